"""Blocking calls are awaited to their end once begun, withdrawn before, and their threads end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from kvcascade.config.errors import TierUnavailable
from kvcascade.tiers.workers import Workers, outlast


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    opened = Workers("test-worker", 2, time.monotonic)
    yield opened
    assert await opened.stop(10)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-worker")]


async def test_results_come_in_the_order_of_the_calls_however_many(workers: Workers) -> None:
    assert await workers.run([lambda i=i: i for i in range(100)]) == list(range(100))  # type: ignore[misc]
    assert await workers.run([]) == []


async def test_an_error_reaches_the_caller_and_the_thread_lives_on(workers: Workers) -> None:
    def fail() -> int:
        raise LookupError("bug")

    with pytest.raises(LookupError):
        await workers.run([fail])
    assert await workers.run([lambda: 1] * 4) == [1] * 4


async def test_a_cancelled_caller_outlasts_what_has_begun_and_withdraws_the_rest(workers: Workers) -> None:
    began, go = threading.Semaphore(0), threading.Event()
    ended: list[int] = []

    def call(number: int) -> None:
        began.release()
        go.wait()
        ended.append(number)

    task = asyncio.create_task(workers.run([lambda i=i: call(i) for i in range(6)]))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(began.acquire), 10)
    assert await asyncio.wait_for(asyncio.to_thread(began.acquire), 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [0, 1]
    assert await workers.run([lambda: 7] * 20) == [7] * 20, "the room of the withdrawn calls is free again"


async def test_a_busy_thread_outlives_a_stop_that_runs_out_of_time() -> None:
    now = 0.0
    workers = Workers("test-worker", 2, lambda: now)
    go, began = threading.Event(), threading.Event()

    def call() -> bool:
        began.set()
        return go.wait()

    task = asyncio.create_task(workers.run([call]))
    await asyncio.to_thread(began.wait)
    now = 12.0
    assert workers.longest() == 12.0
    assert not await workers.stop(0.01)
    with pytest.raises(TierUnavailable):
        await workers.run([call])
    go.set()
    assert await task == [True]
    assert await workers.stop(10)
    assert workers.longest() == 0.0


async def test_outlast_raises_the_cancellation_only_at_the_end() -> None:
    gate = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(outlast([gate]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task
