"""Questions and payloads to the nodes of a Redis, as the tier's threads carry them.

Each thread has connections of its own, one a node. A call that is given up, or whose time is up, has its connections
cut (`Course`), and goes on when the threads have let go of its memory. Payloads go between a connection and the slots
of the caller, where they prove what they are (value.py). A reply that is late, cut off or not Redis's closes its
connection, and is a reason for each block that it concerns: positions never shift. In a cluster, keys that move are
followed.
"""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from threading import Lock, local
from typing import Any, Final

from kvcascade.config.errors import TierUnavailable
from kvcascade.config.settings import RedisSettings

from . import value
from .codec import Codec, CodecError, decode, encode
from .redis_wire import MAX_SMALL, Node, RedisSaysNo, Topology, Wire, command
from .remote import BlockName, Fetch, Secret, Send
from .wire import LATE, SILENT
from .workers import outlast

# On one connection so many blocks are asked for at once, and so many bytes: Redis answers from memory that it takes for
# this, and with 32 blocks of 2 MiB spends more on that than on sending (1.3 GB/s; 4.0 with two).
PIPELINE: Final = 64
PIPELINE_BYTES: Final = 4 << 20
SMALL_PIPELINE: Final = 1024
BATCH: Final = 1 << 20  # of small blocks go out in one call
MOST_SKIPPED: Final = 4 << 20  # bytes of a value that is none of ours; rather than more a connection is given up
ABSENT: Final = "not there"
REDIRECTIONS: Final = 3


class Course:
    """What a call has met with in its threads, and which connections may be touching its caller's memory."""

    def __init__(self, deadline: float, most: int = MAX_SMALL) -> None:
        """`most`: bytes that a small value may have; longer ones are none of ours."""
        self.deadline = deadline
        self.most = most
        self.begun = math.inf  # when a thread came round to it first
        self.answers = 0
        self.firsts: list[float] = []
        self.sent: list[int] = []  # bytes of payloads that crossed the link whole
        self.connecting: Node | None = None
        self.trouble: dict[Node, str] = {}
        self._lock = Lock()
        self.over = False
        self._wires: set[Wire] = set()
        self._let_go: Callable[[], object] = lambda: None

    def begin(self, wire: Wire) -> None:
        """From here to `end` the memory is touched. TierUnavailable once it must not be any more."""
        with self._lock:
            if self.over:
                raise TierUnavailable(f"redis: {LATE}")
            self._wires.add(wire)

    def end(self, wire: Wire) -> None:
        """Whoever was told that it is over has begun nothing, and ends nothing."""
        with self._lock:
            if wire in self._wires:
                self._wires.remove(wire)
                if self.over and not self._wires:
                    self._let_go()

    async def stop(self) -> None:
        """Cuts what is under way, and waits until nobody touches the memory."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self.over = True
            if not self._wires:
                return
            self._let_go = lambda: loop.call_soon_threadsafe(gone.set_result, None)
            for wire in self._wires:
                wire.cut()
        await outlast([gone])


class Nodes:
    """The connections of all threads, and what is said over them. For the tier's threads, but for `cut` and `close`.

    Those that ask or carry raise nothing for trouble: it stands in the place of a reply, or of a block's reason, and in
    the course by its node.
    """

    def __init__(self, settings: RedisSettings, secret: Secret, topology: Topology, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._secret = secret
        self._topology = topology
        self._clock = clock
        self._prefix = settings.key_prefix.encode()
        self._own = local()
        self._lock = Lock()
        self._all: set[Wire] = set()  # changed under _lock
        self._closed = False
        # The loop's thread alone changes it: nodes of a cluster that are left alone, and why.
        self.away: dict[Node, str] = {}

    def cut(self) -> None:
        """Ends all connections, and lets no others be made."""
        self._closed = True
        with self._lock:
            for wire in self._all:
                wire.cut()

    def close(self) -> None:
        """When all threads have ended."""
        with self._lock:
            for wire in self._all:
                wire.close()
            self._all.clear()

    def keys_of(self, names: Iterable[BlockName]) -> list[bytes]:
        """The keys of blocks' values."""
        head = self._prefix + b":b:"
        keys = []
        for (namespace, group), some in groupby(names, lambda name: (name.namespace, name.group)):
            keys += self._secret.names_of(namespace, group, (name.block_hash for name in some))
        return [head + key for key in keys]

    def wire(self, node: Node, deadline: float, silence: float = math.inf, *, probe: bool = False) -> Wire:
        """This thread's connection to a node. TierUnavailable."""
        away = None if probe else self.away.get(node)
        if away is not None:
            raise TierUnavailable(away)
        if deadline <= self._clock():
            raise TierUnavailable(f"redis: {LATE}")  # and the connection is as good as it was
        wires: dict[Node, Wire] = self._own.__dict__.setdefault("by_node", {})
        wire = wires.get(node)
        if wire is not None and (wire.stale or not wire.idle()):
            wire.close()
        if wire is None or wire.closed:
            made = self._connect(node, min(deadline - self._clock(), silence))
            with self._lock:
                if wire is not None:
                    self._all.discard(wire)
                self._all.add(made)
            wires[node] = wire = made
        if self._closed:
            raise TierUnavailable("redis: closed")
        wire.until(deadline, silence)
        return wire

    def _connect(self, node: Node, limit: float) -> Wire:
        began = self._clock()
        try:
            return self._topology.connect(node, limit)
        except TierUnavailable as error:
            if limit < self._settings.connect_timeout and self._clock() - began >= limit:
                raise TierUnavailable(f"redis: {LATE}") from error  # it had less time than a connection may take
            raise

    def prune(self) -> None:
        """Closes this thread's connections to nodes that are none of the cluster's any more. Not while it uses any."""
        if self._own.__dict__.get("version") == self._topology.version:
            return
        self._own.version = self._topology.version
        nodes = set(self._topology.nodes)
        wires: dict[Node, Wire] = self._own.__dict__.get("by_node", {})
        for node in [one for one in wires if one not in nodes]:
            wire = wires.pop(node)
            wire.close()
            with self._lock:
                self._all.discard(wire)

    def _places(self, keys: Mapping[int, bytes], numbers: Iterable[int]) -> tuple[dict[Node, list[int]], str]:
        """Which of the numbered keys each node has; those that nobody has are left out, and why."""
        self.prune()
        places: dict[Node, list[int]] = defaultdict(list)
        nowhere = ""
        for number in numbers:
            try:
                places[self._topology.node_of(keys[number])].append(number)
            except TierUnavailable as error:
                nowhere = str(error)
                self._topology.doubt()
        return places, nowhere

    def ask(self, commands: Sequence[tuple[bytes, bytes]], course: Course) -> list[Any]:
        """Small replies to (key, packed command), in order; errors are not raised, but stand in their places.

        All nodes are asked at once, SMALL_PIPELINE commands at a time.
        """
        replies: list[Any] = [TierUnavailable(f"redis: {LATE}")] * len(commands)
        keys = {number: key for number, (key, _) in enumerate(commands)}
        left: Sequence[int] = range(len(commands))
        asked: dict[int, Node] = {}
        for _ in range(REDIRECTIONS):
            places, nowhere = self._places(keys, left)
            asked |= {number: node for node, mine in places.items() for number in mine}
            if nowhere:
                for number in set(left).difference(*places.values()):
                    replies[number] = TierUnavailable(nowhere)
            self._ask_all(commands, places, replies, course)
            left = [
                number
                for number in left
                if isinstance(reply := replies[number], RedisSaysNo)
                and reply.code == "MOVED"
                and self._moved(keys[number], reply, asked[number])
            ]
            if not left:
                break
        for number, reply in enumerate(replies):
            if isinstance(reply, RedisSaysNo) and reply.code == "ASK":
                replies[number] = self._ask_other(reply, asked[number], commands[number][1], course)
        self._note_refusals(reply.code for reply in replies if isinstance(reply, RedisSaysNo))
        return replies

    def _ask_all(
        self,
        commands: Sequence[tuple[bytes, bytes]],
        places: dict[Node, list[int]],
        replies: list[Any],
        course: Course,
    ) -> None:
        wires: dict[Node, Wire] = {}

        def lost(node: Node, error: TierUnavailable, rest: Iterable[int]) -> None:
            if node in wires:
                wires.pop(node).close()
            for number in rest:
                replies[number] = error
            course.trouble[node] = str(error).removeprefix("redis: ")

        for node, numbers in places.items():
            try:
                wires[node] = self.wire(node, course.deadline)
            except TierUnavailable as error:
                lost(node, error, numbers)
        try:
            for start in range(0, max(map(len, places.values()), default=0), SMALL_PIPELINE):
                some = {node: numbers[start : start + SMALL_PIPELINE] for node, numbers in places.items()}
                for node, wire in list(wires.items()):
                    try:
                        wire.send([b"".join(commands[number][1] for number in some[node])])
                    except TierUnavailable as error:
                        lost(node, error, places[node][start:])
                for node, wire in list(wires.items()):
                    done = start
                    try:
                        for number in some[node]:
                            try:
                                replies[number] = wire.reply(course.most)
                            except RedisSaysNo as no:
                                replies[number] = no
                            done += 1
                        course.answers += done - start
                    except TierUnavailable as error:
                        lost(node, error, places[node][done:])
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise

    def _moved(self, key: bytes, error: RedisSaysNo, asked: Node) -> bool:
        """Learns where a key is now; False where that is no address."""
        node = _address(error, asked)
        if node is None:
            self._topology.doubt()
        else:
            self._topology.moved(key, node)
        return node is not None

    def _ask_other(self, error: RedisSaysNo, asked: Node, packed: bytes, course: Course) -> Any:
        """Asks the node to which a cluster is just moving the key."""
        try:
            wire = self._asking(error, asked, course)
            try:
                wire.send([packed])
                return wire.reply(course.most)
            except RedisSaysNo:
                raise
            except BaseException:
                wire.close()
                raise
        except TierUnavailable as again:
            return again

    def _asking(self, error: RedisSaysNo, asked: Node, course: Course, silence: float = math.inf) -> Wire:
        node = _address(error, asked)
        if node is None:
            raise TierUnavailable("redis: not the Redis protocol")
        wire = self.wire(node, course.deadline, silence)
        try:
            wire.send([command(b"ASKING")])
            wire.reply()
        except RedisSaysNo:
            raise
        except BaseException:
            wire.close()
            raise
        return wire

    def _note_refusals(self, codes: Iterable[str]) -> None:
        """A node that may not write any more is not the master: the next connection asks who is."""
        if any(code in ("READONLY", "CLUSTERDOWN") for code in codes):
            self._topology.doubt()
            if not self._topology.is_cluster:
                with self._lock:
                    for wire in self._all:
                        wire.stale = True

    def exists(self, names: Iterable[BlockName], course: Course, *, chain: bool) -> list[Any]:
        """For each block 1 where it is there and 0 where not; else the error, as in `ask`.

        Of a chain, what lies behind a hole is of no use: no more is asked for once there is one among the answers.
        """
        left, replies = iter(names), list[Any]()
        some = SMALL_PIPELINE * max(1, len(self._topology.nodes))
        while keys := self.keys_of(islice(left, some)):
            # All keys are as long as each other: of a command only they differ.
            head = command(b"EXISTS", keys[0])[: -len(keys[0]) - 2]
            told = self.ask([(key, b"%b%b\r\n" % (head, key)) for key in keys], course)
            replies += told
            if chain and any(one != 1 for one in told):
                break
        return replies

    def renew(self, names: Iterable[BlockName], course: Course) -> list[Any]:
        """Lets blocks live for another TTL; for each 1 where it is there and 0 where not, errors as in `ask`."""
        ttl = b"%d" % int(self._settings.ttl * 1000)
        return self.ask([(key, command(b"PEXPIRE", key, ttl)) for key in self.keys_of(names)], course)

    def read(self, keys: Sequence[bytes], course: Course) -> list[Any]:
        """The keys' values, or None; errors as in `ask`, or TierUnavailable."""
        if self._topology.is_cluster or not keys:
            return self.ask([(key, command(b"GET", key)) for key in keys], course)
        replies = []
        for start in range(0, len(keys), SMALL_PIPELINE):
            some = keys[start : start + SMALL_PIPELINE]
            (reply,) = self.ask([(some[0], command(b"MGET", *some))], course)
            if isinstance(reply, TierUnavailable):
                raise reply
            if not isinstance(reply, list) or len(reply) != len(some):
                raise TierUnavailable("redis: not the Redis protocol")
            replies += reply
        return replies

    def _carry(
        self,
        keys: Mapping[int, bytes],
        numbers: Sequence[int],
        reasons: list[str | None],
        course: Course,
        send: Callable[[Wire, Sequence[int]], None],
        hear: Callable[[Wire, int], str | None],
        window: int,
    ) -> None:
        """Payloads: `send` asks for jobs, or sends them; `hear` gives each one's reason. Follows a cluster's moves."""
        for _ in range(REDIRECTIONS):
            places, nowhere = self._places(keys, numbers)
            for number in set(numbers).difference(*places.values()):
                reasons[number] = nowhere.removeprefix("redis: ")
            for done, (node, mine) in enumerate(places.items()):
                # A node that says nothing leaves the others their part of the time.
                part = max(0.0, course.deadline - self._clock()) / (len(places) - done)
                self._carry_one(node, mine, reasons, course, send, hear, window, silence=part)
            asked = {number: node for node, mine in places.items() for number in mine}
            moved = []
            for number in numbers:
                code, _, rest = (reasons[number] or "").partition(" ")
                if code not in ("MOVED", "ASK"):
                    continue
                no = RedisSaysNo(f"{code} {rest}")
                reasons[number] = "it is on its way to another node"
                if code == "MOVED" and self._moved(keys[number], no, asked[number]):
                    moved.append(number)
                elif code == "ASK" and (other := _address(no, asked[number])) is not None:
                    self._carry_one(other, [number], reasons, course, send, hear, window, asking=no)
            if not moved:
                return
            numbers = moved

    def _carry_one(
        self,
        node: Node,
        mine: Sequence[int],
        reasons: list[str | None],
        course: Course,
        send: Callable[[Wire, Sequence[int]], None],
        hear: Callable[[Wire, int], str | None],
        window: int,
        silence: float = math.inf,
        asking: RedisSaysNo | None = None,
    ) -> None:
        silence = min(silence, self._settings.deadline)
        rest = deque(mine)
        while rest:
            wire: Wire | None = None
            try:
                course.connecting = node
                if asking is None:
                    wire = self.wire(node, course.deadline, silence)
                else:
                    wire = self._asking(asking, node, course, silence)
                course.begin(wire)
                unheard = 0  # of those at the head of `rest`, which were sent
                while rest:
                    if unheard <= window // 2:
                        some = list(islice(rest, unheard, window))
                        send(wire, some)
                        unheard += len(some)
                    reasons[rest[0]] = hear(wire, rest[0])
                    course.answers += 1
                    unheard -= 1
                    rest.popleft()
                    if wire.closed:
                        break
            except TierUnavailable as error:
                text = str(error).removeprefix("redis: ")
                if course.over or (text == SILENT and silence < self._settings.deadline):
                    text = LATE
                course.trouble[node] = text
                while rest:
                    reasons[rest.popleft()] = text
                if wire is not None:
                    wire.close()
            except BaseException:
                if wire is not None:
                    wire.close()
                raise
            finally:
                if wire is not None:
                    course.end(wire)

    def fetch(self, jobs: Sequence[Fetch], numbers: Sequence[int], reasons: list[str | None], course: Course) -> None:
        """Receives those of the jobs that are numbered; each one's reason is then in its place."""
        keys = dict(zip(numbers, self.keys_of(jobs[number].name for number in numbers), strict=True))

        def send(wire: Wire, some: Sequence[int]) -> None:
            # Not by `command`, which takes thrice as long.
            wire.send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(keys[number]), keys[number]) for number in some])

        def hear(wire: Wire, number: int) -> str | None:
            return self._receive(wire, jobs[number], course)

        self._carry(keys, numbers, reasons, course, send, hear, _window(len(jobs[numbers[0]].into)))

    def _receive(self, wire: Wire, job: Fetch, course: Course) -> str | None:
        """One value from the wire into its slot. The wire is in step then, or closed if the value is too long."""
        try:
            size = wire.value()
        except RedisSaysNo as error:
            return "no value of ours" if error.code == "WRONGTYPE" else f"{error.code} {error.rest}"
        course.firsts.append(self._clock())
        if size is None:
            return ABSENT
        left = size
        try:
            if size < value.HEADER_BYTES:
                raise value.BadValue("no value of ours")
            head = memoryview(bytearray(value.HEADER_BYTES))
            wire.read_into(head)
            left -= len(head)
            header = value.parse(value.veiled(head, job.name, self._secret), job.name, len(job.into))
            if left != header.encoded_bytes:
                raise value.BadValue("another length")
            encoded = job.into if header.codec == Codec.RAW else memoryview(bytearray(left))
            if len(encoded) != left:
                raise value.BadValue("another length")
            wire.read_into(encoded)
            left = 0
            value.prove(header, encoded, self._secret)
            if header.codec != Codec.RAW:
                decode(encoded, header.codec, header.element, job.into)
            value.verify(header, job.into)
            course.sent.append(header.encoded_bytes)
        except (value.BadValue, CodecError) as error:
            reason: str | None = str(error)
        else:
            reason = None
        if left > MOST_SKIPPED:
            wire.close()
        else:
            wire.skip(left)
            wire.end_of_value()
        return reason

    def store(
        self,
        codec: Codec,
        jobs: Sequence[Send],
        numbers: Sequence[int],
        reasons: list[str | None],
        course: Course,
    ) -> None:
        """Sends those of the jobs that are numbered; each one's reason is then in its place."""
        keys = dict(zip(numbers, self.keys_of(jobs[number].name for number in numbers), strict=True))
        ttl = b"%d" % int(self._settings.ttl * 1000)

        def send(wire: Wire, some: Sequence[int]) -> None:
            parts: list[bytes | memoryview] = []
            size = 0
            for number in some:
                packed = self._packed(keys[number], jobs[number], codec, ttl)
                course.sent.append(sum(map(len, packed)))
                parts += packed
                size += len(jobs[number].payload)
                if size >= BATCH:
                    wire.send(parts)
                    parts, size = [], 0
            wire.send(parts)

        window = _window(len(jobs[numbers[0]].payload))
        self._carry(keys, numbers, reasons, course, send, lambda wire, _: self._taken(wire), window)
        self._note_refusals((reasons[number] or "").partition(" ")[0] for number in numbers)

    def _packed(self, key: bytes, job: Send, codec: Codec, ttl: bytes) -> list[bytes | memoryview]:
        used, parts = encode(job.payload, codec, job.element)
        header = value.pack(
            job.name, job.parent, job.payload, parts, codec=used, element=job.element, secret=self._secret
        )
        header = value.veiled(header, job.name, self._secret)
        size = len(header) + sum(map(len, parts))
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
        return [begin + header, *parts, b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)]

    def _taken(self, wire: Wire) -> str | None:
        try:
            wire.reply()
        except RedisSaysNo as error:
            return f"{error.code} {error.rest}"
        return None


def _address(error: RedisSaysNo, asked: Node) -> Node | None:
    """The node that a redirection names: without a host, one at the host of the node that was asked."""
    host, colon, port = error.rest.rpartition(" ")[2].rpartition(":")
    host = host or asked[0]
    return (host, int(port)) if colon and host not in ("", "?") and port.isdigit() and len(port) < 6 else None


def _window(size: int) -> int:
    """How many blocks of this size are asked for at once."""
    return max(2, min(PIPELINE, PIPELINE_BYTES // max(1, size)))
