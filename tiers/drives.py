"""The disk tier: one or several drives, each a directory with its own files, threads, limit and state (disk.py).

The rule: drives share nothing but their clients. A batch lies on one drive wherever there is room, so that a chain is
read by few calls, and the next batch goes to another; a drive that fails, hangs or fills up is left out, and costs what
lies on it. A slot's number says which drive it is of.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import CascadeError, ConfigError, TierUnavailable

from .directory import make_directory
from .disk import DiskTier
from .extents import NOWHERE, Extents
from .recovery import Recovery
from .slabfile import ReadJob, WriteJob
from .workers import Workers, outlast

U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

# A million records take a second.
OPEN_SECONDS: Final = 120.0
_RETRY_FIRST: Final = 1.0
_RETRY_MOST: Final = 60.0

_SUMMED: Final = ("capacity", "limit", "reserve", "used", "free", "blocks")

_log = logging.getLogger(__name__)


class Drives:
    """The disk tier as everybody sees it: what DiskTier does, over all drives.

    Life: `open` (blocking, any thread), then from the loop's thread everything else, `close` at the end. Each drive
    wants a task of its own that calls `watch` on its number every second or so.
    """

    def __init__(
        self,
        drives: Sequence[DiskTier],
        *,
        clock: Callable[[], float] = time.monotonic,
        patience: float = OPEN_SECONDS,
    ) -> None:
        """At least one drive, none opened yet. `patience`: seconds after which `open` leaves out one that hangs."""
        assert drives
        self._patience = patience
        # The loop's thread alone, once `open` has returned.
        self._drives = list(drives)
        self._clock = clock
        self._out: dict[int, str] = {}  # drives that could not be opened, and why
        self._retry_at: dict[int, float] = {}
        self._pause: dict[int, float] = {}
        self._openers: dict[int, Workers] = {}
        self._late: dict[int, Future[Recovery]] = {}  # opens that `open` did not wait for
        self._namespaces: dict[bytes, bytes] = {}
        self._closed = False
        self._extents = Extents()

    def __len__(self) -> int:
        return len(self._drives)

    # -- start

    def open(self) -> Recovery:
        """Take all directories, at once; what they hold together.

        Raises ConfigError, naming disk.directory, when one cannot be a drive of ours or is given twice, and
        TierUnavailable when none can be opened. A drive that fails is left out, and tried again by `watch`.
        """
        self._refuse_twins()
        began = time.monotonic()
        opening = _all_at_once([drive.open for drive in self._drives])
        wait(opening, self._patience)
        recoveries: list[tuple[int, Recovery]] = []
        errors: list[BaseException] = []
        for number, (drive, future) in enumerate(zip(self._drives, opening, strict=True)):
            if not future.done():
                error: BaseException | None = TierUnavailable(
                    f"disk.directory {drive.directory}: no answer from the device for {self._patience:g} s"
                )
                self._late[number] = future
            else:
                error = future.exception()
            if error is None:
                recoveries.append((number, future.result()))
            elif isinstance(error, TierUnavailable):
                self._leave_out(number, error)
                errors.append(error)
            else:
                errors.insert(0, error)
        if errors and (not recoveries or not isinstance(errors[0], TierUnavailable)):
            for number, _ in recoveries:
                self._drives[number].abandon()
            raise errors[0]
        numbered = [replace(one, slot=self._extents.encode(number, one.slot)) for number, one in recoveries]
        return Recovery.joined(numbered, time.monotonic() - began)

    def _refuse_twins(self) -> None:
        seen: dict[tuple[int, int], DiskTier] = {}
        for drive in self._drives:
            make_directory(drive.directory)
            status = drive.directory.stat()
            twin = seen.setdefault((status.st_dev, status.st_ino), drive)
            if twin is not drive:
                raise ConfigError(
                    f"disk.directory: {twin.directory} and {drive.directory} are the same directory; name each once"
                )

    def _leave_out(self, number: int, error: BaseException) -> None:
        self._out[number] = str(error)
        self._pause[number] = min(_RETRY_MOST, 2 * self._pause.get(number, _RETRY_FIRST / 2))
        self._retry_at[number] = self._clock() + self._pause[number]
        _log.error("drive left out directory=%s reason=%s", self._drives[number].directory, error)

    # -- slots

    def _split(self, slots: Iterable[int] | U32) -> list[tuple[int, npt.NDArray[np.intp], U32]]:
        """By drive: its number, positions in `slots`, and the drive's own numbers for them."""
        owners, local = self._extents.decode(np.asarray(slots, dtype=np.uint32))
        parts = []
        for number in np.unique(owners).tolist():
            at = np.flatnonzero(owners == number)
            parts.append((number, at, local[at]))
        return parts

    def by_drive(self, slots: U32) -> list[npt.NDArray[np.intp]]:
        """Positions in `slots`, those of one drive together."""
        return [at for _, at, _ in self._split(slots)]

    def drives_of(self, slots: U32) -> U32:
        """The number of each slot's drive."""
        return self._extents.owners(slots)

    def sizes_of(self, slots: U32) -> npt.NDArray[np.uint64]:
        """Bytes of each slot, its header page included."""
        sizes = np.zeros(len(slots), dtype=np.uint64)
        for drive, at, own in self._split(slots):
            sizes[at] = self._drives[drive].sizes_of(own)
        return sizes

    def lie_on(self, number: int, slots: U32) -> Bools:
        """Whether each slot is one of this drive."""
        result: Bools = self.drives_of(slots) == number
        return result

    # -- space: the loop's thread, no IO

    def _sum(self, figure: Callable[[DiskTier], int]) -> int:
        return sum(figure(drive) for drive in self._drives)

    @property
    def capacity(self) -> int:
        """Bytes that all drives may hold."""
        return self._sum(lambda drive: drive.capacity)

    @property
    def limit(self) -> int:
        """Bytes that they may hold now (see DiskTier)."""
        return self._sum(lambda drive: drive.limit)

    @property
    def used(self) -> int:
        return self._sum(lambda drive: drive.used)

    @property
    def blocks(self) -> int:
        return self._sum(lambda drive: drive.blocks)

    @property
    def spare(self) -> int:
        """Bytes that the drives which would take a write now have left."""
        return sum(max(0, drive.limit - drive.used) for _, drive in self._writable())

    def excess(self) -> dict[int, int]:
        """Bytes above its limit, by the number of the drive, where there are any."""
        over = {number: drive.used - drive.limit for number, drive in enumerate(self._drives)}
        return {number: size for number, size in over.items() if size > 0 and number not in self._out}

    def _writable(self) -> list[tuple[int, DiskTier]]:
        return [(n, drive) for n, drive in enumerate(self._drives) if n not in self._out and drive.writable]

    def room(self, length: int) -> int:
        """How many blocks of `length` bytes `allocate` would grant now."""
        return sum(drive.room(length) for _, drive in self._writable())

    def allocate(self, length: int, count: int, near: int = NOWHERE) -> U32:
        """Slots for up to `count` blocks of `length` bytes, on one drive if one has room for all.

        That is the drive of the slot `near`, where given and not behind with its work; else the one with the fewest
        calls under way, and of these the emptiest. Fewer come back when limits are reached or drives are left alone.
        """
        left, parts = count, [np.empty(0, dtype=np.uint32)]
        for number, drive in self._in_order(length, count, near):
            if left <= 0:
                break
            got = drive.allocate(length, left)
            parts.append(self._extents.encode(number, got))
            left -= len(got)
        return np.concatenate(parts)

    def _in_order(self, length: int, count: int, near: int) -> list[tuple[int, DiskTier]]:
        candidates = self._writable()
        if len(candidates) < 2:
            return candidates
        wanted = int(self.drives_of(np.array([near], dtype=np.uint32))[0]) if near != NOWHERE else -1
        least = min(drive.pending for _, drive in candidates)

        def rank(candidate: tuple[int, DiskTier]) -> tuple[bool, bool, bool, int, float]:
            number, drive = candidate
            full = drive.room(length) < count
            # One that does not get on with its work must not attract more by what it holds.
            behind = drive.pending > least + 1
            return full, behind, number != wanted, drive.pending, drive.used / max(1, drive.limit)

        return sorted(candidates, key=rank)

    def free(self, slots: U32 | Sequence[int]) -> None:
        """See DiskTier."""
        for number, _, local in self._split(slots):
            self._drives[number].free(local)

    def register_namespace(self, fingerprint: bytes, descriptor: bytes) -> None:
        """See DiskTier."""
        self._namespaces[fingerprint] = descriptor
        for drive in self._drives:
            drive.register_namespace(fingerprint, descriptor)

    # -- health

    @property
    def state(self) -> str:
        """ok, sick (at least one drive is) or closed."""
        if self._closed:
            return "closed"
        return "ok" if self.reason is None else "sick"

    @property
    def reason(self) -> str | None:
        """Why, with the directory where there are several."""
        reasons = [(drive, self._reason_of(number)) for number, drive in enumerate(self._drives)]
        sick = [(drive, reason) for drive, reason in reasons if reason is not None]
        if not sick:
            return None
        if len(self._drives) == 1:
            return sick[0][1]
        return "; ".join(f"{drive.directory}: {reason}" for drive, reason in sick)

    def _reason_of(self, number: int) -> str | None:
        return self._out.get(number) or self._drives[number].reason

    @property
    def hangs(self) -> str | None:
        """Which drives do not answer, if any: what is under way there cannot be waited for."""
        hung = [(drive, drive.hangs) for number, drive in enumerate(self._drives) if number not in self._out]
        return "; ".join(f"{drive.directory}: {reason}" for drive, reason in hung if reason is not None) or None

    @property
    def writable(self) -> bool:
        """Whether any drive would try a write now."""
        return not self._closed and bool(self._writable())

    @property
    def readable(self) -> bool:
        """Whether any drive would try a read now."""
        return any(drive.readable for number, drive in enumerate(self._drives) if number not in self._out)

    def readable_slots(self, slots: U32) -> Bools:
        """Whether a read of each slot would be tried now."""
        well = [number not in self._out and drive.readable for number, drive in enumerate(self._drives)]
        result: Bools = np.array(well)[self.drives_of(slots)]
        return result

    def writable_slots(self, slots: U32) -> Bools:
        """Whether the drive of each slot would take a write now."""
        well = np.zeros(len(self._drives), dtype=np.bool_)
        well[[number for number, _ in self._writable()]] = True
        result: Bools = well[self.drives_of(slots)]
        return result

    # -- moving bytes

    async def write(self, jobs: Sequence[WriteJob]) -> list[str | None]:
        """See DiskTier; drives write at the same time, and the slowest decides when this ends."""
        calls = []
        for number, at, local in self._split([job.slot for job in jobs]):
            mine = [
                WriteJob(slot, jobs[i].meta, jobs[i].payload)
                for i, slot in zip(at.tolist(), local.tolist(), strict=True)
            ]
            calls.append((at, self._drives[number].write(mine)))
        return await _together(len(jobs), calls)

    async def read(self, jobs: Sequence[ReadJob]) -> list[str | None]:
        """See DiskTier; drives read at the same time, and the slowest decides when this ends."""
        calls = []
        for number, at, local in self._split([job.slot for job in jobs]):
            mine = []
            for i, slot in zip(at.tolist(), local.tolist(), strict=True):
                job = jobs[i]
                mine.append(ReadJob(slot, job.namespace, job.block_hash, job.group, job.length, job.into))
            calls.append((at, self._drives[number].read(mine)))
        return await _together(len(jobs), calls)

    async def flush(self) -> str | None:
        """Wait until everything queued before, removals included, is durable on all drives; why not."""
        reasons = await asyncio.gather(*(drive.flush() for n, drive in enumerate(self._drives) if n not in self._out))
        return next((reason for reason in reasons if reason is not None), None)

    # -- watching

    async def watch(self, number: int) -> Recovery | None:
        """Look once at a drive (see DiskTier). One that was left out is tried again; what it holds when it joins is
        told, and those of its slots that are not wanted are the caller's to free.
        """
        drive = self._drives[number]
        if number not in self._out:
            await drive.watch()
            return None
        if self._closed or self._clock() < self._retry_at[number]:
            return None
        late = self._late.get(number)
        if late is not None:
            if not late.done():
                return None
            del self._late[number]
            if late.exception() is None:
                drive.abandon()
        opener = self._openers.get(number)
        if opener is None:
            opener = self._openers[number] = Workers("kvcascade-disk-open", 1, self._clock)
        try:
            recovery = await opener.begin(drive.open)
        except CascadeError as error:
            self._leave_out(number, error)
            return None
        del self._openers[number]
        await opener.stop(1.0)
        for fingerprint, descriptor in self._namespaces.items():
            drive.register_namespace(fingerprint, descriptor)
        del self._out[number]
        _log.warning("drive joined directory=%s blocks=%d", drive.directory, len(recovery))
        return replace(recovery, slot=self._extents.encode(number, recovery.slot))

    # -- telling

    def status(self) -> dict[str, Any]:
        """A snapshot for `kvcascade status`: the drives together, and each by itself. Does no IO."""
        each = []
        for number, drive in enumerate(self._drives):
            one = drive.status()
            if number in self._out:
                one |= {"state": "sick", "reason": self._out[number]}
            each.append(one)
        if len(each) == 1:
            return {**each[0], "drives": each}
        counters: Counter[str] = Counter()
        nested: dict[str, Counter[str]] = {"misses": Counter(), "failures": Counter()}
        for one in each:
            for name, value in one["counters"].items():
                if isinstance(value, dict):
                    nested[name].update(value)
                else:
                    counters[name] += value
        return {
            "name": "disk",
            "state": self.state,
            "reason": self.reason or "",
            "directory": ", ".join(one["directory"] for one in each),
            **{name: sum(one[name] for one in each) for name in _SUMMED},
            "classes": [one for drive in each for one in drive["classes"]],
            "counters": {**counters, **{name: dict(values) for name, values in nested.items()}},
            "drives": each,
        }

    def check(self) -> list[str]:
        """Violations of the invariants, in words; empty when all is well. Does no IO."""
        several = len(self._drives) > 1
        return [
            f"{drive.directory}: {problem}" if several else problem
            for number, drive in enumerate(self._drives)
            if number not in self._out
            for problem in drive.check()
        ]

    # -- end

    async def close(self, deadline: float = 10.0) -> bool:
        """Close all drives at the same time (see DiskTier); False if one took longer than `deadline` seconds."""
        self._closed = True
        there = [drive for number, drive in enumerate(self._drives) if number not in self._out]
        closed = await asyncio.gather(*(drive.close(deadline) for drive in there))
        for number, late in self._late.items():
            if late.done() and late.exception() is None:
                self._drives[number].abandon()
        answered = all(late.done() for late in self._late.values())
        stopped = [await opener.stop(0.0) for opener in self._openers.values()]
        return all(closed) and all(stopped) and answered


async def _together(count: int, calls: list[tuple[npt.NDArray[np.intp], Any]]) -> list[str | None]:
    """Outcomes of calls on several drives, each put at its positions."""
    if len(calls) == 1:
        # All positions, in order.
        outcome: list[str | None] = await calls[0][1]
        return outcome
    tasks = [asyncio.ensure_future(call) for _, call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await outlast(tasks)
        raise
    reasons: list[str | None] = [None] * count
    for (at, _), task in zip(calls, tasks, strict=True):
        for i, reason in zip(at.tolist(), task.result(), strict=True):
            reasons[i] = reason
    return reasons


def _all_at_once(calls: Sequence[Callable[[], Recovery]]) -> list[Future[Recovery]]:
    """Begin each call in a thread of its own, which does not keep the process."""
    futures: list[Future[Recovery]] = [Future() for _ in calls]

    def run(call: Callable[[], Recovery], future: Future[Recovery]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threads = [
        threading.Thread(target=run, args=pair, name=f"kvcascade-disk-open-{number}", daemon=True)
        for number, pair in enumerate(zip(calls, futures, strict=True))
    ]
    for thread in threads:
        thread.start()
    return futures
