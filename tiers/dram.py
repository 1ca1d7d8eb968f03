"""The DRAM tier: the node's pool in a sealed memfd that engines map and copy to and from themselves.

A size that cannot be had is refused here, before any page is touched, so that neither the machine nor the container is
driven out of memory later. Slots are page-aligned, so disk and network work straight on them.
"""

from typing import cast

from .memory import HostBytes, SharedMemory, require_memory
from .pool import SLAB_BYTES, SlabPool
from .slots import PooledMemory


class DramTier(PooledMemory):
    """The DRAM pool. ConfigError naming `setting` when memory does not suffice.

    `huge_pages` are taken from the kernel's reserve if it has enough of them, else `huge_reason` says why not; `lock`
    keeps the pool from being swapped out as far as RLIMIT_MEMLOCK lets it (`pinned`, `unpinned_reason`).
    """

    def __init__(
        self,
        size: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        huge_pages: bool = False,
        lock: bool = True,
        setting: str = "dram.size",
        memory: SharedMemory | None = None,
        online: int = 0,
    ) -> None:
        """`memory`: an earlier owner's pool of this size, contents kept, whose first `online` slabs are faulted in."""
        pool = SlabPool(size, slab_bytes=slab_bytes)
        taken_over = memory is not None
        if memory is None:
            memory = SharedMemory("kvcascade-dram", pool.capacity, huge_pages=huge_pages)
        self.huge_pages = memory.huge
        self.huge_reason = memory.huge_reason
        try:
            if not memory.huge and not taken_over:  # The kernel has set reserved pages aside already.
                require_memory(pool.capacity, setting)
            pool.online(online)
            super().__init__("dram", pool, memory, lock=lock)
        except BaseException:
            memory.close()
            raise

    def view(self, page: int, nbytes: int) -> HostBytes:
        """The first `nbytes` of the slot at a page, shape (nbytes,). Any thread; valid until `close`."""
        return cast(HostBytes, super().view(page, nbytes))

    def status(self) -> dict[str, object]:
        return super().status() | {"huge_pages": {"used": self.huge_pages, "reason": self.huge_reason or ""}}
