"""The cache as a machine: engines of unlike shapes, late writers, copies in flight, and a disk, step by step.

The model knows three things: which bytes each block must have, whether a rank has let go of a slot, and which slots a
live lease was given. A writer that has not let go may scribble into its slots at any moment; if one of them were handed
on early, some load would find bytes that are not its block's.
"""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines.node import Engine, Node, namespace, open_disk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcascade.config.errors import Refused
from kvcascade.daemon.index import RowState
from kvcascade.daemon.lease import Fence, Writer
from kvcascade.daemon.plans import Demotion, Move, Promotion, Slots
from kvcascade.daemon.protocol import POOL_DRAM, BlockState, Tier
from kvcascade.daemon.recovery import adopt
from kvcascade.tiers.pool import SlotState
from kvcascade.tiers.slabfile import disproves

PLAIN = namespace("plain", layers=32)  # 128 KiB a block
LARGE = namespace("large", layers=110, kv_heads=2)  # 220 KiB
LATENT = namespace("latent", layers=130, kv_heads=1, kind="mla")  # 65 KiB
KINDS = (
    (PLAIN, 1),
    (PLAIN, 2),
    (LARGE, 1),
    (LARGE, 4),  # each head on two ranks
    (LATENT, 2),
)
DISK_BYTES = 14 * (128 << 10)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@dataclass
class Storing:
    """One reservation as its engine sees it. `held`: (rank, block) whose slot the rank may still write."""

    engine: Engine
    lease: int
    path: tuple[int, ...]
    slots: dict[int, tuple[int, int]]  # block → pool, page
    held: set[tuple[int, int]]
    said: set[tuple[int, int]] = field(default_factory=set)  # committed


@dataclass
class Holding:
    """A lease and the slots that it was given."""

    engine: Engine
    lease: int
    path: tuple[int, ...]
    slots: Slots
    deadline: float


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="kvc-machine-"))
        self.node: Any = None
        self.disk: Any = None
        self.engines: list[Engine] = []
        self.offered: set[tuple[int, ...]] = set()
        self.storing: list[Storing] = []
        self.holding: list[Holding] = []
        self.fences: list[tuple[Fence, frozenset[tuple[int, int]]]] = []
        self.flights: list[Demotion | Promotion | Move] = []
        self.lost: list[tuple[Engine, Writer]] = []

    @initialize(
        hbm=st.integers(0, 1),
        disk=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["back", "through"]),
        budget=st.sampled_from([1.0, 0.25]),
        seed=st.integers(0, 1 << 32),
    )
    def start(self, hbm: int, disk: bool, policy: str, budget: float, seed: int) -> None:
        """A node whose pools are full already, with something on disk: so that every store costs somebody."""
        if disk:
            self.disk, _ = self.loop.run_until_complete(open_disk(self.directory, DISK_BYTES))
        self.node = Node(
            slabs=2,
            hbm_slabs=hbm,
            disk=self.disk,
            low_watermark=0.5,
            hbm_watermark=0.3,
            disk_policy=policy,
            dram_policy=policy,
            budget=budget,
            quarantine=0.25,
        )
        self.engines = [self.node.engine(kind, ranks) for kind, ranks in KINDS[:3]]
        rng = np.random.default_rng(seed)
        for _ in range(10):
            self.store_whole(self.engines[rng.integers(3)], tuple(rng.integers(0, 2, rng.integers(1, 9)).tolist()))
            if disk:
                self.loop.run_until_complete(self.node.demote())

    def store_whole(self, engine: Engine, path: tuple[int, ...]) -> None:
        self.offered.add(path)
        engine.store(path)

    def teardown(self) -> None:
        try:
            if self.node is not None:
                self.wind_up()
        finally:
            if self.node is not None:
                self.node.close()
            if self.disk is not None:
                assert self.loop.run_until_complete(self.disk.close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.directory)

    def wind_up(self) -> None:
        """Everybody dies, everything in flight ends: all budgets are 0, and what is on disk is true."""
        while self.flights:
            self.finish(self.flights.pop(0), whole=True)
        for engine, writer in self.lost:
            self.node.cache.writer_gone(writer)
            if writer in engine.writers:
                engine.writers.remove(writer)
        for engine in self.engines:
            engine.end()
        self.node.expect_idle()
        if self.disk is None:
            return
        self.loop.run_until_complete(self.node.demote(everything=True))
        self.node.expect_idle()
        self.node.close()
        assert self.loop.run_until_complete(self.disk.close())
        self.disk, recovery = self.loop.run_until_complete(open_disk(self.directory, DISK_BYTES))
        self.node = Node(slabs=2, disk=self.disk, budget=1)
        adopt(self.node.residency, [], recovery)
        self.node.expect_idle()
        for kind, ranks in KINDS:
            engine = self.node.engine(kind, ranks)
            for path in sorted(self.offered):
                match = engine.lookup(path)
                while match.lease and self.loop.run_until_complete(self.node.promote(engine, match.lease)):
                    pass
                if match.lease:
                    slots = engine.load(match.lease)
                    engine.expect_true(path, slots)
                    engine.release(match.lease)
                    self.node.move()
            engine.end()
        self.node.expect_idle()

    # ---- engines

    def one(self, data: st.DataObject) -> Engine:
        engine: Engine = data.draw(st.sampled_from(self.engines))
        return engine

    @precondition(lambda self: len(self.engines) < 5)
    @rule(kind=st.sampled_from(KINDS))
    def attach(self, kind: tuple[Any, int]) -> None:
        self.engines.append(self.node.engine(*kind))

    @precondition(lambda self: len(self.engines) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        engine = self.one(data)
        self.engines.remove(engine)
        for storing in self.storing:
            if storing.engine is engine:
                storing.held.clear()
        self.storing = [s for s in self.storing if s.engine is not engine]
        self.holding = [h for h in self.holding if h.engine is not engine]
        self.lost = [(e, w) for e, w in self.lost if e is not engine]
        self.fences = [f for f in self.fences if f[0].writer.attachment is not engine.attachment]
        engine.end()
        assert engine.attachment.token not in self.node.cache.attachments

    # ---- storing

    @rule(data=st.data(), path=PATHS)
    def reserve(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        engine = self.one(data)
        if any(lost is engine for lost, _ in self.lost):
            return
        self.offered.add(path)
        found = engine.matched(path)
        start = data.draw(st.integers(0, found))
        reserved = engine.reserve(path, start)
        states = [BlockState(int(state)) for state in reserved.states]
        blocks = [start + place for place, state in enumerate(states) if state is BlockState.SLOT]
        assert len(blocks) == len(reserved.slots.pages) == len(reserved.slots.pools)
        assert bool(reserved.lease) is bool(blocks)
        if blocks:
            slots = {
                block: (int(pool), int(page))
                for block, pool, page in zip(blocks, reserved.slots.pools, reserved.slots.pages, strict=True)
            }
            required = engine.attachment.required(engine.space, 0, len(path))
            held = {
                (rank, block)
                for rank in range(engine.attachment.ranks)
                for block in blocks
                if int(required[block]) >> rank & 1
            }
            self.storing.append(Storing(engine, reserved.lease, path, slots, held))

    @rule(data=st.data(), paths=st.lists(PATHS, min_size=1, max_size=3))
    def store(self, data: st.DataObject, paths: list[tuple[int, ...]]) -> None:
        engine = self.one(data)
        if not any(lost is engine for lost, _ in self.lost):
            for path in paths:
                self.store_whole(engine, path)

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), everything=st.booleans())
    def commit(self, data: st.DataObject, everything: bool) -> None:
        storing = data.draw(st.sampled_from(self.storing))
        pairs = sorted(storing.held - self.silent(storing))
        if not pairs:
            return
        chosen = pairs if everything else data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
        for rank in sorted({rank for rank, _ in chosen}):
            blocks = [block for r, block in chosen if r == rank]
            for block in blocks:
                storing.engine.write(storing.path[: block + 1], *storing.slots[block], rank)
            # It cannot have ended: this rank has not let go.
            ready, gone = storing.engine.commit(storing.lease, blocks, rank)
            said = {(rank, block) for block in blocks}
            storing.held -= said
            storing.said |= said
            required = storing.engine.attachment.required(storing.engine.space, 0, len(storing.path))
            whole = [
                block
                for block in blocks
                if all((r, block) in storing.said for r in range(64) if int(required[block]) >> r & 1)
            ]
            assert ready <= len(whole) and ready + gone <= len(blocks)
            assert gone or ready == len(whole)
        self.tidy()

    def silent(self, storing: Storing) -> set[tuple[int, int]]:
        """What ranks without a socket would have to say."""
        ranks = {writer.rank for engine, writer in self.lost if engine is storing.engine}
        return {(rank, block) for rank, block in storing.held if rank in ranks}

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), by_rank=st.booleans(), everything=st.booleans())
    def abort(self, data: st.DataObject, by_rank: bool, everything: bool) -> None:
        storing = data.draw(st.sampled_from(self.storing))
        blocks = None if everything else data.draw(st.lists(st.sampled_from(sorted(storing.slots)), unique=True))
        rank = data.draw(st.integers(0, storing.engine.attachment.ranks - 1)) if by_rank else None
        if rank is not None and any(e is storing.engine and w.rank == rank for e, w in self.lost):
            return
        storing.engine.abort(storing.lease, blocks, rank)
        if rank is not None:
            storing.held -= {(rank, block) for block in (storing.slots if blocks is None else blocks)}
        self.tidy()

    @precondition(lambda self: self.storing)
    @rule(data=st.data())
    def scribble(self, data: st.DataObject) -> None:
        """A writer in mid-copy writes its own part, or half of it, of a slot that it has not let go of."""
        storing = data.draw(st.sampled_from(self.storing))
        if not storing.held:
            return
        rank, block = data.draw(st.sampled_from(sorted(storing.held)))
        pool, page = storing.slots[block]
        view = self.node.view(pool, page, storing.engine.space.block_bytes)
        if data.draw(st.booleans()):
            storing.engine.write(storing.path[: block + 1], pool, page, rank)
        elif all((other, block) in storing.held for other in range(storing.engine.attachment.ranks)):
            view[:] = 0xEE

    def tidy(self) -> None:
        self.storing = [storing for storing in self.storing if storing.held]

    @rule()
    def ask_fences(self) -> None:
        for fence in self.node.cache.take_fences():
            (lease,) = fence.leases
            covered = {
                (fence.writer.rank, block)
                for storing in self.storing
                if storing.lease == lease and storing.engine.attachment is fence.writer.attachment
                for block in storing.slots
            }
            self.fences.append((fence, frozenset(covered)))

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def answer_fence(self, data: st.DataObject) -> None:
        fence, covered = self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1)))
        if fence.writer.lost:
            return
        for storing in self.storing:
            if storing.lease in fence.leases:
                # The client drains and begins nothing new in what the fence speaks of.
                entries = {int(entry) for entry in fence.entries}
                first = min(storing.slots)
                storing.held -= {(rank, block) for rank, block in covered if block - first in entries}
        try:
            self.node.cache.fenced(fence.writer, fence.number)
        except Refused:
            pass  # what it was about has ended since
        self.tidy()

    @rule(data=st.data())
    def lose_socket(self, data: st.DataObject) -> None:
        engine = self.one(data)
        alive = [writer for writer in engine.writers if not writer.lost]
        if alive:
            writer = data.draw(st.sampled_from(alive))
            self.node.cache.writer_lost(writer)
            self.lost.append((engine, writer))

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def writer_dies(self, data: st.DataObject) -> None:
        engine, writer = self.lost.pop(data.draw(st.integers(0, len(self.lost) - 1)))
        for storing in self.storing:
            if storing.engine is engine:
                storing.held = {(rank, block) for rank, block in storing.held if rank != writer.rank}
        self.tidy()
        self.node.cache.writer_gone(writer)
        # The rank comes back in a new process.
        engine.writers[engine.writers.index(writer)] = self.node.cache.join(engine.attachment, writer.rank)

    @rule(seconds=st.sampled_from([1.0, 6.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.clock.now += seconds
        self.node.cache.expire()
        self.holding = [h for h in self.holding if h.deadline > self.node.clock.now]

    # ---- loading

    @rule(data=st.data(), again=st.booleans(), promote=st.booleans())
    def look_up(self, data: st.DataObject, again: bool, promote: bool) -> None:
        engine = self.one(data)
        path = data.draw(st.sampled_from(sorted(self.offered)))
        request = b"r" if again else b""
        match = engine.lookup(path, request)
        assert match.ready <= match.matched <= len(path)
        if match.lease:
            self.holding = [h for h in self.holding if (h.engine, h.lease) != (engine, match.lease)]
            slots = engine.load(match.lease)
            assert len(slots.pages) == match.ready
            engine.expect_true(path, slots)
            deadline = self.node.clock.now + self.node.settings.leases.lookup
            self.holding.append(Holding(engine, match.lease, path, slots, deadline))
            if promote and match.ready < match.matched:
                lease = engine.lease(match.lease)
                plan = self.node.residency.plan_promotion(lease.space, lease.rows)
                if plan is not None:
                    self.flights.append(plan)
        elif again:
            kept = set(engine.attachment.leases)
            self.holding = [h for h in self.holding if h.engine is not engine or h.lease in kept]

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        holding = self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1)))
        holding.engine.release(holding.lease, *[holding.lease] * twice)

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def doubt(self, data: st.DataObject) -> None:
        holding = data.draw(st.sampled_from(self.holding))
        rows = holding.engine.lease(holding.lease).rows
        block = data.draw(st.integers(0, len(rows) - 1))
        findable = self.node.residency.index.state[rows[block]] == RowState.READY
        self.node.cache.failed(holding.engine.attachment, holding.lease, np.array([block], dtype=np.uint32))
        # If this copy was doubted before, another may have been stored since, and nobody doubts that one.
        assert not findable or holding.engine.matched(holding.path) <= block

    @invariant()
    def a_live_lease_keeps_its_slots_and_their_bytes(self) -> None:
        for holding in self.holding:
            slots = holding.slots
            now = self.node.residency.generations(slots.pools, slots.pages)
            assert (now == slots.generations).all()
            holding.engine.expect_true(holding.path, slots)

    # ---- copies in flight

    @rule(move=st.booleans())
    def plan_copies(self, move: bool) -> None:
        plan = self.node.residency.plan_move() if move else self.node.residency.plan_demotion()
        if plan is not None:
            self.flights.append(plan)

    @rule()
    def clean_up(self) -> None:
        """All copies end, and the cleaner has time."""
        while self.flights:
            self.finish(self.flights.pop(), whole=True)
        self.node.move()
        self.loop.run_until_complete(self.node.demote())

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), whole=st.sampled_from([True, True, True, False]))
    def land(self, data: st.DataObject, whole: bool) -> None:
        self.finish(self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1))), whole)

    def finish(self, plan: Demotion | Promotion | Move, whole: bool) -> None:
        residency = self.node.residency
        if isinstance(plan, Move):
            if whole:
                self.node.copy(plan)
            residency.moved(plan, whole)
        elif isinstance(plan, Promotion):
            reasons = self.loop.run_until_complete(self.disk.read(self.node.read_jobs(plan)))
            assert reasons == [None] * len(plan.rows)
            assert not any(disproves(reason) for reason in reasons if reason)
            good = np.ones(len(plan.rows), dtype=np.bool_)
            good[1:] = whole
            residency.promoted(plan, good, ~good & (np.arange(len(good)) % 2 == 1))
        else:
            done = np.ones(len(plan.rows), dtype=np.bool_)
            if plan.source is Tier.HBM:
                self.node.copy(plan)
            else:
                reasons = self.loop.run_until_complete(self.disk.write(self.node.write_jobs(plan)))
                assert reasons == [None] * len(plan.rows)
            done[1:] = whole
            residency.demoted(plan, done)

    # ---- always

    @invariant()
    def all_is_sound(self) -> None:
        if self.node is not None:
            self.node.expect_sound()
            if self.disk is not None:
                assert self.disk.used <= self.disk.capacity

    @invariant()
    def a_slot_that_somebody_may_be_writing_is_nobody_elses(self) -> None:
        held = [storing.slots[block] for storing in self.storing for block in {block for _, block in storing.held}]
        assert len(set(held)) == len(held)
        for pool, page in held:
            slots = self.node.dram.pool if pool == POOL_DRAM else self.node.hbm.pool
            assert slots.states([page])[0] in (SlotState.PENDING, SlotState.QUARANTINED)

    @invariant()
    def nothing_of_an_ended_reservation_is_quarantined(self) -> None:
        for engine in self.engines:
            open_leases = {storing.lease for storing in self.storing if storing.engine is engine}
            # A lost rank's silence keeps a reservation open though the model's other ranks have let go.
            waiting = any(e is engine for e, _ in self.lost) or any(
                fence.writer.attachment is engine.attachment for fence, _ in self.fences
            )
            if not waiting:
                assert set(engine.attachment.reservations) <= open_leases


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestCacheMachine: Any = CacheMachine.TestCase
