"""vLLM in a process of its own, from the environment of `make engines`, driven step by step by a test."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cbor2

ROOT = Path(__file__).parents[2]
SIDE = Path(__file__).with_name("vllm_side.py")
INSTALL = Path(__file__).parent / "vllm" / "install.sh"
SOURCES = Path(__file__).parent / "vllm" / "sources.sh"
PATIENCE_S = 240.0
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "typing", "*.egg-info", "__pycache__")


class VllmError(Exception):
    """What a step raised: the error's class name, then its text."""


def environment() -> Path:
    """The Python of the environment with vLLM, made now if it is not there. AssertionError says why it cannot be."""
    return _made(INSTALL) / "bin" / "python"


def sources(version: str) -> Path:
    """A folder with the Python code of another version of vLLM, to stand before the environment's own; as above."""
    return _made(SOURCES, version)


def _made(script: Path, *arguments: str) -> Path:
    surroundings = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([script, *arguments], capture_output=True, text=True, env=surroundings, timeout=900)
    assert done.returncode == 0, f"the environment with vLLM cannot be made (`make engines`):\n{done.stderr[-2000:]}"
    return Path(done.stdout.strip())


def packed(folder: Path) -> Path:
    """kvcascade as users install it, from this clone's sources: a folder for PYTHONPATH."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-P", "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    target = folder / "packed"
    zipfile.ZipFile(folder / done.stdout.split()[-1]).extractall(target)
    return target


class Vllm:
    """One process. `lab` and `real` open what `do` then steps; `close_open` closes it, and another may follow."""

    def __init__(self, python: Path, path: list[Path], log: Path, **variables: str) -> None:
        ours, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCASCADE_", "VLLM_"))}
        surroundings = kept | {
            "PYTHONPATH": os.pathsep.join(map(str, [*path, SIDE.parent])),
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            # Several engines share two cores: threads that spin while they wait would take them from the others.
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # An engine that is killed leaves its sockets where temporary files are.
            "TMPDIR": str(log.parent),
        } | variables  # fmt: skip
        self.log = log
        with theirs, log.open("ab") as file:
            self.process = subprocess.Popen(
                [python, "-P", SIDE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdout=file,
                stderr=file,
                env={name: value for name, value in surroundings.items() if value},
            )
        self._pipe = Connection(ours.detach())

    def call(self, step: str, /, *arguments: Any, **named: Any) -> Any:
        self._pipe.send_bytes(cbor2.dumps([step, arguments, named]))
        if not self._pipe.poll(PATIENCE_S):
            self._pipe.close()  # a late answer must not be taken for that of a later step
            raise AssertionError(f"{step} did not end within {PATIENCE_S:g} s:\n{self.tail()}")
        try:
            outcome, value = cbor2.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise AssertionError(f"the engine's process died:\n{self.tail()}") from error
        if outcome == "raised":
            raise VllmError(f"{value}\n{self.tail()}")
        return value

    def do(self, step: str, /, *arguments: Any, **named: Any) -> Any:
        return self.call("do", step, *arguments, **named)

    def get(self, name: str) -> Any:
        return self.call("get", name)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self._pipe.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(60)


@contextmanager
def processes(python: Path, path: list[Path], folder: Path) -> Iterator[Callable[..., Vllm]]:
    """Starts processes, with folders `first` before vLLM's own; every one is ended at the end."""
    started: list[Vllm] = []

    def start(*, first: list[Path] | None = None, **variables: str) -> Vllm:
        one = Vllm(python, [*path, *(first or [])], folder / f"vllm-{len(started)}.log", **variables)
        started.append(one)
        return one

    try:
        yield start
    finally:
        for one in started:
            one.close()
