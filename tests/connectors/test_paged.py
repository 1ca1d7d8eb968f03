"""Both sides of a paged engine's connector over a real daemon, without an engine: every layout, rank and KV group."""

import functools
import itertools
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from engines.scripted import eventually

from kvcascade.config.errors import DaemonUnavailable, LayoutMismatch, Refused
from kvcascade.connectors import paged_worker
from kvcascade.connectors.base import FailedLoad, MatchState, Report, Request, Step, StepPlan
from kvcascade.connectors.layout import VLLM_ORDERS
from kvcascade.connectors.paged_asking import Limits
from kvcascade.connectors.paged_loads import LOAD_THREADS
from kvcascade.connectors.paged_scheduler import PagedScheduler
from kvcascade.connectors.paged_worker import PagedWorker
from kvcascade.connectors.safe import SafeScheduler
from kvcascade.daemon.attachment import Attached, Load, Lookup, MappedPool, Reservation, Session
from kvcascade.tiers.block import KVGroup, block_hashes, head_range, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace

GROUP = KVGroup(block_tokens=16, layers=3, kv_heads=4, head_dim=8)
LATENT = KVGroup(block_tokens=16, layers=2, kv_heads=1, head_dim=24, kind="mla")
BLOCKS = 12
COUNT = 5  # blocks of the request
SEED = "0"
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
PATIENT = Limits(step_wait=10.0, patience=10.0, sync_bytes=0)

Kv = list[torch.Tensor]


def namespace(*groups: KVGroup, dtype: str = "bfloat16") -> Namespace:
    return Namespace(
        model=f"of {len(groups)} groups", weights_epoch="", kv_dtype=dtype, groups=groups,
        kv_scales="ab" * 16 if dtype.startswith("float8") else "", rope="", max_model_len=0, quantisation="",
        producer="paged", hash_algo="sha256_cbor", key_scheme="tagged-0.31", none_hash=none_hash(SEED),
    )  # fmt: skip


def tensors(group: KVGroup, order: str, *, dtype: str, ranks: int, rank: int, device: str, padding: int = 0) -> Kv:
    """A rank's KV, as vLLM registers it: [B, H, N, C] a layer, in memory as `order` says."""
    heads = head_range(group.kv_heads, ranks, rank, group.kind)[1]
    sizes = {"L": group.layers, "B": BLOCKS, "H": heads, "N": group.block_tokens, "C": group.planes * group.head_dim}
    strides, step = {}, 1
    for name in reversed(order):
        strides[name] = step
        step *= sizes[name]
        if name == order[1] or (name == "B" and order[0] == "B"):
            step += padding
    storage = torch.zeros(step + padding, dtype=getattr(torch, dtype), device=device)
    shape, stride = [sizes[name] for name in "BHNC"], [strides[name] for name in "BHNC"]
    return [storage.as_strided(shape, stride, layer * strides["L"]) for layer in range(group.layers)]


def whole(group: KVGroup, dtype: str) -> torch.Tensor:
    """The whole model's KV of all blocks, as bytes [B, H, L, N, C]: what no two places have in common."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    shape = (BLOCKS, group.kv_heads, group.layers, group.block_tokens, group.planes * group.head_dim * size)
    return torch.randint(0, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def part(kv: torch.Tensor, group: KVGroup, ranks: int, rank: int) -> torch.Tensor:
    first, heads = head_range(group.kv_heads, ranks, rank, group.kind)
    return kv[:, first : first + heads]


class Node:
    """One engine's scheduler and ranks, in this process."""

    def __init__(
        self,
        daemon: Any,
        groups: Sequence[KVGroup],
        orders: Sequence[str] = ("LBHNC",),
        *,
        dtype: str = "bfloat16",
        ranks: int = 1,
        device: str = "cpu",
        stage: bool = False,
        step_tokens: int = 0,
        padding: int = 0,
        limits: Limits = PATIENT,
        session: type[Session] = Session,
    ) -> None:
        self.space = namespace(*groups, dtype=dtype)
        self.groups, self.ranks, self._daemon, self._kind = groups, ranks, daemon, session
        self.scheduler = PagedScheduler(
            self.space, lambda epoch: self._session("scheduler", 0), ranks=ranks, null_block=0, limits=limits
        )
        self.scheduler.attach()
        self.kv: list[list[Kv]] = []  # a rank, a group
        self.workers = []
        for rank in range(ranks):
            worker = PagedWorker(
                self.space,
                lambda epoch, rank=rank: self._session("rank", rank),
                ranks=ranks,
                rank=rank,
                axes="BHNC",
                stage=stage,
                step_tokens=step_tokens,
                limits=limits,
            )
            mine = [
                tensors(group, order, dtype=dtype, ranks=ranks, rank=rank, device=device, padding=padding)
                for group, order in zip(groups, orders, strict=True)
            ]
            worker.register(mine)
            self.kv.append(mine)
            self.workers.append(worker)
        self.stored = 0

    def _session(self, role: str, rank: int) -> Session:
        return self._kind(
            namespace=self.space.to_map(),
            probe=probe_hashes(algo="sha256_cbor", none_hash=self.space.none_hash, key_scheme="tagged-0.31"),
            engine=("paged", "1"), role=role, ranks=self.ranks, rank=rank, socket_path=self._daemon.socket,
        )  # fmt: skip

    def fill(self, group: int, kv: torch.Tensor) -> None:
        for rank in range(self.ranks):
            mine = part(kv, self.groups[group], self.ranks, rank)
            for layer, tensor in enumerate(self.kv[rank][group]):
                tensor.view(torch.uint8).copy_(mine[:, :, layer])

    def content(self, group: int, rank: int) -> torch.Tensor:
        return torch.stack([tensor.view(torch.uint8).cpu() for tensor in self.kv[rank][group]], dim=2)

    def request(self, name: str, tokens: list[int], **more: Any) -> Request:
        hashes = tuple(block_hashes(tokens, group.block_tokens, seed=SEED) for group in self.groups)
        return Request(name, len(tokens), hashes, tokens, len(tokens), **more)

    def step(
        self, final: dict[str, int], blocks: dict[str, Any], computed_tokens: Mapping[str, int] = MappingProxyType({})
    ) -> Report:
        """One step on every rank; what all of them report."""
        plan = self.scheduler.plan_step(Step(final, blocks, computed_tokens=computed_tokens))
        reports = []
        for worker in self.workers:
            worker.start_load(plan)
            worker.save(plan)
            reports.append(worker.finished())
        stored = [indices for report in reports for _, indices in report.stored]
        self.stored += sum(map(len, stored))
        report = Report(
            received=frozenset.intersection(*(report.received for report in reports)),
            failed=tuple(load for report in reports for load in report.failed),
            loaded=tuple(lease for report in reports for lease in report.loaded),
        )
        self.scheduler.completed(report)
        return report

    def store(self, name: str, tokens: list[int], table: Any) -> None:
        self.scheduler.arrived(self.request(name, tokens))
        self.scheduler.match(self.request(name, tokens), 0)
        self.scheduler.allocated(self.request(name, tokens), table, 0, background=True)
        self.step({name: len(tokens)}, {name: table})
        self.scheduler.finished(name, (), len(tokens))

    def load(self, name: str, tokens: list[int], table: Any) -> tuple[int, Report]:
        request = self.request(name, tokens)
        self.scheduler.arrived(request)
        match = self.scheduler.match(request, 0)
        assert match.state is not MatchState.LATER
        if not match.tokens:
            return 0, Report()
        self.scheduler.allocated(request, table, match.tokens, background=match.background)
        deadline, received, failed = time.monotonic() + 20, set(), []
        waiting = {number: {name} for number in range(self.ranks)}
        plan = self.scheduler.plan_step(Step({}, {}))
        for worker in self.workers:
            worker.start_load(plan)
        while any(waiting.values()):
            assert time.monotonic() < deadline
            for number, worker in enumerate(self.workers):
                report = worker.finished()
                failed += report.failed
                waiting[number] -= report.received | ({name} if report.loaded else set())
        received.add(name)
        told = Report(received=frozenset(received), failed=tuple(failed))
        self.scheduler.completed(told)
        return match.tokens, told

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


@pytest.fixture
def start_node(daemon: Any) -> Iterator[Any]:
    nodes: list[Node] = []

    def start(*arguments: Any, **named: Any) -> Node:
        if str(named.get("device", "cpu")).startswith("cuda") and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        nodes.append(Node(daemon, *arguments, **named))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def dram_blocks(daemon: Any) -> int:
    return int(next(tier for tier in daemon.status()["tiers"] if tier["name"] == "dram")["blocks"])


FROM, TO = (7, 2, 9, 4, 11), (3, 8, 1, 10, 5)
TOKENS = list(range(100, 100 + COUNT * 16 + 3))


def travels(start_node: Any, daemon: Any, group: KVGroup, source: dict[str, Any], target: dict[str, Any]) -> None:
    """What one engine has stored, another loads byte for byte into the blocks named, and nothing else is touched."""
    dtype = source.get("dtype", "bfloat16")
    kv = whole(group, dtype)
    first = start_node([group], **source)
    first.fill(0, kv)
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    second = start_node([group], **target)
    tokens, report = second.load("b", TOKENS, (TO,))
    assert (tokens, report.failed) == (COUNT * 16, ())
    for rank in range(second.ranks):
        got, wanted = second.content(0, rank), part(kv, group, second.ranks, rank)
        assert torch.equal(got[list(TO)], wanted[list(FROM)])
        others = [block for block in range(BLOCKS) if block not in TO]
        assert not got[others].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_every_layout_of_vllm_stores_what_another_loads(start_node, daemon, order, device):
    travels(start_node, daemon, GROUP, {"orders": [order], "device": device}, {"device": device})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_every_layout_of_vllm_loads_what_another_stored(start_node, daemon, order, device):
    travels(start_node, daemon, GROUP, {"device": device}, {"orders": [order], "device": device})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"orders": ["BLHNC"], "padding": 64}, {"orders": ["LBNHC"], "padding": 32}),  # packed, strides beyond a page
        ({"ranks": 1}, {"ranks": 2}),
        ({"ranks": 4, "orders": ["BHLNC"]}, {"ranks": 2}),
        ({"ranks": 2, "orders": ["LBNHC"]}, {"ranks": 8}),  # two ranks a head: each block is written by one of them
        ({"ranks": 8}, {"ranks": 1}),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "float8_e4m3fn", "orders": ["LHBNC"]}),
        ({"dtype": "float32", "stage": True}, {"dtype": "float32"}),
        ({"stage": True, "ranks": 2}, {"stage": True}),
    ],
)
def test_ranks_dtypes_and_packed_pages_share(start_node, daemon, device, source, target):
    travels(start_node, daemon, GROUP, source | {"device": device}, target | {"device": device})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 2), (4, 1)])
def test_a_latent_is_written_by_one_rank_and_read_by_all(start_node, daemon, device, source, target):
    travels(start_node, daemon, LATENT, {"ranks": source, "device": device}, {"ranks": target, "device": device})


def test_a_layout_that_is_not_known_is_refused(start_node, daemon):
    # Fault J1.
    node = start_node([GROUP])
    strange = [tensor.transpose(1, 2).contiguous() for tensor in node.kv[0][0]]
    with pytest.raises(LayoutMismatch, match="BHNC"):
        node.workers[0].register([strange])


def test_what_all_groups_can_serve_is_loaded_and_a_window_needs_no_older_blocks(start_node, daemon):
    # Fault J3: two groups of unlike blocks, the second with a window of 32 tokens: its older blocks are null.
    coarse = KVGroup(block_tokens=32, layers=2, kv_heads=2, head_dim=8)
    tokens = list(range(500, 500 + 6 * 16 + 3))
    node = start_node([GROUP, coarse], ["LBHNC", "LBHNC"])
    contents = [whole(GROUP, "bfloat16"), whole(coarse, "bfloat16")]
    for number, kv in enumerate(contents):
        node.fill(number, kv)
    node.store("a", tokens, ((1, 2, 3, 4, 5, 6), (7, 8, 9)))
    eventually(lambda: dram_blocks(daemon) == 6 + 3)
    other = start_node([GROUP, coarse], ["BLHNC", "LBNHC"])
    # Of a prompt that shares 80 tokens, five blocks of 16 and two of 32 are there: 64 tokens are what both can serve.
    got, report = other.load("b", [*tokens[:80], *range(40)], ((11, 10, 9, 8), (0, 5)))
    assert (got, report.failed) == (64, ())
    assert torch.equal(other.content(0, 0)[[11, 10, 9, 8]], contents[0][[1, 2, 3, 4]])
    assert torch.equal(other.content(1, 0)[[5]], contents[1][[8]])
    assert not other.content(1, 0)[0].any()


def test_a_drafters_last_block_is_not_stored_while_it_may_change(start_node, daemon):
    node = start_node([GROUP])
    node.scheduler.close()
    node.scheduler = PagedScheduler(
        node.space, lambda epoch: node._session("scheduler", 0), volatile_groups=frozenset({0}), limits=PATIENT
    )
    node.scheduler.attach()
    node.fill(0, whole(GROUP, "bfloat16"))
    tokens = list(range(16 * 4))
    request = node.request("a", tokens)
    decoding = Request("a", 64, request.hashes, tokens, prompt_tokens=20)
    node.scheduler.arrived(decoding)
    node.scheduler.match(decoding, 0)
    node.step({"a": 20}, {"a": ((1, 2),)})
    node.step({"a": 64}, {"a": ((1, 2, 3, 4),)})
    eventually(lambda: dram_blocks(daemon) == 3)


def test_of_a_save_larger_than_the_buffer_the_leading_part_is_stored_and_later_the_rest(
    start_node, daemon, monkeypatch
):
    monkeypatch.setattr("kvcascade.connectors.paged_worker.STAGED_BYTES", 3 * GROUP.block_bytes(2))
    node = start_node([GROUP], stage=True)
    kv = whole(GROUP, "bfloat16")
    node.fill(0, kv)
    node.store("a", TOKENS, (FROM,))
    assert node.workers[0].take_counters()["saves_skipped"] == COUNT - 3
    eventually(lambda: dram_blocks(daemon) == 3)
    node.store("b", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    tokens, report = node.load("c", TOKENS, (TO,))
    assert (tokens, report.failed) == (COUNT * 16, ())
    assert torch.equal(node.content(0, 0)[list(TO)], kv[list(FROM)])


def test_what_one_step_makes_final_fits_into_the_buffer_and_so_does_what_is_queued_behind_it(
    start_node, daemon, monkeypatch
):
    monkeypatch.setattr("kvcascade.connectors.paged_worker.STAGED_BYTES", GROUP.block_bytes(2))
    node = start_node([GROUP], stage=True, step_tokens=COUNT * 16)
    node.fill(0, whole(GROUP, "bfloat16"))
    node.store("a", TOKENS, (FROM,))
    node.store("b", [7, *TOKENS], (FROM,))
    assert not node.workers[0].take_counters().get("saves_skipped")
    eventually(lambda: dram_blocks(daemon) == 2 * COUNT)


@pytest.mark.parametrize("stage", [False, True])
def test_a_rank_that_lost_its_connection_attaches_again_though_nothing_is_loaded(start_node, daemon, stage):
    # One rank alone: the scheduler's attachment stays as it is.
    node = start_node([GROUP], ranks=2, stage=stage)
    node.fill(0, whole(GROUP, "bfloat16"))
    node.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    session = node.workers[1]._session
    session._client.close()
    node.step({}, {})
    eventually(lambda: session.attached)
    node.store("b", [7, *TOKENS], (FROM,))
    eventually(lambda: dram_blocks(daemon) == 2 * COUNT)


def test_a_rank_that_cannot_attach_tries_one_at_a_time_and_ever_more_seldom(start_node, daemon, monkeypatch):
    node = start_node([GROUP])
    node.step({}, {})
    (worker,) = node.workers
    tries = []

    def refused(timeout: float) -> None:
        tries.append(time.monotonic())
        raise Refused("not today")

    monkeypatch.setattr(worker._session, "attach", refused)
    worker._session._client.close()

    def tried() -> bool:
        node.step({}, {})
        return len(tries) > 3

    eventually(tried)
    pauses = [after - before for before, after in pairwise(tries)]
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=False))


class CountingSession(Session):
    """Counts the loads that were answered."""

    loads = 0

    def load(self, *arguments: Any, **options: Any) -> Load:
        found = super().load(*arguments, **options)
        type(self).loads += 1
        return found


def test_a_request_that_ends_before_its_load_is_planned_costs_no_blocks(start_node, daemon):
    first = start_node([GROUP])
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    second = start_node([GROUP], session=CountingSession)
    request = second.request("b", TOKENS)
    second.scheduler.arrived(request)
    match = second.scheduler.match(request, 0)
    answered = CountingSession.loads
    second.scheduler.allocated(request, (TO,), match.tokens, background=match.background)
    eventually(lambda: CountingSession.loads > answered)
    assert not second.scheduler.finished("b", (TO,), 0)
    report = second.step({}, {})
    assert report.received == report.failed_requests == {"b"}
    again, _ = second.load("c", TOKENS, (TO,))
    assert again == match.tokens > 0


class Parts:
    """How the copies of a rank's KV groups go, each on its own: held up, and failed."""

    def __init__(self, node: Node, rank: int = 0) -> None:
        self.go = [threading.Event() for _ in node.groups]
        self.ended = [threading.Event() for _ in node.groups]
        for group, gatherer in enumerate(node.workers[rank]._gatherers):
            gatherer.load = functools.partial(self._load, gatherer.load, group)
        self.failing: set[int] = set()

    def _load(self, load: Any, group: int, *arguments: Any) -> None:
        assert self.go[group].wait(20)
        self.ended[group].set()
        if group in self.failing:
            raise ValueError("a copy that fails")
        load(*arguments)

    def end(self, group: int) -> None:
        self.go[group].set()
        assert self.ended[group].wait(20)


TWO = KVGroup(block_tokens=16, layers=2, kv_heads=4, head_dim=8)


@pytest.fixture
def loading_two(start_node: Any, daemon: Any) -> Any:
    """An engine of two KV groups that is about to load what another has stored, and the other."""

    def begin(ranks: int = 1) -> tuple[Node, Node, StepPlan]:
        first = start_node([GROUP, TWO], ["LBHNC", "LBHNC"], ranks=ranks)
        for number, group in enumerate((GROUP, TWO)):
            first.fill(number, whole(group, "bfloat16"))
        first.store("a", TOKENS, (FROM, FROM))
        eventually(lambda: dram_blocks(daemon) == 2 * COUNT)
        second = start_node([GROUP, TWO], ["LBHNC", "LBHNC"], ranks=ranks)
        request = second.request("b", TOKENS)
        second.scheduler.arrived(request)
        match = second.scheduler.match(request, 0)
        assert match.tokens == COUNT * 16
        second.scheduler.allocated(request, (TO, TO), match.tokens, background=True)
        return first, second, second.scheduler.plan_step(Step({}, {}))

    return begin


class SlowSession(Session):
    """For requests named so nothing is in memory, and a load that may wait does until it is let go."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.slow: set[int] = set()
        self.waits: list[int] = []
        self.go = threading.Event()

    def lookup(self, hashes: Any, *, request: Any, **options: Any) -> Lookup:
        answer = super().lookup(hashes, request=request, **options)
        if request.startswith("slow"):
            self.slow.add(answer.lease)
        return answer

    def load(self, lease: int, count: int, *, wait_ms: int = 0, timeout: float | None = None) -> Load:
        if lease not in self.slow:
            return super().load(lease, count, wait_ms=wait_ms, timeout=timeout)
        if threading.current_thread().name.startswith("kvcascade-load"):
            self.waits.append(wait_ms)
            assert not wait_ms or self.go.wait(20)
        return super().load(lease, 0, timeout=timeout)


def slow_node(start_node: Any, daemon: Any, groups: list[KVGroup], load_wait: float) -> Node:
    """An engine that another one has stored for, and whose scheduler waits for nothing."""
    orders = ["LBHNC"] * len(groups)
    first = start_node(groups, orders)
    for number, group in enumerate(groups):
        first.fill(number, whole(group, "bfloat16"))
    first.store("a", TOKENS, (FROM,) * len(groups))
    eventually(lambda: dram_blocks(daemon) == COUNT * len(groups))
    limits = replace(PATIENT, step_wait=0.0, load_wait=load_wait)
    node: Node = start_node(groups, orders, session=SlowSession, limits=limits)
    return node


def begin_load(node: Node, name: str) -> None:
    request = node.request(name, TOKENS)
    node.scheduler.arrived(request)
    eventually(lambda: node.scheduler.match(request, 0).state is MatchState.READY)
    node.scheduler.allocated(request, (TO,) * len(node.groups), COUNT * 16, background=True)


@pytest.mark.parametrize("groups", [[GROUP], [GROUP, TWO]])
def test_what_is_in_memory_is_loaded_however_many_wait_for_a_drive(start_node, daemon, groups):
    # Invariant 3: DRAM never waits for disk. As many loads wait as can, and two more are queued behind them.
    node = slow_node(start_node, daemon, groups, load_wait=60.0)
    session = node.scheduler._asker.session
    for number in range(LOAD_THREADS + 2):
        begin_load(node, f"slow {number}")
    eventually(lambda: len(session.waits) == LOAD_THREADS)
    begin_load(node, "fast")
    planned: set[str] = set()

    def is_planned() -> bool:
        planned.update(load.request_id for load in node.scheduler.plan_step(Step({}, {})).loads)
        return "fast" in planned

    try:
        eventually(is_planned)
        assert planned == {"fast"} and len(session.waits) == LOAD_THREADS
    finally:
        session.go.set()


def test_all_groups_of_a_load_wait_no_longer_together_than_one_may(start_node, daemon):
    node = slow_node(start_node, daemon, [GROUP, TWO], load_wait=0.3)
    session = node.scheduler._asker.session
    begin_load(node, "slow")
    eventually(lambda: session.waits)
    time.sleep(0.4)
    session.go.set()
    failed: list[FailedLoad] = []

    def is_over() -> bool:
        plan = node.scheduler.plan_step(Step({}, {}))
        assert not plan.loads
        failed.extend(plan.failed)
        return bool(failed)

    eventually(is_over)
    assert {failure.group for failure in failed} == {0, 1}
    assert 0 < session.waits[0] <= 300 and session.waits[1:] == [0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_whose_groups_end_in_different_steps_fails_in_the_step_in_which_it_ends(loading_two, failing):
    # Fault A10: vLLM takes the failure of a request for that of a load that ends in the same step.
    _, node, plan = loading_two()
    (worker,) = node.workers
    parts = Parts(node)
    parts.failing = {failing}
    worker.start_load(plan)
    parts.end(failing)
    eventually(lambda: failing not in {ticket.transfer.group for ticket in worker._book._running})
    assert worker.finished() == Report()
    parts.end(1 - failing)
    reports: list[Report] = []
    eventually(lambda: (reports.append(worker.finished()), reports[-1].received)[1])
    assert reports[-1].received == reports[-1].failed_requests == {"b"}


def test_blocks_that_are_late_are_told_with_the_end_of_those_that_are_being_copied(loading_two):
    _, node, plan = loading_two()
    (worker,) = node.workers
    parts = Parts(node)
    late = next(load for load in plan.loads if load.group)
    failure = FailedLoad("b", 1, late.blocks, background=True)
    worker.start_load(replace(plan, loads=tuple(load for load in plan.loads if not load.group), failed=(failure,)))
    assert worker.finished() == Report()
    parts.end(0)
    reports: list[Report] = []
    eventually(lambda: (reports.append(worker.finished()), reports[-1].received)[1])
    assert reports[-1].received == reports[-1].failed_requests == {"b"}


def test_each_of_two_ranks_tells_of_its_failure_with_its_own_end(loading_two):
    _, node, plan = loading_two(ranks=2)
    parts = [Parts(node, rank) for rank in range(2)]
    parts[0].failing = {0}
    told: list[list[Report]] = [[], []]
    for worker in node.workers:
        worker.start_load(plan)
    for rank, group in ((0, 0), (1, 1), (1, 0)):
        parts[rank].end(group)
    eventually(lambda: (told[1].append(node.workers[1].finished()), told[1][-1].received)[1])
    assert told[1][-1].received == {"b"} and not told[1][-1].failed
    assert node.workers[0].finished() == Report()
    parts[0].end(1)
    eventually(lambda: (told[0].append(node.workers[0].finished()), told[0][-1].received)[1])
    assert told[0][-1].received == told[0][-1].failed_requests == {"b"}


@pytest.mark.parametrize("told", [True, False])
def test_what_an_engine_computes_on_a_failed_load_is_not_stored(loading_two, told):
    # Whatever went wrong in telling it: the tokens' blocks would be found by every other engine.
    _, node, plan = loading_two()
    parts = Parts(node)
    parts.failing = {1}
    node.workers[0].start_load(plan)
    parts.end(0)
    parts.end(1)
    if told:
        reports: list[Report] = []
        eventually(lambda: (reports.append(node.workers[0].finished()), reports[-1].received)[1])
        node.scheduler.completed(reports[-1])
    with pytest.raises(ValueError, match="'b' goes on from 80 tokens, of which 0 are good"):
        node.step({"b": len(TOKENS)}, {"b": (TO, TO)}, {"b": COUNT * 16})


def test_an_engine_that_computes_a_failed_load_anew_goes_on(loading_two, daemon):
    _, node, plan = loading_two()
    parts = Parts(node)
    parts.failing = {1}
    node.workers[0].start_load(plan)
    parts.end(0)
    parts.end(1)
    reports: list[Report] = []
    eventually(lambda: (reports.append(node.workers[0].finished()), reports[-1].received)[1])
    node.scheduler.completed(reports[-1])
    node.step({"b": len(TOKENS)}, {"b": (TO, TO)}, {"b": 0})
    node.step({"b": len(TOKENS) + 1}, {"b": (TO, TO)}, {"b": len(TOKENS)})


class UnattachedSession(Session):
    """One that does not get through to its daemon."""

    refuses = False

    def attach(self, timeout: float | None = None) -> Attached:
        if self.refuses:
            raise DaemonUnavailable("no answer")
        return super().attach(timeout)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("cause", ["unattached", "memory", "generation"])
def test_blocks_are_forgotten_for_bytes_that_are_not_whole_alone(start_node, daemon, cause, background):
    limits = PATIENT if background else replace(PATIENT, sync_bytes=1 << 20)
    first = start_node([GROUP], limits=limits)
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    second = start_node([GROUP], limits=limits, session=UnattachedSession)
    second.step({}, {})
    (worker,) = second.workers
    with pytest.MonkeyPatch.context() as patched:
        if cause == "unattached":
            patched.setattr(worker._session, "refuses", True, raising=False)
        elif cause == "memory":
            patched.setattr(worker._gatherers[0], "load", lambda *_: raise_(torch.OutOfMemoryError("no room")))
        else:
            patched.setattr(worker._session, "intact", lambda held: np.arange(len(held.pages)) != 1)
        tokens, report = second.load("b", TOKENS, (TO,))
        assert tokens and report.failed_requests == {"b"}
    # What was asked before the failure was told is answered after it.
    eventually(
        lambda: second.load(f"c{time.monotonic()}", TOKENS, (TO,))[0] == (16 if cause == "generation" else tokens)
    )


@pytest.mark.parametrize("stage", [True, False])
def test_a_device_without_memory_costs_a_save_and_not_the_connector(start_node, daemon, monkeypatch, stage):
    node = start_node([GROUP], stage=stage)
    node.fill(0, whole(GROUP, "bfloat16"))
    (worker,) = node.workers
    for copying in ("gather", "store"):
        monkeypatch.setattr(
            worker._gatherers[0], copying, lambda *_: raise_(torch.OutOfMemoryError("no room")), raising=False
        )
    node.store("a", TOKENS, (FROM,))
    eventually(lambda: worker.take_counters().get("save_failures") == COUNT)
    assert worker._staged_bytes == 0
    monkeypatch.undo()
    node.store("b", [9, *TOKENS[:32]], (FROM[:2],))
    eventually(lambda: dram_blocks(daemon) == 2)


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("background", [True, False])
def test_what_was_let_go_of_between_match_and_allocation_fails_at_once(start_node, daemon, background):
    # By a reset: vLLM 0.33 allocates a load in the background when the steps that it had planned ahead are over.
    first = start_node([GROUP])
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    node = start_node([GROUP])
    safe = SafeScheduler(node.scheduler, engine_keeps_loading=True)
    request = node.request("b", TOKENS)
    safe.arrived(request)
    match = safe.match(request, 16)
    assert match.tokens
    assert safe.reset()
    safe.allocated(request, (TO,), match.tokens, background=background)
    report = node.step({}, {})
    assert report.failed_blocks == set(TO[1:])
    assert report.received == ({"b"} if background else set())
    assert safe.failure is None


class AskingSession(Session):
    """Its daemon asks other nodes until it is told to end, then says what it has."""

    asks = False
    end = threading.Event()
    waiting = released = 0

    def release(self, *arguments: Any, **options: Any) -> None:
        super().release(*arguments, **options)
        type(self).released += 1

    def lookup(self, *arguments: Any, wait_ms: int = 0, **options: Any) -> Lookup:
        if wait_ms:
            type(self).waiting += 1
            assert self.end.wait(20)
            return super().lookup(*arguments, **options)
        return replace(super().lookup(*arguments, **options), asking=self.asks)


def test_a_question_that_nobody_waits_for_gives_back_no_lease_but_its_own(start_node, daemon, monkeypatch):
    monkeypatch.setattr(AskingSession, "end", threading.Event())
    first = start_node([GROUP])
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    node = start_node([GROUP], session=AskingSession)
    monkeypatch.setattr(AskingSession, "asks", True)
    node.scheduler.arrived(node.request("b", TOKENS))
    eventually(lambda: AskingSession.waiting)
    node.scheduler.finished("b", (), 0)
    monkeypatch.setattr(AskingSession, "asks", False)
    request = node.request("b", TOKENS)
    node.scheduler.arrived(request)
    match = node.scheduler.match(request, 0)
    assert match.tokens == COUNT * 16
    AskingSession.end.set()
    eventually(lambda: AskingSession.released)
    assert daemon.status()["leases"]["live"] == 1
    node.scheduler.allocated(request, (TO,), match.tokens, background=True)
    reports: list[Report] = []
    eventually(lambda: (reports.append(node.step({}, {})), reports[-1].received)[1])
    assert not reports[-1].failed


@pytest.fixture
def late_daemon(start_daemon: Any, monkeypatch: Any) -> Any:
    """A stopped daemon, and an engine that has started without it."""
    monkeypatch.setattr("kvcascade.connectors.paged_asking.LEAVE_ALONE_FIRST_S", 0.0)
    daemon = start_daemon()
    daemon.stop()
    nodes = []

    def start(**options: Any) -> tuple[Any, Node]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PagedScheduler, "attach", lambda *_: ())
            nodes.append(Node(daemon, [GROUP], **options))
        return daemon, nodes[-1]

    yield start
    for node in nodes:
        node.close()


def asked(node: Node, name: str) -> None:
    node.scheduler.arrived(node.request(name, TOKENS))
    node.scheduler.match(node.request(name, TOKENS), 0)
    node.step({}, {})
    node.scheduler.finished(name, (), 0)


class StrangeSession(Session):
    """Its engine's hashes are not what its namespace says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"probe": [b"x" * 32, b"y" * 32]})


def test_an_engine_that_is_refused_after_its_start_says_why_once(late_daemon, caplog):
    daemon, node = late_daemon(session=StrangeSession)
    daemon.start()
    caplog.set_level(logging.DEBUG, "kvcascade.connectors")
    numbers = itertools.count()

    def failures() -> list[Any]:
        asked(node, f"a{next(numbers)}")
        return [record for record in caplog.records if "lookup failed" in record.message and "probe" in record.message]

    eventually(lambda: len(failures()) >= 3)
    assert [record.levelname for record in failures()][:3] == ["WARNING", "DEBUG", "DEBUG"]


def test_the_daemons_warnings_are_told_for_each_attachment(late_daemon, caplog, monkeypatch):
    daemon, node = late_daemon()
    daemon.start()
    attached = Session.attach
    monkeypatch.setattr(
        Session, "info", property(lambda self: replace(attached(self), warnings=("it is nearly full",)))
    )

    def told(times: int) -> None:
        numbers = itertools.count()
        eventually(lambda: asked(node, f"a{next(numbers)}") or caplog.text.count("it is nearly full") == times)
        node.step({}, {})
        assert caplog.text.count("it is nearly full") == times

    told(1)
    daemon.stop()
    daemon.start()
    told(2)


def test_whatever_is_counted_is_shown():
    folder = Path(paged_worker.__file__).parent
    shown = (folder / "vllm_metrics.py").read_text()
    counted = {
        name
        for file in (*folder.glob("paged_*.py"), folder / "vllm.py")
        for name in re.findall(r'(?:count\(|counters\[)"(\w+)"', file.read_text())
    }
    assert len(counted) > 15
    assert not [name for name in counted if f'("{name}", "' not in shown]


class LingeringSession(Session):
    """A rank's copies take a while longer, once their bytes have moved."""

    copies = 0
    lingers = False

    @contextmanager
    def copying(self, *held: Load | Reservation) -> Iterator[Mapping[int, MappedPool]]:
        with super().copying(*held) as pools:
            type(self).copies += 1
            try:
                yield pools
                if self.lingers:
                    time.sleep(2.5)
            finally:
                type(self).copies -= 1


def test_tensors_are_let_go_of_when_no_copy_touches_them_however_long_that_takes(start_node, daemon):
    # Sleep mode unmaps them: a limit on the wait would let a copy go on into memory of others.
    hasty = Limits(step_wait=10.0, patience=10.0, sync_bytes=0, load_wait=0.02, timeout=1.0)
    first = start_node([GROUP])
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    second = start_node([GROUP], limits=hasty, session=LingeringSession)
    (worker,) = second.workers
    request = second.request("b", TOKENS)
    second.scheduler.arrived(request)
    match = second.scheduler.match(request, 0)
    second.scheduler.allocated(request, (TO,), match.tokens, background=match.background)
    LingeringSession.lingers = True
    worker.start_load(second.scheduler.plan_step(Step({}, {})))
    eventually(lambda: LingeringSession.copies)
    worker.unregister()
    assert not LingeringSession.copies
    assert not worker.finished().received


def test_a_planned_load_does_not_wait_for_what_is_said_to_a_daemon_that_hangs(start_node, daemon):
    # Each commit takes the whole timeout, and the load needs nothing more of the daemon.
    first = start_node([GROUP])
    first.fill(0, whole(GROUP, "bfloat16"))
    first.store("a", TOKENS, (FROM,))
    eventually(lambda: dram_blocks(daemon) == COUNT)
    second = start_node([GROUP], limits=Limits(step_wait=10.0, patience=10.0, sync_bytes=0, timeout=60.0))
    (worker,) = second.workers
    names = ("x", "y", "z")
    for number, name in enumerate(names):
        request = second.request(name, [number, *TOKENS])
        second.scheduler.arrived(request)
        second.scheduler.match(request, 0)
        second.scheduler.allocated(request, (FROM,), 0, background=True)
    saves = second.scheduler.plan_step(
        Step(dict.fromkeys(names, len(TOKENS) + 1), dict.fromkeys(names, ((1, 2, 4, 6, 7),)))
    )
    assert len(saves.saves) == len(names)
    request = second.request("b", TOKENS)
    second.scheduler.arrived(request)
    match = second.scheduler.match(request, 0)
    second.scheduler.allocated(request, (TO,), match.tokens, background=match.background)
    loads = second.scheduler.plan_step(Step({}, {}))
    worker.follow(loads)
    assert loads.loads
    daemon.process.send_signal(19)
    try:
        worker.save(saves)
        worker.start_load(loads)
        eventually(lambda: worker.finished().received)
    finally:
        daemon.process.send_signal(18)


def test_asking_costs_the_scheduler_no_more_than_its_budget_when_the_daemon_is_stopped(start_node, daemon):
    # Faults E6, O1: whatever is asked is asked on another thread.
    node = start_node([GROUP], limits=Limits(step_wait=0.001, patience=0.05, timeout=0.3))
    node.fill(0, whole(GROUP, "bfloat16"))
    daemon.process.send_signal(19)
    try:
        request = node.request("a", TOKENS)
        node.scheduler.arrived(request)
        states = []
        deadline = time.monotonic() + 10
        while not states or states[-1] is MatchState.LATER:
            assert time.monotonic() < deadline
            states.append(node.scheduler.match(request, 0).state)
            node.step({}, {})
        assert states[-1] is MatchState.MISS
        # It is left alone for a while: the next request does not wait.
        another = node.request("b", TOKENS)
        node.scheduler.arrived(another)
        assert node.scheduler.match(another, 0).state is MatchState.MISS
    finally:
        daemon.process.send_signal(18)
