"""What a hit in DRAM costs while the disk hangs, and what the ledger of a supervised daemon adds to a commit.

Each against the same daemon, or one beside it, in turn: a hang is a rule of the fault layer that the tests have, the
supervisor a socket that keeps what it is given and reads on.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from engines import faulty_daemon

from kvcascade.daemon.attachment import Session
from kvcascade.tiers.block import KVGroup

from .harness import Bench, Daemon, Engine, Row, check, namespace, quantile, ratio_below, session

GROUP = KVGroup(block_tokens=16, layers=4, kv_heads=2, head_dim=128)
BLOCK = 64 << 10
CHAIN = 64
HASH_BYTES = 32
TESTS = Path(faulty_daemon.__file__).parents[1]


def run(bench: Bench) -> list[Row]:
    return [*hits_while_the_disk_hangs(bench), *commits_with_a_ledger(bench)]


# ---- a disk that hangs


def hits_while_the_disk_hangs(bench: Bench) -> list[Row]:
    rules = faulty_daemon.Rules(bench.sockets / "rules")
    disk = bench.directory / "trouble" / "disk"
    flags = ("--dram", "512MiB", "--disk", str(disk), "--disk-size", "2GiB", "--disk-write-policy", "through")
    environment = {"PYTHONPATH": str(TESTS)}
    seen: dict[str, list[list[float]]] = {"well": [], "hung": []}
    with (
        Daemon(bench, "trouble", *flags, command=rules.command, environment=environment) as daemon,
        Engine(hitter, daemon.socket, 2000 if not bench.quick else 500) as engine,
    ):
        engine.receive()
        for number in range(bench.rounds(5, 2)):
            for state in ("well", "hung"):
                bench.say(f"a disk that hangs, round {number + 1}: {state}")
                if state == "hung":
                    rules.set("write slab-* hang 0", "read slab-* hang 0", "sync * hang 0")
                engine.send("go")
                seen[state].append(engine.receive())
            rules.set()
    rows = []
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        well, hung = ([quantile(one, share) * 1e6 for one in seen[state]] for state in ("well", "hung"))
        rows.append(
            Row(
                f"hit in DRAM, {CHAIN} blocks, while the disk hangs and is written to / while it is well: {name}",
                statistics.median(hung),
                "us",
                statistics.median(well),
                statistics.median(h / w for h, w in zip(hung, well, strict=True)),
                ratio_below(1.5),
            )
        )
    return rows


def hitter(connection: Connection, path: str, rounds: int) -> None:
    """At each "go": seconds of as many hits, and a store of some blocks after every hundredth."""
    with session(path, namespace(GROUP)) as attached:
        hot = os.urandom(CHAIN * HASH_BYTES)
        store(attached, hot)
        connection.send("attached")
        while True:
            connection.recv()
            seconds = []
            for number in range(rounds):
                if number % 100 == 0:
                    store(attached, os.urandom(8 * HASH_BYTES))
                start = time.perf_counter()
                match = attached.lookup(hot, request=b"hot")
                loaded = attached.load(match.lease, match.matched)
                check(loaded.count == CHAIN, "it was no hit")
                attached.release(match.lease)
                seconds.append(time.perf_counter() - start)
            connection.send(seconds)


def store(attached: Session, chain: bytes) -> float:
    """Seconds of the commit."""
    reservation = attached.reserve(chain, request=chain[:8])
    with attached.copying(reservation) as pools:
        for page in reservation.pages.tolist():
            pools[0].slot(page, BLOCK)[:8] = np.frombuffer(chain[:8], np.uint8)
    start = time.perf_counter()
    attached.commit(reservation.lease, reservation.blocks)
    return time.perf_counter() - start


# ---- the ledger


def commits_with_a_ledger(bench: Bench) -> list[Row]:
    flags = ("--dram", "1GiB")
    seen: dict[str, list[list[float]]] = {"alone": [], "kept": []}
    with (
        supervisor(bench.sockets / "notify") as environment,
        Daemon(bench, "alone", *flags) as alone,
        Daemon(bench, "kept", *flags, environment=environment) as kept,
        Engine(committer, alone.socket) as first,
        Engine(committer, kept.socket) as second,
    ):
        check(kept.status()["kept"] != {}, "the daemon does not believe in its supervisor")
        for number in range(bench.rounds(40, 8)):
            bench.say(f"the ledger, round {number + 1}")
            for name, engine in (("alone", first), ("kept", second)):
                engine.send("go")
                seen[name].append(engine.receive())
    rows = []
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        bare, recorded = ([quantile(one, share) * 1e6 for one in seen[which]] for which in ("alone", "kept"))
        rows.append(
            Row(
                f"commit of {CHAIN} blocks with a ledger / without a supervisor: {name}",
                statistics.median(recorded),
                "us",
                statistics.median(bare),
                statistics.median(r / b for r, b in zip(recorded, bare, strict=True)),
            )
        )
    return rows


def committer(connection: Connection, path: str) -> None:
    with session(path, namespace(GROUP)) as attached:
        while True:
            connection.recv()
            connection.send([store(attached, os.urandom(CHAIN * HASH_BYTES)) for _ in range(40)])


@contextmanager
def supervisor(path: Path) -> Iterator[dict[str, str]]:
    """What a daemon's environment needs to take this for systemd."""
    held: list[int] = []

    def listen() -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
            held.extend(descriptors)
            if data == b"end":
                return

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        try:
            yield {"NOTIFY_SOCKET": str(path), "FDSTORE": "8"}
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
                mine.sendto(b"end", str(path))
            thread.join()
            for descriptor in held:
                os.close(descriptor)
