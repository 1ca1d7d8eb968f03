"""The blocks of one slot size: which of them may leave a tier, and in which order.

All sizes share the index and its stamps; each has queues of its own, since a slot is only of use to a block that fits.
Which blocks *may* go is asked of the index anew at every take; the queues only know the order (`tiers/policy.py`).
"""

from collections.abc import Callable

import numpy as np

from kvcascade.tiers.policy import VictimQueue

from .index import NO_SLOT, U32, U64, Index, Mask, RowState

NEVER = 1 << 64  # later than every stamp


class SizeClass:
    """Victims and what waits to be copied down, of the blocks whose slots have `slot_bytes`.

    `clean_victims` leave DRAM at once (a copy lies on disk), `dirty_victims` are forgotten with it (leaves, or with a
    copy in HBM), `demotable` are dirty and the disk takes them, `disk_victims` may leave the disk. `admit_reused`: the
    disk takes only what was asked for again since it was stored.
    """

    def __init__(self, number: int, slot_bytes: int, index: Index, *, admit_reused: bool) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self._index = index
        self._admit_reused = admit_reused
        # The loop's thread alone changes these.
        self.clean = 0  # rows that lie in DRAM and on disk
        self.starved = False  # waits for a slab of another class
        # A store found too little that is clean and may go, whatever the watermark says: leases pin clean blocks, and
        # parents of what is stored must stay.
        self.short = False
        self._fresh: list[U32] = []  # stored since, and to be copied to disk at once
        self._fits: Callable[[U32], Mask] | None = None  # while victims are taken on some drives alone
        self._whole = True  # while victims are taken that leave no child behind
        self.clean_victims = VictimQueue(self._in_dram_clean, self._stamps, self._is_clean)
        self.dirty_victims = VictimQueue(self._in_dram_dirty, self._stamps, self._droppable)
        self.demotable = VictimQueue(self._in_dram_dirty, self._stamps, self._admitted)
        self.disk_victims = VictimQueue(self._on_disk, self._stamps, self._disposable)

    # ---- write-through

    def write_through(self, rows: U32) -> None:
        """These rows lie in memory alone and are to be copied to disk at once."""
        self._fresh.append(rows[self._index.dram[rows] != NO_SLOT])

    def take_fresh(self, count: int) -> U32:
        """Up to `count` blocks to write through, oldest first. One that is gone or busy meanwhile is left to the
        watermark."""
        index = self._index
        if not self._fresh:
            return np.empty(0, dtype=np.uint32)
        rows: U32 = np.unique(np.concatenate(self._fresh))
        # A row may be a block of another size by now.
        good = (index.state[rows] == RowState.READY) & (index.busy[rows] == 0) & (index.size_class[rows] == self.number)
        good &= (index.dram[rows] != NO_SLOT) & (index.disk[rows] == NO_SLOT)
        there: U32 = rows[good]
        there = there[np.argsort(index.stamp[there])]
        self._fresh = [there[count:]] if len(there) > count else []
        return there[:count]

    def newest_dirty(self, count: int) -> U32:
        """Dirty blocks, newest first and so heads first: an end that runs out of time leaves whole prefixes behind."""
        index = self._index
        rows = self._in_dram_dirty()
        rows = rows[index.busy[rows] == 0]
        if self._admit_reused:
            rows = rows[index.reused[rows] != 0]
        newest: U32 = rows[np.argsort(index.stamp[rows])[::-1][:count]]
        return newest

    # ---- victims

    def oldest(self, ready: int) -> int:
        """No block of this size that may leave DRAM has an older stamp; `ready` is how many there are."""
        return min(
            self.clean_victims.lowest() if self.clean else NEVER,
            self.dirty_victims.lowest() if ready > self.clean else NEVER,
        )

    def take_on_disk(self, count: int, fits: Callable[[U32], Mask], *, whole: bool = True) -> U32:
        """Up to `count` victims on disk whose slots fit. Unless `whole`, children on disk may be left behind by blocks
        that lie in memory, too."""
        self._fits, self._whole = fits, whole
        try:
            return self.disk_victims.take(count)
        finally:
            self._fits, self._whole = None, True

    # ---- who could go some day, and who may go now

    def _in_dram_clean(self) -> U32:
        return self._in_dram(clean=True)

    def _in_dram_dirty(self) -> U32:
        return self._in_dram(clean=False)

    def _in_dram(self, *, clean: bool) -> U32:
        index, high = self._index, self._index.high
        mine = (index.dram[:high] != NO_SLOT) & (index.size_class[:high] == self.number)
        mine &= (index.disk[:high] != NO_SLOT) == clean
        return np.flatnonzero(mine & (index.state[:high] == RowState.READY)).astype(np.uint32)

    def _on_disk(self) -> U32:
        index, high = self._index, self._index.high
        mine = (index.disk[:high] != NO_SLOT) & (index.size_class[:high] == self.number)
        return np.flatnonzero(mine & (index.state[:high] == RowState.READY)).astype(np.uint32)

    def _stamps(self, rows: U32) -> U64:
        return self._index.stamp[rows]

    def _idle(self, rows: U32) -> Mask:
        index = self._index
        result: Mask = (index.state[rows] == RowState.READY) & (index.pins[rows] == 0) & (index.busy[rows] == 0)
        return result

    def _is_clean(self, rows: U32) -> Mask:
        index = self._index
        result: Mask = self._idle(rows) & (index.dram[rows] != NO_SLOT) & (index.disk[rows] != NO_SLOT)
        return result

    def _is_dirty(self, rows: U32) -> Mask:
        index = self._index
        result: Mask = self._idle(rows) & (index.dram[rows] != NO_SLOT) & (index.disk[rows] == NO_SLOT)
        return result

    def _droppable(self, rows: U32) -> Mask:
        good = self._is_dirty(rows)
        last = good & (self._index.hbm[rows] == NO_SLOT)
        good[last] = self._index.childless_in_order(rows[last])
        return good

    def _admitted(self, rows: U32) -> Mask:
        result: Mask = self._is_dirty(rows) & (self._index.reused[rows] >= int(self._admit_reused))
        return result

    def _disposable(self, rows: U32) -> Mask:
        index = self._index
        good: Mask = self._idle(rows) & (index.disk[rows] != NO_SLOT)
        if self._fits is not None:
            good[good] = self._fits(index.disk[rows[good]])
        last = good & (index.dram[rows] == NO_SLOT) & (index.hbm[rows] == NO_SLOT)
        good[last] = index.childless_in_order(rows[last])
        if self._whole:
            # At last: who has to stay keeps all above it.
            good[good] = index.childless_in_order(rows[good], index.below)
        return good
