"""Time to first token on node B with a prefix that node A has, over a cable shaped to 10 Gbit/s, 100 and 1 Mbit/s.

Two network namespaces and a veth pair are the machines; `tc` with a token bucket is the link. Node A and Redis are on
one side, node B on the other. The limit that a fetch is held against is what two bare sockets bring over the same
cable in the same run. A scripted engine, whose speed at computing is set, shows what is decided: it fetches what the
daemon gives it and computes the rest, and must not be later than one that computes all. A model on the CPU shows the
same on real input.
"""

import contextlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engines.cable import ADDRESSES, Cable, NoCable, cable

from kvcascade.daemon.attachment import Session
from kvcascade.daemon.cost import SLACK
from kvcascade.daemon.protocol import Tier
from kvcascade.tiers.block import KVGroup, probe_hashes

from .harness import (
    PATIENCE_S,
    ROOT,
    Bench,
    BenchError,
    Daemon,
    Row,
    at_least,
    check,
    median_ratio,
    namespace,
    ratio_below,
)

# As SmolLM2-135M's.
GROUP = KVGroup(block_tokens=16, layers=30, kv_heads=3, head_dim=64)
BLOCKS = 125
TOKENS = BLOCKS * GROUP.block_tokens
BLOCK = GROUP.layers * GROUP.kv_heads * GROUP.head_dim * 2 * 2 * GROUP.block_tokens
HASH_BYTES = 32
LINKS = {"10 Gbit/s": 10e9, "100 Mbit/s": 100e6}
NARROW = 1e6
CPU, GPU = 250.0, 5000.0  # tokens a second: a small model on two cores; a large one on a GPU
DEADLINE_S = 20.0  # of a prefix: the bench asks what pays, not what a user waits for
PORTS = {"a": 7400, "packed": 7401}
MODEL_PORT, REDIS_PORT, RAW_PORT = 7403, 6379, 7900
LATER = 1.05  # than computing all of it: what asking may cost
TRIED = 1 + SLACK + 0.05  # what trying may cost, where it has turned out not to pay
SLEEP = 0.02


@dataclass(frozen=True, slots=True)
class Source:
    """Where node B fetches from: its own flags, and whose blocks they are."""

    name: str
    prefix: str
    store: str

    @property
    def flags(self) -> list[str]:
        return ["--redis-store", self.store, "--redis-key-prefix", self.prefix]


SOURCES = (
    Source("peer", "plain", "directory"),
    Source("Redis", "plain", "payload"),
    Source("Redis, zstd", "packed", "payload"),
)


def run(bench: Bench) -> list[Row]:
    if shutil.which("redis-server") is None:
        bench.notes.append("links: not measured, redis-server is not installed")
        return []
    try:
        with ExitStack() as stack:
            over = stack.enter_context(cable())
            stack.enter_context(over.raw_sender(RAW_PORT))
            stack.enter_context(redis(over, bench.sockets))
            return Links(bench, over).measure(stack)
    except NoCable as error:
        bench.notes.append(f"links: not measured, {error}")
        return []


@contextlib.contextmanager
def redis(over: Cable, directory: Path) -> Iterator[None]:
    """On node A's machine, in memory alone."""
    command = over.on(
        "a",
        *("redis-server", "--bind", ADDRESSES["a"], "--port", str(REDIS_PORT), "--save", "", "--appendonly", "no"),
        *("--dir", str(directory), "--protected-mode", "no"),
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.kill()


class Links:
    """One run: the cable, the two nodes, and the chains that node A has."""

    def __init__(self, bench: Bench, over: Cable) -> None:
        self._bench = bench
        self._over = over
        self._rounds = bench.rounds(3, 1)
        # Exponents as a model's have them, so that there is something to pack.
        numbers = np.random.default_rng(1).standard_normal(BLOCKS * BLOCK // 2, np.float32)
        self._payload = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(BLOCKS, BLOCK)
        generator = np.random.default_rng(2)
        self._chains = {
            name: generator.integers(0, 256, BLOCKS * HASH_BYTES, np.uint8).tobytes()
            for name in ("first", "cpu", "gpu", "cut", "after", *(f"round {n}" for n in range(self._rounds)))
        }

    def measure(self, stack: ExitStack) -> list[Row]:
        over, rows = self._over, []
        for name, prefix, codec in (("a", "plain", "raw"), ("packed", "packed", "zstd")):
            self._bench.say(f"links: node {name} stores")
            flags = [
                "--listen",
                f"{ADDRESSES['a']}:{PORTS[name]}",
                "--cluster-codec",
                codec,
                "--redis-key-prefix",
                prefix,
            ]
            self._store(stack.enter_context(self._node("a", name, *flags)))
        for link, bits in LINKS.items():
            over.shape(bits)
            for source in SOURCES[:1] if self._bench.quick else SOURCES:
                self._bench.say(f"links: {link}, {source.name}")
                rows += self._fetched(link, source, bits)
        rows += [*self._narrow(), *self._cut()]
        return rows if self._bench.quick else [*rows, *self._model(stack)]

    def _node(self, machine: str, name: str, *flags: str) -> Daemon:
        command = [str(Path(sys.executable).with_name("kvcascade")), "serve"]
        return Daemon(
            self._bench,
            f"links-{name}",
            *("--dram", "768MiB", "--cluster-node", name, "--redis", f"redis://{ADDRESSES['a']}:{REDIS_PORT}/0"),
            *("--cluster-deadline", f"{DEADLINE_S:g}s", "--redis-deadline", f"{DEADLINE_S:g}s"),
            *("--peers-deadline", f"{DEADLINE_S:g}s"),
            *flags,
            command=self._over.on(machine, *command),
        )

    def _node_b(self, source: Source) -> Daemon:
        """A new one. It serves nobody: of two nodes that have a block, the directory would name the later one."""
        return self._node("b", "b", *source.flags)

    def _store(self, node: Daemon) -> None:
        with attached(node, "writer") as engine:
            for name, chain in self._chains.items():
                reservation = engine.reserve(chain, request=name)
                with engine.copying(reservation) as pools:
                    for block, page in zip(reservation.blocks.tolist(), reservation.pages.tolist(), strict=True):
                        pools[0].slot(page, BLOCK)[:] = self._payload[block]
                ready = engine.commit(reservation.lease, reservation.blocks).ready
                check(ready == BLOCKS, f"{ready} of {BLOCKS} blocks were stored")
        self._wait_shared(node)

    def _wait_shared(self, node: Daemon) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            told = node.status()["cluster"]
            if not told["sharing"]["waiting"] and told["fleet"]["counters"].get("entries_written", 0):
                break
            if time.monotonic() > end:
                raise BenchError(f"node A's blocks are not in Redis: {told['sharing']}")
            time.sleep(SLEEP)

    def _fetched(self, link: str, source: Source, bits: float) -> list[Row]:
        """What engines of two speeds do; then, whatever pays, how near to the link's limit a fetch comes."""
        what = f"{link}, {source.name}"
        rows = []
        raw: list[float] = []
        ours: list[float] = []
        with self._node_b(source) as node:
            with attached(node, "unknown") as engine:
                self._fetch(engine, "first")  # the link and the engine are not known yet
                for number in range(self._rounds):
                    seconds, count, tier = self._fetch(engine, f"round {number}")
                    check(count == BLOCKS, f"{what}: {count} of {BLOCKS} blocks came")
                    check(tier == source.name.split(",")[0].upper(), f"{what}: they came from {tier}")
                    ours.append(BLOCKS * BLOCK / 1e6 / seconds)
                    raw.append(BLOCKS * BLOCK / 1e6 / self._over.raw(RAW_PORT, BLOCKS * BLOCK))
            told = f"{what}: blocks / bare sockets, which take {statistics.median(raw) * 8e8 / bits:.0f} % of it"
            target = at_least(0.8) if source.name != "Redis, zstd" else None
            rows.append(
                Row(told, statistics.median(ours), "MB/s", statistics.median(raw), median_ratio(ours, raw), target)
            )
            for engine_name, speed in (("cpu", CPU), ("gpu", GPU)):
                rows.append(self._first_token(f"{what}, {speed:,.0f} tokens/s", node, engine_name, speed, engine_name))
        return rows

    def _first_token(self, what: str, node: Daemon, name: str, speed: float, chain: str, limit: float = LATER) -> Row:
        with attached(node, name) as engine:
            engine.computed(TOKENS, TOKENS / speed)
            seconds, count, _ = self._fetch(engine, chain)
        first = seconds + (TOKENS - count * GROUP.block_tokens) / speed
        computed = TOKENS / speed
        told = f"{what}: {count} of {BLOCKS} blocks fetched, first token / computed"
        return Row(told, first, "s", computed, first / computed, ratio_below(limit))

    def _narrow(self) -> list[Row]:
        """1 Mbit/s: nothing pays once that is known."""
        self._over.shape(NARROW)
        rows = []
        with self._node_b(SOURCES[0]) as node:
            for state, chain, limit in (
                ("not known yet", "first", TRIED),
                ("known since just now", "cpu", TRIED),
                ("known", "gpu", LATER),
            ):
                what = f"1 Mbit/s, peer, {state}, 250 tokens/s"
                rows.append(self._first_token(what, node, "cpu", CPU, chain, limit))
        return rows

    def _cut(self) -> list[Row]:
        """A link that becomes a thousand times slower in the middle of a fetch."""
        self._over.shape(LINKS["100 Mbit/s"])
        with self._node_b(SOURCES[0]) as node:
            with attached(node, "unknown") as engine:
                self._fetch(engine, "first")
            sent = self._over.sent()

            def narrow() -> None:
                while self._over.sent() - sent < BLOCKS * BLOCK // 2:
                    time.sleep(SLEEP)
                self._over.shape(NARROW)

            cutter = threading.Thread(target=narrow)
            cutter.start()
            what = "100, then 1 Mbit/s, peer, 250 tokens/s"
            rows = [self._first_token(what, node, "cpu", CPU, "cut", TRIED)]
            cutter.join()
            rows.append(self._first_token(f"{what}, the next one", node, "cpu", CPU, "after", TRIED))
        return rows

    def _model(self, stack: ExitStack) -> list[Row]:
        """The same with SmolLM2-135M on this machine's CPU: what its first token takes, whatever is fetched."""
        # Loaded only now: the demo's parts need torch.
        sys.path.insert(0, str(ROOT / "examples"))
        from demo import Engine as Model
        from demo import document

        self._bench.say("links: preparing the model")
        made = subprocess.run(
            [sys.executable, "-P", str(ROOT / "examples" / "smollm2.py")], capture_output=True, text=True
        )
        if made.returncode:
            self._bench.notes.append(f"links: not measured with a model, {made.stderr.strip().splitlines()[-1]}")
            return []
        model, logs, text = Path(made.stdout.strip()), self._bench.directory, document()
        # The first teaches what the link does; node A answers both. The others teach the engine's speed.
        warm, asked = text[3000:6000], f"{text}\n\nIs there any warranty?"
        prefix = ["--redis-key-prefix", "model", "--cluster-codec", "raw"]
        node_a = stack.enter_context(self._node("a", "model", "--listen", f"{ADDRESSES['a']}:{MODEL_PORT}", *prefix))
        with Model("engine A", model, logs, Path(node_a.socket)) as engine:
            for prompt in (warm, asked):
                self._bench.say("links: node A's engine answers")
                engine.answer([{"role": "user", "content": prompt}], 2)
        self._wait_shared(node_a)
        rows = []
        engine_b = stack.enter_context(Model("engine B", model, logs, self._bench.sockets / "links-b.sock"))
        for link, bits in LINKS.items():
            self._over.shape(bits)
            replies = {}
            for store, fetch in (("directory", "never"), ("directory", "cost"), ("payload", "cost")):
                source = Source("", "model", store)
                self._bench.say(f"links: {link}, a model, {store}, {fetch}")
                with self._node("b", "b", *source.flags, "--cluster-fetch", fetch):
                    for prompt in (warm, f"{link} {store} {text[6000:8000]}", asked):
                        reply = engine_b.answer([{"role": "user", "content": prompt}], 2)
                    replies[store if fetch == "cost" else fetch] = reply
            computed = replies.pop("never")["first_token"]
            for store, reply in replies.items():
                tokens = f"{sum(reply['tokens'].values()):,} of {reply['prompt_tokens']:,} tokens fetched"
                what = f"{link}, {'peer' if store == 'directory' else 'Redis'}, SmolLM2-135M: {tokens}"
                first = reply["first_token"]
                told = f"{what}, first token / computed"
                rows.append(Row(told, first, "s", computed, first / computed, ratio_below(LATER)))
        return rows

    def _fetch(self, engine: Session, name: str) -> tuple[float, int, str]:
        """Looks up, waits for what comes; the seconds, how many blocks came, and from which tier the first."""
        began = time.perf_counter()
        found = engine.lookup(self._chains[name], request=name, wait_ms=int(DEADLINE_S * 1000))
        count = 0
        if found.lease:
            count = engine.load(found.lease, found.matched, wait_ms=int(DEADLINE_S * 1000)).count
            engine.release(found.lease)
        seconds = time.perf_counter() - began
        return seconds, count, Tier(int(found.tiers[0])).name if count else ""


def attached(node: Daemon, name: str) -> Session:
    """An engine whose speed is known by its own name."""
    space = namespace(GROUP)
    engine = Session(
        namespace=space.to_map(),
        probe=probe_hashes(algo=space.hash_algo, none_hash=space.none_hash, key_scheme=space.key_scheme),
        engine=(name, "1"),
        socket_path=node.socket,
        timeout=3 * DEADLINE_S,
    )
    engine.attach()
    return engine
