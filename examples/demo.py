"""The main job, end to end on real input: `make demo`.

A real daemon (device pool, DRAM, disk) and separate engine processes that run SmolLM2-135M answer questions about one
long document and hold a chat: without kvcascade, cold, again in another process, and again after the daemon was
restarted. The table says for each prompt how many tokens were loaded and from which tier, how long the first token
took, and whether the text is the same as without kvcascade. It must be, or the demo fails.
"""

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import (
    QUESTION_TOKENS,
    QUESTIONS,
    Daemon,
    DemoError,
    Engine,
    ask,
    document,
    main,
    prepared_model,
    scratch,
)

CHAT = (
    "Give me three tips for baking bread.",
    "Explain the second tip in more detail.",
    "Now say all of this in one sentence.",
)
CHAT_TOKENS = 32

# The device pool holds half of the document's KV (105 MB), so that both it and DRAM have to serve.
HBM, DRAM, DISK = "64MiB", "1GiB", "2GiB"


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


def converse(engine: Engine, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ask everything, in order; a chat's next turn carries what the engine itself said before."""
    for number, question in enumerate(QUESTIONS, 1):
        yield f"question {number}", engine.answer(ask(text, question), QUESTION_TOKENS)
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


def serve(directory: Path) -> Daemon:
    """A daemon with all its tiers; what lies on its disk outlives it."""
    device = "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
    disk = ["--disk", str(directory / "disk"), "--disk-size", DISK]
    tiers = ["--dram", DRAM, *disk, "--hbm", HBM, "--hbm-device", device]
    return Daemon("daemon", directory / "kvcascade.sock", tiers, directory)


def run(console: Console, stack: ExitStack) -> str:
    text = document()
    directory = stack.enter_context(scratch())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    progress = stack.enter_context(Progress(*columns, console=console, transient=True))
    demo = Demo(console, progress)

    demo.now("preparing the model (20 s, once)")
    model = prepared_model(directory)

    phase = "without kvcascade"
    demo.now(f"starting an engine {phase}")
    with Engine("reference engine", model, directory, None) as reference:
        for title, reply in converse(reference, text):
            demo.say(phase, title, reply)
            demo.references[title] = reply
            demo.now(phase)

    demo.now("starting the daemon and engine A")
    daemon_stack = stack.enter_context(ExitStack())
    daemon = daemon_stack.enter_context(serve(directory))
    engine = stack.enter_context(Engine("engine A", model, directory, daemon.socket))
    demo.run_phase(COLD, engine, text)

    demo.now("starting engine B")
    engine = stack.enter_context(Engine("engine B", model, directory, daemon.socket))
    demo.run_phase(WARM, engine, text)

    demo.now("restarting the daemon")
    daemon.prove()
    if code := daemon.end():
        daemon.fail(f"ended with exit code {code} on SIGTERM")
    daemon = daemon_stack.enter_context(serve(directory))
    demo.run_phase(DISK_HIT, engine, text)
    daemon.prove()

    demo.now("stopping the daemon")
    daemon_stack.close()
    demo.run_phase(ALONE, engine, text, only_first=True)

    progress.stop()
    console.print(demo.table())
    return demo.verdict()


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
