"""Many rounds of kills at random moments: whatever dies, no engine is ever given a byte that is not its own."""

import os
import random
import signal
import time

import pytest
from engines.scripted import EngineDied, EngineError, eventually, prompt

ENGINES = 3
NAMES, BLOCKS = 24, 24  # 24 prompts of up to 24 blocks: 18 MiB of 32 KiB blocks, more than DRAM holds
ROUND_S = 1.0
ROUNDS = int(os.environ.get("KVC_STRESS_ROUNDS", "4"))


@pytest.fixture
def chance(request):
    """A source of chance that is told when the test fails."""
    seed = int(os.environ.get("KVC_STRESS_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVC_STRESS_SEED={seed}")
    return random.Random(seed)


def all_at_rest(daemon):
    status = daemon.status()
    dram = next(tier for tier in status["tiers"] if tier["name"] == "dram")
    return not (status["leases"]["live"] or dram["quarantined"] or dram["pinned"])


def harvest(engines):
    """Ends the round of every engine that lives; the sums of what they tell."""
    told = {"fetched": 0, "stored": 0, "foreign": 0, "failed": 0}
    for engine in engines:
        for name, count in engine.result().items():
            told[name] += count
    return told


def run(start_daemon, start_engine, chance, rounds, victims):
    daemon = start_daemon(dram="8MiB", dram_slab="1MiB", disk_size="64MiB", leases_reservation="500ms",
                          leases_lookup="2s", daemon_drain_deadline="5s")  # fmt: skip
    engines = [start_engine(daemon, timeout=1.0) for _ in range(ENGINES)]
    fetched = 0
    for round_ in range(rounds):
        for engine in engines:
            engine.begin("work", ROUND_S, NAMES, BLOCKS, chance.randrange(1 << 32))
        victim = chance.choice(victims)
        time.sleep(chance.uniform(0.1, ROUND_S))  # the moment is the point
        if victim == "daemon":
            daemon.kill()
            daemon.start()
        elif victim == "engine":
            number = chance.randrange(ENGINES)
            engines[number].kill()
            engines[number] = start_engine(daemon, timeout=1.0)
            engines[number].begin("work", 0.2, NAMES, BLOCKS, round_)
        elif victim == "stopped engine":
            # Stopped in the middle of whatever it does, past its reservation's end, and woken again.
            stopped = chance.choice(engines)
            stopped.freeze()
            time.sleep(chance.uniform(0.1, 1.0))
            stopped.wake()
        elif victim == "stopped daemon":
            os.kill(daemon.pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 1.5))
            os.kill(daemon.pid, signal.SIGCONT)
        told = harvest(engines)
        assert told["foreign"] == 0, f"round {round_}, {victim}: {told}"
        assert daemon.check() == [], f"round {round_}, {victim}"
        fetched += told["fetched"]
    eventually(lambda: all_at_rest(daemon))
    assert fetched > 0
    # What lies on disk after all this is whole, too.
    daemon.restart()
    for engine in engines:
        eventually(lambda engine=engine: _attached(engine))
    for name in range(NAMES):
        got = engines[name % ENGINES].fetch(prompt(f"prompt {name}", BLOCKS))
        assert got["foreign"] == 0
    assert "counters" in daemon.status()
    assert daemon.status()["counters"].get("internal_errors", 0) == 0


def _attached(engine):
    try:
        return engine.attach()
    except (EngineError, EngineDied):
        return None


def test_a_few_kills_of_everything(start_daemon, start_engine, chance):
    run(start_daemon, start_engine, chance, 5, ["daemon", "engine", "stopped engine", "stopped daemon"])


@pytest.mark.stress
@pytest.mark.timeout(60 + 6 * ROUNDS)
@pytest.mark.parametrize("victim", ["daemon", "engine", "stopped engine", "stopped daemon"])
def test_many_kills_of_one_kind(start_daemon, start_engine, chance, victim):
    run(start_daemon, start_engine, chance, ROUNDS, [victim])


@pytest.mark.stress
@pytest.mark.timeout(60 + 12 * ROUNDS)
def test_many_kills_of_everything(start_daemon, start_engine, chance):
    run(start_daemon, start_engine, chance, 2 * ROUNDS, ["daemon", "engine", "stopped engine", "stopped daemon"])
