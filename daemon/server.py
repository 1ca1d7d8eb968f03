"""The daemon's life: take the tiers and the socket, serve, drain, leave nothing behind.

One event loop (uvloop) owns every decision; data threads move bytes. `Daemon` is the one place where the parts meet.
"""

import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
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
from kvcascade.config.errors import CascadeError, ConfigError, Refused
from kvcascade.config.settings import Settings, bytes_of, format_bytes
from kvcascade.tiers.block import CRYPTOGRAPHIC, default_seed, hash_self_test, none_hash
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.dram import DramTier
from kvcascade.tiers.drives import OPEN_SECONDS, Drives
from kvcascade.tiers.folder import Folder
from kvcascade.tiers.hbm import HbmTier
from kvcascade.tiers.ledger import Ledger
from kvcascade.tiers.memory import available_memory, require_memory
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.recovery import Recovery
from kvcascade.tiers.slots import PooledMemory, Progress

from . import protocol
from .address import Address, wait_for_owner
from .aside import look_aside
from .cache import Cache
from .cluster import Cluster
from .handover import OPEN_S, RETRY_MOST_S, RETRY_S, Absent, Listener, Orphaned, Predecessor, Successor, Withheld
from .keeper import LEDGER, POOL, Keeper, Remains
from .protocol import POOL_DRAM, POOL_HBM
from .recovery import adopt, relink
from .residency import Residency
from .session import Session
from .status import describe
from .supervisor import Supervisor
from .transfer import Transfer

log = logging.getLogger("kvcascade.daemon")

DESCRIPTORS = 320  # of pools, disk files and the loop; a slab file a block size, at most 255 of them
DESCRIPTORS_PER_SESSION = 2  # its socket and its process's pidfd
TICK_S = 0.05  # how late a lease may end


class Daemon:
    """All parts of a running daemon. `serve` runs it; everything else is for sessions, on the loop's thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        supervisor: Supervisor | None = None,
        folder: Callable[[Path], Folder] = Folder,
    ) -> None:
        """`supervisor`: who is told of the daemon's life.

        `folder`: how the disk tier reaches its directories; tests put faults there.
        """
        hash_self_test()
        self.settings = settings
        self.supervisor = Supervisor({}) if supervisor is None else supervisor
        self.keeper: Keeper | None = None
        self._watchdog_due = 0.0
        self.clock = clock
        self._folder = folder
        self.hung = False  # a device has not answered by the end: its threads never will
        self.boot = secrets.token_bytes(16)
        self.started = clock()
        self.socket_path = settings.daemon.socket or protocol.default_socket_path()
        self.draining = False
        self.counters: Counter[str] = Counter()
        self.sessions: set[Session] = set()
        self.recovered: dict[str, Any] = {}
        self._lost: dict[
            bytes, Session | Absent
        ] = {}  # sessions whose socket is closed and whose process may still write
        self.handing_over = False  # to a daemon that takes over: no slots are granted any more
        self.handover: Predecessor | None = None
        self._frozen = False
        self._reopening: asyncio.Task[None] | None = None
        self._watched: set[int] = set()  # pidfds on the loop
        self._stop = asyncio.Event()
        self._checking = asyncio.Lock()  # a process for each that asks would be too many
        self._nothing_reserved = asyncio.Event()  # set by the tick while draining
        self._nothing_stored = asyncio.Event()  # set by the tick while handing over
        self._no_sessions = asyncio.Event()
        self._no_sessions.set()
        algo = settings.daemon.hash_algo
        self.none_hash = none_hash(settings.daemon.seed or default_seed(algo), algo)
        self.residency: Residency
        self.cache: Cache
        self.transfer: Transfer
        self.cluster: Cluster | None = None  # where this node deals with others
        self.address: Address
        self._listener: Listener

    # ---- life

    async def serve(self, *, takeover: bool = False) -> None:
        """Runs until `stop`, then drains within the deadline. ConfigError when a part cannot be had.

        With `takeover` a daemon that serves the socket hands over to this one and ends; where none does, or it ends
        before it has handed over, this one starts from the disk alone. Refused when it does not hand over.
        """
        if takeover:
            try:
                predecessor = await Successor.begin(self.socket_path)
                if predecessor is not None:
                    await self._serve(predecessor)
                    return
                log.info("no daemon to take over from socket=%s", self.socket_path)
            except Orphaned as error:
                log.warning("starting cold reason=%s", error)
                # Its sockets are closed before its locks are free.
                await asyncio.to_thread(wait_for_owner, self.socket_path)
        await self._serve(None)

    async def _serve(self, predecessor: Successor | None) -> None:
        settings = self.settings
        self.recovered = {}
        cluster = Cluster(self) if Cluster.wanted(settings) else None
        async with AsyncExitStack() as stack:
            if predecessor is None:
                self.address = stack.enter_context(Address.take(self.socket_path, settings.daemon.socket_group))
            else:
                # Closed last: the old daemon goes on when it hears nothing more, and wants its disk back.
                stack.callback(predecessor.close)
            remains = None if predecessor is not None else Remains.find(self.supervisor, settings)
            if remains is not None:
                stack.callback(remains.close)
            dram, hbm = self._open_pools(stack, predecessor or remains)
            if predecessor is not None:
                await predecessor.freeze()
            disk, recovery = await self._open_disk(stack, OPEN_SECONDS if predecessor is None else OPEN_S)
            self.residency = residency = Residency(settings, dram=dram, hbm=hbm, disk=disk)
            stack.push_async_callback(self._end_reopening)
            earlier = predecessor or remains
            warm = [] if earlier is None else await earlier.read(residency)
            taken, kept = adopt(residency, warm, recovery)
            if recovery is not None:
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
            stack.push_async_callback(self._end_sessions)
            if earlier is not None:
                told = sum(len(piece.pages) for piece in warm) + earlier.dropped
                self.recovered["taken_over"] = {"blocks": taken, "dropped": told - taken}
            del warm
            if predecessor is not None:
                for withheld in await predecessor.read_withheld():
                    self._withhold(withheld)
                await self._succeed(stack, predecessor)
            if remains is not None:
                remains.clear_lost(self.residency)
                self._withhold_all(remains)
                for space in self.residency.spaces:
                    self.register_namespace(space.namespace)
            await self._keep(stack, remains)
            loop = asyncio.get_running_loop()
            dram.start(loop, self._came_online)
            if hbm is not None:
                hbm.start(loop)
            self.transfer = await stack.enter_async_context(Transfer(self.residency))
            if cluster is not None:
                await self._join(stack, cluster, must=predecessor is None)
            stack.push_async_callback(self._end_sessions)
            listening = self.address.listen(settings.daemon.socket_mode, settings.daemon.socket_group)
            self._listener = Listener(listening, lambda: Session(self))
            self._listener.start()
            stack.callback(self._listener.stop)
            ticker = asyncio.create_task(self._tick(), name="tick")
            stack.callback(ticker.cancel)
            # What lives as long as the daemon is not looked at by every collection.
            gc.collect()
            gc.freeze()
            log.info("serving socket=%s dram=%s", self.socket_path, format_bytes(dram.pool.capacity))
            with suppress(OSError):  # whoever started it may not listen any more, or the log's device be full
                print(f"kvcascade {VERSION} serves on {self.socket_path}", file=sys.stderr, flush=True)
            self.supervisor.notify("READY=1", f"MAINPID={os.getpid()}")
            await self._stop.wait()
            if self.handover is not None:
                await self.handover.settle()
            if self.handover is None:
                await self._drain()
            else:
                self.address.leave()

    async def _join(self, stack: AsyncExitStack, cluster: Cluster, *, must: bool) -> None:
        """Begins to deal with other nodes. Unless it `must`, the node serves its own engines where that cannot be."""
        try:
            self.cluster = await stack.enter_async_context(cluster)
        except ConfigError as error:
            if must:
                raise
            log.error("serving without other nodes reason=%s", error)
            self.recovered["cluster"] = str(error)

    def _open_pools(
        self, stack: AsyncExitStack, earlier: Successor | Remains | None
    ) -> tuple[DramTier, HbmTier | None]:
        settings = self.settings
        slab = settings.dram.slab
        lock, huge_pages = settings.dram.lock, settings.dram.huge_pages
        if earlier is not None:
            if isinstance(earlier, Successor):
                earlier.check(settings)
            dram = DramTier(
                earlier.capacity, slab_bytes=slab, lock=lock, memory=earlier.memory(), online=earlier.online
            )
        else:
            dram_bytes = bytes_of(settings.dram.capacity, available_memory()[0])
            if settings.hbm.capacity and settings.hbm.device == "cpu":
                # Neither pool is charged before it is faulted in, so each alone would seem to fit.
                require_memory(dram_bytes + settings.hbm.capacity, "dram.capacity with hbm.capacity")
            dram = DramTier(dram_bytes, slab_bytes=slab, huge_pages=huge_pages, lock=lock, setting="dram.capacity")
        stack.callback(dram.close)
        hbm = None
        if settings.hbm.capacity:
            hbm = HbmTier(settings.hbm.device, settings.hbm.capacity, slab_bytes=slab, setting="hbm.capacity")
            stack.callback(hbm.close)
        return dram, hbm

    def _withhold(self, withheld: Withheld) -> None:
        """Keeps from use what processes of the old daemon may still be writing, until they are gone or re-attached."""
        processes = {token: (pid, uid, pidfd) for token, _, pid, uid, pidfd in withheld.writers}
        named = [(token, rank) for token, rank, *_ in withheld.writers]
        try:
            late = self.cache.withhold(withheld.namespace, withheld.ranks, withheld.engine, named, withheld.slots)
        except BaseException:
            for _, _, pidfd in processes.values():
                if pidfd is not None:
                    os.close(pidfd)
            raise
        for writer in late:
            pid, uid, pidfd = processes[writer.token]
            self._await_end(Absent(writer.token, pid, uid, pidfd, [writer]))

    def _await_end(self, absent: Absent) -> None:
        known = self._lost.get(absent.token)
        if isinstance(known, Absent):
            known.writers += absent.writers
            if absent.pidfd is not None:
                os.close(absent.pidfd)
            return
        self._lost[absent.token] = absent
        self._watch(absent)

    def _withhold_all(self, remains: Remains) -> None:
        """After a crash: every process that could write anywhere may be writing into each slot that was reserved."""
        found, writings = remains.withheld()
        absents = {one.token: Absent(one.token, one.pid, one.uid, pidfd, []) for one, pidfd in writings}
        for withheld in found:
            named = [(token, 0) for token in absents]
            for writer in self.cache.withhold(withheld.namespace, 1, withheld.engine, named, withheld.slots):
                absents[writer.token].writers.append(writer)
        for absent in absents.values():
            self._await_end(absent)

    async def _keep(self, stack: AsyncExitStack, remains: Remains | None) -> None:
        """Has the pool and its ledger kept beyond a crash, where the supervisor does that."""
        self.keeper = None
        if not self.supervisor.keeps_descriptors:
            return
        dram = self.residency.dram
        ledger = remains.ledger if remains is not None else Ledger(dram.pool.pages, dram.pool.slab_bytes)
        self.keeper = await stack.enter_async_context(Keeper(self.residency, ledger))
        if remains is not None:
            return
        self.keeper.record_all(self.cache)
        for process in self._lost.values():
            self.keeper.entered(process.token, process.pid, process.uid)
        for name, memory in ((POOL, dram.memory.export()), (LEDGER, ledger.memory.export())):
            self.supervisor.keep(name, memory)
            os.close(memory)

    async def _succeed(self, stack: AsyncExitStack, predecessor: Successor) -> None:
        """Proves what was taken over, and takes the old daemon's place."""
        violations = self.check()
        if violations:
            raise CascadeError(f"takeover: what the old daemon handed over is not sound: {violations[0]}")
        for space in self.residency.spaces:
            self.register_namespace(space.namespace)
        if self._stop.is_set():
            raise Refused("takeover: told to end before it was done")
        lock, listener = await predecessor.commit()
        self.address = Address(self.socket_path, lock, listener)
        self.supervisor.notify(f"MAINPID={os.getpid()}")
        try:
            predecessor.serving()
        except BaseException as error:
            self.address.leave()
            raise Orphaned(f"takeover: {error}") from error
        stack.enter_context(self.address)
        self.address.sign(self.settings.daemon.socket_mode, self.settings.daemon.socket_group)
        predecessor.close()
        log.info("took over recovered=%s", self.recovered)

    def _came_online(self, progress: Progress) -> None:
        quarter = progress.capacity // 4
        if progress.online_bytes == progress.capacity or progress.online_bytes % quarter < self.settings.dram.slab:
            log.info("dram %s", progress)
        self.residency.grew()

    async def _open_disk(self, stack: AsyncExitStack, patience: float) -> tuple[Drives | None, Recovery | None]:
        disk = self._disk(patience)
        if disk is None:
            return None, None
        log.info("opening disk directories=%s", ",".join(map(str, self.settings.disk.directory)))
        recovery = await asyncio.get_running_loop().run_in_executor(None, disk.open)
        stack.push_async_callback(self._close_disk, disk)
        return disk, recovery

    def _disk(self, patience: float = OPEN_SECONDS) -> Drives | None:
        settings = self.settings.disk
        if not settings.directory:
            return None
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
        return Drives(drives, patience=patience)

    async def _close_disk(self, disk: Drives) -> None:
        if not await disk.close(max(1.0, self.settings.daemon.drain_deadline)):
            self.hung = True
            log.error("a drive does not answer; ending without it reason=%s", disk.reason)

    def stop(self) -> None:
        """Begins the orderly end; from a signal handler."""
        self._stop.set()

    async def _drain(self) -> None:
        """Refuses new work, lets what is open end, writes dirty blocks down; forgets what the deadline leaves."""
        self.draining = True
        log.info("ending sessions=%d", len(self.sessions))
        self.supervisor.notify("STOPPING=1")
        deadline = time.monotonic() + self.settings.daemon.drain_deadline
        self._listener.stop()
        self.address.deafen()
        for session in list(self.sessions):
            session.send_event(protocol.EVENT_BYE, {"reason": "the daemon is ending"})
        # Half of the time for engines to commit what they are storing, the rest to write it down.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.daemon.drain_deadline / 2):
                await self._nothing_reserved.wait()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._flush()
        except TimeoutError:
            log.warning("drain deadline passed: dirty blocks are forgotten")

    async def _flush(self) -> None:
        """Writes down what would be lost."""
        await asyncio.gather(self.transfer.flush(), *([] if self.cluster is None else [self.cluster.sharing.flush()]))

    async def _end_sessions(self) -> None:
        for session in list(self.sessions):
            session.kill()
        # Each is told of its end by the loop, in `connection_lost`.
        await self._no_sessions.wait()
        for pidfd in list(self._watched):
            self._unwatch(pidfd)
        for lost in self._lost.values():
            if lost.pidfd is not None:
                os.close(lost.pidfd)
        self._lost.clear()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._feed_watchdog()
            if not self._frozen:
                self.cache.expire()
                self.send_fences()
            if self.draining and not self.cache.is_being_stored:
                self._nothing_reserved.set()
            if self.handing_over and not self.cache.is_being_stored:
                self._nothing_stored.set()

    def _feed_watchdog(self) -> None:
        period, now = self.supervisor.watchdog_s, time.monotonic()
        if period is not None and now >= self._watchdog_due:
            self._watchdog_due = now + period / 3
            self.supervisor.notify("WATCHDOG=1")

    # ---- sessions

    def writer_entered(self, session: Session) -> None:
        """Its process may write into slots from now on."""
        if self.keeper is not None:
            self.keeper.entered(session.token, session.pid, session.uid)

    def _writer_left(self, token: bytes) -> None:
        if self.keeper is not None:
            self.keeper.left(token)

    def enter(self, session: Session) -> None:
        """A connection is made. Raises Refused if it may not stay."""
        if self.draining:
            raise Refused("the daemon is ending")
        if len(self.sessions) >= self.settings.limits.sessions:
            raise Refused(f"limits.sessions: the daemon has {len(self.sessions)} sessions already")
        self.sessions.add(session)
        self._no_sessions.clear()
        self._watch(session)

    def _watch(self, process: Session | Absent) -> None:
        if process.pidfd is not None:
            self._watched.add(process.pidfd)
            asyncio.get_running_loop().add_reader(process.pidfd, self._process_ended, process)

    def leave(self, session: Session) -> None:
        """Its connection is lost: by its process's death, or with the process alive."""
        if self.handover is not None and self.handover.session is session:
            self.handover.lost()
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
                    self._writer_left(session.token)
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
            self._writer_left(writer.token)
        if attachment.sessions == 0:
            self.cache.end_attachment(attachment)

    def resume(self, session: Session, token: bytes) -> None:
        """`session`'s process says that the copies of its earlier session `token` have all ended."""
        earlier = self._lost.get(token)
        if earlier is None or (earlier.pid, earlier.uid) != (session.pid, session.uid):
            return  # another daemon's session, or ended already: nothing is held for it here
        self._forget_lost(earlier)

    def _process_ended(self, process: Session | Absent) -> None:
        if process.token in self._lost:
            self._forget_lost(process)
        elif isinstance(process, Session):
            process.kill()

    def _forget_lost(self, session: Session | Absent) -> None:
        del self._lost[session.token]
        for writer in session.writers:
            self.cache.writer_gone(writer)
        self._writer_left(session.token)
        self._release_pidfd(session)
        self.send_fences()

    def _release_pidfd(self, session: Session | Absent) -> None:
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

    # ---- another daemon takes over

    def hand_over(self, session: Session, correlation: int, body: dict[str, Any]) -> None:
        """A step of a takeover that `session` asks for; see handover.py. Refused for another user's process."""
        if session.uid != os.getuid():
            raise Refused(f"takeover: the daemon's user is {os.getuid()}, the one that asks is {session.uid}")
        if self.draining:
            raise Refused("takeover: the daemon is ending")
        if self.handover is None:
            self.handover = Predecessor(self, session)
        if self.handover.session is not session:
            raise Refused(f"takeover: pid {self.handover.session.pid} is taking over already")
        self.handover.step(correlation, body)

    def processes(self) -> Iterator[Session | Absent]:
        """All that are attached, and those that lost their sockets and are not known to have stopped writing."""
        yield from self.sessions
        yield from self._lost.values()

    async def stores_end(self, timeout: float) -> None:
        """Waits until nothing is being stored, at most `timeout` seconds."""
        self._nothing_stored.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._nothing_stored.wait()

    async def freeze(self, *, but: Session) -> None:
        """Takes no requests and no connections, save those of one session, until `thaw`; they wait in their sockets."""
        self._listener.stop()
        await self._listener.settle()
        self._frozen = True
        for session in self.sessions:
            if session is not but:
                session.freeze()

    def thaw(self) -> None:
        self._frozen = False
        for session in self.sessions:
            session.thaw()
        self._listener.start()

    def reopen_disk(self, before: Drives) -> None:
        """Opens the disk anew, when its directory has become free: another daemon had it for a while.

        `before`: as it was open, and may not be closed yet where a device does not answer.
        """
        self._reopening = asyncio.create_task(self._reopen_disk(before), name="reopen disk")

    async def disk_is_back(self, timeout: float) -> None:
        """Waits until it is, or for `timeout` seconds: the daemon can do without for longer."""
        if self._reopening is not None:
            await asyncio.wait([self._reopening], timeout=timeout)

    async def _reopen_disk(self, before: Drives) -> None:
        pause = RETRY_S
        while not await before.close(pause):
            self.hung = True
            pause = min(2 * pause, RETRY_MOST_S)
        self.hung = False
        while True:
            disk = self._disk()
            assert disk is not None
            try:
                recovery = await asyncio.get_running_loop().run_in_executor(None, disk.open)
            except CascadeError as error:
                log.warning("the disk is not back reason=%s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST_S)
                continue
            relink(self.residency, disk, recovery)
            for space in self.residency.spaces:
                self.register_namespace(space.namespace)
            return

    async def _end_reopening(self) -> None:
        """Leaves no disk open that was opened after the start."""
        if self._reopening is None:
            return
        if not self._reopening.done():
            self._reopening.cancel()
            await asyncio.wait([self._reopening])
        if self.residency.disk is not None:
            await self._close_disk(self.residency.disk)

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
        """Violations of the invariants; empty when all is well. O(rows), on the loop."""
        return self.cache.check()

    async def check_aside(self) -> list[str]:
        """`check` as of this moment, or of a later one while another runs, without holding up the loop."""
        async with self._checking:
            return await look_aside(self.check)


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


def run(settings: Settings, folder: Callable[[Path], Folder] = Folder, *, takeover: bool = False) -> int:
    """Serves until SIGTERM or SIGINT, or until another daemon has taken over; the exit code."""

    async def main() -> None:
        daemon = Daemon(settings, supervisor=Supervisor(), folder=folder)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.stop)
        await daemon.serve(takeover=takeover)
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
