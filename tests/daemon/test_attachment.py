"""A session: pools mapped safely, copies counted, fences answered in time, re-attachment that blocks nobody."""

import fcntl
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvcascade.config.errors import DaemonUnavailable, ProtocolError, Refused
from kvcascade.daemon.attachment import Committed, Load, MappedPool, Session
from kvcascade.daemon.protocol import PAGE, encode_error, pack_u8, pack_u32, pack_u64

pytestmark = pytest.mark.usefixtures("nothing_leaks")

PATIENCE_S = 10.0
PAGES = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def silence(wire, correlation, body):
    """Never answer."""


def sealed_memory(size, seals=SEALS):
    fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def readonly(fd):
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class Pool:
    """The daemon's side of a pool."""

    def __init__(self, size=PAGES * PAGE, table=PAGES * 4, seals=SEALS):
        self.memory = sealed_memory(size, seals)
        self.generations = sealed_memory(table, seals)
        self.readonly = readonly(self.generations)

    def generation(self, page, value):
        os.pwrite(self.generations, pack_u32([value]), page * 4)

    def close(self):
        for fd in (self.memory, self.generations, self.readonly):
            os.close(fd)


class Boot:
    """Answers attach as a daemon does; a new one is a new boot."""

    def __init__(self, number=1):
        self.boot = bytes([number]) * 16
        self.pools = [Pool()]
        self.sessions = 0
        self.claimed = None
        self.device = "cpu"

    def attach(self, wire, cid, body):
        self.sessions += 1
        described = [
            {"id": i, "tier": "dram", "device": self.device, "bytes": self.claimed or PAGES * PAGE}
            for i in range(len(self.pools))
        ]
        reply = {
            "boot": self.boot,
            "session": self.boot[:8] + self.sessions.to_bytes(8, "big"),
            "attachment": b"a" * 16,
            "namespace": b"n" * 32,
            "pools": described,
            "warnings": ["another seed"],
            "lease_ms": 1000,
        }
        wire.reply(cid, reply, [fd for pool in self.pools for fd in (pool.memory, pool.readonly)])

    def close(self):
        for pool in self.pools:
            pool.close()


@pytest.fixture
def boot(scripted):
    boot = Boot()
    scripted.handlers["attach"] = boot.attach
    yield boot
    boot.close()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def session(scripted, boot, clock):
    session = Session(
        namespace={"model": "m"},
        probe=[b"p" * 32, b"q" * 32],
        engine=("test", "1"),
        socket_path=scripted.path,
        timeout=PATIENCE_S,
        clock=clock,
    )
    yield session
    session.close()


def reservation(session, lease=5, pages=(2,), generations=None):
    from kvcascade.daemon.attachment import Reservation

    count = len(pages)
    return Reservation(
        session.info.boot,
        lease,
        0,
        np.ones(count, np.uint8),
        np.arange(count, dtype=np.uint32),
        np.zeros(count, np.uint8),
        np.array(pages, np.uint32),
        np.array(generations or [0] * count, np.uint32),
        None,
    )


def fence(scripted, number, *leases):
    scripted.run(scripted.wires[-1].event, "fence", {"fence": number, "leases": pack_u64(leases)})


def answered(scripted):
    return [body["fence"] for body in scripted.asked("fenced")]


def until_lost(session):
    end = time.monotonic() + PATIENCE_S
    while session.attached:
        assert time.monotonic() < end
        time.sleep(0.002)


# --------------------------------------------------------------------------------------------------------- attaching


def test_the_first_operation_attaches_and_says_who_we_are(scripted, session):
    session.failed(1, [2])
    (hello,) = scripted.asked("attach")
    assert hello["namespace"] == {"model": "m"}
    assert hello["probe"] == b"p" * 32 + b"q" * 32
    assert (hello["protocol"], hello["role"], hello["pid"]) == (1, "engine", os.getpid())
    assert "resume" not in hello
    assert session.info.warnings == ("another seed",)


def test_pools_are_mapped_shared_and_generations_cannot_be_written(scripted, boot, session):
    session.attach()
    with session.copying() as pools:
        pools[0].slot(3, 5)[:] = np.frombuffer(b"bytes", np.uint8)
        assert os.pread(boot.pools[0].memory, 5, 3 * PAGE) == b"bytes"
        boot.pools[0].generation(3, 77)
        assert pools[0].generations[3] == 77
        with pytest.raises(ValueError, match="read-only"):
            pools[0].generations[3] = 1
        for page, nbytes in ((PAGES, 1), (PAGES - 1, PAGE + 1), (2**32 - 1, 1), (0, -1)):
            with pytest.raises(ProtocolError, match="outside"):
                pools[0].slot(page, nbytes)


def lying_size(boot):
    boot.claimed = 2 * PAGES * PAGE


def short_table(boot):
    boot.pools.append(Pool(table=PAGES * 4 - 4))


def unsealed(boot):
    boot.pools.append(Pool(seals=fcntl.F_SEAL_GROW))


def no_memfd(boot):
    boot.pools.append(Pool())
    os.close(boot.pools[1].memory)
    boot.pools[1].memory = os.open("/dev/zero", os.O_RDWR)


@pytest.mark.parametrize(
    ("lie", "names"),
    [
        (lying_size, "were announced"),
        (short_table, "generations of pool 1"),
        (unsealed, "not sealed"),
        (no_memfd, "memory of pool 1"),
    ],
)
def test_memory_that_is_not_as_announced_is_refused_before_it_is_mapped(boot, session, lie, names):
    lie(boot)
    with pytest.raises(ProtocolError, match=names):
        session.attach()
    assert not session.attached


def test_memory_of_a_gpu_is_left_to_who_can_import_it(boot, session):
    boot.device = "cuda:0"
    session.attach()
    pool = session.pools[0]
    assert os.fstat(pool.fd).st_ino == os.fstat(boot.pools[0].memory).st_ino
    assert pool.generations[0] == 0
    with pytest.raises(ProtocolError, match="not mapped here"):
        pool.array()


def test_a_refused_attach_says_why_and_is_not_repeated_before_its_time(scripted, session, clock):
    scripted.handlers["attach"] = lambda wire, cid, body: wire.raw(encode_error(cid, Refused("seed '0' is not '1'")))
    with pytest.raises(Refused, match="seed '0'"):
        session.failed(1, [2])
    with pytest.raises(DaemonUnavailable, match="seed '0'"):
        session.failed(1, [2])
    assert len(scripted.asked("attach")) == 1


def test_closed_memory_goes_with_the_last_view(scripted, boot, session):
    session.attach()
    pool = session.pools[0]
    view = pool.slot(1, PAGE)
    mapping = weakref.ref(view.base if view.base is not None else view)
    session.close()
    view[:] = 7
    assert os.pread(boot.pools[0].memory, 1, PAGE) == b"\x07"
    with pytest.raises(ProtocolError):
        pool.array()
    del view
    gc.collect()
    assert mapping() is None
    inode = str(os.fstat(boot.pools[0].memory).st_ino)
    assert not any(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


# -------------------------------------------------------------------------------------------------------- operations


def test_operations_return_what_the_daemon_said_as_arrays(scripted, session):
    h = scripted.handlers
    h["lookup"] = lambda wire, cid, body: wire.reply(
        cid, {"lease": 9, "matched": 3, "ready": 2, "tiers": pack_u8([1, 1, 2]), "deadline_ms": 500}
    )
    h["load"] = lambda wire, cid, body: wire.reply(
        cid, {"count": 2, "pools": pack_u8([0, 0]), "pages": pack_u32([4, 5]), "generations": pack_u32([6, 7])}
    )
    h["reserve"] = lambda wire, cid, body: wire.reply(
        cid,
        {
            "lease": 10,
            "states": pack_u8([0, 1, 2, 1, 3]),
            "pools": pack_u8([0, 0]),
            "pages": pack_u32([1, 2]),
            "generations": pack_u32([0, 0]),
        },
    )
    h["commit"] = lambda wire, cid, body: wire.reply(cid, {"ready": 1, "gone": 1})
    hashes = [b"h" * 32] * 8
    found = session.lookup(hashes, request="r1")
    assert (found.lease, found.matched, found.ready, found.tiers.tolist(), found.deadline_ms) == (
        9,
        3,
        2,
        [1, 1, 2],
        500,
    )
    load = session.load(9, 3, wait_ms=10)
    assert (load.count, load.pages.tolist(), load.generations.tolist()) == (2, [4, 5], [6, 7])
    got = session.reserve(hashes, request="r1", start=3, tokens=np.arange(10, dtype=np.int64))
    assert (got.lease, got.blocks.tolist(), got.pages.tolist(), got.hole) == (10, [4, 6], [1, 2], None)
    assert session.commit(10, got.blocks) == Committed(ready=1, gone=1)
    session.abort(10, [6])
    session.abort(10)
    session.release([9, 10])
    session.release(11)
    assert scripted.asked("lookup")[0]["hashes"] == b"h" * 256
    assert scripted.asked("reserve")[0]["tokens"] == pack_u32(range(10))
    assert scripted.asked("commit")[0]["blocks"] == pack_u32([4, 6])
    assert [body["blocks"] for body in scripted.asked("abort")] == [pack_u32([6]), b""]
    assert [body["leases"] for body in scripted.asked("release")] == [pack_u64([9, 10]), pack_u64([11])]


def test_waiting_for_promotion_never_outlasts_the_timeout(scripted, session):
    scripted.handlers["load"] = lambda wire, cid, body: wire.reply(cid, {"count": 0})
    session.load(1, 1, wait_ms=10**9, timeout=2.0)
    assert scripted.asked("load")[0]["wait_ms"] <= 1950


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"lease": 1, "matched": 2, "ready": 3, "tiers": b"\0\0"},
        {"lease": 1, "matched": 2, "ready": 0, "tiers": b""},
        {"lease": -1, "matched": 0, "ready": 0},
    ],
)
def test_a_reply_that_contradicts_itself_is_a_protocol_error(scripted, session, reply):
    scripted.handlers["lookup"] = lambda wire, cid, body: wire.reply(cid, reply)
    with pytest.raises(ProtocolError, match="field"):
        session.lookup(b"", request="r")


def test_releasing_without_a_daemon_is_not_an_error_and_does_not_look_for_one(scripted, session):
    session.release(1)
    session.abort(1)
    assert scripted.asked("attach") == []
    session.attach()
    scripted.handlers["release"] = silence
    session.release(1, timeout=0.05)


# --------------------------------------------------------------------------------------------------- copies and fences


def test_a_fence_is_answered_at_once_while_nothing_is_copied(scripted, session):
    session.attach()
    fence(scripted, 1, 5)
    scripted.wait(lambda it: answered(it) == [1])


def test_a_fence_waits_for_the_copies_begun_before_it_and_for_no_other(scripted, session):
    session.attach()
    with session.copying(reservation(session, lease=5)):
        with session.copying():
            fence(scripted, 1, 5)
            # The session has seen it once it refuses a copy into the fenced lease.
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                try:
                    with session.copying(reservation(session, lease=5)):
                        time.sleep(0.005)
                except Refused:
                    break
            later = session.copying(reservation(session, lease=6))
            later.__enter__()
            assert answered(scripted) == []
        session.failed(1, [1])
        assert answered(scripted) == []
    scripted.wait(lambda it: answered(it) == [1])
    later.__exit__(None, None, None)
    session.failed(1, [1])
    assert answered(scripted) == [1]


def test_what_was_fenced_is_never_copied_into_again(scripted, session):
    session.attach()
    fence(scripted, 1, 5)
    scripted.wait(lambda it: answered(it) == [1])
    with pytest.raises(Refused, match="fenced"), session.copying(reservation(session, lease=5)):
        pytest.fail("entered")
    with session.copying(reservation(session, lease=6)):
        pass


def test_a_slot_that_was_handed_on_is_not_written(scripted, boot, session):
    session.attach()
    held = reservation(session, pages=(2, 3), generations=[0, 0])
    with session.copying(held):
        pass
    boot.pools[0].generation(3, 1)
    with pytest.raises(Refused, match="handed on"), session.copying(held):
        pytest.fail("entered")
    fence(scripted, 1, 9)
    scripted.wait(lambda it: answered(it) == [1])


def test_a_reader_sees_which_slots_changed_under_its_copy(scripted, boot, session):
    # A13
    session.attach()
    load = Load(
        session.info.boot, 1, 3, np.zeros(3, np.uint8), np.array([1, 2, 2**32 - 1], np.uint32), np.zeros(3, np.uint32)
    )
    with session.copying(load):
        boot.pools[0].generation(2, 1)
    assert session.intact(load).tolist() == [True, False, False]


def test_a_copy_that_raises_ends_like_any_other(scripted, session):
    session.attach()
    with pytest.raises(ZeroDivisionError), session.copying():
        raise ZeroDivisionError
    fence(scripted, 1, 5)
    scripted.wait(lambda it: answered(it) == [1])


# ------------------------------------------------------------------------------------------------------ re-attachment


def test_after_a_restart_the_next_use_attaches_to_the_new_daemon(scripted, boot, session):
    session.attach()
    old = reservation(session)
    before = session.info.session
    scripted.stop()
    with pytest.raises(DaemonUnavailable):
        session.failed(1, [1])
    second = Boot(2)
    try:
        scripted.handlers["attach"] = second.attach
        scripted.start()
        session.attach()
        assert session.info.boot == second.boot
        assert scripted.asked("attach")[-1]["resume"] == before
        with pytest.raises(Refused, match="earlier boot"), session.copying(old):
            pytest.fail("entered")
        assert session.intact(old).tolist() == [False]
        with session.copying(reservation(session)) as pools:
            pools[0].slot(0, 1)[:] = 9
        assert os.pread(second.pools[0].memory, 1, 0) == b"\x09"
    finally:
        session.close()
        second.close()


def test_attempts_back_off_and_cost_nothing_in_between(scripted, session, clock):
    session.attach()
    scripted.stop()
    until_lost(session)
    for wait in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        with pytest.raises(DaemonUnavailable):
            session.failed(1, [1])
        clock.now += wait * 0.99
        start = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="due later"):
            session.failed(1, [1])
        assert time.monotonic() - start < 0.5
        clock.now += wait * 0.02
    scripted.start()
    session.failed(1, [1])
    assert session.attached


def test_a_lost_connection_is_resumed_only_when_its_copies_have_ended(scripted, session):
    session.attach()
    before = session.info.session
    copying, go = threading.Event(), threading.Event()

    def copy():
        with session.copying():
            copying.set()
            go.wait(PATIENCE_S)

    worker = threading.Thread(target=copy)
    worker.start()
    copying.wait(PATIENCE_S)
    scripted.stop()
    scripted.start()
    until_lost(session)
    with pytest.raises(DaemonUnavailable, match="still run"):
        session.failed(1, [1], timeout=0.1)
    assert len(scripted.asked("attach")) == 1
    with pytest.raises(DaemonUnavailable, match="detached"), session.copying():
        pytest.fail("entered")
    go.set()
    session.failed(1, [1])
    worker.join()
    assert scripted.asked("attach")[-1]["resume"] == before


def test_the_thread_that_copies_does_not_wait_for_itself(scripted, session):
    session.attach()
    with session.copying():
        scripted.stop()
        scripted.start()
        until_lost(session)
        start = time.monotonic()
        with pytest.raises(DaemonUnavailable, match="still run"):
            session.failed(1, [1])
        assert time.monotonic() - start < PATIENCE_S / 2


def test_a_daemon_that_does_not_answer_attach_blocks_nobody_beyond_the_timeout(scripted, session):
    # D3
    scripted.handlers["attach"] = silence
    failures = []

    def use():
        start = time.monotonic()
        with pytest.raises(DaemonUnavailable):
            session.lookup(b"", request="r", timeout=0.2)
        failures.append(time.monotonic() - start)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 4
    assert max(failures) < 1


def test_a_rank_joins_the_attachment_that_the_scheduler_names(scripted, boot):
    with Session(
        namespace={},
        probe=b"",
        engine=("test", "1"),
        role="rank",
        ranks=2,
        rank=1,
        attachment=b"a" * 16,
        socket_path=scripted.path,
    ) as rank:
        rank.failed(1, [1])
        rank.join(b"a" * 16)
        rank.failed(1, [1])
        # E6: the daemon restarted, the scheduler has a new attachment.
        rank.join(b"b" * 16)
        rank.failed(1, [1])
        assert [(h["attachment"], h["rank"], h["ranks"]) for h in scripted.asked("attach")] == [
            (b"a" * 16, 1, 2),
            (b"b" * 16, 1, 2),
        ]


def test_close_waits_for_copies_then_detaches(scripted, session):
    session.attach()
    copying, go = threading.Event(), threading.Event()

    def copy():
        with session.copying():
            copying.set()
            go.wait(PATIENCE_S)

    worker = threading.Thread(target=copy)
    worker.start()
    copying.wait(PATIENCE_S)
    closing = threading.Thread(target=session.close)
    closing.start()
    assert scripted.asked("detach") == []
    go.set()
    worker.join()
    closing.join()
    assert len(scripted.asked("detach")) == 1
    with pytest.raises(DaemonUnavailable, match="closed"):
        session.failed(1, [1])


def test_close_tells_the_daemon_nothing_while_a_copy_still_runs(scripted, session):
    session.attach()
    with session.copying():
        session.close()
    scripted.wait(lambda it: it.lost == 1)
    assert scripted.asked("detach") == []


def test_pools_stay_mapped_until_the_last_copy_has_ended_though_the_session_is_closed(scripted, session):
    session.attach()
    pool = session.pools[0]
    closed = []
    pool.before_close = lambda: closed.append(1)
    with session.copying() as pools:
        with session.copying():
            session.close()
        assert not closed
        assert pools[0].slot(1, PAGE) is not None
    assert closed == [1]
    with pytest.raises(ProtocolError):
        pool.array()


def test_a_forked_child_is_detached_until_it_attaches_and_the_parent_goes_on(scripted, session):
    session.attach()
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            try:
                session.failed(1, [1])
            except DaemonUnavailable as error:
                if "forked" in str(error) and not session.pools:
                    session.attach()
                    with session.copying() as pools:
                        pools[0].slot(0, 1)[:] = 5
                    verdict = 0
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hellos = scripted.asked("attach")
    assert len(hellos) == 2
    assert hellos[1]["pid"] == child
    assert "resume" not in hellos[1]
    with session.copying() as pools:
        assert pools[0].slot(0, 1)[0] == 5
    session.failed(1, [1])
    assert len(scripted.asked("attach")) == 2


def test_a_pool_is_closed_twice_without_harm():
    pool = Pool()
    mapped = MappedPool(0, "dram", "cpu", PAGES * PAGE, os.dup(pool.memory), os.dup(pool.readonly))
    mapped.close()
    mapped.close()
    pool.close()
