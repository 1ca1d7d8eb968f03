"""Blocks of another node's DRAM into slots here, against raw sockets; and what serving them costs the daemon's loop.

A real daemon holds the blocks and serves them over loopback. The reference is a bare sender in a process of its own
with as many connections and threads, and a receiver that calls `recv_into` for each block: no handshake, no header, no
checksum. Where `make mooncake` has made its environment, Mooncake's transfer engine reads as much over TCP as well: two
engines on either side, with one IO thread and one connection each. It proves nothing about what comes, we do. All are
asked turn by turn, in either order.
"""

import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from engines.mooncake import Side, sides
from engines.mooncake import environment as mooncake_environment

from kvcascade.config import VERSION
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.daemon.client import Client
from kvcascade.daemon.fleet import NodeInfo
from kvcascade.daemon.peers import Peers
from kvcascade.daemon.protocol import OP_PING
from kvcascade.tiers.block import KVGroup, none_hash
from kvcascade.tiers.remote import BlockName, Fetch, Secret
from kvcascade.tiers.wire import SOCKET_BYTES

from .control import Times, compare, echo_server, growth, round_trips
from .harness import (
    GB,
    SEED,
    Bench,
    Daemon,
    Engine,
    Row,
    Target,
    at_least,
    check,
    median_ratio,
    namespace,
    process_cpu,
    ratio_below,
    session,
    stop_asked,
)

TOTAL = 128 << 20  # bytes of one fetch
THREADS = 2
HASH_BYTES = 32
SIZES = {"2 MiB": 32, "64 KiB": 1}  # layers of the group that has such blocks
ME = NodeInfo("bench", os.urandom(16), None, VERSION, "sha256_cbor", "tagged-0.31", none_hash(SEED))


def run(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    flags = ("--dram", "512MiB", "--peers-listen", "127.0.0.1:0")
    with Daemon(bench, "peers", *flags) as daemon, Engine(raw_sender) as raw, mooncake_if_there(bench) as mooncake:
        port = raw.receive()
        for name, layers in SIZES.items():
            bench.say(f"storing blocks of {name} to fetch")
            wanted, endpoint, boot = stored(daemon, layers)
            rows += asyncio.run(fetches(bench, name, wanted, endpoint, boot, daemon, raw, port, mooncake))
            if layers == 32:
                rows += control(bench, daemon, layers, endpoint, boot)
    return rows


class Mooncake:
    """Mooncake's two processes. What comes is proved once, outside the clock: it proves nothing by itself."""

    def __init__(self, reader: Side, source: Side, place: Any) -> None:
        self._sides, self._reader, self._place = (reader, source), reader, place
        source.call("fill", 1)
        for size in SIZES.values():
            reader.call("fill", 2)
            self.read(block_bytes(size))
            check(reader.call("same", 1), "Mooncake: other bytes came than were there")

    def read(self, block: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of both processes."""
        used = self._cpu()
        seconds = self._reader.call("read", self._place, block)
        return seconds, self._cpu() - used

    def _cpu(self) -> float:
        return sum(process_cpu(side.pid) for side in self._sides)


@contextmanager
def mooncake_if_there(bench: Bench) -> Iterator[Mooncake | None]:
    python = mooncake_environment()
    if python is None:
        bench.notes.append("peers: not compared with Mooncake, which is not installed (make mooncake)")
        yield None
        return
    bench.say("starting Mooncake")
    with sides(python, bench.directory, TOTAL, THREADS) as two:
        yield Mooncake(*two)


def group(layers: int) -> KVGroup:
    return KVGroup(block_tokens=16, layers=layers, kv_heads=8, head_dim=128)


def chain_of(layers: int) -> bytes:
    return np.random.default_rng(layers).integers(0, 256, TOTAL // block_bytes(layers) * HASH_BYTES, np.uint8).tobytes()


def block_bytes(layers: int) -> int:
    return layers << 16


def jobs(layers: int) -> list[Fetch]:
    """Into memory that is there already, as slots are."""
    space, hashes, size = namespace(group(layers)), chain_of(layers), block_bytes(layers)
    slots = memoryview(bytearray(b"\x01" * TOTAL))
    return [
        Fetch(
            BlockName(space.fingerprint(), 0, hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]),
            slots[number * size : (number + 1) * size],
        )
        for number in range(TOTAL // size)
    ]


def stored(daemon: Daemon, layers: int) -> tuple[list[Fetch], Endpoint, bytes]:
    size = block_bytes(layers)
    with session(daemon.socket, namespace(group(layers))) as attached:
        reservation = attached.reserve(chain_of(layers), request=b"bench")
        with attached.copying(reservation) as pools:
            for page in reservation.pages.tolist():
                pools[0].slot(page, size)[:] = np.frombuffer(os.urandom(size), np.uint8)
        ready = attached.commit(reservation.lease, reservation.blocks).ready
        check(ready == TOTAL // size, f"{ready} of {TOTAL // size} blocks were stored")
    client = Client(daemon.socket)
    client.connect()
    boot: bytes = client.call(OP_PING)["boot"]
    client.close()
    host, _, port = daemon.status()["cluster"]["server"]["listen"].rpartition(":")
    return jobs(layers), Endpoint(host, int(port)), boot


@dataclass(slots=True)
class Taken:
    """What one side's rounds came to: GB/s, and ms of CPU a GB of both ends together."""

    speeds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, seconds: float, cpu: float) -> None:
        self.speeds.append(TOTAL / GB / seconds)
        self.cpu.append(cpu * 1000 / (TOTAL / GB))

    def against(self, what: str, limit: "Taken", named: str, target: Target | None) -> list[Row]:
        def row(what: str, unit: str, ours: list[float], theirs: list[float], target: Target | None) -> Row:
            ratio = median_ratio(ours, theirs)
            return Row(f"{what} / {named}", statistics.median(ours), unit, statistics.median(theirs), ratio, target)

        return [
            row(what, "GB/s", self.speeds, limit.speeds, target),
            row(f"{what}, CPU of both sides", "ms/GB", self.cpu, limit.cpu, None),
        ]


async def fetches(
    bench: Bench,
    name: str,
    wanted: list[Fetch],
    endpoint: Endpoint,
    boot: bytes,
    daemon: Daemon,
    raw: Engine,
    port: int,
    mooncake: Mooncake | None,
) -> list[Row]:
    async with Peers(PeerSettings(threads=THREADS), Secret(), lambda: ME) as peers:

        async def ours() -> tuple[float, float]:
            used, began = daemon.cpu() + time.process_time(), time.perf_counter()
            reasons = await peers.fetch(endpoint, boot, wanted, 60.0)
            seconds = time.perf_counter() - began
            check(not any(reasons), f"peers: blocks did not come: {next(filter(None, reasons), None)}")
            return seconds, daemon.cpu() + time.process_time() - used

        async def bare() -> tuple[float, float]:
            raw.send("cpu")
            theirs = raw.receive()
            used, began = time.process_time(), time.perf_counter()
            await asyncio.to_thread(receive_raw, port, wanted)
            seconds = time.perf_counter() - began
            used = time.process_time() - used
            raw.send("cpu")
            return seconds, used + raw.receive() - theirs

        async def moved() -> tuple[float, float]:
            assert mooncake is not None
            return await asyncio.to_thread(mooncake.read, len(wanted[0].into))

        turns = {"ours": ours, "bare": bare} | ({} if mooncake is None else {"mooncake": moved})
        taken = {side: Taken() for side in turns}
        rounds = bench.rounds(9, 3)
        for number in range(rounds + 1):
            bench.say(f"peers, blocks of {name}: round {number} of {rounds}")
            for side in turns if number % 2 else reversed(turns):
                seconds, cpu = await turns[side]()
                if number:  # the first of each makes its connections and faults its memory in
                    taken[side].add(seconds, cpu)
    whole = name == "2 MiB"
    what = f"fetch from a peer, {name}, two threads"
    rows = taken["ours"].against(what, taken["bare"], "raw socket", at_least(0.85) if whole else None)
    if mooncake is not None:
        rows += taken["ours"].against(what, taken["mooncake"], "Mooncake's TCP", at_least(1) if whole else None)
        rows += taken["mooncake"].against(f"Mooncake's TCP, {name}", taken["bare"], "raw socket", None)[:1]
    return rows


def control(bench: Bench, daemon: Daemon, layers: int, endpoint: Endpoint, boot: bytes) -> list[Row]:
    seconds = 1.0 if bench.quick else 3.0
    idle: list[Times] = []
    loaded: list[Times] = []
    path = bench.sockets / "peers-echo.sock"
    served = wall = 0.0
    with (
        Engine(fetcher, layers, tuple(endpoint), boot) as other,
        Engine(echo_server, str(path)) as echo,
        socket.socket(socket.AF_UNIX) as bare,
    ):
        other.receive()
        echo.receive()
        bare.connect(str(path))
        client = Client(daemon.socket)
        client.connect()
        for number in range(bench.rounds(5, 2)):
            bench.say(f"peers, control round {number + 1}")
            idle.append(round_trips(client, bare, seconds))
            other.send("go")
            other.receive()
            loaded.append(round_trips(client, bare, seconds))
            other.send("stop")
            fetched, took = other.receive()
            served, wall = served + fetched * TOTAL / GB, wall + took
        client.close()
    bench.notes.append(f"peers: the daemon served {served / wall:.2f} GB/s while its control socket was asked")
    grown, bare_grown = (growth(which, idle, loaded) for which in ("daemon", "bare"))
    return [
        *compare("control round trip, a peer fetches at full speed", "daemon", idle, loaded, 3.0),
        *compare("a bare uvloop server beside it, a peer fetches", "bare", idle, loaded, None),
        Row(
            "control round trip, a peer fetches: what the p99 grows by / what the bare server's does",
            statistics.median(grown),
            "x",
            statistics.median(bare_grown),
            median_ratio(grown, bare_grown),
            ratio_below(3.0),
        ),
    ]


def receive_raw(port: int, wanted: list[Fetch]) -> None:
    share = -(-len(wanted) // THREADS)
    parts = [wanted[start : start + share] for start in range(0, len(wanted), share)]

    def receive(part: list[Fetch]) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            sock.connect(("127.0.0.1", port))
            sock.sendall(sum(len(job.into) for job in part).to_bytes(8, "little"))
            for job in part:
                have = 0
                while have < len(job.into):
                    count = sock.recv_into(job.into[have:])
                    check(count > 0, "the bare sender is gone")
                    have += count

    threads = [threading.Thread(target=receive, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- other processes


def raw_sender(connection: Connection) -> None:
    payload = memoryview(os.urandom(TOTAL))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def send(sock: socket.socket) -> None:
        with sock:
            sock.sendall(payload[: int.from_bytes(sock.recv(8), "little")])

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=send, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    connection.send(listener.getsockname()[1])
    with suppress(EOFError):
        while True:
            connection.recv()
            connection.send(time.process_time())


def fetcher(connection: Connection, layers: int, endpoint: tuple[str, int], boot: bytes) -> None:
    """Fetches without pause between "go" and "stop", and then says how often and how long."""
    wanted = jobs(layers)

    async def main() -> None:
        async with Peers(PeerSettings(threads=THREADS), Secret(), lambda: ME) as peers:
            connection.send("ready")
            while True:
                await asyncio.to_thread(connection.recv)
                connection.send("going")
                count, start = 0, time.perf_counter()
                while not stop_asked(connection):
                    reasons = await peers.fetch(Endpoint(*endpoint), boot, wanted, 60.0)
                    check(not any(reasons), f"peers: blocks did not come: {next(filter(None, reasons), None)}")
                    count += 1
                connection.recv()
                connection.send((count, time.perf_counter() - start))

    with suppress(EOFError):
        asyncio.run(main())
