"""The daemon's pools as a connector's copies see them: bytes of host memory, or tensors of a device's."""

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcascade.daemon.attachment import MappedPool
from kvcascade.daemon.protocol import PAGE
from kvcascade.tiers.memory import (
    REGISTER_CHUNK,
    HostBytes,
    Memory,
    human_size,
    import_device_memory,
    register_host,
    unregister_host,
)

from .layout import PoolSlots, Slots

log = logging.getLogger(__name__)


class _Pinning:
    """A host pool's registration with CUDA: on a thread of its own, since all of a pool may take many seconds.

    Copies of what is not pinned are true too, only slower, and none crosses two chunks (`layout.py`).
    """

    def __init__(self, pool: MappedPool, device: str) -> None:
        self._pool, self._device = f"{pool.tier} pool", device
        self._array = pool.array()
        self._stopped = threading.Event()
        self._pinned: list[HostBytes] = []  # the thread's, until it has ended
        self._thread = threading.Thread(target=self._run, name="kvcascade-pin", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Nothing is registered on return; waits for one chunk at most. No copy may run."""
        self._stopped.set()
        self._thread.join()
        while self._pinned:
            unregister_host(self._pinned.pop(), self._device)

    def _run(self) -> None:
        for start in range(0, self._array.nbytes, REGISTER_CHUNK):
            if self._stopped.is_set():
                return
            part = self._array[start : start + REGISTER_CHUNK]
            reason = register_host(part, self._device)
            if reason is not None:
                # What is pinned stays so: copies may be using it.
                size = human_size(self._array.nbytes)
                log.warning(
                    "of the %s's %s only %s are pinned for %s reason=%s",
                    self._pool, size, human_size(start), self._device, reason,
                )  # fmt: skip
                return
            self._pinned.append(part)


class PoolViews:
    """Slots of sessions' pools, imported or pinned once a mapping and until it is closed.

    Thread-safe; used inside `Session.copying`, of more than one session too: while weights change, the copies of the
    old one go on beside those of the new.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is where the engine's KV lies: host pools are pinned for it if it is a GPU."""
        self._device = device
        # Under _lock: imported memory; None for host memory, pinned where that is possible.
        self._lock = threading.Lock()
        self._known: dict[MappedPool, Memory | None] = {}

    def slots(
        self, pools: Mapping[int, MappedPool], which: NDArray[np.uint8], pages: NDArray[np.uint32], nbytes: int
    ) -> Slots:
        """The slots at `pages`, of `nbytes` each, in pools `which`. KeyError for a pool that there is not."""
        identities = set(which.tolist())
        memories = {identity: self._memory(pools[identity]) for identity in identities}
        if len(identities) == 1:
            (identity,) = identities
            memory = memories[identity]
            whole: Any = pools[identity].array() if memory is None else memory.tensor(0, pools[identity].size)
            return PoolSlots(whole, pages)
        return [
            pools[identity].slot(page, nbytes) if (memory := memories[identity]) is None
            else memory.tensor(page * PAGE, nbytes)
            for identity, page in zip(which.tolist(), pages.tolist(), strict=True)
        ]  # fmt: skip

    def prepare(self, pools: Iterable[MappedPool]) -> None:
        """Begin to pin those in host memory before they are used."""
        for pool in pools:
            if pool.fd is None:
                self._memory(pool)

    def close(self) -> None:
        """Lets go of imported memory; no slot of it may be in use."""
        with self._lock:
            for memory in self._known.values():
                if memory is not None:
                    memory.close()
            self._known.clear()

    def _memory(self, pool: MappedPool) -> Memory | None:
        """This process's import of a pool in a device's memory; None for one in host memory."""
        with self._lock:
            if pool not in self._known:
                memory = None
                if pool.fd is None:
                    self._pin(pool)
                else:
                    memory = self._import(pool, pool.fd)
                self._known[pool] = memory
            return self._known[pool]

    def _import(self, pool: MappedPool, fd: int) -> Memory:
        memory = import_device_memory(pool.device, fd, pool.size)
        pool.before_close = partial(self._forget, pool, os.getpid())
        return memory

    def _pin(self, pool: MappedPool) -> None:
        pinning = None
        if self._device.type == "cuda":
            pinning = _Pinning(pool, f"cuda:{self._device.index or 0}")
        pool.before_close = partial(self._forget, pool, os.getpid(), pinning)

    def _forget(self, pool: MappedPool, owner: int, pinning: _Pinning | None = None) -> None:
        """The mapping goes, and no copy touches it. A fork's child has none of what its parent did with the GPU."""
        if os.getpid() != owner:
            return
        with self._lock:
            memory = self._known.pop(pool, None)
        if memory is not None:
            memory.close()
        if pinning is not None:
            pinning.end()
