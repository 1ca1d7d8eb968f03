"""The cache: what engines may ask of it, decided synchronously on the event loop's thread.

Attachments look blocks up (and so pin them), reserve slots, commit and abort them. Where the blocks lie is the business
of `residency.py`; who holds them is decided here. The rules that hold throughout, proved by `check()`:

- A block becomes findable only when every rank that writes a part of it has committed.
- A slot that somebody may still be writing is given to nobody else.
- Pins are the sum of the live leases' pins; every pending row belongs to one open reservation.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import ConfigError, ProtocolError, Refused
from kvcascade.config.settings import Settings
from kvcascade.tiers.block import head_range
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.pool import SlotState

from .index import NO_ROW, NO_SLOT, U8, U32, U64, RowState, repeats
from .lease import MAX_RANKS, Attachment, Entry, Fence, Held, Lease, Reservation, Writer
from .plans import Slots, Space
from .protocol import POOL_DRAM, POOL_HBM, BlockState, Tier
from .residency import Residency

NO_SLOTS = Slots(np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0, np.uint32))


@dataclass(frozen=True, slots=True)
class Match:
    """`matched` leading blocks lie in some local tier or are on their way from elsewhere, the first `ready` in memory.

    `tiers`: where each of the matched ones lies or comes from. `found`, for blocks asked for one by one: where the
    matched ones stand among the hashes.
    """

    lease: int
    matched: int
    ready: int
    tiers: U8
    missing: int  # blocks behind them, where no answer for the same request has counted them yet
    found: U32 | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """A BlockState for each block from `start`, and the slots of those that got one, in order."""

    lease: int
    states: U8
    slots: Slots
    hole: int | None


class Cache:
    """The engines of a node, their leases and their reservations."""

    def __init__(self, settings: Settings, residency: Residency, *, clock: Callable[[], float]) -> None:
        self.residency = residency
        self._settings = settings
        self._clock = clock
        # The loop's thread alone changes all of this.
        self.attachments: dict[bytes, Attachment] = {}
        self._held: WeakValueDictionary[int, Held] = WeakValueDictionary()  # by process, while it has an attachment
        self.hit_tokens: Counter[str] = Counter()
        self._pending_owner: dict[int, Reservation] = {}  # pending row → who fills it
        self._fences: list[Fence] = []  # to be sent
        self._asked: dict[int, Fence] = {}  # sent and not answered
        # Lease and fence numbers are never given again, by no later daemon either: a late release can only miss.
        self._numbers = itertools.count((secrets.randbits(31) << 32) + 1)
        residency.give_up = self._give_up_rows
        # Called with a reservation and those of its entries that have become ready; with rows that a lookup has hit.
        self.became_ready: Callable[[Reservation, npt.NDArray[np.int64]], None] = lambda reservation, entries: None
        self.was_used: Callable[[Space, U32], None] = lambda space, rows: None

    def attach(self, namespace: Namespace, ranks: int, engine: str, *, process: int = 0) -> Attachment:
        """A new attachment of an engine with `ranks` ranks; LayoutMismatch when its KV heads cannot be split so.

        `process`: the number of the process that attaches, whose attachments share their budgets; 0 if none is known.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise Refused(f"ranks: {ranks} is not between 1 and {MAX_RANKS}")
        for shape in namespace.groups:
            head_range(shape.kv_heads, ranks, 0, shape.kind)
        try:
            spaces = tuple(self.residency.space(namespace, group) for group in range(len(namespace.groups)))
        except ConfigError as error:
            raise Refused(f"namespace: {error}") from error
        held = self._held.setdefault(process, Held()) if process else Held()
        attachment = Attachment(secrets.token_bytes(16), spaces, ranks, engine, process=held)
        self.attachments[attachment.token] = attachment
        return attachment

    def join(self, attachment: Attachment, rank: int) -> Writer:
        """A session of `rank` that may write from now on."""
        if not 0 <= rank < attachment.ranks:
            raise Refused(f"rank: {rank} is not below the attachment's {attachment.ranks} ranks")
        writer = Writer(secrets.token_bytes(16), rank, attachment)
        attachment.writers.setdefault(rank, set()).add(writer)
        return writer

    def withhold(
        self,
        namespace: Namespace,
        ranks: int,
        engine: str,
        writers: Iterable[tuple[bytes, int]],
        slots: Iterable[tuple[int, U32, U64]],
    ) -> list[Writer]:
        """Keeps DRAM slots from use into which an earlier daemon's `writers` (token, rank) may still be copying.

        `slots`: (group, pages, a bit for each rank that has not committed). They are quarantined as those of writers
        that have lost their sockets, which is what these are: a page is handed out once every such writer is gone.
        """
        attachment = self.attach(namespace, ranks, engine)
        late = [Writer(token, rank, attachment, lost=True) for token, rank in writers]
        for writer in late:
            attachment.writers.setdefault(writer.rank, set()).add(writer)
        now = self._clock()
        for group, pages, remaining in slots:
            space, count = self._space(attachment, group), len(pages)
            self.residency.dram.pool.restore(space.slot_bytes, pages, SlotState.QUARANTINED)
            reservation = Reservation(
                number=next(self._numbers),
                attachment=attachment,
                space=space,
                first=0,
                parent=NO_ROW,
                rows=np.full(count, NO_ROW, dtype=np.uint32),
                pool=np.full(count, POOL_DRAM, dtype=np.uint8),
                pages=pages,
                required=remaining,
                remaining=remaining.copy(),
                state=np.full(count, Entry.GONE, dtype=np.uint8),
                deadline=now,
                created=now,
            )
            attachment.reservations[reservation.number] = reservation
            attachment.quarantine(count * space.slot_bytes)
            for rank in range(ranks):
                self._clear(reservation, np.arange(count), rank)
        self._forget_if_over(attachment)
        return late

    def writer_lost(self, writer: Writer) -> None:
        """Its socket is closed, its process may live: what it had not committed is given up, its slots quarantined."""
        writer.lost = True
        self._give_up_rank(writer)

    def writer_gone(self, writer: Writer) -> None:
        """Its process is dead, or has said that all its copies have ended: what was quarantined for it comes back."""
        attachment = writer.attachment
        if not writer.lost:
            self._give_up_rank(writer)
        attachment.writers.get(writer.rank, set()).discard(writer)
        for reservation in list(attachment.reservations.values()):
            self._clear(reservation, np.flatnonzero(reservation.state == Entry.GONE), writer.rank)
            self._fence_rank(reservation, writer.rank)
        self._forget_if_over(attachment)

    def end_leases(self, attachment: Attachment) -> None:
        """Releases every lease; for an attachment whose scheduler is gone."""
        self.release(attachment, list(attachment.leases))

    def end_attachment(self, attachment: Attachment) -> None:
        """Its last session is gone: nothing more will be committed."""
        self.end_leases(attachment)
        for reservation in list(attachment.reservations.values()):
            self._give_up(reservation, np.flatnonzero(reservation.state == Entry.OPEN))
        self._forget_if_over(attachment)

    def _forget_if_over(self, attachment: Attachment) -> None:
        if attachment.sessions == 0 and not attachment.reservations and not attachment.leases:
            self.attachments.pop(attachment.token, None)

    def lookup(
        self,
        attachment: Attachment,
        group: int,
        hashes: bytes,
        *,
        request: bytes = b"",
        pin: bool = True,
        tokens: bytes = b"",
        final: bool = True,
        each: bool = False,
    ) -> Match:
        """The leading blocks that are resident, or that the daemon is fetching from elsewhere.

        They are stamped as a whole chain, and pinned by the request's one lease.

        Asking again for the same request renews its lease. Blocks past its process's budget of pins are not matched.
        What is missing counts as a miss, once a request; not yet if the answer is not `final`.
        With `each` the hashes are no chain: whatever of them is resident, or being fetched, matches, and only what
        begins a chain is stamped, since a block may not be newer than its parent.
        """
        space = self._space(attachment, group)
        keys = self.residency.keys(space, hashes)
        self.residency.counters["lookups"] += 1
        index = self.residency.index
        rows = index.find(space.number, keys)
        found = None
        coming: list[tuple[int, int | None]] = []
        if each:
            if space.keeps_tokens:
                raise ProtocolError(f"field 'each': with the hash {space.namespace.hash_algo} a block needs its chain")
            found = np.flatnonzero(rows != NO_ROW)
            ours = [position for position, source in self._pending(rows[found]) if source is None]
            found = np.delete(found, ours)
            rows = rows[found]
            coming = self._pending(rows)
            if repeats(rows):
                raise ProtocolError("field 'hashes': a block is named twice")
            index.touch(rows[index.parent[rows] == NO_ROW])
        else:
            rows = self.residency.leading_run(space, rows, ready=False)
            coming = self._pending(rows)
            rows = rows[: next((position for position, source in coming if source is None), len(rows))]
            rows = self._verify_tokens(space, rows, tokens)
            index.touch(rows)
        self.was_used(space, rows)
        self.residency.index.reused[rows] = 1
        old = attachment.leases.get(attachment.by_request.get((group, request), 0)) if request else None
        missing = len(keys) - len(rows) if old is None or not old.settled else 0
        tiers = self.residency.tiers_of(rows)
        brought = index.brought[rows]
        if brought.any():
            # They arrived before the one that they were fetched for had its answer.
            tiers[brought != 0] = brought[brought != 0]
            index.brought[rows] = 0
        for position, source in coming:
            if position < len(rows) and source is not None:
                tiers[position] = source
        if old is not None:
            shared = min(len(old.rows), len(rows))
            same = old.rows[:shared] == rows[:shared]
            # What was promoted for this request still counts as a hit of the tier that it came from.
            tiers[:shared] = np.where(same, old.origin[:shared], tiers[:shared])
        lease = 0
        if pin:
            rows = rows[: self._budget(attachment, space, old)]
            tiers = tiers[: len(rows)]
        if pin and len(rows):
            lease = self._pin(attachment, space, request, rows, tiers, old)
        elif old is not None and not len(rows):
            self.release(attachment, [old.number])
        in_memory = self.residency.in_memory(rows)
        ready = len(rows) if in_memory.all() else int(in_memory.argmin())
        places = None if found is None else found[: len(rows)].astype(np.uint32)
        match = Match(lease, len(rows), ready, tiers, missing, places)
        if final:
            self.settle(attachment, space, match)
        return match

    def settle(self, attachment: Attachment, space: Space, match: Match) -> None:
        """This answer is the request's last: what it misses is computed by the engine."""
        self.hit_tokens["miss"] += match.missing * space.shape.block_tokens
        lease = attachment.leases.get(match.lease)
        if lease is not None:
            lease.settled = True

    def _pending(self, rows: U32) -> list[tuple[int, int | None]]:
        """Positions of the rows that are pending, and what their reservations say of their source."""
        pending = self.residency.index.state[rows] == RowState.PENDING
        if not pending.any():
            return []
        positions = np.flatnonzero(pending).tolist()
        return [(position, self._pending_owner[int(rows[position])].source) for position in positions]

    def hold(self, attachment: Attachment, space: Space, keys: U64, seconds: float, *, pending: bool = False) -> Lease:
        """A lease on the leading blocks of a piece of a chain that are ready here (`pending`: or being stored here).

        It ends where the next one asked for is not the child of the one before.

        For other nodes: no hit is counted, what is fetched from elsewhere is not passed on, and the piece may begin in
        the middle of its chain. The lease may be empty.
        """
        index = self.residency.index
        rows = index.find(space.number, keys)
        good = rows != NO_ROW
        rows = self.residency.chained(rows if good.all() else rows[: int(good.argmin())])
        foreign = (position for position, source in self._pending(rows) if source is not None or not pending)
        rows = rows[: next(foreign, len(rows))]
        rows = rows[: self._budget(attachment, space, None)]
        number = self._pin(attachment, space, b"", rows, np.full(len(rows), Tier.DRAM, dtype=np.uint8), None)
        lease = attachment.leases[number]
        lease.deadline = self._clock() + seconds
        return lease

    def _verify_tokens(self, space: Space, rows: U32, tokens: bytes) -> U32:
        """Where hashes can collide: cuts the run at the first block whose token ids are not those asked for."""
        if not space.keeps_tokens or not len(rows):
            return rows
        width = space.shape.block_tokens
        asked = _token_ids(tokens)
        if len(asked) < len(rows) * width:
            raise ProtocolError(f"field 'tokens': token ids are needed with the hash {space.namespace.hash_algo}")
        same = (self.residency.index.tokens_of(rows, width) == asked[: len(rows) * width].reshape(-1, width)).all(
            axis=1
        )
        if same.all():
            return rows
        self.residency.counters["hash_collisions"] += 1
        return rows[: int(same.argmin())]

    def _budget(self, attachment: Attachment, space: Space, old: Lease | None) -> int:
        most = self._settings.leases.budget_share.of(
            self.residency.dram.pool.capacity + (self.residency.hbm.pool.capacity if self.residency.hbm else 0)
        )
        held = attachment.process.pinned_bytes - (len(old.rows) * old.space.slot_bytes if old else 0)
        return max(0, most - held) // space.slot_bytes

    def _pin(
        self, attachment: Attachment, space: Space, request: bytes, rows: U32, origin: U8, old: Lease | None
    ) -> int:
        now = self._clock()
        hbm_pages = self._reference_hbm(rows)
        self.residency.index.pins[rows] += np.uint32(1)
        attachment.pin(len(rows) * space.slot_bytes)
        deadline = now + self._settings.leases.lookup
        if old is not None:
            self._unpin(old)
            old.rows, old.origin, old.hbm_pages, old.deadline = rows, origin, hbm_pages, deadline
            old.counted = min(old.counted, len(rows))
            return old.number
        lease = Lease(next(self._numbers), attachment, space, request, rows, origin, hbm_pages, deadline, now)
        attachment.leases[lease.number] = lease
        if request:
            attachment.by_request[space.group, request] = lease.number
        return lease.number

    def _reference_hbm(self, rows: U32) -> U32:
        pages: U32 = self.residency.index.hbm[rows]
        pages = pages[pages != NO_SLOT]
        if self.residency.hbm is not None and len(pages):
            self.residency.hbm.reference(pages)
        return pages

    def _unpin(self, lease: Lease) -> None:
        rows = lease.rows
        self.residency.index.pins[rows] -= np.uint32(1)
        lease.attachment.pin(-len(rows) * lease.space.slot_bytes)
        if self.residency.hbm is not None and len(lease.hbm_pages):
            self.residency.hbm.release(lease.hbm_pages)
        self.residency.free_doomed(rows)

    def release(self, attachment: Attachment, numbers: Iterable[int]) -> None:
        """Ends leases; those that have ended already are nothing to complain about."""
        for number in numbers:
            lease = attachment.leases.pop(number, None)
            if lease is not None:
                attachment.by_request.pop((lease.space.group, lease.request), None)
                self._unpin(lease)
        self.residency.wake()

    def lease(self, attachment: Attachment, number: int) -> Lease:
        """A live lease of this attachment; Refused if it has none of that number."""
        lease = attachment.leases.get(number)
        if lease is None:
            raise Refused(f"lease: {number} is not held by this attachment (expired, released or another's)")
        return lease

    def leased_rows(self, attachment: Attachment, number: int, count: int) -> U32:
        """The leading `count` rows of a lease, none if it has ended."""
        lease = attachment.leases.get(number)
        return lease.rows[:count] if lease is not None else np.empty(0, dtype=np.uint32)

    def in_memory(self, lease: Lease, count: int) -> bool:
        """Whether the lease's leading `count` blocks lie in memory now."""
        return bool(self.residency.in_memory(lease.rows[:count]).all())

    def renew(self, lease: Lease, extra: float) -> None:
        """Keeps a lease for its usual time beyond the next `extra` seconds."""
        lease.deadline = max(lease.deadline, self._clock() + extra + self._settings.leases.lookup)

    def located(self, lease: Lease, count: int) -> Slots:
        """The slots of the lease's leading blocks in memory, at most `count`; their tokens are counted as hits."""
        rows = lease.rows[:count]
        in_memory = self.residency.in_memory(rows) & (self.residency.index.state[rows] == RowState.READY)
        rows = rows if in_memory.all() else rows[: int(in_memory.argmin())]
        fresh = lease.origin[lease.counted : len(rows)]
        for tier in Tier:
            self.hit_tokens[tier.name.lower()] += int((fresh == tier).sum()) * lease.space.shape.block_tokens
        lease.counted = max(lease.counted, len(rows))
        self.residency.counters["loads"] += 1
        return self.residency.slots(rows)

    def failed(self, attachment: Attachment, number: int, blocks: U32) -> None:
        """An engine doubts the bytes of these blocks of a lease: they and all below them are forgotten."""
        lease = self.lease(attachment, number)
        if len(blocks) and int(blocks.max()) >= len(lease.rows):
            raise Refused(f"blocks: lease {number} covers {len(lease.rows)} blocks")
        self.residency.counters["failed_loads"] += len(blocks)
        self.residency.forget(lease.rows[blocks])

    def reserve(
        self,
        attachment: Attachment,
        group: int,
        hashes: bytes,
        start: int,
        tokens: bytes = b"",
        *,
        source: Tier | None = None,
    ) -> Reserved:
        """Slots for the blocks [start, n) of a chain that are not here yet; never waits for room.

        `hole` is the first block below `start` that is missing: nothing stored above it could ever be found, so
        nothing is reserved and the caller may offer again from there. `tokens` are those of [start, n), or of the whole
        chain where hashes can collide: below a block of other tokens a block would be found under the wrong prefix.
        With a `source` the daemon itself will fetch the blocks, into DRAM: lookups count on them from now on.
        """
        space = self._space(attachment, group)
        keys = self.residency.keys(space, hashes)
        total = len(keys)
        if not 0 <= start <= total:
            raise ProtocolError(f"field 'start': {start} is not within the chain's {total} blocks")
        width = space.shape.block_tokens
        token_ids = _token_ids(tokens)
        told = 0 if space.keeps_tokens else start  # the first block whose token ids are given
        if len(token_ids) != (total - told) * width and (space.keeps_tokens or len(token_ids)):
            raise ProtocolError(f"field 'tokens': {len(token_ids)} token ids for {total - told} blocks of {width}")
        index = self.residency.index
        self.residency.counters["stores"] += 1
        found = index.find(space.number, keys)
        states = np.full(total - start, BlockState.NO_ROOM, dtype=np.uint8)
        resident = self.residency.leading_run(space, found, ready=False)
        if len(self._verify_tokens(space, resident, tokens)) < len(resident):
            return Reserved(0, states, NO_SLOTS, None)
        index.touch(resident)
        foreign = self._first_in_flight(attachment, resident)
        have = len(resident)
        if foreign < have:
            states[max(foreign - start, 0) :] = BlockState.IN_FLIGHT
            have = foreign
        here = resident[start:have]
        states[: len(here)] = np.where(
            index.state[here] == RowState.READY, np.uint8(BlockState.HERE), np.uint8(BlockState.IN_FLIGHT)
        )
        hole = have if have < start and have == len(resident) else None
        nothing = Reserved(0, states, NO_SLOTS, hole)
        if have < len(resident) or have == total or hole is not None:
            return nothing
        fresh = keys[have:]
        repeated = repeats(fresh[:, 0]) and len(np.unique(fresh, axis=0)) != len(fresh)
        if repeated or (found[have:] != NO_ROW).any():
            raise ProtocolError("field 'hashes': they are not one chain of block hashes")
        most = self._settings.leases.quarantine_share.of(self.residency.dram.pool.capacity)
        if attachment.process.quarantined_bytes > most:
            self.residency.counters["refused_quarantine"] += len(fresh)
            return nothing
        parent = int(resident[have - 1]) if have else NO_ROW
        pools, pages = self.residency.room(space.size_class, len(fresh), parent, dram_only=source is not None)
        if not len(pages):
            self.residency.counters["refused_no_room"] += len(fresh)
            return nothing
        self.residency.counters["refused_no_room"] += len(fresh) - len(pages)
        rows = index.insert_chain(space.number, fresh[: len(pages)], resident[:have], space.size_class)
        if len(token_ids):
            kept = token_ids.reshape(-1, width)[have - told : have - told + len(rows)]
            index.keep_tokens(rows, kept)
        now = self._clock()
        required = attachment.required(space, have, len(rows))
        reservation = Reservation(
            number=next(self._numbers),
            attachment=attachment,
            space=space,
            first=have,
            parent=parent,
            rows=rows,
            pool=pools,
            pages=pages,
            required=required,
            remaining=required.copy(),
            state=np.full(len(rows), Entry.OPEN, dtype=np.uint8),
            deadline=now + self._settings.leases.reservation,
            created=now,
            source=source,
        )
        attachment.reservations[reservation.number] = reservation
        self.residency.reserved(space, pages[pools == POOL_DRAM])
        for row in rows.tolist():
            self._pending_owner[row] = reservation
        states[have - start : have - start + len(rows)] = BlockState.SLOT
        return Reserved(reservation.number, states, Slots(pools, pages, self.residency.generations(pools, pages)), None)

    def _first_in_flight(self, attachment: Attachment, rows: U32) -> int:
        """Position of the first block that another attachment is storing now; the number of rows if there is none."""
        for position in np.flatnonzero(self.residency.index.state[rows] == RowState.PENDING).tolist():
            if self._pending_owner[int(rows[position])].attachment is not attachment:
                return position
        return len(rows)

    def commit(self, attachment: Attachment, writer: Writer, number: int, blocks: U32) -> tuple[int, int]:
        """`writer` has written its ranges of these blocks. Returns (blocks now ready, blocks given up before)."""
        reservation = self._reservation(attachment, number)
        entries = reservation.entries(blocks)
        bit = np.uint64(1 << writer.rank)
        outsiders = (reservation.required[entries] & bit) == 0
        if outsiders.any():
            block = int(blocks[int(outsiders.argmax())])
            raise Refused(f"rank: rank {writer.rank} does not write block {block} of lease {number}")
        gone = int(((reservation.state[entries] == Entry.GONE) | (reservation.state[entries] == Entry.CLOSED)).sum())
        self._clear(reservation, entries[reservation.state[entries] == Entry.GONE], writer.rank, writer)
        entries = entries[reservation.state[entries] == Entry.OPEN]
        reservation.remaining[entries] &= ~bit
        whole = entries[reservation.remaining[entries] == 0]
        self._make_ready(reservation, whole)
        self._close_if_over(reservation)
        return len(whole), gone

    def _make_ready(self, reservation: Reservation, entries: npt.NDArray[np.int64]) -> None:
        rows, pages = reservation.rows[entries], reservation.pages[entries]
        in_dram = reservation.pool[entries] == POOL_DRAM
        self.residency.index.dram[rows[in_dram]] = pages[in_dram]
        self.residency.dram.pool.ready(pages[in_dram])
        if self.residency.hbm is not None:
            self.residency.hbm.cache(pages[~in_dram], rows[~in_dram])
            self.residency.index.hbm[rows[~in_dram]] = pages[~in_dram]
            self.residency.hbm.release(pages[~in_dram])
        self.residency.index.state[rows] = RowState.READY
        self.residency.landed(rows[in_dram])
        reservation.state[entries] = Entry.READY
        for row in rows.tolist():
            del self._pending_owner[row]
        if reservation.source is not None:
            self.residency.index.brought[rows[self.residency.index.reused[rows] == 0]] = reservation.source
        name = "stored" if reservation.source is None else "fetched"
        self.residency.counters[f"{name}_blocks"] += len(rows)
        self.residency.counters[f"{name}_bytes"] += len(rows) * reservation.space.block_bytes
        self.residency.stored(rows, reservation.space.size_class)
        self.became_ready(reservation, entries)

    def abort(self, attachment: Attachment, writer: Writer | None, number: int, blocks: U32 | None) -> None:
        """Gives up these blocks (None: all) and what is chained below them.

        With a `writer` that rank is done with their slots; a scheduler (None) knows nothing of its ranks' copies.
        """
        reservation = self._reservation(attachment, number)
        entries = np.arange(len(reservation.rows)) if blocks is None else reservation.entries(blocks)
        entries = entries[reservation.state[entries] != Entry.READY]
        self._give_up(reservation, entries[reservation.state[entries] == Entry.OPEN])
        if writer is not None:
            self._clear(reservation, entries[reservation.state[entries] == Entry.GONE], writer.rank, writer)

    def _reservation(self, attachment: Attachment, number: int) -> Reservation:
        reservation = attachment.reservations.get(number)
        if reservation is None:
            raise Refused(f"lease: {number} is no open reservation of this attachment (ended, expired or another's)")
        return reservation

    def _give_up(self, reservation: Reservation, entries: npt.NDArray[np.int64]) -> None:
        """These open blocks, all after the first of them and all chained below can no longer become reachable."""
        if not len(entries):
            return
        todo = [(reservation, int(entries.min()))]
        lost: list[U32] = []
        while todo:
            holder, first = todo.pop()
            rows = self._alive_from(holder, first)
            lost.append(rows)
            self._quarantine(holder, first)
            below = set(rows.tolist())
            todo += [(other, 0) for other in holder.attachment.reservations.values() if other.parent in below]
        rows = np.unique(np.concatenate(lost))
        if not self.residency.index.childless_in_order(rows).all():
            # Blocks that were committed out of order, under one that now never will be.
            rows = self.residency.index.with_descendants(rows)
            for row in rows[self.residency.index.state[rows] == RowState.PENDING].tolist():
                self._quarantine_row(row)
        self.residency.remove(rows)

    def _alive_from(self, reservation: Reservation, first: int) -> U32:
        """The reservation's rows from entry `first` that are still its blocks: ready ones may have been evicted."""
        index = self.residency.index
        rows = reservation.rows[first:]
        above = np.concatenate([reservation.rows[first - 1 : first], rows[:-1]]) if first else None
        if above is None:
            above = np.concatenate([np.array([reservation.parent], dtype=np.uint32), rows[:-1]])
        state = index.state[rows]
        alive = (index.parent[rows] == above) & ((state == RowState.PENDING) | (state == RowState.READY))
        return rows if alive.all() else rows[: int(alive.argmin())]

    def _quarantine(self, reservation: Reservation, first: int) -> None:
        """Gives up the open entries from `first` on: their slots wait for every rank that may be writing them."""
        attachment = reservation.attachment
        entries = first + np.flatnonzero(reservation.state[first:] == Entry.OPEN)
        if not len(entries):
            return
        for row in reservation.rows[entries].tolist():
            del self._pending_owner[row]
        reservation.state[entries] = Entry.GONE
        pages, pools = reservation.pages[entries], reservation.pool[entries]
        self.residency.dram.pool.quarantine(pages[pools == POOL_DRAM])
        if self.residency.hbm is not None:
            self.residency.hbm.quarantine(pages[pools == POOL_HBM])
        attachment.quarantine(len(entries) * reservation.space.slot_bytes)
        self.residency.counters["abandoned_blocks"] += len(entries)
        for rank in range(attachment.ranks):
            self._clear(reservation, entries, rank)
            self._fence_rank(reservation, rank)

    def _give_up_rows(self, rows: U32) -> None:
        """Gives up pending rows that are about to be forgotten."""
        for row in rows.tolist():
            self._quarantine_row(row)

    def _quarantine_row(self, row: int) -> None:
        owner = self._pending_owner.get(row)
        if owner is not None:
            self._quarantine(owner, int(np.flatnonzero(owner.rows == row)[0]))

    def _fence_rank(self, reservation: Reservation, rank: int) -> None:
        """Asks the connected sessions of a rank about the given-up slots that it may be writing."""
        written = (reservation.remaining & np.uint64(1 << rank)) != 0
        entries = np.flatnonzero(written & (reservation.state == Entry.GONE))
        if len(entries):
            self._fences += [
                Fence(next(self._numbers), writer, (reservation.number,), entries)
                for writer in reservation.attachment.writers.get(rank, ())
                if not writer.lost
            ]

    def _clear(
        self, reservation: Reservation, entries: npt.NDArray[np.int64], rank: int, writer: Writer | None = None
    ) -> None:
        """A session of `rank` is gone, or `writer` says that it is not writing the slots of these given-up blocks.

        They stay while another session of the rank has not said so: one that lost its socket may be in mid-copy.
        """
        if writer is not None:
            fresh = np.zeros(len(reservation.rows), dtype=np.bool_)
            reservation.answered.setdefault(writer.token, fresh)[entries] = True
        for other in reservation.attachment.writers.get(rank, ()):
            spoken = reservation.answered.get(other.token)
            entries = entries[:0] if spoken is None else entries[spoken[entries]]
        reservation.remaining[entries] &= ~np.uint64(1 << rank)
        self._close(reservation, entries[reservation.remaining[entries] == 0])
        self._close_if_over(reservation)

    def _close(self, reservation: Reservation, entries: npt.NDArray[np.int64]) -> None:
        entries = entries[reservation.state[entries] == Entry.GONE]
        reservation.state[entries] = Entry.CLOSED
        pages, pools = reservation.pages[entries], reservation.pool[entries]
        self.residency.dram.free(pages[pools == POOL_DRAM])
        if self.residency.hbm is not None:
            self.residency.hbm.free(pages[pools == POOL_HBM])
        reservation.attachment.quarantine(-len(entries) * reservation.space.slot_bytes)

    def _close_if_over(self, reservation: Reservation) -> None:
        if reservation.closed:
            reservation.attachment.reservations.pop(reservation.number, None)
            self._forget_if_over(reservation.attachment)

    def _give_up_rank(self, writer: Writer) -> None:
        bit = np.uint64(1 << writer.rank)
        for reservation in list(writer.attachment.reservations.values()):
            unwritten = (reservation.state == Entry.OPEN) & ((reservation.remaining & bit) != 0)
            self._give_up(reservation, np.flatnonzero(unwritten))

    def fenced(self, writer: Writer, number: int) -> None:
        """`writer` answers a fence: its copies into the leases' slots have ended."""
        fence = self._asked.get(number)
        if fence is None or fence.writer is not writer:
            raise Refused(f"fence: {number} was not asked of this session")
        del self._asked[number]
        for lease in fence.leases:
            reservation = writer.attachment.reservations.get(lease)
            if reservation is not None:
                gone = fence.entries[reservation.state[fence.entries] == Entry.GONE]
                self._clear(reservation, gone, writer.rank, writer)

    def take_fences(self) -> list[Fence]:
        """The fences to send, each once."""
        fences, self._fences = self._fences, []
        fences = [fence for fence in fences if fence.leases[0] in fence.writer.attachment.reservations]
        self._asked.update((fence.number, fence) for fence in fences)
        return fences

    def expire(self) -> None:
        """Ends leases and reservations that are past their deadlines."""
        now = self._clock()
        for attachment in list(self.attachments.values()):
            over = [lease.number for lease in attachment.leases.values() if lease.deadline <= now]
            if over:
                self.residency.counters["expired_leases"] += len(over)
                self.release(attachment, over)
            for reservation in list(attachment.reservations.values()):
                if reservation.deadline <= now:
                    self._give_up(reservation, np.flatnonzero(reservation.state == Entry.OPEN))
            self._forget_if_over(attachment)
        self._asked = {
            number: fence
            for number, fence in self._asked.items()
            if any(lease in fence.writer.attachment.reservations for lease in fence.leases)
        }

    @property
    def is_being_stored(self) -> bool:
        """Whether a commit can still come; slots in quarantine, whoever holds them, become no block any more."""
        return bool(self._pending_owner)

    def _space(self, attachment: Attachment, group: int) -> Space:
        if not 0 <= group < len(attachment.spaces):
            raise ProtocolError(f"field 'group': {group} is not one of the namespace's {len(attachment.spaces)} groups")
        return attachment.spaces[group]

    # ---- proof

    def check(self) -> list[str]:
        """Every violation of the invariants, as sentences; empty when all is well. O(rows)."""
        index = self.residency.index
        wrong = self.residency.check()
        pins = np.zeros(len(index.pins), dtype=np.uint32)
        open_rows: list[int] = []
        pending = quarantined = hbm_pending = hbm_quarantined = 0
        for attachment in self.attachments.values():
            name = f"attachment {attachment.token.hex()[:8]}"
            pinned = held = 0
            for lease in attachment.leases.values():
                np.add.at(pins, lease.rows, np.uint32(1))
                pinned += len(lease.rows) * lease.space.slot_bytes
            for reservation in attachment.reservations.values():
                in_hbm = reservation.pool == POOL_HBM
                is_open, gone = reservation.state == Entry.OPEN, reservation.state == Entry.GONE
                open_rows += reservation.rows[is_open].tolist()
                pending += int((is_open & ~in_hbm).sum())
                quarantined += int((gone & ~in_hbm).sum())
                hbm_pending += int((is_open & in_hbm).sum())
                hbm_quarantined += int((gone & in_hbm).sum())
                held += int(gone.sum()) * reservation.space.slot_bytes
            if pinned != attachment.pinned_bytes:
                wrong.append(f"{name}: {attachment.pinned_bytes} bytes pinned, its leases say {pinned}")
            if held != attachment.quarantined_bytes:
                wrong.append(f"{name}: {attachment.quarantined_bytes} bytes quarantined, its reservations say {held}")
        for process in {attachment.process for attachment in self.attachments.values()}:
            together = [one for one in self.attachments.values() if one.process is process]
            sums = (sum(one.pinned_bytes for one in together), sum(one.quarantined_bytes for one in together))
            if sums != (process.pinned_bytes, process.quarantined_bytes):
                wrong.append(f"a process holds {process}, its attachments say {sums}")
        if not np.array_equal(pins, index.pins):
            wrong.append(f"pins: the index says {int(index.pins.sum())}, the leases {int(pins.sum())}")
        pending_rows = np.flatnonzero(index.state[: index.high] == RowState.PENDING).tolist()
        if not sorted(open_rows) == sorted(self._pending_owner) == pending_rows:
            wrong.append("pending rows are not those of the open reservations")
        if self.residency.hbm is not None:
            in_pool = self.residency.hbm.pool.counts().values()
            held_there = (sum(c.pending for c in in_pool), sum(c.quarantined for c in in_pool))
            if held_there != (hbm_pending, hbm_quarantined):
                wrong.append(f"hbm: {held_there} slots pending, quarantined; not {(hbm_pending, hbm_quarantined)}")
        counts = self.residency.dram.pool.counts().values()
        if sum(c.quarantined for c in counts) != quarantined:
            wrong.append(
                f"dram: {sum(c.quarantined for c in counts)} slots quarantined, reservations hold {quarantined}"
            )
        if not index.busy.any() and sum(c.pending for c in counts) != pending:
            wrong.append(f"dram: {sum(c.pending for c in counts)} slots pending, reservations hold {pending}")
        return wrong


def _token_ids(tokens: bytes) -> U32:
    if len(tokens) % 4:
        raise ProtocolError(f"field 'tokens': {len(tokens)} bytes are no whole u32 numbers")
    return np.frombuffer(tokens, dtype="<u4")
