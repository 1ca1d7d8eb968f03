"""Named threads for calls that block, awaited from the loop.

The rule: a call that has begun is always waited for, also by a caller that was cancelled, because it may be touching
the caller's memory; a call that has not begun is withdrawn at once. The threads are daemons, so that a device that
never answers keeps neither the process nor its shutdown.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvcascade.config.errors import TierUnavailable

T = TypeVar("T")


class Workers:
    """A fixed set of threads over one queue. The owner calls `stop` when it has ended its own work."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float]) -> None:
        # `_began` is written by the threads, one entry each; the rest by the loop's thread alone.
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._began: dict[str, float] = {}
        self.stopping = False
        # Enough to keep every thread busy while the loop hands out more; what waits beyond stays with its caller.
        self._room = asyncio.Semaphore(4 * threads)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        self._ended: dict[str, Future[None]] = {thread.name: Future() for thread in self._threads}
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    async def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Results in the order of the calls. When cancelled, those not begun never run and those begun have ended
        before this raises. TierUnavailable once the threads have been told to stop, and when a call was withdrawn."""
        begun: list[Future[T]] = []
        results: list[asyncio.Future[T]] = []
        try:
            for call in calls:
                await self._room.acquire()
                if self.stopping:
                    self._room.release()
                    raise TierUnavailable("the IO threads have ended")
                future: Future[T] = Future()
                begun.append(future)
                results.append(asyncio.wrap_future(future))
                results[-1].add_done_callback(self._release)
                self._queue.put((future, call))
            if results:
                await asyncio.wait(results)
            if any(result.cancelled() for result in results):
                raise TierUnavailable("withdrawn: the IO threads do not come round to it")
        except (asyncio.CancelledError, TierUnavailable):
            await outlast(result for future, result in zip(begun, results, strict=True) if not future.cancel())
            raise
        return [result.result() for result in results]

    def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start one call that touches nobody's memory: whoever waits for it may stop waiting."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return asyncio.wrap_future(future)

    def withdraw(self) -> None:
        """Give up all calls that have not begun, because those that have do not end."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is None:
                    self._queue.put(None)
                    return
                item[0].cancel()

    def _release(self, _: object) -> None:
        self._room.release()

    def longest(self) -> float:
        """Seconds that the oldest running call has been running; 0 at idle."""
        began = list(self._began.values())
        return max(0.0, self._clock() - min(began)) if began else 0.0

    def dismiss(self) -> None:
        """End the threads after what is queued; waits for nothing."""
        self.stopping = True
        for _ in self._threads:
            self._queue.put(None)

    async def stop(self, timeout: float) -> bool:
        """End the threads after what is queued; False when one is still busy after `timeout` seconds."""
        if not self.stopping:
            self.dismiss()
        ended = [asyncio.wrap_future(future) for future in self._ended.values()]
        _, busy = await asyncio.wait(ended, timeout=max(0.0, timeout))
        if busy:
            return False
        for thread in self._threads:
            thread.join()
        return True

    def _work(self) -> None:
        name = threading.current_thread().name
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            self._began[name] = self._clock()
            try:
                result = call()
            except BaseException as error:
                del self._began[name]
                future.set_exception(error)
            else:
                del self._began[name]
                future.set_result(result)
            del item, future, call
        self._ended[name].set_result(None)


async def outlast(awaitables: Iterable[Awaitable[Any]]) -> None:
    """Wait until all have ended, however often the caller is cancelled meanwhile; then the cancellation is raised."""
    pending = {asyncio.ensure_future(awaitable) for awaitable in awaitables}
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
