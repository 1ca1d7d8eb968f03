"""Who is in the fleet, and which node has which prefix: two kinds of small values in Redis.

*Node records*: one key a node, `node:NAME`, with its address, incarnation and key scheme; it lives for LEASE_S and is
renewed every third of that. A node whose record is gone, or has another incarnation, has nothing for us.

*Entries*: one key for every 16th block of a chain and for its end, `d:` and the block's keyed name; the value is the
incarnation of the node that said so last. An entry is a hint, never a promise: it may be late, evicted, or another
node's by now; the node itself says exactly what it has. A chain is never assumed to be whole, so all blocks of a
question are asked for in one MGET, and the last one that some node names decides how far to ask that node.

What it costs (an entry is some 150 bytes in Redis): 10 bytes a block, one pipelined SET for each 16 blocks stored,
and at rest one SET and one GET a node every 5 s; no SCAN, no heartbeat a block. Entries live as long as blocks in Redis
do; those of dead nodes are left to their TTL. Once a minute each node adds its name to one sorted set and reads it, to
meet those it has not met.

Two nodes with one name would take turns at one record: the later one sees the other's living record, and steps back
until that is gone. Nodes that hash otherwise (another seed, algorithm or key scheme) never meet a block of ours, since
all of that is in the namespace; they are told apart here so that `status` can say why nothing is shared.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, Self

import cbor2

from kvcascade.config.errors import CascadeError, ProtocolError
from kvcascade.config.settings import Endpoint
from kvcascade.tiers.remote import TAG_BYTES, BlockName, Secret

from .protocol import decode_body, take

log = logging.getLogger("kvcascade.fleet")

RECORD: Final = 1  # the format of a node's record
LEASE_S: Final = 15.0
RENEW_S: Final = LEASE_S / 3
FRESH_S: Final = 2.0  # how long a record that was read is believed
WAITING: Final = 65536  # entries that wait to be written; more are dropped
BATCH: Final = 1024
GATHER_S: Final = 0.05  # entries of one moment are written together
KNOWN: Final = 4096  # nodes that are remembered
MEET_S: Final = 60.0  # how often nodes that are new are looked for
ROLL_S: Final = 3600.0  # how long a name stays in the roll
MET: Final = 256  # records that are read at one time
MAX_RECORD: Final = 2048  # bytes


class Store(Protocol):
    """Small values that all nodes see; `RedisTier`. All raise TierUnavailable when they cannot tell."""

    async def read(self, keys: Sequence[bytes], timeout: float) -> list[bytes | None]: ...

    async def write(self, items: Sequence[tuple[bytes, bytes]], ttl: float, timeout: float) -> None: ...

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
            and isinstance(address[1], int)
            and 0 < address[1] < 65536
        ):
            raise ProtocolError("field 'address': it is no host and port")
        texts = {name: take(values, name, str, hi=64) for name in ("name", "version", "hash_algo", "key_scheme")}
        return cls(
            boot=take(values, "boot", bytes, lo=16, hi=16),
            address=Endpoint(*address) if address else None,
            none_hash=take(values, "none_hash", bytes, lo=8, hi=32),
            **texts,
        )


@dataclass(slots=True)
class _Known:
    info: NodeInfo
    read: float  # when, by the loop's clock


class Fleet:
    """This node's record and entries, and those of others. Use as an async context manager, on the loop's thread."""

    def __init__(self, store: Store, secret: Secret, me: NodeInfo, *, entry_ttl: float, timeout: float) -> None:
        """`me` is made known only where it has an address; others are found in any case."""
        self._store = store
        self._secret = secret
        self.me = me
        self._entry_ttl = entry_ttl
        self._timeout = timeout
        self._me_packed = self._sealed(me)
        self._known: dict[bytes, _Known] = {}  # incarnation → node
        self._different: dict[str, str] = {}  # node's name → why nothing is shared with it
        self._waiting: dict[bytes, None] = {}
        self._gathered = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.taken_by = ""  # another living node of this name: its incarnation
        self._trouble = ""
        self._meet_at = 0.0
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Makes this node known, at first or again."""
        if self.me.address is not None and not self._tasks:
            self._tasks = [
                asyncio.create_task(self._renew(), name="fleet lease"),
                asyncio.create_task(self._write_entries(), name="fleet directory"),
            ]

    async def stop(self) -> None:
        """Says that this node is gone, until `start`: others stop asking at once. Idempotent."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._tasks = []
        key = self._node_key(self.me.name)
        try:
            (there,) = await self._store.read([key], self._timeout)
            if there == self._me_packed:
                await self._store.write([(key, b"")], 0.001, self._timeout)
        except CascadeError:
            pass  # it runs out by itself

    # ---- node records

    def _node_key(self, name: str) -> bytes:
        return b"node:" + name.encode()

    def _sealed(self, info: NodeInfo) -> bytes:
        body = info.pack()
        return self._secret.tag("nodes", body) + body

    def _unsealed(self, data: bytes) -> NodeInfo:
        tag, body = data[:TAG_BYTES], data[TAG_BYTES:]
        if not self._secret.proves(tag, "nodes", body):
            raise ProtocolError("record: it is not signed with the fleet's secret")
        return NodeInfo.unpack(body)

    async def _renew(self) -> None:
        key = self._node_key(self.me.name)
        while True:
            try:
                (there,) = await self._store.read([key], self._timeout)
                other = self._other(there)
                if other is None:
                    await self._store.write(
                        [(key, self._me_packed), (b"boot:" + self.me.boot, self.me.name.encode())],
                        LEASE_S,
                        self._timeout,
                    )
                elif not self.taken_by:
                    log.error("cluster.node: another node is named %s too; this one is silent", self.me.name)
                self.taken_by = "" if other is None else other.boot.hex()
                now = asyncio.get_running_loop().time()
                if other is None and now >= self._meet_at:
                    self._meet_at = now + MEET_S
                    await self._meet()
                self._trouble = ""
            except CascadeError as error:
                self._trouble = str(error)
                self.counters["lease_failures"] += 1
            except Exception:
                log.exception("the node's record was not renewed")
            await asyncio.sleep(RENEW_S)

    async def _meet(self) -> None:
        """Reads the records of the other nodes, to know those with which nothing can be shared."""
        names = await self._store.enlist(b"nodes", self.me.name.encode(), ROLL_S, self._timeout)
        keys = [b"node:" + name for name in names if len(name) <= 64 and name != self.me.name.encode()][:MET]
        self._different.clear()
        for record in await self._store.read(keys, self._timeout) if keys else []:
            if record:
                try:
                    self.note(self._unsealed(record))
                except CascadeError:
                    self.counters["bad_records"] += 1

    def _other(self, record: bytes | None) -> NodeInfo | None:
        """The living node that has our name, if what lies there is a node's record."""
        if not record:
            return None
        try:
            info = self._unsealed(record)
        except CascadeError as error:
            log.warning("the record under our name is no node's reason=%s", error)
            self.counters["bad_records"] += 1
            return None
        return info if info.boot != self.me.boot else None

    async def _nodes(self, boots: Sequence[bytes], timeout: float) -> dict[bytes, NodeInfo]:
        """The living nodes of these incarnations."""
        now = asyncio.get_running_loop().time()
        unknown = [boot for boot in boots if boot not in self._known or now - self._known[boot].read > FRESH_S]
        if unknown:
            names = await self._store.read([b"boot:" + boot for boot in unknown], timeout)
            found = [(boot, name) for boot, name in zip(unknown, names, strict=True) if name and len(name) <= 64]
            for boot in unknown:
                self._known.pop(boot, None)
            if found:
                keys = [b"node:" + name for _, name in found]
                records = await self._store.read(keys, timeout)
                for (boot, _), record in zip(found, records, strict=True):
                    self._learn(boot, record, now)
        return {boot: self._known[boot].info for boot in boots if boot in self._known}

    def _learn(self, boot: bytes, record: bytes | None, now: float) -> None:
        if not record:
            return
        try:
            info = self._unsealed(record)
        except CascadeError as error:
            self.counters["bad_records"] += 1
            log.debug("a node's record is not believed reason=%s", error)
            return
        if info.boot != boot:
            return  # an earlier incarnation's entry
        self.note(info)
        if self.me.difference(info) is None:
            if len(self._known) >= KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[boot] = _Known(info, now)

    def note(self, info: NodeInfo) -> None:
        """Another node was met: remembers if nothing can be shared with it."""
        difference = self.me.difference(info)
        if difference is None:
            self._different.pop(info.name, None)
        elif len(self._different) < KNOWN:
            self._different[info.name] = difference

    # ---- the directory

    def _entry_key(self, namespace: bytes, group: int, block_hash: bytes) -> bytes:
        return b"d:" + self._secret.name_of(BlockName(namespace, group, block_hash))

    def announce(self, namespace: bytes, group: int, hashes: Sequence[bytes]) -> None:
        """Queues entries: this node has these blocks, and all above them."""
        if self.me.address is None:
            return
        for block_hash in hashes:
            if len(self._waiting) >= WAITING:
                self.counters["entries_dropped"] += 1
            else:
                self._waiting[self._entry_key(namespace, group, block_hash)] = None
        if self._waiting:
            self._gathered.set()

    async def _write_entries(self) -> None:
        while True:
            await self._gathered.wait()
            await asyncio.sleep(GATHER_S)
            self._gathered.clear()
            while self._waiting:
                keys = list(self._waiting)[:BATCH]
                for key in keys:
                    del self._waiting[key]
                if self.taken_by:
                    self.counters["entries_dropped"] += len(keys)
                    continue
                try:
                    await self._store.write([(key, self.me.boot) for key in keys], self._entry_ttl, self._timeout)
                    self.counters["entries_written"] += len(keys)
                except CascadeError:
                    self.counters["entries_dropped"] += len(keys)
                except Exception:
                    log.exception("entries were not written")

    async def find(
        self, namespace: bytes, group: int, hashes: bytes, width: int, timeout: float
    ) -> list[tuple[NodeInfo, int]]:
        """Living nodes that may have leading blocks of this piece of a chain, and how many at most, most first.

        TierUnavailable when the directory cannot be read: then nobody knows.
        """
        keys = [
            self._entry_key(namespace, group, hashes[start : start + width]) for start in range(0, len(hashes), width)
        ]
        reached: dict[bytes, int] = {}
        for start in range(0, len(keys), BATCH):
            replies = await self._store.read(keys[start : start + BATCH], timeout)
            for number, boot in enumerate(replies, start + 1):
                if boot is not None and len(boot) == 16 and boot != self.me.boot:
                    reached[boot] = number
        if not reached:
            return []
        nodes = await self._nodes(list(reached), timeout)
        # An entry says what lies above it is there, too; what lies below is for the node to say.
        last = len(keys)
        named = sorted(((info, reached[boot]) for boot, info in nodes.items()), key=lambda one: -one[1])
        return [(info, last) for info, _ in named]

    # ---- what people see

    def status(self) -> dict[str, Any]:
        return {
            "node": self.me.name,
            "address": "" if self.me.address is None else str(self.me.address),
            "boot": self.me.boot.hex(),
            "waiting_entries": len(self._waiting),
            "reason": self._trouble,
            "known": sorted(one.info.name for one in self._known.values()),
            "different": sorted(self._different.values()),
            "counters": dict(self.counters),
        }

    def problems(self) -> list[str]:
        problems = [f"nothing is shared with a node: {text}" for text in sorted(self._different.values())[:5]]
        if self.taken_by:
            problems.append(f"cluster.node: another node is named {self.me.name} too (boot {self.taken_by[:8]})")
        return problems
