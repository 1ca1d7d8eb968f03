"""Two nodes share prefixes: real daemons, a real Redis, engines in processes of their own, a pattern in every byte."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.nodes import BLOCKS, Start, fetch, node, stored
from engines.redis_server import RedisServer, serve
from engines.scripted import Engine, eventually, prompt

from kvcascade.config.settings import Endpoint
from kvcascade.daemon.granting import Ticket
from kvcascade.tiers.remote import TAG_BYTES, Secret


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def test_a_prefix_in_redis_is_fetched_by_another_node(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="payload")
    b = node(start_daemon, redis, "b", redis_store="payload")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    assert fetch(reader, tokens)["matched"] == 0
    stored(a, writer, tokens, where="redis")
    time.sleep(1.1)  # what was absent is remembered that long
    assert fetch(reader, tokens) == {"matched": BLOCKS, "loaded": BLOCKS, "tiers": ["REDIS"] * BLOCKS}
    assert fetch(reader, tokens, "again")["tiers"] == ["DRAM"] * BLOCKS
    hits = b.status()["hits"]["tokens"]
    assert (hits["redis"], hits["dram"], hits["miss"]) == (BLOCKS * 16, BLOCKS * 16, BLOCKS * 16)
    # With its first node dead, the prefix lives on.
    a.kill()
    c = node(start_daemon, redis, "c", redis_store="payload")
    assert fetch(start_engine(c), tokens)["loaded"] == BLOCKS


def test_a_prefix_on_another_node_is_fetched_from_there(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    b = node(start_daemon, redis, "b", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, tokens, where="directory")
    assert fetch(reader, tokens) == {"matched": BLOCKS, "loaded": BLOCKS, "tiers": ["PEER"] * BLOCKS}
    status = b.status()["cluster"]
    (peer,), (link,) = status["peers"], status["links"]
    assert link["observed"] and peer["bandwidth"] == link["bandwidth"]
    assert (peer["name"], peer["state"], peer["fetched_blocks"]) == ("a", "ok", BLOCKS)
    assert a.status()["cluster"]["server"]["counters"]["served_blocks"] == BLOCKS
    (caller,) = a.status()["cluster"]["server"]["callers"]
    assert (caller["name"], caller["served_blocks"]) == ("b", BLOCKS)
    shown = subprocess.run(
        [str(Path(sys.executable).with_name("kvcascade")), "status", "--socket", str(a.socket)],
        capture_output=True,
        text=True,
    )
    assert f"served to b boot {caller['boot'][:8]}: {BLOCKS} blocks" in shown.stdout
    assert redis.client().dbsize() < BLOCKS


def test_what_has_arrived_before_the_answer_still_comes_from_another_node_for_whom_it_was_fetched(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    b = node(start_daemon, redis, "b", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, tokens, where="directory")
    assert reader.lookup(tokens, "r", wait_ms=0)["asking"]
    eventually(lambda: b.status()["tiers"][0]["blocks"] == BLOCKS)
    assert fetch(reader, tokens)["tiers"] == ["PEER"] * BLOCKS
    assert fetch(reader, tokens, "another")["tiers"] == ["DRAM"] * BLOCKS
    hits = b.status()["hits"]["tokens"]
    assert (hits["peer"], hits["dram"]) == (BLOCKS * 16, BLOCKS * 16)


def test_a_prefix_on_another_nodes_disk_is_fetched_from_there(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    """And after its restart: what it holds is named anew under its new incarnation."""
    a = node(start_daemon, redis, "a", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="directory")
    a.restart()
    assert {tier["name"]: tier["blocks"] for tier in a.status()["tiers"]} == {"dram": 0, "disk": BLOCKS}
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0))
    b = node(start_daemon, redis, "b", redis_store="directory")
    assert fetch(start_engine(b), tokens)["loaded"] == BLOCKS


def test_blocks_that_are_no_chain_are_asked_for_one_by_one(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="payload")
    b = node(start_daemon, redis, "b", redis_store="payload")
    writer, reader = start_engine(a), start_engine(b)
    alone = [prompt(f"alone {number}", 1) for number in range(5)]
    for tokens in alone[:3] + alone[4:]:
        writer.store(tokens)
    eventually(lambda: a.status()["cluster"]["sharing"]["counters"].get("shared_blocks", 0) == 4)
    reader.attach()
    found = reader.lookup_alone(alone, wait_ms=5000)
    assert (found["found"], found["asking"]) == ([0, 1, 2, 4], False)
    for tokens in alone[:3] + alone[4:]:
        assert fetch(reader, tokens, "again", remote=False)["loaded"] == 1


def test_what_redis_has_lost_of_the_directory_comes_back(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="directory")
    redis.client().flushall()
    eventually(lambda: len(list(redis.client().scan_iter("kvcascade:d:*"))) >= BLOCKS // 16, 60)
    b = node(start_daemon, redis, "b", redis_store="directory")
    assert fetch(start_engine(b), tokens)["loaded"] == BLOCKS


def test_part_of_a_prefix_is_here_and_the_rest_elsewhere(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    b = node(start_daemon, redis, "b", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    reader.store(tokens[: 10 * 16])
    stored(a, writer, tokens, where="directory")
    found = fetch(reader, tokens)
    assert found["loaded"] == BLOCKS
    assert found["tiers"] == ["DRAM"] * 10 + ["PEER"] * (BLOCKS - 10)


def test_a_node_that_dies_costs_a_miss_and_no_more(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    b = node(start_daemon, redis, "b", redis_store="directory", peers_deadline="1s")
    tokens, other = prompt("one", BLOCKS), prompt("two", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    stored(a, writer, tokens, where="directory")
    where = a.status()["cluster"]["server"]["listen"]
    a.process.send_signal(signal.SIGSTOP)
    assert fetch(reader, tokens)["loaded"] == 0
    assert any(f"at {where} is left alone: no " in problem for problem in b.status()["problems"])
    a.process.send_signal(signal.SIGCONT)
    a.kill()
    assert fetch(reader, tokens, "again")["loaded"] == 0
    reader.store(other)
    assert fetch(reader, other)["loaded"] == BLOCKS


def test_redis_that_dies_costs_misses_and_no_more(start_daemon: Start, start_engine: Start, redis: RedisServer) -> None:
    b = node(start_daemon, redis, "b")
    reader = start_engine(b)
    redis.stop()
    tokens = prompt("one", BLOCKS)
    assert fetch(reader, tokens)["matched"] == 0
    reader.store(tokens)
    assert fetch(reader, tokens)["loaded"] == BLOCKS
    redis.resume()
    redis.kill()
    eventually(lambda: any("redis is left alone" in problem for problem in b.status()["problems"]))
    assert fetch(reader, prompt("two", 4))["matched"] == 0
    redis.start()
    eventually(lambda: not b.status()["problems"], 40)


def test_a_redis_that_evicts_while_nodes_share_costs_misses_and_no_more(
    start_daemon: Start, start_engine: Start
) -> None:
    """Fault G4: what a lookup counted on may be gone when it is fetched; the prefix ends there, with true bytes."""
    with serve("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru") as redis:
        a = node(start_daemon, redis, "a", redis_store="payload")
        b = node(start_daemon, redis, "b", redis_store="payload")
        writer, reader = start_engine(a), start_engine(b)
        prompts = [prompt(f"evicted {number}", BLOCKS) for number in range(24)]
        loaded = []
        for number, tokens in enumerate(prompts):
            stored(a, writer, tokens, where="redis")
            # Half of them at once; the others when Redis has had to make room.
            if number % 2 == 0 or number > 11:
                asked = prompts[number if number % 2 == 0 else number - 12]
                loaded.append(fetch(reader, asked, f"r{number}")["loaded"])
        assert max(loaded) == BLOCKS and min(loaded) < BLOCKS
        assert redis.client().info("stats")["evicted_keys"]
        for one in (a, b):
            assert one.status()["cluster"]["redis"]["state"] == "ok"


def test_without_waiting_a_lookup_says_that_it_asks(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    """The scheduler's way: ask, go on, ask again; one lease, and the answer is final once."""
    a = node(start_daemon, redis, "a")
    b = node(start_daemon, redis, "b")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    reader = start_engine(b)
    first = reader.lookup(tokens, "r")
    assert first["asking"] and first["matched"] == 0
    found = eventually(lambda: None if (again := reader.lookup(tokens, "r"))["asking"] else again)
    assert found["matched"] == BLOCKS
    assert reader.load(found["lease"], BLOCKS, 4000) == BLOCKS
    reader.release(found["lease"])
    assert b.status()["hits"]["tokens"]["miss"] == 0
    assert b.status()["leases"]["pins"] == 0


def test_many_engines_that_want_a_prefix_fetch_it_once(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a")
    b = node(start_daemon, redis, "b")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    readers = [start_engine(b) for _ in range(3)]
    for reader in readers:
        reader.begin("lookup", tokens, "r", wait_ms=3000)
    leases = [reader.result() for reader in readers]
    assert [one["matched"] for one in leases] == [BLOCKS] * 3
    for reader, one in zip(readers, leases, strict=True):
        assert reader.load(one["lease"], BLOCKS, 4000) == BLOCKS
        assert reader.read(tokens)["foreign"] == []
        reader.release(one["lease"])
    counters = b.status()["counters"]
    assert counters["fetched_blocks"] == BLOCKS


def test_the_directory_goes_on_naming_what_is_used(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    """Entries run out; and a node that fetched the blocks, named itself for them and died hides nobody who has them."""
    flags = {"redis_store": "directory", "redis_ttl": "4s"}
    a, b, c = (node(start_daemon, redis, name, **flags) for name in "abc")
    tokens = prompt("one", BLOCKS)
    writer = start_engine(a)
    stored(a, writer, tokens, where="directory")

    def used_for(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert fetch(writer, tokens, "used")["loaded"] == BLOCKS
            time.sleep(0.5)

    used_for(6.0)
    assert fetch(start_engine(b), tokens)["tiers"] == ["PEER"] * BLOCKS
    time.sleep(0.5)
    b.kill()
    used_for(2.0)
    assert fetch(start_engine(c), tokens)["tiers"] == ["PEER"] * BLOCKS


def test_a_node_that_fetched_and_starts_anew_does_not_hide_who_has_the_blocks(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a, b = (node(start_daemon, redis, name, redis_store="directory", disk="") for name in "ab")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="directory")
    for _ in range(2):
        assert fetch(start_engine(b), tokens)["tiers"] == ["PEER"] * BLOCKS
        time.sleep(0.5)
        b.kill()
        b.start()


def test_a_hand_off_is_fetched_while_it_is_still_being_stored(start_daemon: Start, start_engine: Start) -> None:
    """Prefill here, decode there; no Redis at all."""
    a, b = node(start_daemon, None, "a"), node(start_daemon, None, "b")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    writer.reserve(tokens)
    ticket = writer.hand_off(tokens)
    assert a.status()["cluster"]["handoffs"] == {"handoffs": 1, "handoff_blocks": BLOCKS}
    reader.begin("lookup", tokens, "r", wait_ms=4000, ticket=ticket)
    time.sleep(0.3)
    writer.write()
    writer.commit()
    found = reader.result()
    assert found["matched"] == BLOCKS
    assert reader.load(found["lease"], BLOCKS, 4000) == BLOCKS
    assert reader.read(tokens)["foreign"] == []
    reader.release(found["lease"])
    eventually(lambda: a.status()["cluster"]["handoffs"]["handoffs"] == 0)
    assert a.status()["leases"]["pins"] == 0


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_a_hand_off_between_engines_of_unlike_ranks(
    start_daemon: Start, start_engine: Start, writers: int, readers: int
) -> None:
    """Prefill on few ranks, decode on many, or the other way; the last rank stores while it is asked for."""
    a, b = node(start_daemon, None, "a"), node(start_daemon, None, "b")
    tokens = prompt("one", BLOCKS)

    def engine(daemon: Any, ranks: int) -> tuple[Engine, list[Engine]]:
        scheduler = start_engine(daemon, role="scheduler", ranks=ranks)
        joins = scheduler.attach()["attachment"]
        return scheduler, [
            start_engine(daemon, role="rank", ranks=ranks, rank=rank, attachment=joins) for rank in range(ranks)
        ]

    (prefill, stores), (decode, loads) = engine(a, writers), engine(b, readers)
    reserved = prefill.reserve(tokens)
    ticket = prefill.hand_off(tokens)
    for one in stores:
        one.take_over(tokens, reserved["value"])
        one.write()
    for one in stores[:-1]:
        one.commit()
    decode.begin("lookup", tokens, "r", wait_ms=4000, ticket=ticket)
    time.sleep(0.3)
    assert not decode.ended(0)
    stores[-1].commit()
    found = decode.result()
    assert (found["matched"], found["asking"]) == (BLOCKS, False)
    assert decode.load(found["lease"], BLOCKS, 4000) == BLOCKS
    value = decode.load_value(found["lease"], BLOCKS)
    for one in loads:
        read = one.read_value(value, tokens)
        assert (len(read["intact"]), read["foreign"]) == (BLOCKS, [])
    decode.release(found["lease"])
    eventually(lambda: a.status()["cluster"]["handoffs"]["handoffs"] == 0)


def test_a_hand_off_is_not_waited_for_where_nothing_is_being_stored(start_daemon: Start, start_engine: Start) -> None:
    """What the source stored is fetched at once; what it could not, or gave up, is nothing to wait for."""
    a = node(start_daemon, None, "a", peers_deadline="60s")
    b = node(start_daemon, None, "b", peers_deadline="60s", cluster_deadline="60s")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(b)
    writer.store(tokens[: 10 * 16])
    writer.reserve(tokens)
    ticket = writer.hand_off(tokens)
    reader.begin("lookup", tokens, "r", wait_ms=15_000, ticket=ticket, timeout=16)
    time.sleep(0.3)
    assert not reader.ended(0)
    writer.abort()
    assert reader.result()["matched"] == 10


def test_a_hand_off_of_a_prompt_that_was_asked_for_before_is_a_new_question(
    start_daemon: Start, start_engine: Start
) -> None:
    """And a ticket that this node gave itself is good here."""
    a = node(start_daemon, None, "a")
    tokens = prompt("one", BLOCKS)
    writer, reader = start_engine(a), start_engine(a)
    assert fetch(reader, tokens)["matched"] == 0
    writer.reserve(tokens)
    writer.write()
    reader.begin("lookup", tokens, "r", wait_ms=4000, ticket=writer.hand_off(tokens))
    time.sleep(0.3)
    writer.commit()
    assert reader.result()["matched"] == BLOCKS


def test_a_hand_off_ends_by_its_deadline(start_daemon: Start, start_engine: Start) -> None:
    a = node(start_daemon, None, "a")
    writer = start_engine(a)
    writer.store(prompt("one", 4))
    writer.hand_off(prompt("one", 4), keep_ms=300)
    assert a.status()["leases"]["pins"] == 4
    eventually(lambda: a.status()["leases"]["pins"] == 0)


def test_nodes_of_another_seed_share_nothing_and_say_so_on_both_sides(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    """Fault B1."""
    a = node(start_daemon, redis, "a", daemon_seed="0")
    b = node(start_daemon, redis, "b", daemon_seed="42")
    for one in (a, b):
        (problem,) = eventually(lambda one=one: one.status()["problems"], 70)
        assert "seed" in problem and "a (kvcascade" in problem and "b (kvcascade" in problem


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"daemon_seed": "42"}, "seed"),
        ({"daemon_hash_algo": "sha256"}, "hash algorithm"),
        ({"daemon_key_scheme": "untagged-0.19"}, "key scheme"),
    ],
)
def test_nodes_that_share_payloads_alone_and_hash_otherwise_say_so_on_both_sides(
    start_daemon: Start, redis: RedisServer, other: dict[str, str], words: str
) -> None:
    """Fault B1: never a silent 0 %, though the two have no directory and serve nobody."""
    payload = {"redis_store": "payload", "peers_listen": ""}
    a = node(start_daemon, redis, "a", **payload)
    b = node(start_daemon, redis, "b", **payload, **other)
    for one in (a, b):
        told = eventually(lambda one=one: [text for text in one.status()["problems"] if words in text], 90)
        assert len(told) == 1 and "a (kvcascade" in told[0] and "b (kvcascade" in told[0]
    names = redis.client().keys("*")
    assert not any(name.startswith((b"kvcascade:boot:", b"kvcascade:d:")) for name in names), names


def test_a_secret_keeps_strangers_out(
    start_daemon: Start, start_engine: Start, redis: RedisServer, tmp_path: Path
) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    for path, text in ((secret, "a secret of the fleet"), (other, "another secret, as long")):
        path.write_text(text)
        path.chmod(0o600)
    a = node(start_daemon, redis, "a", cluster_secret_file=str(secret))
    b = node(start_daemon, redis, "b", cluster_secret_file=str(secret))
    c = node(start_daemon, redis, "c", cluster_secret_file=str(other))
    tokens = prompt("one", BLOCKS)
    writer = start_engine(a)
    stored(a, writer, tokens, where="redis")
    assert fetch(start_engine(b), tokens)["loaded"] == BLOCKS
    stranger = start_engine(c)
    assert fetch(stranger, tokens)["matched"] == 0
    ticket = writer.hand_off(tokens)
    assert fetch(stranger, tokens, "again", ticket=ticket)["loaded"] == 0


def test_nobody_without_the_secret_has_a_node_connect_where_they_wish(
    start_daemon: Start, start_engine: Start, tmp_path: Path
) -> None:
    """Clients may write what they like into the parameters that carry a ticket."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the fleet")
    secret.chmod(0o600)
    a, b = (node(start_daemon, None, name, cluster_secret_file=str(secret)) for name in "ab")
    writer, reader = start_engine(a), start_engine(b)
    tokens = prompt("one", BLOCKS)
    writer.store(tokens)
    ticket = writer.hand_off(tokens)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        here = Ticket("a", b"x" * 16, Endpoint("127.0.0.1", listener.getsockname()[1]))
        body = here.pack(Secret())[TAG_BYTES:]
        forged = [here.pack(Secret()), here.pack(Secret(b"a guess at the secret")), ticket[:TAG_BYTES] + body, body]
        forged += [bytes(TAG_BYTES), ticket[:-1], ticket[:40] + bytes([ticket[40] ^ 1]) + ticket[41:]]
        for number, one in enumerate(forged):
            assert fetch(reader, tokens, f"{number}", ticket=one)["matched"] == 0
        with pytest.raises(TimeoutError):
            listener.accept()
    assert b.status()["cluster"]["peers"] == []
    assert fetch(reader, tokens, "good", ticket=ticket)["loaded"] == BLOCKS


@pytest.mark.parametrize("known", ["not at all", "payload", "directory"])
def test_without_a_secret_a_hand_off_names_nobody_but_nodes_that_redis_knows(
    start_daemon: Start, start_engine: Start, redis: RedisServer, known: str
) -> None:
    """Whoever has a node connect to them could plant bytes under the hashes of other engines' prompts."""
    where = None if known == "not at all" else redis
    flags = {"cluster_secret_file": "", "redis_write_policy": "on-evict"} | ({"redis_store": known} if where else {})
    a, b = (node(start_daemon, where, name, **flags) for name in "ab")
    writer, reader = start_engine(a), start_engine(b)
    tokens = prompt("one", BLOCKS)
    writer.store(tokens)
    ticket = writer.hand_off(tokens)
    true = Ticket.unpack(ticket, Secret())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        here = Endpoint("127.0.0.1", listener.getsockname()[1])
        for number, boot in enumerate((true.boot, b"x" * 16)):
            forged = Ticket("a", boot, here).pack(Secret())
            assert fetch(reader, tokens[16 * number :], f"{number}", ticket=forged)["matched"] == 0
        with pytest.raises(TimeoutError):
            listener.accept()
    assert b.status()["cluster"]["peers"] == []
    assert f"a hand-off names {here}" in b.log.read_text() and "cluster.secret_file" in b.log.read_text()
    taken = eventually(lambda: fetch(reader, tokens, "good", ticket=ticket)["tiers"]) if where else []
    assert taken == (["PEER"] * BLOCKS if where else [])


def test_recomputing_that_is_quicker_is_left_to_the_engine(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a = node(start_daemon, redis, "a")
    b = start_daemon(cluster_node="b", redis_url=redis.url)
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    reader = start_engine(b)
    reader.attach()
    reader.computed(10**9, 1.0)
    assert fetch(reader, tokens)["matched"] == 0
    (told,) = b.call("explain", hashes=b"".join(reader.hashes(tokens)))["namespaces"]
    assert "recomputing is quicker" in told["why"]
    for _ in range(60):
        reader.computed(1, 1.0)
    time.sleep(1.1)
    assert fetch(reader, tokens, "again")["loaded"] == BLOCKS


def test_explaining_a_prompt_where_no_engine_has_been_says_why_nobody_was_asked(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a, b = (node(start_daemon, redis, name, redis_store="payload") for name in "ab")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")

    def explained(daemon: Any) -> str:
        command = [str(Path(sys.executable).with_name("kvcascade")), "lookup", "--explain", "--socket"]
        words = [*command, str(daemon.socket), *map(str, tokens)]
        return subprocess.run(words, capture_output=True, text=True).stdout

    assert "why: other nodes were not asked" in explained(b)
    start_engine(b).attach()
    told = explained(b)
    assert "not asked" not in told and f"has {BLOCKS} blocks more" in told
    assert "deals with no other nodes" in explained(start_daemon())


def test_an_address_that_all_could_use_needs_one_to_be_named(start_daemon: Start) -> None:
    with pytest.raises(AssertionError, match=r"peers\.advertise"):
        start_daemon(peers_listen="0.0.0.0:0")


def test_a_secret_that_cannot_be_read_ends_the_start(start_daemon: Start, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"cluster\.secret_file: .* cannot be read"):
        start_daemon(cluster_secret_file=str(tmp_path / "none"))


def test_a_node_that_serves_nobody_fetches_what_is_handed_to_it(
    start_daemon: Start, start_engine: Start, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes and more")
    secret.chmod(0o600)
    a = node(start_daemon, None, "a", cluster_secret_file=str(secret))
    b = start_daemon(cluster_secret_file=str(secret), cluster_fetch="always", daemon_seed="0")
    tokens = prompt("one", BLOCKS)
    writer = start_engine(a)
    writer.store(tokens)
    assert fetch(start_engine(b), tokens, ticket=writer.hand_off(tokens))["tiers"] == ["PEER"] * BLOCKS


def test_a_takeover_goes_on_sharing(start_daemon: Start, start_engine: Start, redis: RedisServer) -> None:
    a = node(start_daemon, redis, "a", redis_store="directory")
    b = node(start_daemon, redis, "b", redis_store="directory")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="directory")
    old = a.process
    a.start_takeover()
    assert old.wait(20) == 0
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0))
    assert a.status()["problems"] == []
    assert fetch(start_engine(b), tokens)["loaded"] == BLOCKS


def test_what_is_handed_off_can_be_fetched_however_much_of_the_pool_it_holds(
    start_daemon: Start, start_engine: Start
) -> None:
    a = node(start_daemon, None, "a", dram="16MiB", disk="", disk_size="")
    b = node(start_daemon, None, "b")
    writer, reader = start_engine(a), start_engine(b)
    tokens = prompt("one", 300)  # of 512 that the pool holds, half of which may be pinned for one purpose
    writer.store(tokens)
    ticket = writer.hand_off(tokens)
    assert a.status()["cluster"]["handoffs"] == {"handoffs": 1, "handoff_blocks": 256}
    assert fetch(reader, tokens, ticket=ticket)["loaded"] >= 256
    other = prompt("two", BLOCKS)
    writer.store(other)
    assert fetch(reader, other, "2", ticket=writer.hand_off(other))["loaded"] == BLOCKS
