"""Nothing raises into serving: what goes around both sides of a connector, so that an engine never meets its failures.

Rule: after the first exception nothing more is asked of that side, and what the engine was promised and waits for is
told to have failed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .base import (
    NO_MATCH,
    BlockIds,
    FailedLoad,
    Match,
    Report,
    Request,
    SchedulerConnector,
    Step,
    StepPlan,
    WorkerConnector,
)

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


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
            name = getattr(method, "__qualname__", repr(method))
            log.exception("connector failed in %s; the engine goes on without it", name)
            self.fail(error)
            raise _Broken from error

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.close()

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
    ends while it is loaded until it is reported as received. `block_tokens` of each KV group: of such a load those
    blocks fail that were to be loaded, and not what the engine had in its own cache, which other requests share; the
    whole tables where it is not given.

    A worker side that is broken ends this one too: what it were to load would fail, each request's anew, and what it
    were to save would keep its slots until their deadline.
    """

    def __init__(
        self, inner: SchedulerConnector, *, engine_keeps_loading: bool = False, block_tokens: Sequence[int] = ()
    ) -> None:
        # On the engine's scheduling thread alone.
        self._inner = inner
        self._guard = _Guard(inner.close)
        self._engine_keeps_loading = engine_keeps_loading
        self._block_tokens = tuple(block_tokens)
        self._computed: dict[str, int] = {}  # by request, what the engine had when it was matched last
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
        self._computed[request.request_id] = computed_tokens
        try:
            return self._guard.call(self._inner.match, request, computed_tokens)
        except _Broken:
            return NO_MATCH

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        if tokens:
            # Which of these would have been loaded only the inner side knows.
            computed = self._computed.get(request.request_id, 0)
            loaded = [slice(computed // size, -(-(computed + tokens) // size)) for size in self._block_tokens]
            self._promised[request.request_id] = tuple(
                FailedLoad(request.request_id, group, tuple(ids[which]), background)
                for group, (ids, which) in enumerate(zip(blocks, loaded or (slice(None),) * len(blocks), strict=True))
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
        self._computed.pop(request_id, None)
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
            return
        if report.broken:
            log.error("a rank's connector has failed; the engine goes on without any")
            self._guard.fail(RuntimeError("a rank's connector has failed"))

    def close(self) -> None:
        self._guard.close()


class SafeWorker(WorkerConnector):
    """A worker side that never raises but from `register`.

    After the inner one's first exception it is closed, so that nothing of it touches the engine's memory any more;
    what the engine waits for is then reported: loads that had not been reported as failed, saves as ended. From there
    on loads fail at once, nothing is saved, and each report says `broken`. `failure` is the exception.
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

    def guarded(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call what this engine's worker side has beyond `WorkerConnector`, as its other methods are called."""
        self._call(method, *args, **kwargs)

    def wait_load(self, layer: int | None = None) -> None:
        self._call(self._inner.wait_load, layer)

    def save(self, plan: StepPlan) -> None:
        self._call(self._inner.save, plan)

    def finished(self) -> Report:
        try:
            report = self._guard.call(self._inner.finished)
        except _Broken:
            failed = [*self._step_loads, *(load for loads in self._loads.values() for load in loads)]
            report = Report(frozenset(self._kept), frozenset(self._loads), tuple(failed), broken=True)
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
