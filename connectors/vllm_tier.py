"""The daemon below vLLM's own CPU offloading: a secondary tier of its tiered KV offloading (vLLM 0.32 and later).

    "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
        "secondary_tiers": [{"type": "CascadeTier", "module_path": "kvcascade.connectors.vllm_tier"}]}

vLLM moves its KV between GPU and a region in host memory, in chunks that are its own bytes, whatever the model's
layout; what it stores there is offered to this tier, and what it lacks there is asked of it. So every model that vLLM
can offload reaches the daemon. The bytes are vLLM's pages, all ranks of a chunk in one row: a namespace of their own,
shared only by engines whose pages are cut alike.

Rule: the scheduler's thread never waits for the daemon. What it asks is queued, a batch a step, and answered by threads
of our own: one looks up, some copy. An answer that is late is a miss; a daemon that is away, slow or killed costs the
engine nothing but its hits, and is attached again by itself.

How vLLM's keys become blocks. A key is a hash and a KV group. vLLM's request knows the keys of all its chunks by
position, so a chunk of a full-attention group is stored, and looked up, as a block of its whole chain. A sliding window
keeps no chunk before the window, and recurrent state one here and there: their chunks are blocks that stand alone, as
are partial tails. Both are loaded one by one.
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcascade.config.errors import CascadeError, ConfigError, ProtocolError, Refused
from kvcascade.daemon.attachment import Session
from kvcascade.daemon.protocol import PAGE
from kvcascade.tiers.block import TAGGED, probe_hashes

from .pages import COUNTERS, GROUP, HASH, NOTHING, OPERATION_S, Answer, Done, Job, Mover, Question, Run, group_of
from .vllm_pages import PRODUCER, chained_groups, engine_config, hash_algo_of, page_namespace, refuse_computed_scales

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

ATTACH_S: Final = 2.0
_PREFIX = "vllm:kv_offload_kvcascade_"


# ---- what this tier needs of vLLM


def check_contract() -> None:
    """Raises ConfigError, naming what is missing, for a vLLM whose tiers are not the ones that this module knows.

    Versions are told apart by what they offer: a later one that keeps all this is taken.
    """
    wanted = {
        TransferJob: {"job_id", "keys", "chunk_ids", "req_context"},
        JobResult: {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"},
        ReqContext: {"req_id", "kv_transfer_params", "_offload_key_positions"},
    }
    for kind, names in wanted.items():
        if missing := names - {each.name for each in fields(kind)}:
            raise ConfigError(_unlike(f"{kind.__name__}.{min(missing)}"))
    for name in ("HIT", "MISS", "RETRY"):
        if not hasattr(LookupResult, name):
            raise ConfigError(_unlike(f"LookupResult.{name}"))
    if unknown := {name for name in SecondaryTierManager.__abstractmethods__ if name not in vars(CascadeTier)}:
        raise ConfigError(f"vllm {vllm.__version__}: tiers must have {min(unknown)}(), which this tier does not know")


def _unlike(name: str) -> str:
    return f"vllm {vllm.__version__}: its tiers have no {name}; known are those of 0.32 and 0.33"


# ---- one request, as the scheduler's thread knows it


@dataclass(slots=True)
class _Chain:
    """The hashes of one request's chunks in one full-attention group, from its first token on, as far as known."""

    hashes: bytearray = field(default_factory=bytearray)
    # Positions that vLLM named out of order, until the gap before them closes.
    later: dict[int, bytes] = field(default_factory=dict)
    # Of the first `asked` blocks the first `matched` are there; nothing is known of those beyond.
    asked: int = 0
    matched: int = 0

    def index(self, key: bytes, position: int, tokens: int) -> int | None:
        """The block's place in the chain, None if it is not of it."""
        block, rest = divmod(position, tokens)
        at = (block - 1) * HASH
        return block - 1 if not rest and self.hashes[at : at + HASH] == key[:HASH] else None


@dataclass(slots=True)
class _Request:
    context: Any
    reads: bool
    writes: bool
    chains: dict[int, _Chain]
    seen: int = 0  # entries of the context's positions that are in the chains
    alone: dict[bytes, bool] = field(default_factory=dict)  # what is known of keys that stand alone
    failed: set[bytes] = field(default_factory=set)
    # To be asked at the step's end: keys that stand alone, and groups of which the whole chain is asked.
    wanted: dict[bytes, None] = field(default_factory=dict)
    wanted_chains: set[int] = field(default_factory=set)
    # The last question's number, how many of its parts are not answered, since when something is asked (0: nothing is),
    # and whether the daemon has said that it asks other nodes.
    question: int = 0
    unanswered: int = 0
    since: float = 0.0
    elsewhere: bool = False

    def forget(self) -> None:
        """What the daemon said, and is being asked."""
        self.question = self.unanswered = 0
        self.settle()
        self.alone.clear()
        self.wanted.clear()
        self.wanted_chains.clear()
        for chain in self.chains.values():
            chain.asked = chain.matched = 0

    def settle(self) -> None:
        """Nothing is asked any more."""
        self.since = 0.0
        self.elsewhere = False


# ---- the tier


class CascadeTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The daemon as a tier. All methods are called by the scheduler's thread, one at a time.

    It tells no KV events. vLLM takes one only with a medium, and what is told as stored must be told as removed: the
    daemon's blocks move between media, are stored, evicted and fetched by others, and outlive this engine, so what one
    engine told of them would be wrong for most of their life.
    """

    # A block may lie in the daemon's memory, on disk or elsewhere: no medium would be true of all.
    medium: ClassVar[Any] = None

    def __new__(cls, *_: Any, **__: Any) -> "CascadeTier":
        """Before Python itself would complain about methods that are missing."""
        check_contract()
        made: CascadeTier = super().__new__(cls)
        return made

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str | None = None,
        model: str = "",
        weights_epoch: str = "",
        hash_algo: str = "",
        lookup_timeout_s: float = 0.25,
        remote_timeout_s: float = 2.0,
        load_timeout_s: float = 5.0,
        resets: str = "private",
        locality: str | None = None,
        **unknown: Any,
    ) -> None:
        """`offloading_spec` to `backpressure_detector` are vLLM's; the others come from the tier's config.

        `socket`: the daemon's, else KVCASCADE_SOCKET or the default. `model`: an identity instead of the digest of
        config and weights. `weights_epoch`: the version of weights that are updated in place. `hash_algo`: vLLM's,
        where its config is not in reach. A lookup that takes longer than `lookup_timeout_s` is a miss, or, while the
        daemon gets blocks from other nodes, than `remote_timeout_s` more; a load longer than `load_timeout_s` has
        failed. `resets` says what a reset of vLLM's caches means, see `drain_jobs`.

        Raises ConfigError naming what is wrong: the contract, the hash, the seed, the model, computed KV scales; and
        what the daemon refuses. A daemon that does not answer is no error.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if unknown:
            raise ConfigError(f'CascadeTier has no option {min(unknown)!r}: README, "Below vLLM\'s own CPU offloading"')
        if resets not in ("private", "keep"):
            raise ConfigError(f"CascadeTier: resets must be one of private, keep, got {resets!r:.80}")
        if locality is not None:
            raise ConfigError("locality: this tier's blocks may lie on this node or elsewhere; leave it out")
        engine, kv_cache = engine_config(offloading_spec)
        self._algo = hash_algo_of(engine, hash_algo)
        refuse_computed_scales(engine)
        row_bytes = primary_kv_view.strides[0] if primary_kv_view.strides else 0
        if row_bytes <= 0 or row_bytes % PAGE:
            raise ConfigError(f"primary_kv_view: rows of {row_bytes} bytes are not whole pages of {PAGE}")
        self._tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.config.cache.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        self._chained = chained_groups(offloading_spec, kv_cache)
        self._groups = {group: place for place, group in enumerate(self._tokens)}
        self._load_s = load_timeout_s
        self._lookup_s = lookup_timeout_s
        self._remote_s = remote_timeout_s
        self._socket = socket
        self._private = resets == "private"
        # The scheduler's thread alone changes the rest.
        self._namespace = page_namespace(
            offloading_spec,
            row_bytes,
            self._chained,
            engine,
            model=model,
            weights_epoch=weights_epoch,
            hash_algo=self._algo,
        )
        self._requests: dict[str, _Request] = {}
        self._wanting: dict[str, None] = {}  # requests with keys to be asked at the step's end
        self._loads: dict[int, tuple[str, tuple[bytes, ...]]] = {}  # by job: the request and its keys
        self._pending_stores: dict[int, int] = {}  # by job: chunks
        self._question = 0
        self._timeouts = 0
        self._proved = False
        self._refused = ""
        session = self._session()
        try:
            for warning in session.attach(ATTACH_S).warnings:
                log.warning("attached, but: %s", warning)
        except (Refused, ProtocolError) as error:
            session.close(0)
            raise ConfigError(f"the daemon refuses this engine: {error}") from error
        except CascadeError as error:
            log.warning("no daemon yet, its blocks are missed until it is there: %s", error)
        # Last: while somebody views vLLM's memory it cannot be unmapped, and a constructor that fails is kept for long.
        self._rows: NDArray[np.uint8] | None = np.asarray(primary_kv_view).view(np.uint8)
        self._mover = Mover(session, self._rows, self._groups, self._load_s, self._remote_s)

    def _session(self) -> Session:
        return Session(
            namespace=self._namespace.to_map(),
            probe=probe_hashes(algo=self._algo, none_hash=self._namespace.none_hash, key_scheme=TAGGED),
            engine=(PRODUCER, vllm.__version__),
            socket_path=self._socket,
            timeout=OPERATION_S,
        )

    # ---- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """After holes in its chains, or an absence, the daemon is offered all chunks of a request, not only new ones.

        vLLM offers a chunk once, so what was dropped then would be missing for as long as vLLM itself has it.
        """
        self._prove_root()
        self._requests[req_context.req_id] = self._new(req_context)
        healing = time.monotonic() < self._mover.heal_until
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL if healing else OffloadPolicy.CHUNK_LEVEL)

    def _new(self, context: Any) -> _Request:
        wish = (context.kv_transfer_params or {}).get("kvcascade")
        chains = {group: _Chain() for group, chained in self._chained.items() if chained}
        return _Request(context, wish not in ("off", "write"), wish not in ("off", "read"), chains)

    def _of(self, context: Any) -> _Request:
        """The request's state; one that vLLM did not announce (after a reset) is new."""
        request = self._requests.get(context.req_id)
        if request is None or request.context is not context:
            request = self._requests[context.req_id] = self._new(context)
        return request

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._wanting.pop(req_context.req_id, None)

    def _prove_root(self) -> None:
        """vLLM makes its root after it made us. Under another than ours the tier is off, loudly."""
        root = getattr(kv_cache_utils, "NONE_HASH", None)
        if self._proved or root is None:
            return
        self._proved = True
        if root != self._namespace.none_hash:
            self._refused = (
                f"hash_algo: vLLM's chains begin with {root.hex()[:16]}, {self._algo} under this seed with "
                f"{self._namespace.none_hash.hex()[:16]}: pass --prefix-caching-hash-algo {self._algo}, and set "
                "PYTHONHASHSEED before vLLM starts or not at all"
            )
            log.error("kvcascade is off: %s", self._refused)

    def _follow(self, request: _Request) -> None:
        """Takes over the keys that vLLM has named since."""
        positions = request.context._offload_key_positions
        if len(positions) == request.seen:
            return
        for key, position in islice(positions.items(), request.seen, None):
            chain = request.chains.get(group_of(key))
            if chain is None or len(key) != HASH + GROUP:
                continue
            block, rest = divmod(position, self._tokens[group_of(key)])
            if not rest:
                chain.later[block - 1] = key[:HASH]
                while (following := chain.later.pop(len(chain.hashes) // HASH, None)) is not None:
                    chain.hashes += following
        request.seen = len(positions)

    def _place(self, request: _Request, key: bytes) -> tuple[_Chain, int] | None:
        """The key's chain and its place there, None where it stands alone."""
        group = group_of(key)
        chain = request.chains.get(group)
        position = request.context._offload_key_positions.get(key)
        if chain is None or position is None:
            return None
        index = chain.index(key, position, self._tokens[group])
        return None if index is None else (chain, index)

    def _stands_alone(self, request: _Request, key: bytes) -> bool:
        """Whether the key is of no chain: its group keeps none, or it ends within a chunk."""
        group = group_of(key)
        position = request.context._offload_key_positions.get(key)
        return not self._chained[group] or (position is not None and position % self._tokens[group] != 0)

    # ---- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT and MISS as the daemon said; RETRY while it is being asked, for `lookup_timeout_s` at most.

        For `remote_timeout_s` where it says that it asks others: a block is a HIT when it has come.
        """
        request = self._of(req_context)
        self._take_answers()
        if not request.reads or self._refused or len(key) != HASH + GROUP or group_of(key) not in self._groups:
            return LookupResult.MISS
        if key in request.failed:
            return LookupResult.MISS
        self._follow(request)
        place = self._place(request, key)
        known = request.alone.get(key)
        if place is not None and place[1] < place[0].asked:
            known = place[1] < place[0].matched
        if known is not None:
            return LookupResult.HIT if known else LookupResult.MISS
        if self._mover.circuit.open:
            return LookupResult.MISS
        patience = self._lookup_s + (self._remote_s if request.elsewhere else 0.0)
        if not request.since:
            request.since = time.monotonic()
        elif time.monotonic() > request.since + patience:
            self._timeouts += 1
            request.failed.add(key)
            return LookupResult.MISS
        if place is None:
            request.wanted[key] = None
        else:
            request.wanted_chains.add(group_of(key))
        self._wanting[req_context.req_id] = None
        return LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's questions, as one batch; and those that are late are misses."""
        self._take_answers()
        batch: list[Question] = []
        for identity in list(self._wanting):
            request = self._requests[identity]
            if not request.unanswered:
                del self._wanting[identity]
                batch += self._questions_of(request)
        if batch and not self._mover.ask(batch):
            for question in batch:
                self._answer(Answer(question, NOTHING))

    def _questions_of(self, request: _Request) -> list[Question]:
        self._question += 1
        request.question = self._question
        alone: dict[tuple[int, bool], list[bytes]] = {}
        for key in request.wanted.keys() - request.alone.keys():
            alone.setdefault((group_of(key), self._stands_alone(request, key)), []).append(key[:HASH])
        identity = request.context.req_id
        chains = {group: request.chains[group] for group in request.wanted_chains}
        # What was asked for before the answer came is known now.
        questions = [
            Question(self._question, identity, group, bytes(chain.hashes), True)
            for group, chain in chains.items()
            if chain.asked < len(chain.hashes) // HASH
        ] + [
            Question(self._question, identity, group, b"".join(hashes), False, remote=remote)
            for (group, remote), hashes in alone.items()
        ]
        request.wanted.clear()
        request.wanted_chains.clear()
        request.unanswered = len(questions)
        if not questions:
            request.settle()
        return questions

    def _take_answers(self) -> None:
        answers = self._mover.answers
        while answers:
            self._answer(answers.popleft())

    def _answer(self, answer: Answer) -> None:
        question = answer.question
        request = self._requests.get(question.request_id)
        if request is None or request.question != question.number:
            return
        count = len(question.hashes) // HASH
        if question.chain:
            chain = request.chains[question.group]
            chain.asked, chain.matched = count if answer.last else len(answer.found), len(answer.found)
        else:
            group = question.group.to_bytes(GROUP, "big")
            found = set(answer.found.tolist())
            for place in range(count) if answer.last else found:
                request.alone[question.hashes[place * HASH : (place + 1) * HASH] + group] = place in found
        if not answer.last:
            request.elsewhere = True
            return
        request.unanswered -= 1
        if not request.unanswered:
            request.settle()

    # ---- jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queues the job; its chunks are ours to write until it is reported."""
        keys, chunks = tuple(job_metadata.keys), tuple(int(chunk) for chunk in job_metadata.chunk_ids)
        self._loads[job_metadata.job_id] = (job_metadata.req_context.req_id, keys)
        self._mover.load(Job(job_metadata.job_id, keys, chunks=chunks))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queues the job. While more than a quarter of vLLM's memory waits to be stored, further jobs fail at once:
        what waits is pinned there.
        """
        request = self._of(job_metadata.req_context)
        keys, chunks = tuple(job_metadata.keys), [int(chunk) for chunk in job_metadata.chunk_ids]
        assert self._rows is not None
        waiting = sum(self._pending_stores.values())
        if not request.writes or self._refused or waiting + len(keys) > max(len(keys), len(self._rows) // 4):
            self._mover.counts["dropped_chunks"] += len(keys)
            self._mover.results.append(Done(job_metadata.job_id, False))
            return
        self._pending_stores[job_metadata.job_id] = len(keys)
        self._follow(request)
        ordered, runs = self._runs(request, keys, chunks)
        self._mover.counts["dropped_chunks"] += len(keys) - len(ordered)
        self._mover.store(Job(job_metadata.job_id, ordered, runs=runs))

    def _runs(
        self, request: _Request, keys: Sequence[bytes], chunks: Sequence[int]
    ) -> tuple[tuple[bytes, ...], tuple[Run, ...]]:
        """The keys in the order of the runs of consecutive blocks that they are.

        A key of a chain that has no place in it is left out: stored by itself its block would keep the chain from ever
        being stored.
        """
        alone: list[tuple[bytes, Run]] = []
        chained: dict[int, list[tuple[int, int, bytes]]] = {}
        for key, chunk in zip(keys, chunks, strict=True):
            group = group_of(key)
            place = self._place(request, key)
            if place is None:
                if self._stands_alone(request, key):
                    alone.append((key, Run(self._groups[group], key[:HASH], 0, (chunk,))))
            else:
                chained.setdefault(group, []).append((place[1], chunk, key))
        ordered: list[bytes] = []
        runs: list[Run] = []
        for group, blocks in chained.items():
            blocks.sort()
            start = 0
            for end in range(1, len(blocks) + 1):
                if end == len(blocks) or blocks[end][0] != blocks[end - 1][0] + 1:
                    run = blocks[start:end]
                    hashes = bytes(request.chains[group].hashes[: (run[-1][0] + 1) * HASH])
                    runs.append(Run(self._groups[group], hashes, run[0][0], tuple(chunk for _, chunk, _ in run)))
                    ordered += [key for _, _, key in run]
                    start = end
        return (*ordered, *(key for key, _ in alone)), (*runs, *(run for _, run in alone))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Each job once. What could not be loaded is a miss for the rest of its request."""
        results = self._mover.results
        finished: list[JobResult] = []
        while results:
            result = results.popleft()
            self._pending_stores.pop(result.job_id, None)
            load = self._loads.pop(result.job_id, None)
            if load is not None and not result.success:
                request = self._requests.get(load[0])
                if request is not None:
                    request.failed |= set(load[1]) - set(result.good)
            finished.append(
                JobResult(
                    job_id=result.job_id,
                    success=result.success,
                    successful_keys=result.good if load is not None else None,
                    transfer_time=result.seconds,
                    transfer_bytes=result.nbytes,
                )
            )
        return finished

    def drain_jobs(self) -> None:
        """No job touches vLLM's memory on return; all are reported by `get_finished_jobs`.

        vLLM calls it for a reset alone: before sleep, and around an update of the weights, of which nobody tells a
        tier. What comes after may be other weights, so it goes to a namespace that nobody else has, unless the operator
        says by `resets: keep` that weights are never updated in place.
        """
        self._mover.drain()
        if not self._private:
            return
        assert self._rows is not None
        over = self._mover
        over.close()
        self._namespace = replace(self._namespace, weights_epoch=f"private-{secrets.token_hex(16)}")
        self._mover = Mover(self._session(), self._rows, self._groups, self._load_s, self._remote_s)
        self._mover.results, self._mover.counts = over.results, over.counts
        for request in self._requests.values():
            request.forget()
        self._wanting.clear()

    def shutdown(self) -> None:
        """Raises CascadeError when a copy does not end: vLLM then keeps its memory mapped."""
        self._mover.close()
        self._rows = None

    # ---- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {_PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts, self._mover.counts = self._mover.counts, Counter()
        timeouts, self._timeouts = self._timeouts, 0
        stats = OffloadingConnectorStats()
        for name, value in {**counts, "lookup_timeouts": timeouts}.items():
            if value:
                stats.increase_counter(_PREFIX + name, value)
        return None if stats.is_empty() else stats
