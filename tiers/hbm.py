"""The HBM tier: a pool in device memory, kept like an engine's own block pool.

Slots in use are counted by reference. A READY slot that nobody references stays findable and waits in its class's
queue, in the order in which it may go: a doubly linked list threaded through arrays by page, so that leaving it from
the middle costs no search. Chains are released tail first, so tails go first. Several slots may hold one block (two
engines computed it at once); a block is gone when its last copy is.

The tier knows blocks by the index's *rows* alone, and never decides what is evicted: it names candidates, and is told.
All bookkeeping belongs to the loop's thread.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .memory import open_device_memory
from .pool import SLAB_BYTES, Pages, SlabPool, SlotState
from .slots import PooledMemory


class HbmTier(PooledMemory):
    """A pool on "cuda:N", or on "cpu" in shared memory with the same code above it.

    The life of a slot: `allocate` (PENDING, one reference) → `cache` (READY, findable) → `release` (waits in the
    queue) ⇄ `reference`; ends with `evict`, `drop`, or before it was cached with `free` or `quarantine` and `free`.
    Each batch is of distinct pages; one that a method cannot take is a ValueError, and then nothing has changed.
    ConfigError naming `setting` when the device has not so much, TierUnavailable when it cannot be used.
    """

    def __init__(
        self,
        device: str,
        size: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        lock: bool = True,
        setting: str = "hbm.size",
    ) -> None:
        pool = SlabPool(size, slab_bytes=slab_bytes)
        memory = open_device_memory(device, pool.capacity, setting)
        try:
            super().__init__("hbm", pool, memory, lock=lock)
        except BaseException:
            memory.close()
            raise
        # Changed by the loop's thread alone; arrays by page. The queues are rings: behind the pages lie their anchors,
        # whose next is the first to go and whose previous the last. No more queues hold something than there are slabs.
        nodes = pool.pages + pool.slabs
        self._references: NDArray[np.int32] = np.zeros(pool.pages, np.int32)
        self._findable: NDArray[np.bool_] = np.zeros(pool.pages, np.bool_)
        self._row: NDArray[np.int64] = np.zeros(pool.pages, np.int64)  # of findable slots
        self._next: NDArray[np.int64] = np.zeros(nodes, np.int64)
        self._previous: NDArray[np.int64] = np.zeros(nodes, np.int64)
        self._hop: NDArray[np.int64] = np.zeros(nodes, np.int64)  # scratch of `_unlink`
        self._leaving: NDArray[np.bool_] = np.zeros(nodes, np.bool_)  # scratch of `_unlink`, all False outside it
        self._anchors: dict[int, int] = {}  # slot bytes → anchor
        self._spare_anchors = list(range(pool.pages, nodes))
        self._copies: dict[int, list[int]] = {}  # row → pages, first cached first

    # --- slots -------------------------------------------------------------------------------------------------

    def allocate(self, slot_bytes: int, n: int) -> Pages:
        """Up to n free slots, PENDING and with one reference each, none evicted for them; see `SlabPool.allocate`."""
        pages = self.pool.allocate(slot_bytes, n)
        self._references[pages] = 1
        return pages

    def cache(self, pages: ArrayLike, rows: ArrayLike) -> None:
        """PENDING → READY: these slots now hold the blocks of these rows, which are findable; the reference stays.

        A row may be cached already: both copies are kept.
        """
        named, blocks = np.atleast_1d(np.asarray(pages, np.int64)), np.atleast_1d(np.asarray(rows, np.int64))
        if named.shape != blocks.shape or (blocks < 0).any():
            raise ValueError(f"{len(named)} pages for {len(blocks)} rows, or a row below 0")
        self.pool.ready(named)
        self._row[named] = blocks
        self._findable[named] = True
        for page, row in zip(named.tolist(), blocks.tolist(), strict=True):
            self._copies.setdefault(row, []).append(page)

    def quarantine(self, pages: ArrayLike) -> None:
        """PENDING → QUARANTINED: a late writer may still write there; `free` ends it."""
        self.pool.quarantine(pages)
        self._references[np.asarray(pages, np.int64)] = 0

    def free(self, pages: ArrayLike) -> None:
        """Take back slots that were never cached: PENDING or QUARANTINED."""
        if (self.pool.states(pages) == SlotState.READY).any():
            raise ValueError("a cached slot goes by evict or drop")
        super().free(pages)
        self._references[np.asarray(pages, np.int64)] = 0

    # --- blocks ------------------------------------------------------------------------------------------------

    def find(self, row: int) -> int | None:
        """The page of a slot that holds a block; None when none does."""
        copies = self._copies.get(row)
        return copies[0] if copies else None

    def reference(self, pages: ArrayLike) -> None:
        """Keep cached slots from eviction, until as many calls of `release`. O(1) each."""
        named = self._ready(pages)
        self._unlink(named[self._references[named] == 0])
        self._references[named] += 1

    def release(self, pages: ArrayLike) -> None:
        """Give back one reference on each of these cached slots, named in chain order.

        Those that nobody references any more join the end of their queue, the tail of the chain first. A slot whose row
        was dropped meanwhile is free at once.
        """
        named = self._ready(pages)
        references = self._references[named]
        if (references < 1).any():
            raise ValueError(f"page {named[references < 1][0]} is released more often than referenced")
        self._references[named] = references - 1
        idle = named[references == 1]
        findable = self._findable[idle]
        self._append(idle[findable][::-1])
        super().free(idle[~findable])

    def victims(self, slot_bytes: int, n: int) -> list[tuple[int, int]]:
        """The (page, row) of up to n slots of a class that nobody references, first to go first; nothing changes."""
        found: list[tuple[int, int]] = []
        anchor = self._anchors.get(slot_bytes)
        if anchor is not None:
            page = int(self._next[anchor])
            while page != anchor and len(found) < n:
                found.append((page, int(self._row[page])))
                page = int(self._next[page])
        return found

    def evict(self, page: int) -> tuple[int, bool]:
        """`evict_batch` for one slot."""
        return self.evict_batch([page])[0]

    def evict_batch(self, pages: ArrayLike) -> list[tuple[int, bool]]:
        """Free cached slots that nobody references; for each its row, and whether another slot holds the block."""
        named = self._ready(pages)
        if self._references[named].any():
            raise ValueError(f"page {named[self._references[named] > 0][0]} is referenced")
        self._unlink(named)
        gone = []
        for page, row in zip(named.tolist(), self._row[named].tolist(), strict=True):
            copies = self._copies[row]
            copies.remove(page)
            if not copies:
                del self._copies[row]
            gone.append((row, bool(copies)))
        self._findable[named] = False
        super().free(named)
        return gone

    def drop(self, row: int) -> list[int]:
        """Make a block unfindable: all its copies. Those that nobody references are free at once, and returned; the
        others are free when they are released."""
        freed: list[int] = []
        for page in self._copies.pop(row, ()):
            self._findable[page] = False
            if not self._references[page]:
                freed.append(page)
        if freed:
            named = np.asarray(freed, np.int64)
            self._unlink(named)
            super().free(named)
        return freed

    def check(self) -> list[str]:
        """Violations of the pool's, the queues' and the map's invariants, each a sentence. Costs O(pages)."""
        wrong = super().check()
        states = self.pool.states(np.arange(self.pool.pages))
        ready = states == SlotState.READY
        mapped = {page: row for row, pages in self._copies.items() for page in pages}
        if any(not pages for pages in self._copies.values()):
            wrong.append("hbm: a row is findable and has no slot")
        if len(mapped) != sum(map(len, self._copies.values())):
            wrong.append("hbm: a slot holds two blocks")
        if {page: int(self._row[page]) for page in np.flatnonzero(self._findable).tolist()} != mapped:
            wrong.append("hbm: slots and rows do not name each other")
        if not ready[self._findable].all():
            wrong.append("hbm: a slot that is not ready is findable")
        if (self._references[~ready] != (states[~ready] == SlotState.PENDING)).any():
            wrong.append("hbm: a slot that is not ready has the wrong number of references")
        if (self._references < 0).any():
            wrong.append("hbm: a slot has fewer than no references")
        queued: list[int] = []
        for slot_bytes, anchor in self._anchors.items():
            node = anchor
            for _ in range(self.pool.pages + 1):
                following = int(self._next[node])
                if self._previous[following] != node:
                    wrong.append(f"hbm: the queue of {slot_bytes} is torn at page {node}")
                    break
                node = following
                if node == anchor:
                    break
                if self.pool.class_of(node) != slot_bytes:
                    wrong.append(f"hbm: page {node} waits in the queue of {slot_bytes}")
                queued.append(node)
        if sorted(queued) != np.flatnonzero(ready & (self._references == 0)).tolist():
            wrong.append("hbm: the queues do not hold exactly the ready slots that nobody references")
        return wrong

    # --- inside ------------------------------------------------------------------------------------------------

    def _ready(self, pages: ArrayLike) -> NDArray[np.int64]:
        named = np.asarray(pages, np.int64)
        states = self.pool.states(named)
        if (states != SlotState.READY).any():
            raise ValueError(f"page {named[states != SlotState.READY][0]} holds no block")
        self._hop[named] = np.arange(len(named))
        if (self._hop[named] != np.arange(len(named))).any():
            raise ValueError("a page is named twice")
        return named

    def _anchor(self, slot_bytes: int) -> int:
        anchor = self._anchors.get(slot_bytes)
        if anchor is None:
            if not self._spare_anchors:
                for unused in [size for size, ring in self._anchors.items() if self._next[ring] == ring]:
                    self._spare_anchors.append(self._anchors.pop(unused))
            anchor = self._anchors[slot_bytes] = self._spare_anchors.pop()
            self._next[anchor] = self._previous[anchor] = anchor
        return anchor

    def _append(self, pages: NDArray[np.int64]) -> None:
        sizes = self.pool.classes_of(pages)
        for slot_bytes in np.unique(sizes).tolist():
            anchor = self._anchor(slot_bytes)
            mine = pages[sizes == slot_bytes]
            ring = np.concatenate(([self._previous[anchor]], mine, [anchor]))
            self._next[ring[:-1]] = ring[1:]
            self._previous[ring[1:]] = ring[:-1]

    def _unlink(self, pages: NDArray[np.int64]) -> None:
        """Take pages out of their rings, wherever they lie: whole runs of neighbours at once."""
        if not len(pages):
            return
        self._leaving[pages] = True
        following = self._next[pages]
        # From each page to the last of its run, by doubling the stride: log2 of the longest run, in whole batches.
        self._hop[pages] = np.where(self._leaving[following], following, pages)
        while True:
            reached = self._hop[pages]
            further = self._hop[reached]
            if (further == reached).all():
                break
            self._hop[pages] = further
        firsts = ~self._leaving[self._previous[pages]]
        before = self._previous[pages[firsts]]
        after = self._next[reached[firsts]]
        self._next[before] = after
        self._previous[after] = before
        self._leaving[pages] = False
