"""vLLM's own scheduler and block pool drive the connector through the states that an engine reaches rarely.

The model is one of ours that shows every wrong byte in its tokens (engines/vllm_side.py); the daemon is a real one.
"""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.faulty_daemon import Rules
from engines.scripted import eventually
from engines.scripted import prompt as other
from engines.vllm_engine import Vllm, VllmError, sources
from engines.vllm_lab import Lab, at_random, in_memory, pins, prompt, stored
from engines.vllm_side import expected

from kvcascade.tiers.block import block_hashes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 16
MEGA = 1 << 20


@pytest.fixture(scope="module")
def process(start_vllm: Callable[..., Vllm]) -> Vllm:
    """With the variable VLLM_SOURCES the Python code of that version of vLLM runs instead."""
    version = os.environ.get("VLLM_SOURCES")
    return start_vllm(first=[sources(version)] if version else [])


@pytest.fixture
def start_lab(process: Vllm, tiny_model: Path) -> Iterator[Callable[..., Lab]]:
    """Opens a lab in place of the one before, as a restarted engine."""
    yield lambda daemon, **options: Lab(process, tiny_model, daemon, **options)
    process.call("close")


# ---- what is loaded


@pytest.mark.parametrize("sync_bytes", [0, MEGA])
def test_a_restarted_engine_computes_only_what_is_not_stored(start_lab, daemon, sync_bytes):
    lab = start_lab(daemon)
    assert lab.serve("cold", prompt(1, 100)) == 103
    lab.sound()
    stored(lab, daemon, 6)
    lab = start_lab(daemon, extra={"sync_budget_bytes": sync_bytes})
    assert lab.serve("warm", prompt(1, 100)) == 7
    assert lab.serve("longer", prompt(1, 90) + prompt(2, 60)) == 153 - 80
    lab.sound()
    assert lab.get("received") == ([] if sync_bytes else ["warm"])
    counted = lab.counters()
    assert counted["hit_tokens_dram"] == 96
    assert counted["loaded_blocks"] == 6
    # Fault C1: nothing stays pinned.
    eventually(lambda: pins(daemon) == 0)


def test_the_whole_prompt_is_never_loaded(start_lab, daemon):
    # Fault E10: a prompt of whole blocks, all of them stored, with 0, some or all blocks in the engine's own cache.
    start_lab(daemon).serve("cold", prompt(1, 96))
    lab = start_lab(daemon, extra={"sync_budget_bytes": MEGA})
    assert lab.serve("all", prompt(1, 96)) == 16 + 3
    assert lab.serve("again", prompt(1, 96)) == 16 + 3
    lab = start_lab(daemon)
    assert lab.serve("some", prompt(1, 40)) == 40 - 32 + 3
    assert lab.serve("all", prompt(1, 96)) == 16 + 3
    lab.sound()


def test_without_the_engines_own_cache_all_hits_are_ours(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    assert lab.serve("cold", prompt(1, 100)) == 103
    stored(lab, daemon, 6)
    assert lab.serve("warm", prompt(1, 100)) == 7
    lab.sound()


def test_a_request_may_wish_not_to_be_loaded_or_not_to_be_stored(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    for name, wish, computed in (("off", "off", 67), ("read", "read", 67), ("write", "write", 67), ("back", "off", 67)):
        assert lab.serve(name, prompt(1, 64), parameters={"kvcascade": wish}) == computed
    stored(lab, daemon, 4)
    assert lab.serve("read again", prompt(1, 64), parameters={"kvcascade": "read"}) == 16 + 3
    assert lab.serve("write again", prompt(1, 64), parameters={"kvcascade": "write"}) == 67
    assert lab.serve("skips", prompt(1, 64), skip=True) == 67
    lab.sound()


def test_an_engine_that_only_consumes_stores_nothing(start_lab, daemon):
    lab = start_lab(daemon, role="kv_consumer", prefix_caching=False)
    assert lab.serve("first", prompt(1, 64)) == lab.serve("second", prompt(1, 64)) == 67
    lab.sound()


def test_what_a_request_draws_is_stored_as_it_is_computed(start_lab, daemon):
    start_lab(daemon).serve("long", prompt(1, 20), 60)
    drawn = expected(prompt(1, 20), 60)
    lab = start_lab(daemon)
    # 79 tokens were final: the last one drawn has no KV.
    assert lab.serve("next turn", prompt(1, 20) + drawn + [5], 2) == 81 - 64 + 1
    lab.sound()


# ---- whatever ends a load or a save in the middle


@pytest.mark.parametrize("point", ["ask", "load", "copy"])
@pytest.mark.parametrize("event", ["abort", "slow", "another ends first", "daemon killed"])
def test_a_load_may_end_in_any_way_at_any_point(start_lab, start_daemon, point, event):
    # Faults E1, A10, C4: reported once, never after the engine has dropped it, and what was not loaded is computed.
    daemon = start_daemon()
    start_lab(daemon).serve("cold", prompt(1, 100))
    lab = start_lab(daemon)
    lab.serve("other", prompt(2, 20))
    lab.hold(point)
    lab.add("slow", prompt(1, 100))
    for _ in range(3):
        lab.step()
    if event == "abort":
        lab.abort("slow")
        lab.step()
    elif event == "another ends first" and point != "ask":
        lab.serve("first", prompt(3, 30))
    elif event == "daemon killed":
        daemon.kill()
    lab.release(point)
    if event != "abort":
        lab.run("slow")
        lab.prove("slow")
    lab.sound()
    if not daemon.running:
        daemon.start()
    assert lab.serve("after", prompt(1, 100)) <= 103
    lab.sound()
    eventually(lambda: pins(daemon) == 0)


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("point", ["ask", "copy"])
@pytest.mark.parametrize("event", ["abort", "finish", "preempt", "pressure"])
def test_a_save_may_be_cut_off_at_any_point_and_no_wrong_block_is_stored(start_lab, daemon, stage, point, event):
    # A pending save is finished or failed before its blocks are reused: freed blocks hold poison.
    lab = start_lab(daemon, prefix_caching=False, extra={"stage": stage}, blocks=24)
    lab.hold(point)
    lab.add("saved", prompt(1, 100), 6)
    lab.step()
    if event == "abort":
        lab.abort("saved")
    elif event == "finish":
        lab.run("saved")
    elif event == "preempt":
        assert lab.preempt_all()
    else:
        for number in range(3):
            lab.add(f"pressing {number}", prompt(5 + number, 90), 30)
    for _ in range(3):
        lab.step()
    lab.release(point)
    lab.run(*(name for name in lab.prompts if not (event == "abort" and name == "saved")))
    lab.sound()
    if event != "abort":
        lab.prove(*lab.prompts)
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("read back", prompt(1, 100), 6)
    lab.sound()


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("event", ["finish", "abort", "preempt"])
def test_what_a_step_made_final_is_stored_although_its_slots_come_when_its_blocks_are_others(
    start_lab, daemon, stage, event
):
    # Nobody waits for slots, and no block is kept for them: freed blocks are poisoned, and given to the next request.
    lab = start_lab(daemon, prefix_caching=False, extra={"stage": stage}, blocks=24)
    lab.hold("ask")
    lab.add("late", prompt(1, 100), 1 if event == "finish" else 40, parameters={"kvcascade": "write"})
    lab.step_until(lambda: bool(lab.report("late")["tokens"]))
    if event == "abort":
        lab.abort("late")
    elif event == "preempt":
        assert lab.preempt_all()
        lab.step()
    lab.serve("next", prompt(2, 100), parameters={"kvcascade": "off"})
    assert "stored_blocks" not in lab.counters()
    lab.release("ask")
    if event == "preempt":
        lab.run("late")
        lab.prove("late")
    lab.sound()  # an engine with nothing else to do has gone on until they were stored
    stored(lab, daemon, 6)
    assert "saves_late" not in lab.counters()
    lab = start_lab(daemon, prefix_caching=False)
    assert lab.serve("read back", prompt(1, 100)) == 7
    lab.sound()


def test_copies_aside_that_follow_one_another_keep_to_themselves(start_lab, daemon):
    # They fill the same memory again, in turn longer and shorter.
    lab = start_lab(daemon, prefix_caching=False)
    lengths = (100, 40, 90, 120)
    blocks = 0
    for number, length in enumerate(lengths):
        lab.hold("ask")
        lab.serve(f"late {number}", prompt(number, length), parameters={"kvcascade": "write"})
        lab.release("ask")
        lab.sound()
        blocks += length // 16
        stored(lab, daemon, blocks)
    lab = start_lab(daemon, prefix_caching=False)
    for number, length in enumerate(lengths):
        assert lab.serve(f"read back {number}", prompt(number, length)) == length % 16 + 3
    lab.sound()


def test_what_waits_for_slots_of_a_daemon_that_is_gone_is_let_go_and_the_engine_comes_to_rest(start_lab, start_daemon):
    daemon = start_daemon()
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("first", prompt(2, 40))
    os.kill(daemon.pid, signal.SIGSTOP)
    lab.serve("late", prompt(1, 100), parameters={"kvcascade": "write"})
    lab.sound()
    os.kill(daemon.pid, signal.SIGCONT)
    assert lab.counters()["saves_late"] == 6


def test_a_reset_lets_go_of_what_waits_for_slots(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    lab.hold("ask")
    lab.serve("late", prompt(1, 100), parameters={"kvcascade": "write"})
    assert lab.reset()
    lab.release("ask")
    lab.sound()
    assert lab.counters()["saves_late"] == 6
    assert lab.serve("after", prompt(1, 100)) == 103
    lab.sound()


def test_finishing_twice_and_outputs_of_forgotten_requests_do_no_harm(start_lab, daemon):
    lab = start_lab(daemon)
    lab.serve("one", prompt(1, 40))
    lab.finish_again("one")
    lab.step()
    assert lab.serve("two", prompt(1, 40)) < 43
    lab.sound()


def test_a_preempted_request_is_loaded_again(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    lab.add("one", prompt(1, 100), 40)
    lab.step_until(lambda: len(lab.report("one")["tokens"]) >= 20)
    stored(lab, daemon, 7)
    before = lab.get("computed")
    assert lab.preempt_all()
    lab.run("one")
    lab.prove("one")
    assert lab.get("computed") - before < 60
    lab.sound()


# ---- siblings, failures, policies


def test_the_sibling_that_is_not_chosen_lets_go(start_lab, daemon):
    lab = start_lab(daemon, multi="sibling", prefix_caching=False)
    lab.serve("cold", prompt(1, 100))
    stored(lab, daemon, 6)
    assert lab.serve("warm", prompt(1, 100)) == 7
    lab.sound()
    assert "loaded_blocks" not in lab.counters()
    eventually(lambda: pins(daemon) == 0)


def test_the_sibling_that_is_chosen_loads(start_lab, daemon):
    lab = start_lab(daemon, multi="chosen", prefix_caching=False)
    lab.serve("cold", prompt(1, 100))
    stored(lab, daemon, 6)
    assert lab.serve("warm", prompt(1, 100)) == 7
    lab.sound()


@pytest.mark.parametrize("behind", [False, True])
def test_what_a_sibling_loads_and_what_follows_is_stored(start_lab, start_daemon, behind):
    name = 50 + behind
    start_lab(start_daemon(), multi="sibling").serve("cold", prompt(name, 100))
    daemon = start_daemon()
    lab = start_lab(daemon, multi="sibling", sibling={"behind": behind, "later": True}, prefix_caching=False)
    assert lab.serve("warm", prompt(name, 100) + prompt(2, 50)) == 153 - 96
    lab.sound()
    stored(lab, daemon, 9)
    assert "loaded_blocks" not in lab.counters()
    lab = start_lab(daemon, prefix_caching=False)
    assert lab.serve("read back", prompt(name, 100) + prompt(2, 50)) == 153 - 144
    lab.sound()


def test_what_a_sibling_loaded_wrongly_is_never_stored(start_lab, start_daemon):
    # The step computes on it, and others take it from the engine's own cache, before the engine is told.
    start_lab(start_daemon(), multi="sibling").serve("cold", prompt(52, 64))
    daemon = start_daemon()
    lab = start_lab(daemon, multi="sibling", sibling={"fails": True}, max_tokens_a_step=200)
    lab.add("bad", prompt(52, 64) + prompt(2, 50))
    lab.add("shares", prompt(52, 64) + prompt(3, 50))
    lab.add("alone", prompt(53, 40))
    lab.run("bad", "shares", "alone")
    lab.prove("bad", "alone")
    lab.sound()
    lab = start_lab(daemon, prefix_caching=False)
    for tail in (2, 3):
        lab.serve(f"read back {tail}", prompt(52, 64) + prompt(tail, 50))
    lab.sound()


def test_what_a_sibling_loaded_wrongly_does_not_stay_in_the_engines_own_cache(start_lab, start_daemon):
    start_lab(start_daemon(), multi="sibling").serve("cold", prompt(55, 64))
    daemon = start_daemon()
    lab = start_lab(daemon, multi="sibling", sibling={"fails": True})
    lab.add("bad", prompt(55, 64) + prompt(2, 50))
    lab.step_until(lambda: lab.get("computed") > 0)
    lab.abort("bad")
    lab.serve("next", prompt(55, 64) + prompt(2, 50), parameters={"kvcascade": "write"})
    lab.sound()
    start_lab(daemon, prefix_caching=False).serve("read back", prompt(55, 64) + prompt(2, 50))


@pytest.mark.parametrize("multi", ["chosen", "sibling"])
def test_below_a_multi_connector_requests_may_end_twice_or_in_the_middle(start_lab, daemon, multi):
    lab = start_lab(daemon, multi=multi, prefix_caching=False)
    lab.serve("cold", prompt(54, 100))
    stored(lab, daemon, 6)
    lab.finish_again("cold")
    lab.hold("copy")
    lab.add("slow", prompt(54, 100))
    for _ in range(4):
        lab.step()
    lab.abort("slow")
    lab.finish_again("slow")
    lab.step()
    lab.release("copy")
    lab.sound()
    assert lab.serve("after", prompt(54, 100)) == 7
    lab.sound()
    eventually(lambda: pins(daemon) == 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("damage", ["flipped bits", "daemon killed"])
def test_a_failed_load_is_told_and_follows_the_policy(start_lab, start_daemon, tmp_path, monkeypatch, policy, damage):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    rules = Rules(tmp_path / "rules")
    daemon = start_daemon(command=rules.command)
    start_lab(daemon).serve("cold", prompt(1, 100))
    stored(None, daemon, 6)
    lab = start_lab(daemon, policy=policy)
    if damage == "flipped bits":
        daemon.restart()
        rules.set("read slab-* flip 3")
        lab.serve("wakes", prompt(9, 20))
        eventually(lambda: lab.serve(f"wakes {random.random()}", prompt(9, 40)) < 43)
        lab.add("hit", prompt(1, 100))
    else:
        lab.hold("copy")
        lab.add("hit", prompt(1, 100))
        lab.step()
        daemon.kill()
        lab.release("copy")
    lab.run("hit")
    rules.set_quietly()
    if policy == "recompute":
        lab.prove("hit")
    elif lab.report("hit")["status"] != "FINISHED_LENGTH_CAPPED":
        assert lab.report("hit")["status"] == "FINISHED_ERROR"
    else:
        assert damage == "flipped bits"  # the promotion had failed before the lookup was answered
    lab.sound()
    if not daemon.running:
        daemon.start()
    lab.serve("after", prompt(1, 100))
    lab.sound()


def test_a_load_within_the_step_that_fails_spoils_no_other_block(start_lab, start_daemon):
    # The step computes on bad blocks before the engine is told: nothing of it may be stored.
    daemon = start_daemon()
    start_lab(daemon).serve("cold", prompt(1, 64))
    stored(None, daemon, 4)
    lab = start_lab(daemon, extra={"sync_budget_bytes": MEGA}, prefix_caching=False)
    lab.serve("attached", prompt(8, 20))
    lab.tamper()
    lab.serve("bad", prompt(1, 64) + prompt(2, 50))
    lab.sound()
    assert lab.counters()["failed_blocks"] == 2
    assert lab.counters()["saves_doubted"] >= 3
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("read back", prompt(1, 64) + prompt(2, 50))
    lab.sound()


def test_bad_blocks_do_not_stay_in_the_engines_own_cache(start_lab, start_daemon):
    # vLLM caches what is loaded within the step before it is loaded; here nobody computes it anew.
    daemon = start_daemon()
    start_lab(daemon).serve("cold", prompt(1, 64))
    stored(None, daemon, 4)
    lab = start_lab(daemon, extra={"sync_budget_bytes": MEGA})
    lab.serve("attached", prompt(8, 20))
    lab.tamper()
    lab.add("bad", prompt(1, 64) + prompt(2, 50))
    lab.step_until(lambda: lab.counters().get("failed_blocks", 0) > 0)
    lab.abort("bad")
    lab.serve("next", prompt(1, 64) + prompt(2, 50))
    lab.sound()


def test_a_slot_that_was_handed_on_while_it_was_copied_is_a_failed_load(start_lab, start_daemon, start_engine):
    # Fault A10: the lease is over and the slots hold other blocks by the time that the copy begins.
    daemon = start_daemon(dram="4MiB", dram_slab="1MiB", leases_lookup="200ms")
    start_lab(daemon).serve("cold", prompt(1, 100))
    stored(None, daemon, 6)
    lab = start_lab(daemon)
    lab.hold("copy")
    lab.add("hit", prompt(1, 100))
    lab.step_until(lambda: bool(lab.get("loads")))
    lab.step()
    engine = start_engine(daemon)

    def pushed_out() -> bool:
        for number in range(10):
            engine.store(other(f"other {random.random()} {number}", 16))
        return pins(daemon) == 0

    eventually(pushed_out)
    for _ in range(4):  # and twice what DRAM holds
        pushed_out()
    lab.release("copy")
    lab.run("hit")
    lab.prove("hit")
    assert lab.counters()["failed_blocks"] >= 1
    lab.sound()


# ---- several KV groups


def test_a_model_with_a_sliding_window_is_loaded_in_both_groups(start_lab, daemon):
    # Fault J3.
    lab = start_lab(daemon, window=40)
    assert lab.serve("cold", prompt(1, 100), 30) == 129
    lab.sound()
    stored(lab, daemon, 16)
    lab = start_lab(daemon, window=40)
    assert lab.serve("warm", prompt(1, 100), 30) == 129 - 96
    assert lab.serve("longer", prompt(1, 70) + prompt(2, 60), 30) == 159 - 64
    lab.sound()
    eventually(lambda: pins(daemon) == 0)


def test_of_a_group_with_a_window_only_the_window_is_held_and_brought_into_memory(start_lab, start_daemon):
    daemon = start_daemon()
    lab = start_lab(daemon, window=40)
    lab.serve("cold", prompt(1, 200))
    lab.sound()
    stored(lab, daemon, 24)
    daemon.restart()
    assert in_memory(daemon) == 0
    lab = start_lab(daemon, window=40)
    lab.hold("copy")
    lab.add("warm", prompt(1, 200))
    lab.step_until(lambda: bool(lab.get("loads")))
    assert pins(daemon) == 12 + 3
    lab.release("copy")
    lab.run("warm")
    lab.prove("warm")
    assert in_memory(daemon) == 12 + 3
    assert lab.counters()["loaded_blocks"] == 12 + 3
    # A shorter prefix needs another window, of which some blocks lie in memory.
    shorter = prompt(1, 170) + prompt(2, 20)
    assert lab.serve("shorter", shorter, parameters={"kvcascade": "read"}) == 193 - 160
    assert in_memory(daemon) == 12 + 5
    lab.sound()
    eventually(lambda: pins(daemon) == 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_with_several_groups_a_failed_load_is_told_by_request(start_lab, start_daemon, policy):
    daemon = start_daemon()
    start_lab(daemon, window=40).serve("cold", prompt(1, 100))
    stored(None, daemon, 12)
    lab = start_lab(daemon, window=40, policy=policy)
    lab.hold("copy")
    lab.add("hit", prompt(1, 100))
    lab.step_until(lambda: bool(lab.get("loads")))
    lab.step()
    daemon.kill()
    lab.release("copy")
    lab.run("hit")
    if policy == "recompute":
        lab.prove("hit")
    else:
        assert lab.report("hit")["status"] == "FINISHED_ERROR"
    lab.sound()


# ---- drafts, adapters, images, salts


@pytest.mark.parametrize("window", [0, 40])
def test_of_guessed_tokens_only_those_that_were_right_are_stored(start_lab, daemon, window):
    lab = start_lab(daemon, drafts=3, window=window, prefix_caching=False)
    for name in range(3):
        lab.add(f"cold {name}", prompt(name, 40), 60)
    lab.run(*lab.prompts)
    lab.prove(*lab.prompts)
    assert lab.get("accepted") > 30
    lab.sound()
    for drafts in (0, 3):
        lab = start_lab(daemon, drafts=drafts, window=window, prefix_caching=False)
        for name in range(3):
            drawn = expected(prompt(name, 40), 60, window)
            before = lab.get("computed")
            lab.add(f"next turn {name}", prompt(name, 40) + drawn, 1)
            lab.run(f"next turn {name}")
            lab.prove(f"next turn {name}")
            assert lab.get("computed") - before == 100 - 96
        lab.sound()


def test_of_a_group_with_a_drafter_the_last_block_is_neither_stored_while_it_decodes_nor_taken(start_lab, daemon):
    lab = start_lab(daemon, eagle=True, prefix_caching=False)
    lab.serve("cold", prompt(1, 100), 30)
    lab.sound()
    assert in_memory(daemon) == 7  # of 129 tokens that were computed
    assert lab.serve("warm", prompt(1, 100), 30) == 129 - 80
    lab.sound()


def test_with_guesses_that_are_rejected_a_drafters_last_block_is_left_out_too(start_lab, daemon):
    lab = start_lab(daemon, eagle=True, drafts=3, prefix_caching=False)
    lab.add("cold", prompt(1, 40), 60)
    most = 0
    while not lab.report("cold")["reason"]:
        computed, accepted = lab.computed_of("cold"), lab.get("accepted")
        lab.step()
        # What a step is told to store is final whatever becomes of its guesses, of which none or some are right.
        final = computed + (40 if not computed else 1)
        most = max(most, final // BLOCK - (final > 40))
        assert in_memory(daemon) <= most
        assert lab.get("accepted") - accepted <= 3
    lab.prove("cold")
    assert 0 < lab.get("accepted") < 59
    lab.sound()
    stored(lab, daemon, most)
    assert in_memory(daemon) == most == 99 // BLOCK - 1
    # The next turn leaves out one more, as the drafter's KV of its last token depends on the token behind it.
    lab = start_lab(daemon, eagle=True, drafts=3, prefix_caching=False)
    lab.add("next turn", prompt(1, 40) + expected(prompt(1, 40), 60), 1)
    lab.run("next turn")
    lab.prove("next turn")
    assert lab.get("computed") == 100 - (most - 1) * BLOCK
    lab.sound()


@pytest.mark.parametrize("kind", ["lora", "image", "salt"])
def test_what_adapters_images_and_salts_set_apart_is_never_shared(start_lab, daemon, kind):
    lab = start_lab(daemon, prefix_caching=False)
    cases = [{}, {kind: "one", "flavour": 1}, {kind: "two", "flavour": 2}]
    for number, options in enumerate(cases):
        assert lab.serve(f"cold {number}", prompt(1, 100), **options) == 103
    stored(lab, daemon, 18)
    for number, options in enumerate(cases):
        assert lab.serve(f"warm {number}", prompt(1, 100), **options) == 7
    lab.sound()


def test_an_adapter_that_replaces_one_of_the_same_name_shares_nothing(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("old", prompt(1, 100), lora="one", flavour=1)
    stored(lab, daemon, 6)
    for name in ("new", "again"):
        assert lab.serve(name, prompt(1, 100), lora="one", flavour=2, replaced=True) == 103
    lab.sound()


# ---- the daemon's troubles


def test_a_stopped_daemon_costs_a_moment_and_no_token(start_lab, start_daemon):
    daemon = start_daemon()
    start_lab(daemon).serve("cold", prompt(1, 100))
    lab = start_lab(daemon)
    os.kill(daemon.pid, signal.SIGSTOP)
    lab.serve("stopped", prompt(1, 100))
    lab.serve("left alone", prompt(2, 100))
    os.kill(daemon.pid, signal.SIGCONT)
    lab.sound()


def test_an_engine_that_starts_without_a_daemon_attaches_by_itself(start_lab, start_daemon):
    daemon = start_daemon()
    daemon.stop()
    lab = start_lab(daemon)
    assert lab.serve("alone", prompt(1, 100)) == 103
    daemon.start()
    number = iter(range(1000))
    eventually(lambda: lab.serve(f"later {next(number)}", prompt(2, 100)) < 103 and lab.counters().get("stored_blocks"))
    lab.sound()


def test_a_restarted_daemon_serves_what_its_disk_kept(start_lab, start_daemon):
    daemon = start_daemon()
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("cold", prompt(1, 100))
    stored(lab, daemon, 6)
    daemon.restart()
    number = iter(range(1000))
    eventually(lambda: lab.serve(f"later {next(number)}", prompt(1, 100)) == 7)
    assert lab.counters().get("hit_tokens_disk", 0) + lab.counters().get("hit_tokens_dram", 0) >= 96
    lab.sound()


def test_after_a_reset_nothing_older_is_found(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("old", prompt(1, 100))
    stored(lab, daemon, 6)
    assert lab.reset()
    assert lab.serve("new", prompt(1, 100)) == 103
    eventually(lambda: lab.counters().get("stored_blocks", 0) >= 12)
    assert lab.serve("again", prompt(1, 100)) == 7
    lab.sound()


def test_nothing_touches_the_memory_of_a_sleeping_engine_and_after_it_everything_works(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("stored", prompt(1, 100))
    stored(lab, daemon, 6)
    lab.hold("copy")
    lab.add("loads", prompt(1, 100))
    lab.step_until(lambda: bool(lab.get("loads")))
    lab.step()
    lab.release("copy")
    lab.run("loads")
    lab.prove("loads")
    lab.sleep()
    assert lab.wake()
    # vLLM has reset all caches on its way to sleep: nobody says whether the weights are still the same.
    assert lab.serve("awake", prompt(1, 100)) == 103
    stored(lab, daemon, 12)
    assert lab.serve("again", prompt(1, 100)) == 7
    lab.sound()


def test_a_reset_and_a_sleep_may_be_told_to_keep_what_is_stored(start_lab, daemon):
    lab = start_lab(daemon, prefix_caching=False, extra={"resets": "keep"})
    lab.serve("stored", prompt(1, 100))
    stored(lab, daemon, 6)
    assert lab.reset()
    assert lab.serve("kept", prompt(1, 100)) == 7
    lab.sleep()
    assert lab.wake()
    assert lab.serve("awake", prompt(1, 100)) == 7
    assert start_lab(daemon).serve("shared", prompt(1, 100)) == 7
    lab.sound()


@pytest.mark.parametrize("method", ["follow", "begin", "unregister", "register"])
def test_nothing_that_a_worker_side_raises_reaches_the_engine(start_lab, daemon, method):
    lab = start_lab(daemon, prefix_caching=False)
    lab.serve("before", prompt(1, 100))
    stored(lab, daemon, 6)
    lab.fail_in(method)
    if method in ("unregister", "register"):
        lab.sleep()
        lab.wake()
    lab.serve("after", prompt(1, 100))
    lab.serve("another", prompt(2, 100))
    lab.sound()


# ---- events, refusals


@pytest.mark.parametrize("multi", ["", "chosen", "sibling"])
def test_stored_blocks_are_announced_with_their_tokens(start_lab, daemon, multi):
    lab = start_lab(daemon, events=True, multi=multi)
    lab.serve("cold", prompt(1, 40))
    found: list[dict[str, Any]] = []

    def all_told() -> bool:
        lab.serve(f"more {len(found)} {random.random()}", prompt(7, 5), 1)
        found.extend(lab.get("events"))
        return {tuple(one["token_ids"]) for one in found} >= {tuple(prompt(1, 40)[s : s + BLOCK]) for s in (0, 16)}

    eventually(all_told)
    assert {one["medium"] for one in found} == {"CPU"}
    assert {one["block_size"] for one in found} == {BLOCK}
    lab.sound()


@pytest.mark.parametrize(
    ("kind", "tagged"),
    [
        ("", lambda key: key),
        ("lora", lambda name: ("lora", name, f"/adapters/{name}")),  # vLLM's own events leave out the path too
        ("image", lambda key: ("mm", *key)),
        ("salt", lambda salt: ("cache_salt", salt)),
    ],
)
def test_the_hashes_that_are_announced_follow_from_what_is_announced_with_them(start_lab, daemon, kind, tagged):
    lab = start_lab(daemon, events=True)
    lab.serve("cold", prompt(1, 100), **({kind: "one", "flavour": 1} if kind else {}))
    found: list[dict[str, Any]] = []

    def all_told() -> bool:
        lab.serve(f"more {len(found)} {random.random()}", prompt(7, 5), 1)
        found.extend(lab.get("events"))
        return len(found) >= 6

    eventually(all_told)
    found.sort(key=lambda event: prompt(1, 100).index(event["token_ids"][0]))
    keys = [key and tuple(map(tagged, key)) for event in found for key in event["extra_keys"]]
    tokens = [token for event in found for token in event["token_ids"]]
    hashes = block_hashes(tokens, BLOCK, seed="0", extra_keys=keys)
    assert tokens == prompt(1, 100)[:96]
    assert [event["block_hashes"] for event in found] == [[int.from_bytes(one[-8:], "big")] for one in hashes]
    assert any(keys) == bool(kind)
    lab.sound()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algo": "sha256"}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"extra": {"seed": "42"}}, "PYTHONHASHSEED=42"),
        ({"extra": {"sokcet": "/x"}}, "'sokcet'"),
        ({"extra": {"sync_budget_bytes": -1}}, "sync_budget_bytes must be a number"),
        ({"extra": {"resets": "sometimes"}}, "resets must be one of private, keep"),
        ({"kv_dtype": "int8_per_token_head"}, "--kv-cache-dtype"),
        ({"kv_dtype": "fp8", "fp8": "float8_e4m3fnuz"}, "fp8 is float8_e4m3fnuz on this device"),
        ({"stages": 2}, "--pipeline-parallel-size 1"),
        ({"executor": "ray"}, "--distributed-executor-backend mp"),
        ({"recurrent": True}, "layer model.layers.9.mixer keeps its KV as MambaSpec: a recurrent state"),
    ],
)
def test_what_cannot_be_stored_rightly_is_refused_by_the_flag_to_change(start_lab, daemon, options, told):
    with pytest.raises(VllmError) as raised:
        start_lab(daemon, **options)
    assert told in str(raised.value)


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(start_lab, daemon, process):
    if process.call("tells_of_sleep"):
        start_lab(daemon, sleeps=True)
        return
    with pytest.raises(VllmError, match="without --enable-sleep-mode"):
        start_lab(daemon, sleeps=True)


# ---- everything at once


@pytest.mark.parametrize(("seed", "window"), [("7", 0), ("21", 0), ("27", 0), ("1", 40), ("2", 24)])
def test_tokens_are_right_whatever_happens_at_random(start_lab, start_daemon, seed, window):
    at_random(start_lab, start_daemon, seed, window)
