"""The fleet's registry and directory in a real Redis: hints that are wrong, nodes that are dead, doubled or forged."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import cbor2
import pytest
from engines.redis_server import RedisServer, serve

from kvcascade.config.errors import ProtocolError, TierUnavailable
from kvcascade.config.settings import Endpoint, RedisSettings
from kvcascade.daemon import fleet as module
from kvcascade.daemon.fleet import Fleet, NodeInfo
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import Secret

SECRET = Secret(b"sixteen bytes and more")
SPACE = b"n" * 32
A = NodeInfo("a", b"A" * 16, Endpoint("10.0.0.1", 7400), "0.1", "sha256_cbor", "tagged-0.31", b"r" * 32)
B = replace(A, name="b", boot=b"B" * 16, address=Endpoint("10.0.0.2", 7400))
HASHES = [bytes([number]) * 32 for number in range(40)]
CHAIN = b"".join(HASHES)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_S", 1.2)
    monkeypatch.setattr(module, "RENEW_S", 0.2)
    monkeypatch.setattr(module, "FRESH_S", 0.1)
    monkeypatch.setattr(module, "MEET_S", 0.1)


@asynccontextmanager
async def node(server: RedisServer, info: NodeInfo, secret: Secret = SECRET) -> AsyncIterator[Fleet]:
    tier = RedisTier(RedisSettings(url=server.url, deadline="1s"), secret)  # type: ignore[arg-type]
    await tier.open()
    try:
        async with Fleet(tier, secret, info, entry_ttl=60, timeout=1) as one:
            yield one
    finally:
        await tier.close()


async def find(one: Fleet, chain: bytes = CHAIN) -> list[tuple[str, int]]:
    return [(info.name, count) for info, count in await one.find(SPACE, 0, chain, 32, 1)]


async def eventually(one: Fleet, wanted: list[tuple[str, int]], chain: bytes = CHAIN) -> None:
    for _ in range(200):
        if await find(one, chain) == wanted:
            return
        await asyncio.sleep(0.03)
    assert await find(one, chain) == wanted


async def written(one: Fleet, count: int) -> None:
    for _ in range(300):
        if one.counters["entries_written"] >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(one.status())


async def test_a_node_finds_who_has_a_prefix(server: RedisServer) -> None:
    async with node(server, A) as a, node(server, B) as b:
        a.announce(SPACE, 0, [HASHES[15], HASHES[20]])
        await written(a, 2)
        await eventually(b, [("a", 40)])
        assert await find(b, HASHES[30]) == []
        assert await b.find(SPACE, 1, CHAIN, 32, 1) == []
        assert await b.find(b"m" * 32, 0, CHAIN, 32, 1) == []
        # Its own entries are nothing new to a node.
        assert await find(a) == []


async def test_nothing_is_scanned_and_at_rest_nothing_is_written_a_block(server: RedisServer) -> None:
    async with node(server, A) as a, node(server, B) as b:
        a.announce(SPACE, 0, [HASHES[15]])
        await written(a, 1)
        await eventually(b, [("a", 40)])
        client = server.client()
        client.config_resetstat()
        await asyncio.sleep(1)
        commands = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        assert not commands & {"scan", "keys", "sscan", "hscan"}
        assert client.info("commandstats")["cmdstat_set"]["calls"] <= 40


async def test_a_dead_nodes_entries_lead_nowhere(server: RedisServer) -> None:
    async with node(server, B) as b:
        async with node(server, A) as a:
            a.announce(SPACE, 0, [HASHES[15]])
            await written(a, 1)
            await eventually(b, [("a", 40)])
            for task in a._tasks:  # as a killed process would: without a word
                task.cancel()
        await eventually(b, [])


async def test_a_restarted_nodes_old_entries_are_void(server: RedisServer) -> None:
    async with node(server, B) as b:
        async with node(server, A) as a:
            a.announce(SPACE, 0, [HASHES[15]])
            await written(a, 1)
        async with node(server, replace(A, boot=b"C" * 16)) as again:
            await asyncio.sleep(0.5)
            assert await find(b) == []
            again.announce(SPACE, 0, [HASHES[15]])
            await written(again, 1)
            await eventually(b, [("a", 40)])


async def test_the_later_one_of_two_nodes_with_one_name_steps_back(server: RedisServer) -> None:
    async with node(server, A) as a:
        await asyncio.sleep(0.3)
        async with node(server, replace(A, boot=b"C" * 16)) as twin, node(server, B) as b:
            await asyncio.sleep(0.6)
            assert any("named a too" in problem for problem in twin.problems())
            assert a.problems() == []
            twin.announce(SPACE, 0, [HASHES[15]])
            await asyncio.sleep(0.3)
            assert twin.counters["entries_dropped"] == 1
            assert await find(b) == []


async def test_nodes_that_hash_otherwise_are_named_on_both_sides(server: RedisServer) -> None:
    """Fault B1: never a silent 0 %."""
    other = replace(B, none_hash=b"s" * 32, version="0.2")
    async with node(server, A) as a, node(server, other) as b:
        for _ in range(200):
            if a.problems() and b.problems():
                break
            await asyncio.sleep(0.03)
        for one in (a, b):
            (problem,) = one.problems()
            assert "seed" in problem
            assert "a (kvcascade 0.1) uses" in problem or "b (kvcascade 0.2) uses" in problem
            assert (b"r" * 8).hex() in problem and (b"s" * 8).hex() in problem


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"garbage",
        b"x" * 4000,
        cbor2.dumps({"record": 2}),
        b"\x81" * 1500,
        A.pack().replace(b"10.0.0.1", b"10.6.6.6"),
    ],
)
async def test_a_forged_record_is_not_believed(server: RedisServer, record: bytes) -> None:
    async with node(server, A) as a, node(server, B) as b:
        a.announce(SPACE, 0, [HASHES[15]])
        await written(a, 1)
        await eventually(b, [("a", 40)])
        for forged in (record, bytes(32) + record, Secret().tag("nodes", record) + record):
            server.client().set("kvcascade:node:evil", forged)
            server.client().set(b"kvcascade:boot:" + b"E" * 16, b"evil")
            server.client().set(b"kvcascade:d:" + SECRET.name_of(module.BlockName(SPACE, 0, HASHES[20])), b"E" * 16)
            assert await find(b) == [("a", 40)]


async def test_garbage_for_entries_is_no_holder(server: RedisServer) -> None:
    async with node(server, B) as b:
        key = b"kvcascade:d:" + SECRET.name_of(module.BlockName(SPACE, 0, HASHES[3]))
        for garbage in (b"", b"x", b"y" * 5000, b"Z" * 16):
            server.client().set(key, garbage)
            assert await find(b) == []
        server.client().delete(key)
        server.client().lpush(key, b"a list")
        assert await find(b) == []


async def test_a_redis_that_is_away_is_unknown_and_not_absent(server: RedisServer) -> None:
    async with node(server, A) as a:
        server.kill()
        with pytest.raises(TierUnavailable):
            await find(a)
        a.announce(SPACE, 0, HASHES[:10])
        await asyncio.sleep(0.5)
        assert a.counters["entries_dropped"] == 10
        server.start()
        for _ in range(200):
            if a.status()["reason"] == "":
                break
            await asyncio.sleep(0.05)
        assert await find(a) == []


async def test_what_waits_is_bounded(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 8)
    async with node(server, A) as a:
        a.announce(SPACE, 0, HASHES)
        assert a.counters["entries_dropped"] == 32


@pytest.mark.parametrize(
    ("field", "bad"),
    [("boot", b"short"), ("address", ["host"]), ("address", ["", 1]), ("address", ["h", 70000]), ("name", "n" * 65)],
)
def test_a_record_names_the_field_that_is_wrong(field: str, bad: object) -> None:
    assert NodeInfo.unpack(A.pack()) == A
    assert NodeInfo.unpack(replace(A, address=None).pack()).address is None
    values = cbor2.loads(A.pack()) | {field: bad}
    with pytest.raises(ProtocolError, match=field):
        NodeInfo.unpack(cbor2.dumps(values))
