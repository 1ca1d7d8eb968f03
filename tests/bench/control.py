"""The control round trip while another process stores at full speed and the cleaner writes to disk, against idle.

A third process asks every half millisecond. In turn with the daemon it asks a bare uvloop server that does nothing
else: what that one loses under the same load is the machine's doing (cores, scheduler), not the daemon's.
"""

import asyncio
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import uvloop

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

Times = dict[str, list[float]]


def run(bench: Bench) -> list[Row]:
    seconds = 1.0 if bench.quick else 3.0
    rounds = bench.rounds(5, 2)
    idle: list[Times] = []
    loaded: list[Times] = []
    stored = written = wall = 0.0
    disk = bench.directory / "control" / "disk"
    flags = ("--dram", "1GiB", "--dram-low-watermark", "25%", "--disk", str(disk), "--disk-size", "4GiB")
    echo_path = bench.sockets / "echo.sock"
    with (
        Daemon(bench, "control", *flags) as daemon,
        Engine(storer, daemon.socket) as engine,
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
                idle.append(round_trips(client, bare, seconds))
                bench.say(f"control round {number + 1}: loaded")
                before = demoted(daemon)
                engine.send("go")
                engine.receive()
                loaded.append(round_trips(client, bare, seconds))
                engine.send("stop")
                one_stored, one_wall = engine.receive()
                written += (demoted(daemon) - before) * BLOCK / GB
                stored, wall = stored + one_stored * BLOCK / GB, wall + one_wall
        client.close()
    if not written:
        raise BenchError("the cleaner wrote nothing, so nothing was measured")
    bench.notes.append(f"control: stored at {stored / wall:.2f} GB/s, the cleaner wrote {written / wall:.2f} GB/s")
    return [
        *compare("control round trip, stores and cleaner at full speed", "daemon", idle, loaded, 3.0),
        *compare("the same against a bare uvloop server beside it", "bare", idle, loaded, None),
    ]


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


def demoted(daemon: Daemon) -> int:
    counters: dict[str, Any] = daemon.status()["counters"]
    return int(counters.get("demoted_blocks", 0))


def wait_until_quiet(daemon: Daemon) -> None:
    seen = -1
    while seen != (seen := demoted(daemon)):
        time.sleep(QUIET_S)


# ---- other processes


def storer(connection: Connection, path: str) -> None:
    """Stores chains without pause between "go" and "stop", and then says how many blocks and how long."""
    source = np.random.default_rng(1).integers(0, 256, BLOCK, np.uint8)
    with session(path, namespace(GROUP)) as attached:
        connection.send("attached")
        while True:
            connection.recv()
            connection.send("going")
            count, start = 0, time.perf_counter()
            while not stop_asked(connection):
                chain = os.urandom(CHAIN * HASH_BYTES)
                reservation = attached.reserve(chain, request=chain[:8])
                with attached.copying(reservation) as pools:
                    for page in reservation.pages.tolist():
                        np.copyto(pools[0].slot(page, BLOCK), source)
                count += attached.commit(reservation.lease, reservation.blocks).ready
            connection.recv()
            connection.send((count, time.perf_counter() - start))


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
