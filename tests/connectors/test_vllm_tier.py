"""vLLM's real TieringOffloadingManager with our tier below it, in vLLM's own Python; see engines/vllm_manager.py."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DaemonProcess
from engines.vllm_managers import (
    FULL,
    HYBRID,
    PATIENCE_S,
    ROOT,
    WINDOWED,
    Manager,
    Vllm,
    VllmError,
    evict,
    expect_all,
    managers,
    prompt,
)

# What one call on the scheduler's thread may take on a busy machine of two cores; the daemon's deadlines are longer.
AT_ONCE_S = 0.2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    process = Vllm(tmp_path_factory.mktemp("vllm"))
    yield process
    process.close()


@pytest.fixture
def make(vllm: Vllm, daemon: DaemonProcess) -> Iterator[Callable[..., Manager]]:
    """Makes managers on the test's daemon, and ends them before it."""
    with managers(vllm, daemon) as factory:
        yield factory


# ---- storing and loading


def test_what_vllm_evicts_comes_back_byte_for_byte(make: Callable[..., Manager]) -> None:
    manager = make()
    assert manager.store(name="a", tokens=prompt(1)) == {"stored": 10, "settled": True}
    manager.take_trace()
    manager.store(name="b", tokens=prompt(2))  # 12 chunks of vLLM's: this evicts nearly all of a
    manager.take_trace()
    expect_all(manager.load(name="c", tokens=prompt(1)), 10)
    trace = manager.take_trace()
    # The order of vLLM's calls: a step of questions, a step of answers and promotion, then what was promoted.
    order = [name for name, _ in itertools.groupby(trace)]
    assert order[:5] == ["on_new_request", "lookup -> RETRY", "on_schedule_end", "lookup -> HIT", "submit_load"]
    assert manager.stats()["loaded_chunks"] >= 8


def test_a_prefix_is_found_under_another_continuation(make: Callable[..., Manager]) -> None:
    manager = make()
    manager.store(name="a", tokens=prompt(1))
    manager.store(name="b", tokens=prompt(2))
    manager.store(name="d", tokens=prompt(3))
    expect_all(manager.load(name="c", tokens=[*prompt(1)[:64], *prompt(4)]), 4)
    expect_all(manager.load(name="e", tokens=prompt(5)), 0)


def test_a_new_manager_finds_what_an_earlier_one_stored(make: Callable[..., Manager]) -> None:
    first = make()
    first.store(name="a", tokens=prompt(1))
    first.close()
    expect_all(make().load(name="c", tokens=prompt(1)), 10)


def test_two_managers_share(make: Callable[..., Manager]) -> None:
    one, two = make(), make()
    one.store(name="a", tokens=prompt(1))
    two.store(name="a", tokens=[*prompt(1)[:80], *prompt(2)[:80]])
    assert two.stats()["known_chunks"] == 5
    expect_all(two.load(name="b", tokens=prompt(1)), 10)
    expect_all(one.load(name="b", tokens=[*prompt(1)[:80], *prompt(2)[:80]]), 10)


def test_groups_of_unlike_blocks_and_windows_without_heads(make: Callable[..., Manager]) -> None:
    manager = make(groups=HYBRID, chunks=20)
    stored = manager.store(name="a", tokens=prompt(1))
    assert stored == {"stored": 10 + 2 + 1, "settled": True}
    manager.close()
    other = make(groups=HYBRID, chunks=20)
    expect_all(other.load(name="b", tokens=prompt(1)), 10, 2, 1)
    # Windows were found though nothing before them was ever stored; of this one the first half was not.
    expect_all(other.load(name="c", tokens=prompt(1, 8)), 8, 1, 0)


def test_an_engine_of_other_pages_or_weights_finds_nothing(make: Callable[..., Manager], vllm: Vllm) -> None:
    make().store(name="a", tokens=prompt(1))
    make(cache={"cache_dtype": "fp8"}).store(name="a", tokens=prompt(1))
    unlike: list[dict[str, Any]] = [
        {"groups": [{"tokens": 32}]},
        {"groups": HYBRID},
        {"model": str(vllm.directory / "tuned"), "weights": "another tuning"},
        {"tier": {"weights_epoch": "2"}},
        {"cache": {"cache_dtype": "fp8_e4m3"}},  # of the flavour alone: the pages are of one size
        {"cache": {"cache_dtype": "fp8_e5m2"}},
        {"environ": {"PYTHONHASHSEED": "7"}},
    ]
    for spec in unlike:
        hits = make(**{"chunks": 20, **spec}).load(name="b", tokens=prompt(1))["hits"]
        assert not any(hits), spec
    # The same under another path: a name is no identity.
    same = make(model=str(vllm.directory / "elsewhere"), weights="model")
    expect_all(same.load(name="b", tokens=prompt(1)), 10)


def test_a_request_may_ask_to_be_left_alone(make: Callable[..., Manager]) -> None:
    manager = make()
    manager.store(name="a", tokens=prompt(1), params={"kvcascade": "read"})
    manager.store(name="b", tokens=prompt(2), params={"kvcascade": "write"})
    evict(manager)
    expect_all(manager.load(name="c", tokens=prompt(1)), 0)
    expect_all(manager.load(name="e", tokens=prompt(2), params={"kvcascade": "write"}), 0)
    expect_all(manager.load(name="f", tokens=prompt(2)), 10)


def test_more_than_the_daemon_has_room_for_is_dropped_and_the_rest_is_true(
    vllm: Vllm, start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon(dram="8MiB", disk="", disk_size="")
    with managers(vllm, daemon) as make:
        manager = make(chunks=40)
        for name in range(30):  # 300 chunks of 16 KiB, and 4 MiB a slab
            manager.store(name=f"s{name}", tokens=prompt(name, 30))
        for name in range(29, -1, -1):
            loaded = manager.load(name=f"l{name}", tokens=prompt(name, 30))
            assert loaded["good"] == sum(loaded["hits"]) and loaded["settled"]
        assert daemon.check() == []


# ---- under vLLM's real scheduler


@pytest.mark.parametrize("groups", [FULL, WINDOWED], ids=["full", "windowed"])
def test_another_engine_computes_only_what_no_tier_has(
    make: Callable[..., Manager], groups: list[dict[str, Any]]
) -> None:
    """Requests through vLLM's Scheduler and OffloadingConnector: every block that one attends to is the right one."""
    first = make(engine=True, groups=groups, chunks=60)
    cold = first.serve(name="a", tokens=prompt(1))
    assert (cold["computed"], cold["wrong"]) == (160 + 1, 0)
    first.serve(name="b", tokens=[*prompt(1)[:96], *prompt(2)])
    second = make(engine=True, groups=groups, chunks=60)
    warm = second.serve(name="c", tokens=prompt(1))
    assert warm["wrong"] == 0
    assert warm["computed"] <= 16 + 1
    assert second.serve(name="d", tokens=[*prompt(1)[:96], *prompt(2)])["computed"] <= 16 + 1
    # A reset forgets what vLLM has, on the GPU too.
    trace = second.take_trace()
    assert "submit_load" in trace


def test_many_requests_in_a_small_engine_are_all_true(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    """GPU blocks, vLLM's chunks and the daemon's slots are all handed on again and again."""
    engine = make(engine=True, groups=WINDOWED, chunks=30, blocks=40)
    for number in range(24):
        head = prompt(1 + number % 5)[: 16 * (2 + number % 7)]
        served = engine.serve(name=f"r{number}", tokens=[*head, *prompt(50 + number % 9, 6)])
        assert served["wrong"] == 0
    assert engine.stats()["loaded_chunks"]
    assert daemon.check() == []


def test_an_engine_goes_on_while_its_daemon_is_stopped_and_killed(
    make: Callable[..., Manager], daemon: DaemonProcess
) -> None:
    engine = make(engine=True, chunks=60)
    engine.serve(name="a", tokens=prompt(1))
    os.kill(daemon.pid, signal.SIGSTOP)
    for number in range(4):
        assert engine.serve(name=f"s{number}", tokens=prompt(10 + number))["wrong"] == 0
    daemon.kill()
    for number in range(4):
        assert engine.serve(name=f"k{number}", tokens=prompt(20 + number))["wrong"] == 0
    assert max(engine.slowest().values()) < AT_ONCE_S
    daemon.start()
    deadline = time.monotonic() + PATIENCE_S
    engine.stats()
    for number in itertools.count(30):
        assert engine.serve(name=f"t{number}", tokens=prompt(number))["wrong"] == 0
        if engine.stats().get("stored_chunks"):
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    engine.serve(name="y", tokens=prompt(9))
    assert make(engine=True, chunks=60).serve(name="z", tokens=prompt(9))["computed"] <= 16 + 1


# ---- the daemon's troubles


def test_a_daemon_that_was_restarted_serves_from_disk(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    manager = make()
    manager.store(name="a", tokens=prompt(1))
    manager.store(name="b", tokens=prompt(2))
    daemon.restart()
    until_back(manager)
    expect_all(manager.load(name="c", tokens=prompt(1)), 10)


def until_back(manager: Manager) -> None:
    """Requests go on as always until one finds the daemon again."""
    deadline = time.monotonic() + PATIENCE_S
    manager.stats()
    for number in itertools.count(900):
        manager.store(name=f"back{number}", tokens=prompt(number, 2))
        if manager.stats().get("stored_chunks"):
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_daemon_costs_hits_and_nothing_else(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    """E1: what was in memory is gone, vLLM's own goes on; the next daemon is attached by itself."""
    manager = make(chunks=60)
    manager.store(name="a", tokens=prompt(1))
    daemon.kill()
    expect_all(manager.load(name="b", tokens=prompt(1)), 10)  # vLLM's own
    assert manager.store(name="c", tokens=prompt(2))["settled"]
    expect_all(manager.load(name="d", tokens=prompt(3)), 0)
    daemon.start()
    until_back(manager)
    # What was offered while nobody was there is offered again by the next request that has it.
    manager.store(name="e", tokens=prompt(2))
    evict(manager, 60)
    expect_all(manager.load(name="g", tokens=prompt(2)), 10)


def test_without_a_daemon_vllm_starts_and_goes_on(vllm: Vllm, daemon: DaemonProcess) -> None:
    daemon.stop()
    with managers(vllm, daemon) as make:
        manager = make()
        assert manager.store(name="a", tokens=prompt(1)) == {"stored": 10, "settled": True}
        expect_all(manager.load(name="b", tokens=prompt(1)), 10)
        daemon.start()
        until_back(manager)


def test_a_stopped_daemon_never_holds_the_scheduler(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    """E6: SIGSTOP. Every call returns at once; a request waits for the lookup's deadline and is computed."""
    manager = make()
    manager.store(name="a", tokens=prompt(1))
    manager.store(name="b", tokens=prompt(2))
    manager.slowest()
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        loaded = manager.load(name="c", tokens=prompt(1))
        assert loaded["good"] == sum(loaded["hits"]) and not loaded["waiting"]
        assert loaded["hits"] != [10]
        assert manager.stats()["lookup_timeouts"]  # by the lookup's deadline, not the operation's
        for name in range(5):
            manager.store(name=f"s{name}", tokens=prompt(10 + name))
            expect_all(manager.load(name=f"l{name}", tokens=prompt(20 + name)), 0)
        slowest = manager.slowest()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert max(slowest.values()) < AT_ONCE_S, slowest
    until_back(manager)
    manager.store(name="d", tokens=prompt(3))
    expect_all(manager.load(name="e", tokens=prompt(1)), 10)


def test_a_load_from_a_daemon_that_stops_in_the_middle_fails_once(
    make: Callable[..., Manager], daemon: DaemonProcess
) -> None:
    """A promise that cannot be kept: vLLM is told so by its deadline, and asks no more for that request."""
    manager = make(tier={"load_timeout_s": 0.5})
    manager.store(name="a", tokens=prompt(1))
    evict(manager)
    manager.prime(name="c", tokens=prompt(1))  # the daemon has promised
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        loaded = manager.load_primed(wait=20.0)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert loaded["good"] == sum(loaded["hits"]) and loaded["settled"] and not loaded["waiting"]
    assert loaded["hits"] == [0]


def test_a_corrupt_block_on_disk_is_a_miss(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    """C1: the checksum is proved on the way up; what vLLM was promised is told as failed, and computed."""
    manager = make()
    manager.store(name="a", tokens=prompt(1))
    manager.store(name="b", tokens=prompt(2))
    assert daemon.stop() == 0
    spoil(daemon.disk)
    daemon.start()
    until_back(manager)
    loaded = manager.load(name="c", tokens=prompt(1))
    assert loaded["good"] == sum(loaded["hits"]) and loaded["settled"] and not loaded["waiting"]
    assert sum(loaded["hits"]) < 10
    # The next request meets no promise that cannot be kept.
    again = manager.load(name="d", tokens=prompt(1))
    assert again["good"] == sum(again["hits"]) and not again["waiting"]


def spoil(directory: Path) -> None:
    """Flips bits in the middle of whatever payload the slab files hold."""
    spoiled = 0
    for file in directory.rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            with file.open("r+b") as slab:
                size = file.stat().st_size
                for at in range(0, size, 4096):
                    slab.seek(at)
                    page = slab.read(64)
                    if any(page):
                        slab.seek(at)
                        slab.write(bytes(byte ^ 0xFF for byte in page))
                        spoiled += 1
    assert spoiled


# ---- vLLM's own events


def test_after_a_reset_no_byte_of_vllms_memory_is_touched(make: Callable[..., Manager]) -> None:
    manager = make()
    manager.store(name="a", tokens=prompt(1))
    manager.store(name="b", tokens=prompt(2))
    manager.begin_load(name="c", tokens=prompt(1))
    assert manager.poison_and_reset() == {"clean": True, "jobs": 0}
    # What was stored before may be of other weights: vLLM resets its caches around an update and says no more.
    expect_all(manager.load(name="d", tokens=prompt(1)), 0)
    manager.store(name="e", tokens=prompt(1))
    manager.store(name="f", tokens=prompt(2))
    expect_all(manager.load(name="g", tokens=prompt(1)), 10)
    expect_all(make().load(name="h", tokens=prompt(1)), 10)  # an engine that was not reset


def test_a_reset_may_be_told_to_keep_what_is_stored(make: Callable[..., Manager]) -> None:
    manager = make(tier={"resets": "keep"})
    manager.store(name="a", tokens=prompt(1))
    assert manager.poison_and_reset() == {"clean": True, "jobs": 0}
    expect_all(manager.load(name="d", tokens=prompt(1)), 10)


def test_a_hole_at_the_head_is_offered_again(make: Callable[..., Manager]) -> None:
    """vLLM offers a chunk once: a chain whose head was dropped would stay out for as long as vLLM keeps the head."""
    manager = make(chunks=40)
    manager.store(name="a", tokens=prompt(1)[:64], params={"kvcascade": "read"})  # not stored below
    manager.store(name="b", tokens=prompt(1), skip=4)
    assert manager.stats()["dropped_chunks"] >= 6
    manager.store(name="c", tokens=prompt(1))  # offered as a whole now
    expect_all(make().load(name="d", tokens=prompt(1)), 10)


def test_a_chunk_whose_place_in_its_chain_is_not_known_keeps_nobody_from_storing_the_chain(
    make: Callable[..., Manager],
) -> None:
    """By itself it would be the head of a chain of its own, under the name that the chain needs for it."""
    manager = make()
    manager.store(name="a", tokens=prompt(1), unnamed=3)
    assert manager.stats() == {"dropped_chunks": 10}
    other = make()
    other.store(name="b", tokens=prompt(1))
    assert other.stats() == {"stored_chunks": 10}
    expect_all(make().load(name="c", tokens=prompt(1)), 10)


def test_nothing_is_left_pinned_or_reserved(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    manager = make(groups=HYBRID, chunks=20)
    for name in range(6):
        manager.store(name=f"s{name}", tokens=prompt(name))
        manager.load(name=f"l{name}", tokens=prompt(name // 2))
    assert daemon.check() == []
    status = daemon.status()
    assert all(not session.get("leases") for session in status["sessions"] if session["role"] != "tool")


def test_the_config_in_the_readme_is_the_one_that_works(make: Callable[..., Manager], daemon: DaemonProcess) -> None:
    lines = re.findall(r"--kv-transfer-config '(.*?)'", (ROOT / "README.md").read_text(), re.DOTALL)
    (config,) = (one for one in map(json.loads, lines) if one["kv_connector"] == "OffloadingConnector")
    assert config["kv_role"] == "kv_both"
    manager = make(extra=config["kv_connector_extra_config"], environ={"KVCASCADE_SOCKET": str(daemon.socket)})
    manager.store(name="a", tokens=prompt(1))
    assert manager.stats() == {"stored_chunks": 10}


# ---- refused at start


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"algo": "sha256"}, "hash_algo: sha256 .*--prefix-caching-hash-algo"),
        ({"algo": "xxhash_cbor"}, "PYTHONHASHSEED"),
        ({"algo": "xxhash_cbor", "environ": {"PYTHONHASHSEED": "1"}}, "hash_algo: xxhash_cbor"),
        ({"tier": {"hash_algo": "sha256"}}, "hash_algo"),
        ({"cache_has": {"calculate_kv_scales": True}}, "calculate_kv_scales: .*--calculate-kv-scales"),
        ({"tier": {"resets": "sometimes"}}, "resets"),
        ({"tier": {"locality": "LOCAL"}}, "locality"),
        ({"tier": {"sokcet": "/x"}}, "CascadeTier has no option 'sokcet'"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_start_by_name(
    make: Callable[..., Manager], spec: dict[str, Any], named: str
) -> None:
    with pytest.raises(VllmError, match=named):
        make(**spec)


def test_another_root_than_declared_turns_the_tier_off(make: Callable[..., Manager]) -> None:
    """vLLM makes its root after the tier is made; under another one nothing would ever be found."""
    manager = make(root="sha256")
    assert manager.store(name="a", tokens=prompt(1))["settled"]
    assert manager.stats() == {"dropped_chunks": 10}
    expect_all(manager.load(name="b", tokens=prompt(1)), 10)


def test_a_contract_that_is_not_known_is_named(make: Callable[..., Manager]) -> None:
    manager = make()
    assert manager.contract(without="successful_keys").startswith("ConfigError: vllm 0.3")
    assert "successful_keys" in manager.contract(without="successful_keys")
    assert "warm_up()" in manager.contract(method="warm_up")
