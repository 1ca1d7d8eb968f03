"""Small blocks of one chain through a drive, and what a start costs with a million of them.

64 KiB blocks, read 32 of a chain at a time and written in batches as the daemon's cleaners do, against the same
bytes in raw calls of 32 pieces each: what a chain that lies together could reach. Both from as many threads; the
drive's figures include checksums, header pages, syncs and journal records.
"""

import asyncio
import mmap
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcascade.daemon.residency import DEMOTION_BATCH_BLOCKS
from kvcascade.daemon.transfer import CLEANERS
from kvcascade.tiers.disk import BlockMeta, DiskTier, ReadJob, WriteJob, slot_size
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.journal import RECORD, Journal, namespace_tag

from .disk import add_fio
from .harness import GB, Bench, Row, at_least, below, check, median_ratio
from .raw_disk import Blocks, RawDisk, timed

BLOCK = 64 << 10
CHAIN = 32
THREADS = 8
NAMESPACE = bytes(range(32))
RECORDS = 1_000_000


def run(bench: Bench) -> list[Row]:
    directory = bench.directory / "chains"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        count = 2048 if bench.quick else 4096
        rows = report(asyncio.run(measure(bench, directory, count)), count)
        bench.say("disk: a start with a million records")
        return rows + recovery(directory / "million", bench.rounds(3, 1))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def report(seen: dict[str, list[float]], count: int) -> list[Row]:
    size = count * BLOCK / GB
    rows = []
    for way in ("write", "read"):
        tier = seen[f"tier {way}"]
        for raw, name in (("raw", f"raw O_DIRECT, {THREADS} threads"), ("fio", "fio io_uring, 32 MiB in flight")):
            limit = seen[f"{raw} {way}"]
            if limit:
                rows.append(
                    Row(
                        f"disk {way} of 64 KiB blocks, chains of {CHAIN} / {name}, in calls of {CHAIN}",
                        size / statistics.median(tier),
                        "GB/s",
                        size / statistics.median(limit),
                        median_ratio(limit, tier),
                        at_least(0.8),
                    )
                )
        rows.append(
            Row(
                f"disk {way} of 64 KiB blocks: CPU / raw",
                statistics.median(seen[f"tier {way} cpu"]) * 1000 / size,
                "ms/GB",
                statistics.median(seen[f"raw {way} cpu"]) * 1000 / size,
                median_ratio(seen[f"tier {way} cpu"], seen[f"raw {way} cpu"]),
            )
        )
    return rows


async def measure(bench: Bench, directory: Path, count: int) -> dict[str, list[float]]:
    memory = mmap.mmap(-1, 2 * count * BLOCK)
    whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    np.random.default_rng(1).random(out=whole.view(np.float64))
    payloads, targets = (list(half.reshape(count, BLOCK)) for half in np.split(whole, 2))
    names = [f"{what} {way}" for what in ("tier", "raw", "fio") for way in ("write", "read")]
    seen: dict[str, list[float]] = {name: [] for name in [*names, *(f"{name} cpu" for name in names)]}
    raw = RawDisk(directory / "raw", payloads, targets, together=CHAIN, threads=THREADS)
    # Two rounds' worth: each round gets other slots than the one before.
    tier = DiskTier(directory / "tier", 2 * count * slot_size(BLOCK), threads=THREADS)
    await asyncio.to_thread(tier.open)
    tier.register_namespace(NAMESPACE, b"\xa0")
    try:
        for number in range(-2, bench.rounds(7, 3)):
            bench.say(f"disk chains, round {number + 1}" if number >= 0 else "disk chains: writing all files once")
            if number == 0:
                for times in seen.values():
                    times.clear()
            jobs = write_jobs(tier, payloads, number + 2)
            with timed(seen, "raw write"):
                raw.write()
            with timed(seen, "tier write"):
                await write(tier, jobs)
            add_fio(seen, raw, "write")
            reads = read_jobs(jobs, targets)
            with timed(seen, "raw read"):
                raw.read()
            with timed(seen, "tier read"):
                await read(tier, reads)
            add_fio(seen, raw, "read")
            tier.free([job.slot for job in jobs])
    finally:
        await tier.close(5.0)
        raw.close()
    return seen


def write_jobs(tier: DiskTier, payloads: Blocks, number: int) -> list[WriteJob]:
    jobs = []
    for first in range(0, len(payloads), CHAIN):
        slots = tier.allocate(BLOCK, CHAIN)
        check(len(slots) == CHAIN and bool((np.diff(slots) == 1).all()), "a chain does not lie together")
        for at, slot in enumerate(slots.tolist(), start=first):
            key = number.to_bytes(16, "little") + at.to_bytes(16, "little")
            jobs.append(WriteJob(slot, BlockMeta(NAMESPACE, key, b"", 0, BLOCK, 0), payloads[at]))
    return jobs


def read_jobs(jobs: list[WriteJob], targets: Blocks) -> list[ReadJob]:
    return [
        ReadJob(job.slot, NAMESPACE, job.meta.block_hash, 0, BLOCK, into)
        for job, into in zip(jobs, targets, strict=True)
    ]


async def write(tier: DiskTier, jobs: list[WriteJob]) -> None:
    batches = iter(range(0, len(jobs), DEMOTION_BATCH_BLOCKS))

    async def writer() -> None:
        for first in batches:
            reasons = await tier.write(jobs[first : first + DEMOTION_BATCH_BLOCKS])
            check(not any(reasons), f"a write failed: {reasons}")

    await asyncio.gather(*(writer() for _ in range(CLEANERS)))


async def read(tier: DiskTier, jobs: list[ReadJob]) -> None:
    outcomes = await asyncio.gather(*(tier.read(jobs[first : first + CHAIN]) for first in range(0, len(jobs), CHAIN)))
    check(not any(any(reasons) for reasons in outcomes), "a read failed")


# ---- a start


def recovery(directory: Path, rounds: int) -> list[Row]:
    make_records(directory)
    seconds, memory = [], []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"from {__spec__.name} import start; start()", str(directory)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        took, grown = done.stdout.split()
        seconds.append(float(took))
        memory.append(float(grown))
    return [
        Row("a start with 10^6 records on disk: time", statistics.median(seconds), "s", target=below(5.0)),
        Row("a start with 10^6 records on disk: memory at its peak", statistics.median(memory), "MiB"),
    ]


def start() -> None:
    """In a process of its own: seconds of the start, and MiB by which it grew at most."""
    # The peak that getrusage tells is the parent's, where that was the larger process.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    tier = DiskTier(Path(sys.argv[1]), 1 << 44)
    recovery = tier.open()
    check(len(recovery) == RECORDS, f"{len(recovery)} records came back")
    print(recovery.seconds, (memory_kib("VmHWM") - before) / 1024)
    tier.abandon()


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make_records(directory: Path) -> None:
    """A drive whose journal names a million blocks, in a file of holes."""
    tier = DiskTier(directory, 1 << 44)
    tier.open()
    tier.abandon()
    identity = bytes.fromhex((directory / "format").read_text().splitlines()[2].removeprefix("id "))
    records = np.zeros(RECORDS, dtype=RECORD)
    records["namespace"] = namespace_tag(NAMESPACE)
    records["hash"] = np.random.default_rng(3).integers(0, 256, (RECORDS, 32), dtype=np.uint8)
    records["kind"], records["length"], records["pages"] = 1, BLOCK, slot_size(BLOCK) >> 12
    records["index"] = np.arange(RECORDS)
    folder = Folder(directory)
    journal = Journal(folder, identity)
    journal.replay()
    journal.add_namespace(NAMESPACE, b"\xa0")
    for part in np.split(records, 10):
        journal.append(bytearray(part.tobytes()))
    journal.close()
    folder.close()
    with (directory / f"slab-{slot_size(BLOCK)}.dat").open("wb") as file:
        file.truncate(RECORDS * slot_size(BLOCK))
