"""The connector in vLLM's real engine, with real attention on the CPU: the same tokens with it and without."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.scripted import eventually
from engines.vllm_engine import Vllm
from engines.vllm_server import serving, vllm_command, vllm_variables

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 32


def prompts() -> list[list[int]]:
    """Two of 200 tokens, and one that shares 128 with the first."""
    return [
        [(i * 31 + 3) % 1000 for i in range(200)],
        [(i * 31 + 10) % 1000 for i in range(200)],
        [(i * 31 + 3) % 1000 for i in range(128)] + [5] * 40,
    ]


def tokens(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in found]


@pytest.fixture(scope="module")
def node(shared_daemon: Any) -> Any:
    """One daemon for the engines of the module."""
    return shared_daemon


@pytest.fixture(scope="module")
def plain(start_vllm: Callable[..., Vllm], tiny_model: Path) -> list[list[int]]:
    """What the model says by itself."""
    engine = start_vllm()
    engine.call("real", str(tiny_model), "")
    found = tokens([engine.do("generate", [one])[0] for one in prompts()])
    engine.close()
    return found


@pytest.fixture(scope="module")
def engine(start_vllm: Callable[..., Vllm], tiny_model: Path, node: Any) -> Iterator[Vllm]:
    """An engine with the connector, known by its name alone: vLLM finds it by its entry point."""
    one = start_vllm()
    one.call("real", str(tiny_model), str(node.socket))
    yield one
    one.close()


def stored_blocks(daemon: Any) -> int:
    return int(next(tier for tier in daemon.status()["tiers"] if tier["name"] == "dram")["blocks"])


def test_the_same_tokens_cold_warm_and_in_other_engines(engine, plain, node, start_vllm, tiny_model):
    cold = [engine.do("generate", [one])[0] for one in prompts()]
    assert tokens(cold) == plain
    eventually(lambda: stored_blocks(node) >= 13)
    # The engine forgets its own cache: all hits are ours, alone and several at once.
    assert engine.do("reset")
    warm = engine.do("generate", prompts())
    assert tokens(warm) == plain
    assert [one["cached"] for one in warm] == [192, 192, 160]
    metrics = engine.do("metrics")
    # The third may find its first 128 tokens in the engine, where the first has just been loaded.
    assert metrics["vllm:kvcascade_hit_tokens{dram}"] in (192 + 192 + 160, 192 + 192 + 32)
    assert metrics["vllm:external_prefix_cache_hits"] == metrics["vllm:kvcascade_hit_tokens{dram}"]
    assert metrics["vllm:kvcascade_stored_blocks"] >= 13
    # Killed and started again under the engine: computed meanwhile, then found on the disk or stored anew.
    node.kill()
    assert engine.do("reset")
    assert tokens(engine.do("generate", prompts())) == plain
    node.start()

    def attached_again() -> bool:
        engine.do("reset")
        assert tokens(engine.do("generate", prompts())) == plain
        return stored_blocks(node) >= 13

    eventually(attached_again, 60)
    # Weights that nobody names: nothing older is found, and what is new stays apart.
    assert engine.do("reset", connector=True)
    fresh = engine.do("generate", prompts()[:1])
    assert (fresh[0]["cached"], tokens(fresh)) == (0, plain[:1])
    # Another engine process, of two ranks: each loads its own heads of what one rank has stored, and stores its own.
    other = start_vllm(VLLM_CPU_OMP_THREADS_BIND="0|1")
    other.call("real", str(tiny_model), str(node.socket), tp=2)

    def two_ranks_load() -> bool:
        # On two cores that two ranks spin on, an answer may come too late for the request: it is computed then.
        other.do("reset")
        loaded = other.do("generate", prompts()[:1])
        assert tokens(loaded) == plain[:1]
        return bool(loaded[0]["cached"] == 192)

    eventually(two_ranks_load, 60)
    longer = other.do("generate", [prompts()[0] + [7] * 40], 4)
    assert longer[0]["cached"] == 192

    def two_ranks_have_stored() -> bool:
        # On two cores that two ranks spin on, an answer may come too late to store a block in its only step.
        other.do("reset")
        return bool(other.do("generate", [prompts()[0] + [7] * 40], 4)[0]["cached"] == 224)

    eventually(two_ranks_have_stored, 120)
    other.close()
    # What two ranks have stored is found by one, after a restart.
    again = start_vllm()
    again.call("real", str(tiny_model), str(node.socket), extra={"sync_budget_bytes": 0})
    found = again.do("generate", [prompts()[0] + [7] * 40], 4)
    assert found[0]["cached"] == 224
    assert tokens(found) == tokens(longer)
    again.close()


def test_with_drafts_the_same_tokens_are_drawn_and_stored_for_an_engine_without(
    start_vllm, start_daemon, tiny_model, plain
):
    daemon = start_daemon()
    engine = start_vllm()
    guesses = {"method": "custom_class", "model": "vllm_guesser.Guesser", "num_speculative_tokens": 3}
    engine.call("real", str(tiny_model), str(daemon.socket), speculative_config=guesses)

    def cached() -> list[int]:
        found = engine.do("generate", prompts())
        assert tokens(found) == plain
        counted = engine.do("metrics")
        drafted, accepted = (counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
        assert 0 < accepted < drafted
        assert engine.do("reset")
        return [one["cached"] for one in found]

    cached()
    eventually(lambda: stored_blocks(daemon) >= 13)
    # On a busy machine an answer may come too late for a request: the rest of it is computed then.
    eventually(lambda: cached() == [192, 192, 160], 60)
    drawn = engine.do("generate", [prompts()[2]], 100)[0]["tokens"]
    eventually(lambda: stored_blocks(daemon) >= 13 + 3)
    engine.close()
    # What was drawn with drafts is stored behind its prompt, and is what an engine without drafts goes on from.
    again = start_vllm()
    again.call("real", str(tiny_model), str(daemon.socket))
    (found,) = again.do("generate", [prompts()[2] + drawn[:-1]], 1)
    assert (found["cached"], found["tokens"]) == (256, drawn[-1:])
    again.close()


def test_below_a_multi_connector_whose_children_are_no_plug_ins(start_vllm, start_daemon, tiny_model, plain):
    daemon = start_daemon()
    names = {"CascadeConnector": "kvcascade.connectors.vllm", "ShelfConnector": "vllm_shelf"}
    options = {"CascadeConnector": {"socket": str(daemon.socket)}}
    children = [
        {
            "kv_connector": name,
            "kv_connector_module_path": path,
            "kv_role": "kv_both",
            "kv_connector_extra_config": options.get(name, {}),
        }
        for name, path in names.items()
    ]
    multi = {"connectors": children}
    engine = start_vllm(VLLM_PLUGINS="none")
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": multi}
    engine.call("real", str(tiny_model), "", kv_transfer_config=both)
    assert tokens(engine.do("generate", prompts())) == plain
    eventually(lambda: stored_blocks(daemon) >= 13)
    assert engine.do("reset")
    found = engine.do("generate", prompts())
    assert tokens(found) == plain
    assert [one["cached"] for one in found] == [192, 192, 160]
    counted = engine.do("metrics")
    assert counted["vllm:kvcascade_stored_blocks"] >= 13
    assert counted["vllm:kvcascade_loaded_blocks"] > 0
    engine.close()
    # What it stored beside its sibling is right.
    again = start_vllm()
    again.call("real", str(tiny_model), str(daemon.socket))
    found = again.do("generate", prompts())
    assert tokens(found) == plain
    assert found[0]["cached"] == 192
    again.close()


def test_a_block_that_rots_on_disk_is_computed_again(start_vllm, start_daemon, tiny_model, plain):
    daemon = start_daemon(disk_write_policy="through")
    engine = start_vllm()
    engine.call("real", str(tiny_model), str(daemon.socket))
    engine.do("generate", prompts())
    eventually(lambda: stored_blocks(daemon) >= 13)
    daemon.stop()
    for slab in daemon.disk.rglob("slab-*"):
        with slab.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for at in range(20_000, size, 3 * 32 * 1024):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 8]) if byte else b"")
    daemon.start()

    def came_back() -> bool:
        engine.do("reset")
        found = engine.do("generate", prompts())
        assert tokens(found) == plain
        return any(one["cached"] for one in found)

    eventually(came_back, 60)
    engine.close()


def test_the_server_shows_the_connectors_metrics(vllm_python, vllm_path, tiny_model, node, tmp_path):
    line = subprocess.run(
        [Path(os.sys.executable).parent / "kvcascade", "config", "vllm", "--socket", str(node.socket), "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    flags = json.loads(line.stdout)["arguments"]
    command = vllm_command(vllm_python, tiny_model, "--skip-tokenizer-init", *flags)
    with serving(command, tmp_path / "server.log", **vllm_variables(vllm_path)) as server:
        server.wait()
        body = {"model": "tiny", "prompt": prompts()[1], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        for salt in ("one", "one", "two"):
            assert json.loads(server.post("/v1/completions", **body, cache_salt=salt, return_token_ids=True))["choices"]
        shown = server.get("/metrics").decode()
    values = dict(one.rsplit(" ", 1) for one in shown.splitlines() if one.startswith("vllm:kvcascade_"))
    assert sum(float(value) for name, value in values.items() if name.startswith("vllm:kvcascade_lookups_total")) >= 3
    stored = [float(value) for name, value in values.items() if name.startswith("vllm:kvcascade_stored_bytes_total")]
    assert stored and stored[0] > 0
