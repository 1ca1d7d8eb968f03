"""The slots of one pool: which are free, and what the others are for. Pure bookkeeping, no memory is touched here.

A pool is cut in slabs of equal size, a slab in equal slots of one size class. A slot is named by its *page number*
(byte offset in the pool >> 12, a u32), so that a name stays valid whatever class its slab has. Whole slabs move between
classes: an unassigned slab goes to whoever asks first, an entirely free one is taken back on demand, and one that is to
be emptied is reserved (its slots are no longer handed out) until the last of them is free.

The rule that holds throughout: in each class, and over all, free + pending + ready + quarantined = total; `check()`
proves it. All state belongs to the event loop's thread, so there are no locks. Every operation is a handful of numpy
calls on the whole batch: 512 slots cost some tens of microseconds, and nothing is done slot by slot.
"""

import heapq
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcascade.config.errors import ConfigError

PAGE: Final = 4096
PAGE_SHIFT: Final = 12
NO_SLOT: Final = 0xFFFFFFFF
SLAB_BYTES: Final = 32 << 20

Pages = NDArray[np.uint32]


class SlotState(IntEnum):
    """What a slot is for. Pages where no slot begins have none of these."""

    FREE = 1
    PENDING = 2
    READY = 3
    QUARANTINED = 4


class ClassCounts(NamedTuple):
    """The slots of one size class by state; total is the sum of the others."""

    total: int
    free: int
    pending: int
    ready: int
    quarantined: int


class _Class:
    """One size class: its counts, and the stack of the free slots that may be handed out (none of a reserved slab)."""

    __slots__ = ("counts", "slot_pages", "stack", "top")

    def __init__(self, slot_pages: int, most: int) -> None:
        self.slot_pages = slot_pages
        # Sized for the whole pool once; the kernel gives no memory to the part that is never reached.
        self.stack: Pages = np.empty(most, np.uint32)
        self.top = 0
        self.counts: NDArray[np.int64] = np.zeros(len(SlotState) + 1, np.int64)


class SlabPool:
    """Slots of `capacity` bytes, of which the part that is online may be handed out.

    The capacity is cut down to whole slabs (a pool smaller than one slab is one slab of its own size). Nothing is
    usable before `online`. Page arrays given to the methods may have any integer dtype and may mix classes; every
    method checks all of its pages before it changes anything, and raises ValueError for one that is not a slot, that
    is named twice, or that is in another state than the method needs.
    """

    def __init__(self, capacity: int, *, slab_bytes: int = SLAB_BYTES) -> None:
        if slab_bytes <= 0 or slab_bytes % PAGE:
            raise ConfigError(f"slab_bytes = {slab_bytes} is not a positive multiple of {PAGE}")
        if capacity < PAGE:
            raise ConfigError(f"a pool of {capacity} bytes holds no slot; the least is {PAGE}")
        if capacity < slab_bytes:
            slab_bytes = capacity - capacity % PAGE
        if capacity // PAGE > NO_SLOT:
            raise ConfigError(f"a pool of {capacity} bytes is too large: pages are numbered in 32 bits")
        self.slab_bytes: Final = slab_bytes
        self.slabs: Final = capacity // slab_bytes
        self.capacity: Final = self.slabs * slab_bytes
        self.pages: Final = self.capacity >> PAGE_SHIFT
        self._slab_pages: Final = slab_bytes >> PAGE_SHIFT
        # Changed by the loop's thread alone. Arrays by page: zeroed lazily by the kernel, so a page without a slot
        # costs nothing. `_position` is where a FREE, unreserved slot lies in its class's stack; for every other slot
        # it is scratch space.
        self._online = 0
        self._state: NDArray[np.uint8] = np.zeros(self.pages, np.uint8)
        self._position: Pages = np.zeros(self.pages, np.uint32)
        self._slab_slot_pages: NDArray[np.int64] = np.zeros(self.slabs, np.int64)  # 0: unassigned
        self._slab_used: NDArray[np.int64] = np.zeros(self.slabs, np.int64)
        self._reserved: NDArray[np.bool_] = np.zeros(self.slabs, np.bool_)
        self._reserved_count = 0
        self._unassigned: list[int] = []  # heap: lowest address first
        self._classes: dict[int, _Class] = {}

    # --- slabs -------------------------------------------------------------------------------------------------

    @property
    def online_slabs(self) -> int:
        return self._online

    @property
    def online_bytes(self) -> int:
        return self._online * self.slab_bytes

    def online(self, slabs: int) -> None:
        """Make the first `slabs` slabs usable. The number never falls; one beyond the pool is a ValueError."""
        if not self._online <= slabs <= self.slabs:
            raise ValueError(f"{slabs} slabs online after {self._online} of {self.slabs}")
        for slab in range(self._online, slabs):
            heapq.heappush(self._unassigned, slab)
        self._online = slabs

    def slab_of(self, page: int) -> int:
        """The slab in which a page lies."""
        return page // self._slab_pages

    def class_of(self, page: int) -> int:
        """Slot size in bytes of the slab in which a page lies; 0 when it is unassigned."""
        return int(self._slab_slot_pages[page // self._slab_pages]) << PAGE_SHIFT

    def classes_of(self, pages: ArrayLike) -> NDArray[np.int64]:
        """`class_of` for each page."""
        sizes: NDArray[np.int64] = self._slab_slot_pages[self._named(pages) // self._slab_pages] << PAGE_SHIFT
        return sizes

    def classes(self) -> list[int]:
        """The slot sizes in bytes that have at least one slab, ascending."""
        return sorted(slot_pages << PAGE_SHIFT for slot_pages in self._classes)

    def slabs_of(self, slot_bytes: int) -> NDArray[np.int64]:
        """The slabs of a class, ascending."""
        return np.flatnonzero(self._slab_slot_pages == self._slot_pages(slot_bytes))

    def pages_in_slab(self, slab: int) -> Pages:
        """All slots of a slab, whatever their state, ascending; empty when it is unassigned."""
        slot_pages = int(self._slab_slot_pages[slab])
        if not slot_pages:
            return np.empty(0, np.uint32)
        slots = self._slab_pages // slot_pages
        return np.arange(slots, dtype=np.uint32) * np.uint32(slot_pages) + np.uint32(slab * self._slab_pages)

    def used_in(self, slabs: ArrayLike) -> NDArray[np.int64]:
        """How many slots of each of these slabs are not free: what emptying it would have to move or drop."""
        used: NDArray[np.int64] = self._slab_used[np.asarray(slabs, np.int64)]
        return used

    def reserve_slab(self, slab: int) -> None:
        """Stop handing out slots of a slab that is to be emptied; those in use stay as they are. Idempotent.

        Ends with `release_slab` once the last slot is free or with `unreserve_slab`. ValueError for an unassigned slab.
        """
        if not self._slab_slot_pages[slab]:
            raise ValueError(f"slab {slab} has no class: there is nothing to empty")
        if not self._reserved[slab]:
            self._withdraw(slab)
            self._reserved[slab] = True
            self._reserved_count += 1

    def unreserve_slab(self, slab: int) -> None:
        """Hand out the slots of a slab again. Idempotent."""
        if self._reserved[slab]:
            self._reserved[slab] = False
            self._reserved_count -= 1
            pages = self.pages_in_slab(slab)
            free = pages[self._state[pages] == SlotState.FREE]
            self._push(self._classes[int(self._slab_slot_pages[slab])], free[::-1])

    def release_slab(self, slab: int) -> bool:
        """Take a slab from its class if all its slots are free (a reservation ends too); say whether that was so."""
        slot_pages = int(self._slab_slot_pages[slab])
        if not slot_pages or self._slab_used[slab]:
            return False
        pages = self.pages_in_slab(slab)
        if self._reserved[slab]:
            self._reserved[slab] = False
            self._reserved_count -= 1
        else:
            self._withdraw(slab)
        size_class = self._classes[slot_pages]
        size_class.counts[SlotState.FREE] -= len(pages)
        self._state[pages] = 0
        self._slab_slot_pages[slab] = 0
        heapq.heappush(self._unassigned, slab)
        if not size_class.counts.any():
            del self._classes[slot_pages]
        return True

    # --- slots -------------------------------------------------------------------------------------------------

    def slot_bytes(self, block_bytes: int) -> int:
        """The class of blocks of this size: rounded up to a page. ConfigError when one does not fit in a slab."""
        if block_bytes <= 0:
            raise ValueError(f"a block of {block_bytes} bytes")
        slot_bytes = -(-block_bytes // PAGE) * PAGE
        if slot_bytes > self.slab_bytes:
            raise ConfigError(
                f"a block of {block_bytes} bytes does not fit in a slab of {self.slab_bytes}: "
                "use a larger pool or slab, or fewer tokens a block"
            )
        return slot_bytes

    def allocate(self, slot_bytes: int, n: int) -> Pages:
        """Up to n free slots of a class, now PENDING, ascending and with consecutive addresses where there are such.

        Fewer (down to none) come back when the class has no more and no slab can be had: neither an unassigned one
        nor an entirely free one of another class. Each must come back by `free`, at once or after `ready`.
        """
        slot_pages = self._slot_pages(slot_bytes)
        size_class = self._classes.get(slot_pages)
        have = size_class.top if size_class is not None else 0
        if n > have:
            size_class = self._grow(slot_pages, n - have)
        if size_class is None or n <= 0:
            return np.empty(0, np.uint32)
        top = size_class.top
        size_class.top = max(0, top - n)
        pages = np.sort(size_class.stack[size_class.top : top])
        self._state[pages] = SlotState.PENDING
        np.add.at(self._slab_used, pages // self._slab_pages, 1)
        size_class.counts[SlotState.FREE] -= len(pages)
        size_class.counts[SlotState.PENDING] += len(pages)
        return pages

    def restore(self, slot_bytes: int, pages: ArrayLike, state: SlotState) -> None:
        """Slots of a class that another owner of this memory had handed out: FREE → `state`, before any `allocate`.

        Unassigned slabs are given to the class as needed. ValueError, with nothing changed, for a page that is no slot
        of the class, that lies in a slab of another class or beyond those online, or that is in use or named twice.
        """
        slot_pages = self._slot_pages(slot_bytes)
        named = self._named(pages)
        if not len(named):
            return
        slabs, offsets = np.divmod(named, self._slab_pages)
        whole = (offsets % slot_pages == 0) & (offsets + slot_pages <= self._slab_pages) & (slabs < self._online)
        sizes = self._slab_slot_pages[slabs]
        whole &= (sizes == 0) | (sizes == slot_pages)
        whole &= (sizes == 0) | (self._state[named] == SlotState.FREE)
        if not whole.all():
            raise ValueError(f"page {named[~whole][0]} is no free slot of {slot_bytes} bytes")
        if len(np.unique(named)) != len(named):
            raise ValueError("a page is named twice")
        fresh = np.unique(slabs[sizes == 0])
        self._unassigned = np.setdiff1d(self._unassigned, fresh).tolist()  # sorted, and so a heap
        size_class = self._assign(slot_pages, fresh)
        self._unlist(size_class, self._position[named])
        self._state[named] = state
        np.add.at(self._slab_used, slabs, 1)
        size_class.counts[SlotState.FREE] -= len(named)
        size_class.counts[state] += len(named)

    def ready(self, pages: ArrayLike) -> None:
        """PENDING → READY: the bytes are whole."""
        self._change(pages, SlotState.PENDING, SlotState.READY)

    def quarantine(self, pages: ArrayLike) -> None:
        """PENDING → QUARANTINED: a late writer may still write there; only `free` ends it."""
        self._change(pages, SlotState.PENDING, SlotState.QUARANTINED)

    def free(self, pages: ArrayLike) -> None:
        """PENDING, READY or QUARANTINED → FREE. The caller bumps the generations before the next `allocate`."""
        named = self._named(pages)
        if not len(named):
            return
        states = self._state[named]
        if states.min() <= SlotState.FREE:
            worst = named[states <= SlotState.FREE][0]
            what = "is free already" if self._state[worst] == SlotState.FREE else "is not a slot"
            raise ValueError(f"page {worst} {what}")
        self._distinct(named)
        self._state[named] = SlotState.FREE
        slabs = named // self._slab_pages
        np.subtract.at(self._slab_used, slabs, 1)
        for size_class, mine in self._by_class(slabs):
            counts = size_class.counts
            counts -= np.bincount(states[mine], minlength=len(counts))
            counts[SlotState.FREE] += len(states[mine])
            freed = named[mine]
            if self._reserved_count:
                freed = freed[~self._reserved[slabs[mine]]]
            self._push(size_class, freed)

    def states(self, pages: ArrayLike) -> NDArray[np.uint8]:
        """The SlotState of each page, 0 where no slot begins."""
        states: NDArray[np.uint8] = self._state[self._named(pages)]
        return states

    def free_slots(self, slot_bytes: int) -> int:
        """How many slots `allocate` could give now: the class's own, and what slabs that can be had would give."""
        slot_pages = self._slot_pages(slot_bytes)
        size_class = self._classes.get(slot_pages)
        have = size_class.top if size_class is not None else 0
        slabs = len(self._unassigned) + np.count_nonzero(self._empty(slot_pages))
        return have + int(slabs) * (self._slab_pages // slot_pages)

    def counts(self) -> dict[int, ClassCounts]:
        """Slot size in bytes → how many slots in each state. Free slots of a reserved slab count as free."""
        return {
            slot_bytes: ClassCounts(int(counts.sum()), *(int(counts[state]) for state in SlotState))
            for slot_bytes in self.classes()
            for counts in (self._classes[slot_bytes >> PAGE_SHIFT].counts,)
        }

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        return sum((c.total - c.free) * slot_bytes for slot_bytes, c in self.counts().items())

    @property
    def free_bytes(self) -> int:
        """Online bytes that no slot in use covers and that some class could have: free slots and unassigned slabs."""
        held = sum(c.free * slot_bytes for slot_bytes, c in self.counts().items())
        return held + len(self._unassigned) * self.slab_bytes

    def check(self) -> list[str]:
        """Prove the counts from the slots themselves; each violation is a sentence. Costs O(pages)."""
        wrong: list[str] = []
        slots = 0
        listed = np.zeros(self.pages, np.bool_)
        for slot_pages, size_class in self._classes.items():
            slabs = self.slabs_of(slot_pages << PAGE_SHIFT)
            pages = np.concatenate([self.pages_in_slab(int(slab)) for slab in slabs]) if len(slabs) else _NONE
            slots += len(pages)
            name = f"class {slot_pages << PAGE_SHIFT}"
            found = np.bincount(self._state[pages], minlength=len(size_class.counts))
            if found[0]:
                wrong.append(f"{name}: {found[0]} slots have no state")
            if (found != size_class.counts).any():
                wrong.append(f"{name}: counts {size_class.counts.tolist()} but the slots say {found.tolist()}")
            used = np.bincount(self._slab_index(pages[self._state[pages] != SlotState.FREE]), minlength=self.slabs)
            if (used[slabs] != self._slab_used[slabs]).any():
                wrong.append(f"{name}: the slabs' counts of used slots are wrong")
            stack = size_class.stack[: size_class.top]
            if (self._position[stack] != np.arange(size_class.top)).any():
                wrong.append(f"{name}: a free slot is listed twice or its position is wrong")
            if listed[stack].any():
                wrong.append(f"{name}: a free slot is listed in two classes")
            listed[stack] = True
            may = pages[(self._state[pages] == SlotState.FREE) & ~self._reserved[self._slab_index(pages)]]
            if len(may) != size_class.top or not listed[may].all():
                wrong.append(f"{name}: {size_class.top} slots listed as free, {len(may)} are")
        if slots != np.count_nonzero(self._state):
            wrong.append(f"{np.count_nonzero(self._state)} pages have a state, {slots} are slots")
        idle = np.flatnonzero(self._slab_slot_pages[: self._online] == 0).tolist()
        if sorted(self._unassigned) != idle:
            wrong.append(f"unassigned slabs {sorted(self._unassigned)} but {idle} have no class")
        if self._slab_slot_pages[self._online :].any():
            wrong.append("a slab that is not online has a class")
        if self._reserved_count != np.count_nonzero(self._reserved) or self._reserved[self._slab_slot_pages == 0].any():
            wrong.append("the count of reserved slabs is wrong, or one of them has no class")
        return wrong

    # --- inside ------------------------------------------------------------------------------------------------

    def _slab_index(self, pages: Pages) -> NDArray[np.int64]:
        return pages.astype(np.int64) // self._slab_pages

    def _slot_pages(self, slot_bytes: int) -> int:
        if slot_bytes <= 0 or slot_bytes % PAGE or slot_bytes > self.slab_bytes:
            raise ValueError(f"{slot_bytes} is not a slot size of slabs of {self.slab_bytes} bytes")
        return slot_bytes >> PAGE_SHIFT

    def _named(self, pages: ArrayLike) -> NDArray[np.int64]:
        named = np.asarray(pages, np.int64)
        if len(named) and not 0 <= int(named.min()) <= int(named.max()) < self.pages:
            raise ValueError(f"a page outside the pool of {self.pages}")
        return named

    def _distinct(self, pages: NDArray[np.int64]) -> None:
        # Only for pages that are not free: their positions are scratch, and a page written twice keeps one number.
        numbers = np.arange(len(pages), dtype=np.uint32)
        self._position[pages] = numbers
        if (self._position[pages] != numbers).any():
            raise ValueError("a page is named twice")

    def _by_class(self, slabs: NDArray[np.int64]) -> Sequence[tuple[_Class, slice | NDArray[np.intp]]]:
        sizes = self._slab_slot_pages[slabs]
        first = int(sizes[0])
        if (sizes == first).all():
            return [(self._classes[first], slice(None))]
        return [(self._classes[int(size)], np.flatnonzero(sizes == size)) for size in np.unique(sizes)]

    def _change(self, pages: ArrayLike, old: SlotState, new: SlotState) -> None:
        named = self._named(pages)
        if not len(named):
            return
        states = self._state[named]
        if (states != old).any():
            worst = named[states != old][0]
            found = self._state[worst]
            what = SlotState(int(found)).name if found else "not a slot"
            raise ValueError(f"page {worst} is {what}, not {old.name}")
        self._distinct(named)
        self._state[named] = new
        for size_class, mine in self._by_class(named // self._slab_pages):
            moved = len(named[mine])
            size_class.counts[old] -= moved
            size_class.counts[new] += moved

    def _push(self, size_class: _Class, pages: NDArray[np.int64] | Pages) -> None:
        top = size_class.top + len(pages)
        size_class.stack[size_class.top : top] = pages
        self._position[pages] = np.arange(size_class.top, top, dtype=np.uint32)
        size_class.top = top

    def _withdraw(self, slab: int) -> None:
        """Take a slab's free slots out of the stack; the stack's end fills the holes."""
        pages = self.pages_in_slab(slab)
        free = self._position[pages[self._state[pages] == SlotState.FREE]]
        self._unlist(self._classes[int(self._slab_slot_pages[slab])], free)

    def _unlist(self, size_class: _Class, holes: Pages) -> None:
        """Take what lies at these places out of a class's stack, in O(their number)."""
        top = size_class.top - len(holes)
        stays = np.ones(len(holes), np.bool_)
        stays[holes[holes >= top] - top] = False
        movers = size_class.stack[top : size_class.top][stays]
        holes = holes[holes < top]
        size_class.stack[holes] = movers
        self._position[movers] = holes
        size_class.top = top

    def _empty(self, slot_pages: int) -> NDArray[np.bool_]:
        """Which slabs of other classes hold nothing and may be taken."""
        sizes = self._slab_slot_pages
        empty: NDArray[np.bool_] = (self._slab_used == 0) & (sizes != 0) & (sizes != slot_pages) & ~self._reserved
        return empty

    def _grow(self, slot_pages: int, slots: int) -> _Class | None:
        """Give a class slabs for so many more slots, as far as there are any; None if it has no slab at all."""
        a_slab = self._slab_pages // slot_pages
        wanted = -(-slots // a_slab)
        if wanted > len(self._unassigned):
            for slab in np.flatnonzero(self._empty(slot_pages))[: wanted - len(self._unassigned)]:
                self.release_slab(int(slab))
        wanted = min(wanted, len(self._unassigned))
        if not wanted:
            return self._classes.get(slot_pages)
        return self._assign(slot_pages, np.array([heapq.heappop(self._unassigned) for _ in range(wanted)], np.int64))

    def _assign(self, slot_pages: int, taken: NDArray[np.int64]) -> _Class:
        """Give a class these slabs, ascending, which were taken from the unassigned ones."""
        a_slab = self._slab_pages // slot_pages
        size_class = self._classes.get(slot_pages)
        if size_class is None:
            size_class = self._classes[slot_pages] = _Class(slot_pages, self.slabs * a_slab)
        self._slab_slot_pages[taken] = slot_pages
        starts = np.arange(a_slab, dtype=np.int64) * slot_pages
        pages = (taken[:, None] * self._slab_pages + starts).reshape(-1)
        self._state[pages] = SlotState.FREE
        size_class.counts[SlotState.FREE] += len(pages)
        # Lowest address on top, so that they are handed out ascending.
        self._push(size_class, pages[::-1])
        return size_class


_NONE: Final[Pages] = np.empty(0, np.uint32)
