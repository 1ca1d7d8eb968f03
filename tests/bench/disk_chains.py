"""Small blocks of one chain through a drive, and what a start costs with a million of them.

64 KiB blocks, read 32 of a chain at a time and written in batches as the daemon's cleaners do, against the same
bytes in raw calls of 32 pieces each: what a chain that lies together could reach. Both from as many threads.
"""

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvcascade.daemon.residency import DEMOTION_BATCH_BLOCKS
from kvcascade.daemon.transfer import CLEANERS
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.journal import RECORD, Journal, namespace_tag
from kvcascade.tiers.slabfile import BlockMeta, ReadJob, WriteJob, slot_size

from .harness import Bench, Row, below, check
from .raw_disk import NAMESPACE, TIER_THREADS, AgainstRaw, TierRun

BLOCK = 64 << 10
CHAIN = 32
RECORDS = 1_000_000


def run(bench: Bench) -> list[Row]:
    directory = bench.directory / "chains"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    count = 2048 if bench.quick else 4096
    against = AgainstRaw("disk chains", BLOCK, count, together=CHAIN, threads=TIER_THREADS)
    try:
        seen = asyncio.run(against.measure(bench, directory, _Tier))
        rows = against.report(
            seen,
            f"64 KiB blocks, chains of {CHAIN}",
            raw=f"raw O_DIRECT, {TIER_THREADS} threads, in calls of {CHAIN}",
            fio=f"fio io_uring, 32 MiB in flight, in calls of {CHAIN}",
        )
        bench.say("disk: a start with a million records")
        return rows + recovery(directory / "million", bench.rounds(3, 1))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Tier(TierRun):
    def prepare(self) -> None:
        super().prepare()
        self._writes: list[WriteJob] = []
        for first in range(0, len(self._payloads), CHAIN):
            slots = self._tier.allocate(BLOCK, CHAIN)
            check(len(slots) == CHAIN and bool((np.diff(slots) == 1).all()), "a chain does not lie together")
            for at, slot in enumerate(slots.tolist(), start=first):
                key = self._round.to_bytes(16, "little") + at.to_bytes(16, "little")
                self._writes.append(WriteJob(slot, BlockMeta(NAMESPACE, key, b"", 0, BLOCK, 0), self._payloads[at]))
        self._reads = [
            ReadJob(job.slot, NAMESPACE, job.meta.block_hash, 0, BLOCK, into)
            for job, into in zip(self._writes, self._targets, strict=True)
        ]

    async def write(self) -> None:
        batches = iter(range(0, len(self._writes), DEMOTION_BATCH_BLOCKS))

        async def writer() -> None:
            for first in batches:
                reasons = await self._tier.write(self._writes[first : first + DEMOTION_BATCH_BLOCKS])
                check(not any(reasons), f"a write failed: {reasons}")

        await asyncio.gather(*(writer() for _ in range(CLEANERS)))

    async def read(self) -> None:
        firsts = range(0, len(self._reads), CHAIN)
        outcomes = await asyncio.gather(*(self._tier.read(self._reads[first : first + CHAIN]) for first in firsts))
        check(not any(any(reasons) for reasons in outcomes), "a read failed")

    def free(self) -> None:
        self._tier.free([job.slot for job in self._writes])


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
