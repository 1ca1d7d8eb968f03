"""vLLM's own offloading over blocks that another node holds: in Redis, or on a daemon that is asked over TCP."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import DaemonProcess
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually
from engines.vllm_managers import HYBRID, WINDOWED, Manager, Vllm, expect_all, managers, prompt

Start = Callable[..., DaemonProcess]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]
# On two shared cores; what is bounded by it is proved by what is found, not by the time that it takes.
PATIENT = {"remote_timeout_s": 30.0, "lookup_timeout_s": 5.0}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    process = Vllm(tmp_path_factory.mktemp("vllm"))
    yield process
    process.close()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture
def on(vllm: Vllm, start_daemon: Start) -> Iterator[Callable[..., Manager]]:
    """`on(daemon, ...)` makes a manager there; all are ended before the daemons."""
    with ExitStack() as stack:

        def make(daemon: DaemonProcess, **spec: Any) -> Manager:
            tier = PATIENT | spec.pop("tier", {})
            return stack.enter_context(managers(vllm, daemon))(tier=tier, **spec)

        yield make


def node(start_daemon: Start, redis: RedisServer, name: str, store: str, **flags: str) -> DaemonProcess:
    flags = {"peers_listen": "127.0.0.1:0"} | flags
    return start_daemon(
        cluster_node=name,
        cluster_fetch="always",
        cluster_deadline="10s",
        redis_url=redis.url,
        redis_store=store,
        redis_deadline="2s",
        **flags,
    )


def shared(daemon: DaemonProcess, blocks: int) -> bool:
    """Whether so many blocks lie in Redis, by this daemon's word, or are named there."""
    now = daemon.status()["cluster"]
    return bool(
        now["sharing"]["counters"].get("shared_blocks", 0) >= blocks
        or (now["fleet"] and now["fleet"]["counters"].get("entries_written", 0))
    )


@pytest.mark.parametrize("store", ["payload", "directory"])
def test_what_another_node_stored_is_fetched_byte_for_byte(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer, store: str
) -> None:
    a, b = (node(start_daemon, redis, name, store) for name in "ab")
    on(a).store(name="a", tokens=prompt(1))
    eventually(lambda: shared(a, 10))
    manager = on(b)
    loaded = manager.load(name="b", tokens=prompt(1))
    expect_all(loaded, 10)
    assert manager.stats()["loaded_chunks"] == 10
    # In the node's own memory now: for the next engine there, and with the source gone.
    a.kill()
    redis.kill()
    expect_all(on(b).load(name="c", tokens=prompt(1)), 10)
    # Another prompt is nowhere; nobody waits for more than the answer that nobody can give.
    expect_all(manager.load(name="d", tokens=prompt(2)), 0)


@pytest.mark.parametrize("store", ["payload", "directory"])
def test_a_prefix_that_is_half_here_is_completed_from_elsewhere(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer, store: str
) -> None:
    a, b = (node(start_daemon, redis, name, store) for name in "ab")
    on(b).store(name="a", tokens=prompt(1)[:64])
    on(a).store(name="a", tokens=prompt(1))
    eventually(lambda: shared(a, 10))
    expect_all(on(b).load(name="b", tokens=prompt(1)), 10)


@pytest.mark.parametrize("store", ["payload", "directory"])
def test_windows_without_heads_are_fetched_one_by_one(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer, store: str
) -> None:
    a, b = (node(start_daemon, redis, name, store) for name in "ab")
    on(a, groups=HYBRID, chunks=20).store(name="a", tokens=prompt(1))
    eventually(lambda: shared(a, 13))
    manager = on(b, groups=HYBRID, chunks=20)
    expect_all(manager.load(name="b", tokens=prompt(1)), 10, 2, 1)
    # Of this window the first half was never stored by anybody.
    expect_all(manager.load(name="c", tokens=prompt(1, 8)), 8, 1, 0)


@pytest.mark.parametrize("store", ["payload", "directory"])
def test_an_engine_under_vllms_scheduler_computes_only_what_no_node_has(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer, store: str
) -> None:
    a, b = (node(start_daemon, redis, name, store) for name in "ab")
    first = on(a, engine=True, groups=WINDOWED, chunks=60)
    assert first.serve(name="a", tokens=prompt(1))["computed"] == 160 + 1
    eventually(lambda: shared(a, 10))
    second = on(b, engine=True, groups=WINDOWED, chunks=60)
    warm = second.serve(name="b", tokens=prompt(1))
    assert warm["wrong"] == 0
    assert warm["computed"] <= 16 + 1


def test_a_redis_that_is_killed_midway_is_a_miss(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer
) -> None:
    """G-row: while it is asked, and while it sends. Whatever was promised is true or told as missed."""
    a, b = (node(start_daemon, redis, name, "payload", peers_listen="") for name in "ab")
    writer = on(a, chunks=60)
    for number in range(4):
        writer.store(name=f"s{number}", tokens=prompt(number))
    eventually(lambda: shared(a, 40))
    reader = on(b, chunks=60)
    expect_all(reader.load(name="l0", tokens=prompt(0)), 10)
    redis.stop()  # it takes the question, and answers nothing
    context = reader.begin_lookup(name="l1", tokens=prompt(1))
    assert set(context["results"]) == {"RETRY"}
    redis.kill()
    loaded = reader.load_primed(wait=60.0)
    expect_all(loaded, 0)
    for number in (2, 3):
        expect_all(reader.load(name=f"l{number}", tokens=prompt(number)), 0)
    # And it comes back.
    redis.start()
    for number in range(4):
        on(a, chunks=60).store(name=f"again{number}", tokens=prompt(50 + number))
    eventually(lambda: shared(a, 80))
    found: list[int] = []
    for number in itertools.count():
        found = reader.load(name=f"m{number}", tokens=prompt(50))["hits"]
        if found == [10]:
            break
        assert number < 100
        time.sleep(0.2)
    assert b.check() == []


def test_a_node_that_hangs_costs_the_patience_and_no_more(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer
) -> None:
    """E6 across nodes: SIGSTOP of the peer, its blocks promised by the directory."""
    a, b = (node(start_daemon, redis, name, "directory") for name in "ab")
    on(a).store(name="a", tokens=prompt(1))
    eventually(lambda: shared(a, 10))
    reader = on(b, engine=True, chunks=60, tier={"remote_timeout_s": 0.5, "lookup_timeout_s": 0.5})
    os.kill(a.pid, signal.SIGSTOP)
    try:
        served = reader.serve(name="b", tokens=prompt(1))
        slowest = reader.slowest()
    finally:
        os.kill(a.pid, signal.SIGCONT)
    assert (served["computed"], served["wrong"]) == (160 + 1, 0)
    assert max(slowest.values()) < 0.2, slowest  # no call of the scheduler's thread waits


def test_blocks_that_never_come_leave_nothing_waiting(
    on: Callable[..., Manager], start_daemon: Start, redis: RedisServer, tmp_path: Path
) -> None:
    """The value in Redis is spoilt: the fetch fails after it was promised, and the request is computed."""
    a, b = (node(start_daemon, redis, name, "payload", peers_listen="") for name in "ab")
    on(a).store(name="a", tokens=prompt(1))
    eventually(lambda: shared(a, 10))
    client = redis.client()
    spoilt = 0
    for key in client.scan_iter("kvcascade:*"):
        if client.type(key) == b"string" and client.strlen(key) > 4096:
            client.setrange(key, client.strlen(key) - 64, bytes(64))
            spoilt += 1
    assert spoilt == 10
    expect_all(on(b).load(name="b", tokens=prompt(1)), 0)
