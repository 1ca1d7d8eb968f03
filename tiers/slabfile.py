"""Slab files: the disk tier's slots, who holds which, and the calls that move a block's bytes to and from them.

One file a size class, cut in equal slots: a header page, then the payload rounded up to pages.

    0      magic, version, group, has parent, length, token count, payload checksum, stamp, namespace, hash, parent
    136    token ids, packed little-endian u32, where they fit
    4088   xxh3_64 of the 4088 bytes before
    4096   payload

The rule: a slot proves what it holds. A read compares the whole key, the length and two checksums before its bytes
count, so that a slot that was torn, flipped, swapped or handed on is a miss with a reason, whatever the journal said.

Bookkeeping belongs to the loop's thread and does no IO; the transfers run in IO threads and touch no bookkeeping.
"""

import errno
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from .folder import Folder

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

PAGE: Final = 4096
HASH_BYTES: Final = 32

# One call moves at most this much, so that a long batch still spreads over the IO threads; 4 MiB already reaches the
# device's speed. The vector has up to three parts a slot and the kernel takes 1024.
CALL_BYTES: Final = 4 << 20
CALL_SLOTS: Final = 256

_MAGIC: Final = b"KVCSSLOT"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sHBBIQQII32s32s32s")
_SEAL: Final = struct.Struct("<Q")
_SEALED: Final = PAGE - _SEAL.size
MAX_TOKENS: Final = (_SEALED - _HEADER.size) // 4

_ERRNO_NAMES: Final = frozenset(errno.errorcode.values())

# States of a slot. HELD: handed out, no record names it. RECORDED: a put record was queued, so freeing needs another.
FREE: Final = 0
HELD: Final = 1
RECORDED: Final = 2

# A search for free slots looks at this many at a time: 5 us each when full, 100 us when empty.
_WINDOW: Final = 1 << 16
_WINDOWS_FOR_A_RUN: Final = 16


@dataclass(slots=True, frozen=True)
class BlockMeta:
    """Who a block is. `block_hash` and `parent` have at most 32 bytes, `parent` none for a chain's first block;
    `tokens` are packed little-endian u32, kept in the slot's header when there are at most `MAX_TOKENS`."""

    namespace: bytes
    block_hash: bytes
    parent: bytes
    group: int
    length: int
    stamp: int
    tokens: bytes = b""


@dataclass(slots=True, frozen=True)
class WriteJob:
    """Put `payload` (`meta.length` bytes, C-contiguous) in a slot. The payload is read until the awaited call ends."""

    slot: int
    meta: BlockMeta
    payload: memoryview | U8


@dataclass(slots=True, frozen=True)
class ReadJob:
    """Fetch this very block into `into` (`length` writable bytes, C-contiguous), which is written until the awaited
    call ends and holds garbage unless the job succeeded."""

    slot: int
    namespace: bytes
    block_hash: bytes
    group: int
    length: int
    into: memoryview | U8


@dataclass(slots=True, frozen=True)
class Header:
    """A slot's header page, its own checksum verified."""

    meta: BlockMeta
    checksum: int


def slot_size(length: int) -> int:
    """Bytes that a block of `length` bytes takes on disk: a header page and the payload rounded up to pages."""
    return PAGE + -(-length // PAGE) * PAGE


def errno_name(error: OSError) -> str:
    """The reason that an OSError becomes: ENOSPC, EIO, ..."""
    return errno.errorcode.get(error.errno or 0, "EIO")


def is_device_fault(reason: str) -> bool:
    """Whether a reason speaks of the device or the file system rather than of one slot's content."""
    return reason == "short write" or reason in _ERRNO_NAMES


def disproves(reason: str) -> bool:
    """Whether a reason means that the slot does not hold the block, rather than that it could not be read now."""
    return not is_device_fault(reason) and reason != "closed" and not reason.startswith("sick")


# -- header


def pack_header(page: memoryview, meta: BlockMeta, checksum: int) -> None:
    """Fill a header page."""
    tokens = meta.tokens if len(meta.tokens) <= 4 * MAX_TOKENS else b""
    end = _HEADER.size + len(tokens)
    numbers = (meta.group, bool(meta.parent), meta.length, checksum, meta.stamp, len(tokens) // 4, 0)
    _HEADER.pack_into(page, 0, _MAGIC, _VERSION, *numbers, meta.namespace, meta.block_hash, meta.parent)
    page[_HEADER.size : end] = tokens
    page[end:_SEALED] = bytes(_SEALED - end)
    _SEAL.pack_into(page, _SEALED, xxhash.xxh3_64_intdigest(page[:_SEALED]))


def unpack_header(page: memoryview) -> Header | str:
    """The header in a page, or why there is none."""
    fields = _HEADER.unpack_from(page)
    doubt = _doubt(page, fields)
    if doubt is not None:
        return doubt
    _, _, group, has_parent, length, checksum, stamp, count, _, namespace, block_hash, parent = fields
    tokens = bytes(page[_HEADER.size : _HEADER.size + 4 * count])
    meta = BlockMeta(namespace, block_hash, parent if has_parent else b"", group, length, stamp, tokens)
    return Header(meta, checksum)


def _doubt(page: memoryview, fields: tuple[Any, ...]) -> str | None:
    """Why a page, whose fields are these, is no header."""
    if fields[0] != _MAGIC:
        return "no block"
    if xxhash.xxh3_64_intdigest(page[:_SEALED]) != _SEAL.unpack_from(page, _SEALED)[0]:
        return "header checksum"
    if fields[1] != _VERSION or fields[7] > MAX_TOKENS:
        return "header version"
    return None


def claims(page: memoryview, job: ReadJob) -> str | int:
    """The checksum of the payload, if a header page names the very block that a job asks for; else why not."""
    # No objects are made of it: with small blocks they would cost as much as the checksum.
    fields = _HEADER.unpack_from(page)
    doubt = _doubt(page, fields)
    if doubt is not None:
        return doubt
    _, _, group, _, length, checksum, _, _, _, namespace, block_hash, _ = fields
    named = (
        block_hash == job.block_hash.ljust(HASH_BYTES, b"\0")
        and namespace == job.namespace
        and group == job.group
        and length == job.length
    )
    return int(checksum) if named else "foreign key"


# -- transfers


class Scratch:
    """An IO thread's own page-aligned memory: for each slot of a call a header page and one for the payload's tail."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * CALL_SLOTS * PAGE)
        view = memoryview(self._memory)
        self.headers = [view[2 * slot * PAGE : (2 * slot + 1) * PAGE] for slot in range(CALL_SLOTS)]
        self.tails = [view[(2 * slot + 1) * PAGE : (2 * slot + 2) * PAGE] for slot in range(CALL_SLOTS)]


def _as_bytes(buffer: memoryview | U8) -> U8:
    array = np.frombuffer(buffer, dtype=np.uint8) if isinstance(buffer, memoryview) else buffer
    return array.reshape(-1)


def _aligned(buffer: memoryview | U8) -> bool:
    return bool(_as_bytes(buffer).__array_interface__["data"][0] % PAGE == 0)


def _pages(length: int) -> U8:
    return np.frombuffer(mmap.mmap(-1, slot_size(length) - PAGE), dtype=np.uint8)


def write_slots(
    folder: Folder,
    fd: int,
    offset: int,
    jobs: Sequence[WriteJob],
    direct: bool,
    scratch: Scratch,
    *,
    copied: bool = False,
) -> list[str | None]:
    """Write adjacent slots from `offset` on in one call; a reason for each job that failed. Not yet durable.

    `direct`: the file is open with O_DIRECT, which takes no payload that does not begin on a page: refused one, all are
    copied first.
    """
    vector: list[memoryview] = []
    for position, job in enumerate(jobs):
        payload = _as_bytes(job.payload)
        header, tail = scratch.headers[position], scratch.tails[position]
        pack_header(header, job.meta, xxhash.xxh3_64_intdigest(payload.data))
        if copied:
            copy = _pages(job.meta.length)
            copy[: job.meta.length] = payload
            vector += [header, copy.data]
            continue
        whole = job.meta.length // PAGE * PAGE
        vector += [header, payload[:whole].data]
        if whole < job.meta.length:
            tail[: job.meta.length - whole] = payload[whole:].data
            tail[job.meta.length - whole :] = bytes(PAGE - job.meta.length + whole)
            vector.append(tail)
    try:
        written = folder.write(fd, vector, offset)
        reason = None if written == sum(slot_size(job.meta.length) for job in jobs) else "short write"
    except OSError as error:
        reason = errno_name(error)
    if reason == "EINVAL" and direct and not copied and not all(_aligned(job.payload) for job in jobs):
        return write_slots(folder, fd, offset, jobs, direct, scratch, copied=True)
    if reason is None or len(jobs) == 1:
        return [reason] * len(jobs)
    return _one_by_one_write(folder, fd, offset, jobs, direct, scratch)


def _one_by_one_write(
    folder: Folder, fd: int, offset: int, jobs: Sequence[WriteJob], direct: bool, scratch: Scratch
) -> list[str | None]:
    reasons: list[str | None] = []
    for job in jobs:
        reasons += write_slots(folder, fd, offset, [job], direct, scratch)
        offset += slot_size(job.meta.length)
    return reasons


def read_slots(
    folder: Folder,
    fd: int,
    offset: int,
    jobs: Sequence[ReadJob],
    direct: bool,
    scratch: Scratch,
    *,
    copied: bool = False,
) -> list[str | None]:
    """Read adjacent slots from `offset` on in one call; None for each job whose bytes are proven, else the reason."""
    vector: list[memoryview] = []
    copies: list[U8 | None] = []
    for position, job in enumerate(jobs):
        into = _as_bytes(job.into)
        vector.append(scratch.headers[position])
        if copied:
            copy = _pages(job.length)
            copies.append(copy)
            vector.append(copy.data)
            continue
        copies.append(None)
        whole = job.length // PAGE * PAGE
        vector.append(into[:whole].data)
        if whole < job.length:
            vector.append(scratch.tails[position])
    try:
        reached = folder.read(fd, vector, offset)
        failure = None
    except OSError as error:
        reached, failure = 0, errno_name(error)
    if failure == "EINVAL" and direct and not copied and not all(_aligned(job.into) for job in jobs):
        return read_slots(folder, fd, offset, jobs, direct, scratch, copied=True)
    reasons: list[str | None] = []
    for position, job in enumerate(jobs):
        size = slot_size(job.length)
        if reached >= size:
            reasons.append(_verify(scratch, position, job, copies[position]))
        elif len(jobs) == 1:
            reasons.append(failure or "short read")
        else:
            reasons += _one_by_one_read(folder, fd, offset, jobs[position:], direct, scratch)
            break
        reached -= size
        offset += size
    return reasons


def _one_by_one_read(
    folder: Folder, fd: int, offset: int, jobs: Sequence[ReadJob], direct: bool, scratch: Scratch
) -> list[str | None]:
    reasons: list[str | None] = []
    for job in jobs:
        reasons += read_slots(folder, fd, offset, [job], direct, scratch)
        offset += slot_size(job.length)
    return reasons


def _verify(scratch: Scratch, position: int, job: ReadJob, copy: U8 | None) -> str | None:
    checksum = claims(scratch.headers[position], job)
    if isinstance(checksum, str):
        return checksum
    into = _as_bytes(job.into)
    if copy is not None:
        into[:] = copy[: job.length]
    else:
        whole = job.length // PAGE * PAGE
        if whole < job.length:
            into[whole:] = np.frombuffer(scratch.tails[position], dtype=np.uint8)[: job.length - whole]
    return None if xxhash.xxh3_64_intdigest(into.data) == checksum else "payload checksum"


# -- bookkeeping


class SlabFile:
    """The slots of one size class: who holds which, and which have space set aside. No IO; the loop's thread only."""

    def __init__(self, name: str, slot_bytes: int) -> None:
        # `fd` is set by the IO thread that creates the file, before any slot is backed, and by `reopened`.
        self.name = name
        self.slot_bytes = slot_bytes
        self.fd: int | None = None
        self.end = 0  # slots [0, end) have been handed out or backed at least once
        self.grown = 0  # slots [0, grown) lie inside the file
        self.used = 0
        self.recorded = 0
        self._cursor = 0
        self._states: U8 = np.zeros(1024, dtype=np.uint8)
        self._backed: Bools = np.zeros(1024, dtype=bool)

    @property
    def free(self) -> int:
        """Free slots below `end`."""
        return self.end - self.used

    def states(self, indices: U32) -> U8:
        return self._states[indices]

    def restore(self, recorded: U32, slots_in_file: int, sparse: bool) -> None:
        """Take over a file found at the start: which slots hold blocks, and whether all of it is known to be backed."""
        self._make_room(slots_in_file)
        self.end = self.grown = slots_in_file
        self._states[recorded] = RECORDED
        self.used = self.recorded = len(recorded)
        self._backed[:slots_in_file] = not sparse
        self._backed[recorded] = True

    def reopened(self, fd: int | None, slots_in_file: int) -> None:
        """The file was opened anew, or is gone: who holds which slot stays, and nothing is known to be backed."""
        self.fd = fd
        self._make_room(slots_in_file)
        self.grown = slots_in_file
        self.end = max(self.end, slots_in_file)
        self._backed[:] = False

    def take(self, count: int, most: int) -> U32:
        """Hand out up to `count` free slots, HELD from now on, in ascending order; one run where there is one.

        Freed slots are reused in the order of their place, on from where the last search ended. `most`: slots that the
        file may ever have; fewer than `count` come back when these are all in use.
        """
        tail = max(0, most - self.end)
        found = self._find_run(count) if self.free >= count else None
        if found is None and tail < count:
            found = self._find(min(count, self.free))
        taken = found if found is not None else np.empty(0, dtype=np.int64)
        fresh = min(count - len(taken), tail)
        if fresh:
            self._make_room(self.end + fresh)
            taken = np.concatenate([taken, np.arange(self.end, self.end + fresh)])
            self.end += fresh
        if found is not None and len(found):
            self._cursor = int(found[-1]) + 1
        self._states[taken] = HELD
        self.used += len(taken)
        return np.sort(taken).astype(np.uint32)

    def record(self, indices: U32) -> None:
        """A put record of each of these HELD slots has been queued."""
        self._states[indices] = RECORDED
        self.recorded += len(indices)

    def give(self, indices: U32) -> U32:
        """Free slots; returns those whose removal must be recorded. Raises ValueError if one is free already."""
        states = self._states[indices]
        if len(np.unique(indices)) != len(indices) or not states.all():
            raise ValueError("slot freed twice")
        recorded: U32 = indices[states == RECORDED]
        self._states[indices] = FREE
        self.used -= len(indices)
        self.recorded -= len(recorded)
        return recorded

    def unbacked(self, indices: U32) -> U32:
        missing: U32 = indices[~self._backed[indices]]
        return missing

    def back(self, first: int, count: int) -> None:
        """Space has been set aside for slots [first, first + count)."""
        self._make_room(first + count)
        self.grown = max(self.grown, first + count)
        self.end = max(self.end, self.grown)
        self._backed[first : first + count] = True

    @property
    def backed(self) -> int:
        """Slots that have space set aside."""
        return int(np.count_nonzero(self._backed[: self.end]))

    def strip(self, count: int) -> list[tuple[int, int]]:
        """Take the space from up to `count` free slots; ranges (first, count) to punch out of the file."""
        loose = np.flatnonzero(self._backed[: self.end] & (self._states[: self.end] == FREE))[:count]
        self._backed[loose] = False
        return runs(loose)

    def check(self) -> list[str]:
        """Violations of the bookkeeping, in words; empty when all is well."""
        states = self._states[: self.end]
        problems = []
        if int(np.count_nonzero(states)) != self.used:
            problems.append(f"{self.name}: {int(np.count_nonzero(states))} slots held, {self.used} counted")
        if int(np.count_nonzero(states == RECORDED)) != self.recorded:
            problems.append(f"{self.name}: recorded slots miscounted")
        if self._states[self.end :].any():
            problems.append(f"{self.name}: slots held beyond the end")
        return problems

    def _make_room(self, slots: int) -> None:
        if slots > len(self._states):
            more = max(slots, 2 * len(self._states)) - len(self._states)
            self._states = np.concatenate([self._states, np.zeros(more, dtype=np.uint8)])
            self._backed = np.concatenate([self._backed, np.zeros(more, dtype=bool)])

    def _windows(self) -> list[tuple[int, int]]:
        """Windows [first, last) over all slots, from the cursor on and around."""
        if self._cursor >= self.end:
            self._cursor = 0
        bounds = [*range(self._cursor, self.end, _WINDOW), self.end]
        around = [*range(0, self._cursor, _WINDOW), self._cursor]
        return [*pairwise(bounds), *pairwise(around)]

    def _find_run(self, count: int) -> npt.NDArray[np.int64] | None:
        """`count` adjacent free slots near the cursor, if there are; a window's border may hide a run."""
        for first, last in self._windows()[:_WINDOWS_FOR_A_RUN]:
            free = np.flatnonzero(self._states[first:last] == FREE)
            if len(free) < count:
                continue
            starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            if len(starts):
                begin = first + int(free[starts[0]])
                return np.arange(begin, begin + count)
        return None

    def _find(self, count: int) -> npt.NDArray[np.int64]:
        """The next `count` free slots from the cursor on; there are that many."""
        parts: list[npt.NDArray[np.int64]] = []
        for first, last in self._windows():
            if count == 0:
                break
            free = first + np.flatnonzero(self._states[first:last] == FREE)[:count]
            parts.append(free)
            count -= len(free)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def runs(indices: npt.NDArray[np.integer]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges (first, count)."""
    if not len(indices):
        return []
    breaks = np.flatnonzero(np.diff(indices.astype(np.int64)) != 1) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(indices)]
    return [(int(indices[start]), end - start) for start, end in zip(starts, ends, strict=True)]
