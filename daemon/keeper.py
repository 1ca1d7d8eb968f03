"""Keeps the DRAM pool for a start after a crash: the ledger's upkeep here, and what a new daemon makes of it.

Used where a supervisor keeps descriptors (supervisor.py). While the daemon runs, every block that lands in DRAM and
every slot that is reserved there is recorded (tiers/ledger.py); a data thread follows with the blocks' checksums. A
daemon that starts and gets the pool and the ledger back takes over each block whose bytes give its checksum, drops the
others, and withholds the slots that were reserved: until every process that could write when the old daemon ended is
dead, or has re-attached and said that its copies have ended. Coarser than after a takeover, where it is known who
writes where; such a start is rare.

Blocks whose hashes can collide are dropped, since their token ids are not kept.
"""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import cbor2
import numpy as np

from kvcascade.config.errors import CascadeError, ProtocolError
from kvcascade.config.settings import Settings
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.ledger import HELD, LANDED, SEALED, Ledger, Records, Writing, digests
from kvcascade.tiers.memory import SharedMemory
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.pool import PAGE_SHIFT
from kvcascade.tiers.workers import outlast

from .cache import Cache
from .handover import Withheld
from .index import NO_ROW, NO_SLOT, U32, U64, Mask, RowState
from .lease import Entry
from .plans import Space, Warm
from .protocol import POOL_DRAM, decode_body, take
from .residency import Residency
from .supervisor import Supervisor

log = logging.getLogger("kvcascade.keeper")

POOL: Final = "kvcascade-dram"
LEDGER: Final = "kvcascade-ledger"
SEAL_BYTES: Final = 64 << 20  # of blocks that are read for their checksums at once
SEAL_PAUSE_S: Final = 0.05  # commits come by the hundred
VERIFIERS: Final = 4
WITHHELD_PART: Final = 1 << 16


class Keeper:
    """The ledger of a running daemon's DRAM pool. An async context: inside it, blocks get their checksums."""

    def __init__(self, residency: Residency, ledger: Ledger) -> None:
        self._residency = residency
        self._ledger = ledger
        # The loop's thread alone.
        self._numbers: dict[int, int | None] = {}  # space → the ledger's number
        self._unsealed: list[tuple[U32, int]] = []  # pages, bytes a slot
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcascade-seal")
        residency.landed = self._landed
        residency.reserved = self._reserved
        residency.dram.freed = self._ledger.clear

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._seal(), name="seal")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._thread.shutdown()
        residency = self._residency
        residency.landed, residency.reserved = (lambda rows: None), (lambda space, pages: None)
        residency.dram.freed = lambda pages: None
        self._ledger.close()

    def entered(self, token: bytes, pid: int, uid: int) -> None:
        """A process that may write into slots."""
        self._ledger.add_writer(Writing(token, pid, uid, _started(pid) or 0))

    def left(self, token: bytes) -> None:
        """It is dead, or has said that it writes no more."""
        self._ledger.remove_writer(token)

    def record_all(self, cache: Cache) -> None:
        """Writes down all that is there already, in a ledger that is new."""
        index = self._residency.index
        for attachment in cache.attachments.values():
            for reservation in attachment.reservations.values():
                held = (reservation.pool == POOL_DRAM) & (reservation.state == Entry.GONE)
                self._reserved(reservation.space, reservation.pages[held])
        there = (index.dram[: index.high] != NO_SLOT) & (index.state[: index.high] == RowState.READY)
        self._landed(np.flatnonzero(there).astype(np.uint32))

    def counts(self) -> dict[str, int]:
        """Blocks in DRAM that a daemon started after a crash would take over, and those that wait for a checksum."""
        index = self._residency.index
        pages = index.dram[: index.high]
        states = self._ledger.states(pages[pages != NO_SLOT])
        return {"sealed": int((states == SEALED).sum()), "unsealed": int((states == LANDED).sum())}

    def _number(self, space: Space) -> int | None:
        if space.number not in self._numbers:
            descriptor = cbor2.dumps({"namespace": space.namespace.to_map(), "group": space.group}, canonical=True)
            self._numbers[space.number] = self._ledger.space(descriptor)
        return self._numbers[space.number]

    def _reserved(self, space: Space, pages: U32) -> None:
        number = self._number(space)
        # Without a number the slots' class is not known to the next daemon, and so they are in no slab of its own.
        if number is not None:
            self._ledger.hold(pages, number, space.slot_bytes)

    def _landed(self, rows: U32) -> None:
        index = self._residency.index
        spaces = index.space[rows]
        for number in np.unique(spaces).tolist():
            space = self._residency.spaces[number]
            known = self._number(space)
            mine = rows[spaces == number]
            pages = index.dram[mine]
            if known is None or space.keeps_tokens:
                self._ledger.clear(pages)
                continue
            above = index.parent[mine]
            has_parent = above != NO_ROW
            parents = np.zeros((len(mine), 4), dtype=np.uint64)
            parents[has_parent] = index.key[above[has_parent]]
            self._ledger.land(pages, known, space.slot_bytes, index.key[mine], parents, has_parent, index.stamp[mine])
            self._unsealed.append((pages, space.slot_bytes))
        self._work.set()

    async def _seal(self) -> None:
        dram = self._residency.dram
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(SEAL_PAUSE_S)
            while self._unsealed:
                pages, slot_bytes = self._unsealed.pop()
                most = max(1, SEAL_BYTES // slot_bytes)
                if len(pages) > most:
                    self._unsealed.append((pages[most:], slot_bytes))
                    pages = pages[:most]
                pages = pages[self._ledger.states(pages) == LANDED]
                before = dram.generations.of(pages)
                digests = await self._digest(dram, pages, slot_bytes)
                # What was handed on meanwhile holds something else, or half of it.
                same = (dram.generations.of(pages) == before) & (self._ledger.states(pages) == LANDED)
                self._ledger.seal(pages[same], digests[same])

    async def _digest(self, dram: DramTier, pages: U32, slot_bytes: int) -> U64:
        work = asyncio.get_running_loop().run_in_executor(self._thread, _digests, dram, pages, slot_bytes)
        await outlast([work])
        return work.result()


def _digests(dram: DramTier, pages: U32, slot_bytes: int) -> U64:
    """Of the bytes of each slot, in a data thread; the GIL is free meanwhile."""
    return digests(dram.view(page, slot_bytes) for page in pages.tolist())


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks: with its pid, it names it for good. None for one that is not there."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


class Remains:
    """What a daemon left that was killed: its pool and its ledger, kept by the supervisor. `close` what is not used."""

    def __init__(self, memory: SharedMemory, ledger: Ledger) -> None:
        self._memory: SharedMemory | None = memory
        self.ledger = ledger
        self.capacity = ledger.pages << PAGE_SHIFT
        self.dropped = 0
        self._records: Records = ledger.records()
        self._known: dict[int, tuple[Namespace, int]] = {}
        for number, descriptor in enumerate(ledger.spaces()):
            with suppress(CascadeError):
                told = decode_body(descriptor)
                self._known[number] = Namespace.from_map(take(told, "namespace", dict)), take(told, "group", int)

    @classmethod
    def find(cls, supervisor: Supervisor, settings: Settings) -> "Remains | None":
        """None where nothing was kept, or what was kept does not fit the settings; it is let go then."""
        memory: SharedMemory | None = None
        try:
            if POOL not in supervisor.kept or LEDGER not in supervisor.kept:
                raise ProtocolError("nothing was kept")
            memory = SharedMemory.adopt(supervisor.kept[POOL], os.fstat(supervisor.kept[POOL]).st_size)
            del supervisor.kept[POOL]
            ledger = Ledger.adopt(supervisor.kept[LEDGER], os.fstat(supervisor.kept[LEDGER]).st_size)
            del supervisor.kept[LEDGER]
        except (CascadeError, OSError) as error:
            log.info("no pool of an earlier daemon reason=%s", error)
            if memory is not None:
                memory.close()
            supervisor.forget(POOL)
            supervisor.forget(LEDGER)
            return None
        asked, size = settings.dram.capacity, ledger.pages << PAGE_SHIFT
        fits = ledger.slab_bytes == settings.dram.slab and size <= memory.size
        if not fits or (isinstance(asked, int) and asked - asked % ledger.slab_bytes != size):
            log.warning("the pool of the earlier daemon is let go reason=dram.capacity or dram.slab have changed")
            memory.close()
            ledger.close()
            supervisor.forget(POOL)
            supervisor.forget(LEDGER)
            return None
        return cls(memory, ledger)

    def memory(self) -> SharedMemory:
        """The pool; the caller owns it."""
        assert self._memory is not None
        memory, self._memory = self._memory, None
        return memory

    @property
    def online(self) -> int:
        """Slabs up to the last one in use: they come online from the first one on."""
        pages = self._records.pages
        return (int(pages.max()) << PAGE_SHIFT) // self.ledger.slab_bytes + 1 if len(pages) else 0

    async def read(self, residency: Residency) -> list[Warm]:
        """The blocks that prove true; the records of the others are cleared. Their spaces are opened in `residency`."""
        records, dram = self._records, residency.dram
        sealed = records.state == SEALED
        true = np.zeros(len(records.pages), dtype=np.bool_)
        spaces: dict[int, Space] = {}
        for number, (namespace, group) in self._known.items():
            with suppress(CascadeError):
                space = spaces[number] = residency.space(namespace, group)
                mine = np.flatnonzero(sealed & (records.space == number) & (records.slot_bytes == space.slot_bytes))
                true[mine] = await _verify(dram, records.pages[mine], records.checksums[mine], space.slot_bytes)
        lost = ~true & (records.state != HELD)
        self.ledger.clear(records.pages[lost])
        self.dropped = int(lost.sum())
        return [_warm(space, records, true & (records.space == number)) for number, space in spaces.items()]

    def clear_lost(self, residency: Residency) -> None:
        """Forgets blocks that proved true, but whose chain is not here."""
        index, records = residency.index, self._records
        there = index.dram[: index.high]
        gone = ~np.isin(records.pages, there[there != NO_SLOT]) & (records.state != HELD)
        self.ledger.clear(records.pages[gone])

    def withheld(self) -> tuple[list[Withheld], list[tuple[Writing, int | None]]]:
        """Slots to be withheld, one entry a space and as if of one rank, and who may be writing into any of them.

        Each writer comes with a pidfd, the caller's, where there is one.
        """
        records = self._records
        writers: list[tuple[Writing, int | None]] = []
        for writing in self.ledger.writers():
            # In this order: what has the pidfd now is what the start time is asked of, or dead.
            pidfd = writing.pidfd()
            if writing.started and _started(writing.pid) != writing.started:
                self.ledger.remove_writer(writing.token)
                if pidfd is not None:
                    os.close(pidfd)
            else:
                writers.append((writing, pidfd))
        if self.ledger.writers_left_out:
            # Somebody who is not known, and so can never be known to have stopped.
            writers.append((Writing(os.urandom(16), 0, 0, 0), None))
        found = []
        for number, (namespace, group) in self._known.items():
            pages = records.pages[(records.state == HELD) & (records.space == number)]
            if not len(pages):
                continue
            if not writers:
                self.ledger.clear(pages)
                continue
            # In parts, each of which fits in a frame of a takeover.
            parts = [pages[start : start + WITHHELD_PART] for start in range(0, len(pages), WITHHELD_PART)]
            slots = [(group, part, np.ones(len(part), dtype=np.uint64)) for part in parts]
            found.append(Withheld(namespace, 1, "before the crash", slots, []))
        return found, writers

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _warm(space: Space, records: Records, mine: Mask) -> Warm:
    count = int(mine.sum())
    return Warm(
        space=space,
        keys=records.keys[mine],
        parents=records.parents[mine],
        has_parent=records.has_parent[mine],
        pages=records.pages[mine],
        stamps=records.stamps[mine],
        reused=np.zeros(count, dtype=np.uint8),
        has_tokens=np.zeros(count, dtype=np.bool_),
        tokens=np.empty((0, space.shape.block_tokens), dtype=np.uint32),
    )


async def _verify(dram: DramTier, pages: U32, checksums: U64, slot_bytes: int) -> Mask:
    """Which slots give their checksums, read by some data threads."""
    loop = asyncio.get_running_loop()
    batch = max(1, SEAL_BYTES // slot_bytes)
    with ThreadPoolExecutor(VERIFIERS, thread_name_prefix="kvcascade-verify") as threads:
        parts = [
            loop.run_in_executor(threads, _digests, dram, pages[start : start + batch], slot_bytes)
            for start in range(0, len(pages), batch)
        ]
        digests = await asyncio.gather(*parts)
    proved: Mask = np.concatenate([np.empty(0, np.uint64), *digests]) == checksums
    return proved
