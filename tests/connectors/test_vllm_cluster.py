"""Prefixes of other nodes in vLLM: real daemons, a real Redis, vLLM's real engine and its real scheduler."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually
from engines.vllm_engine import Vllm
from engines.vllm_lab import Lab, pins, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture(scope="module")
def process(start_vllm: Callable[..., Vllm]) -> Vllm:
    return start_vllm()


def node(start_daemon: Any, redis: RedisServer, name: str, store: str, **flags: str) -> Any:
    flags = {"cluster_fetch": "always", "redis_deadline": "5s", "daemon_seed": "0", **flags}
    return start_daemon(cluster_node=name, peers_listen="127.0.0.1:0", redis_url=redis.url, redis_store=store, **flags)


def known(daemon: Any, blocks: int) -> Callable[[], bool]:
    """Whether other nodes can know of so many blocks, and fetch them from Redis."""

    def told() -> bool:
        cluster = daemon.status()["cluster"]
        shared = int(cluster["sharing"]["counters"].get("shared_blocks", 0))
        return shared >= blocks and cluster["fleet"]["counters"].get("entries_written", 0) > 0

    return told


@pytest.mark.engine
def test_an_engine_loads_what_an_engine_of_another_node_computed_from_that_node_and_from_redis(
    process, tiny_model, start_daemon, redis
):
    tokens = [(i * 31 + 3) % 1000 for i in range(200)]
    a = node(start_daemon, redis, "a", "both")

    def generated(daemon: Any) -> tuple[list[int], int, dict[str, float]]:
        process.call("close")
        process.call("real", str(tiny_model), str(daemon.socket), extra={"remote_wait_s": 60})
        (found,) = process.do("generate", [tokens])
        return found["tokens"], found["cached"], process.do("metrics")

    drawn, cached, metrics = generated(a)
    assert cached == 0
    eventually(known(a, 6), 60)
    for name, store, source in (("b", "directory", "peer"), ("c", "payload", "redis")):
        there = node(start_daemon, redis, name, store)
        again, cached, metrics = generated(there)
        assert (again, cached) == (drawn, 192)
        hits = {name: value for name, value in metrics.items() if "kvcascade_hit_tokens" in name and value}
        assert hits == {f"vllm:kvcascade_hit_tokens{{{source}}}": 192}
        assert metrics["vllm:external_prefix_cache_hits"] == 192
    process.call("close")


def test_while_other_nodes_are_asked_a_request_waits_with_one_lease_and_others_go_on(
    process, tiny_model, start_daemon, redis
):
    slow = {"cluster_deadline": "60s", "peers_deadline": "60s"}
    a = node(start_daemon, redis, "a", "directory", **slow)
    b = node(start_daemon, redis, "b", "directory", **slow)
    lab = Lab(process, tiny_model, a)
    lab.serve("cold", prompt(1, 100))
    lab.sound()
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0) > 0)
    lab = Lab(process, tiny_model, b, extra={"remote_wait_s": 60})
    lab.serve("begins alike", prompt(1, 40), parameters={"kvcascade": "write"})
    lab.sound()
    os.kill(a.pid, signal.SIGSTOP)
    try:
        lab.add("waits", prompt(1, 100))
        for number in range(5):
            lab.serve(f"goes on {number}", prompt(2 + number, 30))
            assert lab.report("waits")["status"] == "WAITING"
            leases = b.status()["leases"]
            assert (leases["live"], leases["pins"]) == (1, 2)
    finally:
        os.kill(a.pid, signal.SIGCONT)
    lab.run("waits")
    lab.prove("waits")
    lab.sound()
    counted = lab.counters()
    assert counted["hit_tokens_peer"] == 96 - 32
    assert "miss_unanswered" not in counted
    eventually(lambda: pins(b) == 0)
    process.call("close")


def test_a_request_whose_nodes_do_not_answer_is_computed(process, tiny_model, start_daemon, redis):
    slow = {"cluster_deadline": "60s", "peers_deadline": "60s"}
    a = node(start_daemon, redis, "a", "directory", **slow)
    b = node(start_daemon, redis, "b", "directory", **slow)
    lab = Lab(process, tiny_model, a)
    lab.serve("cold", prompt(1, 100))
    lab.sound()
    eventually(lambda: a.status()["cluster"]["fleet"]["counters"].get("entries_written", 0) > 0)
    lab = Lab(process, tiny_model, b, extra={"remote_wait_s": 0.3})
    os.kill(a.pid, signal.SIGSTOP)
    try:
        assert lab.serve("computed", prompt(1, 100)) == 103
        lab.sound()
    finally:
        os.kill(a.pid, signal.SIGCONT)
    process.call("close")
