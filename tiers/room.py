"""How much a drive may hold, and the space on it that is set aside for slots before they are written."""

import asyncio
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from .opened import Opened
from .slabfile import SlabFile, runs, slot_size
from .slabfiles import SlabFiles
from .workers import Workers, outlast

# Space is set aside this far ahead; one fallocate of it takes milliseconds, and a file in few extents reads faster.
_GROW_BYTES: Final = 256 << 20


class Room:
    """A drive's limit and what of it is taken; the loop's thread alone, but for the start."""

    def __init__(self, files: SlabFiles, capacity: int, reserve: int) -> None:
        """Bytes on disk for slots, and bytes of the file system that stay free whoever takes them."""
        self._files = files
        self.capacity = capacity
        self.reserve = reserve
        self.limit = capacity
        """Bytes that slots may take now: the capacity, or less where others have filled the file system so far that its
        reserve begins. More may be used until blocks have been freed."""
        self._reshaping = asyncio.Lock()

    def blocks(self, length: int) -> int:
        """How many more blocks of `length` bytes the limit lets in."""
        return max(0, self.limit - self._files.used) // slot_size(length)

    def others_leave(self, available: int) -> None:
        """So much of the file system may be taken beside what is set aside."""
        self.limit = max(0, min(self.capacity, self._files.set_aside + available - self.reserve))

    async def set_aside(
        self, opened: Opened, workers: Workers, file: SlabFile, indices: npt.NDArray[np.uint32]
    ) -> str | None:
        """See to it that slots have space in the file; the reason if they cannot have it."""
        if not len(file.unbacked(indices)):
            return None
        async with self._reshaping:
            missing = file.unbacked(indices)
            if not len(missing):
                return None
            holes = missing[missing < file.grown]
            most = max(int(missing[-1]) + 1, file.grown)
            needs = runs(holes) + ([(file.grown, most - file.grown)] if most > file.grown else [])
            required = sum(count for _, count in needs) * file.slot_bytes
            spare = self.limit - self._files.set_aside - required
            punches, gained = self._files.strip(-spare)
            spare += gained
            ahead = max(0, min(spare, _GROW_BYTES) // file.slot_bytes) if most > file.grown else 0
            call = partial(opened.reshape, file, punches, needs, (most, ahead))
            task = asyncio.ensure_future(workers.run([call]))
            try:
                await outlast([task])
            finally:
                failure = None
                if not task.cancelled():
                    (failure, got) = task.result()[0]
                    for first, count in got:
                        file.back(first, count)
            return failure

    async def give_back(self, opened: Opened, watcher: Workers) -> None:
        """Give space back that is above the limit and holds nothing."""
        if self._reshaping.locked() or self._files.set_aside <= self.limit:
            return
        async with self._reshaping:
            punches, gained = self._files.strip(self._files.set_aside - self.limit)
            if gained:
                await asyncio.wait([watcher.begin(partial(opened.punch, punches))])
