"""Whatever comes through the socket: an answer that names the field, the daemon alive, and nothing leaked."""

import contextlib
import errno
import mmap
import os
import pickle
import socket
import struct

import pytest
from engines.scripted import EngineError, eventually, hashes_of, namespace, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcascade.config.errors import CascadeError, ProtocolError, Refused
from kvcascade.daemon import protocol
from kvcascade.daemon.protocol import HEADER, MAGIC, MAX_BODY, FrameDecoder, Kind, decode_body, encode
from kvcascade.tiers.block import none_hash, probe_hashes

PATIENCE_S = 20.0
NAMESPACE = namespace()
PROBE = b"".join(probe_hashes(algo="sha256_cbor", none_hash=NAMESPACE.none_hash, key_scheme="tagged-0.31"))
CHAIN = b"".join(hashes_of(prompt("raw", 4)))


class Raw:
    """A client that sends whatever it is told to."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))
        self.decoder = FrameDecoder(max_descriptors=16)
        self.frames = []
        self.descriptors = []
        self.correlation = 0

    def send(self, data):
        self.socket.sendall(data)

    def receive(self):
        """The next frame, or None at the end of the connection."""
        while not self.frames:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.descriptors += descriptors
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    def ask(self, body):
        """Sends a request and returns (kind, body) of its answer; events on the way are dropped."""
        self.correlation += 1
        self.send(encode(Kind.REQUEST, self.correlation, body))
        while True:
            frame = self.receive()
            assert frame is not None, "the daemon closed the connection"
            if frame.kind != Kind.EVENT:
                break
        assert frame.correlation == self.correlation
        return Kind(frame.kind), decode_body(frame.body)

    def call(self, op, **body):
        kind, answer = self.ask({"op": op, **body})
        if kind == Kind.ERROR:
            raise protocol.error_from(answer)
        return answer

    def attach(self, **changes):
        body = {"protocol": 1, "role": "engine", "engine": {"family": "raw", "version": "0"}, "ranks": 1, "rank": 0,
                "namespace": NAMESPACE.to_map(), "probe": PROBE, "pid": os.getpid()}  # fmt: skip
        return self.call("attach", **{**body, **changes})

    def close(self):
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


@pytest.fixture
def daemon(shared_daemon):
    return shared_daemon


@pytest.fixture
def own_daemon(start_daemon):
    return start_daemon()


@pytest.fixture
def chain(request):
    """Hashes that no other test stores."""
    return b"".join(hashes_of(prompt(request.node.name, 4)))


@pytest.fixture
def connect(daemon):
    with contextlib.ExitStack() as stack:

        def one():
            client = Raw(daemon.socket)
            stack.callback(client.close)
            return client

        yield one


@pytest.fixture
def raw(connect):
    return connect()


@pytest.fixture
def attached(raw):
    raw.attach()
    return raw


def header(magic=MAGIC, version=1, kind=Kind.REQUEST, descriptors=0, length=0):
    return HEADER.pack(magic, version, kind, descriptors, 7, length)


def unharmed(daemon):
    """The daemon answers, is sound, met no defect of its own, and holds nothing for anybody."""
    assert daemon.check() == []
    status = eventually(lambda: _at_rest(daemon))
    assert "internal_errors" not in status["counters"]


def _at_rest(daemon):
    status = daemon.status()
    dram = next(tier for tier in status["tiers"] if tier["name"] == "dram")
    busy = status["leases"]["live"] or dram["quarantined"] or dram["pinned"]
    return None if busy or status["sessions"] else status


# ---- frames

BROKEN = {
    "magic": header(magic=b"HTTP"),
    "one byte of another magic": b"X",
    "text of another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "version": header(version=2),
    "kind": header(kind=9),
    "descriptors": header(descriptors=1),
    "a body of": header(length=MAX_BODY + 1),
    "a body of 2^60": header(length=1 << 60),
    "reply": encode(Kind.REPLY, 1, {}),
    "event": encode(Kind.EVENT, 0, {"event": "fence"}),
    "pickle": pickle.dumps({"op": "status"}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_frame_ends_its_connection_with_a_reason(daemon, raw, what):
    raw.send(BROKEN[what])
    frame = raw.receive()
    assert (frame.kind, frame.correlation) == (Kind.ERROR, 0)
    assert decode_body(frame.body)["error"] == "ProtocolError"
    assert raw.receive() is None
    unharmed(daemon)


def test_a_frame_that_never_ends_holds_up_nobody(daemon, raw):
    raw.send(encode(Kind.REQUEST, 1, {"op": "ping"})[:-1])
    assert daemon.status()["pid"] == daemon.pid
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.receive() is None
    unharmed(daemon)


def test_a_request_that_dribbles_in_byte_by_byte_is_answered(raw):
    for byte in encode(Kind.REQUEST, 5, {"op": "ping"}):
        raw.send(bytes([byte]))
    frame = raw.receive()
    assert (frame.kind, frame.correlation) == (Kind.REPLY, 5)


def test_requests_that_come_in_one_piece_are_answered_in_order(raw):
    raw.send(b"".join(encode(Kind.REQUEST, n, {"op": "ping"}) for n in range(1, 2001)))
    assert [raw.receive().correlation for _ in range(2000)] == list(range(1, 2001))


# ---- bodies: L1, L6

NASTY = {
    "100,000 nested arrays": b"\xa1\x61a" + b"\x81" * 100_000 + b"\x00",
    "100,000 nested maps": b"\xa1\x61a" * 100_000 + b"\x00",
    "an array of 2^60": b"\xa1\x61a\x9b" + (1 << 60).to_bytes(8, "big"),
    "a map of 2^60": b"\xbb" + (1 << 60).to_bytes(8, "big"),
    "a text of 2^60 bytes": b"\xa1\x61a\x7b" + (1 << 60).to_bytes(8, "big"),
    "5 MB of tags": b"\xa1\x61a" + b"\xc6" * 5_000_000 + b"\x00",
    "an endless array": b"\xa1\x61a\x9f" + b"\x00" * 1000,
    "a pickle": pickle.dumps({"op": "status"}),
    "nothing": b"",
    "no map": b"\x83\x01\x02\x03",
    "keys that are numbers": b"\xa1\x01\x02",
    "a field given twice": b"\xa2\x62op\x64ping\x62op\x64ping",
    "text that is not UTF-8": b"\xa1\x62op\x62\xff\xfe",
    "bytes after the end": b"\xa1\x62op\x64ping\x00",
}


@pytest.mark.parametrize("what", NASTY)
def test_a_body_that_cannot_be_is_refused_and_the_connection_goes_on(daemon, raw, what):
    body = NASTY[what]
    raw.send(HEADER.pack(MAGIC, 1, Kind.REQUEST, 0, 3, len(body)) + body)
    frame = raw.receive()
    assert (frame.kind, frame.correlation) == (Kind.ERROR, 3)
    assert decode_body(frame.body)["error"] == "ProtocolError"
    assert "boot" in raw.call("ping")
    unharmed(daemon)


WRONG = [
    ({}, "'op'"),
    ({"op": 7}, "'op'"),
    ({"op": "x" * 33}, "'op'"),
    ({"op": "shutdown"}, "'op'.*shutdown"),
    ({"op": "lookup"}, "'hashes'"),
    ({"op": "lookup", "hashes": "text"}, "'hashes'"),
    ({"op": "lookup", "hashes": b"x" * 31}, "'hashes'"),
    ({"op": "lookup", "hashes": CHAIN, "group": 1}, "'group'"),
    ({"op": "lookup", "hashes": CHAIN, "group": -1}, "'group'"),
    ({"op": "lookup", "hashes": CHAIN, "request": 1}, "'request'"),
    ({"op": "lookup", "hashes": CHAIN, "request": "x" * 129}, "'request'"),
    ({"op": "lookup", "hashes": CHAIN, "pin": 1}, "'pin'"),
    ({"op": "load", "lease": 1}, "'count'"),
    ({"op": "load", "lease": "1", "count": 1}, "'lease'"),
    ({"op": "load", "lease": 1, "count": -1}, "'count'"),
    ({"op": "load", "lease": 1, "count": 1}, "lease: 1 is not held"),
    ({"op": "load", "lease": 1 << 63, "count": 1, "wait_ms": "soon"}, "'wait_ms'"),
    ({"op": "release", "leases": b"1234567"}, "'leases'"),
    ({"op": "reserve", "hashes": CHAIN, "start": 5}, "'start'"),
    ({"op": "reserve", "hashes": CHAIN, "start": -1}, "'start'"),
    ({"op": "reserve", "hashes": CHAIN, "tokens": b"123"}, "'tokens'"),
    ({"op": "reserve", "hashes": CHAIN, "tokens": b"1234"}, "'tokens'"),
    ({"op": "reserve", "hashes": CHAIN + CHAIN}, "'hashes'"),
    ({"op": "commit", "lease": 1, "blocks": b"123"}, "'blocks'"),
    ({"op": "commit", "lease": 1, "blocks": b""}, "lease: 1"),
    ({"op": "commit", "lease": 1 << 64, "blocks": b""}, "a tag"),
    ({"op": "abort", "lease": 1, "blocks": b""}, "lease: 1"),
    ({"op": "abort", "lease": None, "blocks": b""}, "'lease'"),
    ({"op": "failed", "lease": 1, "blocks": b"1234"}, "lease: 1"),
    ({"op": "fenced", "fence": 1}, "fence: 1"),
    ({"op": "where", "hashes": 1}, "'hashes'"),
    ({"op": "attach", "protocol": 1, "role": "engine"}, "attach"),
]


@pytest.mark.parametrize(("body", "named"), WRONG, ids=[f"{b.get('op')} {n}" for b, n in WRONG])
def test_a_wrong_field_is_named(daemon, attached, body, named):
    kind, answer = attached.ask(body)
    assert kind == Kind.ERROR
    with pytest.raises((ProtocolError, Refused), match=named):
        raise protocol.error_from(answer)
    assert "boot" in attached.call("ping")
    attached.close()
    unharmed(daemon)


WRONG_ATTACH = [
    ({"protocol": 2}, "protocol"),
    ({"protocol": "1"}, "'protocol'"),
    ({"role": "admin"}, "'role'.*admin"),
    ({"engine": 1}, "'engine'"),
    ({"engine": {"family": "x" * 129}}, "'family'"),
    ({"ranks": 0}, "'ranks'"),
    ({"ranks": 2}, "ranks"),
    ({"ranks": 1 << 40}, "'ranks'"),
    ({"rank": 1}, "rank"),
    ({"role": "rank", "attachment": b"x" * 16}, "attachment"),
    ({"role": "rank", "attachment": b"x"}, "'attachment'"),
    ({"role": "rank"}, "'attachment'"),
    ({"resume": b"x" * 17}, "'resume'"),
    ({"namespace": {}}, "namespace field model"),
    ({"namespace": {**NAMESPACE.to_map(), "more": 1}}, "'more'"),
    ({"namespace": {**NAMESPACE.to_map(), "kv_dtype": "float12"}}, "kv_dtype"),
    ({"namespace": {**NAMESPACE.to_map(), "groups": []}}, "groups"),
    ({"namespace": {**NAMESPACE.to_map(), "slot_format": 2}}, "slot_format"),
    ({"namespace": {**NAMESPACE.to_map(), "hash_algo": "md5"}}, "hash_algo"),
    ({"namespace": {**NAMESPACE.to_map(), "none_hash": "00"}}, "none_hash"),
    ({"namespace": namespace(layers=512, kv_heads=64, head_dim=256).to_map()}, "slab"),
    ({"probe": b""}, "'probe'"),
    ({"probe": PROBE[:-1]}, "'probe'"),
    ({"probe": PROBE[::-1]}, "probe: .*the engine declares sha256_cbor"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG_ATTACH, ids=[n for _, n in WRONG_ATTACH])
def test_what_is_not_recognised_is_refused_at_attach_by_name(daemon, raw, changes, named):
    with pytest.raises(CascadeError, match=named):
        raw.attach(**changes)
    # The refusal is no end: the same connection may attach with what is right.
    assert raw.attach()["namespace"] == NAMESPACE.fingerprint()
    raw.close()
    unharmed(daemon)


def test_an_engine_that_uses_another_seed_than_it_declares_is_refused_naming_both_sides(daemon, start_engine):
    engine = start_engine(daemon, seed="0", probe_seed="42")
    with pytest.raises(EngineError, match=none_hash("0").hex()[:16]):
        engine.attach()


@pytest.mark.parametrize("op", ["lookup", "load", "reserve", "commit", "abort", "failed", "fenced"])
def test_who_has_not_attached_may_ask_nothing_of_an_engine(daemon, raw, op):
    body = {"hashes": CHAIN, "lease": 1, "count": 1, "blocks": b"", "fence": 1}
    with pytest.raises(Refused, match="attach"):
        raw.call(op, **body)
    unharmed(daemon)


# ---- leases and reservations


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def test_releasing_twice_is_nothing_to_complain_about(daemon, attached, chain):
    reserved = attached.call("reserve", hashes=chain)
    attached.call("commit", lease=reserved["lease"], blocks=u32(0, 1, 2, 3))
    lease = attached.call("lookup", hashes=chain, request="r")["lease"]
    for _ in range(2):
        attached.call("release", leases=struct.pack("<QQ", lease, 12345))
    assert daemon.status()["leases"]["live"] == 0
    with pytest.raises(Refused, match="lease"):
        attached.call("load", lease=lease, count=4)


def test_asking_again_for_one_request_renews_its_one_lease(daemon, attached, chain):
    # C1: a lookup repeated five times pins once.
    reserved = attached.call("reserve", hashes=chain)
    attached.call("commit", lease=reserved["lease"], blocks=u32(0, 1, 2, 3))
    assert len({attached.call("lookup", hashes=chain, request="r")["lease"] for _ in range(5)}) == 1
    assert daemon.status()["leases"]["pins"] == 4


def test_a_commit_after_an_abort_makes_nothing_findable(daemon, attached, chain):
    lease = attached.call("reserve", hashes=chain)["lease"]
    attached.call("abort", lease=lease, blocks=b"")
    with pytest.raises(Refused, match="lease"):
        attached.call("commit", lease=lease, blocks=u32(0))
    assert attached.call("lookup", hashes=chain, request="r")["matched"] == 0


def test_a_block_that_is_not_reserved_cannot_be_committed(daemon, attached, chain):
    lease = attached.call("reserve", hashes=chain)["lease"]
    for blocks in (u32(4), u32(0xFFFFFFFF), u32(0, 0)):
        with pytest.raises(Refused, match="blocks"):
            attached.call("commit", lease=lease, blocks=blocks)
    assert attached.call("commit", lease=lease, blocks=u32(0, 1, 2, 3)) == {"ready": 4, "gone": 0}


def test_another_attachment_can_neither_commit_abort_load_nor_release(daemon, attached, connect, chain):
    other = connect()
    other.attach()
    lease = attached.call("reserve", hashes=chain)["lease"]
    for op in ("commit", "abort"):
        with pytest.raises(Refused, match="lease"):
            other.call(op, lease=lease, blocks=u32(0))
    attached.call("commit", lease=lease, blocks=u32(0, 1, 2, 3))
    held = attached.call("lookup", hashes=chain, request="r")["lease"]
    other.call("release", leases=struct.pack("<Q", held))
    with pytest.raises(Refused, match="lease"):
        other.call("load", lease=held, count=4)
    with pytest.raises(Refused, match="lease"):
        other.call("failed", lease=held, blocks=u32(0))
    assert attached.call("load", lease=held, count=4)["count"] == 4


def test_a_rank_cannot_commit_what_another_rank_writes(daemon, connect, chain):
    # One KV head and two ranks: replicas take turns, block i is written by rank i mod 2.
    shape = namespace(kv_heads=1)
    scheduler = connect()
    token = scheduler.attach(role="scheduler", ranks=2, namespace=shape.to_map())["attachment"]
    ranks = [connect(), connect()]
    for number, rank in enumerate(ranks):
        rank.attach(role="rank", ranks=2, rank=number, attachment=token, namespace=shape.to_map())
    lease = scheduler.call("reserve", hashes=chain)["lease"]
    with pytest.raises(Refused, match="rank 0 does not write block 1"):
        ranks[0].call("commit", lease=lease, blocks=u32(0, 1))
    with pytest.raises(Refused, match="'scheduler' writes no slots"):
        scheduler.call("commit", lease=lease, blocks=u32(0))
    assert ranks[0].call("commit", lease=lease, blocks=u32(0, 2))["ready"] == 2
    assert ranks[1].call("commit", lease=lease, blocks=u32(1, 3))["ready"] == 2
    assert scheduler.call("lookup", hashes=chain, request="r")["matched"] == 4


def test_a_rank_of_another_model_cannot_join(daemon, connect):
    token = connect().attach(role="scheduler", ranks=2)["attachment"]
    with pytest.raises(Refused, match="namespace"):
        connect().attach(role="rank", ranks=2, attachment=token, namespace=namespace(model="other").to_map())
    with pytest.raises(Refused, match="ranks"):
        connect().attach(role="rank", ranks=4, attachment=token)


def test_a_prompt_without_a_full_block_is_a_miss(attached):
    assert attached.call("lookup", hashes=b"", request="r")["matched"] == 0
    assert attached.call("reserve", hashes=b"")["states"] == b""


def test_token_ids_that_the_daemon_cannot_keep_are_refused_by_name(daemon, start_engine):
    # Non-cryptographic hashes: token ids are kept as u32 and compared. sha256 hashes the same ids as vLLM does.
    tokens = [1 << 32, *range(15)]
    with pytest.raises(EngineError, match=r"4294967296|u32|2\^32"):
        start_engine(daemon, algo="xxhash_cbor").store(tokens, keep_tokens=True)
    assert start_engine(daemon).store(tokens) == {"states": ["SLOT"], "ready": 1}
    with pytest.raises(EngineError, match=r"negative|-1"):
        start_engine(daemon).store([-1, *range(15)])


# ---- memory


def test_the_pools_memory_can_be_neither_truncated_nor_grown_and_generations_not_written(daemon, attached):
    memory, generations = attached.descriptors
    for descriptor in (memory, generations):
        for size in (0, 1 << 40):
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        mmap.mmap(generations, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(PermissionError):
        # The owner of the file may open it for writing; what it may not is write.
        reopened = os.open(f"/proc/self/fd/{generations}", os.O_RDWR)
        try:
            with pytest.raises(OSError, match="not permitted"):
                os.pwrite(reopened, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(reopened, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(reopened)
    unharmed_with_sessions(daemon)


def unharmed_with_sessions(daemon):
    assert daemon.check() == []


# ---- bad company


def test_a_client_that_never_reads_is_cut_off_and_nobody_waits_for_it(daemon, raw):
    raw.socket.setblocking(False)
    request = encode(Kind.REQUEST, 1, {"op": "status"})
    block = request * 64
    unread = 0
    try:
        while unread < 1 << 20:
            try:
                unread += raw.socket.send(block)
            except BlockingIOError:
                # The daemon reads on: it answers others meanwhile.
                assert daemon.status()["pid"] == daemon.pid
    except OSError as error:
        assert error.errno in (errno.EPIPE, errno.ECONNRESET)
    else:
        raise AssertionError("the daemon holds whatever a client does not read")
    unharmed(daemon)


def test_a_session_with_many_waiting_loads_is_not_read_on_and_holds_nothing_after_its_end(
    daemon, attached, connect, chain
):
    lease = attached.call("reserve", hashes=chain)["lease"]
    attached.call("commit", lease=lease, blocks=u32(0, 1, 2, 3))
    held = attached.call("lookup", hashes=chain, request="r")["lease"]
    for number in range(200):
        attached.send(encode(Kind.REQUEST, 100 + number, {"op": "load", "lease": held, "count": 4, "wait_ms": 60_000}))
    assert [attached.receive().correlation for _ in range(200)] == list(range(100, 300))
    attached.close()
    unharmed(daemon)


LEASE, RESERVATION, TOKEN = "the lease", "the reservation", "the attachment"

values = st.one_of(
    st.sampled_from([LEASE, RESERVATION, TOKEN, CHAIN, CHAIN[:32], CHAIN[32:], CHAIN[:33], PROBE, b"", b"\0" * 16]),
    st.sampled_from([0, 1, 2, 4, -1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 64)]),
    st.sampled_from([u32(0), u32(3), u32(0, 1, 2, 3), u32(4), u32(0xFFFFFFFF), u32(1, 1)]),
    st.sampled_from([None, True, False, 0.5, float("nan"), "", "r", "engine", "rank", "tool", [], {}, [[1]]]),
    st.binary(max_size=70),
    st.sampled_from([NAMESPACE.to_map(), {**NAMESPACE.to_map(), "groups": [None]}, {"model": 1}]),
)  # fmt: skip
fields = st.sampled_from(
    ["hashes", "lease", "leases", "blocks", "group", "request", "pin", "promote", "count", "wait_ms", "start", "tokens",
     "fence", "namespace", "protocol", "role", "ranks", "rank", "attachment", "resume", "probe", "engine", "pid"]
)  # fmt: skip
operations = st.sampled_from(
    ["ping", "lookup", "load", "release", "reserve", "commit", "abort", "failed", "where", "status", "check",
     "fenced", "attach", "detach", "??"]
)  # fmt: skip
RIGHT = {"hashes": CHAIN, "lease": LEASE, "leases": b"", "blocks": u32(0, 1), "group": 0, "count": 4, "request": "r"}
requests = st.lists(
    st.tuples(operations, st.dictionaries(fields, values, max_size=4), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=requests)
def test_any_sequence_of_requests_is_answered_and_leaves_the_daemon_sound(own_daemon, script):
    daemon = own_daemon
    client = Raw(daemon.socket)
    try:
        known = {TOKEN: client.attach()["attachment"], LEASE: 0, RESERVATION: 0}
        for op, wild, tame in script:
            body = {"op": op, **(RIGHT if tame else {}), **wild}
            kind, answer = client.ask({n: known.get(v, v) if isinstance(v, str) else v for n, v in body.items()})
            assert kind in (Kind.REPLY, Kind.ERROR)
            if kind == Kind.ERROR:
                assert answer["error"] in ("ProtocolError", "Refused", "ConfigError", "LayoutMismatch"), answer
            elif op in ("lookup", "reserve"):
                known[LEASE if op == "lookup" else RESERVATION] = answer["lease"]
                known[LEASE] = known[LEASE] or answer["lease"]
        assert daemon.check() == []
        # A lost socket alone would leave its slots quarantined while this process lives.
        client.call("detach")
    finally:
        client.close()
    unharmed(daemon)
