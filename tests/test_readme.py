"""The README is true: its commands exist and run, its lines of Python work, its settings are settings."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcascade.config.settings import SHORTHANDS, all_settings  # noqa: E402
from kvcascade.connectors.huggingface import PrefixCache  # noqa: E402

KVCASCADE = Path(sys.executable).parent / "kvcascade"
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Sizes that this machine need not have, and a directory that a test must not use.
SMALLER = {"64GiB": "64MiB", "500GiB": "64MiB"}


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"make ([a-z]+)", README))
    assert {"demo", "test", "check", "bench", "dev"} <= named <= targets


def test_continuous_integration_runs_the_make_targets_of_the_readme() -> None:
    assert {"check", "test", "demo"} <= set((ROOT / ".ci" / "run").read_text().split())


def test_the_serve_line_of_the_readme_serves_and_its_status_line_answers(start_daemon: Any, tmp_path: Path) -> None:
    lines = [line.strip() for line in README.splitlines() if line.startswith("    kvcascade ")]
    serve, status = (
        shlex.split(next(line for line in lines if f"kvcascade {name}" in line)) for name in ("serve", "status")
    )
    words = [SMALLER.get(word, word) for word in serve[2:]]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    flags["--disk"] = str(tmp_path / "disk")
    daemon = start_daemon(**{name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()})
    answer = subprocess.run(
        [KVCASCADE, *status[1:], "--socket", str(daemon.socket)], capture_output=True, text=True, check=True
    )
    assert "dram" in answer.stdout
    assert str(tmp_path / "disk") in answer.stdout


def test_every_setting_that_the_readme_names_is_one() -> None:
    flags = {f"--{name}" for name in SHORTHANDS} | {setting.flag for setting in all_settings()}
    variables = {setting.variable for setting in all_settings()}
    assert set(re.findall(r"`(--[a-z-]+)`", README)) - {"--json", "--help"} <= flags
    assert set(re.findall(r"`(KVCASCADE_[A-Z_]+)`", README)) <= variables
    assert tomllib.loads((ROOT / "config" / "kvcascade.toml").read_text())


def test_the_five_lines_of_the_readme_generate_what_the_model_generates_without_them(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCASCADE_SOCKET", str(daemon.socket))
    torch.manual_seed(0)
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **fields)).eval()
    model.generation_config.do_sample = False
    model.generation_config.max_new_tokens = 8
    model.generation_config.pad_token_id = 0
    ids = torch.arange(1, 81)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**inputs)
    block = re.search(r"```python\n(.*?)```", README, re.S)
    assert block is not None
    for expected in (0, 79 // 16 * 16):
        names: dict[str, Any] = {"model": model, "inputs": inputs}
        exec(compile(block[1], "README.md", "exec"), names)  # noqa: S102 - our own text
        assert torch.equal(names["output"], plain)
        assert names["loaded"].report.loaded_tokens == expected
        cache = names["prefixes"]
        assert isinstance(cache, PrefixCache)
        cache.close()
