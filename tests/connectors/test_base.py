"""The connector API: arithmetic, guards, and a whole connector written from its docstrings."""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import LayoutMismatch
from kvcascade.connectors.base import (
    NO_MATCH,
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
    WorkerConnector,
    common_hit,
    final_tokens,
    loadable_tokens,
    new_tokens,
    storable_blocks,
)
from kvcascade.connectors.layout import Gatherer, PoolSlots, describe_paged
from kvcascade.connectors.safe import SafeScheduler, SafeWorker
from kvcascade.connectors.transfer_book import Copy, TransferBook
from kvcascade.tiers.block import BlockHash, KVGroup, block_hashes, committers, head_range

TOKENS = 4
GROUP = KVGroup(block_tokens=TOKENS, layers=2, kv_heads=2, head_dim=8, kind="attention")
BLOCK_BYTES = GROUP.block_bytes(2)
PAGES = 1  # a slot's pages
NO_LEASE = 0


# ---- arithmetic


@pytest.mark.parametrize(
    ("hit", "tokens", "loadable"),
    [
        (0, 16, 0),
        (16, 16, 12),
        (16, 17, 16),
        (16, 13, 12),
        (7, 100, 4),
        (3, 100, 0),
        (16, 4, 0),
        (16, 1, 0),
        (16, 0, 0),
    ],
)
def test_at_least_one_token_is_left_to_compute(hit: int, tokens: int, loadable: int) -> None:
    assert loadable_tokens(hit, tokens, 4) == loadable


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 64))
def test_reported_tokens_are_never_negative_nor_the_whole_prompt(
    hit: int, computed: int, tokens: int, size: int
) -> None:
    # Faults E10 and M1: hit - computed, within [0, tokens - 1 - computed], and the same when asked again.
    computed = computed // size * size
    reported = new_tokens(hit, computed, tokens, size)
    assert reported == new_tokens(hit, computed, tokens, size)
    assert 0 <= reported <= max(0, hit - computed)
    assert reported == 0 or computed + reported <= tokens - 1
    assert reported % size == 0


@pytest.mark.parametrize(
    ("hits", "common"),
    [
        ([(12, 4), (8, 4)], 8),  # fault J3: the recurrent state reaches 8 of the 12 tokens
        ([(12, 4), (0, 4)], 0),
        ([(48, 16), (40, 8)], 32),
        ([(48, 16), (47, 12)], 0),
        ([(96, 16), (95, 12)], 48),
        ([(12, 4)], 12),
        ([], 0),
    ],
)
def test_a_hit_is_what_all_groups_can_serve(hits: list[tuple[int, int]], common: int) -> None:
    assert common_hit(hits) == common
    assert common_hit(reversed(hits)) == common


def test_drafts_that_may_be_rejected_are_not_final() -> None:
    assert final_tokens(10, 6) == 16
    assert final_tokens(10, 6, draft_tokens=5) == 11
    assert final_tokens(10, 2, draft_tokens=5) == 10


def test_only_full_blocks_of_final_tokens_are_stored_once() -> None:
    assert list(storable_blocks(15, 0, 4)) == [0, 1, 2]
    assert list(storable_blocks(16, 3, 4)) == [3]
    assert list(storable_blocks(16, 4, 4)) == []
    assert list(storable_blocks(8, 4, 4)) == []


# ---- a connector for another engine, from the docstrings alone


class Shelf:
    """Stands where the daemon is: slots in memory, found by block hash once every rank has committed."""

    def __init__(self, slots: int) -> None:
        self.pool = np.zeros(slots * PAGES << 12, np.uint8)
        self.generations = np.zeros(slots * PAGES, np.uint32)
        self.ready: dict[BlockHash, int] = {}
        self._free = list(range(0, slots * PAGES, PAGES))
        self._pending: dict[int, tuple[BlockHash, set[int]]] = {}

    def hit(self, hashes: Sequence[BlockHash]) -> int:
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in self.ready), len(hashes))

    def reserve(self, block_hash: BlockHash, index: int, ranks: int) -> int | None:
        if block_hash in self.ready or not self._free or any(block_hash == h for h, _ in self._pending.values()):
            return None
        page = self._free.pop()
        self._pending[page] = (block_hash, set(committers(GROUP.kv_heads, ranks, index, GROUP.kind)))
        return page

    def commit(self, page: int, rank: int) -> None:
        block_hash, missing = self._pending[page]
        missing.remove(rank)
        if not missing:
            del self._pending[page]
            self.ready[block_hash] = page

    def abort(self, page: int) -> None:
        if self._pending.pop(page, None) is not None:
            self._free.append(page)

    def forget(self, block_hash: BlockHash) -> None:
        page = self.ready.pop(block_hash, None)
        if page is not None:
            self.generations[page] += 1
            self._free.append(page)


class ShelfScheduler(SchedulerConnector):
    def __init__(self, shelf: Shelf, ranks: int) -> None:
        self._shelf, self._ranks = shelf, ranks
        self._requests: dict[str, Request] = {}
        self._asked: dict[str, int] = {}  # tokens that were computed when it matched
        self._loads: list[Transfer] = []
        self._failed: list[FailedLoad] = []
        self._stored: dict[str, int] = {}
        self._kept: set[str] = set()
        self._hash_of: dict[tuple[str, int], BlockHash] = {}

    def match(self, request: Request, computed_tokens: int) -> Match:
        hit = common_hit([(self._shelf.hit(request.hashes[0]) * TOKENS, TOKENS)])
        tokens = new_tokens(hit, computed_tokens, request.tokens, TOKENS)
        self._asked[request.request_id] = computed_tokens
        return Match(tokens, MatchState.READY) if tokens else NO_MATCH

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        self._requests[request.request_id] = request
        first = self._asked.pop(request.request_id, 0) // TOKENS
        indices = range(first, first + tokens // TOKENS)
        self._stored[request.request_id] = indices.stop
        for index in indices:
            self._hash_of[request.request_id, blocks[0][index]] = request.hashes[0][index]
        ids = tuple(blocks[0][index] for index in indices)
        pages = tuple(self._shelf.ready.get(request.hashes[0][index], -1) for index in indices)
        if -1 in pages:
            self._failed.append(FailedLoad(request.request_id, 0, ids, background))
        elif tokens:
            generations = tuple(self._shelf.generations[list(pages)].tolist())
            zeros = (0,) * len(ids)
            self._loads.append(
                Transfer(request.request_id, 0, NO_LEASE, tuple(indices), ids, zeros, pages, generations, background)
            )

    def plan_step(self, step: Step) -> StepPlan:
        saves = []
        for request_id, final in step.final_tokens.items():
            hashes = self._requests[request_id].hashes[0]
            new = storable_blocks(min(final, len(hashes) * TOKENS), self._stored[request_id], TOKENS)
            self._stored[request_id] = new.stop
            reserved = [(i, page) for i in new if (page := self._shelf.reserve(hashes[i], i, self._ranks)) is not None]
            if reserved:
                indices, pages = zip(*reserved, strict=True)
                ids = tuple(step.blocks[request_id][0][i] for i in indices)
                zeros = (0,) * len(ids)
                saves.append(Transfer(request_id, 0, NO_LEASE, indices, ids, zeros, pages, zeros))
        loads, self._loads = tuple(self._loads), []
        failed, self._failed = tuple(self._failed), []
        kept, self._kept = frozenset(self._kept), set()
        return StepPlan(loads, tuple(saves), failed=failed, kept=kept)

    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        del self._requests[request_id]
        self._kept.add(request_id)
        return True

    def completed(self, report: Report) -> None:
        for load in report.failed:
            for block in load.blocks:
                self._shelf.forget(self._hash_of[load.request_id, block])

    def close(self) -> None:
        self._loads.clear()


class ShelfWorker(WorkerConnector):
    """Copies when `copy` is called, as a thread of its own would, or at the latest when it must."""

    def __init__(self, shelf: Shelf, ranks: int, rank: int) -> None:
        self._shelf, self._ranks, self._rank = shelf, ranks, rank
        self._book = TransferBook()
        self._queue: list[Callable[[], None]] = []
        self._gatherer: Gatherer | None = None

    def register(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        layout = describe_paged(tensors[0], GROUP, "bfloat16", ranks=self._ranks, rank=self._rank)
        self._gatherer = Gatherer(layout, tensors[0], GROUP, ranks=self._ranks, rank=self._rank)

    def preempted(self, request_ids: frozenset[str]) -> None:
        self._book.preempt(request_ids, timeout=0)
        self.copy()

    def start_load(self, plan: StepPlan) -> None:
        for request_id in plan.dropped:
            self._book.drop(request_id)
        for failed in plan.failed:
            self._book.fail(failed)
        for request_id in plan.kept:
            self._book.keep(request_id)
        for load in plan.loads:
            self._queue.append(self._loading(load, self._book.begin(load, load=True)))

    def wait_load(self, layer: int | None = None) -> None:
        self.copy()

    def save(self, plan: StepPlan) -> None:
        for save in plan.saves:
            self._queue.append(self._saving(save, self._book.begin(save, load=False)))

    def finished(self) -> Report:
        return self._book.take()

    def close(self) -> None:
        self._book.close(timeout=0)
        self.copy()

    def copy(self) -> None:
        queue, self._queue = self._queue, []
        for job in queue:
            job()

    def _slots(self, pages: Sequence[int]) -> PoolSlots:
        return PoolSlots(self._shelf.pool, np.array(pages, np.uint32))

    def _loading(self, load: Transfer, copy: Copy) -> Callable[[], None]:
        def job() -> None:
            if not copy.given_up:
                assert self._gatherer is not None
                self._gatherer.load(load.blocks, self._slots(load.pages))
            now = self._shelf.generations[list(load.pages)]
            changed = [b for b, g, was in zip(load.blocks, now, load.generations, strict=True) if g != was]
            self._book.end(copy, failed_blocks=changed)

        return job

    def _saving(self, save: Transfer, copy: Copy) -> Callable[[], None]:
        def job() -> None:
            assert self._gatherer is not None
            mine = [
                (block, page)
                for index, block, page in zip(save.indices, save.blocks, save.pages, strict=True)
                if self._gatherer.writes(index)
            ]
            if not copy.given_up:
                self._gatherer.store([block for block, _ in mine], self._slots([page for _, page in mine]))
            intact = self._book.end(copy)
            for _, page in mine:
                if intact:
                    self._shelf.commit(page, self._rank)
                else:
                    self._shelf.abort(page)

        return job


def computed(block_hash: BlockHash) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """What the scripted model computes for a block: a function of its whole prefix, in canonical order."""
    stream = b"".join(sha256(block_hash + bytes([i])).digest() for i in range(-(-BLOCK_BYTES // 32)))
    return np.frombuffer(stream, np.uint8)[:BLOCK_BYTES]


class Engine:
    """A scripted engine of some ranks: serves one request at a time, a block a step, and can be made to preempt it."""

    def __init__(
        self, shelf: Shelf, ranks: int, *, blocks: int = 16, scheduler: SchedulerConnector | None = None
    ) -> None:
        self.scheduler: SchedulerConnector = SafeScheduler(scheduler or ShelfScheduler(shelf, ranks))
        self.inner = [ShelfWorker(shelf, ranks, rank) for rank in range(ranks)]
        self.workers: list[WorkerConnector] = [SafeWorker(worker) for worker in self.inner]
        self.reports = Counter[tuple[str, str]]()
        self.tensors = []
        self._models = []
        self._blocks = blocks
        for rank, worker in enumerate(self.workers):
            heads = head_range(GROUP.kv_heads, ranks, rank, GROUP.kind)[1]
            tensors = list(torch.zeros(GROUP.layers, blocks, heads, TOKENS, 2 * GROUP.head_dim, dtype=torch.bfloat16))
            self.tensors.append(tensors)
            layout = describe_paged(tensors, GROUP, "bfloat16", ranks=ranks, rank=rank)
            self._models.append(Gatherer(layout, tensors, GROUP, ranks=ranks, rank=rank))
            worker.register([tensors])

    def step(self, step: Step, before_copies: Callable[[], None] = lambda: None) -> Report:
        plan = self.scheduler.plan_step(step)
        reports = []
        for worker in self.workers:
            worker.preempted(step.preempted)
            worker.start_load(plan)
        before_copies()
        for worker in self.workers:
            worker.wait_load()
            worker.save(plan)
        for worker in self.inner:
            worker.copy()
        for worker in self.workers:
            reports.append(worker.finished())
        report = Report(
            frozenset.intersection(*(r.sent for r in reports)),
            frozenset.intersection(*(r.received for r in reports)),
            tuple({load: None for r in reports for load in r.failed}),
            broken=any(r.broken for r in reports),
        )
        self.scheduler.completed(report)
        self.reports.update([("sent", r) for r in report.sent] + [("received", r) for r in report.received])
        return report

    def serve(
        self, request_id: str, prompt: list[int], *, local: int = 0, before_copies: Callable[[], None] = lambda: None
    ) -> int:
        """Serve a request whose first `local` tokens are in the engine's own cache. Returns the tokens loaded."""
        hashes = block_hashes(prompt, TOKENS, seed="0")
        request = Request(request_id, len(prompt), (hashes,))
        ids = tuple(range(1, 1 + -(-len(prompt) // TOKENS)))
        self._compute(hashes, ids, range(local // TOKENS))
        match = self.scheduler.match(request, local)
        assert match == self.scheduler.match(request, local)
        assert local + match.tokens < len(prompt)
        self.scheduler.allocated(request, (ids,), match.tokens, background=True)
        loaded, known = match.tokens, local + match.tokens
        if match.tokens:
            report = self.step(Step({}, {}), before_copies)
            assert request_id in report.received
            if report.failed:
                bad = min(ids.index(block) for block in report.failed_blocks) * TOKENS
                loaded, known = max(0, bad - local), bad
            self.scheduler.allocated(request, (ids,), 0, background=True)
        self._compute(hashes, ids, range(known // TOKENS, len(hashes)))
        self.step(Step({request_id: final_tokens(known, len(prompt) - known)}, {request_id: (ids,)}))
        for rank, model in enumerate(self._models):
            self._prove(rank, model, hashes, ids)
        if self.scheduler.finished(request_id, (ids,), len(prompt)):
            assert request_id in self.step(Step({}, {})).sent
        return loaded

    def _compute(self, hashes: list[BlockHash], ids: tuple[int, ...], which: range) -> None:
        for model in self._models:
            model.load([ids[i] for i in which], [computed(hashes[i]) for i in which])

    def _prove(self, rank: int, model: Gatherer, hashes: list[BlockHash], ids: tuple[int, ...]) -> None:
        begin, end = model.byte_range
        slots = [np.zeros(BLOCK_BYTES, np.uint8) for _ in hashes]
        model.store(ids[: len(hashes)], slots)
        for block_hash, slot in zip(hashes, slots, strict=True):
            np.testing.assert_array_equal(slot[begin:end], computed(block_hash)[begin:end], err_msg=f"rank {rank}")


PROMPT = list(range(100, 100 + 5 * TOKENS))


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 1), (4, 1), (1, 4), (4, 2)])
def test_what_one_engine_computed_another_loads(writers: int, readers: int) -> None:
    shelf = Shelf(32)
    one = Engine(shelf, writers)
    assert one.serve("cold", PROMPT) == 0
    assert one.serve("again", PROMPT) == 4 * TOKENS  # fault E10: the last block is computed, for its logits
    two = Engine(shelf, readers)
    assert two.serve("longer", [*PROMPT, 1, 2]) == 5 * TOKENS
    assert two.serve("local hit", PROMPT, local=2 * TOKENS) == 2 * TOKENS
    assert two.serve("all but one local", PROMPT, local=4 * TOKENS) == 0
    assert two.serve("other", [7, *PROMPT]) == 0
    assert two.serve("short", PROMPT[: TOKENS - 1]) == 0
    assert set((one.reports + two.reports).values()) == {1}
    assert two.reports["received", "longer"] == 1


def test_a_slot_that_was_handed_on_while_it_was_copied_is_a_failed_load() -> None:
    shelf = Shelf(32)
    engine = Engine(shelf, 2)
    Engine(shelf, 1).serve("cold", PROMPT)
    third = block_hashes(PROMPT, TOKENS, seed="0")[2]
    # Fault A10: blocks from the doubted one on are computed, none of it served.
    assert engine.serve("warm", [*PROMPT, 1], before_copies=lambda: shelf.forget(third)) == 2 * TOKENS


def test_a_preempted_requests_save_is_given_up_and_never_found() -> None:
    shelf = Shelf(32)
    scheduler, worker = ShelfScheduler(shelf, 1), ShelfWorker(shelf, 1, 0)
    tensors = list(torch.zeros(2, 8, 2, TOKENS, 16, dtype=torch.bfloat16))
    worker.register([tensors])
    hashes = block_hashes(PROMPT, TOKENS, seed="0")
    scheduler.allocated(Request("a", 20, (hashes,)), ((1, 2, 3, 4, 5),), 0, background=False)
    worker.save(scheduler.plan_step(Step({"a": 20}, {"a": ((1, 2, 3, 4, 5),)})))
    worker.preempted(frozenset({"a"}))
    assert not shelf.ready and shelf.hit(hashes) == 0
    assert worker.finished() == Report()


def test_an_unknown_layout_is_refused_when_the_engine_attaches() -> None:
    worker = SafeWorker(ShelfWorker(Shelf(1), 1, 0))
    with pytest.raises(LayoutMismatch, match=r"\[3, 5\]"):
        worker.register([[torch.zeros(3, 5, dtype=torch.bfloat16)] * 2])


# ---- nothing raises into serving


class Failing(ShelfScheduler):
    def __init__(self, shelf: Shelf, method: str) -> None:
        super().__init__(shelf, 1)
        self._method = method
        self.closed = 0

    def match(self, request: Request, computed_tokens: int) -> Match:
        self._raise("match")
        return super().match(request, computed_tokens)

    def allocated(self, request: Request, blocks: BlockIds, tokens: int, *, background: bool) -> None:
        self._raise("allocated")
        super().allocated(request, blocks, tokens, background=background)

    def plan_step(self, step: Step) -> StepPlan:
        self._raise("plan_step")
        return super().plan_step(step)

    def finished(self, request_id: str, blocks: BlockIds, final_tokens: int) -> bool:
        self._raise("finished")
        return super().finished(request_id, blocks, final_tokens)

    def completed(self, report: Report) -> None:
        self._raise("completed")
        super().completed(report)

    def close(self) -> None:
        self.closed += 1
        raise OSError("closing fails as well")

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError(f"{method} is broken")


@pytest.mark.parametrize("method", ["match", "allocated", "plan_step", "finished", "completed"])
def test_a_scheduler_side_that_raises_costs_the_engine_nothing_but_the_cache(method: str) -> None:
    shelf = Shelf(32)
    Engine(shelf, 1).serve("cold", PROMPT)
    inner = Failing(shelf, method)
    engine = Engine(shelf, 1, scheduler=inner)
    engine.serve("one", [*PROMPT, 1])  # ends: no load is waited for in vain, no block kept for ever
    assert engine.serve("two", [*PROMPT, 1]) == 0
    assert isinstance(engine.scheduler, SafeScheduler) and str(engine.scheduler.failure) == f"{method} is broken"
    assert inner.closed == 1
    engine.scheduler.close()


def test_of_a_load_that_is_not_planned_any_more_no_block_fails_that_the_engine_had() -> None:
    # Others share those: vLLM would have them compute anew what is good, or by its other policy fail them.
    shelf = Shelf(32)
    Engine(shelf, 1).serve("cold", PROMPT)
    inner = Failing(shelf, "plan_step")
    safe = SafeScheduler(inner, engine_keeps_loading=True, block_tokens=[TOKENS])
    request = Request("a", len(PROMPT), (block_hashes(PROMPT, TOKENS, seed="0"),))
    match = safe.match(request, 2 * TOKENS)
    assert match.tokens == 2 * TOKENS
    safe.allocated(request, ((1, 2, 3, 4, 5, 6),), match.tokens, background=True)
    assert safe.plan_step(Step({}, {})).failed == (FailedLoad("a", 0, (3, 4), background=True),)


class FailingWorker(ShelfWorker):
    def __init__(self, shelf: Shelf, method: str, ranks: int = 1, rank: int = 0) -> None:
        super().__init__(shelf, ranks, rank)
        self._method = method

    def preempted(self, request_ids: frozenset[str]) -> None:
        self._raise("preempted")
        super().preempted(request_ids)

    def start_load(self, plan: StepPlan) -> None:
        super().start_load(plan)
        self._raise("start_load")

    def wait_load(self, layer: int | None = None) -> None:
        self._raise("wait_load")
        super().wait_load(layer)

    def save(self, plan: StepPlan) -> None:
        super().save(plan)
        self._raise("save")

    def finished(self) -> Report:
        self._raise("finished")
        return super().finished()

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError(f"{method} is broken")


@pytest.mark.parametrize("method", ["preempted", "start_load", "wait_load", "save", "finished"])
def test_a_worker_side_that_raises_fails_its_loads_and_frees_its_blocks(method: str) -> None:
    shelf = Shelf(32)
    Engine(shelf, 1).serve("cold", PROMPT)
    found = dict(shelf.ready)
    engine = Engine(shelf, 1)
    inner = FailingWorker(shelf, method)
    safe = SafeWorker(inner)
    engine.inner, engine.workers = [inner], [safe]
    inner.register([engine.tensors[0]])
    engine.serve("one", [*PROMPT, 1])
    assert engine.serve("two", [*PROMPT, 1]) == 0
    assert str(safe.failure) == f"{method} is broken"
    assert set(shelf.ready) <= set(found)  # nothing half-written is found
    assert set(engine.reports.values()) == {1}
    safe.close()


def test_what_a_worker_side_has_of_its_own_is_called_under_the_same_guard() -> None:
    calls: list[int] = []

    def follow(number: int) -> None:
        calls.append(number)
        if number:
            raise OSError("too many open files")

    safe = SafeWorker(ShelfWorker(Shelf(1), 1, 0))
    for number in (0, 1, 2):
        safe.guarded(follow, number)
    assert calls == [0, 1] and isinstance(safe.failure, OSError)


def test_a_broken_worker_reports_loads_within_the_step_and_forgets_what_was_dropped() -> None:
    shelf = Shelf(4)
    safe = SafeWorker(FailingWorker(shelf, "wait_load"))
    safe.wait_load()
    within, behind, gone = (
        Transfer(name, 0, NO_LEASE, (0,), (block,), (0,), (0,), (0,), background)
        for name, block, background in (("a", 1, False), ("b", 2, True), ("c", 3, True))
    )
    safe.start_load(StepPlan(loads=(within, behind, gone), failed=(FailedLoad("d", 0, (4,), background=True),)))
    safe.start_load(StepPlan(dropped=frozenset({"c"}), kept=frozenset({"e"})))
    report = safe.finished()
    assert report.failed_blocks == {1, 2, 4}
    assert report.received == {"b", "d"} and report.sent == {"e"}
    assert safe.finished() == Report(broken=True)


def test_an_engine_one_of_whose_ranks_is_broken_is_promised_no_more_loads_and_saves_nothing() -> None:
    # Else, by a policy that fails requests whose load fails, every request with a hit would end in an error.
    shelf = Shelf(32)
    Engine(shelf, 1).serve("cold", PROMPT)
    engine = Engine(shelf, 2)
    engine.inner[1] = broken = FailingWorker(shelf, "wait_load", 2, 1)
    engine.workers[1] = SafeWorker(broken)
    broken.register([engine.tensors[1]])
    engine.step(Step({}, {}))
    request = Request("warm", len(PROMPT), (block_hashes(PROMPT, TOKENS, seed="0"),))
    assert engine.scheduler.match(request, 0) == NO_MATCH
    assert engine.scheduler.plan_step(Step({"warm": len(PROMPT)}, {"warm": ((1, 2, 3, 4, 5),)})) == StepPlan()
    assert isinstance(engine.scheduler, SafeScheduler) and engine.scheduler.failure is not None
