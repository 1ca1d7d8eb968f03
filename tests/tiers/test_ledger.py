"""The ledger: what an earlier owner of the pool wrote down is read as it was, or not at all."""

import os

import numpy as np
import pytest

from kvcascade.config.errors import ProtocolError
from kvcascade.tiers.ledger import HELD, LANDED, NOTHING, SEALED, Ledger, Writing

PAGES, SLAB = 1 << 16, 1 << 20


def u32(*values: int):
    return np.array(values, dtype=np.uint32)


def keys(count: int, first: int = 1):
    return np.arange(first, first + 4 * count, dtype=np.uint64).reshape(-1, 4)


@pytest.fixture
def ledger():
    ledger = Ledger(PAGES, SLAB)
    yield ledger
    ledger.close()


def adopted(ledger: Ledger) -> Ledger:
    """As the next daemon reads it."""
    return Ledger.adopt(ledger.memory.export(), ledger.memory.size)


def land(ledger: Ledger, pages, space: int = 0) -> None:
    count = len(pages)
    has_parent = np.arange(count) > 0
    ledger.land(pages, space, 8192, keys(count), keys(count, 100), has_parent, np.arange(count, dtype=np.uint64))


def test_records_spaces_and_writers_are_read_as_they_were_written(ledger):
    assert [ledger.space(b"first"), ledger.space(b"second"), ledger.space(b"first")] == [0, 1, 0]
    land(ledger, u32(8, 4, 60000), space=1)
    ledger.seal(u32(4), np.array([77], dtype=np.uint64))
    ledger.hold(u32(100, 102), 0, 8192)
    ledger.add_writer(Writing(b"t" * 16, 12, 34, 56))
    ledger.add_writer(Writing(b"u" * 16, 1, 2, 3))
    ledger.remove_writer(b"u" * 16)
    later = adopted(ledger)
    found = later.records()
    assert found.pages.tolist() == [4, 8, 100, 102, 60000]
    assert found.state.tolist() == [SEALED, LANDED, HELD, HELD, LANDED]
    assert found.space.tolist() == [1, 1, 0, 0, 1]
    assert (found.checksums[0], found.stamps.tolist()[:2]) == (77, [1, 0])
    assert found.keys[1].tolist() == [1, 2, 3, 4]
    assert found.has_parent.tolist()[:2] == [True, False]
    assert list(later.spaces()) == [b"first", b"second"]
    assert later.writers() == [Writing(b"t" * 16, 12, 34, 56)]
    # It goes on where the other ended.
    assert (later.space(b"second"), later.space(b"third")) == (1, 2)
    later.remove_writer(b"t" * 16)
    assert ledger.writers() == []
    later.close()


def test_what_is_cleared_is_not_found(ledger):
    land(ledger, u32(1, 2, 3))
    ledger.clear(u32(2))
    assert ledger.records().pages.tolist() == [1, 3]
    assert ledger.states(u32(1, 2)).tolist() == [LANDED, NOTHING]


def test_a_record_that_is_written_anew_is_none_until_it_is_whole(ledger):
    land(ledger, u32(1, 2))
    with pytest.raises(ValueError):
        # As killed in the middle: the keys cannot be written.
        ledger.land(u32(1, 2), 0, 8192, keys(3), keys(2), np.zeros(2, bool), np.zeros(2, np.uint64))
    assert len(ledger.records().pages) == 0


def test_reading_makes_no_memory_of_what_was_never_written(ledger):
    land(ledger, u32(1, PAGES - 1))
    before = os.fstat(ledger.memory.fd).st_blocks
    assert ledger.records().pages.tolist() == [1, PAGES - 1]
    # A record may reach into the page behind.
    assert os.fstat(ledger.memory.fd).st_blocks <= before + 2 * 8
    assert before * 512 < ledger.memory.size // 100


def test_more_writers_than_it_holds_are_confessed(ledger):
    for number in range(4097):
        ledger.add_writer(Writing(number.to_bytes(16, "little"), number, 0, 0))
    later = adopted(ledger)
    assert later.writers_left_out
    assert len(later.writers()) == 4096
    later.close()


def test_more_spaces_than_it_holds_have_no_number(ledger):
    assert ledger.space(bytes(3 << 20)) == 0
    assert ledger.space(bytes(2 << 20)) is None
    assert ledger.space(b"small") == 1


@pytest.mark.parametrize("place", [0, 8, 4096 + 20])
def test_one_that_is_damaged_or_of_another_version_is_refused_and_its_descriptor_left_to_the_caller(ledger, place):
    ledger.space(b"a descriptor")
    ledger.memory.array()[place] ^= 0xFF
    fd = ledger.memory.export()
    with pytest.raises(ProtocolError):
        Ledger.adopt(fd, ledger.memory.size)
    os.close(fd)
