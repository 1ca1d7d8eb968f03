"""The main job, end to end on real input: `make demo`.

A real daemon (device pool, DRAM, disk) and separate engine processes that run SmolLM2-135M answer questions about one
long document and hold a chat: without kvcascade, cold, again in another process, and again after the daemon was
restarted. The table says for each prompt how many tokens were loaded and from which tier, how long the first token
took, and whether the text is the same as without kvcascade. It must be, or the demo fails.

Rule: whatever this starts, it ends, also on errors and Ctrl-C. The last line is `demo ok: ...`, or `demo failed: why`
and a non-zero exit code.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

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
CHAT = (
    "Give me three tips for baking bread.",
    "Explain the second tip in more detail.",
    "Now say all of this in one sentence.",
)
QUESTION_TOKENS, CHAT_TOKENS = 24, 32

# The device pool holds half of the document's KV (105 MB), so that both it and DRAM have to serve.
HBM, DRAM, DISK = "64MiB", "1GiB", "2GiB"

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
    """`kvcascade serve` on a directory that outlives it."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "kvcascade.sock"
        device = "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
        command = [
            kvcascade_command(), "serve", "--socket", str(self.socket), "--dram", DRAM,
            "--disk", str(directory / "disk"), "--disk-size", DISK, "--hbm", HBM, "--hbm-device", device,
        ]  # fmt: skip
        super().__init__("daemon", command, directory, stdout=subprocess.DEVNULL)

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


# ---- the conversations


@dataclass(slots=True)
class Row:
    phase: str
    title: str
    reply: dict[str, Any]
    reference: dict[str, Any]

    @property
    def same(self) -> bool:
        return bool(self.reply["text"] == self.reference["text"])

    @property
    def loaded(self) -> int:
        return sum(self.reply["tokens"].values())

    @property
    def speed_up(self) -> float:
        return float(self.reference["first_token"] / self.reply["first_token"])


def document() -> str:
    for path in DOCUMENTS:
        if path.is_file():
            return path.read_text()
    raise DemoError(f"no document to ask about: none of {', '.join(map(str, DOCUMENTS))} is there")


def converse(engine: Engine, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ask everything, in order; a chat's next turn carries what the engine itself said before."""
    for number, question in enumerate(QUESTIONS, 1):
        prompt = f"{text}\n\nAnswer a question about this licence: {question}"
        yield f"question {number}", engine.answer([{"role": "user", "content": prompt}], QUESTION_TOKENS)
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(CHAT, 1):
        messages.append({"role": "user", "content": turn})
        reply = engine.answer(messages, CHAT_TOKENS)
        messages.append({"role": "assistant", "content": reply["text"]})
        yield f"chat turn {number}", reply


COLD = "A, cold"
WARM = "B, another process"
DISK_HIT = "B, daemon restarted"
ALONE = "B, daemon stopped"
ASKED = len(QUESTIONS) + len(CHAT)


class Demo:
    """The run: its console, and the answers so far."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console = console
        self.progress = progress
        self.bar = progress.add_task("", total=4 * ASKED + 1)
        self.references: dict[str, dict[str, Any]] = {}
        self.rows: list[Row] = []

    def now(self, what: str) -> None:
        self.progress.update(self.bar, description=what)

    def say(self, phase: str, title: str, reply: dict[str, Any]) -> None:
        tiers = ", ".join(f"{count} from {tier}" for tier, count in sorted(reply["tokens"].items()) if count)
        missed = f" ({reply['missed']})" if reply["missed"] else ""
        self.console.print(
            f"  {phase}: {title}, {reply['prompt_tokens']} tokens, {tiers or 'none loaded'}, "
            f"first token after {reply['first_token']:.2f} s{missed}",
            highlight=False,
            soft_wrap=True,
        )
        self.progress.advance(self.bar)

    def run_phase(self, phase: str, engine: Engine, text: str, *, only_first: bool = False) -> None:
        for title, reply in converse(engine, text):
            self.say(phase, title, reply)
            self.rows.append(Row(phase, title, reply, self.references[title]))
            if only_first:
                return
            self.now(phase)

    def row(self, phase: str, title: str = "question 1") -> Row:
        return next(row for row in self.rows if (row.phase, row.title) == (phase, title))

    def table(self) -> Table:
        """Narrow enough for 80 columns."""
        title = "Tokens of each prompt by where their KV came from, and time to first token"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False, title_justify="left")
        table.add_column("engine and prompt", no_wrap=True)
        for heading in ("tokens", "hbm", "dram", "disk", "computed", "without", "with", "faster", "same"):
            table.add_column(heading, justify="right", no_wrap=True)
        phase = ""
        for row in self.rows:
            if phase != row.phase:
                table.add_row(row.phase, style="bold")
            phase = row.phase
            tokens = row.reply["tokens"]
            table.add_row(
                f"  {row.title}",
                str(row.reply["prompt_tokens"]),
                *(str(tokens.get(tier) or "") for tier in ("hbm", "dram", "disk")),
                str(row.reply["prompt_tokens"] - row.loaded),
                f"{row.reference['first_token']:.2f} s",
                f"{row.reply['first_token']:.2f} s",
                f"{row.speed_up:.1f}x",
                "yes" if row.same else "NO",
            )
        return table

    def verdict(self) -> str:
        """The figures of the last line. Raises DemoError where something promised did not come true."""
        for row in self.rows:
            if not row.same:
                raise DemoError(f"{row.phase}, {row.title}: the text differs from the run without kvcascade")
        cold, warm, disk = (self.row(phase) for phase in (COLD, WARM, DISK_HIT))
        if cold.loaded:
            raise DemoError(f"the first prompt of a fresh daemon found {cold.loaded} tokens")
        for row, tiers in ((warm, ("hbm", "dram")), (disk, ("disk",))):
            got = sum(row.reply["tokens"].get(tier, 0) for tier in tiers)
            if got < 0.9 * row.reply["prompt_tokens"]:
                why = f" ({row.reply['missed']})" if row.reply["missed"] else ""
                raise DemoError(
                    f"{row.phase}: {got} of {row.reply['prompt_tokens']} tokens came from {' and '.join(tiers)}{why}"
                )
        hits = [row for row in self.rows if row.phase in (WARM, DISK_HIT)]
        return (
            f"{len(self.rows)} answers, all identical to those without kvcascade; first token of a "
            f"{warm.reply['prompt_tokens']}-token prompt: {cold.reply['first_token']:.2f} s computed, "
            f"{warm.reply['first_token']:.2f} s from memory in another process ({warm.speed_up:.0f}x), "
            f"{disk.reply['first_token']:.2f} s from disk after a daemon restart ({disk.speed_up:.0f}x); "
            f"median speed-up of all hits {statistics.median(row.speed_up for row in hits):.1f}x"
        )


def run(console: Console, stack: ExitStack) -> str:
    text = document()
    # /var/tmp is on a disk where /tmp may be memory.
    base = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcascade-demo-", dir=base)))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = stack.enter_context(Progress(*columns, console=console, transient=True))
    demo = Demo(console, progress)

    demo.now("preparing the model (20 s, once)")
    convert = [sys.executable, "-P", str(HERE / "smollm2.py")]
    with Process("model", convert, directory, stdout=subprocess.PIPE, text=True) as made:
        folder = made.popen.communicate(timeout=STARTING_S)[0].strip()
        if made.popen.returncode:
            made.fail("could not be prepared")
    model = Path(folder)

    phase = "without kvcascade"
    demo.now(f"starting an engine {phase}")
    with Engine("reference engine", model, directory, None) as reference:
        for title, reply in converse(reference, text):
            demo.say(phase, title, reply)
            demo.references[title] = reply
            demo.now(phase)

    demo.now("starting the daemon and engine A")
    daemon_stack = stack.enter_context(ExitStack())
    daemon = daemon_stack.enter_context(Daemon(directory))
    engine = stack.enter_context(Engine("engine A", model, directory, daemon.socket))
    demo.run_phase(COLD, engine, text)

    demo.now("starting engine B")
    engine = stack.enter_context(Engine("engine B", model, directory, daemon.socket))
    demo.run_phase(WARM, engine, text)

    demo.now("restarting the daemon")
    prove(daemon)
    if code := daemon.end():
        daemon.fail(f"ended with exit code {code} on SIGTERM")
    daemon = daemon_stack.enter_context(Daemon(directory))
    demo.run_phase(DISK_HIT, engine, text)
    prove(daemon)

    demo.now("stopping the daemon")
    daemon_stack.close()
    demo.run_phase(ALONE, engine, text, only_first=True)

    progress.stop()
    console.print(demo.table())
    return demo.verdict()


def prove(daemon: Daemon) -> None:
    if violations := daemon.ask("check")["violations"]:
        raise DemoError(f"the daemon's invariants do not hold: {violations[0]}")


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


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
