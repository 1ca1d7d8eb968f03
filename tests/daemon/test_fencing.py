"""Late, stopped, killed, forked and cut-off writers: a slot that somebody may still write is given to nobody else."""

import os
import signal

import pytest
from engines.scripted import EngineError, eventually, prompt

RESERVATION_S = 0.3


@pytest.fixture
def impatient(start_daemon):
    """Reservations end after 0.3 s; 16 MiB of DRAM, so that every slot can be asked for."""
    return start_daemon(dram="16MiB", dram_slab="1MiB", leases_reservation=f"{RESERVATION_S}s",
                        leases_quarantine_share="100%", leases_budget_share="100%")  # fmt: skip


def dram(daemon):
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == "dram")


def quarantined(daemon):
    return dram(daemon)["quarantined"]


def abandoned(daemon):
    return daemon.status()["counters"].get("abandoned_blocks", 0)


def at_rest(daemon):
    return not quarantined(daemon) and not daemon.status()["leases"]["live"]


def fill_and_prove(engine, rounds=3, blocks=256):
    """Stores more than fits, so that every free slot is used, and loads what stayed: nothing foreign."""
    for number in range(rounds):
        engine.store(prompt(f"filler {os.urandom(4).hex()} {number}", blocks))
        tokens = prompt(f"kept {os.urandom(4).hex()}", 16)
        assert engine.store(tokens) == {"states": ["SLOT"] * 16, "ready": 16}
        got = engine.fetch(tokens)
        assert (got["loaded"], got["foreign"]) == (16, 0)


# ---- stopped and woken


def test_a_stopped_writers_slots_are_quarantined_until_it_is_woken_and_answers(impatient, start_engine):
    late, other = start_engine(impatient), start_engine(impatient)
    tokens = prompt("a", 32)
    late.reserve(tokens)
    late.begin_copy()
    late.fill(0.5)
    late.freeze()
    eventually(lambda: quarantined(impatient) == 32)
    # The blocks themselves are free to be stored by somebody else, in other slots (C9).
    assert other.store(tokens)["ready"] == 32
    fill_and_prove(other)
    assert quarantined(impatient) == 32
    late.wake()
    # Woken it knows of nothing and writes on: into slots that nobody else has.
    late.fill()
    assert other.fetch(tokens[:16])["foreign"] == 0
    late.end_copy()
    eventually(lambda: at_rest(impatient))
    with pytest.raises(EngineError, match="Refused"):
        late.commit()
    # It was told, and copies into them no more.
    with pytest.raises(EngineError, match="Refused"):
        late.write()
    assert late.store(prompt("b", 8))["ready"] == 8
    fill_and_prove(late)


def test_a_writer_that_copies_for_longer_than_its_reservation_loses_it_and_nothing_else(impatient, start_engine):
    slow = start_engine(impatient)
    slow.reserve(prompt("a", 8))
    slow.begin_copy()
    eventually(lambda: quarantined(impatient) == 8)
    slow.fill()
    slow.end_copy()  # answers the fence
    eventually(lambda: at_rest(impatient))
    with pytest.raises(EngineError, match="Refused"):
        slow.commit()
    assert slow.lookup(prompt("a", 8))["matched"] == 0
    assert slow.store(prompt("a", 8))["ready"] == 8


def test_a_late_commit_clears_the_quarantine_and_says_that_the_blocks_are_gone(impatient, start_engine):
    late = start_engine(impatient)
    late.reserve(prompt("a", 8))
    late.begin_copy()
    eventually(lambda: quarantined(impatient) == 8)
    # Its own commit proves the same as an answer to the fence.
    assert late.commit() == {"ready": 0, "gone": 8}
    assert quarantined(impatient) == 0
    late.end_copy()
    assert late.fetch(prompt("a", 8))["matched"] == 0


def test_an_idle_engines_expired_reservation_comes_back_without_its_doing(impatient, start_engine):
    # C9: reserved and forgotten. The client answers the fence by itself while nobody calls it.
    forgetful = start_engine(impatient)
    forgetful.reserve(prompt("a", 8))
    eventually(lambda: abandoned(impatient) == 8 and at_rest(impatient))
    assert dram(impatient)["blocks"] == 0


# ---- killed


@pytest.mark.parametrize("point", ["after reserve", "after half the bytes", "before commit"])
def test_a_killed_writers_blocks_can_be_stored_at_once_by_another(daemon, start_engine, point):
    # C9
    writer, other = start_engine(daemon), start_engine(daemon)
    tokens = prompt("a", 32)
    writer.reserve(tokens)
    if point != "after reserve":
        writer.begin_copy()
        writer.fill(0.5 if point == "after half the bytes" else 1.0)
    assert set(other.reserve(tokens)["states"]) == {"IN_FLIGHT"}
    writer.kill()
    eventually(lambda: other.store(tokens)["ready"] == 32)
    assert other.fetch(tokens) == {"matched": 32, "loaded": 32, "foreign": 0, "tiers": [1] * 32}
    eventually(lambda: at_rest(daemon))


def test_a_writer_killed_while_it_is_stopped_gives_everything_back(impatient, start_engine):
    writer = start_engine(impatient)
    writer.reserve(prompt("a", 32))
    writer.begin_copy()
    writer.freeze()
    eventually(lambda: quarantined(impatient) == 32)
    writer.kill()
    eventually(lambda: at_rest(impatient))
    assert impatient.status()["sessions"] == []


def test_half_of_a_chain_that_was_committed_before_the_kill_stays(daemon, start_engine):
    writer, reader = start_engine(daemon), start_engine(daemon)
    writer.reserve(prompt("a", 8))
    writer.write()
    assert writer.commit([0, 1, 2, 3])["ready"] == 4
    writer.kill()
    eventually(lambda: not daemon.status()["sessions"])
    got = reader.fetch(prompt("a", 8))
    assert (got["matched"], got["loaded"], got["foreign"]) == (4, 4, 0)


# ---- without a socket


def test_a_client_that_loses_its_socket_while_it_copies_keeps_its_slots_from_others(impatient, start_engine):
    cut, other = start_engine(impatient), start_engine(impatient)
    cut.reserve(prompt("a", 32))
    cut.begin_copy()
    cut.fill(0.5)
    assert cut.lose_socket() == 1
    eventually(lambda: quarantined(impatient) == 32)
    # Its leases end by the loss of the socket, its slots do not: the process lives and copies.
    fill_and_prove(other)
    cut.fill()
    assert quarantined(impatient) == 32
    with pytest.raises(EngineError, match="DaemonUnavailable"):
        cut.attach(0.2)  # a session of ours still copies: nothing may be said for it yet
    cut.end_copy()
    cut.attach()  # says by `resume` that the old session's copies have ended
    assert quarantined(impatient) == 0
    assert cut.store(prompt("a", 32))["ready"] == 32
    fill_and_prove(cut)


def test_a_client_without_a_socket_that_dies_gives_its_slots_back(daemon, start_engine):
    cut = start_engine(daemon)
    cut.reserve(prompt("a", 32))
    cut.begin_copy()
    cut.lose_socket()
    eventually(lambda: quarantined(daemon) == 32)
    assert any("late writers" in problem for problem in daemon.status()["problems"])
    cut.kill()
    eventually(lambda: at_rest(daemon))
    assert daemon.status()["problems"] == []


def test_no_other_process_can_say_that_a_lost_sessions_copies_have_ended(daemon, start_engine):
    cut, other = start_engine(daemon), start_engine(daemon)
    token = cut.attach()["session"]
    cut.reserve(prompt("a", 8))
    cut.begin_copy()
    cut.lose_socket()
    eventually(lambda: quarantined(daemon) == 8)
    other.claim(token)
    other.attach()
    assert quarantined(daemon) == 8
    cut.end_copy()


def test_quarantine_is_capped_for_its_attachment_alone(start_daemon, start_engine):
    daemon = start_daemon(dram="16MiB", dram_slab="1MiB", leases_quarantine_share="5%")
    other = start_engine(daemon)
    scheduler, (quick, stopped) = ranks_of(daemon, start_engine, 2)
    quick.attach()
    stopped.attach()
    stopped.freeze()
    assert set(scheduler.reserve(prompt("a", 32))["states"]) == {"SLOT"}
    scheduler.abort()
    eventually(lambda: quarantined(daemon) == 32)
    # 32 slots of 512 are more than 5 %: nothing more for this engine until its rank has answered.
    assert set(scheduler.reserve(prompt("b", 32))["states"]) == {"NO_ROOM"}
    assert other.store(prompt("b", 32))["ready"] == 32
    stopped.wake()
    eventually(lambda: quarantined(daemon) == 0)
    assert set(scheduler.reserve(prompt("c", 32))["states"]) == {"SLOT"}


def test_a_process_that_attaches_again_and_again_has_one_budget(start_daemon, start_engine):
    # C1: 128 slots, of which late writers of a process may hold a quarter, and its lookups half.
    daemon = start_daemon(dram="4MiB", dram_slab="1MiB", disk="", disk_size="", leases_quarantine_share="25%",
                          leases_reservation=f"{RESERVATION_S}s")  # fmt: skip
    greedy, other = start_engine(daemon), start_engine(daemon)
    for number in range(12):
        greedy.reserve(prompt(f"late {number}", 8))
        greedy.begin_copy()
        eventually(lambda number=number: quarantined(daemon) == min(8 * (number + 1), 40))
        greedy.again()
    assert quarantined(daemon) == 40
    assert set(greedy.reserve(prompt("more", 8))["states"]) == {"NO_ROOM"}
    other.store(prompt("a", 80))
    for number in range(4):
        greedy.again()
        assert greedy.lookup(prompt("a", 80), f"{number}")["matched"] == (64 if number == 0 else 0)
    assert daemon.status()["leases"]["pins"] == 64
    assert other.lookup(prompt("a", 80))["matched"] == 64
    greedy.kill()
    eventually(lambda: quarantined(daemon) == 0)
    assert other.store(prompt("b", 40))["ready"] == 40


# ---- forked


def test_a_forked_child_can_do_nothing_with_its_parents_session(daemon, start_engine):
    parent = start_engine(daemon)
    parent.store(prompt("a", 4))
    told = parent.fork()
    assert (told["error"], told["attached"]) == ("DaemonUnavailable", False)
    # The parent's session is whole: the child has neither read its replies nor closed its socket.
    assert parent.fetch(prompt("a", 4))["loaded"] == 4


def test_a_child_that_holds_the_socket_open_does_not_keep_a_dead_engine_alive(daemon, start_engine):
    parent = start_engine(daemon)
    parent.reserve(prompt("a", 8))
    parent.begin_copy()
    child = parent.fork_unnoticed()
    try:
        os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait()
        eventually(lambda: at_rest(daemon) and not daemon.status()["sessions"])
    finally:
        os.kill(child, signal.SIGKILL)


# ---- ranks


def ranks_of(daemon, start_engine, count, **options):
    scheduler = start_engine(daemon, role="scheduler", ranks=count, **options)
    token = scheduler.attach()["attachment"]
    ranks = [start_engine(daemon, role="rank", ranks=count, rank=rank, attachment=token, **options)
             for rank in range(count)]  # fmt: skip
    return scheduler, ranks


def test_a_block_of_two_ranks_is_ready_only_when_both_have_committed(daemon, start_engine):
    scheduler, ranks = ranks_of(daemon, start_engine, 2)
    tokens = prompt("a", 8)
    reserved = scheduler.reserve(tokens)
    for number, rank in enumerate(ranks):
        assert scheduler.lookup(tokens)["matched"] == 0
        rank.take_over(tokens, reserved["value"])
        rank.write()
        assert rank.commit()["ready"] == 8 * number
    # Slots are canonical: an engine of one rank loads what two have written, byte for byte.
    one = start_engine(daemon)
    assert one.fetch(tokens) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}


def test_what_one_rank_has_stored_two_ranks_load(daemon, start_engine):
    one = start_engine(daemon)
    tokens = prompt("a", 8)
    one.store(tokens)
    scheduler, ranks = ranks_of(daemon, start_engine, 2)
    found = scheduler.lookup(tokens)
    assert found["matched"] == 8
    load = scheduler.load_value(found["lease"], 8)
    for rank in ranks:
        rank.attach()
        assert rank.read_value(load, tokens) == {"intact": list(range(8)), "foreign": [], "changed": []}


@pytest.mark.parametrize("shape", [{"kv_heads": 2}, {"kv_heads": 1}, {"kv_heads": 1, "kind": "mla"}])
def test_replicated_heads_are_written_once_by_ranks_in_turn(daemon, start_engine, shape):
    scheduler, ranks = ranks_of(daemon, start_engine, 4, **shape)
    tokens = prompt("a", 8)
    reserved = scheduler.reserve(tokens)
    ready = 0
    for rank in ranks:
        rank.take_over(tokens, reserved["value"])
        rank.write()
        ready += rank.commit()["ready"]
    assert ready == 8
    assert start_engine(daemon, **shape).fetch(tokens)["foreign"] == 0
    assert scheduler.lookup(tokens)["matched"] == 8


def test_a_killed_rank_takes_what_it_had_not_committed_with_it(daemon, start_engine):
    scheduler, (first, second) = ranks_of(daemon, start_engine, 2)
    tokens = prompt("a", 8)
    reserved = scheduler.reserve(tokens)
    for rank in (first, second):
        rank.take_over(tokens, reserved["value"])
    first.write()
    first.commit()
    second.write(0.5)
    second.commit([0, 1])
    second.kill()
    eventually(lambda: scheduler.lookup(tokens, "again")["matched"] == 2 and not quarantined(daemon))
    # The blocks can be stored again by the whole engine, with a new process for the dead rank.
    new = start_engine(daemon, role="rank", ranks=2, rank=1, attachment=scheduler.attach()["attachment"])
    again = scheduler.reserve(tokens)
    for rank in (first, new):
        rank.attach()
        rank.take_over(tokens, again["value"])
        rank.write()
        rank.commit()
    assert start_engine(daemon).fetch(tokens)["loaded"] == 8


def test_a_stopped_rank_holds_only_the_slots_that_it_may_be_writing(impatient, start_engine):
    scheduler, (quick, stopped) = ranks_of(impatient, start_engine, 2)
    tokens = prompt("a", 8)
    reserved = scheduler.reserve(tokens)
    quick.take_over(tokens, reserved["value"])
    stopped.take_over(tokens, reserved["value"])
    stopped.commit([0, 1, 2, 3])
    stopped.begin_copy()
    stopped.freeze()
    quick.write()
    quick.commit()
    # Blocks 0 to 3 are ready; 4 to 7 expire, and wait for the stopped rank alone.
    eventually(lambda: quarantined(impatient) == 4)
    assert scheduler.lookup(tokens, "again")["matched"] == 4
    stopped.wake()
    stopped.end_copy()
    eventually(lambda: not quarantined(impatient))


def test_the_death_of_the_scheduler_leaves_no_rank_with_something_to_commit(daemon, start_engine):
    scheduler, (first, second) = ranks_of(daemon, start_engine, 2)
    tokens = prompt("a", 8)
    reserved = scheduler.reserve(tokens)
    scheduler.lookup(tokens)
    first.take_over(tokens, reserved["value"])
    first.attach()
    second.attach()
    scheduler.kill()
    eventually(lambda: len(daemon.status()["sessions"]) == 2 and not daemon.status()["leases"]["live"])
    first.close()
    second.close()
    eventually(lambda: at_rest(daemon) and not daemon.status()["sessions"])


def test_idle_ranks_stay_attached_while_one_works(daemon, start_engine):
    # E6: liveness is the connection's own; no rank has to store or load to be taken for alive.
    scheduler, ranks = ranks_of(daemon, start_engine, 4)
    for rank in ranks:
        rank.attach()
    tokens = prompt("a", 4)
    for number in range(20):
        part = prompt(f"{number}", 4)
        reserved = scheduler.reserve(part)
        ranks[0].take_over(part, reserved["value"])
        ranks[0].write()
        ranks[0].commit()
    sessions = daemon.status()["sessions"]
    assert sorted(s["rank"] for s in sessions if s["role"] == "rank") == [0, 1, 2, 3]
    assert {s["ranks"] for s in sessions} == {4}
    reserved = scheduler.reserve(tokens)
    ready = 0
    for rank in ranks:
        rank.take_over(tokens, reserved["value"])
        rank.write()
        ready += rank.commit()["ready"]
    assert ready == 4
    assert start_engine(daemon).fetch(tokens)["foreign"] == 0
