"""The daemon's pools as a connector's copies see them: bytes of host memory, or tensors of a device's."""

import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcascade.daemon.attachment import MappedPool
from kvcascade.daemon.protocol import PAGE
from kvcascade.tiers.memory import Memory, import_device_memory, register_host, unregister_host

from .layout import PoolSlots, Slots

log = logging.getLogger(__name__)


class PoolViews:
    """Slots of a session's pools, imported and pinned once a mapping. Thread-safe; used inside `Session.copying`."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the engine's KV lies: host pools are pinned for it if it is a GPU."""
        self._device = device
        # All of this changes under _lock.
        self._lock = threading.Lock()
        self._imports: dict[int, tuple[MappedPool, Memory]] = {}
        self._pinned: dict[int, MappedPool] = {}  # what was pinned, or found not to be possible to pin

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

    def close(self) -> None:
        """Lets go of imported memory; no slot of it may be in use."""
        with self._lock:
            for _, memory in self._imports.values():
                memory.close()
            self._imports.clear()

    def _memory(self, pool: MappedPool) -> Memory | None:
        """This process's import of a pool in a device's memory; None for one in host memory."""
        with self._lock:
            if pool.fd is None:
                self._pin(pool)
                return None
            known, memory = self._imports.get(pool.pool, (None, None))
            if memory is None or known is not pool:
                if memory is not None:
                    memory.close()
                memory = import_device_memory(pool.device, pool.fd, pool.size)
                self._imports[pool.pool] = (pool, memory)
            return memory

    def _pin(self, pool: MappedPool) -> None:
        """Unpinned copies are true too, only slower."""
        if self._device.type != "cuda" or self._pinned.get(pool.pool) is pool:
            return
        self._pinned[pool.pool] = pool
        device = f"cuda:{self._device.index or 0}"
        reason = register_host(pool.array(), device)
        if reason is None:
            pool.before_close = partial(unregister_host, pool.array(), device)
        else:
            log.warning("the %s pool is not pinned for %s reason=%s", pool.tier, device, reason)
