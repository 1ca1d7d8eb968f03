"""2 MiB blocks through the disk tier, against raw O_DIRECT (and fio, where it is installed) on the same file system.

The tier is driven as the daemon drives it: cleaners that write batches of 32 MiB, all reads of a prefix at once in
batches of 16 MiB; the raw transfers come from 16 threads.
"""

import asyncio
import shutil

from kvcascade.daemon.residency import DEMOTION_BATCH_BYTES
from kvcascade.daemon.transfer import CLEANERS, READ_BATCH_BYTES
from kvcascade.tiers.slabfile import BlockMeta, ReadJob, WriteJob

from .harness import Bench, Row, check
from .raw_disk import NAMESPACE, AgainstRaw, TierRun

BLOCK = 2 << 20
RAW_THREADS = 16
WRITE_BATCH = DEMOTION_BATCH_BYTES // BLOCK
READ_BATCH = READ_BATCH_BYTES // BLOCK


def run(bench: Bench) -> list[Row]:
    directory = bench.directory / "disk"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    against = AgainstRaw("disk", BLOCK, count=64 if bench.quick else 128, together=1, threads=RAW_THREADS)
    try:
        seen = asyncio.run(against.measure(bench, directory, _Tier))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return against.report(
        seen,
        "2 MiB blocks through the tier",
        raw=f"raw O_DIRECT, {RAW_THREADS} threads",
        fio="fio io_uring, depth 16",
    )


class _Tier(TierRun):
    def _key(self, number: int) -> bytes:
        return self._round.to_bytes(16, "little") + number.to_bytes(16, "little")

    def prepare(self) -> None:
        super().prepare()
        self._slots: list[int] = []

    async def write(self) -> None:
        count = len(self._payloads)
        batches = iter(range(0, count, WRITE_BATCH))

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
