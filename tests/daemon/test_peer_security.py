"""Strangers at the port, and in between: whoever lacks the secret gets nothing, and can cause misses at most."""

import asyncio
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import cbor2
import pytest
from engines.peer_node import BLOCK, NAMESPACE, Pool, chain, jobs, node, pattern, serving

from kvcascade.config.errors import CascadeError, ConfigError, Refused, TierUnavailable
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.daemon import peer_server
from kvcascade.daemon.peer_wire import Channel, Say
from kvcascade.daemon.peers import Peers
from kvcascade.tiers import value
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.remote import BlockName, Secret

pytestmark = pytest.mark.usefixtures("nothing_leaks")

HASHES = chain(4)
SECRET = Secret(b"what the fleet shares")
PATIENCE_S = 20.0
HELLO = struct.Struct("<4sHI")


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)


def asking(secret: Secret = SECRET, me: Any = None, met: Any = lambda info: None, **settings: Any) -> Peers:
    mine = me or node("asking")
    return Peers(PeerSettings(**{"deadline": 2.0, **settings}), secret, lambda: mine, met=met)


async def ask(peers: Peers, endpoint: Endpoint, boot: bytes) -> int:
    return await peers.ask(endpoint, boot, NAMESPACE, 0, b"".join(HASHES), wait=0.0, timeout=5.0)


async def fetched(peers: Peers, endpoint: Endpoint, boot: bytes) -> list[str | None]:
    """Reasons; what is said to be good is so in every byte."""
    wanted = jobs(HASHES)
    reasons = await peers.fetch(endpoint, boot, wanted, 5.0)
    for job, reason in zip(wanted, reasons, strict=True):
        assert reason is not None or job.into == pattern(job.name.block_hash, BLOCK)
    return reasons


class Between:
    """Whoever sits between two nodes: passes on what `change(from the server?, offset, bytes)` makes of the stream."""

    def __init__(self, port: int, change: Callable[[bool, int, bytes], bytes] = lambda back, at, data: data) -> None:
        self._target = port
        self._change = change
        self.seen: dict[bool, bytes] = {False: b"", True: b""}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Between":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._open:
            shut(one)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            for pair in ((near, far, False), (far, near, True)):
                self._threads.append(threading.Thread(target=self._pass, args=pair))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        at = 0
        try:
            while data := source.recv(1 << 16):
                self.seen[back] += data
                sink.sendall(self._change(back, at, data))
                at += len(data)
        except OSError:
            pass
        shut(source)
        shut(sink)


def shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


# ---- who may come in


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Secret(b"another secret"), SECRET), (Secret(), SECRET), (SECRET, Secret())]
)
async def test_another_secret_is_refused_and_told_on_both_sides(
    ours: Secret, theirs: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    me, pool = node("source"), Pool(HASHES)
    async with serving(pool, me, theirs) as server, asking(ours) as peers:
        with pytest.raises(Refused, match=r"cluster\.secret_file: source has another secret"):
            await ask(peers, server.endpoint, me.boot)
        assert "another secret" in peers.status()[0]["reason"]
        await until(lambda: server.status()["counters"].get("refused_callers"))
        assert "asking has another secret" in caplog.text
        assert not pool.asked


async def test_a_recorded_handshake_is_of_no_use() -> None:
    me, pool = node("source"), Pool(HASHES)
    async with serving(pool, me, SECRET) as server:
        with Between(server.endpoint.port) as between:
            async with asking() as peers:
                assert await ask(peers, between.endpoint, me.boot) == len(HASHES)
            recorded = between.seen[False]
        asked = pool.asked

        def replay() -> bytes:
            with socket.create_connection(server.endpoint, 10) as sock:
                sock.sendall(recorded)
                answer = b""
                try:
                    while data := sock.recv(1 << 16):
                        answer += data
                except ConnectionResetError:
                    pass
                return answer

        answer = await asyncio.to_thread(replay)
        assert pool.asked == asked
        _, _, length = HELLO.unpack(answer[: HELLO.size])
        # Its hello and its proof, which are for everybody; nothing after them.
        assert len(answer) <= HELLO.size + length + 32


def test_a_hello_is_never_answered_with_the_same_proof() -> None:
    """Two handshakes with one and the same caller's hello have nothing in common."""
    theirs = set()
    for _ in range(3):
        near, far = socket.socketpair()
        with near, far:
            channel, server = Channel(near, SECRET), Channel(far, SECRET)
            for one in (channel, server):
                one.until(time.monotonic() + PATIENCE_S)
            thread = threading.Thread(target=suppressed, args=(server.welcome, node("source")))
            thread.start()
            body = cbor2.dumps({"info": node("x", boot=bytes(16)).pack(), "nonce": bytes(32)})
            channel.send([HELLO.pack(b"kvcp", 1, len(body)), body])
            _, _, length = HELLO.unpack(channel.read(HELLO.size))
            channel.read(length)
            theirs.add(channel.read(32))
            channel.close()
            thread.join()
    assert len(theirs) == 3


def suppressed(call: Callable[..., Any], *arguments: Any) -> None:
    try:
        call(*arguments)
    except CascadeError:
        pass


@pytest.mark.parametrize(
    ("field", "mine", "theirs"),
    [
        ("none_hash", b"\x01" * 32, b"\x02" * 32),
        ("hash_algo", "sha256_cbor", "sha256"),
        ("key_scheme", "tagged-0.31", "untagged-0.19"),
    ],
)
async def test_a_node_that_hashes_otherwise_is_refused_and_both_sides_say_so(
    field: str, mine: Any, theirs: Any
) -> None:  # B1
    met: list[Any] = []
    told: list[Any] = []
    me, pool = node("source", **{field: theirs}), Pool(HASHES)
    other = node("asking", **{field: mine})
    async with serving(pool, me, SECRET, met=told.append) as server, asking(me=other, met=met.append) as peers:
        with pytest.raises(Refused) as refusal:
            await ask(peers, server.endpoint, me.boot)
        for side in (
            "asking",
            "source",
            *(str(one.hex()[:16] if field == "none_hash" else one) for one in (mine, theirs)),
        ):
            assert side in str(refusal.value)
        await until(lambda: told)
        assert (met, told) == ([me], [other])
        assert not pool.asked


async def test_a_stranger_cannot_make_up_nodes() -> None:
    """What differs is only spoken of with those that hold the secret."""
    told: list[Any] = []
    me = node("source")
    async with serving(Pool(HASHES), me, SECRET, met=told.append) as server:
        stranger = node("made-up", none_hash=b"\x03" * 32)
        async with asking(Secret(b"a guess"), me=stranger) as peers:
            with pytest.raises(Refused, match="secret"):
                await ask(peers, server.endpoint, me.boot)
        await until(lambda: server.status()["counters"].get("refused_callers"))
    assert not told


def _arrived(server: peer_server.PeerServer) -> int:
    counters = server.status()["counters"]
    return int(counters.get("connections", 0) + counters.get("connections_refused", 0))


@pytest.mark.parametrize("tls", [False, True])
async def test_strangers_from_many_hosts_keep_no_node_out(
    certificates: Callable[[str], dict[str, Path]], tls: bool
) -> None:
    """Each host may have some connections that say nothing, but of all of them the oldest make room."""
    me, settings = node("source"), certificates("fleet") if tls else {}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(Pool(HASHES), me, SECRET, **settings))

        def flood() -> None:
            for host in range(2, 8):
                for _ in range(80):
                    sock = stack.enter_context(socket.socket())
                    sock.bind((f"127.0.0.{host}", 0))
                    sock.connect(("127.0.0.1", server.endpoint.port))

        await asyncio.to_thread(flood)
        await until(lambda: _arrived(server) == 480)
        async with asking(SECRET, **settings) as peers:
            assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
        await until(lambda: server.status()["connections"] <= peer_server.STRANGERS)


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%lo", "fe80::2%lo", True),
    ],
)
def test_a_host_that_has_a_network_of_addresses_is_one(one: str, another: str, same: bool) -> None:
    assert (peer_server._host(one) == peer_server._host(another)) is same


async def test_only_networks_that_are_allowed_may_connect() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me, allow="10.0.0.0/8") as server, asking(Secret()) as peers:
        with pytest.raises(TierUnavailable):
            await ask(peers, server.endpoint, me.boot)
        assert server.status()["counters"]["connections_refused"] >= 1
    async with serving(Pool(HASHES), me, allow="10.0.0.0/8,127.0.0.0/8") as server, asking(Secret()) as peers:
        assert await ask(peers, server.endpoint, me.boot) == len(HASHES)


async def test_a_port_open_to_all_is_a_problem_that_status_names() -> None:
    everywhere = Endpoint("0.0.0.0", 0)
    async with serving(Pool(), node("a"), listen=everywhere) as server:
        assert "cluster.secret_file" in server.problems()[0]
    async with serving(Pool(), node("a"), SECRET, listen=everywhere) as server:
        assert server.problems() == []
    async with serving(Pool(), node("a")) as server:
        assert server.problems() == []


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """A node's certificate, key and CA by the CA's name."""

    def make(authority: str) -> dict[str, Path]:
        where = tmp_path_factory.mktemp(authority)

        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=where, check=True, capture_output=True)

        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
        openssl(*new, f"/CN={authority}", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
        openssl(*new, "/CN=node", "-keyout", "key.pem", "-out", "request.pem")
        sign = "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out cert.pem"
        openssl(*sign.split())
        return {"tls_cert": where / "cert.pem", "tls_key": where / "key.pem", "tls_ca": where / "ca.pem"}

    made: dict[str, dict[str, Path]] = {}
    return lambda authority: made.setdefault(authority, made.get(authority) or make(authority))


async def test_over_tls_blocks_come_whole_and_connections_are_kept(certificates: Any) -> None:
    me, ours = node("source"), certificates("ours")
    async with serving(Pool(HASHES), me, SECRET, **ours) as server, asking(**ours) as peers:
        for _ in range(5):
            assert await fetched(peers, server.endpoint, me.boot) == [None] * len(HASHES)
        assert server.status()["counters"]["connections"] == 1
        assert server.problems() == []


async def test_another_signer_no_certificate_and_no_tls_are_refused(certificates: Any) -> None:
    me, pool = node("source"), Pool(HASHES)
    async with serving(pool, me, SECRET, **certificates("ours")) as server:
        for other in (certificates("theirs"), {}):
            async with asking(**other) as peers:
                assert None not in await fetched(peers, server.endpoint, me.boot)
                await until(lambda: server.status()["refused"].startswith("127.0.0.1: peers.tls_cert: "))
                if not other:
                    assert "peers.tls_*" in peers.status()[0]["reason"]
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE

        def without() -> bytes:
            try:
                with (
                    socket.create_connection(server.endpoint, 10) as sock,
                    plain.wrap_socket(sock) as secured,
                ):
                    return secured.recv(100)
            except OSError:
                return b""

        assert await asyncio.to_thread(without) == b""
        # The other way round: this one wants TLS, and the server has none of it.
        assert not pool.asked
    async with serving(Pool(HASHES), me, SECRET) as server, asking(**certificates("ours")) as peers:
        assert None not in await fetched(peers, server.endpoint, me.boot)
        assert "peers.tls_*" in peers.status()[0]["reason"]
        assert (
            server.status()["refused"] == "127.0.0.1: peers.tls_cert: the other side speaks TLS, and this node does not"
        )


def test_tls_files_that_cannot_be_used_are_named(certificates: Any, tmp_path: Path) -> None:
    ours = certificates("ours")
    for name in ("tls_cert", "tls_key", "tls_ca"):
        with pytest.raises(ConfigError, match=f"peers.{name}"):
            asking(**{**ours, name: tmp_path / "none"})
    with pytest.raises(ConfigError, match=r"peers\.tls_cert"):
        asking(tls_cert=ours["tls_cert"], tls_key=certificates("theirs")["tls_key"], tls_ca=ours["tls_ca"])
    with pytest.raises(ConfigError, match=r"peers\.tls_cert"):
        asking(tls_ca=ours["tls_ca"])
    key = tmp_path / "key.pem"
    key.write_bytes(ours["tls_key"].read_bytes())
    key.chmod(0o640)
    with pytest.raises(ConfigError, match=r"peers\.tls_key: .* is open to others \(mode 0640\)"):
        asking(**{**ours, "tls_key": key})


# ---- what comes to the port


def hello(body: bytes, magic: bytes = b"kvcp", version: int = 1, length: int | None = None) -> bytes:
    return HELLO.pack(magic, version, len(body) if length is None else length) + body


NONSENSE = {
    "http": b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n",
    "garbage": bytes(range(256)) * 64,
    "pickle": b"\x80\x04\x95csystem\n",  # L1
    "nothing in it": hello(b""),
    "a long hello": hello(b"", length=0xFFFFFFFF),
    "nested": hello(b"\x81" * 4000 + b"\x80"),  # L6
    "a huge array": hello(b"\xa1\x61a\x9b\x10" + bytes(7)),
    "no map": hello(cbor2.dumps([1, 2, 3])),
    "no fields": hello(cbor2.dumps({"x": 1})),
    "a short nonce": hello(cbor2.dumps({"info": node("x").pack(), "nonce": b"1"})),
    "no node": hello(cbor2.dumps({"info": cbor2.dumps({"record": 1}), "nonce": bytes(32)})),
    "no proof": hello(cbor2.dumps({"info": node("x").pack(), "nonce": bytes(32)})) + bytes(2000),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_is_turned_away_and_the_port_serves_on(what: str, caplog: pytest.LogCaptureFixture) -> None:
    me, pool = node("source"), Pool(HASHES)
    async with serving(pool, me, SECRET) as server, asking() as peers:

        def send() -> None:
            with socket.create_connection(server.endpoint, 10) as sock:
                try:
                    sock.sendall(NONSENSE[what])
                    while sock.recv(1 << 16):
                        pass
                except ConnectionError:
                    pass

        await asyncio.wait_for(asyncio.to_thread(send), PATIENCE_S)
        assert server.status()["counters"]["refused_callers"] == 1
        assert not pool.asked
        assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
    assert "Traceback" not in caplog.text


async def test_another_version_of_the_protocol_is_refused_naming_both() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server:

        def newer() -> bytes:
            with socket.create_connection(server.endpoint, 10) as sock:
                sock.sendall(hello(b"whatever version two says", version=2))
                return sock.recv(100)

        assert HELLO.unpack(await asyncio.to_thread(newer)) == (b"kvcp", 1, 0)
    with answering(lambda sock: sock.sendall(hello(b"", version=2))) as endpoint:
        async with asking() as peers:
            with pytest.raises(Refused, match="the other side speaks version 2 of the protocol, this node 1"):
                await ask(peers, endpoint, me.boot)


async def test_a_caller_that_says_its_hello_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcascade.daemon.peer_server.HANDSHAKE_S", 0.5)
    me = node("source")
    async with serving(Pool(HASHES), me, SECRET) as server, asking() as peers:

        def drip() -> int:
            with socket.create_connection(server.endpoint, 10) as sock:
                for sent, byte in enumerate(hello(bytes(4000))):
                    try:
                        sock.sendall(bytes([byte]))
                    except ConnectionError:
                        return sent
                    time.sleep(0.05)
            return 4000

        dripping = asyncio.create_task(asyncio.to_thread(drip))
        assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
        assert await dripping < 1000


async def test_one_host_that_opens_connections_without_end_keeps_no_other_host_out() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me, SECRET) as server, asking() as peers:
        crowd = [socket.create_connection(server.endpoint, 10, source_address=("127.0.0.2", 0)) for _ in range(300)]
        try:
            await until(lambda: server.status()["counters"].get("connections_refused", 0) >= 200)
            assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
        finally:
            for one in crowd:
                one.close()


def frame(channel: Channel, kind: int, body: bytes, length: int | None = None) -> None:
    """As `say`, with whatever in it."""
    head = struct.pack("<BIQ", kind, len(body) if length is None else length, 0)
    channel.send([head, body, channel._tag(b"caller", head, body)])


@pytest.mark.parametrize(
    ("kind", "body", "length"),
    [
        (Say.ASK, b"\x81" * 1_000_000, None),
        (Say.ASK, b"", 0xFFFFFFFF),
        (Say.FETCH, b"\xa1\x61a\x9b\x10" + bytes(7), None),
        (Say.FETCH, cbor2.dumps({"boot": b"1"}), None),
        (Say.SENT, cbor2.dumps({"valid": True}), None),
        (77, cbor2.dumps({}), None),
        (Say.ASK, cbor2.dumps({"boot": bytes(16), "namespace": NAMESPACE, "group": -1, "hashes": "text"}), None),
    ],
)
async def test_a_member_that_talks_nonsense_is_refused(
    kind: int, body: bytes, length: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    me, pool = node("source"), Pool(HASHES)
    async with serving(pool, me, SECRET) as server, asking() as peers:

        def talk() -> None:
            channel = Channel(socket.create_connection(server.endpoint, 10), SECRET)
            channel.until(time.monotonic() + PATIENCE_S)
            try:
                channel.greet(node("member"))
                frame(channel, kind, body, length)
                with pytest.raises(CascadeError):
                    channel.hear()
            finally:
                channel.close()

        await asyncio.to_thread(talk)
        assert not pool.asked
        assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
    assert "Traceback" not in caplog.text


# ---- what answers a caller


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """A server that says what a test wants, to each that comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(PATIENCE_S)
                    try:
                        answer(sock)
                        while sock.recv(1 << 16):
                            pass
                    except (OSError, CascadeError):
                        pass

        thread = threading.Thread(target=work)
        thread.start()
        yield Endpoint(*listener.getsockname())
        shut(listener)
        thread.join()


@pytest.mark.parametrize("what", NONSENSE)
async def test_a_server_that_talks_nonsense_costs_misses(what: str) -> None:
    with answering(lambda sock: sock.sendall(NONSENSE[what])) as endpoint:
        async with asking(deadline=1.0) as peers:
            assert None not in await fetched(peers, endpoint, bytes(16))


def header(name: BlockName, payload: bytes, **fields: Any) -> bytes:
    view = memoryview(payload)
    return value.pack(name, b"", view, [view], **{"codec": Codec.RAW, "element": 2, "secret": SECRET, **fields})


NAME = BlockName(NAMESPACE, 0, HASHES[0])
GOOD = pattern(HASHES[0], BLOCK)
LIES = {
    "another block": header(BlockName(NAMESPACE, 0, HASHES[1]), GOOD) + GOOD,
    "another namespace": header(BlockName(bytes(32), 0, HASHES[0]), GOOD) + GOOD,
    "another group": header(BlockName(NAMESPACE, 1, HASHES[0]), GOOD) + GOOD,
    "shorter": header(NAME, GOOD[:-1]) + GOOD[:-1],
    "longer": header(NAME, GOOD + b"1") + GOOD + b"1",
    "other bytes": header(NAME, GOOD) + GOOD[:-1] + b"1",
    "another secret": header(NAME, GOOD, secret=Secret(b"a guess")) + GOOD,
    "no secret": header(NAME, GOOD, secret=Secret()) + GOOD,
    "unknown codec": header(NAME, GOOD, codec=99) + GOOD,
    "not packed": header(NAME, GOOD, codec=Codec.ZSTD) + GOOD,
    "zeros": bytes(1 << 17),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_member_that_sends_other_bytes_is_not_believed(what: str) -> None:
    me = node("liar")

    def lie(sock: socket.socket) -> None:
        channel = Channel(sock, SECRET)
        channel.until(time.monotonic() + PATIENCE_S)
        channel.welcome(me)
        channel.hear()
        channel.say(Say.GRANTED, {"count": 1})
        channel.send([LIES[what]])
        channel.say(Say.SENT, {"valid": True})

    with answering(lie) as endpoint:
        async with asking(deadline=2.0) as peers:
            assert None not in await fetched(peers, endpoint, me.boot)


@pytest.mark.parametrize("count", [5, 1 << 40, -1, "4", None])
async def test_a_grant_of_what_was_not_asked_for_is_nonsense(count: Any) -> None:
    me = node("liar")

    def grant(sock: socket.socket) -> None:
        channel = Channel(sock, SECRET)
        channel.until(time.monotonic() + PATIENCE_S)
        channel.welcome(me)
        channel.hear()
        channel.say(Say.GRANTED, {"count": count})

    with answering(grant) as endpoint:
        async with asking() as peers:
            assert None not in await fetched(peers, endpoint, me.boot)


# ---- who sits in between


@pytest.mark.parametrize("secret", [SECRET, Secret()])
@pytest.mark.parametrize("back", [True, False])
async def test_whatever_bit_is_flipped_on_the_way_costs_misses_at_most(secret: Secret, back: bool) -> None:
    me = node("source")
    size = len(HASHES) * BLOCK
    places = [*range(0, 1200, 29), *range(1200, size, size // 12)] if back else range(0, 900, 17)
    struck = 0
    async with serving(Pool(HASHES), me, secret) as server:
        for place in places:

            def flip(direction: bool, at: int, data: bytes, place: int = place) -> bytes:
                if direction != back or not at <= place < at + len(data):
                    return data
                changed = bytearray(data)
                changed[place - at] ^= 1 << place % 8
                return bytes(changed)

            with Between(server.endpoint.port, flip) as between:
                async with asking(secret, deadline=0.5, threads=1) as peers:
                    struck += any(await fetched(peers, between.endpoint, me.boot))
    assert struck > len(places) / 2


@pytest.mark.parametrize("trick", ["drop", "repeat", "swap"])
async def test_bytes_that_are_dropped_repeated_or_swapped_cost_misses_at_most(trick: str) -> None:
    me = node("source")

    for place in range(0, 4 * BLOCK, BLOCK // 2 + 13):

        def change(back: bool, at: int, data: bytes, place: int = place) -> bytes:
            if not back or not at <= place < at + len(data):
                return data
            cut = place - at
            tail = data[cut:]
            if trick == "drop":
                return data[:cut] + data[cut + 160 :]
            if trick == "repeat":
                return data[:cut] + tail + tail
            return tail + data[:cut]

        async with serving(Pool(HASHES), me, SECRET) as server:
            with Between(server.endpoint.port, change) as between:
                async with asking(deadline=0.5, threads=1) as peers:
                    await fetched(peers, between.endpoint, me.boot)


async def test_frames_of_one_connection_are_nothing_to_another() -> None:
    """An answer that was recorded on one connection, played on another one of the same two nodes."""
    me = node("source")
    async with serving(Pool(HASHES), me, SECRET) as server:
        lengths = {}
        with Between(server.endpoint.port) as between:
            async with asking() as peers:
                assert await ask(peers, between.endpoint, me.boot) == len(HASHES)
            first = between.seen[True]
        _, _, length = HELLO.unpack(first[: HELLO.size])
        handshake = HELLO.size + length + 32
        lengths[handshake] = len(first)

        def replay(back: bool, at: int, data: bytes) -> bytes:
            if not back or at + len(data) <= handshake:
                return data
            keep = max(0, handshake - at)
            return data[:keep] + first[at + keep : at + len(data)]

        with Between(server.endpoint.port, replay) as between:
            async with asking(deadline=1.0) as peers:
                with pytest.raises(CascadeError):
                    await ask(peers, between.endpoint, me.boot)
