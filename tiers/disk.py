"""One drive of the disk tier: blocks in slab files of one directory, found again after any end of the process.

The rule: a block counts only when its payload is durable and, after that, its record is; and whatever the records say,
its bytes count only when the slot itself proves them. So a crash, a full device or a flipped bit costs blocks, never
truth.

A sick drive is a state (health.py): what fails is counted by its reason and the drive left alone, longer each time;
`watch` looks whether it came back, whether the directory is still the one that was opened, and how much of the file
system others have left for it. A call that hangs keeps its thread and its caller's memory, and nothing else: what waits
behind it is withdrawn.

A directory (directory.py) holds a journal (journal.py) and one slab file a size class (slabfile.py). Which slot is free
is decided on the loop's thread without IO (slabfiles.py), which space it has (room.py) and when its record is durable
(commits.py) too; payloads, checksums, syncs and space go through the tier's own threads (opened.py).

IO goes by threads and not by io_uring: of some 200 ms of CPU a GB of 2 MiB blocks the checksum takes 63 and the kernel
60-90, io_uring with registered buffers took 27 (measured apart), and the device is the limit either way (0.9 of fio's
io_uring writing, 1.06 reading). What small blocks cost is Python, 10 us each, which it would not spare.

A slot may be handed on before the record of its removal is durable. A crash in between brings back the old record over
the new bytes, and the slot's header unmasks it: a miss. Waiting would put a sync before each store into a full tier.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import ConfigError, TierUnavailable

from .commits import Commits, Turns
from .directory import DIRECT, make_directory
from .folder import Folder
from .health import Health
from .journal import remove_record
from .opened import WORKED, Opened, Seen
from .recovery import Recovery, recover
from .room import Room
from .slabfile import (
    HASH_BYTES,
    HELD,
    PAGE,
    RECORDED,
    ReadJob,
    SlabFile,
    WriteJob,
    disproves,
    is_device_fault,
    slot_size,
)
from .slabfiles import Placed, SlabFiles, for_calls
from .workers import Workers

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

# More than are read at once; a drive that answers nothing is the drive's fault, whatever the slots.
_MOST_SUSPECTS: Final = 10_000

_ORPHAN: Final = "its parent was not written"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Running:
    """What there is between `open` and the end: the directory, and the threads that work on it."""

    opened: Opened
    workers: Workers
    syncer: Workers
    watcher: Workers
    commits: Commits

    @property
    def threads(self) -> tuple[Workers, Workers, Workers]:
        return self.workers, self.syncer, self.watcher


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
        self._discard_old = discard_old
        self._clock = clock
        self._thread_count = threads
        self._reach = folder
        # The loop's thread alone, once `open` has returned.
        self._running: _Running | None = None
        self._closed = False
        self._files = SlabFiles()
        self._room = Room(self._files, capacity, reserve)
        self._health = Health(clock, self._longest)
        self._turns = Turns()
        self._namespaces: dict[bytes, bytes] = {}
        self._calls = 0  # writes and reads under way
        self._idle = asyncio.Event()
        self._idle.set()
        self._looking: asyncio.Future[Seen] | None = None
        # Slots that could not be read while nothing else could: by slot, how often reading had recovered before.
        self._suspects: dict[int, int] = {}
        self._recovered: dict[str, Any] = {}
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    # -- start

    def open(self) -> Recovery:
        """Take the directory, replay its records, sweep what dead writers left; reads no payload.

        Raises ConfigError, naming disk.directory, when it is a file, cannot be written, holds something else or another
        version, or belongs to a live process; TierUnavailable when the file system fails.
        """
        began = time.monotonic()
        if self._running is not None or self._closed:
            raise RuntimeError("a DiskTier is opened once")
        make_directory(self.directory)
        opened: Opened | None = None
        try:
            opened = Opened(self.directory, self._reach, discard_old=self._discard_old)
            recovery = recover(opened, self._files, began)
            self._room.others_leave(opened.available())
        except OSError as error:
            self._forget(opened)
            raise TierUnavailable(f"disk.directory {self.directory}: {error.strerror or error}") from error
        except BaseException:
            self._forget(opened)
            raise
        self._namespaces = dict(recovery.namespaces)
        self._recovered = {
            "blocks": len(recovery),
            "dropped": dict(recovery.dropped),
            "seconds": round(recovery.seconds, 3),
        }
        workers = Workers("kvcascade-disk", self._thread_count, self._clock)
        syncer = Workers("kvcascade-disk-sync", 1, self._clock)
        watcher = Workers("kvcascade-disk-watch", 1, self._clock)
        commits = Commits(
            opened,
            syncer,
            workers,
            writes=self._health.writes,
            counters=self.counters,
            failures=self.failures,
        )
        self._running = _Running(opened, workers, syncer, watcher, commits)
        return recovery

    def abandon(self) -> None:
        """Undo `open`, before anything else was done; it may be tried again."""
        running, self._running = self._running, None
        if running is not None:
            for workers in running.threads:
                workers.dismiss()
            self._forget(running.opened)

    def _forget(self, opened: Opened | None) -> None:
        if opened is not None:
            opened.close(self._files)
        self._files.clear()
        self._namespaces.clear()

    def _require(self) -> _Running:
        if self._running is None:
            raise RuntimeError("the DiskTier is not open")
        return self._running

    def _longest(self) -> float:
        running = self._running
        return max(workers.longest() for workers in running.threads) if running is not None else 0.0

    # -- space: the loop's thread, no IO

    @property
    def used(self) -> int:
        """Bytes of all slots handed out, header pages included."""
        return self._files.used

    @property
    def blocks(self) -> int:
        """Slots that hold a block, or will once the sync under way has ended."""
        return self._files.recorded

    @property
    def limit(self) -> int:
        """Bytes that slots may take now: the capacity, or less where others have filled the file system so far that its
        reserve begins. `used` may be above it until blocks have been freed."""
        return self._room.limit

    @property
    def pending(self) -> int:
        """Writes and reads under way."""
        return self._calls

    def room(self, length: int) -> int:
        """How many blocks of `length` bytes `allocate` would grant now, were the tier well."""
        return self._room.blocks(length)

    def sizes_of(self, slots: U32) -> U64:
        """Bytes of each slot, its header page included."""
        return self._files.sizes_of(slots)

    def allocate(self, length: int, count: int) -> U32:
        """Slots for up to `count` blocks of `length` bytes, ascending, adjacent on disk where possible.

        Fewer, down to none, come back when the limit is reached or the tier is left alone because it is sick.
        """
        if length <= 0 or length >= 1 << 32:
            raise ValueError(f"length {length} cannot be a block's")
        count = min(count, self.room(length)) if self.writable else 0
        if count <= 0:
            return np.empty(0, dtype=np.uint32)
        file = self._files.of_size(slot_size(length))
        return self._files.encode(file, file.take(count, self.capacity // file.slot_bytes))

    def free(self, slots: U32 | Sequence[int]) -> None:
        """Give slots back; they may be handed out again at once. No write or read of them may be under way.

        The removal is recorded with the next group commit, which this starts when it runs on a loop. Raises ValueError,
        with nothing freed of that slot's file, for a slot that is free or not of this tier.
        """
        removals: list[bytes] = []
        for file, indices, _ in self._files.decode(slots):
            pages = file.slot_bytes // PAGE
            removals += [remove_record(pages, index) for index in file.give(indices).tolist()]
        if not removals:
            return
        commits = self._require().commits
        commits.owe(b"".join(removals))
        # While the directory is away it may be opened anew once nothing is under way.
        if self._health.away is None or self._calls:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                commits.start()

    def register_namespace(self, fingerprint: bytes, descriptor: bytes) -> None:
        """Let blocks of a namespace be written; what it stands for is stored with the first of them."""
        if len(fingerprint) != HASH_BYTES:
            raise ValueError("a namespace fingerprint has 32 bytes")
        self._namespaces[fingerprint] = descriptor

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
        return self._health.reason

    @property
    def hangs(self) -> str | None:
        """Why it cannot be waited for: a call has not ended for long."""
        return self._health.stalled

    def _refuses_writes(self) -> str | None:
        return "closed" if self._closed else self._health.refuses_writes()

    def _refuses_reads(self) -> str | None:
        return "closed" if self._closed else self._health.refuses_reads()

    @property
    def writable(self) -> bool:
        """Whether a write would be tried now: the tier is well, or its back-off is over."""
        return self._refuses_writes() is None

    @property
    def readable(self) -> bool:
        """Whether a read would be tried now: the tier is well, or its back-off is over."""
        return self._refuses_reads() is None

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

    def _withdrawn(self, jobs: Sequence[object], counter: Counter[str]) -> list[str | None]:
        """The threads have been stopped, or hang; a block that was read or written by then is not counted on."""
        reason = "closed" if self._closed else f"sick: {self._health.stalled or 'withdrawn'}"
        counter["closed" if self._closed else "withdrawn"] += len(jobs)
        return [reason] * len(jobs)

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
        placed = self._files.decode([job.slot for job in jobs])
        self._validate_writes(jobs, placed)
        refusal = self._refuses_writes()
        if refusal is not None:
            self.failures["left alone"] += len(jobs)
            return [refusal] * len(jobs)
        with self._call(), self._turns.turn() as turn:
            try:
                reasons, written, files = await self._write_payloads(jobs, placed)
                await turn.come()
                written = _without_orphans(jobs, reasons, written)
                done = self._make_durable(jobs, written, files)
                turn.end()
                failure = await asyncio.shield(done) if done is not None else None
            except TierUnavailable:
                return self._withdrawn(jobs, self.failures)
        for i, _ in written:
            reasons[i] = failure
        for reason in reasons:
            if reason is not None:
                self.failures[reason] += 1
                if reason != _ORPHAN:
                    self._health.writes.failed(reason)
        if failure is None:
            self.counters["written_blocks"] += len(written)
            self.counters["written_bytes"] += sum(jobs[i].meta.length for i, _ in written)
        return reasons

    def _validate_writes(self, jobs: Sequence[WriteJob], placed: list[Placed]) -> None:
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
        self, jobs: Sequence[WriteJob], placed: list[Placed]
    ) -> tuple[list[str | None], list[tuple[int, bytes]], frozenset[SlabFile]]:
        """Reasons by job; (job, its record) for each that was written; and the files that they were written to."""
        running = self._require()
        opened, workers = running.opened, running.workers
        reasons: list[str | None] = [None] * len(jobs)
        calls: list[Placed] = []
        for file, indices, positions in placed:
            failure = await self._room.set_aside(opened, workers, file, indices)
            if failure is None:
                calls += for_calls((file, indices, positions))
            else:
                for i in positions.tolist():
                    reasons[i] = failure
        outcomes = await workers.run(
            [partial(opened.write, file, int(indices[0]), [jobs[i] for i in at]) for file, indices, at in calls]
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
        return reasons, written, frozenset(files)

    def _make_durable(
        self, jobs: Sequence[WriteJob], written: list[tuple[int, bytes]], files: frozenset[SlabFile]
    ) -> asyncio.Future[str | None] | None:
        """Queue the records of what was written; what tells why they did not become durable."""
        if not written:
            return None
        fingerprints = {jobs[i].meta.namespace for i, _ in written}
        namespaces = {fingerprint: self._namespaces[fingerprint] for fingerprint in fingerprints}
        return self._require().commits.put(b"".join(record for _, record in written), files, namespaces)

    async def flush(self) -> str | None:
        """Wait until everything queued before, removals included, is durable; why not, if it cannot be now."""
        return self._refuses_writes() or await self._require().commits.flush()

    # -- read

    async def read(self, jobs: Sequence[ReadJob]) -> list[str | None]:
        """Fetch blocks; for each None, once its bytes are proven to be those asked for, or why it is a miss.

        Nothing is written to `into` after this has ended, cancelled or not. Raises ValueError for a job that
        contradicts its slot.
        """
        if not jobs:
            return []
        reasons: list[str | None] = ["no block"] * len(jobs)
        calls: list[Placed] = []
        for file, indices, positions in self._files.decode([job.slot for job in jobs]):
            for i in positions.tolist():
                if slot_size(jobs[i].length) != file.slot_bytes or not _contiguous(jobs[i].into, jobs[i].length):
                    raise ValueError("length contradicts the slot's size or the memory to read into")
            present = file.states(indices) == RECORDED
            calls += for_calls((file, indices[present], positions[present]))
        refusal = self._refuses_reads()
        if refusal is not None:
            self.misses["left alone"] += len(jobs)
            return [refusal] * len(jobs)
        running = self._require()
        with self._call():
            try:
                outcomes = await running.workers.run(
                    [
                        partial(running.opened.read, file, int(indices[0]), [jobs[i] for i in positions])
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
        reads = self._health.reads
        faults = [i for i, reason in enumerate(reasons) if reason is not None and is_device_fault(reason)]
        if len(faults) < len(reasons) and any(reason is None or disproves(reason) for reason in reasons):
            # The drive answers: what it could not read is lost, as with a bad sector, and will not be asked for again.
            reads.worked()
            for i in faults:
                reasons[i] = f"unreadable: {reasons[i]}"
        elif faults:
            before = reads.recoveries
            for i in faults:
                if self._suspects.get(jobs[i].slot, before) < before:
                    del self._suspects[jobs[i].slot]
                    reasons[i] = f"unreadable: {reasons[i]}"
                elif len(self._suspects) < _MOST_SUSPECTS:
                    self._suspects[jobs[i].slot] = before
            failed = [reason for reason in reasons if reason is not None and is_device_fault(reason)]
            if failed:
                reads.failed(failed[0])
        for job, reason in zip(jobs, reasons, strict=True):
            if reason is None:
                self.counters["read_blocks"] += 1
                self.counters["read_bytes"] += job.length
            else:
                self.misses[reason] += 1

    # -- watch

    async def watch(self) -> None:
        """Look once at the drive; to be called every second or so, and to be cancelled at any time.

        Finds out how much room others leave (`limit`), whether the directory and its files are still those that were
        opened, and, when a sick drive's pause is over, whether it works again. Space above the limit that no block
        holds is given back. Calls that wait behind one that hangs are given up.
        """
        running, health = self._running, self._health
        if self._closed or running is None:
            return
        if health.stalled is not None:
            running.workers.withdraw()
            running.syncer.withdraw()
            self._turns.give_up()
        if self._looking is None:
            self._looking = running.watcher.begin(self._next_look(running))
        looking = self._looking
        await asyncio.wait([looking])
        if self._looking is looking:
            self._looking = None
            self._saw(looking.result(), running.commits)
            if health.away is None and health.writes.reason is None:
                await self._room.give_back(running.opened, running.watcher)

    def _next_look(self, running: _Running) -> Callable[[], Seen]:
        files, health = list(self._files), self._health
        if health.away is not None and not self._calls and running.commits.idle:
            return partial(running.opened.reopen, files)
        return partial(running.opened.look, files, try_write=health.writes.due, try_read=health.reads.due)

    def _saw(self, seen: Seen, commits: Commits) -> None:
        health = self._health
        if seen.away != health.away:
            _log.warning("disk directory=%s %s", self.directory, seen.away or "is back")
            self.counters["vanished"] += health.away is None
            health.away = seen.away
        if seen.away is not None:
            return
        if seen.available is not None:
            self._room.others_leave(seen.available)
        commits.start()
        for direction, outcome in ((health.writes, seen.write), (health.reads, seen.read)):
            if outcome == WORKED:
                direction.worked()
            elif outcome is not None:
                direction.failed(outcome)

    # -- telling

    def status(self) -> dict[str, Any]:
        """A snapshot for `kvcascade status`; sizes in bytes. Does no IO."""
        opened = self._running.opened if self._running is not None else None
        classes = [
            {
                "slot_bytes": file.slot_bytes,
                "slots": file.end,
                "used": file.used,
                "blocks": file.recorded,
                "free": file.free,
                "file_bytes": file.grown * file.slot_bytes,
            }
            for file in self._files
        ]
        return {
            "name": "disk",
            "state": self.state,
            "reason": self.reason or "",
            "directory": str(self.directory),
            "capacity": self.capacity,
            "limit": self.limit,
            "reserve": self._room.reserve,
            "used": self.used,
            "free": max(0, self.limit - self.used),
            "blocks": self.blocks,
            "classes": classes,
            "io": opened.mode if opened is not None else DIRECT,
            "threads": self._thread_count,
            "journal": {
                "bytes": opened.journal.size if opened is not None else 0,
                "snapshot_bytes": opened.journal.snapshot_bytes if opened is not None else 0,
            },
            "recovered": dict(self._recovered),
            "counters": {
                **self.counters,
                "misses": dict(self.misses),
                "failures": dict(self.failures),
            },
        }

    def check(self) -> list[str]:
        """Violations of the tier's invariants, in words; empty when all is well. Call it at any time; does no IO."""
        return self._files.check() + (self._running.commits.check() if self._running is not None else [])

    # -- end

    async def close(self, deadline: float = 10.0) -> bool:
        """End the work under way, make durable what is queued, end the threads, release the directory.

        New work is refused at once. False if it took longer than `deadline` seconds: what was not yet durable is
        forgotten, never half written, and a device that does not answer keeps its thread and the directory's lock until
        the process ends or a later `close` succeeds.
        """
        self._closed = True
        running = self._running
        if running is None:
            return True
        end = time.monotonic() + deadline
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await self._idle.wait()
                if not running.syncer.stopping and self._health.refuses_writes() is None:
                    await running.commits.flush()
                await running.commits.compacted()
        stopped = [await workers.stop(end - time.monotonic()) for workers in running.threads]
        if not all(stopped):
            return False
        await running.commits.ended()
        running.opened.close(self._files)
        return True


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
