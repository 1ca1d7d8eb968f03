"""One drive of the disk tier: blocks in slab files of one directory, found again after any end of the process.

The rule: a block counts only when its payload is durable and, after that, its record is; and whatever the records say,
its bytes count only when the slot itself proves them. So a crash, a full device or a flipped bit costs blocks, never
truth.

A sick drive is a state: what fails is counted by its reason and the drive left alone, longer each time; `watch` looks
whether it came back, whether the directory is still the one that was opened, and how much of the file system others
have left for it. A call that hangs keeps its thread and its caller's memory, and nothing else: what waits behind it is
withdrawn.

A directory (directory.py) holds a journal (journal.py) and one slab file a size class (slabfile.py). Which slot is free
is decided on the loop's thread without IO; payloads, checksums, syncs and space go through the tier's own threads.
Writers share syncs: while one group is being made durable the next gathers, since a sync costs 4-12 ms here whatever
its size. Their records are appended in the order in which `write` was called, whichever payload is on disk first: a
caller that writes a chain's head before its tail never leaves the tail alone behind.

IO goes by threads and not by io_uring: of some 200 ms of CPU a GB of 2 MiB blocks the checksum takes 63 and the kernel
60-90, io_uring with registered buffers took 27 (measured apart), and the device is the limit either way (0.9 of fio's
io_uring writing, 1.06 reading). What small blocks cost is Python, 10 us each, which it would not spare.

A slot may be handed on before the record of its removal is durable. A crash in between brings back the old record over
the new bytes, and the slot's header unmasks it: a miss. Waiting would put a sync before each store into a full tier.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import local
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import ConfigError, TierUnavailable

from .directory import (
    DIRECT,
    DirectoryReport,
    OldFormat,
    check_directory,
    discard_content,
    locate,
    lock,
    make_directory,
    open_folder,
    probe_direct,
    read_format,
    slab_name,
)
from .folder import Folder
from .journal import Journal, Replay, put_record, remove_record
from .slabfile import (
    CALL_BYTES,
    CALL_SLOTS,
    HASH_BYTES,
    HELD,
    PAGE,
    RECORDED,
    BlockMeta,
    ReadJob,
    Scratch,
    SlabFile,
    WriteJob,
    disproves,
    errno_name,
    is_device_fault,
    read_slots,
    runs,
    slot_size,
    write_slots,
)
from .workers import Workers, outlast

__all__ = [
    "HASH_BYTES",
    "BlockMeta",
    "DirectoryReport",
    "DiskTier",
    "ReadJob",
    "Recovery",
    "WriteJob",
    "check_directory",
    "disproves",
    "slot_size",
]

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

# Space is set aside this far ahead; one fallocate of it takes milliseconds, and a file in few extents reads faster.
_GROW_BYTES: Final = 256 << 20
# Replaying 64 MiB of records, 600,000 of them, takes about half a second.
_COMPACT_BYTES: Final = 64 << 20
_COMPACT_SEGMENTS: Final = 16
_BACKOFF_FIRST: Final = 1.0
_BACKOFF_MOST: Final = 60.0
# A healthy device answers within milliseconds, a busy network file system within seconds.
_STALLED_SECONDS: Final = 10.0

# More than are read at once; a drive that answers nothing is the drive's fault, whatever the slots.
_MOST_SUSPECTS: Final = 10_000

# A slot number is an extent and a place in it; extents are dealt to slab files as they grow.
EXTENT_BITS: Final = 16
_EXTENT_SLOTS: Final = 1 << EXTENT_BITS
EXTENTS: Final = _EXTENT_SLOTS - 1  # the last is left out, so that no slot is NO_SLOT

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Recovery:
    """What a directory held at the start; row i of each array is one block, in the order in which they were written.

    `namespaces`: (fingerprint, descriptor); `ns`: (n,) u32, index into it. `hashes`, `parents`: (n, 32) u8, padded with
    zeros. `has_parent`: (n,) bool. `group`: (n,) u8. `slot`, `length` (bytes): (n,) u32. `stamp`: (n,) u64 as it was
    written. `dropped`: records and files not taken, by reason. `seconds`: what it took.
    """

    namespaces: list[tuple[bytes, bytes]]
    ns: U32
    hashes: U8
    parents: U8
    has_parent: npt.NDArray[np.bool_]
    group: U8
    slot: U32
    length: U32
    stamp: U64
    dropped: dict[str, int]
    seconds: float

    def __len__(self) -> int:
        return len(self.slot)


class _Health:
    """Whether one direction of IO is left alone: a failure starts a pause, the next doubles it, a success ends it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0
        self.reason: str | None = None
        self.recoveries = 0

    def failed(self, reason: str) -> None:
        now = self._clock()
        # Calls that were under way together fail together; they count as one failure.
        if self.reason is None or now >= self._until:
            self._pause = min(_BACKOFF_MOST, 2 * self._pause) if self._pause else _BACKOFF_FIRST
            self._until = now + self._pause
        self.reason = reason

    def worked(self) -> None:
        self.recoveries += self.reason is not None
        self.reason, self._pause, self._until = None, 0.0, 0.0

    @property
    def due(self) -> bool:
        """Sick, and its pause is over."""
        return self.reason is not None and self._clock() >= self._until

    def refusal(self) -> str | None:
        return f"sick: {self.reason}" if self.reason is not None and self._clock() < self._until else None


# A file, places in it in ascending order, and which job each is for.
_Placed = tuple[SlabFile, U32, npt.NDArray[np.intp]]


@dataclass(slots=True, frozen=True)
class _Seen:
    """What a look at the directory found: why it cannot be used, else the space that others leave; how trials went."""

    away: str | None = None
    available: int | None = None
    write: str | None = None
    read: str | None = None


@dataclass(slots=True, frozen=True)
class _Commit:
    """Records that become durable together, after the payloads in `files`; `done` tells the writer that waits."""

    records: bytes
    files: frozenset[SlabFile] = frozenset()
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    done: asyncio.Future[str | None] | None = None


class DiskTier:
    """One directory of blocks, under a limit.

    Life: `open` (blocking, any thread), then from the loop's thread everything else, `close` at the end. `allocate` →
    `write` → `free`; a slot that was allocated is the caller's until it frees it, whether or not the write worked.
    """

    def __init__(
        self,
        directory: Path,
        capacity: int,
        *,
        reserve: int = 0,
        threads: int = 4,
        discard_old: bool = False,
        clock: Callable[[], float] = time.monotonic,
        folder: Callable[[Path], Folder] = Folder,
    ) -> None:
        """Does no IO.

        Args:
            capacity: bytes on disk for slots, header pages included.
            reserve: bytes of the file system that stay free whoever takes them: `limit` is what this leaves.
            discard_old: empty a directory that an earlier version wrote, instead of refusing it.
            folder: how the directory is reached; tests put faults there.
        """
        if capacity <= 0:
            raise ConfigError(f"disk.capacity: {capacity} bytes of {directory} hold nothing")
        self.directory = Path(directory)
        self.capacity = capacity
        self._reserve = reserve
        self._discard_old = discard_old
        self._clock = clock
        self._thread_count = threads
        self._open_folder = folder
        # Set by `open` and `close`; the descriptors of slab files by the IO thread that creates them.
        self._lock_fd: int | None = None
        self._workers: Workers | None = None
        self._syncer: Workers | None = None
        self._watcher: Workers | None = None
        self._mode = DIRECT
        self._closed = False
        self._identity = b""
        self._opened = False
        # Also by the watching thread, while no call is under way.
        self._folder: Folder
        self._journal: Journal
        # The loop's thread alone.
        self._files: dict[int, SlabFile] = {}
        self._by_id: list[SlabFile] = []
        self._extents: dict[int, U32] = {}  # by slot size: the extents of its file, in the order of the file
        self._extent_file = np.zeros(EXTENTS, dtype=np.uint32)
        self._extent_base = np.zeros(EXTENTS, dtype=np.uint32)
        self._extent_count = 0
        self._namespaces: dict[bytes, bytes] = {}
        self._queue: list[_Commit] = []
        self._committing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._reshaping = asyncio.Lock()
        self._last_write: asyncio.Future[None] | None = None  # done once its records, and those before, are queued
        self._given_up = asyncio.Event()  # set for a moment when what waits behind a call that hangs is given up
        self._calls = 0  # writes and reads under way
        self._idle = asyncio.Event()
        self._idle.set()
        self._writes = _Health(clock)
        self._reads = _Health(clock)
        self._limit = capacity
        self._away: str | None = None  # why the directory is not to be used, until `watch` has opened it anew
        self._looking: asyncio.Future[_Seen] | None = None
        # Slots that could not be read while nothing else could: by slot, how often reading had recovered before.
        self._suspects: dict[int, int] = {}
        self._recovered: dict[str, Any] = {}
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._scratch = local()

    # -- start

    def open(self) -> Recovery:
        """Take the directory, replay its records, sweep what dead writers left; reads no payload.

        Raises ConfigError, naming disk.directory, when it is a file, cannot be written, holds something else or another
        version, or belongs to a live process; TierUnavailable when the file system fails.
        """
        began = time.monotonic()
        if self._lock_fd is not None or self._closed:
            raise RuntimeError("a DiskTier is opened once")
        make_directory(self.directory)
        try:
            self._folder = open_folder(self.directory, self._open_folder)
        except OSError as error:
            raise TierUnavailable(f"disk.directory {self.directory}: {error.strerror or error}") from error
        self._journal = Journal(self._folder, b"")
        self._opened = True
        try:
            self._lock_fd = lock(self._folder)
            self._identity, discarded = self._take_format()
            for name in self._folder.names():
                if name.endswith(".tmp"):
                    self._folder.unlink(name)
            self._mode = probe_direct(self._folder)
            self._journal = Journal(self._folder, self._identity)
            replay = self._journal.replay()
            replay.dropped.update(discarded)
            recovery = self._restore(replay, began)
            self._journal.sweep()
            self._journal.forget_namespaces({fingerprint for fingerprint, _ in recovery.namespaces})
            self._set_limit(self._folder.space().available)
        except OSError as error:
            self.abandon()
            raise TierUnavailable(f"disk.directory {self.directory}: {error.strerror or error}") from error
        except BaseException:
            self.abandon()
            raise
        self._workers = Workers("kvcascade-disk", self._thread_count, self._clock)
        self._syncer = Workers("kvcascade-disk-sync", 1, self._clock)
        self._watcher = Workers("kvcascade-disk-watch", 1, self._clock)
        self._recovered = {
            "blocks": len(recovery),
            "dropped": dict(recovery.dropped),
            "seconds": round(recovery.seconds, 3),
        }
        return recovery

    def abandon(self) -> None:
        """Undo `open`, before anything else was done; it may be tried again."""
        for workers in (self._workers, self._syncer, self._watcher):
            if workers is not None:
                workers.dismiss()
        self._workers = self._syncer = self._watcher = None
        self._release()
        self._files.clear()
        self._by_id.clear()
        self._extents.clear()
        self._extent_count = 0
        self._namespaces.clear()

    def _take_format(self) -> tuple[bytes, dict[str, int]]:
        """The directory's id, and what was cleaned away of an earlier version's."""
        try:
            return read_format(self._folder, create=True), {}
        except OldFormat as old:
            if not self._discard_old:
                raise
            count = discard_content(self._folder)
            _log.warning("content of an earlier version discarded directory=%s format=%d", self.directory, old.version)
            return read_format(self._folder, create=True), {f"files of format {old.version}": count}

    def _restore(self, replay: Replay, began: float) -> Recovery:
        located = locate(self._folder, replay)
        records = located.records
        slots = np.empty(len(records), dtype=np.uint32)
        for slot_bytes, size in located.sizes.items():
            file = self._file(slot_bytes)
            rows = np.flatnonzero(records["pages"] == slot_bytes // PAGE)
            if not len(rows):
                # Nothing in it is known any more: its space is worth more than its name.
                self._folder.unlink(file.name)
                continue
            file.fd = self._open_file(self._folder, file.name)
            index = records["index"][rows]
            sparse = self._folder.fstat(file.fd).st_blocks * 512 < size // slot_bytes * slot_bytes
            file.restore(index, size // slot_bytes, sparse)
            slots[rows] = self._encode(file, index)
        self._namespaces = dict(located.namespaces)
        return Recovery(
            namespaces=located.namespaces,
            ns=located.ns,
            hashes=np.ascontiguousarray(records["hash"]),
            parents=np.ascontiguousarray(records["parent"]),
            has_parent=records["has_parent"].astype(bool),
            group=np.ascontiguousarray(records["group"]),
            slot=slots,
            length=np.ascontiguousarray(records["length"]),
            stamp=np.ascontiguousarray(records["stamp"]),
            dropped=dict(located.dropped),
            seconds=time.monotonic() - began,
        )

    def _open_file(self, folder: Folder, name: str, flags: int = 0) -> int:
        """Open a file for reading and writing, for direct IO if that is to be had."""
        if self._mode == DIRECT:
            try:
                return folder.open(name, os.O_RDWR | os.O_DIRECT | flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._give_up_direct()
        return folder.open(name, os.O_RDWR | flags)

    def _give_up_direct(self) -> None:
        self._mode = "buffered: direct IO gave EINVAL"
        _log.warning("direct IO given up reason=EINVAL directory=%s", self.directory)

    # -- space: the loop's thread, no IO

    @property
    def used(self) -> int:
        """Bytes of all slots handed out, header pages included."""
        return sum(file.used * file.slot_bytes for file in self._by_id)

    @property
    def blocks(self) -> int:
        """Slots that hold a block, or will once the sync under way has ended."""
        return sum(file.recorded for file in self._by_id)

    @property
    def limit(self) -> int:
        """Bytes that slots may take now: the capacity, or less where others have filled the file system so far that its
        reserve begins. `used` may be above it until blocks have been freed."""
        return self._limit

    @property
    def pending(self) -> int:
        """Writes and reads under way."""
        return self._calls

    def room(self, length: int) -> int:
        """How many blocks of `length` bytes `allocate` would grant now, were the tier well."""
        return max(0, self._limit - self.used) // slot_size(length)

    def _set_limit(self, available: int) -> None:
        self._limit = max(0, min(self.capacity, self._set_aside_bytes() + available - self._reserve))

    def sizes_of(self, slots: U32) -> U64:
        """Bytes of each slot, its header page included."""
        sizes = np.array([file.slot_bytes for file in self._by_id], dtype=np.uint64)
        found: U64 = sizes[self._extent_file[slots >> np.uint32(EXTENT_BITS)]] if len(sizes) else sizes[:0]
        return found

    def allocate(self, length: int, count: int) -> U32:
        """Slots for up to `count` blocks of `length` bytes, ascending, adjacent on disk where possible.

        Fewer, down to none, come back when the limit is reached or the tier is left alone because it is sick.
        """
        if length <= 0 or length >= 1 << 32:
            raise ValueError(f"length {length} cannot be a block's")
        if self._closed or self._write_refusal() is not None:
            return np.empty(0, dtype=np.uint32)
        file = self._file(slot_size(length))
        count = min(count, self.room(length))
        if count <= 0:
            return np.empty(0, dtype=np.uint32)
        return self._encode(file, file.take(count, self.capacity // file.slot_bytes))

    def free(self, slots: U32 | Sequence[int]) -> None:
        """Give slots back; they may be handed out again at once. No write or read of them may be under way.

        The removal is recorded with the next group commit, which this starts when it runs on a loop. Raises ValueError,
        with nothing freed of that slot's file, for a slot that is free or not of this tier.
        """
        removals: list[bytes] = []
        for file, indices, _ in self._decode(slots):
            pages = file.slot_bytes // PAGE
            removals += [remove_record(pages, index) for index in file.give(indices).tolist()]
        if removals:
            self._queue.append(_Commit(b"".join(removals)))
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                self._start_committing()

    def register_namespace(self, fingerprint: bytes, descriptor: bytes) -> None:
        """Let blocks of a namespace be written; what it stands for is stored with the first of them."""
        if len(fingerprint) != HASH_BYTES:
            raise ValueError("a namespace fingerprint has 32 bytes")
        self._namespaces[fingerprint] = descriptor

    def _file(self, slot_bytes: int) -> SlabFile:
        file = self._files.get(slot_bytes)
        if file is None:
            file = SlabFile(slab_name(slot_bytes), slot_bytes)
            self._files[slot_bytes] = file
            self._extents[slot_bytes] = np.empty(0, dtype=np.uint32)
            self._by_id.append(file)
        return file

    def _encode(self, file: SlabFile, indices: U32) -> U32:
        """Slot numbers of places in a file."""
        if not len(indices):
            return np.empty(0, dtype=np.uint32)
        extents = self._extents[file.slot_bytes]
        missing = (int(indices.max()) >> EXTENT_BITS) + 1 - len(extents)
        if missing > 0:
            fresh = np.arange(self._extent_count, self._extent_count + missing, dtype=np.uint32)
            assert self._extent_count + missing <= EXTENTS, "out of slot numbers: over 4 * 10^9 slots"
            self._extent_file[fresh] = self._by_id.index(file)
            self._extent_base[fresh] = np.arange(len(extents), len(extents) + missing, dtype=np.uint32) << EXTENT_BITS
            self._extent_count += missing
            self._extents[file.slot_bytes] = extents = np.concatenate([extents, fresh])
        slots: U32 = extents[indices >> np.uint32(EXTENT_BITS)] << np.uint32(EXTENT_BITS)
        slots |= indices & np.uint32(_EXTENT_SLOTS - 1)
        return slots

    def _decode(self, slots: U32 | Sequence[int]) -> list[_Placed]:
        """Where slots lie: by file, in the order of the file."""
        numbers = np.asarray(slots, dtype=np.uint32)
        extents = numbers >> np.uint32(EXTENT_BITS)
        if len(extents) and int(extents.max()) >= self._extent_count:
            raise ValueError("slot not of this tier")
        owners = self._extent_file[extents]
        places = self._extent_base[extents] + (numbers & np.uint32(_EXTENT_SLOTS - 1))
        order = np.lexsort((places, owners))
        split = np.flatnonzero(np.diff(owners[order])) + 1
        groups = np.split(order, split) if len(order) else []
        decoded = []
        for positions in groups:
            file, indices = self._by_id[int(owners[positions[0]])], places[positions]
            if int(indices[-1]) >= file.end:
                raise ValueError("slot not of this tier")
            decoded.append((file, indices, positions))
        return decoded

    # -- health

    @property
    def state(self) -> str:
        """ok, sick (left alone, or only tried now and then) or closed."""
        if self._closed:
            return "closed"
        return "ok" if self.reason is None else "sick"

    @property
    def reason(self) -> str | None:
        """Why the tier is sick."""
        return self._away or self._stalled() or self._writes.reason or self._reads.reason

    @property
    def hangs(self) -> str | None:
        """Why it cannot be waited for: a call has not ended for long."""
        return self._stalled()

    def _stalled(self) -> str | None:
        threads = (self._workers, self._syncer, self._watcher)
        busy = [workers.longest() for workers in threads if workers is not None]
        longest = max(busy, default=0.0)
        return f"no answer from the device for {longest:.0f} s" if longest >= _STALLED_SECONDS else None

    def _write_refusal(self) -> str | None:
        whole = self._away or self._stalled()
        return f"sick: {whole}" if whole else self._writes.refusal()

    def _read_refusal(self) -> str | None:
        whole = self._away or self._stalled()
        return f"sick: {whole}" if whole else self._reads.refusal()

    @property
    def writable(self) -> bool:
        """Whether a write would be tried now: the tier is well, or its back-off is over."""
        return not self._closed and self._write_refusal() is None

    @property
    def readable(self) -> bool:
        """Whether a read would be tried now: the tier is well, or its back-off is over."""
        return not self._closed and self._read_refusal() is None

    # -- write

    async def write(self, jobs: Sequence[WriteJob]) -> list[str | None]:
        """Write blocks to slots that were allocated; for each None, once it outlives a power cut, or why it failed.

        No record of theirs comes before one of an earlier call; and where some jobs fail, none is recorded whose
        parent, earlier among them, is not. After a failure the slot is still the caller's to free, and no later start
        finds the block in it, save one whose bytes are whole. When cancelled, payloads are not read any more once the
        cancellation arrives; the blocks may be durable or not, and freeing their slots makes them gone. Raises
        ValueError for a job that contradicts its slot.
        """
        if not jobs:
            return []
        placed = self._decode([job.slot for job in jobs])
        self._validate_writes(jobs, placed)
        refusal = "closed" if self._closed else self._write_refusal()
        if refusal is not None:
            self.failures["left alone"] += len(jobs)
            return [refusal] * len(jobs)
        with self._call(), self._turn() as (earlier, turn):
            try:
                reasons, written, files = await self._write_payloads(jobs, placed)
                await self._await_turn(earlier)
                written = _without_orphans(jobs, reasons, written)
                done = self._make_durable(jobs, written, files)
                turn.set_result(None)
                failure = await asyncio.shield(done) if done is not None else None
            except TierUnavailable:
                return self._withdrawn(jobs, self.failures)
        for i, _ in written:
            reasons[i] = failure
        for reason in reasons:
            if reason is not None:
                self.failures[reason] += 1
                if reason != _ORPHAN:
                    self._writes.failed(reason)
        if failure is None:
            self.counters["written_blocks"] += len(written)
            self.counters["written_bytes"] += sum(jobs[i].meta.length for i, _ in written)
        return reasons

    @contextlib.contextmanager
    def _turn(self) -> Iterator[tuple[asyncio.Future[None] | None, asyncio.Future[None]]]:
        """The turn of the write that was called before, if it is not over, and this one's own, over at the latest when
        both have ended."""
        earlier, turn = self._last_write, asyncio.get_running_loop().create_future()
        self._last_write = turn
        try:
            yield (None if earlier is None or earlier.done() else earlier), turn
        finally:
            if not turn.done():
                if earlier is None or earlier.done():
                    turn.set_result(None)
                else:
                    earlier.add_done_callback(lambda _: turn.set_result(None))

    async def _await_turn(self, earlier: asyncio.Future[None] | None) -> None:
        """Raises TierUnavailable when what was called before hangs."""
        if earlier is None:
            return
        given_up = asyncio.create_task(self._given_up.wait())
        waited: list[asyncio.Future[Any]] = [earlier, given_up]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up.cancel()
        if not earlier.done():
            raise TierUnavailable("withdrawn: the writes before it do not end")

    def _withdrawn(self, jobs: Sequence[object], counter: Counter[str]) -> list[str | None]:
        """The threads have been stopped, or hang; a block that was read or written by then is not counted on."""
        reason = "closed" if self._closed else f"sick: {self._stalled() or 'withdrawn'}"
        counter["closed" if self._closed else "withdrawn"] += len(jobs)
        return [reason] * len(jobs)

    def _validate_writes(self, jobs: Sequence[WriteJob], placed: list[_Placed]) -> None:
        for job in jobs:
            meta = job.meta
            if meta.namespace not in self._namespaces:
                raise ValueError("namespace was not registered")
            if len(meta.block_hash) > HASH_BYTES or len(meta.parent) > HASH_BYTES or not 0 <= meta.group <= 255:
                raise ValueError("hash, parent or group out of range")
            if not _contiguous(job.payload, meta.length):
                raise ValueError(f"the payload is not {meta.length} contiguous bytes")
        for file, indices, positions in placed:
            if (file.states(indices) != HELD).any() or not np.diff(indices).all():
                raise ValueError("write to a slot that was not allocated or is written already")
            if any(slot_size(jobs[i].meta.length) != file.slot_bytes for i in positions.tolist()):
                raise ValueError("length contradicts the slot's size")

    async def _write_payloads(
        self, jobs: Sequence[WriteJob], placed: list[_Placed]
    ) -> tuple[list[str | None], list[tuple[int, bytes]], set[SlabFile]]:
        """Reasons by job; (job, its record) for each that was written; and the files that they were written to."""
        reasons: list[str | None] = [None] * len(jobs)
        calls: list[_Placed] = []
        for file, indices, positions in placed:
            failure = await self._set_aside(file, indices)
            if failure is None:
                calls += [(file, indices[part], positions[part]) for part in _split(indices, file.slot_bytes)]
            else:
                for i in positions.tolist():
                    reasons[i] = failure
        outcomes = await self._running_workers().run(
            [partial(self._write_call, file, int(indices[0]), [jobs[i] for i in at]) for file, indices, at in calls]
        )
        written: list[tuple[int, bytes]] = []
        files: set[SlabFile] = set()
        for (file, indices, positions), (call_reasons, records) in zip(calls, outcomes, strict=True):
            good = np.array([reason is None for reason in call_reasons], dtype=bool)
            for i, reason in zip(positions.tolist(), call_reasons, strict=True):
                reasons[i] = reason
            if good.any():
                file.record(indices[good])
                files.add(file)
                written += zip(positions[good].tolist(), records, strict=True)
        return reasons, written, files

    def _write_call(self, file: SlabFile, first: int, jobs: list[WriteJob]) -> tuple[list[str | None], list[bytes]]:
        """In an IO thread: adjacent slots; a reason a job, and the records of those without."""
        reasons = self._transfer(write_slots, file, first, jobs)
        pages = file.slot_bytes // PAGE
        records = []
        for index, (job, reason) in enumerate(zip(jobs, reasons, strict=True), start=first):
            if reason is None:
                meta = job.meta
                records.append(
                    put_record(
                        meta.namespace, meta.stamp, meta.block_hash, meta.parent, meta.group, meta.length, pages, index
                    )
                )
        return reasons, records

    def _transfer(
        self, move: Callable[..., list[str | None]], file: SlabFile, first: int, jobs: Sequence[Any]
    ) -> list[str | None]:
        """In an IO thread: write or read adjacent slots; without direct IO from the moment on that it is refused."""
        fd = file.fd
        if fd is None:
            return ["no block"] * len(jobs)
        direct = self._mode == DIRECT
        reasons = move(self._folder, fd, first * file.slot_bytes, jobs, direct, self._thread_scratch())
        if direct and "EINVAL" in reasons:
            self._give_up_direct()
        if "EINVAL" in reasons:
            with contextlib.suppress(OSError):
                self._folder.go_buffered(fd)
            reasons = move(self._folder, fd, first * file.slot_bytes, jobs, False, self._thread_scratch())
        return reasons

    def _make_durable(
        self, jobs: Sequence[WriteJob], written: list[tuple[int, bytes]], files: set[SlabFile]
    ) -> asyncio.Future[str | None] | None:
        """Queue the records of what was written; what tells why they did not become durable."""
        if not written:
            return None
        namespaces = {jobs[i].meta.namespace for i, _ in written}
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._queue.append(
            _Commit(
                b"".join(record for _, record in written),
                frozenset(files),
                {fingerprint: self._namespaces[fingerprint] for fingerprint in namespaces},
                done,
            )
        )
        self._start_committing()
        return done

    # -- space on disk

    async def _set_aside(self, file: SlabFile, indices: U32) -> str | None:
        """See to it that slots have space in the file; the reason if they cannot have it."""
        if not len(file.unbacked(indices)):
            return None
        async with self._reshaping:
            missing = file.unbacked(indices)
            if not len(missing):
                return None
            holes = missing[missing < file.grown]
            most = max(int(missing[-1]) + 1, file.grown)
            needs = runs(holes) + ([(file.grown, most - file.grown)] if most > file.grown else [])
            required = sum(count for _, count in needs) * file.slot_bytes
            spare = self._limit - self._set_aside_bytes() - required
            punches, gained = self._strip(-spare)
            spare += gained
            ahead = max(0, min(spare, _GROW_BYTES) // file.slot_bytes) if most > file.grown else 0
            call = partial(self._reshape, file, punches, needs, (most, ahead))
            task = asyncio.ensure_future(self._running_workers().run([call]))
            try:
                await outlast([task])
            finally:
                failure = None
                if not task.cancelled():
                    (failure, got) = task.result()[0]
                    for first, count in got:
                        file.back(first, count)
            return failure

    def _strip(self, wanted: int) -> tuple[list[tuple[SlabFile, list[tuple[int, int]]]], int]:
        """Free slots that give their space back: ranges of them by file, `wanted` bytes or as far as they reach."""
        punches: list[tuple[SlabFile, list[tuple[int, int]]]] = []
        gained = 0
        for file in self._by_id:
            if gained < wanted and file.free:
                taken = file.strip(-((gained - wanted) // file.slot_bytes))
                gained += sum(count for _, count in taken) * file.slot_bytes
                punches.append((file, taken))
        return punches, gained

    def _punch(self, punches: list[tuple[SlabFile, list[tuple[int, int]]]]) -> None:
        """In an IO thread."""
        for file, ranges in punches:
            if file.fd is not None:
                for first, count in ranges:
                    self._folder.punch(file.fd, first * file.slot_bytes, count * file.slot_bytes)

    def _set_aside_bytes(self) -> int:
        return sum(file.backed * file.slot_bytes for file in self._by_id)

    def _reshape(
        self,
        file: SlabFile,
        punches: list[tuple[SlabFile, list[tuple[int, int]]]],
        needs: list[tuple[int, int]],
        ahead: tuple[int, int],
    ) -> tuple[str | None, list[tuple[int, int]]]:
        """In an IO thread: punch, then set aside; why it failed, and the ranges of slots that have space now."""
        got: list[tuple[int, int]] = []
        size = file.slot_bytes
        try:
            if file.fd is None:
                file.fd = self._open_file(self._folder, file.name, os.O_CREAT)
                self._folder.sync()
            self._punch(punches)
            for first, count in needs:
                self._folder.allocate(file.fd, first * size, count * size)
                got.append((first, count))
        except OSError as error:
            return errno_name(error), got
        first, count = ahead
        with contextlib.suppress(OSError):
            # Only needed later; a file system too full for it may still have room for what is needed now.
            if count:
                self._folder.allocate(file.fd, first * size, count * size)
                got.append(ahead)
        return None, got

    # -- durability

    async def flush(self) -> str | None:
        """Wait until everything queued before, removals included, is durable; why not, if it cannot be now."""
        refusal = "closed" if self._closed else self._write_refusal()
        return refusal or await self._commit(_Commit(b"", done=asyncio.get_running_loop().create_future()))

    async def _commit(self, commit: _Commit) -> str | None:
        """Queue records and wait for their group; why it failed. A cancelled caller leaves them queued."""
        assert commit.done is not None
        self._queue.append(commit)
        self._start_committing()
        return await asyncio.shield(commit.done)

    def _start_committing(self) -> None:
        # While the directory is away it may be opened anew once nothing is under way.
        if self._committing is None and (self._away is None or self._calls):
            self._committing = asyncio.get_running_loop().create_task(self._commit_queue(), name="disk group commit")

    async def _commit_queue(self) -> None:
        group: list[_Commit] = []
        try:
            while self._queue:
                group, self._queue = self._queue, []
                failure = await self._commit_group(group)
                _answer(group, failure)
                if failure is None:
                    self._writes.worked()
                    self.counters["commits"] += 1
                    await self._compact_if_due()
                    continue
                self._writes.failed(failure)
                self.failures[f"sync: {failure}"] += 1
                # Removals stay owed, in front of what came after them; the next write or flush tries again.
                self._queue[:0] = [commit for commit in group if commit.done is None]
                if all(commit.done is None for commit in self._queue):
                    return
        except Exception:
            _log.exception("disk group commit failed directory=%s", self.directory)
            self._writes.failed("internal error")
            _answer([*group, *self._queue], "internal error")
            self._queue = [commit for commit in self._queue if commit.done is None]
        finally:
            self._committing = None

    async def _commit_group(self, group: list[_Commit]) -> str | None:
        assert self._syncer is not None
        files = frozenset[SlabFile]().union(*(commit.files for commit in group))
        namespaces: dict[bytes, bytes] = {}
        for commit in group:
            namespaces |= commit.namespaces
        records = bytearray().join(commit.records for commit in group)
        try:
            (failure,) = await self._syncer.run([partial(self._sync, files, namespaces, records)])
        except TierUnavailable:
            return "closed"
        return failure

    def _sync(self, files: frozenset[SlabFile], namespaces: dict[bytes, bytes], records: bytearray) -> str | None:
        """In the sync thread: payloads, then namespaces, then records; why it failed."""
        try:
            for file in files:
                assert file.fd is not None
                self._folder.sync_data(file.fd)
            for fingerprint, descriptor in namespaces.items():
                self._journal.add_namespace(fingerprint, descriptor)
            if records:
                self._journal.append(records)
        except OSError as error:
            return errno_name(error)
        return None

    async def _compact_if_due(self) -> None:
        if self._compacting is not None or not self._journal.due(_COMPACT_BYTES, _COMPACT_SEGMENTS):
            return
        assert self._syncer is not None
        try:
            (failure,) = await self._syncer.run([partial(_reason_of, self._journal.rotate)])
        except TierUnavailable:
            return
        if failure is not None:
            # The segment is closed all the same; the next append begins another or fails with its writers told.
            return
        self._compacting = asyncio.get_running_loop().create_task(
            self._compact(self._journal.number - 1), name="disk compaction"
        )

    async def _compact(self, up_to: int) -> None:
        try:
            (failure,) = await self._running_workers().run([partial(_reason_of, partial(self._journal.compact, up_to))])
            if failure is None:
                self.counters["compactions"] += 1
            else:
                self.failures[f"compaction: {failure}"] += 1
                _log.warning("journal not compacted reason=%s directory=%s", failure, self.directory)
        except TierUnavailable:
            _log.info("journal not compacted reason=closed directory=%s", self.directory)
        except Exception:
            _log.exception("journal not compacted directory=%s", self.directory)
        finally:
            self._compacting = None

    # -- read

    async def read(self, jobs: Sequence[ReadJob]) -> list[str | None]:
        """Fetch blocks; for each None, once its bytes are proven to be those asked for, or why it is a miss.

        Nothing is written to `into` after this has ended, cancelled or not. Raises ValueError for a job that
        contradicts its slot.
        """
        if not jobs:
            return []
        reasons: list[str | None] = ["no block"] * len(jobs)
        calls: list[_Placed] = []
        for file, indices, positions in self._decode([job.slot for job in jobs]):
            for i in positions.tolist():
                if slot_size(jobs[i].length) != file.slot_bytes or not _contiguous(jobs[i].into, jobs[i].length):
                    raise ValueError("length contradicts the slot's size or the memory to read into")
            present = file.states(indices) == RECORDED
            indices, positions = indices[present], positions[present]
            calls += [(file, indices[part], positions[part]) for part in _split(indices, file.slot_bytes)]
        refusal = "closed" if self._closed else self._read_refusal()
        if refusal is not None:
            self.misses["left alone"] += len(jobs)
            return [refusal] * len(jobs)
        with self._call():
            try:
                outcomes = await self._running_workers().run(
                    [
                        partial(self._read_call, file, int(indices[0]), [jobs[i] for i in positions])
                        for file, indices, positions in calls
                    ]
                )
            except TierUnavailable:
                return self._withdrawn(jobs, self.misses)
        for (_, _, positions), call_reasons in zip(calls, outcomes, strict=True):
            for i, reason in zip(positions.tolist(), call_reasons, strict=True):
                reasons[i] = reason
        self._count_reads(jobs, reasons)
        return reasons

    def _count_reads(self, jobs: Sequence[ReadJob], reasons: list[str | None]) -> None:
        faults = [i for i, reason in enumerate(reasons) if reason is not None and is_device_fault(reason)]
        if len(faults) < len(reasons) and any(reason is None or disproves(reason) for reason in reasons):
            # The drive answers: what it could not read is lost, as with a bad sector, and will not be asked for again.
            self._reads.worked()
            for i in faults:
                reasons[i] = f"unreadable: {reasons[i]}"
        elif faults:
            before = self._reads.recoveries
            for i in faults:
                if self._suspects.get(jobs[i].slot, before) < before:
                    del self._suspects[jobs[i].slot]
                    reasons[i] = f"unreadable: {reasons[i]}"
                elif len(self._suspects) < _MOST_SUSPECTS:
                    self._suspects[jobs[i].slot] = before
            failed = [reason for reason in reasons if reason is not None and is_device_fault(reason)]
            if failed:
                self._reads.failed(failed[0])
        for job, reason in zip(jobs, reasons, strict=True):
            if reason is None:
                self.counters["read_blocks"] += 1
                self.counters["read_bytes"] += job.length
            else:
                self.misses[reason] += 1

    def _read_call(self, file: SlabFile, first: int, jobs: list[ReadJob]) -> list[str | None]:
        return self._transfer(read_slots, file, first, jobs)

    def _thread_scratch(self) -> Scratch:
        scratch = getattr(self._scratch, "own", None)
        if scratch is None:
            scratch = self._scratch.own = Scratch()
        assert isinstance(scratch, Scratch)
        return scratch

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A write or read under way: `close` waits for it."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _running_workers(self) -> Workers:
        if self._workers is None:
            raise RuntimeError("the DiskTier is not open")
        return self._workers

    # -- watch

    async def watch(self) -> None:
        """Look once at the drive; to be called every second or so, and to be cancelled at any time.

        Finds out how much room others leave (`limit`), whether the directory and its files are still those that were
        opened, and, when a sick drive's pause is over, whether it works again. Space above the limit that no block
        holds is given back. Calls that wait behind one that hangs are given up.
        """
        if self._closed or self._watcher is None:
            return
        if self._stalled() is not None:
            for workers in (self._workers, self._syncer):
                if workers is not None:
                    workers.withdraw()
            self._given_up.set()
            self._given_up.clear()
        if self._looking is None:
            idle = not self._calls and self._committing is None and self._compacting is None
            away = self._away is not None
            call = self._reopen if away and idle else partial(self._look, self._writes.due, self._reads.due)
            self._looking = self._watcher.begin(call)
        looking = self._looking
        await asyncio.wait([looking])
        if self._looking is looking:
            self._looking = None
            self._saw(looking.result())
            await self._shrink()

    def _saw(self, seen: _Seen) -> None:
        if seen.away != self._away:
            _log.warning("disk directory=%s %s", self.directory, seen.away or "is back")
            self.counters["vanished"] += self._away is None
            self._away = seen.away
        if seen.away is not None:
            return
        if seen.available is not None:
            self._set_limit(seen.available)
        if self._queue:
            self._start_committing()
        for health, outcome in ((self._writes, seen.write), (self._reads, seen.read)):
            if outcome == _WORKED:
                health.worked()
            elif outcome is not None:
                health.failed(outcome)

    def _look(self, try_write: bool, try_read: bool) -> _Seen:
        """In the watching thread."""
        folder = self._folder
        try:
            if folder.moved():
                return _Seen(away="its path leads elsewhere: a mount that vanished, or another directory")
            for file in self._by_id:
                if file.fd is not None and not _same(folder, file.name, file.fd):
                    return _Seen(away=f"{file.name} was deleted or replaced")
            if self._lock_fd is not None and not _same(folder, "lock", self._lock_fd):
                return _Seen(away="its lock was deleted or replaced")
            if "format" not in folder.names():
                return _Seen(away="its file 'format' was deleted")
            available = folder.space().available
        except OSError as error:
            # What the device cannot tell now, reads and writes will meet.
            return _Seen(read=errno_name(error))
        return _Seen(
            available=available,
            write=_reason_of(self._try_write) or _WORKED if try_write else None,
            read=_reason_of(self._try_read) or _WORKED if try_read else None,
        )

    def _try_write(self) -> None:
        folder, page = self._folder, self._thread_scratch().headers[0]
        fd = self._open_file(folder, "probe.tmp", os.O_CREAT)
        try:
            if folder.write(fd, [page], 0) != PAGE:
                raise OSError(errno.EIO, "short write")
            folder.sync_data(fd)
        finally:
            folder.close_file(fd)
            folder.unlink("probe.tmp")

    def _try_read(self) -> None:
        """Read some page of the slab files past the page cache, else the format."""
        folder, page = self._folder, self._thread_scratch().headers[0]
        for file in self._by_id:
            if file.fd is not None and file.grown:
                folder.read(file.fd, [page], 0)
                return
        read_format(folder, create=False)

    def _reopen(self) -> _Seen:
        """In the watching thread, no call under way: take the directory again if it is ours, files and lock."""
        try:
            folder = open_folder(self.directory, self._open_folder)
        except (ConfigError, OSError) as error:
            return _Seen(away=str(error))
        kept = False
        try:
            if read_format(folder, create=False) != self._identity:
                return _Seen(away="another directory lies at its path")
            if self._lock_fd is None or not _same(folder, "lock", self._lock_fd):
                fresh = lock(folder)
                if self._lock_fd is not None:
                    os.close(self._lock_fd)
                self._lock_fd = fresh
            names = set(folder.names())
            before, self._folder, kept = self._folder, folder, True
            for file in self._by_id:
                if file.fd is not None:
                    with contextlib.suppress(OSError):
                        before.close_file(file.fd)
                    file.fd = None
                fd = self._open_file(folder, file.name) if file.name in names else None
                file.reopened(fd, folder.fstat(fd).st_size // file.slot_bytes if fd is not None else 0)
            self._journal.rebind(folder)
            before.close()
            return _Seen(available=folder.space().available)
        except ConfigError as error:
            return _Seen(away=str(error))
        except OSError as error:
            return _Seen(away=f"cannot be opened: {errno_name(error)}")
        finally:
            if not kept:
                folder.close()

    async def _shrink(self) -> None:
        """Give space back that is above the limit and holds nothing."""
        healthy = self._away is None and self._writes.reason is None and not self._reshaping.locked()
        if not healthy or self._set_aside_bytes() <= self._limit:
            return
        async with self._reshaping:
            punches, gained = self._strip(self._set_aside_bytes() - self._limit)
            if gained and self._watcher is not None:
                await asyncio.wait([self._watcher.begin(partial(_reason_of, partial(self._punch, punches)))])

    # -- telling

    def status(self) -> dict[str, Any]:
        """A snapshot for `kvcascade status`; sizes in bytes. Does no IO."""
        classes = [
            {
                "slot_bytes": file.slot_bytes,
                "slots": file.end,
                "used": file.used,
                "blocks": file.recorded,
                "free": file.free,
                "file_bytes": file.grown * file.slot_bytes,
            }
            for file in self._by_id
        ]
        return {
            "name": "disk",
            "state": self.state,
            "reason": self.reason or "",
            "directory": str(self.directory),
            "capacity": self.capacity,
            "limit": self._limit,
            "reserve": self._reserve,
            "used": self.used,
            "free": max(0, self._limit - self.used),
            "blocks": self.blocks,
            "classes": classes,
            "io": self._mode,
            "threads": self._thread_count,
            "journal": {"bytes": self._journal.size, "snapshot_bytes": self._journal.snapshot_bytes},
            "recovered": dict(self._recovered),
            "counters": {
                **self.counters,
                "misses": dict(self.misses),
                "failures": dict(self.failures),
            },
        }

    def check(self) -> list[str]:
        """Violations of the tier's invariants, in words; empty when all is well. Call it at any time; does no IO."""
        problems = [problem for file in self._by_id for problem in file.check()]
        if self._committing is None and any(commit.done is not None for commit in self._queue):
            problems.append("a write waits for a commit that nobody makes")
        if sum(len(extents) for extents in self._extents.values()) != self._extent_count:
            problems.append("slot numbers dealt out do not add up")
        return problems

    # -- end

    async def close(self, deadline: float = 10.0) -> bool:
        """End the work under way, make durable what is queued, end the threads, release the directory.

        New work is refused at once. False if it took longer than `deadline` seconds: what was not yet durable is
        forgotten, never half written, and a device that does not answer keeps its thread and the directory's lock until
        the process ends or a later `close` succeeds.
        """
        self._closed = True
        if self._workers is None or self._syncer is None:
            self._release()
            return True
        end = time.monotonic() + deadline
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await self._idle.wait()
                if not self._syncer.stopping and self._write_refusal() is None:
                    await self._commit(_Commit(b"", done=asyncio.get_running_loop().create_future()))
                if self._compacting is not None:
                    await asyncio.wait([self._compacting])
        threads = [workers for workers in (self._workers, self._syncer, self._watcher) if workers is not None]
        stopped = [await workers.stop(end - time.monotonic()) for workers in threads]
        if not all(stopped):
            return False
        if self._committing is not None:
            await asyncio.wait([self._committing])
        self._release()
        return True

    def _release(self) -> None:
        if not self._opened:
            return
        self._opened = False
        self._journal.close()
        for file in self._by_id:
            if file.fd is not None:
                with contextlib.suppress(OSError):
                    self._folder.close_file(file.fd)
                file.fd = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
        self._folder.close()


_WORKED: Final = "worked"
_ORPHAN: Final = "its parent was not written"


def _same(folder: Folder, name: str, fd: int) -> bool:
    """Whether a name still leads to an open file."""
    try:
        there = folder.stat(name)
    except FileNotFoundError:
        return False
    here = folder.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _reason_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except OSError as error:
        return errno_name(error)
    return None


def _answer(group: Iterable[_Commit], failure: str | None) -> None:
    for commit in group:
        if commit.done is not None and not commit.done.done():
            commit.done.set_result(failure)


def _without_orphans(
    jobs: Sequence[WriteJob], reasons: list[str | None], written: list[tuple[int, bytes]]
) -> list[tuple[int, bytes]]:
    """Those of the written jobs, parents before children, whose parents did not fail; the others' reasons are set."""
    if len(written) == len(jobs):
        return written

    def name(i: int, block_hash: bytes) -> tuple[bytes, int, bytes]:
        return jobs[i].meta.namespace, jobs[i].meta.group, block_hash

    failed = {name(i, jobs[i].meta.block_hash) for i, reason in enumerate(reasons) if reason is not None}
    kept = []
    for i, record in sorted(written):
        if name(i, jobs[i].meta.parent) in failed:
            failed.add(name(i, jobs[i].meta.block_hash))
            reasons[i] = _ORPHAN
        else:
            kept.append((i, record))
    return kept


def _contiguous(buffer: memoryview | U8, length: int) -> bool:
    if isinstance(buffer, memoryview):
        return buffer.c_contiguous and buffer.nbytes == length
    return bool(buffer.flags.c_contiguous) and buffer.nbytes == length


def _split(indices: U32, slot_bytes: int) -> list[slice]:
    """Adjacent places in parts for one call each."""
    most = min(CALL_SLOTS, max(1, CALL_BYTES // slot_bytes))
    parts: list[slice] = []
    begin = 0
    for _, count in runs(indices):
        parts += [slice(first, min(first + most, begin + count)) for first in range(begin, begin + count, most)]
        begin += count
    return parts
