"""What nodes make of the state their Redis is in: lost data, bad settings, foreign keys. Service goes on in each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.nodes import BLOCKS, Start, absence_forgotten, fetch, fetched, node, stored
from engines.redis_server import RedisServer, serve
from engines.scripted import Engine, eventually, prompt

from kvcascade.tiers.value import MAGIC, VERSION


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


# ---- bad states: each is told, and service goes on


def served(daemon: Any, engine: Engine, name: str) -> None:
    """What an engine stores here it loads here, whatever Redis does."""
    tokens = prompt(name, 8)
    assert engine.store(tokens)["ready"] == 8
    assert fetch(engine, tokens, name)["loaded"] == 8
    assert daemon.check() == []


def told(daemon: Any, *words: str) -> str:
    """The problem that has all of these words, once it is there; `kvcascade status` shows it first."""
    problem: str = eventually(
        lambda: next((one for one in daemon.status()["problems"] if all(word in one for word in words)), None), 60
    )
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("kvcascade")), "status", "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "400"},
    )
    assert problem in shown.stdout and shown.returncode != 0
    return problem


def nowhere(daemon: Any, secret: str) -> None:
    """A secret is in no message."""
    assert secret not in daemon.log.read_text()
    assert secret not in repr(daemon.status())


def test_redis_is_down_at_the_start(start_daemon: Start, start_engine: Start, redis: RedisServer) -> None:
    redis.kill()
    a = node(start_daemon, redis, "a")
    engine = start_engine(a)
    told(a, "redis is left alone", "refused")
    served(a, engine, "without")
    redis.start()
    eventually(lambda: a.status()["problems"] == [], 90)
    stored(a, engine, prompt("with", BLOCKS), where="redis")


@pytest.mark.parametrize("how", ["in the url", "in a file"])
def test_a_wrong_password(start_daemon: Start, start_engine: Start, tmp_path: Path, how: str) -> None:
    with serve(password="right one") as redis:
        if how == "in the url":
            flags = {"redis_url": redis.url.replace("://", "://:my-wrong-secret@")}
        else:
            file = tmp_path / "password"
            file.write_text("my-wrong-secret\n")
            file.chmod(0o600)
            flags = {"redis_password_file": str(file)}
        a = node(start_daemon, redis, "a", **flags)
        told(a, "redis is left alone", "login", "WRONGPASS")
        served(a, start_engine(a), "one")
        nowhere(a, "my-wrong-secret")


def test_no_password_where_one_is_needed(start_daemon: Start, start_engine: Start) -> None:
    with serve(password="right one") as redis:
        a = node(start_daemon, redis, "a")
        told(a, "redis is left alone", "NOAUTH")
        served(a, start_engine(a), "one")


@pytest.mark.parametrize(
    "url", ["redis://:my-secret@127.0.0.1:port/0", "redis://u:my-secret@/x", "nothing://u:my-secret@h"]
)
def test_a_url_that_is_none_is_refused_without_its_password(start_daemon: Start, url: str) -> None:
    with pytest.raises(AssertionError) as refused:
        start_daemon(redis_url=url)
    assert "redis.url" in str(refused.value) and "my-secret" not in str(refused.value)


def test_a_replica_that_may_only_be_read(start_daemon: Start, start_engine: Start, redis: RedisServer) -> None:
    with serve("--replicaof", "127.0.0.1", str(redis.port)) as replica:
        b = node(start_daemon, redis, "b")
        tokens = prompt("one", BLOCKS)
        stored(b, start_engine(b), tokens, where="redis")
        a = node(start_daemon, replica, "a")
        engine = start_engine(a)
        served(a, engine, "mine")
        told(a, "redis takes no blocks", "READONLY")
        told(a, "other nodes do not hear of this one", "READONLY")
        # What can be read is read.
        eventually(lambda: replica.client().dbsize() >= BLOCKS, 60)
        eventually(lambda: fetched(engine, tokens) == BLOCKS, 60)
        assert a.status()["cluster"]["redis"]["role"] == "slave"


def test_memory_that_is_used_up_where_nothing_is_evicted(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    client = redis.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1 << 20)
    a = node(start_daemon, redis, "a", redis_store="payload")
    engine = start_engine(a)
    served(a, engine, "one")
    told(a, "redis takes no blocks", "OOM", "maxmemory")
    status = a.status()["cluster"]["redis"]
    assert status["state"] == "ok" and status["policy"] == "noeviction" and status["memory_limit"] == 1 << 20
    client.config_set("maxmemory", 0)
    # It is tried again with what comes next, and with what is used.
    eventually(lambda: (served(a, engine, f"more {time.monotonic()}"), a.status()["problems"] == [])[1], 60)


@pytest.mark.parametrize("kind", ["another program's", "an old format's", "lists"])
def test_other_data_under_our_prefix(start_daemon: Start, start_engine: Start, redis: RedisServer, kind: str) -> None:
    a = node(start_daemon, redis, "a", redis_store="payload")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    client = redis.client()
    for key in client.keys("kvcascade:b:*"):
        value = client.get(key)
        client.delete(key)
        match kind:
            case "another program's":
                client.set(key, b"x" * len(value))
            case "lists":
                client.lpush(key, b"x")
            case _:
                assert value[:5] == MAGIC + bytes([VERSION])
                client.set(key, MAGIC + bytes([VERSION - 1]) + value[5:])
    b = node(start_daemon, redis, "b", redis_store="payload")
    reader = start_engine(b)
    assert fetch(reader, tokens)["loaded"] == 0
    problem = told(b, "values in redis were not believed")
    assert ("another version of kvcascade" if kind == "an old format's" else "redis.key_prefix") in problem
    served(b, reader, "mine")
    reader.store(tokens)
    assert fetch(reader, tokens, "again")["loaded"] == BLOCKS


def test_two_nodes_with_one_name(start_daemon: Start, start_engine: Start, redis: RedisServer) -> None:
    first = node(start_daemon, redis, "same")
    eventually(lambda: redis.client().exists("kvcascade:node:same"))
    second = node(start_daemon, redis, "same")
    heard = told(first, "cluster.node", "named same too", "that one is not known")
    assert second.status()["cluster"]["server"]["listen"] in heard
    told(second, "cluster.node", "named same too", "this one is not known")
    for daemon in (first, second):
        served(daemon, start_engine(daemon), "mine")
    tokens = prompt("one", BLOCKS)
    stored(first, start_engine(first), tokens, where="redis")
    assert fetch(start_engine(second), tokens)["loaded"] == BLOCKS
    second.stop()
    eventually(lambda: first.status()["problems"] == [], 60)


def test_what_is_fetched_from_redis_begins_its_life_there_anew(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    """Reading alone does not prolong it, and whoever has fetched it believes that Redis has it."""
    a, b = (node(start_daemon, redis, name, redis_store="payload") for name in "ab")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    client = redis.client()
    keys = client.keys("kvcascade:b:*")
    for key in keys:
        client.expire(key, 60)
    assert fetch(start_engine(b), tokens)["tiers"] == ["REDIS"] * BLOCKS
    eventually(lambda: all(client.ttl(key) > 3600 for key in keys))
    assert not b.status()["cluster"]["sharing"]["counters"].get("lost_blocks")
