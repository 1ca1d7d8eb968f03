"""Copies between tiers are cancelled at every point where they wait: nothing leaks, nothing lies, and the next goes."""

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.node import BLOCK, SLAB, Engine, Node, open_disk

from kvcascade.daemon.protocol import Tier
from kvcascade.daemon.transfer import Transfer

PER_SLAB = SLAB // BLOCK
A, B = tuple(range(4)), tuple(range(10, 14))
PATIENCE_S = 10


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """1 MiB of HBM over 1 MiB of DRAM over 64 MiB of disk: 16 blocks each in memory. Nothing is cleaned unasked."""
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=1, hbm_slabs=1, budget=1, low_watermark=0, hbm_watermark=0, disk=disk)
    yield node
    await at_rest(node)
    node.close()
    assert await disk.close()


async def at_rest(node: Node) -> None:
    """Waits until nothing is under way: no row busy, no slot pending; then as check()."""
    pools = [node.dram.pool] + ([node.hbm.pool] if node.hbm is not None else [])
    async with asyncio.timeout(PATIENCE_S):
        while node.residency.index.busy.any():  # noqa: ASYNC110 - the cleaner tells nobody when it is done
            await asyncio.sleep(0.005)
    assert all(counts.pending == 0 for pool in pools for counts in pool.counts().values())
    node.expect_sound()


def cancelled_at(steps: set[int], work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """A task that is cancelled while it waits for the n-th time, for each n of `steps`."""

    @types.coroutine
    def interrupted() -> Iterator[Any]:
        loop = asyncio.get_running_loop()
        resume: Callable[[Any], Any] = work.send
        value: Any = None
        step = 0
        while True:
            try:
                future = resume(value)
            except StopIteration as end:
                return end.value
            if step in steps:
                current = asyncio.current_task()
                assert current is not None
                loop.call_soon(current.cancel)
            step += 1
            try:
                value = yield future
                resume = work.send
            except BaseException as error:
                value, resume = error, work.throw

    async def main() -> Any:
        return await interrupted()  # type: ignore[misc]

    return asyncio.create_task(main())


async def cancelled_everywhere(node: Node, begin: Callable[[], Coroutine[Any, Any, Any]], most: int = 12) -> int:
    """Cancels what `begin` begins at each of its waits, and once more at the one after; how many waits it had."""
    for step in range(most):
        for steps in ({step}, {step, step + 1}):
            task = cancelled_at(steps, begin())
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.done()
            node.expect_sound()
            if not task.cancelled():
                assert task.exception() is None
                return step
    raise AssertionError("it never came to its end")


async def on_disk_alone(node: Node, engine: Engine, path: tuple[int, ...]) -> None:
    """Stores a path and brings it all the way down."""
    engine.store(path)
    await node.demote(everything=True)
    # What fills the memory pushes out what is clean.
    for filler in range(100, 100 + 4 * PER_SLAB):
        engine.store((filler,))
    await node.demote(everything=True)
    for filler in range(200, 200 + 4 * PER_SLAB):
        engine.store((filler,))
    assert engine.tiers(path) == [{Tier.DISK}] * len(path)


async def test_a_demotion_from_hbm_may_be_cancelled_at_every_wait(node: Node) -> None:
    engine = node.engine()
    async with Transfer(node.residency) as transfer:
        engine.store(A)
        assert engine.tiers(A) == [{Tier.HBM}] * 4

        async def demote() -> None:
            plan = node.residency.plan_demotion(everything=True)
            if plan is not None:
                await transfer.demote(plan)

        assert await cancelled_everywhere(node, demote) > 0
        engine.expect_loads(A, 4)
    engine.end()


async def test_a_drain_may_be_cancelled_at_every_wait(node: Node) -> None:
    # The drain's deadline cancels it: what is below is whole, what is not is still dirty.
    engine = node.engine()
    async with Transfer(node.residency) as transfer:
        for path in (A, B):
            engine.store(path)
        assert await cancelled_everywhere(node, transfer.flush, most=40) > 0
        await transfer.flush()
        for path in (A, B):
            assert all(Tier.DISK in tiers for tiers in engine.tiers(path))
            engine.expect_loads(path, 4)
    engine.end()


async def test_a_load_may_be_cancelled_at_every_wait_and_its_promotion_goes_on(node: Node) -> None:
    engine = node.engine()
    await on_disk_alone(node, engine, A)
    async with Transfer(node.residency) as transfer:
        lease = engine.lookup(A).lease

        async def fetch() -> None:
            await transfer.fetch(engine.space, lambda: engine.lease(lease).rows, PATIENCE_S)

        assert await cancelled_everywhere(node, fetch) > 0
        engine.expect_true(A, engine.load(lease))
        assert len(engine.load(lease).pages) == 4
        engine.release(lease)
    engine.end()


@pytest.mark.parametrize("turns", range(8))
async def test_a_promotion_may_be_cancelled_at_any_moment(node: Node, turns: int) -> None:
    engine = node.engine()
    await on_disk_alone(node, engine, A)
    async with Transfer(node.residency) as transfer:
        lease = engine.lookup(A).lease
        transfer.promote(engine.space, engine.lease(lease).rows)
        (promotion,) = [task for task in asyncio.all_tasks() if task.get_name() == "promotion"]
        for _ in range(turns):
            await asyncio.sleep(0)
        promotion.cancel()
        await asyncio.wait([promotion], timeout=PATIENCE_S)
        await at_rest(node)
        # Not doubted, and so not forgotten: the next load brings it up.
        await transfer.fetch(engine.space, lambda: engine.lease(lease).rows, PATIENCE_S)
        engine.expect_true(A, engine.load(lease))
        assert len(engine.load(lease).pages) == 4
        engine.release(lease)
    engine.end()


@pytest.mark.parametrize("turns", range(8))
async def test_the_cleaner_may_be_ended_at_any_moment(node: Node, turns: int) -> None:
    engine = node.engine()
    for path in (A, B):
        engine.store(path)
    async with Transfer(node.residency):
        # Everything that comes now finds no room unless something goes down.
        for filler in range(100, 100 + 3 * PER_SLAB):
            engine.store((filler,))
        for _ in range(turns):
            await asyncio.sleep(0)
    assert not node.residency.index.busy.any()
    node.expect_sound()
    for path in (A, B):
        engine.expect_loads(path, engine.lookup(path, pin=False).ready)
    engine.end()


async def test_a_lease_that_ends_in_mid_load_ends_the_load(node: Node) -> None:
    # C4: the budget of promotions lets four blocks come up at a time. After the release the rows are nobody's, and
    # may become other blocks: none of them is asked for any more.
    engine = node.engine()
    path = tuple(range(12))
    await on_disk_alone(node, engine, path)
    async with Transfer(node.residency) as transfer:
        lease = engine.lookup(path).lease

        def wanted() -> Any:
            return node.cache.leased_rows(engine.attachment, lease, len(path))

        loading = asyncio.create_task(transfer.fetch(engine.space, wanted, PATIENCE_S))
        await asyncio.sleep(0)
        engine.release(lease)
        await asyncio.wait_for(loading, PATIENCE_S)
        assert node.residency.counters["promoted_blocks"] == 4
    engine.end()


async def test_many_waiters_for_one_block_are_served_by_one_flight(node: Node) -> None:
    engine = node.engine()
    await on_disk_alone(node, engine, A)
    async with Transfer(node.residency) as transfer:
        leases = [engine.lookup(A, request=f"{n}".encode()).lease for n in range(8)]
        await asyncio.gather(
            *(transfer.fetch(engine.space, lambda n=n: engine.lease(n).rows, PATIENCE_S) for n in leases)  # type: ignore[misc]
        )
        assert node.residency.counters["promoted_blocks"] == 4
        engine.release(*leases)
    engine.end()
