"""Engines in containers: other pid, ipc, net and mount namespaces and another uid, the socket's directory mounted."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from engines.scripted import EngineError, eventually, prompt

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.client import Client

UID, GID = 54321, 54322
NAMESPACES = ["unshare", "--pid", "--ipc", "--net", "--mount", "--fork", "--kill-child"]
KVCASCADE = Path(sys.executable).parent / "kvcascade"


def user(uid, gid):
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]


def missing():
    """Why no container can be made here."""
    if os.geteuid() != 0:
        return "needs root"
    if not all(shutil.which(tool) for tool in ("unshare", "setpriv", "mount")):
        return "needs unshare, setpriv and mount"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no namespaces can be made: {tried.stderr.strip()}"
    python = [sys.executable, "-P", "-c", "import numpy"]
    if subprocess.run([*user(UID, GID), *python], capture_output=True, check=False).returncode:
        return "another user cannot run this Python"
    return ""


MISSING = missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture
def daemon(start_daemon):
    return start_daemon(daemon_socket_mode="0660", daemon_socket_group=str(GID))


@pytest.fixture
def contain(daemon, start_engine):
    """Starts engines in containers that see the socket's directory and no other part of the daemon's."""
    mounted = Path(tempfile.mkdtemp(prefix="kvc-mnt-"))
    mounted.chmod(0o755)

    def start(uid=UID, gid=GID, **options):
        enter = f'mount --bind {daemon.socket.parent} {mounted} && exec {" ".join(user(uid, gid))} "$@"'
        return start_engine(mounted / daemon.socket.name, prefix=[*NAMESPACES, "sh", "-c", enter, "sh"], **options)

    yield start
    mounted.rmdir()


def at_rest(daemon):
    status = daemon.status()
    dram = next(tier for tier in status["tiers"] if tier["name"] == "dram")
    return not (status["leases"]["live"] or dram["quarantined"] or dram["pinned"] or status["sessions"])


def test_a_contained_engine_shares_with_one_outside(daemon, contain, start_engine):
    inside, outside = contain(), start_engine(daemon)
    assert inside.pid <= 2  # its own pid namespace
    tokens = prompt("document", 8)
    assert inside.store(tokens)["ready"] == 8
    assert outside.fetch(tokens) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}
    outside.store(tokens + prompt("more", 8))
    assert inside.fetch(tokens + prompt("more", 8))["loaded"] == 16
    sessions = {session["uid"]: session["pid"] for session in daemon.status()["sessions"]}
    assert set(sessions) == {UID, os.getuid()}
    assert sessions[UID] > 2  # as the daemon sees it


def test_a_killed_contained_engine_gives_back_everything(daemon, contain, start_engine):
    inside, outside = contain(), start_engine(daemon)
    inside.store(prompt("document", 8))
    inside.lookup(prompt("document", 8))
    inside.reserve(prompt("unfinished", 32))
    inside.begin_copy()
    inside.fill(0.5)
    inside.kill()
    eventually(lambda: at_rest(daemon))
    assert outside.store(prompt("unfinished", 32))["ready"] == 32
    assert outside.fetch(prompt("document", 8))["loaded"] == 8


def test_a_contained_engine_that_lost_its_socket_is_known_by_its_process(daemon, contain):
    inside = contain()
    inside.reserve(prompt("a", 8))
    inside.begin_copy()
    inside.lose_socket()
    dram = eventually(lambda: [t for t in daemon.status()["tiers"] if t["name"] == "dram" and t["quarantined"]])
    assert dram[0]["quarantined"] == 8
    inside.kill()
    eventually(lambda: at_rest(daemon))


def test_a_user_outside_the_group_cannot_connect(daemon, contain):
    stranger = contain(uid=UID + 1, gid=GID + 1)
    outcome = stranger.timed("lookup", prompt("a", 1))
    assert outcome["error"] == "DaemonUnavailable"
    assert daemon.status()["sessions"] == []


def test_the_socket_and_its_directory_are_closed_to_others(daemon):
    assert (daemon.socket.stat().st_mode & 0o777, daemon.socket.stat().st_gid) == (0o660, GID)
    assert (daemon.socket.parent.stat().st_mode & 0o777, daemon.socket.parent.stat().st_gid) == (0o750, GID)


def test_a_contained_engine_outlives_a_restart_of_the_daemon(daemon, contain):
    # The directory is mounted, not the socket: the new daemon's socket appears in it.
    inside = contain()
    tokens = prompt("document", 8)
    inside.store(tokens)
    daemon.restart()
    got = eventually(lambda: _fetched(inside, tokens))
    assert (got["loaded"], got["foreign"]) == (8, 0)


def _fetched(engine, tokens):
    try:
        return engine.fetch(tokens)
    except EngineError:
        return None


def test_an_engine_outside_the_daemons_own_pid_namespace_is_watched_too(start_engine):
    # A daemon in a pod of its own is told pid 0 by SO_PEERCRED; what it has of the engine is a pidfd.
    directory = Path(tempfile.mkdtemp(prefix="kvc-pod-"))
    sock = directory / "run" / "s"
    command = ["unshare", "--pid", "--fork", "--kill-child", KVCASCADE, "serve", "--socket", sock, "--dram", "16MiB",
               "--dram-slab", "1MiB", "--disk", "", "--disk-size", "1MiB"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCASCADE_")}
    log = (directory / "log").open("wb")
    pod = subprocess.Popen([str(part) for part in command], stderr=log, stdout=log, env=environment)
    try:
        eventually(lambda: _told(sock, "status"))
        engine = start_engine(sock)
        engine.store(prompt("document", 8))
        engine.lookup(prompt("document", 8))
        engine.reserve(prompt("unfinished", 8))
        engine.begin_copy()
        (session,) = _told(sock, "status")["sessions"]
        assert session["pid"] == 0
        engine.lose_socket()
        eventually(lambda: _quarantined(sock) == 8)
        engine.kill()
        eventually(lambda: _quarantined(sock) == 0)
        assert _told(sock, "check")["violations"] == []
        (serving,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(serving), signal.SIGTERM)
        assert pod.wait(20) == 0
    finally:
        pod.kill()
        pod.wait()
        log.close()
        shutil.rmtree(directory)


def _told(sock, op):
    client = Client(sock)
    try:
        client.connect()
        return client.call(op, {})
    except CascadeError:
        return None
    finally:
        client.close()


def _quarantined(sock):
    return next(tier["quarantined"] for tier in _told(sock, "status")["tiers"] if tier["name"] == "dram")
