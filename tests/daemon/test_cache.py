"""What engines may ask of the cache, and what never happens: on real pools and a real disk, with a clock of our own."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from engines.node import BLOCK, SLAB, TOKENS, Engine, Node, namespace, open_disk, pattern

from kvcascade.config.errors import LayoutMismatch, ProtocolError, Refused
from kvcascade.daemon.index import NO_SLOT, RowState
from kvcascade.daemon.lease import Fence
from kvcascade.daemon.protocol import BlockState, Tier
from kvcascade.daemon.recovery import adopt
from kvcascade.tiers.namespace import Namespace

PER_SLAB = SLAB // BLOCK
A, B, C = (1, 2, 3), (1, 2, 4, 5), (9, 8)
SPLIT = namespace(kv_heads=2)


@pytest.fixture
def node() -> Iterator[Node]:
    """4 MiB of DRAM: 64 blocks."""
    node = Node()
    yield node
    node.expect_sound()
    node.close()


@pytest.fixture
def tiny() -> Iterator[Node]:
    """1 MiB of DRAM and nothing below: 16 blocks, all of which one engine may pin."""
    node = Node(slabs=1, budget=1, quarantine=1)
    yield node
    node.expect_sound()
    node.close()


@pytest.fixture
async def deep(tmp_path: Path) -> AsyncIterator[Node]:
    """1 MiB of DRAM over 64 MiB of disk; the cleaner wants all of DRAM clean or free."""
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=1, budget=1, low_watermark=0.5, disk=disk)
    yield node
    node.expect_sound()
    node.close()
    assert await disk.close()


def states(reserved_states: object) -> list[BlockState]:
    return [BlockState(int(state)) for state in np.asarray(reserved_states)]


def path(name: int, length: int) -> tuple[int, ...]:
    return tuple(100 * name + step for step in range(length))


def free_slots(node: Node) -> int:
    return node.dram.pool.free_slots(BLOCK)


def stamps(engine: Engine, blocks: tuple[int, ...]) -> list[int]:
    index = engine.node.residency.index
    rows = index.find(engine.space.number, engine.node.residency.keys(engine.space, engine.hashes(blocks)))
    return [int(stamp) for stamp in index.stamp[rows]]


def answer_fences(node: Node) -> list[Fence]:
    fences = node.cache.take_fences()
    for fence in fences:
        node.cache.fenced(fence.writer, fence.number)
    return fences


# ---- storing and finding


def test_a_block_is_findable_once_it_is_committed_and_not_before(node: Node) -> None:
    engine, other = node.engine(), node.engine()
    reserved = engine.reserve(A)
    assert states(reserved.states) == [BlockState.SLOT] * 3
    assert other.matched(A) == 0
    assert engine.commit(reserved.lease, [0]) == (1, 0)
    assert other.matched(A) == 1
    engine.commit(reserved.lease, [1, 2])
    for block, (pool, page) in enumerate(zip(reserved.slots.pools, reserved.slots.pages, strict=True)):
        engine.write(A[: block + 1], int(pool), int(page))
    other.expect_loads(A, 3)


def test_blocks_that_are_here_are_not_stored_twice(node: Node) -> None:
    engine = node.engine()
    assert engine.store(A) == [0, 1, 2]
    assert engine.store(A) == []
    reserved = engine.reserve(B)
    assert states(reserved.states) == [BlockState.HERE, BlockState.HERE, BlockState.SLOT, BlockState.SLOT]
    assert engine.fill(B, reserved) == [2, 3]
    engine.expect_loads(A, 3)
    engine.expect_loads(B, 4)


def test_blocks_committed_out_of_order_are_found_when_their_parents_are_ready(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.commit(reserved.lease, [2])
    engine.commit(reserved.lease, [1])
    assert engine.matched(A) == 0
    engine.commit(reserved.lease, [0])
    assert engine.matched(A) == 3


def test_a_chain_with_a_missing_parent_is_not_stored_above_the_hole(node: Node) -> None:
    engine = node.engine()
    engine.store(A[:1])
    reserved = engine.reserve(A, start=2)
    assert (reserved.hole, reserved.lease) == (1, 0)
    assert states(reserved.states) == [BlockState.NO_ROOM]
    assert engine.fill(A, engine.reserve(A, start=1), start=1) == [1, 2]
    assert engine.reserve(A, start=3).hole is None
    engine.expect_loads(A, 3)


def test_a_chain_that_another_engine_is_storing_is_in_flight(node: Node) -> None:
    first, second = node.engine(), node.engine()
    reserved = first.reserve(A)
    first.commit(reserved.lease, [0])
    seen = second.reserve(B)
    assert seen.lease == 0
    assert states(seen.states) == [BlockState.HERE] + [BlockState.IN_FLIGHT] * 3
    first.commit(reserved.lease, [1, 2])
    assert states(second.reserve(B).states)[2:] == [BlockState.SLOT] * 2


def test_an_engine_may_store_on_below_its_own_blocks_in_flight(node: Node) -> None:
    engine = node.engine()
    first = engine.reserve(A)
    second = engine.reserve((*A, 4, 5), start=3)
    assert states(second.states) == [BlockState.SLOT] * 2
    engine.commit(second.lease, [3, 4])
    assert engine.matched((*A, 4, 5)) == 0
    engine.commit(first.lease, [0, 1, 2])
    assert engine.matched((*A, 4, 5)) == 5


def test_hashes_that_are_no_chain_are_refused(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    cache, own = node.cache, engine.hashes(A)
    for wrong in (own[64:] + engine.hashes(C), engine.hashes(C)[:32] * 2, engine.hashes(C)[:32] + own[32:64]):
        with pytest.raises(ProtocolError, match="not one chain"):
            cache.reserve(engine.attachment, 0, wrong, 0)
    # Asked for, they are found as far as they are one.
    assert cache.lookup(engine.attachment, 0, own[:32] + own[64:], pin=False).matched == 1
    assert cache.lookup(engine.attachment, 0, own[32:], pin=False).matched == 0
    with pytest.raises(ProtocolError, match="hashes"):
        cache.lookup(engine.attachment, 0, own[:33])
    with pytest.raises(ProtocolError, match="group"):
        cache.lookup(engine.attachment, 1, own)
    with pytest.raises(ProtocolError, match="start"):
        engine.reserve(A, start=4)


def test_token_ids_of_the_wrong_number_are_refused(node: Node) -> None:
    engine = node.engine()
    with pytest.raises(ProtocolError, match="tokens"):
        engine.reserve(A, tokens=bytes(4 * TOKENS * 3 - 4))
    with pytest.raises(ProtocolError, match="tokens"):
        engine.reserve(A, tokens=bytes(7))
    engine.fill(A, engine.reserve(A, start=0, tokens=bytes(4 * TOKENS * 3)))
    engine.expect_loads(A, 3)


def test_an_empty_prompt_is_a_miss_and_stores_nothing(node: Node) -> None:
    engine = node.engine()
    assert (engine.lookup(()).lease, engine.matched(()), engine.reserve(()).lease) == (0, 0, 0)


def test_namespaces_and_their_groups_never_meet(node: Node) -> None:
    # L4: the same hashes under another model, epoch or group are not there.
    engine = node.engine()
    engine.store(A)
    assert node.engine(namespace("other")).matched(A) == 0
    group = namespace().groups[0]
    twins = Namespace(
        **{**{name: getattr(namespace("g"), name) for name in Namespace.__slots__}, "groups": (group, group)}
    )
    both = node.engine(twins)
    both.store(A)
    assert node.cache.lookup(both.attachment, 1, both.hashes(A)).matched == 0


# ---- recency and eviction


def test_using_any_prefix_stamps_the_whole_chain_tail_first(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    engine.store(C)
    engine.store((*A, 7))
    assert stamps(engine, (*A, 7)) == sorted(stamps(engine, (*A, 7)), reverse=True)
    assert min(stamps(engine, (*A, 7))) > max(stamps(engine, C))
    engine.matched(C)
    assert min(stamps(engine, C)) > max(stamps(engine, A))


def test_the_least_recently_used_tail_goes_first_and_no_orphan_stays(tiny: Node) -> None:
    engine = tiny.engine()
    engine.store(path(1, 8))
    engine.store(path(2, 8))
    engine.matched(path(1, 8))
    engine.store(path(3, 3))
    assert engine.matched(path(2, 8)) == 5
    assert engine.matched(path(1, 8)) == 8
    engine.store(path(4, 6))
    assert engine.matched(path(2, 8)) == 0 or engine.matched(path(3, 3)) < 3
    tiny.expect_sound()


def test_a_pinned_block_is_not_evicted(tiny: Node) -> None:
    engine = tiny.engine()
    engine.store(path(1, 16))
    lease = engine.lookup(path(1, 4), b"r").lease
    slots = engine.load(lease)
    engine.store(path(2, 16))
    assert engine.matched(path(1, 16)) == 4
    assert engine.matched(path(2, 16)) == 12
    engine.expect_true(path(1, 4), slots)
    assert (tiny.residency.generations(slots.pools, slots.pages) == slots.generations).all()
    engine.release(lease)
    engine.store(path(3, 16))
    assert engine.matched(path(1, 4)) == 0


def test_a_store_is_refused_only_when_all_is_pinned(tiny: Node) -> None:
    # D1: never an endless wait, an answer at once.
    engine = tiny.engine()
    engine.store(path(1, 16))
    lease = engine.lookup(path(1, 16)).lease
    reserved = engine.reserve(path(2, 3))
    assert states(reserved.states) == [BlockState.NO_ROOM] * 3
    assert reserved.lease == 0
    engine.release(lease)
    assert engine.store(path(2, 3)) == [0, 1, 2]


def test_a_chain_is_not_evicted_to_make_room_for_its_own_end(tiny: Node) -> None:
    engine = tiny.engine()
    engine.store(path(1, 12))
    reserved = engine.reserve(path(1, 40))
    assert states(reserved.states)[12:17] == [BlockState.SLOT] * 4 + [BlockState.NO_ROOM]
    engine.fill(path(1, 40), reserved)
    engine.expect_loads(path(1, 40), 16)


def test_an_evicted_slot_is_handed_on_with_another_generation(tiny: Node) -> None:
    # A13: a reader whose lease has run out finds out by itself.
    engine = tiny.engine()
    engine.store(path(1, 16))
    match = engine.lookup(path(1, 16))
    slots = engine.load(match.lease)
    tiny.clock.now += 3600
    tiny.cache.expire()
    engine.store(path(2, 16))
    assert (tiny.residency.generations(slots.pools, slots.pages) != slots.generations).all()


# ---- leases


def test_asking_again_for_a_request_renews_its_one_lease(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    engine.store(B)
    first = engine.lookup(A, b"r")
    node.clock.now += 8
    assert engine.lookup(B, b"r").lease == first.lease
    node.clock.now += 8
    node.cache.expire()
    assert len(engine.lease(first.lease).rows) == 4
    assert int(node.residency.index.pins.sum()) == 4
    assert engine.lookup(C, b"r").lease == 0
    assert not node.residency.index.pins.any()
    engine.end()
    node.expect_idle()


def test_requests_have_a_lease_each(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    leases = {engine.lookup(A, request).lease for request in (b"r", b"s", b"", b"")}
    assert len(leases) == 4
    engine.release(*leases)
    assert not node.residency.index.pins.any()


def test_a_lease_is_released_once_however_often_it_is_said(node: Node) -> None:
    engine, other = node.engine(), node.engine()
    engine.store(A)
    lease, kept = engine.lookup(A, b"r").lease, engine.lookup(A, b"s").lease
    other.release(lease)
    assert len(engine.load(lease).pages) == 3
    engine.release(lease, lease, 12345)
    engine.release(lease)
    assert int(node.residency.index.pins.sum()) == 3
    with pytest.raises(Refused, match="lease"):
        engine.load(lease)
    engine.release(kept)


def test_pins_end_with_their_deadline(node: Node) -> None:
    # C1: whatever an engine does or leaves undone.
    engine = node.engine()
    for request in range(10):
        engine.store(path(request, 4))
        engine.lookup(path(request, 4), b"%d" % request)
    node.clock.now += node.settings.leases.lookup
    node.cache.expire()
    assert not node.residency.index.pins.any()
    assert not engine.attachment.leases
    assert engine.matched(path(3, 4)) == 4


def test_a_lease_in_use_is_kept_beyond_its_deadline(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    lease = engine.lookup(A).lease
    node.cache.renew(engine.lease(lease), 30)
    node.clock.now += 35
    node.cache.expire()
    assert len(engine.load(lease).pages) == 3


def test_blocks_asked_for_one_by_one_are_found_wherever_they_stand(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    engine.store(C)
    before = stamps(engine, A)
    names = [engine.hashes(A)[64:96], engine.hashes(B)[96:], engine.hashes(C)[:32], engine.hashes(A)[32:64]]
    match = node.cache.lookup(engine.attachment, 0, b"".join(names), each=True)
    assert (match.matched, match.ready, match.found.tolist() if match.found is not None else None) == (3, 3, [0, 2, 3])
    slots = engine.load(match.lease)
    for end, at in ((A, 0), (C[:1], 1), (A[:2], 2)):
        block = node.view(int(slots.pools[at]), int(slots.pages[at]), engine.space.block_bytes)
        assert (block == pattern(engine.space, end)).all()
    # A block is never stamped newer than its parent.
    assert stamps(engine, A) == before
    engine.release(match.lease)
    nothing = node.cache.lookup(engine.attachment, 0, names[1], each=True)
    assert nothing.found is not None and (nothing.lease, len(nothing.found)) == (0, 0)


def test_a_block_asked_for_twice_at_once_is_refused(node: Node) -> None:
    engine, weak = node.engine(), node.engine(namespace(algo="xxhash_cbor"))
    engine.store(A)
    with pytest.raises(ProtocolError, match="twice"):
        node.cache.lookup(engine.attachment, 0, engine.hashes(A)[:32] * 2, each=True)
    with pytest.raises(ProtocolError, match="chain"):
        node.cache.lookup(weak.attachment, 0, weak.hashes(A), each=True)


def test_blocks_asked_for_one_by_one_count_against_the_budget() -> None:
    node = Node(slabs=1, budget=0.25)
    engine = node.engine()
    engine.store(path(1, 6))
    match = node.cache.lookup(engine.attachment, 0, engine.hashes(path(1, 6))[32:], each=True)
    assert (match.matched, match.found.tolist() if match.found is not None else None) == (4, [0, 1, 2, 3])
    node.expect_sound()
    engine.end()


def test_an_attachment_pins_no_more_than_its_budget() -> None:
    node = Node(slabs=1, budget=0.25)
    engine, other = node.engine(), node.engine()
    engine.store(path(1, 6))
    assert engine.lookup(path(1, 6), b"r").matched == 4
    assert engine.lookup(path(1, 6), b"r").matched == 4  # its own lease does not count against it
    full = engine.lookup(path(1, 6), b"s")
    assert (full.matched, full.lease, len(full.tiers)) == (0, 0, 0)
    assert other.lookup(path(1, 6), b"r").matched == 4
    assert engine.lookup(path(1, 6), pin=False).matched == 6
    node.expect_sound()
    engine.end()
    other.end()
    node.expect_idle()
    node.close()


def test_attachments_of_one_process_share_its_budget() -> None:
    node = Node(slabs=1, budget=0.25)
    first, other = node.engine(process=7), node.engine(process=8)
    first.store(path(1, 6))
    assert first.lookup(path(1, 6), b"r").matched == 4
    second = node.engine(process=7)
    assert second.lookup(path(1, 6), b"r").matched == 0
    assert other.lookup(path(1, 6), b"r").matched == 4
    node.expect_sound()
    # The process that is gone leaves nothing to one that has its number.
    first.end()
    assert second.lookup(path(1, 6), b"r").matched == 4
    second.end()
    other.end()
    third = node.engine(process=7)
    assert third.attachment.process.pinned_bytes == 0
    third.end()
    node.expect_idle()
    node.close()


def test_a_lookup_that_does_not_pin_holds_nothing(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    assert engine.lookup(A, b"r", pin=False).lease == 0
    assert not node.residency.index.pins.any()


def test_hits_are_counted_when_they_are_loaded_and_once(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    lease = engine.lookup((*A, 7), b"r").lease
    engine.load(lease, 2)
    engine.load(lease)
    engine.load(lease)
    assert node.cache.hit_tokens["dram"] == 3 * TOKENS
    assert node.cache.hit_tokens["miss"] == TOKENS


def test_thousands_of_requests_leave_no_pin_whatever_becomes_of_them(tiny: Node) -> None:
    # C1: the engine has all of it already, has a part, aborts, is preempted, asks five times, dies.
    rng = np.random.default_rng(1)
    engine = tiny.engine()
    for step in range(3_000):
        wanted = path(int(rng.integers(4)), int(rng.integers(1, 9)))
        match kind := step % 6:
            case 0:
                engine.store(wanted)
            case 1 | 2:
                for _ in range(kind * 2):
                    lease = engine.lookup(wanted, b"%d" % step).lease
                engine.release(lease)
            case 3:
                engine.lookup(wanted, b"%d" % step)
                tiny.clock.now += 4
                tiny.cache.expire()
            case 4:
                lease = engine.lookup(wanted, b"%d" % step).lease
                if lease:
                    engine.load(lease, 1)
                    engine.release(lease)
            case 5 if step % 60 == 5:
                engine.lookup(wanted)
                engine.end()
                engine = tiny.engine()
    tiny.clock.now += 3600
    tiny.cache.expire()
    assert not tiny.residency.index.pins.any()
    assert engine.store(path(77, 16)) == list(range(16))


# ---- loads that failed


def test_blocks_whose_bytes_are_doubted_are_missed_next_time_with_all_below(node: Node) -> None:
    # A10: said once by the engine, a miss for everybody from then on.
    engine, other = node.engine(), node.engine()
    engine.store(path(1, 10))
    lease = engine.lookup(path(1, 10), b"r").lease
    node.cache.failed(engine.attachment, lease, np.array([6, 6], dtype=np.uint32))
    assert other.matched(path(1, 10)) == 6
    assert len(engine.load(lease).pages) == 6
    assert node.residency.index.doomed == 4
    # Stored anew while the old bytes are still pinned.
    assert other.store(path(1, 10)) == [6, 7, 8, 9]
    node.expect_sound()
    engine.release(lease)
    assert node.residency.index.doomed == 0
    other.expect_loads(path(1, 10), 10)


def test_a_doubt_about_a_block_that_the_lease_does_not_have_is_refused(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    lease = engine.lookup(A).lease
    with pytest.raises(Refused, match="blocks"):
        node.cache.failed(engine.attachment, lease, np.array([3], dtype=np.uint32))
    with pytest.raises(Refused, match="lease"):
        node.cache.failed(engine.attachment, lease + 1, np.array([0], dtype=np.uint32))
    assert engine.matched(A) == 3


def test_what_is_being_stored_below_a_doubted_block_is_given_up(node: Node) -> None:
    engine, other = node.engine(), node.engine()
    engine.store(A)
    lease = engine.lookup(A).lease
    storing = other.reserve((*A, 7, 8, 9), start=3)
    other.commit(storing.lease, [4])  # ready below a pending block
    node.cache.failed(engine.attachment, lease, np.array([1], dtype=np.uint32))
    node.expect_sound()
    assert other.commit(storing.lease, [3, 5]) == (0, 2)
    assert other.matched((*A, 7, 8, 9)) == 1
    assert not other.attachment.reservations
    engine.release(lease)
    assert free_slots(node) == 4 * PER_SLAB - 1


# ---- stores that end badly


def test_what_is_aborted_leaves_no_trace(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.abort(reserved.lease)
    assert free_slots(node) == 4 * PER_SLAB
    assert engine.matched(A) == 0
    with pytest.raises(Refused, match="lease"):
        engine.commit(reserved.lease, [0])
    with pytest.raises(Refused, match="lease"):
        engine.abort(reserved.lease)
    assert engine.store(A) == [0, 1, 2]


def test_an_abort_in_the_middle_of_a_chain_takes_the_later_blocks_away(node: Node) -> None:
    engine = node.engine()
    long = path(1, 6)
    reserved = engine.reserve(long)
    for block in (0, 1):
        engine.write(long[: block + 1], int(reserved.slots.pools[block]), int(reserved.slots.pages[block]))
    further = engine.reserve((*long, 7), start=6)
    engine.commit(reserved.lease, [0, 1, 4])
    engine.abort(reserved.lease, [2])
    node.expect_sound()
    assert engine.matched(long) == 2
    # The writer has let go of block 2 alone; it may still be writing 3, 5 and the block below.
    assert node.dram.pool.counts()[BLOCK].quarantined == 3
    assert engine.commit(reserved.lease, [3, 5]) == (0, 2)
    assert engine.commit(further.lease, [6]) == (0, 1)
    assert node.dram.pool.counts()[BLOCK] == (PER_SLAB, PER_SLAB - 2, 0, 2, 0)
    assert engine.store((*long, 7)) == [2, 3, 4, 5, 6]
    engine.expect_loads((*long, 7), 7)


def test_ready_blocks_stay_when_their_reservation_is_aborted(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.commit(reserved.lease, [0, 1])
    engine.abort(reserved.lease)
    assert engine.matched(A) == 2


def test_a_late_writers_slots_are_handed_on_only_after_it_let_go(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    node.clock.now += node.settings.leases.reservation
    node.cache.expire()
    assert engine.matched(A) == 0
    # C9: the name is free at once, the slots are not.
    again = node.engine()
    assert again.store(A) == [0, 1, 2]
    assert node.dram.pool.counts()[BLOCK].quarantined == 3
    assert not set(reserved.slots.pages.tolist()) & set(again.load(again.lookup(A).lease).pages.tolist())
    assert engine.commit(reserved.lease, [0]) == (0, 1)
    assert node.dram.pool.counts()[BLOCK].quarantined == 2
    assert engine.attachment.quarantined_bytes == 2 * BLOCK
    engine.abort(reserved.lease, [1])
    assert node.dram.pool.counts()[BLOCK].quarantined == 1
    assert {fence.leases for fence in answer_fences(node)} == {(reserved.lease,)}
    assert node.dram.pool.counts()[BLOCK].quarantined == 0
    assert not engine.attachment.reservations
    again.expect_loads(A, 3)


@pytest.mark.parametrize("end", ["fence", "death", "resume"])
def test_a_writer_that_lost_its_socket_is_waited_for_until_it_answers_or_dies(node: Node, end: str) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.commit(reserved.lease, [0])
    writer = engine.writers[0]
    node.cache.writer_lost(writer)
    assert engine.matched(A) == 1
    assert node.dram.pool.counts()[BLOCK].quarantined == 2
    assert node.cache.take_fences() == []  # nobody to ask
    if end == "fence":
        # A session that was asked before its socket was lost answers over nothing: only death or resumption counts.
        with pytest.raises(Refused):
            node.cache.fenced(writer, 1)
        assert node.dram.pool.counts()[BLOCK].quarantined == 2
    node.cache.writer_gone(writer)
    engine.writers.clear()
    assert node.dram.pool.counts()[BLOCK].quarantined == 0
    engine.end()
    node.expect_idle()


def test_a_dead_writers_slots_come_back_at_once(node: Node) -> None:
    # C9: killed after reserve, half way, or just before commit.
    engine = node.engine()
    engine.reserve(A)
    node.cache.writer_gone(engine.writers.pop())
    assert free_slots(node) == 4 * PER_SLAB
    assert node.engine().store(A) == [0, 1, 2]


def test_a_rank_without_a_process_cannot_be_writing(node: Node) -> None:
    engine = node.engine(SPLIT, ranks=2)
    node.cache.writer_gone(engine.writers.pop(1))
    reserved = engine.reserve(A)
    engine.commit(reserved.lease, [0, 1, 2])
    engine.abort(reserved.lease, rank=None)
    assert free_slots(node) == node.dram.pool.free_slots(engine.space.slot_bytes) * engine.space.slot_bytes // BLOCK
    assert not engine.attachment.reservations


def test_a_scheduler_that_aborts_knows_nothing_of_its_ranks_copies(node: Node) -> None:
    engine = node.engine(SPLIT, ranks=2)
    reserved = engine.reserve(A)
    engine.abort(reserved.lease, rank=None)
    slot_bytes = engine.space.slot_bytes
    assert node.dram.pool.counts()[slot_bytes].quarantined == 3
    fences = node.cache.take_fences()
    assert {fence.writer.rank for fence in fences} == {0, 1}
    node.cache.fenced(fences[0].writer, fences[0].number)
    assert node.dram.pool.counts()[slot_bytes].quarantined == 3
    node.cache.fenced(fences[1].writer, fences[1].number)
    assert node.dram.pool.counts()[slot_bytes].quarantined == 0


def test_a_fence_is_answered_by_the_session_that_was_asked_alone(node: Node) -> None:
    engine, other = node.engine(), node.engine()
    reserved = engine.reserve(A)
    engine.abort(reserved.lease, rank=None)
    (fence,) = node.cache.take_fences()
    assert node.cache.take_fences() == []
    with pytest.raises(Refused, match="fence"):
        node.cache.fenced(other.writers[0], fence.number)
    # Somebody else's answer has not taken it away.
    node.cache.fenced(fence.writer, fence.number)
    assert node.dram.pool.counts()[BLOCK].quarantined == 0
    with pytest.raises(Refused, match="fence"):
        node.cache.fenced(fence.writer, fence.number)


def test_a_fences_answer_says_nothing_of_what_was_given_up_later(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.abort(reserved.lease, [2], rank=None)
    (early,) = node.cache.take_fences()
    # Blocks 0 and 1 were still open when the fence was sent: a copy into them may have begun since.
    engine.abort(reserved.lease, rank=None)
    node.cache.fenced(early.writer, early.number)
    assert node.dram.pool.counts()[BLOCK].quarantined == 2
    answer_fences(node)
    assert node.dram.pool.counts()[BLOCK].quarantined == 0


def test_every_session_of_a_rank_must_let_go(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    second = node.cache.join(engine.attachment, 0)
    engine.abort(reserved.lease)
    assert node.dram.pool.counts()[BLOCK].quarantined == 3
    fences = node.cache.take_fences()
    node.cache.fenced(second, next(fence.number for fence in fences if fence.writer is second))
    assert node.dram.pool.counts()[BLOCK].quarantined == 0


def test_an_old_session_that_is_lost_is_waited_for_though_its_rank_has_a_new_one(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    node.cache.writer_lost(engine.writers[0])
    second = node.cache.join(engine.attachment, 0)
    answer_fences(node)
    with pytest.raises(Refused):
        node.cache.commit(engine.attachment, second, reserved.lease + 1, np.array([0], dtype=np.uint32))
    assert node.dram.pool.counts()[BLOCK].quarantined == 3
    node.cache.writer_gone(engine.writers[0])
    answer_fences(node)
    assert node.dram.pool.counts()[BLOCK].quarantined == 0


def test_quarantine_is_capped_and_then_refuses_that_attachment_alone() -> None:
    node = Node(slabs=1, quarantine=0.25)
    engine, other = node.engine(), node.engine()
    for name in range(5):
        reserved = engine.reserve(path(name, 1))
        engine.abort(reserved.lease, rank=None)
    assert engine.attachment.quarantined_bytes == 5 * BLOCK
    assert engine.reserve(path(9, 1)).lease == 0
    assert other.store(path(9, 1)) == [0]
    answer_fences(node)
    assert engine.store(path(8, 1)) == [0]
    node.expect_sound()
    node.close()


def test_all_that_a_dead_engine_held_comes_back(node: Node) -> None:
    engine = node.engine(SPLIT, ranks=2)
    engine.store(A)
    engine.lookup(A, b"r")
    engine.lookup(A, b"s")
    engine.reserve(C)
    reserved = engine.reserve(path(5, 2))
    engine.commit(reserved.lease, [0], rank=1)
    engine.end()
    node.expect_idle()
    assert node.engine(SPLIT).matched(A) == 3


# ---- ranks


def test_a_block_is_ready_when_every_rank_has_committed_its_part(node: Node) -> None:
    pair, single = node.engine(SPLIT, ranks=2), node.engine(SPLIT)
    reserved = pair.reserve(A)
    assert pair.commit(reserved.lease, [0, 1, 2], rank=0) == (0, 0)
    assert single.matched(A) == 0
    assert pair.commit(reserved.lease, [0, 1, 2], rank=0) == (0, 0)
    assert pair.commit(reserved.lease, [0, 1], rank=1) == (2, 0)
    assert single.matched(A) == 2
    assert pair.commit(reserved.lease, [2], rank=1) == (1, 0)
    assert not pair.attachment.reservations


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 1), (2, 4)])
def test_what_some_ranks_store_any_number_of_ranks_loads(node: Node, writers: int, readers: int) -> None:
    # Two heads on four ranks: each head is written by one of its two replicas in turn.
    node.engine(SPLIT, ranks=writers).store(A)
    node.engine(SPLIT, ranks=readers).expect_loads(A, 3)


def test_replicated_heads_are_committed_by_one_replica_a_block(node: Node) -> None:
    engine = node.engine(SPLIT, ranks=4)
    reserved = engine.reserve(A)
    with pytest.raises(Refused, match="rank 1 does not write block 0"):
        engine.commit(reserved.lease, [0], rank=1)
    assert engine.commit(reserved.lease, [0, 2], rank=0) == (0, 0)
    assert engine.commit(reserved.lease, [0, 2], rank=2) == (2, 0)
    assert engine.commit(reserved.lease, [1], rank=3) == (0, 0)
    assert engine.commit(reserved.lease, [1], rank=1) == (1, 0)
    assert engine.matched(A) == 3


def test_latent_blocks_are_committed_by_one_rank_each(node: Node) -> None:
    engine = node.engine(namespace(kv_heads=1, kind="mla"), ranks=2)
    reserved = engine.reserve(A)
    with pytest.raises(Refused, match="rank"):
        engine.commit(reserved.lease, [1], rank=0)
    assert engine.commit(reserved.lease, [0, 2], rank=0) == (2, 0)
    assert engine.commit(reserved.lease, [1], rank=1) == (1, 0)
    # The turn goes by the block's place in the chain, not in the reservation.
    reserved = engine.reserve((*A, 7), start=3)
    assert engine.commit(reserved.lease, [3], rank=1) == (1, 0)
    assert engine.matched((*A, 7)) == 4


def test_ranks_that_cannot_share_the_heads_are_refused_at_attach(node: Node) -> None:
    for kind, ranks in ((namespace(), 3), (SPLIT, 5)):
        with pytest.raises(LayoutMismatch):
            node.cache.attach(kind, ranks, "test")
    for ranks in (0, 65):
        with pytest.raises(Refused, match="ranks"):
            node.cache.attach(namespace(), ranks, "test")
    with pytest.raises(Refused, match="rank"):
        node.cache.join(node.engine().attachment, 1)
    assert len(node.cache.attachments) == 1


def test_a_rank_that_dies_in_mid_store_leaves_no_half_block(node: Node) -> None:
    # I1: whole on all ranks or absent.
    engine = node.engine(SPLIT, ranks=2)
    reserved = engine.reserve(A)
    engine.commit(reserved.lease, [0], rank=1)
    engine.commit(reserved.lease, [0, 1, 2], rank=0)
    node.cache.writer_gone(engine.writers.pop(1))
    assert engine.matched(A) == 1
    assert not engine.attachment.reservations
    assert node.dram.pool.counts()[engine.space.slot_bytes].quarantined == 0


# ---- misuse


def test_a_commit_by_another_attachment_or_of_other_blocks_is_refused(node: Node) -> None:
    engine, other = node.engine(), node.engine()
    engine.store(A[:1])
    reserved = engine.reserve(A)
    with pytest.raises(Refused, match="lease"):
        other.commit(reserved.lease, [1])
    with pytest.raises(Refused, match="lease"):
        other.abort(reserved.lease)
    for blocks in ([0], [3], [0xFFFFFFFF], [1, 2, 3]):
        with pytest.raises(Refused, match="covers blocks 1 to 2"):
            engine.commit(reserved.lease, blocks)
    with pytest.raises(Refused, match="twice"):
        engine.commit(reserved.lease, [1, 1])
    assert engine.matched(A) == 1
    assert engine.commit(reserved.lease, [1, 2]) == (2, 0)


def test_a_reservation_is_no_lease_to_load_or_release(node: Node) -> None:
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.release(reserved.lease)
    with pytest.raises(Refused):
        engine.load(reserved.lease)
    assert engine.commit(reserved.lease, [0, 1, 2]) == (3, 0)


# ---- hashes that can collide


def tokens(*ids: int) -> bytes:
    return np.array([[one] * TOKENS for one in ids], dtype="<u4").tobytes()


def test_where_hashes_can_collide_token_ids_decide(node: Node) -> None:
    engine = node.engine(namespace(algo="xxhash"))
    own, others = tokens(1, 2, 3), tokens(1, 5, 3)
    engine.fill(A, engine.reserve(A, tokens=own))
    assert engine.lookup(A, tokens=own).matched == 3
    assert node.residency.counters["hash_collisions"] == 0
    assert engine.lookup(A, tokens=others).matched == 1
    assert node.residency.counters["hash_collisions"] == 1
    with pytest.raises(ProtocolError, match="tokens"):
        engine.lookup(A)
    with pytest.raises(ProtocolError, match="tokens"):
        engine.reserve((*A, 4))
    with pytest.raises(ProtocolError, match="tokens"):
        engine.reserve((*A, 4), start=3, tokens=tokens(4))


def test_nothing_is_stored_below_a_block_of_other_tokens(node: Node) -> None:
    # Its bytes were computed behind another prefix than the one that would find it.
    engine = node.engine(namespace(algo="xxhash"))
    engine.fill(A, engine.reserve(A, tokens=tokens(1, 2, 3)))
    reserved = engine.reserve((*A, 4), tokens=tokens(1, 5, 3, 4))
    assert (reserved.lease, states(reserved.states)) == (0, [BlockState.NO_ROOM] * 4)
    assert engine.lookup((*A, 4), tokens=tokens(1, 2, 3, 4)).matched == 3
    reserved = engine.reserve((*A, 4), start=3, tokens=tokens(1, 2, 3, 4))
    assert engine.fill((*A, 4), reserved, start=3) == [3]
    assert engine.lookup((*A, 4), tokens=tokens(1, 2, 3, 4)).matched == 4
    assert engine.reserve((*A, 4), start=4, tokens=tokens(1, 2, 3, 4)).hole is None


# ---- size classes


def test_models_of_unlike_block_sizes_share_one_pool_and_slabs_follow_the_use() -> None:
    node = Node(slabs=4, budget=1)
    small, large = node.engine(), node.engine(namespace("large", layers=64))
    slots = 4 * PER_SLAB
    small.store(path(1, slots))
    assert large.store(path(1, 2)) == []
    assert node.move() == 1
    assert large.store(path(1, 4)) == [0, 1, 2, 3]
    assert small.matched(path(1, slots)) == slots - PER_SLAB
    small.expect_loads(path(1, slots), slots - PER_SLAB)
    # The large blocks are in use, the small ones are not: slab by slab the pool follows.
    for name in range(2, 40):
        large.store(path(name, 2))
        node.move()
        node.expect_sound()
    assert node.dram.pool.counts()[large.space.slot_bytes].total == 4 * 4
    assert small.matched(path(1, slots)) == 0
    large.expect_loads(path(39, 2), 2)
    for name in range(40, 140):
        small.store(path(name, 4))
        node.move()
    assert node.dram.pool.counts()[BLOCK].total == slots
    node.expect_sound()
    node.close()


def test_slabs_stay_where_blocks_are_pinned_or_being_written() -> None:
    node = Node(slabs=1, budget=1)
    small, large = node.engine(), node.engine(namespace("large", layers=64))
    small.store(path(1, 15))
    lease = small.lookup(path(1, 1)).lease
    assert large.store(path(1, 1)) == []
    assert node.move() == 0
    small.release(lease)
    reserved = small.reserve(path(2, 1))
    assert large.store(path(1, 1)) == []
    assert node.move() == 0
    small.abort(reserved.lease, rank=None)
    assert large.store(path(1, 1)) == []
    assert node.move() == 0
    answer_fences(node)
    assert small.matched(path(1, 15)) == 15
    node.expect_sound()
    node.close()


def test_a_block_that_was_pinned_while_its_slab_moves_stays_where_it_is_read() -> None:
    node = Node(slabs=2, budget=1)
    small, large = node.engine(), node.engine(namespace("large", layers=64))
    small.store(path(1, 2 * PER_SLAB - 8))
    large.store(path(1, 1))
    plan = node.residency.plan_move()
    assert plan is not None
    lease = small.lookup(path(1, 4)).lease
    slots = small.load(lease)
    node.copy(plan)
    node.residency.moved(plan, True)
    node.expect_sound()
    assert (small.load(lease).pages == slots.pages).all()
    assert (small.load(lease).generations == slots.generations).all()
    small.release(lease)
    small.expect_loads(path(1, 2 * PER_SLAB), small.matched(path(1, 2 * PER_SLAB)))
    node.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_move_that_fails_changes_nothing_that_is_findable(whole: bool) -> None:
    node = Node(slabs=2, budget=1)
    small, large = node.engine(), node.engine(namespace("large", layers=64))
    small.store(path(1, 2 * PER_SLAB))
    large.store(path(1, 1))
    plan = node.residency.plan_move()
    assert plan is not None
    node.expect_sound()
    before = small.matched(path(1, 2 * PER_SLAB))
    if whole:
        node.copy(plan)
    node.residency.moved(plan, whole)
    node.expect_sound()
    small.expect_loads(path(1, 2 * PER_SLAB), before)
    if whole:
        assert large.store(path(1, 1)) == [0]
    node.close()


# ---- HBM


def test_blocks_go_to_hbm_while_it_has_room_and_to_dram_then(node: Node) -> None:
    node = Node(slabs=4, hbm_slabs=1, budget=1, hbm_watermark=0.25)
    engine = node.engine()
    engine.store(path(1, 20))
    assert engine.tiers(path(1, 20)) == [{Tier.HBM}] * 16 + [{Tier.DRAM}] * 4
    engine.expect_loads(path(1, 20), 20)
    assert engine.lookup(path(1, 20), pin=False).tiers.tolist() == [Tier.HBM] * 16 + [Tier.DRAM] * 4
    node.close()


async def test_what_hbm_evicts_goes_down_to_dram_tails_first() -> None:
    node = Node(slabs=4, hbm_slabs=1, budget=1, hbm_watermark=0.25)
    engine = node.engine()
    engine.store(path(1, 16))
    plans = await node.demote()
    assert {plan.source for plan in plans} == {Tier.HBM}
    assert engine.tiers(path(1, 16)) == [{Tier.HBM}] * 8 + [{Tier.DRAM}] * 8
    engine.expect_loads(path(1, 16), 16)
    node.expect_sound()
    node.close()


async def test_a_pinned_block_stays_in_hbm_and_is_not_lost_when_doubted_there() -> None:
    node = Node(slabs=4, hbm_slabs=1, budget=1, hbm_watermark=0.5)
    engine = node.engine()
    engine.store(path(1, 16))
    lease = engine.lookup(path(1, 4), b"r").lease
    slots = engine.load(lease)
    plan = node.residency.plan_demotion()
    assert plan is not None
    late = engine.lookup(path(1, 16), b"s").lease  # pinned while it is on its way down
    node.copy(plan)
    node.residency.demoted(plan, np.ones(len(plan.rows), dtype=np.bool_))
    node.expect_sound()
    assert (engine.load(lease).generations == slots.generations).all()
    engine.expect_true(path(1, 16), engine.load(late))
    node.cache.failed(engine.attachment, lease, np.array([2], dtype=np.uint32))
    node.expect_sound()
    assert engine.matched(path(1, 16)) == 2
    engine.release(lease, late)
    engine.end()
    node.expect_idle()
    node.close()


async def test_write_through_copies_hbm_blocks_and_keeps_them() -> None:
    node = Node(slabs=4, hbm_slabs=1, budget=1, dram_policy="through")
    engine = node.engine()
    engine.store(A)
    await node.demote()
    assert engine.tiers(A) == [{Tier.HBM, Tier.DRAM}] * 3
    assert node.residency.dirty_in(Tier.HBM) == 0
    assert node.residency.dirty_in(Tier.DRAM) == 3
    await node.demote()
    node.expect_sound()
    # DRAM may lose its copies of them without asking.
    engine.store(path(7, 13))
    filler = path(8, 60)
    engine.store(filler)
    engine.store(path(9, 30))
    node.expect_sound()
    node.close()


def test_a_late_writer_of_an_hbm_slot_is_waited_for_too() -> None:
    node = Node(slabs=1, hbm_slabs=1, budget=1)
    assert node.hbm is not None
    engine = node.engine()
    reserved = engine.reserve(A)
    engine.abort(reserved.lease, rank=None)
    assert node.hbm.pool.counts()[BLOCK].quarantined == 3
    node.expect_sound()
    answer_fences(node)
    assert node.hbm.pool.counts()[BLOCK].quarantined == 0
    node.close()


def test_blocks_too_large_for_the_hbm_pool_go_to_dram() -> None:
    node = Node(slabs=2)
    from kvcascade.daemon.cache import Cache
    from kvcascade.daemon.residency import Residency
    from kvcascade.tiers.hbm import HbmTier

    node.hbm = HbmTier("cpu", SLAB // 2, slab_bytes=SLAB // 2, lock=False)
    node.hbm.pool.online(1)
    node.residency = Residency(node.settings, dram=node.dram, hbm=node.hbm)
    node.cache = Cache(node.settings, node.residency, clock=node.clock)
    engine = node.engine(namespace(layers=200))
    engine.store(A[:1])
    assert engine.tiers(A[:1]) == [{Tier.DRAM}]
    node.expect_sound()
    node.close()


# ---- disk


async def test_the_cleaner_copies_the_oldest_down_and_clean_blocks_leave_at_once(deep: Node) -> None:
    engine = deep.engine()
    engine.store(path(1, 16))
    assert deep.residency.dirty_in(Tier.DRAM) == 16
    await deep.demote()
    assert deep.residency.dirty_in(Tier.DRAM) == 0
    assert engine.tiers(path(1, 16)) == [{Tier.DRAM, Tier.DISK}] * 16
    engine.store(path(2, 4))
    assert engine.tiers(path(1, 16)) == [{Tier.DRAM, Tier.DISK}] * 12 + [{Tier.DISK}] * 4
    assert deep.residency.counters["dropped_blocks"] == 0
    match = engine.lookup(path(1, 16), pin=False)
    assert (match.matched, match.ready) == (16, 12)
    assert match.tiers.tolist() == [Tier.DRAM] * 12 + [Tier.DISK] * 4


async def test_what_lies_on_disk_comes_up_true(deep: Node) -> None:
    engine = deep.engine()
    engine.store(path(1, 8))
    await deep.demote()
    engine.store(path(2, 16))
    assert engine.tiers(path(1, 8)) == [{Tier.DISK}] * 8
    lease = engine.lookup(path(1, 8)).lease
    assert len(engine.load(lease).pages) == 0
    await deep.demote()
    moved = 0
    while part := await deep.promote(engine, lease):
        moved += part
    assert moved == 8
    engine.expect_true(path(1, 8), engine.load(lease))
    assert deep.cache.hit_tokens["disk"] == 8 * TOKENS
    assert engine.tiers(path(1, 8)) == [{Tier.DRAM, Tier.DISK}] * 8
    engine.release(lease)


async def test_promotions_in_flight_stay_within_their_budget(deep: Node) -> None:
    engine = deep.engine()
    engine.store(path(1, 16))
    await deep.demote()
    engine.store(path(2, 16))
    await deep.demote()
    lease = engine.lookup(path(1, 16)).lease
    rows = engine.lease(lease).rows
    plan = deep.residency.plan_promotion(engine.space, rows)
    assert plan is not None
    assert plan.rows.tolist() == rows[:4].tolist()
    assert deep.residency.plan_promotion(engine.space, rows) is None
    # C4: forgotten in mid-flight, the slots come back when the flight ends, once.
    deep.cache.failed(engine.attachment, lease, np.array([0], dtype=np.uint32))
    engine.release(lease)
    deep.expect_sound()
    deep.residency.promoted(plan, np.ones(4, dtype=np.bool_), np.zeros(4, dtype=np.bool_))
    assert deep.residency.index.doomed == 0
    assert engine.matched(path(1, 16)) == 0
    deep.expect_sound()


async def test_a_block_that_proves_false_on_disk_is_forgotten_with_all_below_and_one_unread_is_not(deep: Node) -> None:
    engine = deep.engine()
    engine.store(path(1, 16))
    await deep.demote()
    engine.store(path(2, 16))
    lease = engine.lookup(path(1, 16)).lease
    plan = deep.residency.plan_promotion(engine.space, engine.lease(lease).rows)
    assert plan is not None
    good = np.array([True, False, False, True])
    deep.residency.promoted(plan, good, np.array([False, False, True, False]))
    deep.expect_sound()
    assert engine.matched(path(1, 16)) == 2
    assert engine.tiers(path(1, 3)) == [{Tier.DRAM, Tier.DISK}, {Tier.DISK}, set()]
    engine.release(lease)


async def test_a_failed_write_leaves_the_block_dirty_and_its_disk_slot_free(deep: Node) -> None:
    assert deep.disk is not None
    engine = deep.engine()
    engine.store(path(1, 16))
    plan = deep.residency.plan_demotion()
    assert plan is not None
    succeeded = np.arange(len(plan.rows)) % 2 == 0
    reasons = await deep.disk.write(deep.write_jobs(plan))
    assert reasons == [None] * len(plan.rows)
    deep.residency.demoted(plan, succeeded)
    assert deep.rows_in(Tier.DISK) == succeeded.sum()
    assert deep.disk.blocks == succeeded.sum()
    deep.expect_sound()


async def test_when_the_cleaner_is_behind_the_oldest_dirty_leaves_go_and_never_a_parent(deep: Node) -> None:
    engine = deep.engine()
    engine.store(path(1, 8))
    engine.store(path(2, 8))
    plans = []
    while (plan := deep.residency.plan_demotion()) is not None:
        plans.append(plan)
    # All is on its way down, and so is held: there is no room, but no wait either.
    assert sum(len(plan.rows) for plan in plans) == 16
    assert engine.reserve(path(3, 2)).lease == 0
    assert deep.disk is not None
    heads = engine.hashes(path(1, 8))[: 3 * 32]
    for plan in plans:
        jobs = deep.write_jobs(plan)
        arrives = np.array([job.meta.block_hash in heads for job in jobs])
        await deep.disk.write([job for job, goes in zip(jobs, arrives, strict=True) if goes])
        deep.residency.demoted(plan, arrives)
    deep.expect_sound()
    engine.store(path(3, 6))
    # Three clean ones left, though they have children; then the oldest dirty leaves, which are chain 1's.
    assert engine.matched(path(1, 8)) == 5
    assert engine.matched(path(2, 8)) == 8
    assert engine.matched(path(3, 6)) == 6
    assert deep.residency.counters["dropped_blocks"] == 3


async def test_a_block_leaves_its_last_tier_only_childless(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "disk", 20 * (BLOCK + 4096))
    node = Node(slabs=1, budget=1, low_watermark=0.5, disk=disk)
    engine = node.engine()
    for name in range(8):
        engine.store(path(name, 6))
        await node.demote()
        node.expect_sound()
    assert disk.used <= disk.capacity
    # The newest chains are whole; of the oldest that is there a head may be left, never a tail alone.
    assert engine.matched(path(7, 6)) == engine.matched(path(6, 6)) == 6
    for name in range(8):
        tiers = engine.tiers(path(name, 6))
        assert all(tiers[: engine.matched(path(name, 6))]) and not any(tiers[engine.matched(path(name, 6)) :])
    node.close()
    assert await disk.close()


async def test_a_model_that_comes_later_gets_its_share_of_a_full_disk(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "disk", 40 * (BLOCK + 4096))
    node = Node(slabs=2, budget=1, low_watermark=0.5, disk=disk)
    old, new = node.engine(), node.engine(namespace("new", layers=64))
    for name in range(4):
        old.store(path(name, 12))
        await node.demote()
    for name in range(6):
        new.store(path(name, 2))
        node.move()
        await node.demote()
        node.expect_sound()
    assert new.tiers(path(5, 2)) == [{Tier.DRAM, Tier.DISK}] * 2
    assert disk.used <= disk.capacity
    assert node.rows_in(Tier.DISK) < 36
    node.close()
    assert await disk.close()


async def test_write_through_copies_at_once(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=4, budget=1, disk=disk, disk_policy="through")
    engine = node.engine()
    engine.store(A)
    await node.demote()
    assert engine.tiers(A) == [{Tier.DRAM, Tier.DISK}] * 3
    node.expect_sound()
    node.close()
    assert await disk.close()


async def test_a_row_that_became_another_blocks_is_not_written_through_as_the_one_it_was(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=4, budget=1, disk=disk, disk_policy="through")
    small, large = node.engine(), node.engine(namespace("large", layers=48))
    small.store(A)
    lease = small.lookup(A).lease
    node.cache.failed(small.attachment, lease, np.array([0], dtype=np.uint32))
    small.release(lease)
    large.store(A)  # takes over the rows before the cleaner came to write them
    await node.demote()
    node.expect_sound()
    assert large.tiers(A) == [{Tier.DRAM, Tier.DISK}] * 3
    node.residency._evict(large.space.size_class, 3)
    lease = large.lookup(A).lease
    assert await node.promote(large, lease) == 3
    large.expect_true(A, large.load(lease))
    node.close()
    assert await disk.close()


async def test_an_orderly_end_writes_everything_down_and_the_next_start_finds_it(tmp_path: Path) -> None:
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=2, hbm_slabs=1, budget=1, disk=disk)
    engine, other = node.engine(), node.engine(namespace("other", layers=20))
    engine.store(path(1, 20))
    other.store(path(1, 5))
    engine.store(path(2, 3))
    await node.demote(everything=True)
    assert node.residency.dirty_in(Tier.DRAM) == 0
    node.close()
    assert await disk.close()

    disk, recovery = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=2, budget=1, disk=disk)
    assert adopt(node.residency, [], recovery)[1] == 28
    node.expect_sound()
    engine, other = node.engine(), node.engine(namespace("other", layers=20))
    for who, blocks in ((engine, path(1, 20)), (other, path(1, 5)), (engine, path(2, 3))):
        match = who.lookup(blocks)
        assert (match.matched, match.ready) == (len(blocks), 0)
        while await node.promote(who, match.lease):
            pass
        who.expect_true(blocks, who.load(match.lease))
        who.release(match.lease)
    node.close()
    assert await disk.close()


async def test_recovery_takes_over_no_chain_with_a_hole_and_no_more_than_the_limit(tmp_path: Path) -> None:
    # E3: the usage is right from the start, and a smaller limit holds at once, oldest first.
    disk, _ = await open_disk(tmp_path / "disk", 64 << 20)
    node = Node(slabs=2, budget=1, disk=disk)
    engine = node.engine()
    engine.store(path(1, 6))
    engine.store(path(2, 6))
    await node.demote(everything=True)
    hole = node.residency.index.find(engine.space.number, node.residency.keys(engine.space, engine.hashes(path(2, 3))))
    disk.free(node.residency.index.disk[hole[2:]])
    node.close()
    assert await disk.close()

    disk, recovery = await open_disk(tmp_path / "disk", 5 * (BLOCK + 4096))
    assert len(recovery) == 11
    node = Node(slabs=2, budget=1, disk=disk)
    adopt(node.residency, [], recovery)
    node.expect_sound()
    engine = node.engine()
    assert node.rows_in(Tier.DISK) == 5
    assert disk.used <= disk.capacity
    assert engine.matched(path(2, 6)) == 2
    assert engine.matched(path(1, 6)) == 3
    node.close()
    assert await disk.close()


# ---- the proof itself


def test_check_notices_what_is_wrong(node: Node) -> None:
    engine = node.engine()
    engine.store(A)
    index = node.residency.index
    row = int(index.rows()[0])
    for column, value in ((index.pins, 1), (index.stamp, 0), (index.children, 5), (index.dram, NO_SLOT)):
        kept = column[row]
        column[row] = value
        assert node.cache.check()
        column[row] = kept
    index.state[row] = RowState.PENDING
    assert node.cache.check()
    index.state[row] = RowState.READY
    engine.attachment.quarantined_bytes += 1
    assert node.cache.check()
    engine.attachment.quarantined_bytes -= 1


def test_patterns_are_told_apart(node: Node) -> None:
    engine = node.engine()
    assert (pattern(engine.space, A) != pattern(engine.space, B)).any()
