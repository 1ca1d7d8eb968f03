"""A test's own end of the model of ours (`Lab` in vllm_side.py): serves requests and proves their tokens."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.scripted import eventually
from engines.vllm_engine import Vllm, VllmError
from engines.vllm_side import expected


def prompt(name: int, tokens: int) -> list[int]:
    return [(i * 31 + 7 * name + 3) % 1000 for i in range(tokens)]


class Lab:
    """One scheduler, worker and model of ours, in the module's process."""

    def __init__(self, process: Vllm, model: Path, daemon: Any, **options: Any) -> None:
        self._process = process
        self._window = int(options.get("window", 0))
        process.call("close")
        process.call("lab", str(model), str(daemon.socket), **options)
        self.prompts: dict[str, tuple[list[int], int, int]] = {}

    def __getattr__(self, step: str) -> Any:
        return lambda *arguments, **named: self._process.do(step, *arguments, **named)

    def get(self, name: str) -> Any:
        return self._process.get(name)

    def add(self, name: str, tokens: list[int], count: int = 4, **options: Any) -> None:
        self.prompts[name] = (tokens, count, int(options.get("flavour", 0)))
        self._process.do("add", name, tokens, count, **options)

    def serve(self, name: str, tokens: list[int], count: int = 4, **options: Any) -> int:
        """Runs one request to its end, proves its tokens, and says how many tokens were computed for it."""
        before = self.get("computed")
        self.add(name, tokens, count, **options)
        self.run(name)
        self.prove(name)
        return int(self.get("computed")) - before

    def prove(self, *names: str) -> None:
        for name in names:
            tokens, count, flavour = self.prompts[name]
            found, wanted = self.report(name), expected(tokens, count, self._window, flavour)
            assert found["tokens"] == wanted, f"{name}: {found}, and not {wanted}"

    def sound(self) -> None:
        """Nothing is left over, and nothing was told twice or written to what was free."""
        assert self.idle() == 0
        assert self.get("faults") == []
        received = Counter(self.get("received"))
        loads = Counter(self.get("loads"))
        assert received == loads

    def step_until(self, condition: Callable[[], bool], steps: int = 200) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError("it did not come to that")


def stored(lab: Lab, daemon: Any, blocks: int) -> None:
    """Waits until so many blocks are stored."""
    eventually(lambda: sum(tier["blocks"] for tier in daemon.status()["tiers"] if tier["name"] == "dram") >= blocks)


def in_memory(daemon: Any) -> int:
    """Blocks in DRAM."""
    return int(next(tier["blocks"] for tier in daemon.status()["tiers"] if tier["name"] == "dram"))


def pins(daemon: Any) -> int:
    return int(daemon.status()["leases"]["pins"])


def at_random(start_lab: Callable[..., Lab], start_daemon: Callable[..., Any], seed: str, window: int) -> None:
    """Faults E1, M1: a small pool, so that requests are preempted, and aborts, slow answers and a killed daemon."""
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB")
    chance = random.Random(seed)
    extra = {"sync_budget_bytes": 20_000}
    lab = start_lab(daemon, blocks=42 if window else 26, extra=extra, max_tokens_a_step=48, window=window)
    heads = [prompt(name, 64) for name in range(4)]
    aborted: set[str] = set()
    for number in range(120):
        name = f"r{number}"
        tail = prompt(100 + chance.randrange(6), chance.randrange(1, 40))
        lab.add(name, chance.choice(heads)[: chance.choice((16, 40, 64))] + tail, chance.randrange(1, 20))
        for _ in range(chance.randrange(4)):
            lab.step()
        what = chance.random()
        if what < 0.1:
            victim = chance.choice(list(lab.prompts))
            lab.abort(victim)
            aborted.add(victim)
        elif what < 0.2:
            try:
                lab.preempt_all()
            except VllmError as error:
                assert "Failed to reset KV cache" in str(error)  # vLLM's own, while a request is being loaded
        elif what < 0.4:
            point = chance.choice(("ask", "load", "copy"))
            lab.hold(point)
            for _ in range(chance.randrange(3)):
                lab.step()
            lab.release(point)
        elif what < 0.43:
            daemon.kill()
            daemon.start()
    lab.sound()
    done = [name for name in lab.prompts if name not in aborted]
    lab.prove(*done)
    assert all(value >= 0 for value in lab.counters().values())
    eventually(lambda: pins(daemon) == 0)
