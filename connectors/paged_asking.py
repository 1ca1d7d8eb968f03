"""How the scheduler's side of a paged engine asks the daemon: on threads of our own, since the scheduler's never waits
for an answer but for a small budget a step.

Rule: an errand's answer belongs to the thread that asks until it is `done`, and to the scheduling thread from then on.
Of done and abandoned one comes second, and who makes it so gives back what the daemon granted.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvcascade.config.errors import CascadeError, DaemonUnavailable, ProtocolError, Refused
from kvcascade.daemon.attachment import Attached, Session

log = logging.getLogger(__name__)

LEAVE_ALONE_FIRST_S = 1.0
LEAVE_ALONE_LAST_S = 30.0
MOST_REFUSALS = 100
"""Refusals of so many kinds are told; more would be one kind that is never worded twice the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the daemon may cost its engine."""

    step_wait: float = 0.0005
    """Seconds that the scheduling thread waits for answers in one step, all requests together."""
    patience: float = 0.25
    """Seconds after which a request is computed whose lookup has no answer; then the daemon is left alone a while."""
    remote_patience: float = 2.0
    """Seconds that a request waits while other nodes are still being asked."""
    load_wait: float = 2.0
    """Seconds that a load may take for blocks to come up from below."""
    handoff_patience: float = 5.0
    """In place of both, for a request that another engine handed off: its blocks may still be on their way into the
    other node's memory, and computing them here is what the hand-off was to spare."""
    handoff_keep: float = 60.0
    """Seconds that what is handed off stays in this node's memory, if no other node fetches it before."""
    sync_bytes: int = 16 << 20
    """Bytes that may be loaded within one step, the engine waiting for them; 0: all loads are in the background."""
    timeout: float = 1.0
    """Seconds after which any question counts as unanswered."""


@dataclass(eq=False, slots=True)
class Errand:
    """Something asked of the daemon on another thread. `Asker.settle` and `Asker.abandon` alone set the marks."""

    done: bool = field(default=False, init=False)
    abandoned: bool = field(default=False, init=False)

    @property
    def pending(self) -> bool:
        """Still to be waited for."""
        return not (self.done or self.abandoned)


class Asker:
    """The scheduler's sessions, one after the other, and what it costs to ask by them.

    The scheduling thread calls everything, other threads what says so.
    """

    def __init__(
        self,
        open_session: Callable[[str], Session],
        weights_epoch: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No IO before the session is used. `open_session` makes the scheduler's session for a weights epoch."""
        self.limits = limits
        self.clock = clock
        # The scheduling thread's.
        self.epoch = weights_epoch
        self.session = open_session(weights_epoch)
        self._open_session = open_session
        self._wait_left = limits.step_wait
        self._closed = False
        # Any thread's, under _lock: errands' marks, and the counters.
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._counters: Counter[str] = Counter()
        # Any thread's, each a float: what is lost when two write at once is a doubling.
        self._pause = 0.0
        self._not_before = 0.0
        self._refusals: set[str] = set()  # that were told, under _lock
        self._told: Attached | None = None  # whose warnings were told
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="kvcascade-ask")
        self._pools = [self._asking]

    # ---- sessions

    @property
    def info(self) -> Attached | None:
        """What the daemon said when the session was attached; None while it is not. On any thread."""
        try:
            return self.session.info if self.session.attached else None
        except DaemonUnavailable:
            return None  # it went away in between

    def attach(self, timeout: float) -> tuple[str, ...]:
        """Attach now; the daemon's warnings, which the caller tells. Raises as `Session.attach`."""
        self._told = info = self.session.attach(timeout)
        return info.warnings

    def renew(self, weights_epoch: str) -> None:
        """Ask by another session from now on; the old one is closed once what was submitted by it has run."""
        old = self.session
        self.epoch = weights_epoch
        self.session = self._open_session(weights_epoch)
        self.submit(old.close)

    @property
    def closed(self) -> bool:
        """On any thread."""
        return self._closed

    def close(self) -> None:
        """Idempotent; what is submitted from now on does not run, and what runs ends by its deadline."""
        if self._closed:
            return
        self._closed = True
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.session.close(self.limits.timeout)

    # ---- errands

    def submit(self, errand: Callable[..., None], *arguments: Any) -> None:
        """Run it on the asking thread, after all that was submitted before."""
        if not self._closed:
            self._asking.submit(errand, *arguments)

    def threads(self, name: str, count: int) -> ThreadPoolExecutor:
        """Threads for what may have to wait longer than others should wait for the asking thread; ended by `close`."""
        pool = ThreadPoolExecutor(count, thread_name_prefix=f"kvcascade-{name}")
        self._pools.append(pool)
        return pool

    def settle(self, errand: Errand) -> bool:
        """On the thread that asked, last: it is done. True if nobody wants it any more: the caller gives it back."""
        with self._lock:
            errand.done = True
            self._settled.notify_all()
            return errand.abandoned

    def abandon(self, errand: Errand) -> bool:
        """Nobody wants it any more. True if it was done already: the caller gives it back."""
        with self._lock:
            errand.abandoned = True
            return errand.done

    def wait_for(self, errand: Errand) -> None:
        """Return when it is over, or when this step's budget for waiting is spent."""
        if not errand.pending or self._wait_left <= 0:
            return
        began = time.perf_counter()
        with self._lock:
            self._settled.wait_for(lambda: not errand.pending, self._wait_left)
        self._wait_left -= time.perf_counter() - began

    def begin_step(self) -> None:
        """Another step, another budget for waiting; and what the daemon warns of, if it has been attached to anew."""
        self._wait_left = self.limits.step_wait
        info = self.info
        if info is not None and (self._told is None or info.attachment != self._told.attachment):
            self._told = info
            for warning in info.warnings:
                log.warning("the daemon warns: %s", warning)

    def release(self, session: Session, leases: Iterable[int]) -> None:
        """On a thread that may wait: give leases back, 0 being none."""
        held = [lease for lease in leases if lease]
        if held:
            try:
                session.release(held, timeout=self.limits.timeout)
            except CascadeError as error:
                log.debug("leases end by their deadline reason=%s", error)

    # ---- a daemon that does not answer is left alone, longer each time

    @property
    def may_ask(self) -> bool:
        """On any thread."""
        return self.clock() >= self._not_before

    def answered(self) -> None:
        """A question was answered in time."""
        self._pause = 0.0

    def blame(self, began: float) -> None:
        """A question failed that was asked then: if by having no answer in time, the daemon is left alone.

        On any thread.
        """
        if self.clock() - began >= 0.9 * self.limits.timeout:
            self.leave_alone()

    def leave_alone(self) -> None:
        """On any thread."""
        self._pause = min(LEAVE_ALONE_LAST_S, max(LEAVE_ALONE_FIRST_S, 2 * self._pause))
        self._not_before = self.clock() + self._pause

    # ---- failures

    def failed(self, what: str, request_id: str, error: CascadeError) -> None:
        """Tell of it, on any thread: what the daemon refuses stays so until somebody reads it, so once as a warning.

        Everything else comes and goes, and is counted elsewhere.
        """
        level = logging.DEBUG
        if isinstance(error, Refused | ProtocolError):
            kind = re.sub(r"\d+", "#", str(error))
            with self._lock:
                if kind not in self._refusals and len(self._refusals) < MOST_REFUSALS:
                    self._refusals.add(kind)
                    level = logging.WARNING
        log.log(level, "%s request=%s reason=%s", what, request_id, error)

    # ---- counters

    def count(self, name: str, number: int = 1) -> None:
        """On any thread."""
        with self._lock:
            self._counters[name] += number

    def take_counters(self) -> dict[str, int]:
        """The sums since the last call. On any thread."""
        with self._lock:
            taken, self._counters = self._counters, Counter()
        return dict(taken)
