"""The daemon's life: take the tiers and the socket, serve, drain, leave nothing behind.

One event loop (uvloop) owns every decision; data threads move bytes. `Daemon` is the one place where the parts meet.
"""

import asyncio
import fcntl
import gc
import grp
import logging
import os
import resource
import secrets
import signal
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import cbor2
import uvloop

from kvcascade.config import VERSION
from kvcascade.config.errors import ConfigError, Refused
from kvcascade.config.settings import Settings, bytes_of, format_bytes
from kvcascade.tiers.block import CRYPTOGRAPHIC, default_seed, hash_self_test, none_hash
from kvcascade.tiers.disk import DiskTier, Recovery
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.hbm import HbmTier
from kvcascade.tiers.memory import available_memory, require_memory
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.slots import PooledMemory, Progress

from . import protocol
from .cache import Cache
from .protocol import POOL_DRAM, POOL_HBM
from .residency import Residency
from .session import Session
from .status import describe
from .transfer import Transfer

log = logging.getLogger("kvcascade.daemon")

DESCRIPTORS = 320  # of pools, disk files and the loop; a slab file a block size, at most 255 of them
DESCRIPTORS_PER_SESSION = 2  # its socket and its process's pidfd
TICK_S = 0.05  # how late a lease may end
MAX_SOCKET_PATH = 107  # bytes; the kernel's limit


class Daemon:
    """All parts of a running daemon. `serve` runs it; everything else is for sessions, on the loop's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        folder: Callable[[Path], Folder] = Folder,
    ) -> None:
        """`folder`: how the disk tier reaches its directories; tests put faults there."""
        hash_self_test()
        self.settings = settings
        self.clock = clock
        self._folder = folder
        self.hung = False  # a device has not answered by the end: its threads never will
        self.boot = secrets.token_bytes(16)
        self.started = time.time()
        self.socket_path = settings.daemon.socket or protocol.default_socket_path()
        self.draining = False
        self.counters: Counter[str] = Counter()
        self.sessions: set[Session] = set()
        self.recovered: dict[str, Any] = {}
        self._lost: dict[bytes, Session] = {}  # sessions whose socket is closed and whose process may still write
        self._watched: set[int] = set()  # pidfds on the loop
        self._stop = asyncio.Event()
        self._nothing_reserved = asyncio.Event()  # set by the tick while draining
        self._no_sessions = asyncio.Event()
        self._no_sessions.set()
        algo = settings.daemon.hash_algo
        self.none_hash = none_hash(settings.daemon.seed or default_seed(algo), algo)
        self.residency: Residency
        self.cache: Cache
        self.transfer: Transfer

    # ---- life

    async def serve(self) -> None:
        """Runs until `stop`, then drains within the deadline. ConfigError when a part cannot be had."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            lock = _SocketLock(self.socket_path, settings.daemon.socket_mode, settings.daemon.socket_group)
            stack.callback(lock.close)
            slab = settings.dram.slab
            dram_bytes = bytes_of(settings.dram.capacity, available_memory()[0])
            if settings.hbm.capacity and settings.hbm.device == "cpu":
                # Neither pool is charged before it is faulted in, so each alone would seem to fit.
                require_memory(dram_bytes + settings.hbm.capacity, "dram.capacity with hbm.capacity")
            dram = DramTier(
                dram_bytes,
                slab_bytes=slab,
                huge_pages=settings.dram.huge_pages,
                lock=settings.dram.lock,
                setting="dram.capacity",
            )
            stack.callback(dram.close)
            hbm = None
            if settings.hbm.capacity:
                hbm = HbmTier(settings.hbm.device, settings.hbm.capacity, slab_bytes=slab, setting="hbm.capacity")
                stack.callback(hbm.close)
            disk, recovery = await self._open_disk(stack)
            self.residency = residency = Residency(settings, dram=dram, hbm=hbm, disk=disk)
            if disk is not None and recovery is not None:
                kept = self.residency.recover(recovery)
                dropped = dict(recovery.dropped)
                counted = (
                    (
                        "recovery_unreachable_blocks",
                        "without its prefix, or of an unknown namespace",
                    ),
                    ("disk_trimmed_blocks", "beyond the limit"),
                )
                dropped |= {why: residency.counters[name] for name, why in counted if residency.counters[name]}
                self.recovered = {"blocks": kept, "dropped": dropped, "seconds": recovery.seconds}
                log.info("disk recovered blocks=%d seconds=%.2f dropped=%s", kept, recovery.seconds, dropped)
            self.cache = Cache(settings, self.residency, clock=self.clock)
            loop = asyncio.get_running_loop()
            dram.start(loop, self._came_online)
            if hbm is not None:
                hbm.start(loop)
            self.transfer = await stack.enter_async_context(Transfer(self.residency))
            stack.push_async_callback(self._end_sessions)
            server = await loop.create_unix_server(lambda: Session(self), sock=lock.listen())
            stack.callback(server.close)
            ticker = asyncio.create_task(self._tick(), name="tick")
            stack.callback(ticker.cancel)
            # What lives as long as the daemon is not looked at by every collection.
            gc.collect()
            gc.freeze()
            log.info("serving socket=%s dram=%s", self.socket_path, format_bytes(dram.pool.capacity))
            with suppress(OSError):  # whoever started it may not listen any more, or the log's device be full
                print(f"kvcascade {VERSION} serves on {self.socket_path}", file=sys.stderr, flush=True)
            await self._stop.wait()
            await self._drain(server)

    def _came_online(self, progress: Progress) -> None:
        quarter = progress.capacity // 4
        if progress.online_bytes == progress.capacity or progress.online_bytes % quarter < self.settings.dram.slab:
            log.info("dram %s", progress)
        self.residency.grew()

    async def _open_disk(self, stack: AsyncExitStack) -> tuple[Drives | None, Recovery | None]:
        settings = self.settings.disk
        if not settings.directory:
            return None, None
        drives = []
        for directory in settings.directory:
            whole = _file_system_bytes(directory)
            drives.append(
                DiskTier(
                    directory,
                    bytes_of(settings.capacity, whole),
                    reserve=bytes_of(settings.reserve, whole),
                    threads=settings.threads,
                    discard_old=settings.old_format == "discard",
                    folder=self._folder,
                )
            )
        disk = Drives(drives)
        log.info("opening disk directories=%s", ",".join(map(str, settings.directory)))
        recovery = await asyncio.get_running_loop().run_in_executor(None, disk.open)
        stack.push_async_callback(self._close_disk, disk)
        return disk, recovery

    async def _close_disk(self, disk: Drives) -> None:
        if not await disk.close(max(1.0, self.settings.daemon.drain_deadline)):
            self.hung = True
            log.error("a drive does not answer; ending without it reason=%s", disk.reason)

    def stop(self) -> None:
        """Begins the orderly end; from a signal handler."""
        self._stop.set()

    async def _drain(self, server: asyncio.AbstractServer) -> None:
        """Refuses new work, lets what is open end, writes dirty blocks down; forgets what the deadline leaves."""
        self.draining = True
        deadline = time.monotonic() + self.settings.daemon.drain_deadline
        server.close()
        for session in list(self.sessions):
            session.send_event(protocol.EVENT_BYE, {"reason": "the daemon is ending"})
        # Half of the time for engines to commit what they are storing, the rest to write it down.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.daemon.drain_deadline / 2):
                await self._nothing_reserved.wait()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self.transfer.flush()
        except TimeoutError:
            log.warning("drain deadline passed: dirty blocks are forgotten")

    async def _end_sessions(self) -> None:
        for session in list(self.sessions):
            session.kill()
        # Each is told of its end by the loop, in `connection_lost`.
        await self._no_sessions.wait()
        for pidfd in list(self._watched):
            self._unwatch(pidfd)
        for session in self._lost.values():
            if session.pidfd is not None:
                os.close(session.pidfd)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.cache.expire()
            self.send_fences()
            if self.draining and not self.cache.is_being_stored:
                self._nothing_reserved.set()

    # ---- sessions

    def enter(self, session: Session) -> None:
        """A connection is made. Raises Refused if it may not stay."""
        if self.draining:
            raise Refused("the daemon is ending")
        if len(self.sessions) >= self.settings.limits.sessions:
            raise Refused(f"limits.sessions: the daemon has {len(self.sessions)} sessions already")
        self.sessions.add(session)
        self._no_sessions.clear()
        if session.pidfd is not None:
            self._watched.add(session.pidfd)
            asyncio.get_running_loop().add_reader(session.pidfd, self._process_ended, session)

    def leave(self, session: Session) -> None:
        """Its connection is lost: by its process's death, or with the process alive."""
        if session not in self.sessions:
            if session.pidfd is not None and session.token not in self._lost:
                self._release_pidfd(session)
            return
        self.sessions.discard(session)
        if not self.sessions:
            self._no_sessions.set()
        attachment = session.attachment
        if attachment is not None:
            attachment.sessions -= 1
            if session.role != protocol.ROLE_RANK:
                self.cache.end_leases(attachment)
            if session.writer is not None:
                if session.process_is_dead():
                    self.cache.writer_gone(session.writer)
                else:
                    self.cache.writer_lost(session.writer)
                    self._lost[session.token] = session
            if attachment.sessions == 0:
                self.cache.end_attachment(attachment)
            self.send_fences()
        if session.token not in self._lost:
            self._release_pidfd(session)

    def detach(self, session: Session) -> None:
        """The client says that it is done, and that none of its copies still runs."""
        attachment, writer = session.attachment, session.writer
        session.attachment = session.writer = None
        if attachment is None:
            return
        attachment.sessions -= 1
        if session.role != protocol.ROLE_RANK:
            self.cache.end_leases(attachment)
        if writer is not None:
            self.cache.writer_gone(writer)
        if attachment.sessions == 0:
            self.cache.end_attachment(attachment)

    def resume(self, session: Session, token: bytes) -> None:
        """`session`'s process says that the copies of its earlier session `token` have all ended."""
        earlier = self._lost.get(token)
        if earlier is None or (earlier.pid, earlier.uid) != (session.pid, session.uid):
            return  # another daemon's session, or ended already: nothing is held for it here
        self._forget_lost(earlier)

    def _process_ended(self, session: Session) -> None:
        if session.token in self._lost:
            self._forget_lost(session)
        else:
            session.kill()

    def _forget_lost(self, session: Session) -> None:
        del self._lost[session.token]
        assert session.writer is not None
        self.cache.writer_gone(session.writer)
        self._release_pidfd(session)
        self.send_fences()

    def _release_pidfd(self, session: Session) -> None:
        if session.pidfd is not None:
            self._unwatch(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None

    def _unwatch(self, pidfd: int) -> None:
        if pidfd in self._watched:
            self._watched.discard(pidfd)
            asyncio.get_running_loop().remove_reader(pidfd)

    def send_fences(self) -> None:
        """Sends what the cache wants asked of late writers."""
        for fence in self.cache.take_fences():
            for session in self.sessions:
                if session.writer is fence.writer:
                    leases = protocol.pack_u64(fence.leases)
                    session.send_event(protocol.EVENT_FENCE, {"fence": fence.number, "leases": leases})

    # ---- namespaces

    def differences(self, namespace: Namespace) -> list[str]:
        """How an engine's keys differ from those that this daemon expects: not wrong, but nothing is shared."""
        expected, found = self.settings.daemon, []
        if namespace.hash_algo != expected.hash_algo:
            found.append(
                f"hash algorithm: the engine uses {namespace.hash_algo}, the daemon expects {expected.hash_algo}"
            )
        elif namespace.none_hash != self.none_hash:
            found.append(
                f"seed: the engine's chain root is {namespace.none_hash.hex()[:16]}, the daemon's "
                f"{self.none_hash.hex()[:16]} (PYTHONHASHSEED, or daemon.seed)"
            )
        if namespace.key_scheme != expected.key_scheme:
            found.append(
                f"key scheme: the engine uses {namespace.key_scheme}, the daemon expects {expected.key_scheme}"
            )
        if namespace.hash_algo not in CRYPTOGRAPHIC:
            found.append(f"hash algorithm: {namespace.hash_algo} can collide; token ids are kept and compared")
        return found

    def register_namespace(self, namespace: Namespace) -> None:
        """Makes the namespace's description durable beside its blocks."""
        if self.residency.disk is not None:
            self.residency.disk.register_namespace(namespace.fingerprint(), cbor2.dumps(namespace.to_map()))

    # ---- what sessions and tools see

    def pools(self) -> Iterator[tuple[int, PooledMemory]]:
        """The pools that engines map."""
        yield POOL_DRAM, self.residency.dram
        if self.residency.hbm is not None:
            yield POOL_HBM, self.residency.hbm

    @property
    def lost_sessions(self) -> int:
        """Sessions whose socket is closed while their process lives."""
        return len(self._lost)

    def status(self) -> dict[str, Any]:
        return describe(self)

    def check(self) -> list[str]:
        """Violations of the invariants; empty when all is well."""
        return self.cache.check()


class _SocketLock:
    """The socket's directory, held against a second daemon; a dead one's socket is swept away."""

    def __init__(self, path: Path, mode: int, group: str) -> None:
        self._path = path
        self._mode = mode
        self._group = _group_id(group)
        self._bound = False
        directory = path.parent
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(f"daemon.socket: {path} is too long: a socket's path has at most {MAX_SOCKET_PATH} bytes")
        _require_socket(path)
        try:
            if not directory.exists():
                directory.mkdir(mode=0o700, parents=True)
                if self._group is not None:
                    os.chown(directory, -1, self._group)
                    directory.chmod(0o750)
            if reason := protocol.distrust(path):
                raise ConfigError(f"daemon.socket: {reason}")
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"daemon.socket: {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise ConfigError(f"daemon.socket: another daemon (pid {owner or 'unknown'}) serves {path}") from error
        try:
            _require_unused(path)
        except ConfigError:
            os.close(self._lock)
            raise
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def listen(self) -> socket.socket:
        """A bound socket with its final mode from the first moment on."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            before = os.umask(0o777 & ~self._mode)
            try:
                sock.bind(str(self._path))
            finally:
                os.umask(before)
            self._bound = True
            if self._group is not None:
                os.chown(self._path, -1, self._group)
        except OSError as error:
            sock.close()
            raise ConfigError(f"daemon.socket: {self._path} cannot be used: {error}") from error
        return sock

    def close(self) -> None:
        if self._bound:
            self._path.unlink(missing_ok=True)
        os.close(self._lock)


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


def _file_system_bytes(directory: Path) -> int:
    """Size of the file system that holds a directory, or will hold it once it is made."""
    there = directory
    # Not Path.exists, which raises where a folder may not be entered; the tier says so when it makes the directory.
    while not os.path.exists(there) and there != there.parent:  # noqa: PTH110
        there = there.parent
    found = os.statvfs(there)
    return found.f_blocks * found.f_frsize


def _raise_descriptor_limit(sessions: int) -> None:
    """Takes as many descriptors as the hard limit allows: a session costs two, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS + DESCRIPTORS_PER_SESSION * sessions
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        log.warning("limits.sessions: %d need %d descriptors, RLIMIT_NOFILE is %d", sessions, wanted, soft)


def run(settings: Settings, folder: Callable[[Path], Folder] = Folder) -> int:
    """Serves until SIGTERM or SIGINT; the exit code."""

    async def main() -> None:
        daemon = Daemon(settings, folder=folder)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.stop)
        await daemon.serve()
        if daemon.hung:
            # Tasks that wait for the device cannot be cancelled, since it may still write to their memory.
            logging.shutdown()
            sys.stderr.flush()
            os._exit(0)

    # Disk and copy threads hold the GIL for moments only; the loop must not wait 5 ms for its turn (measured: a p99 of
    # 9 ms became 33 us).
    sys.setswitchinterval(0.0005)
    _raise_descriptor_limit(settings.limits.sessions)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0
