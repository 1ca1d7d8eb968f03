"""Asks other nodes for their blocks, and receives them straight into this node's slots.

Data threads do the IO, over a few connections a node, which are kept while they are used. A node that does not answer
is left alone for a while, longer each time, and then tried by one at a time. Whatever is late, cut off, changed on its
way or void at its source is a reason for each block that it concerns; blocks that came whole before are good, since
each proves itself. The memory of a job is let go of before its answer is given: a call that is cancelled, or late, cuts
its connection.

One node may have a few exchanges at a time and no more, so that one that hangs leaves threads to the others.
"""

import asyncio
import logging
import math
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Self, TypeVar

from kvcascade.config.errors import CascadeError, ProtocolError, Refused, TierUnavailable
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.tiers import value
from kvcascade.tiers.codec import Codec, CodecError, decode
from kvcascade.tiers.remote import Fetch, Secret
from kvcascade.tiers.wire import LATE, SOCKET_BYTES
from kvcascade.tiers.workers import Workers, outlast

from .fleet import NodeInfo
from .peer_wire import Channel, Different, Say, tls_context
from .protocol import MOST_LISTED, take

log = logging.getLogger("kvcascade.peers")

T = TypeVar("T")
Observe = Callable[[int, float, float, int], None]
Address = tuple[Any, ...]  # family, and what its sockets connect to

PAUSE_FIRST_S: Final = 0.5
PAUSE_LAST_S: Final = 30.0
TROUBLE_S: Final = 2 * PAUSE_LAST_S  # so long a node that nobody asks any more counts as in trouble
# So long in all a node is asked in vain, since its last answer, before it is left alone: a question of somebody in a
# hurry may have had no time. No longer than this share of peers.deadline, of which a question has had most by then.
VAIN_S: Final = 0.5
VAIN: Final = 0.8
IDLE_S: Final = 60.0  # a connection that was not used for so long is closed
RESOLVED_S: Final = 60.0  # how long a host name's addresses are believed
NODES: Final = 1024  # that are remembered
SPLIT_BYTES: Final = 1 << 20  # what is smaller goes over one connection
CLOSE_S: Final = 2.0
DATA_NODES: Final = 4  # may send payloads at one time
ASKING: Final = 16  # questions at one time
ASKING_ONE: Final = 4  # of one node
WAITING: Final = 32  # questions whose answer may take long, at one time: hand-offs
WAITING_ONE: Final = 12  # of one node
VOID: Final = "handed on at its source while it was sent"
# After these the length of what follows a header is not known.
OUT_OF_STEP: Final = frozenset({"no value of ours", "another format version", "another block", "another length"})


class _Anew(Refused):
    """Another incarnation answers there: this one is over, which is no trouble."""


class _Busy(TierUnavailable):
    """No thread came round to it in time: nothing is known of the node."""


class _Late(TierUnavailable):
    """No answer came from `since` on, which may be no time at all."""

    def __init__(self, text: str, since: float) -> None:
        super().__init__(text)
        self.since = since


@dataclass(eq=False, slots=True)
class _Peer:
    """One node, in one incarnation."""

    endpoint: Endpoint
    boot: bytes
    data: asyncio.Semaphore
    asking: asyncio.Semaphore
    waiting: asyncio.Semaphore
    name: str = ""
    idle: list[tuple[float, Channel]] = field(default_factory=list)  # under `Peers._lock`
    forgotten: bool = False  # under `Peers._lock`
    addresses: list[Address] = field(default_factory=list)
    resolved_at: float = 0.0
    reason: str = ""
    pause: float = PAUSE_FIRST_S
    retry_at: float = 0.0
    trouble_at: float = -math.inf  # when it failed last, and not because it is over
    vain: float = 0.0  # seconds for which it was asked in vain since its last answer
    vain_until: float = -math.inf  # when the last of them ended
    blocks: int = 0
    nbytes: int = 0


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
        """`met`: told, on the loop, of every node that shook hands. ConfigError for certificates that do not fit."""
        self._settings = settings
        self._secret = secret
        self._me = me
        self._met = met
        self._clock = clock
        self._tls = tls_context(settings, server=False)
        self._lock = Lock()
        self._peers: OrderedDict[tuple[Endpoint, bytes], _Peer] = OrderedDict()
        self._open: set[Channel] = set()  # under _lock
        self._closed = False  # under _lock
        self._data: Workers | None = None
        self._asking: Workers | None = None
        self._waiting: Workers | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._data = Workers("kvcascade-peers", DATA_NODES * self._settings.threads, self._clock)
        self._asking = Workers("kvcascade-peers-ask", ASKING, self._clock)
        self._waiting = Workers("kvcascade-peers-wait", WAITING, self._clock)
        self._sweeper = asyncio.create_task(self._sweep(), name="peers sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._sweeper is not None
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        every = [workers for workers in (self._data, self._asking, self._waiting) if workers is not None]
        for workers in every:
            workers.dismiss()
            workers.withdraw()
        # What waits for bytes that may never come ends now.
        with self._lock:
            self._closed = True
            channels = list(self._open)
        for channel in channels:
            channel.break_off()
        for workers in every:
            if not await workers.stop(CLOSE_S):
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
        assert self._asking is not None and self._waiting is not None
        deadline = self._clock() + min(timeout, self._settings.deadline + wait)
        body = {"boot": boot, "namespace": namespace, "group": group, "hashes": hashes, "wait_ms": int(wait * 1000)}

        def work(channel: Channel) -> int:
            channel.say(Say.ASK, body)
            said, values = channel.hear()
            if said != Say.ANSWER:
                raise ProtocolError(f"peer: {said.name.lower()} is no answer")
            return take(values, "count", int, lo=0)

        # Those that may wait do not keep a thread from those that will not.
        workers, turns = (self._waiting, peer.waiting) if wait else (self._asking, peer.asking)
        try:
            count = await self._exchange(workers, turns, peer, deadline, work)
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
        codec: Codec | None = None,
        observe: Observe | None = None,
    ) -> list[str | None]:
        """Receives blocks of one namespace and group, consecutive ones of a chain; a reason, or None for each.

        `codec`: how the other side had better pack them. `observe`: told how many bytes came within how many seconds,
        after how many the first, and as how many they crossed the link.

        `timeout` is for all of them; where no byte moves for peers.deadline it ends sooner.
        """
        peer = self._peer(endpoint, boot)
        try:
            self._require(peer)
        except TierUnavailable as error:
            return [str(error)] * len(jobs)
        began = self._clock()
        deadline = began + timeout
        total = sum(len(job.into) for job in jobs)
        pieces = self._settings.threads if total >= SPLIT_BYTES else 1
        share = max(1, -(-len(jobs) // pieces))
        parts = [jobs[start : start + share] for start in range(0, len(jobs), share)]
        firsts: list[float] = []
        sent: list[int] = []

        async def receive(part: Sequence[Fetch], reasons: list[str | None]) -> CascadeError | None:
            assert self._data is not None
            try:
                await self._exchange(
                    self._data,
                    peer.data,
                    peer,
                    deadline,
                    lambda on: self._receive(on, boot, part, codec, reasons, firsts, sent),
                    silence=self._settings.deadline,
                )
            except CascadeError as error:
                text = str(error).removeprefix("peer: ")
                reasons[:] = [text if reason is LATE else reason for reason in reasons]
                return error
            return None

        outcomes: list[list[str | None]] = [[LATE] * len(part) for part in parts]
        async with asyncio.TaskGroup() as group:
            receiving = [group.create_task(receive(*one)) for one in zip(parts, outcomes, strict=True)]
        trouble = [failure for task in receiving if (failure := task.result()) is not None]
        reasons = [reason for part in outcomes for reason in part]
        good = sum(len(job.into) for job, reason in zip(jobs, reasons, strict=True) if reason is None)
        seconds = self._clock() - began
        peer.blocks += sum(reason is None for reason in reasons)
        peer.nbytes += good
        # A link that brings blocks, if not all of them in time, is slow and not away; its speed is known by now.
        if trouble and not (good and all(str(one) == f"peer: {LATE}" for one in trouble)):
            self._failed(peer, min(trouble, key=lambda one: one.since if isinstance(one, _Late) else -math.inf))
        else:
            self._worked(peer)
        if observe is not None and good and firsts:
            observe(good, seconds, min(firsts) - began, sum(sent))
        return reasons

    async def _exchange(
        self,
        workers: Workers,
        turns: asyncio.Semaphore,
        peer: _Peer,
        deadline: float,
        work: Callable[[Channel], T],
        silence: float = math.inf,
    ) -> T:
        """Has `work` done with a connection to a node. However this ends, the thread has let go of everything then."""
        await self._resolve(peer, deadline)
        using = _Using(self, peer, deadline, silence)
        begun = math.inf

        def run() -> T | CascadeError:
            nonlocal begun
            if self._clock() >= deadline:
                return _Busy("peer: other fetches took all the time")
            begun = self._clock()
            try:
                with using as channel:
                    return work(channel)
            except CascadeError as error:
                # Not raised: nobody looks at it when the caller has given up.
                return error

        async def in_turn() -> T | CascadeError:
            async with turns:
                return (await workers.run([run]))[0]

        task = asyncio.create_task(in_turn())
        try:
            await asyncio.wait([task], timeout=max(0.0, deadline - self._clock()))
        finally:
            if not task.done():
                using.cut()
                task.cancel()
                await outlast([task])
            if using.info is not None:
                self._met(using.info)
        if task.cancelled():
            late = begun < math.inf
            raise _Late(f"peer: {LATE}", begun) if late else _Busy("peer: other fetches took all the time")
        result = task.result()
        if isinstance(result, CascadeError):
            raise _Late(str(result), begun) if str(result) == f"peer: {LATE}" else result
        return result

    async def _resolve(self, peer: _Peer, deadline: float) -> None:
        """A name's addresses are asked for here: the resolver has no deadline, and would hold a data thread."""
        if peer.addresses and self._clock() - peer.resolved_at < RESOLVED_S:
            return
        host, port = peer.endpoint
        began = self._clock()
        try:
            # Nothing is waited for where the host is a number.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock())):
                    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except TimeoutError:
                raise _Late(f"peer: {host} was not resolved in time", began) from None
            except OSError as error:
                raise TierUnavailable(f"peer: {host}: {error.strerror or error}") from error
        except ValueError as error:  # of the encoding of names
            raise TierUnavailable(f"peer: {host!r} is no name of a host: {error}") from error
        peer.addresses = [(family, address) for family, _, _, _, address in found]
        peer.resolved_at = self._clock()

    def _receive(
        self,
        channel: Channel,
        boot: bytes,
        part: Sequence[Fetch],
        codec: Codec | None,
        reasons: list[str | None],
        firsts: list[float],
        sent: list[int],
    ) -> None:
        name = part[0].name
        hashes = b"".join(job.name.block_hash for job in part)
        body = {"boot": boot, "namespace": name.namespace, "group": name.group, "hashes": hashes, "codec": codec}
        channel.say(Say.FETCH, body)
        said, values = channel.hear()
        if said != Say.GRANTED:
            raise ProtocolError(f"peer: {said.name.lower()} is no answer")
        count = take(values, "count", int, lo=0, hi=len(part))
        firsts.append(self._clock())
        reasons[count:] = ["not there"] * (len(part) - count)
        for number, job in enumerate(part[:count]):
            head = channel.read(value.HEADER_BYTES)
            if head == value.VOID:
                reasons[number:count] = [VOID] * (count - number)
                break
            reasons[number] = self._receive_block(channel, head, job, sent)
            if reasons[number] in OUT_OF_STEP:
                # Its header may say any length: nothing behind it can be found.
                raise TierUnavailable("peer: what came before was not what was asked for")
        said, values = channel.hear()
        if said != Say.SENT:
            raise ProtocolError(f"peer: {said.name.lower()} in place of an answer's end")
        if not take(values, "valid", bool):
            # What proved true was read in time; the rest was overwritten on its way out.
            reasons[:count] = [None if reason is None else VOID for reason in reasons[:count]]

    def _receive_block(self, channel: Channel, head: bytes, job: Fetch, sent: list[int]) -> str | None:
        """One block into its slot. A reason of OUT_OF_STEP: its payload was not read."""
        try:
            header = value.parse(head, job.name, len(job.into))
        except value.BadValue as error:
            return str(error)
        if header.codec == Codec.RAW and header.encoded_bytes != len(job.into):
            return "another length"
        encoded = job.into if header.codec == Codec.RAW else memoryview(bytearray(header.encoded_bytes))
        channel.read_into(encoded)
        try:
            value.prove(header, encoded, self._secret)
            if header.codec != Codec.RAW:
                decode(encoded, header.codec, header.element, job.into)
            value.verify(header, job.into)
            sent.append(header.encoded_bytes)
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
                    old.forgotten = True
                    for _, channel in old.idle:
                        channel.close()
                        self._open.discard(channel)
            data, asking, waiting = map(asyncio.Semaphore, (self._settings.threads, ASKING_ONE, WAITING_ONE))
            peer = self._peers[key] = _Peer(endpoint, boot, data, asking, waiting)
        self._peers.move_to_end(key)
        return peer

    def _require(self, peer: _Peer) -> None:
        if not peer.reason:
            return
        now = self._clock()
        if now < peer.retry_at:
            raise TierUnavailable(f"peer: {peer.endpoint} is left alone for a while: {peer.reason}")
        # This caller tries it; the next one does so if it does not come back with an answer.
        peer.retry_at = now + peer.pause

    def _failed(self, peer: _Peer, error: CascadeError) -> None:
        self.counters["failures"] += 1
        if isinstance(error, _Busy):
            return
        if isinstance(error, _Late):
            now = self._clock()
            peer.vain += max(0.0, now - max(error.since, peer.vain_until))
            peer.vain_until = now
            if peer.vain < min(VAIN_S, VAIN * self._settings.deadline):
                return
        if isinstance(error, Different):
            self._met(error.info)
        text = str(error).removeprefix("peer: ")
        if not peer.reason:
            log.warning("peers: a node is left alone for a while node=%s reason=%s", peer.endpoint, text)
        peer.reason = text
        peer.trouble_at = -math.inf if isinstance(error, _Anew) else self._clock()
        peer.retry_at = self._clock() + peer.pause
        peer.pause = min(2 * peer.pause, PAUSE_LAST_S)

    def _worked(self, peer: _Peer) -> None:
        peer.reason, peer.pause, peer.vain = "", PAUSE_FIRST_S, 0.0

    def take_channel(self, using: "_Using", peer: _Peer) -> Channel:
        """A connection to a node, of those that are idle or a new one; for one thread."""
        while True:
            with self._lock:
                if not peer.idle:
                    break
                _, channel = peer.idle.pop()
            if not channel.closed and not channel.is_stale():
                channel.until(using.deadline, using.silence)
                try:
                    using.enter(channel)
                except TierUnavailable:
                    self.drop_channel(channel)
                    raise
                return channel
            self.drop_channel(channel)
        return self._connect(using, peer)

    def _connect(self, using: "_Using", peer: _Peer) -> Channel:
        trouble = TierUnavailable(f"peer: {peer.endpoint} has no address")
        for family, address in peer.addresses:
            sock: socket.socket | None = None
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, do_handshake_on_connect=False)
                channel = Channel(sock, self._secret)
            except OSError as error:
                # A family of addresses that this machine has not is no reason against the next one.
                if sock is not None:
                    sock.close()
                trouble = TierUnavailable(f"peer: {error.strerror or error}")
                continue
            with self._lock:
                self._open.add(channel)
            try:
                # An answer may be waited for while blocks are being stored; who the other side is, it knows at once.
                channel.until(using.deadline, min(using.silence, self._settings.deadline))
                using.enter(channel)
                channel.connect(address)
                channel.secure()
                info = channel.greet(self._me())
                channel.until(using.deadline, using.silence)
                if info.boot != peer.boot:
                    raise _Anew("peer: this node was started anew: what is known of it is out of date")
            except TierUnavailable as error:
                self.drop_channel(channel)
                trouble = error
                continue
            except BaseException:
                self.drop_channel(channel)
                raise
            peer.name = info.name
            using.info = info
            return channel
        raise trouble

    def enter(self, channel: Channel) -> None:
        """TierUnavailable when all connections are being closed."""
        with self._lock:
            if self._closed:
                raise TierUnavailable("peer: the daemon is ending")

    def give_back(self, peer: _Peer, channel: Channel) -> None:
        """The connection's last answer was read to its end."""
        with self._lock:
            if not peer.forgotten and not self._closed:
                peer.idle.append((self._clock(), channel))
                return
        self.drop_channel(channel)

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
            }
            for peer in list(self._peers.values())[-MOST_LISTED:]  # those used last
        ]

    def problems(self) -> list[str]:
        """What an operator should know, in sentences. A node that was shut down is asked no more, and soon none."""
        since = self._clock() - TROUBLE_S
        # Where a node was started anew, its earlier life is no trouble.
        newest = {peer.endpoint: peer for peer in self._peers.values()}
        return [
            f"{f'node {peer.name} at ' if peer.name else 'the node at '}{peer.endpoint} is left alone: {peer.reason}"
            for peer in newest.values()
            if peer.reason and peer.trouble_at > since
        ]


class _Using:
    """A connection for one exchange: given back if that came to its end, closed if not. `cut` ends it from outside."""

    def __init__(self, peers: Peers, peer: _Peer, deadline: float, silence: float) -> None:
        self._peers = peers
        self._peer = peer
        self.deadline = deadline
        self.silence = silence
        self.info: NodeInfo | None = None  # who it is, if this exchange began with a handshake
        # Under the lock: `cut` is the loop's, the rest the thread's.
        self._lock = Lock()
        self._channel: Channel | None = None
        self._cut = False

    def enter(self, channel: Channel) -> None:
        """From here on `cut` ends what waits on this connection."""
        with self._lock:
            if self._cut:
                raise TierUnavailable(f"peer: {LATE}")
            self._channel = channel
        self._peers.enter(channel)

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            if self._channel is not None:
                self._channel.break_off()

    def __enter__(self) -> Channel:
        return self._peers.take_channel(self, self._peer)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        assert channel is not None
        # A refusal is an answer: the connection is in step.
        if not self._cut and (error is None or (isinstance(error, Refused) and not channel.closed)):
            self._peers.give_back(self._peer, channel)
        else:
            self._peers.drop_channel(channel)
