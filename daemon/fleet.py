"""Who is in the fleet, and which node has which prefix: two kinds of small values in Redis.

*Node records*: each node's address, incarnation and key scheme, under its name (`node:`, so that a name has one node)
and, if it serves others, under its incarnation (`boot:`, where entries lead); both live for LEASE_S and are renewed
every third of that. A node whose record is gone has nothing for us. Every node that uses Redis has one, also where only
payloads are shared: blocks that are named otherwise look like blocks that nobody has.

*Entries*: one key for every 16th block of a chain and for its end, `d:` and the block's keyed name; the value is the
incarnation of the node that said so last; one that has fetched the block from another node leaves that one's entry, and
says so itself once the block is used there some minutes later. An entry is a hint, never a promise: it may be late,
evicted, or another node's by now; the node itself says exactly what it has. A chain is never assumed to be whole, so
all blocks of a question are asked for in one MGET, and the last one that some node names decides how far to ask that
node.

What it costs is in `make bench`: 10 bytes of Redis a block (160 for an entry, which stands for 16), one pipelined SET
for each 16 blocks stored, and at rest an MGET and a SET a node every 5 s, two SETs if it serves others; no SCAN, no
heartbeat a block. Once a minute each node adds its name to one sorted set and reads it, to meet those it has not met.
Entries live as long as blocks in Redis do; one that leads to a node that has been gone for as long as a lease goes when
met.

With the same roll each node tells of its engines' namespaces (`s:` and its name), so that nodes whose engines are alike
and share nothing all the same say so (alike.py).

Two nodes with one name would take turns at one record: the later one sees the other's living record, steps back until
that is gone, and says so under `twin:` and the name, for the other one to know. A node that was killed and is back at
its address takes its record over at once, because no two can listen there. Nodes that hash otherwise (another seed,
algorithm or key scheme) never meet a block of ours, since all of that is in the namespace; they are told apart here so
that `status` can say why nothing is shared.

A record is signed, but who can write into Redis can put an old one there again. So no clock and no order is trusted,
but two things that an old record cannot have. Each renewal counts on (`beat`): a node whose record has not advanced for
a lease is gone. And a record names the namesakes that its node has just seen (`seen`): one that names us was written in
our life, by a node that lives. One that does not never makes a node give up the name that it has, and makes one that
starts wait for a lease at most.

A Redis that has lost what it held (it was restarted, flushed or failed over) is noticed by our own record's absence:
`forgotten` is called, for all that lies here to be named again.
"""

import asyncio
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final, Protocol, Self

import cbor2

from kvcascade.config.errors import CascadeError, ProtocolError
from kvcascade.config.settings import Endpoint
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.remote import TAG_BYTES, Secret

from . import alike
from .protocol import MOST_LISTED, decode_body, take
from .together import Together

log = logging.getLogger("kvcascade.fleet")

RECORD: Final = 1  # the format of a node's record
LEASE_S: Final = 15.0
RENEW_S: Final = LEASE_S / 3
FRESH_S: Final = 2.0  # how long a record that was read is believed
WAITING: Final = 65536  # entries that wait to be written; more are dropped
BATCH: Final = 1024
GATHER_S: Final = 0.05  # entries of one moment are written together
KNOWN: Final = 4096  # nodes that are remembered
MEET_S: Final = 60.0  # how often nodes that are new are looked for, and entries are written anew at most
HEARD_S: Final = 600.0  # how long it is told what a node was that does not shake hands again
ROLL_S: Final = 3600.0  # how long a name stays in the roll
MET: Final = 256  # records that are read at one time
MAX_RECORD: Final = 2048  # bytes
ERASE_S: Final = 0.001  # what is to go gets a value that nobody takes, and so long to live
ERASING: Final = 4  # tasks, with the two that always run
BOOT_BYTES: Final = 16
GONE: Final = 4096  # incarnations without a record that are remembered
HINTS: Final = 20  # that are shown
NAMESAKES: Final = 4  # that a record names

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class Store(Protocol):
    """Small values that all nodes see; `RedisTier`. All raise TierUnavailable when they cannot tell."""

    @property
    def available(self) -> bool: ...

    async def read(self, keys: Sequence[bytes], timeout: float, *, most: int = ...) -> list[bytes | None]: ...

    async def write(
        self, items: Sequence[tuple[bytes, bytes]], ttl: float, timeout: float, *, over: bool = True
    ) -> None: ...

    async def enlist(self, key: bytes, member: bytes, keep: float, timeout: float) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself. `boot`: its incarnation (16 B); `address`: where it serves others, None: nowhere."""

    name: str
    boot: bytes
    address: Endpoint | None
    version: str
    hash_algo: str
    key_scheme: str
    none_hash: bytes

    def difference(self, other: "NodeInfo") -> str | None:
        """Why this node and another one can share nothing, naming both sides; None: they can."""
        for what, mine, theirs in (
            ("hash algorithm", self.hash_algo, other.hash_algo),
            ("key scheme", self.key_scheme, other.key_scheme),
            ("seed (chain root)", self.none_hash.hex()[:16], other.none_hash.hex()[:16]),
        ):
            if mine != theirs:
                return (
                    f"{what}: {self.name} (kvcascade {self.version}) uses {mine}, "
                    f"{other.name} (kvcascade {other.version}) {theirs}"
                )
        return None

    def pack(self) -> bytes:
        values = asdict(self)
        values["address"] = [] if self.address is None else [self.address.host, self.address.port]
        return cbor2.dumps(values | {"record": RECORD})

    @classmethod
    def unpack(cls, data: bytes) -> "NodeInfo":
        """ProtocolError naming the field for what no node of this version says."""
        if len(data) > MAX_RECORD:
            raise ProtocolError(f"record: {len(data)} bytes are more than {MAX_RECORD}")
        values = decode_body(data)
        if take(values, "record", int) != RECORD:
            raise ProtocolError(f"record: of format {values['record']!r}, not {RECORD}")
        address = take(values, "address", list, hi=2)
        if address and not (
            len(address) == 2
            and isinstance(address[0], str)
            and 0 < len(address[0]) < 256
            and address[0].isprintable()
            and isinstance(address[1], int)
            and 0 < address[1] < 65536
            and Endpoint(*address).is_possible
        ):
            raise ProtocolError("field 'address': it is no host and port")
        texts = {name: take(values, name, str, hi=64) for name in ("name", "version", "hash_algo", "key_scheme")}
        for name, text in texts.items():
            # They are shown to people, and a name is part of keys.
            if not (_NAME.fullmatch(text) if name == "name" else text.isprintable()):
                raise ProtocolError(f"field {name!r}: {text!r} is none")
        return cls(
            boot=take(values, "boot", bytes, lo=BOOT_BYTES, hi=BOOT_BYTES),
            address=Endpoint(*address) if address else None,
            none_hash=take(values, "none_hash", bytes, lo=8, hi=32),
            **texts,
        )


@dataclass(frozen=True, slots=True)
class _Record:
    """What lies in Redis for a node; see above."""

    info: NodeInfo
    beat: int
    seen: tuple[bytes, ...]

    def pack(self) -> bytes:
        return cbor2.dumps({"info": self.info.pack(), "beat": self.beat, "seen": list(self.seen)})

    @classmethod
    def unpack(cls, data: bytes) -> "_Record":
        """ProtocolError naming the field for what no node of this version writes."""
        if len(data) > MAX_RECORD:
            raise ProtocolError(f"record: {len(data)} bytes are more than {MAX_RECORD}")
        values = decode_body(data)
        seen = take(values, "seen", list, hi=NAMESAKES)
        if not all(isinstance(boot, bytes) and len(boot) == BOOT_BYTES for boot in seen):
            raise ProtocolError("field 'seen': it is no list of incarnations")
        return cls(
            NodeInfo.unpack(take(values, "info", bytes, hi=MAX_RECORD)),
            take(values, "beat", int, lo=0, hi=(1 << 63) - 1),
            tuple(seen),
        )


@dataclass(slots=True)
class _Known:
    info: NodeInfo
    read: float  # when, by the loop's clock


class Fleet:
    """This node's record and entries, and those of others. Use as an async context manager, on the loop's thread."""

    def __init__(self, store: Store, secret: Secret, me: NodeInfo, *, entry_ttl: float, timeout: float) -> None:
        """`me` may have no address: then it is known, but has no entries. `timeout`: for each question to Redis."""
        self._store = store
        self._secret = secret
        self.me = me
        self._entry_ttl = entry_ttl
        self._timeout = timeout
        self.forgotten: Callable[[], None] = lambda: None
        self.namespaces: Callable[[], Sequence[Namespace]] = lambda: ()  # of the engines here
        # The loop's thread alone changes what follows.
        self._known: dict[bytes, _Known] = {}  # incarnation → node
        self._gone: dict[bytes, tuple[float, float]] = {}  # incarnation without a record → since, last looked
        # Node's name → why nothing is shared with it: of the nodes in the roll, and of those met elsewhere, and when.
        self._different: dict[str, str] = {}
        self._heard: dict[str, tuple[str, float]] = {}
        self._waiting: dict[bytes, bool] = {}  # entries by key, and whether they go over others'
        self._gathered = asyncio.Event()
        self._alone = Together(self._find_each)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat = 0
        self._beats: dict[bytes, tuple[int, float]] = {}  # incarnation → the last beat, and when that was first seen
        self._namesakes: dict[bytes, tuple[NodeInfo, float]] = {}  # others of our name, and when they were last seen
        self._recorded = False  # our record was written, so the name is ours
        self._waiting_since = 0.0  # for another one of our name to show that it lives
        self.taken_by = ""  # the incarnation of another node, which has the name
        self._twin_key = b"twin:" + me.name.encode()
        self._trouble = ""  # why others do not hear of this node
        self._unmet = ""  # why it does not hear of others
        self._unwritten = False  # entries were lost on their way
        self._again_at = 0.0
        self._meet_at = 0.0
        self._told: Sequence[Namespace] = ()  # of our engines, to the others
        self._alike: dict[str, list[str]] = {}  # node's name → what keeps our engines and its from sharing
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Makes this node known, at first or again."""
        if self._tasks:
            return
        self._tasks.add(asyncio.create_task(self._renew(), name="fleet lease"))
        if self.me.address is not None:
            self._tasks.add(asyncio.create_task(self._write_entries(), name="fleet directory"))

    async def stop(self, timeout: float = math.inf) -> None:
        """Says that this node is gone, until `start`, if that can be said within `timeout` seconds. Idempotent."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        tasks = list(self._tasks)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._tasks.clear()
        self._recorded = False
        keys = [self._node_key(self.me.name), self._twin_key, b"boot:" + self.me.boot]
        with suppress(CascadeError):  # they run out by themselves
            # No record is better than one that runs out: others stop asking at once. A namesake's is left alone.
            there = await self._store.read(keys, min(self._timeout, end - loop.time()))
            ours = [key for key, record in zip(keys, there, strict=True) if self._is_ours(record)]
            if ours and end > loop.time():
                await self._erase(ours, end - loop.time())

    async def _erase(self, keys: Sequence[bytes], timeout: float = math.inf) -> None:
        await self._store.write([(key, b"") for key in keys], ERASE_S, min(self._timeout, timeout))

    # ---- node records

    def _node_key(self, name: str) -> bytes:
        return b"node:" + name.encode()

    def _sealed(self, now: float) -> bytes:
        """Our record, a beat further."""
        self._beat += 1
        seen = [boot for boot, (_, at) in self._namesakes.items() if now - at < LEASE_S]
        body = _Record(self.me, self._beat, tuple(seen[-NAMESAKES:])).pack()
        return self._secret.tag("nodes", body) + body

    def _unsealed(self, data: bytes) -> _Record:
        tag, body = data[:TAG_BYTES], data[TAG_BYTES:]
        if not self._secret.proves(tag, "nodes", body):
            mine = "" if self._secret.shared else "; this node has none"
            raise ProtocolError(f"record: it is not signed with the secret of this node (cluster.secret_file{mine})")
        return _Record.unpack(body)

    def _is_ours(self, data: bytes | None) -> bool:
        try:
            return data is not None and self._unsealed(data).info.boot == self.me.boot
        except CascadeError:
            return False

    def _lives(self, record: _Record, now: float) -> bool:
        """Whether the record has advanced within a lease; one that is seen for the first time has."""
        boot = record.info.boot
        beat, since = self._beats.get(boot, (-1, now))
        if record.beat > beat:
            beat, since = record.beat, now
            self._beats.pop(boot, None)
            if len(self._beats) >= KNOWN:
                self._beats.pop(next(iter(self._beats)))
            self._beats[boot] = (beat, since)
        return now - since < LEASE_S

    async def _renew(self) -> None:
        while True:
            try:
                await self._renew_once()
                self._trouble = ""
            except CascadeError as error:
                self._trouble = str(error)
                self.counters["lease_failures"] += 1
            except Exception:
                log.exception("the node's record was not renewed")
            # Nodes that were started together do not ask together for ever.
            await asyncio.sleep(RENEW_S * random.uniform(0.9, 1.0))

    async def _renew_once(self) -> None:
        key = self._node_key(self.me.name)
        there, twin = await self._store.read([key, self._twin_key], self._timeout)
        now = asyncio.get_running_loop().time()
        self._namesake(twin, now)
        other = self._namesake(there, now)
        if other is not None and self._has_the_name(other, now):
            if not self.taken_by:
                log.warning("cluster.node: another node has the name %s, or had it; this one waits", self.me.name)
            self.taken_by = other.info.boot.hex()
            self._recorded = False
            await self._store.write([(self._twin_key, self._sealed(now))], LEASE_S, self._timeout)
            return
        if other is not None and not self._recorded:
            log.info("an earlier life of this node is over boot=%s", other.info.boot.hex())
            await self._erase([b"boot:" + other.info.boot])
        # The name is ours: who had it has gone.
        self._namesakes.pop(bytes.fromhex(self.taken_by), None)
        silent, self.taken_by, self._waiting_since = self.taken_by, "", 0.0
        record = self._sealed(now)
        keys = [key] if self.me.address is None else [key, b"boot:" + self.me.boot]
        await self._store.write([(one, record) for one in keys], LEASE_S, self._timeout)
        if self._recorded and not there:
            log.warning("redis has lost what it held")
            self.counters["forgotten"] += 1
        redo = self._unwritten and now >= self._again_at
        if silent or redo or (self._recorded and not there):
            self._unwritten, self._again_at = False, now + MEET_S
            self.forgotten()  # nothing that was to be named then has been
        self._recorded = True
        namespaces = self.namespaces()
        if now >= self._meet_at or namespaces != self._told:
            try:
                await self._tell(namespaces)
                await self._meet(now)
                self._meet_at = now + MEET_S
                self._unmet = ""
            except CascadeError as error:
                self._unmet = str(error)

    def _namesake(self, data: bytes | None, now: float) -> _Record | None:
        """The record of another node of our name, if that is what lies there; an earlier life of ours is none."""
        if not data:
            return None
        try:
            record = self._unsealed(data)
        except CascadeError as error:
            log.warning("the record under our name is no node's reason=%s", error)
            self.counters["bad_records"] += 1
            return None
        info = record.info
        if info.boot == self.me.boot or info.name != self.me.name:
            return None
        if not self._is_here(info) and self._lives(record, now):
            self._namesakes.pop(info.boot, None)
            self._namesakes[info.boot] = (info, now)
            if len(self._namesakes) > KNOWN:
                self._namesakes.pop(next(iter(self._namesakes)))
        return record

    def _is_here(self, info: NodeInfo) -> bool:
        """Whether a node says that it is where we are; then it is over, since no two can listen there."""
        return info.address is not None and info.address == self.me.address

    def _has_the_name(self, other: _Record, now: float) -> bool:
        """Whether the name is another node's, whose record this is, and not ours."""
        if self._is_here(other.info):
            return False
        if self.me.boot in other.seen and self._lives(other, now):
            self._waiting_since = 0.0
            # Of two that both have written a record, one must go.
            return not self._recorded or other.info.boot < self.me.boot
        if self._recorded:
            return False
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since < LEASE_S

    async def _tell(self, namespaces: Sequence[Namespace]) -> None:
        body = alike.pack(self.me.boot, namespaces)
        told = (b"s:" + self.me.name.encode(), self._secret.tag("nodes", body) + body)
        await self._store.write([told], 3 * MEET_S, self._timeout)
        self._told = namespaces

    async def _meet(self, now: float) -> None:
        """Reads the records of the other nodes, to know those with which nothing can be shared, or nothing is.

        One that lacks the fleet's secret is among them: all looks well to it, and its record is noise to the others.
        """
        names = await self._store.enlist(b"nodes", self.me.name.encode(), ROLL_S, self._timeout)
        names = [name for name in names if len(name) <= 64 and name != self.me.name.encode()][:MET]
        if names:
            keys = [head + name for head in (b"node:", b"s:") for name in names]
            values = await self._store.read(keys, self._timeout)
        else:
            values = []
        self._different.clear()
        self._alike.clear()
        for name, record, told in zip(names, values[: len(names)], values[len(names) :], strict=True):
            if record:
                try:
                    known = self._unsealed(record)
                    if self._lives(known, now):
                        self._heard.pop(known.info.name, None)
                        difference = self.me.difference(known.info)
                        if difference is not None:
                            self._different[known.info.name] = difference
                        self._compare(known.info, told)
                except CascadeError as error:
                    self.counters["bad_records"] += 1
                    shown = name.decode(errors="replace")
                    if _NAME.fullmatch(shown):
                        self._different[shown] = f"{shown}: {error}"

    def _compare(self, info: NodeInfo, told: bytes | None) -> None:
        """Remembers what keeps engines from sharing that could. CascadeError for what no node tells."""
        if not told or self.me.difference(info) is not None:
            return
        tag, body = told[:TAG_BYTES], told[TAG_BYTES:]
        if not self._secret.proves(tag, "nodes", body):
            raise ProtocolError("namespaces: they are not signed with the fleet's secret")
        boot, theirs = alike.unpack(body)
        if boot == info.boot and len(self._alike) < KNOWN:
            ours = [alike.flat(one.to_map()) for one in self._told]
            self._alike[info.name] = alike.hints(ours, theirs, self.me.name, info.name)

    async def _nodes(self, boots: Sequence[bytes], timeout: float) -> dict[bytes, NodeInfo]:
        """The living nodes of these incarnations; of those of whom nothing is known the first MET."""
        now = asyncio.get_running_loop().time()
        unknown = [
            boot
            for boot in boots
            if not (boot in self._known and now - self._known[boot].read < FRESH_S)
            and not (boot in self._gone and now - self._gone[boot][1] < FRESH_S)
        ][:MET]
        if unknown:
            keys = [b"boot:" + boot for boot in unknown]
            records = await self._store.read(keys, timeout, most=TAG_BYTES + MAX_RECORD)
            for boot, record in zip(unknown, records, strict=True):
                self._known.pop(boot, None)
                if not self._learn(boot, record, now):
                    since, _ = self._gone.pop(boot, (now, now))
                    if len(self._gone) >= GONE:
                        self._gone.pop(next(iter(self._gone)))
                    self._gone[boot] = (since, now)
                else:
                    self._gone.pop(boot, None)
        return {boot: self._known[boot].info for boot in boots if boot in self._known}

    async def address_of(self, boot: bytes, timeout: float) -> Endpoint | None:
        """Where the living node of this incarnation serves others, by its record; None where there is none."""
        nodes = await self._nodes([boot], timeout)
        return nodes[boot].address if boot in nodes else None

    def _learn(self, boot: bytes, record: bytes | None, now: float) -> bool:
        """Whether this is the record of a living node, with which things can be shared or not."""
        if not record:
            return False
        try:
            known = self._unsealed(record)
        except CascadeError as error:
            self.counters["bad_records"] += 1
            log.debug("a node's record is not believed reason=%s", error)
            return False
        info = known.info
        if info.boot != boot or not self._lives(known, now):
            return False
        self.note(info)
        if info.address is not None and self.me.difference(info) is None:
            if len(self._known) >= KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[boot] = _Known(info, now)
        return True

    def note(self, info: NodeInfo) -> None:
        """Another node was met: remembers if nothing can be shared with it."""
        difference = self.me.difference(info)
        self._heard.pop(info.name, None)
        if difference is None:
            self._different.pop(info.name, None)
        else:
            if len(self._heard) >= KNOWN:
                self._heard.pop(next(iter(self._heard)))
            self._heard[info.name] = (difference, asyncio.get_running_loop().time())

    def _differences(self) -> list[str]:
        since = asyncio.get_running_loop().time() - HEARD_S
        heard = {name: text for name, (text, at) in self._heard.items() if at > since}
        return sorted((self._different | heard).values())

    # ---- the directory

    def _entry_keys(self, namespace: bytes, group: int, hashes: Iterable[bytes]) -> list[bytes]:
        return [b"d:" + name for name in self._secret.names_of(namespace, group, hashes)]

    def announce(self, namespace: bytes, group: int, hashes: Sequence[bytes], *, over: bool = True) -> None:
        """Queues entries: this node has these blocks, and all above them. `over`: in place of other nodes' entries."""
        if self.me.address is None:
            return
        for key in self._entry_keys(namespace, group, hashes):
            if len(self._waiting) >= WAITING:
                self.counters["entries_dropped"] += 1
            else:
                self._waiting[key] = over or self._waiting.get(key, False)
        if self._waiting:
            self._gathered.set()

    async def _write_entries(self) -> None:
        while True:
            await self._gathered.wait()
            await asyncio.sleep(GATHER_S)
            self._gathered.clear()
            while self._waiting:
                over = next(iter(self._waiting.values()))
                keys = list(islice((key for key, one in self._waiting.items() if one == over), BATCH))
                for key in keys:
                    del self._waiting[key]
                if self.taken_by:
                    self.counters["entries_dropped"] += len(keys)
                    continue
                try:
                    entries = [(key, self.me.boot) for key in keys]
                    await self._store.write(entries, self._entry_ttl, self._timeout, over=over)
                    self.counters["entries_written"] += len(keys)
                except CascadeError:
                    self.counters["entries_dropped"] += len(keys)
                    self._unwritten = True
                except Exception:
                    log.exception("entries were not written")
                    self._unwritten = True

    async def find(
        self, namespace: bytes, group: int, hashes: bytes, width: int, timeout: float
    ) -> list[tuple[NodeInfo, int]]:
        """Living nodes that may have leading blocks of this piece of a chain, and how many at most, most first.

        TierUnavailable when the directory cannot be read: then nobody knows.
        """
        count = len(hashes) // width
        if count == 1:
            # Of blocks that are no chain each is a question of its own: hundreds at once.
            holder = await self._alone.one((namespace, group, hashes), timeout)
            return [] if holder is None else [(holder, 1)]
        reached: dict[bytes, int] = {}
        entries: list[tuple[bytes, bytes]] = []
        for start in range(0, count, BATCH):
            # A batch's keys at a time: those of a long question are 10 ms of the loop's time.
            numbers = range(start, min(start + BATCH, count))
            keys = self._entry_keys(namespace, group, (hashes[n * width : (n + 1) * width] for n in numbers))
            for number, key, boot in zip(numbers, keys, await self._read_entries(keys, timeout), strict=True):
                if boot is not None:
                    reached[boot] = number
                    entries.append((key, boot))
        if not reached:
            return []
        nodes = await self._nodes(sorted(reached, key=lambda boot: -reached[boot]), timeout)
        self._erase_dead(entries)
        # An entry says that what lies above it is there, too; what lies below is for the node to say.
        named = sorted(((info, reached[boot]) for boot, info in nodes.items()), key=lambda one: -one[1])
        return [(info, count) for info, _ in named]

    async def _find_each(self, blocks: Sequence[tuple[bytes, int, bytes]], timeout: float) -> list[NodeInfo | None]:
        """Which living node may have each of these blocks, if any."""
        keys = [key for namespace, group, one in blocks for key in self._entry_keys(namespace, group, [one])]
        boots = await self._read_entries(keys, timeout)
        entries = [(key, boot) for key, boot in zip(keys, boots, strict=True) if boot is not None]
        if not entries:
            return [None] * len(blocks)
        nodes = await self._nodes(list(dict.fromkeys(boot for _, boot in entries)), timeout)
        self._erase_dead(entries)
        return [None if boot is None else nodes.get(boot) for boot in boots]

    async def _read_entries(self, keys: Sequence[bytes], timeout: float) -> list[bytes | None]:
        """Another node's incarnation for each key, where there is one."""
        replies = await self._store.read(keys, timeout, most=BOOT_BYTES)
        return [one if one is not None and len(one) == BOOT_BYTES and one != self.me.boot else None for one in replies]

    def _erase_dead(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Begins to erase entries of nodes that have been gone for a lease.

        Not sooner: a node that is cut off from Redis for a moment would lose all of its entries. One that a living node
        has written over in between is lost, too; that costs a miss.
        """
        dead = [
            key for key, boot in entries if boot in self._gone and self._gone[boot][1] - self._gone[boot][0] >= LEASE_S
        ]
        if dead and len(self._tasks) < ERASING:
            task = asyncio.create_task(self._erase_entries(dead), name="fleet erases dead entries")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _erase_entries(self, keys: Sequence[bytes]) -> None:
        with suppress(CascadeError):
            await self._erase(keys)
            self.counters["entries_erased"] += len(keys)

    # ---- what people see

    def status(self) -> dict[str, Any]:
        return {
            "node": self.me.name,
            "address": "" if self.me.address is None else str(self.me.address),
            "boot": self.me.boot.hex(),
            "waiting_entries": len(self._waiting),
            "reason": self._trouble,
            "taken_by": self.taken_by,
            "known": sorted(one.info.name for one in self._known.values())[:MOST_LISTED],
            "different": self._differences()[:MOST_LISTED],
            "hints": sorted(hint for hints in self._alike.values() for hint in hints)[:HINTS],
            "counters": dict(self.counters),
        }

    def problems(self) -> list[str]:
        problems = [f"nothing is shared with a node: {text}" for text in self._differences()[:5]]
        if self._trouble and self._store.available:
            problems.append(f"other nodes do not hear of this one: {self._trouble}")
        if self._unmet and self._store.available:
            problems.append(f"this node does not hear of new ones: {self._unmet}")
        what = f"cluster.node: another node is named {self.me.name} too"
        if self.taken_by:
            # Until the other one has shown that it lives, it is most likely this node's own earlier life.
            if not self._waiting_since:
                problems.append(f"{what} (boot {self.taken_by[:8]}); this one is not known to others: rename it")
            return problems
        now = asyncio.get_running_loop().time()
        for boot, (info, at) in self._namesakes.items():
            if now - at < LEASE_S:
                where = "" if info.address is None else f" at {info.address}"
                problems.append(f"{what} (boot {boot.hex()[:8]}{where}); that one is not known to others: rename it")
        return problems
