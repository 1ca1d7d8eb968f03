"""A wall clock that jumps by hours, on one node or under Redis: service goes on, and nothing is held for hours."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.nodes import BLOCKS, Start, absence_forgotten, fetch, fetched, node, stored
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually, prompt
from engines.wall_clock import WallClock

HOUR = 3600
KVCASCADE = Path(sys.executable).with_name("kvcascade")


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[WallClock]:
    one = WallClock(tmp_path)
    yield one
    one.close()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def under(clock: WallClock) -> list[str | Path]:
    return ["env", *(f"{name}={value}" for name, value in clock.environment.items()), KVCASCADE, "serve"]


def sharing(daemon: Any) -> dict[str, int]:
    counters: dict[str, int] = daemon.status()["cluster"]["sharing"]["counters"]
    return counters


def test_the_clock_of_these_tests_jumps(clock: WallClock) -> None:
    clock.jump(-30 * 365 * 24 * HOUR)
    told = subprocess.run(
        [sys.executable, "-c", "import time, datetime; print(datetime.datetime.now().year, time.monotonic() > 0)"],
        env=clock.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    year, monotonic = told.stdout.split()
    assert int(year) < 2000 and monotonic == "True"


@pytest.mark.parametrize("jump", [5 * HOUR, -5 * HOUR, 20 * 365 * 24 * HOUR, -30 * 365 * 24 * HOUR])
def test_a_node_whose_clock_jumps_serves_and_fetches_on(
    start_daemon: Start, start_engine: Start, redis: RedisServer, clock: WallClock, jump: int
) -> None:
    a = node(start_daemon, redis, "a", command=under(clock), redis_daily_bytes="64MiB", leases_lookup="2s")
    b = node(start_daemon, redis, "b")
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, prompt("before", BLOCKS), where="redis")
    writer.hand_off(prompt("before", 4), keep_ms=1500)
    writer.lookup(prompt("before", 8), "leased")
    spent = a.status()["cluster"]["redis"]["written_today"]
    assert spent > 0 and a.status()["leases"]["pins"] == 12
    clock.jump(jump)
    # Leases and hand-offs neither end at once nor stay for hours.
    assert a.status()["leases"]["pins"] == 12
    eventually(lambda: a.status()["leases"]["pins"] == 0)
    # The day's budget is what it was, and is spent on.
    assert a.status()["cluster"]["redis"]["written_today"] == spent
    stored(a, writer, prompt("after", BLOCKS), where="redis")
    assert a.status()["cluster"]["redis"]["written_today"] == 2 * spent
    assert fetch(reader, prompt("before", BLOCKS))["loaded"] == BLOCKS
    assert fetch(reader, prompt("after", BLOCKS))["loaded"] == BLOCKS
    theirs = prompt("theirs", BLOCKS)
    stored(b, reader, theirs, where="redis")
    assert fetch(writer, theirs)["loaded"] == BLOCKS
    # Nothing was taken for old, and sent a second time; nobody was taken for gone.
    assert sharing(a)["shared_blocks"] == 2 * BLOCKS and not sharing(a).get("lost_blocks")
    # A circuit closes by itself.
    redis.stop()
    absence_forgotten()
    assert fetch(writer, prompt("nobody's", 4))["matched"] == 0
    eventually(lambda: any("redis is left alone" in problem for problem in a.status()["problems"]))
    clock.jump(-jump)
    redis.resume()
    eventually(lambda: a.status()["problems"] == [], 60)
    told = a.status()
    assert 0 <= told["uptime_s"] < HOUR
    assert subprocess.run([KVCASCADE, "status", "--socket", str(a.socket)], capture_output=True).returncode == 0


@pytest.mark.parametrize("jump", [30 * HOUR, -30 * HOUR])
def test_a_redis_whose_clock_jumps_loses_what_is_old_and_keeps_nobody_alive(
    start_daemon: Start,
    start_engine: Start,
    clock: WallClock,
    monkeypatch: pytest.MonkeyPatch,
    jump: int,
) -> None:
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    with serve() as redis:
        for name in clock.environment:
            monkeypatch.delenv(name)
        a = node(start_daemon, redis, "a")
        b = node(start_daemon, redis, "b")
        writer, reader = start_engine(a), start_engine(b)
        tokens = prompt("one", BLOCKS)
        stored(a, writer, tokens, where="redis")
        clock.jump(jump)
        if jump > 0:
            # All has expired at once, which is a loss like any other.
            eventually(lambda: a.status()["cluster"]["redis"]["counters"].get("data_losses"), 60)
            eventually(lambda: len(redis.client().keys("kvcascade:d:*")) >= BLOCKS // 16, 60)
        absence_forgotten()
        assert fetched(writer, tokens, "again") == BLOCKS
        eventually(lambda: len(redis.client().keys("kvcascade:b:*")) == BLOCKS)
        assert fetch(reader, tokens)["loaded"] == BLOCKS
        # A node that dies is told dead within a lease, though its record now stays for hours.
        a.kill()
        if jump < 0:
            clock.jump(jump)  # once more: the record may have been renewed since
            assert redis.client().pttl("kvcascade:node:a") > 20 * HOUR * 1000
            again = node(start_daemon, redis, "a")  # at another address, so it waits for the other one to show itself
            eventually(lambda: again.status()["cluster"]["fleet"]["taken_by"])
            eventually(lambda: not again.status()["cluster"]["fleet"]["taken_by"], 60)
            assert again.status()["problems"] == []
            stored(again, start_engine(again), prompt("new", BLOCKS), where="directory")
