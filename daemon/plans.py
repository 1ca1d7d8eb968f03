"""What `residency.py` decides and `transfer.py` carries out: copies between tiers, and the nouns that both speak of.

A plan is a value. Its rows are busy from the moment it is made until it is reported back.
"""

from dataclasses import dataclass

from kvcascade.tiers.block import KVGroup
from kvcascade.tiers.namespace import Namespace

from .index import NO_ROW, U8, U32, U64, Mask
from .protocol import Tier


@dataclass(frozen=True, slots=True)
class Space:
    """One KV group of one namespace, numbered for the index, with the size class of its blocks."""

    number: int
    namespace: Namespace
    fingerprint: bytes
    group: int
    shape: KVGroup
    block_bytes: int
    slot_bytes: int
    size_class: int
    width: int  # bytes of a block hash
    keeps_tokens: bool  # the hash is not cryptographic: token ids are kept and compared


@dataclass(frozen=True, slots=True)
class Slots:
    """Where blocks lie in memory, with the generations that must still hold after a copy."""

    pools: U8
    pages: U32
    generations: U32


@dataclass(frozen=True, slots=True)
class Demotion:
    """Copy `rows` down: from HBM to DRAM pages, or from DRAM to disk slots.

    `above`: for each row the block above it, on disk already, that must not leave before it arrives; else NO_ROW.
    """

    source: Tier
    size_class: int
    rows: U32
    pages: U32  # where the bytes are: HBM or DRAM
    targets: U32  # where they go: DRAM pages or disk slots
    above: U32

    @property
    def held(self) -> U32:
        """The rows in `above`: busy like the plan's own."""
        held: U32 = self.above[self.above != NO_ROW]
        return held


@dataclass(frozen=True, slots=True)
class Promotion:
    """Read `rows`, all of one space, from disk `slots` into DRAM `pages`."""

    space: Space
    rows: U32
    slots: U32
    pages: U32


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `rows` from `pages` to `targets` within DRAM, so that `slab` can go to another size class."""

    slab: int
    slot_bytes: int
    rows: U32
    pages: U32
    targets: U32


@dataclass(frozen=True, slots=True)
class Warm:
    """Blocks of one space that lie in DRAM: what a daemon that takes the pool over is told. One entry a block.

    `tokens` are those of the blocks in `has_tokens`, (k, block tokens). Which of them are clean is not told: the disk
    itself says what it has.
    """

    space: Space
    keys: U64  # (n, 4)
    parents: U64  # (n, 4), zeros where there is none
    has_parent: Mask
    pages: U32
    stamps: U64
    reused: U8
    has_tokens: Mask
    tokens: U32


@dataclass(frozen=True, slots=True)
class Recovered:
    """A disk's blocks that fit this daemon's spaces, one entry a block."""

    space: U32
    keys: U64
    parents: U64
    has_parent: Mask
    stamps: U64
    slots: U32
