"""Two and more engines on one daemon: what they share, what must never meet, and what trouble costs them."""

import os
import signal
import statistics
import time

import pytest
from engines.scripted import BLOCK_TOKENS, EngineError, eventually, prompt

from kvcascade.tiers.block import none_hash


def dram(daemon):
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == "dram")


def disk(daemon):
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == "disk")


def status_when_stored_below(daemon, blocks):
    return eventually(lambda: disk(daemon)["blocks"] >= blocks)


# ---- sharing


def test_one_engine_loads_what_another_has_stored(daemon, start_engine):
    first, second = start_engine(daemon), start_engine(daemon)
    tokens = prompt("document", 8)
    assert first.store(tokens) == {"states": ["SLOT"] * 8, "ready": 8}
    assert second.fetch(tokens) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}
    assert second.store(tokens) == {"states": ["HERE"] * 8, "ready": 0}


def test_prompts_share_their_prefix_and_nothing_else(daemon, start_engine):
    first, second = start_engine(daemon), start_engine(daemon)
    document = prompt("document", 6)
    first.store(document + prompt("question 1", 2))
    got = second.fetch(document + prompt("question 2", 2))
    assert (got["matched"], got["loaded"], got["foreign"]) == (6, 6, 0)
    assert second.store(document + prompt("question 2", 2))["states"] == ["HERE"] * 6 + ["SLOT"] * 2
    # The same tokens after another prefix are other blocks.
    assert first.fetch(prompt("question 1", 2))["matched"] == 0


def test_two_engines_store_one_prompt_at_the_same_time_and_one_writes(daemon, start_engine):
    first, second = start_engine(daemon), start_engine(daemon)
    tokens = prompt("document", 8)
    first.reserve(tokens)
    assert second.store(tokens) == {"states": ["IN_FLIGHT"] * 8, "ready": 0}
    first.write()
    first.commit()
    assert second.fetch(tokens)["loaded"] == 8


def test_nothing_is_stored_above_a_hole(daemon, start_engine):
    engine = start_engine(daemon)
    tokens = prompt("document", 8)
    engine.store(tokens[: 4 * BLOCK_TOKENS])
    assert engine.reserve(tokens, 6)["hole"] == 4
    assert engine.store(tokens, 4)["ready"] == 4
    assert engine.fetch(tokens)["loaded"] == 8


def test_a_whole_prompt_hit_is_told_exactly_and_the_same_again(daemon, start_engine):
    # E10, the daemon's part: never more than was asked; that one token is left to compute is the connector's part.
    engine = start_engine(daemon)
    tokens = prompt("document", 4)
    engine.store(tokens)
    for _ in range(3):
        assert engine.lookup(tokens)["matched"] == 4
    assert engine.lookup(tokens[:BLOCK_TOKENS])["matched"] == 1
    assert engine.lookup(tokens[: BLOCK_TOKENS - 1])["matched"] == 0
    assert engine.lookup([])["matched"] == 0


# ---- what must never meet


@pytest.mark.parametrize(
    "difference",
    [{"model": "another digest"}, {"weights_epoch": "2"}, {"layers": 3}, {"kv_heads": 2}, {"head_dim": 32}],
    ids=lambda d: next(iter(d)),
)
def test_engines_of_other_weights_or_shapes_never_hit(start_daemon, start_engine, difference):
    # B5: the same tokens, the same seed, and so the same block hashes. In memory, and from disk after a restart.
    daemon = start_daemon()
    one, other = start_engine(daemon), start_engine(daemon, **difference)
    tokens = prompt("document", 8)
    one.store(tokens)
    assert other.fetch(tokens)["matched"] == 0
    assert other.store(tokens)["ready"] == 8
    assert [e.fetch(tokens)["foreign"] for e in (one, other)] == [0, 0]
    assert len({n["fingerprint"] for n in daemon.status()["namespaces"]}) == 2
    daemon.restart()
    for engine in (one, other):
        got = eventually(lambda engine=engine: _fetched(engine, tokens))
        assert (got["loaded"], got["foreign"]) == (8, 0)


def _fetched(engine, tokens):
    try:
        return engine.fetch(tokens)
    except EngineError:
        return None


@pytest.mark.parametrize("asking", ["b", ""])
def test_another_tenants_salt_finds_nothing_and_learns_nothing(daemon, start_engine, asking):
    # L4, with the paired control: the same salt hits.
    tenant, same, other = (start_engine(daemon, salt=salt) for salt in ("a secret", "a secret", asking))
    tokens = prompt("document", 8)
    tenant.store(tokens)
    assert same.fetch(tokens)["loaded"] == 8
    stored_by_other, never_stored = other.lookup(tokens, "1"), other.lookup(prompt("never", 8), "2")
    assert stored_by_other == never_stored
    # Whether somebody else is storing it is not told either.
    tenant.reserve(prompt("secret", 4))
    assert other.reserve(prompt("secret", 4))["states"] == ["SLOT"] * 4
    told = repr(daemon.status()) + daemon.log.read_text()
    assert "a secret" not in told


def test_a_seed_unlike_the_daemons_is_served_apart_and_status_says_so_first(start_daemon, start_engine):
    # B1: never a silent 0 %.
    daemon = start_daemon(daemon_seed="0")
    alike, unlike, also = (start_engine(daemon, seed=seed) for seed in ("0", "42", "42"))
    tokens = prompt("document", 4)
    assert alike.attach()["warnings"] == []
    (warning,) = unlike.attach()["warnings"]
    assert none_hash("42").hex()[:16] in warning
    assert none_hash("0").hex()[:16] in warning
    alike.store(tokens)
    assert unlike.fetch(tokens)["matched"] == 0
    unlike.store(tokens)
    assert also.fetch(tokens)["loaded"] == 4  # engines of that seed share among themselves
    status = daemon.status()
    assert next(iter(status["problems"])).startswith(f"namespace {unlike.attach()['namespace'].hex()[:12]}: seed")
    assert status["seed_fingerprint"] == none_hash("0").hex()[:16]


@pytest.mark.parametrize("difference", [{"seed": ""}, {"algo": "sha256"}, {"key_scheme": "untagged-0.19"}])
def test_other_hash_schemes_are_served_apart_with_a_warning(start_daemon, start_engine, difference):
    daemon = start_daemon(daemon_seed="0")
    engine = start_engine(daemon, **difference)
    assert len(engine.attach()["warnings"]) == 1
    assert len(daemon.status()["problems"]) == 1
    engine.close()
    eventually(lambda: daemon.status()["problems"] == [])


def test_where_hashes_collide_the_tokens_decide(daemon, start_engine):
    engine = start_engine(daemon, algo="xxhash_cbor")
    tokens = prompt("document", 4)
    assert engine.store(tokens, keep_tokens=True)["ready"] == 4
    with pytest.raises(EngineError, match="tokens"):
        engine.lookup(tokens)  # without them it could not be told


# ---- eviction and late readers


@pytest.fixture
def small(start_daemon):
    """128 slots of DRAM, leases of 0.3 s, no disk."""
    return start_daemon(dram="4MiB", dram_slab="1MiB", disk="", disk_size="", leases_lookup="300ms",
                        leases_budget_share="100%")  # fmt: skip


def test_a_leased_prefix_is_not_evicted_and_an_unleased_one_goes(small, start_engine):
    reader, writer = start_engine(small), start_engine(small)
    reader.store(prompt("leased", 32))
    reader.store(prompt("unleased", 32))
    reader.lookup(prompt("leased", 32), "kept")
    writer.store(prompt("more", 96))
    assert reader.lookup(prompt("leased", 32), "kept")["matched"] == 32
    assert reader.lookup(prompt("unleased", 32), "other")["matched"] < 32


def test_a_slot_that_is_reused_during_a_slow_load_is_told_by_its_generation(small, start_engine):
    # A13: the lease runs out in the middle of the copy and the memory goes to somebody else.
    slow, writer = start_engine(small), start_engine(small)
    tokens = prompt("slow", 32)
    slow.store(tokens)
    found = slow.lookup(tokens)
    assert slow.load(found["lease"], 32) == 32
    slow.read_slowly(tokens)
    eventually(lambda: small.status()["leases"]["live"] == 0)
    for name in "abc":
        writer.store(prompt(name, 64))
    judged = slow.read_on(tokens)
    # Bytes did change under the reader, and not one block that has changed is taken for its own.
    assert len(judged["changed"]) > 0
    assert judged["foreign"] == []
    assert set(judged["intact"]).isdisjoint(judged["changed"])


def test_a_lease_that_was_renewed_protects_the_slow_load(small, start_engine):
    slow, writer = start_engine(small), start_engine(small)
    tokens = prompt("slow", 32)
    slow.store(tokens)
    found = slow.lookup(tokens)
    slow.load(found["lease"], 32)
    slow.read_slowly(tokens)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert slow.lookup(tokens)["lease"] == found["lease"]
        writer.store(prompt(f"{time.monotonic()}", 32))
    assert slow.read_on(tokens) == {"intact": list(range(32)), "foreign": [], "changed": []}


def test_a_block_that_goes_between_lookup_and_load_ends_what_is_loaded(daemon, start_engine):
    # A10: block 6 is dropped by another engine that doubts it; what was leased is still whole for who leased it.
    engine, other = start_engine(daemon), start_engine(daemon)
    tokens = prompt("document", 10)
    engine.store(tokens)
    found = engine.lookup(tokens)
    assert found["matched"] == 10
    doubted = other.lookup(tokens)
    other.failed(doubted["lease"], [6])
    assert engine.load(found["lease"], 10) == 6
    judged = engine.read(tokens)
    assert judged == {"intact": list(range(6)), "foreign": [], "changed": []}
    # The next lookup of that block is a miss, and with it of all that is chained below.
    assert engine.lookup(tokens, "again")["matched"] == 6
    assert daemon.status()["counters"]["failed_loads"] == 1


def test_blocks_that_are_corrupt_on_disk_are_a_miss_and_never_data(start_daemon, start_engine):
    # A10, A1: flipped bits below; the load ends before them and the next lookup knows.
    daemon = start_daemon()
    engine = start_engine(daemon)
    tokens = prompt("document", 10)
    engine.store(tokens)
    assert daemon.stop() == 0
    (slab,) = daemon.disk.glob("slab-*.dat")
    with slab.open("r+b") as file:
        for at in range(0, slab.stat().st_size, 36 << 10):
            # Each slot has a header page and 32 KiB: hit the payload of slot 6 alone.
            if at // (36 << 10) == 6:
                file.seek(at + 8192)
                byte = file.read(1)
                file.seek(at + 8192)
                file.write(bytes([byte[0] ^ 1]))
    daemon.start()
    got = eventually(lambda: _fetched(engine, tokens))
    assert got["matched"] == 10
    assert got["foreign"] == 0
    assert got["loaded"] < 10
    again = engine.fetch(tokens)
    assert (again["matched"], again["loaded"], again["foreign"]) == (got["loaded"], got["loaded"], 0)
    assert any("byte-true" in problem for problem in daemon.status()["problems"])


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_daemon_that_ends_in_mid_load_leaves_nothing_reported_as_loaded(daemon, start_engine, end):
    # A10: what was copied after the daemon's death is not trusted.
    engine = start_engine(daemon)
    tokens = prompt("document", 8)
    engine.store(tokens)
    found = engine.lookup(tokens)
    engine.load(found["lease"], 8)
    engine.read_slowly(tokens)
    daemon.kill() if end == "kill" else daemon.stop()
    judged = engine.read_on(tokens)
    assert judged["foreign"] == []
    with pytest.raises(EngineError, match="DaemonUnavailable"):
        engine.lookup(tokens)
    daemon.start()
    engine.attach()
    engine.store(tokens)
    assert engine.fetch(tokens)["loaded"] == 8


def test_leases_of_engines_that_never_come_back_end_by_their_deadline(small, start_engine):
    # C1: held, never loaded, over and over; the pool can still be filled.
    engine = start_engine(small)
    engine.store(prompt("a", 32))
    for number in range(50):
        engine.lookup(prompt("a", 32), f"request {number}")
    assert small.status()["leases"]["pins"] == 4 * 32  # the whole pool is the budget
    eventually(lambda: small.status()["leases"]["pins"] == 0)
    assert engine.store(prompt("b", 128))["ready"] == 128


# ---- promotion


def test_sixteen_loads_of_eight_blocks_each_through_four_slots_all_end(start_daemon, start_engine):
    # D1: the staging is far too small for all; each ends with what it got, and nobody waits for ever.
    daemon = start_daemon(
        dram="1MiB",
        dram_slab="1MiB",
        disk_write_policy="through",
        promotion_budget_share="100%",
        leases_budget_share="100%",
    )
    engine = start_engine(daemon, layers=8, head_dim=128)  # 256 KiB a block: four slots
    prompts = [prompt(f"document {number}", 8) for number in range(16)]
    for number, tokens in enumerate(prompts):
        for blocks in range(1, 9):
            eventually(lambda tokens=tokens, blocks=blocks: _stored(engine, tokens[: blocks * BLOCK_TOKENS]))
            # Not faster than the disk, or blocks that are still dirty are dropped for the next ones.
            eventually(lambda written=8 * number + blocks: disk(daemon)["blocks"] >= written)
    began = time.monotonic()
    results = engine.storm(prompts, 1000)
    assert time.monotonic() - began < 15
    assert all(result["error"] == "" for result in results), results
    assert sum(result["foreign"] for result in results) == 0
    assert sum(result["matched"] for result in results) > 0
    # After the storm one load goes as if nothing had been.
    eventually(lambda: daemon.status()["leases"]["live"] == 0)
    got = engine.fetch(prompts[0][: 2 * BLOCK_TOKENS])
    assert (got["loaded"], got["foreign"]) == (2, 0)


def _stored(engine, tokens):
    return set(engine.store(tokens)["states"]) <= {"HERE", "SLOT"}


@pytest.mark.parametrize("moment", ["at once", "later", "at its end"])
def test_a_load_that_is_given_up_on_its_way_frees_its_buffers_once(start_daemon, start_engine, moment):
    # C4
    daemon = start_daemon()
    engine = start_engine(daemon)
    tokens = prompt("document", 64)
    engine.store(tokens)
    daemon.restart()
    eventually(lambda: _attached(engine))
    found = engine.lookup(tokens)
    assert (found["matched"], found["ready"]) == (64, 0)
    if moment == "later":
        engine.timed("load", found["lease"], 64, 1)
    if moment == "at its end":
        assert engine.load(found["lease"], 64, 2000) == 64
    engine.release(found["lease"])
    eventually(lambda: dram(daemon)["pinned"] == 0 and daemon.check() == [])
    got = engine.fetch(tokens)
    assert (got["loaded"], got["foreign"]) == (64, 0)


def _attached(engine):
    try:
        return engine.attach()
    except EngineError:
        return None


def test_an_engine_killed_while_its_blocks_come_up_leaves_nothing_pinned(daemon, start_engine):
    engine, other = start_engine(daemon), start_engine(daemon)
    tokens = prompt("document", 256)
    engine.store(tokens)
    daemon.restart()
    eventually(lambda: _attached(engine))
    engine.begin("fetch", tokens, "r", 5000)
    engine.kill()
    eventually(lambda: daemon.status()["leases"]["live"] == 0 and not daemon.status()["sessions"])
    got = eventually(lambda: _fetched(other, tokens))
    assert (got["loaded"], got["foreign"]) == (256, 0)


# ---- a daemon in trouble


def test_a_stopped_daemon_costs_an_engine_its_deadline_and_no_more(daemon, start_engine):
    # D3
    engine = start_engine(daemon, timeout=0.5)
    tokens = prompt("document", 4)
    engine.store(tokens)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        outcomes = [engine.timed("lookup", tokens, f"{number}") for number in range(3)]
        assert [outcome["error"] for outcome in outcomes] == ["DaemonUnavailable"] * 3
        assert all(outcome["seconds"] < 1.5 for outcome in outcomes)
        told = engine.timed("release", 1)
        assert told["error"] is None
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    # Late replies are nobody's: what is asked now is answered with its own.
    assert eventually(lambda: _fetched(engine, tokens))["loaded"] == 4


def test_an_engine_starts_without_a_daemon_and_finds_it_later(daemon, start_engine):
    daemon.stop()
    engine = start_engine(daemon)
    outcome = engine.timed("lookup", prompt("a", 1))
    assert outcome["error"] == "DaemonUnavailable"
    assert outcome["seconds"] < 1
    daemon.start()
    assert eventually(lambda: _fetched(engine, prompt("a", 1)))["matched"] == 0


def test_a_total_miss_costs_under_two_milliseconds(daemon, start_engine):
    # O1, F1: one lookup of 1,000 blocks, nothing there; the bench has the exact figure.
    engine = start_engine(daemon)
    engine.misses(1000, 5)
    assert min(engine.misses(1000, 30)) < 0.002


def test_the_cost_of_a_miss_does_not_grow_with_what_is_stored(daemon, start_engine):
    # F1
    engine = start_engine(daemon)
    empty = statistics.median(engine.misses(256, 50))
    for number in range(8):
        engine.store(prompt(f"{number}", 200))
    full = min(engine.misses(256, 50))
    assert full < 5 * max(empty, 0.0002)
