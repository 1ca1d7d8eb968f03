"""Faults that others have met, between real nodes: by Redis and from node to node, a pattern in each byte."""

import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from engines.nodes import BLOCKS, SECRET, Start, absence_forgotten, fetch, fetched, node, stored
from engines.ports import free_port
from engines.proxy import Proxy
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually, prompt

from kvcascade.config.settings import Endpoint
from kvcascade.daemon.granting import Ticket
from kvcascade.tiers.remote import Secret


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


WAYS = pytest.mark.parametrize("way", ["payload", "directory"])


def knows(way: str) -> str:
    return "redis" if way == "payload" else "directory"


@WAYS
@pytest.mark.parametrize("difference", [{"model": "another digest"}, {"weights_epoch": "2"}])
def test_two_checkpoints_of_one_name_never_hit_across_nodes(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: str, difference: dict[str, Any]
) -> None:
    # B5: the same tokens and seed, so the same block hashes.
    a, b = (node(start_daemon, redis, name, redis_store=way) for name in "ab")
    writer, other, same = start_engine(a), start_engine(b, **difference), start_engine(b)
    tokens = prompt("one", BLOCKS)
    stored(a, writer, tokens, where=knows(way))
    assert fetch(other, tokens)["matched"] == 0
    assert fetch(same, tokens)["loaded"] == BLOCKS
    stored(b, other, tokens, where=knows(way))
    theirs = start_engine(a, **difference)
    assert fetch(theirs, tokens)["loaded"] == BLOCKS


@WAYS
@pytest.mark.parametrize("salt", ["b", ""])
def test_another_tenants_prefix_is_neither_found_nor_confirmed_on_another_node(
    start_daemon: Start, start_engine: Start, redis: RedisServer, way: str, salt: str
) -> None:
    # L4, with the paired control: the same salt hits.
    a, b = (node(start_daemon, redis, name, redis_store=way) for name in "ab")
    tenant, other, same = start_engine(a, salt="a secret"), start_engine(b, salt=salt), start_engine(b, salt="a secret")
    tokens = prompt("one", BLOCKS)
    stored(a, tenant, tokens, where=knows(way))
    assert fetch(other, tokens, "1") == fetch(other, prompt("never stored", BLOCKS), "2")
    named = [b"".join(other.hashes(prompt)) for prompt in (tokens, prompt("never stored", BLOCKS))]
    told = [b.call("explain", hashes=one)["namespaces"][0] for one in named]
    assert told[0] == told[1]
    assert fetch(same, tokens)["loaded"] == BLOCKS
    client = redis.client()
    for key in list(client.scan_iter()):
        assert b"a secret" not in key
        assert client.type(key) != b"string" or b"a secret" not in client.get(key)
    for one in (a, b):
        assert "a secret" not in one.log.read_text() + repr(one.status())


@pytest.mark.parametrize("damage", ["evicted", "corrupt", "another block's", "cut short"])
def test_a_block_that_goes_bad_in_redis_between_lookup_and_load_ends_what_is_loaded(
    start_daemon: Start, start_engine: Start, redis: RedisServer, damage: str
) -> None:
    # A10, G4: the lookup has promised ten.
    a = node(start_daemon, redis, "a", redis_store="payload")
    writer = start_engine(a)
    tokens = prompt("one", 10)
    client = redis.client()
    for blocks in range(1, 11):
        before = set(client.keys("kvcascade:b:*"))
        stored(a, writer, tokens[: 16 * blocks], where="redis") if blocks == 1 else writer.store(tokens[: 16 * blocks])
        eventually(lambda before=before: len(client.keys("kvcascade:b:*")) > len(before))
        if blocks == 7:
            (victim,) = set(client.keys("kvcascade:b:*")) - before
    with Proxy(redis.port) as proxy:
        b = node(start_daemon, redis, "b", redis_store="payload", redis_url=f"redis://127.0.0.1:{proxy.port}/0",
                 redis_deadline="10s", cluster_deadline="10s")  # fmt: skip
        reader = start_engine(b)
        reader.attach()
        proxy.rate = 50_000  # a block takes more than half a second
        found = eventually(lambda: one if (one := reader.lookup(tokens, "r", wait_ms=500))["matched"] else None)
        assert found["matched"] == 10
        whole = client.get(victim)
        match damage:
            case "evicted":
                client.delete(victim)
            case "corrupt":
                client.setrange(victim, len(whole) - 100, b"!" if whole[-100:-99] != b"!" else b"?")
            case "another block's":
                client.set(victim, client.get(next(key for key in before if key != victim)))
            case "cut short":
                client.set(victim, whole[:-1])
        proxy.rate = 0
        assert reader.load(found["lease"], 10, 10_000) == 6
        assert reader.read(tokens) == {"intact": list(range(6)), "foreign": [], "changed": []}
        reader.release(found["lease"])
        eventually(lambda: not b.status()["cluster"]["remote"]["fetching"])
        absence_forgotten()
        # What was good is here, and the next lookup promises no more.
        assert fetch(reader, tokens, "again")["loaded"] == 6


@pytest.mark.parametrize("again", ["at its address", "elsewhere", "with another model"])
def test_a_node_that_restarts_under_its_readers_costs_misses_and_is_found_again(
    start_daemon: Start, start_engine: Start, redis: RedisServer, again: str
) -> None:
    # H1: nothing of its old life is trusted.
    port = free_port()
    a = node(start_daemon, redis, "a", redis_store="directory", peers_listen=f"127.0.0.1:{port}")
    b = node(start_daemon, redis, "b", redis_store="directory", peers_deadline="1s", dram="16MiB", disk="",
             disk_size="", leases_lookup="300ms")  # fmt: skip
    writer, reader = start_engine(a), start_engine(b)
    prompts = [prompt(f"prompt {number}", BLOCKS) for number in range(4)]
    for tokens in prompts:
        stored(a, writer, tokens, where="directory")
    over, counts = threading.Event(), []

    def read() -> None:
        number = 0
        while not over.is_set():
            counts.append(fetched(reader, prompts[number % 4], f"{number}"))  # asserts that nothing is foreign
            number += 1
            # So that it has to be fetched again and again.
            reader.store(prompt(f"filler {number}", 480))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        eventually(lambda: BLOCKS in counts)
        a.kill()
        time.sleep(0.5)
        a.flags["--peers-listen"] = f"127.0.0.1:{port if again != 'elsewhere' else free_port()}"
        a.start()
        model = {"model": "another"} if again == "with another model" else {}
        second = start_engine(a, **model)
        for tokens in prompts:
            eventually(lambda tokens=tokens: second.store(tokens)["ready"] >= 0)
        time.sleep(0.5)
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive()
    if again != "with another model":
        eventually(lambda: fetched(reader, prompts[0], f"last {time.monotonic()}") == BLOCKS, 60)


def test_what_is_no_value_of_ours_runs_nothing_and_costs_a_miss(
    start_daemon: Start, start_engine: Start, redis: RedisServer, tmp_path: Path
) -> None:
    # L1, L6: pickles with a side effect, and what decoders choke on, wherever a node reads from Redis.
    trace = tmp_path / "it ran"

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(trace), "w")

    bad = [
        pickle.dumps(Evil()),
        b"\x81" * 100_000,
        b"\x9b" + b"\x10" + bytes(7),
        b"\xc6" * (1 << 20),
        b"",
        bytes(8 << 20),
    ]
    a = node(start_daemon, redis, "a", dram="64MiB")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0))
    client = redis.client()
    for number, data in enumerate(bad):
        for key in list(client.scan_iter()):
            client.delete(key)
            client.set(key, data)
        b = node(start_daemon, redis, f"b{number}")
        reader = start_engine(b)
        assert fetch(reader, tokens)["loaded"] == 0
        reader.store(tokens)
        assert fetch(reader, tokens, "again")["loaded"] == BLOCKS
        # Values that are read past may take longer than an answer should.
        eventually(lambda b=b: b.status()["cluster"]["redis"]["state"] == "ok", 60)
        b.stop()
    assert not trace.exists()
    eventually(lambda: a.status()["cluster"]["redis"]["state"] == "ok", 60)


def listening(pid: int) -> list[str]:
    """Addresses of TCP and UDP on which a process takes what comes."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in between
            inodes.add(descriptor.readlink().name)
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and (table.startswith("udp") or fields[3] == "0A"):
                found.append(fields[1])
    return found


def test_no_port_is_open_but_those_that_are_asked_for(start_daemon: Start, redis: RedisServer) -> None:
    # L3: the default start, then a node that serves others.
    assert listening(start_daemon().pid) == []
    assert listening(start_daemon(cluster_node="a", redis_url=redis.url).pid) == []
    serving = node(start_daemon, None, "b")
    port = int(serving.status()["cluster"]["server"]["listen"].rpartition(":")[2])
    assert listening(serving.pid) == [f"0100007F:{port:04X}"]


STRANGERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\nContent-Length: 0\r\n\r\n",
    "tls": bytes.fromhex("15030100020246"),  # an alert: what came was no hello
    "garbage": bytes(range(256)) * 64,
    "redis": b"-ERR unknown command 'kvcp'\r\n",
    "a later version": b"kvcp\x02\x00\x00\x00" + bytes(64),
    "nothing at all": b"",
    "an end at once": None,
}


@contextmanager
def answering(data: bytes | None) -> Iterator[int]:
    """The port of somebody who answers whatever comes with this; None: who closes at once."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve_all() -> None:
            held = []
            while not over.is_set():
                with suppress(TimeoutError):
                    one, _ = listener.accept()
                    if data is None:
                        one.close()
                        continue
                    held.append(one)
                    one.sendall(data)
            for one in held:
                one.close()

        thread = threading.Thread(target=serve_all)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("what", STRANGERS)
def test_a_peer_that_speaks_another_protocol_is_told_and_costs_a_miss(
    start_daemon: Start, start_engine: Start, what: str
) -> None:
    a = node(start_daemon, None, "a")
    b = node(start_daemon, None, "b", peers_deadline="1s", cluster_deadline="2s")
    writer, reader = start_engine(a), start_engine(b)
    tokens = prompt("one", BLOCKS)
    writer.store(tokens)
    with answering(STRANGERS[what]) as port:
        ticket = Ticket("stranger", b"x" * 16, Endpoint("127.0.0.1", port)).pack(Secret(SECRET))
        assert fetch(reader, tokens, "1", ticket=ticket)["loaded"] == 0
        (peer,) = b.status()["cluster"]["peers"]
        assert peer["endpoint"] == f"127.0.0.1:{port}" and peer["state"] == "sick" and peer["reason"]
    absence_forgotten()
    assert fetch(reader, tokens, "2", ticket=writer.hand_off(tokens))["loaded"] == BLOCKS


def test_who_speaks_another_protocol_to_a_node_is_turned_away_and_told_of(
    start_daemon: Start, start_engine: Start
) -> None:
    a, b = node(start_daemon, None, "a"), node(start_daemon, None, "b")
    host, _, port = a.status()["cluster"]["server"]["listen"].rpartition(":")
    silent = socket.create_connection((host, int(port)), 10)
    with silent:
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes.fromhex("160301007b010000770303") + bytes(120),
            b"*1\r\n$4\r\nPING\r\n" * 9,
        ):
            with socket.create_connection((host, int(port)), 10) as sock, suppress(ConnectionError):
                sock.sendall(said)
                while sock.recv(1 << 16):
                    pass
        server = a.status()["cluster"]["server"]
        assert server["counters"]["refused_callers"] == 3
        assert "is no kvcascade node" in server["refused"]
        writer, tokens = start_engine(a), prompt("one", BLOCKS)
        writer.store(tokens)
        assert fetch(start_engine(b), tokens, ticket=writer.hand_off(tokens))["loaded"] == BLOCKS


@pytest.mark.parametrize("fetch_policy", ["always", "cost"])
def test_a_node_that_does_not_answer_keeps_nothing_from_readers_that_redis_has(
    start_daemon: Start, start_engine: Start, redis: RedisServer, fetch_policy: str
) -> None:
    # G1: with the deadlines that users have, where no source's own is shorter than a question's; with "cost" there is
    # less time, a quarter of what computing takes.
    a, b = (node(start_daemon, redis, name, cluster_fetch=fetch_policy) for name in "ab")
    tokens = prompt("one", BLOCKS)
    stored(a, start_engine(a), tokens, where="redis")
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0))
    reader = start_engine(b, timeout=20.0)
    reader.attach()
    reader.computed(len(tokens), 6.0)
    a.process.send_signal(signal.SIGSTOP)
    found = reader.lookup(tokens, "r", wait_ms=15_000)
    assert (found["matched"], found["asking"]) == (BLOCKS, False)
    reader.release(found["lease"])
    (peer,) = b.status()["cluster"]["peers"]
    assert peer["state"] == "sick"
    a.process.send_signal(signal.SIGCONT)
    assert "never retrieved" not in b.log.read_text()


def test_a_node_that_has_served_before_and_hangs_is_not_waited_for_until_the_deadline(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    # G1: its usual latency is known, and both deadlines are far longer than this test waits.
    flags = {"redis_store": "directory", "cluster_deadline": "300s", "peers_deadline": "60s"}
    a, b = (node(start_daemon, redis, name, **flags) for name in "ab")
    writer, reader = start_engine(a), start_engine(b, timeout=90.0)
    stored(a, writer, prompt("one", BLOCKS), where="directory")
    assert fetch(reader, prompt("one", BLOCKS))["loaded"] == BLOCKS
    (link,) = b.status()["cluster"]["links"]
    assert link["observed"] and link["latency_ms"] < 1000
    entries = a.status()["cluster"]["fleet"]["counters"]["entries_written"]
    writer.store(prompt("two", BLOCKS))
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"]["entries_written"] > entries)
    a.process.send_signal(signal.SIGSTOP)
    found = reader.lookup(prompt("two", BLOCKS), "two", wait_ms=15_000)
    assert (found["matched"], found["asking"]) == (0, False)
    (peer,) = b.status()["cluster"]["peers"]
    assert (peer["state"], peer["reason"]) == ("sick", "no answer in time")
    a.process.send_signal(signal.SIGCONT)
    eventually(lambda: fetched(reader, prompt("two", BLOCKS), f"{time.monotonic()}") == BLOCKS, 60)
    assert b.status()["problems"] == []


def test_status_lists_some_of_very_many_nodes_and_the_latest_of_them(start_daemon: Start, start_engine: Start) -> None:
    """A reply has a limit: with a thousand nodes and a thousand sessions `status` would not be told at all."""
    b = node(start_daemon, None, "b", cluster_deadline="1s")
    reader = start_engine(b)
    reader.attach()
    nobody = Endpoint("127.0.0.1", free_port())
    for number in range(300):
        boot = number.to_bytes(16, "big")
        reader.lookup(
            prompt("one", 1), f"{number}", ticket=Ticket("n", boot, nobody).pack(Secret(SECRET)), wait_ms=1000
        )
    listed = [int(peer["boot"], 16) for peer in b.status()["cluster"]["peers"]]
    assert listed == list(range(300 - 256, 300))
