"""The fleet's registry and directory in a real Redis: hints that are wrong, nodes that are dead, doubled or forged."""

import asyncio
import sys
from asyncio import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import cbor2
import pytest
from engines.redis_server import RedisServer, serve

from kvcascade.config.errors import ProtocolError, TierUnavailable
from kvcascade.config.settings import Endpoint, RedisSettings
from kvcascade.daemon import fleet as module
from kvcascade.daemon.fleet import Fleet, NodeInfo
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Secret

SECRET = Secret(b"sixteen bytes and more")
NODE = Path(__file__).parents[1] / "engines" / "fleet_node.py"
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


def sealed(info: NodeInfo, secret: Secret, beat: int = 1) -> bytes:
    """A node's record as the node itself would write it."""
    body = cbor2.dumps({"info": info.pack(), "beat": beat, "seen": []})
    return secret.tag("nodes", body) + body


async def until(condition: Callable[[], object]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.03)
    raise AssertionError("it did not come to that")


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


async def test_a_long_question_is_asked_in_pieces_and_answered_as_a_whole(server: RedisServer) -> None:
    hashes = [number.to_bytes(32, "big") for number in range(3 * module.BATCH + 5)]
    chain = b"".join(hashes)
    async with node(server, A) as a, node(server, B) as b, node(server, replace(A, name="c", boot=b"C" * 16)) as c:
        a.announce(SPACE, 0, [hashes[module.BATCH - 1], hashes[-1]])
        c.announce(SPACE, 0, [hashes[module.BATCH]])
        await written(a, 2)
        await written(c, 1)
        await eventually(b, [("a", len(hashes)), ("c", len(hashes))], chain)
        await eventually(b, [("c", module.BATCH + 1), ("a", module.BATCH + 1)], chain[: (module.BATCH + 1) * 32])
        await eventually(b, [("a", module.BATCH)], chain[: module.BATCH * 32])


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


@asynccontextmanager
async def process(server: RedisServer, info: NodeInfo) -> AsyncIterator[subprocess.Process]:
    """A node in a process of its own, whose entry is for the 16th block."""
    arguments = (server.url, "sixteen bytes and more", str(module.LEASE_S), info.pack().hex(), HASHES[15].hex())
    one = await asyncio.create_subprocess_exec(sys.executable, "-P", NODE, *arguments, stdout=subprocess.PIPE)
    try:
        assert one.stdout is not None
        assert await one.stdout.readline() == b"known\n"
        yield one
    finally:
        if one.returncode is None:
            one.kill()
        await one.wait()


async def test_a_killed_nodes_entries_lead_nowhere_and_go(server: RedisServer) -> None:
    async with node(server, B) as b:
        async with process(server, A) as a:
            await eventually(b, [("a", 40)])
            a.kill()
            await a.wait()
        await eventually(b, [])
        for _ in range(200):
            await find(b)
            if b.counters["entries_erased"]:
                break
            await asyncio.sleep(0.05)
        assert b.counters["entries_erased"] == 1
        await asyncio.sleep(0.05)
        assert not server.client().keys("kvcascade:d:*")


async def test_a_node_that_was_killed_is_back_at_once(server: RedisServer) -> None:
    """Its earlier life's record is still there, and no two can listen at one address."""
    async with node(server, B) as b, process(server, A) as first:
        first.kill()
        await first.wait()
        async with node(server, replace(A, boot=b"C" * 16)) as again:
            await eventually(b, [])
            again.announce(SPACE, 0, [HASHES[15]])
            await written(again, 1)
            await eventually(b, [("a", 40)])
            assert again.problems() == []


async def test_a_node_that_was_killed_and_has_no_address_waits_for_its_name_without_a_complaint(
    server: RedisServer,
) -> None:
    """Where only payloads are shared nodes serve nobody; whether its own earlier life is over, only time can tell."""
    silent, lease_ms = replace(A, address=None), int(module.LEASE_S * 1000)
    server.client().set("kvcascade:node:a", sealed(silent, SECRET), px=lease_ms)
    async with node(server, replace(silent, boot=b"C" * 16)) as again:
        await until(lambda: again.taken_by)
        while again.taken_by:
            assert again.problems() == []
            await asyncio.sleep(0.03)
        assert b"C" * 16 in (server.client().get("kvcascade:node:a") or b"")
        assert again.problems() == []


async def test_a_node_that_is_cut_off_for_a_moment_keeps_its_entries(server: RedisServer) -> None:
    async with node(server, B) as b, node(server, A) as a:
        a.announce(SPACE, 0, [HASHES[15]])
        await written(a, 1)
        await eventually(b, [("a", 40)])
        server.client().delete(b"kvcascade:boot:" + A.boot)
        await eventually(b, [("a", 40)])
        assert not b.counters["entries_erased"]


async def test_what_redis_has_lost_is_to_be_named_again(server: RedisServer) -> None:
    async with node(server, A) as a:
        again = asyncio.Event()
        a.forgotten = again.set
        for _ in range(200):
            if server.client().exists("kvcascade:node:a"):
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(3 * module.RENEW_S)
        assert not again.is_set()
        server.client().flushall()
        await asyncio.wait_for(again.wait(), 20)


async def test_a_node_that_serves_nobody_is_known_and_has_no_entries(server: RedisServer) -> None:
    """Nodes that share by Redis alone are told, too, why they share nothing."""
    silent = replace(A, address=None)
    async with node(server, silent) as a, node(server, replace(B, hash_algo="sha256")) as b:
        a.announce(SPACE, 0, HASHES)
        for _ in range(200):
            if a.problems() and b.problems():
                break
            await asyncio.sleep(0.03)
        assert "hash algorithm" in a.problems()[0] and "hash algorithm" in b.problems()[0]
        assert await find(b) == []


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


async def test_the_later_one_of_two_nodes_with_one_name_steps_back_and_both_say_so(server: RedisServer) -> None:
    async with node(server, A) as a:
        await asyncio.sleep(0.3)
        elsewhere = Endpoint("10.0.0.3", 7400)
        async with node(server, replace(A, boot=b"C" * 16, address=elsewhere)) as twin, node(server, B) as b:
            await until(lambda: twin.problems() and a.problems())
            (told,), (heard,) = twin.problems(), a.problems()
            assert "named a too" in told and "; this one is not known" in told and A.boot.hex()[:8] in told
            assert "named a too" in heard and f"{(b'C' * 16).hex()[:8]} at 10.0.0.3:7400" in heard
            a.announce(SPACE, 0, [HASHES[15]])
            twin.announce(SPACE, 0, [HASHES[20]])
            await until(lambda: twin.counters["entries_dropped"])
            await eventually(b, [("a", 40)])
            # And so it stays, however often both renew.
            await asyncio.sleep(2 * module.LEASE_S)
            assert twin.taken_by == A.boot.hex() and not a.taken_by
            assert await find(b, CHAIN[: 17 * 32]) == [("a", 17)] and await find(b, HASHES[20]) == []
        await until(lambda: a.problems() == [])


async def test_a_node_that_gets_its_name_names_all_it_has(server: RedisServer) -> None:
    async with node(server, replace(A, address=Endpoint("10.0.0.3", 7400))) as holder:
        await until(lambda: server.client().exists("kvcascade:node:a"))
        async with node(server, replace(A, boot=b"C" * 16)) as twin:
            again = asyncio.Event()
            twin.forgotten = again.set
            await until(lambda: twin.taken_by)
            await asyncio.sleep(module.LEASE_S)
            assert twin.taken_by and not again.is_set()
            await holder.stop()
            await until(lambda: not twin.taken_by)
            assert again.is_set()


async def test_one_of_two_that_both_have_written_their_record_goes(server: RedisServer) -> None:
    """Both were cut off from each other, or were started at one moment."""
    async with node(server, A) as a:
        await until(lambda: server.client().exists("kvcascade:node:a"))
        server.client().delete("kvcascade:node:a")
        async with node(server, replace(A, boot=b"C" * 16, address=Endpoint("10.0.0.3", 7400))) as twin:
            await until(lambda: bool(a.taken_by) != bool(twin.taken_by))
            await asyncio.sleep(2 * module.LEASE_S)
            assert bool(a.taken_by) != bool(twin.taken_by)


async def test_an_old_record_put_there_again_silences_nobody(server: RedisServer) -> None:
    """Who writes into Redis has recorded an earlier life of the node, at another address, with all its renewals."""
    old = replace(A, boot=b"0" * 16, address=Endpoint("10.0.0.9", 7400))
    client = server.client()
    replays = [sealed(old, SECRET, beat) for beat in range(1, 200)]

    async def replay() -> None:
        for number in range(10**6):
            client.set("kvcascade:node:a", replays[min(number // 4, len(replays) - 1)])
            client.set(b"kvcascade:boot:" + old.boot, replays[-1])
            await asyncio.sleep(0.02)

    async with node(server, A) as a, node(server, B) as b:
        a.announce(SPACE, 0, [HASHES[15]])
        await written(a, 1)
        await eventually(b, [("a", 40)])
        attack = asyncio.create_task(replay())
        try:
            for _ in range(30):
                await asyncio.sleep(0.1)
                assert not a.taken_by
                assert [name for name, _ in await find(b)] == ["a"]
            # What is new is named as before.
            a.announce(SPACE, 0, [HASHES[31]])
            await written(a, 2)
        finally:
            attack.cancel()


async def test_an_old_record_makes_a_node_that_starts_wait_for_a_lease_at_most(server: RedisServer) -> None:
    old = replace(A, boot=b"0" * 16, address=Endpoint("10.0.0.9", 7400))
    client = server.client()
    numbers = iter(range(1, 10**6))

    async def replay() -> None:
        while True:
            client.set("kvcascade:node:a", sealed(old, SECRET, next(numbers)))
            await asyncio.sleep(0.02)

    attack = asyncio.create_task(replay())
    try:
        async with node(server, A) as a, node(server, B) as b:
            await until(lambda: a.taken_by)
            await until(lambda: not a.taken_by)
            a.announce(SPACE, 0, [HASHES[15]])
            await written(a, 1)
            await eventually(b, [("a", 40)])
    finally:
        attack.cancel()


async def test_a_dead_nodes_record_that_does_not_go_is_no_sign_of_life(server: RedisServer) -> None:
    """It was put there again, or a Redis without expiry has kept it."""
    client = server.client()
    async with node(server, B) as b:
        client.set(b"kvcascade:boot:" + A.boot, sealed(A, SECRET, 7))
        client.set(b"kvcascade:d:" + SECRET.name_of(BlockName(SPACE, 0, HASHES[3])), A.boot)
        assert await find(b) == [("a", 40)]
        await eventually(b, [])
        client.set(b"kvcascade:boot:" + A.boot, sealed(A, SECRET, 6))
        client.set(b"kvcascade:d:" + SECRET.name_of(BlockName(SPACE, 0, HASHES[3])), A.boot)
        await asyncio.sleep(2 * module.FRESH_S)
        assert await find(b) == []


async def test_the_name_of_a_node_that_has_gone_is_free(server: RedisServer) -> None:
    elsewhere = replace(A, boot=b"C" * 16, address=Endpoint("10.0.0.3", 7400))
    async with process(server, A) as first, node(server, elsewhere) as other, node(server, B) as b:
        for _ in range(200):
            if other.problems():
                break
            await asyncio.sleep(0.03)
        assert other.problems()
        first.kill()
        await first.wait()
        for _ in range(400):
            if not other.problems():
                break
            await asyncio.sleep(0.03)
        other.announce(SPACE, 0, [HASHES[20]])
        await written(other, 1)
        await eventually(b, [("a", 40)])


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
        bytes(32 << 20),
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
            server.client().set(b"kvcascade:boot:" + b"E" * 16, forged)
            server.client().set(b"kvcascade:d:" + SECRET.name_of(BlockName(SPACE, 0, HASHES[20])), b"E" * 16)
            await eventually(b, [("a", 40)])


async def test_without_a_secret_a_forged_record_is_a_hint_like_any_other(server: RedisServer) -> None:
    """Whoever can write into Redis can send others to a wrong place, which costs a miss: bytes prove themselves."""
    open_secret = Secret()
    evil = replace(A, name="evil", boot=b"E" * 16)
    async with node(server, B, open_secret) as b:
        server.client().set(b"kvcascade:boot:" + evil.boot, sealed(evil, open_secret))
        server.client().set(b"kvcascade:d:" + open_secret.name_of(BlockName(SPACE, 0, HASHES[3])), evil.boot)
        assert await find(b) == [("evil", 40)]
        # Nor can it speak to the terminal of whoever asks for the status.
        info = cbor2.dumps(cbor2.loads(evil.pack()) | {"name": "\x1b[2J", "none_hash": bytes(32)})
        body = cbor2.dumps({"info": info, "beat": 2, "seen": []})
        server.client().set(b"kvcascade:boot:" + evil.boot, open_secret.tag("nodes", body) + body)
        await asyncio.sleep(0.2)
        assert await find(b) == []
        assert b.problems() == []


async def test_a_node_that_lacks_the_secret_is_named_on_both_sides(server: RedisServer) -> None:
    async with node(server, A) as a, node(server, B, Secret()) as b:
        await until(lambda: a.problems() and b.problems())
        assert "b: record: it is not signed with the secret of this node (cluster.secret_file)" in a.problems()[0]
        assert "a: record: " in b.problems()[0]
        assert "(cluster.secret_file; this node has none)" in b.problems()[0]
        # Nor can a name in the roll speak to the terminal of whoever asks for the status.
        server.client().zadd("kvcascade:nodes", {b"\x1b[2J": 9e9})
        server.client().set(b"kvcascade:node:\x1b[2J", b"x" * 64)
        await asyncio.sleep(0.5)
        assert len(a.problems()) == 1
        await b.stop()
        server.client().delete("kvcascade:node:\x1b[2J")
        await until(lambda: not a.problems())


async def test_garbage_for_entries_is_no_holder(server: RedisServer) -> None:
    async with node(server, B) as b:
        key = b"kvcascade:d:" + SECRET.name_of(BlockName(SPACE, 0, HASHES[3]))
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


async def test_a_redis_that_hangs_is_unknown_within_the_time_given(server: RedisServer) -> None:
    async with node(server, A) as a:
        assert await find(a) == []
        server.stop()
        try:
            with pytest.raises(TierUnavailable):
                await asyncio.wait_for(a.find(SPACE, 0, CHAIN, 32, 0.3), 30)
        finally:
            server.resume()


async def test_what_waits_is_bounded(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 8)
    async with node(server, A) as a:
        a.announce(SPACE, 0, HASHES)
        assert a.counters["entries_dropped"] == 32


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("boot", b"short"),
        ("address", ["host"]),
        ("address", ["", 1]),
        ("address", ["h", 70000]),
        ("address", ["node..local", 7400]),
        ("address", ["n" * 64 + ".local", 7400]),
        ("name", "n" * 65),
        ("name", "a b"),
        ("name", ""),
        ("version", "\n"),
        ("none_hash", b""),
        ("key_scheme", 7),
    ],
)
def test_a_record_names_the_field_that_is_wrong(field: str, bad: object) -> None:
    assert NodeInfo.unpack(A.pack()) == A
    assert NodeInfo.unpack(replace(A, address=None).pack()).address is None
    values = cbor2.loads(A.pack()) | {field: bad}
    with pytest.raises(ProtocolError, match=field):
        NodeInfo.unpack(cbor2.dumps(values))


async def test_entries_that_were_lost_on_their_way_are_written_anew(server: RedisServer) -> None:
    """Also where Redis was away for less than a lease, so that it has lost nothing."""
    client = server.client()
    async with node(server, A) as a, node(server, B) as b:
        a.forgotten = lambda: a.announce(SPACE, 0, [HASHES[20]])
        await until(lambda: client.exists("kvcascade:node:a"))
        client.execute_command("ACL", "SETUSER", "default", "resetkeys", "%R~*", "%RW~kvcascade:[^d]*")
        a.announce(SPACE, 0, [HASHES[20]])
        await until(lambda: a.counters["entries_dropped"])
        client.execute_command("ACL", "SETUSER", "default", "allkeys")
        await eventually(b, [("a", 40)])
        assert a.counters["forgotten"] == 0


async def test_a_roll_that_cannot_be_read_is_told_until_it_can(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hear of this node all the same."""
    monkeypatch.setattr(module, "MEET_S", 60.0)
    client = server.client()
    client.set("kvcascade:nodes", "something else")
    async with node(server, A) as a:
        await until(a.problems)
        beats = a._beat
        while a._beat < beats + 4:
            assert ["this node does not hear of new ones" in text for text in a.problems()] == [True]
            assert a.status()["reason"] == ""
            await asyncio.sleep(0.02)
        assert client.exists("kvcascade:node:a")
        client.delete("kvcascade:nodes")
        await until(lambda: not a.problems())


async def test_what_a_handshake_told_is_remembered_beside_what_redis_tells(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that differs may keep its record in another Redis, or in none."""
    async with node(server, A) as a, node(server, replace(B, none_hash=b"s" * 32)):
        a.note(replace(A, name="elsewhere", boot=b"E" * 16, none_hash=b"t" * 32))
        await until(lambda: len(a.status()["different"]) == 2)
        for _ in range(4):
            met = a._beat
            await until(lambda met=met: a._beat > met + 1)
            assert [text for text in a.status()["different"] if "elsewhere" in text]
        a.note(replace(A, name="elsewhere", boot=b"F" * 16))
        assert not [text for text in a.status()["different"] if "elsewhere" in text]
        a.note(replace(A, name="elsewhere", boot=b"E" * 16, none_hash=b"t" * 32))
        monkeypatch.setattr(module, "HEARD_S", 0.0)
        assert not [text for text in a.problems() if "elsewhere" in text]


async def test_a_redis_that_hangs_holds_up_no_end_that_has_a_deadline(server: RedisServer) -> None:
    tier = RedisTier(RedisSettings(url=server.url, deadline="60s"), SECRET)  # type: ignore[arg-type]
    await tier.open()
    try:
        fleet = Fleet(tier, SECRET, A, entry_ttl=60, timeout=60)
        fleet.start()
        await until(lambda: server.client().exists("kvcascade:node:a"))
        server.stop()
        async with asyncio.timeout(20):
            await fleet.stop(0.2)
        server.resume()
        # And it may begin again.
        client = server.client()
        client.delete("kvcascade:node:a")
        fleet.start()
        await until(lambda: client.exists("kvcascade:node:a"))
        await fleet.stop()
    finally:
        await tier.close()
