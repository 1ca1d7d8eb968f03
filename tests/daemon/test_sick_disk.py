"""A real daemon on a sick disk: other tiers at full speed, the state told, the end in time, and back by itself."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from engines.faulty_daemon import Rules
from engines.scripted import EngineError, eventually, prompt

BLOCK_COUNT = 24
PROMPTS = 20  # 15 MiB of 32 KiB blocks


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    return Rules(tmp_path / "rules")


def disk_of(daemon):
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == "disk")


def fetched(engine, tokens):
    try:
        return engine.fetch(tokens)
    except EngineError:  # its back-off has not passed
        return None


def hits(engine, tokens, rounds=100):
    """Seconds of each hit in memory, from question to bytes, sorted."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        got = engine.fetch(tokens)
        seconds.append(time.perf_counter() - began)
        assert (got["loaded"], got["foreign"]) == (len(tokens) // 16, 0)
    return sorted(seconds)


def test_a_hanging_disk_slows_no_hit_in_memory_and_does_not_keep_the_daemon_from_ending(
    start_daemon, start_engine, rules
):
    # F5 (b): the threads never come back; the rule is never lifted.
    daemon = start_daemon(command=rules.command, disk_write_policy="through", daemon_drain_deadline="2s")
    engine = start_engine(daemon)
    hot = prompt("hot", 8)
    engine.store(hot)
    eventually(lambda: disk_of(daemon)["blocks"] == 8)
    before = hits(engine, hot)
    rules.set("write slab-* hang 0", "read slab-* hang 0", "sync * hang 0")
    for number in range(10):
        engine.store(prompt(f"cold {number}", BLOCK_COUNT))
    during = hits(engine, hot)
    # Noise on a shared machine reaches far: only what waits for the disk would be slower than this.
    assert during[50] < 3 * before[50] + 0.005
    assert during[-1] < 1.0
    assert daemon.check() == []
    eventually(lambda: disk_of(daemon)["state"] == "sick", timeout=30)
    status = daemon.status()
    assert any("disk is sick: no answer from the device" in problem for problem in status["problems"])
    hits(engine, hot, 10)
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert time.monotonic() - began < 15
    assert "a drive does not answer" in daemon.log.read_text()
    daemon.process = None
    # What was durable before is there, and nothing half written is.
    rules.set_quietly()
    daemon.start()
    assert daemon.status()["recovered"]["blocks"] >= 8
    got = eventually(lambda: fetched(engine, hot))
    assert (got["loaded"], got["foreign"]) == (8, 0)


def test_a_disk_that_fails_is_told_left_alone_and_comes_back_by_itself(start_daemon, start_engine, rules):
    daemon = start_daemon(command=rules.command, disk_write_policy="through")
    engine = start_engine(daemon)
    rules.set("write slab-* EIO 0")
    engine.store(prompt("a", 8))
    eventually(lambda: disk_of(daemon)["state"] == "sick")
    status = daemon.status()
    assert "tier disk is sick: EIO" in status["problems"]
    assert disk_of(daemon)["counters"]["failures"]["EIO"] >= 8
    got = engine.fetch(prompt("a", 8))
    assert (got["loaded"], got["foreign"], got["tiers"]) == (8, 0, [1] * 8)
    rules.set()
    eventually(lambda: disk_of(daemon)["state"] == "ok")
    engine.store(prompt("b", 8))
    eventually(lambda: disk_of(daemon)["blocks"] >= 8)
    daemon.restart()
    got = eventually(lambda: fetched(engine, prompt("b", 8)))
    assert (got["loaded"], got["foreign"]) == (8, 0)


def test_flipped_bits_on_the_way_up_are_misses_that_are_counted(start_daemon, start_engine, rules):
    daemon = start_daemon(command=rules.command)
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    daemon.restart()
    rules.set("read slab-* flip 0")
    got = eventually(lambda: fetched(engine, prompt("a", 8)))
    assert (got["matched"], got["foreign"]) == (8, 0)
    assert got["loaded"] < 8
    assert disk_of(daemon)["counters"]["misses"]["payload checksum"] >= 1
    assert engine.fetch(prompt("a", 8))["matched"] < 8
    rules.set()


def test_two_directories_are_striped_shown_apart_and_survive_one_that_vanishes(start_daemon, start_engine, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    daemon = start_daemon(disk=f"{first}, {second}", disk_write_policy="through", dram="8MiB", dram_slab="1MiB")
    engine = start_engine(daemon)
    for number in range(PROMPTS):
        engine.store(prompt(f"p{number}", BLOCK_COUNT))
        eventually(lambda n=number: disk_of(daemon)["blocks"] == (n + 1) * BLOCK_COUNT)
    drives = disk_of(daemon)["drives"]
    assert [drive["directory"] for drive in drives] == [str(first), str(second)]
    assert all(drive["used"] >= BLOCK_COUNT for drive in drives)
    second.rename(tmp_path / "away")
    eventually(lambda: disk_of(daemon)["state"] == "sick")
    assert disk_of(daemon)["reason"].startswith(f"{second}: its path leads elsewhere")
    loaded = 0
    for number in range(PROMPTS):
        got = engine.fetch(prompt(f"p{number}", BLOCK_COUNT))
        assert got["foreign"] == 0
        loaded += got["loaded"]
    assert loaded >= BLOCK_COUNT
    assert not second.exists()
    (tmp_path / "away").rename(second)
    eventually(lambda: disk_of(daemon)["state"] == "ok")
    assert sum(engine.fetch(prompt(f"p{number}", BLOCK_COUNT))["loaded"] for number in range(PROMPTS)) > loaded
    (held,) = daemon.status()["namespaces"]
    assert held["disk_blocks"] == disk_of(daemon)["blocks"]
    assert held["disk_bytes"] == disk_of(daemon)["used"]


def test_a_file_system_that_others_fill_takes_room_from_the_oldest_blocks(start_daemon, start_engine, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", mount], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        daemon = start_daemon(disk=str(mount / "disk"), disk_size="64MiB", disk_reserve="4MiB",
                              disk_write_policy="through", dram="8MiB", dram_slab="1MiB")  # fmt: skip
        engine = start_engine(daemon)
        for number in range(40):
            engine.store(prompt(f"p{number}", BLOCK_COUNT))
        eventually(lambda: disk_of(daemon)["used"] > 16 << 20)
        assert any("disk.capacity 64 MiB is more than" in problem for problem in daemon.status()["problems"])
        (mount / "others").write_bytes(bytes(3 << 20))
        eventually(lambda: free_on(mount) >= (4 << 20) - (1 << 20))
        disk = disk_of(daemon)
        assert disk["state"] == "ok"
        assert disk["used"] <= disk["limit"]
        assert daemon.status()["counters"]["disk_trimmed_blocks"] > 0
        got = engine.fetch(prompt("p39", BLOCK_COUNT))
        assert (got["loaded"], got["foreign"]) == (BLOCK_COUNT, 0)
        assert daemon.check() == []
        assert daemon.stop() == 0
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def free_on(path):
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize


@pytest.mark.parametrize("rule", ["write slab-* torn_kill 3", "sync journal-* late_kill 2"])
def test_a_daemon_that_dies_inside_a_system_call_serves_all_that_was_durable(start_daemon, start_engine, rules, rule):
    daemon = start_daemon(command=rules.command, disk_write_policy="through")
    engine = start_engine(daemon, timeout=1.0)
    engine.store(prompt("a", 8))
    eventually(lambda: disk_of(daemon)["blocks"] == 8)
    rules.set(rule)
    for number in range(20):
        try:
            engine.store(prompt(f"b{number}", 4))
        except EngineError:
            break
        time.sleep(0.02)
    assert daemon.process.wait(10) == -signal.SIGKILL
    daemon.process = None
    rules.set_quietly()
    daemon.start()
    assert daemon.status()["recovered"]["blocks"] >= 8
    got = eventually(lambda: fetched(engine, prompt("a", 8)))
    assert (got["loaded"], got["foreign"]) == (8, 0)
    for number in range(20):
        assert engine.fetch(prompt(f"b{number}", 4))["foreign"] == 0
