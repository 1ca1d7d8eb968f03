"""The scheduler's side of a paged engine's connector, over the daemon: what such engines' plug-ins are thin on top of.

Rule: the scheduler's thread never waits for the daemon but for a small budget a step. Whatever is asked is asked on a
thread of our own; an answer that is late is used by a later step, or let go of.

A save never holds the engine's blocks (`paged_worker.py`), and never waits for slots: what a step makes final whose
reservation is not answered yet is copied aside within that step, and goes to its slots by the plan of a later one,
whatever has become of the request since.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import CascadeError, DaemonUnavailable, Refused
from kvcascade.daemon.attachment import Load, Lookup, Reservation, Session
from kvcascade.daemon.protocol import BlockState, Tier
from kvcascade.tiers.namespace import Namespace

from .base import (
    NO_MATCH,
    Aside,
    BlockIds,
    FailedLoad,
    Match,
    MatchState,
    Report,
    Request,
    SchedulerConnector,
    Step,
    StepPlan,
    Transfer,
    common_hit,
    loadable_tokens,
    new_tokens,
    storable_blocks,
)
from .handoff import HandOff

log = logging.getLogger(__name__)

LATER = Match(0, MatchState.LATER)
LOAD_THREADS = 8
WAIT_THREADS = 32
"""So many requests can be told at once what other nodes have; others are told when one of them has been."""
LEAVE_ALONE_FIRST_S = 1.0
LEAVE_ALONE_LAST_S = 30.0


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
class _Question:
    """One lookup. `done` is set by the thread that asked, last; before that the answer is its own.

    A list entry a group: `matched` leading blocks are there, and the lease of `answers` is on those from `first` on.
    """

    usable: int
    asked_at: float
    session: Session
    answers: list[Lookup] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    tiers: tuple[int, ...] = ()
    until: float = 0.0  # while other nodes are asked: when the daemon answers at the latest, whatever they say
    places: Load | None = None
    error: str = ""
    done: bool = False
    abandoned: bool = False


@dataclass(eq=False, slots=True)
class _Loading:
    """One load: blocks [first, first + len(blocks)) of each group's chain. `done` as with `_Question`.

    `leased`: the first block of each group's lease; between it and `first`, or the other way, nothing is needed.
    """

    request_id: str
    background: bool
    session: Session
    leases: tuple[int, ...]
    leased: tuple[int, ...]
    first: tuple[int, ...]
    blocks: BlockIds
    patience: float
    places: list[Load] = field(default_factory=list)
    done: bool = False
    planned: bool = False
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Offer:
    """Blocks [start, end) of one group's chain for which slots are asked; [start, sent) are in plans already.

    `done` as with `_Question`. `asides`: the numbers and blocks of what was copied aside, of [start, sent). `ended`: no
    further block is wanted, but those aside still are.
    """

    request_id: str
    group: int
    start: int
    end: int
    session: Session
    sent: int
    reservation: Reservation | None = None
    done: bool = False
    abandoned: bool = False
    waited: bool = False
    ended: bool = False
    asides: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Life:
    """What is known of one request. Of the scheduling thread alone."""

    request: Request
    computed: int = 0
    question: _Question | None = None
    waiting_since: float | None = None
    loads_failed: bool = False
    tiers: tuple[int, ...] = ()  # of the matched blocks of the group by which hits are told apart
    stored: list[int] = field(default_factory=list)  # blocks of each group that were offered, or matched
    restarts: int = 1  # how often it may offer again from a hole
    giving: Session | None = None  # by which its prompt was handed off
    of_old_weights: bool = False  # some of its KV may have been computed before a reset


class PagedScheduler(SchedulerConnector):
    """The scheduler's side. `SafeScheduler(..., engine_keeps_loading=True)` goes around it."""

    def __init__(
        self,
        namespace: Namespace,
        open_session: Callable[[str], Session],
        *,
        ranks: int = 1,
        windows: Sequence[int] = (),
        volatile_groups: frozenset[int] = frozenset(),
        null_block: int | None = None,
        lookahead_tokens: int = 2048,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No IO before `attach`.

        Args:
            open_session: makes the scheduler's session for a weights epoch.
            windows: for each KV group how many tokens before the end of a hit its attention sees, 0 where it sees all;
                older blocks are neither held nor brought into memory.
            volatile_groups: KV groups of drafters, whose last block may change while the request decodes.
            null_block: the engine's id for blocks out of a window, which hold nothing.
            lookahead_tokens: for how many tokens after a step slots are asked already, where their hashes are known:
                what one step may compute.
        """
        self._groups = namespace.groups
        self._block_bytes = [namespace.block_bytes(group) for group in range(len(namespace.groups))]
        self._open_session = open_session
        self._windows = tuple(windows) or (0,) * len(namespace.groups)
        self._told = next((group for group, window in enumerate(self._windows) if not window), 0)
        self._volatile = volatile_groups
        self._null_block = null_block
        self._lookahead = lookahead_tokens
        self._limits = limits or Limits()
        # Loads within a step are for one rank and one group: what a rank computes on another's bad block is bad too,
        # and engines take failures of several groups by request, which is for loads in the background alone.
        self._syncs = ranks == 1 and self._windows == (0,) and self._limits.sync_bytes > 0
        self._unit = int(np.lcm.reduce([group.block_tokens for group in self._groups]))
        self._clock = clock
        # All of this is the scheduling thread's, but that other threads mark as done, under _answered, what they did.
        self._answered = threading.Condition(threading.Lock())
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="kvcascade-ask")
        self._locator = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvcascade-load")
        self._waiter = ThreadPoolExecutor(WAIT_THREADS, thread_name_prefix="kvcascade-wait")
        self._session = open_session(namespace.weights_epoch)
        self._epoch = namespace.weights_epoch
        self._lives: dict[str, _Life] = {}
        self._unplanned: list[_Loading] = []
        self._loading: dict[str, _Loading] = {}  # planned or not, in the background
        self._step_loads: dict[int, _Loading] = {}  # planned, within a step, by lease
        self._offers: list[_Offer] = []
        self._refused_handoffs = ""  # why, as it was logged last; the asking thread's
        self._hands_off: set[str] = set()  # requests whose hand-off is to be asked for
        self._dropped: set[str] = set()
        self._cancelled: list[_Loading] = []  # of requests that ended before their load was planned
        self._seen_failures = 0
        self._wait_left = self._limits.step_wait
        self._sync_left = self._limits.sync_bytes
        self._asides = 0  # made so far: their numbers
        self._pause = 0.0
        self._not_before = 0.0
        self._closed = False
        self.counters: Counter[str] = Counter()
        """Sums since the last `take_counters`; any thread of ours adds to it under _answered."""

    # ---- for the plug-in

    def attach(self, timeout: float = 5.0) -> tuple[str, ...]:
        """Attach now; the daemon's warnings. Raises DaemonUnavailable, Refused, ProtocolError."""
        return self._session.attach(timeout).warnings

    def take_counters(self) -> dict[str, int]:
        """The sums since the last call."""
        with self._answered:
            taken, self.counters = self.counters, Counter()
        return dict(taken)

    @property
    def saves_pending(self) -> bool:
        """Whether something copied aside waits for its slots, so that further steps should be planned, empty ones too.

        Not for long: a question without an answer ends by its deadline.
        """
        return any(offer.asides for offer in self._offers)

    def sources(self, request_id: str, tokens: int) -> dict[int, int]:
        """By the tier that they were in when they were looked up, the last `tokens` of those that were matched."""
        life = self._lives.get(request_id)
        if life is None:
            return {}
        size = self._groups[self._told].block_tokens
        first = life.computed // size
        found: Counter[int] = Counter()
        for tier in life.tiers[first : first + tokens // size]:
            found[tier] += size
        return dict(found)

    @property
    def namespace(self) -> bytes:
        """The fingerprint of what blocks are kept under; empty while that is not known."""
        try:
            return self._session.info.namespace if self._session.attached else b""
        except DaemonUnavailable:
            return b""

    def handed_off(self, request_id: str) -> HandOff | None:
        """What another engine needs of a prompt that was computed, to be asked before `finished`; waits for nothing.

        None where nothing was handed off, or the daemon has gone away since, or serves no other node.
        """
        life = self._lives.get(request_id)
        session = life.giving if life is not None else None
        if life is None or session is None or session is not self._session or not session.attached:
            return None
        try:
            info = session.info
        except DaemonUnavailable:
            return None
        if not info.ticket:
            return None
        blocks = self._prompt_blocks(life.request, 0)
        self._count("handoffs_given")
        tokens = blocks * self._groups[0].block_tokens
        return HandOff(info.ticket, info.namespace, tokens, life.request.hashes[0][blocks - 1])

    # ---- SchedulerConnector

    def arrived(self, request: Request) -> None:
        life = self._lives[request.request_id] = _Life(request, stored=[0] * len(self._groups))
        if request.hands_off:
            self._hands_off.add(request.request_id)
        usable = self._usable(request)
        if request.reads and usable and self._may_ask():
            self._ask(life, usable)

    def match(self, request: Request, computed_tokens: int) -> Match:
        life = self._lives.get(request.request_id)
        if life is None:
            life = self._lives[request.request_id] = _Life(request, stored=[0] * len(self._groups))
        life.request, life.computed = request, computed_tokens
        usable = self._usable(request)
        if not request.reads or life.loads_failed or request.request_id in self._loading or usable <= computed_tokens:
            self._let_go(life)
            return NO_MATCH
        question = self._current(life, usable)
        if question is None:
            life.waiting_since = None
            return NO_MATCH
        if not question.until:
            self._wait_for(question)
        now = self._clock()
        since = life.waiting_since = now if life.waiting_since is None else life.waiting_since
        if not question.done:
            if now - max(since, question.asked_at, question.until) < self._limits.patience:
                return LATER
            if not question.until:
                self._leave_alone()
            return self._miss(life, "unanswered")
        if question.error:
            return self._miss(life, "unavailable")
        self._pause = 0.0
        return self._judge(life, question)

    def _judge(self, life: _Life, question: _Question) -> Match:
        hit = self._hit(question)
        if not all(self._is_leased(question, group, hit) for group in range(len(self._groups))):
            hit = 0
        life.stored = [max(stored, matched) for stored, matched in zip(life.stored, question.matched, strict=True)]
        tokens = new_tokens(hit, life.computed, life.request.tokens, self._unit)
        if not tokens:
            return self._miss(life, "missing" if not hit else "engine_has_it")
        life.waiting_since = None
        life.tiers = question.tiers
        nbytes = self._block_bytes[0] * tokens // self._groups[0].block_tokens
        places = question.places
        sync = places is not None and places.count * self._unit >= life.computed + tokens and nbytes <= self._sync_left
        if sync:
            self._sync_left -= nbytes
        return Match(tokens, MatchState.READY, background=not sync)

    def _hit(self, question: _Question) -> int:
        """The tokens that all groups have."""
        sizes = [group.block_tokens for group in self._groups]
        return common_hit((matched * size, size) for matched, size in zip(question.matched, sizes, strict=True))

    def _needed(self, group: int, hit: int) -> tuple[int, int]:
        """The blocks [first, end) of a group that a hit of so many tokens needs."""
        size, window = self._groups[group].block_tokens, self._windows[group]
        return (max(0, hit - window) // size if window else 0), hit // size

    def _is_leased(self, question: _Question, group: int, hit: int) -> bool:
        first, end = self._needed(group, hit)
        answer, leased = question.answers[group], question.first[group]
        return first == end or (answer.lease > 0 and leased <= first and end <= leased + answer.matched)

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        life = self._lives.get(request.request_id)
        question = life.question if life is not None else None
        if life is not None and not (tokens and background):
            life.request = request
            if request.writes and not life.of_old_weights and self._may_ask():
                # It is computed in the next step: by the time that this is planned, its slots may be there.
                self._offer(life, life.computed + tokens + self._lookahead)
        if life is None or question is None or not tokens:
            if life is not None:
                self._let_go(life)
            if tokens:
                raise ValueError(f"{tokens} tokens for request {request.request_id!r}, for which none were matched")
            return
        life.question = None
        if request.ticket:
            self._count("handoffs_taken")
        ends = [(life.computed + tokens) // group.block_tokens for group in self._groups]
        leased = tuple(question.first)
        first = tuple(life.computed // group.block_tokens for group in self._groups)
        loading = _Loading(
            request.request_id,
            background,
            question.session,
            tuple(answer.lease for answer in question.answers),
            leased,
            first,
            tuple(tuple(ids[begin:end]) for ids, begin, end in zip(blocks, first, ends, strict=True)),
            self._limits.handoff_patience if request.ticket else self._limits.load_wait,
        )
        self._unplanned.append(loading)
        if background:
            self._loading[request.request_id] = loading
        if question.places is not None and question.places.count >= ends[0]:
            loading.places, loading.done = [question.places], True
        else:
            self._locator.submit(self._locate, loading, [end - at for end, at in zip(ends, leased, strict=True)])
        with self._answered:
            for tier, count in self.sources(request.request_id, tokens).items():
                self.counters[f"hit_tokens_{_tier_name(tier)}"] += count

    def plan_step(self, step: Step) -> StepPlan:
        for request_id in step.preempted:
            life = self._lives.get(request_id)
            if life is not None:
                self._let_go(life)
                self._abandon_offers(request_id)
        loads, failed = self._plan_loads()
        saves, asides, placed = self._plan_saves(step)
        self._begin_handoffs(step)
        dropped, self._dropped = frozenset(self._dropped), set()
        self._wait_left, self._sync_left = self._limits.step_wait, self._limits.sync_bytes
        attachment = b""
        if self._session.attached:
            try:
                attachment = self._session.info.attachment
            except DaemonUnavailable:
                pass  # it went away in between
        return StepPlan(
            loads=tuple(loads),
            saves=tuple(saves),
            asides=tuple(asides),
            placed=tuple(placed),
            failed=tuple(failed),
            dropped=dropped,
            attachment=attachment,
            weights_epoch=self._epoch,
            seen_failures=self._seen_failures,
            # A load within the step is waited for by the engine, and is no computing.
            prefill=step.prefill if all(load.background for load in loads) else None,
        )

    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        life = self._lives.pop(request_id, None)
        self._hands_off.discard(request_id)
        if life is not None:
            self._let_go(life)
            self._abandon_offers(request_id)
        loading = self._loading.get(request_id)
        if loading is None:
            self._dropped.add(request_id)
        elif not loading.planned:
            # The engine waits for its end: the next plan tells the workers that it has failed.
            self._unplanned.remove(loading)
            self._cancelled.append(loading)
        return False

    def completed(self, report: Report) -> None:
        doubted: dict[int, tuple[_Loading, dict[int, list[int]]]] = {}
        for failure in report.failed:
            self._seen_failures += not failure.background
            loading = self._loading.get(failure.request_id) if failure.background else self._step_load(failure)
            if loading is None:
                continue
            first, ids = loading.first[failure.group], loading.blocks[failure.group]
            indices = [first + place for place, block in enumerate(ids) if block in failure.blocks]
            self._count("load_failures", len(indices))
            life = self._lives.get(failure.request_id)
            if life is not None:
                life.loads_failed = True
                if indices:
                    life.stored[failure.group] = min(life.stored[failure.group], indices[0])
            doubted.setdefault(id(loading), (loading, {}))[1].setdefault(failure.group, []).extend(indices)
        ended = [self._loading.pop(request_id) for request_id in report.received if request_id in self._loading]
        ended += [self._step_loads.pop(lease) for lease in report.loaded if lease in self._step_loads]
        for loading in ended:
            _, failures = doubted.pop(id(loading), (loading, {}))
            self._submit(self._end_load, loading, failures)
        for loading, failures in doubted.values():
            self._submit(self._doubt, loading, failures)

    def reset(self) -> bool:
        """From now on blocks go to, and come from, a private namespace: nobody has named the new weights.

        False while a load is under way that was begun before: its request will hold KV of the old weights.
        """
        old = self._session
        self._epoch = f"private-{secrets.token_hex(16)}"
        self._session = self._open_session(self._epoch)
        for life in self._lives.values():
            self._let_go(life)
            life.of_old_weights = True
        for offer in self._offers:
            offer.abandoned = True
        for loading in self._unplanned:
            loading.places, loading.done = [], True
        self._submit(old.close)
        return not self._loading

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._asker.shutdown(wait=False, cancel_futures=True)
        self._locator.shutdown(wait=False, cancel_futures=True)
        self._waiter.shutdown(wait=False, cancel_futures=True)
        self._session.close(self._limits.timeout)

    # ---- lookups

    def _usable(self, request: Request) -> int:
        """The leading tokens that may be loaded: whole blocks in every group that have hashes, all but the last."""
        hashed = min(
            (len(hashes) * group.block_tokens for hashes, group in zip(request.hashes, self._groups, strict=True)),
            default=0,
        )
        return loadable_tokens(hashed, request.tokens, self._unit)

    def _current(self, life: _Life, usable: int) -> _Question | None:
        """The question that answers for `usable` tokens now, asked anew where the last one's lease is running out."""
        question = life.question
        if question is not None and question.usable == usable:
            if not question.done or question.error:
                return question
            kept = min((answer.deadline_ms for answer in question.answers), default=0) / 2000
            if not kept or self._clock() - question.asked_at < kept:
                return question
        if not self._may_ask():
            self._let_go(life)
            return None
        return self._ask(life, usable)

    def _may_ask(self) -> bool:
        return self._clock() >= self._not_before

    def _ask(self, life: _Life, usable: int) -> _Question:
        # Asking again renews the lease, if it is the same session's: only then is the old one not given back.
        old = life.question
        question = _Question(usable, self._clock(), self._session)
        life.question = question
        if old is not None and (old.session is not self._session or not old.done):
            self._abandon(old)
        self._count("lookups")
        self._submit(self._look_up, question, life.request)
        return question

    def _look_up(self, question: _Question, request: Request) -> None:
        """On the asking thread; then, if other nodes are being asked, on one that waits for them."""
        session = question.session
        asking = False
        began = max(self._clock(), question.until)
        try:
            for number, window in enumerate(self._windows):
                # Of a group with a window the whole chain is asked for, so that it counts as used, but not held.
                end = question.usable // self._groups[number].block_tokens
                answer = self._ask_for(question, request, number, 0, end, hold=not window)
                question.answers.append(answer)
                question.first.append(0)
                matched = answer.matched if answer.lease or window else 0
                # A drafter's KV of a block's last token depends on the token behind it, which the hash does not cover.
                question.matched.append(max(0, matched - (number in self._volatile)))
                asking |= answer.asking
            question.tiers = tuple(question.answers[self._told].tiers.tolist())
            self._hold_windows(question, request)
            first = question.answers[0]
            if self._syncs and first.lease and first.matched == first.ready > 0:
                nbytes = first.matched * self._block_bytes[0]
                if nbytes <= self._limits.sync_bytes:
                    question.places = session.load(first.lease, first.matched, timeout=self._limits.timeout)
        except CascadeError as error:
            question.error = f"{type(error).__name__}: {error}"
            log.debug("lookup failed request=%s reason=%s", request.request_id, error)
            self._blame(began)
        except Exception as error:
            question.error = f"{type(error).__name__}: {error}"
            log.exception("lookup failed request=%s", request.request_id)
        with self._answered:
            if asking and not question.until and not question.error and not question.abandoned and not self._closed:
                patience = self._limits.handoff_patience if request.ticket else self._limits.remote_patience
                question.until = self._clock() + patience
                self._waiter.submit(self._look_up_again, question, request)
                return
            question.done = True
            unwanted = question.abandoned
            self._answered.notify_all()
        if unwanted or question.error:
            self._release(session, [answer.lease for answer in question.answers])

    def _look_up_again(self, question: _Question, request: Request) -> None:
        """On a thread that may wait: the lease is the same, and the daemon answers once other nodes have."""
        question.answers, question.matched, question.first = [], [], []
        self._look_up(question, request)

    def _ask_for(
        self, question: _Question, request: Request, group: int, first: int, end: int, *, hold: bool = True
    ) -> Lookup:
        """Blocks [first, end) of a chain. On the thread of `_look_up`, as the next one."""
        wait = max(0.0, question.until - self._clock()) if question.until else 0.0
        return question.session.lookup(
            b"".join(request.hashes[group][first:end]),
            request=f"{request.request_id}/{group}"[-128:],
            group=group,
            pin=hold,
            promote=hold,
            each=first > 0,
            remote=not first,
            ticket=request.ticket,
            wait_ms=int(wait * 1000),
            timeout=wait + self._limits.timeout,
        )

    def _hold_windows(self, question: _Question, request: Request) -> None:
        hit = self._hit(question)
        for number, window in enumerate(self._windows):
            first, end = self._needed(number, hit)
            if not window or first == end:
                continue
            answer = self._ask_for(question, request, number, first, end)
            if first and answer.matched < end - first:
                # Blocks on their way from elsewhere are found in their chain only.
                first = 0
                answer = self._ask_for(question, request, number, first, end)
            question.answers[number], question.first[number] = answer, first

    def _miss(self, life: _Life, reason: str) -> Match:
        self._count(f"miss_{reason}")
        if life.request.ticket and reason != "engine_has_it":
            self._count("handoffs_missed")
        self._let_go(life)
        return NO_MATCH

    def _let_go(self, life: _Life) -> None:
        life.waiting_since = None
        question, life.question = life.question, None
        if question is not None:
            self._abandon(question)

    def _abandon(self, question: _Question) -> None:
        with self._answered:
            question.abandoned = True
            done = question.done
        if done and not question.error:
            leases = [answer.lease for answer in question.answers if answer.lease]
            if leases:
                self._submit(self._release, question.session, leases)

    def _blame(self, began: float) -> None:
        """A question failed: if by having no answer in time, the daemon is left alone. On any thread."""
        if self._clock() - began >= 0.9 * self._limits.timeout:
            self._leave_alone()

    def _leave_alone(self) -> None:
        self._pause = min(LEAVE_ALONE_LAST_S, max(LEAVE_ALONE_FIRST_S, 2 * self._pause))
        self._not_before = self._clock() + self._pause

    # ---- hand-offs

    def _prompt_blocks(self, request: Request, group: int) -> int:
        return min(request.prompt_tokens // self._groups[group].block_tokens, len(request.hashes[group]))

    def _begin_handoffs(self, step: Step) -> None:
        """Have prompts kept whose end this step computes: behind the questions for their slots, on one thread with
        them, so that the daemon knows which blocks it is about."""
        for request_id in sorted(self._hands_off):
            life, final = self._lives[request_id], step.final_tokens.get(request_id, 0)
            if not final or final < life.request.prompt_tokens:
                continue
            self._hands_off.discard(request_id)
            if self._prompt_blocks(life.request, 0) and not life.of_old_weights and self._may_ask():
                life.giving = self._session
                self._submit(self._hand_off, life.giving, life.request)

    def _hand_off(self, session: Session, request: Request) -> None:
        """On the asking thread."""
        began = self._clock()
        try:
            for group in range(len(self._groups)):
                hashes = b"".join(request.hashes[group][: self._prompt_blocks(request, group)])
                keep = max(1, int(self._limits.handoff_keep * 1000))
                session.hand_off(hashes, group=group, keep_ms=keep, timeout=self._limits.timeout)
        except Refused as error:
            if str(error) != self._refused_handoffs:
                log.warning("nothing is handed off reason=%s", error)
                self._refused_handoffs = str(error)
        except CascadeError as error:
            log.debug("a prompt that is handed off is not kept request=%s reason=%s", request.request_id, error)
            self._blame(began)
        except Exception:
            log.exception("a prompt that is handed off is not kept request=%s", request.request_id)

    # ---- loads

    def _locate(self, loading: _Loading, counts: Sequence[int]) -> None:
        """On a loading thread: waits until the blocks are in memory."""
        places: list[Load] = []
        try:
            for lease, count in zip(loading.leases, counts, strict=True):
                wait = loading.patience
                timeout = wait + self._limits.timeout
                places.append(loading.session.load(lease, count, wait_ms=int(wait * 1000), timeout=timeout))
        except CascadeError as error:
            log.debug("load failed request=%s reason=%s", loading.request_id, error)
        except Exception:
            log.exception("load failed request=%s", loading.request_id)
        with self._answered:
            if not loading.done:
                loading.places, loading.done = places, True
            self._answered.notify_all()

    def _plan_loads(self) -> tuple[list[Transfer], list[FailedLoad]]:
        loads: list[Transfer] = []
        failed: list[FailedLoad] = []
        for loading in self._unplanned:
            self._wait_for(loading)
        due = [loading for loading in self._unplanned if loading.done]
        self._unplanned = [loading for loading in self._unplanned if not loading.done]
        for loading in due:
            loading.planned = True
            if not loading.background:
                self._step_loads[loading.leases[0]] = loading
            for group, ids in enumerate(loading.blocks):
                place = loading.places[group] if group < len(loading.places) else None
                begin = loading.leased[group] - loading.first[group]
                here = range(begin, begin + place.count) if place is not None else range(0)
                wanted = [i for i, block in enumerate(ids) if block != self._null_block]
                if place is not None and (found := [i for i in wanted if i in here]):
                    loads.append(self._load_of(loading, group, place, found))
                if late := tuple(ids[i] for i in wanted if i not in here):
                    self._count("blocks_late", len(late))
                    failed.append(FailedLoad(loading.request_id, group, late, loading.background))
        for loading in self._cancelled:
            # Its lease goes when the load is reported as ended, or by its deadline.
            loading.planned = True
            failed.append(FailedLoad(loading.request_id, 0, loading.blocks[0], True))
        self._cancelled = []
        return loads, failed

    def _load_of(self, loading: _Loading, group: int, place: Load, wanted: Sequence[int]) -> Transfer:
        """A load of those of the group's blocks, by their places among `loading.blocks`."""
        first, ids = loading.first[group], loading.blocks[group]
        at = np.asarray(wanted, np.int64) + first - loading.leased[group]
        return Transfer(
            loading.request_id,
            group,
            loading.leases[group],
            tuple(first + i for i in wanted),
            tuple(ids[i] for i in wanted),
            tuple(place.pools[at].tolist()),
            tuple(place.pages[at].tolist()),
            tuple(place.generations[at].tolist()),
            loading.background,
            place.boot,
        )

    def _step_load(self, failure: FailedLoad) -> _Loading | None:
        return next((load for load in self._step_loads.values() if load.request_id == failure.request_id), None)

    def _end_load(self, loading: _Loading, failures: dict[int, list[int]]) -> None:
        """On the asking thread."""
        self._doubt(loading, failures)
        self._release(loading.session, loading.leases)

    def _doubt(self, loading: _Loading, failures: dict[int, list[int]]) -> None:
        for group, indices in failures.items():
            # Blocks that did not come in time are not doubted by that, but a lookup that finds them again at once
            # would have the engine wait again: `loads_failed` sees to it.
            place = loading.places[group] if group < len(loading.places) else None
            held = [index - loading.leased[group] for index in indices]
            copied = [index for index in held if place is not None and 0 <= index < place.count]
            if copied:
                try:
                    loading.session.failed(loading.leases[group], copied, timeout=self._limits.timeout)
                except CascadeError as error:
                    log.debug("a failed load could not be reported reason=%s", error)

    def _release(self, session: Session, leases: Iterable[int]) -> None:
        """On the asking thread."""
        held = [lease for lease in leases if lease]
        if held:
            try:
                session.release(held, timeout=self._limits.timeout)
            except CascadeError as error:
                log.debug("leases end by their deadline reason=%s", error)

    # ---- saves

    def _plan_saves(self, step: Step) -> tuple[list[Transfer], list[Aside], list[tuple[int, Transfer]]]:
        if self._may_ask():
            for request_id, final in step.final_tokens.items():
                life = self._lives.get(request_id)
                if life is not None and life.request.writes and not life.of_old_weights:
                    self._offer(life, final + self._lookahead)
        saves: list[Transfer] = []
        asides: list[Aside] = []
        placed: list[tuple[int, Transfer]] = []
        kept: list[_Offer] = []
        for offer in self._offers:
            final_blocks = 0 if offer.ended or offer.abandoned else self._final_blocks(offer, step)
            if final_blocks > offer.sent and not offer.waited and self._is_prompt(offer, step):
                # Much at once, whose copies aside may not fit; the few blocks of those that decode always do.
                offer.waited = True
                self._wait_for(offer)
            if not offer.done and not offer.abandoned:
                self._put_aside(offer, final_blocks, step, asides)
                kept.append(offer)
                continue
            self._place(offer, placed)
            if self._use(offer, final_blocks, step, saves):
                kept.append(offer)
        self._offers = kept
        return saves, asides, placed

    def _is_prompt(self, offer: _Offer, step: Step) -> bool:
        return step.final_tokens[offer.request_id] <= self._lives[offer.request_id].request.tokens

    def _put_aside(self, offer: _Offer, final_blocks: int, step: Step, asides: list[Aside]) -> None:
        """Have what the step makes final of an offer that is not answered copied where the engine does not reuse it."""
        final_blocks = min(final_blocks, offer.end)
        if final_blocks <= offer.sent:
            return
        table = step.blocks[offer.request_id][offer.group][:final_blocks]
        end = next((i for i in range(offer.sent, len(table)) if table[i] == self._null_block), len(table))
        # Out of the window already: their bytes are gone, and nothing below them could be found.
        offer.ended = end < final_blocks
        indices, offer.sent = tuple(range(offer.sent, end)), end
        if indices:
            self._asides += 1
            offer.asides.append((self._asides, indices))
            blocks = tuple(table[index] for index in indices)
            asides.append(Aside(self._asides, offer.request_id, offer.group, indices, blocks))

    def _place(self, offer: _Offer, placed: list[tuple[int, Transfer]]) -> None:
        """Say where what was copied aside goes, all of it or none: the answer is there, or is not wanted any more."""
        held = None if offer.abandoned else offer.reservation
        if held is not None and held.hole is not None and held.hole < offer.start:
            held = None
        asides, offer.asides = offer.asides, []
        for number, indices in asides:
            places = np.flatnonzero(np.isin(held.blocks, indices)) if held is not None else np.empty(0, np.int64)
            if held is None:
                self._count("saves_late", len(indices))
            placed.append((number, _save_of(offer, held, places, ())))

    def _offer(self, life: _Life, tokens: int) -> None:
        """Ask for slots for the blocks with hashes within the first `tokens`, those of coming steps among them."""
        request = life.request
        for number, group in enumerate(self._groups):
            start = life.stored[number]
            if tokens // group.block_tokens <= start:
                continue
            end = min(tokens // group.block_tokens, len(request.hashes[number]))
            if end > start:
                life.stored[number] = end
                offer = _Offer(request.request_id, number, start, end, self._session, start)
                self._offers.append(offer)
                self._submit(self._reserve, offer, request)

    def _final_blocks(self, offer: _Offer, step: Step) -> int:
        """How many leading blocks of the offer's group hold final tokens once the step is done."""
        final = step.final_tokens.get(offer.request_id)
        life = self._lives.get(offer.request_id)
        if final is None or life is None:
            return 0
        blocks = storable_blocks(final, 0, self._groups[offer.group].block_tokens).stop
        return blocks - (offer.group in self._volatile and final > life.request.prompt_tokens)

    def _reserve(self, offer: _Offer, request: Request) -> None:
        """On the asking thread."""
        size = self._groups[offer.group].block_tokens
        tokens = request.token_ids[offer.start * size : offer.end * size]
        began = self._clock()
        try:
            if not offer.abandoned and self._may_ask():
                offer.reservation = offer.session.reserve(
                    b"".join(request.hashes[offer.group][: offer.end]),
                    request=f"{offer.request_id}/{offer.group}"[-128:],
                    group=offer.group,
                    start=offer.start,
                    tokens=np.asarray(tokens, np.uint32) if len(tokens) == (offer.end - offer.start) * size else b"",
                    timeout=self._limits.timeout,
                )
                if refused := int((offer.reservation.states == BlockState.NO_ROOM).sum()):
                    self._count("blocks_refused", refused)
        except CascadeError as error:
            log.debug("nothing is stored request=%s reason=%s", offer.request_id, error)
            self._blame(began)
        except Exception:
            log.exception("nothing is stored request=%s", offer.request_id)
        with self._answered:
            offer.done = True
            unwanted = offer.abandoned
            self._answered.notify_all()
        if unwanted:
            self._abort(offer, offer.sent)

    def _use(self, offer: _Offer, final_blocks: int, step: Step, saves: list[Transfer]) -> bool:
        """Make a save of what is final of an answered offer; whether something of it is left for later steps."""
        held = offer.reservation
        if offer.abandoned or held is None:
            return False
        life = self._lives.get(offer.request_id)
        if offer.ended or life is None:
            self._submit(self._abort, offer, offer.sent)
            return False
        if held.hole is not None and held.hole < offer.start and life.restarts:
            # Parents are gone that were matched or stored before; the engine has them all.
            life.restarts -= 1
            life.stored[offer.group] = held.hole
            self._submit(self._abort, offer, offer.start)
            return False
        if not len(held.blocks):
            return False
        if final_blocks <= offer.sent:
            return True
        places = np.flatnonzero((held.blocks >= offer.sent) & (held.blocks < final_blocks))
        indices = held.blocks[places].tolist()
        offer.sent = min(final_blocks, offer.end)
        if indices:
            table = step.blocks[offer.request_id][offer.group]
            if indices[-1] >= len(table) or self._null_block in (ids := [table[index] for index in indices]):
                # Out of the window by now: their bytes are gone, and nothing below them could be found.
                self._submit(self._abort, offer, indices[0])
                return False
            saves.append(_save_of(offer, held, places, tuple(ids)))
        return offer.sent < offer.end

    def _abandon_offers(self, request_id: str) -> None:
        life = self._lives.get(request_id)
        for offer in self._offers:
            if offer.request_id == request_id and not offer.abandoned and not offer.ended:
                if life is not None:
                    life.stored[offer.group] = min(life.stored[offer.group], offer.sent)
                if offer.asides:
                    offer.ended = True
                    continue
                with self._answered:
                    offer.abandoned = True
                    done = offer.done
                if done:
                    self._submit(self._abort, offer, offer.sent)

    def _abort(self, offer: _Offer, first: int) -> None:
        """On the asking thread: give up block `first` and later ones. No rank was told of their slots."""
        held = offer.reservation
        unused = held.blocks[held.blocks >= first] if held is not None else ()
        if held is not None and held.lease and len(unused):
            try:
                offer.session.abort(held.lease, unused, timeout=self._limits.timeout)
            except CascadeError as error:
                log.debug("a reservation ends by its deadline reason=%s", error)

    # ---- waiting

    def _wait_for(self, what: _Question | _Loading | _Offer) -> None:
        """Return when it is done, or when this step's budget for waiting is spent."""
        if what.done or self._wait_left <= 0:
            return
        began = time.perf_counter()
        with self._answered:
            self._answered.wait_for(lambda: what.done, self._wait_left)
        self._wait_left -= time.perf_counter() - began

    def _submit(self, errand: Callable[..., None], *arguments: Any) -> None:
        if not self._closed:
            self._asker.submit(errand, *arguments)

    def _count(self, name: str, number: int = 1) -> None:
        with self._answered:
            self.counters[name] += number


def _save_of(
    offer: _Offer, held: Reservation | None, places: npt.NDArray[np.int64], blocks: tuple[int, ...]
) -> Transfer:
    """Some of an offer's slots, by their places in its answer; of no answer: none."""
    if held is None:
        return Transfer(offer.request_id, offer.group, 0, (), (), (), (), ())
    return Transfer(
        offer.request_id,
        offer.group,
        held.lease,
        tuple(held.blocks[places].tolist()),
        blocks,
        tuple(held.pools[places].tolist()),
        tuple(held.pages[places].tolist()),
        tuple(held.generations[places].tolist()),
        boot=held.boot,
    )


def _tier_name(tier: int) -> str:
    try:
        return Tier(tier).name.lower()
    except ValueError:
        return "other"
