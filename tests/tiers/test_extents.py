"""Slot numbers of several owners never meet, and stay what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.tiers.extents import EXTENTS, NOWHERE, Extents

SLOTS = st.lists(st.integers(0, 300_000), min_size=1, max_size=20, unique=True)


@given(st.lists(st.tuples(st.integers(0, 3), SLOTS), min_size=1, max_size=12))
def test_every_number_leads_back_to_the_one_slot_it_was_given_for(asked: list[tuple[int, list[int]]]) -> None:
    extents = Extents()
    known: dict[int, tuple[int, int]] = {}
    for owner, slots in asked:
        numbers = extents.encode(owner, np.array(slots, dtype=np.uint32))
        for number, slot in zip(numbers.tolist(), slots, strict=True):
            assert known.setdefault(number, (owner, slot)) == (owner, slot)
            assert number != NOWHERE
    numbers = np.array(list(known), dtype=np.uint32)
    owners, places = extents.decode(numbers)
    assert list(zip(owners.tolist(), places.tolist(), strict=True)) == list(known.values())
    assert extents.owners(numbers).tolist() == owners.tolist()
    assert extents.check() == []


def test_a_number_that_was_never_dealt_is_refused() -> None:
    extents = Extents()
    assert not len(extents.encode(0, np.empty(0, dtype=np.uint32)))
    (number,) = extents.encode(0, np.array([7], dtype=np.uint32)).tolist()
    with pytest.raises(ValueError, match="not of this tier"):
        extents.decode(np.array([number + (1 << 16)], dtype=np.uint32))


def test_numbers_run_out_before_they_repeat() -> None:
    extents = Extents()
    extents.encode(0, np.array([(EXTENTS << 16) - 1], dtype=np.uint32))
    with pytest.raises(AssertionError, match="out of slot numbers"):
        extents.encode(1, np.array([0], dtype=np.uint32))
