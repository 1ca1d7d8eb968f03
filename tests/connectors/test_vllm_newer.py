"""The connector and the Python code of vLLM 0.33.0, of which there is no CPU build yet: its scheduler drives ours.

These few take the states in which versions differ; `make test-newer` runs all of test_vllm_scheduler.py so.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_engine import Vllm, sources
from engines.vllm_lab import Lab, at_random, pins, prompt, stored

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NEWER = "0.33.0"


@pytest.fixture(scope="module")
def process(start_vllm: Callable[..., Vllm]) -> Vllm:
    return start_vllm(first=[sources(NEWER)])


@pytest.fixture
def start_lab(process: Vllm, tiny_model: Path) -> Iterator[Callable[..., Lab]]:
    yield lambda daemon, **options: Lab(process, tiny_model, daemon, **options)
    process.call("close")


def test_it_is_that_version(process: Vllm) -> None:
    assert process.call("ping") == NEWER


def test_a_prefix_outlives_its_engine_its_sleep_and_its_failures(start_lab: Any, daemon: Any) -> None:
    start_lab(daemon, window=40, drafts=3).serve("cold", prompt(1, 100), 30)
    stored(None, daemon, 12)
    lab = start_lab(daemon, window=40, sleeps=True, prefix_caching=False)
    assert lab.serve("warm", prompt(1, 100), 30) == 129 - 96
    lab.sleep()
    assert lab.wake()
    assert lab.serve("awake", prompt(1, 100)) == 103
    lab.sound()
    lab = start_lab(daemon, extra={"sync_budget_bytes": 1 << 20})
    lab.serve("first", prompt(1, 100))
    lab.tamper()
    lab.serve("failed", prompt(1, 100) + prompt(2, 20))
    lab.sound()
    assert pins(daemon) == 0


@pytest.mark.parametrize(("seed", "window"), [("7", 0), ("2", 24)])
def test_tokens_are_right_whatever_happens_at_random(start_lab: Any, start_daemon: Any, seed: str, window: int) -> None:
    at_random(start_lab, start_daemon, seed, window)
