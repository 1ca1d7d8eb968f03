"""Records prove themselves, the last one of a slot is its truth, and compaction changes neither."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.tiers.folder import Folder, write_durably
from kvcascade.tiers.journal import (
    RECORD,
    RECORD_BYTES,
    Journal,
    namespace_tag,
    newest,
    put_record,
    record_checksums,
    remove_record,
)

IDENTITY = bytes(range(16))
NS = bytes(range(32))


def put(index: int, name: int, pages: int = 2) -> bytes:
    return put_record(NS, name, name.to_bytes(32, "big"), b"", 0, 4096, pages, index)


def names(records: npt.NDArray[np.void]) -> list[int]:
    return [int(stamp) for stamp in records["stamp"]]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    folder = Folder(tmp_path)
    opened = Journal(folder, IDENTITY)
    opened.replay()
    yield opened
    opened.close()
    folder.close()


def reopened(journal: Journal, directory: Path) -> Journal:
    journal.close()
    return Journal(Folder(directory), IDENTITY)


def test_records_come_back_in_order_with_all_their_fields(journal: Journal, tmp_path: Path) -> None:
    journal.append(bytearray(put_record(NS, 2**64 - 1, b"h" * 32, b"p" * 32, 255, 2**32 - 1, 2**20 + 1, 2**32 - 1)))
    journal.append(bytearray(put(1, 10) + put(2, 11)))
    journal.add_namespace(NS, b"meaning")
    replay = reopened(journal, tmp_path).replay()
    assert names(replay.records) == [2**64 - 1, 10, 11]
    (first, *_) = replay.records
    assert first["hash"].tobytes() == b"h" * 32
    assert first["parent"].tobytes() == b"p" * 32
    assert (first["has_parent"], first["group"], first["length"]) == (1, 255, 2**32 - 1)
    assert (first["pages"], first["index"]) == (2**20 + 1, 2**32 - 1)
    assert replay.namespaces == {namespace_tag(NS): (NS, b"meaning")}
    assert not replay.dropped


def test_the_last_record_of_a_slot_is_its_truth(journal: Journal, tmp_path: Path) -> None:
    journal.append(bytearray(put(0, 1) + put(1, 2) + put(2, 3)))
    journal.append(bytearray(remove_record(2, 0) + put(1, 4) + remove_record(2, 2) + put(2, 5) + put(0, 6, pages=3)))
    assert names(reopened(journal, tmp_path).replay().records) == [4, 5, 6]


def test_every_life_appends_to_a_segment_of_its_own(journal: Journal, tmp_path: Path) -> None:
    for life in range(3):
        journal.append(bytearray(put(life, life)))
        journal = reopened(journal, tmp_path)
        assert names(journal.replay().records) == list(range(life + 1))
    assert len(list(tmp_path.glob("journal-*"))) == 3


@given(
    byte=st.integers(0, 5 * RECORD_BYTES - 1),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    content = bytearray(b"".join(put(i, i) for i in range(5)))
    records = np.frombuffer(content, dtype=RECORD)
    records["checksum"] = record_checksums(records, 9, 0)
    content[byte] ^= 1 << bit
    bad = record_checksums(records, 9, 0) != records["checksum"]
    assert np.flatnonzero(bad).tolist() == [byte // RECORD_BYTES]


def test_a_record_at_another_place_or_of_another_directory_or_file_is_dropped(journal: Journal, tmp_path: Path) -> None:
    journal.append(bytearray(put(0, 1) + put(1, 2)))
    journal.close()
    (path,) = tmp_path.glob("journal-*")
    content = path.read_bytes()
    assert names(Journal(Folder(tmp_path), IDENTITY).replay().records) == [1, 2]
    assert len(Journal(Folder(tmp_path), bytes(16)).replay().records) == 0
    path.write_bytes(content[RECORD_BYTES:] + content[:RECORD_BYTES])
    assert len(Journal(Folder(tmp_path), IDENTITY).replay().records) == 0
    path.write_bytes(content)
    path.rename(tmp_path / "journal-00000002")
    assert len(Journal(Folder(tmp_path), IDENTITY).replay().records) == 0
    (tmp_path / "snapshot-00000001").write_bytes(content)
    assert len(Journal(Folder(tmp_path), IDENTITY).replay().records) == 0


@pytest.mark.parametrize("content", [b"", bytes(10 * RECORD_BYTES), b"\xff" * 1000, os.urandom(999_999)])
def test_a_file_of_rubbish_holds_no_records(tmp_path: Path, content: bytes) -> None:
    for name in ("journal-00000001", "snapshot-00000001", "journal-00000002", f"namespace-{'ab' * 32}"):
        (tmp_path / name).write_bytes(content)
    replay = Journal(Folder(tmp_path), IDENTITY).replay()
    assert len(replay.records) == 0
    assert replay.namespaces == {}
    assert replay.dropped["damaged namespace"] == 1


def test_names_that_are_not_the_journals_are_left_alone(journal: Journal, tmp_path: Path) -> None:
    for name in ("journal-1", "journal-0000000x", "snapshot-00000001.abc.tmp", "journal-00000001.bak"):
        (tmp_path / name).write_bytes(bytes(1000))
    journal.append(bytearray(put(0, 1)))
    journal = reopened(journal, tmp_path)
    assert names(journal.replay().records) == [1]
    journal.sweep()
    assert (tmp_path / "journal-00000001.bak").exists()


def test_compaction_keeps_what_replay_says_and_nothing_else(journal: Journal, tmp_path: Path) -> None:
    for name in range(100):
        journal.append(bytearray(put(name % 10, name)))
    journal.append(bytearray(remove_record(2, 3)))
    journal.rotate()
    journal.append(bytearray(remove_record(2, 4) + put(20, 200)))
    before = journal.size
    journal.compact(journal.number - 1)
    assert journal.snapshot_bytes == 9 * RECORD_BYTES
    assert journal.size == 2 * RECORD_BYTES < before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-00000002", "snapshot-00000001"]
    journal.append(bytearray(put(21, 201)))
    journal = reopened(journal, tmp_path)
    expected = [90, 91, 92, 95, 96, 97, 98, 99, 200, 201]
    assert names(journal.replay().records) == expected
    # Again, from a snapshot and a segment.
    journal.rotate()
    journal.compact(journal.number - 1)
    assert names(reopened(journal, tmp_path).replay().records) == expected


def test_a_crash_between_snapshot_and_deletion_changes_nothing(journal: Journal, tmp_path: Path) -> None:
    journal.append(bytearray(put(0, 1) + put(1, 2)))
    journal.rotate()
    journal.append(bytearray(put(0, 3)))
    segment = (tmp_path / "journal-00000001").read_bytes()
    journal.compact(1)
    (tmp_path / "journal-00000001").write_bytes(segment)
    journal = reopened(journal, tmp_path)
    assert names(journal.replay().records) == [2, 3]
    assert journal.sweep() == 1
    assert not (tmp_path / "journal-00000001").exists()
    assert names(reopened(journal, tmp_path).replay().records) == [2, 3]


def test_a_compaction_that_fails_leaves_the_old_files(journal: Journal, tmp_path: Path) -> None:
    journal.append(bytearray(put(0, 1)))
    journal.rotate()
    (tmp_path / "snapshot-00000001").mkdir()  # what the rename stumbles over
    with pytest.raises(OSError, match="directory"):
        journal.compact(1)
    (tmp_path / "snapshot-00000001").rmdir()
    assert names(reopened(journal, tmp_path).replay().records) == [1]
    assert not list(tmp_path.glob("*.tmp"))


def test_appending_goes_on_while_another_thread_compacts(journal: Journal, tmp_path: Path) -> None:
    name = 0
    for _ in range(5):
        for _ in range(20):
            journal.append(bytearray(put(name % 50, name)))
            name += 1
        journal.rotate()
        compaction = threading.Thread(target=journal.compact, args=(journal.number - 1,))
        compaction.start()
        for _ in range(20):
            journal.append(bytearray(put(name % 50, name)))
            name += 1
        compaction.join()
    assert names(reopened(journal, tmp_path).replay().records) == list(range(150, 200))


def test_compaction_is_due_by_size_or_by_the_number_of_segments(journal: Journal) -> None:
    assert not journal.due(1000, 2)
    journal.append(bytearray(b"".join(put(i, i) for i in range(20))))
    assert journal.due(1000, 2)
    assert not journal.due(10_000, 2)
    for _ in range(3):
        journal.rotate()
    assert journal.due(10_000, 2)


def test_a_file_is_put_under_its_name_whole_or_not_at_all(tmp_path: Path) -> None:
    write_durably(Folder(tmp_path), "x", b"one")
    write_durably(Folder(tmp_path), "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    with pytest.raises(TypeError):
        write_durably(Folder(tmp_path), "x", "no bytes")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(2, 4), st.integers(0, 6)), max_size=60),
)
def test_newest_agrees_with_a_dictionary(steps: list[tuple[bool, int, int]]) -> None:
    model: dict[tuple[int, int], int] = {}
    content = bytearray()
    for position, (is_put, pages, index) in enumerate(steps):
        if is_put:
            model.pop((pages, index), None)
            model[pages, index] = position
            content += put(index, position, pages)
        else:
            model.pop((pages, index), None)
            content += remove_record(pages, index)
    records = np.frombuffer(content, dtype=RECORD)
    assert newest(records).tolist() == sorted(model.values())
