"""The Redis tier: blocks that every node of the fleet can read, and the small values by which nodes find each other.

Redis may be away, slow, full, or evict what it likes: each of these is a reason, counted, and a state in `status`.
After a failure the tier is left alone for a while, longer each time, until a probe succeeds. A chain is never assumed
to be whole: what follows a hole is of no use, and positions never shift.

Two kinds of threads do the IO, each thread with connections of its own: some for payloads, one for what is small, so
that no question waits behind a block on its way. A call that has begun is always waited for by its deadline, also by a
caller that was cancelled, because it may be touching the caller's memory.

Whatever is read proves itself (value.py): without the fleet's secret a writer of Redis can cause misses, and make up
blocks for hashes that it knows; with it, misses.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock, local
from typing import Any, Final, TypeVar

from kvcascade.config.errors import CascadeError, TierUnavailable
from kvcascade.config.settings import RedisSettings

from . import value
from .codec import Codec, CodecError, decode, encode
from .redis_wire import Node, RedisSaysNo, Topology, Wire, command, topology
from .remote import BlockName, Fetch, Secret, Send
from .workers import Workers

log = logging.getLogger("kvcascade.redis")

T = TypeVar("T")
Observe = Callable[[int, float, float], None]

PROBE_S: Final = 2.0  # how often Redis is asked how it is
PAUSE_FIRST_S: Final = 0.5  # before a probe after a failure, doubling
PAUSE_LAST_S: Final = 30.0
PIPELINE: Final = 32  # payloads asked for at once on one connection
SMALL_PIPELINE: Final = 1024
ENDS_S: Final = 1.0  # beyond its deadlines, for the threads to end
DAY_S: Final = 86400.0
MOST_MEMBERS: Final = 2048
ABSENT: Final = "not there"


class RedisTier:
    """The blocks in Redis. `open` before anything else; all methods are for the loop's thread."""

    def __init__(
        self,
        settings: RedisSettings,
        secret: Secret,
        *,
        codec: Callable[[], Codec] = lambda: Codec.RAW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`codec`: how the next payloads are packed. ConfigError for settings that can never work."""
        self._settings = settings
        self._secret = secret
        self._codec = codec
        self._clock = clock
        self._topology: Topology = topology(settings)
        self._topology_lock = Lock()
        self._prefix = settings.key_prefix.encode()
        self._wires = local()
        self._all_wires: set[Wire] = set()  # changed under _topology_lock
        # The loop's thread alone changes what follows.
        self._data: Workers | None = None
        self._small: Workers | None = None
        self._probe: asyncio.Task[None] | None = None
        self._trouble = asyncio.Event()
        self._probed = asyncio.Event()
        self._reason = "not connected yet"
        self._pause = PAUSE_FIRST_S
        self._info: dict[str, Any] = {}
        self._latency = 0.0
        self._day = clock()
        self._written = 0
        self.counters: Counter[str] = Counter()

    # ---- life

    async def open(self) -> None:
        """Starts the threads and a first probe, and waits for that a moment. A Redis that is away is no error."""
        self._data = Workers("kvcascade-redis", self._settings.threads, self._clock)
        self._small = Workers("kvcascade-redis-small", 1, self._clock)
        self._probe = asyncio.create_task(self._watch(), name="redis probe")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.connect_timeout):
                await self._probed.wait()

    async def close(self) -> None:
        """Ends the threads and the connections, at the latest when the deadlines of what is under way have come."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        self._reason = "closed"
        limit = self._settings.deadline + self._settings.connect_timeout + ENDS_S
        for workers in (self._data, self._small):
            if workers is not None and not await workers.stop(limit):
                log.error("redis: a thread does not end")
        for wire in self._all_wires:
            wire.close()
        self._all_wires.clear()
        self._topology.close()

    @property
    def available(self) -> bool:
        """Whether the last that was heard of Redis was good."""
        return not self._reason

    async def _watch(self) -> None:
        while True:
            self._trouble.clear()
            began = self._clock()
            try:
                self._info = await self._run_small(self._read_info, self._settings.deadline)
            except CascadeError as error:
                self._failed(str(error), probe=True)
            except Exception as error:
                log.exception("probe failed")
                self._failed(str(error), probe=True)
            else:
                self._latency = self._clock() - began
                if self._reason:
                    log.info("redis is there url=%s", self._topology.redacted)
                self._reason, self._pause = "", PAUSE_FIRST_S
            self._probed.set()
            if self._reason:
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, PAUSE_LAST_S)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S):
                        await self._trouble.wait()
                        await asyncio.sleep(self._pause)

    def _failed(self, reason: str, *, probe: bool = False) -> None:
        if not self._reason or self._reason == "not connected yet":
            log.warning("redis is left alone for a while reason=%s", reason)
        self._reason = reason.removeprefix("redis: ")
        self.counters["failures"] += 1
        if not probe:
            self._trouble.set()

    def _read_info(self, deadline: float) -> dict[str, Any]:
        wire = self._wire(self._topology.node_of(b"probe"), deadline)
        wire.send([command(b"INFO", b"server"), command(b"INFO", b"memory"), command(b"INFO", b"replication")])
        texts = [wire.reply() for _ in range(3)]
        info = dict(
            line.split(":", 1) for text in texts for line in text.decode("utf-8", "replace").splitlines() if ":" in line
        )
        return {
            "version": info.get("redis_version", ""),
            "role": info.get("role", ""),
            "memory": _number(info.get("used_memory")),
            "memory_limit": _number(info.get("maxmemory")),
            "policy": info.get("maxmemory_policy", ""),
        }

    # ---- blocks

    def key_of(self, name: BlockName) -> bytes:
        """The key of a block's value."""
        return self._prefix + b":b:" + self._secret.name_of(name)

    async def present(self, names: Sequence[BlockName], timeout: float) -> int:
        """How many leading ones of these blocks Redis has. TierUnavailable when that cannot be told."""
        keys = [self.key_of(name) for name in names]
        there = await self._run_small(lambda until: self._exists(keys, until), timeout)
        count = next((number for number, one in enumerate(there) if one is not True), len(there))
        if not count and there and there[0] is None:
            raise TierUnavailable("redis: the node that has the first block does not answer")
        return count

    async def fetch(self, jobs: Sequence[Fetch], timeout: float, *, observe: Observe | None = None) -> list[str | None]:
        """Receives blocks into their slots; a reason, or None for each that is whole and proved, in order."""
        if not self.available:
            return [self._reason] * len(jobs)
        began = self._clock()
        firsts: list[float] = []
        reasons = await self._spread(jobs, timeout, lambda some, until: self._get(some, until, firsts))
        good = sum(len(job.into) for job, reason in zip(jobs, reasons, strict=True) if reason is None)
        self._count("fetched", good, reasons)
        if observe is not None and good and firsts:
            observe(good, self._clock() - began, min(firsts) - began)
        return reasons

    async def store(self, jobs: Sequence[Send], timeout: float) -> list[str | None]:
        """Sends blocks from their slots; a reason, or None for each that Redis has taken, in order."""
        if not self.available:
            return [self._reason] * len(jobs)
        size = sum(len(job.payload) for job in jobs)
        if not self._spend(size):
            self.counters["over_budget_blocks"] += len(jobs)
            return ["redis.daily_bytes is used up"] * len(jobs)
        codec = self._codec()
        reasons = await self._spread(jobs, timeout, lambda some, until: self._set(some, codec, until))
        good = sum(len(job.payload) for job, reason in zip(jobs, reasons, strict=True) if reason is None)
        self._count("stored", good, reasons)
        return reasons

    async def renew(self, names: Sequence[BlockName]) -> None:
        """Lets blocks live for another TTL. TierUnavailable."""
        ttl = b"%d" % int(self._settings.ttl * 1000)
        commands = [(key, command(b"PEXPIRE", key, ttl)) for key in map(self.key_of, names)]
        await self._run_small(lambda until: self._ask(commands, until), self._settings.deadline)

    async def forget(self, names: Sequence[BlockName]) -> None:
        """Takes values away that have proved false. TierUnavailable."""
        await self.drop([self.key_of(name) for name in names])

    # ---- small values, for whoever needs them; keys are under our prefix

    async def read(self, keys: Sequence[bytes], timeout: float) -> list[bytes | None]:
        """The values of keys, None where there is none or it is no string. TierUnavailable when one cannot be told."""
        whole = [self._prefix + b":" + key for key in keys]
        replies = await self._run_small(lambda until: self._read(whole, until), timeout)
        for one in replies:
            if isinstance(one, RedisSaysNo) and one.code != "WRONGTYPE":
                raise one
        return [one if isinstance(one, bytes) else None for one in replies]

    async def write(self, items: Sequence[tuple[bytes, bytes]], ttl: float, timeout: float) -> None:
        """Sets values that live for `ttl` seconds. TierUnavailable."""
        expires = b"%d" % max(1, int(ttl * 1000))
        commands = []
        for key, data in items:
            whole = self._prefix + b":" + key
            commands.append((whole, command(b"SET", whole, data, b"PX", expires)))
        for one in await self._run_small(lambda until: self._ask(commands, until), timeout):
            if isinstance(one, RedisSaysNo):
                raise one

    async def enlist(self, key: bytes, member: bytes, keep: float, timeout: float) -> list[bytes]:
        """Adds a member to a roll, from which those go that were not added for `keep` seconds; all its members.

        At most MOST_MEMBERS, those that were added last. TierUnavailable.
        """
        whole, now = self._prefix + b":" + key, time.time()
        commands = [
            (whole, command(b"ZADD", whole, b"%d" % now, member)),
            (whole, command(b"ZREMRANGEBYSCORE", whole, b"-inf", b"%d" % (now - keep))),
            (whole, command(b"ZRANGE", whole, b"-%d" % MOST_MEMBERS, b"-1")),
        ]
        *_, members = await self._run_small(lambda until: self._ask(commands, until), timeout)
        if isinstance(members, RedisSaysNo):
            raise members
        return [one for one in members if isinstance(one, bytes)]

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Deletes keys. TierUnavailable."""
        commands = [(key, command(b"DEL", key)) for key in keys]
        await self._run_small(lambda until: self._ask(commands, until), self._settings.deadline)

    # ---- what people see

    def status(self) -> dict[str, Any]:
        budget = self._settings.daily_bytes
        return {
            "name": "redis",
            "state": "ok" if self.available else "sick",
            "reason": self._reason,
            "url": self._topology.redacted,
            "latency_ms": self._latency * 1e3,
            "written_today": self._written,
            "daily_bytes": budget,
            **self._info,
            "counters": dict(self.counters),
        }

    # ---- inside

    def _spend(self, size: int) -> bool:
        if self._clock() - self._day >= DAY_S:
            self._day, self._written = self._clock(), 0
        if self._settings.daily_bytes and self._written + size > self._settings.daily_bytes:
            return False
        self._written += size
        return True

    def _count(self, what: str, nbytes: int, reasons: Iterable[str | None]) -> None:
        self.counters[f"{what}_bytes"] += nbytes
        for reason in reasons:
            self.counters[f"{what}_blocks" if reason is None else f"not {what}: {reason}"] += 1

    async def _run_small(self, work: Callable[[float], T], timeout: float) -> T:
        assert self._small is not None
        deadline = self._clock() + min(timeout, self._settings.deadline)
        try:
            return (await self._small.run([lambda: work(deadline)]))[0]
        except RedisSaysNo:
            raise
        except TierUnavailable as error:
            if work != self._read_info:
                self._failed(str(error))
            raise

    async def _spread(
        self, jobs: Sequence[T], timeout: float, work: Callable[[Sequence[T], float], list[str | None]]
    ) -> list[str | None]:
        """Runs jobs in the data threads, each a share of consecutive ones."""
        assert self._data is not None
        deadline = self._clock() + min(timeout, self._settings.deadline)
        share = max(1, -(-len(jobs) // len(self._data)))
        parts = [jobs[start : start + share] for start in range(0, len(jobs), share)]
        trouble: list[str] = []

        def guarded(part: Sequence[T]) -> list[str | None]:
            try:
                return work(part, deadline)
            except TierUnavailable as error:
                trouble.append(str(error))
                return [str(error)] * len(part)

        try:
            done = await self._data.run([lambda part=part: guarded(part) for part in parts])  # type: ignore[misc]
        finally:
            if trouble:
                self._failed(trouble[0])
        return [reason for part in done for reason in part]

    # ---- in the threads

    def _wire(self, node: Node, deadline: float) -> Wire:
        """This thread's connection to a node."""
        wires: dict[Node, Wire] = self._wires.__dict__.setdefault("by_node", {})
        wire = wires.get(node)
        if wire is not None and wire.stale:
            wire.close()
        if wire is None or wire.closed:
            if deadline - time.monotonic() <= 0:
                raise TierUnavailable("redis: no answer in time")
            with self._topology_lock:
                self._all_wires.discard(wire)
            wire = self._topology.connect(node)
            with self._topology_lock:
                self._all_wires.add(wire)
            wires[node] = wire
        wire.until(deadline)
        return wire

    def _by_node(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        places: dict[Node, list[int]] = defaultdict(list)
        with self._topology_lock:
            for number, key in enumerate(keys):
                places[self._topology.node_of(key)].append(number)
        return places

    def _ask(self, commands: Sequence[tuple[bytes, bytes]], deadline: float) -> list[Any]:
        """Small replies to (key, packed command), in order; RedisSaysNo, not raised, for errors."""
        replies: list[Any] = [None] * len(commands)
        for node, numbers in self._by_node([key for key, _ in commands]).items():
            wire = self._wire(node, deadline)
            try:
                for start in range(0, len(numbers), SMALL_PIPELINE):
                    some = numbers[start : start + SMALL_PIPELINE]
                    wire.send([b"".join(commands[number][1] for number in some)])
                    for number in some:
                        try:
                            replies[number] = wire.reply()
                        except RedisSaysNo as error:
                            replies[number] = error
            except BaseException:
                wire.close()
                raise
        for number, reply in enumerate(replies):
            if isinstance(reply, RedisSaysNo) and reply.code in ("MOVED", "ASK"):
                replies[number] = self._redirected(reply, commands[number][1], deadline)
        self._note_refusals(replies)
        return replies

    def _redirected(self, error: RedisSaysNo, packed: bytes, deadline: float) -> Any:
        """Asks the node that a cluster names instead, once."""
        try:
            wire = self._follow(error, deadline)
            wire.send([packed])
            return wire.reply()
        except RedisSaysNo as again:
            return again

    def _follow(self, error: RedisSaysNo, deadline: float) -> Wire:
        place = error.rest.split(" ")[-1]
        host, _, port = place.rpartition(":")
        if not port.isdigit():
            raise TierUnavailable("redis: not the Redis protocol")
        if error.code == "MOVED":
            with self._topology_lock:
                self._topology.refresh()
        wire = self._wire((host, int(port)), deadline)
        if error.code == "ASK":
            wire.send([command(b"ASKING")])
            wire.reply()
        return wire

    def _note_refusals(self, replies: Iterable[Any]) -> None:
        """A node that may not write any more is not the master: the next connection asks who is."""
        if any(isinstance(one, RedisSaysNo) and one.code in ("READONLY", "CLUSTERDOWN") for one in replies):
            with self._topology_lock:
                self._topology.refresh()
                if not self._topology.is_cluster:
                    for wire in self._all_wires:
                        wire.stale = True

    def _exists(self, keys: Sequence[bytes], deadline: float) -> list[bool | None]:
        replies = self._ask([(key, command(b"EXISTS", key)) for key in keys], deadline)
        return [reply == 1 if isinstance(reply, int) else None for reply in replies]

    def _read(self, keys: Sequence[bytes], deadline: float) -> list[Any]:
        if self._topology.is_cluster or not keys:
            return self._ask([(key, command(b"GET", key)) for key in keys], deadline)
        (reply,) = self._ask([(keys[0], command(b"MGET", *keys))], deadline)
        if isinstance(reply, RedisSaysNo):
            raise reply
        if not isinstance(reply, list) or len(reply) != len(keys):
            raise TierUnavailable("redis: not the Redis protocol")
        return reply

    def _get(self, jobs: Sequence[Fetch], deadline: float, firsts: list[float]) -> list[str | None]:
        keys = [self.key_of(job.name) for job in jobs]
        reasons: list[str | None] = ["no answer in time"] * len(jobs)
        for node, numbers in self._by_node(keys).items():
            wire = self._wire(node, deadline)
            try:
                for start in range(0, len(numbers), PIPELINE):
                    some = numbers[start : start + PIPELINE]
                    wire.send([b"".join(command(b"GET", keys[number]) for number in some)])
                    for number in some:
                        reasons[number] = self._receive(wire, jobs[number], firsts)
            except TierUnavailable as error:
                wire.close()
                text = str(error).removeprefix("redis: ")
                reasons = [text if reason == "no answer in time" else reason for reason in reasons]
                if not self._topology.is_cluster:
                    raise
            except BaseException:
                wire.close()
                raise
        for number, reason in enumerate(reasons):
            if reason is not None and reason.startswith(("MOVED ", "ASK ")):
                wire = self._follow(RedisSaysNo(reason), deadline)
                wire.send([command(b"GET", keys[number])])
                reasons[number] = self._receive(wire, jobs[number], firsts)
        return reasons

    def _receive(self, wire: Wire, job: Fetch, firsts: list[float]) -> str | None:
        """One value from the wire into its slot, which is left in step whatever the value is."""
        try:
            size = wire.value()
        except RedisSaysNo as error:
            return f"{error.code} {error.rest}"
        firsts.append(self._clock())
        if size is None:
            return ABSENT
        left = size
        try:
            if size < value.HEADER_BYTES:
                raise value.BadValue("no value of ours")
            head = memoryview(bytearray(value.HEADER_BYTES))
            wire.read_into(head)
            left -= len(head)
            header = value.parse(head, job.name, len(job.into))
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
        except (value.BadValue, CodecError) as error:
            reason: str | None = str(error)
        else:
            reason = None
        wire.skip(left)
        wire.end_of_value()
        return reason

    def _set(self, jobs: Sequence[Send], codec: Codec, deadline: float) -> list[str | None]:
        keys = [self.key_of(job.name) for job in jobs]
        ttl = b"%d" % int(self._settings.ttl * 1000)
        reasons: list[str | None] = ["no answer in time"] * len(jobs)
        for node, numbers in self._by_node(keys).items():
            wire = self._wire(node, deadline)
            try:
                for number in numbers:
                    wire.send(self._packed(keys[number], jobs[number], codec, ttl))
                for number in numbers:
                    reasons[number] = self._taken(wire)
            except TierUnavailable as error:
                wire.close()
                text = str(error).removeprefix("redis: ")
                reasons = [text if reason == "no answer in time" else reason for reason in reasons]
                if not self._topology.is_cluster:
                    raise
            except BaseException:
                wire.close()
                raise
        for number, reason in enumerate(reasons):
            if reason is not None and reason.startswith(("MOVED ", "ASK ")):
                wire = self._follow(RedisSaysNo(reason), deadline)
                wire.send(self._packed(keys[number], jobs[number], codec, ttl))
                reasons[number] = self._taken(wire)
        self._note_refusals(RedisSaysNo(reason) for reason in reasons if reason)
        return reasons

    def _packed(self, key: bytes, job: Send, codec: Codec, ttl: bytes) -> list[bytes | memoryview]:
        used, parts = encode(job.payload, codec, job.element)
        header = value.pack(
            job.name, job.parent, job.payload, parts, codec=used, element=job.element, secret=self._secret
        )
        size = len(header) + sum(map(len, parts))
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
        return [begin + header, *parts, b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)]

    def _taken(self, wire: Wire) -> str | None:
        try:
            wire.reply()
        except RedisSaysNo as error:
            return f"{error.code} {error.rest}"
        return None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
