"""Leases that really run out while bytes are on their way between nodes, over slow links: a miss, never foreign bytes.

A13: the lease lasts 500 ms, the transfer seconds, and the memory becomes other blocks' in between. The source notices
by its generations and the reader by checksums: a block must escape both to be foreign.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from engines.hasty_daemon import command
from engines.nodes import Start, node, stored
from engines.ports import free_port
from engines.proxy import Proxy
from engines.redis_server import RedisServer, serve
from engines.scripted import Engine, eventually, prompt

SHAPE = {"layers": 8, "head_dim": 128}  # 256 KiB a block
BLOCKS = 48
RATE = 1_000_000  # bytes a second: twelve seconds for a prefix
SMALL = {"dram": "16MiB", "disk": "", "disk_size": "", "leases_budget_share": "100%"}  # 64 blocks
PATIENT = {"cluster_deadline": "30s", "peers_deadline": "30s", "redis_deadline": "30s", "peers_threads": "1"}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def engine(start_engine: Start, daemon: Any) -> Engine:
    one: Engine = start_engine(daemon, **SHAPE)
    return one


def fetch_slowly(reader: Engine, tokens: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = reader.lookup(tokens, "r", wait_ms=100)
    return found


def held(daemon: Any) -> dict[str, int]:
    (dram,) = (tier for tier in daemon.status()["tiers"] if tier["name"] == "dram")
    return {"quarantined": dram["quarantined"], "pins": daemon.status()["leases"]["pins"]}


def all_intact(one: Engine, tokens: list[int]) -> int:
    """How many leading blocks of a prompt are here; that each holds its own bytes."""
    found = one.lookup(tokens, "prove")
    if not found["lease"]:
        return 0
    count = one.load(found["lease"], found["matched"], 2000)
    judged = one.read(tokens)
    one.release(found["lease"])
    assert judged["foreign"] == []
    return count


def fill(one: Engine, seconds: float) -> None:
    """Stores prompt after prompt, so that every slot that is free for it becomes another block."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        one.store(prompt(f"filler {number}", 16))
        number += 1


def test_a_source_whose_lease_runs_out_in_the_middle_of_sending_costs_a_miss(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    port = free_port()
    with Proxy(port) as proxy:
        proxy.rate = RATE
        where = {"peers_listen": f"127.0.0.1:{port}", "peers_advertise": f"127.0.0.1:{proxy.port}"}
        a = node(start_daemon, redis, "a", command=command(0.5), redis_store="directory", **where, **SMALL)
        b = node(start_daemon, redis, "b", redis_store="directory", **PATIENT)
        writer, reader = engine(start_engine, a), engine(start_engine, b)
        tokens = prompt("victim", BLOCKS)
        stored(a, writer, tokens, where="directory")
        fetch_slowly(reader, tokens)
        eventually(lambda: a.status()["counters"].get("expired_leases"))
        assert b.status()["cluster"]["remote"]["fetching"], "the transfer was over before the lease"
        fill(writer, 1.0)
        assert writer.lookup(tokens, "gone")["matched"] < BLOCKS
        eventually(lambda: not b.status()["cluster"]["remote"]["fetching"], 60)
        told = b.status()
        assert told["cluster"]["remote"]["counters"]["prefixes_cut"] == 1
        assert all_intact(reader, tokens) == told["counters"]["fetched_blocks"] < BLOCKS
        assert held(a) == {"quarantined": 0, "pins": 0}
        # Sent again, it is whole.
        proxy.rate = 0
        for number in range(8):
            reader.store(tokens[: 16 * 6 * (number + 1)])
        assert all_intact(reader, tokens) == BLOCKS


@pytest.mark.parametrize("source", ["redis", "peer"])
def test_slots_whose_lease_runs_out_while_they_are_filled_are_nobodys_until_that_ends(
    start_daemon: Start, start_engine: Start, redis: RedisServer, source: str
) -> None:
    port = free_port()
    with Proxy(port if source == "peer" else redis.port) as proxy:
        proxy.rate = RATE
        where = {"peers_listen": f"127.0.0.1:{port}", "peers_advertise": f"127.0.0.1:{proxy.port}"}
        store = "payload" if source == "redis" else "directory"
        a = node(start_daemon, redis, "a", redis_store=store, **where)
        flags = {**PATIENT, **SMALL}
        if source == "redis":
            flags["redis_url"] = f"redis://127.0.0.1:{proxy.port}/0"
        b = node(start_daemon, redis, "b", command=command(0.5), redis_store=store, **flags)
        writer, reader, other = engine(start_engine, a), engine(start_engine, b), engine(start_engine, b)
        tokens = prompt("victim", BLOCKS)
        stored(a, writer, tokens, where="redis" if source == "redis" else "directory")
        fetch_slowly(reader, tokens)
        eventually(lambda: held(b)["quarantined"] > 0)
        assert b.status()["cluster"]["remote"]["fetching"], "the transfer was over before the lease"
        # All that is free becomes other blocks; not one byte of the late ones gets into them.
        fill(other, 1.0)
        mine = prompt("mine", 4)
        eventually(lambda: other.store(mine)["ready"] == 4 or all_intact(other, mine) == 4)
        eventually(lambda: not b.status()["cluster"]["remote"]["fetching"], 60)
        eventually(lambda: held(b) == {"quarantined": 0, "pins": 0})
        assert all_intact(other, mine) == 4
        for number in range(200):
            all_intact(other, prompt(f"filler {number}", 16))
        assert all_intact(reader, tokens) < BLOCKS
        assert b.check() == []
