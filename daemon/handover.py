"""One daemon takes over from another: the DRAM pool with its blocks, the disk, the socket; without a loss.

The new daemon (`kvcascade serve --takeover`, a `Successor`) asks the running one (its `Predecessor`) step by step over
the control socket; one request a step, answered when the step is done:

    begin    who may (this user alone), both sides' formats, the pool's memfd; the new one checks its settings
    freeze   the old one grants no more slots, waits a moment for stores under way, lets its transfers end, stops
             reading requests (they wait in the sockets) and gives the disk's directory free; refused while a drive
             does not answer
    read     namespaces, the blocks in DRAM, and the slots that somebody may still be writing, in bounded pieces;
             the new one opens the disk, builds its index and proves it
    commit   the old one voids all generations and gives its lock and its listening socket
    serving  the new one holds all, and will serve. The old one ends when it hears it: this is the commit point

Until the commit point the connection's end, a refusal or FROZEN_S seconds without progress bring the old daemon back to
serving, with its index as it was: the new one changes nothing in the pool before it. (It may have added records to the
disk's journal; the old one opens the directory anew.) If the old one dies before, the new one starts cold, as after any
crash. Between `commit` and `serving`, microseconds, the old one waits as long as the new process lives.

What is not handed over: leases (a new boot id voids them, sessions re-attach), HBM (its blocks are copied to DRAM where
there is room) and the generations, of which no process but their first owner can have a writable mapping: the new
daemon has a table of its own, and the old table is voided as a whole before the new one may hand out a slot.

Slots of open reservations, and those in quarantine, stay withheld in the new daemon until each process that may be
writing there has re-attached and said that its copies have ended (`resume`), or is dead: the rule for sessions that
lost their sockets, which theirs did. Their pidfds are handed over, so that a pid is never mistaken for another.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from kvcascade.config import VERSION
from kvcascade.config.errors import CascadeError, ConfigError, DaemonUnavailable, ProtocolError, Refused
from kvcascade.config.settings import Settings, format_bytes
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.memory import SharedMemory
from kvcascade.tiers.namespace import Namespace

from .client import Client
from .index import U32, U64
from .lease import Entry, Reservation, Writer
from .plans import Space, Warm
from .protocol import MAX_DESCRIPTORS, OP_TAKEOVER, POOL_DRAM, take, take_u8, take_u32, take_u64
from .recovery import describe, warm_pieces
from .residency import Residency

if TYPE_CHECKING:
    from .server import Daemon
    from .session import Session

log = logging.getLogger("kvcascade.handover")

FORMAT: Final = 1  # of all that is told in these steps
PIECE_BYTES: Final = 4 << 20  # of blocks in one frame; half of what a frame may have
BLOCK_BYTES: Final = 32 + 32 + 1 + 4 + 8 + 1 + 1  # of one block in a piece, its tokens apart
STORES_S: Final = 0.5  # for stores under way to be committed
TRANSFERS_S: Final = 10.0  # for copies and disk IO under way
FROZEN_S: Final = 120.0  # for the new daemon to read, open the disk and build its index
STEP_S: Final = 60.0  # the new daemon's patience with one step
OPEN_S: Final = 10.0  # the new daemon's patience with a drive: the old one stands still meanwhile
REOPEN_S: Final = 2.0  # how long the old one waits for its disk before it goes on without, for a while
RETRY_S: Final = 0.05
RETRY_MOST_S: Final = 5.0


class Orphaned(CascadeError):
    """The old daemon has ended before the commit point: there is nothing to take over any more."""


@dataclass(eq=False, slots=True)
class Absent:
    """A process that was attached to the daemon before, and may still write into slots that are withheld for it.

    It counts as one writer of each attachment whose slots it may be writing.
    """

    token: bytes
    pid: int
    uid: int
    pidfd: int | None
    writers: list[Writer]


# ---------------------------------------------------------------------------------------------------- the old daemon


class _State(IntEnum):
    BEGUN = 0
    FREEZING = 1
    FROZEN = 2
    OFFERED = 3  # the new daemon may have what it needs, and has not said that it serves
    OVER = 4


class Predecessor:
    """The running daemon's side of one takeover. `settled` is set when it has come to its end, either way."""

    def __init__(self, daemon: "Daemon", session: "Session") -> None:
        self.session = session
        self.settled = asyncio.Event()
        self._daemon = daemon
        # The loop's thread alone.
        self._state = _State.BEGUN
        self._task: asyncio.Task[None] | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._closed_disk: Drives | None = None  # or told to close
        self._spaces: list[Space] = []
        self._pieces: list[tuple[Space, U32]] = []
        self._late: list[tuple[int, Reservation]] = []  # (number of the attachment, reservation)
        self._writers: list[tuple[int, Writer, Any]] = []  # (number of the attachment, writer, Session or Absent)

    def step(self, correlation: int, body: dict[str, Any]) -> None:
        """Does what the new daemon asks. CascadeError for what cannot be done; the connection goes on."""
        step = take(body, "step", str, hi=16)
        wanted = {
            "begin": _State.BEGUN,
            "freeze": _State.BEGUN,
            "read": _State.FROZEN,
            "commit": _State.FROZEN,
            "serving": _State.OFFERED,
        }.get(step)
        if wanted is None:
            raise ProtocolError(f"field 'step': {step!r} is no step of a takeover")
        if self._state != wanted:
            raise Refused(f"takeover: {step!r} does not follow {self._state.name.lower()}")
        if step == "begin":
            self._begin(correlation, body)
        elif step == "freeze":
            self._state = _State.FREEZING
            self._task = asyncio.create_task(self._freeze(correlation), name="takeover")
        elif step == "read":
            self._read(correlation, body)
        elif step == "commit":
            self._commit(correlation)
        else:
            self._finish()

    def lost(self) -> None:
        """The connection of the new daemon is gone: unless it has said that it serves, all is as it was."""
        if self._state != _State.OVER:
            self._state, freezing = _State.OVER, self._task
            self._task = asyncio.create_task(self._roll_back(freezing), name="takeover's end")

    async def settle(self) -> None:
        """Ends it, for a daemon that is to end: undone if it still can be."""
        if self._state < _State.OFFERED:
            self.session.kill()
        await self.settled.wait()

    # ---- begin

    def _begin(self, correlation: int, body: dict[str, Any]) -> None:
        theirs = take(body, "format", int)
        if theirs != FORMAT:
            raise Refused(f"takeover: the new daemon speaks format {theirs}, this one (version {VERSION}) {FORMAT}")
        dram = self._daemon.residency.dram
        memory = dram.memory.export()
        try:
            self.session.reply_with_descriptors(
                correlation,
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "pid": os.getpid(),
                    "bytes": dram.pool.capacity,
                    "memory_bytes": dram.memory.size,
                    "slab": dram.pool.slab_bytes,
                    "online": dram.pool.online_slabs,
                },
                [memory],
            )
        finally:
            os.close(memory)
        log.info("takeover begun by pid=%d", self.session.pid)

    # ---- freeze

    async def _freeze(self, correlation: int) -> None:
        daemon = self._daemon
        loop = asyncio.get_running_loop()
        try:
            hung = None if daemon.residency.disk is None else daemon.residency.disk.hangs
            if hung is not None:
                # What it reads may still arrive in slots that the new daemon would hand on.
                raise Refused(f"takeover: {hung}; when it answers, or when the daemon is restarted")
            daemon.handing_over = True
            await daemon.stores_end(STORES_S)
            await self._pause(TRANSFERS_S)
            await daemon.freeze(but=self.session)
            if daemon.cluster is not None and not await daemon.cluster.pause(TRANSFERS_S):
                raise Refused(f"takeover: what is sent to Redis has not ended within {TRANSFERS_S:g} s")
            await self._pause(STORES_S)  # for what was asked meanwhile
            disk, daemon.residency.disk = daemon.residency.disk, None
            if disk is not None:
                self._closed_disk = disk
                if not await disk.close(TRANSFERS_S):
                    raise Refused(f"takeover: the disk has not answered within {TRANSFERS_S:g} s")
            self._take_stock()
        except Exception as error:
            if not isinstance(error, CascadeError):
                log.exception("takeover failed")
            # Told, then undone when the new daemon hangs up.
            self.session.reply_error(correlation, error)
            self._overdue = loop.call_later(STEP_S, self.session.kill)
            return
        if self._state == _State.FREEZING:
            self._state = _State.FROZEN
            self._overdue = loop.call_later(FROZEN_S, self.session.kill)
            self.session.reply(correlation, {name: len(what) for name, what in self._parts().items()})

    async def _pause(self, timeout: float) -> None:
        if not await self._daemon.transfer.pause(timeout):
            raise Refused(f"takeover: transfers have not ended within {timeout:g} s")

    def _take_stock(self) -> None:
        daemon = self._daemon
        residency = daemon.residency
        self._spaces = list(residency.spaces)
        width = max((space.shape.block_tokens for space in self._spaces), default=0)
        self._pieces = warm_pieces(residency, max(1, PIECE_BYTES // (BLOCK_BYTES + 4 * width)))
        holders = [a for a in daemon.cache.attachments.values() if a.reservations]
        for number, attachment in enumerate(holders):
            self._late += [(number, reservation) for reservation in attachment.reservations.values()]
            self._writers += [
                (number, writer, one)
                for one in daemon.processes()
                for writer in one.writers
                if writer.attachment is attachment
            ]

    # ---- read

    def _parts(self) -> dict[str, list[Any]]:
        return {"spaces": self._spaces, "blocks": self._pieces, "late": self._late, "writers": self._writers}

    def _read(self, correlation: int, body: dict[str, Any]) -> None:
        part = take(body, "part", str, hi=16)
        lists = self._parts()
        if part not in lists:
            raise ProtocolError(f"field 'part': {part!r} is not one of {', '.join(lists)}")
        at = take(body, "at", int, lo=0, hi=len(lists[part]) - 1)
        if part == "writers":
            self._tell_writers(correlation, self._writers[at : at + MAX_DESCRIPTORS])
            return
        if part == "spaces":
            self.session.reply(correlation, _space(self._spaces[at]))
        elif part == "blocks":
            self.session.reply(correlation, _blocks(describe(self._daemon.residency.index, *self._pieces[at])))
        else:
            self.session.reply(correlation, _late(*self._late[at]))

    def _tell_writers(self, correlation: int, writers: list[tuple[int, Writer, Any]]) -> None:
        told = [
            {
                "attachment": number,
                "token": one.token,
                "rank": writer.rank,
                "pid": one.pid,
                "uid": one.uid,
                "watched": one.pidfd is not None,
            }
            for number, writer, one in writers
        ]
        pidfds = [one.pidfd for _, _, one in writers if one.pidfd is not None]
        self.session.reply_with_descriptors(correlation, {"writers": told}, pidfds)

    # ---- commit

    def _commit(self, correlation: int) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        # Whoever copies out of a slot must see, after the last byte, that the slot may be another's by then.
        for _, tier in self._daemon.pools():
            tier.void()
        self._state = _State.OFFERED
        try:
            self.session.reply_with_descriptors(correlation, {}, self._daemon.address.descriptors())
        except OSError as error:
            raise Refused(f"takeover: the descriptors cannot be sent: {error.strerror}") from error

    def _finish(self) -> None:
        self._state = _State.OVER
        self.settled.set()
        log.info("handed over to pid=%d", self.session.pid)
        self._daemon.stop()

    # ---- back

    async def _roll_back(self, freezing: asyncio.Task[None] | None) -> None:
        daemon = self._daemon
        if self._overdue is not None:
            self._overdue.cancel()
        if freezing is not None:
            await asyncio.wait([freezing])
        if self._closed_disk is not None:
            daemon.reopen_disk(self._closed_disk)
            await daemon.disk_is_back(REOPEN_S)
        daemon.transfer.resume()
        if daemon.cluster is not None:
            daemon.cluster.resume()
        daemon.handing_over = False
        daemon.handover = None
        daemon.thaw()
        self.settled.set()
        log.warning("takeover by pid=%d failed; serving on", self.session.pid)


def _space(space: Space) -> dict[str, Any]:
    return {"namespace": space.namespace.to_map(), "group": space.group}


def _blocks(warm: Warm) -> dict[str, Any]:
    return {
        "space": warm.space.number,
        "keys": warm.keys.astype("<u8").tobytes(),
        "parents": warm.parents.astype("<u8").tobytes(),
        "has_parent": warm.has_parent.astype("u1").tobytes(),
        "pages": warm.pages.astype("<u4").tobytes(),
        "stamps": warm.stamps.astype("<u8").tobytes(),
        "reused": warm.reused.tobytes(),
        "has_tokens": warm.has_tokens.astype("u1").tobytes(),
        "tokens": warm.tokens.astype("<u4").tobytes(),
    }


def _late(number: int, reservation: Reservation) -> dict[str, Any]:
    held = (reservation.state == Entry.OPEN) | (reservation.state == Entry.GONE)
    held &= reservation.pool == POOL_DRAM
    return {
        "attachment": number,
        "space": reservation.space.number,
        "ranks": reservation.attachment.ranks,
        "engine": reservation.attachment.engine,
        "pages": reservation.pages[held].astype("<u4").tobytes(),
        "remaining": reservation.remaining[held].astype("<u8").tobytes(),
    }


# ---------------------------------------------------------------------------------------------------- the new daemon


@dataclass(frozen=True, slots=True)
class Withheld:
    """What one engine of the old daemon may still be writing: `slots` are (group, pages, ranks that are not done)."""

    namespace: Namespace
    ranks: int
    engine: str
    slots: list[tuple[int, U32, U64]]
    writers: list[tuple[bytes, int, int, int, int | None]]  # token, rank, pid, uid, pidfd


class Successor:
    """The new daemon's side of one takeover; `close` it, which before `serving` gives it up.

    Each step raises Orphaned when the old daemon is gone and Refused when it does not do it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.dropped = 0  # blocks of namespaces that this version does not understand
        self._described: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._memory: int | None = None
        self._descriptors: list[int] = []
        self._spaces: dict[int, tuple[Namespace, int]] = {}

    @classmethod
    async def begin(cls, socket_path: os.PathLike[str]) -> "Successor | None":
        """Asks the daemon at the socket to be taken over; None where there is none."""
        client = Client(socket_path, timeout=STEP_S)
        try:
            await asyncio.to_thread(client.connect)
        except DaemonUnavailable:
            return None
        self = cls(client)
        try:
            self._described, descriptors = await self._step("begin", format=FORMAT)
            self._memory = descriptors.pop() if descriptors else None
            if self._memory is None or take(self._described, "format", int) != FORMAT:
                raise Refused("takeover: the running daemon hands over no memory, or in another format")
            log.info("taking over pid=%(pid)s version=%(version)s", self._described)
        except BaseException:
            self.close()
            raise
        return self

    async def _step(self, step: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        body = {"step": step, **fields}
        try:
            return await asyncio.to_thread(self._client.call_with_fds, OP_TAKEOVER, body)
        except DaemonUnavailable as error:
            if self._client.connected:
                raise Refused(f"takeover: {error}") from error
            raise Orphaned(f"takeover: {error}") from error

    def check(self, settings: Settings) -> None:
        """ConfigError for settings that need another pool than the one that is to be taken over."""
        slab, size = take(self._described, "slab", int), take(self._described, "bytes", int)
        if settings.dram.slab != slab:
            raise ConfigError(
                f"dram.slab: {format_bytes(settings.dram.slab)}, but the pool that is to be taken over is cut in slabs "
                f"of {format_bytes(slab)}; a change needs a restart"
            )
        asked = settings.dram.capacity
        if isinstance(asked, int) and asked - asked % slab != size:
            raise ConfigError(
                f"dram.capacity: {format_bytes(asked)}, but the pool that is to be taken over has "
                f"{format_bytes(size)}; a change needs a restart"
            )

    @property
    def capacity(self) -> int:
        return take(self._described, "bytes", int)

    @property
    def online(self) -> int:
        """Slabs that are faulted in."""
        return take(self._described, "online", int)

    def memory(self) -> SharedMemory:
        """The pool; the caller owns it."""
        assert self._memory is not None
        memory = SharedMemory.adopt(self._memory, take(self._described, "memory_bytes", int))
        self._memory = None
        return memory

    async def freeze(self) -> None:
        """The old daemon stands still from here on."""
        self._counts, _ = await self._step("freeze")

    async def read(self, residency: Residency) -> list[Warm]:
        """The blocks that lie in the pool; their spaces are opened in `residency`."""
        for number in range(take(self._counts, "spaces", int)):
            told, _ = await self._step("read", part="spaces", at=number)
            with suppress(CascadeError):
                self._spaces[number] = (Namespace.from_map(take(told, "namespace", dict)), take(told, "group", int))
        warm = []
        for number in range(take(self._counts, "blocks", int)):
            told, _ = await self._step("read", part="blocks", at=number)
            piece = self._warm(residency, told)
            if piece is not None:
                warm.append(piece)
        return warm

    def _warm(self, residency: Residency, told: dict[str, Any]) -> Warm | None:
        count = len(take_u32(told, "pages"))
        known = self._spaces.get(take(told, "space", int))
        if known is None:
            self.dropped += count
            return None
        space = residency.space(*known)
        width = space.shape.block_tokens
        has_tokens = take_u8(told, "has_tokens", count=count) != 0
        return Warm(
            space=space,
            keys=take_u64(told, "keys", count=4 * count).reshape(-1, 4),
            parents=take_u64(told, "parents", count=4 * count).reshape(-1, 4),
            has_parent=take_u8(told, "has_parent", count=count) != 0,
            pages=take_u32(told, "pages"),
            stamps=take_u64(told, "stamps", count=count),
            reused=take_u8(told, "reused", count=count),
            has_tokens=has_tokens,
            tokens=take_u32(told, "tokens", count=width * int(has_tokens.sum())).reshape(-1, width),
        )

    async def read_withheld(self) -> list[Withheld]:
        """Who may still be writing where; the pidfds are the caller's."""
        found: dict[int, Withheld] = {}
        for number in range(take(self._counts, "late", int)):
            told, _ = await self._step("read", part="late", at=number)
            known = self._spaces.get(take(told, "space", int))
            if known is None:
                # Without its blocks' size its slots cannot be kept from use.
                raise Refused("takeover: slots of a namespace that this version does not know are being written")
            namespace, group = known
            pages = take_u32(told, "pages")
            ranks, engine = take(told, "ranks", int), take(told, "engine", str)
            one = found.setdefault(take(told, "attachment", int), Withheld(namespace, ranks, engine, [], []))
            one.slots.append((group, pages.copy(), take_u64(told, "remaining", count=len(pages)).copy()))
        at, total = 0, take(self._counts, "writers", int)
        while at < total:
            told, pidfds = await self._step("read", part="writers", at=at)
            # Owned here until all are read.
            self._descriptors += pidfds
            writers = take(told, "writers", list, lo=1)
            for one in writers:
                pidfd = pidfds.pop(0) if take(one, "watched", bool) else None
                found[take(one, "attachment", int)].writers.append(
                    (
                        take(one, "token", bytes),
                        take(one, "rank", int),
                        take(one, "pid", int),
                        take(one, "uid", int),
                        pidfd,
                    )
                )
            at += len(writers)
        self._descriptors.clear()
        return list(found.values())

    async def commit(self) -> tuple[int, socket.socket]:
        """The lock of the socket's path and the listening socket, the caller's. Then say `serving` at once."""
        _, descriptors = await self._step("commit")
        if len(descriptors) != 2:
            self._descriptors += descriptors
            raise Refused(f"takeover: {len(descriptors)} descriptors came, not the lock and the listening socket")
        return descriptors[0], socket.socket(fileno=descriptors[1])

    def serving(self) -> None:
        """The commit point. DaemonUnavailable: the old daemon is gone or serves on."""
        self._client.post(OP_TAKEOVER, {"step": "serving"})

    def close(self) -> None:
        self._client.close()
        for descriptor in [*self._descriptors, *([] if self._memory is None else [self._memory])]:
            os.close(descriptor)
        self._descriptors.clear()
        self._memory = None


# ------------------------------------------------------------------------------------------------------- the address


class Listener:
    """Accepts connections on a socket that may change hands: it is neither closed nor unlinked here."""

    def __init__(self, sock: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        self._sock = sock
        self._factory = factory
        self._entering: set[asyncio.Task[Any]] = set()
        self._running = False
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)

    def start(self) -> None:
        if not self._running:
            self._running, self._pause = True, None
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def stop(self) -> None:
        """Accepts no more; who connects waits in the socket's backlog."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._running:
            self._running = False
            asyncio.get_running_loop().remove_reader(self._sock)

    async def settle(self) -> None:
        """Returns when every connection that was accepted has been made."""
        if self._entering:
            await asyncio.wait(self._entering)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in self._waiting():
            task = loop.create_task(loop.connect_accepted_socket(self._factory, connection))
            self._entering.add(task)
            task.add_done_callback(self._entered)

    def _waiting(self) -> Iterator[socket.socket]:
        try:
            while True:
                yield self._sock.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: they who wait would be reported again at once.
            log.error("no connection can be accepted reason=%s", error.strerror)
            self.stop()
            self._pause = asyncio.get_running_loop().call_later(1.0, self.start)

    def _entered(self, task: "asyncio.Task[Any]") -> None:
        self._entering.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection failed", exc_info=task.exception())
