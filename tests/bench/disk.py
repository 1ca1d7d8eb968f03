"""2 MiB blocks through the disk tier, against raw O_DIRECT (and fio, where it is installed) on the same file system.

The tier is driven as the daemon drives it: two cleaners writing batches of 32 MiB, all reads of a prefix at once in
batches of 16 MiB. Its figures include checksums, header pages, syncs and journal records; the raw ones nothing but the
transfer, from 16 threads. All files have their blocks on disk before the first round that counts.
"""

import asyncio
import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcascade.tiers.disk import BlockMeta, DiskTier, ReadJob, WriteJob, slot_size

from .harness import GB, Bench, Row, at_least, check, median_ratio

BLOCK = 2 << 20
RAW_THREADS = 16
WRITERS = 2
WRITE_BATCH = 16
READ_BATCH = 8
NAMESPACE = bytes(range(32))

Blocks = list[NDArray[np.uint8]]


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
                    at_least(0.75) if raw == "raw" else None,
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
    raw = _Raw(directory / "raw", payloads, targets)
    tier = _Tier(directory / "tier", payloads, targets)
    fio = shutil.which("fio")
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
            if fio:
                seen["fio write"].append(run_fio(fio, directory / "raw", "write", count))
            with timed(seen, "raw read"):
                raw.read()
            with timed(seen, "tier read"):
                await tier.read()
            if fio:
                seen["fio read"].append(run_fio(fio, directory / "raw", "read", count))
            tier.free()
    finally:
        await tier.close()
        raw.close()
    return seen


@contextmanager
def timed(seen: dict[str, list[float]], name: str) -> Iterator[None]:
    cpu, start = time.process_time(), time.perf_counter()
    yield
    seen[name].append(time.perf_counter() - start)
    seen[f"{name} cpu"].append(time.process_time() - cpu)


class _Raw:
    """Nothing but the transfer."""

    def __init__(self, path: Path, payloads: Blocks, targets: Blocks) -> None:
        self._payloads, self._targets = payloads, targets
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, len(payloads) * BLOCK)
        self._threads = ThreadPoolExecutor(RAW_THREADS)

    def write(self) -> None:
        self._all(lambda number: os.pwritev(self._file, [self._payloads[number].data], number * BLOCK))

    def read(self) -> None:
        self._all(lambda number: os.preadv(self._file, [self._targets[number].data], number * BLOCK))

    def _all(self, move: Callable[[int], int]) -> None:
        moved = list(self._threads.map(move, range(len(self._payloads))))
        check(set(moved) == {BLOCK}, "a raw transfer was short")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)


class _Tier:
    """The disk tier under the daemon's kind of load."""

    def __init__(self, directory: Path, payloads: Blocks, targets: Blocks) -> None:
        self._payloads, self._targets = payloads, targets
        # Two rounds' worth: each round gets other slots than the one before.
        self._tier = DiskTier(directory, 2 * len(payloads) * slot_size(BLOCK))
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

        await asyncio.gather(*(writer() for _ in range(WRITERS)))

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


def run_fio(fio: str, path: Path, way: str, count: int) -> float:
    """Seconds that fio says it took for the same bytes in the same file."""
    command = [
        *(fio, "--name=raw", f"--filename={path}", f"--rw={way}", "--bs=2M", f"--size={count * BLOCK}"),
        *("--direct=1", "--ioengine=io_uring", "--iodepth=16", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
    return float(job["io_bytes"] / job["bw_bytes"])
