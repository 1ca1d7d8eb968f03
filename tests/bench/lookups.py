"""Lookups with pins and stamps at 10^6 resident blocks, against the idle round trip and against 10^4 blocks.

Two daemons stand side by side and are asked in turn, each time about another chain. The engine's own process takes the
time, from the packed hashes to the reply's arrays; the release that follows is not in it. The blocks are real ones of
4 KiB that are reserved and committed without being written.
"""

import gc
import os
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvcascade.daemon.attachment import Session
from kvcascade.daemon.client import Client
from kvcascade.daemon.protocol import OP_PING
from kvcascade.tiers.block import KVGroup, block_hashes

from .harness import (
    SEED,
    Bench,
    Daemon,
    Engine,
    Row,
    below,
    check,
    namespace,
    pool_size,
    quantile,
    ratio_below,
    session,
)

GROUP = KVGroup(block_tokens=16, layers=1, kv_heads=1, head_dim=64)
BLOCK_BYTES = 4096
HASH_BYTES = 32
CHAIN = 1024
FEW = 10 * CHAIN
SPARE_CHAINS = 20
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling took: the longest single reservation, as an engine sees it, and all of it."""

    blocks: int
    longest_reserve: float
    seconds: float


def run(bench: Bench) -> list[Row]:
    # With the spare chains just below a power of two, so that the index does not grow in between.
    many = (84 if bench.quick else 977) * CHAIN
    room = (many + 2 * SPARE_CHAINS * CHAIN) * BLOCK_BYTES
    with (
        Daemon(bench, "many", "--dram", pool_size(room), "--leases-reservation", "60s") as large,
        Daemon(bench, "few", "--dram", pool_size(2 * FEW * BLOCK_BYTES)) as small,
        Engine(engine, large.socket, small.socket, many, bench.rounds(3000, 400)) as worker,
    ):
        empty_rss = large.rss()
        bench.say(f"filling {many} blocks")
        worker.send("fill")
        filled: Filled = worker.receive()
        # What a reply or a request took in passing is not the index's.
        full_rss, full = large.rss(), large.status()["index"]
        worker.send("fill a little more")
        more: Filled = worker.receive()
        without = large.status()["index"]["bytes"] - full["bytes"]
        worker.send("and as much with token ids")
        worker.receive()
        tokens = large.status()["index"]["bytes"] - full["bytes"] - 2 * without
        bench.say(f"looking up among {many} and {FEW} blocks")
        worker.send("measure")
        seen = worker.receive()
        check(large.status()["leases"]["live"] == 0, "leases are left over")
    rows = latency_rows(seen, many)
    rows += ttft_rows(seen, many)
    rows += [
        Row(
            f"RAM of the index a block at {many} blocks, as the daemon counts it",
            full["bytes"] / full["blocks"], "B", target=below(200),
        ),
        Row(
            f"RAM of the index a block at {many} blocks, growth of the daemon's RSS",
            (full_rss - empty_rss) / filled.blocks, "B", target=below(200),
        ),
        Row(
            "token ids on top, a block of 16",
            tokens / more.blocks, "B", 4.0 * GROUP.block_tokens, tokens / more.blocks / (4 * GROUP.block_tokens),
        ),
        Row("reserve + commit of 4 KiB blocks in chains of 1024", filled.blocks / filled.seconds, "blocks/s"),
        Row(f"longest reserve of 1024 blocks up to {many} (the index grows)", filled.longest_reserve * 1000, "ms"),
    ]  # fmt: skip
    return rows


def latency_rows(seen: dict[str, Any], many: int) -> list[Row]:
    rows = []
    idle = statistics.median(seen["ping"]) * 1000
    for length, limit in ((256, 0.2), (1024, 0.5)):
        times, others = seen[f"many {length}"], seen[f"few {length}"]
        p50 = statistics.median(times) * 1000
        what = f"lookup of {length} hashes, all hit, {many} blocks"
        rows += [
            Row(f"{what}: p50 / idle round trip", p50, "ms", idle, p50 / idle, below(limit)),
            Row(f"{what}: p99", quantile(times, 0.99) * 1000, "ms"),
            Row(
                f"{what}: p50 / with {FEW} blocks",
                p50,
                "ms",
                statistics.median(others) * 1000,
                p50 / (statistics.median(others) * 1000),
                ratio_below(5),
            ),
            Row(f"{what}: one engine's throughput", length / statistics.mean(times) / 1e6, "Mhashes/s"),
            Row(f"{what}: release", statistics.median(seen[f"release {length}"]) * 1000, "ms"),
        ]
    return rows


def ttft_rows(seen: dict[str, Any], many: int) -> list[Row]:
    idle = statistics.median(seen["ping"]) * 1000
    miss, hashing = statistics.median(seen["miss"]) * 1000, statistics.median(seen["hashing"]) * 1000
    what = f"added time to first token at 0 % hits, {CHAIN} blocks, {many} resident"
    return [
        Row(f"{what}: lookup / idle round trip", miss, "ms", idle, miss / idle, below(2)),
        Row(f"{what}: lookup, p99", quantile(seen["miss"], 0.99) * 1000, "ms"),
        Row(f"{what}: hashing, where the engine does not hash anyway", hashing, "ms"),
    ]


# ---- the engine's process


def engine(connection: Connection, many_socket: str, few_socket: str, many: int, rounds: int) -> None:
    with session(many_socket, namespace(GROUP)) as large, session(few_socket, namespace(GROUP)) as small:
        connection.recv()
        chains, filled = fill(large, many // CHAIN)
        few_chains, _ = fill(small, FEW // CHAIN)
        connection.send(filled)
        for with_tokens in (False, True):
            connection.recv()
            connection.send(fill(large, SPARE_CHAINS, tokens=with_tokens)[1])
        connection.recv()
        connection.send(measure(many_socket, large, small, chains, few_chains, rounds))


def fill(attached: Session, count: int, *, tokens: bool = False) -> tuple[list[bytes], Filled]:
    chains = []
    longest = 0.0
    start = time.perf_counter()
    for _ in range(count):
        chain = os.urandom(CHAIN * HASH_BYTES)
        ids = os.urandom(CHAIN * GROUP.block_tokens * 4) if tokens else b""
        begun = time.perf_counter()
        reservation = attached.reserve(chain, request=chain[:8], tokens=ids)
        longest = max(longest, time.perf_counter() - begun)
        check(len(reservation.blocks) == CHAIN, "no room")
        attached.commit(reservation.lease, reservation.blocks)
        chains.append(chain)
    return chains, Filled(count * CHAIN, longest, time.perf_counter() - start)


def measure(
    socket: str, large: Session, small: Session, chains: list[bytes], few_chains: list[bytes], rounds: int
) -> dict[str, list[float]]:
    names = ["ping", "miss", "hashing"]
    names += [f"{what} {length}" for what in ("many", "few", "release") for length in (256, 1024)]
    seen: dict[str, list[float]] = {name: [] for name in names}
    tokens = [random.randrange(VOCABULARY) for _ in range(CHAIN * GROUP.block_tokens)]
    client = Client(socket)
    client.connect()
    gc.collect()
    gc.freeze()
    for number in range(rounds + rounds // 10):
        if number == rounds // 10:  # what came before was warming up
            for times in seen.values():
                times.clear()
        start = time.perf_counter()
        client.call(OP_PING)
        seen["ping"].append(time.perf_counter() - start)
        for length in (256, 1024):
            for name, attached, among in (("many", large, chains), ("few", small, few_chains)):
                hashes = random.choice(among)[: length * HASH_BYTES]
                request = f"{name} {number} {length}"
                start = time.perf_counter()
                match = attached.lookup(hashes, request=request)
                found = time.perf_counter()
                check(match.ready == length and match.lease != 0, "not all hit and pinned")
                begun = time.perf_counter()
                attached.release(match.lease)
                released = time.perf_counter()
                seen[f"{name} {length}"].append(found - start)
                if name == "many":
                    seen[f"release {length}"].append(released - begun)
        unknown = os.urandom(CHAIN * HASH_BYTES)
        start = time.perf_counter()
        match = large.lookup(unknown, request=f"miss {number}")
        seen["miss"].append(time.perf_counter() - start)
        check(match.matched == 0, "a hit of what was never stored")
        if number % 10 == 0:
            start = time.perf_counter()
            block_hashes(tokens, GROUP.block_tokens, seed=SEED)
            seen["hashing"].append(time.perf_counter() - start)
    client.close()
    return seen
