"""2 MiB blocks through the disk tier, against raw O_DIRECT (and fio, where it is installed) on the same file system.

The tier is driven as the daemon drives it: cleaners that write batches of 32 MiB, all reads of a prefix at once in
batches of 16 MiB. Its figures include checksums, header pages, syncs and journal records; the raw ones nothing but the
transfer, from 16 threads. All files have their blocks on disk before the first round that counts.
"""

import asyncio
import mmap
import shutil
import statistics
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcascade.daemon.residency import DEMOTION_BATCH_BYTES
from kvcascade.daemon.transfer import CLEANERS, READ_BATCH_BYTES
from kvcascade.tiers.disk import BlockMeta, DiskTier, ReadJob, WriteJob, slot_size

from .harness import GB, Bench, Row, at_least, check, median_ratio
from .raw_disk import Blocks, RawDisk, timed

BLOCK = 2 << 20
RAW_THREADS = 16
THREADS = 8  # the default of disk.threads
WRITE_BATCH = DEMOTION_BATCH_BYTES // BLOCK
READ_BATCH = READ_BATCH_BYTES // BLOCK
NAMESPACE = bytes(range(32))


def run(bench: Bench) -> list[Row]:
    count = 64 if bench.quick else 128
    directory = bench.directory / "disk"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        seen = asyncio.run(measure(bench, directory, count))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report(seen, count)


def report(seen: dict[str, list[float]], count: int) -> list[Row]:
    size = count * BLOCK / GB
    rows = []
    for way in ("write", "read"):
        for raw, name in (("raw", f"raw O_DIRECT, {RAW_THREADS} threads"), ("fio", "fio io_uring, depth 16")):
            limit = seen[f"{raw} {way}"]
            if not limit:
                continue
            tier = seen[f"tier {way}"]
            rows.append(
                Row(
                    f"disk {way} of 2 MiB blocks through the tier / {name}",
                    size / statistics.median(tier),
                    "GB/s",
                    size / statistics.median(limit),
                    median_ratio(limit, tier),
                    at_least(0.8),
                )
            )
        rows.append(
            Row(
                f"disk {way}: CPU / raw",
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
    raw = RawDisk(directory / "raw", payloads, targets, together=1, threads=RAW_THREADS)
    tier = _Tier(directory / "tier", payloads, targets)
    try:
        await tier.open()
        for number in range(-2, bench.rounds(7, 3)):
            bench.say(f"disk round {number + 1}" if number >= 0 else "disk: writing all files once")
            if number == 0:
                for times in seen.values():
                    times.clear()
            with timed(seen, "raw write"):
                raw.write()
            with timed(seen, "tier write"):
                await tier.write()
            add_fio(seen, raw, "write")
            with timed(seen, "raw read"):
                raw.read()
            with timed(seen, "tier read"):
                await tier.read()
            add_fio(seen, raw, "read")
            tier.free()
    finally:
        await tier.close()
        raw.close()
    return seen


def add_fio(seen: dict[str, list[float]], raw: RawDisk, way: str) -> None:
    seconds = raw.fio(way)
    if seconds is not None:
        seen[f"fio {way}"].append(seconds)


class _Tier:
    """The disk tier under the daemon's kind of load."""

    def __init__(self, directory: Path, payloads: Blocks, targets: Blocks) -> None:
        self._payloads, self._targets = payloads, targets
        # Two rounds' worth: each round gets other slots than the one before.
        self._tier = DiskTier(directory, 2 * len(payloads) * slot_size(BLOCK), threads=THREADS)
        self._round = 0

    async def open(self) -> None:
        await asyncio.to_thread(self._tier.open)
        self._tier.register_namespace(NAMESPACE, b"\xa0")

    def _key(self, number: int) -> bytes:
        return self._round.to_bytes(16, "little") + number.to_bytes(16, "little")

    async def write(self) -> None:
        self._round += 1
        count = len(self._payloads)
        batches = iter(range(0, count, WRITE_BATCH))
        self._slots: list[int] = []

        async def writer() -> None:
            for first in batches:
                slots = self._tier.allocate(BLOCK, WRITE_BATCH).tolist()
                check(len(slots) == WRITE_BATCH, "the tier has no room")
                self._slots += slots
                numbers = range(first, first + WRITE_BATCH)
                jobs = [
                    WriteJob(slot, BlockMeta(NAMESPACE, self._key(slot), b"", 0, BLOCK, 0), self._payloads[number])
                    for slot, number in zip(slots, numbers, strict=True)
                ]
                reasons = await self._tier.write(jobs)
                check(not any(reasons), f"a write failed: {reasons}")

        await asyncio.gather(*(writer() for _ in range(CLEANERS)))

    async def read(self) -> None:
        async def reader(first: int) -> None:
            numbers = range(first, first + READ_BATCH)
            jobs = [
                ReadJob(self._slots[n], NAMESPACE, self._key(self._slots[n]), 0, BLOCK, self._targets[n])
                for n in numbers
            ]
            reasons = await self._tier.read(jobs)
            check(not any(reasons), f"a read failed: {reasons}")

        await asyncio.gather(*(reader(first) for first in range(0, len(self._slots), READ_BATCH)))

    def free(self) -> None:
        self._tier.free(self._slots)

    async def close(self) -> None:
        await self._tier.close(5.0)
