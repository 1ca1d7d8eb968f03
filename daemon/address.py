"""The path of the daemon's socket: who has it, and the listening socket there. It may change hands (handover.py)."""

import fcntl
import grp
import logging
import os
import select
import socket
import stat
from pathlib import Path
from typing import Self

from kvcascade.config.errors import ConfigError

from . import protocol

log = logging.getLogger("kvcascade.daemon")

BACKLOG = 128
NO_DESCRIPTOR = -1
OWNER_END_S = 5.0  # for a process that was killed to be gone
MAX_SOCKET_PATH = 107  # bytes; the kernel's limit


class Address:
    """The socket's path: its lock, held against a second daemon, and the listening socket.

    Leaving the context gives the path up; `leave` leaves it to the daemon that has it now.
    """

    def __init__(self, path: Path, lock: int, listener: socket.socket | None = None) -> None:
        self._path = path
        self._lock = lock
        self._listener = listener

    @classmethod
    def take(cls, path: Path, group: str) -> Self:
        """The path's lock; ConfigError when the path cannot be had."""
        self = cls(path, _lock_path(path, _group_id(group)))
        try:
            _require_unused(path)
        except ConfigError:
            self.leave()
            raise
        self._write_pid()
        return self

    def listen(self, mode: int, group: str) -> socket.socket:
        """The listening socket, bound at first, in the place of a dead daemon's: with its final mode from then on."""
        if self._listener is None:
            self._listener = _bind(self._path, mode, _group_id(group))
        return self._listener

    def deafen(self) -> None:
        """Who connects from now on is refused at once."""
        if self._listener is not None:
            self._listener.close()

    def sign(self, mode: int, group: str) -> None:
        """What was another daemon's is ours from here on: says so, and gives the socket the mode of our settings."""
        self._write_pid()
        number = _group_id(group)
        try:
            self._path.chmod(mode)
            if number is not None:
                os.chown(self._path, -1, number)
        except OSError as error:
            log.warning("the socket keeps its mode reason=%s", error.strerror)

    def _write_pid(self) -> None:
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def descriptors(self) -> list[int]:
        """For the daemon that takes over: the lock, the listening socket. They stay ours, too, until `leave`."""
        assert self._listener is not None
        return [self._lock, self._listener.fileno()]

    def leave(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._lock != NO_DESCRIPTOR:
            os.close(self._lock)
            self._lock = NO_DESCRIPTOR

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
        self.leave()


def _lock_path(path: Path, group: int | None) -> int:
    directory = path.parent
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"daemon.socket: {path} is too long: a socket's path has at most {MAX_SOCKET_PATH} bytes")
    _require_socket(path)
    try:
        if not directory.exists():
            directory.mkdir(mode=0o700, parents=True)
            if group is not None:
                os.chown(directory, -1, group)
                directory.chmod(0o750)
        if reason := protocol.distrust(path):
            raise ConfigError(f"daemon.socket: {reason}")
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"daemon.socket: {path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise ConfigError(f"daemon.socket: another daemon (pid {owner or 'unknown'}) serves {path}") from error
    return lock


def wait_for_owner(path: Path) -> None:
    """Returns when the process that had the path last is gone, which is about to end; patiently, but not for ever."""
    try:
        pidfd = os.pidfd_open(int(Path(f"{path}.lock").read_text()))
    except (OSError, ValueError):
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(int(OWNER_END_S * 1000))
    finally:
        os.close(pidfd)


def _bind(path: Path, mode: int, group: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = False
    try:
        path.unlink(missing_ok=True)
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(path))
            bound = True
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, group)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if bound:
            path.unlink(missing_ok=True)
        raise ConfigError(f"daemon.socket: {path} cannot be used: {error}") from error
    return sock


def _require_socket(path: Path) -> None:
    """ConfigError where something lies at the path that is no socket: it is not ours to replace."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing there, or told when it is to be used
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"daemon.socket: {path} exists and is no socket; name another path")


def _require_unused(path: Path) -> None:
    """ConfigError where somebody listens at the path: no daemon of ours, since we hold its lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # its backlog is full
        except OSError:
            return
    raise ConfigError(f"daemon.socket: another program listens at {path}; name another path")


def _group_id(group: str) -> int | None:
    if not group:
        return None
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"daemon.socket_group: there is no group {group!r}") from error
