"""Numbers for slots that have several owners: a drive's slab files, and the disk tier's drives.

A number is an extent, its upper half, and a place in it. Extents are dealt to owners as these grow, so that numbers
stay what they are and nothing need be known of how far anybody will grow.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_BITS: Final = 16
_SLOTS: Final = 1 << _BITS
EXTENTS: Final = _SLOTS - 1  # the last is left out, so that no slot is NOWHERE
NOWHERE: Final = 0xFFFFFFFF  # no slot has this number


class Extents:
    """Which slot of which owner each number means; owners are numbered as well."""

    def __init__(self) -> None:
        self._of: dict[int, U32] = {}  # each owner's extents, in the order of its slots
        self._owner = np.zeros(EXTENTS, dtype=np.uint32)
        self._base = np.zeros(EXTENTS, dtype=np.uint32)  # the owner's own number of an extent's first slot
        self._dealt = 0

    def encode(self, owner: int, slots: U32) -> U32:
        """Numbers of an owner's slots, dealt with the first use."""
        if not len(slots):
            return np.empty(0, dtype=np.uint32)
        extents = self._of.get(owner, np.empty(0, dtype=np.uint32))
        missing = (int(slots.max()) >> _BITS) + 1 - len(extents)
        if missing > 0:
            assert self._dealt + missing <= EXTENTS, "out of slot numbers: over 4 * 10^9 slots"
            fresh = np.arange(self._dealt, self._dealt + missing, dtype=np.uint32)
            self._owner[fresh] = owner
            self._base[fresh] = np.arange(len(extents), len(extents) + missing, dtype=np.uint32) << _BITS
            self._dealt += missing
            self._of[owner] = extents = np.concatenate([extents, fresh])
        numbers: U32 = extents[slots >> np.uint32(_BITS)] << np.uint32(_BITS)
        numbers |= slots & np.uint32(_SLOTS - 1)
        return numbers

    def decode(self, numbers: U32) -> tuple[U32, U32]:
        """The owner of each slot, and its own number for it. ValueError for a number that was never dealt."""
        extents = numbers >> np.uint32(_BITS)
        if len(extents) and int(extents.max()) >= self._dealt:
            raise ValueError("slot not of this tier")
        places: U32 = self._base[extents] + (numbers & np.uint32(_SLOTS - 1))
        return self._owner[extents], places

    def owners(self, numbers: U32) -> U32:
        """The owner of each slot, which must have been dealt."""
        owners: U32 = self._owner[numbers >> np.uint32(_BITS)]
        return owners

    def check(self) -> list[str]:
        """Violations of the invariants, in words; empty when all is well."""
        whole = sum(map(len, self._of.values())) == self._dealt
        return [] if whole else ["slot numbers dealt out do not add up"]
