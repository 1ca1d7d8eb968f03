"""The unit file under the real systemd: what it says is understood, and a crash keeps the blocks that were in DRAM."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "config" / "deploy" / "kvcascade.service"
KVCASCADE = Path(sys.executable).with_name("kvcascade")
SYSTEMD = Path("/lib/systemd/systemd")

# A systemd of the user's own, with nothing but our unit, in namespaces that end with it. It takes itself for the
# system's where this folder is.
STAGE = """
set -eu
unit=$1 systemd=$2 python=$3 tests=$4 kvcascade=$5
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user/systemd/user /run/kvcascade
chmod 700 /run/user
cp "$unit" /run/user/systemd/user/kvcascade.service
export XDG_RUNTIME_DIR=/run/user HOME=/run/kvcascade DBUS_SESSION_BUS_ADDRESS=
"$systemd" --user --log-target=console > /run/kvcascade/log 2>&1 &
trap "kill $! 2>/dev/null; cat /run/kvcascade/log >&2" EXIT
until systemctl --user show -p Version > /dev/null 2>&1; do sleep 0.05; done
show() { systemctl --user show kvcascade.service -p ActiveState -p Result -p NRestarts -p NFileDescriptorStore; }
engine() { "$python" -P -c "import sys; sys.path.insert(0, '$tests')
from engines.scripted import Engine, prompt
engine = Engine('/run/kvcascade/socket')
print('engine', $1)
engine.close()"; }
systemctl --user start kvcascade.service
engine "engine.store(prompt('a', 16))['ready']"
show
# All have their checksums soon.
until "$kvcascade" status --json --socket /run/kvcascade/socket | grep -q '"sealed": 16'; do sleep 0.05; done
systemctl --user kill -s KILL kvcascade.service
until show | grep -q NRestarts=1; do sleep 0.05; done
until "$kvcascade" status --socket /run/kvcascade/socket > /dev/null 2>&1; do sleep 0.05; done
engine "engine.fetch(prompt('a', 16))"
systemctl --user restart kvcascade.service
engine "engine.fetch(prompt('a', 16))"
systemctl --user stop kvcascade.service
show
"""

# What a user's systemd cannot do, or what the stage has no place for.
SYSTEM_ALONE = (
    r"(?m)^(After|RequiresMountsFor|RuntimeDirectory|StateDirectory|Limit|Protect|ReadWrite|Restrict|SystemC).*\n"
)


def test_the_unit_file_is_understood(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/bin/kvcascade", str(KVCASCADE)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.timeout(120)
def test_a_crash_and_a_restart_under_systemd_keep_the_blocks_in_dram(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount", "--cgroup", "--pid", "--fork", "--mount-proc"]
    if os.getuid() != 0 or not SYSTEMD.exists() or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no systemd, or no namespaces for it, here")
    unit = tmp_path / UNIT.name
    flags = "--socket /run/kvcascade/socket --dram 64MiB --dram-slab 4MiB --dram-lock false --daemon-seed 0"
    command = f"{KVCASCADE} serve {flags} --disk /run/kvcascade/disk --disk-size 64MiB"
    unit.write_text(re.sub(r"(?m)^ExecStart=.*$", f"ExecStart={command}", re.sub(SYSTEM_ALONE, "", UNIT.read_text())))
    stage = tmp_path / "stage"
    stage.write_text(STAGE)
    tests = Path(__file__).parents[1]
    words = [*unshare, "bash", stage, unit, SYSTEMD, sys.executable, tests, KVCASCADE]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=100)
    if "Failed to" in done.stderr and "engine" not in done.stdout:
        pytest.skip(f"systemd does not run here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    hit = f"engine {{'matched': 16, 'loaded': 16, 'foreign': 0, 'tiers': {[1] * 16}}}"
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("engine")] == ["engine 16", hit, hit]
    assert {"ActiveState=active", "NFileDescriptorStore=2"} <= set(lines)
    assert {"Result=success", "NFileDescriptorStore=0", "ActiveState=inactive"} <= set(lines[-4:])
