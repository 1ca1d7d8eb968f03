"""What two nodes say to each other over TCP, and how they prove who they are; blocking, one thread a connection.

A connection begins with a handshake, before which nothing else is read: both sides say who they are (`NodeInfo`) and
prove that they hold the fleet's secret over both sides' fresh nonces, so that nothing recorded is of use. Then come
frames: a fixed header (kind, length, number), a CBOR body, and a tag under a key of this connection and direction, so
that nobody in between can change, repeat, drop or reorder one unnoticed. Payloads follow their frame as in Redis
(value.py), each with a tag of its own. Without a secret all tags are made under a key that everybody knows; then TLS is
what keeps strangers out.

    the one that connects                          the one that serves
    hello(info, nonce)                    →
                                          ←        hello(info, nonce), proof
    proof                                 →
    ask(namespace, group, hashes, wait)   →        answer(count)               or   refused(reason)
    fetch(namespace, group, hashes, codec) →        granted(count), count values, sent(valid)

Who they are is compared only once both have proved the secret: a stranger can neither learn by trying which seed would
fit, nor put nodes that do not exist into anybody's `status`. Then either side says why they can share nothing.

A value's header is made from the slot's bytes, and sent only if the slot still held that block after they were read; a
header of zeros says that it did not, and that no more values come. So what proves true under its header is true, even
where the rest of the answer never comes.
"""

import math
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final

import cbor2

from kvcascade.config.errors import ConfigError, ProtocolError, Refused, TierUnavailable
from kvcascade.config.private import check_private
from kvcascade.config.settings import PeerSettings
from kvcascade.tiers.remote import TAG_BYTES, Secret
from kvcascade.tiers.wire import Bytes, TimedSocket, reason_of

from .fleet import NodeInfo
from .protocol import decode_body, take

MAGIC: Final = b"kvcp"
VERSION: Final = 1
_HELLO: Final = struct.Struct("<4sHI")  # magic, version, length of the body
_FRAME: Final = struct.Struct("<BIQ")  # kind, length of the body, number of the frame in its direction
_TLS_HELLO: Final = b"\x16\x03"  # what every connection of TLS begins with
MAX_HELLO: Final = 4096
MAX_BODY: Final = 4 << 20  # 65,536 hashes and more
NONCE_BYTES: Final = 32


class Say(IntEnum):
    """The kinds of frames."""

    REFUSED = 1
    ASK = 2
    ANSWER = 3
    FETCH = 4
    GRANTED = 5
    SENT = 6


class Channel:
    """A socket with deadlines; not thread-safe. TierUnavailable for trouble, ProtocolError for nonsense."""

    def __init__(self, sock: socket.socket, secret: Secret) -> None:
        self._sock = TimedSocket(sock)
        self.encrypted = isinstance(sock, ssl.SSLSocket)
        self._secret = secret
        self._key = b""
        self._sides = (b"", b"")  # ours, theirs
        self._numbers = [0, 0]  # of the next frame: ours, theirs
        self.closed = False

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self._sock.close()

    def break_off(self) -> None:
        """Ends what another thread is waiting for on this channel."""
        with suppress(OSError):
            self._sock.cut()

    def is_stale(self) -> bool:
        """Whether the other side has closed an idle connection, or said what nobody asked for."""
        return not self._sock.idle()

    def until(self, deadline: float, silence: float = math.inf) -> None:
        """Sets the time by which the next calls end, and for how long no byte may move in them."""
        self._sock.until(deadline, silence)

    def connect(self, address: Any) -> None:
        """Connects the socket; TLS's handshake is still to come."""
        self._do(self._sock.connect, address)

    def secure(self) -> None:
        """TLS's own handshake, where the socket is of TLS. Refused where the other side speaks none, or proves none."""
        try:
            self._do(self._sock.secure)
        except TierUnavailable as error:
            if isinstance(error.__cause__, ssl.SSLError):
                raise Refused(f"peers.tls_cert: {str(error).removeprefix('peer: ')}") from error
            if isinstance(error.__cause__, ConnectionError):
                raise TierUnavailable(f"{error}; this node has peers.tls_*, and that one needs it too") from error
            raise

    # ---- bytes

    def send(self, parts: Sequence[Bytes]) -> None:
        """Sends all parts, in order."""
        self._do(self._sock.send, parts)

    def read_into(self, into: memoryview) -> None:
        """Reads exactly as many bytes as `into` has."""
        self._do(self._sock.read_into, into)

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data))
        return bytes(data)

    def _do(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            self.close()
            raise TierUnavailable(f"peer: {reason_of(error)}") from error

    # ---- the handshake

    def _send_hello(self, info: NodeInfo, nonce: bytes) -> bytes:
        body = cbor2.dumps({"info": info.pack(), "nonce": nonce})
        self.send([_HELLO.pack(MAGIC, VERSION, len(body)), body])
        return body

    def _read_hello(self) -> bytes:
        magic, version, length = _HELLO.unpack(self.read(_HELLO.size))
        if magic.startswith(_TLS_HELLO) and not self.encrypted:
            raise ProtocolError("peers.tls_cert: the other side speaks TLS, and this node does not")
        if magic != MAGIC:
            raise ProtocolError("handshake: the other side is no kvcascade node")
        if version != VERSION:
            raise Refused(f"handshake: the other side speaks version {version} of the protocol, this node {VERSION}")
        if not 0 < length <= MAX_HELLO:
            raise ProtocolError(f"handshake: a hello of {length} bytes")
        return self.read(length)

    @staticmethod
    def _parse_hello(body: bytes) -> tuple[NodeInfo, bytes]:
        values = decode_body(body)
        info = NodeInfo.unpack(take(values, "info", bytes, hi=MAX_HELLO))
        return info, take(values, "nonce", bytes, lo=NONCE_BYTES, hi=NONCE_BYTES)

    def _proof(self, side: bytes, caller: bytes, server: bytes) -> bytes:
        return self._secret.tag("peers", b"proof", side, caller, server)

    def _begin(self, ours: bytes, theirs: bytes, caller: bytes, server: bytes) -> None:
        self._key = self._secret.tag("peers", b"key", caller, server)
        self._sides = (ours, theirs)

    def greet(self, me: NodeInfo) -> NodeInfo:
        """The caller's side; who the other one is. Refused, Different where they can share nothing."""
        mine = self._send_hello(me, secrets.token_bytes(NONCE_BYTES))
        try:
            theirs = self._read_hello()
        except TierUnavailable as error:
            # What a port that expects TLS does with our hello.
            if isinstance(error.__cause__, ConnectionError) and not self.encrypted:
                raise TierUnavailable(f"{error}; if that node has peers.tls_*, this one needs it too") from error
            raise
        info, _ = self._parse_hello(theirs)
        proof = self.read(TAG_BYTES)
        # Said before the other side's proof is looked at, so that it too learns why this ends.
        self.send([self._proof(b"caller", mine, theirs)])
        if not _same(proof, self._proof(b"server", mine, theirs)):
            raise Refused(f"cluster.secret_file: {info.name} has another secret than this node")
        self._begin(b"caller", b"server", mine, theirs)
        self._compare(me, info)
        return info

    def welcome(self, me: NodeInfo) -> NodeInfo:
        """The server's side; who the caller is. Refused, Different where they can share nothing."""
        try:
            theirs = self._read_hello()
        except Refused:
            # The other side speaks another version: our hello's first bytes tell it, and any version reads them.
            self.send([_HELLO.pack(MAGIC, VERSION, 0)])
            raise
        info, _ = self._parse_hello(theirs)
        mine = self._send_hello(me, secrets.token_bytes(NONCE_BYTES))
        self.send([self._proof(b"server", theirs, mine)])
        if not _same(self.read(TAG_BYTES), self._proof(b"caller", theirs, mine)):
            raise Refused(f"cluster.secret_file: {info.name} has another secret than this node")
        self._begin(b"server", b"caller", theirs, mine)
        self._compare(me, info)
        return info

    @staticmethod
    def _compare(me: NodeInfo, info: NodeInfo) -> None:
        difference = me.difference(info)
        if difference is not None:
            raise Different(info, difference)

    # ---- frames

    def _tag(self, side: bytes, head: bytes, body: bytes) -> bytes:
        return self._secret.tag("peers", self._key, side, head, body)

    def say(self, kind: Say, values: Mapping[str, Any], *payload: Bytes) -> None:
        """Sends a frame, and what follows it."""
        body = cbor2.dumps(dict(values))
        head = _FRAME.pack(kind, len(body), self._numbers[0])
        self._numbers[0] += 1
        self.send([head, body, self._tag(self._sides[0], head, body), *payload])

    def hear(self) -> tuple[Say, dict[str, Any]]:
        """The next frame. Refused where the other side refuses."""
        head = self.read(_FRAME.size)
        kind, length, number = _FRAME.unpack(head)
        if length > MAX_BODY or number != self._numbers[1]:
            raise ProtocolError(f"peer: frame {number} of {length} bytes is not the next one")
        self._numbers[1] += 1
        body = self.read(length)
        if not _same(self.read(TAG_BYTES), self._tag(self._sides[1], head, body)):
            raise ProtocolError("peer: a frame was changed on its way")
        values = decode_body(body)
        try:
            said = Say(kind)
        except ValueError as error:
            raise ProtocolError(f"peer: a frame of the unknown kind {kind}") from error
        if said == Say.REFUSED:
            raise Refused(f"peer: {take(values, 'reason', str, hi=1024)}")
        return said, values


class Different(Refused):
    """The other side's blocks have other names than ours."""

    def __init__(self, info: NodeInfo, difference: str) -> None:
        super().__init__(difference)
        self.info = info


def _same(one: bytes, other: bytes) -> bool:
    return secrets.compare_digest(one, other)


def tls_context(settings: PeerSettings, *, server: bool) -> ssl.SSLContext | None:
    """For mutual TLS; None where none is set. ConfigError naming what cannot be used."""
    if settings.tls_cert is None:
        if settings.tls_key is not None or settings.tls_ca is not None:
            raise ConfigError("peers.tls_cert: tls_key or tls_ca is set, so say this node's certificate")
        return None
    for name in ("tls_cert", "tls_key", "tls_ca"):
        path = getattr(settings, name)
        if path is None or not os.access(path, os.R_OK):
            raise ConfigError(f"peers.{name}: {path or 'nothing'} cannot be read; mutual TLS needs all three files")
        if name == "tls_key":
            check_private("peers.tls_key", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Who a node is is what its certificate's signer says; its address may be any of the fleet's.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(str(settings.tls_cert), str(settings.tls_key))
        context.load_verify_locations(str(settings.tls_ca))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"peers.tls_cert: the files do not fit together: {error}") from error
    return context
