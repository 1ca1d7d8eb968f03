"""Prefixes on their way from elsewhere, disturbed: slow and cut links, false values, engines and daemons that end."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.ports import free_port
from engines.proxy import Proxy
from engines.redis_server import RedisServer, serve
from engines.scripted import Engine, EngineError, eventually, prompt

from kvcascade.daemon.protocol import Tier
from kvcascade.tiers.remote import Secret
from kvcascade.tiers.value import MAGIC

Start = Callable[..., Any]
BLOCKS = 40
BLOCK = 32 << 10
SLOW = 400_000  # bytes a second: a prompt takes some seconds
NARROW = 125_000  # 1 Mbit/s


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture
def node(start_daemon: Start) -> Any:
    """One that may fetch, for engines that only tell."""
    return start_daemon(cluster_node="one", peers_listen="127.0.0.1:0", daemon_seed="0")


@pytest.fixture
def way(redis: RedisServer) -> Iterator[Proxy]:
    """To Redis, for node B."""
    with Proxy(redis.port) as one:
        yield one


def writer_node(start_daemon: Start, redis: RedisServer, **flags: str) -> Any:
    own = {"daemon_seed": "0", "redis_url": redis.url, "cluster_codec": "raw", "peers_listen": "127.0.0.1:0"}
    return start_daemon(cluster_node="a", **{**own, **flags})


def reader_node(start_daemon: Start, way: Proxy, **flags: str) -> Any:
    url = f"redis://127.0.0.1:{way.port}/0"
    own = {"daemon_seed": "0", "redis_url": url, "redis_store": "payload", "cluster_deadline": "15s"}
    return start_daemon(cluster_node="b", redis_deadline="15s", **{**own, **flags})


def store(daemon: Any, engine: Engine, *prompts: list[int]) -> None:
    """Returns when all of it is in Redis and in the directory."""
    before = entries(daemon)
    for tokens in prompts:
        engine.store(tokens)
    blocks = len({block_hash for tokens in prompts for block_hash in engine.hashes(tokens)})

    def known() -> bool:
        told = daemon.status()["cluster"]
        shared: int = told["sharing"]["counters"].get("shared_blocks", 0)
        return shared >= blocks and not told["sharing"]["waiting"] and entries(daemon) >= before + blocks // 16

    eventually(known, 60)


def take(engine: Engine, tokens: list[int], request: str = "r", **options: Any) -> dict[str, Any]:
    """Looks up, waits for what comes, copies, proves, releases."""
    found = engine.lookup(tokens, request, wait_ms=15_000, **options)
    loaded = 0
    if found["lease"]:
        loaded = engine.load(found["lease"], found["matched"], 15_000)
        judged = engine.read(tokens)
        assert judged["foreign"] == []
        assert judged["intact"] == list(range(loaded))
        engine.release(found["lease"])
    return {"matched": found["matched"], "loaded": loaded, "tiers": [Tier(tier).name for tier in found["tiers"]]}


def keys(engine: Engine, tokens: list[int]) -> list[bytes]:
    """Where a prompt's values lie in Redis, in order."""
    fingerprint = engine.attach()["namespace"]
    names = Secret().names_of(fingerprint, 0, engine.hashes(tokens))
    return [b"kvcascade:b:" + name for name in names]


def remote(daemon: Any) -> dict[str, Any]:
    told: dict[str, Any] = daemon.status()["cluster"]["remote"]
    return told


def entries(daemon: Any) -> int:
    """What it has written into the directory: one for 16 blocks of a chain."""
    return int(daemon.status()["cluster"]["fleet"]["counters"].get("entries_written", 0))


def fetched(daemon: Any) -> int:
    return int(daemon.status()["counters"].get("fetched_blocks", 0))


def why(daemon: Any, engine: Engine, tokens: list[int]) -> str:
    (told,) = daemon.call("explain", hashes=b"".join(engine.hashes(tokens)))["namespaces"]
    return str(told["why"])


# ---- links


def test_over_a_narrow_link_nothing_is_fetched_that_is_computed_sooner(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    """10 s over the link, 1 s of computing. What is not known is tried once, and given up."""
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way)
    prompts = [prompt(name, BLOCKS) for name in ("one", "two", "three", "four")]
    store(a, start_engine(a), *prompts)
    reader = start_engine(b)
    reader.attach()
    reader.computed(BLOCKS * 16, 1.0)
    way.rate = NARROW
    first = take(reader, prompts[0], "0")
    assert first["loaded"] < BLOCKS / 2
    assert remote(b)["counters"]["prefixes_given_up"] == 1
    for number in (1, 2):  # what did not come is an upper limit of the link's speed; it takes one or two of them
        take(reader, prompts[number], str(number))
    before = fetched(b)
    assert take(reader, prompts[3], "3")["matched"] == 0
    assert fetched(b) == before
    assert "recomputing is quicker" in why(b, reader, prompts[3])
    # Whoever computes more slowly than that link brings fetches over it.
    other = start_engine(b, family="slow")
    other.attach()
    other.computed(16, 60.0)
    assert take(other, prompts[3], "slow")["loaded"] > 0


def test_a_link_that_gets_slow_in_the_middle_brings_what_has_come(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way)
    one, *others = (prompt(name, BLOCKS) for name in ("one", "two", "three", "four"))
    store(a, start_engine(a), one, *others)
    reader = start_engine(b)
    reader.attach()
    reader.computed(BLOCKS * 16, 8.0)
    way.rate = SLOW
    reader.begin("lookup", one, "r", wait_ms=15_000)
    found = reader.result()
    assert found["matched"] == BLOCKS
    eventually(lambda: fetched(b) >= 4)
    way.rate = 5000  # and a question takes a second
    loaded = reader.load(found["lease"], BLOCKS, 15_000)
    assert 4 <= loaded < BLOCKS
    judged = reader.read(one)
    assert (judged["intact"], judged["foreign"]) == (list(range(loaded)), [])
    reader.release(found["lease"])
    assert remote(b)["counters"]["prefixes_given_up"] == 1
    assert remote(b)["fetching"] == 0
    # Later decisions know.
    assert any(take(reader, tokens, str(number))["matched"] == 0 for number, tokens in enumerate(others))
    assert "recomputing is quicker" in why(b, reader, others[-1])


def test_two_sources_bring_one_prefix_in_two_ranges(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    port = free_port()
    with Proxy(port) as to_a:
        a = writer_node(start_daemon, redis, peers_listen=f"127.0.0.1:{port}", peers_advertise=f"127.0.0.1:{to_a.port}")
        b = reader_node(start_daemon, way, redis_store="both", cluster_fetch="always")
        prompts = [prompt(name, BLOCKS) for name in ("one", "two", "three")]
        writer = start_engine(a)
        store(a, writer, *prompts)
        reader = start_engine(b)
        way.rate = to_a.rate = SLOW
        # Whichever is asked first turns out to be slow, then the other one; then each of them helps.
        for number, tokens in enumerate(prompts):
            got = take(reader, tokens, str(number))
            assert got["loaded"] == BLOCKS
        assert set(got["tiers"]) == {"REDIS", "PEER"}
        assert len(list(itertools.groupby(got["tiers"]))) == 2
        # A hole in Redis ends its part; the peer has the rest.
        holed = prompt("four", BLOCKS)
        where = keys(writer, holed)
        named = entries(a)
        writer.store(holed)
        eventually(lambda: redis.client().exists(*where) == BLOCKS and entries(a) >= named + BLOCKS // 16, 60)
        redis.client().delete(*where[10:12])
        got = take(reader, holed, "holed")
        assert got["loaded"] == BLOCKS
        assert got["tiers"][10:] == ["PEER"] * (BLOCKS - 10)


def test_a_false_value_in_one_range_ends_the_prefix_there(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    port = free_port()
    with Proxy(port) as to_a:
        a = writer_node(start_daemon, redis, peers_listen=f"127.0.0.1:{port}", peers_advertise=f"127.0.0.1:{to_a.port}")
        b = reader_node(start_daemon, way, redis_store="both", cluster_fetch="always")
        prompts = [prompt(name, BLOCKS) for name in ("one", "two", "three", "four")]
        writer = start_engine(a)
        store(a, writer, *prompts)
        for number in (2, 30):
            falsify(redis, keys(writer, prompts[3])[number])
        reader = start_engine(b)
        way.rate = to_a.rate = SLOW
        tiers = [take(reader, tokens, str(number))["tiers"] for number, tokens in enumerate(prompts[:3])]
        assert set(tiers[2]) == {"REDIS", "PEER"}
        assert take(reader, prompts[3], "3")["loaded"] in (2, 30)  # whichever of the two lay in Redis' range
        assert remote(b)["counters"]["prefixes_cut"] == 1


# ---- false values


def falsify(redis: RedisServer, key: bytes, at: int = -1) -> None:
    """As an attacker does, or a bit that flips."""
    client = redis.client()
    value = bytearray(client.get(key) or b"")
    value[at] ^= 1
    client.set(key, bytes(value), keepttl=True)


def test_what_proves_false_is_fetched_once(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    store(a, writer, tokens)
    where = keys(writer, tokens)
    for key in where[:3]:
        falsify(redis, key)
    redis.client().set(where[3], b"nothing of ours")
    assert take(reader, tokens)["loaded"] == 0
    # Only what was met: the first one.
    eventually(lambda: not redis.client().exists(where[0]))
    untrue = remote(b)["counters"]["fetched_untrue_blocks"]
    assert untrue >= 1
    time.sleep(1.1)  # an answer is remembered that long
    assert take(reader, tokens, "again")["matched"] == 0
    assert remote(b)["counters"]["fetched_untrue_blocks"] == untrue
    assert remote(b)["counters"]["questions"] == 2
    assert redis.client().exists(*where[4:]) == BLOCKS - 4
    # Computed anew, it is stored anew; the next node has it.
    reader.store(tokens)
    eventually(lambda: redis.client().exists(*where) == BLOCKS and not b.status()["cluster"]["sharing"]["waiting"], 60)
    c = reader_node(start_daemon, way, cluster_fetch="always")
    assert take(start_engine(c), tokens)["loaded"] == BLOCKS


def test_trouble_on_the_way_is_no_proof_against_a_value(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    store(a, writer, tokens)
    way.rate = SLOW
    reader.begin("lookup", tokens, "r", wait_ms=15_000)
    found = reader.result()
    assert found["matched"] == BLOCKS
    way.cut_after = 100_000
    assert reader.load(found["lease"], BLOCKS, 15_000) < BLOCKS
    reader.release(found["lease"])
    assert redis.client().exists(*keys(writer, tokens)) == BLOCKS
    assert remote(b)["counters"].get("forgotten_blocks", 0) == 0
    way.cut_after, way.rate = None, 0
    eventually(lambda: not b.status()["problems"], 60)
    assert eventually(lambda: take(reader, tokens, "again")["loaded"] == BLOCKS, 60)


def test_a_value_of_another_version_is_left_to_nodes_of_that_version(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    store(a, writer, tokens)
    where = keys(writer, tokens)
    falsify(redis, where[0], at=len(MAGIC))
    assert take(reader, tokens)["loaded"] == 0
    assert remote(b)["counters"]["fetched_untrue_blocks"] >= 1
    assert redis.client().exists(*where) == BLOCKS


# ---- who asks, and who ends


def test_prompts_with_a_common_part_fetch_it_once(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    """At the same time, by two engines that know nothing of each other."""
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    common = prompt("one", 20)
    left, right = common + prompt("left", 20), common + prompt("right", 20)
    store(a, start_engine(a), left, right)
    readers = [start_engine(b), start_engine(b)]
    for reader in readers:
        reader.attach()
    way.rate = SLOW
    for reader, tokens in zip(readers, (left, right), strict=True):
        reader.begin("lookup", tokens, "r", wait_ms=15_000)
    leases = [reader.result() for reader in readers]
    assert [one["matched"] for one in leases] == [40, 40]
    for reader, one, tokens in zip(readers, leases, (left, right), strict=True):
        assert reader.load(one["lease"], 40, 15_000) == 40
        assert reader.read(tokens)["foreign"] == []
        reader.release(one["lease"])
    assert fetched(b) == 60


@pytest.mark.parametrize("how", ["dies", "detaches"])
def test_an_engine_that_goes_away_in_the_middle_leaves_the_fetch_to_others(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy, how: str
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    store(a, start_engine(a), tokens)
    goes, stays = start_engine(b), start_engine(b)
    way.rate = SLOW
    found = goes.lookup(tokens, "r", wait_ms=15_000)
    assert found["matched"] == BLOCKS
    eventually(lambda: fetched(b) >= 2)
    goes.begin("load", found["lease"], BLOCKS, 15_000)
    if how == "dies":
        goes.kill()
    else:
        goes.result()
        goes.begin("close")
        goes.result()
    eventually(lambda: b.status()["leases"]["pins"] == 0)
    assert take(stays, tokens)["loaded"] == BLOCKS
    assert fetched(b) == BLOCKS
    status = b.status()
    assert (status["leases"]["pins"], remote(b)["fetching"]) == (0, 0)


def test_a_lookup_that_is_given_up_while_others_are_asked_leaves_nothing_behind(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    store(a, start_engine(a), tokens)
    goes = start_engine(b)
    goes.attach()
    way.delay = 1.0
    goes.begin("lookup", tokens, "r", wait_ms=15_000)
    eventually(lambda: remote(b)["asking"] == 1)
    goes.kill()
    eventually(lambda: remote(b)["asking"] == 0 and remote(b)["fetching"] == 0, 60)
    assert b.status()["leases"]["pins"] == 0
    way.delay = 0.0
    # What was cut off is asked for again when its answer is forgotten.
    comes = start_engine(b)
    eventually(lambda: take(comes, tokens)["loaded"] == BLOCKS, 60)
    assert fetched(b) == BLOCKS


def test_a_daemon_ends_in_the_middle_of_a_fetch(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    store(a, start_engine(a), tokens)
    reader = start_engine(b)
    way.rate = SLOW // 10
    found = reader.lookup(tokens, "r", wait_ms=15_000)
    assert found["matched"] == BLOCKS
    assert remote(b)["fetching"]
    reader.begin("timed", "load", found["lease"], BLOCKS, 15_000)
    assert b.stop() == 0
    reader.result(30)
    way.rate = 0
    b.start()
    assert b.check() == []
    assert take(reader, tokens, "again")["loaded"] == BLOCKS


def test_a_takeover_in_the_middle_of_a_fetch_keeps_what_has_come(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a, b = writer_node(start_daemon, redis), reader_node(start_daemon, way, cluster_fetch="always")
    tokens = prompt("one", BLOCKS)
    store(a, start_engine(a), tokens)
    reader = start_engine(b)
    way.rate = SLOW // 2
    found = reader.lookup(tokens, "r", wait_ms=15_000)
    assert found["matched"] == BLOCKS
    eventually(lambda: fetched(b) >= 3)
    old = b.process
    b.start_takeover()
    assert old.wait(30) == 0
    assert b.check() == []
    assert remote(b)["fetching"] == 0
    way.rate = 0
    before = fetched(b)
    got = take(reader, tokens, "again")
    assert got["loaded"] == BLOCKS
    assert got["tiers"][:3] == ["DRAM"] * 3
    assert fetched(b) - before <= BLOCKS - 3


def test_a_full_pool_fetches_what_there_is_room_for(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: Proxy
) -> None:
    a = writer_node(start_daemon, redis)
    b = reader_node(
        start_daemon, way, cluster_fetch="always", dram="4MiB", dram_slab="1MiB", disk="", disk_size="",
        leases_budget_share="100%",
    )  # fmt: skip
    tokens = prompt("one", BLOCKS)
    store(a, start_engine(a), tokens)
    holds, reader = start_engine(b), start_engine(b)
    mine = prompt("mine", 100)
    holds.store(mine)
    held = holds.lookup(mine, "held", remote=False)
    assert held["matched"] == 100
    got = take(reader, tokens)
    assert 0 < got["loaded"] <= 28
    assert remote(b)["fetching"] == 0
    holds.release(held["lease"])
    assert b.status()["leases"]["pins"] == 0
    time.sleep(1.1)
    eventually(lambda: take(reader, tokens, "again")["loaded"] == BLOCKS)


# ---- an engine's speed


@pytest.mark.parametrize(
    ("tokens", "seconds", "position", "field"),
    [
        (-5, 1.0, 0, "tokens"),
        (1 << 33, 1.0, 0, "tokens"),
        (10, 0.0, 0, "micros"),
        (10, -1.0, 0, "micros"),
        (10, 1e8, 0, "micros"),
        (10, 1e30, 0, "seconds"),
        (1 << 32, 1e-6, 0, "micros"),
        (1, 1e5, 0, "micros"),
        (10, float("nan"), 0, "seconds"),
        (10, float("inf"), 0, "seconds"),
        (10, 1.0, -1, "position"),
        (10, 1.0, 1 << 33, "position"),
    ],
)
def test_an_engine_that_reports_what_cannot_be_is_told_which_field(
    node: Any, start_engine: Start, tokens: int, seconds: float, position: int, field: str
) -> None:
    engine = start_engine(node)
    engine.attach()
    with pytest.raises(EngineError, match=f"'{field}'"):
        engine.computed(tokens, seconds, position)
    assert remote(node)["prefill"] == []


def test_the_speed_at_several_depths_is_shown(node: Any, start_engine: Start) -> None:
    engine = start_engine(node)
    engine.attach()
    for position in (0, 8000, 16_000, 24_000) * 10:
        engine.computed(1000, 0.1 + (position + 500) * 1e-5, position)
    (told,) = remote(node)["prefill"]
    speeds = list(told["tokens_s"].values())
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 2 * speeds[-1] > 0
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("kvcascade")), "status", "--socket", str(node.socket)],
        capture_output=True,
        text=True,
    )
    assert "after 8,192" in " ".join(shown.stdout.split())
