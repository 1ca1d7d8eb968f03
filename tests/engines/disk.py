"""Blocks whose every byte follows from their key, and a disk tier with one life after another."""

import contextlib
import hashlib
import mmap
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.recovery import Recovery
from kvcascade.tiers.slabfile import BlockMeta, ReadJob, WriteJob

U8 = npt.NDArray[np.uint8]
NS = hashlib.sha256(b"a namespace").digest()
OTHER_NS = hashlib.sha256(b"another namespace").digest()
KIB = 1 << 10
MIB = 1 << 20


def key(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def truth(name: object, length: int, namespace: bytes = NS) -> U8:
    """The pattern oracle: every byte of a block follows from its namespace and key."""
    return np.frombuffer(hashlib.shake_128(namespace + key(name)).digest(length), dtype=np.uint8)


def aligned(length: int) -> U8:
    return np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)[:length]


def write_job(slot: int, name: object, length: int, namespace: bytes = NS, parent: bytes = b"") -> WriteJob:
    payload = aligned(length)
    payload[:] = truth(name, length, namespace)
    return WriteJob(int(slot), BlockMeta(namespace, key(name), parent, 0, length, 7, b"\1\0\0\0"), payload)


def read_job(slot: int, name: object, length: int, namespace: bytes = NS) -> ReadJob:
    return ReadJob(int(slot), namespace, key(name), 0, length, aligned(length))


async def store(tier: DiskTier, names: Sequence[object], length: int) -> list[int]:
    """Blocks that are durable now; their slots."""
    slots = tier.allocate(length, len(names))
    assert len(slots) == len(names)
    assert await tier.write([write_job(s, n, length) for s, n in zip(slots, names, strict=True)]) == [None] * len(names)
    return [int(slot) for slot in slots]


async def fetch(tier: DiskTier, slot: int, name: object, length: int) -> str | None:
    """Why it is a miss, or None with every byte compared."""
    job = read_job(slot, name, length)
    (reason,) = await tier.read([job])
    if reason is None:
        assert np.array_equal(job.into, truth(name, length)), "foreign bytes"
    return reason


def whereabouts(recovery: Recovery) -> dict[bytes, int]:
    return {row.tobytes(): int(slot) for row, slot in zip(recovery.hashes, recovery.slot, strict=True)}


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tiers:
    """Opens tiers on one directory, one after another, and ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = FakeClock()
        self.tier: DiskTier | None = None

    async def open(self, capacity: int = 64 * MIB, directory: Path | None = None, **options: Any) -> Recovery:
        """Another life; `options` as DiskTier takes them."""
        await self.close()
        options = {"threads": 2, "clock": self.clock, **options}
        tier = DiskTier(directory or self.directory, capacity, **options)
        recovery = tier.open()
        tier.register_namespace(NS, b"what NS means")
        tier.register_namespace(OTHER_NS, b"what OTHER_NS means")
        self.tier = tier
        return recovery

    async def close(self) -> None:
        if self.tier is not None:
            assert self.tier.check() == []
            assert await self.tier.close()
            assert self.tier.check() == []
            self.tier = None


def open_descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{entry.name} {entry.readlink()}")
    return found


def mounted(kind: str, at: Path, *options: str) -> Iterator[Path]:
    """A mount of its own, or a skipped test where none can be had."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, at], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        if subprocess.run(["umount", at], capture_output=True).returncode != 0:
            # A failed test may have left files open; the mount must not outlive it.
            subprocess.run(["umount", "-l", at], capture_output=True)
