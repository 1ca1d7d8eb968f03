"""The benches' own frame: what a row says, and that `make bench` leaves what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")


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
