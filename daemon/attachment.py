"""A process's attachment to the daemon, as connectors use it: operations, mapped pools, copies and fences.

Rule: a slot is touched only inside ``copying``, and the daemon is told that no copy runs only when that is so: a
``fence`` is answered, and an earlier session given up (``resume``), after the copies begun before have ended, and what
was fenced is never copied into again. That is what lets the daemon hand a late writer's slots on.

The session re-attaches by itself on the next use after a lost connection, with back-off; no operation takes longer than
its timeout. Operations raise (DaemonUnavailable, Refused, ...); a connector makes misses of that.
"""

import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcascade.config.errors import CascadeError, DaemonUnavailable, ProtocolError, Refused

from .client import DEFAULT_TIMEOUT_S, Client
from .protocol import (
    EVENT_FENCE,
    OP_ABORT,
    OP_ATTACH,
    OP_COMMIT,
    OP_COMPUTED,
    OP_DETACH,
    OP_FAILED,
    OP_FENCED,
    OP_HANDOFF,
    OP_LOAD,
    OP_LOOKUP,
    OP_RELEASE,
    OP_RESERVE,
    PAGE,
    PROTOCOL_VERSION,
    ROLE_ENGINE,
    BlockState,
    pack_u32,
    pack_u64,
    take,
    take_u8,
    take_u32,
    take_u64,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_LAST_S: Final = 5.0
# Leases remembered as fenced; the slots' generations tell the same as soon as the daemon has seen the answer.
FENCED_REMEMBERED: Final = 4096
# What a load leaves of its timeout for the way to the daemon and back.
LOAD_MARGIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Attached:
    """What the daemon said at attach. ``boot`` names the daemon's incarnation, ``attachment`` is what ranks join.

    ``ticket`` is that of every hand-off of this incarnation; empty where it serves no other node.
    """

    boot: bytes
    session: bytes
    attachment: bytes
    namespace: bytes
    warnings: tuple[str, ...]
    lease_ms: int
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class Lookup:
    """``matched`` leading blocks lie in some local tier or are on their way from elsewhere; ``ready`` are in memory.

    ``tiers`` names each one's tier or source. ``asking``: other nodes are being asked for more, so ask again to know
    (or compute). ``lease`` pins the blocks until released, or for ``deadline_ms``; 0: nothing is pinned. ``found``, for
    blocks asked for one by one: where the matched ones stand among the hashes.
    """

    lease: int
    matched: int
    ready: int
    tiers: "NDArray[np.uint8]"
    deadline_ms: int
    asking: bool = False
    found: "NDArray[np.uint32] | None" = None


@dataclass(frozen=True, slots=True)
class Load:
    """The leading ``count`` blocks of a lease, in memory: where each lies, and the generation that proves it."""

    boot: bytes
    lease: int
    count: int
    pools: "NDArray[np.uint8]"
    pages: "NDArray[np.uint32]"
    generations: "NDArray[np.uint32]"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots to fill for blocks [start, start + len(states)) of a chain; a plain value that may go to a rank's process.

    ``states`` is one BlockState a block; ``blocks`` are the chain indices of those with a slot, and ``pools``,
    ``pages``, ``generations`` have one entry for each of them, in order. ``hole``: index of a parent block that is
    missing, so that nothing from there on can be stored; None if none is.
    """

    boot: bytes
    lease: int
    start: int
    states: "NDArray[np.uint8]"
    blocks: "NDArray[np.uint32]"
    pools: "NDArray[np.uint8]"
    pages: "NDArray[np.uint32]"
    generations: "NDArray[np.uint32]"
    hole: int | None


@dataclass(frozen=True, slots=True)
class Committed:
    """``ready`` blocks became findable by this commit; ``gone`` had expired, their bytes are lost."""

    ready: int
    gone: int


class MappedPool:
    """One of the daemon's pools in this process's memory. Slots may be touched inside ``Session.copying`` only.

    ``tier`` is "dram" or "hbm", ``device`` "cpu" or "cuda:N". Memory of a CUDA device cannot be mapped here: its
    descriptor ``fd`` stays open until ``close``, for whoever imports it; for mapped memory ``fd`` is None.
    """

    def __init__(self, pool: int, tier: str, device: str, size: int, memory_fd: int, generations_fd: int) -> None:
        """Map the memory and, read-only, the generations. Takes over both descriptors, on errors too.

        Raises ProtocolError when their sizes or seals are not what makes a mapping safe.
        """
        self.pool = pool
        self.tier = tier
        self.device = device
        self.size = size
        self.fd: int | None = None
        # What must end before the memory is unmapped: whoever pinned it for a GPU sets this.
        self.before_close: Callable[[], None] | None = None
        self._memory: mmap.mmap | None = None
        self._generations: mmap.mmap | None = None
        self._array: NDArray[np.uint8] | None = None
        self._generation_array: NDArray[np.uint32] | None = None
        try:
            table = -(-size // PAGE) * 4
            self._generations = _map(generations_fd, table, mmap.PROT_READ, f"generations of pool {pool}")
            if device == "cpu":
                self._memory = _map(memory_fd, size, mmap.PROT_READ | mmap.PROT_WRITE, f"memory of pool {pool}")
            else:
                self.fd = memory_fd
        except BaseException:
            self.close()
            os.close(memory_fd)
            raise
        finally:
            os.close(generations_fd)
        if self._memory is not None:
            os.close(memory_fd)

    def array(self) -> "NDArray[np.uint8]":
        """Return the whole pool as bytes, a view. Raises ProtocolError when it is closed or a device's memory."""
        if self._array is None:
            if self._memory is None:
                raise ProtocolError(f"pool {self.pool} ({self.tier} on {self.device}) is not mapped here")
            import numpy as np

            self._array = np.frombuffer(self._memory, np.uint8, count=self.size)
        return self._array

    def slot(self, page: int, nbytes: int) -> "NDArray[np.uint8]":
        """Return the ``nbytes`` bytes of the slot at ``page``, a view. Raises ProtocolError for what lies outside."""
        at = int(page) * PAGE
        if nbytes < 0 or at + nbytes > self.size:
            raise ProtocolError(f"slot at page {page} of {nbytes} bytes lies outside pool {self.pool} of {self.size}")
        return self.array()[at : at + nbytes]

    @property
    def generations(self) -> "NDArray[np.uint32]":
        """The slots' generations, indexed by page, a read-only view that the daemon changes."""
        if self._generation_array is None:
            if self._generations is None:
                raise ProtocolError(f"pool {self.pool} is closed")
            import numpy as np

            self._generation_array = np.frombuffer(self._generations, np.uint32, count=-(-self.size // PAGE))
        return self._generation_array

    def close(self) -> None:
        """Unmap; where somebody still holds a view, the memory goes with the last view."""
        before, self.before_close = self.before_close, None
        if before is not None:
            before()
            del before  # it may hold a view
        self._array = None
        self._generation_array = None
        for mapped in (self._memory, self._generations):
            if mapped is not None:
                try:
                    mapped.close()
                except BufferError:
                    pass
        self._memory = self._generations = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _map(fd: int, size: int, protection: int, what: str) -> mmap.mmap:
    """Map ``size`` bytes of ``fd``, shared, once sure that nobody can take the pages away (a SIGBUS for everybody)."""
    held = os.fstat(fd).st_size
    if size <= 0 or held < size:
        raise ProtocolError(f"{what}: {held} bytes, {size} were announced")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"{what}: not a sealed memfd ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"{what}: not sealed against shrinking")
    try:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as error:
        raise ProtocolError(f"{what}: cannot be mapped ({error.strerror})") from error


class Session:
    """One process's session with the daemon; thread-safe. No IO until the first operation or ``attach``.

    Roles: "engine" (scheduler and only worker in one process), "scheduler" (asks and reserves), "rank" (copies and
    commits its range; needs the scheduler's ``attachment``, see ``join``).

    After a fork the child's session is detached and stays so until the child calls ``attach``; the parent goes on.
    Not to be used from finalisers: they can run while this very thread holds the session's lock.
    """

    def __init__(
        self,
        *,
        namespace: Mapping[str, Any],
        probe: bytes | Sequence[bytes],
        engine: tuple[str, str],
        role: str = ROLE_ENGINE,
        ranks: int = 1,
        rank: int = 0,
        attachment: bytes = b"",
        socket_path: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace`` is Namespace.to_map(), ``probe`` block.probe_hashes(), ``engine`` (family, version)."""
        self._client = Client(socket_path, timeout=timeout)
        self._client.on_event(self._on_event)
        self.role = role
        self.timeout = timeout
        self._clock = clock
        self._ranks = ranks
        self._hello: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "role": role,
            "engine": {"family": engine[0], "version": engine[1]},
            "namespace": dict(namespace),
            "probe": probe if isinstance(probe, bytes) else b"".join(probe),
        }
        self._reset(rank, attachment)
        _sessions.add(self)

    def _reset(self, rank: int, joined: bytes) -> None:
        # Held by the thread that attaches, while it does; the rest changes under _changed alone, held only for moments.
        self._attaching = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._pid = os.getpid()
        self._rank = rank
        self._joined = joined
        self._attached: Attached | None = None
        self._pools: dict[int, MappedPool] = {}
        # The session that the daemon may still believe to be copying: told by `resume` once no copy of it runs.
        self._resume = b""
        self._closed = False
        self._forked = False
        self._backoff = BACKOFF_FIRST_S
        self._not_before = 0.0
        self._refused_by = "not tried yet"
        # Copies under way, in the order in which they began: their number, and the thread that runs each.
        self._copies: dict[int, int] = {}
        self._next_copy = 0
        # Fences to answer: each with the copies that it waits for.
        self._fences: list[tuple[int, set[int]]] = []
        self._fenced: dict[int, None] = {}

    # -------------------------------------------------------------------------------------------------- attachment

    @property
    def attached(self) -> bool:
        """Whether the session is attached as far as known; operations attach by themselves."""
        return self._attached is not None and self._pid == os.getpid() and self._client.connected

    @property
    def info(self) -> Attached:
        """What the daemon said when it was attached last. Raises DaemonUnavailable while detached."""
        info = self._attached
        if info is None:
            raise DaemonUnavailable("not attached")
        return info

    @property
    def pools(self) -> Mapping[int, MappedPool]:
        """The pools by id; they stay mapped and the same inside ``copying``. Empty while detached."""
        return self._pools

    def attach(self, timeout: float | None = None) -> Attached:
        """Attach now, whatever the back-off says, and return what the daemon said; at once if attached already.

        Raises DaemonUnavailable within ``timeout`` seconds, Refused where the daemon contradicts (seed, probe, layout,
        protocol), ProtocolError where it hands out what cannot be mapped safely.
        """
        if self._pid != os.getpid() or self._forked:
            self._forget_parent()
            self._forked = False
        with self._changed:
            self._not_before = 0.0
        return self._ensure(time.monotonic() + (self.timeout if timeout is None else timeout))

    def join(self, attachment: bytes, rank: int | None = None) -> None:
        """Name the attachment (and rank) to join: at the start, and when the scheduler has a new one. No IO.

        A change detaches; the next use attaches anew.
        """
        with self._changed:
            if attachment == self._joined and rank in (None, self._rank):
                return
            self._joined = attachment
            if rank is not None:
                self._rank = rank
            self._not_before = 0.0
            self._detach_locked()
        self._client.close()

    def close(self, timeout: float | None = None) -> None:
        """End the session: wait for the copies under way, tell the daemon, unmap. Never raises; idempotent.

        Where copies still run after ``timeout`` seconds the daemon is told nothing, so that it hands their slots on
        only when this process has ended, and the last of them unmaps.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        if self._pid != os.getpid():
            self._forget_parent()
        with self._changed:
            self._closed = True
            attached = self._attached is not None
            self._detach_locked()
            drained = self._drain_locked(deadline)
        if attached and drained and self._client.connected:
            try:
                self._client.call(OP_DETACH, timeout=max(0.0, deadline - time.monotonic()))
            except CascadeError:
                pass
        self._client.close()
        with self._changed:
            if not self._copies:
                self._close_pools()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_parent(self) -> None:
        pools = self._pools
        had_one = self._attached is not None or bool(self._resume) or self._forked
        self._reset(self._rank, self._joined)
        self._forked = had_one
        for pool in pools.values():
            pool.close()

    def _detach_locked(self) -> None:
        if self._attached is not None:
            self._resume = self._attached.session
            self._attached = None

    def _drain_locked(self, deadline: float) -> bool:
        """Wait until no copy runs; False when the deadline comes first, or when the caller's own copy would be it."""
        while self._copies:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or threading.get_ident() in self._copies.values():
                return False
            self._changed.wait(remaining)
        return True

    def _close_pools(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def _ensure(self, deadline: float) -> Attached:
        """Return the live attachment, attaching if it is time for that."""
        info = self._attached
        if info is not None and self._client.connected and self._pid == os.getpid():
            return info
        if self._pid != os.getpid():
            self._forget_parent()
        if self._forked:
            raise DaemonUnavailable("this process was forked; attach() gives it a session of its own")
        self._check_backoff()
        if not self._attaching.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DaemonUnavailable("another thread is still attaching")
        try:
            info = self._attached
            if info is not None and self._client.connected:
                return info
            self._check_backoff()
            return self._attach(deadline)
        finally:
            self._attaching.release()

    def _check_backoff(self) -> None:
        if self._closed:
            raise DaemonUnavailable("the session is closed")
        if self._clock() < self._not_before:
            raise DaemonUnavailable(f"detached, the next attempt is due later; the last one: {self._refused_by}")

    def _attach(self, deadline: float) -> Attached:
        with self._changed:
            self._detach_locked()
            if not self._drain_locked(deadline):
                raise DaemonUnavailable("copies of the lost session still run")
            self._fences.clear()
            self._fenced.clear()
            self._close_pools()
            hello = {**self._hello, "pid": os.getpid(), "ranks": self._ranks, "rank": self._rank}
            if self._joined:
                hello["attachment"] = self._joined
            if self._resume:
                hello["resume"] = self._resume
        try:
            self._client.close()
            self._client.connect(max(0.0, deadline - time.monotonic()))
            body, descriptors = self._client.call_with_fds(
                OP_ATTACH, hello, timeout=max(0.0, deadline - time.monotonic())
            )
            info, pools = _read_attach(body, descriptors)
        except CascadeError as error:
            self._client.close()
            with self._changed:
                self._refused_by = str(error)
                self._not_before = self._clock() + self._backoff
                self._backoff = min(self._backoff * 2, BACKOFF_LAST_S)
            raise
        with self._changed:
            outdated = self._closed or self._joined != hello.get("attachment", b"")
            if outdated:
                self._resume = info.session
            else:
                self._attached = info
                self._pools = pools
                self._resume = b""
                self._backoff = BACKOFF_FIRST_S
                self._not_before = 0.0
        if outdated:
            for pool in pools.values():
                pool.close()
            self._client.close()
            raise DaemonUnavailable("closed, or told to join another attachment, while attaching")
        return info

    def _call(self, op: str, body: Mapping[str, Any], timeout: float | None) -> tuple[Attached, dict[str, Any]]:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        info = self._ensure(deadline)
        return info, self._client.call(op, body, timeout=max(0.0, deadline - time.monotonic()))

    # -------------------------------------------------------------------------------------------------- operations

    def lookup(
        self,
        hashes: bytes | Sequence[bytes],
        *,
        request: bytes | str,
        group: int = 0,
        pin: bool = True,
        promote: bool = True,
        tokens: "bytes | Sequence[int] | NDArray[np.uint32]" = b"",
        remote: bool = True,
        wait_ms: int = 0,
        ticket: bytes = b"",
        each: bool = False,
        timeout: float | None = None,
    ) -> Lookup:
        """Ask how long a prefix of the chain ``hashes`` (from block 0) can be had; ``pin`` protects it by a lease.

        Asking again with the same ``request`` renews its one lease. ``promote`` starts to bring up what lies below, and
        ``remote`` to ask other nodes for the rest and to fetch what pays; ``wait_ms`` waits for their answers, not for
        the bytes. ``ticket``: a hand-off's, whose node is asked first of all.
        ``tokens``: the chain's token ids, needed where the hash is not cryptographic: the daemon compares them.
        ``each``: the hashes are no chain, but blocks to be found one by one; "leading" then means the first of those
        that were found. With ``remote`` only for blocks that are stored alone: what is fetched so begins a chain, and
        is part of no other. Raises DaemonUnavailable, Refused, ProtocolError.
        """
        body: dict[str, Any] = {"hashes": _packed(hashes), "group": group, "request": request}
        body |= {"pin": pin, "promote": promote, "tokens": pack_u32(tokens), "remote": remote, "ticket": ticket}
        if each:
            body["each"] = True
        limit = self.timeout if timeout is None else timeout
        body["wait_ms"] = max(0, min(wait_ms, int((limit - LOAD_MARGIN_S) * 1000)))
        _, reply = self._call(OP_LOOKUP, body, limit)
        matched = take(reply, "matched", int, lo=0)
        return Lookup(
            lease=take(reply, "lease", int, lo=0),
            matched=matched,
            ready=take(reply, "ready", int, lo=0, hi=matched),
            tiers=take_u8(reply, "tiers", count=matched),
            deadline_ms=take(reply, "deadline_ms", int, default=0, lo=0),
            asking=take(reply, "asking", bool, default=False),
            found=take_u32(reply, "found", count=matched) if each else None,
        )

    def load(self, lease: int, count: int, *, wait_ms: int = 0, timeout: float | None = None) -> Load:
        """Return where the first ``count`` blocks of ``lease`` lie, or of the leading part that is in memory.

        Waits up to ``wait_ms`` (and never beyond ``timeout``) for promotions. Copy inside ``copying``, then trust only
        what ``intact`` confirms, then release. Raises DaemonUnavailable, Refused, ProtocolError.
        """
        limit = self.timeout if timeout is None else timeout
        wait_ms = max(0, min(wait_ms, int((limit - LOAD_MARGIN_S) * 1000)))
        info, reply = self._call(OP_LOAD, {"lease": lease, "count": count, "wait_ms": wait_ms}, limit)
        found = take(reply, "count", int, lo=0, hi=count)
        return Load(info.boot, lease, found, *_places(reply, found))

    def release(self, leases: int | Sequence[int], *, timeout: float | None = None) -> None:
        """Give leases back; idempotent.

        Does nothing while detached, and never raises for a daemon that is away: its leases end by their deadline.
        """
        held = [leases] if isinstance(leases, int) else leases
        self._tell(OP_RELEASE, {"leases": pack_u64(held)}, timeout)

    def reserve(
        self,
        hashes: bytes | Sequence[bytes],
        *,
        request: bytes | str,
        group: int = 0,
        start: int = 0,
        tokens: "bytes | Sequence[int] | NDArray[np.uint32]" = b"",
        timeout: float | None = None,
    ) -> Reservation:
        """Ask for slots for the blocks [start, n) of the chain ``hashes``; never waits for room.

        ``tokens``: the token ids of these blocks, where the daemon keeps them; of the whole chain, and needed, with a
        hash that can collide. Fill the slots inside ``copying``, then
        ``commit``; what is not committed goes by ``abort`` or the lease's deadline. Raises DaemonUnavailable, Refused,
        ProtocolError.
        """
        import numpy as np

        body = {
            "hashes": _packed(hashes),
            "group": group,
            "start": start,
            "tokens": pack_u32(tokens),
            "request": request,
        }
        info, reply = self._call(OP_RESERVE, body, timeout)
        states = take_u8(reply, "states")
        blocks = (np.flatnonzero(states == BlockState.SLOT) + start).astype(np.uint32)
        return Reservation(
            info.boot,
            take(reply, "lease", int, lo=0),
            start,
            states,
            blocks,
            *_places(reply, len(blocks)),
            hole=take(reply, "hole", int, default=None, lo=0),
        )

    def commit(
        self, lease: int, blocks: "bytes | Sequence[int] | NDArray[np.uint32]", *, timeout: float | None = None
    ) -> Committed:
        """Say that this rank's range of ``blocks`` (chain indices) is whole; to be called after ``copying`` has ended.

        A block becomes ready with the last rank's commit. Raises DaemonUnavailable, Refused, ProtocolError.
        """
        _, reply = self._call(OP_COMMIT, {"lease": lease, "blocks": pack_u32(blocks)}, timeout)
        return Committed(take(reply, "ready", int, lo=0), take(reply, "gone", int, lo=0))

    def abort(
        self, lease: int, blocks: "bytes | Sequence[int] | NDArray[np.uint32]" = b"", *, timeout: float | None = None
    ) -> None:
        """Give up the slots of ``blocks``, or all; no copy into them may run or begin.

        As ``release``, never raises for a daemon that is away.
        """
        self._tell(OP_ABORT, {"lease": lease, "blocks": pack_u32(blocks)}, timeout)

    def failed(
        self, lease: int, blocks: "bytes | Sequence[int] | NDArray[np.uint32]", *, timeout: float | None = None
    ) -> None:
        """Doubt the loaded bytes of ``blocks``: the copies are dropped, the next lookup of them misses.

        Raises DaemonUnavailable, Refused, ProtocolError.
        """
        self._call(OP_FAILED, {"lease": lease, "blocks": pack_u32(blocks)}, timeout)

    def computed(self, tokens: int, seconds: float, *, position: int = 0, timeout: float | None = None) -> None:
        """Say how long the engine took to compute ``tokens`` of a prompt: what is fetched must arrive sooner than that.

        ``position``: of the first of them in the prompt; later tokens take longer. As ``release``, never raises for a
        daemon that is away. Raises ProtocolError for what no engine can have done.
        """
        if not abs(seconds) < 1e9:  # nor NaN
            raise ProtocolError(f"field 'seconds': {seconds} is no time")
        if tokens:
            body = {"tokens": tokens, "micros": int(seconds * 1e6), "position": position}
            self._tell(OP_COMPUTED, body, timeout)

    def hand_off(
        self, hashes: bytes | Sequence[bytes], *, group: int = 0, keep_ms: int = 60_000, timeout: float | None = None
    ) -> bytes:
        """Pass a prefix on to an engine of another node: returns the ticket that its lookup takes.

        The blocks, also those still being stored, stay here until that node has fetched them, or for ``keep_ms``.
        Raises DaemonUnavailable, Refused (the daemon serves no other nodes), ProtocolError.
        """
        _, reply = self._call(OP_HANDOFF, {"hashes": _packed(hashes), "group": group, "keep_ms": keep_ms}, timeout)
        return take(reply, "ticket", bytes)

    def _tell(self, op: str, body: Mapping[str, Any], timeout: float | None) -> None:
        if not self.attached:
            return
        try:
            self._client.call(op, body, timeout=timeout)
        except DaemonUnavailable:
            pass

    # ------------------------------------------------------------------------------------------------------ copies

    @contextmanager
    def copying(self, *held: Load | Reservation) -> Iterator[Mapping[int, MappedPool]]:
        """Copy between slots and the engine's memory inside this; yields the pools, which stay until it ends.

        Name what is copied: entering checks that it is of this daemon's boot and not fenced, and that a reservation's
        slots are still its own. Leave only when the copy is complete (on a GPU: after its event). Threads may copy at
        the same time; nobody else's operation waits for a copy, only re-attaching and ``close`` do.

        Raises DaemonUnavailable while detached, Refused for what the daemon has taken back: copy nothing then.
        """
        number = self._begin(held)
        try:
            # Only now: a slot that is handed on later is handed on after a fence, or a resume, that waits for us.
            for each in held:
                if isinstance(each, Reservation) and not self.intact(each).all():
                    raise Refused(f"slots of lease {each.lease} were handed on")
            yield self._pools
        finally:
            self._end(number)

    def intact(self, held: Load | Reservation) -> "NDArray[np.bool_]":
        """For each slot of ``held``, whether it still holds what it held when handed out; asked after the copy.

        What is not intact must be treated as a failed load. All False once detached from the daemon that gave it, and
        once that daemon has ended: its successor may have taken the memory over, and bumps other generations.
        """
        import numpy as np

        info, pools = self._attached, self._pools
        result = np.zeros(len(held.pages), bool)
        if info is None or info.boot != held.boot:
            return result
        for identity in set(held.pools.tolist()):
            pool = pools.get(identity)
            if pool is not None:
                now = pool.generations
                mine = (held.pools == identity) & (held.pages < len(now))
                result[mine] = now[held.pages[mine]] == held.generations[mine]
        # Asked last: a daemon that still lived then had not been succeeded when the generations were read.
        if self._client.hung_up():
            result[:] = False
        return result

    def _begin(self, held: Sequence[Load | Reservation]) -> int:
        if self._pid != os.getpid():
            self._forget_parent()
        with self._changed:
            info = self._attached
            if info is None or not self._client.connected:
                raise DaemonUnavailable("detached: the slots may no longer be touched")
            for each in held:
                if each.boot != info.boot:
                    raise Refused(f"lease {each.lease} is of an earlier boot of the daemon")
                if each.lease in self._fenced:
                    raise Refused(f"lease {each.lease} was fenced")
            number = self._next_copy
            self._next_copy += 1
            self._copies[number] = threading.get_ident()
        return number

    def _end(self, number: int) -> None:
        answers: list[int] = []
        with self._changed:
            if self._copies.pop(number, None) is None:
                return
            for fence, waits_for in self._fences:
                waits_for.discard(number)
                if not waits_for:
                    answers.append(fence)
            if answers:
                self._fences = [each for each in self._fences if each[1]]
            if self._closed and not self._copies:
                self._close_pools()
            self._changed.notify_all()
        self._answer(answers)

    def _on_event(self, event: str, body: dict[str, Any]) -> None:
        if event != EVENT_FENCE:
            return
        fence = take(body, "fence", int, lo=0)
        with self._changed:
            for lease in take_u64(body, "leases").tolist():
                self._fenced[lease] = None
            while len(self._fenced) > FENCED_REMEMBERED:
                del self._fenced[next(iter(self._fenced))]
            if self._copies:
                self._fences.append((fence, set(self._copies)))
                return
        self._answer([fence])

    def _answer(self, fences: Sequence[int]) -> None:
        for fence in fences:
            try:
                self._client.post(OP_FENCED, {"fence": fence})
            except DaemonUnavailable:
                # The connection is lost: `resume` tells the daemon the same when we attach again.
                pass


def _packed(hashes: bytes | Sequence[bytes]) -> bytes:
    return hashes if isinstance(hashes, bytes) else b"".join(hashes)


def _places(reply: Mapping[str, Any], count: int) -> "tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]":
    return (
        take_u8(reply, "pools", count=count),
        take_u32(reply, "pages", count=count),
        take_u32(reply, "generations", count=count),
    )


def _read_attach(body: Mapping[str, Any], descriptors: list[int]) -> tuple[Attached, dict[int, MappedPool]]:
    """Read an attach reply and map its pools; owns the descriptors. Raises ProtocolError and leaves nothing open."""
    pools: dict[int, MappedPool] = {}
    try:
        info = Attached(
            boot=take(body, "boot", bytes, lo=16, hi=16),
            session=take(body, "session", bytes, lo=16, hi=16),
            attachment=take(body, "attachment", bytes, lo=16, hi=16),
            namespace=take(body, "namespace", bytes, lo=32, hi=32),
            warnings=tuple(str(each) for each in take(body, "warnings", list, default=[])),
            lease_ms=take(body, "lease_ms", int, default=0, lo=0),
            ticket=take(body, "ticket", bytes, default=b""),
        )
        described = take(body, "pools", list)
        if len(descriptors) != 2 * len(described):
            raise ProtocolError(f"field 'pools': {len(described)} pools came with {len(descriptors)} descriptors")
        for each in described:
            if not isinstance(each, dict):
                raise ProtocolError("field 'pools': an entry that is not a map")
            identity = take(each, "id", int, lo=0, hi=255)
            tier = take(each, "tier", str)
            device = take(each, "device", str, default="cpu")
            size = take(each, "bytes", int, lo=1)
            if identity in pools:
                raise ProtocolError(f"field 'pools': id {identity} twice")
            pools[identity] = MappedPool(identity, tier, device, size, descriptors.pop(0), descriptors.pop(0))
        return info, pools
    except BaseException:
        for pool in pools.values():
            pool.close()
        while descriptors:
            os.close(descriptors.pop())
        raise


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _forget_parents() -> None:
    for session in list(_sessions):
        session._forget_parent()


os.register_at_fork(after_in_child=_forget_parents)
