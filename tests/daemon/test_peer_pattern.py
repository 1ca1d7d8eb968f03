"""A pattern oracle for blocks between two nodes: whatever a network does, a block that is called good is that block."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvcascade.config.errors import CascadeError
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.daemon.fleet import NodeInfo
from kvcascade.daemon.granting import Grant
from kvcascade.daemon.peer_server import PeerServer
from kvcascade.daemon.peers import Peers
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.remote import BlockName, Fetch, Secret
from tests.engines.proxy import Proxy

SPACE = bytes(range(32))
BLOCK = 96 << 10
COUNT = 24  # more than SPLIT_BYTES together, so that both data threads are at work
SECRET = Secret(b"a secret of the fleet under test")


def name_of(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


def pattern(block_hash: bytes) -> bytes:
    return hashlib.shake_128(block_hash).digest(BLOCK)


HASHES = [name_of(number) for number in range(COUNT)]
PATTERNS = {one: pattern(one) for one in HASHES}


def node(name: str, boot: bytes) -> NodeInfo:
    return NodeInfo(name, boot, None, "0", "sha256_cbor", "1", b"r" * 32)


class Slots:
    """Blocks in memory that may be handed on at any time, as the daemon's pool hands on a slot whose lease ran out."""

    def __init__(self) -> None:
        self.memory = {one: bytearray(PATTERNS[one]) for one in HASHES}
        self.generation = 0
        self.held = 0

    async def leading(self, namespace: bytes, group: int, hashes: bytes, *, wait: float) -> int:
        return len(self._have(hashes))

    def _have(self, hashes: bytes) -> list[bytes]:
        asked = [hashes[start : start + 32] for start in range(0, len(hashes), 32)]
        have = [one in self.memory for one in asked]
        return asked[: have.index(False)] if False in have else asked

    async def grant(self, namespace: bytes, group: int, hashes: bytes) -> Grant | None:
        have = self._have(hashes)
        if not have:
            return None
        self.held += 1
        before = self.generation
        nothing: Any = None  # the server hands these two back as they are
        return Grant(
            [BlockName(namespace, group, one) for one in have],
            [memoryview(self.memory[one]) for one in have],
            2,
            lambda: self.generation == before,
            nothing,
            nothing,
        )

    def release(self, grant: Grant, *, sent: bool) -> None:
        self.held -= 1

    def hand_on(self) -> None:
        self.generation += 1
        for slot in self.memory.values():
            slot[:] = b"\xee" * BLOCK


@asynccontextmanager
async def nodes(
    slots: Slots, through: Callable[[int], int] = lambda port: port
) -> AsyncIterator[tuple[Peers, Endpoint]]:
    settings = PeerSettings(listen=Endpoint("127.0.0.1", 0), deadline=20.0)
    server = PeerServer(settings, SECRET, lambda: node("a", b"a" * 16), slots)
    async with server, Peers(settings, SECRET, lambda: node("b", b"b" * 16)) as peers:
        yield peers, Endpoint("127.0.0.1", through(server.endpoint.port))
    assert not [one for one in threading.enumerate() if one.name.startswith("kvcascade-peer")]


async def fetch(peers: Peers, endpoint: Endpoint, timeout: float = 20.0) -> int:
    """Fetches all blocks; how many came. No block that is called good is another one."""
    slots = [bytearray(BLOCK) for _ in HASHES]
    jobs = [Fetch(BlockName(SPACE, 0, one), memoryview(slot)) for one, slot in zip(HASHES, slots, strict=True)]
    reasons = await peers.fetch(endpoint, b"a" * 16, jobs, timeout)
    assert len(reasons) == COUNT
    for one, slot, reason in zip(HASHES, slots, reasons, strict=True):
        assert reason is not None or slot == PATTERNS[one]
    # The memory is let go of: a view that a thread still held would forbid this.
    for job in jobs:
        job.into.release()
    return reasons.count(None)


async def settled(slots: Slots) -> None:
    """Waits until no grant is held any more."""
    for _ in range(2000):
        if not slots.held:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{slots.held} grants are still held")


async def test_blocks_arrive_as_they_are_and_grants_are_released() -> None:
    slots = Slots()
    async with nodes(slots) as (peers, endpoint):
        told = await peers.ask(endpoint, b"a" * 16, SPACE, 0, b"".join(HASHES), wait=0.0, timeout=20.0)
        assert told == COUNT
        assert await fetch(peers, endpoint) == COUNT
        await settled(slots)


async def test_another_incarnation_is_refused() -> None:
    async with nodes(Slots()) as (peers, endpoint):
        with pytest.raises(CascadeError, match="started anew"):
            await peers.ask(endpoint, b"c" * 16, SPACE, 0, HASHES[0], wait=0.0, timeout=20.0)


# H: cut within the handshake, a frame, a header, a payload, and just before the end.
@pytest.mark.parametrize("count", [1, 40, 300, 700, 5_000, BLOCK, 10 * BLOCK + 7, COUNT * BLOCK - 100, COUNT * BLOCK])
async def test_a_connection_cut_anywhere_never_gives_a_wrong_block(count: int) -> None:
    slots = Slots()
    with Proxy(0) as proxy:

        def through(port: int) -> int:
            proxy.target = port
            return proxy.port

        async with nodes(slots, through) as (peers, endpoint):
            proxy.cut_after = count
            assert await fetch(peers, endpoint) < COUNT
            assert peers.status()[0]["state"] == "sick"
            await settled(slots)


# A13, at its worst: handed on before the header is made, so that the wrong bytes have a header that fits them.
async def test_slots_handed_on_before_they_are_sent_are_no_hits() -> None:
    slots = Slots()
    settings = PeerSettings(listen=Endpoint("127.0.0.1", 0), deadline=20.0)

    def hand_on() -> Codec:  # asked by the server's thread between the grant and the first block
        slots.hand_on()
        return Codec.RAW

    server = PeerServer(settings, SECRET, lambda: node("a", b"a" * 16), slots, codec=hand_on)
    async with server, Peers(settings, SECRET, lambda: node("b", b"b" * 16)) as peers:
        assert await fetch(peers, server.endpoint) == 0
        await settled(slots)


class Flipper:
    """Passes connections on to a port; flips one bit of what comes back, at a place that is counted over all of it."""

    def __init__(self, port: int, place: int) -> None:
        self.left = place
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.target = port
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target), 5)
            self.sockets += [client, server]
            for source, sink, back in ((client, server, False), (server, client, True)):
                self.threads.append(threading.Thread(target=self.pump, args=(source, sink, back), daemon=True))
                self.threads[-1].start()

    def pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if back:
                    with self.lock:
                        if 0 <= self.left < len(data):
                            data[self.left] ^= 1
                        self.left -= len(data)
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for one in self.sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self.threads:
            thread.join()
        for one in self.sockets:
            one.close()


# L: one bit changed by who sits in between: in the hello, the proof, frames, headers, payloads.
@pytest.mark.parametrize("place", [0, 5, 30, 200, 350, 420, 600, 1_000, 50_000, BLOCK, 11 * BLOCK])
async def test_a_bit_flipped_in_between_is_noticed(place: int) -> None:
    slots = Slots()
    flippers: list[Flipper] = []

    def through(port: int) -> int:
        flippers.append(Flipper(port, place))
        return flippers[0].port

    try:
        async with nodes(slots, through) as (peers, endpoint):
            assert await fetch(peers, endpoint, 5.0) < COUNT
            assert flippers[0].left < 0, "the bit was not reached"
            await settled(slots)
    finally:
        for one in flippers:
            one.close()
