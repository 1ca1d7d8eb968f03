"""vLLM's managers in a process of their own, as tests hold them; the other side is vllm_manager.py."""

import itertools
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import DaemonProcess
from engines.vllm_engine import environment

ROOT = Path(__file__).parents[2]
FULL = [{"tokens": 16}]
# A full-attention group, a window of two of its own longer chunks, and one of a window of one short chunk.
HYBRID = [{"tokens": 16}, {"tokens": 32, "window": 64}, {"tokens": 16, "window": 16}]
WINDOWED = [{"tokens": 16}, {"tokens": 16, "window": 32}]
PATIENCE_S = 90.0


class VllmError(Exception):
    """What vLLM's process raised."""


class Manager:
    """One engine's offloading in vLLM's process: each method is one command of engines/vllm_manager.py."""

    def __init__(self, vllm: "Vllm", name: str) -> None:
        self.vllm = vllm
        self.name = name

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return lambda **arguments: self.vllm.command(self.name, op, arguments)


class Vllm:
    """A process with vLLM in it, which imports it once for many managers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        package = directory / "site" / "kvcascade"
        package.mkdir(parents=True)
        for part in ("config", "connectors", "daemon", "tiers"):
            (package / part).symlink_to(ROOT / part)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("KVCASCADE_", "PYTHON"))}
        # VLLM_SOURCES: a folder with another version's Python code, as unpacked from its wheel, to run instead.
        path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("VLLM_SOURCES")])])
        self.log = directory / "vllm.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [environment(), "-P", ROOT / "tests" / "engines" / "vllm_manager.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "WARNING"},
            )
        self._names = (f"m{number}" for number in itertools.count())

    def make(self, daemon: DaemonProcess, **spec: Any) -> Manager:
        manager = Manager(self, next(self._names))
        tier = {"socket": str(daemon.socket), **spec.pop("tier", {})}
        defaults = {"model": str(self.directory / "model"), "groups": FULL, "chunks": 12}
        # Seeds of one test are not those of the next.
        environ = {"PYTHONHASHSEED": None, **spec.pop("environ", {})}
        if "extra" not in spec:
            spec["tier"] = tier
        self.command(manager.name, "make", {**defaults, **spec, "environ": environ})
        return manager

    def command(self, manager: str, op: str, arguments: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"manager": manager, "op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), f"no answer to {op}:\n{self.log.read_text()}"
        line = self.process.stdout.readline()
        assert line, f"vLLM's process ended in {op}:\n{self.log.read_text()}"
        reply = json.loads(line)
        if "error" in reply:
            raise VllmError(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE_S)


@contextmanager
def managers(vllm: Vllm, daemon: DaemonProcess) -> Iterator[Callable[..., Manager]]:
    made: list[Manager] = []

    def factory(**spec: Any) -> Manager:
        made.append(vllm.make(daemon, **spec))
        return made[-1]

    yield factory
    for manager in made:
        try:
            manager.close()
        except VllmError as error:
            assert "KeyError" in str(error)  # the test has closed it


def prompt(name: int, blocks: int = 10) -> list[int]:
    return list(range(name * 1000, name * 1000 + blocks * 16))


def evict(manager: Manager, chunks: int = 12) -> None:
    """Fills all of vLLM's chunks with what no daemon is offered."""
    assert manager.store(name="filler", tokens=prompt(7777, chunks), params={"kvcascade": "read"})["stored"]


def expect_all(loaded: dict[str, Any], *hits: int) -> None:
    """Exactly these hits a group, every chunk byte for byte."""
    assert loaded["hits"] == list(hits), loaded
    assert loaded["good"] == sum(hits), loaded
    assert loaded["settled"] and not loaded["waiting"], loaded
