"""The connector API: what an engine's plug-in implements so that the engine's prefixes outlive it.

A connector has two sides. The scheduler side (one an engine) asks the daemon and plans; the worker side (one a rank)
moves bytes. They share nothing but the `StepPlan` that the engine carries from one to the other and the `Report` that
it carries back. To write a connector for another engine, implement `SchedulerConnector` and `WorkerConnector`, put
them into `SafeScheduler` and `SafeWorker`, and translate the engine's own hooks into these calls:

    a request arrives                           arrived(request)
    it is to be scheduled, or scheduled anew    match(request, computed)  →  how many more tokens can be loaded
    the engine gave it blocks for them          allocated(request, blocks, tokens, background)
    each step, also an empty one                plan_step(step)  →  StepPlan, to every worker
      on each worker, in this order             preempted(ids), start_load(plan), wait_load(layer), save(plan)
      then                                      finished()  →  Report, back to the engine
    on the scheduler                            completed(report), once all ranks have reported
    a request ends, for whatever reason         finished(request_id, blocks, final_tokens)  →  keep its blocks?

The life of a load: `match` leases the leading blocks; `allocated` says where they shall go; the next plan holds a
`Transfer` with slots; a worker copies, then proves by the slots' generations that the bytes were still those; its
report names the request, and the blocks whose bytes are in doubt, which the engine recomputes and `completed` tells to
the daemon.
The life of a save: a step makes tokens final; its plan reserves slots for the new full blocks; after the forward a
worker copies and commits its own heads.

The rules, for every engine:

1. At least one token is left to compute, for its logits (`new_tokens`).
2. With several KV groups a hit is what all of them can serve (`common_hit`).
3. Only final tokens are stored: those whose KV is computed and that no draft's rejection can take back
   (`final_tokens`).
4. A preempted request's saves are finished or given up before its blocks are reused (`TransferBook.preempt`).
5. Results are reported once, and never after the engine dropped the request (`TransferBook`).
6. Nothing raises into serving (`SafeScheduler`, `SafeWorker`). Only `WorkerConnector.register` raises, when attaching.
"""

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from kvcascade.tiers.block import BlockHash

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

LONE_TOKENS = 256
LONE_SHARE = 0.9

T = TypeVar("T")
P = ParamSpec("P")

BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
"""The engine's own block ids of one request, from its first token on, a tuple a KV group."""


# ---- what the engine says, and what it is told


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its engine sees it while it is to be scheduled.

    `tokens`: how many the engine must have KV for before it can draw the next: the prompt, and after a preemption what
    was drawn before as well. `hashes`: those of its full blocks, a sequence a KV group.
    """

    request_id: str
    tokens: int
    hashes: tuple[Sequence[BlockHash], ...]
    token_ids: Sequence[int] = ()
    """All of its tokens, as it grows; the daemon keeps those of stored blocks for whoever routes by prefix."""
    prompt_tokens: int = 0
    reads: bool = True
    writes: bool = True
    ticket: bytes = b""
    """Of another engine's hand-off: where the rest of the prompt's blocks lie, or are being stored."""
    hands_off: bool = False
    """Another engine is to be told where this one's prompt lies."""


class MatchState(Enum):
    MISS = "miss"  # compute
    READY = "ready"  # load `tokens` now
    LATER = "later"  # not known yet, or on its way up: ask again with the next step, or compute


@dataclass(frozen=True, slots=True)
class Match:
    """How many tokens beyond those already computed can be loaded; 0 unless READY.

    `background`: the engine should go on without the request while it is loaded; else within its step, which is
    quicker for a few blocks that are in memory.
    """

    tokens: int
    state: MatchState
    background: bool = True


NO_MATCH = Match(0, MatchState.MISS)


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine will compute in one step.

    `final_tokens`: for each request scheduled, how many of its tokens are final once the step is done (`final_tokens()`
    counts them). `blocks`: their whole block tables. `preempted`: requests that lost their blocks with this step.
    """

    final_tokens: Mapping[str, int]
    blocks: Mapping[str, BlockIds]
    preempted: frozenset[str] = frozenset()
    prefill: "Prefill | None" = None
    """What `lone_prefill` made of it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of one request in one KV group and the slots that they come from or go to: five columns of one length.

    `lease`, given by the daemon of boot id `boot`, protects the slots until it is released, committed or aborted.
    `indices` are the blocks' places in the
    chain (which rank writes a replicated head depends on them), `blocks` the engine's ids,
    `pools`/`pages`/`generations` name the slots. `background`, for loads: the engine computes without the request
    until it is reported as received; else it waits for the load within the step and is told of failures alone.
    """

    request_id: str
    group: int
    lease: int
    indices: tuple[int, ...]
    blocks: tuple[int, ...]
    pools: tuple[int, ...]
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    background: bool = False
    boot: bytes = b""


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """Engine blocks that hold nothing to rely on: the engine computes them, and what follows them, anew."""

    request_id: str
    group: int
    blocks: tuple[int, ...]
    background: bool = False


@dataclass(frozen=True, slots=True)
class Aside:
    """Blocks that are final with this step and whose slots are not known yet: workers copy them aside meanwhile.

    A later plan says under the same `number` where they go (`StepPlan.placed`). The engine may reuse the blocks.
    """

    number: int
    request_id: str
    group: int
    indices: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefill:
    """`tokens` of one prompt behind its first `position`."""

    tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work, the same for every rank. Plain values only, so that any engine can send it to its workers.

    `failed`: loads that were promised and cannot be begun; workers report them as any failed load. `kept`: requests
    that are finished and whose blocks the engine keeps until they are reported as sent. `dropped`: requests that the
    engine has forgotten, never to be reported again. `attachment` is what rank sessions join, and `weights_epoch` the
    namespace's; an empty attachment means that the scheduler has none now. `seen_failures` counts the failed loads
    within a step that the scheduler has been told of: until it knows all, whatever is computed may rest on bad blocks
    and is not stored. `asides` are copied aside, and `placed` says, once for each, which blocks of an earlier step's
    have slots, the engine's own ids left out; the others are let go. `prefill`: the step's time says how fast the
    engine computes prompts, since it does little else.
    """

    loads: tuple[Transfer, ...] = ()
    saves: tuple[Transfer, ...] = ()
    asides: tuple[Aside, ...] = ()
    placed: tuple[tuple[int, Transfer], ...] = ()
    failed: tuple[FailedLoad, ...] = ()
    kept: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    attachment: bytes = b""
    weights_epoch: str = ""
    seen_failures: int = 0
    prefill: Prefill | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What became true on one rank since its last report.

    `sent`: requests of `StepPlan.kept` whose saves have ended: their blocks may be reused. `received`: requests whose
    background loads have ended, well or not. `failed`: loads, or parts of them, that ended badly; always in the same
    report as, or an earlier one than, the request's `received`. Engines that take failures by block use
    `failed_blocks`, those that take them by request `failed_requests`. `loaded`: leases of loads within a step that
    touch memory no more. `stored`: (lease, block indices) that this rank has committed.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: tuple[FailedLoad, ...] = ()
    loaded: tuple[int, ...] = ()
    stored: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def failed_blocks(self) -> frozenset[int]:
        """Unambiguous with one KV group only: groups may use the same ids."""
        return frozenset(block for load in self.failed for block in load.blocks)

    @property
    def failed_requests(self) -> frozenset[str]:
        return frozenset(load.request_id for load in self.failed)


# ---- what a connector implements


class SchedulerConnector(ABC):
    """The side beside the engine's scheduler, on whose thread it is called: no method may block for longer than the
    connector's own small budget, and none may copy bytes.
    """

    def arrived(self, request: Request) -> None:  # noqa: B027 - most need not know
        """The request will be scheduled at some time: what is to be asked about it may be asked now. Never waits."""

    @abstractmethod
    def match(self, request: Request, computed_tokens: int) -> Match:
        """How many tokens after the first `computed_tokens` can be loaded.

        Called any number of times for one request; asking again renews its one lease and changes nothing else. The
        blocks of a READY answer are pinned until the lease's deadline, so `allocated` should follow at once or
        `finished` later. READY with no tokens does not exist: that is a MISS. Use `common_hit` and `new_tokens` for
        the arithmetic.
        """

    @abstractmethod
    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        """The engine has given the request `blocks`, and counts on `tokens` of its last match to be loaded into them.

        Called for every request that is scheduled, with 0 tokens where nothing is to be loaded (it was the local
        cache's, another connector was chosen, or its background load is over): then its lease is released. Otherwise
        the load must appear in `loads` or in `failed`, of the next plan or, in the background, of a later one: an
        engine waits for it. Decide on `tokens` alone.
        """

    @abstractmethod
    def plan_step(self, step: Step) -> StepPlan:
        """The work of this step; called for each step, in order, also for an empty one.

        Loads: what was allocated since the last plan. Saves: `storable_blocks` of each request's final tokens, less
        those that the daemon has already or has no room for; a request is asked for once a block at most. Saves of a
        preempted request that no plan holds yet are forgotten. Blocks whose slots come late are copied aside, so that
        they need not be waited for, nor the engine's blocks kept.
        """

    @abstractmethod
    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        """The request has ended, was aborted or has failed. Called exactly once, before its blocks are freed.

        True: copies from or into its blocks are still running or to come, so the engine keeps them until a report
        names the request as sent; the next plan has it in `kept`. False: nothing of it will be reported any more; the
        next plan has it in `dropped`. Its leases are released, but for those of copies that still run.

        Some engines themselves keep the blocks of a request that ends while it is loaded in the background, until it is
        reported as received (vLLM). For those a connector returns False and does not drop it: its load ends as any.
        """

    @abstractmethod
    def completed(self, report: Report) -> None:
        """All ranks have reported: release what was loaded, and tell the daemon of failed blocks.

        `sent` and `received` hold a request once all ranks have named it; `failed` is the union. The next lookup of a
        failed block is a miss.
        """

    def reset(self) -> bool:
        """Nothing stored so far may be found again: the engine's weights were changed. Whether that is so now."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End: all leases are released or left to their deadline. Idempotent."""


class WorkerConnector(ABC):
    """The side beside one rank's model, called on the engine's thread; its copies may run on threads of its own."""

    @abstractmethod
    def register(self, tensors: Sequence[Sequence["Tensor"]]) -> None:
        """The rank's KV tensors, a sequence a KV group, one tensor a layer; called once, before anything else.

        Raises LayoutMismatch for tensors that are not recognised (`layout.describe_paged`), naming what was seen: the
        one error that engines are to see, while they start. Tensors stay valid and in place until `close`.
        """

    @abstractmethod
    def preempted(self, request_ids: frozenset[str]) -> None:
        """These requests' blocks are reused from this step on; called before anything of the step touches memory.

        On return no copy from or into them runs any more: finished, or given up and never committed.
        """

    @abstractmethod
    def start_load(self, plan: StepPlan) -> None:
        """Begin the plan's loads, and note its failed, kept and dropped requests; returns without waiting.

        Copies wait for the engine's compute stream: destination blocks may still be written by an earlier step. After a
        copy has completed (on a device: after its event) the slot's generation is compared; changed means failed.
        """

    @abstractmethod
    def wait_load(self, layer: int | None = None) -> None:
        """Return when the loads that are not in the background have ended, of one layer or all.

        Bounded by a deadline, past which they have failed. Called before that layer's attention, or once before the
        forward.
        """

    @abstractmethod
    def save(self, plan: StepPlan) -> None:
        """Begin the plan's saves; called after the step's forward was launched, returns without waiting.

        Copies wait for that forward, those aside (`plan.asides`) too. A rank copies and commits its own heads, and
        replicated ones in its turn (`layout.Gatherer.writes`); a copy that was given up or failed is aborted, so
        nothing half-written is ever found. Source blocks belong to the copy until it ended: the scheduler's `finished`
        keeps them, `preempted` waits.
        """

    @abstractmethod
    def finished(self) -> Report:
        """What ended since the last call (`TransferBook.take`); called after each step and while idle. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Give up all copies and return when none runs: no byte of the engine's is touched after it. Idempotent."""


# ---- what is the same for every engine


def loadable_tokens(hit_tokens: int, tokens: int, block_tokens: int) -> int:
    """How much of a hit may be loaded for a request of `tokens` tokens: whole blocks, at most all tokens but one.

    The last token's logits are not in the cache: an engine that is given everything has nothing to draw from.
    """
    return max(0, min(hit_tokens, tokens - 1)) // block_tokens * block_tokens


def new_tokens(hit_tokens: int, computed_tokens: int, tokens: int, block_tokens: int) -> int:
    """The part of a hit to load after the first `computed_tokens`: what `Match.tokens` and metrics report.

    Never negative, and never more than `tokens - 1 - computed_tokens`, however often it is asked.
    """
    return max(0, loadable_tokens(hit_tokens, tokens, block_tokens) - computed_tokens)


def common_hit(hits: Iterable[tuple[int, int]]) -> int:
    """The tokens that all KV groups can serve, from (hit tokens, block tokens) a group; 0 for no groups.

    A group that cannot restore its state beyond a boundary reports that boundary. The answer is whole blocks in every
    group, so it is a multiple of all block sizes.
    """
    groups = list(hits)
    if not groups:
        return 0
    unit = math.lcm(*(block_tokens for _, block_tokens in groups))
    return max(0, min(hit for hit, _ in groups)) // unit * unit


def lone_prefill(scheduled: Mapping[str, int], total: int) -> str | None:
    """The request whose prefill is as good as the whole step of `total` tokens, so that the step's time is its own.

    A small step takes the time that reading the weights takes, whatever it computes, and would make the engine look
    slow. Up to a tenth of the tokens may be others', who decode: steps without any are rare on a busy engine, and what
    they add errs towards fetching. Costs nothing where all requests decode.
    """
    if total < LONE_TOKENS:
        return None
    request_id = max(scheduled, key=scheduled.__getitem__)
    return request_id if scheduled[request_id] >= LONE_SHARE * total else None


def final_tokens(computed_tokens: int, scheduled_tokens: int, draft_tokens: int = 0) -> int:
    """How many tokens are final after a step: computed before or scheduled now, less drafts that may be rejected.

    For a request that ended, what was computed is final: `computed_tokens` of an aborted one, all but the last drawn
    token of a complete one.
    """
    return computed_tokens + max(0, scheduled_tokens - draft_tokens)


def storable_blocks(final_tokens: int, stored_blocks: int, block_tokens: int) -> range:
    """Indices of the full blocks of final tokens that come after the first `stored_blocks`."""
    return range(stored_blocks, max(stored_blocks, final_tokens // block_tokens))


@dataclass(eq=False, slots=True)
class Ticket:
    """One running copy; made by `TransferBook.begin`, ended by `TransferBook.end`, once."""

    transfer: Transfer
    load: bool
    given_up: bool = False


@dataclass(slots=True)
class _Entry:
    """What one request's engine waits for. `loads` and `saves`: running copies that count."""

    loads: set[Ticket] = field(default_factory=set)
    saves: set[Ticket] = field(default_factory=set)
    awaits_received: bool = False
    awaits_sent: bool = False

    @property
    def idle(self) -> bool:
        return not (self.loads or self.saves or self.awaits_received or self.awaits_sent)


class TransferBook:
    """Which copies run on one rank, and what its engine is still to be told: each result once, while it waits.

    A worker side begins a ticket for each copy on the engine's thread, ends it on whatever thread copies, and returns
    `take()` from `finished()`. Every method may be called from any thread; only `preempt` and `close` wait.

    A ticket may be given up while its copy runs (`preempt`, `drop`, `close`): `end` then says so, and the copy's result
    must be thrown away: a save is aborted, not committed; a load is told to nobody. A request that comes back under the
    same id after it was dropped or preempted starts afresh: tickets of its earlier life cannot be mistaken for the new.
    """

    def __init__(self) -> None:
        # All of it guarded by _changed.
        self._changed = threading.Condition()
        self._requests: dict[str, _Entry] = {}
        self._failed: list[FailedLoad] = []
        self._running: set[Ticket] = set()
        self._closed = False

    def begin(self, transfer: Transfer, *, load: bool) -> Ticket:
        """Note a copy before it touches memory. After `close` its ticket is given up from the start."""
        ticket = Ticket(transfer, load)
        with self._changed:
            if self._closed:
                ticket.given_up = True
                return ticket
            entry = self._requests.setdefault(transfer.request_id, _Entry())
            (entry.loads if load else entry.saves).add(ticket)
            entry.awaits_received |= load and transfer.background
            self._running.add(ticket)
        return ticket

    def end(self, ticket: Ticket, failed_blocks: Iterable[int] = ()) -> bool:
        """The copy touches memory no more. `failed_blocks`: the engine's ids of blocks that were not loaded.

        False: it was given up meanwhile, so whatever it did must not count. Ending a ticket twice is a bug
        (ValueError).
        """
        transfer = ticket.transfer
        with self._changed:
            if ticket not in self._running:
                if self._closed:
                    return False
                raise ValueError(f"the copy for request {transfer.request_id!r} had ended before")
            self._running.discard(ticket)
            self._changed.notify_all()
            if ticket.given_up:
                return False
            entry = self._requests[transfer.request_id]
            (entry.loads if ticket.load else entry.saves).discard(ticket)
            blocks = tuple(failed_blocks)
            if ticket.load and blocks:
                self._failed.append(FailedLoad(transfer.request_id, transfer.group, blocks, transfer.background))
            self._forget_idle(transfer.request_id)
            return True

    def fail(self, load: FailedLoad) -> None:
        """A load that was promised to the engine and never began (`StepPlan.failed`)."""
        with self._changed:
            self._failed.append(load)
            if load.background:
                self._requests.setdefault(load.request_id, _Entry()).awaits_received = True

    def keep(self, request_id: str) -> None:
        """The engine keeps the finished request's blocks until it is reported as sent, which is now due."""
        with self._changed:
            self._requests.setdefault(request_id, _Entry()).awaits_sent = True

    def drop(self, request_id: str) -> None:
        """The engine has forgotten the request: nothing of it is reported any more, its running copies are given up."""
        with self._changed:
            self._give_up(request_id)

    def preempt(self, request_ids: Iterable[str], timeout: float) -> frozenset[str]:
        """Wait up to `timeout` seconds for these requests' copies to end by themselves, then give up the others.

        Nothing that ended is undone: a save that has ended may still be committed, for its bytes were read in time.
        Returns the requests of which a given-up copy still runs: their blocks are not to be reused until `wait_ended`.
        """
        wanted = frozenset(request_ids)
        with self._changed:
            self._wait(wanted, timeout)
            for request_id in wanted:
                self._give_up(request_id)
            return self._busy(wanted)

    def wait_ended(self, request_ids: Iterable[str], timeout: float) -> bool:
        """Whether, within `timeout` seconds, no copy of these requests runs any more, given up or not."""
        wanted = frozenset(request_ids)
        with self._changed:
            return self._wait(wanted, timeout)

    def busy(self, request_id: str) -> bool:
        """Whether a copy from or into the request's blocks still runs."""
        with self._changed:
            return bool(self._busy(frozenset((request_id,))))

    def take(self) -> Report:
        """What is to be told to the engine now, each thing once."""
        with self._changed:
            sent, received = set(), set()
            running = {ticket.transfer.request_id for ticket in self._running}
            for request_id, entry in list(self._requests.items()):
                if entry.awaits_received and not entry.loads:
                    entry.awaits_received = False
                    received.add(request_id)
                # Blocks are free for reuse when no copy touches them, not even one that was given up.
                if entry.awaits_sent and request_id not in running:
                    entry.awaits_sent = False
                    sent.add(request_id)
                self._forget_idle(request_id)
            failed, self._failed = tuple(self._failed), []
            return Report(frozenset(sent), frozenset(received), failed)

    def close(self, timeout: float) -> bool:
        """Give up every copy; whether all have ended within `timeout` seconds. Later tickets are given up at once."""
        with self._changed:
            self._closed = True
            for request_id in list(self._requests):
                self._give_up(request_id)
            self._failed.clear()
            return self._changed.wait_for(lambda: not self._running, timeout)

    def _give_up(self, request_id: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            for ticket in entry.loads | entry.saves:
                ticket.given_up = True
        self._failed = [load for load in self._failed if load.request_id != request_id]

    def _forget_idle(self, request_id: str) -> None:
        if self._requests[request_id].idle:
            del self._requests[request_id]

    def _busy(self, request_ids: frozenset[str]) -> frozenset[str]:
        return frozenset(ticket.transfer.request_id for ticket in self._running) & request_ids

    def _wait(self, request_ids: frozenset[str], timeout: float) -> bool:
        return self._changed.wait_for(lambda: not self._busy(request_ids), timeout)


# ---- nothing raises into serving


class _Broken(Exception):
    """Not an error of its own: the call was not made because an earlier one has failed."""


class _Guard:
    """Calls into a connector that raised once are not made again: a half-done step leaves nothing to build on."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._close = close

    def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.failure is not None:
            raise _Broken
        try:
            return method(*args, **kwargs)
        except Exception as error:
            self.failure = error
            name = getattr(method, "__qualname__", repr(method))
            log.exception("connector failed in %s; the engine goes on without it", name)
            self.close()
            raise _Broken from error

    def close(self) -> None:
        try:
            self._close()
        except Exception:
            log.exception("connector failed to close")


class SafeScheduler(SchedulerConnector):
    """A scheduler side that never raises: after the inner one's first exception it matches and plans nothing more.

    Loads that were promised to the engine then, and not planned, are reported as failed by the next plan, so that no
    request waits for ever; requests whose blocks are kept are reported by the workers as before. `failure` is the
    exception, for `status` and logs. `engine_keeps_loading`: the engine is one that keeps the blocks of a request that
    ends while it is loaded until it is reported as received.
    """

    def __init__(self, inner: SchedulerConnector, *, engine_keeps_loading: bool = False) -> None:
        # On the engine's scheduling thread alone.
        self._inner = inner
        self._guard = _Guard(inner.close)
        self._engine_keeps_loading = engine_keeps_loading
        self._promised: dict[str, tuple[FailedLoad, ...]] = {}  # in no plan yet
        self._loading: set[str] = set()  # in the background, not yet reported as received
        self._ended: dict[str, bool] = {}  # since the last plan: request -> are its blocks kept

    @property
    def failure(self) -> Exception | None:
        return self._guard.failure

    def arrived(self, request: Request) -> None:
        try:
            self._guard.call(self._inner.arrived, request)
        except _Broken:
            pass

    def match(self, request: Request, computed_tokens: int) -> Match:
        try:
            return self._guard.call(self._inner.match, request, computed_tokens)
        except _Broken:
            return NO_MATCH

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        if tokens:
            # By whole groups: which of the blocks would have been loaded only the inner side knows.
            self._promised[request.request_id] = tuple(
                FailedLoad(request.request_id, group, ids, background) for group, ids in enumerate(blocks)
            )
            if background:
                self._loading.add(request.request_id)
        try:
            self._guard.call(self._inner.allocated, request, blocks, tokens, background=background)
        except _Broken:
            pass

    def plan_step(self, step: Step) -> StepPlan:
        ended, self._ended = self._ended, {}
        try:
            plan = self._guard.call(self._inner.plan_step, step)
            for request_id in {load.request_id for load in plan.loads} | {load.request_id for load in plan.failed}:
                self._promised.pop(request_id, None)
            return plan
        except _Broken:
            promised, self._promised = self._promised, {}
            return StepPlan(
                failed=tuple(load for loads in promised.values() for load in loads),
                kept=frozenset(request_id for request_id, kept in ended.items() if kept),
                dropped=frozenset(request_id for request_id, kept in ended.items() if not kept),
            )

    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        waits = self._engine_keeps_loading and request_id in self._loading
        if not waits:
            self._promised.pop(request_id, None)
        try:
            kept = self._guard.call(self._inner.finished, request_id, blocks, final_tokens)
        except _Broken:
            # A worker may still copy from or into the blocks; it reports the request as sent when none does.
            kept = not self._engine_keeps_loading
        if not waits:
            self._ended[request_id] = kept
        return kept

    def reset(self) -> bool:
        try:
            return self._guard.call(self._inner.reset)
        except _Broken:
            return True  # nothing is found any more

    def completed(self, report: Report) -> None:
        self._loading -= report.received
        try:
            self._guard.call(self._inner.completed, report)
        except _Broken:
            pass

    def close(self) -> None:
        self._guard.close()


class SafeWorker(WorkerConnector):
    """A worker side that never raises but from `register`.

    After the inner one's first exception it is closed, so that nothing of it touches the engine's memory any more;
    what the engine waits for is then reported: loads that had not been reported as failed, saves as ended. From there
    on loads fail at once and nothing is saved. `failure` is the exception.
    """

    def __init__(self, inner: WorkerConnector) -> None:
        # On the engine's worker thread alone. What the inner one owes the engine:
        self._inner = inner
        self._guard = _Guard(inner.close)
        self._loads: dict[str, list[FailedLoad]] = {}
        self._step_loads: list[FailedLoad] = []  # of loads within the step, which are never named as received
        self._kept: set[str] = set()

    @property
    def failure(self) -> Exception | None:
        return self._guard.failure

    def register(self, tensors: Sequence[Sequence["Tensor"]]) -> None:
        self._inner.register(tensors)

    def preempted(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            self._loads.pop(request_id, None)
        self._step_loads = [load for load in self._step_loads if load.request_id not in request_ids]
        self._call(self._inner.preempted, request_ids)

    def start_load(self, plan: StepPlan) -> None:
        for request_id in plan.dropped:
            self._loads.pop(request_id, None)
        for load in (*plan.failed, *(FailedLoad(t.request_id, t.group, t.blocks, t.background) for t in plan.loads)):
            (self._loads.setdefault(load.request_id, []) if load.background else self._step_loads).append(load)
        self._kept |= plan.kept
        self._call(self._inner.start_load, plan)

    def wait_load(self, layer: int | None = None) -> None:
        self._call(self._inner.wait_load, layer)

    def save(self, plan: StepPlan) -> None:
        self._call(self._inner.save, plan)

    def finished(self) -> Report:
        try:
            report = self._guard.call(self._inner.finished)
        except _Broken:
            failed = [*self._step_loads, *(load for loads in self._loads.values() for load in loads)]
            report = Report(frozenset(self._kept), frozenset(self._loads), tuple(failed))
        for request_id in report.received:
            self._loads.pop(request_id, None)
        self._kept -= report.sent
        self._step_loads = []
        return report

    def close(self) -> None:
        self._guard.close()

    def _call(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            self._guard.call(method, *args, **kwargs)
        except _Broken:
            pass
