"""`make bench-vllm`: what the connector gives vLLM, and what it costs, with a model whose prefill matters on a CPU.

SmolLM2-135M at float32 on vLLM's CPU build. Time to first token on a shared prefix of 2,000 tokens by where the prefix
is; what a lookup that finds nothing adds; the scheduling thread's time in a step with nothing to do; and the first 45
seconds of a real trace of coding agents, replayed one request after another. All in one run, so that figures compare.
Prints a table and writes build/bench/vllm.json.
"""

import gzip
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Run as a script with -P, so nothing of ours is on the path yet.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from engines.vllm_engine import Vllm, environment, packed, processes  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from smollm2 import model_folder  # noqa: E402

from kvcascade.daemon.client import Client  # noqa: E402

PREFIX = 2000
ROUNDS = 3
OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 4096}
REPLAY = {"num_gpu_blocks_override": 128}  # 4,096 tokens: an engine's own cache is as small beside real traffic


class Node:
    """A daemon on directories of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "run" / "k.sock"
        self._command = [
            Path(sys.executable).parent / "kvcascade", "serve", "--socket", self.socket, "--dram", "2GiB", "--disk",
            folder / "disk", "--disk-size", "4GiB",
        ]  # fmt: skip
        self._log = (folder / "daemon.log").open("ab")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        while True:
            try:
                if all(tier.get("state") != "onlining" for tier in self.status()["tiers"]):
                    return
            except Exception:
                assert self._process.poll() is None, "the daemon has ended"
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        client = Client(self.socket)
        client.connect()
        try:
            return client.call("status")
        finally:
            client.close()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def settle(self) -> None:
        """Until nothing more is stored."""
        before = -1
        while (now := sum(tier["blocks"] for tier in self.status()["tiers"])) != before:
            before = now
            time.sleep(0.3)


def prompts(name: str, count: int = ROUNDS, tokens: int = PREFIX) -> list[list[int]]:
    chance = random.Random(name)
    return [[chance.randrange(1000, 40_000) for _ in range(tokens)] for _ in range(count)]


def first_tokens(engine: Vllm, given: list[list[int]], before: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds to the first token of each prompt, alone."""
    found = []
    for one in given:
        before()
        found.append(engine.do("timed", [one])["seconds"])
    return found


def by_source(engine: Vllm, node: Node) -> dict[str, float]:
    """Median seconds to the first token of 2,000 shared and 8 new tokens, by where the shared ones are."""
    shared = prompts("shared")

    def asked(name: str) -> list[list[int]]:
        return [one + tail for one, tail in zip(shared, prompts(name, tokens=8), strict=True)]

    cold = first_tokens(engine, shared)
    own = first_tokens(engine, asked("own"))
    node.settle()
    dram = first_tokens(engine, asked("dram"), lambda: engine.do("reset"))
    node.stop()
    node.start()
    # Attached again once a question has been answered: other prompts, so that nothing of the shared ones is brought up.
    while not sum(engine.do("timed", [one])["cached"][0] for one in prompts("wakes", 2, 100)):
        engine.do("reset")
        time.sleep(0.5)
    disk = []
    for one in asked("disk"):
        engine.do("reset")
        timed = engine.do("timed", [one])
        disk.append(timed["seconds"])
        assert timed["cached"][0] >= PREFIX - 32, f"only {timed['cached'][0]} tokens came from disk"
    return {name: statistics.median(times) for name, times in
            (("cold", cold), ("own cache", own), ("dram", dram), ("disk", disk))}  # fmt: skip


def without_hits(plain: Vllm, ours: Vllm) -> dict[str, float]:
    """What the connector adds where nothing is found, in per cent: pairs, in turn, of the same prompts."""
    firsts: list[float] = []
    rates: list[float] = []
    for number in range(4):
        given = prompts(f"miss {number}", 1)
        # Whoever comes first in one pair comes second in the next.
        order = (plain, ours) if number % 2 else (ours, plain)
        took = {id(engine): first_tokens(engine, given)[0] for engine in order}
        alone, with_ours = took[id(plain)], took[id(ours)]
        firsts.append(with_ours / alone - 1)
        batch = prompts(f"batch {number}", 8, 200)
        times = {id(engine): engine.do("timed", batch, 64)["seconds"] for engine in order}
        rates.append(times[id(ours)] / times[id(plain)] - 1)
    return {
        "first token, % more": 100 * statistics.median(firsts),
        "first token, spread of pairs": 100 * (max(firsts) - min(firsts)),
        "batch of 8, % longer": 100 * statistics.median(rates),
        "batch of 8, spread of pairs": 100 * (max(rates) - min(rates)),
    }


def replay(engine: Vllm, halfway: Callable[[], object]) -> dict[str, Any]:
    with gzip.open(Path(__file__).with_name("agent_minute.json.gz")) as file:
        trace = json.load(file)
    tokens: list[int] = []
    seconds, total, cached = [], 0, 0
    before = engine.do("metrics")
    for number, one in enumerate(trace["requests"]):
        if number == len(trace["requests"]) // 2:
            engine.do("reset")
            halfway()
        tokens = tokens[: one["keep"]] + one["add"]
        timed = engine.do("timed", [tokens])
        seconds.append(timed["seconds"])
        total += len(tokens)
        cached += timed["cached"][0]
    after = engine.do("metrics")
    tiers = {
        name.partition("{")[2].rstrip("}"): value - before.get(name, 0)
        for name, value in after.items()
        if name.startswith("vllm:kvcascade_hit_tokens") and value > before.get(name, 0)
    }
    return {
        "requests": len(seconds), "prompt tokens": total, "computed": total - cached, "by tier": tiers,
        "own cache": cached - sum(tiers.values()), "median s": statistics.median(seconds), "total s": sum(seconds),
    }  # fmt: skip


def main() -> int:
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="kvb-"))
    model = str(model_folder())
    node = Node(folder)
    results: dict[str, Any] = {}
    try:
        with processes(environment(), [packed(folder)], folder) as start:
            lab = start()
            lab.call("lab", model, str(node.socket))
            steps = sorted(lab.do("idle_step_seconds", 12, 12))
            results["scheduler us a step, nothing to do"] = {"median": steps[6] * 1e6, "worst of 12": steps[-1] * 1e6}
            lab.close()
            plain, ours = start(VLLM_CPU_KVCACHE_SPACE="2"), start(VLLM_CPU_KVCACHE_SPACE="2")
            plain.call("real", model, "", **OPTIONS)
            ours.call("real", model, str(node.socket), **OPTIONS)
            for engine in (plain, ours):
                engine.do("timed", prompts("warm up", 1))
            results["seconds to first token"] = by_source(ours, node)
            results["at 0 % hits"] = without_hits(plain, ours)
            plain.close()
            ours.close()
            for name, socket in (("without", ""), ("with", str(node.socket))):
                engine = start(VLLM_CPU_KVCACHE_SPACE="2")
                engine.call("real", model, socket, **OPTIONS, **REPLAY)
                engine.do("timed", prompts("warm up", 1))
                results[f"replay {name}"] = replay(engine, node.settle if socket else lambda: None)
                engine.close()
    finally:
        node.stop()
        shutil.rmtree(folder)
    out = ROOT / "build" / "bench" / "vllm.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2))
    table = Table(box=None)
    for title in ("what", "", "value"):
        table.add_column(title)
    for what, values in results.items():
        for name, value in values.items():
            table.add_row(what, name, f"{value:.3f}" if isinstance(value, float) else str(value))
            what = ""
    console.print(table)
    console.print(f"written to {out.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
