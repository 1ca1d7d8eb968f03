"""The invariants are proved beside the daemon: its loop goes on, and a proof that dies is told."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from engines.disk import open_descriptors
from engines.scripted import eventually, prompt

from kvcascade.config.errors import CascadeError, Refused
from kvcascade.daemon.aside import look_aside

# A daemon whose proof begins by waiting for somebody at the other end of a pipe.
PATIENT = """
import sys
from kvcascade.daemon import cli, cache
before = cache.Cache.check
def after(self):
    with open(sys.argv[1]) as pipe:
        told = pipe.read()
    return before(self) + [told] * bool(told)
cache.Cache.check = after
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_engines_are_served_while_a_check_runs(start_daemon, start_engine, pipe):
    daemon = start_daemon(command=[sys.executable, "-P", "-c", PATIENT, pipe, "serve"])
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(daemon.check())) for _ in range(2)]
    for thread in asking:
        thread.start()
    eventually(lambda: len(children(daemon.pid)) == 1)
    # It stands still, and sees the daemon as it was; the daemon goes on.
    assert engine.fetch(prompt("a", 8))["loaded"] == 8
    engine.store(prompt("b", 40))
    assert daemon.status()["index"]["blocks"] == 48
    assert answers == []
    for number in range(2):
        pipe.write_text("told")  # returns when the check is there to read it
        eventually(lambda expected=number + 1: len(answers) == expected)
    assert answers == [["told"], ["told"]]
    for thread in asking:
        thread.join()
    eventually(lambda: children(daemon.pid) == [])
    daemon.kill()


def test_a_check_that_is_killed_is_told_and_the_daemon_goes_on(start_daemon, start_engine, pipe):
    daemon = start_daemon(command=[sys.executable, "-P", "-c", PATIENT, pipe, "serve"])
    raised = []

    def ask():
        try:
            daemon.check()
        except CascadeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    (child,) = eventually(lambda: children(daemon.pid))
    os.kill(int(child), signal.SIGKILL)
    thread.join()
    assert "died" in raised[0]
    assert start_engine(daemon).store(prompt("a", 8))["ready"] == 8
    # With the daemon dies what it has begun; its locks are free at once.
    thread = threading.Thread(target=ask)
    thread.start()
    (child,) = eventually(lambda: children(daemon.pid))
    daemon.kill()
    thread.join()
    eventually(lambda: not Path(f"/proc/{child}").exists())
    daemon.command = [Path(sys.executable).parent / "kvcascade", "serve"]
    daemon.start()
    assert daemon.check() == []


async def test_what_a_look_raises_is_told_and_nothing_of_it_stays() -> None:
    before = open_descriptors()
    assert await look_aside(lambda: ["one", "two"]) == ["one", "two"]
    with pytest.raises(CascadeError, match="ZeroDivisionError"):
        await look_aside(lambda: [str(1 // 0)])
    with pytest.raises(CascadeError, match="died"):
        await look_aside(lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type,func-returns-value]
    assert open_descriptors() == before


async def test_where_no_process_can_be_made_the_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", none)
    with pytest.raises(Refused, match="no process"):
        await look_aside(list)
