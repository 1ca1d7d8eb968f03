"""What lies in each slot of a pool, told in shared memory that outlives the daemon: for a start after a kill.

The descriptor is given to a keeper (systemd's file descriptor store) together with the pool's. A daemon that is started
after a crash gets both back and reads which slots held whole blocks, with a checksum of their bytes, and which ones
somebody may still be writing.

The rule: a record's state is written last and cleared first, so a process that is killed between any two instructions
leaves a record that is true or none. A block counts only when its bytes give the checksum in its record.

Layout: a header page, the descriptors of spaces (opaque here), a table of processes that may write into slots, then a
record for each page of the pool where a slot can begin. Records that are never used take no memory. All changes belong
to the loop's thread.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from kvcascade.config.errors import ProtocolError

from .memory import SharedMemory

# State of a record. HELD: somebody may be writing there. LANDED: a whole block. SEALED: with the checksum of its bytes.
NOTHING, HELD, LANDED, SEALED = range(4)

_MAGIC: Final = b"KVCLEDG1"
_HEADER: Final = struct.Struct("<8sQQQQ")  # magic, pages, slab bytes, bytes of spaces, whether writers were left out
_HEADER_BYTES: Final = 4096
_SPACES_BYTES: Final = 4 << 20
_SPACE: Final = struct.Struct("<IQ")  # length, xxh3 of the descriptor that follows
_WRITERS: Final = 4096
_WRITER: Final = np.dtype([("token", "u1", 16), ("pid", "<u4"), ("uid", "<u4"), ("started", "<u8"), ("used", "<u4"),
                           ("rest", "u1", 28)])  # fmt: skip
_RECORD: Final = np.dtype([("state", "u1"), ("has_parent", "u1"), ("rest", "u1", 2), ("space", "<u4"),
                           ("slot_bytes", "<u4"), ("rest2", "u1", 4), ("stamp", "<u8"), ("checksum", "<u8"),
                           ("key", "<u8", 4), ("parent", "<u8", 4)])  # fmt: skip
_RECORDS_AT: Final = _HEADER_BYTES + _SPACES_BYTES + _WRITERS * _WRITER.itemsize

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Writing:
    """A process that could write into slots; `started` is its start time in clock ticks, 0 where it was not known."""

    token: bytes
    pid: int
    uid: int
    started: int

    def pidfd(self) -> int | None:
        """A pidfd of it, the caller's; None where there is none to be had."""
        try:
            return os.pidfd_open(self.pid) if self.pid > 0 else None
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Records:
    """The records in use, one entry each."""

    pages: U32
    state: U8
    space: U32
    slot_bytes: U32
    stamps: U64
    checksums: U64
    keys: U64  # (n, 4)
    parents: U64  # (n, 4)
    has_parent: NDArray[np.bool_]


class Ledger:
    """The records of a pool of `pages` pages; `memory` is that of an earlier daemon's."""

    def __init__(self, pages: int, slab_bytes: int, memory: SharedMemory | None = None) -> None:
        self.pages: Final = pages
        self.slab_bytes: Final = slab_bytes
        self.memory: Final = memory or SharedMemory("kvcascade-ledger", _size(pages))
        array = self.memory.array()
        self._header = array[:_HEADER_BYTES]
        self._spaces = array[_HEADER_BYTES : _HEADER_BYTES + _SPACES_BYTES]
        self._writers = array[_HEADER_BYTES + _SPACES_BYTES : _RECORDS_AT].view(_WRITER)
        self._records = array[_RECORDS_AT : _RECORDS_AT + pages * _RECORD.itemsize].view(_RECORD)
        self._spaces_used = 0
        self.writers_left_out = False
        self._numbers: dict[bytes, int] = {}
        self._places: dict[bytes, int] = {}
        self._free_places = list(range(_WRITERS))[::-1]
        if memory is None:
            self._write_header()

    @classmethod
    def adopt(cls, fd: int, size: int) -> "Ledger":
        """That of an earlier daemon, by its descriptor, which is taken over; ProtocolError when it is none of ours."""
        memory = SharedMemory.adopt(fd, size)
        try:
            magic, pages, slab_bytes, used, left_out = _HEADER.unpack_from(memory.array()[: _HEADER.size].tobytes())
            if magic != _MAGIC or _size(pages) != size or used > _SPACES_BYTES:
                raise ProtocolError("the ledger is of another version")
            self = cls(pages, slab_bytes, memory)
            self._spaces_used, self.writers_left_out = used, bool(left_out)
            self._numbers = {descriptor: number for number, descriptor in enumerate(self.spaces())}
            self._places = {self._writers["token"][place].tobytes(): place for place in self._places_used()}
            self._free_places = [place for place in range(_WRITERS)[::-1] if not self._writers["used"][place]]
        except BaseException:
            # The descriptor is the caller's again.
            memory.disown()
            raise
        return self

    def _write_header(self) -> None:
        packed = _HEADER.pack(_MAGIC, self.pages, self.slab_bytes, self._spaces_used, int(self.writers_left_out))
        self._header[: len(packed)] = np.frombuffer(packed, np.uint8)

    def close(self) -> None:
        del self._header, self._spaces, self._writers, self._records
        self.memory.close()

    # --- spaces

    def space(self, descriptor: bytes) -> int | None:
        """The number of a space, given at first use; None when no more can be kept."""
        number = self._numbers.get(descriptor)
        if number is not None:
            return number
        entry = _SPACE.pack(len(descriptor), xxhash.xxh3_64_intdigest(descriptor)) + descriptor
        end = self._spaces_used + len(entry)
        if end > _SPACES_BYTES:
            return None
        self._spaces[self._spaces_used : end] = np.frombuffer(entry, np.uint8)
        self._spaces_used = end
        self._write_header()
        return self._numbers.setdefault(descriptor, len(self._numbers))

    def spaces(self) -> Iterator[bytes]:
        """The descriptors, in the order of their numbers. ProtocolError for what was not written here."""
        at, whole = 0, self._spaces[: self._spaces_used].tobytes()
        while at < len(whole):
            if at + _SPACE.size > len(whole):
                raise ProtocolError("the ledger's spaces are damaged")
            length, digest = _SPACE.unpack_from(whole, at)
            at += _SPACE.size
            descriptor = whole[at : at + length]
            if xxhash.xxh3_64_intdigest(descriptor) != digest:
                raise ProtocolError("the ledger's spaces are damaged")
            yield descriptor
            at += length

    # --- records

    def hold(self, pages: U32, space: int, slot_bytes: int) -> None:
        """Slots that somebody will be writing."""
        self._records["state"][pages] = NOTHING
        self._records["space"][pages] = space
        self._records["slot_bytes"][pages] = slot_bytes
        self._records["state"][pages] = HELD

    def land(
        self,
        pages: U32,
        space: int,
        slot_bytes: int,
        keys: U64,
        parents: U64,
        has_parent: NDArray[np.bool_],
        stamps: U64,
    ) -> None:
        """Slots that hold whole blocks of a space."""
        records = self._records
        records["state"][pages] = NOTHING
        records["space"][pages] = space
        records["slot_bytes"][pages] = slot_bytes
        records["key"][pages] = keys
        records["parent"][pages] = parents
        records["has_parent"][pages] = has_parent
        records["stamp"][pages] = stamps
        records["state"][pages] = LANDED

    def seal(self, pages: U32, checksums: U64) -> None:
        """Checksums of blocks that have landed and are still there."""
        self._records["checksum"][pages] = checksums
        self._records["state"][pages] = SEALED

    def states(self, pages: U32) -> U8:
        states: U8 = self._records["state"][pages]
        return states

    def clear(self, pages: ArrayLike) -> None:
        """Slots that are free; said before they are handed on."""
        self._records["state"][np.asarray(pages, np.int64)] = NOTHING

    def records(self) -> Records:
        """What an earlier daemon left. Reads only the parts that were ever written."""
        found = [np.flatnonzero(self._records["state"][first:end]) + first for first, end in self._written()]
        pages = np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)
        records = self._records[pages]
        return Records(
            pages=pages.astype(np.uint32),
            state=records["state"].copy(),
            space=records["space"].astype(np.uint32),
            slot_bytes=records["slot_bytes"].astype(np.uint32),
            stamps=records["stamp"].astype(np.uint64),
            checksums=records["checksum"].astype(np.uint64),
            keys=records["key"].astype(np.uint64),
            parents=records["parent"].astype(np.uint64),
            has_parent=records["has_parent"] != 0,
        )

    def _written(self) -> Iterator[tuple[int, int]]:
        """Ranges of records that may have been written: to read a hole would make memory of it."""
        at, end = _RECORDS_AT, _RECORDS_AT + self.pages * _RECORD.itemsize
        while at < end:
            try:
                start = os.lseek(self.memory.fd, at, os.SEEK_DATA)
            except OSError:  # nothing but a hole
                return
            at = min(os.lseek(self.memory.fd, start, os.SEEK_HOLE), end)
            if start < end:
                first = (start - _RECORDS_AT) // _RECORD.itemsize
                yield first, -(-(at - _RECORDS_AT) // _RECORD.itemsize)

    # --- writers

    def add_writer(self, writing: Writing) -> None:
        """A process that may write into HELD slots from now on."""
        if not self._free_places:
            self.writers_left_out = True
            self._write_header()
            return
        place = self._free_places.pop()
        entry = self._writers[place : place + 1]
        entry["token"] = np.frombuffer(writing.token, np.uint8)
        entry["pid"], entry["uid"], entry["started"] = writing.pid, writing.uid, writing.started
        entry["used"] = 1
        self._places[writing.token] = place

    def remove_writer(self, token: bytes) -> None:
        """It is dead, or has said that it writes no more."""
        place = self._places.pop(token, None)
        if place is not None:
            self._writers["used"][place] = 0
            self._free_places.append(place)

    def _places_used(self) -> list[int]:
        used: list[int] = np.flatnonzero(self._writers["used"]).tolist()
        return used

    def writers(self) -> list[Writing]:
        return [
            Writing(one["token"].tobytes(), int(one["pid"]), int(one["uid"]), int(one["started"]))
            for one in self._writers[self._places_used()]
        ]


def digests(places: Iterable[U8]) -> U64:
    """The checksums of these bytes, for a data thread: the GIL is free while they are read."""
    return np.array([xxhash.xxh3_64_intdigest(place.data) for place in places], dtype=np.uint64)


def _size(pages: int) -> int:
    return -(-(_RECORDS_AT + pages * _RECORD.itemsize) // 4096) * 4096
