"""A pool's memory and its bookkeeping together: what the DRAM and the HBM tier have in common.

Slabs come online while they are faulted in by a thread of their own, and each is usable at once. Bookkeeping belongs to
the loop's thread; data threads use `view` alone. Slots are given back through `free`, never behind its back through the
pool, because that is where generations are bumped: a slot is not handed on before every reader can see that it was.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numpy.typing import ArrayLike

from kvcascade.config.errors import TierUnavailable

from .memory import DeviceMemory, Generations, Place, SharedMemory, human_size
from .pool import PAGE_SHIFT, SlabPool


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a pool may be used by now."""

    online_bytes: int
    capacity: int

    def __str__(self) -> str:
        return f"{human_size(self.online_bytes)} of {human_size(self.capacity)} online"


class PooledMemory:
    """Memory cut in slots, with generations. `start` it, `wait_online` if all of it is needed, `close` it.

    `state` is "off" before `start` and after `close`, "onlining" while slabs are faulted in, "ok" then, and "sick" when
    memory ran out on the way: the slabs that are online serve on, and `reason` says what happened.
    """

    def __init__(self, name: str, pool: SlabPool, memory: DeviceMemory, *, lock: bool) -> None:
        self.name: Final = name
        self.pool: Final = pool
        self.memory: Final = memory
        self.generations: Final = Generations(pool.pages)
        self.state = "off"
        self.reason: str | None = None
        self.freed: Callable[[ArrayLike], None] = lambda pages: None  # called with pages that may be handed on
        # By the faulting thread alone while it runs; the others read whole values.
        self._locked_bytes = 0
        self._lock_reason: str | None = None if lock else "not asked for"
        # By the loop's thread alone.
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._settled = asyncio.Event()

    def start(self, loop: asyncio.AbstractEventLoop, on_online: Callable[[Progress], None] | None = None) -> None:
        """Bring the slabs online, in the background where that takes time; `on_online` hears of each, on the loop."""
        if self.state != "off" or self._stop.is_set():
            raise TierUnavailable(f"{self.name} was started before")
        self.state = "onlining"
        if isinstance(self.memory, SharedMemory):
            self._thread = threading.Thread(
                target=self._fault_in,
                args=(self.memory, loop, on_online),
                name=f"kvcascade-{self.name}-online",
                daemon=True,
            )
            self._thread.start()
        else:
            self.generations.populate(0, self.pool.pages)
            self._lock_reason = "device memory"
            self._came_online(self.pool.slabs, on_online)

    async def wait_online(self) -> None:
        """Return when all slabs are online; TierUnavailable with the reason when they will not be."""
        await self._settled.wait()
        if self.state != "ok":
            raise TierUnavailable(f"{self.name}: {self.reason or 'closed'}")

    def void(self) -> None:
        """Tell every reader that its slots may be handed on: another process is about to own this memory."""
        self.generations.void()

    def progress(self) -> Progress:
        return Progress(self.pool.online_bytes, self.pool.capacity)

    @property
    def pinned(self) -> bool:
        """Whether all that is online can never be swapped out."""
        return not self.unpinned_reason

    @property
    def unpinned_reason(self) -> str | None:
        """Why memory is not, or not all, locked; None when it is."""
        if self._lock_reason and self._locked_bytes:
            return f"{human_size(self._locked_bytes)} locked, then {self._lock_reason}"
        return self._lock_reason

    def view(self, page: int, nbytes: int) -> Place:
        """The first `nbytes` of the slot at a page, for `copy` or IO. Any thread; valid until `close`."""
        return self.memory.view(page << PAGE_SHIFT, nbytes)

    def free(self, pages: ArrayLike) -> None:
        """Take slots back from any state but FREE and void what readers know of them; see `SlabPool.free`."""
        self.pool.free(pages)
        self.generations.bump(pages)
        self.freed(pages)

    def export(self) -> tuple[int, int]:
        """New descriptors of the memory and of its generations (for reading alone); the caller closes both."""
        memory = self.memory.export()
        return memory, self.generations.export()

    def status(self) -> dict[str, object]:
        """The tier's part of `kvcascade status`; sizes in bytes."""
        counts = self.pool.counts()
        return {
            "name": self.name,
            "device": self.memory.device,
            "state": self.state,
            "reason": self.reason or "",
            "capacity": self.pool.capacity,
            "online": self.pool.online_bytes,
            "used": self.pool.used_bytes,
            "free": self.pool.free_bytes,
            "quarantined": sum(c.quarantined * slot_bytes for slot_bytes, c in counts.items()),
            "classes": [{"slot_bytes": slot_bytes, **c._asdict()} for slot_bytes, c in counts.items()],
            "memory": {"pinned": self.pinned, "reason": self.unpinned_reason or ""},
        }

    def check(self) -> list[str]:
        """Violations of the pool's invariants, each a sentence."""
        return [f"{self.name}: {violation}" for violation in self.pool.check()]

    def close(self) -> None:
        """Stop bringing slabs online and give the memory up; engines keep their own mappings. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()  # at most one slab's time, some 30 ms
            self._thread = None
        self.state = "off"
        self._settled.set()
        self.generations.close()
        self.memory.close()

    # --- the faulting thread -----------------------------------------------------------------------------------

    def _fault_in(
        self,
        memory: SharedMemory,
        loop: asyncio.AbstractEventLoop,
        on_online: Callable[[Progress], None] | None,
    ) -> None:
        pool = self.pool
        slab_pages = pool.slab_bytes >> PAGE_SHIFT
        for slab in range(pool.slabs):
            if self._stop.is_set():
                return
            short: str | None = None
            try:
                self.generations.populate(slab * slab_pages, slab_pages)
                memory.populate(slab * pool.slab_bytes, pool.slab_bytes)
            except TierUnavailable as error:
                short = str(error)
            if short is None and self._lock_reason is None:
                self._lock_reason = memory.lock(slab * pool.slab_bytes, pool.slab_bytes)
                self._locked_bytes += 0 if self._lock_reason else pool.slab_bytes
            try:
                if short is not None:
                    loop.call_soon_threadsafe(self._came_short, short)
                    return
                loop.call_soon_threadsafe(self._came_online, slab + 1, on_online)
            except RuntimeError:  # The loop is closed: nobody is left to use a slab.
                return

    def _came_online(self, slabs: int, on_online: Callable[[Progress], None] | None) -> None:
        if self._stop.is_set():
            return
        # What came from an earlier owner is online already.
        self.pool.online(max(slabs, self.pool.online_slabs))
        if slabs == self.pool.slabs:
            self.state = "ok"
            self._settled.set()
        if on_online is not None:
            on_online(self.progress())

    def _came_short(self, reason: str) -> None:
        if not self._stop.is_set():
            self.state, self.reason = "sick", reason
            self._settled.set()
