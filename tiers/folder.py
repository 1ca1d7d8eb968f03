"""A directory of the disk tier, held open: every system call that the tier makes on its files goes through here.

The rule: nothing of the disk tier touches a file but by a `Folder`. Names are resolved in the directory that was
opened, never again by its path, so that a mount that vanishes cannot turn the next write into one on the file system
below it. And it is the one seam at which a test puts a layer that fails, tears, hangs, flips or forgets, by name.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_UNCOUNTED: Final = 1 << 62
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


@dataclass(slots=True, frozen=True)
class Space:
    """Bytes of a file system: all of it, and what an unprivileged user may still take."""

    total: int
    available: int


class Folder:
    """A directory by its descriptor. All methods block and raise OSError; any thread may call them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    # -- names

    def names(self) -> list[str]:
        return os.listdir(self.fd)  # noqa: PTH208 (by descriptor)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.fd)

    def rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a name, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names durable."""
        os.fsync(self.fd)

    def moved(self) -> bool:
        """Whether the path leads elsewhere or nowhere by now: a mount that vanished, a directory that was replaced."""
        try:
            there = self.path.stat()
        except OSError:
            return True
        here = os.fstat(self.fd)
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)

    def space(self) -> Space:
        figures = os.fstatvfs(self.fd)
        if not figures.f_blocks:
            # ramfs and its kind keep no count.
            return Space(_UNCOUNTED, _UNCOUNTED)
        return Space(figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)

    # -- open files

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes written, maybe fewer than asked."""
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes read, fewer than asked at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def sync_data(self, fd: int) -> None:
        """Make the content durable, and what is needed to find it."""
        os.fdatasync(fd)

    def go_buffered(self, fd: int) -> None:
        """Take O_DIRECT from an open file."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Have the file system set aside [offset, offset + length), the file growing if need be; where it cannot, only
        the size grows."""
        try:
            _fallocate(fd, 0, offset, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            if os.fstat(fd).st_size < offset + length:
                os.ftruncate(fd, offset + length)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Return a range's blocks to the file system, which then reads as zeros; False where it cannot."""
        try:
            _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return False
        return True


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    while _libc.fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def write_whole(folder: Folder, fd: int, content: Buffer, offset: int) -> None:
    """Write all of `content`."""
    view = memoryview(content)
    while view:
        written = folder.write(fd, [view], offset)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        view = view[written:]


def read_whole(folder: Folder, name: str, most: int | None = None) -> bytearray:
    """A file's content, its first `most` bytes."""
    fd = folder.open(name, os.O_RDONLY)
    try:
        size = folder.fstat(fd).st_size
        content = bytearray(size if most is None else min(size, most))
        reached = 0
        while reached < len(content):
            got = folder.read(fd, [memoryview(content)[reached:]], reached)
            if got == 0:
                break
            reached += got
        del content[reached:]
        return content
    finally:
        folder.close_file(fd)


def write_durably(folder: Folder, name: str, content: Buffer) -> None:
    """Put a whole file under a name, or leave the name as it was: write beside, sync, rename, sync the directory."""
    # The directory has one owner, and no two of its threads write the same file.
    temporary = f"{name}.tmp"
    try:
        fd = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_whole(folder, fd, content, 0)
            folder.sync_data(fd)
        finally:
            folder.close_file(fd)
        folder.rename(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            folder.unlink(temporary)
        raise
    folder.sync()
