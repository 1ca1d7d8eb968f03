"""What is asked for one by one within one moment, asked as one question."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST: Final = 1024  # of one question


@dataclass(eq=False, slots=True)
class _Batch(Generic[K, V]):
    keys: list[K] = field(default_factory=list)
    timeout: float = 0.0
    task: "asyncio.Task[Sequence[V]] | None" = None


class Together(Generic[K, V]):
    """Gathers keys until the loop comes round, then asks for all of them at once. On the loop's thread."""

    def __init__(self, ask: Callable[[Sequence[K], float], Awaitable[Sequence[V]]]) -> None:
        """`ask`: an answer for each key, in order, within so many seconds; what it raises, all are told."""
        self._ask = ask
        self._gathering: _Batch[K, V] | None = None

    async def one(self, key: K, timeout: float) -> V:
        """The answer for a key. Whoever waits for it no longer keeps it from nobody."""
        batch = self._gathering
        if batch is None or len(batch.keys) >= MOST:
            batch = self._gathering = _Batch()
            batch.task = asyncio.create_task(self._answers(batch), name="questions together")
            batch.task.add_done_callback(_hear)
        place = len(batch.keys)
        batch.keys.append(key)
        batch.timeout = max(batch.timeout, timeout)
        assert batch.task is not None
        return (await asyncio.shield(batch.task))[place]

    async def _answers(self, batch: _Batch[K, V]) -> Sequence[V]:
        if batch is self._gathering:
            self._gathering = None
        return await self._ask(batch.keys, batch.timeout)


def _hear(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # those who wait for it are told; where nobody does any more, nobody is to be
