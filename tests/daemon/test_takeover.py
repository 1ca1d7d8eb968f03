"""One daemon takes over from another, with real processes: nothing is lost, nothing lies, and either side may die.

The steps of a takeover (begin, freeze, read, commit, serving) are those of daemon/handover.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines.faulty_daemon import Rules
from engines.nodes import fetch, node
from engines.redis_server import serve
from engines.scripted import EngineError, eventually, prompt

from kvcascade.config.errors import CascadeError, DaemonUnavailable, Refused
from kvcascade.daemon.client import Client
from kvcascade.daemon.handover import FORMAT

KVCASCADE = Path(sys.executable).parent / "kvcascade"
STEPS = ("begin", "freeze", "read", "commit", "serving")


@contextmanager
def successor(daemon, *wrapper, **flags) -> Iterator[subprocess.Popen[str]]:
    """`kvcascade serve --takeover` with the flags of a running daemon, some of them changed."""
    chosen = {**daemon.flags, **{f"--{name.replace('_', '-')}": value for name, value in flags.items()}}
    command = [*(wrapper or [KVCASCADE, "serve"]), "--takeover", *(part for pair in chosen.items() for part in pair)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCASCADE_")}
    with daemon.log.open("a") as log:
        process = subprocess.Popen([str(part) for part in command], stderr=log, stdout=log, text=True, env=environment)
    try:
        yield process
    finally:
        if process is not daemon.process and process.poll() is None:
            process.kill()
            process.wait(10)


def take_over(daemon, **flags):
    """A successful takeover: `daemon` is the new one from now on; the old one's exit code."""
    old = daemon.process
    with successor(daemon, **flags) as new:
        code = old.wait(20)
        daemon.process = new
        daemon.flags.update({f"--{name.replace('_', '-')}": value for name, value in flags.items()})
        eventually(lambda: _status(daemon)["pid"] == new.pid)
        eventually(lambda: all(tier["state"] == "ok" for tier in daemon.status()["tiers"]))
    return code


def _status(daemon):
    try:
        return daemon.status()
    except CascadeError:
        return {"pid": None}


def fetched(engine, tokens):
    """What an engine fetches once it has re-attached by itself."""

    def fetch():
        try:
            return engine.fetch(tokens)
        except EngineError:  # its back-off has not passed
            return None

    return eventually(fetch)


def dram(daemon):
    return next(one for one in daemon.status()["tiers"] if one["name"] == "dram")


def test_blocks_in_dram_stay_warm_and_sessions_reattach_by_themselves(daemon, start_engine):
    engine, other = start_engine(daemon), start_engine(daemon, model="another")
    engine.store(prompt("a", 40))
    other.store(prompt("b", 8))
    boot = engine.attach()["boot"]
    assert take_over(daemon) == 0
    assert daemon.check() == []
    assert fetched(engine, prompt("a", 40)) == {"matched": 40, "loaded": 40, "foreign": 0, "tiers": [1] * 40}
    assert fetched(other, prompt("b", 8)) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}
    assert engine.attach()["boot"] != boot
    assert daemon.status()["recovered"]["taken_over"] == {"blocks": 48, "dropped": 0}
    # The new daemon evicts, demotes and stores as any other, in the same memory.
    for name in range(60):
        engine.store(prompt(f"more {name}", 40))
    assert daemon.check() == []
    assert fetched(engine, prompt("more 59", 40))["foreign"] == 0


def test_clean_blocks_stay_clean_and_those_on_disk_alone_are_found(start_daemon, start_engine):
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB", disk_write_policy="through")
    engine = start_engine(daemon)
    for name in range(12):
        engine.store(prompt(f"p {name}", 40))
        eventually(lambda: dram(daemon)["dirty"] == 0)
    before = daemon.status()
    assert take_over(daemon) == 0
    after = daemon.status()
    assert (dram(daemon)["blocks"], dram(daemon)["dirty"]) == (before["tiers"][0]["blocks"], 0)
    assert after["index"]["blocks"] == before["index"]["blocks"]
    for name in range(12):
        got = fetched(engine, prompt(f"p {name}", 40))
        assert (got["loaded"], got["foreign"]) == (40, 0)


def test_takeovers_may_follow_one_another_and_a_restart_finds_all_on_disk(daemon, start_engine):
    engine = start_engine(daemon)
    for round_ in range(3):
        engine.store(prompt(f"a {round_}", 16))
        assert take_over(daemon) == 0
        for earlier in range(round_ + 1):
            assert fetched(engine, prompt(f"a {earlier}", 16))["tiers"] == [1] * 16
    daemon.restart()
    assert daemon.status()["recovered"]["blocks"] == 48


def test_token_ids_come_along_where_hashes_can_collide(start_daemon, start_engine):
    daemon = start_daemon(daemon_hash_algo="xxhash", daemon_seed="0")
    engine = start_engine(daemon, algo="xxhash")
    tokens = prompt("a", 8)
    engine.reserve(tokens, keep_tokens=True)
    engine.write()
    engine.commit()
    assert take_over(daemon) == 0
    eventually(lambda: _attached(engine))
    assert engine.lookup_told(tokens, tokens) == 8
    assert engine.lookup_told(tokens, [1] * len(tokens)) == 0


def _attached(engine):
    try:
        return engine.attach()
    except EngineError:
        return None


def test_blocks_in_hbm_come_down_to_dram(start_daemon, start_engine):
    daemon = start_daemon(hbm="8MiB", hbm_device="cpu")
    engine = start_engine(daemon)
    engine.store(prompt("a", 32))
    assert take_over(daemon) == 0
    assert fetched(engine, prompt("a", 32))["tiers"] == [1] * 32


def test_what_was_connecting_waits_for_the_new_daemon(daemon):
    # The listening socket itself changes hands, so no connection is refused in between.
    refused = []
    with successor(daemon) as new:
        old, daemon.process = daemon.process, new
        while old.poll() is None and new.poll() is None:
            try:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(daemon.socket))
            except OSError as error:
                refused.append(error)
            time.sleep(0.001)  # a flood would make the steps late, and a late takeover is given up
        assert (old.wait(20), new.poll()) == (0, None)
        eventually(lambda: _status(daemon)["pid"] == new.pid)
    assert refused == []


def test_with_no_daemon_it_starts_as_any_other(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    engine.close()
    assert daemon.stop() == 0
    with successor(daemon) as new:
        daemon.process = new
        eventually(lambda: _status(daemon)["pid"] == new.pid)
        recovered = daemon.status()["recovered"]
        assert (recovered["blocks"], recovered["dropped"], "taken_over" in recovered) == (8, {}, False)


# ---- leases


def test_slots_of_an_open_reservation_are_withheld_until_its_session_is_back(daemon, start_engine):
    engine = start_engine(daemon)
    engine.reserve(prompt("a", 8))
    engine.begin_copy()
    engine.fill(0.5)
    assert take_over(daemon) == 0
    assert dram(daemon)["quarantined"] == 8
    # Others may have all the rest, never these.
    other = start_engine(daemon)
    for name in range(60):
        other.store(prompt(f"b {name}", 40))
    engine.fill()
    assert fetched(other, prompt("b 59", 40)) == {"matched": 40, "loaded": 40, "foreign": 0, "tiers": [1] * 40}
    assert dram(daemon)["quarantined"] == 8
    # Re-attaching says that no copy of the earlier session runs: while one does, it waits.
    with pytest.raises(EngineError):
        engine.attach(0.3)
    assert dram(daemon)["quarantined"] == 8
    engine.end_copy()
    eventually(lambda: _attached(engine))
    assert dram(daemon)["quarantined"] == 0
    assert daemon.check() == []


def test_slots_withheld_for_a_process_come_back_with_its_death(daemon, start_engine):
    engine, quarantined = start_engine(daemon), start_engine(daemon)
    engine.reserve(prompt("a", 8))
    engine.begin_copy()
    quarantined.reserve(prompt("b", 4))
    quarantined.begin_copy()
    quarantined.lose_socket()
    assert take_over(daemon) == 0
    assert dram(daemon)["quarantined"] == 12
    engine.kill()
    eventually(lambda: dram(daemon)["quarantined"] == 4)
    quarantined.kill()
    eventually(lambda: dram(daemon)["quarantined"] == 0)


def test_withheld_slots_are_handed_on_by_a_second_takeover_too(daemon, start_engine):
    engine = start_engine(daemon)
    engine.reserve(prompt("a", 8))
    engine.begin_copy()
    assert take_over(daemon) == 0
    assert take_over(daemon) == 0
    assert dram(daemon)["quarantined"] == 8
    engine.kill()
    eventually(lambda: dram(daemon)["quarantined"] == 0)


def test_each_rank_that_has_not_committed_withholds_its_slots(daemon, start_engine):
    scheduler = start_engine(daemon, role="scheduler", ranks=2)
    attachment = scheduler.attach()["attachment"]
    ranks = [start_engine(daemon, role="rank", ranks=2, rank=rank, attachment=attachment) for rank in range(2)]
    value = scheduler.reserve(prompt("a", 8))["value"]
    for rank in ranks:
        rank.take_over(prompt("a", 8), value)
    ranks[0].write()
    ranks[0].commit()
    assert take_over(daemon) == 0
    assert dram(daemon)["quarantined"] == 8
    ranks[0].kill()
    assert dram(daemon)["quarantined"] == 8
    ranks[1].kill()
    eventually(lambda: dram(daemon)["quarantined"] == 0)


def test_a_store_that_is_about_to_be_committed_is_waited_for(daemon, start_engine):
    engine = start_engine(daemon)
    engine.reserve(prompt("a", 8))
    engine.write()
    with successor(daemon) as new:
        old, daemon.process = daemon.process, new
        eventually(lambda: _refuses_stores(engine))
        assert engine.commit()["ready"] == 8
        assert old.wait(20) == 0
        eventually(lambda: _status(daemon)["pid"] == new.pid)
    assert fetched(engine, prompt("a", 8))["tiers"] == [1] * 8


def _refuses_stores(engine):
    return engine.timed("probe_store", prompt("other", 1))["error"] == "Refused"


def test_a_load_in_mid_copy_is_not_trusted_after_the_takeover(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    lease = engine.lookup(prompt("a", 8))["lease"]
    assert engine.load(lease, 8) == 8
    engine.read_slowly(prompt("a", 8))
    assert take_over(daemon) == 0
    other = start_engine(daemon)
    for name in range(80):
        other.store(prompt(f"b {name}", 40))
    judged = engine.read_on(prompt("a", 8))
    assert (judged["intact"], judged["foreign"]) == ([], [])


# ---- refusals


def refused(daemon, **flags):
    """A takeover that must fail: the exit code and what it says."""
    before = daemon.log.read_text()
    with successor(daemon, **flags) as new:
        code = new.wait(60)
    return code, daemon.log.read_text().removeprefix(before)


def expect_undisturbed(daemon, engine, tokens, boot):
    """The old daemon serves on, with every block, and stores."""
    assert daemon.running
    assert fetched(engine, tokens) == {"matched": 16, "loaded": 16, "foreign": 0, "tiers": [1] * 16}
    assert daemon.status()["boot"] == boot
    assert engine.store(prompt(f"{os.urandom(4)!r}", 4))["ready"] == 4
    assert daemon.check() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"dram_slab": "8MiB"}, "dram.slab"),
        ({"dram": "32MiB"}, "dram.capacity"),
        ({"disk": "/proc/x"}, "disk.directory"),
    ],
)
def test_settings_that_do_not_fit_leave_the_old_daemon_serving(daemon, start_engine, flags, named):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    boot = daemon.status()["boot"]
    code, said = refused(daemon, **flags)
    assert code == 2
    assert named in said
    eventually(lambda: _attached(engine))
    expect_undisturbed(daemon, engine, prompt("a", 16), boot)


@contextmanager
def asking(daemon):
    """A test in the place of the new daemon."""
    client = Client(daemon.socket, timeout=20)
    client.connect()
    try:
        yield lambda step, **fields: client.call_with_fds("takeover", {"step": step, **fields})
    finally:
        client.close()


def test_another_format_an_unknown_step_and_steps_out_of_order_are_refused(daemon):
    for step, fields, message in (
        ("begin", {"format": FORMAT + 1}, f"format {FORMAT + 1}"),
        ("begin", {}, "format"),
        ("leap", {}, "leap"),
        ("commit", {}, "commit"),
        ("serving", {}, "serving"),
        ("read", {"part": "blocks", "at": 0}, "read"),
    ):
        with asking(daemon) as ask, pytest.raises(CascadeError, match=message):
            ask(step, **fields)
    eventually(lambda: not _busy(daemon))


def _busy(daemon):
    with asking(daemon) as ask:
        try:
            _, descriptors = ask("begin", format=FORMAT)
        except Refused:
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        return False


def test_two_at_once_are_refused(daemon):
    with asking(daemon) as ask:
        _, descriptors = ask("begin", format=FORMAT)
        code, said = refused(daemon)
        assert code == 4
        assert f"pid {os.getpid()}" in said
        for descriptor in descriptors:
            os.close(descriptor)


# ---- deaths


KILLED = """
import os, signal, sys
from kvcascade.daemon import cli, handover
side, step = sys.argv[1:3]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if side == "new":
    before = handover.Successor._step
    async def after(self, name, **fields):
        answer = await before(self, name, **fields)
        if name == step:
            die()
        return answer
    handover.Successor._step = after
else:
    before = handover.Predecessor.step
    def after(self, correlation, body):
        if body["step"] == step:
            die()
        before(self, correlation, body)
    handover.Predecessor.step = after
sys.exit(cli.main(sys.argv[3:]))
"""


def killed(side, step, program=KILLED):
    """The command of a daemon that ends at a step of the takeover."""
    return [sys.executable, "-P", "-c", program, side, step, "serve"]


@pytest.mark.parametrize("step", ["begin", "freeze", "read", "commit"])
def test_a_new_daemon_that_is_killed_at_a_step_leaves_the_old_one_serving(daemon, start_engine, step):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    engine.reserve(prompt("b", 4))
    boot = daemon.status()["boot"]
    with successor(daemon, *killed("new", step)) as new:
        assert new.wait(20) == -signal.SIGKILL
    eventually(lambda: _status(daemon)["pid"] == daemon.pid)
    expect_undisturbed(daemon, engine, prompt("a", 16), boot)
    # The next one works.
    assert take_over(daemon) == 0
    assert fetched(engine, prompt("a", 16))["tiers"] == [1] * 16


@pytest.mark.parametrize("step", STEPS)
def test_an_old_daemon_that_is_killed_at_a_step_is_succeeded_all_the_same(daemon, start_engine, step):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    daemon.restart()  # so that the blocks lie on disk
    with successor(daemon, *killed("old", step)) as doomed:
        assert daemon.process.wait(20) == 0
        daemon.process = doomed
        eventually(lambda: _status(daemon)["pid"] == doomed.pid)
        assert fetched(engine, prompt("a", 16))["loaded"] == 16
        with successor(daemon) as new:
            assert doomed.wait(20) == -signal.SIGKILL
            daemon.process = new
            eventually(lambda: _status(daemon)["pid"] == new.pid)
    got = fetched(engine, prompt("a", 16))
    assert (got["loaded"], got["foreign"]) == (16, 0)
    # Only where the old one had given everything away are they warm.
    assert set(got["tiers"]) == ({1} if step == "serving" else {2})


def test_a_new_daemon_that_stands_still_is_given_up_when_it_is_killed(daemon, start_engine):
    engine = start_engine(daemon, timeout=1.0)
    engine.store(prompt("a", 16))
    boot = daemon.status()["boot"]
    with asking(daemon) as ask:
        _, descriptors = ask("begin", format=FORMAT)
        ask("freeze")
        # The old daemon stands still; engines go on without it within their deadline.
        outcome = engine.timed("lookup", prompt("a", 16))
        assert (outcome["error"], outcome["seconds"] < 2) == ("DaemonUnavailable", True)
        for descriptor in descriptors:
            os.close(descriptor)
    expect_undisturbed(daemon, engine, prompt("a", 16), boot)


def test_sigterm_to_the_old_daemon_undoes_the_takeover_and_ends_it_in_order(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    with asking(daemon) as ask:
        _, descriptors = ask("begin", format=FORMAT)
        ask("freeze")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        with pytest.raises(DaemonUnavailable):
            ask("commit")
        for descriptor in descriptors:
            os.close(descriptor)
    daemon.start()
    assert daemon.status()["recovered"]["blocks"] == 16


def _serves(daemon):
    """Whether the old daemon serves on, and will: one that was told of a successor ends within moments."""
    try:
        daemon.process.wait(0.3)
    except subprocess.TimeoutExpired:
        status = _status(daemon)
        return status["pid"] == daemon.pid and "the daemon is ending" not in status["problems"]
    return False


@pytest.mark.stress
def test_many_kills_at_random_moments(daemon, start_engine, tmp_path):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    boot = daemon.status()["boot"]
    for round_ in range(6):
        with successor(daemon) as new:
            time.sleep(0.25 + 0.1 * round_)  # the moment is the point
            new.kill()
            new.wait(20)
            eventually(lambda: daemon.process.poll() is not None or _serves(daemon))
            if daemon.process.poll() is not None:
                # It had said that it serves: its death is a crash like any other.
                daemon.process = None
                daemon.start()
                fetched(engine, prompt("a", 16))  # the first use after a loss may tell of it
                engine.store(prompt("a", 16))
                boot = daemon.status()["boot"]
        eventually(lambda: _attached(engine))
        expect_undisturbed(daemon, engine, prompt("a", 16), boot)


@pytest.mark.stress
def test_takeovers_under_load_lose_nothing_that_was_committed_and_tell_no_lie(start_daemon, start_engine):
    # Written through and seen on disk, since a small pool under load may forget what is dirty.
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB", disk_size="64MiB", disk_write_policy="through")
    kept = start_engine(daemon)
    kept.store(prompt("kept", 8))
    eventually(lambda: next(tier for tier in _status(daemon)["tiers"] if tier["name"] == "disk")["blocks"] >= 8)
    engines = [start_engine(daemon, timeout=2.0) for _ in range(2)]
    for round_ in range(3):
        for number, engine in enumerate(engines):
            engine.begin("work", 2.0, 24, 24, 10 * round_ + number)
        assert take_over(daemon) == 0
        told = [engine.result() for engine in engines]
        assert [one["foreign"] for one in told] == [0, 0]
        assert sum(one["stored"] for one in told) > 0
        assert daemon.check() == []
        # What the engines stored last may still be on its way down, and leave no room to bring eight blocks up.
        eventually(lambda: fetched(kept, prompt("kept", 8))["loaded"] == 8)


# ---- a disk that hangs


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    return Rules(tmp_path / "rules")


def disk_of(daemon):
    return next((tier for tier in daemon.status()["tiers"] if tier["name"] == "disk"), None)


def on_two_drives(start_daemon, start_engine, rules, tmp_path):
    """A daemon whose drives obey `rules`, and an engine with 16 blocks that are durable."""
    daemon = start_daemon(command=rules.command, disk=f"{tmp_path / 'a'}, {tmp_path / 'b'}",
                          disk_write_policy="through", daemon_drain_deadline="2s")  # fmt: skip
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    eventually(lambda: disk_of(daemon)["blocks"] == 16)
    return daemon, engine


def forget_half(engine):
    lease = engine.lookup(prompt("a", 16))["lease"]
    engine.failed(lease, [8])
    engine.release(lease)


@pytest.mark.parametrize(
    "what",
    [
        "write slab-* hang 0",
        pytest.param("read slab-* hang 0", marks=pytest.mark.stress),
        pytest.param("sync * hang 0", marks=pytest.mark.stress),
    ],
)
def test_while_a_drive_hangs_the_old_daemon_carries_on_and_hands_over_when_it_answers(
    start_daemon, start_engine, rules, tmp_path, what
):
    daemon, engine = on_two_drives(start_daemon, start_engine, rules, tmp_path)
    boot = daemon.status()["boot"]
    rules.set(*(what.replace(" ", " a/", 1), what.replace(" ", " b/", 1)))
    engine.store(prompt("late", 8))
    if what.startswith("read"):
        # Blocks that are on disk alone: what is asked for next hangs.
        for number in range(60):
            engine.store(prompt(f"b {number}", 40))
        engine.begin("fetch", prompt("a", 16), wait_ms=100)
        engine.result(60)
    for _ in range(2):  # at once, and after its state is known
        code, said = refused(daemon)
        assert (code, "takeover" in said) == (4, True), said
        eventually(lambda: _status(daemon)["pid"] == daemon.pid)
        assert daemon.status()["boot"] == boot
        assert fetched(engine, prompt("late", 8))["foreign"] == 0
        assert daemon.check() == []
        eventually(lambda: disk_of(daemon)["state"] == "sick", 30)
    assert "no answer" in said
    rules.set()
    eventually(lambda: disk_of(daemon)["state"] == "ok", 60)
    assert take_over(daemon) == 0
    assert fetched(engine, prompt("late", 8))["foreign"] == 0
    assert fetched(engine, prompt("a", 16)) | {"tiers": []} == {"matched": 16, "loaded": 16, "foreign": 0, "tiers": []}


def test_a_disk_that_hangs_as_it_is_handed_over_is_the_old_daemons_again_once_it_answers(
    start_daemon, start_engine, rules, tmp_path
):
    daemon, engine = on_two_drives(start_daemon, start_engine, rules, tmp_path)
    # The records of what is forgotten are all that is left to be written.
    rules.set("sync journal-* hang 0")
    forget_half(engine)
    code, said = refused(daemon)
    assert (code, "takeover: the disk has not answered" in said) == (4, True), said
    eventually(lambda: _status(daemon)["pid"] == daemon.pid)
    assert disk_of(daemon) is None
    assert fetched(engine, prompt("a", 8))["tiers"] == [1] * 8
    rules.set()
    eventually(lambda: disk_of(daemon) is not None and disk_of(daemon)["state"] == "ok", 60)
    assert daemon.check() == []
    engine.store(prompt("b", 8))
    eventually(lambda: disk_of(daemon)["blocks"] == 16)
    assert take_over(daemon) == 0


def test_a_daemon_whose_closed_disk_hangs_ends_when_it_is_told_to(start_daemon, start_engine, rules, tmp_path):
    daemon, engine = on_two_drives(start_daemon, start_engine, rules, tmp_path)
    rules.set("sync journal-* hang 0")
    forget_half(engine)
    assert refused(daemon)[0] == 4
    eventually(lambda: _status(daemon)["pid"] == daemon.pid)
    assert daemon.stop() == 0


def test_a_drive_that_hangs_for_the_new_daemon_alone_is_left_out_and_joins_later(
    start_daemon, start_engine, rules, tmp_path
):
    daemon, engine = on_two_drives(start_daemon, start_engine, rules, tmp_path)
    others = Rules(tmp_path / "the successor's rules")
    others.set_quietly("read a/* hang 0")
    old, daemon.command = daemon.process, others.command
    daemon.start_takeover()
    assert old.wait(20) == 0
    assert disk_of(daemon)["state"] == "sick"
    assert f"{tmp_path / 'a'}: " in disk_of(daemon)["reason"]
    assert fetched(engine, prompt("a", 16))["tiers"] == [1] * 16
    engine.store(prompt("b", 16))
    others.set()
    eventually(lambda: disk_of(daemon)["state"] == "ok", 60)
    assert daemon.check() == []


def test_a_disk_that_hangs_for_the_new_daemon_as_a_whole_leaves_the_old_one_serving(
    start_daemon, start_engine, rules, tmp_path
):
    daemon, engine = on_two_drives(start_daemon, start_engine, rules, tmp_path)
    boot = daemon.status()["boot"]
    others = Rules(tmp_path / "the successor's rules")
    others.set_quietly("read * hang 0")
    with successor(daemon, *others.command) as new:
        assert new.wait(60) == 4
    eventually(lambda: _status(daemon)["pid"] == daemon.pid)
    eventually(lambda: disk_of(daemon) is not None, 30)
    expect_undisturbed(daemon, engine, prompt("a", 16), boot)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_users_process_is_refused_though_it_may_connect(daemon):
    for path in (daemon.directory, daemon.socket.parent, daemon.socket):
        path.chmod(0o777)
    client = Client(daemon.socket, timeout=20)
    os.seteuid(65534)
    try:
        client.connect()
    finally:
        os.seteuid(0)
    try:
        with pytest.raises(Refused, match="65534"):
            client.call_with_fds("takeover", {"step": "begin", "format": FORMAT})
    finally:
        client.close()


def test_a_new_daemon_that_is_told_to_end_before_the_commit_point_leaves_the_old_one_serving(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 16))
    boot = daemon.status()["boot"]
    with successor(daemon, *killed("new", "read", KILLED.replace("SIGKILL", "SIGTERM"))) as new:
        assert new.wait(20) == 4
    eventually(lambda: _status(daemon)["pid"] == daemon.pid)
    expect_undisturbed(daemon, engine, prompt("a", 16), boot)


def test_a_new_daemon_that_stands_still_is_given_up_after_a_while(daemon):
    # As the one before, but nobody ends it: the old one does not stand still for ever.
    patience = KILLED.replace("side, step = sys.argv[1:3]", 'side, step = "", ""; handover.FROZEN_S = 0.5')
    doomed = daemon.process
    with successor(daemon, *killed("", "", patience)) as impatient:
        assert doomed.wait(20) == 0
        daemon.process = impatient
        eventually(lambda: _status(daemon)["pid"] == impatient.pid)
        with asking(daemon) as ask:
            _, descriptors = ask("begin", format=FORMAT)
            ask("freeze")
            assert eventually(lambda: _status(daemon)["pid"]) == impatient.pid
            with pytest.raises(DaemonUnavailable):
                ask("commit")
            for descriptor in descriptors:
                os.close(descriptor)


@pytest.mark.parametrize("step", ["freeze", "commit"])
def test_after_a_takeover_that_failed_the_disk_is_as_it_was(start_daemon, start_engine, step):
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB", disk_write_policy="through")
    engine = start_engine(daemon)
    for name in range(12):
        engine.store(prompt(f"p {name}", 40))
        eventually(lambda: dram(daemon)["dirty"] == 0)
    before = daemon.status()["index"]["blocks"]
    for _ in range(2):
        with successor(daemon, *killed("new", step)) as new:
            assert new.wait(20) == -signal.SIGKILL
        eventually(lambda: _status(daemon)["pid"] == daemon.pid)
        assert daemon.check() == []
        assert daemon.status()["index"]["blocks"] == before
        assert dram(daemon)["dirty"] == 0
    # Blocks that lie on disk alone come up, new ones go down, and the next start finds all of them.
    for name in range(12):
        got = fetched(engine, prompt(f"p {name}", 40))
        assert (got["loaded"], got["foreign"]) == (40, 0)
    engine.store(prompt("late", 8))
    eventually(lambda: dram(daemon)["dirty"] == 0)
    held = daemon.status()["index"]["blocks"]
    assert held > before
    daemon.restart()
    assert daemon.status()["recovered"]["blocks"] == held


def test_a_node_whose_port_was_taken_during_a_takeover_that_failed_says_so_and_serves_once_it_is_free(
    start_daemon, start_engine
):
    with serve() as redis:
        a, b = (node(start_daemon, redis, name, redis_store="directory") for name in "ab")
        writer, reader = start_engine(a), start_engine(b)
        writer.store(prompt("before", 16))
        host, _, port = a.status()["cluster"]["server"]["listen"].rpartition(":")
        with asking(a) as ask:
            _, descriptors = ask("begin", format=FORMAT)
            ask("freeze")
            thief = eventually(lambda: socket.create_server((host, int(port))))
            for descriptor in descriptors:
                os.close(descriptor)
        with thief:
            told = eventually(lambda: _status(a).get("problems"))
            assert f"peers.listen: {host}:{port} cannot be had" in told[0]
            assert a.status()["cluster"]["fleet"]["address"] == ""
            # Nobody is sent there.
            fetched(writer, prompt("before", 16))
            assert redis.client().keys("kvcascade:boot:*") == [b"kvcascade:boot:" + bytes.fromhex(b.status()["boot"])]
            writer.store(prompt("meanwhile", 16))
        eventually(lambda: a.status()["problems"] == [])
        for name in ("before", "meanwhile"):
            eventually(lambda name=name: fetch(reader, prompt(name, 16), f"{time.monotonic()}")["tiers"], 60)


def test_failed_takeovers_leave_no_descriptor_behind(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 4))
    writer = start_engine(daemon)
    writer.reserve(prompt("b", 4))

    def descriptors():
        return sum(1 for _ in Path(f"/proc/{daemon.pid}/fd").iterdir())

    before = eventually(lambda: daemon.status()["index"]["blocks"] and descriptors())
    for step in ("begin", "read", "commit"):
        with successor(daemon, *killed("new", step)) as new:
            assert new.wait(20) == -signal.SIGKILL
        eventually(lambda: _status(daemon)["pid"] == daemon.pid)
        eventually(lambda: descriptors() <= before)
