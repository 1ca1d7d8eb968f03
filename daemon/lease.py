"""Who holds what: attachments, their leases on blocks to read, and their reservations of slots to write.

A *lease* pins blocks for an attachment until it is released, until its deadline, or until the process that holds it
is gone. A *reservation* owns slots that the attachment's ranks fill; a block is ready when every rank that writes a
part of it has committed. A reservation that ends early gives its blocks up at once, but a slot that a rank may still be
writing stays with it, quarantined, until that rank commits, aborts, answers a fence, or its process is gone. A closed
socket alone proves nothing about a process that may be in the middle of a copy.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import Refused
from kvcascade.tiers.block import committers

from .index import U8, U32, U64, Mask, repeats
from .plans import Space

MAX_RANKS = 64  # committed ranges are kept as one bit a rank


@dataclass(eq=False, slots=True)
class Writer:
    """One process's session that may write into slots: a rank of an attachment, or a whole one-process engine."""

    token: bytes
    rank: int
    attachment: "Attachment"
    lost: bool = False  # its socket is closed, its process is not known to be dead


@dataclass(eq=False, slots=True)
class Lease:
    """Pins on the leading blocks of a chain, or on blocks that were asked for one by one.

    `hbm_pages` are referenced in the HBM pool as well.
    """

    number: int
    attachment: "Attachment"
    space: Space
    request: bytes
    rows: U32
    origin: U8  # the tier that each block came from when it was first asked for
    hbm_pages: U32
    deadline: float
    created: float
    counted: int = 0  # leading blocks whose tokens were already counted as hits
    settled: bool = False  # the blocks that the request misses were counted


class Entry:
    """What became of a reserved block. Plain numbers, as `RowState` is."""

    OPEN: Final = 0
    READY: Final = 1
    GONE: Final = 2  # given up; the slot is quarantined while `remaining` has bits
    CLOSED: Final = 3  # given up and the slot is free


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots for consecutive blocks of one chain. All arrays have one entry a block, in chain order."""

    number: int
    attachment: "Attachment"
    space: Space
    first: int  # index of the first block in its chain
    parent: int  # row of the block before it, NO_ROW if it begins the chain
    rows: U32
    pool: U8
    pages: U32
    required: U64
    remaining: U64
    state: U8
    deadline: float
    created: float
    source: int | None = None  # the Tier that the daemon itself fetches the blocks from; None: an engine stores them
    answered: dict[bytes, Mask] = field(default_factory=dict)  # writer's token → entries whose slots it has let go of

    def entries(self, blocks: U32) -> npt.NDArray[np.int64]:
        """Positions of `blocks` (indices in the chain); raises Refused for one that is not reserved here."""
        entries = blocks.astype(np.int64) - self.first
        if len(entries) and (entries.min() < 0 or entries.max() >= len(self.rows)):
            raise Refused(
                f"blocks: lease {self.number} covers blocks {self.first} to {self.first + len(self.rows) - 1} only"
            )
        if repeats(entries):
            raise Refused("blocks: named twice")
        return entries

    @property
    def closed(self) -> bool:
        return bool(((self.state == Entry.READY) | (self.state == Entry.CLOSED)).all())


@dataclass(eq=False, slots=True, weakref_slot=True)
class Held:
    """What all attachments of one process hold together: budgets are a process's, however often it attaches."""

    pinned_bytes: int = 0
    quarantined_bytes: int = 0


@dataclass(eq=False, slots=True)
class Attachment:
    """One engine: its scheduler's session and its ranks' sessions together."""

    token: bytes
    spaces: tuple[Space, ...]
    ranks: int
    engine: str
    leases: dict[int, Lease] = field(default_factory=dict)
    by_request: dict[tuple[int, bytes], int] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    writers: dict[int, set[Writer]] = field(default_factory=dict)  # rank → sessions whose process may still write
    pinned_bytes: int = 0
    quarantined_bytes: int = 0
    process: Held = field(default_factory=Held)  # of the one that attached
    sessions: int = 0  # connected ones; at zero the attachment ends once nothing is quarantined

    def pin(self, nbytes: int) -> None:
        """So many bytes are pinned more; fewer, where negative."""
        self.pinned_bytes += nbytes
        self.process.pinned_bytes += nbytes

    def quarantine(self, nbytes: int) -> None:
        """So many bytes are quarantined more; fewer, where negative."""
        self.quarantined_bytes += nbytes
        self.process.quarantined_bytes += nbytes

    def required(self, space: Space, first: int, count: int) -> U64:
        """One bit for each rank that must commit, for blocks [first, first + count) of a chain."""
        shape = space.shape
        # Replicas take turns, so the pattern repeats after at most `ranks` blocks.
        period = [
            sum(1 << rank for rank in committers(shape.kv_heads, self.ranks, block, shape.kind))
            for block in range(self.ranks)
        ]
        return np.array(period, dtype=np.uint64)[np.arange(first, first + count) % self.ranks]


@dataclass(frozen=True, eq=False, slots=True)
class Fence:
    """Ask `writer` to finish or give up its copies into the slots of these leases.

    Its answer speaks of `entries` of the lease alone: others, given up after it was asked, may be copied into since.
    """

    number: int
    writer: Writer
    leases: tuple[int, ...]
    entries: npt.NDArray[np.int64]
