"""What this node tells the fleet unasked: copies of its blocks in Redis, and word of where they lie.

Nothing here ever makes an engine wait. Blocks that have become ready are queued for Redis, and for the directory; a
queue that is full drops, and counts it. A block that waits is not held: it is looked up again when its turn comes, and
is busy only while it is being sent.

A block that Redis was sent is marked so. Marks are beliefs: Redis evicts, expires, and may lose all that it held. So
when a lookup touches blocks whose marks are old, older than such a loss, or missing (this daemon is new, another node
sent them), Redis is asked to keep them for another TTL, which tells which of them it has; the others are sent again. A
loss costs nothing here but that: no block is looked at until it is used.

The directory names every 16th block and the ends of chains. A block that is evicted here leaves its entry behind:
entries are hints, and the node that follows one is told exactly what is here. Entries run out, and each names the node
that said so last, which may have died since: what is used is named again every few minutes.
"""

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import CascadeError
from kvcascade.config.settings import RedisSettings
from kvcascade.tiers.block import CRYPTOGRAPHIC, itemsize
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Send

from .cache import Cache
from .fleet import Fleet
from .index import NO_ROW, NO_SLOT, U32, RowState
from .lease import Reservation
from .plans import Space
from .protocol import Tier

log = logging.getLogger("kvcascade.sharing")

QUEUE_BLOCKS = 65536  # that wait for Redis; more are dropped
SEND_BYTES = 16 << 20  # in one batch
SEND_BLOCKS = 256  # describing a batch costs the loop some 10 us a block
NAMED_S = 300  # how long blocks in use stay named without being named again; sooner where entries run out sooner
STEP = 16  # every so many blocks of a chain one is named in the directory
RENEW_BLOCKS = 4096  # of one lookup at most
EVICTING_S = 60  # so old a mark is in doubt while Redis evicts
ASK_AGAIN_S = 5.0  # how long Redis is not asked what it has when it could not tell, or did not take what it lacked
IDLE_S = 1.0  # how often blocks that are about to be evicted are looked for, at the least
ANNOUNCE_PAUSE_S = 0.01  # between the pieces of what is named after a start
ANNOUNCE_PIECE = 1024
AGAIN_S = 5.0


class Sharing:
    """Sends this node's blocks to Redis and names them in the directory. Use as an async context manager.

    `redis` and `fleet` are None where blocks, or their whereabouts, are not kept there.
    """

    def __init__(
        self,
        settings: RedisSettings,
        cache: Cache,
        redis: RedisTier | None,
        fleet: Fleet | None,
        *,
        slack: int,
        timeout: float,
    ) -> None:
        """`slack`: "on-evict" copies the oldest blocks, as many as hold what is lacking to so many free bytes of DRAM.

        `timeout`: how long a batch of blocks may take on its way.
        """
        self._settings = settings
        self._timeout = timeout
        self._cache = cache
        self._redis = redis
        self._fleet = fleet
        self._slack = slack
        self._born = time.monotonic()
        # The loop's thread alone changes these. (space, row, key): the row may be another block's by its turn.
        self._queue: deque[tuple[Space, int, bytes]] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._renewals: set[asyncio.Task[None]] = set()
        self._announcing: asyncio.Task[None] | None = None
        self._paused = False
        self._ask_at = 0.0  # of `_now`: no sooner
        self._moved = 0  # bytes that came to or left DRAM since its oldest blocks were looked at
        self._look = asyncio.Event()
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._cache.became_ready = self._became_ready
        self._cache.was_used = self._was_used
        if self._redis is not None:
            self._tasks.append(asyncio.create_task(self._send_queued(), name="share"))
            if self._settings.write_policy == "on-evict":
                self._cache.residency.leaving = self._leaving
                self._tasks.append(asyncio.create_task(self._watch_dram(), name="share before eviction"))
        if self._fleet is not None:
            self._fleet.forgotten = self._announce_again
            self._announcing = asyncio.create_task(self._announce_all(0.0), name="announce")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cache.became_ready = lambda reservation, entries: None
        self._cache.was_used = lambda space, rows: None
        self._cache.residency.leaving = lambda rows: None
        if self._fleet is not None:
            self._fleet.forgotten = lambda: None
        tasks = [*self._tasks, *self._renewals, *filter(None, [self._announcing])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def pause(self, timeout: float) -> bool:
        """Begins to send nothing any more; whether nothing is under way within `timeout` seconds."""
        self._paused = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False
        self._work.set()

    async def flush(self) -> None:
        """Returns when all that waits has been sent or given up; for an orderly end."""
        if self._redis is not None and self._settings.write_policy == "on-evict":
            self._enqueue_oldest(self._cache.residency.dram.pool.capacity)
        while self._queue and self._redis is not None and self._redis.available:
            self._work.set()
            await asyncio.sleep(0.01)
        await self._idle.wait()

    def status(self) -> dict[str, Any]:
        return {"waiting": len(self._queue), "counters": dict(self.counters)}

    # ---- what has become ready, and what is used

    def _became_ready(self, reservation: Reservation, entries: npt.NDArray[np.int64]) -> None:
        space = reservation.space
        if not len(entries) or space.namespace.hash_algo not in CRYPTOGRAPHIC:
            return
        rows = reservation.rows[entries]
        if self._fleet is not None:
            depths = reservation.first + entries
            # The last of the reservation ends its chain for now.
            named = (depths % STEP == STEP - 1) | (entries == len(reservation.rows) - 1)
            # Who gave them is named already, and an entry of ours in its place would hide it when we are gone.
            self._announce(space, rows[named], over=reservation.source != Tier.PEER)
        if self._redis is None:
            return
        if reservation.source == Tier.REDIS:
            # Who reads a value does not prolong its life, of which it may be near the end.
            self._renew_soon(self._redis, space, rows, np.ones(len(rows), dtype=np.uint32))
        elif reservation.source is None and self._settings.write_policy == "through":
            self._enqueue(space, rows[self._cache.residency.index.shared_at[rows] == 0])
        self._note_moved(len(rows) * space.slot_bytes)

    def _was_used(self, space: Space, rows: U32) -> None:
        if not len(rows) or space.namespace.hash_algo not in CRYPTOGRAPHIC:
            return
        if self._fleet is not None:
            self._name_again(space, rows)
        redis, now = self._redis, self._now()
        if redis is None or not redis.available or now < self._ask_at:
            return
        index = self._cache.residency.index
        shared = index.shared_at[rows]
        # Redis may have evicted it since.
        evicted = min(redis.evicted_at - self._born + 1, now - EVICTING_S)
        due = (shared != 0) & (shared <= max(self._lost_at(), evicted, now - self._settings.ttl / 4))
        if self._settings.write_policy != "on-evict":
            due |= (shared == 0) & (index.state[rows] == RowState.READY)
        asked, before = rows[due][:RENEW_BLOCKS], shared[due][:RENEW_BLOCKS]
        if len(asked):
            self._renew_soon(redis, space, asked, before)

    def _renew_soon(self, redis: RedisTier, space: Space, rows: U32, before: U32) -> None:
        self._cache.residency.index.shared_at[rows] = self._now()
        task = asyncio.create_task(self._renew(redis, space, rows, before), name="renew")
        self._renewals.add(task)
        task.add_done_callback(self._renewals.discard)

    async def _renew(self, redis: RedisTier, space: Space, rows: U32, before: U32) -> None:
        """Asks for a longer life of blocks, marked so at `before`; those that Redis does not have are sent again."""
        index = self._cache.residency.index
        keys = index.key[rows]

        def same() -> npt.NDArray[np.bool_]:
            there: npt.NDArray[np.bool_] = index.state[rows] == RowState.READY
            there &= (index.space[rows] == space.number) & (index.key[rows] == keys).all(axis=1)
            return there

        try:
            lacking = ~np.array(await redis.renew(self._names(space, rows)))
        except CascadeError as error:
            log.info("not renewed blocks=%d reason=%s", len(rows), error)
            self._ask_at = self._now() + ASK_AGAIN_S
            index.shared_at[rows[same()]] = before[same()]
            return
        lacking &= same()
        index.shared_at[rows[lacking]] = 0
        if self._settings.write_policy != "on-evict":
            self.counters["lost_blocks"] += int(np.count_nonzero(before[lacking]))
            self._enqueue(space, rows[lacking])

    def _lost_at(self) -> float:
        """What was marked then or before is lost."""
        assert self._redis is not None
        return max(0.0, self._redis.lost_at - self._born + 1)

    def _now(self) -> int:
        """Seconds, never 0."""
        return int(time.monotonic() - self._born) + 1

    def _names(self, space: Space, rows: U32) -> Iterator[BlockName]:
        """For another thread to iterate over; the blocks are those of now."""
        keys = self._cache.residency.index.key[rows]
        return (BlockName(space.fingerprint, space.group, key.tobytes()[: space.width]) for key in keys)

    # ---- the directory

    def _name_again(self, space: Space, rows: U32) -> None:
        """Of a chain from its first block on, or of blocks that stand alone."""
        index = self._cache.residency.index
        named = index.children[rows] == 0
        named[STEP - 1 :: STEP] = True
        mine = rows[named]
        old = self._now() - min(NAMED_S, self._settings.ttl / 4)
        due = mine[(index.named_at[mine] <= old) & (index.state[mine] == RowState.READY)][:RENEW_BLOCKS]
        if len(due):
            self._announce(space, due)

    def _announce(self, space: Space, rows: U32, *, over: bool = True) -> None:
        assert self._fleet is not None
        index = self._cache.residency.index
        index.named_at[rows] = self._now()
        keys = index.key[rows]
        self._fleet.announce(space.fingerprint, space.group, [key.tobytes()[: space.width] for key in keys], over=over)

    def _announce_again(self) -> None:
        """Redis has lost the directory. All nodes notice within seconds; they need not all write at once."""
        if self._announcing is None or self._announcing.done():
            delay = random.uniform(0, AGAIN_S)
            self._announcing = asyncio.create_task(self._announce_all(delay), name="announce again")

    async def _announce_all(self, delay: float) -> None:
        """Names all that the node holds: at its start, because entries of an earlier boot are void."""
        await asyncio.sleep(delay)
        index = self._cache.residency.index
        rows = index.rows()
        depths = index.depth(rows)
        named = (depths % STEP == STEP - 1) | (index.children[rows] == 0)
        rows = rows[named]
        keys = index.key[rows].copy()
        for start in range(0, len(rows), ANNOUNCE_PIECE):
            at = slice(start, start + ANNOUNCE_PIECE)
            same = (index.key[rows[at]] == keys[at]).all(axis=1) & (index.state[rows[at]] == RowState.READY)
            there = rows[at][same]
            for number in np.unique(index.space[there]).tolist():
                space = self._cache.residency.spaces[number]
                mine = index.space[there] == number
                if space.namespace.hash_algo in CRYPTOGRAPHIC:
                    self._announce(space, there[mine])
            await asyncio.sleep(ANNOUNCE_PAUSE_S)

    # ---- to Redis

    def _enqueue(self, space: Space, rows: U32) -> None:
        index = self._cache.residency.index
        room = QUEUE_BLOCKS - len(self._queue)
        if len(rows) > room or not self._redis_takes():
            self.counters["share_dropped_blocks"] += len(rows) - (room if self._redis_takes() else 0)
            rows = rows[: room if self._redis_takes() else 0]
        index.shared_at[rows] = self._now()
        keys = index.key[rows]
        self._queue.extend((space, row, key.tobytes()) for row, key in zip(rows.tolist(), keys, strict=True))
        self._work.set()

    def _redis_takes(self) -> bool:
        return self._redis is not None and self._redis.available

    async def _send_queued(self) -> None:
        assert self._redis is not None
        while True:
            await self._work.wait()
            self._work.clear()
            while self._queue and not self._paused:
                self._idle.clear()
                try:
                    await self._send_batch(self._redis)
                except Exception:
                    log.exception("sharing failed")
                finally:
                    self._idle.set()

    async def _send_batch(self, redis: RedisTier) -> None:
        residency = self._cache.residency
        index = residency.index
        rows: list[int] = []
        jobs: list[Send] = []
        size = 0
        while self._queue and size < SEND_BYTES and len(jobs) < SEND_BLOCKS:
            space, row, key = self._queue.popleft()
            there = index.state[row] == RowState.READY and index.space[row] == space.number
            if not there or index.key[row].tobytes() != key:
                self.counters["share_dropped_blocks"] += 1
                continue  # it is gone, and its row another block's
            if index.dram[row] == NO_SLOT:
                index.shared_at[row] = 0
                self.counters["share_dropped_blocks"] += 1
                continue
            parent = int(index.parent[row])
            jobs.append(
                Send(
                    BlockName(space.fingerprint, space.group, key[: space.width]),
                    b"" if parent == NO_ROW else index.key[parent].tobytes()[: space.width],
                    residency.dram.view(int(index.dram[row]), space.block_bytes).data,
                    itemsize(space.namespace.kv_dtype),
                )
            )
            rows.append(row)
            size += space.block_bytes
        if not jobs:
            return
        held = np.array(rows, dtype=np.uint32)
        # One by one: a block may stand in the queue twice.
        np.add.at(index.busy, held, np.uint8(1))
        reasons: list[str | None] = ["cancelled"] * len(jobs)
        try:
            reasons = await redis.store(jobs, self._timeout)
        finally:
            np.subtract.at(index.busy, held, np.uint8(1))
            failed = held[[reason is not None for reason in reasons]]
            index.shared_at[failed] = 0
            self.counters["shared_blocks"] += len(held) - len(failed)
            self.counters["share_dropped_blocks"] += len(failed)
            if len(failed):
                self._ask_at = self._now() + ASK_AGAIN_S
            residency.free_doomed(np.unique(held))
            residency.wake()

    # ---- "on-evict"

    def _note_moved(self, size: int) -> None:
        """So often that what leaves between two looks at the oldest blocks is a part of the slack."""
        self._moved += size
        if self._moved >= self._slack // 4:
            self._look.set()

    def _leaving(self, rows: U32) -> None:
        """These rows make room in DRAM: what Redis has not been sent by now it is not sent any more."""
        index = self._cache.residency.index
        lacking = index.shared_at[rows] <= max(self._lost_at(), self._now() - self._settings.ttl)
        lacking &= index.hbm[rows] == NO_SLOT  # it passes through DRAM again
        if lacking.any():
            spaces = self._cache.residency.spaces
            counts = np.bincount(index.space[rows[lacking]]).tolist()
            missed = sum(n for number, n in enumerate(counts) if spaces[number].namespace.hash_algo in CRYPTOGRAPHIC)
            self.counters["share_missed_blocks"] += missed
        self._note_moved(int(self._slot_bytes(rows).sum()))

    async def _watch_dram(self) -> None:
        """Copies the oldest blocks in DRAM to Redis before they have to go."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._look.wait()
            self._look.clear()
            self._moved = 0
            try:
                pool = self._cache.residency.dram.pool
                used = sum((counts.total - counts.free) * size for size, counts in pool.counts().items())
                short = self._slack - (pool.capacity - used)
                if short > 0 and not self._paused and self._redis_takes():
                    self._enqueue_oldest(short)
            except Exception:
                log.exception("the oldest blocks in DRAM are not copied to Redis now")

    def _slot_bytes(self, rows: U32) -> npt.NDArray[np.int64]:
        residency = self._cache.residency
        sizes = np.array([one.slot_bytes for one in residency.classes], dtype=np.int64)
        return sizes[residency.index.size_class[rows]]

    def _enqueue_oldest(self, size: int) -> None:
        """Of the oldest blocks in DRAM that hold `size` bytes, those that Redis has not."""
        residency, now = self._cache.residency, self._now()
        index = residency.index
        rows = np.flatnonzero(residency.resident(Tier.DRAM)).astype(np.uint32)
        if not len(rows):
            return
        most = size // min(one.slot_bytes for one in residency.classes) + 1
        if most < len(rows):
            rows = rows[np.argpartition(index.stamp[rows], most)[:most]]
        rows = rows[np.argsort(index.stamp[rows])]
        before = np.cumsum(self._slot_bytes(rows)) - self._slot_bytes(rows)
        rows = rows[before < size]
        rows = rows[index.shared_at[rows] <= max(self._lost_at(), now - self._settings.ttl)]
        for number in np.unique(index.space[rows]).tolist():
            space = residency.spaces[number]
            if space.namespace.hash_algo in CRYPTOGRAPHIC:
                self._enqueue(space, rows[index.space[rows] == number])
