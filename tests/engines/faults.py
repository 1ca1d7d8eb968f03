"""Faults for the disk tier, put at the one place where it meets the kernel (`tiers/folder.py`), chosen by name.

A `Faults` holds rules; `folder` makes the folders that obey them. A rule names an operation and a pattern of file names
and says what happens at the n-th time: an error, a short transfer, a flipped bit, a wait without end, or the end of the
process. `PowerCut` makes folders that remember what was not synced, and forgets a part of it on `cut`.
"""

import errno
import fcntl
import fnmatch
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcascade.tiers.folder import Buffer, Folder, Space


@dataclass
class Fault:
    """What happens to an operation: `write`, `read`, `sync`, `open`, `rename`, `unlink`, `names`, `allocate`, `stat`.

    `name`: a pattern of file names, or of directory/file. `what`: an errno's name, "short", "flip", "hang", "kill"
    (before), "torn kill" (after half of it) or "late kill" (after all of it). `skip`: so many pass first; `times`: so
    many are struck, all without a number. `done` counts.
    """

    operation: str
    name: str
    what: str
    skip: int = 0
    times: int | None = None
    at: int | None = None  # only transfers that touch this byte of the file
    done: int = 0
    seen: int = 0


@dataclass
class Faults:
    """Rules, shared by the folders that it makes; change everything at any time.

    `direct`: whether direct IO is allowed. `available`: bytes that the file system claims to have left.
    """

    rules: list[Fault] = field(default_factory=list)
    direct: bool = True
    available: int | None = None

    def __post_init__(self) -> None:
        self.released = threading.Event()
        self.hanging = threading.Semaphore(0)  # one permit a call that hangs
        self._lock = threading.Lock()

    def add(
        self, operation: str, name: str, what: str, *, skip: int = 0, times: int | None = None, at: int | None = None
    ) -> Fault:
        rule = Fault(operation, name, what, skip, times, at)
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """The device is well again; what hangs goes on."""
        self.rules.clear()
        self.released.set()

    def folder(self, path: Path) -> Folder:
        return FaultyFolder(path, self)

    def strike(self, operation: str, name: str, span: range = range(0)) -> str | None:
        """What happens to this call, errors and waits having happened by then."""
        with self._lock:
            rule = next((rule for rule in self.rules if self._strikes(rule, operation, name, span)), None)
        if rule is None:
            return None
        if rule.what == "hang":
            self.hanging.release()
            self.released.wait()
        elif rule.what == "kill":
            end()
        elif rule.what in ERRORS:
            raise OSError(ERRORS[rule.what], os.strerror(ERRORS[rule.what]))
        return rule.what

    @staticmethod
    def _strikes(rule: Fault, operation: str, name: str, span: range) -> bool:
        known = name if "/" in rule.name else name.rpartition("/")[2]
        if rule.operation != operation or not fnmatch.fnmatch(known, rule.name):
            return False
        if rule.at is not None and rule.at not in span:
            return False
        rule.seen += 1
        if rule.seen <= rule.skip or (rule.times is not None and rule.done >= rule.times):
            return False
        rule.done += 1
        return True


ERRORS = {name: code for code, name in errno.errorcode.items()}


def end() -> None:
    """As a crash: nothing runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyFolder(Folder):
    """A directory whose operations are struck by rules. Knows open files by the name they were opened by."""

    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(path)
        self._faults = faults
        self._names: dict[int, str] = {}

    def _strike(self, operation: str, name: str) -> str | None:
        return self._faults.strike(operation, f"{self.path.name}/{name}")

    def _strike_transfer(self, operation: str, fd: int, buffers: Sequence[Buffer], offset: int) -> str | None:
        length = sum(memoryview(one).nbytes for one in buffers)
        if not self._faults.direct and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        name = f"{self.path.name}/{self._names.get(fd, '')}"
        return self._faults.strike(operation, name, range(offset, offset + length))

    def _after(self, what: str | None) -> None:
        if what == "late kill":
            end()

    def names(self) -> list[str]:
        self._strike("names", ".")
        return super().names()

    def moved(self) -> bool:
        return self._strike("moved", ".") == "vanish" or super().moved()

    def space(self) -> Space:
        self._strike("space", ".")
        found = super().space()
        return found if self._faults.available is None else Space(found.total, self._faults.available)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        what = self._strike("open", name)
        if flags & os.O_DIRECT and not self._faults.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fd = super().open(name, flags, mode)
        self._names[fd] = name
        self._after(what)
        return fd

    def close_file(self, fd: int) -> None:
        self._names.pop(fd, None)
        super().close_file(fd)

    def stat(self, name: str) -> os.stat_result:
        self._strike("stat", name)
        return super().stat(name)

    def rename(self, name: str, to: str) -> None:
        what = self._strike("rename", to)
        super().rename(name, to)
        self._after(what)

    def unlink(self, name: str) -> None:
        what = self._strike("unlink", name)
        super().unlink(name)
        self._after(what)

    def sync(self) -> None:
        what = self._strike("sync", ".")
        super().sync()
        self._after(what)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        what = self._strike_transfer("write", fd, buffers, offset)
        if what in ("short", "torn kill"):
            whole = b"".join(bytes(memoryview(one).cast("B")) for one in buffers)
            self._write_plainly(fd, whole[: len(whole) // 2], offset)
            if what == "torn kill":
                end()
            return len(whole) // 2
        written = super().write(fd, buffers, offset)
        self._after(what)
        return written

    def _write_plainly(self, fd: int, content: bytes, offset: int) -> None:
        """Any length, past O_DIRECT."""
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(other, content, offset)
        finally:
            os.close(other)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        what = self._strike_transfer("read", fd, buffers, offset)
        reached = super().read(fd, buffers, offset)
        if what == "short":
            return reached // 2
        if what == "flip" and reached:
            longest = max((memoryview(one).cast("B") for one in buffers), key=len)
            longest[len(longest) // 2] ^= 4
        return reached

    def sync_data(self, fd: int) -> None:
        what = self._strike("sync", self._names.get(fd, ""))
        super().sync_data(fd)
        self._after(what)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        what = self._strike("allocate", self._names.get(fd, ""))
        super().allocate(fd, offset, length)
        self._after(what)


class PowerCut:
    """Makes folders whose writes are lost, each page by chance, until they were synced; names too.

    `cut` ends the power: every operation fails from then on. `forget`, when nobody has the directory open any more,
    puts it in a state that the drive may be left in.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.off = False
        self.lock = threading.RLock()
        self.path = Path()
        # What undoes a change that may be lost: (name of file, offset, bytes before), and names made but not synced.
        self.pages: list[tuple[str, int, bytes]] = []
        self.made: list[str] = []
        self.renamed: list[tuple[str, str, bytes | None]] = []
        self.countdown: int | None = None

    def folder(self, path: Path) -> Folder:
        self.path = path
        return _ForgetfulFolder(path, self)

    def cut(self) -> None:
        self.off = True

    def step(self) -> None:
        if self.countdown is not None:
            self.countdown -= 1
            self.off |= self.countdown < 0
        if self.off:
            raise OSError(errno.EIO, "the power is off")

    def forget(self) -> None:
        """Undo some of what was not synced: pages each by chance, names from the newest on."""
        for name, offset, before in reversed(self.pages):
            file = self.path / name
            if file.exists() and self.chance.random() < 0.5:
                with file.open("r+b") as opened:
                    opened.seek(offset)
                    opened.write(before)
        for name, to, before_rename in reversed(self.renamed):
            if self.chance.random() < 0.5:
                (self.path / to).rename(self.path / name)
                if before_rename is not None:
                    (self.path / to).write_bytes(before_rename)
        for name in reversed(self.made):
            if self.chance.random() < 0.5:
                (self.path / name).unlink(missing_ok=True)


_PAGE = 4096


class _ForgetfulFolder(Folder):
    def __init__(self, path: Path, power: PowerCut) -> None:
        super().__init__(path)
        self._power = power
        self._names: dict[int, str] = {}

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        with self._power.lock:
            self._power.step()
            new = flags & os.O_CREAT and name not in super().names()
            fd = super().open(name, flags, mode)
            self._names[fd] = name
            if new:
                self._power.made.append(name)
            return fd

    def close_file(self, fd: int) -> None:
        self._names.pop(fd, None)
        super().close_file(fd)

    def rename(self, name: str, to: str) -> None:
        with self._power.lock:
            self._power.step()
            target = self.path / to
            before = target.read_bytes() if target.exists() else None
            super().rename(name, to)
            self._power.made = [made for made in self._power.made if made != name]
            self._power.renamed.append((name, to, before))

    def unlink(self, name: str) -> None:
        with self._power.lock:
            self._power.step()
            super().unlink(name)

    def sync(self) -> None:
        with self._power.lock:
            self._power.step()
            super().sync()
            self._power.made.clear()
            self._power.renamed.clear()

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._power.lock:
            self._power.step()
            length = sum(memoryview(one).nbytes for one in buffers)
            name = self._names[fd]
            file = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                first = offset // _PAGE * _PAGE
                for page in range(first, offset + length, _PAGE):
                    before = os.pread(file, _PAGE, page)
                    low, high = max(page, offset), min(page + _PAGE, offset + length)
                    kept = before.ljust(_PAGE, b"\0")[low - page : high - page]
                    self._power.pages.append((name, low, kept))
            finally:
                os.close(file)
            return super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self._power.off:
            raise OSError(errno.EIO, "the power is off")
        return super().read(fd, buffers, offset)

    def sync_data(self, fd: int) -> None:
        with self._power.lock:
            self._power.step()
            super().sync_data(fd)
            name = self._names[fd]
            self._power.pages = [page for page in self._power.pages if page[0] != name]

    def allocate(self, fd: int, offset: int, length: int) -> None:
        with self._power.lock:
            self._power.step()
            super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        with self._power.lock:
            self._power.step()
            return super().punch(fd, offset, length)
