"""The disk tier against what the device itself gives: the bare transfer of the same bytes by threads, and fio.

Rounds of both take turns on the same file system, and all files have their blocks on disk before the first round that
counts. The tier's figures include checksums, header pages, syncs and journal records.
"""

import asyncio
import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.slabfile import slot_size

from .harness import GB, Bench, Row, at_least, check, median_ratio

Blocks = list[NDArray[np.uint8]]
Times = dict[str, list[float]]

FIO_BYTES = 32 << 20  # in flight
TIER_THREADS = 8  # the default of disk.threads
NAMESPACE = bytes(range(32))


@contextmanager
def timed(seen: Times, name: str) -> Iterator[None]:
    cpu, start = time.process_time(), time.perf_counter()
    yield
    seen[name].append(time.perf_counter() - start)
    seen[f"{name} cpu"].append(time.process_time() - cpu)


class TierRun(ABC):
    """The tier under the daemon's kind of load: one round is `prepare`, `write`, `read`, `free`."""

    def __init__(self, directory: Path, payloads: Blocks, targets: Blocks) -> None:
        self._payloads, self._targets = payloads, targets
        # Two rounds' worth: each round gets other slots than the one before.
        self._tier = DiskTier(directory, 2 * len(payloads) * slot_size(payloads[0].nbytes), threads=TIER_THREADS)
        self._round = 0

    async def open(self) -> None:
        await asyncio.to_thread(self._tier.open)
        self._tier.register_namespace(NAMESPACE, b"\xa0")

    def prepare(self) -> None:
        """What belongs to a round and is not measured."""
        self._round += 1

    @abstractmethod
    async def write(self) -> None: ...

    @abstractmethod
    async def read(self) -> None: ...

    @abstractmethod
    def free(self) -> None: ...

    async def close(self) -> None:
        await self._tier.close(5.0)


@dataclass(frozen=True, slots=True)
class AgainstRaw:
    """`count` blocks of `block` bytes, `together` of them in one raw call, by as many as `threads`."""

    name: str
    block: int
    count: int
    together: int
    threads: int

    async def measure(self, bench: Bench, directory: Path, make: Callable[[Path, Blocks, Blocks], TierRun]) -> Times:
        """Seconds and CPU seconds of each round, by "tier|raw|fio write|read[ cpu]"."""
        memory = mmap.mmap(-1, 2 * self.count * self.block)
        whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        np.random.default_rng(1).random(out=whole.view(np.float64))
        payloads, targets = (list(half.reshape(self.count, self.block)) for half in np.split(whole, 2))
        names = [f"{what} {way}" for what in ("tier", "raw", "fio") for way in ("write", "read")]
        seen: Times = {name: [] for name in [*names, *(f"{name} cpu" for name in names)]}
        raw = RawDisk(directory / "raw", payloads, targets, together=self.together, threads=self.threads)
        tier = make(directory / "tier", payloads, targets)
        try:
            await tier.open()
            for number in range(-2, bench.rounds(7, 3)):
                bench.say(f"{self.name}, round {number + 1}" if number >= 0 else f"{self.name}: writing all files once")
                if number == 0:
                    for times in seen.values():
                        times.clear()
                tier.prepare()
                with timed(seen, "raw write"):
                    raw.write()
                with timed(seen, "tier write"):
                    await tier.write()
                seen["fio write"] += raw.fio("write")
                with timed(seen, "raw read"):
                    raw.read()
                with timed(seen, "tier read"):
                    await tier.read()
                seen["fio read"] += raw.fio("read")
                tier.free()
        finally:
            await tier.close()
            raw.close()
        return seen

    def report(self, seen: Times, what: str, raw: str, fio: str) -> list[Row]:
        """Rows named by `what` was moved and what the limits `raw` and `fio` are."""
        size = self.count * self.block / GB
        rows = []
        for way in ("write", "read"):
            tier, cpu, raw_cpu = (seen[name] for name in (f"tier {way}", f"tier {way} cpu", f"raw {way} cpu"))
            for limit, name in ((seen[f"raw {way}"], raw), (seen[f"fio {way}"], fio)):
                if limit:
                    rows.append(
                        Row(
                            f"disk {way} of {what} / {name}",
                            size / statistics.median(tier),
                            "GB/s",
                            size / statistics.median(limit),
                            median_ratio(limit, tier),
                            at_least(0.8),
                        )
                    )
            rows.append(
                Row(
                    f"disk {way} of {what}: CPU / raw",
                    statistics.median(cpu) * 1000 / size,
                    "ms/GB",
                    statistics.median(raw_cpu) * 1000 / size,
                    median_ratio(cpu, raw_cpu),
                )
            )
        return rows


class RawDisk:
    """A file with its blocks on disk, written and read with O_DIRECT in calls of `together` blocks."""

    def __init__(self, path: Path, payloads: Blocks, targets: Blocks, *, together: int, threads: int) -> None:
        self._path, self._payloads, self._targets, self._together = path, payloads, targets, together
        self._block = payloads[0].nbytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, len(payloads) * self._block)
        self._threads = ThreadPoolExecutor(threads)

    def write(self) -> None:
        self._all(lambda at: os.pwritev(self._file, self._payloads[at : at + self._together], at * self._block))

    def read(self) -> None:
        self._all(lambda at: os.preadv(self._file, self._targets[at : at + self._together], at * self._block))

    def _all(self, move: Callable[[int], int]) -> None:
        moved = list(self._threads.map(move, range(0, len(self._payloads), self._together)))
        check(set(moved) == {self._together * self._block}, "a raw transfer was short")

    def fio(self, way: str) -> list[float]:
        """Seconds that fio says it took for the same bytes in calls as large, FIO_BYTES in flight; none without it."""
        fio = shutil.which("fio")
        if fio is None:
            return []
        size = self._together * self._block
        command = [
            *(fio, "--name=raw", f"--filename={self._path}", f"--rw={way}", f"--bs={size}"),
            *(f"--size={len(self._payloads) * self._block}", f"--iodepth={FIO_BYTES // size}"),
            *("--direct=1", "--ioengine=io_uring", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
        return [float(job["io_bytes"] / job["bw_bytes"])]

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)
