"""Pages between an array and a real daemon, without an engine: what each job's end says is true of its bytes."""

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from conftest import DaemonProcess

from kvcascade.connectors.pages import GROUP, HASH, Done, Job, Mover, Question, Run
from kvcascade.daemon.attachment import Load, Session
from kvcascade.tiers.block import TAGGED, KVGroup, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace

ROW = 64 << 10
PATIENCE_S = 30.0


class LateSession(Session):
    """Something happens between the daemon's answer to a load and the copy."""

    between: Callable[[int], None] = staticmethod(lambda lease: None)

    def load(self, lease: int, count: int, **options: Any) -> Load:
        located = super().load(lease, count, **options)
        self.between(lease)
        return located


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
