"""The disk tier forgets when it must and never lies: every byte that it returns is checked against its key."""

import asyncio
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engines.disk import (
    KIB,
    MIB,
    NS,
    OTHER_NS,
    Tiers,
    aligned,
    fetch,
    key,
    read_job,
    store,
    truth,
    whereabouts,
    write_job,
)

from kvcascade.config.errors import ConfigError
from kvcascade.tiers.directory import check_directory
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.journal import RECORD, RECORD_BYTES, Journal
from kvcascade.tiers.slabfile import BlockMeta, ReadJob, WriteJob, disproves, slot_size

# -- the natural way


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 100_001, 2 * MIB])
async def test_what_was_written_is_read_back_byte_for_byte(tiers: Tiers, length: int) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, ["a", "b", "c"], length)
    for slot, name in zip(slots, ["a", "b", "c"], strict=True):
        assert await fetch(tier, slot, name, length) is None
    assert tier.used == 3 * slot_size(length)
    assert tier.blocks == 3


async def test_a_batch_in_any_order_over_several_sizes_is_read_back(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    blocks = [(name, 16 * KIB if name % 3 else 64 * KIB) for name in range(100)]
    slots = {name: int(tier.allocate(length, 1)[0]) for name, length in blocks}
    random.Random(1).shuffle(blocks)
    assert await tier.write([write_job(slots[n], n, length) for n, length in blocks]) == [None] * 100
    random.Random(2).shuffle(blocks)
    jobs = [read_job(slots[n], n, length) for n, length in blocks]
    assert await tier.read(jobs) == [None] * 100
    for job, (name, length) in zip(jobs, blocks, strict=True):
        assert np.array_equal(job.into, truth(name, length))


async def test_memory_that_does_not_begin_on_a_page_is_taken_too(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    length = 10_000
    payload = aligned(length + 1)[1:]
    payload[:] = truth("odd", length)
    (slot,) = tier.allocate(length, 1)
    meta = BlockMeta(NS, key("odd"), b"", 0, length, 0)
    assert await tier.write([WriteJob(int(slot), meta, payload.data)]) == [None]
    into = bytearray(length + 1)
    assert await tier.read([ReadJob(int(slot), NS, key("odd"), 0, length, memoryview(into)[1:])]) == [None]
    assert into[1:] == truth("odd", length).tobytes()


async def test_everything_about_a_block_comes_back_after_a_restart(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    first, second = tier.allocate(20_000, 2).tolist()
    jobs = [
        WriteJob(first, BlockMeta(NS, key("root"), b"", 3, 20_000, 11), truth("root", 20_000)),
        WriteJob(second, BlockMeta(OTHER_NS, key("leaf")[:16], key("root"), 0, 19_999, 2**63), aligned(19_999)),
    ]
    assert await tier.write(jobs) == [None, None]
    recovery = await tiers.open()
    assert sorted(recovery.namespaces) == sorted([(NS, b"what NS means"), (OTHER_NS, b"what OTHER_NS means")])
    assert [recovery.namespaces[i][0] for i in recovery.ns] == [NS, OTHER_NS]
    assert recovery.hashes[0].tobytes() == key("root")
    assert recovery.hashes[1].tobytes() == key("leaf")[:16] + bytes(16)
    assert recovery.parents[1].tobytes() == key("root")
    assert recovery.has_parent.tolist() == [False, True]
    assert recovery.group.tolist() == [3, 0]
    assert recovery.length.tolist() == [20_000, 19_999]
    assert recovery.stamp.tolist() == [11, 2**63]
    assert recovery.dropped == {}
    assert [column.dtype.str for column in (recovery.slot, recovery.ns, recovery.stamp)] == ["<u4", "<u4", "<u8"]
    job = ReadJob(int(recovery.slot[1]), OTHER_NS, key("leaf")[:16], 0, 19_999, aligned(19_999))
    assert tiers.tier is not None
    assert await tiers.tier.read([job]) == [None]


async def test_a_file_system_without_direct_io_serves_through_the_page_cache(tiers: Tiers, plain_disk: Path) -> None:
    await tiers.open(directory=plain_disk / "disk")
    tier = tiers.tier
    assert tier is not None
    assert str(tier.status()["io"]).startswith("buffered: ")
    slots = await store(tier, range(20), 10_001)
    recovery = await tiers.open(directory=plain_disk / "disk")
    assert sorted(recovery.slot.tolist()) == sorted(slots)
    tier = tiers.tier
    assert tier is not None
    for name in range(20):
        assert await fetch(tier, whereabouts(recovery)[key(name)], name, 10_001) is None
    await tiers.close()


async def test_status_is_plain_data(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, ["a"], 5000)
    status = json.loads(json.dumps(tiers.tier.status()))
    assert (status["name"], status["state"], status["blocks"]) == ("disk", "ok", 1)
    assert status["used"] + status["free"] == status["capacity"]


# -- space


async def test_the_limit_holds_and_counts_header_pages(tiers: Tiers) -> None:
    await tiers.open(capacity=10 * slot_size(64 * KIB) + 100)
    tier = tiers.tier
    assert tier is not None
    assert tier.room(64 * KIB) == 10
    slots = tier.allocate(64 * KIB, 11)
    assert len(slots) == 10
    assert tier.used <= tier.capacity
    assert len(tier.allocate(64 * KIB, 1)) == 0
    assert len(tier.allocate(1, 1)) == 0
    tier.free(slots[:1])
    assert tier.allocate(64 * KIB, 5).tolist() == [slots[0]]
    tier.free(slots)
    assert tier.used == 0


async def test_the_slots_of_a_chain_lie_together_and_freed_ones_are_reused_in_order(tiers: Tiers) -> None:
    await tiers.open(capacity=100 * slot_size(4096))
    tier = tiers.tier
    assert tier is not None
    slots = tier.allocate(4096, 100)
    assert np.array_equal(np.diff(slots), np.ones(99))
    tier.free(slots[[3, 50, 51, 52, 53, 80]])
    assert tier.allocate(4096, 4).tolist() == slots[50:54].tolist()
    assert tier.allocate(4096, 9).tolist() == slots[[3, 80]].tolist()
    tier.free(slots[20:40])
    assert tier.allocate(4096, 6).tolist() == slots[20:26].tolist()
    assert tier.allocate(4096, 6).tolist() == slots[26:32].tolist()
    tier.free(np.setdiff1d(slots, slots[32:40]))


async def test_freeing_twice_or_a_slot_of_nobody_is_refused(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    (slot,) = tier.allocate(4096, 1).tolist()
    with pytest.raises(ValueError, match="twice"):
        tier.free([slot, slot])
    tier.free([slot])
    with pytest.raises(ValueError, match="twice"):
        tier.free([slot])
    for stranger in (slot + 1_000_000, 2**32 - 1):
        with pytest.raises(ValueError, match="not of this tier"):
            tier.free([stranger])


async def test_jobs_that_contradict_their_slots_are_refused(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    (slot,) = tier.allocate(4096, 1).tolist()
    good = write_job(slot, "a", 4096)
    for bad, what in [
        (write_job(slot, "a", 9000), "length"),
        (WriteJob(slot, good.meta, aligned(4095)), "payload"),
        (WriteJob(slot, good.meta, np.zeros(8192, dtype=np.uint8)[::2]), "payload"),
        (write_job(slot, "a", 4096, namespace=key("unknown")), "namespace"),
    ]:
        with pytest.raises(ValueError, match=what):
            await tier.write([bad])
    with pytest.raises(ValueError, match="not allocated"):
        await tier.write([good, good])
    assert await tier.write([good]) == [None]
    with pytest.raises(ValueError, match="not allocated"):
        await tier.write([good])
    with pytest.raises(ValueError, match="length"):
        await tier.read([read_job(slot, "a", 9000)])


async def test_space_moves_between_sizes_and_the_files_stay_within_the_limit(tiers: Tiers) -> None:
    capacity = 8 * MIB
    await tiers.open(capacity=capacity)
    tier = tiers.tier
    assert tier is not None

    def on_disk() -> int:
        return sum(path.stat().st_blocks * 512 for path in tiers.directory.glob("slab-*.dat"))

    for round_, length in enumerate([60 * KIB, 508 * KIB, 4 * KIB, 60 * KIB]):
        count = tier.room(length)
        assert count == capacity // slot_size(length)
        names = [f"{round_}-{i}" for i in range(count)]
        slots = await store(tier, names, length)
        assert on_disk() <= capacity + 256 * KIB  # the file system's own blocks
        for slot, name in list(zip(slots, names, strict=True))[:: max(1, count // 20)]:
            assert await fetch(tier, slot, name, length) is None
        tier.free(slots)


async def test_usage_is_right_after_a_restart_and_the_limit_still_holds(tiers: Tiers) -> None:
    # E3
    length, capacity = 60 * KIB, 4 * MIB
    await tiers.open(capacity=capacity)
    assert tiers.tier is not None
    count = int(0.95 * capacity) // slot_size(length)
    await store(tiers.tier, range(count), length)
    recovery = await tiers.open(capacity=capacity)
    tier = tiers.tier
    assert tier is not None
    assert tier.used == count * slot_size(length)
    assert tier.blocks == len(recovery) == count
    # The order of writing is kept, so that the oldest can go first.
    assert [row.tobytes() for row in recovery.hashes] == [key(name) for name in range(count)]
    got = tier.allocate(length, count)
    assert tier.used <= capacity
    assert len(got) == capacity // slot_size(length) - count
    assert not set(got.tolist()) & set(recovery.slot.tolist())


# -- doubt is a miss


DAMAGE = {
    "magic": (0, "no block"),
    "key": (50, "header checksum"),
    "length": (13, "header checksum"),
    "tokens": (136, "header checksum"),
    "unused": (3000, "header checksum"),
    "header checksum": (4090, "header checksum"),
    "payload checksum": (17, "header checksum"),
    "first of payload": (4096, "payload checksum"),
    "last of payload": (4096 + 9999, "payload checksum"),
}


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def slab(directory: Path, length: int) -> Path:
    return directory / f"slab-{slot_size(length)}.dat"


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_flipped_bit_in_a_slot_is_a_miss_for_that_block_alone(tiers: Tiers, damage: str) -> None:
    # F5
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    length = 10_000
    slots = await store(tier, range(3), length)
    offset, reason = DAMAGE[damage]
    flip(slab(tiers.directory, length), slot_size(length) + offset)
    jobs = [read_job(slot, name, length) for name, slot in enumerate(slots)]
    assert await tier.read(jobs) == [None, reason, None]
    for name in (0, 2):
        assert np.array_equal(jobs[name].into, truth(name, length))
    assert tier.misses == {reason: 1}
    assert disproves(reason)
    assert tier.state == "ok"
    await tiers.close()
    report = check_directory(tiers.directory, deep=True)
    assert (report.ok, report.damaged, report.verified) == (False, {reason: 1}, 2)
    shallow = check_directory(tiers.directory, deep=False)
    assert shallow.damaged == ({} if "payload" in reason else {reason: 1})


async def test_slots_that_were_swapped_or_belong_to_another_namespace_are_misses(tiers: Tiers) -> None:
    # A3, F5
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    length, size = 10_000, slot_size(10_000)
    slots = await store(tier, ["a", "b"], length)
    path = slab(tiers.directory, length)
    content = path.read_bytes()[: 2 * size]
    with path.open("r+b") as file:
        file.write(content[size:] + content[:size])
    for slot, name in zip(slots, "ab", strict=True):
        assert await fetch(tier, slot, name, length) == "foreign key"
    assert await tier.read([read_job(slots[1], "a", length, OTHER_NS)]) == ["foreign key"]
    wrong_group = ReadJob(slots[1], NS, key("a"), 1, length, aligned(length))
    assert await tier.read([wrong_group]) == ["foreign key"]
    assert await fetch(tier, slots[1], "a", length) is None


async def test_a_slot_of_which_nothing_was_written_or_that_was_freed_is_a_miss(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    slots = await store(tier, ["a"], 4096)
    (empty,) = tier.allocate(4096, 1).tolist()
    assert await fetch(tier, empty, "b", 4096) == "no block"
    tier.free(slots)
    assert await fetch(tier, slots[0], "a", 4096) == "no block"


async def test_a_file_cut_short_or_deleted_costs_its_blocks_and_nothing_else(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    small, large = await store(tier, range(4), 4096), await store(tier, "xy", 70_000)
    os.truncate(slab(tiers.directory, 4096), 2 * slot_size(4096) + 100)
    assert [await fetch(tier, slot, name, 4096) for name, slot in enumerate(small)] == [None, None, *["short read"] * 2]
    slab(tiers.directory, 70_000).unlink()
    assert await fetch(tier, large[0], "x", 70_000) is None
    recovery = await tiers.open()
    assert sorted(whereabouts(recovery)) == sorted([key(0), key(1)])
    assert recovery.dropped == {"slot outside its file": 4}
    assert tiers.tier is not None
    assert tiers.tier.used == 2 * slot_size(4096)


async def test_a_reader_never_sees_a_block_that_is_still_being_written(tiers: Tiers) -> None:
    # A4
    await tiers.open(capacity=256 * MIB)
    tier = tiers.tier
    assert tier is not None
    length, names = MIB, range(48)
    slots = tier.allocate(length, len(names))
    writing = asyncio.create_task(tier.write([write_job(s, n, length) for s, n in zip(slots, names, strict=True)]))
    rounds = 0
    while not writing.done():
        rounds += 1
        for name in random.Random(rounds).sample(list(names), 2):
            assert await fetch(tier, int(slots[name]), name, length) in (None, "no block")
        await asyncio.sleep(0)
    assert await writing == [None] * len(names)
    assert rounds > 0


# -- restarts and crashes


@pytest.mark.parametrize("field", ["hash", "kind", "length", "index", "checksum"])
async def test_a_flipped_bit_in_the_journal_costs_that_record_alone(tiers: Tiers, field: str) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(5), 4096)
    await tiers.close()
    (journal,) = tiers.directory.glob("journal-*")
    offset = RECORD.fields[field][1]  # type: ignore[index]
    flip(journal, 2 * RECORD_BYTES + offset)
    report = check_directory(tiers.directory, deep=True)
    assert (report.ok, report.blocks, report.dropped) == (False, 4, {"damaged journal record": 1})
    recovery = await tiers.open()
    assert recovery.dropped == {"damaged journal record": 1}
    assert sorted(whereabouts(recovery)) == sorted(key(name) for name in (0, 1, 3, 4))
    tier = tiers.tier
    assert tier is not None
    assert tier.used == 4 * slot_size(4096)
    for name in (0, 1, 3, 4):
        assert await fetch(tier, whereabouts(recovery)[key(name)], name, 4096) is None


@pytest.mark.parametrize("left", [1, RECORD_BYTES // 2, RECORD_BYTES - 1])
async def test_a_torn_tail_of_the_journal_is_dropped_and_written_over(tiers: Tiers, left: int) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(5), 4096)
    await tiers.close()
    (journal,) = tiers.directory.glob("journal-*")
    os.truncate(journal, 4 * RECORD_BYTES + left)
    assert check_directory(tiers.directory, deep=True).ok
    for _ in range(2):
        recovery = await tiers.open()
        assert recovery.dropped == {"torn journal tail": 1}
        assert [row.tobytes() for row in recovery.hashes[:4]] == [key(name) for name in range(4)]
    assert tiers.tier is not None
    await store(tiers.tier, ["after"], 4096)
    recovery = await tiers.open()
    assert len(recovery) == 5
    assert key("after") in whereabouts(recovery)


async def test_many_restarts_leave_one_snapshot_and_a_flipped_bit_in_it_costs_one_block(tiers: Tiers) -> None:
    for life in range(20):
        await tiers.open()
        assert tiers.tier is not None
        (slot,) = await store(tiers.tier, [f"gone {life}"], 4096)
        await store(tiers.tier, [life], 4096)
        tiers.tier.free([slot])
    await tiers.close()
    (snapshot,) = tiers.directory.glob("snapshot-*")
    assert len(list(tiers.directory.glob("journal-*"))) < 6
    recovery = await tiers.open()
    assert sorted(whereabouts(recovery)) == sorted(key(life) for life in range(20))
    tier = tiers.tier
    assert tier is not None
    for life in range(20):
        assert await fetch(tier, whereabouts(recovery)[key(life)], life, 4096) is None
    await tiers.close()
    flip(snapshot, RECORD_BYTES + 20)
    recovery = await tiers.open()
    assert recovery.dropped == {"damaged snapshot record": 1}
    assert len(recovery) == 19


async def test_a_freed_block_is_not_found_again_and_its_slot_never_serves_it(tiers: Tiers) -> None:
    await tiers.open(capacity=4 * slot_size(4096))
    assert tiers.tier is not None
    slots = await store(tiers.tier, range(4), 4096)
    tiers.tier.free(slots[:2])
    await store(tiers.tier, ["new"], 4096)
    recovery = await tiers.open(capacity=4 * slot_size(4096))
    assert sorted(whereabouts(recovery)) == sorted([key(2), key(3), key("new")])


async def test_a_block_found_twice_is_taken_once_the_later_copy(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, ["a", "b"], 4096)
    again = await store(tiers.tier, ["a"], 4096)
    recovery = await tiers.open()
    assert recovery.dropped == {"older copy": 1}
    assert whereabouts(recovery)[key("a")] == again[0]
    assert tiers.tier is not None
    assert tiers.tier.blocks == 2


async def test_a_million_blocks_are_back_within_seconds(tiers: Tiers) -> None:
    count = 1_000_000
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, ["first"], 4096)
    await tiers.close()
    identity = bytes.fromhex((tiers.directory / "format").read_text().splitlines()[2].removeprefix("id "))
    records = np.zeros(count, dtype=RECORD)
    records["namespace"] = int.from_bytes(NS[:8], "little")
    records["hash"] = np.random.default_rng(3).integers(0, 256, (count, 32), dtype=np.uint8)
    records["kind"], records["length"], records["pages"] = 1, 4096, 2
    records["index"] = np.arange(count)
    folder = Folder(tiers.directory)
    journal = Journal(folder, identity)
    journal.replay()
    for part in np.split(records, 10):
        journal.append(bytearray(part.tobytes()))
    journal.close()
    folder.close()
    os.truncate(slab(tiers.directory, 4096), count * slot_size(4096))
    began = time.process_time()
    recovery = await tiers.open(capacity=2 * count * slot_size(4096))
    seconds = time.process_time() - began
    assert len(recovery) == count
    assert tiers.tier is not None
    assert tiers.tier.used == count * slot_size(4096)
    assert seconds < 5
    # F1: neither finding free slots nor giving them back depends on how many there are.
    began = time.process_time()
    for _ in range(100):
        tiers.tier.free(tiers.tier.allocate(4096, 32))
    assert (time.process_time() - began) / 100 < 2e-3


# -- refusals


async def test_a_directory_serves_one_daemon_at_a_time(tiers: Tiers) -> None:
    await tiers.open()
    with pytest.raises(ConfigError, match=rf"disk\.directory .* in use .*pid {os.getpid()}"):
        DiskTier(tiers.directory, MIB).open()
    with pytest.raises(ConfigError, match=rf"disk\.directory .* in use .*pid {os.getpid()}"):
        check_directory(tiers.directory, deep=False)
    opener = "import sys; from pathlib import Path; from kvcascade.tiers.disk import DiskTier; "
    arguments = [sys.executable, "-c", opener + "DiskTier(Path(sys.argv[1]), 1 << 20).open()", str(tiers.directory)]
    other = await asyncio.create_subprocess_exec(*arguments, stderr=subprocess.PIPE)
    _, stderr = await other.communicate()
    assert f"in use by another process (pid {os.getpid()})" in stderr.decode()
    await tiers.close()
    await tiers.open()


def test_a_directory_that_cannot_be_ours_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").write_text("years of work")
    for path, what in [(file, "not a directory"), (file / "below", "cannot be made"), (strange, "thesis.txt")]:
        with pytest.raises(ConfigError, match=rf"disk\.directory .*{what}"):
            DiskTier(path, MIB).open()
    assert (strange / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match=r"disk\.directory"):
        check_directory(tmp_path / "absent", deep=False)
    with pytest.raises(ConfigError, match=r"disk\.directory .* no file 'format'"):
        (tmp_path / "empty").mkdir()
        check_directory(tmp_path / "empty", deep=False)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"kvcascade disk 2\npage 4096\nid " + b"0" * 32 + b"\n", "format '2'"),
        (b"kvcascade disk 1\npage 16384\nid " + b"0" * 32 + b"\n", "page 16384"),
        (b"kvcascade disk 1\npage 4096\nid 00\n", "damaged"),
        (b"", "damaged"),
        (b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/pwned'\ntR.", "damaged"),  # L1
        (b"kvcascade disk 1\n" * 1000, "damaged"),
    ],
)
def test_a_foreign_or_damaged_format_is_refused_and_left_alone(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "format").write_bytes(content)
    (tmp_path / "slab-8192.dat").write_bytes(b"precious")
    with pytest.raises(ConfigError, match=rf"disk\.directory .*{what}"):
        DiskTier(tmp_path, MIB).open()
    assert (tmp_path / "slab-8192.dat").read_bytes() == b"precious"


def test_a_read_only_file_system_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ConfigError, match=r"disk\.directory .*not writable"):
        DiskTier(small_disk, MIB).open()
    with pytest.raises(ConfigError, match=r"disk\.directory .*cannot be made"):
        DiskTier(small_disk / "disk", MIB).open()


async def test_what_dead_writers_left_is_swept(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, ["a"], 4096)
    await tiers.close()
    leftovers = ["snapshot-00000009.x1y2.tmp", "format.abc.tmp", "probe.tmp", "slab-20480.dat"]
    for name in leftovers:
        (tiers.directory / name).write_bytes(b"half a")
    (tiers.directory / f"namespace-{key('unused').hex()}").write_bytes(b"not what it says")
    recovery = await tiers.open()
    assert len(recovery) == 1
    assert recovery.dropped == {"damaged namespace": 1}
    assert sorted(path.name.split("-")[0] for path in tiers.directory.iterdir()) == [
        "format", "journal", "lock", "namespace", "slab",
    ]  # fmt: skip


# -- a sick disk


async def test_a_full_file_system_is_a_reason_and_a_state_that_passes(tiers: Tiers, small_disk: Path) -> None:
    # A1
    ballast = small_disk / "ballast"
    await tiers.open(capacity=64 * MIB, directory=small_disk / "disk")
    ballast.write_bytes(bytes(5 * MIB))
    tier = tiers.tier
    assert tier is not None
    kept = await store(tier, range(4), 256 * KIB)
    slots = tier.allocate(256 * KIB, 16)
    reasons = await tier.write([write_job(s, f"late {s}", 256 * KIB) for s in slots])
    assert set(reasons) == {"ENOSPC"}
    assert (tier.state, tier.reason) == ("sick", "ENOSPC")
    assert (tier.writable, tier.readable) == (False, True)
    assert tier.failures["ENOSPC"] == 16
    # Left alone: no slots, no writes; reads go on.
    assert len(tier.allocate(4096, 1)) == 0
    assert await tier.write([write_job(slots[0], "x", 256 * KIB)]) == ["sick: ENOSPC"]
    for name, slot in enumerate(kept):
        assert await fetch(tier, slot, name, 256 * KIB) is None
    for slot in slots:
        assert await fetch(tier, int(slot), f"late {slot}", 256 * KIB) == "no block"
    tier.free(slots)
    tiers.clock.now += 1.1
    slots = tier.allocate(256 * KIB, 16)
    assert set(await tier.write([write_job(s, f"late {s}", 256 * KIB) for s in slots])) == {"ENOSPC"}
    tiers.clock.now += 1.1
    assert len(tier.allocate(4096, 1)) == 0, "the second pause is longer"
    tiers.clock.now += 1.0
    ballast.unlink()
    tier.free(slots)
    again = await store(tier, ["back"], 256 * KIB)
    assert (tier.state, tier.reason) == ("ok", None)
    assert await fetch(tier, again[0], "back", 256 * KIB) is None
    recovery = await tiers.open(directory=small_disk / "disk")
    assert sorted(whereabouts(recovery)) == sorted([*(key(name) for name in range(4)), key("back")])
    await tiers.close()


async def test_a_device_that_does_not_answer_is_a_state_and_does_not_stop_the_shutdown(
    tiers: Tiers, image_disk: Path
) -> None:
    # F5 (b): a frozen file system holds every write until it is thawed.
    freeze, thaw = 0xC0045877, 0xC0045878
    await tiers.open(capacity=16 * MIB, directory=image_disk / "disk")
    tier = tiers.tier
    assert tier is not None
    (kept,) = await store(tier, ["kept"], 64 * KIB)
    handle = os.open(image_disk, os.O_RDONLY)
    job = write_job(int(tier.allocate(64 * KIB, 1)[0]), "late", 64 * KIB)
    fcntl.ioctl(handle, freeze, 0)
    try:
        writing = asyncio.create_task(tier.write([job]))
        while tier.state == "ok":
            tiers.clock.now += 20
            await asyncio.sleep(0)
        assert tier.reason is not None
        assert tier.reason.startswith("no answer from the device for ")
        assert await tier.read([read_job(kept, "kept", 64 * KIB)]) == [f"sick: {tier.reason}"]
        assert len(tier.allocate(4096, 1)) == 0
        writing.cancel()
        assert not await tier.close(deadline=0.05)
        assert not writing.done(), "the payload is the tier's while the kernel may read it"
    finally:
        fcntl.ioctl(handle, thaw, 0)
        os.close(handle)
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await tier.close()
    recovery = await tiers.open(directory=image_disk / "disk")
    assert list(whereabouts(recovery)) == [key("kept")]
    await tiers.close()


# -- cancellation


async def cancel_after(task: asyncio.Task[object], steps: int) -> bool:
    """Let a task run for so many turns of the loop, then cancel it; whether it was still running."""
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def test_a_cancelled_write_leaves_its_payload_and_the_books_alone(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    length, cancelled = 100_000, 0
    for steps in [*range(12), *range(12, 4000, 250)]:
        slots = tier.allocate(length, 6)
        jobs = [write_job(slot, f"{steps}-{i}", length) for i, slot in enumerate(slots)]
        cancelled += await cancel_after(asyncio.create_task(tier.write(jobs)), steps)
        for job in jobs:
            # The bytes of a block that may already have a record must never become these.
            np.asarray(job.payload)[:] = 0xEE
        await tier.flush()
        for i, slot in enumerate(slots):
            assert await fetch(tier, int(slot), f"{steps}-{i}", length) in (None, "no block")
        tier.free(slots)
        assert tier.check() == []
    assert cancelled >= 10
    assert tier.used == 0
    assert len(await tiers.open()) == 0


async def test_a_cancelled_read_does_not_touch_its_memory_any_more(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    length, cancelled = 500_000, 0
    slots = await store(tier, range(12), length)
    for steps in [*range(10), *range(10, 1000, 100)]:
        jobs = [read_job(slot, name, length) for name, slot in enumerate(slots)]
        cancelled += await cancel_after(asyncio.create_task(tier.read(jobs)), steps)
        for job in jobs:
            np.asarray(job.into)[:] = 0xEE
        assert await fetch(tier, slots[0], 0, length) is None
        assert all((np.asarray(job.into) == 0xEE).all() for job in jobs)
    assert cancelled >= 8


async def test_a_closed_tier_refuses_without_an_error_and_closes_again(tiers: Tiers) -> None:
    await tiers.open()
    tier = tiers.tier
    assert tier is not None
    slots = tier.allocate(4096, 2)
    writing = asyncio.create_task(tier.write([write_job(slots[0], "in time", 4096)]))
    await asyncio.sleep(0)
    assert await tier.close()
    assert await writing == [None], "what was under way is finished"
    assert tier.state == "closed"
    assert await tier.write([write_job(slots[1], "late", 4096)]) == ["closed"]
    assert await tier.read([read_job(slots[0], "in time", 4096)]) == ["closed"]
    assert await tier.flush() == "closed"
    assert len(tier.allocate(4096, 1)) == 0
    assert await tier.close()
    assert list(whereabouts(await tiers.open(directory=tiers.directory))) == [key("in time")]


async def test_the_offline_check_reports_progress_and_agrees_with_a_sound_directory(tiers: Tiers) -> None:
    await tiers.open()
    assert tiers.tier is not None
    await store(tiers.tier, range(70), 4096)
    await store(tiers.tier, ["large"], 100_000)
    await tiers.close()
    steps: list[tuple[int, int]] = []
    report = check_directory(tiers.directory, deep=True, progress=lambda done, total: steps.append((done, total)))
    assert (report.ok, report.blocks, report.verified, report.dropped) == (True, 71, 71, {})
    assert report.disk_bytes == 70 * slot_size(4096) + slot_size(100_000)
    assert report.namespaces == [(NS, b"what NS means")]
    assert steps[-1] == (71, 71)
