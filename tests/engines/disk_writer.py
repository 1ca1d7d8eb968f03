"""A process that stores, reuses and frees blocks until it is killed, and says what it has done.

    python disk_writer.py DIRECTORY PREFIX [RULE ...]

Each RULE is `operation:name:what:skip`, as `engines.faults` has them: the end of the process at a named point. A line
is printed before blocks are written (`writing`), once they are durable (`durable`) and before they are freed.
"""

import asyncio
import hashlib
import sys
from pathlib import Path

import numpy as np
from engines.faults import Faults

from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.slabfile import BlockMeta, WriteJob

NS = hashlib.sha256(b"a namespace").digest()
LENGTHS = [4096, 60_000, 300_000]
CAPACITY = 6 << 20


def say(word: str, *names: str) -> None:
    print(word, *names, flush=True)


async def chain(tier: DiskTier, prefix: str, first: int, count: int) -> list[tuple[int, str]]:
    length = LENGTHS[first % len(LENGTHS)]
    slots = tier.allocate(length, count).tolist()
    names = [f"{prefix}-{first}-{number}" for number in range(len(slots))]
    jobs = []
    for slot, name in zip(slots, names, strict=True):
        key = hashlib.sha256(name.encode()).digest()
        payload = np.frombuffer(hashlib.shake_128(NS + key).digest(length), dtype=np.uint8)
        jobs.append(WriteJob(slot, BlockMeta(NS, key, b"", 0, length, 0), payload))
    say("writing", *names)
    reasons = await tier.write(jobs)
    assert reasons == [None] * len(jobs), reasons
    say("durable", *names)
    return list(zip(slots, names, strict=True))


async def main(directory: Path, prefix: str, rules: list[str]) -> None:
    faults = Faults()
    for rule in rules:
        operation, name, what, skip = rule.split(":")
        faults.add(operation, name, what, skip=int(skip))
    tier = DiskTier(directory, CAPACITY, threads=3, folder=faults.folder)
    recovery = tier.open()
    tier.register_namespace(NS, b"what NS means")
    tier.free(recovery.slot[: len(recovery) // 2])
    say("open")
    kept: list[tuple[int, str]] = []
    for turn in range(10_000):
        for done in await asyncio.gather(*(chain(tier, prefix, 3 * turn + i, 4) for i in range(3))):
            kept += done
        if len(kept) > 20:
            going, kept = kept[:12], kept[12:]
            say("freeing", *(name for _, name in going))
            tier.free([slot for slot, _ in going])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
