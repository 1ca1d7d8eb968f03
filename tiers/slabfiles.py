"""A drive's slab files, one a size class, and the numbers by which others name their slots: the books, without IO."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from .directory import slab_name
from .extents import Extents
from .slabfile import CALL_BYTES, CALL_SLOTS, SlabFile, runs

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

# A file, places in it in ascending order, and which job each is for.
Placed = tuple[SlabFile, U32, npt.NDArray[np.intp]]
# Ranges (first, count) of a file's slots.
Ranges = tuple[SlabFile, list[tuple[int, int]]]


class SlabFiles:
    """All slab files of one drive, in the order in which they were made."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them, and their slots' numbers."""
        self._files: list[SlabFile] = []
        self._number: dict[int, int] = {}  # of each size class's file
        self._extents = Extents()

    def __iter__(self) -> Iterator[SlabFile]:
        return iter(self._files)

    def of_size(self, slot_bytes: int) -> SlabFile:
        """The file with slots of this size, which may have none yet and not be on disk."""
        number = self._number.setdefault(slot_bytes, len(self._files))
        if number == len(self._files):
            self._files.append(SlabFile(slab_name(slot_bytes), slot_bytes))
        return self._files[number]

    def encode(self, file: SlabFile, indices: U32) -> U32:
        """Slot numbers of places in a file."""
        return self._extents.encode(self._number[file.slot_bytes], indices)

    def decode(self, slots: U32 | Sequence[int]) -> list[Placed]:
        """Where slots lie: by file, in the order of the file. ValueError for a slot that never was."""
        owners, places = self._extents.decode(np.asarray(slots, dtype=np.uint32))
        order = np.lexsort((places, owners))
        split = np.flatnonzero(np.diff(owners[order])) + 1
        decoded = []
        for positions in np.split(order, split) if len(order) else []:
            file, indices = self._files[int(owners[positions[0]])], places[positions]
            if int(indices[-1]) >= file.end:
                raise ValueError("slot not of this tier")
            decoded.append((file, indices, positions))
        return decoded

    def sizes_of(self, slots: U32) -> U64:
        """Bytes of each slot, its header page included."""
        sizes = np.array([file.slot_bytes for file in self._files], dtype=np.uint64)
        found: U64 = sizes[self._extents.owners(slots)] if len(sizes) else sizes[:0]
        return found

    @property
    def used(self) -> int:
        """Bytes of all slots handed out."""
        return sum(file.used * file.slot_bytes for file in self._files)

    @property
    def recorded(self) -> int:
        """Slots that hold a block, or will once the sync under way has ended."""
        return sum(file.recorded for file in self._files)

    @property
    def set_aside(self) -> int:
        """Bytes that have space on the drive, used or not."""
        return sum(file.backed * file.slot_bytes for file in self._files)

    def strip(self, wanted: int) -> tuple[list[Ranges], int]:
        """Take the space from free slots, `wanted` bytes or as far as they reach: what to punch, and its bytes."""
        punches: list[Ranges] = []
        gained = 0
        for file in self._files:
            if gained < wanted and file.free:
                taken = file.strip(-((gained - wanted) // file.slot_bytes))
                gained += sum(count for _, count in taken) * file.slot_bytes
                punches.append((file, taken))
        return punches, gained

    def check(self) -> list[str]:
        """Violations of the bookkeeping, in words; empty when all is well."""
        return [*chain.from_iterable(file.check() for file in self._files), *self._extents.check()]


def for_calls(placed: Placed) -> list[Placed]:
    """The same in parts of adjacent places, one for each call."""
    file, indices, positions = placed
    most = min(CALL_SLOTS, max(1, CALL_BYTES // file.slot_bytes))
    parts: list[Placed] = []
    begin = 0
    for _, count in runs(indices):
        for first in range(begin, begin + count, most):
            part = slice(first, min(first + most, begin + count))
            parts.append((file, indices[part], positions[part]))
        begin += count
    return parts
