"""Carries out what `residency.py` plans: the only file that sees two tiers at once.

Payload bytes move in data threads (copies here, disk IO in the disk tier's own), never on the event loop. A plan is
always reported back exactly once, after the last thread has let go of its memory: on success, on failure and on
cancellation. One flight fills a block; later askers wait for it.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from kvcascade.config.errors import CascadeError
from kvcascade.tiers.memory import copy_all
from kvcascade.tiers.slabfile import HASH_BYTES, BlockMeta, ReadJob, WriteJob, disproves
from kvcascade.tiers.workers import outlast

from .index import NO_ROW, NO_SLOT, U32, Mask
from .plans import Demotion, Move, Promotion, Space
from .protocol import Tier
from .recovery import join
from .residency import Residency

log = logging.getLogger("kvcascade.transfer")

T = TypeVar("T")

CLEANERS = (
    4  # for each drive, so that it writes while what is there is made durable: 0.7 of its speed with 2, 0.8 with 4
)
IDLE_S = 0.01  # the cleaner looks at most this often: commits come by the hundred
PAUSE_S = 0.002  # how often a pause looks whether all has ended
END_S = 5.0  # for what is in flight at the end
ANSWER_S = 10.0  # a cleaner waits so long for a batch, then leaves it to itself and goes on with the next
WATCH_S = 1.0  # how often each drive is looked at
STALLED_S = 1.0  # and this seldom while what is dirty is pinned or the disk takes nothing
READ_BATCH_BYTES = 16 << 20  # so that the first blocks of a long prefix come up before the last


class Transfer:
    """Copies between tiers. Use as an async context manager; leaving it waits for everything in flight."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        # The loop's thread alone changes these.
        self._work = asyncio.Event()
        self._grew = asyncio.Event()  # set for a moment when a slab comes online
        self._flights: dict[int, asyncio.Task[Any]] = {}  # row → what brings it up from disk, or from elsewhere
        self._cleaners: list[asyncio.Task[None]] = []
        self._demotions: set[asyncio.Task[Mask]] = set()
        self._watches: list[asyncio.Task[None]] = []
        self._copiers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvcascade-copy")
        self._closing = False
        self._paused = False
        self._at_work = 0  # cleaners and watches that are in the middle of something
        residency.wake = self._work.set
        residency.grew = self._tell_growth

    async def __aenter__(self) -> Self:
        drives = 0 if self._residency.disk is None else len(self._residency.disk)
        # A drive that hangs keeps its batches, but never all cleaners.
        cleaners = CLEANERS * max(1, drives)
        self._cleaners = [asyncio.create_task(self._clean(), name=f"cleaner {n}") for n in range(cleaners)]
        self._watches = [asyncio.create_task(self._watch(n), name=f"watch of drive {n}") for n in range(drives)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._residency.wake = self._residency.grew = lambda: None
        for task in (*self._cleaners, *self._watches, *self._demotions):
            task.cancel()
        tasks: set[asyncio.Task[Any]] = {*self._cleaners, *self._watches, *self._demotions, *self._flights.values()}
        # A device that does not answer must not keep the process from ending.
        hung = (await asyncio.wait(tasks, timeout=END_S))[1]
        if hung:
            log.error("transfers abandoned count=%d", len(hung))
        self._copiers.shutdown(wait=not hung)

    def _tell_growth(self) -> None:
        self._grew.set()
        self._grew.clear()
        self._work.set()

    # ---- down

    async def _clean(self) -> None:
        pause = IDLE_S
        while True:
            await self._work.wait()
            self._work.clear()
            self._at_work += 1
            try:
                worked = await self._demote_pending()
            finally:
                self._at_work -= 1
            stalled = not worked and self._residency.wants_cleaning
            pause = min(2 * pause, STALLED_S) if stalled else IDLE_S
            await asyncio.sleep(pause)

    async def _demote_pending(self) -> bool:
        worked = False
        while True:
            if self._paused:
                return False
            try:
                demotion = self._residency.plan_demotion()
                if demotion is not None:
                    worked |= await self._demote_in_time(demotion)
                    continue
                move = self._residency.plan_move()
                if move is None:
                    return worked
                await self._move(move)
                worked = True
            except CascadeError as error:
                log.warning("cleaning stopped reason=%s", error)
                return False

    async def demote(self, plan: Demotion) -> bool:
        """Copies a batch down and reports it; whether anything arrived. Cancelled, it ends only when that has ended."""
        parts = self._begin(plan)
        try:
            await asyncio.wait(parts)
        except asyncio.CancelledError:
            for part in parts:
                part.cancel()
            await outlast(parts)
            raise
        arrived = [bool(part.result().any()) for part in parts]
        return any(arrived)

    async def _demote_in_time(self, plan: Demotion) -> bool:
        """Copies a batch down; whether anything arrived within ANSWER_S. What is late goes on, and reports itself."""
        parts = self._begin(plan)
        self._work.set()  # there may be more, for the next cleaner
        done, late = await asyncio.wait(parts, timeout=ANSWER_S)
        if late:
            log.error("batches are late count=%d", len(late))
        arrived = [bool(part.result().any()) for part in done if not part.cancelled()]
        return any(arrived)

    def _begin(self, plan: Demotion) -> "list[asyncio.Task[Mask]]":
        """One task for each drive, so that a slow one holds up nothing but its own."""
        disk = self._residency.disk
        tasks = []
        for at in [slice(None)] if disk is None or plan.source is Tier.HBM else disk.by_drive(plan.targets):
            part = replace(
                plan, rows=plan.rows[at], pages=plan.pages[at], targets=plan.targets[at], above=plan.above[at]
            )
            task = asyncio.create_task(self._copy_down(part), name="demotion")
            # Not by the task itself: one that is cancelled before it begins would report nothing.
            task.add_done_callback(partial(self._demoted, part))
            self._demotions.add(task)
            tasks.append(task)
        return tasks

    def _demoted(self, plan: Demotion, task: "asyncio.Task[Mask]") -> None:
        self._demotions.discard(task)
        whole = not task.cancelled() and task.exception() is None
        self._residency.demoted(plan, task.result() if whole else np.zeros(len(plan.rows), dtype=np.bool_))

    async def _copy_down(self, plan: Demotion) -> Mask:
        if plan.source is Tier.HBM:
            await self._copy_to_dram(plan)
            return np.ones(len(plan.rows), dtype=np.bool_)
        disk = self._residency.disk
        assert disk is not None
        reasons = await disk.write(self._write_jobs(plan))
        return np.array([reason is None for reason in reasons], dtype=np.bool_)

    async def _copy_to_dram(self, plan: Demotion) -> None:
        hbm, dram = self._residency.hbm, self._residency.dram
        assert hbm is not None
        size = self._residency.slot_bytes(plan.size_class)
        pairs = [
            (dram.view(target, size), hbm.view(page, size))
            for page, target in zip(plan.pages.tolist(), plan.targets.tolist(), strict=True)
        ]
        await self._in_thread(lambda: copy_all(pairs))

    def _write_jobs(self, plan: Demotion) -> list[WriteJob]:
        residency = self._residency
        index, dram = residency.index, residency.dram
        rows, size = plan.rows, residency.slot_bytes(plan.size_class)
        above = index.parent[rows]
        hashes = index.key[rows].tobytes()
        parents = index.key[np.where(above == NO_ROW, 0, above)].tobytes()
        spaces, stamps, has_parent = index.space[rows].tolist(), index.stamp[rows].tolist(), (above != NO_ROW).tolist()
        has_tokens = (index.token_slot[rows] != NO_SLOT).tolist()
        jobs = []
        for i, (page, slot) in enumerate(zip(plan.pages.tolist(), plan.targets.tolist(), strict=True)):
            space = residency.spaces[spaces[i]]
            key = slice(HASH_BYTES * i, HASH_BYTES * i + space.width)
            tokens = b""
            if has_tokens[i]:
                tokens = index.tokens_of(rows[i : i + 1], space.shape.block_tokens).tobytes()
            parent = parents[key] if has_parent[i] else b""
            meta = BlockMeta(space.fingerprint, hashes[key], parent, space.group, size, stamps[i], tokens)
            jobs.append(WriteJob(slot, meta, dram.view(page, size)))
        return jobs

    async def _move(self, plan: Move) -> None:
        dram = self._residency.dram
        pairs = [
            (dram.view(target, plan.slot_bytes), dram.view(page, plan.slot_bytes))
            for page, target in zip(plan.pages.tolist(), plan.targets.tolist(), strict=True)
        ]
        whole = False
        try:
            await self._in_thread(lambda: copy_all(pairs))
            whole = True
        finally:
            self._residency.moved(plan, whole)

    async def flush(self) -> None:
        """Copies down everything that is dirty, newest chains and their heads first; for an orderly end."""
        while not self._closing:
            plan = self._residency.plan_demotion(everything=True)
            if plan is not None:
                if not await self._demote_in_time(plan):
                    return
            elif self._demotions:
                # What is below a block on its way waits for it.
                ended, _ = await asyncio.wait(self._demotions, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
                if not ended:
                    return
            else:
                return

    async def pause(self, timeout: float) -> bool:
        """Begins nothing any more, and waits for what is under way; whether all has ended within `timeout` seconds.

        What then lies in HBM alone is copied to DRAM, as far as there is room.
        """
        self._paused = True
        end = asyncio.get_running_loop().time() + timeout
        while self._at_work or self._flights or self._demotions:
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(PAUSE_S)
        while (plan := self._residency.plan_hbm_demotion(everything=True)) is not None:
            if not await self.demote(plan):
                return False
        return True

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False
        self._work.set()

    async def _watch(self, drive: int) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            disk = self._residency.disk
            if disk is None or self._paused:  # another daemon has the directories
                continue
            was_writable = disk.writable
            self._at_work += 1
            try:
                joined = await disk.watch(drive)
                if joined is not None:
                    join(self._residency, joined)
                self._residency.trim_disk()
            except Exception:
                log.exception("watching failed drive=%d", drive)
            finally:
                self._at_work -= 1
            if disk.writable and not was_writable:
                self._residency.wake()

    # ---- up

    def promote(self, space: Space, rows: U32) -> None:
        """Begins to bring up those of `rows` that lie on disk only, as far as the budget reaches. Does not wait."""
        if self._closing or self._paused:
            return
        plan = self._residency.plan_promotion(space, rows)
        if plan is None:
            return
        batch = max(1, READ_BATCH_BYTES // space.slot_bytes)
        disk = self._residency.disk
        assert disk is not None
        for part in disk.by_drive(plan.slots):
            for start in range(0, len(part), batch):
                at = part[start : start + batch]
                piece = Promotion(space, plan.rows[at], plan.slots[at], plan.pages[at])
                flight = asyncio.create_task(self._read(piece), name="promotion")
                # Not by the task itself: one that is cancelled before it begins would report nothing.
                flight.add_done_callback(partial(self._promoted, piece))
                self._flights.update((row, flight) for row in piece.rows.tolist())

    def follow(self, rows: U32, flight: "asyncio.Task[Any]") -> None:
        """Whoever waits for these rows waits for `flight`, which fills them from elsewhere."""
        flights = dict.fromkeys(rows.tolist(), flight)
        self._flights |= flights

        def over(_: object) -> None:
            for row in flights:
                if self._flights.get(row) is flight:
                    del self._flights[row]

        flight.add_done_callback(over)

    async def _read(self, plan: Promotion) -> list[str | None]:
        disk = self._residency.disk
        assert disk is not None
        return await disk.read(self._read_jobs(plan))

    def _promoted(self, plan: Promotion, flight: "asyncio.Task[list[str | None]]") -> None:
        for row in plan.rows.tolist():
            self._flights.pop(row, None)
        good: Mask = np.zeros(len(plan.rows), dtype=np.bool_)
        doubted: Mask = np.zeros(len(plan.rows), dtype=np.bool_)
        if not flight.cancelled():
            error = flight.exception()
            if error is None:
                reasons = flight.result()
                good = np.array([reason is None for reason in reasons], dtype=np.bool_)
                doubted = np.array([reason is not None and disproves(reason) for reason in reasons], dtype=np.bool_)
            else:
                log.error("promotion failed", exc_info=error)
        self._residency.promoted(plan, good, doubted)

    def _read_jobs(self, plan: Promotion) -> list[ReadJob]:
        index, dram, space = self._residency.index, self._residency.dram, plan.space
        return [
            ReadJob(
                slot=slot,
                namespace=space.fingerprint,
                block_hash=index.key[row].tobytes()[: space.width],
                group=space.group,
                length=space.slot_bytes,
                into=dram.view(page, space.slot_bytes),
            )
            for row, slot, page in zip(plan.rows.tolist(), plan.slots.tolist(), plan.pages.tolist(), strict=True)
        ]

    async def fetch(self, space: Space, wanted: Callable[[], U32], timeout: float) -> None:
        """Brings rows into memory, waiting at most `timeout` seconds; what is not there then stays where it is.

        `wanted` says which, all pinned by the caller's lease, and none once that has ended: it is asked again after
        each wait, because rows that nobody pins may become other blocks. Never waits for others to make room: what
        finds none counts as not there, save that right after the start slabs still come online.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            rows = wanted()
            self.promote(space, rows)
            flights = {self._flights[row] for row in rows.tolist() if row in self._flights}
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            if flights:
                await asyncio.wait(flights, timeout=left)
            elif self._residency.dram.state == "onlining" and not self._residency.in_memory(rows).all():
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._grew.wait()
            else:
                return

    # ---- threads

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in a copy thread. Cancelled, it ends only when the thread has let go of the memory."""
        future = asyncio.get_running_loop().run_in_executor(self._copiers, work)
        await outlast([future])
        return future.result()
