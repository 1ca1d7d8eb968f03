"""A drive's directory while it is ours, and every call that blocks on it: for IO threads.

The rule: nothing here decides. The loop's thread says what to do and keeps the books; a call answers with what became
of it, an error as a reason. A call that hangs keeps its thread and its caller's memory, and nothing else.

The lock is held from the start to `close`; `reopen` alone may change hands from one lock, folder and set of descriptors
to the next, while no other call is under way.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, Final

from kvcascade.config.errors import ConfigError

from .directory import DIRECT, OldFormat, discard_content, lock, open_folder, probe_direct, read_format
from .folder import Folder
from .journal import Journal, put_record
from .slabfile import PAGE, ReadJob, Scratch, SlabFile, WriteJob, errno_name, read_slots, write_slots
from .slabfiles import Ranges

WORKED: Final = "worked"

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Seen:
    """What a look at the directory found: why it cannot be used, else the space that others leave; how trials went,
    WORKED or the reason."""

    away: str | None = None
    available: int | None = None
    write: str | None = None
    read: str | None = None


class Opened:
    """One directory, taken. Blocks; from any thread, unless it says otherwise."""

    def __init__(self, directory: Path, reach: Callable[[Path], Folder], *, discard_old: bool) -> None:
        """Take it, and sweep what dead writers left, but for the journal.

        Raises ConfigError, naming disk.directory, where it cannot be ours, and OSError; nothing is held then.
        """
        self.directory = directory
        self._reach = reach
        self._lock_fd: int | None = None
        self._scratch = local()
        self._closed = False
        self.mode = DIRECT
        self.discarded: dict[str, int] = {}
        """What was cleaned away of an earlier version's, by what it was."""
        self.folder = open_folder(directory, reach)
        self.journal = Journal(self.folder, b"")
        try:
            self._lock_fd = lock(self.folder)
            self._identity = self._take_format(discard_old)
            for name in self.folder.names():
                if name.endswith(".tmp"):
                    self.folder.unlink(name)
            self.mode = probe_direct(self.folder)
            self.journal = Journal(self.folder, self._identity)
        except BaseException:
            self.close(())
            raise

    def _take_format(self, discard_old: bool) -> bytes:
        """The directory's id."""
        try:
            return read_format(self.folder, create=True)
        except OldFormat as old:
            if not discard_old:
                raise
            self.discarded = {f"files of format {old.version}": discard_content(self.folder)}
            _log.warning("content of an earlier version discarded directory=%s format=%d", self.directory, old.version)
            return read_format(self.folder, create=True)

    def close(self, files: Iterable[SlabFile]) -> None:
        """Let go of the directory and close its files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.journal.close()
        for file in files:
            if file.fd is not None:
                with contextlib.suppress(OSError):
                    self.folder.close_file(file.fd)
                file.fd = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
        self.folder.close()

    def available(self) -> int:
        """Bytes of the file system that anybody may take."""
        return self.folder.space().available

    def open_file(self, name: str, flags: int = 0) -> int:
        """Open a file for reading and writing, for direct IO if that is to be had."""
        if self.mode == DIRECT:
            try:
                return self.folder.open(name, os.O_RDWR | os.O_DIRECT | flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._give_up_direct()
        return self.folder.open(name, os.O_RDWR | flags)

    def _give_up_direct(self) -> None:
        self.mode = "buffered: direct IO gave EINVAL"
        _log.warning("direct IO given up reason=EINVAL directory=%s", self.directory)

    # -- blocks

    def write(self, file: SlabFile, first: int, jobs: list[WriteJob]) -> tuple[list[str | None], list[bytes]]:
        """Write adjacent slots; a reason a job, and the records of those without. Not yet durable."""
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

    def read(self, file: SlabFile, first: int, jobs: list[ReadJob]) -> list[str | None]:
        """Read adjacent slots; None for each job whose bytes are proven, else the reason."""
        return self._transfer(read_slots, file, first, jobs)

    def _transfer(
        self, move: Callable[..., list[str | None]], file: SlabFile, first: int, jobs: Sequence[Any]
    ) -> list[str | None]:
        """Write or read adjacent slots; without direct IO from the moment on that it is refused."""
        fd = file.fd
        if fd is None:
            return ["no block"] * len(jobs)
        direct = self.mode == DIRECT
        reasons = move(self.folder, fd, first * file.slot_bytes, jobs, direct, self._own_scratch())
        if direct and "EINVAL" in reasons:
            self._give_up_direct()
        if "EINVAL" in reasons:
            with contextlib.suppress(OSError):
                self.folder.go_buffered(fd)
            reasons = move(self.folder, fd, first * file.slot_bytes, jobs, False, self._own_scratch())
        return reasons

    def _own_scratch(self) -> Scratch:
        scratch = getattr(self._scratch, "own", None)
        if scratch is None:
            scratch = self._scratch.own = Scratch()
        assert isinstance(scratch, Scratch)
        return scratch

    # -- space

    def reshape(
        self, file: SlabFile, punches: list[Ranges], needs: list[tuple[int, int]], ahead: tuple[int, int]
    ) -> tuple[str | None, list[tuple[int, int]]]:
        """Punch, then set aside; why it failed, and the ranges of slots that have space now.

        The file is made if it is not there. `ahead` is had only if the file system has it.
        """
        got: list[tuple[int, int]] = []
        size = file.slot_bytes
        try:
            if file.fd is None:
                file.fd = self.open_file(file.name, os.O_CREAT)
                self.folder.sync()
            self._punch(punches)
            for first, count in needs:
                self.folder.allocate(file.fd, first * size, count * size)
                got.append((first, count))
        except OSError as error:
            return errno_name(error), got
        first, count = ahead
        with contextlib.suppress(OSError):
            # Only needed later; a file system too full for it may still have room for what is needed now.
            if count:
                self.folder.allocate(file.fd, first * size, count * size)
                got.append(ahead)
        return None, got

    def punch(self, punches: list[Ranges]) -> str | None:
        """Give the space of slots back; why it failed."""
        return _reason_of(lambda: self._punch(punches))

    def _punch(self, punches: list[Ranges]) -> None:
        for file, ranges in punches:
            if file.fd is not None:
                for first, count in ranges:
                    self.folder.punch(file.fd, first * file.slot_bytes, count * file.slot_bytes)

    # -- durability

    def sync(self, files: frozenset[SlabFile], namespaces: dict[bytes, bytes], records: bytearray) -> str | None:
        """Payloads, then namespaces, then records; why it failed. In one thread, as `rotate`."""
        try:
            for file in files:
                assert file.fd is not None
                self.folder.sync_data(file.fd)
            for fingerprint, descriptor in namespaces.items():
                self.journal.add_namespace(fingerprint, descriptor)
            if records:
                self.journal.append(records)
        except OSError as error:
            return errno_name(error)
        return None

    def rotate(self) -> str | None:
        """Begin another journal segment (`Journal.rotate`); why it failed."""
        return _reason_of(self.journal.rotate)

    def compact(self, up_to: int) -> str | None:
        """Replace old segments by a snapshot (`Journal.compact`); why it failed."""
        return _reason_of(lambda: self.journal.compact(up_to))

    # -- watching: in one thread

    def look(self, files: Sequence[SlabFile], *, try_write: bool, try_read: bool) -> Seen:
        """Whether the directory, its files and lock are still those that were opened, and whether IO works."""
        folder = self.folder
        try:
            if folder.moved():
                return Seen(away="its path leads elsewhere: a mount that vanished, or another directory")
            for file in files:
                if file.fd is not None and not _same(folder, file.name, file.fd):
                    return Seen(away=f"{file.name} was deleted or replaced")
            if self._lock_fd is not None and not _same(folder, "lock", self._lock_fd):
                return Seen(away="its lock was deleted or replaced")
            if "format" not in folder.names():
                return Seen(away="its file 'format' was deleted")
            available = folder.space().available
        except OSError as error:
            # What the device cannot tell now, reads and writes will meet.
            return Seen(read=errno_name(error))
        return Seen(
            available=available,
            write=_reason_of(self._try_write) or WORKED if try_write else None,
            read=_reason_of(lambda: self._try_read(files)) or WORKED if try_read else None,
        )

    def _try_write(self) -> None:
        folder, page = self.folder, self._own_scratch().headers[0]
        fd = self.open_file("probe.tmp", os.O_CREAT)
        try:
            if folder.write(fd, [page], 0) != PAGE:
                raise OSError(errno.EIO, "short write")
            folder.sync_data(fd)
        finally:
            folder.close_file(fd)
            folder.unlink("probe.tmp")

    def _try_read(self, files: Sequence[SlabFile]) -> None:
        """Read some page of the slab files past the page cache, else the format."""
        folder, page = self.folder, self._own_scratch().headers[0]
        for file in files:
            if file.fd is not None and file.grown:
                folder.read(file.fd, [page], 0)
                return
        read_format(folder, create=False)

    def reopen(self, files: Sequence[SlabFile]) -> Seen:
        """No other call under way: take the directory again if it is ours, files and lock."""
        try:
            folder = open_folder(self.directory, self._reach)
        except (ConfigError, OSError) as error:
            return Seen(away=str(error))
        kept = False
        try:
            if read_format(folder, create=False) != self._identity:
                return Seen(away="another directory lies at its path")
            if self._lock_fd is None or not _same(folder, "lock", self._lock_fd):
                fresh = lock(folder)
                if self._lock_fd is not None:
                    os.close(self._lock_fd)
                self._lock_fd = fresh
            names = set(folder.names())
            before, self.folder, kept = self.folder, folder, True
            for file in files:
                if file.fd is not None:
                    with contextlib.suppress(OSError):
                        before.close_file(file.fd)
                    file.fd = None
                fd = self.open_file(file.name) if file.name in names else None
                file.reopened(fd, folder.fstat(fd).st_size // file.slot_bytes if fd is not None else 0)
            self.journal.rebind(folder)
            before.close()
            return Seen(available=folder.space().available)
        except ConfigError as error:
            return Seen(away=str(error))
        except OSError as error:
            return Seen(away=f"cannot be opened: {errno_name(error)}")
        finally:
            if not kept:
                folder.close()


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
