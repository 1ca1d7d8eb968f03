"""Two nodes share a prefix: `make demo-cluster`, as root.

Two network namespaces, joined by a virtual cable, are two machines: each runs a kvcascade daemon and an engine process
with SmolLM2-135M; one Redis is their directory and shared tier. Node A answers a question about a long document. Node
B, which never saw it, then answers the same with A's blocks: first straight from node A, then, started anew, from
Redis; then node A is killed, then Redis, and B goes on each time. The table says what each prompt took; every text must
be the one that is computed without kvcascade, or the demo fails.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import (
    QUESTION_TOKENS,
    QUESTIONS,
    Daemon,
    DemoError,
    Engine,
    Process,
    ask,
    document,
    main,
    prepared_model,
    scratch,
)

ADDRESSES = {"a": "10.213.77.1", "b": "10.213.77.2"}
PORT, REDIS_PORT = 7400, 6379
SHARED_S = 60.0  # for node A's blocks to be in Redis


def serve(namespace: str, name: str, directory: Path, secret: Path, store: str) -> Daemon:
    """A daemon in a network namespace, that keeps its blocks in DRAM alone."""
    settings = [
        "--dram", "512MiB", "--cluster-node", name, "--cluster-secret-file", str(secret),
        "--listen", f"{ADDRESSES[name]}:{PORT}", "--redis", f"redis://{ADDRESSES['a']}:{REDIS_PORT}/0",
        "--redis-store", store,
    ]  # fmt: skip
    inside = ("ip", "netns", "exec", namespace)
    return Daemon(f"node {name}", directory / f"{name}.sock", settings, directory, inside=inside)


class Redis(Process):
    """The fleet's Redis, on node A's machine, in memory alone."""

    def __init__(self, namespace: str, directory: Path) -> None:
        command = [
            "ip", "netns", "exec", namespace, "redis-server", "--bind", ADDRESSES["a"], "--port", str(REDIS_PORT),
            "--save", "", "--appendonly", "no", "--dir", str(directory), "--protected-mode", "no",
        ]  # fmt: skip
        super().__init__("redis", command, directory, stdout=subprocess.DEVNULL)


@contextmanager
def two_machines() -> Iterator[dict[str, str]]:
    """Network namespaces by node, joined by a cable; gone when this ends."""
    if os.geteuid() != 0:
        raise DemoError("network namespaces need root: sudo make demo-cluster")
    for program in ("ip", "redis-server"):
        if shutil.which(program) is None:
            raise DemoError(f"{program} is not installed: `make demo-cluster` installs it")
    names = {name: f"kvc-{name}-{os.getpid()}" for name in ADDRESSES}
    cable = {name: f"kvc{name}{os.getpid()}" for name in ADDRESSES}
    try:
        for name in names.values():
            ip("netns", "add", name)
        ip("link", "add", cable["a"], "type", "veth", "peer", "name", cable["b"])
        for name, namespace in names.items():
            ip("link", "set", cable[name], "netns", namespace)
            ip("-n", namespace, "addr", "add", f"{ADDRESSES[name]}/24", "dev", cable[name])
            ip("-n", namespace, "link", "set", cable[name], "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise DemoError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Demo:
    """The run: its console, and the answers so far."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._text = text
        self._references: dict[int, dict[str, Any]] = {}
        self.rows: list[tuple[str, int, dict[str, Any]]] = []

    def ask(self, phase: str, engine: Engine, number: int = 0) -> dict[str, Any]:
        """One question; every answer must be the one that was given without kvcascade."""
        reply = engine.answer(ask(self._text, QUESTIONS[number]), QUESTION_TOKENS)
        reference = self._references.setdefault(number, reply)
        self.rows.append((phase, number, reply))
        sources = ", ".join(f"{count} from {source}" for source, count in reply["tokens"].items() if count)
        self._console.print(
            f"  {phase}: question {number + 1}, {reply['prompt_tokens']} tokens, {sources or 'none loaded'}, "
            f"first token after {reply['first_token']:.2f} s",
            highlight=False,
            soft_wrap=True,
        )
        if reply["text"] != reference["text"]:
            raise DemoError(f"{phase}: the text differs from the run without kvcascade")
        return reply

    def expect(self, reply: dict[str, Any], source: str) -> None:
        got = reply["tokens"].get(source, 0)
        if got < 0.9 * reply["prompt_tokens"]:
            raise DemoError(f"{got} of {reply['prompt_tokens']} tokens came from {source} ({reply['missed']})")

    def table(self) -> Table:
        """Narrow enough for 80 columns."""
        title = "One document, two nodes: where the KV came from, and what it took"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False, title_justify="left")
        table.add_column("engine", no_wrap=True)
        for heading in ("asked", "tokens", "peer", "redis", "dram", "computed", "fetch", "first", "same"):
            table.add_column(heading, justify="right", no_wrap=True)
        for phase, number, reply in self.rows:
            tokens = reply["tokens"]
            loaded = sum(tokens.values())
            fetch = reply.get("lookup", 0.0) + reply.get("load", 0.0)
            table.add_row(
                phase,
                str(number + 1),
                str(reply["prompt_tokens"]),
                *(str(tokens.get(source) or "") for source in ("peer", "redis", "dram")),
                str(reply["prompt_tokens"] - loaded),
                f"{fetch:.2f} s" if loaded else "",
                f"{reply['first_token']:.2f} s",
                "yes",
            )
        return table


def run(console: Console, stack: ExitStack) -> str:
    names = stack.enter_context(two_machines())
    directory = stack.enter_context(scratch())
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    console.print("preparing the model (20 s, once)")
    model = prepared_model(directory)
    demo = Demo(console, document())

    with Engine("reference engine", model, directory, None) as engine:
        for number in range(len(QUESTIONS)):
            demo.ask("without kvcascade", engine, number)

    redis = stack.enter_context(Redis(names["a"], directory))
    node_a = stack.enter_context(serve(names["a"], "a", directory, secret, "both"))
    with Engine("engine A", model, directory, node_a.socket) as engine:
        demo.ask("A, cold", engine)
    end = time.monotonic() + SHARED_S
    while node_a.ask("status")["cluster"]["sharing"]["waiting"]:
        if time.monotonic() > end:
            raise DemoError(f"node A's blocks are not in Redis after {SHARED_S:.0f} s")
        time.sleep(0.1)

    def on_node_b(phase: str, store: str, number: int, source: str) -> dict[str, Any]:
        with (
            serve(names["b"], "b", directory, secret, store) as node,
            Engine("engine B", model, directory, node.socket) as engine,
        ):
            reply = demo.ask(phase, engine, number)
            demo.expect(reply, source)
            node.prove()
            return reply

    time.sleep(1)
    peer = on_node_b("B, from node A", "directory", 0, "peer")
    node_a.prove()
    from_redis = on_node_b("B, from Redis", "payload", 0, "redis")
    node_a.popen.kill()
    on_node_b("B, node A killed", "both", 1, "redis")
    with (
        serve(names["b"], "b", directory, secret, "both") as node,
        Engine("engine B", model, directory, node.socket) as engine,
    ):
        demo.ask("B, node A killed", engine, 0)
        redis.popen.kill()
        redis.popen.wait()
        demo.expect(demo.ask("B, Redis killed", engine, 2), "dram")
        node.prove()

    console.print(demo.table())
    cold = demo.rows[0][2]["first_token"]
    return (
        f"{len(demo.rows)} answers, all identical to those without kvcascade; first token of a "
        f"{peer['prompt_tokens']}-token prompt on node B: {cold:.2f} s computed, {peer['first_token']:.2f} s from "
        f"node A, {from_redis['first_token']:.2f} s from Redis; without node A and without Redis node B goes on"
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
