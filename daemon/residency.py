"""Where blocks lie: the index, the slots of every local tier, and what is to be copied, evicted or moved.

Decide, then do: nothing here waits or touches payload bytes. A `plan_...` method takes slots and marks its rows *busy*
(neither evicted nor given away, whatever happens to their leases) and returns; `transfer.py` copies in data threads and
reports back to `demoted`, `promoted` or `moved`, where copies that are whole become part of the index.

The rules that hold throughout, proved by `check()`:

- A slot is handed on only after its generation has grown, so that a late reader notices.
- A block leaves its last local tier only when it has no resident child.
- What the disk holds is as good as prefix-closed, so that a daemon that is killed leaves whole prefixes: a block is
  written after those above it or in one batch with them, and leaves the disk before they do. (Exceptions, few: what is
  above lies in HBM alone, or on a drive that must give space back while another drive holds what is below.)
- A clean block (one with a copy on disk) leaves DRAM at once; a dirty one is copied down first, and is forgotten only
  when the cleaner fell behind, oldest leaves first. Disk keeps its copy of what comes back up.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import CascadeError, ProtocolError
from kvcascade.config.settings import Settings
from kvcascade.tiers.block import CRYPTOGRAPHIC, HASH_BYTES
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.extents import NOWHERE
from kvcascade.tiers.hbm import HbmTier
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.pool import PAGE_SHIFT
from kvcascade.tiers.slabfile import slot_size

from .index import NO_ROW, NO_SLOT, U8, U32, U64, Index, Mask, RowState, pack_keys
from .plans import Demotion, Move, Promotion, Slots, Space
from .protocol import POOL_DRAM, POOL_HBM, Tier
from .sizeclass import NEVER, SizeClass

log = logging.getLogger("kvcascade.residency")

DEMOTION_BATCH_BYTES = 32 << 20
DEMOTION_BATCH_BLOCKS = 256  # describing a batch costs the loop some 3 us a block
MAX_SIZE_CLASSES = 255  # a u8 column


class Residency:
    """The blocks of a node and their copies. `give_up` is called for pending rows that are about to be forgotten."""

    def __init__(
        self, settings: Settings, *, dram: DramTier, hbm: HbmTier | None = None, disk: Drives | None = None
    ) -> None:
        self.dram = dram
        self.hbm = hbm
        self.disk = disk
        self._settings = settings
        room = dram.pool.capacity + (hbm.pool.capacity if hbm else 0) + (disk.capacity if disk else 0)
        # The loop's thread alone changes all of this. The index grows by itself; this is a guess at 16 KiB a block.
        self.index = Index(rows=min(max(room >> 14, 1 << 12), 1 << 21))
        # What is being copied down cannot make room, so a small pool must not be busy as a whole.
        self._batch_bytes = min(DEMOTION_BATCH_BYTES, dram.pool.capacity // 16)
        self.spaces: list[Space] = []
        self.counters: Counter[str] = Counter()
        self.wake: Callable[[], None] = lambda: None  # called when the cleaner may have work
        self.grew: Callable[[], None] = lambda: None  # called when memory has come online
        self.landed: Callable[[U32], None] = lambda rows: None  # called with rows whose whole blocks now lie in DRAM
        self.leaving: Callable[[U32], None] = lambda rows: None  # called with rows that are about to make room in DRAM
        self.reserved: Callable[[Space, U32], None] = lambda space, pages: None  # DRAM slots that engines will write
        self.give_up: Callable[[U32], None] = lambda rows: None
        self._space_of: dict[tuple[bytes, int], Space] = {}
        self.classes: list[SizeClass] = []  # by number
        self._descending: dict[int, int] = {}  # rows that are being written to disk → their slots there
        self._path = _none(np.uint32)  # what lay above the last row that was looked at, and it
        self.wants_cleaning = False  # what the last plan_demotion saw: too little is free or clean
        self._promoting: set[int] = set()  # rows being read from disk
        self._promoting_bytes = 0

    def space(self, namespace: Namespace, group: int) -> Space:
        """The space of a namespace's KV group, opened at its first use. ConfigError: a block does not fit in a slab."""
        fingerprint = namespace.fingerprint()
        known = self._space_of.get((fingerprint, group))
        if known is not None:
            return known
        block_bytes = namespace.block_bytes(group)
        slot_bytes = self.dram.pool.slot_bytes(block_bytes)
        space = Space(
            number=len(self.spaces),
            namespace=namespace,
            fingerprint=fingerprint,
            group=group,
            shape=namespace.groups[group],
            block_bytes=block_bytes,
            slot_bytes=slot_bytes,
            size_class=self._class_number(slot_bytes),
            width=HASH_BYTES[namespace.hash_algo],
            keeps_tokens=namespace.hash_algo not in CRYPTOGRAPHIC,
        )
        self.spaces.append(space)
        self._space_of[fingerprint, group] = space
        self.index.block_tokens[space.number] = space.shape.block_tokens
        return space

    def _class_number(self, slot_bytes: int) -> int:
        for known in self.classes:
            if known.slot_bytes == slot_bytes:
                return known.number
        number = len(self.classes)
        if number == MAX_SIZE_CLASSES:
            raise CascadeError(f"slots of {slot_bytes} bytes: {MAX_SIZE_CLASSES} sizes are in use already")
        # "on-reuse" spares a disk that wears.
        admit_reused = self._settings.disk.write_policy == "on-reuse"
        self.classes.append(SizeClass(number, slot_bytes, self.index, admit_reused=admit_reused))
        return number

    def leading_run(self, space: Space, rows: U32, *, ready: bool) -> U32:
        """The leading rows that are resident and really chained; with `ready`, up to the first that is pending."""
        index = self.index
        good = rows != NO_ROW
        count = len(rows) if good.all() else int(good.argmin())
        rows = rows[:count]
        if not count:
            return rows
        # Hashes that do not chain as claimed must not mix the stamps of two chains.
        good = np.empty(count, dtype=np.bool_)
        good[0] = index.parent[rows[0]] == NO_ROW
        good[1:] = index.parent[rows[1:]] == rows[:-1]
        if ready:
            good &= index.state[rows] == RowState.READY
        return rows if good.all() else rows[: int(good.argmin())]

    def chained(self, rows: U32) -> U32:
        """The leading ones of these rows that follow each other in one chain, which may begin above them.

        Others may claim any order: rows that are taken for a chain are stamped, and pinned once each, as one.
        """
        good: Mask = self.index.parent[rows[1:]] == rows[:-1]
        return rows if good.all() else rows[: int(good.argmin()) + 1]

    def tiers_of(self, rows: U32) -> U8:
        tiers = np.full(len(rows), Tier.DISK, dtype=np.uint8)
        tiers[self.index.dram[rows] != NO_SLOT] = Tier.DRAM
        if self.hbm is not None:
            tiers[self.index.hbm[rows] != NO_SLOT] = Tier.HBM
        return tiers

    def in_memory(self, rows: U32) -> Mask:
        result: Mask = self.index.dram[rows] != NO_SLOT
        if self.hbm is not None:
            result |= self.index.hbm[rows] != NO_SLOT
        return result

    def is_ready(self, rows: U32) -> Mask:
        """Which of the rows that a search found exist and are ready."""
        there: Mask = rows != NO_ROW
        there[there] = self.index.state[rows[there]] == RowState.READY
        return there

    def slots(self, rows: U32) -> Slots:
        hbm = self.index.hbm[rows]
        in_hbm = hbm != NO_SLOT
        pages = np.where(in_hbm, hbm, self.index.dram[rows]).astype(np.uint32)
        pools = np.where(in_hbm, POOL_HBM, POOL_DRAM).astype(np.uint8)
        return Slots(pools, pages, self.generations(pools, pages))

    def generations(self, pools: U8, pages: U32) -> U32:
        generations = np.empty(len(pages), dtype=np.uint32)
        in_dram = pools == POOL_DRAM
        generations[in_dram] = self.dram.generations.of(pages[in_dram])
        if self.hbm is not None:
            generations[~in_dram] = self.hbm.generations.of(pages[~in_dram])
        return generations

    def room(self, size_class: int, count: int, parent: int, *, dram_only: bool = False) -> tuple[U8, U32]:
        """Up to `count` PENDING slots for a store, in HBM while it has free ones and it may be, else in DRAM."""
        held = np.array([] if parent == NO_ROW else [parent], dtype=np.uint32)
        # The chain's tail must not be evicted to make room for its own children.
        self.index.busy[held] += np.uint8(1)
        try:
            slot_bytes = self.slot_bytes(size_class)
            hbm = _none(np.uint32)
            if self.hbm is not None and not dram_only and slot_bytes <= self.hbm.pool.slab_bytes:
                hbm = self.hbm.allocate(slot_bytes, count)
            dram = self._dram_room(size_class, count - len(hbm))
        finally:
            self.index.busy[held] -= np.uint8(1)
        self.wake()
        pools = np.repeat(np.array([POOL_HBM, POOL_DRAM], dtype=np.uint8), [len(hbm), len(dram)])
        return pools, np.concatenate([hbm, dram]).astype(np.uint32)

    def _dram_room(self, size_class: int, count: int, *, drop: bool = True) -> U32:
        """Up to `count` PENDING DRAM slots: free ones, then clean victims', then (`drop`) the oldest dirty leaves'."""
        pool, slot_bytes = self.dram.pool, self.slot_bytes(size_class)
        pages = pool.allocate(slot_bytes, count)
        short = count - len(pages)
        if short > 0 and self._evict(size_class, short, drop=drop):
            pages = np.concatenate([pages, pool.allocate(slot_bytes, short)])
        if len(pages) < count and drop:
            self.classes[size_class].starved = True
        return pages

    def _evict(self, size_class: int, count: int, *, drop: bool = True) -> int:
        """Frees up to `count` DRAM slots of a class; returns how many."""
        mine = self.classes[size_class]
        victims = mine.clean_victims.take(count)
        self.leaving(victims)
        self._drop_dram(victims)
        self.counters["evicted_blocks"] += len(victims)
        if len(victims) < count and drop:
            victims = np.concatenate([victims, self._drop_dirty(mine, count - len(victims))])
            mine.short = True
            self.wake()
        if len(self.classes) > 1 and len(victims):
            youngest = int(self.index.stamp[victims].max())
            if any(self._oldest(other) < youngest for other in self.classes if other is not mine):
                mine.starved = True  # another class keeps blocks that are older than those that had to go
        return len(victims)

    def _oldest(self, size_class: SizeClass) -> int:
        counts = self.dram.pool.counts().get(size_class.slot_bytes)
        return size_class.oldest(counts.ready if counts else 0)

    def _drop_dirty(self, size_class: SizeClass, count: int) -> U32:
        """Forgets the oldest dirty leaves: the cleaner fell behind, or there is nothing below. Returns which."""
        rows = size_class.dirty_victims.take(count)
        self.leaving(rows)
        elsewhere = self.index.hbm[rows] != NO_SLOT
        self._drop_dram(rows[elsewhere])
        leaves = rows[~elsewhere]
        self.counters["dropped_blocks"] += len(leaves)
        self.remove(leaves)
        return rows

    def _drop_dram(self, rows: U32) -> None:
        """Frees the DRAM copies of rows that have another."""
        clean = self.index.disk[rows] != NO_SLOT
        self.count_clean(rows[clean], -1)
        pages = self.index.dram[rows]
        self.index.dram[rows] = NO_SLOT
        self.dram.free(pages)

    def count_clean(self, rows: U32, change: int) -> None:
        counts = np.bincount(self.index.size_class[rows], minlength=len(self.classes))
        for size_class, count in zip(self.classes, counts.tolist(), strict=True):
            size_class.clean += change * count

    def remove(self, rows: U32) -> None:
        """Makes rows unfindable, and frees what nobody holds."""
        idle, _ = self.index.remove(rows)
        self._free_copies(idle)

    def forget(self, rows: U32) -> None:
        """Makes rows and all below them unfindable: their bytes are in doubt."""
        index = self.index
        below = index.with_descendants(np.unique(rows[index.state[rows] == RowState.READY]))
        pending = index.state[below] == RowState.PENDING
        self.give_up(below[pending])
        self.counters["forgotten_blocks"] += int((~pending).sum())
        self.remove(below)

    def free_doomed(self, rows: U32) -> None:
        index = self.index
        if index.doomed:
            over = rows[(index.state[rows] == RowState.DOOMED) & (index.pins[rows] == 0) & (index.busy[rows] == 0)]
            self._free_copies(over)

    def _free_copies(self, rows: U32) -> None:
        index = self.index
        in_dram = index.dram[rows] != NO_SLOT
        on_disk = index.disk[rows] != NO_SLOT
        self.count_clean(rows[in_dram & on_disk], -1)
        self.dram.free(index.dram[rows[in_dram]])
        if self.disk is not None and on_disk.any():
            self.disk.free(index.disk[rows[on_disk]])
        if self.hbm is not None:
            for row in rows[index.hbm[rows] != NO_SLOT].tolist():
                self.hbm.drop(row)
        index.recycle(rows)

    def plan_demotion(self, *, everything: bool = False) -> Demotion | None:
        """The next batch to copy down, or None when enough is clean; with `everything`, while anything is dirty."""
        self.wants_cleaning = False
        planners = [self.plan_hbm_demotion, self._plan_dram_demotion]
        if everything:
            planners.reverse()  # or what comes down from HBM would push dirty blocks out of DRAM
        for planner in planners:
            plan = planner(everything)
            if plan is not None:
                return plan
        return None

    def _plan_dram_demotion(self, everything: bool) -> Demotion | None:
        if self.disk is None or not self.disk.writable:
            return None
        for size_class in self.classes:
            plan = self._plan_class_demotion(size_class, everything)
            if plan is not None:
                return plan
        return None

    def _plan_class_demotion(self, size_class: SizeClass, everything: bool) -> Demotion | None:
        pool, slot_bytes = self.dram.pool, size_class.slot_bytes
        batch = min(max(1, self._batch_bytes // slot_bytes), DEMOTION_BATCH_BLOCKS)
        rows = fresh = size_class.take_fresh(batch)
        short, size_class.short = size_class.short, False
        if not len(rows) and not everything and not short:
            target = 2 * self._settings.dram.low_watermark.of(pool.capacity)
            easy = pool.free_slots(slot_bytes) + size_class.clean
            if easy * slot_bytes >= target:
                return None
        if not len(rows):
            self.wants_cleaning = True
            rows = size_class.newest_dirty(batch) if everything else size_class.demotable.take(batch)
        if not len(rows):
            return None
        index = self.index
        wanted = self._with_those_above(rows, batch)
        if len(wanted) == batch:
            # Others wait below a block that is being stored or moved: the watermark finds them again.
            left = np.setdiff1d(rows, wanted)
            if len(fresh):
                size_class.write_through(left)
            elif not everything:
                size_class.demotable.add(left)
        held = np.concatenate([wanted, self._above_on_disk(wanted)])
        held = held[held != NO_ROW]
        index.busy[held] += np.uint8(1)
        going, slots = self._disk_room(slot_bytes, wanted)
        index.busy[held] -= np.uint8(1)
        if not len(going):
            return None
        plan = Demotion(Tier.DRAM, size_class.number, going, index.dram[going], slots, above=self._above_on_disk(going))
        index.busy[going] += np.uint8(1)
        index.busy[plan.held] += np.uint8(1)
        self._descending.update(zip(going.tolist(), slots.tolist(), strict=True))
        return plan

    def _lacks_above(self, rows: U32) -> Mask:
        """Below which rows' parents the disk has a hole that it could do without."""
        index = self.index
        above = index.parent[rows]
        lacks: Mask = above != NO_ROW
        there = above[lacks]
        lacks[lacks] = (index.disk[there] == NO_SLOT) & (index.dram[there] != NO_SLOT)
        return lacks

    def _above_on_disk(self, rows: U32) -> U32:
        """For each row the block above it that lies on disk, for each such block once; else NO_ROW."""
        index = self.index
        above = index.parent[rows]
        there = np.flatnonzero(above != NO_ROW)
        there = there[index.disk[above[there]] != NO_SLOT]
        named, first = np.unique(above[there], return_index=True)
        result = np.full(len(rows), NO_ROW, dtype=np.uint32)
        result[there[first]] = named
        return result

    def _with_those_above(self, rows: U32, most: int) -> U32:
        """Up to `most` blocks: `rows`, each after the dirty blocks above it, as far as they reach.

        A row below a block that is being stored or moved is left out: it has to wait.
        """
        chosen: dict[int, None] = {}
        for row in rows.tolist():
            chosen.update(dict.fromkeys(self._path_to(row, chosen)[: most - len(chosen)]))
            if len(chosen) == most:
                break
        return np.fromiter(chosen, dtype=np.uint32, count=len(chosen))

    def _path_to(self, row: int, chosen: Collection[int]) -> list[int]:
        """The dirty blocks above a row that nobody writes yet, heads first, and the row; none where it has to wait."""
        index = self.index
        if len(self._path) and self._path[-1] == row:
            # A long chain is asked for again and again, batch by batch, and a step upwards costs half a microsecond.
            path = self._path[self._is_dirty(self._path)]
            if len(path) and self._goes_on(int(index.parent[path[0]])) and self._is_chain(path):
                self._path = path
                return path.tolist()  # type: ignore[no-any-return]
        parent, state, busy, dram = (column.item for column in (index.parent, index.state, index.busy, index.dram))
        steps: list[int] = []
        while row not in chosen and not self._goes_on(row):
            if state(row) != RowState.READY or busy(row):
                return []
            if dram(row) != NO_SLOT:
                steps.append(row)
            row = parent(row)
        steps.reverse()
        self._path = np.array(steps, dtype=np.uint32)
        return steps

    def _goes_on(self, above: int) -> bool:
        """Whether what lies below may be written: it is a chain's beginning, or this is on disk or will be before."""
        return above == NO_ROW or above in self._descending or self.index.disk.item(above) != NO_SLOT

    def descending(self, rows: U32) -> Mask:
        """Which of these rows are being written to disk."""
        return np.isin(rows, list(self._descending))

    def _is_chain(self, rows: U32) -> bool:
        return bool((self.index.parent[rows[1:]] == rows[:-1]).all())

    def _is_dirty(self, rows: U32) -> Mask:
        """Which of these rows lie in DRAM, not on disk, and are not being copied."""
        index = self.index
        dirty: Mask = (index.state[rows] == RowState.READY) & (index.busy[rows] == 0)
        dirty &= (index.dram[rows] != NO_SLOT) & (index.disk[rows] == NO_SLOT)
        return dirty

    def stored(self, rows: U32, size_class: int) -> None:
        """These rows have become ready, or came down from HBM: they lie in memory alone."""
        if self.disk is not None and self._settings.disk.write_policy == "through":
            self.classes[size_class].write_through(rows)
        self.wake()

    def slot_bytes(self, size_class: int) -> int:
        """Bytes of a slot of this class."""
        return self.classes[size_class].slot_bytes

    def _disk_room(self, length: int, rows: U32) -> tuple[U32, U32]:
        """The newest of `rows` that find room on disk, heads first, and their slots: free ones, then older blocks'."""
        assert self.disk is not None
        rows = rows[np.argsort(self.index.stamp[rows])[::-1]]
        placed: dict[int, int] = {}
        short = self._place(length, rows, placed)
        if len(short):
            self._evict_disk(slot_size(length), self.index.stamp[short])
            self._place(length, short, placed)
        going, slots = (np.fromiter(part, dtype=np.uint32, count=len(placed)) for part in (placed, placed.values()))
        return going, slots

    def _place(self, length: int, rows: U32, placed: dict[int, int]) -> U32:
        """Disk slots for `rows`, heads before tails, into `placed`: each chain on the drive where the rest of it lies.

        Returns those that find no room. A block that would lie on another drive than one above it, which is not
        durable yet, is left out: drives do not wait for one another.
        """
        disk, index = self.disk, self.index
        assert disk is not None
        if len(disk) == 1 or not len(rows):
            slots = disk.allocate(length, len(rows))
            placed.update(zip(rows.tolist(), slots.tolist(), strict=False))
            return rows[len(slots) :]
        parents = index.parent[rows]
        starts = np.flatnonzero(np.append(True, parents[1:] != rows[:-1])).tolist()
        left_out: set[int] = set()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            above, part = int(parents[start]), rows[start:end].tolist()
            if above in left_out:
                left_out.update(part)
                continue
            durable = above == NO_ROW or index.disk[above] != NO_SLOT
            slot = NOWHERE if above == NO_ROW else int(index.disk[above])
            if not durable:
                slot = placed.get(above, self._descending.get(above, NOWHERE))
            # Where chains fork a new one begins: else all that share a first block would crowd on its drive.
            near = slot if above != NO_ROW and index.children[above] == 1 else NOWHERE
            slots = disk.allocate(length, end - start, near)
            if not len(slots):
                return rows[start:]
            drives = disk.drives_of(slots)
            here = drives[0] if durable or slot == NOWHERE else disk.drives_of(np.array([slot], dtype=np.uint32))[0]
            fits = len(slots) if (drives == here).all() else int((drives != here).argmax())
            disk.free(slots[fits:])
            placed.update(zip(part, slots[:fits].tolist(), strict=False))
            if len(slots) < end - start and fits == len(slots):
                return rows[start + fits :]
            left_out.update(part[fits:])
        return rows[:0]

    def _evict_disk(self, size: int, stamps: U64) -> None:
        """Makes room on disk for blocks of `size` bytes with these stamps, newest first, as far as blocks may go.

        Each takes the place of older ones alone. Otherwise a disk that is smaller than what is dirty would be written
        over and over: what it loses while it lies in DRAM is dirty again.
        """
        assert self.disk is not None
        wanted = len(stamps) * size - self.disk.spare
        classes = [one for one in self.classes if one.disk_victims.lowest() < NEVER]
        for size_class in sorted(classes, key=lambda one: one.disk_victims.lowest()):
            if wanted <= 0:
                return
            each = slot_size(size_class.slot_bytes)
            victims = size_class.take_on_disk(-(-wanted // each), self.disk.writable_slots)
            successors = np.minimum(np.arange(len(victims)) * each // size, len(stamps) - 1)
            older = self.index.stamp[victims] < stamps[successors]
            size_class.disk_victims.add(victims[~older])
            self._drop_disk(victims[older])
            wanted -= int(older.sum()) * each

    def trim_disk(self) -> None:
        """Evicts the oldest blocks of drives that hold more than their limit, which others' files may have lowered."""
        if self.disk is None:
            return
        disk = self.disk
        for drive, excess in disk.excess().items():
            for size_class in self.classes:
                each = slot_size(size_class.slot_bytes)
                for whole in (True, False):
                    if excess > 0:
                        wanted = -(-excess // each)
                        victims = size_class.take_on_disk(wanted, partial(disk.lie_on, drive), whole=whole)
                        self._drop_disk(victims)
                        self.counters["disk_trimmed_blocks"] += len(victims)
                        excess -= len(victims) * each

    def _drop_disk(self, rows: U32) -> None:
        index = self.index
        elsewhere = (index.dram[rows] != NO_SLOT) | (index.hbm[rows] != NO_SLOT)
        stay = rows[elsewhere]
        self.count_clean(stay[index.dram[stay] != NO_SLOT], -1)
        if self.disk is not None:
            self.disk.free(index.disk[stay])
        index.take_off_disk(stay)
        self.counters["disk_evicted_blocks"] += len(rows)
        self.remove(rows[~elsewhere])

    def plan_hbm_demotion(self, everything: bool) -> Demotion | None:
        """The next batch to copy from HBM to DRAM; with `everything`, while a block lies in HBM alone."""
        if self.hbm is None:
            return None
        index = self.index
        for size_class, slot_bytes in ((one.number, one.slot_bytes) for one in self.classes):
            counts = self.hbm.pool.counts().get(slot_bytes)
            if counts is None or not counts.ready:
                continue
            target = 2 * self._settings.hbm.low_watermark.of(self.hbm.pool.capacity)
            wanted = -(-target // slot_bytes) - self.hbm.pool.free_slots(slot_bytes)
            through = everything or self._settings.dram.write_policy == "through"
            batch = min(max(1, self._batch_bytes // slot_bytes), DEMOTION_BATCH_BLOCKS)
            queued = self.hbm.victims(slot_bytes, min(wanted, batch)) if wanted > 0 else []
            rows = np.array([row for _, row in queued], dtype=np.uint32)
            rows = rows[index.busy[rows] == 0]
            covered = (index.dram[rows] != NO_SLOT) | (index.disk[rows] != NO_SLOT)
            self._drop_hbm(rows[covered])
            rows = rows[~covered]
            # Copied without need, a block pushes no dirty one out: that one might lie in HBM too, and want back.
            needed = len(rows) > 0
            if through and not needed:
                rows = self._in_hbm_alone(size_class, batch)
            if not len(rows):
                continue
            index.busy[rows] += np.uint8(1)
            pages = self._dram_room(size_class, len(rows), drop=needed)
            index.busy[rows[len(pages) :]] -= np.uint8(1)
            rows = rows[: len(pages)]
            if len(rows):
                return Demotion(Tier.HBM, size_class, rows, index.hbm[rows], pages, above=np.full_like(rows, NO_ROW))
        return None

    def _in_hbm_alone(self, size_class: int, count: int) -> U32:
        """The oldest blocks that lie nowhere else and are not being copied."""
        index = self.index
        high = index.high
        alone = self.resident(Tier.HBM) & (index.dram[:high] == NO_SLOT) & (index.disk[:high] == NO_SLOT)
        alone &= (index.size_class[:high] == size_class) & (index.busy[:high] == 0)
        rows = np.flatnonzero(alone).astype(np.uint32)
        oldest: U32 = rows[np.argsort(index.stamp[rows])[:count]]
        return oldest

    def _drop_hbm(self, rows: U32) -> None:
        """Frees the HBM copies of unpinned rows that have another."""
        assert self.hbm is not None
        self.hbm.evict_batch(self.index.hbm[rows])
        self.index.hbm[rows] = NO_SLOT

    def demoted(self, plan: Demotion, succeeded: Mask) -> None:
        """A demotion has ended: copies of the blocks that succeeded are whole (for disk: durable) below."""
        index = self.index
        rows, targets = plan.rows, plan.targets
        index.busy[rows] -= np.uint8(1)
        if plan.source is Tier.HBM:
            good = succeeded & (index.state[rows] == RowState.READY)
            self.dram.pool.ready(targets[good])
            index.dram[rows[good]] = targets[good]
            self.landed(rows[good])
            self.dram.free(targets[~good])
            self.stored(rows[good], plan.size_class)
            if self._settings.dram.write_policy != "through":
                self._drop_hbm(rows[good & (index.pins[rows] == 0)])
        else:
            assert self.disk is not None
            index.busy[plan.held] -= np.uint8(1)
            for row in rows.tolist():
                del self._descending[row]
            good = succeeded & (index.state[rows] == RowState.READY)
            index.put_on_disk(rows[good], targets[good])
            # What was to lie above may have failed, in this batch or in the one before it.
            while (bad := good & self._lacks_above(rows)).any():
                index.take_off_disk(rows[bad])
                good &= ~bad
            kept = rows[good & (index.dram[rows] != NO_SLOT)]
            self.count_clean(kept, 1)
            size_class = self.classes[plan.size_class]
            size_class.clean_victims.add(kept)
            # They may be older than all that was there before: children of what else would go first.
            size_class.disk_victims.add(rows[good])
            self.disk.free(targets[~good])
            self.counters["demoted_blocks"] += int(good.sum())
        self.free_doomed(np.concatenate([rows, plan.held]))
        self.wake()

    def plan_promotion(self, space: Space, rows: U32) -> Promotion | None:
        """Slots for those of `rows` that lie on disk only, leading ones first, as far as budget and DRAM reach."""
        if self.disk is None or not self.disk.readable:
            return None
        index = self.index
        below = rows[~self.in_memory(rows) & (index.state[rows] == RowState.READY) & (index.disk[rows] != NO_SLOT)]
        well = self.disk.readable_slots(index.disk[below])
        if not well.all():
            # Behind a block that cannot be read nothing is of use.
            below = below[: int(well.argmin())]
        wanted = np.array([row for row in below.tolist() if row not in self._promoting], dtype=np.uint32)
        slot_bytes = space.slot_bytes
        budget = self._settings.promotion.budget_share.of(self.dram.pool.capacity) - self._promoting_bytes
        wanted = wanted[: max(0, budget // slot_bytes)]
        if not len(wanted):
            return None
        pages = self._dram_room(space.size_class, len(wanted))
        wanted = wanted[: len(pages)]
        if not len(wanted):
            return None
        index.busy[wanted] += np.uint8(1)
        self._promoting_bytes += len(wanted) * slot_bytes
        self._promoting.update(wanted.tolist())
        return Promotion(space, wanted, index.disk[wanted], pages)

    def promoted(self, plan: Promotion, good: Mask, doubted: Mask) -> None:
        """A promotion has ended: the `good` blocks were read whole and proved true; `doubted` ones proved false.

        The latter are forgotten. The others could not be read now: they stay what and where they are.
        """
        index = self.index
        rows = plan.rows
        index.busy[rows] -= np.uint8(1)
        self._promoting_bytes -= len(rows) * plan.space.slot_bytes
        self._promoting.difference_update(rows.tolist())
        keep = good & (index.state[rows] == RowState.READY)
        self.dram.pool.ready(plan.pages[keep])
        index.dram[rows[keep]] = plan.pages[keep]
        self.landed(rows[keep])
        self.count_clean(rows[keep], 1)
        self.dram.free(plan.pages[~keep])
        self.counters["promoted_blocks"] += int(keep.sum())
        self.free_doomed(rows)
        bad = rows[doubted & (index.state[rows] == RowState.READY)]
        if len(bad):
            self.counters["failed_promotions"] += len(bad)
            self.forget(bad)

    def plan_move(self) -> Move | None:
        """Picks a slab for a size class that has no room, from the class whose oldest blocks are the oldest of all."""
        for needy in self.classes:
            if needy.starved:
                needy.starved = False
                plan = self._plan_move_to(needy.number)
                if plan is not None:
                    return plan
        return None

    def _plan_move_to(self, needy: int) -> Move | None:
        index, pool = self.index, self.dram.pool
        high = index.high
        resident = (index.dram[:high] != NO_SLOT) & (index.state[:high] == RowState.READY)
        oldest: list[tuple[int, int]] = []
        for size_class in range(len(self.classes)):
            rows = np.flatnonzero(resident & (index.size_class[:high] == size_class))
            if len(rows):
                oldest.append((int(index.stamp[rows].min()), size_class))
        oldest.sort()
        if not oldest or oldest[0][1] == needy:
            return None
        donor = oldest[0][1]
        slot_bytes = self.slot_bytes(donor)
        rows = np.flatnonzero(resident & (index.size_class[:high] == donor)).astype(np.uint32)
        slabs = pool.slabs_of(slot_bytes)
        slab_of = index.dram[rows] // np.uint32(pool.slab_bytes >> PAGE_SHIFT)
        held = (index.pins[rows] != 0) | (index.busy[rows] != 0)
        busy_slabs = set(slab_of[held].tolist())
        ready_in = Counter(slab_of.tolist())
        used = dict(zip(slabs.tolist(), pool.used_in(slabs).tolist(), strict=True))
        # Slots that are pending or quarantined cannot be moved: their slabs are out of the question.
        free = [s for s in slabs.tolist() if s not in busy_slabs and used[s] == ready_in.get(s, 0)]
        if not free:
            return None
        slab = min(free, key=lambda s: used[s])
        pool.reserve_slab(slab)
        mine = rows[slab_of == slab]
        pages = index.dram[mine]
        # The donor's oldest blocks go, wherever they lie; what is left in the slab moves to the slots of the others.
        self._evict(donor, len(mine) - pool.free_slots(slot_bytes))
        self.classes[donor].starved = False
        stay = (index.state[mine] == RowState.READY) & (index.dram[mine] == pages)
        movers = mine[stay]
        targets = pool.allocate(slot_bytes, len(movers))
        if len(targets) < len(movers):
            self.dram.free(targets)
            pool.unreserve_slab(slab)
            return None
        index.busy[movers] += np.uint8(1)
        return Move(slab, slot_bytes, movers, pages[stay], targets)

    def moved(self, plan: Move, whole: bool) -> None:
        """A move has ended. If its copies are whole the blocks lie in their new slots, and the slab may be free."""
        index = self.index
        rows = plan.rows
        index.busy[rows] -= np.uint8(1)
        # A block that was pinned meanwhile is being read where it lies.
        go = (index.state[rows] == RowState.READY) & (index.pins[rows] == 0) & whole
        self.dram.pool.ready(plan.targets[go])
        index.dram[rows[go]] = plan.targets[go]
        self.landed(rows[go])
        self.dram.free(plan.pages[go])
        self.dram.free(plan.targets[~go])
        self.free_doomed(rows)
        if self.dram.pool.release_slab(plan.slab):
            self.counters["moved_slabs"] += 1
        else:
            self.dram.pool.unreserve_slab(plan.slab)

    def where(self, space: Space, hashes: bytes) -> U8:
        """For each block a bit mask of the tiers that it lies in (1 << Tier), 0 where absent."""
        rows = self.index.find(space.number, self.keys(space, hashes))
        masks = np.zeros(len(rows), dtype=np.uint8)
        known = self.is_ready(rows)
        for tier, column in self._columns():
            masks[known] |= np.where(column[rows[known]] != NO_SLOT, np.uint8(1 << tier), np.uint8(0))
        return masks

    def blocks_by_space(self, tier: Tier | None = None) -> list[int]:
        """Ready blocks of each space, wherever they lie or with a copy in `tier`. O(rows)."""
        high = self.index.high
        counted = self.index.state[:high] == RowState.READY if tier is None else self.resident(tier)
        counts: list[int] = np.bincount(self.index.space[:high][counted], minlength=len(self.spaces)).tolist()
        return counts

    def _columns(self) -> list[tuple[Tier, U32]]:
        return [(Tier.HBM, self.index.hbm), (Tier.DRAM, self.index.dram), (Tier.DISK, self.index.disk)]

    def blocks_in(self, tier: Tier) -> int:
        """Ready blocks that have a copy in a tier. O(rows)."""
        return int(self.resident(tier).sum())

    def resident(self, tier: Tier) -> Mask:
        index = self.index
        high = index.high
        column = dict(self._columns())[tier][:high]
        mask: Mask = (column != NO_SLOT) & (index.state[:high] == RowState.READY)
        return mask

    def dirty_in(self, tier: Tier) -> int:
        """Ready blocks of a memory tier without a copy in a lower tier. O(rows)."""
        high = self.index.high
        mask = self.resident(tier)
        mask &= self.index.disk[:high] == NO_SLOT
        if tier is Tier.HBM:
            mask &= self.index.dram[:high] == NO_SLOT
        return int(mask.sum())

    def pinned_in(self, tier: Tier) -> int:
        """Ready blocks of a tier that some lease pins. O(rows)."""
        return int((self.resident(tier) & (self.index.pins[: self.index.high] != 0)).sum())

    def keys(self, space: Space, hashes: bytes) -> U64:
        if len(hashes) % space.width:
            raise ProtocolError(f"field 'hashes': {len(hashes)} bytes are no multiple of {space.width}")
        return pack_keys(hashes, space.width)

    # ---- proof

    def check(self) -> list[str]:
        """Violations in the index and the tiers, and between them, as sentences. O(rows)."""
        index = self.index
        wrong = index.check() + self.dram.check()
        if self.hbm is not None:
            wrong += self.hbm.check()
        if self.disk is not None:
            wrong += [f"disk: {text}" for text in self.disk.check()]
            below = np.flatnonzero(index.disk[: index.high] != NO_SLOT)
            fitting = np.array([slot_size(one.slot_bytes) for one in self.classes] or [0], dtype=np.uint64)
            unfit = int((self.disk.sizes_of(index.disk[below]) != fitting[index.size_class[below]]).sum())
            if unfit:
                wrong.append(f"disk: {unfit} rows have slots of another size than their blocks")
        counts = self.dram.pool.counts().values()
        if self.hbm is not None:
            cached = sum(c.ready for c in self.hbm.pool.counts().values())
            in_hbm = np.flatnonzero(index.hbm[: index.high] != NO_SLOT).tolist()
            if len(in_hbm) != cached or any(self.hbm.find(row) != index.hbm[row] for row in in_hbm):
                wrong.append(f"hbm: {cached} slots hold blocks, the index knows {len(in_hbm)}, or others")
        held = np.flatnonzero(index.dram[: index.high] != NO_SLOT)
        if len(held) != sum(c.ready for c in counts):
            wrong.append(f"dram: {sum(c.ready for c in counts)} ready slots for {len(held)} rows")
        for tier, column in self._columns():
            taken = column[: index.high]
            taken = taken[taken != NO_SLOT]
            if len(np.unique(taken)) != len(taken):
                wrong.append(f"{tier.name.lower()}: two rows share a slot")
        for one in self.classes:
            mine = held[index.size_class[held] == one.number]
            counted = int((index.disk[mine] != NO_SLOT).sum())
            if counted != one.clean:
                wrong.append(f"class {one.slot_bytes}: {one.clean} clean rows counted, {counted} found")
        if not index.busy.any() and (self._promoting or self._promoting_bytes):
            wrong.append(f"promotion: {self._promoting_bytes} bytes of the budget are taken at rest")
        return wrong


def _none(dtype: type) -> npt.NDArray[Any]:
    return np.empty(0, dtype=dtype)
