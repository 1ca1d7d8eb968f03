"""The connector for vLLM: its prefixes outlive the request, the engine and the process.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config
      '{"kv_connector":"CascadeConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'

`CascadeConnector` translates vLLM's hooks (`KVConnectorBase_V1`, as of 0.32 and 0.33) into the calls of `base.py`; what
is done about them is in `paged_scheduler.py` and `paged_worker.py`. Rule: whatever cannot be stored without doubt is
refused while the engine starts, by the name of the flag to change; after that nothing raises into serving.

Options, in `kv_connector_extra_config`: `socket`, the daemon's (else KVCASCADE_SOCKET, else this user's default);
`sync_budget_bytes`, how much may be loaded within one step; `load_wait_s`, how long a load may take for blocks to come
up from disk; `step_wait_s`, how long the scheduler waits for answers in one step (0.0005); `remote_wait_s`, how long a
request waits while other nodes are asked for its prefix (2); `handoff_keep_s`, how long a prompt stays that was handed
off (60); `seed`, which this engine must have; `model_identity`, for weights that are not files; `weights_epoch`, the
version of weights that are updated under the same name; `resets`, what a reset of vLLM's caches means: "private", that
the weights may be others afterwards, or "keep", that they are never updated in place. A request may say
`kv_transfer_params: {"kvcascade": "off"}`, or "read" or "write" for one of both.

Roles: `kv_both` loads and stores, and so does `kv_producer`, since a prefill engine gains most from prefixes that are
there; `kv_consumer` loads alone. A request with `do_remote_decode` is handed off to another engine by whoever stores
(`handoff.py`); the engine that gets the hand-off loads it in any role.
"""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1 import base as hooks
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from kvcascade.config.errors import CascadeError, ConfigError, DaemonUnavailable, LayoutMismatch
from kvcascade.daemon.attachment import Session
from kvcascade.daemon.protocol import ROLE_RANK, ROLE_SCHEDULER, Tier
from kvcascade.tiers.block import (
    BlockHash,
    committers,
)

from .base import (
    Aside,
    BlockIds,
    FailedLoad,
    MatchState,
    Prefill,
    Report,
    Request,
    Step,
    StepPlan,
    Transfer,
    lone_prefill,
)
from .base import final_tokens as count_final_tokens
from .handoff import REFUSED, Wishes
from .paged_asking import Limits
from .paged_scheduler import PagedScheduler
from .paged_worker import PagedWorker
from .safe import SafeScheduler, SafeWorker
from .vllm_metrics import CascadeMetrics, CascadeStats
from .vllm_model import PRODUCER, Offered, namespace_of, own_probe, refuse_unsupported, shape_of

log = logging.getLogger(__name__)

CONNECTOR = "CascadeConnector"
OPTIONS = (
    "socket",
    "sync_budget_bytes",
    "load_wait_s",
    "step_wait_s",
    "handoff_keep_s",
    "remote_wait_s",
    "seed",
    "model_identity",
    "weights_epoch",
    "resets",
    "stage",
)
RESETS = ("private", "keep")
MAX_EVENTS = 10_000

_NULL_BLOCK = 0


# ---- what travels between the two sides


@dataclass
class CascadeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to every worker, for one step."""

    plan: StepPlan
    preempted: frozenset[str] = frozenset()


@dataclass
class CascadeWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, what vLLM's own fields do not say; of several ranks: joined."""

    failed: tuple[FailedLoad, ...] = ()
    loaded: tuple[int, ...] = ()
    stored: tuple[tuple[int, tuple[int, ...]], ...] = ()
    broken: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CascadeWorkerMetadata":
        return CascadeWorkerMetadata(
            self.failed + other.failed,
            self.loaded + other.loaded,
            self.stored + other.stored,
            self.broken or other.broken,
        )


class _Hashes(Sequence[BlockHash]):
    """The hashes of one KV group's blocks, as they grow: the last of the fine hashes within each block."""

    def __init__(self, request: Any, ratio: int) -> None:
        self._request, self._ratio = request, ratio

    def __len__(self) -> int:
        return len(self._request.block_hashes) // self._ratio

    def __getitem__(self, key: Any) -> Any:
        fine = self._request.block_hashes
        if self._ratio == 1:
            return fine[key]
        if isinstance(key, slice):
            last = range(self._ratio - 1, len(fine), self._ratio)
            return [fine[place] for place in last[key]]
        return fine[range(self._ratio - 1, len(fine), self._ratio)[key]]


class _Tables(Mapping[str, BlockIds]):
    """Block tables of the requests of a step, copied only when they are looked at."""

    def __init__(self, state: Any, scheduled: Mapping[str, int]) -> None:
        self._state, self._scheduled = state, scheduled

    def __getitem__(self, request_id: str) -> BlockIds:
        found = self._state.get_block_ids(request_id)
        if found is None:
            raise KeyError(request_id)
        return found  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        return iter(self._scheduled)

    def __len__(self) -> int:
        return len(self._scheduled)


# ---- the connector


class CascadeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. vLLM makes one with the scheduler and one with each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered = Offered.here()
        options = dict(self._kv_transfer_config.kv_connector_extra_config or {})
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(f"kv_connector_extra_config: {name!r:.60} is not one of {', '.join(OPTIONS)}")
        refuse_unsupported(vllm_config, options, self._offered)
        self._options = options
        self._shape = shape_of(vllm_config, kv_cache_config)
        self._namespace = namespace_of(vllm_config, self._shape, options)
        parallel = vllm_config.parallel_config
        self._ranks, self._rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
        self._limits = _limits(options)
        self._private = _resets(options) == "private"
        self._steps_ahead = getattr(vllm_config, "max_concurrent_batches", 1)
        if not self._offered.evicts or self._steps_ahead > 1:
            # A load within a step that fails is told after it. What vLLM has put into its own prefix cache meanwhile
            # must be thrown out (`_evict`), which is complete only where no further step has been planned by then.
            self._limits = dataclasses.replace(self._limits, sync_bytes=0)
        # Of the engine's thread on either side.
        self._requests: dict[str, Any] = {}
        self._wishes: dict[str, Wishes] = {}
        self._described: dict[str, Request] = {}
        self._background: dict[str, bool] = {}
        self._step_tables: dict[str, BlockIds] = {}  # of requests that are loaded within the step
        # Below a MultiConnector, of what a sibling loads within a step: it may turn out to be bad.
        self._known: dict[str, int] = {}  # of requests about to begin, the tokens that the engine has or we load
        self._unproven: dict[str, int] = {}  # by request, the step from which on its blocks are proven
        self._steps = self._all_proven = 0
        self._report = Report()
        self._events: list[Any] = []
        self._announces: dict[tuple[int, int], _Announced] = {}
        self._asides: dict[int, dict[int, _Announced]] = {}  # of copies aside, which have no lease yet
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._scheduler: SafeScheduler | None = None
        self._worker: SafeWorker | None = None
        self._paged: PagedScheduler | PagedWorker
        if role == KVConnectorRole.SCHEDULER:
            paged = PagedScheduler(
                self._namespace,
                self._scheduler_session,
                ranks=self._ranks,
                windows=self._shape.windows,
                volatile_groups=self._shape.volatile,
                null_block=_NULL_BLOCK,
                lookahead_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                limits=self._limits,
            )
            self._paged = paged
            self._scheduler = SafeScheduler(
                paged,
                engine_keeps_loading=True,
                block_tokens=[group.block_tokens for group in self._shape.groups],
            )
            self._attach(paged)
        else:
            worker = PagedWorker(
                self._namespace,
                self._rank_session,
                ranks=self._ranks,
                rank=self._rank,
                axes="BHNC" if any(group.kind == "attention" for group in self._shape.groups) else None,
                stage=bool(options.get("stage", False)),
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                limits=self._limits,
            )
            self._paged = worker
            self._worker = SafeWorker(worker)

    def _attach(self, paged: PagedScheduler) -> None:
        try:
            warnings = paged.attach()
        except DaemonUnavailable as error:
            log.warning("no daemon, so every prompt is computed; attaching later by itself reason=%s", error)
        except CascadeError:
            paged.close()
            raise
        else:
            for warning in warnings:
                log.warning("the daemon warns: %s", warning)

    def _scheduler_session(self, epoch: str) -> Session:
        return self._session(epoch, ROLE_SCHEDULER)

    def _rank_session(self, epoch: str) -> Session:
        return self._session(epoch, ROLE_RANK)

    def _session(self, epoch: str, role: str) -> Session:
        namespace = dataclasses.replace(self._namespace, weights_epoch=epoch)
        return Session(
            namespace=namespace.to_map(),
            probe=[BlockHash(one) for one in own_probe(namespace.none_hash)],  # type: ignore[arg-type]
            engine=(PRODUCER, self._offered.version),
            role=role,
            ranks=self._ranks,
            rank=self._rank if role == ROLE_RANK else 0,
            socket_path=self._options.get("socket"),
            timeout=self._limits.timeout,
        )

    # ---- what vLLM asks of the class

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may forget: a preempted request's output need not wait for its KV to be stored."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No copy touches KV between `unregister_kv_caches` and `restore_kv_caches`."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing is done layer by layer."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CascadeStats(data=data) if data is not None else CascadeStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return CascadeMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- the scheduler's side

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._requests[request.request_id] = request
        self._scheduler.arrived(self._describe(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        self._known[request.request_id] = num_computed_tokens
        match = self._scheduler.match(self._describe(request), num_computed_tokens)
        if match.state is MatchState.LATER:
            return None, False
        self._background[request.request_id] = match.background
        return match.tokens, bool(match.tokens) and match.background

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        background = self._background.pop(request.request_id, True)
        if num_external_tokens:
            self._known[request.request_id] = self._known.get(request.request_id, 0) + num_external_tokens
        table = blocks.get_block_ids() if num_external_tokens else ()
        if num_external_tokens and not background:
            self._step_tables[request.request_id] = table
        self._scheduler.allocated(self._describe(request), table, num_external_tokens, background=background)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        names = self._offered.sources
        if names is None or not isinstance(self._paged, PagedScheduler):
            return {}
        by_tier: dict[int, Any] = {
            Tier.HBM: names.DEVICE, Tier.DRAM: names.HOST, Tier.DISK: names.DISK, Tier.PEER: names.P2P
        }  # fmt: skip
        found: dict[Any, int] = {}
        try:
            for tier, tokens in self._paged.sources(request.request_id, num_external_tokens).items():
                source = by_tier.get(tier, names.EXTERNAL_UNSPECIFIED)
                found[source] = found.get(source, 0) + tokens
        except Exception:
            log.exception("hits are not told apart by source")
            found = {}
        missing = num_external_tokens - sum(found.values())
        if missing:
            found = {names.EXTERNAL_UNSPECIFIED: num_external_tokens}
        return found

    def build_connector_meta(self, scheduler_output: Any) -> CascadeMetadata:
        assert self._scheduler is not None
        preempted = frozenset(scheduler_output.preempted_req_ids or ())
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._doubt_siblings(scheduler_output)
        computed = {name: self._requests[name].num_computed_tokens for name in scheduled if name in self._requests}
        final = {
            name: count_final_tokens(before, scheduled[name], len(drafts.get(name, ())))
            for name, before in computed.items()
            if self._unproven.get(name, 0) <= self._steps
        }
        tables = _Tables(scheduler_output.kv_connector_block_state, scheduled)
        plan = self._scheduler.plan_step(Step(final, tables, preempted, computed, self._lone_prefill(scheduler_output)))
        if self._announcing:
            self._note_saves(plan)
        return CascadeMetadata(plan, preempted)

    def _doubt_siblings(self, scheduler_output: Any) -> None:
        """Note which requests may rest on what another child of a MultiConnector loads within this step.

        Whether that failed is told after the step, and after those that are planned before its end. Until then nothing
        is stored of requests that begin: they may share the blocks by the engine's own prefix cache.
        """
        self._steps += 1
        begun = {name: self._known.pop(name) for name in scheduler_output.num_scheduled_tokens if name in self._known}
        if scheduler_output.has_sync_kv_loads and any(
            name in self._requests and self._requests[name].num_computed_tokens > known for name, known in begun.items()
        ):
            self._all_proven = self._steps + self._steps_ahead
        if self._all_proven > self._steps:
            self._unproven.update(dict.fromkeys(begun, self._all_proven))

    def _lone_prefill(self, scheduler_output: Any) -> Prefill | None:
        scheduled = scheduler_output.num_scheduled_tokens
        request = self._requests.get(lone_prefill(scheduled, scheduler_output.total_num_scheduled_tokens) or "")
        if request is None:
            return None
        return Prefill(scheduled[request.request_id], request.num_computed_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        told = connector_output.kv_connector_worker_meta
        if not isinstance(told, CascadeWorkerMetadata):
            told = CascadeWorkerMetadata()
        received = frozenset(connector_output.finished_recving or ())
        if self._announcing:
            self._note_stored(told)
        self._scheduler.completed(Report(received=received, failed=told.failed, loaded=told.loaded, broken=told.broken))
        bad = {block for load in told.failed if not load.background for block in load.blocks}
        bad |= connector_output.invalid_block_ids or set()  # a sibling's too
        if bad:
            self._evict(bad)
        self._step_tables.clear()

    def _evict(self, bad: set[int]) -> None:
        """Blocks that were loaded within the step and are bad, and all that was computed on them, are found no more.

        vLLM has cached them before the load. By its recompute policy it leaves them there, since the request computes
        them anew; but if that request is aborted or preempted first, the next one with the same prefix would hit them.
        """
        try:
            manager = self._kv_cache_manager
            if manager is None:
                return
            tables = [*self._step_tables.values(), *(manager.get_block_ids(name) for name in self._requests)]
            spoilt = set(bad)
            for (ids,) in tables:
                first = next((place for place, block in enumerate(ids) if block in bad), len(ids))
                spoilt.update(ids[first:])
            manager.evict_blocks(spoilt)
        except Exception:
            log.exception("bad blocks may stay in the engine's prefix cache")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never kept: saves do not need them, and vLLM itself keeps those of loads."""
        assert self._scheduler is not None
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._described.pop(request_id, None)
        self._background.pop(request_id, None)
        self._known.pop(request_id, None)
        self._unproven.pop(request_id, None)
        parameters = self._parameters_for(request, self._wishes.pop(request_id, None))
        self._scheduler.finished(request_id, (), request.num_computed_tokens)
        return False, parameters

    def has_pending_push_work(self) -> bool:
        """Copies aside wait for their slots: an engine with nothing else to do goes on stepping till these are told."""
        assert self._scheduler is not None and isinstance(self._paged, PagedScheduler)
        return self._scheduler.failure is None and self._paged.saves_pending

    def reset_cache(self) -> bool | None:
        """vLLM calls it when it goes to sleep or pauses too, the weights being the same; of that nobody tells it."""
        assert self._scheduler is not None
        if not self._private:
            return True
        log.warning("reset: blocks stored so far are not used any more, and new ones are shared with nobody")
        return self._scheduler.reset()

    def _describe(self, request: Any) -> Request:
        """What `base` knows a request by. A preempted one must have KV for what was drawn before as well."""
        known = self._described.get(request.request_id)
        if known is None or known.tokens != request.num_tokens:
            wishes = self._wishes_of(request)
            transfer = self._kv_transfer_config
            hashes = tuple(_Hashes(request, ratio) for ratio in self._shape.hash_ratios)
            # An adapter that replaces another under its name has that one's hashes too.
            named = not getattr(getattr(request, "lora_request", None), "load_inplace", False)
            known = Request(
                request.request_id,
                request.num_tokens,
                hashes,
                request.all_token_ids,
                request.num_prompt_tokens,
                reads=named and wishes.reads and not request.skip_reading_prefix_cache,
                # A streaming session replaces tokens that were computed, so that their blocks are not final.
                writes=(
                    named and wishes.writes and transfer.is_kv_producer and not getattr(request, "resumable", False)
                ),
                ticket=wishes.handoff.ticket if wishes.handoff is not None else b"",
                hands_off=named and wishes.hands_off and transfer.is_kv_producer,
            )
            self._described[request.request_id] = known
        return known

    def _wishes_of(self, request: Any) -> Wishes:
        """What the request's parameters ask for; what is refused of them is told once, and the prompt is computed."""
        known = self._wishes.get(request.request_id)
        if known is None:
            assert isinstance(self._paged, PagedScheduler)
            known = Wishes.of(request.kv_transfer_params)
            if known.handoff is not None:
                hashes = _Hashes(request, self._shape.hash_ratios[0])
                try:
                    known.handoff.prove(self._paged.namespace, hashes, self._shape.groups[0].block_tokens)
                except CascadeError as error:
                    known = dataclasses.replace(known, handoff=None, refused=str(error))
            if known.refused:
                log.warning("refused, and done without request=%s reason=%s", request.request_id, known.refused)
                self._paged.count("handoffs_refused")
            self._wishes[request.request_id] = known
        return known

    def _parameters_for(self, request: Any, wishes: Wishes | None) -> dict[str, Any] | None:
        """What a request that ended gives its client: a hand-off to take to another engine, or what was refused.

        No name that other connectors use is among them: below a MultiConnector vLLM raises where two of its children
        give the same one.
        """
        try:
            if wishes is None:
                return None
            if wishes.refused:
                return {REFUSED: wishes.refused}
            ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
            if wishes.hands_off and ended and isinstance(self._paged, PagedScheduler):
                given = self._paged.handed_off(request.request_id)
                return given.to_parameters() if given is not None else None
        except Exception:
            log.exception("nothing is handed off request=%s", request.request_id)
        return None

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._kv_caches = kv_caches
        try:
            self._worker.register(self._tensors())
        except KeyError as error:
            raise LayoutMismatch(f"layer {error} has no KV tensor") from error
        except LayoutMismatch as error:
            layout = getattr(self._vllm_config.cache_config, "kv_cache_layout", None)
            hint = "LBHNC and the other layouts of vllm's KVCacheLayout are known: set VLLM_KV_CACHE_LAYOUT=LBHNC"
            raise LayoutMismatch(f"kv_cache_layout {layout}: {error}; {hint}") from error

    def _tensors(self) -> list[list[torch.Tensor]]:
        return [[self._kv_caches[name] for name in names] for names in self._shape.layers]

    def unregister_kv_caches(self) -> None:
        if self._worker is not None and isinstance(self._paged, PagedWorker):
            self._worker.guarded(self._paged.unregister)

    def restore_kv_caches(self) -> None:
        if self._worker is not None and isinstance(self._paged, PagedWorker) and self._kv_caches:
            self._worker.guarded(self._paged.register, self._tensors())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert self._worker is not None
        if isinstance(self._paged, PagedWorker):
            self._worker.guarded(self._paged.follow, kv_connector_metadata.plan)
            self._worker.guarded(self._paged.begin, kv_connector_metadata.plan)
        if kv_connector_metadata.preempted:
            self._worker.preempted(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.start_load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads within the step are complete, or queued before the layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, all layers at once, after the forward."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.save(self._get_connector_metadata().plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        assert self._worker is not None
        self._report = self._worker.finished()
        # With several KV groups a block's id does not say whose it is: failures are told by request.
        failed = self._report.failed_requests & self._report.received if len(self._shape.groups) > 1 else frozenset()
        return hooks.KVConnectorTransferResults(
            finished_sending=set(self._report.sent),
            finished_recving=set(self._report.received),
            failed_recving=set(failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._report.failed_blocks) if len(self._shape.groups) == 1 else set()

    def build_connector_worker_meta(self) -> CascadeWorkerMetadata | None:
        report = self._report
        if not (report.failed or report.loaded or report.stored or report.broken):
            return None
        return CascadeWorkerMetadata(report.failed, report.loaded, report.stored, report.broken)

    # ---- both

    def get_kv_connector_stats(self) -> "CascadeStats | None":
        try:
            counted = self._paged.take_counters()
        except Exception:
            log.exception("metrics are lost")
            return None
        return CascadeStats(data=dict(counted)) if counted else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # ---- events

    @property
    def _announcing(self) -> bool:
        events = getattr(self._vllm_config, "kv_events_config", None)
        return bool(events is not None and events.enable_kv_cache_events)

    def take_events(self) -> Iterable[Any]:
        events, self._events = self._events, []
        return events

    def _note_saves(self, plan: StepPlan) -> None:
        """Remember what the plan's saves are of, to announce them once every rank has stored its part."""
        try:
            for number, placed in plan.placed:
                made = self._asides.pop(number, {})
                self._announces |= {(placed.lease, index): made[index] for index in placed.indices if index in made}
            for aside in plan.asides:
                self._asides[aside.number] = dict(self._announced(aside))
            for save in plan.saves:
                self._announces |= {(save.lease, index): one for index, one in self._announced(save)}
            _forget_oldest(self._announces)
            _forget_oldest(self._asides)
        except Exception:
            log.exception("events are lost")

    def _announced(self, save: Transfer | Aside) -> "Iterator[tuple[int, _Announced]]":
        """For each of its blocks, the place in the chain and what is to be announced."""
        request = self._requests.get(save.request_id)
        if request is None:
            return
        group = self._shape.groups[save.group]
        hashes = self._described[save.request_id].hashes[save.group]
        lora = getattr(request, "lora_request", None)
        for index in save.indices:
            begin, end = index * group.block_tokens, (index + 1) * group.block_tokens
            extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, 0)
            event = BlockStored(
                block_hashes=[kv_cache_utils.maybe_convert_block_hash(hashes[index])],
                parent_block_hash=kv_cache_utils.maybe_convert_block_hash(hashes[index - 1]) if index else None,
                token_ids=list(request.all_token_ids[begin:end]),
                block_size=group.block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium="CPU",
                lora_name=lora.lora_name if lora else None,
                extra_keys=kv_cache_utils.to_event_extra_keys([extra_keys]),
                group_idx=save.group,
            )
            yield index, _Announced(event, len(committers(group.kv_heads, self._ranks, index, group.kind)))

    def _note_stored(self, told: CascadeWorkerMetadata) -> None:
        try:
            for lease, indices in told.stored:
                for index in indices:
                    announced = self._announces.get((lease, index))
                    if announced is None:
                        continue
                    announced.writers_left -= 1
                    if not announced.writers_left:
                        del self._announces[lease, index]
                        if len(self._events) < MAX_EVENTS:
                            self._events.append(announced.event)
        except Exception:
            log.exception("events are lost")


def _forget_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_EVENTS:
        del kept[next(iter(kept))]


@dataclass(slots=True)
class _Announced:
    """A block that is being stored, and how many ranks have still to say that their part is."""

    event: Any
    writers_left: int


# ---- settings, and how vLLM finds us


def _limits(options: Mapping[str, Any]) -> Limits:
    limits = Limits()
    for option, name in (
        ("sync_budget_bytes", "sync_bytes"),
        ("load_wait_s", "load_wait"),
        ("step_wait_s", "step_wait"),
        ("handoff_keep_s", "handoff_keep"),
        ("remote_wait_s", "remote_patience"),
    ):
        value = options.get(option)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"kv_connector_extra_config: {option} must be a number of at least 0, got {value!r:.40}")
        limits = dataclasses.replace(limits, **{name: type(getattr(limits, name))(value)})
    return limits


def _resets(options: Mapping[str, Any]) -> str:
    value = options.get("resets", RESETS[0])
    if value not in RESETS:
        raise ConfigError(f"kv_connector_extra_config: resets must be one of {', '.join(RESETS)}, got {value!r:.40}")
    return str(value)


def register() -> None:
    """vLLM's plug-in entry point: the connector is known by its name alone, without its module's path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in getattr(KVConnectorFactory, "_registry", {}):
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)


# However it was found: below a MultiConnector vLLM looks its children up by name wherever it shows what they count, and
# raises into serving where it does not know one.
register()
