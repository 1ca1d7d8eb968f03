"""The Redis tier: blocks that every node of the fleet can read, and the small values by which nodes find each other.

Redis may be away, slow, full, or evict what it likes: each of these is a reason, counted, and a state in `status`.
After a failure the tier is left alone for a while, longer each time, until a probe succeeds. A chain is never assumed
to be whole: what follows a hole is of no use, and positions never shift.

Three kinds of threads do the IO, each thread with connections of its own: some for payloads, one for what is small, so
that no question waits behind a block on its way, one for probes. When a caller is cancelled or its time is up, the
connections on which its blocks travel are cut, and it goes on when the threads have let go of its memory. A thread that
hangs elsewhere, where names of hosts are looked up, say, has not got hold of it yet and never will.

One node of a cluster that is away is left alone by itself: what the others have is served on.

Redis may lose what it held and be there all the same: it was restarted, flushed or failed over to an empty replica. So
each node of it holds a mark of ours, a value that was made up once and goes with all the rest: where it is another one,
all that was sent before is in doubt (`lost_at`). What Redis evicts is told by its own counter (`evicted_at`).

Whatever is read proves itself (value.py): without the fleet's secret a writer of Redis can cause misses, and make up
blocks for hashes that it knows; with it, misses. A reader of Redis who guesses a prompt can find it there without the
secret; with it neither keys nor headers tell. Payloads are not encrypted: who runs the model too can know KV again.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvcascade.config.errors import CascadeError, TierUnavailable
from kvcascade.config.settings import RedisSettings

from .codec import Codec
from .redis_nodes import Course, Nodes
from .redis_wire import MAX_SMALL, Node, RedisSaysNo, Topology, Wire, command, topology
from .remote import BlockName, Fetch, Secret, Send
from .wire import LATE
from .workers import Workers

log = logging.getLogger("kvcascade.redis")

T = TypeVar("T")
J = TypeVar("J")
Work = Callable[[Sequence[J], Sequence[int], list[str | None], Course], None]
Observe = Callable[[int, float, float, int], None]

PROBE_S: Final = 2.0  # how often Redis is asked how it is
PAUSE_FIRST_S: Final = 0.5  # before a probe after a failure, doubling
PAUSE_LAST_S: Final = 30.0
GRACE_S: Final = 0.1  # beyond its deadline, for a thread to say so itself
ENOUGH: Final = 0.8  # of redis.deadline must be a call's own time, for a late answer to say that Redis is away
TELL_S: Final = 10.0  # after one line of the log about Redis being away, before one for another reason
ENDS_S: Final = 1.0  # beyond its deadlines, for the threads to end
DAY_S: Final = 86400.0
REFUSED_S: Final = 1.0  # for how long no block is sent after Redis refused one for a reason that lasts
MOST_MEMBERS: Final = 2048
MARK_S: Final = 3600.0  # how long a mark outlives the last daemon
MARK_BYTES: Final = 16
MARKS: Final = 1024  # names that are tried to find one for each node of a cluster
_SECTIONS: Final = (b"server", b"memory", b"replication", b"stats")
LASTING: Final = frozenset({"OOM", "MISCONF", "NOPERM", "NOREPLICAS"})
NOT_READY: Final = frozenset({"LOADING", "NOAUTH", "MASTERDOWN"})
_DISBELIEVED: Final = {
    "no value of ours": "something else writes keys that begin with redis.key_prefix",
    "another format version": "another version of kvcascade wrote them",
    "bad tag": "nodes have other secrets, or somebody writes there who has none",
    "another block": "somebody has put them elsewhere",
    "another length": "somebody has cut them",
    "bad checksum": "their bytes have changed",
    "cannot be decoded": "their bytes have changed",
}


@dataclass(frozen=True, slots=True)
class _Look:
    """What a probe has seen: figures of all nodes, the longest latency, who is away and why, each node's mark."""

    info: dict[str, Any]
    latency: float
    away: dict[Node, str]
    marks: dict[bytes, bytes]


class RedisTier:
    """The blocks in Redis. `open` before anything else; all methods are for the loop's thread."""

    def __init__(
        self,
        settings: RedisSettings,
        secret: Secret,
        *,
        codec: Callable[[], Codec] = lambda: Codec.RAW,
        sent: Observe = lambda nbytes, seconds, first, sent: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`codec`: how the next payloads are packed. `sent`: told of what was stored as `observe` is of what was
        fetched: bytes, seconds, those until the first one, and as how many they crossed the link.

        ConfigError for settings that can never work.
        """
        self._settings = settings
        self._codec = codec
        self._sent = sent
        self._clock = clock
        self._topology: Topology = topology(settings)
        self._nodes = Nodes(settings, secret, self._topology, clock)
        self._prefix = settings.key_prefix.encode()
        # The loop's thread alone changes what follows.
        self._closed = False
        # What is fetched is waited for, and must not wait for what is sent.
        self._fetching: Workers | None = None
        self._sending: Workers | None = None
        self._small: Workers | None = None
        self._probes: Workers | None = None
        self._probe: asyncio.Task[None] | None = None
        self._refused, self._refused_until = "", 0.0
        self._takes_none = ""  # why, when Redis refused all blocks of the last batch
        self._trouble = asyncio.Event()
        self._probed = asyncio.Event()
        self._reason = "not connected yet"
        self._told, self._told_at = "", 0.0  # the reason that the log has, and since when
        self._pause = PAUSE_FIRST_S
        self._info: dict[str, Any] = {}
        self._latency = 0.0
        self._marks: dict[bytes, bytes] = {}  # as they were last seen
        # By the clock: when Redis was last found to have lost what it held, and to have evicted something.
        self.lost_at = self.evicted_at = float("-inf")
        self._day = clock()
        self._written = 0
        self.counters: Counter[str] = Counter()

    # ---- life

    async def open(self) -> None:
        """Starts the threads and a first probe, and waits for that a moment. A Redis that is away is no error."""
        threads = self._settings.threads
        self._fetching = Workers("kvcascade-redis", threads, self._clock)
        self._sending = Workers("kvcascade-redis-send", max(1, threads // 2), self._clock)
        self._small = Workers("kvcascade-redis-small", 1, self._clock)
        self._probes = Workers("kvcascade-redis-probe", 1, self._clock)
        self._probe = asyncio.create_task(self._watch(), name="redis probe")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.connect_timeout):
                await self._probed.wait()

    async def close(self) -> None:
        """Ends the threads and the connections; what is under way ends without an answer."""
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        self._reason = "closed"
        every = (self._fetching, self._sending, self._small, self._probes)
        threads = [workers for workers in every if workers is not None]
        for workers in threads:
            workers.withdraw()
            workers.dismiss()
        self._nodes.cut()
        limit = self._settings.connect_timeout + ENDS_S
        if not all(await asyncio.gather(*(workers.stop(limit) for workers in threads))):
            log.error("redis: a thread does not end")
        self._nodes.close()

    @property
    def available(self) -> bool:
        """Whether the last that was heard of Redis was good."""
        return not self._reason

    async def _watch(self) -> None:
        assert self._probes is not None
        while True:
            self._trouble.clear()
            try:
                look = await self._probes.begin(self._look)
            except CascadeError as error:
                self._failed(str(error), probe=True)
            except Exception as error:
                log.exception("probe failed")
                self._failed(str(error), probe=True)
            else:
                if self._reason:
                    log.info("redis is there url=%s", self._topology.redacted)
                self._note(look)
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

    def _note(self, look: _Look) -> None:
        evicted = look.info["evicted"] > self._info.get("evicted", look.info["evicted"])
        if evicted:
            self.evicted_at = self._clock()
        if any(self._marks.get(key, mark) != mark for key, mark in look.marks.items()):
            self.lost_at = self._clock()
            if not evicted:  # else a mark alone may be gone, which makes all that it stands for worth a question
                log.warning("redis has lost what it held url=%s", self._topology.redacted)
                self.counters["data_losses"] += 1
        self._marks |= look.marks
        self._info, self._latency, self._nodes.away = look.info, look.latency, look.away

    def _failed(self, reason: str, *, probe: bool = False) -> None:
        if self._closed:
            return
        # Without a reason it would be available.
        reason = reason.removeprefix("redis: ") or "an error that says nothing"
        now = self._clock()
        first = not self._reason or self._reason == "not connected yet"
        if first or (reason != self._told and now - self._told_at >= TELL_S):
            what = "is left alone for a while" if first else "is still away, by now for another reason"
            log.warning("redis %s reason=%s", what, reason)
            self._told, self._told_at = reason, now
        self._reason = reason
        self.counters["failures"] += 1
        if not probe:
            self._trouble.set()

    def _judge(self, course: Course) -> None:
        """What a call's trouble says of Redis. A large batch that was not done in time does not say that it is away.

        That nothing moved for redis.deadline does, whatever came before. Nor does it say so that an answer was late for
        a caller in a hurry, or for one that waited for our own threads: that is for a probe to tell.
        """
        for node, reason in course.trouble.items():
            if reason == LATE and (course.answers or course.firsts):
                continue
            if reason == LATE and not self._had_its_time(course):
                self._trouble.set()
                continue
            if not self._topology.is_cluster:
                self._failed(reason)
                return
            if node not in self._nodes.away:
                log.warning("a redis node is left alone for a while node=%s:%d reason=%s", *node, reason)
                self.counters["failures"] += 1
            self._nodes.away[node] = reason
            self._topology.doubt()
            self._trouble.set()
        if self._nodes.away and all(node in self._nodes.away for node in self._topology.nodes):
            self._failed(next(iter(self._nodes.away.values())))

    def _had_its_time(self, course: Course) -> bool:
        return course.deadline - course.begun >= ENOUGH * self._settings.deadline

    def _look(self) -> _Look:
        """How all nodes are. TierUnavailable when all are away."""
        try:
            self._topology.learn()
        except TierUnavailable:
            if not self._topology.nodes:
                raise
        self._nodes.prune()
        infos: dict[Node, dict[str, str]] = {}
        away: dict[Node, str] = {}
        marks: dict[bytes, bytes] = {}
        latency = 0.0
        for node in self._topology.nodes:
            try:
                wire = self._nodes.wire(node, self._clock() + self._settings.deadline, probe=True)
                began = self._clock()
                info = self._info_of(wire)
                latency = max(latency, self._clock() - began)
                marks |= self._mark_of(node, wire)
                infos[node] = info
            except TierUnavailable as error:
                away[node] = str(error).removeprefix("redis: ")
        if not infos:
            raise TierUnavailable(f"redis: {next(iter(away.values()))}")
        if away:
            self._topology.doubt()  # another node may have taken its place
        first = next(iter(infos.values()))
        told: dict[str, Any] = {
            "version": first.get("redis_version", ""),
            "role": first.get("role", ""),
            "memory": sum(_number(info.get("used_memory")) for info in infos.values()),
            "memory_limit": sum(_number(info.get("maxmemory")) for info in infos.values()),
            "policy": first.get("maxmemory_policy", ""),
            "evicted": sum(_number(info.get("evicted_keys")) for info in infos.values()),
        }
        if self._topology.is_cluster:
            told["nodes"] = {f"{host}:{port}": away.get((host, port)) for host, port in [*infos, *away]}
        return _Look(told, latency, away, marks)

    def _mark_of(self, node: Node, wire: Wire) -> dict[bytes, bytes]:
        """A node's mark under its key, which is made where there is none; nothing where none can be had."""
        key = self._mark_key(node)
        if key is None:
            return {}
        lives = b"%d" % int(MARK_S * 1000)
        wire.send(
            [
                command(b"SET", key, secrets.token_bytes(MARK_BYTES), b"NX", b"PX", lives),
                command(b"PEXPIRE", key, lives),
                command(b"GET", key),
            ]
        )
        mark: Any = None
        for _ in range(3):
            try:
                mark = wire.reply()
            except RedisSaysNo:
                mark = None
        return {key: mark} if isinstance(mark, bytes) and len(mark) == MARK_BYTES else {}

    def _mark_key(self, node: Node) -> bytes | None:
        for number in range(MARKS):
            key = self._prefix + b":mark:%d" % number
            with suppress(TierUnavailable):
                if self._topology.node_of(key) == node:
                    return key
        return None

    def _info_of(self, wire: Wire) -> dict[str, str]:
        """A node's figures; none where they are not for us. TierUnavailable where it cannot serve now."""
        texts: list[str] = []
        wire.send([command(b"INFO", section) for section in _SECTIONS])
        for _ in _SECTIONS:
            try:
                reply = wire.reply()
            except RedisSaysNo as error:
                if error.code in NOT_READY:
                    wire.close()
                    raise
                continue
            texts.append(reply.decode("utf-8", "replace") if isinstance(reply, bytes) else "")
        return dict(line.split(":", 1) for text in texts for line in text.splitlines() if ":" in line)

    # ---- blocks

    def key_of(self, name: BlockName) -> bytes:
        """The key of a block's value."""
        return self._nodes.keys_of([name])[0]

    async def present(self, names: Iterable[BlockName], timeout: float) -> int:
        """How many leading ones of these blocks Redis has. TierUnavailable when that cannot be told.

        Another thread iterates over `names`: making those of a long question takes it as long as asking.
        """
        there = await self._run_small(lambda course: self._nodes.exists(names, course, chain=True), timeout)
        count = next((number for number, one in enumerate(there) if one != 1), len(there))
        if not count:
            _all_good(there[:1])
        return count

    async def which(self, names: Iterable[BlockName], timeout: float) -> list[bool | TierUnavailable]:
        """Of each of these blocks, which need be no chain, whether Redis has it, or why that cannot be told.

        Another thread iterates over `names`. TierUnavailable when it can be told of none.
        """
        there = await self._run_small(lambda course: self._nodes.exists(names, course, chain=False), timeout)
        return [one if isinstance(one, TierUnavailable) else one == 1 for one in there]

    async def fetch(self, jobs: Sequence[Fetch], timeout: float, *, observe: Observe | None = None) -> list[str | None]:
        """Receives blocks into their slots; a reason, or None for each that is whole and proved, in order.

        `timeout` is for all of them; where no byte moves for redis.deadline it ends sooner.
        """
        if not self.available:
            return [self._reason] * len(jobs)
        began = self._clock()
        reasons, course = await self._spread(self._fetching, jobs, timeout, self._nodes.fetch)
        good = sum(len(job.into) for job, reason in zip(jobs, reasons, strict=True) if reason is None)
        self._count("fetched", good, reasons)
        if observe is not None and good and course.firsts:
            observe(good, self._clock() - began, min(course.firsts) - began, sum(course.sent))
        return reasons

    async def store(self, jobs: Sequence[Send], timeout: float) -> list[str | None]:
        """Sends blocks from their slots; a reason, or None for each that Redis has taken, in order.

        `timeout` is for all of them; where no byte moves for redis.deadline it ends sooner.
        """
        if not self.available:
            return [self._reason] * len(jobs)
        if self._clock() < self._refused_until:
            self._count("stored", 0, [self._refused] * len(jobs))
            return [self._refused] * len(jobs)
        some, spent = self._spend(jobs)
        codec = self._codec()
        began = self._clock()
        reasons, course = await self._spread(
            self._sending, some, timeout, lambda *rest: self._nodes.store(codec, *rest)
        )
        good = sum(len(job.payload) for job, reason in zip(some, reasons, strict=True) if reason is None)
        self._written -= spent - good
        self._count("stored", good, reasons)
        if good and reasons.count(None) == len(some):
            self._sent(good, self._clock() - began, 0.0, sum(course.sent))
        lasting = next((one for one in reasons if one is not None and one.partition(" ")[0] in LASTING), None)
        if lasting is not None:
            self._refused, self._refused_until = lasting, self._clock() + REFUSED_S
        if some:
            refusals = [one for one in reasons if one is not None and one.partition(" ")[0].isupper()]
            self._takes_none = refusals[0] if len(refusals) == len(some) else ""
        self.counters["over_budget_blocks"] += len(jobs) - len(some)
        return reasons + ["redis.daily_bytes is used up"] * (len(jobs) - len(some))

    async def renew(self, names: Iterable[BlockName]) -> list[bool]:
        """Lets blocks live for another TTL; which of them are there. TierUnavailable when one cannot be told.

        Another thread iterates over `names`.
        """
        replies = await self._run_small(lambda course: self._nodes.renew(names, course), self._settings.deadline)
        _all_good(replies)
        return [reply == 1 for reply in replies]

    async def forget(self, names: Sequence[BlockName]) -> None:
        """Takes values away that have proved false. TierUnavailable."""
        await self.drop([self.key_of(name) for name in names])

    # ---- small values, for whoever needs them; keys are under our prefix

    async def read(self, keys: Sequence[bytes], timeout: float, *, most: int = MAX_SMALL) -> list[bytes | None]:
        """The values of keys, None where there is none, or it is no string, or one of over `most` bytes.

        TierUnavailable when one cannot be told.
        """
        whole = [self._prefix + b":" + key for key in keys]
        replies = await self._run_small(lambda course: self._nodes.read(whole, course), timeout, most)
        _all_good(one for one in replies if not (isinstance(one, RedisSaysNo) and one.code == "WRONGTYPE"))
        return [one if isinstance(one, bytes) else None for one in replies]

    async def write(
        self, items: Sequence[tuple[bytes, bytes]], ttl: float, timeout: float, *, over: bool = True
    ) -> None:
        """Sets values that live for `ttl` seconds; without `over` only where there is none. TierUnavailable."""
        options = (b"PX", b"%d" % max(1, int(ttl * 1000)), *(() if over else (b"NX",)))
        commands = []
        for key, data in items:
            whole = self._prefix + b":" + key
            commands.append((whole, command(b"SET", whole, data, *options)))
        _all_good(await self._run_small(lambda course: self._nodes.ask(commands, course), timeout))

    async def enlist(self, key: bytes, member: bytes, keep: float, timeout: float) -> list[bytes]:
        """Adds a member to a roll, from which those go that were not added for `keep` seconds; all its members.

        At most MOST_MEMBERS, those that were added last. The time is Redis's own: a node whose clock has jumped would
        strike all others off. TierUnavailable.
        """
        whole = self._prefix + b":" + key
        (told,) = await self._run_small(lambda course: self._nodes.ask([(whole, command(b"TIME"))], course), timeout)
        _all_good([told])
        if not isinstance(told, list) or not told or not isinstance(told[0], bytes) or not told[0].isdigit():
            raise TierUnavailable("redis: not the Redis protocol")
        now = int(told[0])
        commands = [
            (whole, command(b"ZADD", whole, b"%d" % now, member)),
            (whole, command(b"ZREMRANGEBYSCORE", whole, b"-inf", b"%d" % (now - keep))),
            (whole, command(b"ZRANGE", whole, b"-%d" % MOST_MEMBERS, b"-1")),
        ]
        replies = await self._run_small(lambda course: self._nodes.ask(commands, course), timeout)
        _all_good(replies)
        members = replies[-1] if isinstance(replies[-1], list) else []
        return [one for one in members if isinstance(one, bytes)]

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Deletes keys. TierUnavailable."""
        commands = [(key, command(b"DEL", key)) for key in keys]
        _all_good(await self._run_small(lambda course: self._nodes.ask(commands, course), self._settings.deadline))

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
            **({"lost_s": self._clock() - self.lost_at} if self.counters["data_losses"] else {}),
            "counters": dict(self.counters),
        }

    def problems(self) -> list[str]:
        """What an operator should know, in sentences."""
        if not self.available:
            return [f"redis is left alone: {self._reason}"]
        problems = [
            f"redis node {host}:{port} is left alone: {reason}" for (host, port), reason in self._nodes.away.items()
        ]
        if self._takes_none:
            problems.append(f"redis takes no blocks: {self._takes_none}")
        for reason, why in _DISBELIEVED.items():
            if count := self.counters[f"not fetched: {reason}"]:
                problems.append(f"{count} values in redis were not believed: {reason} ({why})")
        return problems

    # ---- inside

    def _spend(self, jobs: Sequence[Send]) -> tuple[Sequence[Send], int]:
        """The leading jobs that the day's budget has room for, and their bytes, which are taken from it."""
        if self._clock() - self._day >= DAY_S:
            self._day, self._written = self._clock(), 0
        room = self._settings.daily_bytes - self._written if self._settings.daily_bytes else None
        spent = count = 0
        for job in jobs:
            if room is not None and spent + len(job.payload) > room:
                break
            spent += len(job.payload)
            count += 1
        self._written += spent
        return jobs[:count], spent

    def _count(self, what: str, nbytes: int, reasons: Iterable[str | None]) -> None:
        self.counters[f"{what}_bytes"] += nbytes
        for reason in reasons:
            if reason is None:
                self.counters[f"{what}_blocks"] += 1
            else:
                # What Redis says may hold all kinds of text; its first word is one of a few.
                word = reason.partition(" ")[0]
                self.counters[f"not {what}: {word if word.isupper() else reason}"] += 1

    async def _run_small(self, work: Callable[[Course], T], timeout: float, most: int = MAX_SMALL) -> T:
        assert self._small is not None
        if not self.available:
            raise TierUnavailable(f"redis: {self._reason}")
        course = Course(self._clock() + min(timeout, self._settings.deadline), most)

        def run() -> T:
            if self._clock() >= course.deadline:
                raise TierUnavailable("redis: other questions took all the time")
            course.begun = self._clock()
            return work(course)

        call = self._small.begin(run)
        call.add_done_callback(_hear)  # a caller that was cancelled does not
        try:
            await asyncio.wait([call], timeout=course.deadline + GRACE_S - self._clock())
        finally:
            call.cancel()  # in the queue it would take others' time
        if call.cancelled():
            # A thread that does not end by its deadline hangs elsewhere, whoever's call it has.
            if self._had_its_time(course) or self._small.longest() > self._settings.deadline + GRACE_S:
                self._failed(LATE)
            raise TierUnavailable(f"redis: {LATE}")
        self._judge(course)
        return call.result()

    async def _spread(
        self, workers: Workers | None, jobs: Sequence[J], timeout: float, work: Work[J]
    ) -> tuple[list[str | None], Course]:
        """Runs jobs in threads for payloads, each a share of consecutive ones."""
        assert workers is not None
        course = Course(self._clock() + timeout)
        reasons: list[str | None] = [LATE] * len(jobs)
        if not jobs:
            return reasons, course
        share = -(-len(jobs) // len(workers))

        def run(numbers: Sequence[int]) -> None:
            course.begun = min(course.begun, self._clock())
            work(jobs, numbers, reasons, course)

        calls = [
            workers.begin(partial(run, range(start, min(start + share, len(jobs)))))
            for start in range(0, len(jobs), share)
        ]
        late: set[asyncio.Future[None]] = set(calls)
        try:
            _, late = await asyncio.wait(calls, timeout=course.deadline - self._clock())
        finally:
            for call in late:
                call.cancel()
            if late:
                await course.stop()
        if late and not course.answers and not course.trouble and course.connecting is not None:
            course.trouble[course.connecting] = LATE
        self._judge(course)
        for call in calls:
            if not call.cancelled():
                call.result()
        return reasons, course


def _hear(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _all_good(replies: Iterable[Any]) -> None:
    for one in replies:
        if isinstance(one, TierUnavailable):
            raise one
