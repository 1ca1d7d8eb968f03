"""A node without its sockets: the real index, pools and disk under one cache, on a clock that a test moves.

Blocks are true to their key: `pattern` says which bytes a block must have, each rank of an engine writes its own part
of them, and `expect_true` compares what lies in the slots that a load was given.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import numpy.typing as npt

from kvcascade.config.settings import DiskSettings, DramSettings, HbmSettings, LeaseSettings, Settings, Share
from kvcascade.daemon.cache import Cache, Match, Reserved
from kvcascade.daemon.index import NO_ROW, NO_SLOT, RowState
from kvcascade.daemon.lease import Attachment, Lease, Writer
from kvcascade.daemon.plans import Demotion, Move, Promotion, Slots, Space
from kvcascade.daemon.protocol import POOL_DRAM, BlockState, Tier
from kvcascade.daemon.residency import Residency
from kvcascade.tiers.block import KVGroup, head_range
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.hbm import HbmTier
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.slabfile import BlockMeta, ReadJob, WriteJob, disproves

Path_ = tuple[int, ...]
U8 = npt.NDArray[np.uint8]

SLAB = 1 << 20
BLOCK = 64 << 10  # of NAMESPACE: 16 to a slab
TOKENS = 4
ENDLESS = 200

NAMESPACE = Namespace(
    model="m",
    weights_epoch="",
    kv_dtype="float16",
    groups=(KVGroup(block_tokens=TOKENS, layers=16, kv_heads=4, head_dim=64, kind="attention"),),
    kv_scales="",
    rope="",
    max_model_len=0,
    quantisation="",
    producer="test",
    hash_algo="sha256_cbor",
    key_scheme="tagged-0.31",
    none_hash=bytes(32),
)


def namespace(
    model: str = "m", *, layers: int = 16, kv_heads: int = 4, kind: Any = "attention", algo: str = ""
) -> Namespace:
    """NAMESPACE with other numbers: a block has 4096 bytes for each layer with 4 heads."""
    group = replace(NAMESPACE.groups[0], layers=layers, kv_heads=kv_heads, kind=kind)
    algo = algo or NAMESPACE.hash_algo
    return replace(
        NAMESPACE, model=model, groups=(group,), hash_algo=algo, none_hash=bytes(16 if "xxhash" in algo else 32)
    )


def block_hash(path: Path_, width: int = 32) -> bytes:
    """The hash of the block at the end of a path of blocks."""
    return hashlib.sha256(repr(path).encode()).digest()[:width]


def hashes(path: Path_, width: int = 32) -> bytes:
    """The hashes of all blocks of a path."""
    return b"".join(block_hash(path[: end + 1], width) for end in range(len(path)))


def pattern(space: Space, path: Path_) -> U8:
    """The bytes of the block at the end of a path."""
    seed = hashlib.sha256(space.fingerprint + bytes([space.group]) + repr(path).encode()).digest()
    tiled: U8 = np.resize(np.frombuffer(seed, dtype=np.uint8), space.block_bytes)
    return tiled


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """An attachment with one writer a rank."""

    node: "Node"
    attachment: Attachment
    writers: list[Writer]

    @property
    def space(self) -> Space:
        return self.attachment.spaces[0]

    def hashes(self, path: Path_) -> bytes:
        return hashes(path, self.space.width)

    def lookup(self, path: Path_, request: bytes = b"", *, pin: bool = True, tokens: bytes = b"") -> Match:
        return self.node.cache.lookup(self.attachment, 0, self.hashes(path), request=request, pin=pin, tokens=tokens)

    def matched(self, path: Path_) -> int:
        """How long a prefix is found, without holding it."""
        return self.lookup(path, pin=False).matched

    def lease(self, number: int) -> Lease:
        return self.node.cache.lease(self.attachment, number)

    def load(self, number: int, count: int = 1 << 20) -> Slots:
        return self.node.cache.located(self.lease(number), count)

    def release(self, *numbers: int) -> None:
        self.node.cache.release(self.attachment, numbers)

    def reserve(self, path: Path_, start: int = 0, tokens: bytes = b"") -> Reserved:
        return self.node.cache.reserve(self.attachment, 0, self.hashes(path), start, tokens)

    def commit(self, number: int, blocks: Sequence[int], rank: int = 0) -> tuple[int, int]:
        writer = self.writers[rank]
        return self.node.cache.commit(self.attachment, writer, number, np.array(blocks, dtype=np.uint32))

    def abort(self, number: int, blocks: Sequence[int] | None = None, rank: int | None = 0) -> None:
        writer = None if rank is None else self.writers[rank]
        named = None if blocks is None else np.array(blocks, dtype=np.uint32)
        self.node.cache.abort(self.attachment, writer, number, named)

    def write(self, path: Path_, pool: int, page: int, rank: int = 0) -> None:
        """This rank's part of the block at the end of the path, into a slot."""
        shape = self.space.shape
        first, count = head_range(shape.kv_heads, self.attachment.ranks, rank, shape.kind)
        heads = 1 if shape.kind == "mla" else shape.kv_heads
        head = self.space.block_bytes // heads
        part = slice(first * head, (first + count) * head)
        self.node.view(pool, page, self.space.block_bytes)[part] = pattern(self.space, path)[part]

    def fill(self, path: Path_, reserved: Reserved, start: int = 0) -> list[int]:
        """Writes and commits every slot of a reservation, all ranks; the blocks."""
        blocks = [start + int(place) for place in np.flatnonzero(reserved.states == BlockState.SLOT)]
        for rank in range(self.attachment.ranks):
            mine = self.attachment.required(self.space, 0, len(path)) & np.uint64(1 << rank)
            for block, pool, page in zip(blocks, reserved.slots.pools, reserved.slots.pages, strict=True):
                if mine[block]:
                    self.write(path[: block + 1], int(pool), int(page), rank)
            if any(mine[block] for block in blocks):
                self.commit(reserved.lease, [block for block in blocks if mine[block]], rank)
        return blocks

    def store(self, path: Path_) -> list[int]:
        """Reserves, writes and commits what is not here of a path; the blocks that were stored."""
        return self.fill(path, self.reserve(path))

    def expect_true(self, path: Path_, slots: Slots) -> None:
        """The slots hold the path's leading blocks."""
        for end, (pool, page) in enumerate(zip(slots.pools, slots.pages, strict=True)):
            block = self.node.view(int(pool), int(page), self.space.block_bytes)
            assert (block == pattern(self.space, path[: end + 1])).all(), f"block {end} of {path} is not its own"

    def expect_loads(self, path: Path_, count: int) -> None:
        """Exactly the `count` leading blocks are in memory and true."""
        match = self.lookup(path)
        assert match.ready == count
        slots = self.load(match.lease) if match.lease else Slots(*(np.empty(0, np.uint32),) * 3)  # type: ignore[arg-type]
        assert len(slots.pages) == count
        self.expect_true(path, slots)
        self.release(match.lease)

    def tiers(self, path: Path_) -> list[set[Tier]]:
        """Where each block of a path lies."""
        masks = self.node.residency.where(self.space, self.hashes(path))
        return [{tier for tier in Tier if mask & (1 << tier)} for mask in masks.tolist()]

    def end(self) -> None:
        """All its processes are gone."""
        cache = self.node.cache
        self.attachment.sessions = 0
        cache.end_attachment(self.attachment)
        for writer in self.writers:
            cache.writer_gone(writer)
        self.writers.clear()


class Node:
    """Pools of whole slabs of 1 MiB, everything else by settings; `close` it."""

    def __init__(
        self,
        *,
        slabs: int = 4,
        hbm_slabs: int = 0,
        disk: Drives | None = None,
        low_watermark: float = 0.05,
        hbm_watermark: float = 0.05,
        disk_policy: str = "back",
        dram_policy: str = "back",
        budget: float = 0.5,
        quarantine: float = 0.25,
    ) -> None:
        self.settings = Settings(
            dram=DramSettings(
                capacity=slabs * SLAB, slab=SLAB, low_watermark=Share(low_watermark), write_policy=dram_policy
            ),
            hbm=HbmSettings(capacity=hbm_slabs * SLAB, device="cpu", low_watermark=Share(hbm_watermark)),
            disk=DiskSettings(write_policy=disk_policy),
            leases=LeaseSettings(budget_share=Share(budget), quarantine_share=Share(quarantine)),
        )
        self.clock = Clock()
        self.dram = DramTier(slabs * SLAB, slab_bytes=SLAB, lock=False)
        self.dram.pool.online(slabs)
        self.hbm = HbmTier("cpu", hbm_slabs * SLAB, slab_bytes=SLAB, lock=False) if hbm_slabs else None
        if self.hbm is not None:
            self.hbm.pool.online(hbm_slabs)
        self.disk = disk
        self.residency = Residency(self.settings, dram=self.dram, hbm=self.hbm, disk=disk)
        self.cache = Cache(self.settings, self.residency, clock=self.clock)

    def close(self) -> None:
        self.dram.close()
        if self.hbm is not None:
            self.hbm.close()

    def engine(self, kind: Namespace = NAMESPACE, ranks: int = 1, *, process: int = 0) -> Engine:
        attachment = self.cache.attach(kind, ranks, "test", process=process)
        attachment.sessions = 1
        if self.disk is not None:
            self.disk.register_namespace(kind.fingerprint(), cbor2.dumps(kind.to_map()))
        return Engine(self, attachment, [self.cache.join(attachment, rank) for rank in range(ranks)])

    def view(self, pool: int, page: int, size: int) -> U8:
        if pool == POOL_DRAM:
            return self.dram.view(page, size)
        assert self.hbm is not None
        view = self.hbm.view(page, size)
        assert isinstance(view, np.ndarray)
        return view

    def expect_sound(self) -> None:
        assert self.cache.check() == []

    def expect_idle(self) -> None:
        """Nobody holds anything: every slot is free or holds a findable block."""
        self.expect_sound()
        assert not self.cache.attachments
        assert not self.residency.index.pins.any()
        assert self.residency.index.doomed == 0
        for pool in [self.dram.pool] + ([self.hbm.pool] if self.hbm is not None else []):
            assert all(counts.pending == counts.quarantined == 0 for counts in pool.counts().values())

    # ---- what transfer.py does, step by step

    def copy(self, plan: Demotion | Move) -> None:
        """Moves the bytes of a plan within memory."""
        if isinstance(plan, Move):
            size, source = plan.slot_bytes, POOL_DRAM
        else:
            size, source = self.residency.slot_bytes(plan.size_class), 1
        for page, target in zip(plan.pages.tolist(), plan.targets.tolist(), strict=True):
            self.dram.view(target, size)[:] = self.view(source, page, size)

    def write_jobs(self, plan: Demotion) -> list[WriteJob]:
        index, size = self.residency.index, self.residency.slot_bytes(plan.size_class)
        jobs = []
        for row, page, slot in zip(plan.rows.tolist(), plan.pages.tolist(), plan.targets.tolist(), strict=True):
            space = self.residency.spaces[index.space[row]]
            parent = int(index.parent[row])
            meta = BlockMeta(
                namespace=space.fingerprint,
                block_hash=index.key[row].tobytes()[: space.width],
                parent=b"" if parent == NO_ROW else index.key[parent].tobytes()[: space.width],
                group=space.group,
                length=size,
                stamp=int(index.stamp[row]),
                tokens=b"",
            )
            jobs.append(WriteJob(slot, meta, self.dram.view(page, size)))
        return jobs

    def read_jobs(self, plan: Promotion) -> list[ReadJob]:
        index, space = self.residency.index, plan.space
        return [
            ReadJob(
                slot=slot,
                namespace=space.fingerprint,
                block_hash=index.key[row].tobytes()[: space.width],
                group=space.group,
                length=space.slot_bytes,
                into=self.dram.view(page, space.slot_bytes),
            )
            for row, slot, page in zip(plan.rows.tolist(), plan.slots.tolist(), plan.pages.tolist(), strict=True)
        ]

    async def demote(self, *, everything: bool = False) -> list[Demotion]:
        """Copies down as the cleaner does, until nothing is planned any more."""
        plans = []
        while (plan := self.residency.plan_demotion(everything=everything)) is not None:
            assert len(plans) < ENDLESS, f"demotion does not come to an end: {plan}"
            if plan.source is Tier.HBM:
                self.copy(plan)
                done = np.ones(len(plan.rows), dtype=np.bool_)
            else:
                assert self.disk is not None
                reasons = await self.disk.write(self.write_jobs(plan))
                done = np.array([reason is None for reason in reasons])
            self.residency.demoted(plan, done)
            plans.append(plan)
        return plans

    async def promote(self, engine: Engine, lease: int) -> int:
        """Brings a lease's blocks up; how many arrived."""
        plan = self.residency.plan_promotion(engine.space, engine.lease(lease).rows)
        if plan is None:
            return 0
        assert self.disk is not None
        reasons = await self.disk.read(self.read_jobs(plan))
        good = np.array([reason is None for reason in reasons])
        doubted = np.array([reason is not None and disproves(reason) for reason in reasons])
        self.residency.promoted(plan, good, doubted)
        return int(good.sum())

    def move(self) -> int:
        """Moves slabs as the cleaner does, until nothing is planned any more; how many were tried."""
        moves = 0
        while (plan := self.residency.plan_move()) is not None:
            assert moves < ENDLESS, f"slabs are moved to and fro: {plan}"
            self.copy(plan)
            self.residency.moved(plan, True)
            moves += 1
        return moves

    def rows_in(self, tier: Tier) -> int:
        return self.residency.blocks_in(tier)


@contextmanager
def running(**options: Any) -> Iterator[Node]:
    """A node that must be sound at the end."""
    node = Node(**options)
    try:
        yield node
        node.expect_sound()
    finally:
        node.close()


async def open_disk(
    directory: Path | Sequence[Path], capacity: int, clock: Clock | None = None, **options: Any
) -> tuple[Drives, Any]:
    """The real disk tier, of one directory or several, and what it recovered; close it with `await disk.close()`."""
    options |= {"threads": 2} if clock is None else {"clock": clock}
    directories = [directory] if isinstance(directory, Path) else directory
    disk = Drives([DiskTier(one, capacity, **options) for one in directories])
    recovery = await asyncio.to_thread(disk.open)
    return disk, recovery


__all__ = [
    "BLOCK",
    "NAMESPACE",
    "NO_SLOT",
    "SLAB",
    "TOKENS",
    "Engine",
    "Node",
    "RowState",
    "block_hash",
    "hashes",
    "namespace",
    "open_disk",
    "pattern",
    "running",
]
