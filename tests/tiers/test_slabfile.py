"""Slots of one size: who holds which, agreeing with a plain model after every step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcascade.tiers.slabfile import (
    HELD,
    MAX_TOKENS,
    PAGE,
    BlockMeta,
    Header,
    SlabFile,
    pack_header,
    runs,
    slot_size,
    unpack_header,
)

MOST = 40


class Slots(RuleBasedStateMachine):
    """Take, record, free and strip, against sets."""

    def __init__(self) -> None:
        super().__init__()
        self.file = SlabFile("slab-8192.dat", 8192)
        self.held: set[int] = set()
        self.recorded: set[int] = set()

    @rule(count=st.integers(1, 15))
    def take(self, count: int) -> None:
        got = self.file.take(count, MOST)
        taken = set(got.tolist())
        assert got.tolist() == sorted(taken)
        assert len(taken) == min(count, MOST - len(self.held | self.recorded))
        assert not taken & (self.held | self.recorded)
        assert all(slot < MOST for slot in taken)
        self.held |= taken

    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(sorted(self.held)))) if self.held else set()
        self.file.record(np.array(sorted(some), dtype=np.uint32))
        self.held -= some
        self.recorded |= some

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        taken = sorted(self.held | self.recorded)
        some = data.draw(st.sets(st.sampled_from(taken))) if taken else set()
        to_record = self.file.give(np.array(sorted(some), dtype=np.uint32))
        assert set(to_record.tolist()) == some & self.recorded
        self.held -= some
        self.recorded -= some

    @rule(data=st.data())
    def back(self, data: st.DataObject) -> None:
        taken = sorted(self.held)
        if taken:
            slot = data.draw(st.sampled_from(taken))
            self.file.back(slot, 1)
            assert not len(self.file.unbacked(np.array([slot], dtype=np.uint32)))

    @rule(count=st.integers(0, 10))
    def strip(self, count: int) -> None:
        before = self.file.backed
        stripped = {slot for first, many in self.file.strip(count) for slot in range(first, first + many)}
        assert len(stripped) <= count
        assert not stripped & (self.held | self.recorded)
        assert self.file.backed == before - len(stripped)

    @invariant()
    def books_balance(self) -> None:
        assert self.file.check() == []
        assert self.file.used == len(self.held) + len(self.recorded)
        assert self.file.recorded == len(self.recorded)
        assert self.file.free == self.file.end - self.file.used


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_run_is_found_far_from_the_last_search_in_a_large_file() -> None:
    file = SlabFile("slab-8192.dat", 8192)
    count = 300_000
    everything = file.take(count, count)
    assert len(everything) == count
    file.give(np.arange(0, count, 1000, dtype=np.uint32))
    file.give(np.arange(200_001, 200_033, dtype=np.uint32))
    assert file.take(32, count).tolist() == list(range(200_000, 200_032))
    assert file.take(4, count).tolist() == [200_032, 201_000, 202_000, 203_000]
    assert (file.states(np.array([200_032], dtype=np.uint32)) == HELD).all()


@pytest.mark.parametrize("count", [0, 1, MAX_TOKENS, MAX_TOKENS + 1])
def test_a_header_holds_the_token_ids_that_fit(count: int) -> None:
    tokens = np.arange(count, dtype="<u4").tobytes()
    page = memoryview(bytearray(b"\xff" * PAGE))
    meta = BlockMeta(b"n" * 32, b"h" * 32, b"p" * 32, 3, 2**32 - 1, 2**64 - 1, tokens)
    pack_header(page, meta, 77)
    header = unpack_header(page)
    assert isinstance(header, Header)
    assert header.checksum == 77
    assert header.meta == (meta if count <= MAX_TOKENS else replace(meta, tokens=b""))


def test_any_flipped_bit_of_a_header_is_noticed() -> None:
    page = bytearray(PAGE)
    pack_header(memoryview(page), BlockMeta(b"n" * 32, b"h" * 32, b"", 0, 1, 1, b"\1\0\0\0"), 5)
    for byte in range(PAGE):
        page[byte] ^= 1 << (byte % 8)
        assert isinstance(unpack_header(memoryview(page)), str)
        page[byte] ^= 1 << (byte % 8)
    assert isinstance(unpack_header(memoryview(page)), Header)


def test_sizes_and_runs() -> None:
    assert [slot_size(length) for length in (1, 4096, 4097)] == [8192, 8192, 12288]
    assert runs(np.array([], dtype=np.int64)) == []
    assert runs(np.array([3, 4, 5, 9, 11, 12])) == [(3, 3), (9, 1), (11, 2)]
