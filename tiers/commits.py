"""Group commit: records of a drive's journal become durable together, after the payloads that they speak of.

Writers share syncs: while one group is being made durable the next gathers, since a sync costs 4-12 ms here whatever
its size. Records are appended in the order in which they were queued, and a write queues its own in its turn (`Turns`),
whichever payload is on disk first: a caller that writes a chain's head before its tail never leaves the tail alone
behind.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvcascade.config.errors import TierUnavailable

from .health import Direction
from .opened import Opened
from .slabfile import SlabFile
from .workers import Workers

# Replaying 64 MiB of records, 600,000 of them, takes about half a second.
_COMPACT_BYTES: Final = 64 << 20
_COMPACT_SEGMENTS: Final = 16

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Commit:
    """Records that become durable together, after the payloads in `files`; `done` tells the writer that waits."""

    records: bytes
    files: frozenset[SlabFile] = frozenset()
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    done: asyncio.Future[str | None] | None = None


class Commits:
    """A drive's queue of records; the loop's thread alone."""

    def __init__(
        self,
        opened: Opened,
        syncer: Workers,
        workers: Workers,
        *,
        writes: Direction,
        counters: Counter[str],
        failures: Counter[str],
    ) -> None:
        """`syncer`: one thread, nobody else's; `workers` compact. `writes`, `counters`, `failures`: the drive's, told
        of what becomes of each group."""
        self._opened = opened
        self._syncer = syncer
        self._workers = workers
        self._writes = writes
        self._counters = counters
        self._failures = failures
        self._queue: list[_Commit] = []
        self._committing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Nothing touches the journal."""
        return self._committing is None and self._compacting is None

    def put(
        self, records: bytes, files: frozenset[SlabFile], namespaces: dict[bytes, bytes]
    ) -> asyncio.Future[str | None]:
        """Make records durable behind the payloads in `files` and what their namespaces stand for.

        What it returns tells why it failed, and must be shielded from a cancellation.
        """
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Commit(records, files, namespaces, done))
        self.start()
        return done

    def owe(self, records: bytes) -> None:
        """Queue records that nobody waits for. They stay owed until a group with them is durable."""
        self._queue.append(_Commit(records))

    def start(self) -> None:
        """Make durable what is owed."""
        if self._committing is None and self._queue:
            self._committing = asyncio.get_running_loop().create_task(self._commit_queue(), name="disk group commit")

    async def flush(self) -> str | None:
        """Wait until everything queued before is durable; why it failed. A cancelled caller leaves it queued."""
        return await asyncio.shield(self.put(b"", frozenset(), {}))

    async def compacted(self) -> None:
        """Wait for a compaction, if one is under way."""
        if self._compacting is not None:
            await asyncio.wait([self._compacting])

    async def ended(self) -> None:
        """Wait for the group under way, once the threads have ended."""
        if self._committing is not None:
            await asyncio.wait([self._committing])

    def check(self) -> list[str]:
        """Violations of the invariants, in words; empty when all is well."""
        if self._committing is None and any(commit.done is not None for commit in self._queue):
            return ["a write waits for a commit that nobody makes"]
        return []

    async def _commit_queue(self) -> None:
        group: list[_Commit] = []
        try:
            while self._queue:
                group, self._queue = self._queue, []
                failure = await self._commit_group(group)
                _answer(group, failure)
                if failure is None:
                    self._writes.worked()
                    self._counters["commits"] += 1
                    await self._compact_if_due()
                    continue
                self._writes.failed(failure)
                self._failures[f"sync: {failure}"] += 1
                # Removals stay owed, in front of what came after them; the next write or flush tries again.
                self._queue[:0] = [commit for commit in group if commit.done is None]
                if all(commit.done is None for commit in self._queue):
                    return
        except Exception:
            _log.exception("disk group commit failed directory=%s", self._opened.directory)
            self._writes.failed("internal error")
            _answer([*group, *self._queue], "internal error")
            self._queue = [commit for commit in self._queue if commit.done is None]
        finally:
            self._committing = None

    async def _commit_group(self, group: list[_Commit]) -> str | None:
        files = frozenset[SlabFile]().union(*(commit.files for commit in group))
        namespaces: dict[bytes, bytes] = {}
        for commit in group:
            namespaces |= commit.namespaces
        records = bytearray().join(commit.records for commit in group)
        try:
            (failure,) = await self._syncer.run([partial(self._opened.sync, files, namespaces, records)])
        except TierUnavailable:
            return "closed"
        return failure

    async def _compact_if_due(self) -> None:
        journal = self._opened.journal
        if self._compacting is not None or not journal.due(_COMPACT_BYTES, _COMPACT_SEGMENTS):
            return
        try:
            (failure,) = await self._syncer.run([self._opened.rotate])
        except TierUnavailable:
            return
        if failure is not None:
            # The segment is closed all the same; the next append begins another or fails with its writers told.
            return
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(journal.number - 1), name="disk compaction"
        )

    async def _compact(self, up_to: int) -> None:
        try:
            (failure,) = await self._workers.run([partial(self._opened.compact, up_to)])
            if failure is None:
                self._counters["compactions"] += 1
            else:
                self._failures[f"compaction: {failure}"] += 1
                _log.warning("journal not compacted reason=%s directory=%s", failure, self._opened.directory)
        except TierUnavailable:
            _log.info("journal not compacted reason=closed directory=%s", self._opened.directory)
        except Exception:
            _log.exception("journal not compacted directory=%s", self._opened.directory)
        finally:
            self._compacting = None


class Turns:
    """Who queues records before whom: in the order of the calls; the loop's thread alone."""

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None  # done once its records, and those before, are queued
        self._given_up = asyncio.Event()  # set for a moment when what waits behind a call that hangs is given up

    @contextlib.contextmanager
    def turn(self) -> Iterator["Turn"]:
        """A turn behind all that were begun before; over by `Turn.end`, else when it and those before have ended."""
        earlier, own = self._last, asyncio.get_running_loop().create_future()
        self._last = own
        if earlier is not None and earlier.done():
            earlier = None
        try:
            yield Turn(earlier, own, self._given_up)
        finally:
            if not own.done():
                if earlier is None or earlier.done():
                    own.set_result(None)
                else:
                    earlier.add_done_callback(lambda _: own.set_result(None))

    def give_up(self) -> None:
        """All who wait for their turn now do so in vain."""
        self._given_up.set()
        self._given_up.clear()


@dataclass(slots=True, frozen=True)
class Turn:
    """One write's; `earlier`: the turn before it, if that was not over."""

    earlier: asyncio.Future[None] | None
    own: asyncio.Future[None]
    given_up: asyncio.Event

    async def come(self) -> None:
        """Wait for it. Raises TierUnavailable when what was called before hangs."""
        if self.earlier is None:
            return
        given_up = asyncio.create_task(self.given_up.wait())
        waited: list[asyncio.Future[Any]] = [self.earlier, given_up]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
        if not self.earlier.done():
            raise TierUnavailable("withdrawn: the writes before it do not end")

    def end(self) -> None:
        """Its records are queued."""
        self.own.set_result(None)


def _answer(group: Iterable[_Commit], failure: str | None) -> None:
    for commit in group:
        if commit.done is not None and not commit.done.done():
            commit.done.set_result(failure)
