"""The HBM tier, on the host and, with `-m gpu`, on a device: references, the queue, duplicates, eviction."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcascade.config.errors import ConfigError
from kvcascade.tiers.hbm import HbmTier
from kvcascade.tiers.memory import copy, copy_all, import_device_memory, register_host, unregister_host
from kvcascade.tiers.pool import PAGE, SlotState

SLOT, LARGE = 16 * PAGE, 64 * PAGE
SLAB = LARGE
SLABS = 4


def has_cuda() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def tier(request: pytest.FixtureRequest) -> AsyncIterator[HbmTier]:
    if request.param != "cpu" and not has_cuda():
        pytest.skip("no CUDA device")
    hbm = HbmTier(request.param, SLABS * SLAB, slab_bytes=SLAB)
    hbm.start(asyncio.get_running_loop())
    await hbm.wait_online()
    yield hbm
    assert hbm.check() == []
    hbm.close()


def cached(tier: HbmTier, rows: list[int], slot_bytes: int = SLOT) -> list[int]:
    """Slots that hold these rows, still referenced."""
    pages = tier.allocate(slot_bytes, len(rows))
    assert len(pages) == len(rows)
    tier.cache(pages, rows)
    return pages.tolist()


def test_a_block_is_findable_once_it_is_cached_and_not_before(tier: HbmTier) -> None:
    pages = tier.allocate(SLOT, 2)
    assert tier.find(5) is None
    tier.cache(pages[0], 5)
    assert tier.find(5) == pages[0]
    assert tier.pool.states(pages).tolist() == [SlotState.READY, SlotState.PENDING]
    tier.free(pages[1:])


def test_tails_of_a_released_chain_go_first(tier: HbmTier) -> None:
    pages = cached(tier, [10, 11, 12])
    assert tier.victims(SLOT, 9) == []
    tier.release(pages)
    assert tier.victims(SLOT, 9) == [(pages[2], 12), (pages[1], 11), (pages[0], 10)]
    assert tier.victims(SLOT, 1) == [(pages[2], 12)]
    assert tier.find(10) == pages[0]


def test_a_referenced_block_is_no_victim_until_the_last_release(tier: HbmTier) -> None:
    pages = cached(tier, [0, 1, 2, 3])
    tier.release(pages)
    tier.reference(pages[1:3])
    tier.reference(pages[1:2])
    assert tier.victims(SLOT, 9) == [(pages[3], 3), (pages[0], 0)]
    with pytest.raises(ValueError, match="is referenced"):
        tier.evict(pages[1])
    tier.release(pages[1:3])
    assert tier.victims(SLOT, 9) == [(pages[3], 3), (pages[0], 0), (pages[2], 2)]
    tier.release(pages[1:2])
    assert tier.victims(SLOT, 9)[-1] == (pages[1], 1)


def test_eviction_frees_the_slot_and_voids_its_generation(tier: HbmTier) -> None:
    pages = cached(tier, [7])
    tier.release(pages)
    assert tier.evict(pages[0]) == (7, False)
    assert tier.find(7) is None
    assert tier.generations.of(pages).tolist() == [1]
    assert tier.allocate(SLOT, 1).tolist() == pages
    tier.free(pages)


def test_a_block_with_a_duplicate_is_gone_only_with_its_last_copy(tier: HbmTier) -> None:
    first, second = cached(tier, [4])[0], cached(tier, [4])[0]
    assert tier.find(4) == first
    tier.release([first])
    tier.release([second])
    assert tier.evict(first) == (4, True)
    assert tier.find(4) == second
    assert tier.evict(second) == (4, False)
    assert tier.find(4) is None


def test_copies_of_one_block_may_be_evicted_in_one_batch(tier: HbmTier) -> None:
    pages = cached(tier, [4, 5, 4])
    with pytest.raises(ValueError, match="is referenced"):
        tier.evict_batch(pages)
    tier.release(pages)
    assert tier.evict_batch(pages) == [(4, True), (5, False), (4, False)]
    assert tier.evict_batch([]) == []
    assert tier.generations.of(pages).tolist() == [1, 1, 1]


def test_dropping_a_block_frees_idle_copies_now_and_referenced_ones_when_released(tier: HbmTier) -> None:
    idle, used = cached(tier, [4, 4])
    tier.release([idle])
    assert tier.drop(4) == [idle]
    assert tier.find(4) is None
    assert tier.drop(4) == []
    assert tier.check() == []
    assert tier.pool.states([idle, used]).tolist() == [SlotState.FREE, SlotState.READY]
    tier.release([used])
    assert tier.pool.states([used]).tolist() == [SlotState.FREE]
    assert tier.generations.of([idle, used]).tolist() == [1, 1]


def test_a_late_writers_slot_is_quarantined_and_comes_back(tier: HbmTier) -> None:
    pages = tier.allocate(SLOT, 2)
    tier.quarantine(pages)
    assert tier.pool.counts()[SLOT].quarantined == 2
    assert tier.check() == []
    tier.free(pages)
    assert tier.pool.counts()[SLOT].quarantined == 0


def test_classes_have_queues_of_their_own_and_one_call_may_mix_them(tier: HbmTier) -> None:
    small, large = cached(tier, [1, 2]), cached(tier, [3, 4], LARGE)
    tier.release([*small, *large])
    assert [row for _, row in tier.victims(SLOT, 9)] == [2, 1]
    assert [row for _, row in tier.victims(LARGE, 9)] == [4, 3]
    assert tier.victims(2 * SLOT, 9) == []


def test_misuse_is_refused_and_changes_nothing(tier: HbmTier) -> None:
    (ready,) = cached(tier, [1])
    pending = tier.allocate(SLOT, 2)
    for misuse, what in (
        (lambda: tier.release(pending), "holds no block"),
        (lambda: tier.reference([pending[0]]), "holds no block"),
        (lambda: tier.release([ready, ready]), "named twice"),
        (lambda: tier.free([ready]), "goes by evict or drop"),
        (lambda: tier.evict(int(pending[0])), "holds no block"),
        (lambda: tier.cache(pending, [1]), "2 pages for 1 rows"),
        (lambda: tier.cache(pending[:1], [-1]), "a row below 0"),
        (lambda: tier.cache([ready], [2]), "is READY, not PENDING"),
    ):
        with pytest.raises(ValueError, match=what):
            misuse()
    tier.release([ready])
    with pytest.raises(ValueError, match="more often than referenced"):
        tier.release([ready])
    tier.free(pending)


def test_a_slab_moves_to_another_class_when_all_its_blocks_are_evicted(tier: HbmTier) -> None:
    pages = cached(tier, list(range(SLABS * SLAB // SLOT)))
    tier.release(pages)
    assert len(tier.allocate(LARGE, 1)) == 0
    tier.pool.reserve_slab(1)
    for page in tier.pool.pages_in_slab(1).tolist():
        tier.evict(page)
    assert tier.pool.release_slab(1)
    large = tier.allocate(LARGE, 1)
    assert large.tolist() == [SLAB // PAGE]
    tier.free(large)


def test_bytes_go_down_to_the_host_and_up_again(tier: HbmTier) -> None:
    pages = tier.allocate(SLOT, 3).tolist()
    data = [np.full(SLOT, 10 + i, np.uint8) for i in range(3)]
    copy_all((tier.view(page, SLOT), block) for page, block in zip(pages, data, strict=True))
    back = [np.zeros(SLOT, np.uint8) for _ in pages]
    copy_all((into, tier.view(page, SLOT)) for page, into in zip(pages, back, strict=True))
    assert all((a == b).all() for a, b in zip(data, back, strict=True))
    copy(tier.view(pages[0], SLOT), tier.view(pages[2], SLOT))
    copy(back[0], tier.view(pages[0], SLOT))
    assert (back[0] == 12).all()
    tensor = tier.memory.tensor(pages[1] * PAGE, SLOT)
    assert (str(tensor.device), int(tensor[3])) == (tier.memory.device, 11)
    tensor.fill_(9)
    if tier.memory.device != "cpu":
        import torch

        torch.cuda.synchronize()
    copy(back[1], tier.view(pages[1], SLOT))
    assert (back[1] == 9).all()
    with pytest.raises(ValueError, match="do not go into"):
        copy(back[0][:-1], tier.view(pages[0], SLOT))
    with pytest.raises(IndexError):
        tier.view(SLABS * SLAB // PAGE, 1)
    tier.free(pages)


ENGINE = """
import sys
import numpy as np
from kvcascade.tiers.memory import copy, import_device_memory
device, fd, size, page = sys.argv[1], *map(int, sys.argv[2:])
memory = import_device_memory(device, fd, size)
block = np.empty(4096, np.uint8)
copy(block, memory.view(page << 12, 4096))
copy(memory.view(page << 12, 4096), block + 1)
memory.close()
"""


def test_an_engine_process_reads_and_writes_the_pool_by_its_descriptor(tier: HbmTier) -> None:
    pages = tier.allocate(SLOT, 2).tolist()
    copy(tier.view(pages[1], PAGE), np.full(PAGE, 41, np.uint8))
    fds = tier.export()
    arguments = (tier.memory.device, fds[0], tier.memory.size, pages[1])
    subprocess.run([sys.executable, "-P", "-c", ENGINE, *map(str, arguments)], pass_fds=fds, check=True)
    for descriptor in fds:
        os.close(descriptor)
    back = np.zeros(PAGE, np.uint8)
    copy(back, tier.view(pages[1], PAGE))
    assert (back == 42).all()
    tier.free(pages)


def test_exported_memory_outlives_the_tier_that_made_it(tier: HbmTier) -> None:
    other = HbmTier(tier.memory.device, SLAB, slab_bytes=SLAB)
    copy(other.view(0, PAGE), np.full(PAGE, 5, np.uint8))
    fds = other.export()
    engine = import_device_memory(other.memory.device, fds[0], other.memory.size)
    for descriptor in fds:
        os.close(descriptor)
    other.close()
    other.close()
    back = np.zeros(PAGE, np.uint8)
    copy(back, engine.view(0, PAGE))
    assert (back == 5).all()
    engine.close()
    engine.close()


def test_more_than_the_device_has_is_refused(tier: HbmTier) -> None:
    with pytest.raises(ConfigError, match=r"hbm\.size = 8 TiB does not fit"):
        HbmTier(tier.memory.device, 8 << 40)


def test_status_names_the_device(tier: HbmTier) -> None:
    status = tier.status()
    assert (status["name"], status["device"], status["state"]) == ("hbm", tier.memory.device, "ok")
    assert status["online"] == status["free"] == SLABS * SLAB


@pytest.mark.gpu
def test_host_memory_is_registered_chunk_by_chunk() -> None:
    if not has_cuda():
        pytest.skip("no CUDA device")
    array = np.zeros(5 * PAGE * 256, np.uint8)
    start = -array.ctypes.data % PAGE
    aligned = array[start : start + 4 * PAGE * 256]
    for _ in range(2):
        assert register_host(aligned, "cuda:0", chunk=PAGE * 256) is None
        assert register_host(aligned, "cuda:0", chunk=PAGE * 256) is not None
        unregister_host(aligned, "cuda:0", chunk=PAGE * 256)


def test_a_chain_of_many_blocks_is_referenced_in_one_batch(tier: HbmTier) -> None:
    pages = cached(tier, list(range(16)))
    tier.release(pages)
    order = np.array(pages)
    for chosen in (order[2:9], order[::2], order[[0, 15]], order[:1], order[:0], order):
        tier.reference(chosen)
        assert tier.check() == []
        left = [page for page in pages if page not in chosen.tolist()]
        assert sorted(page for page, _ in tier.victims(SLOT, 99)) == left
        tier.release(chosen)
        assert tier.check() == []


class HbmMachine(RuleBasedStateMachine):
    """The tier against lists and dicts, with `check` after each step."""

    SIZES = (SLOT, LARGE)

    @initialize()
    def build(self) -> None:
        self.tier = HbmTier("cpu", 3 * SLAB, slab_bytes=SLAB)
        self.tier.pool.online(3)
        self.pending: dict[int, int] = {}  # page → slot bytes
        self.size: dict[int, int] = {}
        self.row: dict[int, int | None] = {}  # cached page → row, None when dropped
        self.references: dict[int, int] = {}
        self.queues: dict[int, list[int]] = {size: [] for size in self.SIZES}
        self.generation: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()

    def gone(self, page: int) -> None:
        self.generation[page] = self.generation.get(page, 0) + 1

    @rule(size=st.sampled_from(SIZES), n=st.integers(0, 5))
    def allocate(self, size: int, n: int) -> None:
        for page in self.tier.allocate(size, n).tolist():
            assert page not in self.pending and page not in self.row
            self.pending[page] = size

    @rule(data=st.data(), whole=st.booleans())
    def cache_or_free(self, data: st.DataObject, whole: bool) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.pending)), unique=True)) if self.pending else []
        if whole:
            rows = data.draw(st.lists(st.integers(0, 6), min_size=len(pages), max_size=len(pages)))
            self.tier.cache(pages, rows)
            for page, row in zip(pages, rows, strict=True):
                self.size[page] = self.pending.pop(page)
                self.row[page], self.references[page] = row, 1
        else:
            self.tier.free(pages)
            for page in pages:
                del self.pending[page]
                self.gone(page)

    @precondition(lambda self: self.row)
    @rule(data=st.data())
    def reference(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.row)), unique=True))
        self.tier.reference(pages)
        for page in pages:
            if not self.references[page]:
                self.queues[self.size[page]].remove(page)
            self.references[page] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        used = sorted(page for page, count in self.references.items() if count)
        pages = data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        self.tier.release(pages)
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                if self.row[page] is None:
                    self.forget(page)
                else:
                    self.queues[self.size[page]].append(page)

    def forget(self, page: int) -> None:
        del self.row[page], self.references[page]
        self.gone(page)

    @rule(size=st.sampled_from(SIZES), skip=st.integers(0, 2))
    def evict(self, size: int, skip: int) -> None:
        for page, row in self.tier.victims(size, skip + 1)[skip:]:
            assert self.queues[size][skip] == page
            self.queues[size].remove(page)
            self.forget(page)
            assert self.tier.evict(page) == (row, row in self.row.values())

    @rule(row=st.integers(0, 6))
    def drop(self, row: int) -> None:
        freed = self.tier.drop(row)
        idle = []
        for page in [page for page, held in self.row.items() if held == row]:
            self.row[page] = None
            if not self.references[page]:
                idle.append(page)
                self.queues[self.size[page]].remove(page)
                self.forget(page)
        assert sorted(freed) == sorted(idle)

    @invariant()
    def holds(self) -> None:
        assert self.tier.check() == []
        for size in self.SIZES:
            assert self.tier.victims(size, 99) == [(page, self.row[page]) for page in self.queues[size]]
        for row in range(7):
            copies = [page for page, held in self.row.items() if held == row]
            found = self.tier.find(row)
            assert found in copies if copies else found is None
        pages = list(self.generation)
        assert self.tier.generations.of(pages).tolist() == list(self.generation.values())


TestHbmMachine = HbmMachine.TestCase
TestHbmMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
