"""Several drives are one tier: chains lie together, batches spread, and what ails one drive stays with it."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.disk import KIB, MIB, NS, FakeClock, fetch, key, open_descriptors, read_job, store, whereabouts, write_job
from engines.faults import Faults

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.recovery import Recovery
from kvcascade.tiers.slabfile import slot_size

LENGTH = 64 * KIB


class Array:
    """Drives in directories of their own, each with faults of its own; one life after another."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = [root / f"drive {number}" for number in range(count)]
        self.faults = [Faults() for _ in self.paths]
        self.clock = FakeClock()
        self.patience = 60.0
        self.drives: Drives | None = None

    async def open(self, capacities: Sequence[int] = (), **options: Any) -> Recovery:
        await self.close()
        sizes = [*capacities, *[32 * MIB] * (len(self.paths) - len(capacities))]
        drives = Drives(
            [
                DiskTier(path, size, threads=2, clock=self.clock, folder=faults.folder, **options)
                for path, size, faults in zip(self.paths, sizes, self.faults, strict=True)
            ],
            clock=self.clock,
            patience=self.patience,
        )
        recovery = await asyncio.to_thread(drives.open)
        drives.register_namespace(NS, b"what NS means")
        self.drives = drives
        return recovery

    async def close(self) -> None:
        if self.drives is not None:
            assert self.drives.check() == []
            assert await self.drives.close()
            self.drives = None

    async def watch(self) -> list[Recovery]:
        """What drives that joined hold."""
        assert self.drives is not None
        told = [await self.drives.watch(number) for number in range(len(self.paths))]
        return [one for one in told if one is not None]


@pytest.fixture
async def array(tmp_path: Path) -> AsyncIterator[Array]:
    before = open_descriptors()
    array = Array(tmp_path, 3)
    yield array
    for faults in array.faults:
        faults.clear()
    await array.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvcascade-disk")]
    assert open_descriptors() <= before


async def put(drives: Drives, names: Sequence[object], near: int | None = None) -> list[int]:
    """Durable blocks; their slots."""
    slots = drives.allocate(LENGTH, len(names)) if near is None else drives.allocate(LENGTH, len(names), near)
    assert len(slots) == len(names)
    jobs = [write_job(slot, name, LENGTH) for slot, name in zip(slots, names, strict=True)]
    assert await drives.write(jobs) == [None] * len(names)
    return [int(slot) for slot in slots]


def drive_of(drives: Drives, slot: int) -> int:
    (number,) = [n for n in range(len(drives)) if drives.lie_on(n, np.array([slot], dtype=np.uint32))[0]]
    return number


async def test_batches_spread_over_drives_and_each_lies_together(array: Array) -> None:
    await array.open()
    drives = array.drives
    assert drives is not None
    batches = [await put(drives, [f"{batch} {i}" for i in range(10)]) for batch in range(6)]
    owners = [{drive_of(drives, slot) for slot in batch} for batch in batches]
    assert all(len(owner) == 1 for owner in owners)
    assert sorted(owner.pop() for owner in owners) == [0, 0, 1, 1, 2, 2]
    for batch in batches:
        assert np.array_equal(np.diff(batch), np.ones(9))
    near = batches[4][0]
    more = await put(drives, [f"more {i}" for i in range(10)], near)
    assert {drive_of(drives, slot) for slot in more} == {drive_of(drives, near)}


async def test_drives_fill_in_proportion_and_to_the_last_byte(array: Array) -> None:
    size = slot_size(LENGTH)
    await array.open([10 * size, 20 * size, 30 * size])
    drives = array.drives
    assert drives is not None
    assert (drives.capacity, drives.room(LENGTH)) == (60 * size, 60)
    for batch in range(12):
        await put(drives, [f"{batch} {i}" for i in range(3)])
    used = [drive["used"] // size for drive in drives.status()["drives"]]
    assert used == [6, 12, 18]
    assert len(drives.allocate(LENGTH, 100)) == 24
    assert (drives.spare, drives.used) == (0, drives.capacity)


async def test_everything_on_all_drives_comes_back_after_a_restart(array: Array) -> None:
    await array.open()
    assert array.drives is not None
    names = [f"{batch} {i}" for batch in range(6) for i in range(5)]
    for batch in range(6):
        await put(array.drives, names[5 * batch : 5 * batch + 5])
    recovery = await array.open()
    assert array.drives is not None
    found = whereabouts(recovery)
    assert sorted(found) == sorted(key(name) for name in names)
    assert recovery.namespaces == [(NS, b"what NS means")]
    assert len({drive_of(array.drives, slot) for slot in found.values()}) == 3
    jobs = [read_job(found[key(name)], name, LENGTH) for name in names]
    assert await array.drives.read(jobs) == [None] * 30
    for name in names:
        assert await fetch(array.drives, found[key(name)], name, LENGTH) is None  # type: ignore[arg-type]
    array.drives.free(recovery.slot)
    assert array.drives.used == 0


async def test_a_drive_that_fails_is_left_out_and_the_others_go_on(array: Array) -> None:
    await array.open()
    drives = array.drives
    assert drives is not None
    batches = [await put(drives, [f"{batch} {i}" for i in range(4)]) for batch in range(3)]
    owners = [drive_of(drives, batch[0]) for batch in batches]
    sick = owners[1]
    for operation in ("read", "write"):
        array.faults[sick].add(operation, "slab-*", "EIO")
    jobs = [read_job(batch[0], f"{number} 0", LENGTH) for number, batch in enumerate(batches)]
    assert await drives.read(jobs) == [None, "EIO", None]
    slots = drives.allocate(LENGTH, 4, batches[1][0])
    assert set(await drives.write([write_job(slot, f"lost {slot}", LENGTH) for slot in slots])) == {"EIO"}
    drives.free(slots)
    assert (drives.state, drives.writable, drives.readable) == ("sick", True, True)
    assert drives.reason == f"{array.paths[sick]}: EIO"
    for batch in range(4):
        slots_of = await put(drives, [f"on {batch} {i}" for i in range(4)])
        assert drive_of(drives, slots_of[0]) != sick
    everything = np.array([batch[0] for batch in batches], dtype=np.uint32)
    assert drives.readable_slots(everything).tolist() == [True, False, True]
    states = {drive["directory"]: drive["state"] for drive in drives.status()["drives"]}
    assert states[str(array.paths[sick])] == "sick"
    assert list(states.values()).count("ok") == 2
    array.faults[sick].clear()
    array.clock.now += 61
    await array.watch()
    assert drives.state == "ok"
    assert await drives.read(jobs) == [None] * 3


async def test_a_drive_that_hangs_delays_nothing_on_the_others(array: Array) -> None:
    # F5 (b)
    await array.open()
    drives = array.drives
    assert drives is not None
    faults = array.faults[0]
    faults.add("write", "slab-*", "hang")
    hung = []
    for batch in range(6):
        slots = drives.allocate(LENGTH, 4)
        writing = asyncio.create_task(
            drives.write([write_job(slot, f"{batch} {i}", LENGTH) for i, slot in enumerate(slots)])
        )
        if drive_of(drives, int(slots[0])) == 0:
            hung.append(writing)
            assert await asyncio.to_thread(faults.hanging.acquire, timeout=10)
        else:
            assert await asyncio.wait_for(writing, 10) == [None] * 4
    assert len(hung) == 1, "a drive with a call under way is not asked again while others have none"
    array.clock.now += 20
    assert str(drives.reason).startswith(f"{array.paths[0]}: no answer from the device")
    assert drives.writable
    assert not await drives.close(deadline=0.1)
    faults.clear()
    assert await hung[0] == ["closed"] * 4
    assert await drives.close()
    array.drives = None


async def test_a_drive_that_cannot_be_opened_is_tried_again_and_joins_with_what_it_holds(array: Array) -> None:
    await array.open()
    assert array.drives is not None
    for batch in range(3):
        await put(array.drives, [f"{batch} {i}" for i in range(4)])
    await array.close()
    array.faults[1].add("stat", "*", "EIO")
    recovery = await array.open()
    drives = array.drives
    assert drives is not None
    assert len(recovery) == 8
    assert drives.state == "sick"
    assert f"{array.paths[1]}: disk.directory" in str(drives.reason)
    await put(drives, ["meanwhile"])
    await array.watch()
    assert drives.state == "sick", "its pause is not over"
    array.clock.now += 2
    await array.watch()
    assert drives.state == "sick", "it fails still"
    array.faults[1].clear()
    array.clock.now += 61
    (joined,) = await array.watch()
    assert (drives.state, drives.blocks, len(joined)) == ("ok", 13, 4)
    assert drives.lie_on(1, joined.slot).all()
    for name in (f"{batch} {i}" for batch in range(3) for i in range(4)):
        if key(name) in whereabouts(joined):
            assert await fetch(drives, whereabouts(joined)[key(name)], name, LENGTH) is None  # type: ignore[arg-type]
    drives.free(joined.slot[:2])
    placed = {drive_of(drives, (await put(drives, [f"after {batch} {i}" for i in range(4)]))[0]) for batch in range(3)}
    assert 1 in placed
    assert len(await array.open()) == 11 + 12


async def test_status_tells_of_a_drive_whose_directory_cannot_be_reached_at_the_start(tmp_path: Path) -> None:
    def unreachable(directory: Path) -> Folder:
        raise OSError(errno.EIO, f"Input/output error: {directory}")

    drives = Drives([DiskTier(tmp_path / "well", MIB), DiskTier(tmp_path / "sick", MIB, folder=unreachable)])
    assert len(await asyncio.to_thread(drives.open)) == 0
    well, sick = drives.status()["drives"]
    assert (well["state"], sick["state"], sick["journal"]["bytes"]) == ("ok", "sick", 0)
    assert "Input/output error" in sick["reason"]
    assert drives.check() == []
    assert await drives.close()


async def test_a_drive_that_hangs_at_the_start_is_left_out(array: Array) -> None:
    await array.open()
    assert array.drives is not None
    for batch in range(3):
        await put(array.drives, [f"{batch} {i}" for i in range(4)])
    await array.close()
    array.faults[2].add("names", "*", "hang")
    array.patience = 0.5
    recovery = await array.open()
    drives = array.drives
    assert len(recovery) == 8
    assert str(drives.reason).endswith("no answer from the device for 0.5 s")
    array.clock.now += 2
    await array.watch()
    assert drives.state == "sick"
    await put(drives, ["meanwhile"])
    array.faults[2].clear()
    while drives.state == "sick":
        array.clock.now += 61
        await array.watch()
        await asyncio.sleep(0.01)
    assert drives.blocks == 13


async def test_no_drive_at_all_is_a_tier_that_cannot_be_had(array: Array) -> None:
    await array.open()
    await array.close()
    for faults in array.faults:
        faults.add("names", "*", "EIO")
    with pytest.raises(TierUnavailable, match=r"disk\.directory"):
        await array.open()


@pytest.mark.parametrize("how", ["twice", "by a link", "not a directory"])
async def test_one_directory_that_cannot_be_had_is_refused_and_the_others_let_go(array: Array, how: str) -> None:
    first, second, third = array.paths
    first.mkdir()
    if how == "twice":
        array.paths[2] = first
    elif how == "by a link":
        third.symlink_to(first)
    else:
        third.write_text("x")
    with pytest.raises(ConfigError, match=r"disk\.directory.*(same directory|not a directory)"):
        await array.open()
    array.paths = [first, second]
    array.faults.pop()
    await array.open()


async def test_a_limit_that_shrank_is_told_by_drive(array: Array) -> None:
    size = slot_size(LENGTH)
    await array.open()
    assert array.drives is not None
    for batch in range(6):
        await put(array.drives, [f"{batch} {i}" for i in range(4)])
    await array.open([5 * size, 100 * size, 6 * size])
    assert array.drives is not None
    assert array.drives.excess() == {0: 3 * size, 2: 2 * size}
    assert await store(array.drives, ["fits beside"], LENGTH)  # type: ignore[arg-type]
