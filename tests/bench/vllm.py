"""`make bench-vllm`: what the connector gives vLLM, and what it costs, with a model whose prefill matters on a CPU.

SmolLM2-135M at float32 on vLLM's CPU build. Time to first token on a shared prefix of 2,000 tokens by where the prefix
is; what a lookup that finds nothing adds, by engines with and without the connector in turn; the scheduling thread's
time in a step with nothing to do; and a real trace of coding agents, shortened to what a CPU can do.

Prints a table and writes build/bench/vllm.json. A row that cannot be measured is shown as failed, with the reason, and
the others go on; the exit status is then 1. Targets that are missed are listed and change no status.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# Run as a script with -P, so nothing of ours is on the path yet.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import numpy as np
from bench.harness import ROOT, Row, below, check, machine, ratio_below, write_results
from bench.show import missed, show
from bench.vllm_parts import (
    BLOCK,
    Node,
    Pairs,
    Results,
    attached,
    cpu_of,
    first_token,
    gained,
    hits,
    prompts,
    serving,
    spread,
)
from engines.redis_server import RedisServer, serve
from engines.vllm_engine import Vllm, environment, packed, processes
from rich.console import Console
from rich.markup import escape
from smollm2 import model_folder

PARTS = {
    "step": "the scheduling thread in a step with nothing to do",
    "sources": "time to first token by where the prefix is",
    "misses": "what the connector adds where nothing is found",
    "replay": "a trace of coding agents, with and without",
}
LONGEST = 2560  # tokens of a request
OWN_BLOCKS = 96  # 3,072 tokens: an engine's own cache is as small beside what its users come back for
MISSES_S = 75.0  # for either comparison of engines with and without, but for its least rounds
REPLAY_S = 200.0
# One core computes and the other is the scheduler's, the connector's and the daemon's: vLLM by itself leaves cores for
# the first two, and beside an engine that takes them all it is luck who waits for whom.
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    listing = "\n".join(f"  {name:8} {what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"parts:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter prompts and fewer rounds; less exact")
    parser.add_argument("--only", metavar="PART", action="append", choices=PARTS, help="only this; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where vllm.json goes")
    return parser.parse_args(argv)


class Run:
    """The run: its folder, its engines, its node's socket, and how much of everything."""

    def __init__(self, folder: Path, results: Results, quick: bool, start: Callable[..., Vllm]) -> None:
        self.folder, self.results, self.quick, self._start = folder, results, quick, start
        self.socket = folder / "k.sock"
        self.times = folder / "times"
        self.times.mkdir()
        self.model = str(model_folder())

    def bare(self) -> Vllm:
        return self._start()

    def engines(self, with_plain: bool) -> tuple[Vllm, Vllm | None]:
        """One with the connector, its hooks under a clock, and one without; warm."""
        room = {"VLLM_CPU_KVCACHE_SPACE": "1", **CORES}
        ours = self._start(BENCH_TIMES=str(self.times), **room)
        plain = self._start(**room) if with_plain else None
        connector = {
            "kv_connector": "TimedConnector",
            "kv_connector_module_path": "vllm_timed",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(self.socket)},
        }

        def opened(engine: Vllm, connector: dict[str, Any] | None) -> None:
            options = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
            engine.call(
                "real", self.model, "", kv_transfer_config=connector, num_gpu_blocks_override=OWN_BLOCKS, **options
            )
            for number in range(2):
                first_token(engine, prompts(f"warm up {number}", 1, 512)[0])

        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(opened, ours, connector)]
            waits += [pool.submit(opened, plain, None)] if plain is not None else []
            for wait in waits:
                wait.result()
        return ours, plain

    def in_hooks(self) -> tuple[float, float, float]:
        """Seconds of the scheduler's thread in the connector so far, of the worker's, and the scheduler's steps."""
        seconds = {"scheduler": 0.0, "worker": 0.0}
        steps = 0.0
        for file in self.times.iterdir():
            side = file.name.partition("-")[0]
            spent, count = np.fromfile(file, np.float64).tolist()
            seconds[side] += spent
            steps += count if side == "scheduler" else 0
        return seconds["scheduler"], seconds["worker"], steps


# ---- the scheduling thread with nothing to do


def step(run: Run) -> None:
    results = run.results
    with serving(Node(run.folder, "step", dram="128MiB"), run.socket), results.measuring("scheduler, idle step"):
        engine = run.bare()
        engine.call("lab", run.model, str(run.socket))
        steps = sorted(engine.do("idle_step_seconds", 12, 12))
        engine.close()
        results.rows += [
            Row("scheduler: connector in a step with nothing to do, 12 requests decode", 1e6 * steps[len(steps) // 2],
                "us", target=below(100)),
            Row("scheduler: the same, worst of 12 steps", 1e6 * steps[-1], "us"),
        ]  # fmt: skip


# ---- by where the prefix is


@contextmanager
def redis_server() -> Iterator[RedisServer | None]:
    if shutil.which("redis-server") is None:
        yield None
    else:
        with serve() as server:
            yield server


class Sources:
    """Time to first token of shared and 8 new tokens; each row of another place that the shared ones come from."""

    def __init__(self, run: Run, engine: Vllm, redis: RedisServer | None) -> None:
        self.run, self.engine, self.redis, self.results = run, engine, redis, run.results
        self.tokens = 512 if run.quick else 2000
        self.blocks = self.tokens // BLOCK
        self.shared = prompts("shared", 1 if run.quick else 3, self.tokens)
        self.cold: list[float] = []
        self.one = Node(run.folder, "one", *self.fleet("payload"))

    def fleet(self, store: str) -> tuple[str, ...]:
        if self.redis is None:
            return ()
        return ("--redis-url", self.redis.url, "--peers-listen", "127.0.0.1:0", "--redis-store", store)

    def measure(self) -> None:
        run, results = self.run, self.results
        with serving(self.one, run.socket):
            attached(self.engine, self.one)
            self.one.settle()
            with results.measuring("first token, computed and from the engine's own cache"):
                self.computed()
            if len(self.cold) < len(self.shared):
                return
            with results.measuring("first token, DRAM"):
                self.row("DRAM", self.asked("dram"))
        with results.measuring("first token, disk"), serving(self.one, run.socket):
            attached(self.engine, self.one)
            self.row("disk", self.asked("disk"))
        with results.measuring("first token, Redis"):
            self.from_redis()
        with results.measuring("first token, peer"):
            self.from_peer()

    def computed(self) -> None:
        own, again = [], 0
        for number, prompt in enumerate(self.shared):
            before = self.one.blocks()
            for turn in range(3):
                check(bool(self.engine.do("reset")), "the engine's cache could not be reset")
                timed = self.engine.do("timed", [prompt])
                if turn == 0:
                    check(timed["cached"] == [0], f"{timed['cached'][0]} tokens of a new prompt were found")
                    self.cold.append(timed["seconds"])
                self.one.settle()
                if self.one.blocks() - before >= self.blocks:
                    break
                again += 1
            else:
                del self.cold[-1]
                check(False, f"only {self.one.blocks() - before} of {self.blocks} blocks were stored")
            own.append(self.from_own(number))
        if again:
            self.results.notes.append(f"sources: {again} more runs until {len(self.shared)} prompts were stored whole")
        name = f"first token of {self.tokens + 8} tokens, of which {self.tokens} shared: "
        self.results.rows.append(Row(name + "computed", statistics.median(self.cold), "s"))
        self.row("the engine's own cache", own)

    def from_own(self, number: int) -> float:
        # The second time: the first small step after a long prefill was seen to take half as long again.
        for tail in prompts(f"own {number}", 2, 8):
            timed = self.engine.do("timed", [self.shared[number] + tail])
        check(timed["cached"][0] >= self.blocks * BLOCK, f"the engine's cache had {timed['cached'][0]} tokens")
        return float(timed["seconds"])

    def asked(self, source: str) -> list[float]:
        """Seconds of each, where the tokens came from `source`; of some it may be told that they have come, to DRAM."""
        found, others = [], []
        for number, prompt in enumerate(self.shared):
            self.engine.do("reset")
            before = hits(self.engine)
            timed = self.engine.do("timed", [prompt + prompts(f"{source} {number}", 1, 8)[0]])
            came = gained(before, hits(self.engine))
            wanted = self.blocks * BLOCK
            used = sum(came.get(name, 0) for name in {source, "dram"})
            if came.get(source, 0) and used >= wanted and timed["cached"][0] >= wanted:
                found.append(float(timed["seconds"]))
            else:
                others.append(f"{timed['cached'][0]} tokens were used, found were {came or 'none'}")
        check(bool(found), f"of {self.blocks * BLOCK} tokens in {source}: {'; '.join(others)}")
        if others:
            self.results.notes.append(f"first token, {source}: {len(others)} left out: {'; '.join(others)}")
        return found

    def row(self, name: str, seconds: list[float]) -> None:
        computed = statistics.median(self.cold)
        took = statistics.median(seconds)
        self.results.rows.append(
            Row(f"first token, {name} / computed", took, "s", computed, took / computed, ratio_below(1))
        )

    def from_redis(self) -> None:
        check(self.redis is not None, "redis-server is not installed")
        with serving(Node(self.run.folder, "two", *self.fleet("payload")), self.run.socket) as node:
            attached(self.engine, node)
            self.row("Redis", self.asked("redis"))

    def from_peer(self) -> None:
        """The first node has them in DRAM, and says in Redis no more than that; another one is the engine's."""
        check(self.redis is not None, "redis-server is not installed")
        assert self.redis is not None
        self.redis.client().flushall()
        directory = self.fleet("directory")
        with serving(self.one, self.run.folder / "peer.sock", *directory):
            self.one.warm(self.shared)
            end = time.monotonic() + 60
            while not self.one.status()["cluster"]["fleet"]["counters"].get("entries_written", 0):
                check(time.monotonic() < end, "the node does not name its blocks in the directory")
                time.sleep(0.2)
            with serving(Node(self.run.folder, "three", *directory), self.run.socket) as node:
                attached(self.engine, node)
                self.row("a peer's DRAM", self.asked("peer"))


# ---- where nothing is found


def misses(run: Run, ours: Vllm, plain: Vllm) -> None:
    """Rounds of four: plain, ours, ours, plain, and the other way round in the next; each with prompts of its own."""
    results = run.results
    length, batch = (256, 4) if run.quick else (1000, 8)
    with serving(Node(run.folder, "misses", dram="2GiB"), run.socket) as node:
        attached(ours, node)

        def first(engine: Vllm, name: str) -> float:
            return first_token(engine, prompts(name, 1, length)[0])

        def together(engine: Vllm, name: str) -> float:
            return float(engine.do("timed", prompts(name, batch, 64), 32)["seconds"])

        with results.measuring("0 % hits, first token"):
            compared(run, ours, plain, node, f"first token of {length} tokens", first)
        with results.measuring("0 % hits, throughput"):
            compared(run, ours, plain, node, f"{batch} requests of 64 + 32 tokens at once", together)
        found = node.status()["hits"]["tokens"]
        check(not any(count for name, count in found.items() if name != "miss"), f"there were hits: {found}")


def compared(run: Run, ours: Vllm, plain: Vllm, node: Node, what: str, one: Callable[[Vllm, str], float]) -> None:
    """Rows of what the connector adds to `one`: in time, in CPU, and by the clock on its hooks.

    Time is what counts, but on a busy machine it differs by more between two runs of one engine; CPU differs by less,
    and the time in the hooks holds whatever the machine does: the engine's threads do nothing else for the connector.
    """
    least, most, seconds = (2, 2, 0.0) if run.quick else (4, 16, MISSES_S)
    times, cpus = Pairs(), Pairs()
    hooked, spent, daemon = [0.0, 0.0, 0.0], 0.0, 0.0
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < least or (rounds < most and time.monotonic() < end):
        order = (plain, ours, ours, plain) if rounds % 2 else (ours, plain, plain, ours)
        took: dict[int, list[tuple[float, float]]] = {id(plain): [], id(ours): []}
        for place, engine in enumerate(order):
            before, cpu, its = run.in_hooks(), node.cpu(), cpu_of(engine)
            wall = one(engine, f"{what} {rounds} {place}")
            its = cpu_of(engine) - its
            if engine is ours:
                hooked = [total + now - then for total, now, then in zip(hooked, run.in_hooks(), before, strict=True)]
                cpu = node.cpu() - cpu
                daemon, spent, its = daemon + cpu, spent + wall, its + cpu
            took[id(engine)].append((wall, its))
        for pairs, which in ((times, 0), (cpus, 1)):
            pairs.add([one[which] for one in took[id(ours)]], [one[which] for one in took[id(plain)]])
        rounds += 1
    scheduler, worker, steps = hooked
    name = f"0 % hits, {what}: "
    run.results.rows += [
        times.row(f"{name}longer / an engine without against itself"),
        Row(f"{name}spread of the {rounds} rounds", spread(times.more), "%"),
        cpus.row(f"{name}more CPU, the daemon's included / without against itself"),
        Row(f"{name}the engine's threads in the connector", 100 * (scheduler + worker) / spent, "%", target=below(1)),
        Row(f"{name}of that the scheduler's, a step", 1e6 * scheduler / max(1, steps), "us"),
        Row(f"{name}the daemon's CPU meanwhile", 100 * daemon / spent, "% of a core"),
    ]
    for pairs, kind in ((times, "time"), (cpus, "CPU")):
        if not pairs.told_apart:
            run.results.unjudged.append(f"{name}{kind}")
            run.results.notes.append(
                f"0 % hits, {what}: 1 % of {kind} cannot be told from this machine's noise: "
                f"{spread(pairs.itself):.1f} % between two runs of the same engine; no verdict by it"
            )


# ---- real traffic


def replay(run: Run, ours: Vllm, plain: Vllm) -> None:
    results = run.results
    with gzip.open(Path(__file__).with_name("agent_sessions.json.gz")) as file:
        trace = json.load(file)
    requests = trace["requests"][: 24 if run.quick else None]
    node = Node(run.folder, "replay", dram="160MiB")
    with serving(node, run.socket), results.measuring("replay"):
        attached(ours, node)
        for engine in (ours, plain):
            engine.do("reset")
        before = hits(ours)
        sessions: dict[str, list[int]] = {}
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        cached = {"with": 0, "without": 0}
        total = differ = 0
        end = time.monotonic() + REPLAY_S
        for number, one in enumerate(requests):
            if time.monotonic() > end:
                requests = requests[:number]
                break
            tokens = sessions[one["session"]] = sessions.get(one["session"], [])[: one["keep"]] + one["add"]
            total += len(tokens)
            pair = [("with", ours), ("without", plain)]
            said = []
            for name, engine in pair if number % 2 else reversed(pair):
                timed = engine.do("timed", [tokens])
                seconds[name].append(timed["seconds"])
                cached[name] += timed["cached"][0]
                said.append(timed["tokens"])
            differ += said[0] != said[1]
        came = gained(before, hits(ours))
        results.notes.append(
            f"replay: {len(requests)} of {len(trace['requests'])} requests of {len(sessions)} agents, one at a time; "
            f"lengths are {trace['lengths']} of the trace's. {trace['source']}"
        )
        ratios = [mine / other for mine, other in zip(seconds["with"], seconds["without"], strict=True)]
        computed = {name: total - cached[name] for name in cached}
        results.rows += [
            Row("replay, first token, median / without", statistics.median(seconds["with"]), "s",
                statistics.median(seconds["without"]), statistics.median(ratios), ratio_below(1)),
            Row("replay, first tokens, sum / without", sum(seconds["with"]), "s", sum(seconds["without"]),
                sum(seconds["with"]) / sum(seconds["without"]), ratio_below(1)),
            Row("replay, tokens computed / without", computed["with"], "tokens", computed["without"],
                computed["with"] / computed["without"], ratio_below(1)),
            Row("replay, tokens of all prompts", total, "tokens"),
            Row("replay, from the engine's own cache / without", cached["with"] - sum(came.values()), "tokens",
                cached["without"]),
            *(Row(f"replay, from {source}", came.get(source, 0), "tokens") for source in ("dram", "disk")),
            Row("replay, first tokens that are not those without", differ, "", target=below(1)),
        ]  # fmt: skip


# ---- all of it


def measure(run: Run, parts: Sequence[str], stack: ExitStack) -> None:
    if "step" in parts:
        step(run)
    if not {"sources", "misses", "replay"} & set(parts):
        return
    with run.results.measuring("start of the engines"):
        both = bool({"misses", "replay"} & set(parts))
        # Nodes come and go at the engine's socket; at the start there is one, so that it is found then.
        with serving(Node(run.folder, "start", dram="128MiB"), run.socket):
            ours, plain = run.engines(both)
        if "sources" in parts:
            with run.results.measuring("time to first token by source"):
                redis = stack.enter_context(redis_server())
                Sources(run, ours, redis).measure()
        if "misses" in parts and plain is not None:
            with run.results.measuring("0 % hits"):
                misses(run, ours, plain)
        if "replay" in parts and plain is not None:
            with run.results.measuring("a trace of agents"):
                replay(run, ours, plain)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    results = Results(console)
    about = machine()
    folder = Path(tempfile.mkdtemp(prefix="kvb-"))  # short: a unix socket's path may have 107 bytes
    try:
        with ExitStack() as stack, results.measuring("bench-vllm"):
            start = stack.enter_context(processes(environment(), [packed(folder)], folder))
            measure(Run(folder, results, options.quick, start), options.only or tuple(PARTS), stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(results, options, about)


def report(results: Results, options: argparse.Namespace, about: dict[str, Any]) -> int:
    """Show and write everything; the exit status."""
    console = results.console
    show(console, results.rows)
    for note in results.notes:
        console.print(note, highlight=False)
    seconds = time.monotonic() - results.started
    file = options.out / "vllm.json"
    extra = {"machine": about, "quick": options.quick, "failed": results.failed, "notes": results.notes}
    extra["unjudged"] = results.unjudged
    write_results(file, results.rows, {**extra, "seconds": seconds})
    short = missed(results.rows)
    judged = [row for row in results.rows if row.ok is not None]
    console.print(
        f"\n{len(judged) - len(short)} of {len(judged)} targets met, {len(results.unjudged)} hidden by noise, "
        f"in {seconds:.0f} s, load {os.getloadavg()[0]:.1f}; {file}"
    )
    for line in short:
        console.print(f"[red]missed[/] {escape(line)}")
    for name, reason in results.failed.items():
        console.print(f"[bold red]failed[/] {escape(name)}: {escape(reason)}")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
