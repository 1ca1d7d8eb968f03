"""The index: keys, chains, stamps and removal, alone and as a machine against a model of dictionaries."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcascade.daemon.index import NO_ROW, NO_SLOT, Index, RowState, pack_keys

U32 = npt.NDArray[np.uint32]
NO_ROWS = np.empty(0, dtype=np.uint32)
TOKENS = 4


def keys_of(*names: int) -> npt.NDArray[np.uint64]:
    """Keys that all want the same few places of the table, so that they meet there."""
    return np.array([[name % 3, name, 7, 0] for name in names], dtype=np.uint64).reshape(-1, 4)


def numbers(rows: Any) -> list[int]:
    return [int(row) for row in rows]


def ready(index: Index, rows: U32) -> U32:
    index.state[rows] = RowState.READY
    index.dram[rows] = rows
    return rows


def chain(index: Index, *names: int, above: U32 = NO_ROWS, space: int = 0) -> U32:
    return ready(index, index.insert_chain(space, keys_of(*names), above, 0))


def remove(index: Index, rows: U32) -> U32:
    idle, held = index.remove(rows)
    index.recycle(idle)
    return held


def test_blocks_are_found_under_their_own_key_and_space_only() -> None:
    index = Index(16)
    rows = chain(index, 1, 2, 3)
    assert numbers(index.find(0, keys_of(1, 2, 3, 4))) == [*numbers(rows), NO_ROW]
    assert numbers(index.find(1, keys_of(1, 2, 3))) == [NO_ROW] * 3
    assert index.find(0, keys_of()).shape == (0,)
    assert index.check() == []


def test_keys_that_differ_in_their_last_bit_alone_are_told_apart() -> None:
    index = Index(16)
    low = np.array([[5, 5, 5, 5]], dtype=np.uint64)
    high = low + np.array([[0, 0, 0, 1 << 63]], dtype=np.uint64)
    rows = ready(index, index.insert_chain(0, low, NO_ROWS, 0))
    assert numbers(index.find(0, np.concatenate([high, low]))) == [NO_ROW, int(rows[0])]


def test_short_hashes_are_padded_and_long_ones_taken_whole() -> None:
    assert pack_keys(bytes(range(32)), 16).tolist() == [
        [0x0706050403020100, 0x0F0E0D0C0B0A0908, 0, 0],
        [0x1716151413121110, 0x1F1E1D1C1B1A1918, 0, 0],
    ]
    assert pack_keys(bytes(range(32)), 32).shape == (1, 4)
    assert pack_keys(b"", 32).shape == (0, 4)


def test_a_new_block_stamps_its_whole_chain_tail_first() -> None:
    index = Index(16)
    head = chain(index, 1, 2)
    other = chain(index, 9)
    tail = chain(index, 3, 4, above=head)
    stamps = index.stamp[np.concatenate([head, tail])].tolist()
    assert stamps == sorted(stamps, reverse=True)
    assert min(stamps) > int(index.stamp[other[0]])
    assert index.children[np.concatenate([head, tail])].tolist() == [1, 1, 1, 0]
    assert index.check() == []


def test_a_block_that_is_still_pinned_stays_until_it_is_not() -> None:
    index = Index(16)
    rows = chain(index, 1, 2)
    index.pins[rows[1]] = 1
    held = remove(index, rows)
    assert numbers(held) == [rows[1]]
    assert numbers(index.find(0, keys_of(1, 2))) == [NO_ROW, NO_ROW]
    # The key may be stored anew while the old bytes are still being read.
    again = chain(index, 1, 2)
    assert rows[1] not in again
    index.pins[rows[1]] = 0
    index.recycle(held)
    assert index.check() == []
    assert index.doomed == 0


def test_removing_a_block_that_is_doomed_already_changes_nothing() -> None:
    index = Index(16)
    rows = chain(index, 1)
    index.busy[rows] = 1
    idle, held = index.remove(rows)
    assert (len(idle), len(held)) == (0, 1)
    idle, held = index.remove(rows)
    assert (len(idle), len(held)) == (0, 0)
    index.busy[rows] = 0
    index.recycle(rows)
    assert index.check() == []


def test_a_recycled_row_remembers_nothing() -> None:
    index = Index(16)
    index.block_tokens[0] = TOKENS
    rows = chain(index, 1)
    index.disk[rows] = 5
    index.keep_tokens(rows, np.arange(TOKENS, dtype=np.uint32).reshape(1, TOKENS))
    remove(index, rows)
    fresh = index.insert_chain(0, keys_of(2), NO_ROWS, 0)
    assert numbers(fresh) == numbers(rows)
    for column in (index.hbm, index.dram, index.disk, index.token_slot):
        assert column[fresh[0]] == NO_SLOT
    assert index.children[fresh[0]] == index.pins[fresh[0]] == index.busy[fresh[0]] == 0


def test_token_ids_come_back_as_they_were_and_their_places_are_used_again() -> None:
    index = Index(16)
    index.block_tokens.update({0: TOKENS, 1: 2})
    wide, narrow = chain(index, 1, 2), chain(index, 1, space=1)
    ids = np.array([[0, 1, 2, 0xFFFFFFFF], [4, 5, 6, 7]], dtype=np.uint32)
    index.keep_tokens(wide, ids)
    index.keep_tokens(narrow, np.array([[8, 9]], dtype=np.uint32))
    assert index.tokens_of(wide[::-1], TOKENS).tolist() == ids[::-1].tolist()
    assert index.tokens_of(narrow, 2).tolist() == [[8, 9]]
    before = index.tokens.nbytes
    remove(index, np.concatenate([wide, narrow]))
    for _ in range(600):
        rows = chain(index, 1, 2)
        index.keep_tokens(rows, ids)
        assert index.tokens_of(rows, TOKENS).tolist() == ids.tolist()
        remove(index, rows)
    assert index.tokens.nbytes == before
    assert index.check() == []


def test_many_token_ids_make_the_store_grow_and_stay_right() -> None:
    index = Index(16)
    index.block_tokens[0] = TOKENS
    rows = chain(index, *range(3000))
    ids = np.arange(3000 * TOKENS, dtype=np.uint32).reshape(-1, TOKENS)
    index.keep_tokens(rows[:1000], ids[:1000])
    index.keep_tokens(rows[1000:], ids[1000:])
    assert (index.tokens_of(rows, TOKENS) == ids).all()


def test_the_index_grows_with_its_blocks_and_keeps_them_all() -> None:
    index = Index(1)
    rows = np.concatenate([chain(index, *range(start, start + 700)) for start in range(0, 7000, 700)])
    assert len(np.unique(rows)) == 7000
    assert numbers(index.find(0, keys_of(*range(7000)))) == numbers(rows)
    assert index.check() == []


def test_a_block_may_go_with_all_its_children_or_when_it_has_none() -> None:
    index = Index(16)
    head = chain(index, 1, 2)
    left, right = chain(index, 3, 4, above=head), chain(index, 5, above=head)
    everything = np.concatenate([head, left, right])

    def free(rows: U32) -> list[int]:
        return numbers(rows[index.childless_in_order(rows)])

    assert free(everything) == numbers(everything)
    assert free(head) == []
    assert free(np.concatenate([head, left])) == numbers(left)
    assert free(np.concatenate([right, left[:1]])) == numbers(right)
    assert free(np.concatenate([left, right, head[1:]])) == numbers(np.concatenate([left, right, head[1:]]))
    assert free(NO_ROWS) == []
    assert index.check() == []


def test_what_may_go_is_found_fast_in_a_long_chain_whose_tail_stays() -> None:
    # The tail is being copied while the cleaner has fallen behind: each block of the chain is asked about at once.
    index = Index(16384)
    rows = chain(index, *range(8192))
    began = time.process_time()
    assert not index.childless_in_order(rows[:-1]).any()
    assert time.process_time() - began < 0.1


def test_descendants_are_all_that_lies_below_and_nothing_else() -> None:
    index = Index(16)
    head = chain(index, 1, 2, 3)
    branch = chain(index, 4, 5, above=head[:2])
    other = chain(index, 6, 7)
    below = index.with_descendants(head[1:2])
    assert sorted(numbers(below)) == sorted(numbers(np.concatenate([head[1:], branch])))
    assert sorted(numbers(index.with_descendants(other[:1]))) == sorted(numbers(other))
    assert numbers(index.with_descendants(other[1:])) == [other[1]]


def bulk(index: Index, records: list[tuple[int, int, int, int]]) -> U32:
    """Records of (space, name, name of the parent or 0, stamp)."""
    spaces, names, parents, stamps = (list(column) for column in zip(*records, strict=True)) if records else ([],) * 4
    rows = index.insert_bulk(
        np.array(spaces, dtype=np.uint32),
        keys_of(*names),
        keys_of(*parents),
        np.array(parents, dtype=np.int64) != 0,
        np.array(stamps, dtype=np.uint64),
    )
    index.dram[rows[rows != NO_ROW]] = 1000 + np.flatnonzero(rows != NO_ROW)
    return rows


def test_recovered_chains_are_whole_whatever_the_order_of_their_records() -> None:
    index = Index(16)
    rows = bulk(index, [(0, 3, 2, 1), (0, 1, 0, 3), (0, 2, 1, 2), (1, 3, 0, 9)])
    assert NO_ROW not in rows
    assert numbers(index.find(0, keys_of(1, 2, 3))) == [rows[1], rows[2], rows[0]]
    assert numbers(index.find(1, keys_of(3))) == [rows[3]]
    assert index.check() == []


def test_what_lies_behind_a_hole_is_not_taken_over() -> None:
    index = Index(16)
    rows = bulk(index, [(0, 1, 0, 9), (0, 3, 2, 5), (0, 4, 3, 4), (0, 5, 1, 3), (1, 2, 0, 9)])
    assert [int(row) == NO_ROW for row in rows] == [False, True, True, False, False]
    assert index.count == 3
    assert index.check() == []


def test_a_second_record_of_a_block_is_not_taken_over() -> None:
    index = Index(16)
    rows = bulk(index, [(0, 1, 0, 9), (0, 2, 1, 5), (0, 1, 0, 4), (0, 2, 1, 3)])
    assert np.count_nonzero(rows != NO_ROW) == 2
    assert index.count == 2
    assert index.check() == []


def test_records_that_name_each_other_as_parents_are_not_taken_over_and_nothing_hangs() -> None:
    index = Index(16)
    rows = bulk(index, [(0, 1, 2, 9), (0, 2, 1, 5), (0, 3, 2, 4), (0, 4, 4, 3), (0, 5, 0, 2)])
    assert [int(row) == NO_ROW for row in rows] == [True, True, True, True, False]
    assert index.check() == []


def test_stamps_of_records_that_contradict_their_chain_are_repaired() -> None:
    index = Index(16)
    rows = bulk(index, [(0, 1, 0, 5), (0, 2, 1, 90), (0, 3, 2, 90), (0, 9, 0, 50), (0, 8, 0, (1 << 64) - 1)])
    assert index.check() == []
    # The chain's newest use counts for all of it.
    assert int(index.stamp[rows[3]]) < int(index.stamp[rows[2]])
    index.touch(rows[3:4])
    assert int(index.stamp[rows[3]]) > int(index.stamp[rows[4]])


def test_what_is_stored_after_a_restart_is_newer_than_what_was_found_by_it_and_by_the_next() -> None:
    # E3: a restart must not make the blocks of the run before the newest for ever.
    first = Index(16)
    first.touch(NO_ROWS)
    old = bulk(first, [(0, 1, 0, 1_000_000), (0, 2, 0, 999_999)])
    new = chain(first, 3)
    recorded = [(0, 1, 0, 1_000_000), (0, 2, 0, 999_999), (0, 3, 0, int(first.stamp[new[0]]))]
    second = Index(16)
    rows = bulk(second, recorded)
    stamps = second.stamp[rows]
    assert stamps[2] > stamps[0] > stamps[1]
    assert len(old) == 2


def test_nothing_recovered_is_nothing() -> None:
    index = Index(16)
    assert len(bulk(index, [])) == 0
    assert index.check() == []


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 12), st.integers(0, 12), st.integers(0, (1 << 64) - 1)), max_size=40
    )
)
def test_recovery_keeps_exactly_what_is_chained_to_a_beginning(records: list[tuple[int, int, int, int]]) -> None:
    index = Index(16)
    rows = bulk(index, records)
    assert index.check() == []
    kept: dict[tuple[int, int], int] = {}
    for (space, name, parent, _), row in zip(records, numbers(rows), strict=True):
        if row != NO_ROW:
            assert (space, name) not in kept
            kept[space, name] = parent
    for (space, _), parent in kept.items():
        assert not parent or (space, parent) in kept
    for space, name, parent, _ in records:
        if not parent:
            # Which of several records of a block counts is open, so only an undisputed beginning must be there.
            disputed = any(other[:2] == (space, name) and other[2] for other in records)
            assert disputed or (space, name) in kept
    index.remove(rows[rows != NO_ROW])
    assert index.count == 0


def test_tombstones_do_not_pile_up() -> None:
    # Years of stores and evictions in a full index: a lookup must not come to walk the whole table.
    index = Index(4096)
    rng = np.random.default_rng(3)
    live = ready(index, index.insert_chain(0, rng.integers(0, 1 << 63, (4000, 4), dtype=np.uint64), NO_ROWS, 0))
    index.parent[live] = NO_ROW
    index.children[live] = 0
    for _ in range(200):
        live = rng.permutation(live)
        remove(index, live[:500])
        fresh = ready(index, index.insert_chain(0, rng.integers(0, 1 << 63, (500, 4), dtype=np.uint64), NO_ROWS, 0))
        index.parent[fresh] = NO_ROW
        index.children[fresh] = 0
        live = np.concatenate([live[500:], fresh])
    absent = rng.integers(0, 1 << 63, (10_000, 4), dtype=np.uint64)
    began = time.process_time()
    assert (index.find(0, absent) == NO_ROW).all()
    assert time.process_time() - began < 0.2
    assert index.check() == []


def test_a_million_blocks_take_less_than_200_bytes_each() -> None:
    assert Index(1 << 20).nbytes < 200 << 20
    index = Index(1 << 16)
    rng = np.random.default_rng(5)
    chain_rows = index.insert_chain(0, rng.integers(0, 1 << 63, (60_000, 4), dtype=np.uint64), NO_ROWS, 0)
    assert index.nbytes / len(chain_rows) < 200


class IndexMachine(RuleBasedStateMachine):
    """Chains in two spaces against a dictionary: (space, name) → row, with parents, stamps by order of use and pins."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(1)
        self.index.block_tokens.update({0: TOKENS, 1: TOKENS})
        self.rows: dict[tuple[int, int], int] = {}
        self.parents: dict[tuple[int, int], int] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.order: list[tuple[int, int]] = []  # least recently stamped first
        self.doomed: dict[int, int] = {}  # row → pins
        self.pins: dict[int, int] = {}

    @initialize(
        records=st.lists(
            st.tuples(st.integers(0, 1), st.integers(1, 12), st.integers(0, 12), st.integers(0, 50)), max_size=12
        )
    )
    def recover(self, records: list[tuple[int, int, int, int]]) -> None:
        rows = bulk(self.index, records)
        for (space, name, parent, _), row in zip(records, numbers(rows), strict=True):
            if row != NO_ROW:
                self.rows[space, name], self.parents[space, name] = row, parent
                self.pins[row] = 0
        self.order = sorted(self.rows, key=lambda block: int(self.index.stamp[self.rows[block]]))

    def path(self, space: int, name: int) -> list[int]:
        names: list[int] = []
        while name:
            names.insert(0, name)
            name = self.parents[space, name]
        return names

    def children(self, space: int, name: int) -> list[tuple[int, int]]:
        return [block for block, parent in self.parents.items() if block[0] == space and parent == name]

    def below(self, block: tuple[int, int]) -> list[tuple[int, int]]:
        return [block, *(other for child in self.children(*block) for other in self.below(child))]

    def rows_of(self, space: int, names: list[int]) -> U32:
        return np.array([self.rows[space, name] for name in names], dtype=np.uint32)

    def stamped(self, space: int, names: list[int]) -> None:
        for name in reversed(names):
            if (space, name) in self.order:
                self.order.remove((space, name))
            self.order.append((space, name))

    @rule(data=st.data(), space=st.integers(0, 1), count=st.integers(1, 5), with_tokens=st.booleans())
    def insert(self, data: st.DataObject, space: int, count: int, with_tokens: bool) -> None:
        above = data.draw(st.sampled_from([0, *sorted(name for s, name in self.rows if s == space)]))
        absent = [name for name in range(1, 40) if (space, name) not in self.rows]
        names = data.draw(st.permutations(absent))[:count]
        if not names:
            return
        path = self.path(space, above)
        rows = self.index.insert_chain(space, keys_of(*names), self.rows_of(space, path), 0)
        ready(self.index, rows)
        assert not set(numbers(rows)) & (set(self.rows.values()) | set(self.doomed))
        for parent, name, row in zip([above, *names], names, numbers(rows), strict=False):
            self.rows[space, name], self.parents[space, name] = row, parent
            self.pins[row] = 0
        self.stamped(space, [*path, *names])
        if with_tokens:
            ids = np.array([[space, name, row, 0xFFFFFFFF] for name, row in zip(names, rows, strict=True)])
            self.index.keep_tokens(rows, ids.astype(np.uint32))
            self.tokens |= {(space, name): row.tolist() for name, row in zip(names, ids, strict=True)}

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        space, name = data.draw(st.sampled_from(sorted(self.rows)))
        path = self.path(space, name)
        self.index.touch(self.rows_of(space, path))
        self.stamped(space, path)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        row = self.rows[data.draw(st.sampled_from(sorted(self.rows)))]
        self.index.pins[row] += 1
        self.pins[row] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = sorted({row for row, pins in self.pins.items() if pins} | set(self.doomed))
        if not pinned:
            return
        row = data.draw(st.sampled_from(pinned))
        self.index.pins[row] -= 1
        if row in self.doomed:
            self.doomed[row] -= 1
            if not self.doomed[row]:
                del self.doomed[row]
                self.index.recycle(np.array([row], dtype=np.uint32))
        else:
            self.pins[row] -= 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), whole=st.booleans())
    def remove(self, data: st.DataObject, whole: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.rows)))
        gone = self.below(block)
        rows = np.array([self.rows[b] for b in gone], dtype=np.uint32)
        if whole:
            found = self.index.with_descendants(rows[:1])
            assert sorted(numbers(found)) == sorted(numbers(rows))
        elif len(gone) > 1:
            assert not self.index.childless_in_order(rows[:1]).any()
            gone = [other for other in gone if not self.children(*other)]
            rows = np.array([self.rows[b] for b in gone], dtype=np.uint32)
        assert self.index.childless_in_order(rows).all()
        idle, held = self.index.remove(rows)
        self.index.recycle(idle)
        expected = [self.rows[b] for b in gone if self.pins[self.rows[b]]]
        assert sorted(numbers(held)) == sorted(expected)
        for other in gone:
            row = self.rows.pop(other)
            del self.parents[other]
            self.tokens.pop(other, None)
            self.order.remove(other)
            pins = self.pins.pop(row)
            if pins:
                self.doomed[row] = pins

    @rule(data=st.data())
    def childless(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True)) if self.rows else []
        free = set(chosen)
        while True:
            less = {block for block in free if set(self.children(*block)) <= free}
            if less == free:
                break
            free = less
        mask = self.index.childless_in_order(np.array([self.rows[b] for b in chosen], dtype=np.uint32))
        assert [block for block, may in zip(chosen, mask, strict=True) if may] == [b for b in chosen if b in free]

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        index = self.index
        assert index.check() == []
        assert (index.count, index.doomed) == (len(self.rows), len(self.doomed))
        for space in (0, 1):
            names = list(range(1, 45))
            expected = [self.rows.get((space, name), NO_ROW) for name in names]
            assert numbers(index.find(space, keys_of(*names))) == expected
        stamps = [int(index.stamp[self.rows[block]]) for block in self.order]
        assert stamps == sorted(set(stamps))
        for block, ids in self.tokens.items():
            assert index.tokens_of(np.array([self.rows[block]], dtype=np.uint32), TOKENS)[0].tolist() == ids


TestIndexMachine: Any = IndexMachine.TestCase
