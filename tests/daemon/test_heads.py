"""What the disk holds is prefix-closed at every moment: whenever the daemon ends, what was durable is reachable."""

import asyncio
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from engines.node import BLOCK, Node, Path_, open_disk
from engines.scripted import prompt

from kvcascade.daemon.index import NO_ROW, NO_SLOT, RowState
from kvcascade.daemon.plans import Demotion
from kvcascade.daemon.protocol import Tier
from kvcascade.daemon.recovery import adopt

SIZE = BLOCK + 4096


def orphans_on_disk(node: Node) -> int:
    """Blocks on disk whose parents are not."""
    index = node.residency.index
    rows = np.flatnonzero((index.disk[: index.high] != NO_SLOT) & (index.state[: index.high] == RowState.READY))
    above = index.parent[rows]
    above = above[above != NO_ROW]
    return int((index.disk[above] == NO_SLOT).sum())


def chains(chance: random.Random, trunk: Path_) -> Path_:
    """A new chain, or one that forks from a known one."""
    stem = trunk[: chance.randrange(len(trunk) + 1)] if chance.random() < 0.5 else ()
    return (*stem, *(chance.randrange(1 << 30) for _ in range(chance.randint(1, 24))))


async def carry_out(node: Node, plan: Demotion, chance: random.Random) -> None:
    """As the cleaner does, the drives in any order; some writes fail."""
    assert node.disk is not None
    reasons = await node.disk.write(node.write_jobs(plan))
    done = np.array([reason is None for reason in reasons])
    if chance.random() < 0.1:
        # Such is a write whose tail failed.
        done[chance.randrange(len(done)) :] = False
    node.residency.demoted(plan, done)


@pytest.mark.parametrize("policy", ["back", "through"])
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("blocks", [40, 400])
async def test_no_block_lies_on_disk_without_those_above_it(
    tmp_path: Path, policy: str, drives: int, blocks: int
) -> None:
    chance = random.Random(f"{policy} {drives} {blocks}")
    directories = [tmp_path / str(number) for number in range(drives)]
    disk, _ = await open_disk(directories, blocks * SIZE // drives)
    node = Node(slabs=4, budget=1, low_watermark=0.3, disk=disk, disk_policy=policy)
    engine = node.engine()
    trunk: Path_ = (1,)
    for _ in range(120):
        trunk = chains(chance, trunk)
        if chance.random() < 0.2:
            engine.matched(trunk[: chance.randint(1, len(trunk))])
        else:
            engine.store(trunk)
        # Two cleaners: what the second one plans may continue what the first one is writing.
        plans = [node.residency.plan_demotion() for _ in range(chance.randint(0, 2))]
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                if plan is not None:
                    group.create_task(carry_out(node, plan, chance))
        assert orphans_on_disk(node) == 0
        node.expect_sound()
    assert node.residency.counters["demoted_blocks"] > 100
    held = node.rows_in(Tier.DISK)
    node.close()
    assert await disk.close()
    disk, recovery = await open_disk(directories, blocks * SIZE // drives)
    node = Node(slabs=4, budget=1, disk=disk)
    assert adopt(node.residency, [], recovery)[1] == held
    assert node.residency.counters["recovery_unreachable_blocks"] == 0
    node.expect_sound()
    node.close()
    assert await disk.close()


def kill_in_mid_store(start_daemon, start_engine, rounds):
    """Long chains, stored without a pause until the daemon is killed: some are half on disk, always."""
    chance = random.Random(rounds)
    daemon = start_daemon(dram="16MiB", dram_slab="1MiB", disk_size="256MiB", dram_low_watermark="25%")
    recovered = 0
    for round_ in range(rounds):
        engine = start_engine(daemon, timeout=2.0)
        number, end = 0, time.monotonic() + chance.uniform(0.3, 1.2)
        while time.monotonic() < end:
            engine.store(prompt(f"{round_} {number}", 200))
            number += 1
        engine.close()
        daemon.kill()
        daemon.start()
        status = daemon.status()
        recovered += status["recovered"]["blocks"]
        assert status["counters"].get("recovery_unreachable_blocks", 0) == 0, status["recovered"]
    assert recovered > 0


def test_a_daemon_that_is_killed_in_mid_store_leaves_no_block_out_of_reach(start_daemon, start_engine):
    kill_in_mid_store(start_daemon, start_engine, 2)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_many_kills_in_mid_store_leave_no_block_out_of_reach(start_daemon, start_engine):
    kill_in_mid_store(start_daemon, start_engine, int(os.environ.get("KVC_STRESS_ROUNDS", "30")))
