"""When blocks are copied to Redis: `redis.write_policy` with real daemons and a real Redis."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from engines.nodes import Start, fetch, node
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually, prompt

PROMPTS, BLOCKS = 40, 16
DRAM_BLOCKS = 128


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def small(start_daemon: Start, redis: RedisServer, name: str, **flags: str) -> Any:
    """128 blocks of DRAM, no disk; "on-evict" copies when fewer than 64 are free."""
    flags = {"dram": "4MiB", "dram_slab": "1MiB", "disk": "", "disk_size": "", "dram_low_watermark": "25%", **flags}
    return node(start_daemon, redis, name, redis_store="payload", **flags)


def counters(daemon: Any) -> Counter[str]:
    return Counter(daemon.status()["cluster"]["sharing"]["counters"])


def test_on_evict_copies_what_leaves_dram_however_fast_it_leaves(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = small(start_daemon, redis, "a", redis_write_policy="on-evict")
    writer = start_engine(a)
    prompts = [prompt(f"on evict {number}", BLOCKS) for number in range(PROMPTS)]
    for tokens in prompts:
        assert writer.store(tokens)["ready"] == BLOCKS
        eventually(lambda: not a.status()["cluster"]["sharing"]["waiting"])
    counted = counters(a)
    assert counted["shared_blocks"] >= PROMPTS * BLOCKS - DRAM_BLOCKS
    assert counted["share_missed_blocks"] == 0
    # What is in no danger is not copied.
    assert counted["shared_blocks"] <= PROMPTS * BLOCKS - DRAM_BLOCKS // 4
    b = small(start_daemon, redis, "b", redis_write_policy="on-evict")
    reader = start_engine(b)
    for number, tokens in enumerate(prompts[:4]):
        assert fetch(reader, tokens, f"r{number}")["tiers"] == ["REDIS"] * BLOCKS


def test_on_evict_counts_what_leaves_dram_uncopied_and_goes_on_when_redis_is_back(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = small(start_daemon, redis, "a", redis_write_policy="on-evict")
    writer = start_engine(a)
    redis.kill()
    eventually(lambda: any("redis is left alone" in problem for problem in a.status()["problems"]))
    for number in range(PROMPTS):
        writer.store(prompt(f"lost {number}", BLOCKS))
    counted = counters(a)
    assert counted["shared_blocks"] == 0
    assert counted["share_missed_blocks"] >= PROMPTS * BLOCKS - DRAM_BLOCKS
    redis.start()
    eventually(lambda: a.status()["cluster"]["redis"]["state"] == "ok", 40)
    eventually(lambda: counters(a)["shared_blocks"] >= DRAM_BLOCKS // 2)


def test_on_evict_an_orderly_end_copies_what_is_left(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = small(start_daemon, redis, "a", redis_write_policy="on-evict")
    tokens = prompt("at the end", BLOCKS)
    start_engine(a).store(tokens)
    assert counters(a)["shared_blocks"] == 0
    assert a.stop() == 0
    b = small(start_daemon, redis, "b")
    assert fetch(start_engine(b), tokens)["tiers"] == ["REDIS"] * BLOCKS


def test_on_reuse_copies_what_was_looked_up_again_and_nothing_else(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = small(start_daemon, redis, "a", redis_write_policy="on-reuse")
    writer = start_engine(a)
    used, unused = prompt("used", BLOCKS), prompt("unused", BLOCKS)
    for tokens in (used, unused):
        assert writer.store(tokens)["ready"] == BLOCKS
    assert counters(a)["shared_blocks"] == 0
    assert fetch(writer, used)["loaded"] == BLOCKS
    eventually(lambda: counters(a)["shared_blocks"] == BLOCKS)
    b = small(start_daemon, redis, "b", redis_write_policy="on-reuse")
    reader = start_engine(b)
    assert fetch(reader, used)["tiers"] == ["REDIS"] * BLOCKS
    assert fetch(reader, unused, "another")["matched"] == 0
    assert counters(a)["shared_blocks"] == BLOCKS
