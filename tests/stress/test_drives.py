"""Several drives, each in a trouble of its own, and takeovers under load that either side may not outlive: no engine is
ever given a byte that is not its own, and what is well goes on."""

import os
import random
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from engines.faulty_daemon import Rules
from engines.scripted import EngineError, eventually, prompt

from kvcascade.config.errors import CascadeError

NAMES, BLOCKS = 24, 24  # 24 prompts of up to 24 blocks of 32 KiB: 18 MiB, more than DRAM holds
ROUNDS = int(os.environ.get("KVC_STRESS_ROUNDS", "4"))

pytestmark = [pytest.mark.stress, pytest.mark.timeout(120 + 60 * ROUNDS)]


@pytest.fixture
def chance(request):
    """A source of chance that is told when the test fails."""
    seed = int(os.environ.get("KVC_STRESS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVC_STRESS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    return Rules(tmp_path / "rules")


@pytest.fixture
def mounts(tmp_path):
    """Two small file systems: `full` and `readonly`."""
    made = []
    for name, size in (("full", "3m"), ("readonly", "24m")):
        at = tmp_path / name
        at.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", at], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        made.append(at)
    yield made
    for at in made:
        subprocess.run(["umount", "-l", at], check=True)


def disk_of(daemon):
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == "disk")


def attached(engine):
    try:
        return engine.attach()
    except EngineError:
        return None


def pid_of(daemon):
    try:
        return daemon.status()["pid"]
    except CascadeError:
        return None


def work(engines, chance, seconds=2.0):
    for engine in engines:
        engine.begin("work", seconds, NAMES, BLOCKS, chance.randrange(1 << 32))


def harvest(engines):
    told = [engine.result(60) for engine in engines]
    assert sum(one["foreign"] for one in told) == 0
    return sum(one["fetched"] for one in told)


def all_is_true(engines):
    """Whatever is found of any prompt is its own; how many blocks."""
    loaded = 0
    for name in range(NAMES):
        engine = engines[name % len(engines)]
        eventually(lambda engine=engine: attached(engine))
        try:
            got = engine.fetch(prompt(f"prompt {name}", BLOCKS))
        except EngineError:  # the first use after a loss may tell of it
            got = eventually(lambda engine=engine: attached(engine)) and engine.fetch(prompt(f"prompt {name}", BLOCKS))
        assert got["foreign"] == 0
        loaded += got["loaded"]
    return loaded


def test_drives_each_in_a_trouble_of_its_own(start_daemon, start_engine, chance, rules, mounts, tmp_path):
    full, readonly = mounts
    homes = {name: tmp_path / name for name in ("sick", "gone", "well")}
    directories = [*homes.values(), full / "disk", readonly / "disk"]
    daemon = start_daemon(command=rules.command, disk=", ".join(map(str, directories)), disk_size="16MiB",
                          disk_reserve="0B", disk_write_policy=chance.choice(["back", "through"]), dram="8MiB",
                          dram_slab="1MiB", daemon_drain_deadline="5s", leases_reservation="500ms")  # fmt: skip
    engines = [start_engine(daemon, timeout=2.0) for _ in range(2)]
    for round_ in range(ROUNDS):
        what = chance.choice(["EIO", "hang", "short", "flip", "ENOSPC"])
        way = chance.choice(["write", "read", "sync"]) if what not in ("flip",) else "read"
        if what == "short" and way == "sync":
            way = "write"
        print(f"round {round_}: {way} {what}")
        work(engines, chance)
        time.sleep(chance.uniform(0, 0.5))
        rules.set(f"{way} sick/slab-* {what} 0", *[f"{way} sick/journal-* {what} 0"] * (way == "sync"))
        with suppress(OSError):  # there is none left
            (full / "others").write_bytes(bytes(1 << 20))
        remounted = subprocess.run(["mount", "-o", "remount,ro", readonly], capture_output=True).returncode == 0
        homes["gone"].rename(tmp_path / "away")
        assert harvest(engines) > 0
        assert daemon.check() == []
        work(engines, chance, 3.0)
        assert harvest(engines) > 0
        assert daemon.check() == []
        end = chance.choice(["heal", "kill", "stop"])
        if end == "kill":
            daemon.kill()
        elif end == "stop":
            assert daemon.stop() == 0
        rules.set_quietly()
        (full / "others").unlink()
        if remounted:
            subprocess.run(["mount", "-o", "remount,rw", readonly], check=True)
        if homes["gone"].exists():
            for path in homes["gone"].iterdir():
                path.unlink()
            homes["gone"].rmdir()
        (tmp_path / "away").rename(homes["gone"])
        if end != "heal":
            daemon.start()
        eventually(lambda: disk_of(daemon)["state"] == "ok", 90)
        assert all_is_true(engines) > 0
        assert daemon.check() == []
    daemon.restart()
    assert all_is_true(engines) > 0


@contextmanager
def successor(daemon):
    arguments = [part for name, value in daemon.flags.items() if value for part in (name, value)]
    with daemon.log.open("ab") as log:
        process = subprocess.Popen([*daemon.command, "--takeover", *arguments], stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process is not daemon.process and process.poll() is None:
            process.kill()
            process.wait(20)


def survivor(old, new, daemon):
    """The one of two that serves on; None where both have ended."""

    def seen():
        alive = [one for one in (old, new) if one.poll() is None]
        if len(alive) == 1 and pid_of(daemon) == alive[0].pid:
            return alive
        return [None] if not alive else []

    return eventually(seen, 90)[0]


def test_takeovers_with_several_drives_that_either_side_may_not_outlive(start_daemon, start_engine, chance, tmp_path):
    directories = ", ".join(str(tmp_path / name) for name in "abc")
    daemon = start_daemon(disk=directories, disk_size="16MiB", dram="8MiB", dram_slab="1MiB",
                          disk_write_policy=chance.choice(["back", "through"]), leases_reservation="500ms",
                          daemon_drain_deadline="5s")  # fmt: skip
    engines = [start_engine(daemon, timeout=2.0) for _ in range(2)]
    for round_ in range(3 * ROUNDS):
        work(engines, chance, 2.5)
        victim = chance.choice(["old", "new", "both", "nobody"])
        print(f"round {round_}: {victim}")
        old = daemon.process
        with successor(daemon) as new:
            time.sleep(chance.uniform(0.2, 1.2))  # the moment is the point
            for process in {"old": [old], "new": [new], "both": [old, new], "nobody": []}[victim]:
                process.kill()
            daemon.process = survivor(old, new, daemon)
            if daemon.process is None:
                daemon.start()
        harvest(engines)
        assert daemon.check() == []
        assert all_is_true(engines) >= 0
        assert daemon.status()["counters"].get("internal_errors", 0) == 0
    daemon.restart()
    assert daemon.status()["counters"].get("recovery_unreachable_blocks", 0) == 0
    assert all_is_true(engines) > 0
