"""The worker's side of a paged engine's connector, over the daemon: copies between its blocks and the daemon's slots.

Rule: a save never holds the engine's blocks. On the CPU they are copied into their slots before the step ends; on a
device into a staging buffer in the order of the compute stream, from where a thread takes them on. What has no slots
yet is copied aside the same way, until a later plan places it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcascade.config.errors import CascadeError, DaemonUnavailable, LayoutMismatch
from kvcascade.daemon.attachment import BACKOFF_FIRST_S, BACKOFF_LAST_S, Load, Reservation, Session
from kvcascade.daemon.protocol import BlockState
from kvcascade.tiers.namespace import Namespace

from .base import Aside, FailedLoad, Prefill, Report, StepPlan, Transfer, WorkerConnector
from .layout import Gatherer, describe_paged
from .paged_asking import Limits
from .pools import PoolViews
from .transfer_book import Copy, TransferBook

log = logging.getLogger(__name__)

COPY_THREADS = 2
JOIN_S = 0.5
"""Seconds of the engine's that joining the scheduler's attachment may take, each time that it has a new one."""
MOST_TIMED = 8
"""Steps that may have been timed and not yet read; more are not timed."""
STAGED_BYTES = 256 << 20
"""Memory of the device's that saves under way and copies aside may take; what does not fit is not saved."""
STAGED_STEPS = 2
"""Where so many full steps make more final than that, it is as much: one that is computed and one queued behind it."""
FREE_SHARE = 4
"""And yet no more than one part in so many of what the engine has left free on the device."""


@dataclass(eq=False, slots=True)
class _StepLoad:
    """A load within the step whose copies are queued; `copying` keeps the pools until they have ended."""

    transfer: Transfer
    session: Session
    copying: ExitStack
    event: Any


@dataclass(eq=False, slots=True)
class _Held:
    """This rank's part of blocks that were copied aside: `indices` are their places in the chain."""

    indices: tuple[int, ...]
    gathered: Tensor
    ready: Any
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Timed:
    """A prefill whose step is under way or done: moments on the CPU's clock in seconds, or events on the device."""

    prefill: Prefill
    session: Session
    began: Any
    ended: Any = None


class PagedWorker(WorkerConnector):
    """One rank's side. `SafeWorker` goes around it.

    On the CPU copies for loads within the step and for saves run on the engine's thread, since its compute is done
    when they begin; loads in the background run on threads of ours. On a CUDA device all copies are queued: loads
    within the step on the compute stream, others on streams of our own that wait for it.
    """

    def __init__(
        self,
        namespace: Namespace,
        open_session: Callable[[str], Session],
        *,
        ranks: int = 1,
        rank: int = 0,
        axes: str | None = None,
        stage: bool = False,
        step_tokens: int = 0,
        limits: Limits | None = None,
    ) -> None:
        """No IO before the first plan.

        Args:
            open_session: makes this rank's session for a weights epoch; it joins what plans name.
            axes: how the shape of a tensor reads, where sizes coincide.
            stage: go through a staging buffer on the CPU too, so that saves are finished by a thread.
            step_tokens: how many tokens one step may make final.
        """
        self._namespace = namespace
        self._open_session = open_session
        self._ranks, self._rank = ranks, rank
        self._axes = axes
        self._stage = stage
        self._step_tokens = step_tokens
        self._limits = limits or Limits()
        # The engine's thread's, but for what _lock guards.
        self._gatherers: list[Gatherer] = []
        self._device = torch.device("cpu")
        self._views = PoolViews(self._device)
        self._book = TransferBook()
        self._copier = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvcascade-copy")
        # A daemon that hangs holds up what is said to it for the timeout, each time: copies do not queue behind that.
        self._talker = ThreadPoolExecutor(1, thread_name_prefix="kvcascade-talk")
        self._session: Session | None = None
        self._epoch: str | None = None
        self._attachment = b""
        self._step_loads: list[_StepLoad] = []
        self._step_failures: list[FailedLoad] = []
        self._loaded: list[int] = []
        self._asides: dict[int, _Held] = {}
        self._spare: dict[int, list[Tensor]] = {}  # by group, guarded by _lock: what held copies aside, on the CPU
        self._failures_begun = 0
        self._timing: _Timed | None = None
        self._timed: list[_Timed] = []
        self._streams: dict[int, Any] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._stored: list[tuple[int, tuple[int, ...]]] = []
        self._staged_bytes = 0
        self._most_staged = STAGED_BYTES
        self._attaching = False  # in the background
        self._attach_after = 0.0
        self._attach_pause = BACKOFF_FIRST_S
        self.counters: Counter[str] = Counter()
        """Sums since the last `take_counters`."""

    def take_counters(self) -> dict[str, int]:
        """The sums since the last call."""
        with self._lock:
            taken, self.counters = self.counters, Counter()
        return dict(taken)

    # ---- WorkerConnector

    def register(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        dtype = self._namespace.kv_dtype
        if len(tensors) != len(self._namespace.groups):
            raise LayoutMismatch(
                f"tensors of {len(tensors)} KV groups, the namespace has {len(self._namespace.groups)}"
            )
        gatherers = []
        for group, layers in zip(self._namespace.groups, tensors, strict=True):
            place = {"ranks": self._ranks, "rank": self._rank}
            layout = describe_paged(layers, group, dtype, axes=self._axes, **place)
            gatherers.append(Gatherer(layout, layers, group, **place))
        self._gatherers = gatherers
        if tensors[0][0].device != self._device:
            self._views.close()
            self._device = tensors[0][0].device
            self._views = PoolViews(self._device)
        wanted = STAGED_STEPS * sum(
            -(-self._step_tokens // group.block_tokens) * self._rank_bytes(number)
            for number, group in enumerate(self._namespace.groups)
        )
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            wanted = min(wanted, free // FREE_SHARE)
        with self._lock:
            self._most_staged = max(STAGED_BYTES, wanted)

    def unregister(self) -> None:
        """The tensors go: on return no copy touches them. `register` brings new ones."""
        limit = self._limits.load_wait + self._limits.timeout
        while not self._book.close(limit):
            log.warning("copies still run after %g s; the engine's memory cannot be let go of before they end", limit)
        self._book = TransferBook()
        self._end_step_loads()
        self._gatherers = []

    def preempted(self, request_ids: frozenset[str]) -> None:
        limit = self._limits.timeout
        busy = self._book.preempt(request_ids, limit)
        if busy and not self._book.wait_ended(busy, limit):
            raise DaemonUnavailable(f"copies of preempted requests still run: {', '.join(sorted(busy))}")

    def start_load(self, plan: StepPlan) -> None:
        self.follow(plan)
        for load in plan.failed:
            if load.background:
                self._book.fail(load)
            else:
                self._step_failed(load)
        for request_id in plan.dropped:
            self._book.drop(request_id)
        session = self._session
        for transfer in plan.loads:
            if not transfer.background:
                self._load_in_step(session, transfer)
                continue
            copy = self._book.begin(transfer, load=True)
            ready = self._compute_event()
            try:
                self._copier.submit(self._load_behind, session, copy, ready)
            except RuntimeError:  # closed
                self._book.end(copy, transfer.blocks)

    def wait_load(self, layer: int | None = None) -> None:
        """Nothing to wait for: on the CPU the loads are done, on a device the compute stream comes after them."""

    def save(self, plan: StepPlan) -> None:
        self._end_timing()
        # A load within this step that failed, or one that the scheduler has not heard of yet: what was computed since
        # may rest on its blocks, of whichever request.
        self._end_step_loads()
        sound = plan.seen_failures >= self._failures_begun
        for aside in plan.asides:
            self._put_aside(aside, sound)
        session = self._session
        for number, transfer in plan.placed:
            self._place(session, self._asides.pop(number, None), transfer)
        if session is not None:
            for transfer in plan.saves:
                self._save(session, transfer, sound and bool(self._gatherers))

    def finished(self) -> Report:
        self._end_step_loads()
        self._tell_timed()
        report = self._book.take()
        failures, self._step_failures = self._step_failures, []
        loaded, self._loaded = self._loaded, []
        with self._lock:
            stored, self._stored = self._stored, []
        return Report(
            report.sent, report.received, (*report.failed, *failures), loaded=tuple(loaded), stored=tuple(stored)
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_step_loads()
        self._book.close(self._limits.load_wait + self._limits.timeout)
        self._copier.shutdown(wait=True, cancel_futures=True)
        # What was stored is committed, as far as the daemon answers.
        wait([self._talker.submit(bool)], self._limits.timeout)
        self._talker.shutdown(wait=True, cancel_futures=True)
        if self._session is not None:
            self._session.close(self._limits.timeout)
        self._views.close()

    # ---- the session

    def follow(self, plan: StepPlan) -> None:
        """Join what the scheduler has attached, in a session of its weights' namespace, and attach again where lost.

        `start_load` does it too; called before the forward it does not have to share the cores with what that leaves.
        """
        if not plan.attachment:
            return
        if (plan.attachment, plan.weights_epoch) == (self._attachment, self._epoch):
            self._attach_again()
            return
        if self._session is None or plan.weights_epoch != self._epoch:
            if self._session is not None:
                self._say(self._session.close)
            self._session = self._open_session(plan.weights_epoch)
        self._session.join(plan.attachment)
        self._attachment, self._epoch = plan.attachment, plan.weights_epoch
        # Now, since this step's copies need it: the scheduler has just attached, so the daemon answers in milliseconds.
        self._attach(self._session, JOIN_S)
        with self._lock:
            self._attach_after, self._attach_pause = 0.0, BACKOFF_FIRST_S
        self._attach_again()

    def _attach_again(self) -> None:
        """See to it that the session is attached, one try at a time and with back-off.

        Copies for saves do not attach, nor does giving up their slots: a rank that has lost its connection would store
        nothing any more until something is loaded, and each block stored needs all ranks.
        """
        session = self._session
        if session is None or session.attached:
            return
        with self._lock:
            if self._attaching or time.monotonic() < self._attach_after:
                return
            self._attaching = True
        self._say(self._attach_behind, session)

    def _attach_behind(self, session: Session) -> None:
        """On the talking thread."""
        try:
            self._attach(session, self._limits.timeout)
        finally:
            with self._lock:
                self._attaching = False
                self._attach_after = time.monotonic() + self._attach_pause
                self._attach_pause = (
                    BACKOFF_FIRST_S if session.attached else min(2 * self._attach_pause, BACKOFF_LAST_S)
                )

    def _attach(self, session: Session, timeout: float) -> None:
        try:
            session.attach(timeout)
            with session.copying() as pools:
                self._views.prepare(pools.values())
        except CascadeError as error:
            log.warning("rank %d is not attached reason=%s", self._rank, error)

    # ---- how fast the engine computes

    def begin(self, plan: StepPlan) -> None:
        """Just before the forward: times it, if it is as good as one request's prefill.

        One rank speaks for all: they compute together. On a device the time is that between two events on the compute
        stream, read in a later step, so nothing waits for it.
        """
        self._timing = None
        if plan.prefill is not None and self._rank == 0 and self._session is not None:
            self._timing = _Timed(plan.prefill, self._session, self._moment())

    def _end_timing(self) -> None:
        timing, self._timing = self._timing, None
        if timing is not None and len(self._timed) < MOST_TIMED:
            self._timed.append(replace(timing, ended=self._moment()))

    def _tell_timed(self) -> None:
        while self._timed and (self._device.type != "cuda" or self._timed[0].ended.query()):
            timed = self._timed.pop(0)
            if self._device.type == "cuda":
                seconds = timed.began.elapsed_time(timed.ended) / 1e3
            else:
                seconds = timed.ended - timed.began
            self._say(self._tell_computed, timed, seconds)

    def _tell_computed(self, timed: _Timed, seconds: float) -> None:
        """On the talking thread."""
        try:
            timed.session.computed(
                timed.prefill.tokens, seconds, position=timed.prefill.position, timeout=self._limits.timeout
            )
        except CascadeError as error:
            log.debug("the daemon is not told how fast prompts are computed reason=%s", error)

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    # ---- loads

    def _load_in_step(self, session: Session | None, transfer: Transfer) -> None:
        stack = ExitStack()
        try:
            if session is None:
                raise DaemonUnavailable("the rank has joined no attachment yet")
            session.attach(self._limits.timeout)
            pools = stack.enter_context(session.copying(_load(transfer)))
            slots = self._slots(pools, transfer)
            self._gatherers[transfer.group].load(transfer.blocks, slots)
        except (CascadeError, KeyError, ValueError, IndexError, RuntimeError) as error:
            with stack:
                self._wait_for_compute()
            # A device without memory for it is one load's failure; one that is broken raises while it is waited for.
            log.log(_level(error), "load failed request=%s reason=%s", transfer.request_id, error)
            self._step_failed(FailedLoad(transfer.request_id, transfer.group, transfer.blocks))
            self._loaded.append(transfer.lease)
            return
        except BaseException:
            stack.close()
            raise
        self._step_loads.append(_StepLoad(transfer, session, stack, self._compute_event()))
        if self._device.type == "cpu":
            self._end_step_loads()

    def _end_step_loads(self) -> None:
        """Prove what was loaded within the step, once its copies have completed."""
        loads, self._step_loads = self._step_loads, []
        for load in loads:
            with load.copying:
                if load.event is not None:
                    load.event.synchronize()
                intact = load.session.intact(_load(load.transfer))
            bad = tuple(block for block, good in zip(load.transfer.blocks, intact.tolist(), strict=True) if not good)
            if bad:
                self._step_failed(FailedLoad(load.transfer.request_id, load.transfer.group, bad, doubted=True))
            self._loaded.append(load.transfer.lease)
            self._note_load(load.transfer, len(bad))

    def _step_failed(self, load: FailedLoad) -> None:
        self._failures_begun += 1
        self._step_failures.append(load)

    def _load_behind(self, session: Session | None, copy: Copy, ready: Any) -> None:
        """On a copying thread."""
        transfer = copy.transfer
        bad: Sequence[int] = transfer.blocks
        doubted = False
        try:
            if session is None:
                raise DaemonUnavailable("the rank has joined no attachment yet")
            session.attach(self._limits.timeout)
            held = _load(transfer)
            with session.copying(held) as pools:
                if copy.given_up:
                    raise DaemonUnavailable("the request has ended")
                slots = self._slots(pools, transfer)
                with self._behind(ready):
                    self._gatherers[transfer.group].load(transfer.blocks, slots)
                intact = session.intact(held)
            bad = [block for block, good in zip(transfer.blocks, intact.tolist(), strict=True) if not good]
            doubted = True
        except (CascadeError, KeyError, ValueError, IndexError) as error:
            log.debug("load failed request=%s reason=%s", transfer.request_id, error)
        except Exception:
            log.exception("load failed request=%s", transfer.request_id)
        finally:
            self._book.end(copy, bad, doubted=doubted)
            self._note_load(transfer, len(bad))

    def _note_load(self, transfer: Transfer, bad: int) -> None:
        good = len(transfer.blocks) - bad
        with self._lock:
            self.counters["loaded_bytes"] += good * self._rank_bytes(transfer.group)
            self.counters["loaded_blocks"] += good
            self.counters["failed_blocks"] += bad

    # ---- saves

    def _save(self, session: Session, transfer: Transfer, sound: bool) -> None:
        gatherer = self._gatherers[transfer.group] if self._gatherers else None
        mine = [i for i, index in enumerate(transfer.indices) if gatherer is None or gatherer.writes(index)]
        if not mine:
            return
        part = _picked(transfer, mine)
        if gatherer is None or not sound:
            self._count("saves_doubted", len(mine))
            self._say(self._abort, session, part)
            return
        if self._device.type == "cpu" and not self._stage:
            try:
                with session.copying(_reservation(part)) as pools:
                    gatherer.store(part.blocks, self._slots(pools, part))
            except (CascadeError, KeyError, ValueError, IndexError, RuntimeError) as error:
                log.log(_level(error), "save failed request=%s reason=%s", part.request_id, error)
                self._count("save_failures", len(mine))
                self._say(self._abort, session, part)
            else:
                self._say(self._commit, session, part, len(mine) * self._rank_bytes(transfer.group))
            return
        fitting = self._room_for(len(mine), transfer.group)
        if fitting < len(mine):
            self._say(self._abort, session, _picked(part, range(fitting, len(mine))))
        if fitting:
            part = _picked(part, range(fitting))
            staged = self._gather(part.group, part.blocks)
            if staged is None:
                self._submit(self._abort, session, part)
            else:
                gathered, ready = staged
                self._submit(self._put, session, part, gathered, ready, gathered.nbytes)

    def _gather(self, group: int, blocks: Sequence[int], into: Tensor | None = None) -> tuple[Tensor, Any] | None:
        """Copies of the blocks in staging memory that was taken for them, there behind the event.

        None, and the memory given back, where the device has no room after all.
        """
        try:
            return self._gatherers[group].gather(blocks, into), self._compute_event()
        except RuntimeError as error:
            log.warning("save failed reason=%s", error)
            with self._lock:
                self._staged_bytes -= len(blocks) * self._rank_bytes(group)
                self.counters["save_failures"] += len(blocks)
            return None

    def _room_for(self, blocks: int, group: int) -> int:
        """Take staging memory for as many of the blocks as fit, and say how many.

        The leading ones, since what follows a missing block cannot be found.
        """
        each = self._rank_bytes(group)
        with self._lock:
            fitting = min(blocks, max(0, self._most_staged - self._staged_bytes) // each)
            self._staged_bytes += fitting * each
            self.counters["saves_skipped"] += blocks - fitting
        return fitting

    def _put_aside(self, aside: Aside, sound: bool) -> None:
        if not self._gatherers:
            return
        gatherer = self._gatherers[aside.group]
        mine = [i for i, index in enumerate(aside.indices) if gatherer.writes(index)]
        if not sound:
            self._count("saves_doubted", len(mine))
            return
        mine = mine[: self._room_for(len(mine), aside.group)]
        blocks = [aside.blocks[i] for i in mine]
        if mine and (staged := self._gather(aside.group, blocks, self._take_spare(aside.group, len(mine)))) is not None:
            gathered, ready = staged
            indices = tuple(aside.indices[i] for i in mine)
            self._asides[aside.number] = _Held(indices, gathered, ready, gathered.nbytes)

    def _take_spare(self, group: int, blocks: int) -> Tensor | None:
        """Memory of an earlier copy aside that holds so many blocks. Where none is big enough, one makes room."""
        with self._lock:
            spares = self._spare.get(group, [])
            place = next((place for place, one in enumerate(spares) if len(one) >= blocks), None)
            if place is not None:
                return spares.pop(place)
            if spares:
                spares.pop(0)
            return None

    def _keep_spare(self, group: int, gathered: Tensor) -> None:
        if self._device.type != "cpu":
            return  # torch itself keeps a device's memory
        memory = gathered if gathered._base is None else gathered._base
        with self._lock:
            if sum(one.nbytes for spares in self._spare.values() for one in spares) + memory.nbytes <= STAGED_BYTES:
                self._spare.setdefault(group, []).append(memory)

    def _place(self, session: Session | None, held: _Held | None, transfer: Transfer) -> None:
        """Send on what of a copy aside has slots, let go of the rest, and give up slots of what there is no copy of."""
        gatherer = self._gatherers[transfer.group] if self._gatherers else None
        kept = {} if held is None else {index: place for place, index in enumerate(held.indices)}
        mine = [i for i, index in enumerate(transfer.indices) if gatherer is None or gatherer.writes(index)]
        have = [i for i in mine if transfer.indices[i] in kept]
        lacking = [i for i in mine if transfer.indices[i] not in kept]
        if session is not None and lacking:
            self._say(self._abort, session, _picked(transfer, lacking))
        if held is None:
            return
        if session is None or not have or self._closed:
            with self._lock:
                self._staged_bytes -= held.nbytes
            self._keep_spare(transfer.group, held.gathered)
            return
        wanted = [kept[transfer.indices[i]] for i in have]
        self._submit(self._put, session, _picked(transfer, have), held.gathered, held.ready, held.nbytes, wanted)

    def _put(
        self,
        session: Session,
        part: Transfer,
        gathered: Tensor,
        ready: Any,
        nbytes: int,
        wanted: Sequence[int] | None = None,
    ) -> None:
        """On a copying thread: from the staging buffer, or from its places `wanted`, into the slots."""
        done = False
        try:
            with session.copying(_reservation(part)) as pools:
                slots = self._slots(pools, part)
                with self._behind(ready):
                    self._gatherers[part.group].put(gathered, slots, wanted)
            done = True
        except (CascadeError, KeyError, ValueError, IndexError) as error:
            log.debug("save failed request=%s reason=%s", part.request_id, error)
        except Exception:
            log.exception("save failed request=%s", part.request_id)
        finally:
            with self._lock:
                self._staged_bytes -= nbytes
            self._keep_spare(part.group, gathered)
            del gathered
        if done:
            self._say(self._commit, session, part, len(part.indices) * self._rank_bytes(part.group))
        else:
            self._count("save_failures", len(part.indices))
            self._say(self._abort, session, part)

    def _commit(self, session: Session, part: Transfer, nbytes: int) -> None:
        """On the talking thread."""
        try:
            committed = session.commit(part.lease, part.indices, timeout=self._limits.timeout)
        except CascadeError as error:
            log.debug("save is lost request=%s reason=%s", part.request_id, error)
            self._count("save_failures", len(part.indices))
            return
        with self._lock:
            self.counters["stored_bytes"] += nbytes
            self.counters["stored_blocks"] += len(part.indices) - committed.gone
            if not committed.gone:
                self._stored.append((part.lease, part.indices))

    def _abort(self, session: Session, part: Transfer) -> None:
        """On the talking thread."""
        try:
            session.abort(part.lease, part.indices, timeout=self._limits.timeout)
        except CascadeError as error:
            log.debug("slots end by their deadline reason=%s", error)

    # ---- what both use

    def _submit(self, errand: Callable[..., None], *arguments: Any) -> None:
        if not self._closed:
            self._copier.submit(errand, *arguments)

    def _say(self, errand: Callable[..., None], *arguments: Any) -> None:
        """Have an errand done that only talks to the daemon. Those of copies that end while it closes are done too."""
        with suppress(RuntimeError):  # closed
            self._talker.submit(errand, *arguments)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self.counters[name] += number

    def _slots(self, pools: Any, transfer: Transfer) -> Any:
        nbytes = self._namespace.block_bytes(transfer.group)
        which, pages = np.asarray(transfer.pools, np.uint8), np.asarray(transfer.pages, np.uint32)
        return self._views.slots(pools, which, pages, nbytes)

    def _rank_bytes(self, group: int) -> int:
        begin, end = self._gatherers[group].byte_range if self._gatherers else (0, 0)
        return end - begin

    def _compute_event(self) -> Any:
        """An event behind all that the engine has queued so far; None on the CPU, where nothing is queued."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _wait_for_compute(self) -> None:
        """Nothing that was queued behind the engine's compute touches memory any more."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def _behind(self, ready: Any) -> Iterator[None]:
        """Copies inside are queued behind `ready`, and have ended when it is left, by an error too.

        What was queued before the error would otherwise go on into blocks, or slots, that others have by then.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = self._stream()
        stream.wait_event(ready)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def _stream(self) -> Any:
        """The calling thread's own stream."""
        with self._lock:
            if threading.get_ident() not in self._streams:
                self._streams[threading.get_ident()] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            return self._streams[threading.get_ident()]


def _level(error: Exception) -> int:
    """A device that is out of memory is worth more notice than blocks that went."""
    return logging.WARNING if isinstance(error, RuntimeError) else logging.DEBUG


def _load(transfer: Transfer) -> Load:
    places = (np.asarray(transfer.pools, np.uint8), np.asarray(transfer.pages, np.uint32))
    generations = np.asarray(transfer.generations, np.uint32)
    return Load(transfer.boot, transfer.lease, len(transfer.blocks), *places, generations)


def _reservation(transfer: Transfer) -> Reservation:
    return Reservation(
        transfer.boot,
        transfer.lease,
        transfer.indices[0],
        np.full(len(transfer.indices), BlockState.SLOT, np.uint8),
        np.asarray(transfer.indices, np.uint32),
        np.asarray(transfer.pools, np.uint8),
        np.asarray(transfer.pages, np.uint32),
        np.asarray(transfer.generations, np.uint32),
        hole=None,
    )


def _picked(transfer: Transfer, which: Sequence[int]) -> Transfer:
    """Some of a transfer's blocks; of one that leaves out the engine's ids, too."""
    if len(which) == len(transfer.indices):
        return transfer
    columns = (transfer.indices, transfer.pools, transfer.pages, transfer.generations)
    indices, pools, pages, generations = (tuple(column[i] for i in which) for column in columns)
    blocks = tuple(transfer.blocks[i] for i in which) if transfer.blocks else ()
    return replace(transfer, indices=indices, blocks=blocks, pools=pools, pages=pages, generations=generations)
