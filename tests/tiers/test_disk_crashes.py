"""Whenever the process or the power ends: every durable block is there, and no byte is another's."""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engines import disk_writer
from engines.disk import MIB, NS, Tiers, aligned, fetch, key, store, whereabouts, write_job
from engines.faults import PowerCut

from kvcascade.config.errors import TierUnavailable
from kvcascade.tiers.directory import check_directory
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.recovery import Recovery
from kvcascade.tiers.slabfile import ReadJob, slot_size

TORN = {"torn journal tail", "torn snapshot tail"}


class Life:
    """A writer in a process of its own, until it is killed or kills itself at the point that a rule names.

    `durable`: names of the blocks that it called durable and did not begin to free. `announced`: of all.
    """

    def __init__(self, directory: Path, prefix: str, *rules: str) -> None:
        arguments = [sys.executable, disk_writer.__file__, str(directory), prefix, *rules]
        path = [str(Path(disk_writer.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        self._child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
        self.durable: set[str] = set()
        self.announced: set[str] = set()

    def run(self, point: str = "", passes: int = 1, delay: float = 0.0) -> None:
        """To its end; killed `delay` seconds after it has said `point` so often."""
        try:
            self._listen(point, passes, delay)
        finally:
            self._child.kill()
        assert self._child.wait() == -signal.SIGKILL

    def _listen(self, point: str, passes: int, delay: float) -> None:
        assert self._child.stdout is not None
        # What the pipe still holds after the kill was said before it: it binds too.
        for line in self._child.stdout:
            word, *names = line.split()
            self.announced.update(names)
            if word == "durable":
                self.durable.update(names)
            elif word == "freeing":
                self.durable.difference_update(names)
            if word == point:
                passes -= 1
                if passes == 0:
                    deadline = time.perf_counter() + delay
                    while time.perf_counter() < deadline:
                        pass
                    self._child.kill()
        self._child.stdout.close()


async def expect_true(tier: DiskTier, recovery: Recovery, durable: set[str]) -> None:
    """Every durable block reads back whole, and whatever else is found proves itself or is a miss."""
    assert set(recovery.dropped) <= TORN
    assert tier.used == sum(slot_size(int(length)) for length in recovery.length) <= tier.capacity
    found = whereabouts(recovery)
    assert {key(name) for name in durable} <= set(found)
    must = {key(name) for name in durable}
    for row, length in zip(recovery.hashes, recovery.length.tolist(), strict=True):
        name = row.tobytes()
        job = ReadJob(found[name], NS, name, 0, length, aligned(length))
        (reason,) = await tier.read([job])
        assert reason is None or name not in must, reason
        if reason is None:
            assert np.asarray(job.into).tobytes() == hashlib.shake_128(NS + name).digest(length), "foreign bytes"


@pytest.mark.parametrize("point", ["open", "writing", "durable", "freeing"])
async def test_a_killed_writer_leaves_every_durable_block_and_no_foreign_byte(tiers: Tiers, point: str) -> None:
    chance = random.Random(point)
    for number in range(2):
        life = Life(tiers.directory, f"{point}{number}")
        life.run(point, 1 if point == "open" else chance.randint(1, 8), chance.random() * 0.02)
        recovery = await tiers.open(capacity=6 * MIB)
        assert tiers.tier is not None
        await expect_true(tiers.tier, recovery, life.durable)
        await tiers.close()


# Every system call that changes something: the end before it, half way through it and after it.
POINTS = [
    ("write", "slab-*", ["kill", "torn kill", "late kill"]),
    ("sync", "slab-*", ["kill", "late kill"]),
    ("write", "journal-*", ["kill", "torn kill", "late kill"]),
    ("sync", "journal-*", ["kill", "late kill"]),
    ("open", "journal-*", ["kill", "late kill"]),
    ("open", "slab-*", ["kill", "late kill"]),
    ("allocate", "slab-*", ["kill", "late kill"]),
    ("write", "namespace-*", ["kill", "torn kill", "late kill"]),
    ("rename", "namespace-*", ["kill", "late kill"]),
    ("write", "snapshot-*", ["kill", "torn kill", "late kill"]),
    ("sync", "snapshot-*", ["kill", "late kill"]),
    ("rename", "snapshot-*", ["kill", "late kill"]),
    ("unlink", "journal-*", ["kill", "late kill"]),
    ("sync", ".", ["kill", "late kill"]),
    ("rename", "format", ["kill", "late kill"]),
]
EVERY_POINT = [(operation, name, what) for operation, name, whats in POINTS for what in whats]
SOME_POINTS = [
    ("write", "slab-*", "torn kill"),
    ("sync", "slab-*", "kill"),
    ("write", "journal-*", "torn kill"),
    ("sync", "journal-*", "late kill"),
    ("write", "snapshot-*", "torn kill"),
    ("rename", "snapshot-*", "late kill"),
    ("rename", "format", "kill"),
]


async def many_segments(tiers: Tiers, name: str) -> None:
    """So many that the first commit of the next life begins a compaction."""
    number = 0
    while len(list(tiers.directory.glob("journal-*"))) != 17:
        number += 1
        await tiers.open(capacity=6 * MIB)
        assert tiers.tier is not None
        tiers.tier.free(await store(tiers.tier, [f"{name} {number}"], 4096))
        await tiers.close()


async def killed_at(tiers: Tiers, number: int, operation: str, name: str, what: str, skip: int) -> None:
    if name == "snapshot-*" or operation == "unlink":
        await many_segments(tiers, f"segment {number}")
    life = Life(tiers.directory, f"life{number}", f"{operation}:{name}:{what}:{skip}")
    life.run()
    if (tiers.directory / "format").exists():
        # Nothing is damaged that records name, by the end of a process alone.
        check = check_directory(tiers.directory, deep=False)
        assert set(check.dropped) <= TORN
    recovery = await tiers.open(capacity=6 * MIB)
    assert tiers.tier is not None
    await expect_true(tiers.tier, recovery, life.durable)
    await tiers.close()


@pytest.mark.parametrize(("operation", "name", "what"), SOME_POINTS)
async def test_the_end_of_the_process_inside_a_system_call_costs_no_durable_block(
    tiers: Tiers, operation: str, name: str, what: str
) -> None:
    # C9, E3
    await killed_at(tiers, 0, operation, name, what, 0)


@pytest.mark.stress
@pytest.mark.timeout(1800)
async def test_the_end_of_the_process_at_every_point_hundreds_of_times(tiers: Tiers, tmp_path: Path) -> None:
    chance = random.Random(7)
    rounds = int(os.environ.get("KVC_TEST_ROUNDS", "300"))
    for number in range(rounds):
        operation, name, what = EVERY_POINT[number % len(EVERY_POINT)]
        first = name in ("namespace-*", "format") or operation == "open"
        tiers.directory = tmp_path / (f"fresh {number}" if first else "disk")
        few = operation in ("open", "allocate", "unlink", "rename") or name in ("snapshot-*", "namespace-*", ".")
        await killed_at(tiers, number, operation, name, what, 0 if few else chance.randint(0, 12))


# -- power cuts


async def lives_until_the_power_fails(tiers: Tiers, seed: int, steps: int) -> None:
    """Some lives on one directory, each ended by a power cut after so many changes on disk."""
    chance = random.Random(seed)
    durable: dict[str, int] = {}
    for life in range(4):
        power = PowerCut(seed * 100 + life)
        power.countdown = chance.randint(0, steps)
        try:
            await tiers.open(capacity=4 * MIB, folder=power.folder)
            assert tiers.tier is not None
            durable = await use(tiers.tier, chance, durable, f"{seed}-{life}")
        except TierUnavailable:
            pass  # it failed while the directory was being opened
        power.cut()
        if tiers.tier is not None:
            await tiers.tier.close()
            tiers.tier = None
        power.forget()
        recovery = await tiers.open(capacity=4 * MIB)
        assert tiers.tier is not None
        found = whereabouts(recovery)
        for name, length in durable.items():
            assert await fetch(tiers.tier, found[key(name)], name, length) is None, (seed, life, name)
        for row, length in zip(recovery.hashes, recovery.length.tolist(), strict=True):
            job = ReadJob(found[row.tobytes()], NS, row.tobytes(), 0, length, aligned(length))
            if await tiers.tier.read([job]) == [None]:
                assert np.asarray(job.into).tobytes() == hashlib.shake_128(NS + row.tobytes()).digest(length)
        assert tiers.tier.used <= tiers.tier.capacity
        await tiers.close()


async def use(tier: DiskTier, chance: random.Random, durable: dict[str, int], prefix: str) -> dict[str, int]:
    """Store and free until a write fails; the blocks that are durable, with their lengths."""
    held: dict[str, tuple[int, int]] = {}
    for turn in range(200):
        length = chance.choice([4096, 30_000, 200_000])
        slots = tier.allocate(length, chance.randint(1, 5)).tolist()
        names = [f"{prefix}-{turn}-{number}" for number in range(len(slots))]
        reasons = await tier.write([write_job(s, n, length) for s, n in zip(slots, names, strict=True)])
        for slot, name, reason in zip(slots, names, reasons, strict=True):
            if reason is None:
                durable[name] = length
                held[name] = (slot, length)
        if any(reason is not None for reason in reasons):
            return durable
        while held and (not slots or len(held) > 8):
            name = chance.choice(sorted(held))
            tier.free([held.pop(name)[0]])
            del durable[name]
        await asyncio.sleep(0)
    return durable


@pytest.mark.parametrize("seed", range(12))
async def test_a_power_cut_loses_nothing_that_was_durable(tiers: Tiers, seed: int) -> None:
    await lives_until_the_power_fails(tiers, seed, 60)


@pytest.mark.stress
@pytest.mark.timeout(1800)
async def test_hundreds_of_power_cuts_lose_nothing_that_was_durable(tiers: Tiers, tmp_path: Path) -> None:
    for seed in range(100, 300):
        tiers.directory = tmp_path / f"disk {seed}"
        await lives_until_the_power_fails(tiers, seed, 150)
