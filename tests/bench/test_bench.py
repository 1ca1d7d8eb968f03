"""The benches' own frame: what a row says, and that `make bench` leaves what it promises."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.harness import Bench, Row, below
from bench.peers import mooncake_if_there
from bench.vllm import LONGEST, arguments, report
from bench.vllm_parts import Pairs, Results
from engines import mooncake
from rich.console import Console

RUN = Path(__file__).with_name("run.py")
VLLM = Path(__file__).with_name("vllm.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-P", "-W", "error", str(RUN), "--quick", "--only", "hashing", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100), out


def test_a_run_ends_well_whether_or_not_the_targets_are_met(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = finished
    assert done.returncode == 0, done.stderr
    assert "hashing 128k tokens" in done.stdout
    assert "of 1 targets met" in done.stdout


def test_the_results_have_the_fields_that_programs_read(
    finished: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, out = finished
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    (row,) = results["rows"]
    assert list(row) == ["name", "value", "unit", "reference", "ratio", "target", "ok"]
    assert row["value"] > 0
    assert row["reference"] > 0
    assert row["target"] == "ratio >= 1"
    assert row["ok"] == (row["ratio"] >= 1)


def test_the_plot_is_a_picture(finished: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = finished
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_subject_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-P", str(RUN), "--only", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'nothing'" in done.stderr


def vllm_bench(out: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", str(VLLM), "--quick", "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | variables)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_part_of_the_vllm_bench_can_be_run_alone(tmp_path: Path) -> None:
    done = vllm_bench(tmp_path, "--only", "step")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))
    assert results["failed"] == {}
    assert [row["unit"] for row in results["rows"]] == ["us", "us"]
    assert results["rows"][0]["target"] == "value < 100"
    assert all(row["value"] > 0 for row in results["rows"])


def test_without_its_environment_the_vllm_bench_fails_and_says_why(tmp_path: Path) -> None:
    done = vllm_bench(tmp_path, XDG_CACHE_HOME="/dev/null")
    assert done.returncode == 1
    (reason,) = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))["failed"].values()
    assert "the environment with vLLM cannot be made" in reason
    assert f"failed bench-vllm: {reason}"[:60] in done.stdout


def test_without_its_environment_mooncake_is_left_out_and_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    bench = Bench(True, tmp_path, tmp_path, lambda text: None)
    with mooncake_if_there(bench) as found:
        assert found is None
    assert bench.notes == ["peers: not compared with Mooncake, which is not installed (make mooncake)"]
    assert not cache.exists()


def test_mooncake_brings_what_the_other_process_holds(tmp_path: Path) -> None:
    python = mooncake.environment()
    if python is None:
        pytest.skip("Mooncake is not installed (make mooncake)")
    with mooncake.sides(python, tmp_path, 8 << 20, 2) as (reader, source, place):
        source.call("fill", 1)
        reader.call("fill", 2)
        assert not reader.call("same", 1)
        assert reader.call("read", place, 1 << 20) > 0
        assert reader.call("same", 1)


def test_a_figure_that_cannot_be_measured_is_told_and_the_next_ones_are_measured(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    results = Results(console)
    with results.measuring("one"):
        raise ValueError("out of luck\nat length")
    with results.measuring("two"):
        results.rows.append(Row("two", 1.0, "s", target=below(2)))
    assert report(results, arguments(["--out", str(tmp_path)]), {}) == 1
    written = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))
    assert written["failed"] == {"one": "ValueError: out of luck"}
    assert [row["name"] for row in written["rows"]] == ["two"]
    assert "failed one: ValueError: out of luck" in console.file.getvalue()


def test_the_trace_of_agents_names_its_source_and_continues_its_sessions() -> None:
    with gzip.open(Path(__file__).with_name("agent_sessions.json.gz")) as file:
        trace = json.load(file)
    assert "Apache-2.0" in trace["source"]
    lengths: dict[str, int] = {}
    for one in trace["requests"]:
        assert one["keep"] == lengths.get(one["session"], 0)
        assert one["add"]
        lengths[one["session"]] = one["keep"] + len(one["add"])
    assert len(lengths) == 9
    assert max(lengths.values()) < LONGEST


def test_what_noise_hides_gets_no_verdict() -> None:
    quiet, busy = Pairs(), Pairs()
    for nudge in (0.001, -0.001, 0.002, -0.002):
        quiet.add([2.04, 2.04], [2.0, 2.0 + nudge])
        busy.add([2.04, 2.04], [2.0, 2.0 + 300 * nudge])
    row = quiet.row("more")
    assert (round(row.value), row.ok) == (2, False)
    assert busy.row("more").ok is None
