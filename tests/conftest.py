"""Fixtures that every test may use: a real daemon in a process of its own, checked and ended after the test."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.scripted import Engine, engines

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.client import Client

KVCASCADE = Path(sys.executable).parent / "kvcascade"
START_S = 20.0
STOP_S = 20.0


class DaemonProcess:
    """`kvcascade serve` on directories of its own; `kill` is SIGKILL, `stop` SIGTERM, and `start` may follow either."""

    def __init__(self, directory: Path, flags: dict[str, str]) -> None:
        self.directory = directory
        self.socket = directory / "run" / "kvcascade.sock"
        self.disk = directory / "disk"
        self.log = directory / "daemon.log"
        self.flags = {"--socket": str(self.socket), "--dram": "64MiB", "--dram-slab": "4MiB", "--disk": str(self.disk),
                      "--disk-size": "256MiB", **flags}  # fmt: skip
        self.command: list[str | Path] = [KVCASCADE, "serve"]
        self.process: subprocess.Popen[bytes] | None = None
        # For a supervisor's part: what stands before the command, variables and descriptors beside the usual ones.
        self.wrapper: list[str] = []
        self.environment: dict[str, str] = {}
        self.descriptors: list[int] = []

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start_takeover(self) -> None:
        """Starts one that takes over from the one that runs; the caller keeps the old process and waits for it."""
        self._start("--takeover")

    def start(self, **flags: str) -> None:
        """Starts it and returns when it answers and all its memory is online."""
        self.flags.update({f"--{name.replace('_', '-')}": value for name, value in flags.items()})
        self._start()

    def _start(self, *more: str) -> None:
        arguments = [*more] + [part for name, value in self.flags.items() if value for part in (name, value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCASCADE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, *self.command, *arguments],
                stderr=log,
                stdout=log,
                env=environment | self.environment,
                pass_fds=self.descriptors,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                status = self.status()
                if status["pid"] == self.pid and all(tier.get("state") != "onlining" for tier in status["tiers"]):
                    return
            except Exception:
                pass
            time.sleep(0.02)
        raise AssertionError(f"the daemon did not start:\n{self.log.read_text()}")

    def call(self, op: str, **body: Any) -> dict[str, Any]:
        """One request from a tool's session."""
        client = Client(self.socket)
        client.connect()
        try:
            return client.call(op, body)
        finally:
            client.close()

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def check(self) -> list[str]:
        """Violations of the invariants of the running daemon."""
        violations: list[str] = self.call("check")["violations"]
        return violations

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        self.process = None
        return code

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)
        self.process = None

    def restart(self) -> None:
        """An orderly end and a new start on the same directories."""
        assert self.stop() == 0
        self.start()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@contextmanager
def _daemons() -> Iterator[Callable[..., DaemonProcess]]:
    daemons: list[DaemonProcess] = []

    def start(command: Sequence[str | Path] = (), **flags: str) -> DaemonProcess:
        # A short path: a unix socket's may have 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="kvc-"))
        daemon = DaemonProcess(directory, {f"--{name.replace('_', '-')}": value for name, value in flags.items()})
        daemons.append(daemon)
        daemon.command = list(command) or daemon.command
        daemon.start()
        return daemon

    yield start
    failures: list[str] = []
    for daemon in daemons:
        if daemon.running:
            os.kill(daemon.pid, signal.SIGCONT)
            try:
                failures += daemon.check()
            except CascadeError as error:
                failures.append(f"check: {error}")
            if daemon.stop() != 0:
                failures.append(f"the daemon did not end in order:\n{daemon.log.read_text()}")
        if "Traceback" in daemon.log.read_text():
            failures.append(daemon.log.read_text())
        shutil.rmtree(daemon.directory)
    assert not failures, "\n".join(failures)


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons with other flags (`start_daemon(dram="8MiB")`); each is proved sound and ended after the test."""
    with _daemons() as start:
        yield start


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    """One running daemon for all tests of a module, which leave nothing in it that another could find."""
    with _daemons() as start:
        yield start()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A running daemon: 64 MiB of DRAM, 256 MiB of disk, no HBM pool."""
    return start_daemon()


@pytest.fixture
def start_engine(start_daemon: Callable[..., DaemonProcess]) -> Iterator[Callable[..., Engine]]:
    """Starts scripted engines, processes of their own (`start_engine(daemon, model="m")`), ended before the daemons."""
    with engines() as start:
        yield start
