"""Pages between an array and a real daemon, without an engine: what each job's end says is true of its bytes."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import DaemonProcess

from kvcascade.connectors.pages import GROUP, HASH, WAITERS, Done, Job, Mover, Question, Run
from kvcascade.daemon.attachment import Load, Lookup, MappedPool, Reservation, Session
from kvcascade.tiers.block import TAGGED, KVGroup, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace

ROW = 64 << 10
PATIENCE_S = 30.0


class LateSession(Session):
    """Something happens between the daemon's answer and the copy, or within the copy, once its bytes have moved."""

    between: Callable[[int], None] = staticmethod(lambda lease: None)
    within: Callable[[], None] = staticmethod(lambda: None)

    def load(self, lease: int, count: int, **options: Any) -> Load:
        located = super().load(lease, count, **options)
        self.between(lease)
        return located

    def reserve(self, *arguments: Any, **options: Any) -> Reservation:
        reserved = super().reserve(*arguments, **options)
        self.between(reserved.lease)
        return reserved

    @contextmanager
    def copying(self, *held: Load | Reservation) -> Iterator[Mapping[int, MappedPool]]:
        with super().copying(*held) as pools:
            yield pools
            self.within()


def session(daemon: DaemonProcess, kind: type[Session] = Session) -> Session:
    root = none_hash("0")
    group = KVGroup(block_tokens=16, layers=ROW // 4096, kv_heads=1, head_dim=4096, kind="pages")
    namespace = Namespace(
        model="m", weights_epoch="", kv_dtype="uint8", groups=(group,), kv_scales="", rope="", max_model_len=0,
        quantisation="", producer="test", hash_algo="sha256_cbor", key_scheme=TAGGED, none_hash=root,
    )  # fmt: skip
    probe = probe_hashes(algo="sha256_cbor", none_hash=root, key_scheme=TAGGED)
    return kind(namespace=namespace.to_map(), probe=probe, engine=("test", "1"), socket_path=daemon.socket, timeout=5.0)


def keys(name: str, count: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name} {place}".encode()).digest() + bytes(GROUP) for place in range(count))


def pattern(key: bytes) -> npt.NDArray[np.uint8]:
    return np.resize(np.frombuffer(key[:HASH], np.uint8), ROW)


def ended(mover: Mover) -> Done:
    deadline = time.monotonic() + PATIENCE_S
    while not mover.results:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return mover.results.popleft()


def store(mover: Mover, rows: npt.NDArray[np.uint8], names: tuple[bytes, ...]) -> Done:
    for place, key in enumerate(names):
        rows[place] = pattern(key)
    chain = b"".join(key[:HASH] for key in names)
    mover.store(Job(1, names, runs=(Run(0, chain, 0, tuple(range(len(names)))),)))
    return ended(mover)


def test_what_was_stored_is_loaded_and_what_was_not_is_named(daemon: DaemonProcess) -> None:
    rows = np.zeros((16, ROW), np.uint8)
    mover = Mover(session(daemon), rows, {0: 0}, 5.0, 5.0)
    mine = keys("a", 8)
    assert store(mover, rows, mine).success
    rows[:] = 0
    strange = keys("b", 1)
    mover.load(Job(2, (mine[5], *strange, mine[2]), chunks=(9, 10, 11)))
    done = ended(mover)
    assert (done.job_id, done.success, done.good, done.nbytes) == (2, False, (mine[5], mine[2]), 2 * ROW)
    assert (rows[9] == pattern(mine[5])).all() and (rows[11] == pattern(mine[2])).all()
    assert not rows[:9].any() and not rows[10].any() and not rows[12:].any()
    mover.close()


def test_a_slot_that_was_handed_on_before_the_copy_is_a_failed_load(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    """The generation is compared after the copy: a lease that ended in the meantime protects nothing."""
    daemon = start_daemon(dram="8MiB", disk="", disk_size="")
    late, rows, others = session(daemon, LateSession), np.zeros((64, ROW), np.uint8), np.zeros((64, ROW), np.uint8)
    mover, other = Mover(late, rows, {0: 0}, 5.0, 5.0), Mover(session(daemon), others, {0: 0}, 5.0, 5.0)
    mine = keys("a", 8)
    assert store(mover, rows, mine).success

    def hand_on(lease: int) -> None:
        late.release(lease)
        for name in range(6):
            store(other, others, keys(f"other {name}", 60))

    late.between = hand_on  # type: ignore[attr-defined]
    mover.load(Job(2, mine, chunks=tuple(range(20, 28))))
    done = ended(mover)
    assert (done.success, done.good) == (False, ())
    mover.close()
    other.close()


@pytest.mark.parametrize("moment", ["between", "within"])
def test_a_daemon_that_is_killed_around_a_copy_fails_the_load_once(daemon: DaemonProcess, moment: str) -> None:
    """E1: the next daemon may have taken the memory over, so what was copied proves nothing."""
    late, rows = session(daemon, LateSession), np.zeros((32, ROW), np.uint8)
    mover = Mover(late, rows, {0: 0}, 5.0, 5.0)
    mine = keys("a", 8)
    assert store(mover, rows, mine).success
    once = iter([daemon.kill])
    setattr(late, moment, lambda *_: next(once, lambda: None)())
    mover.load(Job(2, mine, chunks=tuple(range(20, 28))))
    done = ended(mover)
    assert (done.job_id, done.success, done.good) == (2, False, ())
    daemon.start()
    works_again(mover, rows)
    assert not mover.results
    mover.close()


@pytest.mark.parametrize("moment", ["between", "within"])
def test_a_daemon_that_is_killed_around_a_copy_has_stored_nothing(daemon: DaemonProcess, moment: str) -> None:
    late, rows = session(daemon, LateSession), np.zeros((32, ROW), np.uint8)
    mover = Mover(late, rows, {0: 0}, 5.0, 5.0)
    late.attach()
    once = iter([daemon.kill])
    setattr(late, moment, lambda *_: next(once, lambda: None)())
    done = store(mover, rows, keys("a", 8))
    assert (done.success, done.good) == (False, ())
    daemon.start()
    works_again(mover, rows)
    mover.load(Job(3, keys("a", 8), chunks=tuple(range(8))))
    assert ended(mover).good == ()
    mover.close()


def works_again(mover: Mover, rows: npt.NDArray[np.uint8]) -> None:
    """Asked as long as the daemon is left alone, it stores and loads byte for byte."""
    deadline = time.monotonic() + PATIENCE_S
    mine = keys("again", 4)
    while not store(mover, rows, mine).success:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rows[:] = 0
    mover.load(Job(9, mine, chunks=(3, 2, 1, 0)))
    assert ended(mover).good == mine
    assert all((rows[3 - place] == pattern(key)).all() for place, key in enumerate(mine))


def given_back(daemon: DaemonProcess) -> bool:
    """Whether no slot waits for a writer any more."""
    status = daemon.status()
    quarantined = sum(session.get("quarantined", 0) for session in status["sessions"])
    return not status["index"]["blocks"] and not quarantined


def test_slots_that_were_taken_back_before_the_copy_are_written_by_nobody(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    """A6: a store that comes too late for its reservation is dropped, and what others stored there stays true."""
    daemon = start_daemon(dram="8MiB", disk="", disk_size="", leases_reservation="2s")
    late, rows, others = session(daemon, LateSession), np.zeros((64, ROW), np.uint8), np.zeros((64, ROW), np.uint8)
    mover, other = Mover(late, rows, {0: 0}, 5.0, 5.0), Mover(session(daemon), others, {0: 0}, 5.0, 5.0)

    def hand_on(lease: int) -> None:
        late.between = lambda lease: None  # type: ignore[attr-defined]
        deadline = time.monotonic() + PATIENCE_S
        while not given_back(daemon):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for name in range(6):
            assert store(other, others, keys(f"other {name}", 30)).success

    late.between = hand_on  # type: ignore[attr-defined]
    done = store(mover, rows, keys("a", 8))
    assert (done.success, done.good) == (False, ())
    theirs = keys("other 5", 30)
    others[:] = 0
    other.load(Job(2, theirs, chunks=tuple(range(30))))
    assert ended(other).good == theirs
    assert all((others[place] == pattern(key)).all() for place, key in enumerate(theirs))
    mover.load(Job(3, keys("a", 8), chunks=tuple(range(8))))
    assert ended(mover).good == ()
    mover.close()
    other.close()


def test_a_job_that_comes_after_the_end_fails_once(daemon: DaemonProcess) -> None:
    rows = np.zeros((16, ROW), np.uint8)
    mover = Mover(session(daemon), rows, {0: 0}, 5.0, 5.0)
    mover.close()
    mover.load(Job(1, keys("a", 2), chunks=(0, 1)))
    mover.store(Job(2, keys("a", 2), runs=()))
    assert [(done.job_id, done.success) for done in mover.results] == [(1, False), (2, False)]


def test_draining_waits_for_the_copy_that_runs(daemon: DaemonProcess) -> None:
    late, rows = session(daemon, LateSession), np.zeros((16, ROW), np.uint8)
    mover = Mover(late, rows, {0: 0}, 5.0, 5.0)
    mine = keys("a", 4)
    assert store(mover, rows, mine).success
    begun = threading.Event()

    def linger(lease: int) -> None:
        begun.set()
        time.sleep(0.5)

    late.between = linger  # type: ignore[attr-defined]
    mover.load(Job(2, mine, chunks=(8, 9, 10, 11)))
    assert begun.wait(PATIENCE_S)
    mover.drain()
    assert mover.results.popleft().success
    rows[:] = 0xA5
    time.sleep(0.2)
    assert (rows == 0xA5).all()
    mover.close()


class SlowSession(Session):
    """Of the chain whose first hash is `slow` nothing is in memory, and who may wait for it does until it is let go."""

    slow = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.leases: set[int] = set()
        self.waiting: set[int] = set()
        self.go = threading.Event()

    def lookup(self, hashes: Any, **options: Any) -> Lookup:
        answer = super().lookup(hashes, **options)
        if self.slow and hashes.startswith(self.slow):
            self.leases.add(answer.lease)
        return answer

    def load(self, lease: int, count: int, *, wait_ms: int = 0, timeout: float | None = None) -> Load:
        if lease not in self.leases:
            return super().load(lease, count, wait_ms=wait_ms, timeout=timeout)
        if wait_ms:
            self.waiting.add(lease)
            assert self.go.wait(PATIENCE_S)
        return super().load(lease, count if wait_ms else 0, timeout=timeout)


def test_what_is_in_memory_is_loaded_however_many_wait_for_a_drive(daemon: DaemonProcess) -> None:
    # Invariant 3: DRAM never waits for disk. As many loads wait as can, and two more are queued behind them.
    slow, rows = session(daemon, SlowSession), np.zeros((64, ROW), np.uint8)
    mover = Mover(slow, rows, {0: 0}, 60.0, 5.0)
    hanging, here = keys("a", 2), keys("b", 4)
    assert store(mover, rows, hanging).success and store(mover, rows, here).success
    rows[:] = 0
    slow.slow = hanging[0][:HASH]  # type: ignore[attr-defined]
    for number in range(WAITERS + 2):
        mover.load(Job(10 + number, hanging, chunks=(2 * number, 2 * number + 1)))
    deadline = time.monotonic() + PATIENCE_S
    while len(slow.waiting) < WAITERS:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    mover.load(Job(2, here, chunks=(60, 61, 62, 63)))
    done = ended(mover)
    assert (done.job_id, done.success, done.good) == (2, True, here)
    assert all((rows[60 + place] == pattern(key)).all() for place, key in enumerate(here))
    slow.go.set()  # type: ignore[attr-defined]
    late = [ended(mover) for _ in range(WAITERS + 2)]
    assert sorted(done.job_id for done in late) == list(range(10, 12 + WAITERS)) and all(done.success for done in late)
    assert (rows[: 2 * len(late)] == np.stack([pattern(key) for key in hanging * len(late)])).all()
    mover.close()


def test_loads_that_wait_or_are_to_wait_are_over_once_drained(daemon: DaemonProcess) -> None:
    slow, rows = session(daemon, SlowSession), np.zeros((64, ROW), np.uint8)
    mover = Mover(slow, rows, {0: 0}, 60.0, 5.0)
    mine = keys("a", 2)
    assert store(mover, rows, mine).success
    slow.slow = mine[0][:HASH]  # type: ignore[attr-defined]
    for number in range(WAITERS + 4):
        mover.load(Job(10 + number, mine, chunks=(2 * number, 2 * number + 1)))
    threading.Timer(0.3, slow.go.set).start()  # type: ignore[attr-defined]
    mover.drain()
    rows[:] = 0xA5
    assert sorted(done.job_id for done in mover.results) == list(range(10, 14 + WAITERS))
    time.sleep(0.2)
    assert (rows == 0xA5).all()
    mover.close()


def test_jobs_that_were_not_begun_fail_once_when_it_ends(daemon: DaemonProcess) -> None:
    rows = np.zeros((64, ROW), np.uint8)
    mover = Mover(session(daemon), rows, {0: 0}, 5.0, 5.0)
    for number in range(40):
        mover.load(Job(number, keys(f"{number}", 4), chunks=(0, 1, 2, 3)))
    mover.close()
    assert sorted(done.job_id for done in mover.results) == list(range(40))


def test_a_question_is_answered_for_chains_and_for_single_blocks(daemon: DaemonProcess) -> None:
    rows = np.zeros((16, ROW), np.uint8)
    mover = Mover(session(daemon), rows, {7: 0}, 5.0, 5.0)
    mine = keys("a", 6)
    store(mover, rows, mine)
    hashes = [key[:HASH] for key in mine]
    strange = keys("b", 1)[0][:HASH]
    chain = Question(1, "r", 7, b"".join([*hashes[:4], strange]), True)
    alone = Question(1, "r", 7, b"".join([hashes[3], strange, hashes[1]]), False)
    assert mover.ask([chain, alone])
    deadline = time.monotonic() + PATIENCE_S
    while len(mover.answers) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert [answer.found.tolist() for answer in mover.answers] == [[0, 1, 2, 3], [0, 2]]
    mover.close()
