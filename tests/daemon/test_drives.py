"""Blocks over several drives: a chain lies on one, chains spread, and a drive's trouble cuts what it holds."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engines.faults import Faults
from engines.node import BLOCK, Clock, Engine, Node, open_disk

from kvcascade.daemon.index import NO_SLOT
from kvcascade.daemon.protocol import Tier
from kvcascade.daemon.recovery import adopt, join
from kvcascade.daemon.transfer import Transfer
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.drives import Drives

SIZE = BLOCK + 4096


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """4 MiB of DRAM over two drives of 32 MiB; batches of 8 blocks."""
    disk, _ = await open_disk([tmp_path / "a", tmp_path / "b"], 32 << 20)
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    yield node
    node.expect_sound()
    node.close()
    assert await disk.close()


def drives_of(node: Node, engine: Engine, path: tuple[int, ...]) -> list[int]:
    """The drive of each block of a path."""
    rows = node.residency.index.find(engine.space.number, node.residency.keys(engine.space, engine.hashes(path)))
    slots = node.residency.index.disk[rows]
    assert (slots != NO_SLOT).all()
    assert node.disk is not None
    return [int(not one) for one in node.disk.lie_on(0, slots)]


async def test_a_long_chain_lies_on_one_drive_and_chains_spread(node: Node) -> None:
    engine = node.engine()
    chains = [tuple(range(100 * number, 100 * number + 24)) for number in range(6)]
    for chain in chains:
        engine.store(chain)
        await node.demote(everything=True)
    owners = [set(drives_of(node, engine, chain)) for chain in chains]
    assert all(len(owner) == 1 for owner in owners)
    assert sorted(owner.pop() for owner in owners) == [0, 0, 0, 1, 1, 1]


async def test_chains_that_share_their_beginning_do_not_crowd_on_its_drive(node: Node) -> None:
    engine = node.engine()
    shared = (1, 2)
    engine.store(shared)
    await node.demote(everything=True)
    owners = []
    for number in range(6):
        chain = (*shared, *range(100 * number + 10, 100 * number + 26))
        engine.store(chain)
        await node.demote(everything=True)
        owners.append(set(drives_of(node, engine, chain)[2:]))
    assert all(len(owner) == 1 for owner in owners)
    assert {owner.pop() for owner in owners} == {0, 1}


async def test_a_full_drive_gives_its_oldest_blocks_and_a_smaller_limit_too(tmp_path: Path) -> None:
    faults = Faults()
    first = DiskTier(tmp_path / "a", 40 * SIZE, reserve=20 * SIZE, folder=faults.folder)
    disk = Drives([first, DiskTier(tmp_path / "b", 40 * SIZE)])
    disk.open()
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    engine = node.engine()
    for number in range(12):
        engine.store(tuple(range(100 * number, 100 * number + 16)))
        await node.demote(everything=True)
        assert disk.used <= disk.capacity
    assert disk.used >= disk.capacity - 16 * SIZE
    node.expect_sound()
    # Others fill the first drive's file system.
    before = disk.status()["drives"]
    faults.available = 0
    await disk.watch(0)
    assert disk.excess() == {0: before[0]["used"] - 20 * SIZE}
    node.residency.trim_disk()
    after = disk.status()["drives"]
    assert after[0]["used"] <= 20 * SIZE
    assert after[1]["used"] == before[1]["used"]
    node.expect_sound()
    node.close()
    assert await disk.close()


async def test_a_block_on_a_sick_drive_ends_the_prefix_and_is_not_asked_for_again_and_again(tmp_path: Path) -> None:
    faults, clock = Faults(), Clock()
    disk = Drives([DiskTier(tmp_path / "a", 32 << 20, folder=faults.folder, clock=clock)])
    disk.open()
    node = Node(slabs=2, budget=1, low_watermark=0, disk=disk)
    engine = node.engine()
    chain = tuple(range(8))
    engine.store(chain)
    await node.demote(everything=True)
    for filler in range(100, 140):
        engine.store((filler,))
    assert engine.tiers(chain) == [{Tier.DISK}] * 8
    faults.add("read", "slab-*", "EIO")
    match = engine.lookup(chain)
    rows = engine.lease(match.lease).rows
    async with Transfer(node.residency) as transfer:
        began = time.perf_counter()
        await transfer.fetch(engine.space, lambda: rows, 5.0)
        assert time.perf_counter() - began < 2
        assert disk.state == "sick"
        assert sum(disk.status()["counters"]["misses"].values()) <= 8
        faults.clear()
        clock.now += 61
        # The first may wait for a look that was begun before.
        await disk.watch(0)
        await disk.watch(0)
        assert disk.state == "ok"
        await transfer.fetch(engine.space, lambda: rows, 5.0)
    assert np.asarray(node.residency.in_memory(rows)).all()
    engine.release(match.lease)
    engine.expect_loads(chain, 8)
    node.expect_sound()
    node.close()
    assert await disk.close()


async def test_a_drive_that_hangs_holds_up_its_own_batches_alone(tmp_path: Path) -> None:
    faults = Faults()
    disk = Drives([DiskTier(tmp_path / "a", 64 << 20, folder=faults.folder), DiskTier(tmp_path / "b", 64 << 20)])
    disk.open()
    node = Node(slabs=8, budget=1, low_watermark=0.5, disk=disk)
    engine = node.engine()
    faults.add("write", "slab-*", "hang")
    async with Transfer(node.residency):
        for number in range(8):
            engine.store(tuple(range(100 * number, 100 * number + 16)))
        async with asyncio.timeout(20):
            # All that the well drive can take, while the other one has swallowed one batch or two.
            while node.residency.counters["demoted_blocks"] < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        well = disk.status()["drives"][1]
        assert well["blocks"] >= 64
        assert node.residency.index.busy.any(), "what hangs is still the drive's"
        faults.clear()
    node.expect_sound()
    node.close()
    assert await disk.close()


async def test_a_drive_that_was_left_out_at_the_start_comes_back_with_its_blocks(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    disk, _ = await open_disk(directories, 32 << 20)
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    engine = node.engine()
    chains = [tuple(range(100 * number, 100 * number + 16)) for number in range(6)]
    for chain in chains:
        engine.store(chain)
        await node.demote(everything=True)
    away = [chain for chain in chains if drives_of(node, engine, chain) == [1] * 16]
    assert len(away) == 3
    node.close()
    assert await disk.close()

    faults, clock = Faults(), Clock()
    faults.add("names", "*", "EIO")
    disk = Drives([DiskTier(directories[0], 32 << 20), DiskTier(directories[1], 32 << 20, folder=faults.folder)],
                  clock=clock)  # fmt: skip
    recovery = await asyncio.to_thread(disk.open)
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    adopt(node.residency, [], recovery)
    engine = node.engine()
    assert [engine.matched(chain) for chain in away] == [0, 0, 0]
    # Meanwhile some of them are stored again: the first whole, and on disk; of the second the head, in memory alone.
    engine.store(away[0])
    await node.demote(everything=True)
    engine.store(away[1][:4])
    engine.store((*away[1][:4], 999))
    faults.clear()
    clock.now += 61
    joined = await disk.watch(1)
    assert joined is not None
    assert join(node.residency, joined) == 32
    node.expect_sound()
    assert [engine.matched(chain) for chain in chains] == [16] * 6
    assert node.rows_in(Tier.DISK) == disk.blocks == 6 * 16
    for chain in away:
        match = engine.lookup(chain)
        while await node.promote(engine, match.lease):
            pass
        engine.expect_true(chain, engine.load(match.lease))
        engine.release(match.lease)
    node.expect_sound()
    # They are blocks as all others: stored below, demoted, found at the next start.
    engine.store((*away[2], 7, 8))
    await node.demote(everything=True)
    node.close()
    assert await disk.close()
    disk, recovery = await open_disk(directories, 32 << 20)
    node = Node(slabs=4, budget=1, disk=disk)
    adopt(node.residency, [], recovery)
    assert node.residency.counters["recovery_unreachable_blocks"] == 0
    assert node.engine().matched((*away[2], 7, 8)) == 18
    node.expect_sound()
    node.close()
    assert await disk.close()


async def test_blocks_of_a_drive_that_comes_back_are_given_up_where_their_heads_are_gone(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "a", 32 << 20)
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    engine = node.engine()
    engine.store(tuple(range(16)))
    await node.demote(everything=True)
    row = node.residency.index.find(engine.space.number, node.residency.keys(engine.space, engine.hashes((0, 1))))
    disk.free(node.residency.index.disk[row[1:]])
    await disk.flush()
    node.close()
    assert await disk.close()

    faults, clock = Faults(), Clock()
    faults.add("names", "*", "EIO", times=1)
    disk = Drives([DiskTier(tmp_path / "b", 32 << 20), DiskTier(tmp_path / "a", 32 << 20, folder=faults.folder)],
                  clock=clock)  # fmt: skip
    recovery = await asyncio.to_thread(disk.open)
    node = Node(slabs=4, budget=1, low_watermark=0.5, disk=disk)
    adopt(node.residency, [], recovery)
    clock.now += 61
    joined = await disk.watch(1)
    assert joined is not None
    assert (len(joined), join(node.residency, joined), disk.blocks) == (15, 1, 1)
    node.expect_sound()
    node.close()
    assert await disk.close()
