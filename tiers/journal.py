"""The disk tier's memory of what lies where: fixed records, appended and group-committed, bounded by a snapshot.

The rule: a record is written only after the payload that it names is durable, and a record proves itself. Its
checksum covers the directory's id, the file's number and the record's position, so that a torn, flipped, moved or
foreign record is dropped, and whatever survives is replayed in the order in which it was appended. The last record of a
slot is its truth.

    journal-00000007     records appended since snapshot 6; one segment a process life, more when compacted
    snapshot-00000006    the live records of all segments up to 6; written beside, synced, then renamed
    namespace-<hex>      what a namespace fingerprint stands for

Compaction closes the current segment and merges only closed files, from disk to disk, so that neither appends wait for
it nor the records take room in memory between restarts. All functions here block; the tier calls them from its threads.
"""

import contextlib
import os
import re
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from .folder import Folder, read_whole, write_durably, write_whole

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

PUT: Final = 1
REMOVE: Final = 2

# namespace tag, stamp, hash, parent, kind, group, has parent, 0, length, slot pages, slot index, checksum
_LAYOUT: Final = struct.Struct("<QQ32s32sBBBBIIIQ")
RECORD: Final = np.dtype(
    [
        ("namespace", "<u8"),
        ("stamp", "<u8"),
        ("hash", "u1", 32),
        ("parent", "u1", 32),
        ("kind", "u1"),
        ("group", "u1"),
        ("has_parent", "u1"),
        ("zero", "u1"),
        ("length", "<u4"),
        ("pages", "<u4"),
        ("index", "<u4"),
        ("checksum", "<u8"),
    ]
)
RECORD_BYTES: Final = RECORD.itemsize
_WORDS: Final = RECORD_BYTES // 8 - 1
assert _LAYOUT.size == RECORD_BYTES

_NAMESPACE: Final = struct.Struct("<8sI32sQ")
_NAMESPACE_MAGIC: Final = b"KVCSNAM1"
MAX_DESCRIPTOR: Final = 1 << 20
_NAMESPACE_NAME: Final = re.compile(r"namespace-[0-9a-f]{64}")

# 20,000 rows of temporaries stay in the cache of a core; larger chunks were no faster.
_CHUNK: Final = 20_000


def put_record(
    namespace: bytes, stamp: int, block_hash: bytes, parent: bytes, group: int, length: int, pages: int, index: int
) -> bytes:
    """One record "slot `index` of the class of `pages` pages holds this block"; its checksum is filled in on append."""
    tag = int.from_bytes(namespace[:8], "little")
    return _LAYOUT.pack(tag, stamp, block_hash, parent, PUT, group, bool(parent), 0, length, pages, index, 0)


def remove_record(pages: int, index: int) -> bytes:
    """One record "this slot holds nothing"."""
    return _LAYOUT.pack(0, 0, b"", b"", REMOVE, 0, 0, 0, 0, pages, index, 0)


def namespace_tag(fingerprint: bytes) -> int:
    """The eight bytes of a namespace fingerprint that records carry; the slot's header carries all 32."""
    return int.from_bytes(fingerprint[:8], "little")


def _multipliers(count: int) -> U64:
    odd = [xxhash.xxh3_64_intdigest(f"kvcascade record word {word}".encode()) | 1 for word in range(count)]
    return np.array(odd, dtype=np.uint64)


_MULTIPLY: Final = _multipliers(_WORDS)
_FINAL: Final = _multipliers(2)


def record_checksums(records: npt.NDArray[np.void], seed: int, first: int) -> U64:
    """Checksum of each record at positions [first, first + n) of the file that `seed` names; shape (n,).

    Every step on a word can be undone, so damage within one word of eight bytes never goes unseen; other damage, a
    record at another position or in another file passes with a chance of 2**-64. Whole columns at once: one xxh3 call a
    record would take ten times as long at 10^6 records.
    """
    words = records.view("<u8").reshape(len(records), _WORDS + 1)[:, :_WORDS]
    mixed = words * _MULTIPLY
    mixed ^= mixed >> np.uint64(32)
    mixed *= _FINAL[0]
    positions = np.arange(first + 1, first + 1 + len(records), dtype=np.uint64)
    total: U64 = mixed.sum(axis=1, dtype=np.uint64) ^ (positions * _FINAL[1]) ^ np.array(seed, dtype=np.uint64)
    total ^= total >> np.uint64(29)
    total *= _FINAL[0]
    total ^= total >> np.uint64(32)
    return total


def newest(records: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
    """Positions, ascending, of the records that are the last of their slot and put a block there."""
    keep: list[npt.NDArray[np.intp]] = []
    for pages in np.unique(records["pages"]):
        rows = np.flatnonzero(records["pages"] == pages)
        # One key a slot; the sort is stable, so the last of equal keys is the last that was appended.
        order = rows[np.argsort(records["index"][rows], kind="stable")]
        index = records["index"][order]
        last = np.ones(len(order), dtype=bool)
        last[:-1] = index[1:] != index[:-1]
        keep.append(order[last])
    found = np.sort(np.concatenate(keep)) if keep else np.empty(0, dtype=np.intp)
    live: npt.NDArray[np.intp] = found[records["kind"][found] == PUT]
    return live


@dataclass(slots=True, frozen=True)
class Replay:
    """What the files say, before anybody has looked at a slot.

    `records`: the live put records in the order of their appending. `namespaces`: tag → (fingerprint, descriptor).
    `dropped`: records and files not taken, by reason.
    """

    records: npt.NDArray[np.void]
    namespaces: dict[int, tuple[bytes, bytes]]
    dropped: Counter[str]


class Journal:
    """The journal, snapshot and namespace files of one directory. One thread appends; another may compact."""

    def __init__(self, folder: Folder, identity: bytes) -> None:
        # `append`, `rotate` and `close` are called by one thread at a time; only they change these.
        self._folder = folder
        self._identity = identity
        self._fd: int | None = None
        self._number = 0
        self._position = 0  # records durably appended to the open segment
        # Bytes of each closed segment: the appending thread adds entries, a compaction removes its own.
        self._closed: dict[int, int] = {}
        self._snapshot_bytes = 0
        self._known: set[bytes] = set()

    # -- reading

    def replay(self) -> Replay:
        """Read snapshot and segments; change nothing on disk. Damage costs the records it touched, never an error.

        Raises OSError where the directory itself cannot be read.
        """
        dropped: Counter[str] = Counter()
        snapshots, segments = self._files()
        covered = max(snapshots, default=0)
        parts = [self._read_if_can(self._snapshot(covered), -covered, dropped)] if snapshots else []
        self._snapshot_bytes = len(parts[0]) * RECORD_BYTES if parts else 0
        later = sorted(number for number in segments if number > covered)
        tail = [self._read_if_can(self._segment(number), number, dropped) for number in later]
        self._closed = {number: part.nbytes for number, part in zip(later, tail, strict=True)}
        self._number = max([covered, *segments], default=0)
        records = np.concatenate([*parts, *tail]) if parts or tail else np.empty(0, dtype=RECORD)
        live = records[newest(records)]
        namespaces: dict[int, tuple[bytes, bytes]] = {}
        for name in sorted(name for name in self._folder.names() if _NAMESPACE_NAME.fullmatch(name)):
            entry = _read_namespace(self._folder, name)
            if entry is None:
                dropped["damaged namespace"] += 1
            else:
                namespaces[namespace_tag(entry[0])] = entry
        self._known = {fingerprint for fingerprint, _ in namespaces.values()}
        return Replay(live, namespaces, dropped)

    def _files(self) -> tuple[list[int], list[int]]:
        def numbers(prefix: str) -> list[int]:
            numbered = re.compile(prefix + r"(\d{8})", re.ASCII)
            found = [match for match in map(numbered.fullmatch, names) if match]
            return [int(match[1]) for match in found if stat.S_ISREG(self._folder.stat(match[0]).st_mode)]

        names = self._folder.names()
        return numbers("snapshot-"), numbers("journal-")

    def _segment(self, number: int) -> str:
        return f"journal-{number:08d}"

    def _snapshot(self, number: int) -> str:
        return f"snapshot-{number:08d}"

    def _seed(self, number: int) -> int:
        return xxhash.xxh3_64_intdigest(self._identity + struct.pack("<q", number))

    def _read_if_can(self, name: str, number: int, dropped: Counter[str]) -> npt.NDArray[np.void]:
        try:
            return self._read(name, number, dropped)
        except OSError as error:
            dropped[f"unreadable {name}: {error.strerror}"] += 1
            return np.empty(0, dtype=RECORD)

    def _read(self, name: str, number: int, dropped: Counter[str]) -> npt.NDArray[np.void]:
        what = "snapshot" if number < 0 else "journal"
        content = read_whole(self._folder, name)
        records = np.frombuffer(content, dtype=RECORD, count=len(content) // RECORD_BYTES)
        torn = len(content) % RECORD_BYTES != 0
        seed = self._seed(number)
        good = np.empty(len(records), dtype=bool)
        for first in range(0, len(records), _CHUNK):
            chunk = records[first : first + _CHUNK]
            good[first : first + _CHUNK] = record_checksums(chunk, seed, first) == chunk["checksum"]
        good &= (records["kind"] == PUT) | (records["kind"] == REMOVE)
        sound = np.flatnonzero(good)
        end = int(sound[-1]) + 1 if len(sound) else 0
        damaged = end - len(sound)
        if damaged:
            dropped[f"damaged {what} record"] += damaged
        if torn or end < len(records):
            dropped[f"torn {what} tail"] += len(records) - end + torn
        return records if len(sound) == len(records) else records[sound]

    # -- appending

    def append(self, records: bytearray) -> None:
        """Make these records durable, in order; after an OSError none counts, and the next append begins a new segment.

        A kernel may call dirty pages clean after a failed sync, so that file is never trusted to a later sync.
        """
        array = np.frombuffer(records, dtype=RECORD)
        if self._fd is None:
            self.rotate()
        assert self._fd is not None
        array["checksum"] = record_checksums(array, self._seed(self._number), self._position)
        try:
            write_whole(self._folder, self._fd, records, self._position * RECORD_BYTES)
            self._folder.sync_data(self._fd)
        except OSError:
            self._end_segment()
            raise
        self._position += len(array)

    def rotate(self) -> None:
        """Begin a new segment; its name is durable when this returns."""
        self._end_segment()
        number = self._number + 1
        fd = self._folder.open(self._segment(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._fd, self._number, self._position = fd, number, 0
        self._folder.sync()

    def _end_segment(self) -> None:
        if self._fd is not None:
            self._closed[self._number] = self._position * RECORD_BYTES
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                # All that counts in it was synced; a sick device may refuse even this.
                self._folder.close_file(fd)

    def rebind(self, folder: Folder) -> None:
        """Go on in the same directory, opened anew after it was away; the next append begins a new segment."""
        self._end_segment()
        self._folder = folder
        snapshots, segments = self._files()
        self._number = max([self._number, *snapshots, *segments])

    def rewrite(self, records: npt.NDArray[np.void]) -> None:
        """Replace all records by these, in this order; only while nothing is being appended.

        A crash at any point leaves the old records or the new ones whole.
        """
        self._end_segment()
        snapshots, segments = self._files()
        number = max([self._number, *snapshots, *segments]) + 1
        self._write_snapshot(number, records)
        self._number = number
        self._closed.clear()
        self.sweep()

    def add_namespace(self, fingerprint: bytes, descriptor: bytes) -> None:
        """Make a namespace's descriptor durable, once; call before the first record that carries its tag."""
        if fingerprint in self._known:
            return
        checksum = xxhash.xxh3_64_intdigest(fingerprint + descriptor)
        head = _NAMESPACE.pack(_NAMESPACE_MAGIC, len(descriptor), fingerprint, checksum)
        write_durably(self._folder, f"namespace-{fingerprint.hex()}", head + descriptor)
        self._known.add(fingerprint)

    def forget_namespaces(self, keep: set[bytes]) -> None:
        """Delete the files of namespaces that no record needs any more; only while nothing is being appended."""
        wanted = {f"namespace-{fingerprint.hex()}" for fingerprint in keep}
        for name in self._folder.names():
            if name.startswith("namespace-") and name not in wanted:
                self._folder.unlink(name)
        self._known &= keep

    # -- compaction

    @property
    def size(self) -> int:
        """Bytes of all segments that the next start would replay on top of the snapshot."""
        closed = sum(list(self._closed.values()))
        return closed if self._fd is None else closed + self._position * RECORD_BYTES

    @property
    def snapshot_bytes(self) -> int:
        return self._snapshot_bytes

    def due(self, least: int, segments: int) -> bool:
        """Whether there are more than `segments` closed segments, or all have outgrown `least` bytes and twice the
        snapshot."""
        return len(self._closed) > segments or self.size > max(least, 2 * self._snapshot_bytes)

    def compact(self, up_to: int) -> None:
        """Merge the snapshot and the segments numbered up to `up_to`, all closed, into a new snapshot; delete the old.

        A crash at any point leaves either the old files or the new snapshot whole; what is left over is swept at the
        next start. Raises OSError with the old files in place.
        """
        snapshots, segments = self._files()
        covered = max(snapshots, default=0)
        merged = [number for number in sorted(segments) if covered < number <= up_to]
        if merged:
            lost: Counter[str] = Counter()
            parts = [self._read(self._snapshot(covered), -covered, lost)] if snapshots else []
            tail = [self._read(self._segment(number), number, lost) for number in merged]
            records = np.concatenate([*parts, *tail])
            live = records[newest(records)]
            self._write_snapshot(up_to, live)
            for number in merged:
                self._closed.pop(number, None)
        self.sweep()

    def _write_snapshot(self, number: int, records: npt.NDArray[np.void]) -> None:
        seed = self._seed(-number)
        for first in range(0, len(records), _CHUNK):
            chunk = records[first : first + _CHUNK]
            chunk["checksum"] = record_checksums(chunk, seed, first)
        write_durably(self._folder, self._snapshot(number), records.view(np.uint8).data if len(records) else b"")
        self._snapshot_bytes = records.nbytes

    @property
    def number(self) -> int:
        """Number of the newest segment."""
        return self._number

    def sweep(self) -> int:
        """Delete what a snapshot has made superfluous and what dead writers left; returns the number of files."""
        snapshots, segments = self._files()
        covered = max(snapshots, default=0)
        stale = [self._snapshot(number) for number in snapshots if number < covered]
        stale += [self._segment(number) for number in segments if number <= covered]
        for name in stale:
            self._folder.unlink(name)
        return len(stale)

    def close(self) -> None:
        """Close the open segment; everything appended is durable already."""
        self._end_segment()


def _read_namespace(folder: Folder, name: str) -> tuple[bytes, bytes] | None:
    """Fingerprint and descriptor, or None for a file that does not prove itself."""
    try:
        content = bytes(read_whole(folder, name, _NAMESPACE.size + MAX_DESCRIPTOR + 1))
    except OSError:
        return None
    if len(content) < _NAMESPACE.size:
        return None
    magic, length, fingerprint, checksum = _NAMESPACE.unpack_from(content)
    descriptor = content[_NAMESPACE.size :]
    if magic != _NAMESPACE_MAGIC or len(descriptor) != length:
        return None
    if xxhash.xxh3_64_intdigest(fingerprint + descriptor) != checksum or name != f"namespace-{fingerprint.hex()}":
        return None
    return fingerprint, descriptor
