"""Blocks of another node's DRAM into slots here, against raw sockets; and what serving them costs the daemon's loop.

A real daemon holds the blocks and serves them over loopback. The reference is a bare sender in a process of its own
with as many connections and threads, and a receiver that calls `recv_into` for each block: no handshake, no header, no
checksum. Both are asked turn by turn.
"""

import asyncio
import os
import socket
import statistics
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

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
    at_least,
    check,
    median_ratio,
    namespace,
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
    rounds = bench.rounds(9, 3)
    flags = ("--dram", "512MiB", "--peers-listen", "127.0.0.1:0")
    with Daemon(bench, "peers", *flags) as daemon, Engine(raw_sender) as raw:
        port = raw.receive()
        for name, layers in SIZES.items():
            bench.say(f"storing blocks of {name} to fetch")
            wanted, endpoint, boot = stored(daemon, layers)
            rows += asyncio.run(fetches(bench, name, wanted, endpoint, boot, daemon, raw, port, rounds))
            if layers == 32:
                rows += control(bench, daemon, layers, endpoint, boot)
    return rows


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
            element=2,
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


async def fetches(
    bench: Bench,
    name: str,
    wanted: list[Fetch],
    endpoint: Endpoint,
    boot: bytes,
    daemon: Daemon,
    raw: Engine,
    port: int,
    rounds: int,
) -> list[Row]:
    ours: list[float] = []
    bare: list[float] = []
    cpu: list[float] = []
    bare_cpu: list[float] = []
    async with Peers(PeerSettings(threads=THREADS), Secret(), lambda: ME) as peers:
        for number in range(rounds + 1):
            bench.say(f"peers, blocks of {name}: round {number} of {rounds}")
            used, began = daemon.cpu() + time.process_time(), time.perf_counter()
            reasons = await peers.fetch(endpoint, boot, wanted, 60.0)
            seconds = time.perf_counter() - began
            used = daemon.cpu() + time.process_time() - used
            check(not any(reasons), f"peers: blocks did not come: {next(filter(None, reasons), None)}")
            raw.send("cpu")
            theirs = raw.receive()
            bare_used, began = time.process_time(), time.perf_counter()
            await asyncio.to_thread(receive_raw, port, wanted)
            bare_seconds = time.perf_counter() - began
            bare_used = time.process_time() - bare_used
            raw.send("cpu")
            bare_used += raw.receive() - theirs
            if number:  # the first of each makes its connections and faults its memory in
                ours.append(TOTAL / GB / seconds)
                bare.append(TOTAL / GB / bare_seconds)
                cpu.append(used * 1000 / (TOTAL / GB))
                bare_cpu.append(bare_used * 1000 / (TOTAL / GB))
    what = f"fetch from a peer, {name}, two threads"
    return [
        Row(
            f"{what} / raw socket",
            statistics.median(ours),
            "GB/s",
            statistics.median(bare),
            median_ratio(ours, bare),
            at_least(0.85) if name == "2 MiB" else None,
        ),
        Row(
            f"{what}, CPU of both sides / raw socket",
            statistics.median(cpu),
            "ms/GB",
            statistics.median(bare_cpu),
            median_ratio(cpu, bare_cpu),
        ),
    ]


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
