"""Mooncake's transfer engine over TCP between two processes, in the environment of `make mooncake`."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIDE = Path(__file__).with_name("mooncake_side.py")
INSTALL = Path(__file__).parent / "mooncake" / "install.sh"
PATIENCE_S = 60.0


def environment() -> Path | None:
    """The Python of the environment with Mooncake; None where it has not been made. Makes and downloads nothing."""
    done = subprocess.run([INSTALL], capture_output=True, text=True, env=os.environ | {"FIND": "1"}, timeout=PATIENCE_S)
    return Path(done.stdout.strip()) / "bin" / "python" if done.returncode == 0 else None


class Side:
    """A process that has `size` bytes registered; `call` has it do a step of mooncake_side.py."""

    def __init__(self, python: Path, log: Path, size: int, engines: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as file:
            self._process = subprocess.Popen(
                [python, "-P", SIDE, str(theirs.fileno()), str(size), str(engines)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # Its ports are open on all interfaces, so it holds nothing of ours. A connection for each engine, kept:
                # of what was tried (more of either, other slices, new connections) nothing was faster.
                env={"MC_TCP_ENABLE_CONNECTION_POOL": "true", "MC_TCP_LANES_PER_PEER": "1"},
            )
        self.pid = self._process.pid
        self._log = log
        self._pipe = Connection(ours.detach())

    def answer(self) -> Any:
        try:
            assert self._pipe.poll(PATIENCE_S), f"Mooncake says nothing within {PATIENCE_S:g} s:\n{self._tail()}"
            return self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise AssertionError(f"Mooncake's process ended:\n{self._tail()}") from error

    def call(self, step: str, /, *arguments: Any) -> Any:
        self._pipe.send((step, *arguments))
        return self.answer()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def sides(python: Path, folder: Path, size: int, engines: int) -> Iterator[tuple[Side, Side, Any]]:
    """One that reads, one that is read, and the place of the latter; both are ended at the end."""
    reader = Side(python, folder / "mooncake-reader.log", size, engines)
    try:
        source = Side(python, folder / "mooncake-source.log", size, engines)
        try:
            place = source.answer()
            reader.answer()
            yield reader, source, place
        finally:
            source.close()
    finally:
        reader.close()
