"""Asks other nodes for their blocks, and receives them straight into this node's slots.

Data threads do the IO, over a few connections a node, which are kept while they are used. A node that does not answer
is left alone for a while, longer each time. Whatever is late, cut off, changed on its way or void at its source is a
reason for each block that it concerns; the memory of a job is let go of before its answer is given.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Self

from kvcascade.config.errors import CascadeError, ProtocolError, Refused, TierUnavailable
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.tiers import value
from kvcascade.tiers.codec import Codec, CodecError, decode
from kvcascade.tiers.remote import Fetch, Secret
from kvcascade.tiers.workers import Workers

from .fleet import NodeInfo
from .peer_wire import SOCKET_BYTES, Channel, Say, tls_context
from .protocol import take

log = logging.getLogger("kvcascade.peers")

Observe = Callable[[int, float, float], None]

PAUSE_FIRST_S: Final = 0.5
PAUSE_LAST_S: Final = 30.0
IDLE_S: Final = 60.0  # a connection that was not used for so long is closed
NODES: Final = 1024  # that are remembered
SPLIT_BYTES: Final = 1 << 20  # what is smaller goes over one connection
CLOSE_S: Final = 2.0


@dataclass(eq=False, slots=True)
class _Peer:
    """One node, in one incarnation."""

    endpoint: Endpoint
    boot: bytes
    name: str = ""
    idle: list[tuple[float, Channel]] = field(default_factory=list)  # under `Peers._lock`
    reason: str = ""
    pause: float = PAUSE_FIRST_S
    retry_at: float = 0.0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Peers:
    """The nodes that this one fetches from. Use as an async context manager, on the loop's thread."""

    def __init__(
        self,
        settings: PeerSettings,
        secret: Secret,
        me: Callable[[], NodeInfo],
        *,
        met: Callable[[NodeInfo], None] = lambda info: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`met`: told of every node that shook hands. ConfigError for certificates that do not fit."""
        self._settings = settings
        self._secret = secret
        self._me = me
        self._met = met
        self._clock = clock
        self._tls = tls_context(settings, server=False)
        self._lock = Lock()
        self._peers: OrderedDict[tuple[Endpoint, bytes], _Peer] = OrderedDict()
        self._open: set[Channel] = set()  # under _lock
        self._data: Workers | None = None
        self._asking: Workers | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._data = Workers("kvcascade-peers", 2 * self._settings.threads, self._clock)
        self._asking = Workers("kvcascade-peers-ask", 2, self._clock)
        self._sweeper = asyncio.create_task(self._sweep(), name="peers sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._data is not None and self._asking is not None and self._sweeper is not None
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        for workers in (self._data, self._asking):
            workers.dismiss()
        # What waits for bytes that may never come ends now.
        with self._lock:
            channels = list(self._open)
        for channel in channels:
            channel.break_off()
        for workers in (self._data, self._asking):
            if not await workers.stop(self._settings.deadline + CLOSE_S):
                log.error("peers: a thread does not end")
        for channel in channels:
            channel.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 4)
            now = self._clock()
            with self._lock:
                for peer in self._peers.values():
                    for since, channel in peer.idle:
                        if now - since > IDLE_S:
                            channel.close()
                            self._open.discard(channel)
                    peer.idle = [(since, channel) for since, channel in peer.idle if not channel.closed]

    # ---- what is asked

    async def ask(
        self,
        endpoint: Endpoint,
        boot: bytes,
        namespace: bytes,
        group: int,
        hashes: bytes,
        *,
        wait: float,
        timeout: float,
    ) -> int:
        """How many leading blocks of a piece of a chain this node has, by its own word.

        `wait`: seconds that it may wait for blocks that are still being stored there. TierUnavailable or Refused when
        it does not say.
        """
        peer = self._peer(endpoint, boot)
        self._require(peer)
        assert self._asking is not None
        deadline = self._clock() + min(timeout, self._settings.deadline + wait)
        body = {"boot": boot, "namespace": namespace, "group": group, "hashes": hashes, "wait_ms": int(wait * 1000)}

        def work() -> int:
            with _Using(self, peer, deadline) as channel:
                channel.say(Say.ASK, body)
                said, values = channel.hear()
                if said != Say.ANSWER:
                    raise ProtocolError(f"peer: {said.name.lower()} is no answer")
                return take(values, "count", int, lo=0)

        try:
            count = (await self._asking.run([work]))[0]
        except CascadeError as error:
            self._failed(peer, error)
            raise
        self._worked(peer)
        return count

    async def fetch(
        self,
        endpoint: Endpoint,
        boot: bytes,
        jobs: Sequence[Fetch],
        timeout: float,
        *,
        observe: Observe | None = None,
    ) -> list[str | None]:
        """Receives blocks of one namespace and group, consecutive ones of a chain; a reason, or None for each."""
        peer = self._peer(endpoint, boot)
        try:
            self._require(peer)
        except TierUnavailable as error:
            return [str(error)] * len(jobs)
        assert self._data is not None
        began = self._clock()
        deadline = began + min(timeout, self._settings.deadline)
        total = sum(len(job.into) for job in jobs)
        pieces = self._settings.threads if total >= SPLIT_BYTES else 1
        share = max(1, -(-len(jobs) // pieces))
        parts = [jobs[start : start + share] for start in range(0, len(jobs), share)]
        firsts: list[float] = []
        trouble: list[CascadeError] = []

        def work(part: Sequence[Fetch]) -> list[str | None]:
            reasons: list[str | None] = ["no answer in time"] * len(part)
            try:
                with _Using(self, peer, deadline) as channel:
                    self._receive(channel, boot, part, reasons, firsts)
            except CascadeError as error:
                trouble.append(error)
                # What came before is as good as it proved; void only where the source says so, which it did not.
                text = str(error).removeprefix("peer: ")
                return [text] * len(part)
            return reasons

        try:
            done = await self._data.run([lambda part=part: work(part) for part in parts])  # type: ignore[misc]
        finally:
            if trouble:
                self._failed(peer, trouble[0])
        reasons = [reason for part in done for reason in part]
        good = sum(len(job.into) for job, reason in zip(jobs, reasons, strict=True) if reason is None)
        seconds = self._clock() - began
        peer.blocks += sum(reason is None for reason in reasons)
        peer.nbytes += good
        peer.seconds += seconds
        if not trouble:
            self._worked(peer)
        if observe is not None and good and firsts:
            observe(good, seconds, min(firsts) - began)
        return reasons

    def _receive(
        self, channel: Channel, boot: bytes, part: Sequence[Fetch], reasons: list[str | None], firsts: list[float]
    ) -> None:
        name = part[0].name
        hashes = b"".join(job.name.block_hash for job in part)
        body = {"boot": boot, "namespace": name.namespace, "group": name.group, "hashes": hashes}
        channel.say(Say.FETCH, body)
        said, values = channel.hear()
        if said != Say.GRANTED:
            raise ProtocolError(f"peer: {said.name.lower()} is no answer")
        count = take(values, "count", int, lo=0, hi=len(part))
        firsts.append(self._clock())
        for number, job in enumerate(part):
            reasons[number] = self._receive_block(channel, job) if number < count else "not there"
        said, values = channel.hear()
        if said != Say.SENT or not take(values, "valid", bool):
            reasons[:] = ["handed on at its source while it was sent"] * len(part)

    def _receive_block(self, channel: Channel, job: Fetch) -> str | None:
        """One block into its slot. CascadeError where what follows on the channel is not known any more."""
        # A header that is not of this block may say any length: nothing behind it can be found.
        header = value.parse(channel.read(value.HEADER_BYTES), job.name, len(job.into))
        encoded = job.into if header.codec == Codec.RAW else memoryview(bytearray(header.encoded_bytes))
        if len(encoded) != header.encoded_bytes:
            raise value.BadValue("another length")
        channel.read_into(encoded)
        try:
            value.prove(header, encoded, self._secret)
            if header.codec != Codec.RAW:
                decode(encoded, header.codec, header.element, job.into)
            value.verify(header, job.into)
        except (value.BadValue, CodecError) as error:
            return str(error)
        return None

    # ---- nodes and connections

    def _peer(self, endpoint: Endpoint, boot: bytes) -> _Peer:
        key = (endpoint, boot)
        peer = self._peers.get(key)
        if peer is None:
            while len(self._peers) >= NODES:
                _, old = self._peers.popitem(last=False)
                with self._lock:
                    for _, channel in old.idle:
                        channel.close()
                        self._open.discard(channel)
            peer = self._peers[key] = _Peer(endpoint, boot)
        self._peers.move_to_end(key)
        return peer

    def _require(self, peer: _Peer) -> None:
        if peer.reason and self._clock() < peer.retry_at:
            raise TierUnavailable(f"peer: {peer.endpoint} is left alone for a while: {peer.reason}")

    def _failed(self, peer: _Peer, error: CascadeError) -> None:
        self.counters["failures"] += 1
        text = str(error).removeprefix("peer: ")
        if not peer.reason:
            log.warning("peers: a node is left alone for a while node=%s reason=%s", peer.endpoint, text)
        peer.reason = text
        peer.retry_at = self._clock() + peer.pause
        peer.pause = min(2 * peer.pause, PAUSE_LAST_S)

    def _worked(self, peer: _Peer) -> None:
        peer.reason, peer.pause = "", PAUSE_FIRST_S

    def take_channel(self, peer: _Peer, deadline: float) -> Channel:
        """A connection to a node, of those that are idle or a new one; for one thread."""
        while True:
            with self._lock:
                if not peer.idle:
                    break
                _, channel = peer.idle.pop()
            if not channel.closed and not channel.is_stale():
                channel.until(deadline)
                return channel
            channel.close()
            with self._lock:
                self._open.discard(channel)
        return self._connect(peer, deadline)

    def _connect(self, peer: _Peer, deadline: float) -> Channel:
        left = deadline - self._clock()
        if left <= 0:
            raise TierUnavailable("peer: no answer in time")
        try:
            sock = socket.create_connection(peer.endpoint, timeout=left)
        except OSError as error:
            raise TierUnavailable(f"peer: {error.strerror or error}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock)
        except (OSError, ssl.SSLError) as error:
            sock.close()
            raise TierUnavailable(f"peer: {error}") from error
        channel = Channel(sock, self._secret)
        with self._lock:
            self._open.add(channel)
        try:
            channel.until(deadline)
            info = channel.greet(self._me())
            if info.boot != peer.boot:
                raise Refused("peer: this node was started anew: what is known of it is out of date")
        except BaseException:
            self.drop_channel(channel)
            raise
        peer.name = info.name
        return channel

    def give_back(self, peer: _Peer, channel: Channel) -> None:
        """The connection's last answer was read to its end."""
        with self._lock:
            peer.idle.append((self._clock(), channel))

    def drop_channel(self, channel: Channel) -> None:
        """The connection is of no use any more."""
        channel.close()
        with self._lock:
            self._open.discard(channel)

    # ---- what people see

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "name": peer.name,
                "endpoint": str(peer.endpoint),
                "boot": peer.boot.hex(),
                "state": "sick" if peer.reason else "ok",
                "reason": peer.reason,
                "fetched_blocks": peer.blocks,
                "fetched_bytes": peer.nbytes,
                "bandwidth": peer.nbytes / peer.seconds if peer.seconds else 0.0,
            }
            for peer in self._peers.values()
        ]


class _Using:
    """A connection for one exchange: given back if that came to its end, closed if not."""

    def __init__(self, peers: Peers, peer: _Peer, deadline: float) -> None:
        self._peers = peers
        self._peer = peer
        self._channel = peers.take_channel(peer, deadline)

    def __enter__(self) -> Channel:
        return self._channel

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # A refusal is an answer: the connection is in step.
        if error is None or (isinstance(error, Refused) and not self._channel.closed):
            self._peers.give_back(self._peer, self._channel)
        else:
            self._peers.drop_channel(self._channel)
