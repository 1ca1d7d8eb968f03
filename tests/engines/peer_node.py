"""A node that serves blocks to peers, without a daemon: real memory with generations, a pattern in each block.

`serving` runs one on the caller's loop, `PeerNode` in a process of its own that may be stopped and killed.
"""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np

from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.daemon.fleet import NodeInfo
from kvcascade.daemon.granting import Grant
from kvcascade.daemon.peer_server import PeerServer
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.memory import Generations, SharedMemory
from kvcascade.tiers.remote import BlockName, Fetch, Secret

NAMESPACE = bytes(range(32))
PATIENCE_S = 30.0

# Its pipe stays open as long as the process lives; it is no test's leak.
resource_tracker.ensure_running()
BLOCK = 64 << 10


def chain(count: int, name: str = "chain") -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def pattern(block_hash: bytes, size: int) -> bytes:
    """What a block holds: every byte follows from its hash."""
    words = np.random.default_rng(int.from_bytes(block_hash[:8], "big"))
    return words.integers(0, 256, size, np.uint8).tobytes()


def node(name: str, **fields: Any) -> NodeInfo:
    info = NodeInfo(
        name=name,
        boot=os.urandom(16),
        address=None,
        version="1",
        hash_algo="sha256_cbor",
        key_scheme="tagged-0.31",
        none_hash=bytes(32),
    )
    return replace(info, **fields)


def jobs(hashes: Sequence[bytes], size: int = BLOCK) -> list[Fetch]:
    """Into memory that holds something else, so that untouched bytes do not look like a block."""
    return [
        Fetch(BlockName(NAMESPACE, 0, one), memory(bytearray(b"\xa5" * size))) for one in hashes
    ]  # fmt: skip


def memory(data: bytearray) -> memoryview:
    return memoryview(data)


class Pool:
    """Slots over a memfd, with generations; answers what a `PeerServer` asks. On the loop's thread."""

    def __init__(self, hashes: Sequence[bytes] = (), size: int = BLOCK) -> None:
        self.size = size
        self.memory = SharedMemory("kvcascade-test-peer", max(1, len(hashes)) * size)
        self.generations = Generations(max(1, len(hashes)))
        self.pages = {one: page for page, one in enumerate(hashes)}
        for one in hashes:
            self._slot(one)[:] = np.frombuffer(pattern(one, size), np.uint8)
        self.held: set[int] = set()  # grants that are not released
        self.sent: list[bool] = []
        self.asked = 0
        self.granted = asyncio.Event()
        self.coming: set[bytes] = set()  # still being stored
        self.after_grant: list[bytes] = []  # handed on as soon as they have been granted

    def _slot(self, one: bytes) -> Any:
        return self.memory.view(self.pages[one] * self.size, self.size)

    def hand_on(self, one: bytes) -> None:
        """The slot is another block's from now on."""
        self.generations.bump([self.pages[one]])
        self._slot(one)[:] = 0xEE

    def _there(self, hashes: bytes) -> list[bytes]:
        names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        return names[
            : next((n for n, one in enumerate(names) if one not in self.pages or one in self.coming), len(names))
        ]

    async def leading(self, namespace: bytes, group: int, hashes: bytes, *, wait: float) -> int:
        self.asked += 1
        end = asyncio.get_running_loop().time() + wait
        while True:
            count = len(self._there(hashes)) if namespace == NAMESPACE else 0
            left = end - asyncio.get_running_loop().time()
            if count * 32 == len(hashes) or left <= 0:
                return count
            await asyncio.sleep(min(0.005, left))

    async def grant(self, namespace: bytes, group: int, hashes: bytes) -> Grant | None:
        names = self._there(hashes) if namespace == NAMESPACE else []
        if not names:
            return None
        pages = [self.pages[one] for one in names]
        before = self.generations.of(pages).copy()
        grant: Any = Grant(
            names=[BlockName(namespace, group, one) for one in names],
            blocks=[self._slot(one).data for one in names],
            element=2,
            valid=lambda: bool((self.generations.of(pages) == before).all()),
            attachment=None,  # type: ignore[arg-type]
            lease=None,  # type: ignore[arg-type]
        )
        self.held.add(id(grant))
        self.granted.set()
        for one in self.after_grant:
            self.hand_on(one)
        return grant

    def release(self, grant: Grant, *, sent: bool) -> None:
        self.held.remove(id(grant))
        grant.blocks.clear()
        self.sent.append(sent)

    def close(self) -> None:
        self.generations.close()
        self.memory.close()


@asynccontextmanager
async def serving(
    pool: Pool,
    me: NodeInfo,
    secret: Secret | None = None,
    *,
    codec: Codec = Codec.RAW,
    met: Any = None,
    **settings: Any,
) -> AsyncIterator[PeerServer]:
    """Serves a pool, and proves after the end that nothing of it is held any more."""
    settings = {"listen": Endpoint("127.0.0.1", 0), **settings}
    more = {} if met is None else {"met": met}
    async with PeerServer(
        PeerSettings(**settings), secret or Secret(), lambda: me, pool, codec=lambda asked: asked or codec, **more
    ) as server:
        yield server
    assert not pool.held
    assert server.status()["connections"] == 0
    pool.close()


class PeerNode:
    """A node in a process of its own. Use as a context manager."""

    def __init__(
        self, hashes: Sequence[bytes], size: int = BLOCK, port: int = 0, secret: bytes = b"", threads: int = 2
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(hashes), size, port, secret), daemon=True)
        self.process.start()
        theirs.close()
        assert self._connection.poll(PATIENCE_S)
        port, self.boot = self._connection.recv()
        self.endpoint = Endpoint("127.0.0.1", port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def cpu(self) -> float:
        self._connection.send("cpu")
        assert self._connection.poll(PATIENCE_S)
        used: float = self._connection.recv()
        return used


def _serve(connection: Connection, hashes: list[bytes], size: int, port: int, secret: bytes) -> None:
    async def main() -> None:
        me = node("served")
        async with serving(Pool(hashes, size), me, Secret(secret), listen=Endpoint("127.0.0.1", port)) as server:
            connection.send((server.endpoint.port, me.boot))
            while True:
                await asyncio.to_thread(connection.recv)
                times = os.times()
                connection.send(times.user + times.system)

    try:
        asyncio.run(main())
    except EOFError:
        pass
