"""What the fleet's registry and directory cost: Redis memory a block, commands a block and at rest, a question's time.

A million blocks lie in chains of 125, named as the daemon names them. A thousand nodes are simulated in one process,
with a clock that is twice as fast so that each of them goes through all that it does in a minute; the figures are for
real seconds.
"""

import asyncio
import os
import shutil
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from engines.redis_server import RedisServer, serve
from redis import Redis

from kvcascade.config.settings import Endpoint, RedisSettings
from kvcascade.daemon import fleet
from kvcascade.daemon.fleet import Fleet, NodeInfo
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import Secret

from .harness import Bench, BenchError, Row, below, check

CHAIN = 125
STEP = 16
ASKED = 1024
FASTER = 2.0
SPACE = b"n" * 32
ME = NodeInfo("node", b"M" * 16, Endpoint("10.0.0.1", 7400), "0", "sha256_cbor", "tagged-0.31", b"r" * 32)
OURS = ("get", "mget", "set", "del", "zadd", "zrange", "zremrangebyscore")


def run(bench: Bench) -> list[Row]:
    if shutil.which("redis-server") is None:
        bench.notes.append("fleet: not measured, redis-server is not installed")
        return []
    bench.directory.mkdir(parents=True, exist_ok=True)
    with serve() as server:
        return asyncio.run(measure(bench, server))


async def measure(bench: Bench, server: RedisServer) -> list[Row]:
    tier = RedisTier(RedisSettings(url=server.url), Secret(b"of the bench only"))
    await tier.open()
    try:
        rows = await directory(bench, server.client(), tier)
        server.client().flushall()
        return [*rows, *await at_rest(bench, server.client(), tier)]
    finally:
        await tier.close()


async def directory(bench: Bench, client: "Redis[Any] | Any", tier: RedisTier) -> list[Row]:
    chains = (100_000 if bench.quick else 1_000_000) // CHAIN
    secret = Secret(b"of the bench only")
    # Another node's, so that a question does not pass over the entries as its own.
    async with Fleet(tier, secret, ME, entry_ttl=86400, timeout=10) as one:
        before, calls = client.info("memory")["used_memory"], commands(client)
        sent = 0
        for number in range(chains):
            bench.say(f"naming {number * CHAIN} blocks in the directory")
            depths = [depth for depth in range(CHAIN) if depth % STEP == STEP - 1 or depth == CHAIN - 1]
            one.announce(SPACE, 0, [os.urandom(32) for _ in depths])
            sent += len(depths)
            if number % 1000 == 999 or number == chains - 1:
                await written(one, sent)
        blocks = chains * CHAIN
        memory = (client.info("memory")["used_memory"] - before) / blocks
        each = (commands(client) - calls) / blocks
        check(not one.counters["entries_dropped"], "entries were dropped")
        absent = [os.urandom(32) for _ in range(ASKED)]
        times = []
        for _ in range(bench.rounds(200, 50)):
            start = time.perf_counter()
            check(await one.find(SPACE, 0, b"".join(absent), 32, 10) == [], "somebody has what nobody has")
            times.append(time.perf_counter() - start)
    return [
        Row(f"directory at {blocks:.0e} blocks: Redis memory", memory, "B/block", target=below(20)),
        Row("directory: commands for each block that is stored", each, "/block"),
        Row(f"directory: {ASKED} blocks that nobody has", statistics.median(times) * 1e3, "ms", target=below(3)),
    ]


async def written(one: Fleet, count: int) -> None:
    end = time.monotonic() + 120
    while one.counters["entries_written"] + one.counters["entries_dropped"] < count:
        if time.monotonic() > end:
            raise BenchError(f"entries were not written: {one.status()}")
        await asyncio.sleep(0.005)


async def at_rest(bench: Bench, client: "Redis[Any] | Any", tier: RedisTier) -> list[Row]:
    count = 50 if bench.quick else 1000
    faster = 10 * FASTER if bench.quick else FASTER
    normal = fleet.LEASE_S, fleet.RENEW_S, fleet.MEET_S
    fleet.LEASE_S, fleet.RENEW_S, fleet.MEET_S = (seconds / faster for seconds in normal)  # type: ignore[misc]
    try:
        async with AsyncExitStack() as stack:
            for number in range(count):
                bench.say(f"starting {number + 1} nodes")
                me = replace(ME, name=f"node-{number}", boot=number.to_bytes(16, "big"))
                await stack.enter_async_context(Fleet(tier, Secret(b"of the bench only"), me, entry_ttl=60, timeout=10))
                # Spread, as nodes are by themselves; one process cannot do at once what a thousand can.
                await asyncio.sleep(fleet.MEET_S / count)
            calls, cpu, start = commands(client), redis_cpu(client), time.monotonic()
            bench.say(f"{count} nodes at rest")
            await asyncio.sleep(fleet.MEET_S * 1.05)
            seconds = (time.monotonic() - start) * faster
            calls, cpu = commands(client) - calls, redis_cpu(client) - cpu
            living = await tier.read([b"node:node-%d" % number for number in range(count)], 10)
            check(all(living), f"{living.count(None)} nodes have lost their lease")
    finally:
        fleet.LEASE_S, fleet.RENEW_S, fleet.MEET_S = normal  # type: ignore[misc]
    return [
        Row(f"{count} nodes at rest: commands of one", calls / seconds / count, "/s"),
        Row(f"{count} nodes at rest: Redis", 100 * cpu / seconds, "% of a core"),
    ]


def commands(client: "Redis[Any] | Any") -> int:
    stats = client.info("commandstats")
    others = {name.removeprefix("cmdstat_") for name in stats} - {*OURS, "info", "client|setinfo", "flushall"}
    check(not others, f"commands that nobody should give: {', '.join(others)}")
    return sum(stats[f"cmdstat_{name}"]["calls"] for name in OURS if f"cmdstat_{name}" in stats)


def redis_cpu(client: "Redis[Any] | Any") -> float:
    info = client.info("cpu")
    return float(info["used_cpu_sys"] + info["used_cpu_user"])
