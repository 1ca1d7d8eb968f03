"""VictimQueue: who goes first, and that nobody goes twice."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.tiers import policy
from kvcascade.tiers.policy import Mask, Rows, Scores, VictimQueue


class Blocks:
    """Rows with stamps, as the queue's owner keeps them."""

    def __init__(self, count: int, stamps: Sequence[int] | None = None) -> None:
        self.stamp = np.array(range(count) if stamps is None else stamps, dtype=np.uint64)
        self.resident = np.ones(count, dtype=np.bool_)
        self.pinned = np.zeros(count, dtype=np.bool_)
        self.scans = 0
        self.clock = int(self.stamp.max(initial=0))
        self.queue = VictimQueue(self._candidates, self._score, self._usable)

    def _candidates(self) -> Rows:
        self.scans += 1
        return np.flatnonzero(self.resident).astype(np.uint32)

    def _score(self, rows: Rows) -> Scores:
        return self.stamp[rows]

    def _usable(self, rows: Rows) -> Mask:
        usable: Mask = self.resident[rows] & ~self.pinned[rows]
        return usable

    def touch(self, row: int) -> None:
        self.clock += 1
        self.stamp[row] = self.clock

    def evict(self, count: int) -> list[int]:
        rows = self.queue.take(count)
        assert len(set(rows.tolist())) == len(rows) <= count
        self.resident[rows] = False
        return [int(row) for row in rows]


def test_the_least_recently_used_go_first() -> None:
    blocks = Blocks(5, stamps=[30, 10, 50, 20, 40])
    assert blocks.evict(2) == [1, 3]
    blocks.touch(0)
    assert blocks.evict(9) == [4, 2, 0]
    assert blocks.evict(1) == []


def test_a_row_that_was_used_since_is_passed_over_until_its_time() -> None:
    blocks = Blocks(100)
    assert blocks.evict(1) == [0]
    for row in range(1, 50):
        blocks.touch(row)
    assert blocks.evict(99) == [*range(50, 100), *range(1, 50)]


def test_one_request_never_names_a_row_twice_though_the_queue_is_refilled_meanwhile() -> None:
    blocks = Blocks(10)
    blocks.evict(7)
    blocks.resident[:5] = True
    for row in range(5):
        blocks.touch(row)
    assert blocks.evict(8) == [7, 8, 9, 0, 1, 2, 3, 4]


def test_a_row_that_is_added_though_the_queue_has_it_is_named_once() -> None:
    # A block that was clean, lost its copy below and got a new one, without having been used.
    blocks = Blocks(10)
    blocks.evict(1)
    blocks.queue.add(np.array([4, 2], dtype=np.uint32))
    blocks.queue.add(np.array([2], dtype=np.uint32))
    assert blocks.evict(9) == list(range(1, 10))


def test_rows_that_were_added_take_their_place_in_the_order() -> None:
    blocks = Blocks(8)
    blocks.resident[[2, 5]] = False
    assert blocks.evict(1) == [0]
    blocks.resident[[2, 5]] = True
    blocks.queue.add(np.array([5, 2], dtype=np.uint32))
    assert blocks.evict(3) == [1, 2, 3]
    assert blocks.evict(9) == [4, 5, 6, 7]


def test_pinned_rows_are_left_out_and_come_back_when_the_queue_is_filled_again() -> None:
    blocks = Blocks(6)
    blocks.pinned[:3] = True
    assert blocks.evict(2) == [3, 4]
    blocks.pinned[:3] = False
    assert sorted(blocks.evict(9)) == [0, 1, 2, 5]


def test_nothing_is_found_and_nothing_loops_when_all_is_pinned() -> None:
    blocks = Blocks(6)
    blocks.pinned[:] = True
    assert blocks.evict(3) == []
    assert blocks.scans <= 2


def test_one_that_may_go_is_found_behind_however_many_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # D1: "no eviction candidates" only when there are none.
    monkeypatch.setattr(policy, "LEAST_REFILL", 8)
    blocks = Blocks(2000)
    blocks.pinned[:1990] = True
    assert blocks.evict(4) == [1990, 1991, 1992, 1993]
    assert blocks.evict(99) == list(range(1994, 2000))
    assert blocks.scans < 10


def test_what_is_usable_is_asked_together_with_what_was_taken_before() -> None:
    # A chain 0 → 1 → … whose parents may only go with their children, cut where the queue looks at 64 rows at a time.
    count = 300
    stamps = np.arange(count, 0, -1, dtype=np.uint64)

    def usable(rows: Rows) -> Mask:
        named = np.zeros(count, dtype=np.bool_)
        named[rows] = True
        missing = np.flatnonzero(~named)
        lowest = int(missing.max()) if len(missing) else -1
        allowed: Mask = rows.astype(np.int64) > lowest
        return allowed

    queue = VictimQueue(lambda: np.arange(count, dtype=np.uint32), lambda rows: stamps[rows], usable)
    queue.take(20)
    for _ in range(2):
        assert queue.take(count).tolist() == list(range(count - 1, -1, -1))


def test_only_a_share_is_sorted_and_the_order_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LEAST_REFILL", 8)
    rng = np.random.default_rng(1)
    stamps = rng.permutation(1000)
    blocks = Blocks(1000, stamps=stamps.tolist())
    order = [row for _ in range(40) for row in blocks.evict(25)]
    assert order == np.argsort(stamps).tolist()
    assert blocks.scans > 3


def test_the_lowest_score_is_a_bound_and_infinite_when_there_is_none() -> None:
    blocks = Blocks(3, stamps=[7, 5, 9])
    assert blocks.queue.lowest() == 5
    blocks.touch(1)
    assert blocks.queue.lowest() == 7
    blocks.evict(9)
    assert blocks.queue.lowest() == 1 << 64


@given(st.data())
def test_the_order_is_exact_lru_however_rows_are_used(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 90))
    blocks = Blocks(count)
    model = list(range(count))  # least recently used first
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["touch", "evict", "bring", "lowest"]))
        if step == "touch" and model:
            row = data.draw(st.sampled_from(model))
            blocks.touch(row)
            model.remove(row)
            model.append(row)
        elif step == "bring" and len(model) < count:
            row = data.draw(st.sampled_from(sorted(set(range(count)) - set(model))))
            # Back with the stamp that it had: a block that became clean again.
            blocks.resident[row] = True
            blocks.queue.add(np.array([row], dtype=np.uint32))
            model.append(row)
            model.sort(key=lambda r: int(blocks.stamp[r]))
        elif step == "lowest":
            bound = blocks.queue.lowest()
            assert all(bound <= int(blocks.stamp[row]) for row in model)
        else:
            wanted = data.draw(st.integers(0, count))
            assert blocks.evict(wanted) == model[:wanted]
            del model[:wanted]
