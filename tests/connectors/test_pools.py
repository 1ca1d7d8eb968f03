"""What copies see of the daemon's pools while sessions come and go. A memfd plays a device's memory."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engines.scripted import eventually

from kvcascade.connectors import pools
from kvcascade.connectors.layout import PoolSlots
from kvcascade.connectors.pools import PoolViews
from kvcascade.daemon.attachment import MappedPool
from kvcascade.daemon.protocol import PAGE
from kvcascade.tiers.memory import Generations, SharedMemory, import_device_memory

PAGES = 8
WHICH, THIRD = np.array([1], np.uint8), np.array([3], np.uint32)


class Daemon:
    """A pool and its generations, as an attach hands them out: a mapping of its own each time."""

    def __init__(self) -> None:
        self.memory = SharedMemory("test-pool", PAGES * PAGE)
        self.generations = Generations(PAGES)
        self.memory.array()[:] = np.arange(PAGES * PAGE, dtype=np.uint32).astype(np.uint8)

    def attach(self, device: str) -> MappedPool:
        return MappedPool(1, "hbm", device, PAGES * PAGE, os.dup(self.memory.fd), self.generations.export())


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    made.generations.close()
    made.memory.close()


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was imported and closed, in order."""
    seen: list[str] = []

    def imported(device: str, fd: int, size: int) -> Any:
        memory = import_device_memory("cpu", fd, size)
        number = sum(one.startswith("open") for one in seen)
        seen.append(f"open {number}")
        close = memory.close

        def closed() -> None:
            seen.append(f"close {number}")
            close()

        memory.close = closed  # type: ignore[method-assign]
        return memory

    monkeypatch.setattr(pools, "import_device_memory", imported)
    return seen


def third_slot(views: PoolViews, pool: MappedPool) -> torch.Tensor:
    slots = views.slots({1: pool}, WHICH, THIRD, PAGE)
    assert isinstance(slots, PoolSlots) and isinstance(slots.pool, torch.Tensor)
    return slots.pool[int(slots.pages[0]) * PAGE :][:PAGE]


def test_a_session_that_goes_on_beside_a_new_one_keeps_its_memory(daemon: Daemon, imports: list[str]) -> None:
    """The weights have changed: copies of the old session's still run when the new one's begin."""
    views = PoolViews(torch.device("cpu"))
    old, new = daemon.attach("cuda:0"), daemon.attach("cuda:0")
    for pool in (old, new, old, new):
        assert third_slot(views, pool).numpy().tobytes() == daemon.memory.array()[3 * PAGE : 4 * PAGE].tobytes()
    assert imports == ["open 0", "open 1"]
    old.close()
    assert imports[2:] == ["close 0"]
    third_slot(views, new)
    new.close()
    views.close()
    assert imports[2:] == ["close 0", "close 1"]


def test_views_let_go_of_what_is_still_mapped(daemon: Daemon, imports: list[str]) -> None:
    views, pool = PoolViews(torch.device("cpu")), daemon.attach("cuda:0")
    third_slot(views, pool)
    views.close()
    assert imports == ["open 0", "close 0"]
    pool.close()
    assert imports == ["open 0", "close 0"]


class Cuda:
    """Notes what is pinned, and waits on the way where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.refuses_from = 99
        self.open = threading.Event()
        self.open.set()
        monkeypatch.setattr(pools, "register_host", self.register)
        monkeypatch.setattr(pools, "unregister_host", self.unregister)
        monkeypatch.setattr(pools, "REGISTER_CHUNK", PAGES // 4 * PAGE)

    def register(self, array: Any, device: str) -> str | None:
        assert len(array) == PAGES // 4 * PAGE
        if len(self.calls) >= self.refuses_from:
            return "the driver says no"
        self.calls.append(f"pin {device}")
        self.open.wait(20)
        return None

    def unregister(self, array: Any, device: str) -> None:
        self.calls.append(f"unpin {device}")


def test_a_host_pool_is_pinned_once_a_mapping_and_let_go_of_before_it_is_unmapped(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    views = PoolViews(torch.device("cuda", 1))
    old, new = daemon.attach("cpu"), daemon.attach("cpu")
    views.prepare([old])
    for pool in (old, new, old, new):
        views.slots({1: pool}, WHICH, THIRD, PAGE)
    eventually(lambda: cuda.calls == ["pin cuda:1"] * 8)
    old.close()
    new.close()
    assert cuda.calls[8:] == ["unpin cuda:1"] * 8


def test_nobody_waits_for_a_pool_to_be_pinned_and_what_is_closed_is_pinned_no_further(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    cuda.open.clear()
    views, pool = PoolViews(torch.device("cuda")), daemon.attach("cpu")
    slots = views.slots({1: pool}, WHICH, THIRD, PAGE)
    assert isinstance(slots, PoolSlots) and len(slots) == 1
    eventually(lambda: cuda.calls)
    closing = threading.Thread(target=pool.close)
    closing.start()
    eventually(lambda: pool.before_close is None)
    assert closing.is_alive()  # one part is being pinned
    cuda.open.set()
    closing.join()
    pins = cuda.calls.count("pin cuda:0")
    assert cuda.calls == ["pin cuda:0"] * pins + ["unpin cuda:0"] * pins and pins


def test_a_pool_that_can_be_pinned_in_part_is_used_as_it_is(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    cuda.refuses_from = 3
    views, pool = PoolViews(torch.device("cuda")), daemon.attach("cpu")
    views.prepare([pool])
    assert len(views.slots({1: pool}, WHICH, THIRD, PAGE)) == 1
    eventually(lambda: len(cuda.calls) == 3)
    pool.close()
    assert cuda.calls == ["pin cuda:0"] * 3 + ["unpin cuda:0"] * 3


def test_a_forks_child_leaves_the_gpu_alone(daemon: Daemon, imports: list[str]) -> None:
    views, pool = PoolViews(torch.device("cpu")), daemon.attach("cuda:0")
    third_slot(views, pool)
    child = os.fork()
    if not child:
        pool.close()
        os._exit(len(imports) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
    assert imports == ["open 0", "close 0"]
