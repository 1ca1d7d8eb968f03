"""Crashes under a supervisor that keeps descriptors: a small systemd of ours, and the real daemon as its service."""

import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from engines.scripted import EngineError, eventually, prompt

from kvcascade.daemon.supervisor import Supervisor

# What systemd does between fork and exec: descriptors from number 3 on, and whose they are.
WRAPPER = """
import os, sys
numbers, command = sys.argv[1], sys.argv[2:]
held = [os.dup(int(number)) for number in numbers.split(",") if number]
high = [__import__("fcntl").fcntl(one, 0, 100) for one in held]
for place, one in enumerate(high):
    os.dup2(one, 3 + place)
os.closerange(3 + len(high), 256)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(command[0], command)
"""


class Systemd:
    """Listens on a notify socket, keeps the descriptors that it is given, and gives them to the next start."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self.said: list[str] = []
        self.store: dict[str, int] = {}
        self.news = threading.Condition()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(self.path))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._sock, 4096, 16)
            if data == b"end":
                return
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            with self.news:
                name = lines.get("FDNAME", "")
                if lines.get("FDSTOREREMOVE") and name in self.store:
                    os.close(self.store.pop(name))
                if lines.get("FDSTORE"):
                    (self.store[name],) = descriptors
                self.said += data.decode().splitlines()
                self.news.notify_all()

    def wait(self, line: str) -> None:
        with self.news:
            assert self.news.wait_for(lambda: line in self.said, 20), self.said

    def adopt(self, daemon, **environment: str) -> None:
        """The daemon's next start is this supervisor's."""
        names, numbers = list(self.store), list(self.store.values())
        daemon.wrapper = [sys.executable, "-P", "-c", WRAPPER, ",".join(map(str, numbers))]
        daemon.environment = {"NOTIFY_SOCKET": str(self.path), "FDSTORE": "8", **environment}
        if numbers:
            daemon.environment |= {"LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": ":".join(names)}
        daemon.descriptors = numbers
        self.said.clear()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"end", str(self.path))
        self._thread.join()
        self._sock.close()
        for descriptor in self.store.values():
            os.close(descriptor)


@pytest.fixture
def systemd(tmp_path):
    supervisor = Systemd(tmp_path)
    yield supervisor
    supervisor.close()


@pytest.fixture
def service(daemon, systemd):
    """A daemon that runs under a supervisor."""
    assert daemon.stop() == 0
    systemd.adopt(daemon)
    daemon.start()
    systemd.wait("READY=1")
    return daemon


def crash(daemon, systemd, **flags):
    daemon.kill()
    systemd.adopt(daemon)
    daemon.start(**flags)


def sealed(daemon, blocks):
    """All blocks have their checksums."""
    return daemon.status()["kept"] == {"sealed": blocks, "unsealed": 0}


def fetched(engine, tokens):
    def fetch():
        try:
            return engine.fetch(tokens)
        except EngineError:
            return None

    return eventually(fetch)


def _attached(engine):
    try:
        return engine.attach()
    except EngineError:
        return None


def dram(daemon):
    return next(one for one in daemon.status()["tiers"] if one["name"] == "dram")


def test_it_tells_when_it_is_ready_and_when_it_ends_and_feeds_the_watchdog(daemon, systemd):
    assert daemon.stop() == 0
    systemd.adopt(daemon, WATCHDOG_USEC="300000")
    daemon.start()
    systemd.wait("READY=1")
    assert f"MAINPID={daemon.pid}" in systemd.said
    systemd.wait("WATCHDOG=1")
    assert "STOPPING=1" not in systemd.said
    assert daemon.stop() == 0
    systemd.wait("STOPPING=1")


def test_after_a_kill_the_blocks_in_dram_are_warm(service, systemd, start_engine):
    engine, other = start_engine(service), start_engine(service, model="another")
    engine.store(prompt("a", 40))
    other.store(prompt("b", 8))
    eventually(lambda: sealed(service, 48))
    for _ in range(2):
        crash(service, systemd)
        assert service.check() == []
        assert service.status()["recovered"]["taken_over"] == {"blocks": 48, "dropped": 0}
        assert fetched(engine, prompt("a", 40)) == {"matched": 40, "loaded": 40, "foreign": 0, "tiers": [1] * 40}
        assert fetched(other, prompt("b", 8)) == {"matched": 8, "loaded": 8, "foreign": 0, "tiers": [1] * 8}
    for name in range(60):
        engine.store(prompt(f"more {name}", 40))
    assert fetched(engine, prompt("more 59", 40))["foreign"] == 0


def test_an_orderly_restart_finds_them_warm_too(service, systemd, start_engine):
    engine = start_engine(service)
    engine.store(prompt("a", 16))
    eventually(lambda: sealed(service, 16))
    assert service.stop() == 0
    systemd.adopt(service)
    service.start()
    assert fetched(engine, prompt("a", 16))["tiers"] == [1] * 16


def test_a_block_whose_bytes_do_not_give_its_checksum_is_dropped_with_what_hangs_below(
    start_daemon, systemd, start_engine
):
    daemon = start_daemon(disk="")
    assert daemon.stop() == 0
    systemd.adopt(daemon)
    daemon.start()
    engine = start_engine(daemon)
    engine.store(prompt("a", 8))
    eventually(lambda: sealed(daemon, 8))
    engine.load(engine.lookup(prompt("a", 8))["lease"], 8)
    page = engine.pages()[3]
    daemon.kill()
    os.pwrite(systemd.store["kvcascade-dram"], b"another", page * 4096 + 100)
    systemd.adopt(daemon)
    daemon.start()
    assert daemon.status()["recovered"]["taken_over"] == {"blocks": 3, "dropped": 5}
    assert fetched(engine, prompt("a", 8)) == {"matched": 3, "loaded": 3, "foreign": 0, "tiers": [1] * 3}
    # The dropped ones' slots are free, and are not found by the next start either.
    crash(daemon, systemd)
    assert daemon.status()["recovered"]["taken_over"] == {"blocks": 3, "dropped": 0}


def test_slots_that_were_being_written_are_withheld_until_every_writer_is_back_or_dead(service, systemd, start_engine):
    engine, bystander = start_engine(service), start_engine(service)
    bystander.store(prompt("b", 4))
    engine.reserve(prompt("a", 8))
    engine.begin_copy()
    engine.fill(0.5)
    crash(service, systemd)
    assert dram(service)["quarantined"] == 8
    other = start_engine(service)
    for name in range(60):
        other.store(prompt(f"c {name}", 40))
    engine.fill()
    assert fetched(other, prompt("c 59", 40)) == {"matched": 40, "loaded": 40, "foreign": 0, "tiers": [1] * 40}
    # It is not known which of the two was writing there.
    engine.kill()
    assert dram(service)["quarantined"] == 8
    eventually(lambda: _attached(bystander))
    eventually(lambda: dram(service)["quarantined"] == 0)
    assert service.check() == []


def test_writers_that_died_meanwhile_withhold_nothing(service, systemd, start_engine):
    engine = start_engine(service)
    engine.reserve(prompt("a", 8))
    engine.begin_copy()
    service.kill()
    engine.kill()
    systemd.adopt(service)
    service.start()
    assert dram(service)["quarantined"] == 0
    crash(service, systemd)
    assert dram(service)["quarantined"] == 0


def test_a_load_in_mid_copy_is_not_trusted_after_the_crash(service, systemd, start_engine):
    engine = start_engine(service)
    engine.store(prompt("a", 8))
    assert engine.load(engine.lookup(prompt("a", 8))["lease"], 8) == 8
    engine.read_slowly(prompt("a", 8))
    crash(service, systemd)
    other = start_engine(service)
    for name in range(80):
        other.store(prompt(f"b {name}", 40))
    judged = engine.read_on(prompt("a", 8))
    assert (judged["intact"], judged["foreign"]) == ([], [])


def test_other_settings_let_the_old_pool_go(service, systemd, start_engine):
    engine = start_engine(service)
    engine.store(prompt("a", 8))
    eventually(lambda: sealed(service, 8))
    crash(service, systemd, dram_slab="8MiB")
    assert "taken_over" not in service.status()["recovered"]
    assert fetched(engine, prompt("a", 8))["loaded"] == 0
    engine.store(prompt("a", 8))
    eventually(lambda: sealed(service, 8))
    crash(service, systemd)
    assert service.status()["recovered"]["taken_over"]["blocks"] == 8


def test_garbage_in_the_store_starts_cold(service, systemd, start_engine):
    for name in ("kvcascade-dram", "kvcascade-ledger"):
        service.kill()
        os.close(systemd.store[name])
        systemd.store[name] = os.memfd_create("garbage", os.MFD_ALLOW_SEALING)
        systemd.adopt(service)
        service.start()
        assert "taken_over" not in service.status()["recovered"]
        assert service.check() == []


def test_the_environment_is_read_once_and_leaves_nothing_for_children():
    environ = {"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "0", "WATCHDOG_USEC": "x", "LISTEN_FDS": "2",
               "LISTEN_PID": "1", "LISTEN_FDNAMES": "a:b", "HOME": "/"}  # fmt: skip
    supervisor = Supervisor(environ)
    assert environ == {"HOME": "/"}
    assert (supervisor.kept, supervisor.keeps_descriptors, supervisor.watchdog_s) == ({}, False, None)
    supervisor.notify("READY=1")  # nobody listens: logged, no more


def test_a_daemon_that_took_over_is_kept_like_any_other(service, systemd, start_engine):
    engine = start_engine(service)
    engine.store(prompt("a", 16))
    writer = start_engine(service)
    writer.reserve(prompt("b", 8))
    writer.begin_copy()
    old = service.process
    systemd.adopt(service)
    service.wrapper, service.descriptors = [], []
    service.environment = {"NOTIFY_SOCKET": str(systemd.path), "FDSTORE": "8"}
    service.start_takeover()
    assert old.wait(20) == 0
    systemd.wait(f"MAINPID={service.pid}")
    assert "STOPPING=1" not in systemd.said
    assert fetched(engine, prompt("a", 16))["tiers"] == [1] * 16
    engine.store(prompt("c", 8))
    eventually(lambda: sealed(service, 24))
    crash(service, systemd)
    assert fetched(engine, prompt("a", 16))["tiers"] == [1] * 16
    assert fetched(engine, prompt("c", 8))["tiers"] == [1] * 8
    # What was withheld by the takeover is withheld still.
    assert dram(service)["quarantined"] == 8
    writer.kill()
    eventually(lambda: dram(service)["quarantined"] == 0)


def test_kills_under_load_never_bring_back_a_byte_that_is_not_its_own(start_daemon, systemd, start_engine):
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB", disk_size="64MiB", leases_reservation="500ms")
    assert daemon.stop() == 0
    systemd.adopt(daemon)
    daemon.start()
    engines = [start_engine(daemon, timeout=1.0) for _ in range(2)]
    chance = random.Random(7)
    warm = 0
    for round_ in range(5):
        for number, engine in enumerate(engines):
            engine.begin("work", 1.0, 24, 24, 10 * round_ + number)
        time.sleep(chance.uniform(0.2, 0.9))  # the moment is the point
        crash(daemon, systemd)
        warm += daemon.status()["recovered"]["taken_over"]["blocks"]
        told = [engine.result() for engine in engines]
        assert [one["foreign"] for one in told] == [0, 0]
        assert daemon.check() == []
    assert warm > 0
    for name in range(24):
        assert fetched(engines[0], prompt(f"prompt {name}", 24))["foreign"] == 0
    eventually(lambda: _attached(engines[1]))
    eventually(lambda: dram(daemon)["quarantined"] == 0)
