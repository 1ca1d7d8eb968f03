"""The control round trip while another process stores at full speed and the cleaner writes to disk, and while one loads
what lies on disk alone, against idle.

A third process asks every half millisecond. In turn with the daemon it asks a bare uvloop server that does nothing
else: what that one loses under the same load is the machine's doing (cores, scheduler), not the daemon's.
"""

import asyncio
import os
import socket
import statistics
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import uvloop
from numpy.typing import NDArray

from kvcascade.daemon.attachment import Session
from kvcascade.daemon.client import Client
from kvcascade.daemon.protocol import OP_PING
from kvcascade.tiers.block import KVGroup

from .harness import GB, Bench, BenchError, Daemon, Engine, Row, namespace, quantile, ratio_below, session, stop_asked

GROUP = KVGroup(block_tokens=16, layers=32, kv_heads=8, head_dim=128)
BLOCK = 2 << 20
CHAIN = 64
HASH_BYTES = 32
PAUSE_S = 0.0005
QUIET_S = 0.25
REMEMBERED = 32  # chains of 128 MiB: four times DRAM, and less than the disk

Times = dict[str, list[float]]


def run(bench: Bench) -> list[Row]:
    seconds = 1.0 if bench.quick else 3.0
    rounds = bench.rounds(5, 2)
    times: dict[str, list[Times]] = {"idle": [], "store": [], "load": []}
    moved = dict.fromkeys(("store", "load"), 0.0)
    disk = bench.directory / "control" / "disk"
    flags = ("--dram", "1GiB", "--dram-low-watermark", "25%", "--disk", str(disk), "--disk-size", "6GiB")
    echo_path = bench.sockets / "echo.sock"
    with (
        Daemon(bench, "control", *flags) as daemon,
        Engine(worker, daemon.socket) as engine,
        Engine(echo_server, str(echo_path)) as echo,
    ):
        engine.receive()
        echo.receive()
        client = Client(daemon.socket)
        client.connect()
        with socket.socket(socket.AF_UNIX) as bare:
            bare.connect(str(echo_path))
            for number in range(rounds):
                bench.say(f"control round {number + 1}: idle")
                wait_until_quiet(daemon)
                times["idle"].append(round_trips(client, bare, seconds))
                for way, counter in (("store", "demoted_blocks"), ("load", "promoted_blocks")):
                    bench.say(f"control round {number + 1}: {way}")
                    wait_until_quiet(daemon)
                    before = counted(daemon, counter)
                    engine.send(way)
                    engine.receive()
                    times[way].append(round_trips(client, bare, seconds))
                    engine.send("stop")
                    engine.receive()
                    moved[way] += (counted(daemon, counter) - before) * BLOCK / GB
        client.close()
    if not all(moved.values()):
        raise BenchError(f"nothing went to the disk, or came from it, so nothing was measured: {moved}")
    rates = {way: size / (rounds * seconds) for way, size in moved.items()}
    bench.notes.append(f"control: the disk wrote {rates['store']:.2f} GB/s, and read {rates['load']:.2f} GB/s")
    rows = []
    for way, what in (("store", "stores and cleaner at full speed"), ("load", "loads from disk at full speed")):
        rows += compare(f"control round trip, {what}", "daemon", times["idle"], times[way], 3.0)
        rows += compare(f"a bare uvloop server beside it, {what}", "bare", times["idle"], times[way], None)
        ours, bare = (growth(which, times["idle"], times[way]) for which in ("daemon", "bare"))
        rows.append(
            Row(
                f"control round trip, {what}: what the p99 grows by / what the bare server's does",
                statistics.median(ours),
                "x",
                statistics.median(bare),
                statistics.median(o / b for o, b in zip(ours, bare, strict=True)),
                ratio_below(3.0),
            )
        )
    return rows


def compare(what: str, which: str, idle: list[Times], loaded: list[Times], limit: float | None) -> list[Row]:
    rows = []
    for share, name in ((0.99, "p99"), (0.5, "p50")):
        quiet = [quantile(times[which], share) * 1e6 for times in idle]
        busy = [quantile(times[which], share) * 1e6 for times in loaded]
        rows.append(
            Row(
                f"{what}: {name} / idle",
                statistics.median(busy),
                "us",
                statistics.median(quiet),
                statistics.median(b / q for b, q in zip(busy, quiet, strict=True)),
                ratio_below(limit) if limit is not None and name == "p99" else None,
            )
        )
    return rows


def growth(which: str, idle: list[Times], loaded: list[Times]) -> list[float]:
    """How many times its idle p99 each round's is."""
    return [
        quantile(busy[which], 0.99) / quantile(quiet[which], 0.99) for busy, quiet in zip(loaded, idle, strict=True)
    ]


def round_trips(client: Client, bare: socket.socket, seconds: float) -> Times:
    times: Times = {"daemon": [], "bare": []}
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        client.call(OP_PING)
        times["daemon"].append(time.perf_counter() - start)
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        bare.sendall(b"x" * 64)
        bare.recv(64)
        times["bare"].append(time.perf_counter() - start)
        time.sleep(PAUSE_S)
    return times


def counted(daemon: Daemon, name: str) -> int:
    counters: dict[str, Any] = daemon.status()["counters"]
    return int(counters.get(name, 0))


def wait_until_quiet(daemon: Daemon) -> None:
    seen = -1
    while seen != (seen := counted(daemon, "demoted_blocks")):
        time.sleep(QUIET_S)


# ---- other processes


def worker(connection: Connection, path: str) -> None:
    """Stores chains without pause from "store" to "stop", and loads them from "load" to "stop", the oldest first."""
    source = np.random.default_rng(1).integers(0, 256, BLOCK, np.uint8)
    stored: deque[bytes] = deque(maxlen=REMEMBERED)
    with session(path, namespace(GROUP)) as attached:
        connection.send("attached")
        while True:
            step = load if connection.recv() == "load" else store
            connection.send("going")
            while not stop_asked(connection):
                step(attached, stored, source)
            connection.recv()
            connection.send("stopped")


def store(attached: Session, stored: deque[bytes], source: NDArray[np.uint8]) -> None:
    chain = os.urandom(CHAIN * HASH_BYTES)
    reservation = attached.reserve(chain, request=chain[:8])
    with attached.copying(reservation) as pools:
        for page in reservation.pages.tolist():
            np.copyto(pools[0].slot(page, BLOCK), source)
    attached.commit(reservation.lease, reservation.blocks)
    stored.append(chain)


def load(attached: Session, stored: deque[bytes], into: NDArray[np.uint8]) -> None:
    """The one that was not used for the longest: it has left DRAM, which is smaller than what is remembered."""
    chain = stored.popleft()
    stored.append(chain)
    match = attached.lookup(chain, request=chain[:8])
    if match.matched:
        loaded = attached.load(match.lease, match.matched, wait_ms=2000)
        with attached.copying(loaded) as pools:
            for page in loaded.pages.tolist():
                np.copyto(into, pools[0].slot(page, BLOCK))
        attached.release(match.lease)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def echo_server(connection: Connection, path: str) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_unix_server(_Echo, path)
        connection.send("serving")
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
