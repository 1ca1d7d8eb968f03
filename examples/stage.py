"""What the demonstrations stand on: their processes, the text they ask about, and how they end.

Rule: whatever a demonstration starts, it ends, also on errors and Ctrl-C. The last line is `demo ok: ...`, or
`demo failed: why` and a non-zero exit code.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from rich.console import Console

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.client import Client
from kvcascade.daemon.protocol import OP_ATTACH, PROTOCOL_VERSION, ROLE_TOOL

HERE = Path(__file__).resolve().parent
# The whole text, about 2,200 tokens. Debian ships it; it is this repository's own licence too.
DOCUMENTS = (Path("/usr/share/common-licenses/Apache-2.0"), HERE.parent / "LICENSE")
QUESTIONS = (
    "Which conditions must I meet when I redistribute the work?",
    "What does this licence say about patents?",
    "Is there any warranty?",
)
QUESTION_TOKENS = 24

STARTING_S, ANSWERING_S, ENDING_S = 120.0, 180.0, 20.0


class DemoError(Exception):
    """Why the demo failed, for its last line."""


# ---- the processes


class Process:
    """A child that is ended with everything in it when its `with` block is left."""

    def __init__(self, name: str, command: list[str], logs: Path, **pipes: Any) -> None:
        self.name = name
        self._log = logs / f"{name.replace(' ', '-')}.log"
        # A session of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
        with self._log.open("ab") as stderr:
            self.popen = subprocess.Popen(
                command, stderr=stderr, start_new_session=True, env=environment(), cwd=logs, **pipes
            )

    def fail(self, what: str) -> NoReturn:
        log = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        raise DemoError(f"{self.name} {what}" + (f"; it said: {' | '.join(log[-3:])}" if log else ""))

    def end(self) -> int:
        """SIGTERM, and SIGKILL for what does not end by it; returns the exit code."""
        self.popen.terminate()
        try:
            return self.popen.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()

    def wait_until_ready(self) -> None:
        """Return when the child can be used; raise DemoError when it ends or takes too long."""

    def __enter__(self) -> Self:
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.end()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


class Engine(Process):
    """An engine process and the JSON lines to and from it."""

    def __init__(self, name: str, model: Path, logs: Path, socket: Path | None) -> None:
        use = ["--socket", str(socket)] if socket else []
        command = [sys.executable, "-P", str(HERE / "engine.py"), str(model), *use]
        super().__init__(name, command, logs, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Only the reading thread puts; None says that the engine is gone.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"read {name}", daemon=True).start()

    def wait_until_ready(self) -> None:
        self._reply(STARTING_S)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        try:
            for line in self.popen.stdout:
                self._lines.put(line)
        except ValueError:  # closed under us while the demo ends
            pass
        self._lines.put(None)

    def _reply(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=deadline)
        except queue.Empty:
            self.fail(f"gave no answer within {deadline:.0f} s")
        if line is None:
            self.fail(f"ended with exit code {self.popen.wait()}")
        return dict(json.loads(line))

    def answer(self, messages: list[dict[str, str]], max_new_tokens: int) -> dict[str, Any]:
        assert self.popen.stdin is not None
        request = json.dumps({"messages": messages, "max_new_tokens": max_new_tokens})
        try:
            print(request, file=self.popen.stdin, flush=True)
        except BrokenPipeError:
            pass  # the missing reply says more
        return self._reply(ANSWERING_S)


class Daemon(Process):
    """`kvcascade serve`."""

    def __init__(self, name: str, socket: Path, serve: list[str], logs: Path, *, inside: Sequence[str] = ()) -> None:
        """Serve on `socket` with the arguments `serve`; `inside` is the command that starts it elsewhere, if any."""
        self.socket = socket
        command = [*inside, kvcascade_command(), "serve", "--socket", str(socket), *serve]
        super().__init__(name, command, logs, stdout=subprocess.DEVNULL)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + STARTING_S
        while True:
            if self.popen.poll() is not None:
                self.fail(f"ended with exit code {self.popen.returncode}")
            try:
                # It serves at once; wait for the rest of its memory, so that the figures do not depend on the moment.
                if all(tier["state"] != "onlining" for tier in self.ask("status")["tiers"]):
                    return
                why = "its memory is not online"
            except CascadeError as error:
                why = str(error)
            if time.monotonic() > deadline:
                self.fail(f"is not ready after {STARTING_S:.0f} s: {why}")
            time.sleep(0.05)

    def ask(self, op: str) -> dict[str, Any]:
        with Client(self.socket) as client:
            tool = {"protocol": PROTOCOL_VERSION, "role": ROLE_TOOL, "pid": os.getpid()}
            client.call(OP_ATTACH, tool | {"engine": {"family": "demo", "version": "1"}})
            return client.call(op)

    def prove(self) -> None:
        if violations := self.ask("check")["violations"]:
            raise DemoError(f"the invariants of {self.name} do not hold: {violations[0]}")


def kvcascade_command() -> str:
    beside = Path(sys.executable).with_name("kvcascade")
    found = str(beside) if beside.exists() else shutil.which("kvcascade")
    if found is None:
        raise DemoError("the command kvcascade is not installed; run `make demo`, which sets everything up")
    return found


def environment() -> dict[str, str]:
    """Ours without the operator's own kvcascade settings, which must not reach the demo's daemon."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVCASCADE_")}
    return ours | {"HF_HUB_OFFLINE": "1"}


# ---- the input


def prepared_model(logs: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once and kept."""
    command = [sys.executable, "-P", str(HERE / "smollm2.py")]
    with Process("model", command, logs, stdout=subprocess.PIPE, text=True) as made:
        folder = made.popen.communicate(timeout=STARTING_S)[0].strip()
        if made.popen.returncode:
            made.fail("could not be prepared")
    return Path(folder)


def document() -> str:
    for path in DOCUMENTS:
        if path.is_file():
            return path.read_text()
    raise DemoError(f"no document to ask about: none of {', '.join(map(str, DOCUMENTS))} is there")


def ask(text: str, question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{text}\n\nAnswer a question about this licence: {question}"}]


# ---- the run


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for sockets, logs and blocks; on a disk, where /tmp may be memory."""
    base = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvcascade-demo-", dir=base) as directory:
        yield Path(directory)


@contextmanager
def signals_end_the_demo() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C; a second one must not interrupt the unwinding, which takes seconds."""

    def unwind(number: int, _: FrameType | None) -> NoReturn:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    previous = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(about: str, run: Callable[[Console, ExitStack], str]) -> int:
    """Runs a demonstration and says as its last line how it ended. The exit status: 0, 1 failed, 130 interrupted."""
    argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console = Console()
    try:
        with signals_end_the_demo(), ExitStack() as stack:
            verdict = run(console, stack)
    except (DemoError, CascadeError, OSError, subprocess.SubprocessError) as error:
        console.print(f"demo failed: {error}", soft_wrap=True, highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo failed: interrupted", highlight=False)
        return 130
    console.print(f"demo ok: {verdict}", soft_wrap=True, highlight=False, markup=False)
    return 0
