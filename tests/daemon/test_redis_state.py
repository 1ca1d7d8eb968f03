"""What nodes make of the state their Redis is in: lost data, bad settings, foreign keys. Service goes on in each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.nodes import BLOCKS, Start, absence_forgotten, fetch, fetched, node, stored
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually, prompt


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.mark.parametrize("loss", ["killed and started empty", "flushed"])
def test_payloads_that_redis_has_lost_are_sent_again_when_they_are_used(
    start_daemon: Start, start_engine: Start, redis: RedisServer, loss: str
) -> None:
    a = node(start_daemon, redis, "a", redis_store="payload")
    b = node(start_daemon, redis, "b", redis_store="payload")
    tokens, unused = prompt("one", BLOCKS), prompt("unused", 4)
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, tokens, where="redis")
    stored(a, writer, unused, where="redis")
    if loss == "flushed":
        redis.client().flushall()
    else:
        redis.kill()
        redis.start()
    told = eventually(lambda: (now := a.status()["cluster"]["redis"]).get("lost_s") is not None and now, 60)
    assert told["counters"]["data_losses"] == 1
    eventually(lambda: a.status()["problems"] == [] == b.status()["problems"], 60)
    assert fetch(reader, tokens)["matched"] == 0
    absence_forgotten()
    assert fetch(writer, tokens)["loaded"] == BLOCKS
    eventually(lambda: a.status()["cluster"]["sharing"]["counters"]["shared_blocks"] == 2 * BLOCKS + 4)
    assert fetch(reader, tokens, "again") == {"matched": BLOCKS, "loaded": BLOCKS, "tiers": ["REDIS"] * BLOCKS}
    # What nobody has used is not sent, and what is there is not sent once more.
    assert a.status()["cluster"]["sharing"]["counters"]["lost_blocks"] == BLOCKS
    assert fetch(reader, unused)["matched"] == 0
    absence_forgotten()
    assert fetch(writer, tokens, "again")["loaded"] == BLOCKS
    assert a.status()["cluster"]["sharing"]["counters"]["shared_blocks"] == 2 * BLOCKS + 4
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("kvcascade")), "status", "--socket", str(a.socket)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert "redis lost what it held" in shown.stdout


def test_a_payload_that_redis_has_evicted_is_sent_again_when_it_is_used(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    # G4: halves of chains go at any moment. Marks are renewed every quarter of the TTL.
    a = node(start_daemon, redis, "a", redis_store="payload", redis_ttl="8s")
    b = node(start_daemon, redis, "b", redis_store="payload")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, tokens, where="redis")
    keys = redis.client().keys("kvcascade:b:*")
    assert len(keys) == BLOCKS
    redis.client().delete(*keys[:7])

    def sent_again() -> bool:
        fetch(writer, tokens)
        return bool(a.status()["cluster"]["sharing"]["counters"].get("lost_blocks"))

    eventually(sent_again)
    eventually(lambda: a.status()["cluster"]["sharing"]["counters"]["shared_blocks"] >= BLOCKS + 7)
    assert fetch(reader, tokens)["loaded"] == BLOCKS


def test_what_another_node_or_an_earlier_life_has_sent_is_not_sent_once_more(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="payload", disk_write_policy="through")
    tokens = prompt("one", BLOCKS)
    writer = start_engine(a)
    stored(a, writer, tokens, where="redis")
    a.restart()
    redis.client().config_resetstat()
    eventually(lambda: fetched(writer, tokens) == BLOCKS)
    eventually(lambda: redis.client().info("commandstats").get("cmdstat_pexpire", {}).get("calls", 0) >= BLOCKS)
    time.sleep(0.5)
    counters = a.status()["cluster"]["sharing"]["counters"]
    assert not counters.get("shared_blocks") and not counters.get("lost_blocks")
