"""The daemon's life as a user sees it: start, status, an orderly end, a kill, and what the next start finds."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines.scripted import EngineError, Side, eventually, prompt

from kvcascade.config.errors import CascadeError

KVCASCADE = Path(sys.executable).parent / "kvcascade"


def serve(daemon, **flags):
    """A second `kvcascade serve` with the flags of a running daemon, some of them changed."""
    chosen = {**daemon.flags, **{f"--{name}": value for name, value in flags.items()}}
    command = [KVCASCADE, "serve", *(part for pair in chosen.items() for part in pair)]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=20, check=False)


def tier(daemon, name):
    return next(one for one in daemon.status()["tiers"] if one["name"] == name)


def at_rest(daemon):
    """No lease, no pending or quarantined slot, no session of an engine."""
    status = daemon.status()
    dram = next(one for one in status["tiers"] if one["name"] == "dram")
    return status["leases"]["live"] == 0 and not dram["quarantined"] and not dram["pinned"] and not status["sessions"]


def files_under(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def descriptors_of(daemon):
    return sum(1 for _ in Path(f"/proc/{daemon.pid}/fd").iterdir())


def named_memory_of(daemon):
    """What it maps or holds in /dev/shm, which would stay there after its death; other programs have theirs there."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    files = [str(path.readlink()) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()]
    return [one for one in maps + files if "/dev/shm/" in one]


def test_status_tells_what_runs_and_what_it_holds(daemon, start_engine):
    engine = start_engine(daemon, family="vllm-like")
    engine.store(prompt("a", 4))
    lease = engine.lookup(prompt("a", 4))["lease"]
    status = daemon.status()
    assert len(bytes.fromhex(status["boot"])) == 16
    assert (status["pid"], status["socket"]) == (daemon.pid, str(daemon.socket))
    assert status["uptime_s"] > 0
    assert status["index"]["blocks"] == 4
    dram, disk = status["tiers"]
    assert (dram["name"], dram["state"], dram["capacity"], dram["blocks"], dram["dirty"], dram["pinned"]) == (
        "dram", "ok", 64 << 20, 4, 4, 4)  # fmt: skip
    assert (disk["name"], disk["state"], disk["blocks"], disk["directory"]) == ("disk", "ok", 0, str(daemon.disk))
    (session,) = status["sessions"]
    assert (session["pid"], session["uid"], session["role"]) == (engine.pid, os.getuid(), "engine")
    assert (session["engine"]["family"], session["leases"], session["pins"]) == ("vllm-like", 1, 4)
    (held,) = status["namespaces"]
    assert (held["blocks"], held["fields"]["model"]) == (4, "a model's digest")
    assert status["leases"] == {"live": 1, "pins": 4, "oldest": status["leases"]["oldest"]}
    assert status["leases"]["oldest"][0]["owner"].startswith("vllm-like")
    assert status["hits"]["tokens"]["miss"] == 0
    engine.load(lease=lease, count=4)
    assert daemon.status()["hits"]["tokens"]["dram"] == 4 * 16


def test_namespaces_that_hold_nothing_and_that_nobody_uses_are_not_told(daemon, start_engine):
    # Weights that are updated in place open one each time.
    for epoch in ("1", "2", "3"):
        passing = start_engine(daemon, weights_epoch=epoch)
        passing.attach()
        passing.close()
    keeping, empty = start_engine(daemon, weights_epoch="4"), start_engine(daemon, weights_epoch="5")
    keeping.store(prompt("a", 4))
    keeping.close()
    empty.attach()
    eventually(lambda: len(daemon.status()["sessions"]) == 1)
    told = {one["fields"]["weights_epoch"]: one["blocks"] for one in daemon.status()["namespaces"]}
    assert told == {"4": 4, "5": 0}


def test_status_tells_the_largest_of_very_many_namespaces_and_what_is_most_wrong(daemon):
    # A reply may hold 65536 items; a model in training leaves a namespace behind with each step.
    sides = []
    for epoch in range(600):
        side = Side()
        side.start(str(daemon.socket), weights_epoch=str(epoch), layers=1, kv_heads=1)
        side.store(prompt("a", 2 if epoch == 7 else 1))
        if epoch < 540:
            side.close()
        else:
            sides.append(side)
    status = daemon.status()
    told = [one["fields"]["weights_epoch"] for one in status["namespaces"]]
    assert len(told) == 512
    assert set(told[:60]) == {str(epoch) for epoch in range(540, 600)}  # those in use
    assert told[60] == "7"
    assert (len(status["problems"]), status["problems"][-1]) == (51, "and 10 more")
    for side in sides:
        side.close()


def test_a_restart_finds_the_blocks_on_disk(daemon, start_engine):
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    before = engine.attach()["boot"]
    daemon.restart()
    assert daemon.status()["recovered"]["blocks"] == 8
    # Not told of the restart, the engine attaches anew by itself: another boot, and the bytes come from disk.
    got = eventually(lambda: _fetched(engine, prompt("a", 8)))
    assert got == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [2] * 8}
    assert engine.attach()["boot"] != before


def _fetched(engine, tokens):
    try:
        return engine.fetch(tokens)
    except EngineError:  # its back-off has not passed
        return None


def test_start_and_stop_may_alternate(daemon, start_engine):
    tokens = prompt("a", 4)
    for cycle in range(3):
        engine = start_engine(daemon)
        got = engine.fetch(tokens)
        assert (got["loaded"], got["foreign"]) == ((4, 0) if cycle else (0, 0))
        engine.store(tokens)
        engine.close()
        daemon.restart()
    assert daemon.status()["recovered"]["blocks"] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_with_engines_attached(daemon, start_engine, number):
    engine = start_engine(daemon)
    engine.store(prompt("a", 4))
    os.kill(daemon.pid, number)
    assert daemon.process.wait(10) == 0
    daemon.process = None
    assert not daemon.socket.exists()
    outcome = engine.timed("lookup", prompt("a", 4))
    assert outcome["error"] == "DaemonUnavailable"
    assert outcome["seconds"] < 1


def test_the_end_waits_for_what_is_being_stored(daemon, start_engine):
    engine = start_engine(daemon)
    value = engine.reserve(prompt("a", 4))["value"]
    engine.write()
    os.kill(daemon.pid, signal.SIGTERM)
    eventually(lambda: _status(daemon) is None)
    with pytest.raises(EngineError, match="ending"):
        engine.reserve(prompt("b", 1))
    engine.take_over(prompt("a", 4), value)
    assert engine.commit() == {"ready": 4, "gone": 0}
    assert daemon.process.wait(10) == 0
    daemon.start()
    assert daemon.status()["recovered"]["blocks"] == 4


def test_the_end_comes_by_its_deadline_whatever_engines_hold(start_daemon, start_engine):
    daemon = start_daemon(daemon_drain_deadline="1s")
    engine = start_engine(daemon)
    engine.store(prompt("a", 4))
    engine.reserve(prompt("b", 4))
    engine.freeze()
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 4
    daemon.start()
    # What was committed is there, what was not is nowhere.
    assert daemon.status()["recovered"]["blocks"] == 4


def test_the_end_does_not_wait_for_slots_that_are_given_up(start_daemon, start_engine):
    daemon = start_daemon(leases_reservation="100ms", daemon_drain_deadline="10s")
    engine = start_engine(daemon)
    engine.reserve(prompt("a", 4))
    engine.freeze()
    eventually(lambda: tier(daemon, "dram")["quarantined"] == 4)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 4
    engine.wake()


def test_a_second_daemon_on_the_socket_is_refused_and_the_first_goes_on(daemon, tmp_path):
    second = serve(daemon, disk=tmp_path / "disk")
    assert second.returncode == 2
    assert f"pid {daemon.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert daemon.status()["pid"] == daemon.pid


def test_a_second_daemon_on_the_disk_directory_is_refused_and_the_first_goes_on(daemon, tmp_path):
    second = serve(daemon, socket=tmp_path / "s")
    assert second.returncode in (2, 4)
    assert str(daemon.disk) in second.stderr
    assert "Traceback" not in second.stderr
    assert not (tmp_path / "s").exists()
    assert daemon.check() == []


def test_a_socket_path_that_cannot_be_had_is_refused_by_name(daemon, tmp_path):
    for path in (tmp_path / ("x" * 120), tmp_path / "file" / "s", Path("/proc/s")):
        (tmp_path / "file").touch()
        second = serve(daemon, socket=path, disk=tmp_path / "disk")
        assert second.returncode == 2, second.stderr
        assert "daemon.socket" in second.stderr
        assert "Traceback" not in second.stderr


def test_what_lies_at_the_sockets_path_and_is_not_a_dead_daemons_socket_is_left_alone(daemon, tmp_path):
    (tmp_path / "notes").write_text("kept")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "stranger"))
        stranger.listen()
        for name in ("notes", "folder", "stranger"):
            second = serve(daemon, socket=tmp_path / name, disk=tmp_path / "disk")
            assert second.returncode == 2, second.stderr
            assert f"daemon.socket: {tmp_path / name}" in second.stderr or "listens at" in second.stderr
            assert "Traceback" not in second.stderr
        assert (tmp_path / "notes").read_text() == "kept"
        assert (tmp_path / "folder").is_dir()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(tmp_path / "stranger"))


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
def test_a_folder_that_this_user_may_not_enter_is_refused_by_name(daemon):
    hidden = daemon.directory / "hidden"
    hidden.mkdir(mode=0o700)
    daemon.directory.chmod(0o777)
    # Imported before: the other user may not be able to read this interpreter's files.
    code = (
        "import os, shutil, sys, kvcascade.config.load; from kvcascade.daemon import cli, server\n"
        "os.setuid(12345); sys.exit(cli.main(sys.argv[1:]))"
    )
    flags = ["--socket", daemon.directory / "mine" / "s", "--dram", "8MiB", "--dram-slab", "1MiB"]
    for directory in (hidden, hidden / "disk"):
        done = subprocess.run([sys.executable, "-P", "-c", code, "serve", *flags, "--disk", directory],
                              capture_output=True, text=True, timeout=20, check=False)  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert f"disk.directory {directory}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_dead_daemons_socket_is_swept_away(daemon):
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.check() == []


def test_five_kills_leave_nothing_that_the_next_start_does_not_clean(daemon, start_engine):
    # C13: nothing piles up in /dev/shm, in the socket's directory or on disk, and the memory comes back.
    run = files_under(daemon.socket.parent)
    daemon.restart()
    disk = files_under(daemon.disk)
    for round_ in range(5):
        engine = start_engine(daemon)
        assert engine.store(prompt(f"a {round_}", 32))["ready"] == 32
        engine.reserve(prompt(f"b {round_}", 32))
        assert named_memory_of(daemon) == []
        daemon.kill()
        engine.kill()
        daemon.start()
        assert at_rest(daemon)
        assert files_under(daemon.socket.parent) <= run
        assert {name.replace("slab-32768", "slab-*") for name in files_under(daemon.disk)} - disk <= {"slab-*.dat"}
    # The fifth daemon stores and loads as the first did.
    engine = start_engine(daemon)
    engine.store(prompt("c", 32))
    assert engine.fetch(prompt("c", 32))["loaded"] == 32


def test_engines_that_are_killed_leave_nothing_in_the_daemon(daemon, start_engine):
    # C1: pins, reservations, descriptors and sessions of dead processes come back.
    warm = start_engine(daemon)
    warm.store(prompt("a", 8))
    warm.close()
    descriptors = eventually(lambda: at_rest(daemon) and descriptors_of(daemon))
    for _ in range(3):
        engine = start_engine(daemon)
        engine.lookup(prompt("a", 8))
        engine.reserve(prompt("b", 64))
        engine.write(part=0.5)
        engine.kill()
        eventually(lambda: at_rest(daemon))
    assert daemon.status()["index"]["blocks"] == 8
    eventually(lambda: descriptors_of(daemon) == descriptors)


def test_a_session_above_the_limit_is_told_so(start_daemon, start_engine):
    daemon = start_daemon(limits_sessions="2")
    first, second = start_engine(daemon), start_engine(daemon)
    first.attach()
    second.attach()
    with pytest.raises(CascadeError, match=r"limits\.sessions"):
        daemon.status()
    second.close()
    assert eventually(lambda: _status(daemon))["sessions"][0]["pid"] == first.pid


def _status(daemon):
    try:
        return daemon.status()
    except CascadeError:
        return None


def test_the_usual_limit_of_descriptors_is_raised_for_the_sessions_that_may_attach(start_daemon):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        daemon = start_daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[0] > 2 * 1024


def test_without_descriptors_new_connections_are_lost_and_attached_engines_go_on(daemon, start_engine):
    engine, late = start_engine(daemon), start_engine(daemon, timeout=1.0)
    engine.store(prompt("a", 4))
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (descriptors_of(daemon) + 1, limits[1]))
    for _ in range(10):
        with pytest.raises(EngineError, match="DaemonUnavailable"):
            late.attach()
    assert engine.fetch(prompt("a", 4))["loaded"] == 4
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    late.attach()
    assert late.fetch(prompt("a", 4))["loaded"] == 4
    counters = daemon.status()["counters"]
    assert counters["connections_lost"] >= 10
    assert "internal_errors" not in counters


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", "2>&1 >/dev/null | true", "<&- >&- 2>&-"])
def test_the_daemon_needs_nobody_to_read_what_it_says(daemon, streams):
    daemon.stop()
    flags = " ".join(f"{name} '{value}'" for name, value in daemon.flags.items())
    shell = subprocess.Popen(["/bin/bash", "-c", f"'{KVCASCADE}' serve {flags} {streams}; exit ${{PIPESTATUS[0]}}"])
    pid = eventually(lambda: (_status(daemon) or {}).get("pid"))
    os.kill(pid, signal.SIGTERM)
    assert shell.wait(20) == 0
    daemon.start()
