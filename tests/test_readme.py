"""The README is true: its commands exist and run, its lines of Python work, its settings are settings."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from engines import redis_server
from engines.nodes import secret_file

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
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"make ([a-z-]+)", README))
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
    variables = {f"KVCASCADE_{name.upper()}" for name in SHORTHANDS} | {one.variable for one in all_settings()}
    assert set(re.findall(r"`(--[a-z-]+)`", README)) - {"--json", "--help"} <= flags
    assert set(re.findall(r"`(KVCASCADE_[A-Z_]+)`", README)) <= variables
    assert tomllib.loads((ROOT / "config" / "kvcascade.toml").read_text())


def tiny_model() -> Any:
    torch.manual_seed(0)
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **fields)).eval()
    model.generation_config.do_sample = False
    model.generation_config.max_new_tokens = 8
    model.generation_config.pad_token_id = 0
    return model


def test_the_five_lines_of_the_readme_generate_what_the_model_generates_without_them(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCASCADE_SOCKET", str(daemon.socket))
    model = tiny_model()
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


def test_the_line_for_several_nodes_serves(start_daemon: Any, tmp_path: Path) -> None:
    line = next(line.strip() for line in README.splitlines() if line.startswith("    kvcascade serve --redis"))
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes and more")
    secret.chmod(0o600)
    with redis_server.serve() as redis:
        here = {"redis://10.0.0.1:6379/0": redis.url, "10.0.0.7:7400": "127.0.0.1:0", "/etc/kvcascade/secret": secret}
        words = [str(here.get(word, word)) for word in shlex.split(line)[2:]]
        flags = dict(zip(words[::2], words[1::2], strict=True))
        daemon = start_daemon(**{name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()})
        status = subprocess.run([KVCASCADE, "status", "--socket", str(daemon.socket)], capture_output=True, text=True)
        assert (status.returncode, redis.url in status.stdout, "shared secret" in status.stdout) == (0, True, True)
        daemon.stop()


def test_the_lines_for_a_hand_off_hand_a_prefix_off(start_daemon: Any) -> None:
    usual = {"peers_listen": "127.0.0.1:0", "cluster_secret_file": secret_file()}
    first, second = (start_daemon(cluster_node=name, **usual) for name in ("a", "b"))
    model, ids = tiny_model(), torch.arange(1, 81)[None]
    give, take = re.findall(r"^(?:ticket|prompt) = prefixes\..*ticket.*|^ticket = .*", README, re.M)
    with PrefixCache(model, socket=first.socket) as here, PrefixCache(model, socket=second.socket) as there:
        prompt = here.lookup(ids)
        loaded = here.load(prompt)
        here.store(model.generate(ids, **loaded.arguments), loaded)
        names: dict[str, Any] = {"prefixes": here, "prompt": prompt, "inputs": {"input_ids": ids}}
        exec(give, names)  # noqa: S102 - our own text
        names["prefixes"] = there
        exec(take, names)  # noqa: S102 - our own text
        loaded = there.load(names["prompt"])
        assert dict(loaded.report.tokens) == {"peer": 64}
