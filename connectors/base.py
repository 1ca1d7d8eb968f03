"""The connector API: what an engine's plug-in implements so that the engine's prefixes outlive it.

A connector has two sides. The scheduler side (one an engine) asks the daemon and plans; the worker side (one a rank)
moves bytes. They share nothing but the `StepPlan` that the engine carries from one to the other and the `Report` that
it carries back. To write a connector for another engine, implement `SchedulerConnector` and `WorkerConnector`, put
them into `SafeScheduler` and `SafeWorker` (`safe.py`), and translate the engine's own hooks into these calls:

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
5. Results are reported once, and never after the engine dropped the request (`transfer_book.py`).
6. Nothing raises into serving (`SafeScheduler`, `SafeWorker`). Only `WorkerConnector.register` raises, when attaching.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from kvcascade.tiers.block import BlockHash

if TYPE_CHECKING:
    from torch import Tensor

LONE_TOKENS = 256
LONE_SHARE = 0.9

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
    `computed_tokens`: how many of their tokens the engine does not compute in this step, since it has their KV.
    """

    final_tokens: Mapping[str, int]
    blocks: Mapping[str, BlockIds]
    preempted: frozenset[str] = frozenset()
    computed_tokens: Mapping[str, int] = field(default_factory=dict)
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
    """Engine blocks that hold nothing to rely on: the engine computes them, and what follows them, anew.

    `doubted`: they were copied, and the copy did not prove to be what was stored, so that the daemon must forget them
    too; every other failure says nothing of what it keeps.
    """

    request_id: str
    group: int
    blocks: tuple[int, ...]
    background: bool = False
    doubted: bool = False


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
    background loads have ended, well or not. `failed`: loads, or parts of them, that ended badly; those in the
    background in the very report that names the request as received. Engines that take failures by block use
    `failed_blocks`, those that take them by request `failed_requests`. `loaded`: leases of loads within a step that
    touch memory no more. `stored`: (lease, block indices) that this rank has committed. `broken`: this rank loads and
    saves nothing any more (`SafeWorker`).
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: tuple[FailedLoad, ...] = ()
    loaded: tuple[int, ...] = ()
    stored: tuple[tuple[int, tuple[int, ...]], ...] = ()
    broken: bool = False

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

        Loads: what was allocated and can be copied now. Saves: `storable_blocks` of each request's final tokens, less
        those that the daemon has already or has no room for. Saves of a preempted request that no plan holds yet are
        forgotten, but for what was copied aside. That is done with blocks whose slots come late, so that they need not
        be waited for, nor the engine's blocks kept.
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
        """All ranks have reported: release what was loaded, and tell the daemon of doubted blocks.

        `sent` and `received` hold a request once all ranks have named it; `failed` is the union, and one rank that is
        `broken` makes all of it so. The next lookup of a doubted block is a miss.
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

        On return no copy from or into them runs any more: finished, or given up and never committed. What was copied
        into memory of the worker's own meanwhile may still be committed: its bytes were read in time.
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
        nothing half-written is ever found. Source blocks belong to the copy until it ended: where that is later than
        what the engine queues next, `finished` of the scheduler keeps them and `preempted` waits.
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
