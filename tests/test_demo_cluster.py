"""`make demo-cluster` as a user runs it: real namespaces, daemons, Redis and model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo_cluster.py"


def _may_make_networks() -> bool:
    name = f"kvc-try-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    except OSError:
        return False
    return made


def _networks() -> set[str]:
    """The demo's: what an earlier one left that was killed is not this one's."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in shown.split() if name.startswith(("kvc-a-", "kvc-b-"))}


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_two_nodes_answer_as_one_and_each_goes_on_alone() -> None:
    if not _may_make_networks():
        pytest.skip("no network namespaces can be made here (they need root and CAP_SYS_ADMIN)")
    before = _networks()
    done = subprocess.run([sys.executable, "-P", DEMO], capture_output=True, text=True, timeout=540)
    last = done.stdout.strip().splitlines()[-1]
    assert (done.returncode, done.stderr) == (0, "")
    assert last.startswith("demo ok: 9 answers, all identical")
    assert _networks() <= before
