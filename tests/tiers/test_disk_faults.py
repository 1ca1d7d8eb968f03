"""A sick disk is a state, not an outage: what each fault costs, what it leaves, and that the drive comes back."""

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from engines.disk import KIB, MIB, NS, Tiers, fetch, key, read_job, store, whereabouts, write_job
from engines.faults import Faults

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.tiers.directory import check_directory
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.slabfile import disproves, slot_size


@pytest.fixture
def faults() -> Faults:
    return Faults()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


async def give_pause(tiers: Tiers) -> None:
    """Longer than any back-off; and the look that follows."""
    tiers.clock.now += 61
    assert tiers.tier is not None
    await tiers.tier.watch()


# -- writes


WRITE_FAULTS = [
    ("write", "slab-*", "EIO", "EIO"),
    ("write", "slab-*", "ENOSPC", "ENOSPC"),
    ("write", "slab-*", "EROFS", "EROFS"),
    ("write", "slab-*", "short", "short write"),
    ("allocate", "slab-*", "ENOSPC", "ENOSPC"),
    ("allocate", "slab-*", "EIO", "EIO"),
    ("open", "slab-*", "EROFS", "EROFS"),
    ("sync", "slab-*", "EIO", "EIO"),
    ("open", "journal-*", "EIO", "EIO"),
    ("write", "journal-*", "ENOSPC", "ENOSPC"),
    ("sync", "journal-*", "EIO", "EIO"),
    ("write", "namespace-*", "EIO", "EIO"),
    ("sync", "namespace-*", "EIO", "EIO"),
    ("rename", "namespace-*", "EIO", "EIO"),
    ("sync", ".", "EIO", "EIO"),
]


@pytest.mark.parametrize(("operation", "name", "what", "reason"), WRITE_FAULTS)
async def test_a_write_that_fails_is_never_found_and_the_next_one_is(
    tiers: Tiers, faults: Faults, operation: str, name: str, what: str, reason: str
) -> None:
    # A1, each step of a write at which a device can fail.
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    faults.add(operation, name, what)
    slots = tier.allocate(64 * KIB, 3)
    jobs = [write_job(slot, i, 64 * KIB) for i, slot in enumerate(slots)]
    assert await tier.write(jobs) == [reason] * 3
    assert (tier.state, tier.reason) == ("sick", reason)
    assert tier.failures[reason] == 3
    assert len(tier.allocate(64 * KIB, 1)) == 0
    tier.free(slots)
    faults.clear()
    await give_pause(tiers)
    assert tier.state == "ok"
    (slot,) = await store(tier, [0], 64 * KIB)
    assert await fetch(tier, slot, 0, 64 * KIB) is None
    recovery = await tiers.open(folder=faults.folder)
    assert list(whereabouts(recovery)) == [key(0)]
    assert tiers.tier is not None
    assert tiers.tier.used == slot_size(64 * KIB)
    assert await fetch(tiers.tier, int(recovery.slot[0]), 0, 64 * KIB) is None


async def test_one_short_write_among_many_costs_its_own_block(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    slots = tier.allocate(20_000, 4)
    bad = 2 * slot_size(20_000)
    faults.add("write", "slab-*", "short", at=bad)
    reasons = await tier.write([write_job(slot, i, 20_000) for i, slot in enumerate(slots)])
    assert reasons == [None, None, "short write", None]
    assert [await fetch(tier, int(slot), i, 20_000) for i, slot in enumerate(slots)] == [None, None, "no block", None]


async def test_a_journal_that_takes_its_records_in_pieces_is_whole(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    assert tiers.tier is not None
    faults.add("write", "journal-*", "short", times=3)
    await store(tiers.tier, range(8), 4096)
    assert len(await tiers.open(folder=faults.folder)) == 8


async def test_direct_io_that_is_refused_is_given_up_and_nothing_is_lost(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    before = await store(tier, range(3), 10_001)
    faults.direct = False
    slots = before + await store(tier, range(3, 6), 10_001)
    other = await store(tier, ["of another file"], 20_000)
    assert await fetch(tier, other[0], "of another file", 20_000) is None
    assert str(tier.status()["io"]) == "buffered: direct IO gave EINVAL"
    assert tier.state == "ok"
    for name, slot in enumerate(slots):
        assert await fetch(tier, slot, name, 10_001) is None


async def test_a_file_system_that_refuses_direct_io_at_the_start_is_used_without(tiers: Tiers, faults: Faults) -> None:
    faults.direct = False
    await tiers.open(folder=faults.folder)
    assert tiers.tier is not None
    assert str(tiers.tier.status()["io"]) == "buffered: direct IO gave EINVAL"
    (slot,) = await store(tiers.tier, ["a"], 5000)
    assert await fetch(tiers.tier, slot, "a", 5000) is None


# -- reads


async def test_a_drive_that_cannot_be_read_keeps_its_blocks_and_is_tried_again(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, range(3), 64 * KIB)
    faults.add("read", "slab-*", "EIO")
    assert await fetch(tier, slots[0], 0, 64 * KIB) == "EIO"
    assert not disproves("EIO")
    assert (tier.state, tier.readable, tier.writable) == ("sick", False, True)
    assert await fetch(tier, slots[0], 0, 64 * KIB) == "sick: EIO"
    await tier.watch()
    assert tier.state == "sick", "the pause is not over"
    await give_pause(tiers)
    assert tier.state == "sick", "and the device no better"
    faults.clear()
    await give_pause(tiers)
    assert tier.state == "ok"
    for name, slot in enumerate(slots):
        assert await fetch(tier, slot, name, 64 * KIB) is None
    assert tier.misses == {"EIO": 1, "left alone": 1}


async def test_a_bad_sector_costs_its_block_and_not_the_drive(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, range(4), 64 * KIB)
    faults.add("read", "slab-*", "EIO", at=slot_size(64 * KIB) + 9000)
    jobs = [read_job(slot, name, 64 * KIB) for name, slot in enumerate(slots)]
    # Beside others that could be read, it is plainly the block's own.
    assert await tier.read(jobs) == [None, "unreadable: EIO", None, None]
    assert disproves("unreadable: EIO")
    assert tier.state == "ok"


async def test_a_bad_sector_read_alone_is_told_from_a_bad_drive_by_the_second_time(
    tiers: Tiers, faults: Faults
) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, range(4), 64 * KIB)
    faults.add("read", "slab-*", "EIO", at=slot_size(64 * KIB) + 9000)
    assert await fetch(tier, slots[1], 1, 64 * KIB) == "EIO"
    assert tier.state == "sick"
    await give_pause(tiers)
    assert tier.state == "ok", "the drive answers"
    assert await fetch(tier, slots[1], 1, 64 * KIB) == "unreadable: EIO"
    assert tier.state == "ok"


@pytest.mark.parametrize("what", ["flip", "short"])
async def test_bytes_that_change_on_their_way_are_a_miss(tiers: Tiers, faults: Faults, what: str) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["a"], 64 * KIB)
    faults.add("read", "slab-*", what, times=1)
    reason = "payload checksum" if what == "flip" else "short read"
    assert await fetch(tier, slot, "a", 64 * KIB) == reason
    assert tier.misses == {reason: 1}
    assert await fetch(tier, slot, "a", 64 * KIB) is None


# -- a device that does not answer


async def eventually_sick(tiers: Tiers) -> None:
    assert tiers.tier is not None
    tiers.clock.now += 20
    assert tiers.tier.state == "sick"
    assert str(tiers.tier.reason).startswith("no answer from the device for ")


async def test_what_waits_behind_a_read_that_hangs_is_given_up_and_the_shutdown_goes_on(
    tiers: Tiers, faults: Faults
) -> None:
    # F5 (b)
    await tiers.open(folder=faults.folder, threads=1)
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, range(3), 64 * KIB)
    faults.add("read", "slab-*", "hang", times=1)
    hung = asyncio.create_task(tier.read([read_job(slots[0], 0, 64 * KIB)]))
    assert await asyncio.to_thread(faults.hanging.acquire, timeout=10)
    behind = [asyncio.create_task(tier.read([read_job(slot, 9, 64 * KIB)])) for slot in slots]
    await asyncio.sleep(0)
    await eventually_sick(tiers)
    await tier.watch()
    for task in behind:
        (reason,) = await asyncio.wait_for(task, 5)
        assert str(reason).startswith("sick: no answer")
    assert not hung.done(), "its memory may be written to"
    began = time.perf_counter()
    assert not await tier.close(deadline=0.1)
    assert time.perf_counter() - began < 2
    faults.clear()
    assert await hung == [None]
    assert await tier.close()


async def on_disk(directory: Path, beside: Path) -> set[bytes]:
    """The blocks that the directory's records name at this moment, as a daemon that started now would find them."""
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(directory, beside)
    tier = DiskTier(beside, 64 * MIB)
    found = set(whereabouts(tier.open()))
    assert await tier.close()
    return found


@pytest.mark.parametrize("end", ["goes on", "is cancelled", "is given up"])
async def test_records_come_in_the_order_of_the_writes_whichever_payload_is_there_first(
    tiers: Tiers, faults: Faults, tmp_path: Path, end: str
) -> None:
    await tiers.open(folder=faults.folder, threads=2)
    tier = tiers.tier
    assert tier is not None
    await store(tier, ["before"], 64 * KIB)
    slots = tier.allocate(64 * KIB, 3).tolist()
    faults.add("write", "slab-*", "hang", times=1)
    head = asyncio.create_task(tier.write([write_job(slots[0], "head", 64 * KIB)]))
    assert await asyncio.to_thread(faults.hanging.acquire, timeout=10)
    jobs = [write_job(slots[1], "tail", 64 * KIB), write_job(slots[2], "its tail", 64 * KIB)]
    tails = [asyncio.create_task(tier.write([job])) for job in jobs]
    file, last = tiers.directory / f"slab-{slot_size(64 * KIB)}.dat", bytes(jobs[1].payload)
    while last not in file.read_bytes():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if end == "is cancelled":
        tails[0].cancel()
    if end == "is given up":
        await eventually_sick(tiers)
        await tier.watch()
        assert all(str(reason).startswith("sick: no answer") for (reason,) in await asyncio.gather(*tails))
    await asyncio.sleep(0.05)
    assert await on_disk(tiers.directory, tmp_path / "copy") == {key("before")}
    faults.clear()
    assert await head == [None]
    outcomes = await asyncio.gather(*tails, return_exceptions=True)
    if end == "goes on":
        assert outcomes == [[None], [None]]
    if end != "is given up":
        assert outcomes[1] == [None]
        assert {key("head"), key("its tail")} <= await on_disk(tiers.directory, tmp_path / "copy")
    tier.free(slots)


async def test_where_a_payload_cannot_be_written_those_below_it_are_not_recorded(
    tiers: Tiers, faults: Faults, tmp_path: Path
) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    slots = tier.allocate(64 * KIB, 5).tolist()
    parents = [b"", key(0), key(1), key(2), b""]
    jobs = [write_job(slot, n, 64 * KIB, parent=parents[n]) for n, slot in enumerate(slots)]
    faults.add("write", "slab-*", "EIO", at=slot_size(64 * KIB))
    assert await tier.write(jobs) == [None, "EIO", *["its parent was not written"] * 2, None]
    assert await on_disk(tiers.directory, tmp_path / "copy") == {key(0), key(4)}
    assert tier.failures == {"EIO": 1, "its parent was not written": 2}
    tier.free(slots)
    faults.clear()


@pytest.mark.parametrize("operation", ["moved", "stat", "space", "names"])
async def test_a_look_that_hangs_is_a_sick_state_that_passes(tiers: Tiers, faults: Faults, operation: str) -> None:
    await tiers.open(folder=faults.folder)
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["a"], 4096)
    faults.add(operation, "*", "hang", times=1)
    looking = asyncio.create_task(tier.watch())
    assert await asyncio.to_thread(faults.hanging.acquire, timeout=10)
    await eventually_sick(tiers)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    faults.clear()
    await tier.watch()
    assert tier.state == "ok"
    assert await fetch(tier, slot, "a", 4096) is None


# -- vanished, deleted, replaced


async def test_a_mount_that_vanishes_is_left_alone_until_it_is_back(
    tiers: Tiers, image_disk: Path, tmp_path: Path
) -> None:
    directory = image_disk / "disk"
    await tiers.open(directory=directory, capacity=16 * MIB)
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["kept"], 64 * KIB)
    command("umount", "-l", image_disk)
    await tier.watch()
    assert tier.state == "sick"
    assert "its path leads elsewhere" in str(tier.reason)
    assert await fetch(tier, slot, "kept", 64 * KIB) == f"sick: {tier.reason}"
    assert len(tier.allocate(64 * KIB, 1)) == 0
    await tier.watch()
    assert names_in(image_disk) == [], "nothing is written to what lies below"
    command("mount", "-o", "loop", tmp_path / "image", image_disk)
    await tier.watch()
    assert (tier.state, tier.counters["vanished"]) == ("ok", 1)
    assert await fetch(tier, slot, "kept", 64 * KIB) is None
    (second,) = await store(tier, ["second"], 64 * KIB)
    recovery = await tiers.open(directory=directory, capacity=16 * MIB)
    assert sorted(whereabouts(recovery)) == sorted([key("kept"), key("second")])
    assert second != slot
    await tiers.close()


async def test_another_directory_at_the_path_is_not_written_to(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["a"], 4096)
    aside = tiers.directory.with_name("aside")
    tiers.directory.rename(aside)
    for content in (None, "kvcascade disk 1\npage 4096\nid " + "0" * 32 + "\n"):
        tiers.directory.mkdir(exist_ok=True)
        if content is not None:
            (tiers.directory / "format").write_text(content)
        await tier.watch()
        await tier.watch()
        assert tier.state == "sick"
        assert names_in(tiers.directory) == (["format"] if content else [])
    assert "another directory lies at its path" in str(tier.reason)
    tier.free([slot])  # owed until it can be written down
    shutil.rmtree(tiers.directory)
    aside.rename(tiers.directory)
    await tier.watch()
    assert tier.state == "ok"
    assert await tier.flush() is None
    assert len(await tiers.open()) == 0


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_slab_file_deleted_under_the_daemon_costs_its_blocks_alone(tiers: Tiers, how: str) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    lost, kept = await store(tier, ["lost"], 4096), await store(tier, ["kept"], 70_000)
    victim = tiers.directory / f"slab-{slot_size(4096)}.dat"
    victim.unlink()
    if how == "replaced":
        victim.write_bytes(os.urandom(3 * slot_size(4096)))
    await tier.watch()
    assert tier.reason == f"{victim.name} was deleted or replaced"
    await tier.watch()
    assert tier.state == "ok"
    reason = await fetch(tier, lost[0], "lost", 4096)
    assert reason is not None
    assert disproves(reason)
    assert await fetch(tier, kept[0], "kept", 70_000) is None
    tier.free(lost)
    await store(tier, ["after"], 4096)
    recovery = await tiers.open()
    assert sorted(whereabouts(recovery)) == sorted([key("kept"), key("after")])
    assert tiers.tier is not None
    for name, length in (("kept", 70_000), ("after", 4096)):
        assert await fetch(tiers.tier, whereabouts(recovery)[key(name)], name, length) is None


async def test_a_directory_emptied_under_the_daemon_is_a_sick_drive(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["a"], 4096)
    for path in tiers.directory.iterdir():
        path.unlink()
    for _ in range(2):
        await tier.watch()
        assert tier.state == "sick"
        assert await fetch(tier, slot, "a", 4096) == f"sick: {tier.reason}"
    assert names_in(tiers.directory) == []


async def test_a_file_system_that_the_kernel_made_read_only_still_serves(tiers: Tiers, image_disk: Path) -> None:
    await tiers.open(directory=image_disk / "disk", capacity=16 * MIB)
    tier = tiers.tier
    assert tier is not None
    (slot,) = await store(tier, ["a"], 64 * KIB)
    command("mount", "-o", "remount,abort", image_disk)
    slots = tier.allocate(64 * KIB, 1)
    (reason,) = await tier.write([write_job(slots[0], "b", 64 * KIB)])
    assert reason in ("EROFS", "EIO")
    assert (tier.state, tier.readable) == ("sick", True)
    assert await fetch(tier, slot, "a", 64 * KIB) is None
    await give_pause(tiers)
    assert tier.state == "sick"
    await tiers.close()


# -- room


async def test_the_tier_shrinks_when_others_fill_the_file_system(tiers: Tiers, small_disk: Path) -> None:
    await tiers.open(directory=small_disk / "disk", capacity=64 * MIB, reserve=MIB)
    tier = tiers.tier
    assert tier is not None
    assert tier.limit < 8 * MIB - MIB + 1
    count = tier.room(252 * KIB)
    slots = await store(tier, range(count), 252 * KIB)
    await tier.watch()
    assert len(tier.allocate(252 * KIB, 1)) == 0
    assert os.statvfs(small_disk).f_bavail * 4096 >= MIB - 256 * KIB
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(MIB))
    await tier.watch()
    over = tier.used - tier.limit
    assert over >= MIB - 512 * KIB
    going = -(-over // slot_size(252 * KIB))
    tier.free(slots[:going])
    assert tier.used <= tier.limit
    await tier.watch()
    assert os.statvfs(small_disk).f_bavail * 4096 >= MIB - 256 * KIB, "what nobody holds was given back"
    ballast.unlink()
    await tier.watch()
    assert tier.room(252 * KIB) >= going
    for name in range(going, count):
        assert await fetch(tier, slots[name], name, 252 * KIB) is None
    await tiers.close()


async def test_a_real_file_system_is_filled_to_its_reserve_and_never_beyond(tiers: Tiers, image_disk: Path) -> None:
    # F1, E3: thousands of small blocks in one file; ext4 with its own reserved blocks and metadata.
    def available() -> int:
        figures = os.statvfs(image_disk)
        return figures.f_bavail * figures.f_frsize

    reserve = 8 * MIB
    await tiers.open(directory=image_disk / "disk", capacity=1 << 40, reserve=reserve)
    tier = tiers.tier
    assert tier is not None
    inodes = os.statvfs(image_disk).f_ffree
    held: dict[int, int] = {}
    name = 0
    while (count := min(500, tier.room(4096))) > 0:
        for slot in await store(tier, range(name, name + count), 4096):
            held[slot] = name
            name += 1
        await tier.watch()
        assert available() >= reserve - MIB
    assert name > 3000
    assert inodes - os.statvfs(image_disk).f_ffree < 5
    (image_disk / "others").write_bytes(bytes(6 * MIB))
    await tier.watch()
    over = tier.used - tier.limit
    assert over > 4 * MIB
    going = list(held)[: -(-over // slot_size(4096))]
    tier.free(going)
    await tier.watch()
    await tier.watch()
    assert available() >= reserve - MIB
    for slot in going:
        del held[slot]
    recovery = await tiers.open(directory=image_disk / "disk", capacity=1 << 40, reserve=reserve)
    assert len(recovery) == len(held)
    assert tiers.tier is not None
    found = whereabouts(recovery)
    for name in list(held.values())[::50]:
        assert await fetch(tiers.tier, found[key(name)], name, 4096) is None
    await tiers.close()


async def test_a_limit_larger_than_the_file_system_is_held_to_what_there_is(tiers: Tiers, small_disk: Path) -> None:
    await tiers.open(directory=small_disk / "disk", capacity=1 << 50)
    tier = tiers.tier
    assert tier is not None
    assert tier.limit <= 8 * MIB
    assert tier.capacity == 1 << 50
    room = tier.room(252 * KIB)
    slots = tier.allocate(252 * KIB, room + 5)
    assert len(slots) == room
    reasons = await tier.write([write_job(slot, i, 252 * KIB) for i, slot in enumerate(slots)])
    assert reasons.count(None) >= room - 1
    await tiers.close()


def test_a_capacity_of_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk\.capacity: 0 bytes"):
        DiskTier(tmp_path, 0)


# -- start


async def test_a_drive_that_fails_at_the_start_says_so_and_leaves_nothing_open(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    assert tiers.tier is not None
    await store(tiers.tier, ["a"], 4096)
    await tiers.close()
    faults.add("stat", "slab-*", "EIO")
    with pytest.raises(TierUnavailable, match=r"disk\.directory .*Input/output error"):
        DiskTier(tiers.directory, MIB, folder=faults.folder).open()
    faults.clear()
    assert len(await tiers.open(folder=faults.folder)) == 1


async def test_a_journal_that_cannot_be_read_costs_blocks_and_not_the_start(tiers: Tiers, faults: Faults) -> None:
    await tiers.open(folder=faults.folder)
    assert tiers.tier is not None
    await store(tiers.tier, ["a"], 4096)
    await tiers.close()
    faults.add("read", "journal-*", "EIO")
    recovery = await tiers.open(folder=faults.folder)
    assert len(recovery) == 0
    assert list(recovery.dropped.values()) == [1]
    assert "unreadable journal-00000001" in next(iter(recovery.dropped))


@pytest.mark.parametrize("discard", [False, True])
async def test_content_of_an_earlier_version_is_refused_or_cleaned_away_as_asked(tiers: Tiers, discard: bool) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, ["a"], 4096)
    await tiers.close()
    form = tiers.directory / "format"
    form.write_text(form.read_text().replace("disk 1", "disk 0"))
    (tiers.directory / "lost+found").mkdir()
    if not discard:
        with pytest.raises(ConfigError, match=r"disk\.directory .* has format 0, of an earlier version.*discard"):
            await tiers.open()
        assert (tiers.directory / f"slab-{slot_size(4096)}.dat").exists()
        return
    recovery = await tiers.open(discard_old=True)
    assert (len(recovery), recovery.dropped) == (0, {"files of format 0": 2})
    assert not list(tiers.directory.glob("slab-*"))
    assert (tiers.directory / "lost+found").exists()
    assert tiers.tier is not None
    await store(tiers.tier, ["b"], 4096)


# -- repair


async def damaged(tiers: Tiers) -> None:
    """Ten blocks; slot 1's payload and slot 2's header damaged, the record of slot 3 and of slot 4 too."""
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(10), 10_000)
    await tiers.close()
    size = slot_size(10_000)
    with (tiers.directory / f"slab-{size}.dat").open("r+b") as slab:
        for offset in (size + 5000, 2 * size + 60):
            slab.seek(offset)
            byte = slab.read(1)[0]
            slab.seek(offset)
            slab.write(bytes([byte ^ 1]))
    (journal,) = tiers.directory.glob("journal-*")
    content = bytearray(journal.read_bytes())
    for record in (3, 4):
        content[record * 104 + 30] ^= 1
    journal.write_bytes(content)
    (tiers.directory / "snapshot-00000003.tmp").write_bytes(b"half a")


async def test_a_repair_keeps_what_proves_itself_and_a_second_check_is_content(tiers: Tiers) -> None:
    await damaged(tiers)
    before = {path.name: path.read_bytes() for path in tiers.directory.iterdir()}
    report = check_directory(tiers.directory, deep=True)
    assert (report.ok, report.repaired) == (False, [])
    assert {path.name: path.read_bytes() for path in tiers.directory.iterdir() if path.name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }
    report = check_directory(tiers.directory, deep=True, repair=True)
    assert report.damaged == {"payload checksum": 1, "header checksum": 1}
    assert report.dropped == {"damaged journal record": 2}
    assert report.repaired == [
        "2 damaged blocks forgotten",
        "2 blocks without a record taken back",
        "left-over snapshot-00000003.tmp removed",
        "2 records dropped for good: damaged journal record",
    ]
    again = check_directory(tiers.directory, deep=True)
    assert (again.ok, again.blocks, again.dropped, again.repaired) == (True, 8, {}, [])
    recovery = await tiers.open()
    assert sorted(whereabouts(recovery)) == sorted(key(name) for name in range(10) if name not in (1, 2))
    assert recovery.dropped == {}
    assert tiers.tier is not None
    for name in (0, 3, 4, 5, 6, 7, 8, 9):
        assert await fetch(tiers.tier, whereabouts(recovery)[key(name)], name, 10_000) is None


async def test_a_repair_brings_blocks_back_when_the_whole_journal_is_gone(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(10), 10_000)
    await tiers.close()
    (journal,) = tiers.directory.glob("journal-*")
    journal.write_bytes(bytes(journal.stat().st_size))
    report = check_directory(tiers.directory, deep=True, repair=True)
    assert "10 blocks without a record taken back" in report.repaired
    recovery = await tiers.open()
    assert len(recovery) == 10
    assert tiers.tier is not None
    for name in range(10):
        assert await fetch(tiers.tier, whereabouts(recovery)[key(name)], name, 10_000) is None


async def test_a_repair_of_a_sound_directory_changes_nothing(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(3), 10_000)
    await tiers.close()
    before = {path.name: path.read_bytes() for path in tiers.directory.iterdir() if path.name != "lock"}
    assert check_directory(tiers.directory, deep=True, repair=True).repaired == []
    assert {path.name: path.read_bytes() for path in tiers.directory.iterdir() if path.name != "lock"} == before


@pytest.mark.parametrize("content", [None, b"", b"kvcascade disk 1\npage 4096\nid 00\n", b"\0" * 60])
async def test_a_repair_takes_back_what_slots_prove_where_the_format_is_lost(
    tiers: Tiers, content: bytes | None
) -> None:
    await damaged(tiers)
    file = tiers.directory / "format"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'format' is (damaged|missing); `kvcascade check DIRECTORY --repair`"):
            await tiers.open()
    with pytest.raises(ConfigError, match="--repair"):
        check_directory(tiers.directory, deep=False)
    seen: list[tuple[int, int]] = []
    report = check_directory(
        tiers.directory, deep=False, repair=True, progress=lambda done, of: seen.append((done, of))
    )
    assert report.repaired == ["'format' made anew", "8 blocks without a record taken back"]
    assert (report.blocks, report.ok, [entry[0] for entry in report.namespaces]) == (8, True, [NS])
    assert seen[-1][0] == seen[-1][1]
    assert check_directory(tiers.directory, deep=True).ok
    recovery = await tiers.open()
    assert sorted(whereabouts(recovery)) == sorted(key(name) for name in range(10) if name not in (1, 2))
    assert tiers.tier is not None
    for name in (0, 3, 4, 5, 6, 7, 8, 9):
        assert await fetch(tiers.tier, whereabouts(recovery)[key(name)], name, 10_000) is None
    await store(tiers.tier, ["after"], 10_000)
    assert len(await tiers.open()) == 9


async def test_a_lost_format_is_not_made_up_where_nothing_proves_to_be_ours(tiers: Tiers) -> None:
    await damaged(tiers)
    file = tiers.directory / "format"
    file.write_bytes(b"nonsense")
    (tiers.directory / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"'thesis\.tex', which is not kvcascade's"):
        check_directory(tiers.directory, deep=False, repair=True)
    (tiers.directory / "thesis.tex").unlink()
    (slab,) = tiers.directory.glob("slab-*")
    slab.write_bytes(bytes(slab.stat().st_size))
    with pytest.raises(ConfigError, match="no slot proves a block: empty the directory"):
        check_directory(tiers.directory, deep=False, repair=True)
    assert file.read_bytes() == b"nonsense"
