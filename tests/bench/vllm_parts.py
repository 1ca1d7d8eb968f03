"""What `make bench-vllm` runs on: nodes that come and go behind one socket, engines, and rows that may fail alone.

Rule: a figure is only kept where the engine itself says that the tokens came from where the row says.
"""

import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.vllm_engine import Vllm
from rich.console import Console
from rich.markup import escape

from kvcascade.config.errors import CascadeError
from kvcascade.daemon.client import Client
from kvcascade.tiers.block import BlockHasher
from kvcascade.tiers.namespace import Namespace

from .harness import Row, below, check, process_cpu, session

BLOCK = 32
SEED = "0"  # of the engines, as engines.vllm_engine starts them
START_S = 60.0
SETTLE_S = 60.0


@dataclass(slots=True)
class Results:
    """The rows so far, and why others are missing."""

    console: Console
    rows: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # targets that the machine's noise hides
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.started:4.0f} s[/] {escape(text)}", highlight=False)

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Around what gives the rows of `name`: if it raises there are none, the reason is kept and the run goes on."""
        self.say(name)
        try:
            yield
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            self.failed[name] = f"{type(error).__name__}: {first}" if first else type(error).__name__
            self.console.print(f"[bold red]{escape(name)} failed[/]\n{escape(traceback.format_exc())}", highlight=False)


class Node:
    """A daemon with a disk of its own; `start` after `stop` finds again what the disk holds."""

    def __init__(self, folder: Path, name: str, *flags: str, dram: str = "1GiB") -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self._flags = ["--daemon-seed", SEED, "--dram", dram, "--dram-lock", "false", "--disk", self.folder / "disk",
                       "--disk-size", "4GiB", "--cluster-node", name, *flags]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, socket: Path, *flags: str) -> None:
        self.socket = socket
        command = [Path(sys.executable).with_name("kvcascade"), "serve", "--socket", socket, *self._flags, *flags]
        log = self.folder / "log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if all(tier.get("state") != "onlining" for tier in self.status()["tiers"]):
                    return
            except CascadeError:
                pass
            time.sleep(0.05)
        raise CascadeError(f"node {self.name} did not start: {log.read_text(errors='replace')[-2000:]}")

    def call(self, op: str) -> dict[str, Any]:
        client = Client(self.socket)
        client.connect()
        try:
            return client.call(op, timeout=30.0)
        finally:
            client.close()

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def stop(self) -> None:
        """End it in order, after it has proved its invariants."""
        if self._process is None:
            return
        try:
            violations = self.call("check")["violations"]
            check(not violations, f"node {self.name}: its invariants are broken: {'; '.join(violations[:5])}")
        finally:
            process, self._process = self._process, None
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cpu(self) -> float:
        assert self._process is not None
        return process_cpu(self._process.pid)

    def blocks(self) -> int:
        return sum(tier["blocks"] for tier in self.status()["tiers"])

    def shared(self) -> int:
        """Blocks that it has put into Redis."""
        cluster = self.status()["cluster"]
        return int(cluster["sharing"]["counters"].get("shared_blocks", 0)) if cluster else 0

    def settle(self) -> None:
        """Return when nothing more is stored or shared."""
        end = time.monotonic() + SETTLE_S
        before, same = (-1, -1), 0
        while same < 3 and time.monotonic() < end:
            time.sleep(0.2)
            now = self.blocks(), self.shared()
            same, before = same + 1 if now == before else 0, now

    def warm(self, prompts: Sequence[Sequence[int]]) -> None:
        """Bring the prompts' blocks up into DRAM, as an engine of this node does that asks for them."""
        (space,) = [Namespace.from_map(one["fields"]) for one in self.status()["namespaces"]]
        with session(str(self.socket), space) as attached:
            for number, prompt in enumerate(prompts):
                hashes = BlockHasher(BLOCK, algo=space.hash_algo, none_hash=space.none_hash).extend(list(prompt))
                found = attached.lookup(hashes, request=f"warm-{number}")
                check(found.matched == len(hashes), f"node {self.name} has lost {len(hashes) - found.matched} blocks")
                loaded = attached.load(found.lease, found.matched, wait_ms=20_000, timeout=25.0)
                check(loaded.count == len(hashes), f"node {self.name} could not bring up all blocks")
                attached.release(found.lease)


@contextmanager
def serving(node: Node, socket: Path, *flags: str) -> Iterator[Node]:
    """The node at this socket, ended and checked at the end."""
    try:
        node.start(socket, *flags)
        yield node
    finally:
        node.stop()


# ---- engines


def prompts(name: str, count: int, tokens: int) -> list[list[int]]:
    chance = random.Random(name)
    return [[chance.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(count)]


def first_token(engine: Vllm, prompt: Sequence[int]) -> float:
    """Seconds to the first token of one prompt alone."""
    return float(engine.do("timed", [list(prompt)])["seconds"])


def cpu_of(engine: Vllm) -> float:
    """CPU seconds that all processes of the engine have taken: it leads a session of its own."""
    total = 0.0
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(folder.name) and int(fields[3]) == engine.process.pid:
                total += process_cpu(int(folder.name))
    return total


def attached(engine: Vllm, node: Node) -> None:
    """Return when both sides of the engine are sessions of the node: they come when they want something."""
    end = time.monotonic() + START_S
    number = 0
    while {"scheduler", "rank"} - {one["role"] for one in node.status()["sessions"]}:
        check(time.monotonic() < end, f"the engine did not attach to node {node.name}")
        engine.do("timed", prompts(f"attach {node.name} {number}", 1, 3 * BLOCK))
        number += 1
        time.sleep(0.3)


def hits(engine: Vllm) -> dict[str, int]:
    """Tokens that were loaded so far, by source."""
    found = {}
    for name, value in engine.do("metrics").items():
        what, _, source = name.partition("{")
        if what == "vllm:kvcascade_hit_tokens":
            found[source.rstrip("}")] = int(value)
    return found


def gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}


# ---- numbers


def spread(values: Sequence[float]) -> float:
    """Between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


@dataclass(slots=True)
class Pairs:
    """What something adds, in per cent: rounds of two runs with and two without it, in turn."""

    more: list[float] = field(default_factory=list)
    itself: list[float] = field(default_factory=list)  # the second run without it over the first: what is noise

    def add(self, with_it: Sequence[float], without: Sequence[float]) -> None:
        self.more.append(100 * (sum(with_it) / sum(without) - 1))
        self.itself.append(100 * (without[1] / without[0] - 1))

    @property
    def told_apart(self) -> bool:
        """Whether the median of these rounds tells 1 % from noise."""
        return spread(self.itself) / len(self.itself) ** 0.5 < 1

    def row(self, name: str) -> Row:
        """The median, beside the noise; judged only where that can be told from noise."""
        target = below(1) if self.told_apart else None
        return Row(name, statistics.median(self.more), "%", spread(self.itself), target=target)
