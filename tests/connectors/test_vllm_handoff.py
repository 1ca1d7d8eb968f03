"""Prefill here, decode there: vLLM's own schedulers around a model of ours, on nodes of their own; see vllm_side.py."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.nodes import secret_file
from engines.redis_server import serve
from engines.scripted import eventually
from engines.scripted import prompt as other
from engines.vllm_engine import Vllm, sources
from engines.vllm_side import expected

from kvcascade.connectors.handoff import HANDOFF, REFUSED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def prompt(name: int, tokens: int) -> list[int]:
    return [(i * 31 + 7 * name + 3) % 1000 for i in range(tokens)]


class Lab:
    """One scheduler, worker and model of ours, in a process of its own."""

    def __init__(self, process: Vllm, model: Path, daemon: Any, **options: Any) -> None:
        self._process = process
        self._window = int(options.get("window", 0))
        process.call("close")
        process.call("lab", str(model), str(daemon.socket), **options)

    def __getattr__(self, step: str) -> Any:
        return lambda *arguments, **named: self._process.do(step, *arguments, **named)

    def get(self, name: str) -> Any:
        return self._process.get(name)

    def serve(self, name: str, tokens: list[int], count: int = 4, parameters: Any = None) -> tuple[int, Any]:
        """Runs one request to its end, proves its tokens; how many were computed, and what its client was given."""
        before = self.get("computed")
        self.add(name, tokens, count, parameters=parameters)
        self.run(name, steps=4000)
        report = self.report(name)
        assert report["tokens"] == expected(tokens, count, self._window), name
        return int(self.get("computed")) - before, report["parameters"]

    def prefill(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """What a proxy takes from the prefill engine, as it comes through JSON."""
        _, given = self.serve(name, tokens, 1, ASKED)
        assert list(given) == [HANDOFF]
        return dict(json.loads(json.dumps(given)))


def started(start_vllm: Callable[..., Vllm]) -> Vllm:
    """With the variable VLLM_SOURCES the Python code of that version of vLLM runs instead."""
    version = os.environ.get("VLLM_SOURCES")
    return start_vllm(first=[sources(version)] if version else [])


@pytest.fixture(scope="module")
def prefill_process(start_vllm: Callable[..., Vllm]) -> Vllm:
    return started(start_vllm)


@pytest.fixture(scope="module")
def decode_process(start_vllm: Callable[..., Vllm]) -> Vllm:
    return started(start_vllm)


@pytest.fixture
def start_prefill(prefill_process: Vllm, tiny_model: Path) -> Iterator[Callable[..., Lab]]:
    yield lambda daemon, **options: Lab(prefill_process, tiny_model, daemon, **options)
    prefill_process.call("close")


@pytest.fixture
def start_decode(decode_process: Vllm, tiny_model: Path) -> Iterator[Callable[..., Lab]]:
    yield lambda daemon, **options: Lab(decode_process, tiny_model, daemon, **options)
    decode_process.call("close")


@pytest.fixture
def start_node(start_daemon: Callable[..., Any]) -> Callable[..., Any]:
    def start(name: str, **flags: str) -> Any:
        here = {"cluster_node": name, "peers_listen": "127.0.0.1:0", "cluster_fetch": "always", "daemon_seed": "0"}
        here["cluster_secret_file"] = secret_file()
        return start_daemon(**here | flags)

    return start


def handed(daemon: Any) -> int:
    return int(daemon.status()["cluster"]["handoffs"]["handoffs"])


@pytest.mark.parametrize(("prefills", "decodes"), [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")])
def test_what_one_engine_prefills_another_decodes(start_prefill, start_decode, start_node, prefills, decodes):
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a, role=prefills), start_decode(b, role=decodes, prefix_caching=False)
    given = first.prefill("one", prompt(1, 100))
    assert second.serve("one", prompt(1, 100), parameters=given) == (100 - 96 + 3, None)
    # Fetched, so it need not be kept any more.
    eventually(lambda: handed(a) == 0 and a.status()["leases"]["pins"] == 0)
    assert second.idle() == 0
    counted = second.counters()
    assert counted["handoffs_taken"] == 1
    # Still on their way when they were matched, or there already.
    assert counted.get("hit_tokens_peer", 0) + counted.get("hit_tokens_dram", 0) == 96
    assert "handoffs_missed" not in counted
    # A second turn: the prefill engine loads what it stored, and hands the longer prompt off.
    longer = prompt(1, 100) + expected(prompt(1, 100), 4) + prompt(2, 60)
    first = start_prefill(a, role=prefills)
    computed, again = first.serve("two", longer, 1, ASKED)
    assert computed == 164 - 96
    assert second.serve("two", longer, parameters=again)[0] == 164 - 160 + 3
    # A consumer stores nothing of what it draws.
    second.serve("draws", prompt(3, 40), 30)
    if decodes == "kv_consumer":
        assert "stored_blocks" not in second.counters()
    else:
        eventually(lambda: second.counters().get("stored_blocks", 0) >= 4)


def test_a_prompt_that_is_still_being_stored_is_waited_for(start_prefill, start_decode, start_node):
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a, extra={"stage": True}), start_decode(b)
    first.hold("copy")
    given = first.prefill("one", prompt(1, 100))
    second.add("one", prompt(1, 100), 4, parameters=given)
    for _ in range(20):
        second.step()
    assert second.get("computed") == 0
    assert handed(a) == 1
    first.release("copy")
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 4)
    assert second.get("computed") == 100 - 96 + 3


def test_two_engines_of_one_node_hand_off_too(start_prefill, start_decode, start_node):
    a = start_node("a")
    first, second = start_prefill(a, extra={"stage": True}), start_decode(a)
    first.hold("copy")
    given = first.prefill("one", prompt(1, 100))
    second.add("one", prompt(1, 100), 4, parameters=given)
    for _ in range(20):
        second.step()
    first.release("copy")
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 4)
    assert second.get("computed") == 100 - 96 + 3


@pytest.mark.parametrize("when", ["before it is asked", "while it is asked"])
def test_a_source_that_dies_costs_the_prefill_and_no_more(start_prefill, start_decode, start_node, when):
    # Fault E1: of another node.
    a, b = start_node("a"), start_node("b", peers_deadline="2s", cluster_deadline="2s")
    first, second = start_prefill(a, extra={"stage": True}), start_decode(b)
    first.hold("copy")
    given = first.prefill("one", prompt(1, 100))
    if when == "before it is asked":
        a.kill()
    second.add("one", prompt(1, 100), 4, parameters=given)
    for _ in range(10):
        second.step()
    if when == "while it is asked":
        assert second.get("computed") == 0
        a.kill()
    first.release("copy")
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 4)
    assert second.get("computed") == 103
    assert second.counters()["handoffs_missed"] == 1
    assert second.idle() == 0
    # A node that comes back is another incarnation, which keeps none of the old one's promises.
    a.start()
    assert second.serve("again", [*prompt(1, 100), 1], parameters=given)[0] < 104


def test_a_hand_off_that_nobody_fetches_ends_and_then_costs_a_prefill(
    start_prefill, start_decode, start_node, start_engine
):
    a, b = start_node("a", dram="4MiB", dram_slab="1MiB", disk=""), start_node("b")
    first = start_prefill(a, extra={"handoff_keep_s": 1})
    given = first.prefill("one", prompt(1, 100))
    engine = start_engine(a)

    def pushed_out() -> bool:
        for number in range(20):
            engine.store(other(f"other {number}", 16))
        return handed(a) == 0

    pushed_out()
    eventually(pushed_out)
    pushed_out()
    second = start_decode(b)
    assert second.serve("one", prompt(1, 100), parameters=given)[0] == 103
    assert second.counters()["handoffs_missed"] == 1


def test_with_the_source_dead_redis_still_has_it(start_prefill, start_decode, start_node):
    with serve() as redis:
        a = start_node("a", redis_url=redis.url, redis_store="payload", peers_deadline="1s")
        b = start_node("b", redis_url=redis.url, redis_store="payload", peers_deadline="1s")
        first, second = start_prefill(a), start_decode(b)
        given = first.prefill("one", prompt(1, 100))
        eventually(lambda: a.status()["cluster"]["sharing"]["counters"].get("shared_blocks", 0) >= 6)
        a.kill()
        assert second.serve("one", prompt(1, 100), parameters=given)[0] == 100 - 96 + 3
        assert second.counters()["handoffs_taken"] == 1


def test_a_node_that_serves_nobody_hands_nothing_off(start_prefill, daemon):
    first = start_prefill(daemon)
    assert first.serve("one", prompt(1, 100), 1, ASKED) == (100, None)
    assert "handoffs_given" not in first.counters()


def test_a_hand_off_that_is_not_believed_is_computed(start_prefill, start_decode, start_node):
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a), start_decode(b)
    for number, change in enumerate(({"namespace": "00" * 32}, {"last": "00" * 32}, {"version": 9})):
        given = first.prefill(f"lie {number}", prompt(number, 100))
        given[HANDOFF] |= change
        computed, told = second.serve(f"lie {number}", prompt(number, 100), parameters=given)
        assert (computed, list(told)) == (103, [REFUSED])
        assert told[REFUSED].startswith(f"{HANDOFF}.{next(iter(change))}: ")
    assert second.counters()["handoffs_refused"] == 3
    # What is in the ticket is the daemon's to judge.
    given = first.prefill("ticket", prompt(7, 100))
    given[HANDOFF] |= {"ticket": "AAAA"}
    assert second.serve("ticket", prompt(7, 100), parameters=given) == (103, None)
    assert second.counters()["handoffs_missed"] == 1
    # Another connector's words are none of ours; a wish that is not understood is told by name, too.
    assert second.serve("nixl", prompt(8, 40), parameters={"do_remote_prefill": True, "remote_port": 1}) == (43, None)
    assert second.serve("typo", prompt(9, 40), parameters={"kvcascade": "no"})[1][REFUSED].startswith("kv_transfer_")


def test_an_aborted_prefill_hands_nothing_off(start_prefill, start_node):
    a = start_node("a")
    first = start_prefill(a)
    first.add("one", prompt(1, 100), 1, parameters=ASKED)
    first.step()
    first.abort("one")
    assert first.idle() == 0
    assert first.report("one")["parameters"] is None
    assert handed(a) == 0


def test_the_daemon_learns_how_fast_prompts_are_computed(start_prefill, start_node):
    a = start_node("a")
    first = start_prefill(a, max_tokens_a_step=512)

    def told() -> list[Any]:
        return list(a.status()["cluster"]["remote"]["prefill"])

    first.serve("short", prompt(1, 200))
    first.add("long one", prompt(2, 250), 4)
    first.add("long two", prompt(3, 250), 4)
    first.run("long one", "long two")
    assert told() == []
    first.serve("long", prompt(4, 400))
    (one,) = eventually(told)
    assert one["engine"].startswith("vllm")
    assert all(0 < speed < 1e7 for speed in one["tokens_s"].values())


# ---- what happens to a hand-off on its way


@pytest.mark.parametrize("point", ["ask", "source", "load", "copy"])
def test_a_request_may_be_aborted_while_its_hand_off_is_at_any_point(start_prefill, start_decode, start_node, point):
    # Fault C1: the source's pins end by the fetch or by their deadline, the other node's with the request.
    a, b = start_node("a"), start_node("b")
    first = start_prefill(a, extra={"stage": True, "handoff_keep_s": 3})
    second = start_decode(b)
    second.serve("attached", prompt(8, 20))
    first.serve("attached", prompt(8, 20), 1)
    if point == "source":
        first.hold("copy")
    given = first.prefill("one", prompt(1, 100))
    if point != "source":
        second.hold(point)
    second.add("one", prompt(1, 100), 4, parameters=given)
    loads = second.get("loads")
    for _ in range(400):
        second.step()
        if point in ("ask", "source") or second.get("loads") != loads:
            break
    assert point in ("ask", "source") or second.get("loads") != loads
    for _ in range(3):
        second.step()
    assert second.report("one")["tokens"] == []
    second.abort("one")
    second.step()
    (first if point == "source" else second).release("copy" if point == "source" else point)
    assert (first.idle(), second.idle()) == (0, 0)
    assert first.get("faults") == second.get("faults") == []
    for node in (a, b):
        eventually(lambda node=node: handed(node) == 0 and node.status()["leases"]["pins"] == 0)
    second.serve("after", prompt(1, 100), parameters=given)


@pytest.mark.parametrize("window", [0, 40])
def test_a_request_that_was_handed_off_may_be_preempted_and_resumed(start_prefill, start_decode, start_node, window):
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a, window=window), start_decode(b, window=window, prefix_caching=False)
    given = first.prefill("one", prompt(1, 100))
    second.add("one", prompt(1, 100), 40, parameters=given)
    while len(second.report("one")["tokens"]) < 20:
        second.step()
    for _ in range(15):
        if second.counters().get("stored_blocks", 0) >= (2 if window else 1):
            break
        time.sleep(0.2)
        second.step()  # it sends what waited for its slots
    else:
        raise AssertionError("it did not come to that: nothing that was drawn is stored")
    before = second.get("computed")
    assert second.preempt_all()
    a.kill()  # its ticket is asked with again, and is of no use any more
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 40, window)
    assert second.get("computed") - before < 60
    assert second.idle() == 0
    assert second.get("faults") == []
    eventually(lambda: b.status()["leases"]["pins"] == 0)


def test_others_may_be_preempted_while_a_hand_off_is_loaded(start_prefill, start_decode, start_node):
    # Fault E1: the pool is small, and the blocks that the load writes to are kept for it.
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a), start_decode(b, blocks=22)
    given = first.prefill("one", prompt(1, 100))
    second.hold("copy")
    second.add("one", prompt(1, 100), 30, parameters=given)
    while not second.get("loads"):
        second.step()
    pressing = {f"pressing {number}": prompt(5 + number, 80) for number in range(3)}
    for name, tokens in pressing.items():
        second.add(name, tokens, 60, parameters={"kvcascade": "off"})
    seen: set[str] = set()
    for _ in range(60):
        second.step()
        seen |= {second.report(name)["status"] for name in pressing}
    assert "PREEMPTED" in seen
    second.release("copy")
    second.run("one", *pressing, steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 30)
    for name, tokens in pressing.items():
        assert second.report(name)["tokens"] == expected(tokens, 60)
    assert second.idle() == 0
    assert second.get("faults") == []
    assert second.counters()["handoffs_taken"] >= 1


# ---- beside another connector


@pytest.mark.parametrize("multi", ["chosen", "sibling"])
def test_below_a_multi_connector_a_hand_off_goes_beside_what_the_sibling_says(
    start_prefill, start_decode, start_node, multi
):
    says = {"remote_engine_id": "x", "remote_port": 1}
    a, b = start_node("a"), start_node("b")
    first = start_prefill(a, multi=multi, sibling={"parameters": says})
    second = start_decode(b, multi=multi, sibling={"parameters": says, "later": True})
    number = 60 + (multi == "sibling")  # the sibling's blocks outlive the test
    _, given = first.serve("one", prompt(number, 100), 1, ASKED)
    assert given.keys() == says.keys() | {HANDOFF}
    given = json.loads(json.dumps(given))
    assert second.serve("one", prompt(number, 100), parameters=given) == (100 - 96 + 3, says)
    assert second.counters()["handoffs_taken"] == 1
    given[HANDOFF] |= {"version": 9}
    _, told = second.serve("two", [*prompt(number, 100), 1], parameters=given)
    assert told.keys() == says.keys() | {REFUSED}
    assert (first.idle(), second.idle()) == (0, 0)
    for node in (a, b):
        eventually(lambda node=node: handed(node) == 0 and node.status()["leases"]["pins"] == 0)


# ---- several KV groups

WINDOW = 40


def test_a_model_with_a_sliding_window_is_handed_off_in_both_groups(start_prefill, start_decode, start_node):
    # Fault J3: both groups' blocks, and of the one with the window no more than the window.
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a, window=WINDOW), start_decode(b, window=WINDOW)
    given = first.prefill("one", prompt(1, 200))
    assert second.serve("one", prompt(1, 200), 20, parameters=given) == (200 - 192 + 19, None)
    assert second.counters()["loaded_blocks"] == 12 + 3
    # A second turn: the prefill engine, started anew, loads what it stored, and of the window's group the window alone;
    # the decode engine has the head in its own cache, where what is older than the window is gone too.
    longer = prompt(1, 200) + expected(prompt(1, 200), 20, WINDOW) + prompt(2, 60)
    first = start_prefill(a, window=WINDOW)
    computed, again = first.serve("two", longer, 1, ASKED)
    assert computed == 280 - 192
    assert first.counters()["loaded_blocks"] == 12 + 3
    assert second.serve("two", longer, parameters=again)[0] == 280 - 272 + 3
    counted = second.counters()
    assert counted["handoffs_taken"] == 2
    assert "handoffs_missed" not in counted
    assert (first.idle(), second.idle()) == (0, 0)
    assert first.get("faults") == second.get("faults") == []
    for node in (a, b):
        eventually(lambda node=node: handed(node) == 0 and node.status()["leases"]["pins"] == 0)


def test_a_hand_off_whose_window_is_still_being_stored_is_waited_for(start_prefill, start_decode, start_node):
    # By the time that there are slots, the engine has given the window's old blocks to others.
    a, b = start_node("a"), start_node("b")
    first, second = start_prefill(a, window=WINDOW, blocks=40), start_decode(b, window=WINDOW)
    first.serve("attached", prompt(8, 20))
    first.hold("ask")
    first.add("one", prompt(1, 200), 1, parameters=ASKED | {"kvcascade": "write"})
    for _ in range(8):
        first.step()
    first.serve("other", prompt(3, 200), 1, {"kvcascade": "off"})
    given = first.report("one")["parameters"]
    second.add("one", prompt(1, 200), 4, parameters=given)
    for _ in range(20):
        second.step()
    first.release("ask")
    assert first.idle() == 0
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 200), 4, WINDOW)
    assert second.get("computed") == 200 - 192 + 3
    assert second.counters()["loaded_blocks"] == 12 + 3
    assert first.get("faults") == second.get("faults") == []


def test_a_window_whose_old_blocks_the_source_never_had_is_computed(start_prefill, start_decode, start_node):
    # The prefill engine has the head in its own cache, its daemon has forgotten it: of the window's group nobody has
    # the blocks before the window any more.
    a, b = start_node("a", disk=""), start_node("b")
    first, second = start_prefill(a, window=WINDOW), start_decode(b, window=WINDOW)
    first.serve("head", prompt(1, 200), parameters={"kvcascade": "off"})
    longer = prompt(1, 200) + prompt(2, 100)
    computed, given = first.serve("one", longer, 1, ASKED)
    assert computed == 300 - 192
    assert second.serve("one", longer, parameters=given) == (303, None)
    assert second.counters()["handoffs_missed"] == 1
    assert (first.idle(), second.idle()) == (0, 0)
    assert first.get("faults") == second.get("faults") == []
    for node in (a, b):
        eventually(lambda node=node: node.status()["leases"]["pins"] == 0)


def test_with_several_groups_a_source_that_dies_costs_the_prefill_and_no_more(start_prefill, start_decode, start_node):
    # Fault E1: of another node.
    a, b = start_node("a"), start_node("b", peers_deadline="2s", cluster_deadline="2s")
    first, second = start_prefill(a, extra={"stage": True}, window=WINDOW), start_decode(b, window=WINDOW)
    first.hold("copy")
    given = first.prefill("one", prompt(1, 100))
    second.add("one", prompt(1, 100), 4, parameters=given)
    for _ in range(10):
        second.step()
    assert second.get("computed") == 0
    a.kill()
    first.release("copy")
    second.run("one", steps=4000)
    assert second.report("one")["tokens"] == expected(prompt(1, 100), 4, WINDOW)
    assert second.get("computed") == 103
    assert second.counters()["handoffs_missed"] == 1
    assert second.idle() == 0
    eventually(lambda: b.status()["leases"]["pins"] == 0)
