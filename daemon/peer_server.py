"""Serves this node's blocks to other nodes: one TCP port, one thread a connection, bytes straight from the pool.

The event loop decides (what is here, what is held for how long), threads send. A caller that is slow, or gone, costs
its thread and its grant until the deadline, and nobody else anything. A block's header is made of the bytes in its
slot, then the slot's generation is looked at, and only then the header is sent: what a header proves was that block.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeVar

from kvcascade.config.errors import CascadeError, ConfigError, ProtocolError, Refused, TierUnavailable
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.tiers import value
from kvcascade.tiers.block import HASH_BYTES
from kvcascade.tiers.codec import Codec, encode
from kvcascade.tiers.remote import Secret
from kvcascade.tiers.wire import SOCKET_BYTES

from .fleet import NodeInfo
from .granting import Grant
from .peer_wire import Channel, Different, Say, tls_context
from .protocol import MOST_LISTED, take
from .remote import MOST_BLOCKS

log = logging.getLogger("kvcascade.peers")

T = TypeVar("T")

CONNECTIONS: Final = 256  # at once; the next one takes the place of one that asks for nothing, or is closed
STRANGERS: Final = 128  # of them that have not proved themselves; the next one takes the place of the oldest
STRANGERS_ONE: Final = 64  # of them, of one host
ENDING: Final = 64  # whose place was taken, and whose threads are still to end
HANDSHAKE_S: Final = 5.0
IDLE_S: Final = 120.0  # a connection that asks for nothing is closed
MAX_WAIT_S: Final = 60.0
MOST_HASHES: Final = MOST_BLOCKS * max(HASH_BYTES.values())  # bytes of one question, which no node has more of
BACKLOG: Final = 128
PIECE: Final = 1 << 20  # of a payload at most, where the bandwidth is limited
PIECES_S: Final = 64  # a second, so that many callers who share it do not take each other for silent
BATCH: Final = 1 << 20  # of small blocks go out in one call
CLOSE_S: Final = 5.0
CALLERS: Final = 256  # nodes whose served blocks are counted apart


class Granting(Protocol):
    """What the server asks; all on the loop's thread. `granting.Granting`."""

    async def leading(self, namespace: bytes, group: int, hashes: bytes, *, wait: float) -> int: ...

    async def grant(self, namespace: bytes, group: int, hashes: bytes) -> Grant | None: ...

    def release(self, grant: Grant, *, sent: bool) -> None: ...


class PeerServer:
    """Use as an async context manager; leaving it ends all connections and threads."""

    def __init__(
        self,
        settings: PeerSettings,
        secret: Secret,
        me: Callable[[], NodeInfo],
        granting: Granting,
        *,
        codec: Callable[[Codec | None], Codec] = lambda asked: asked or Codec.RAW,
        met: Callable[[NodeInfo], None] = lambda info: None,
    ) -> None:
        """`me`: who this node is, asked at each handshake. `met`: told, on the loop, of nodes that were refused.

        `codec`: how payloads are packed for one that would have them so, or has no wish.

        ConfigError for certificates that do not fit.
        """
        assert settings.listen is not None
        self._settings = settings
        self._secret = secret
        self._me = me
        self._granting = granting
        self._codec = codec
        self._met = met
        self._tls = tls_context(settings, server=True)
        self._allowed = [ipaddress.ip_network(network) for network in settings.allow]
        self._listener: socket.socket | None = None
        self.endpoint = settings.listen
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # of the six below
        self._threads: set[threading.Thread] = set()
        self._strangers: dict[socket.socket, str] = {}  # whose handshake is still to end, and their hosts, oldest first
        self._sockets: set[socket.socket] = set()
        self._silent: dict[socket.socket, None] = {}  # connections that ask for nothing now, longest first
        self._counters: Counter[str] = Counter()
        self._refused = ""  # whom last, and why
        self._callers: OrderedDict[bytes, _Caller] = OrderedDict()  # by incarnation
        self._stopping = threading.Event()
        self._rate = _Rate(settings.bandwidth, self._stopping)
        self._acceptor: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def listens(self) -> bool:
        return self._listener is not None

    def start(self) -> None:
        """Listens, at first or again. ConfigError where the address cannot be had."""
        self._listener = _listen(self.endpoint)
        self.endpoint = Endpoint(*self._listener.getsockname()[:2])
        self._stopping.clear()
        self._acceptor = threading.Thread(
            target=self._accept, args=(self._listener,), name="kvcascade-peer-accept", daemon=True
        )
        self._acceptor.start()

    async def stop(self, timeout: float = CLOSE_S) -> None:
        """Ends all connections and gives the address free, until `start`. Idempotent.

        Waits `timeout` seconds, and no longer than CLOSE_S, for their threads.
        """
        if self._listener is None or self._acceptor is None:
            return
        with self._lock:
            self._stopping.set()
            sockets = list(self._sockets)
        for sock in (self._listener, *sockets):
            try:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass
        end = time.monotonic() + min(timeout, CLOSE_S)
        while time.monotonic() < end:
            with self._lock:
                threads = [*self._threads, self._acceptor]
            if not any(thread.is_alive() for thread in threads):
                break
            await asyncio.sleep(0.005)
        else:
            log.error("peers: a connection does not end")
        await asyncio.sleep(0)  # grants that the threads let go of on their way out
        self._listener.close()
        self._listener = self._acceptor = None

    # ---- threads

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if not self._stopping.wait(0.05):
                    log.warning("peers: a connection was not accepted reason=%s", error)
                continue
            with self._lock:
                host = _host(address[0])
                allowed = self._may_connect(address[0]) and not self._stopping.is_set() and self._has_room(host)
                self._counters["connections" if allowed else "connections_refused"] += 1
                if not allowed:
                    sock.close()
                    continue
                self._sockets.add(sock)
                self._strangers[sock] = host
                thread = threading.Thread(
                    target=self._serve, args=(sock, address[0]), name="kvcascade-peer", daemon=True
                )
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # The process may have no more threads.
                log.warning("peers: a connection was not accepted reason=%s", error)
                sock.close()
                with self._lock:
                    self._strangers.pop(sock, None)
                    self._threads.discard(thread)
                    self._sockets.discard(sock)

    def _has_room(self, host: str) -> bool:
        """Whether one more connection may be. Under the lock.

        Made by ending one that others only keep for later, or the stranger that has taken longest to prove itself: few
        hosts could keep a fleet out that is quicker than they are.
        """
        if list(self._strangers.values()).count(host) >= STRANGERS_ONE or len(self._threads) >= CONNECTIONS + ENDING:
            return False
        crowded = len(self._strangers) >= STRANGERS
        if not crowded and len(self._threads) < CONNECTIONS:
            return True
        idle: dict[socket.socket, Any] = self._strangers if crowded or not self._silent else self._silent
        if not idle:
            return False
        oldest = next(iter(idle))
        del idle[oldest]
        self._counters["connections_displaced"] += 1
        with suppress(OSError):
            socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        return True

    def _heard(self, channel: Channel, sock: socket.socket) -> tuple[Say, dict[str, Any]]:
        """The caller's next question."""
        with self._lock:
            self._silent[sock] = None
        try:
            return channel.hear()
        finally:
            with self._lock:
                self._silent.pop(sock, None)

    def _may_connect(self, host: str) -> bool:
        if not self._allowed:
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._allowed)

    def _serve(self, sock: socket.socket, host: str) -> None:
        plain = sock
        try:
            try:
                sock = self._secured(sock)
                channel = Channel(sock, self._secret)
                channel.until(time.monotonic() + HANDSHAKE_S)
                channel.secure()
                caller = channel.welcome(self._me())
            finally:
                with self._lock:
                    self._strangers.pop(sock, None)
            self._count("handshakes")
            while not self._stopping.is_set():
                channel.until(time.monotonic() + IDLE_S)
                self._answer(channel, caller, *self._heard(channel, sock))
        except Different as error:
            self._refuse(host, error)
            log.warning("peers: a node was refused host=%s reason=%s", host, error)
            self._on_loop_soon(self._met, error.info)
        except (Refused, ProtocolError) as error:
            self._refuse(host, error)
            log.warning("peers: a connection was refused host=%s reason=%s", host, error)
        except (CascadeError, OSError) as error:
            log.debug("peers: a connection ended host=%s reason=%s", host, error)
        except Exception:
            log.exception("peers: a connection failed host=%s", host)
        finally:
            sock.close()
            plain.close()
            with self._lock:
                self._sockets -= {sock, plain}
                self._threads.discard(threading.current_thread())

    def _secured(self, sock: socket.socket) -> socket.socket:
        if self._tls is None:
            return sock
        secured = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            if self._stopping.is_set():
                secured.close()
                raise TierUnavailable("peer: the daemon is ending")
            self._sockets.add(secured)
            host = self._strangers.pop(sock, None)
            if host is not None:
                self._strangers[secured] = host
        return secured

    def _on_loop_soon(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # The loop is closed: nobody is left to be told.
            pass

    def _on_loop(self, work: Coroutine[Any, Any, T], channel: Channel, timeout: float = MAX_WAIT_S) -> T:
        """What `work` comes to on the loop. Given up when the caller is gone, or the daemon ends."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        end = time.monotonic() + timeout
        while True:
            try:
                return future.result(0.2)
            except TimeoutError:
                if future.done():
                    raise
                if self._stopping.is_set() or time.monotonic() > end:
                    future.cancel()
                    raise TierUnavailable("peer: the daemon is ending, or too busy") from None
                if channel.is_stale():
                    future.cancel()
                    channel.close()
                    raise TierUnavailable("peer: the caller is gone") from None

    def _refuse(self, host: str, error: CascadeError) -> None:
        self._count("refused_callers")
        with self._lock:
            self._refused = f"{host}: {error}"

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counters[name] += by

    def _answer(self, channel: Channel, caller: NodeInfo, said: Say, values: dict[str, Any]) -> None:
        try:
            if take(values, "boot", bytes, lo=16, hi=16) != self._me().boot:
                raise Refused("this node was started anew: what is known of it is out of date")
            namespace = take(values, "namespace", bytes, lo=32, hi=32)
            group = take(values, "group", int, lo=0, hi=255)
            hashes = take(values, "hashes", bytes, hi=MOST_HASHES)
            if said == Say.ASK:
                wait = min(take(values, "wait_ms", int, lo=0) / 1000, MAX_WAIT_S)
                channel.until(time.monotonic() + wait + IDLE_S)
                count = self._on_loop(
                    self._granting.leading(namespace, group, hashes, wait=wait), channel, wait + IDLE_S
                )
                channel.say(Say.ANSWER, {"count": count})
            elif said == Say.FETCH:
                wanted = take(values, "codec", int, default=-1)
                codec = self._codec(Codec(wanted) if wanted in list(Codec) else None)
                self._send(channel, caller, namespace, group, hashes, codec)
            else:
                raise ProtocolError(f"peer: {said.name.lower()} is nothing to ask")
        except CascadeError as error:
            if channel.closed:
                raise
            channel.say(Say.REFUSED, {"reason": str(error)[:1024]})

    def _send(
        self, channel: Channel, caller: NodeInfo, namespace: bytes, group: int, hashes: bytes, codec: Codec
    ) -> None:
        held: list[Grant] = []

        async def hold() -> None:
            grant = await self._granting.grant(namespace, group, hashes)
            if grant is not None:
                held.append(grant)

        sent = False
        try:
            self._on_loop(hold(), channel)
            if held:
                sent = self._send_granted(channel, caller, held[0], codec)
            else:
                channel.say(Say.GRANTED, {"count": 0})
                channel.say(Say.SENT, {"valid": True})
        finally:
            # On the loop `held` is looked at: `hold` may have come to its end while this thread gave it up.
            self._on_loop_soon(self._release, held, sent)

    def _release(self, held: list[Grant], sent: bool) -> None:
        for grant in held:
            self._granting.release(grant, sent=sent)

    def _send_granted(self, channel: Channel, caller: NodeInfo, grant: Grant, codec: Codec) -> bool:
        """Whether all blocks were sent as they are named."""
        # The caller's own deadline ends it sooner, by the connection's end.
        channel.until(time.monotonic() + MAX_WAIT_S, self._settings.deadline)
        channel.say(Say.GRANTED, {"count": len(grant.blocks)})
        batch: list[bytes | memoryview] = []
        size = begin = 0
        for number, (name, block) in enumerate(zip(grant.names, grant.blocks, strict=True)):
            used, parts = encode(block, codec, grant.element)
            header = value.pack(name, b"", block, parts, codec=used, element=grant.element, secret=self._secret)
            batch += [header, *parts]
            size += len(block)
            if size < BATCH and number + 1 < len(grant.blocks):
                continue
            if not grant.valid():
                self._note_served(caller, grant.blocks[:begin])
                channel.send([value.VOID])
                channel.say(Say.SENT, {"valid": False})
                return False
            self._paced(channel, batch)
            batch, size, begin = [], 0, number + 1
        valid = grant.valid()
        channel.say(Say.SENT, {"valid": valid})
        self._note_served(caller, grant.blocks)
        return valid

    def _note_served(self, caller: NodeInfo, sent: Sequence[memoryview]) -> None:
        blocks, nbytes = len(sent), sum(map(len, sent))
        with self._lock:
            self._counters["served_blocks"] += blocks
            self._counters["served_bytes"] += nbytes
            one = self._callers.setdefault(caller.boot, _Caller(caller.name))
            self._callers.move_to_end(caller.boot)
            one.blocks += blocks
            one.nbytes += nbytes
            if len(self._callers) > CALLERS:
                self._callers.popitem(last=False)

    def _paced(self, channel: Channel, parts: Sequence[bytes | memoryview]) -> None:
        if not self._settings.bandwidth:
            channel.send(parts)
            return
        size = min(PIECE, self._settings.bandwidth // PIECES_S)
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), size):
                piece = view[start : start + size]
                self._rate.wait(len(piece))
                channel.send([piece])

    # ---- what people see

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "listen": str(self.endpoint),
                "connections": len(self._threads),
                "tls": self._tls is not None,
                "counters": dict(self._counters),
                "refused": self._refused,
                "callers": [
                    {"name": one.name, "boot": boot.hex(), "served_blocks": one.blocks, "served_bytes": one.nbytes}
                    for boot, one in list(self._callers.items())[-MOST_LISTED:]
                ],
            }

    def problems(self) -> list[str]:
        address = ipaddress.ip_address(self.endpoint.host)
        if self._tls is None and not self._secret.shared and not address.is_loopback:
            return [
                f"peers.listen: {self.endpoint} is open to whoever reaches it: set cluster.secret_file, or peers.tls_*"
            ]
        return []


@dataclass(slots=True)
class _Caller:
    """What one node has had of this one."""

    name: str
    blocks: int = 0
    nbytes: int = 0


class _Rate:
    """Lets so many bytes a second through, all threads together; `wait` ends early when `stopping` is set."""

    def __init__(self, bandwidth: int, stopping: threading.Event) -> None:
        self._bandwidth = bandwidth
        self._stopping = stopping
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._bandwidth
        self._stopping.wait(max(0.0, begin - now))


def _host(address: str) -> str:
    """Who is counted as one: of IPv6 a network, since a host there has as many addresses as it likes."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 4:
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))


def _listen(endpoint: Endpoint) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"peers.listen: {endpoint} cannot be had: {error.strerror or error}") from error
    return sock
