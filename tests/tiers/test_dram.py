"""The DRAM tier: slabs that come online in the background, refusal, and what a real engine process can do to it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.pool import PAGE
from kvcascade.tiers.slots import Progress

MIB = 1 << 20
SLOT = 64 << 10


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def tier() -> Iterator[DramTier]:
    dram = DramTier(8 * MIB, slab_bytes=MIB)
    yield dram
    assert dram.check() == []
    dram.close()


@pytest.fixture
async def online(tier: DramTier) -> DramTier:
    tier.start(asyncio.get_running_loop())
    await tier.wait_online()
    return tier


async def test_slabs_are_usable_as_they_come_online_and_progress_is_told(tier: DramTier) -> None:
    told: list[Progress] = []
    usable: list[int] = []

    def on_online(progress: Progress) -> None:
        told.append(progress)
        usable.append(len(tier.pool.allocate(SLOT, 1000)))

    assert (tier.state, str(tier.progress())) == ("off", "0 B of 8 MiB online")
    tier.start(asyncio.get_running_loop(), on_online)
    assert tier.state == "onlining"
    await tier.wait_online()
    assert tier.state == "ok"
    assert [progress.online_bytes for progress in told] == [n * MIB for n in range(1, 9)]
    assert usable == [MIB // SLOT] * 8
    with pytest.raises(TierUnavailable, match="started before"):
        tier.start(asyncio.get_running_loop())


def test_all_pages_are_faulted_in_when_the_tier_is_online(online: DramTier) -> None:
    fd, generations = online.export()
    assert os.fstat(fd).st_blocks * 512 == online.pool.capacity
    assert os.fstat(generations).st_blocks * 512 == online.generations.size
    for descriptor in (fd, generations):
        os.close(descriptor)


async def test_closing_while_slabs_are_faulted_in_stops_at_once_and_leaves_nothing() -> None:
    before = open_descriptors()
    dram = DramTier(256 * MIB, slab_bytes=MIB)
    online = asyncio.Event()
    dram.start(asyncio.get_running_loop(), lambda _: online.set())
    await online.wait()
    dram.close()
    dram.close()
    assert dram.state == "off"
    assert "kvcascade-dram-online" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(TierUnavailable, match="dram: closed"):
        await dram.wait_online()
    with pytest.raises(TierUnavailable, match="started before"):
        dram.start(asyncio.get_running_loop())
    assert open_descriptors() == before


def test_a_loop_that_is_gone_ends_the_faulting() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    dram = DramTier(2 * MIB, slab_bytes=MIB)
    dram.start(loop)
    dram.close()


async def test_when_memory_runs_out_the_slabs_that_are_online_serve_on(
    tier: DramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tier.memory.populate  # type: ignore[attr-defined]

    def populate(offset: int, length: int) -> None:
        if offset >= 3 * MIB:
            raise TierUnavailable("1 MiB could not be faulted in: Cannot allocate memory")
        real(offset, length)

    monkeypatch.setattr(tier.memory, "populate", populate)
    tier.start(asyncio.get_running_loop())
    with pytest.raises(TierUnavailable, match="could not be faulted in"):
        await tier.wait_online()
    status = tier.status()
    assert (status["state"], status["online"]) == ("sick", 3 * MIB)
    assert "Cannot allocate memory" in str(status["reason"])
    assert len(tier.pool.allocate(SLOT, 1000)) == 3 * MIB // SLOT


def test_a_pool_larger_than_memory_is_refused_and_nothing_stays_open() -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"dram\.size = 8 TiB does not fit"):
        DramTier(8 << 40)
    assert open_descriptors() == before


def test_handing_a_slot_on_bumps_its_generation(online: DramTier) -> None:
    pages = online.pool.allocate(SLOT, 4)
    online.pool.ready(pages)
    before = online.generations.of(pages)
    online.free(pages[:2])
    assert (online.generations.of(pages) - before).tolist() == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="is free already"):
        online.free(pages)
    assert (online.generations.of(pages) - before).tolist() == [1, 1, 0, 0]


def test_a_view_is_the_bytes_of_its_slot(online: DramTier) -> None:
    first, second = online.pool.allocate(SLOT, 2).tolist()
    online.view(first, SLOT)[:] = 1
    online.view(second, SLOT - 5)[:] = 2
    assert online.view(first, SLOT).sum() == SLOT
    assert online.view(second, SLOT).sum() == 2 * (SLOT - 5)
    assert online.view(second, SLOT).ctypes.data % PAGE == 0


def test_status_shows_what_is_used_and_whether_memory_is_pinned(online: DramTier) -> None:
    pages = online.pool.allocate(SLOT, 3)
    online.pool.ready(pages[:1])
    online.pool.quarantine(pages[1:2])
    status = online.status()
    assert (status["name"], status["device"], status["state"], status["reason"]) == ("dram", "cpu", "ok", "")
    assert (status["used"], status["free"], status["quarantined"]) == (3 * SLOT, 8 * MIB - 3 * SLOT, SLOT)
    assert status["classes"] == [
        {"slot_bytes": SLOT, "total": 16, "free": 13, "pending": 1, "ready": 1, "quarantined": 1}
    ]
    assert status["huge_pages"] == {"used": False, "reason": ""}
    assert (online.unpinned_reason is None) == online.pinned
    assert status["memory"] == {"pinned": online.pinned, "reason": online.unpinned_reason or ""}


async def test_pinning_is_optional() -> None:
    dram = DramTier(MIB, slab_bytes=MIB, lock=False, huge_pages=True)
    dram.start(asyncio.get_running_loop())
    await dram.wait_online()
    assert dram.status()["memory"] == {"pinned": False, "reason": "not asked for"}
    assert dram.huge_pages or "vm.nr_hugepages" in str(dram.huge_reason)
    dram.close()


ENGINE = """
import os, sys
import numpy as np
from kvcascade.tiers.memory import Mapping
pool, generations, size, generations_size, page = map(int, sys.argv[1:])
slots, seen = Mapping(pool, size, writable=True), Mapping(generations, generations_size, writable=False)
for descriptor in (pool, generations, os.open(f"/proc/self/fd/{generations}", os.O_RDWR)):
    try:
        os.ftruncate(descriptor, 0)
    except OSError:
        continue
    sys.exit("truncated")
slots.view(page << 12, 4096)[:] = 7
print(int(seen.array().view(np.uint32)[page]), flush=True)
sys.stdin.readline()
print(int(seen.array().view(np.uint32)[page]), flush=True)
sys.stdin.readline()
"""


def test_an_engine_process_shares_the_pool_and_can_neither_truncate_it_nor_hurt_it_by_dying(
    online: DramTier,
) -> None:
    # C9: what a killed writer leaves is a slot that comes back, whatever it had written there.
    page = int(online.pool.allocate(SLOT, 1)[0])
    fds = online.export()
    arguments = [*fds, online.pool.capacity, online.generations.size, page]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", ENGINE, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    ) as engine:
        for descriptor in fds:
            os.close(descriptor)
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "0\n"
        assert (online.view(page, PAGE) == 7).all()
        online.free([page])
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == "1\n"
        engine.kill()
        assert engine.wait() == -signal.SIGKILL
    assert online.pool.allocate(SLOT, 1).tolist() == [page]
    online.view(page, SLOT)[:] = np.arange(SLOT, dtype=np.uint64).view(np.uint8)[:SLOT]
