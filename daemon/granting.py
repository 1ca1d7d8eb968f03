"""What other nodes may have of this one: answers how much of a prefix is here, holds it while it is sent, hands it off.

Only what lies here is given: a node never fetches for another one, so a request cannot travel in circles. Blocks are
held by leases of the daemon's own attachments, with deadlines, as an engine's are.

A *hand-off* is how a prefill engine passes a prefix on: its blocks, also those still being stored, stay pinned until
another node has fetched them or the deadline has come, and the ticket that names them travels with the request.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cbor2

from kvcascade.config.errors import ProtocolError, Refused
from kvcascade.config.settings import Endpoint, Settings
from kvcascade.tiers.block import CRYPTOGRAPHIC, itemsize
from kvcascade.tiers.remote import TAG_BYTES, BlockName, Secret

from .cache import Cache
from .index import NO_ROW, NO_SLOT, U64, RowState
from .lease import Attachment, Lease
from .plans import Space
from .protocol import decode_body
from .transfer import Transfer

log = logging.getLogger("kvcascade.granting")

GRANT_S = 30.0  # how long blocks are held while they are being sent
GRACE_S = 0.2  # how long blocks are waited for of which nothing is known yet, of a prompt that was handed off
POLL_S = 0.005  # how often a prefix that is still being stored is looked at, at first
POLL_SHARE = 0.05  # of what it was waited for already is added to that at most
MOST_HANDOFF_S = 600.0
TICKET_FORMAT = 2
MAX_TICKET = 1024


@dataclass(eq=False, slots=True)
class Grant:
    """Blocks that are held for another node: a name and the payload for each, in order.

    The payloads may be read until `release`. `valid`: whether the slots still hold these blocks; to be asked once they
    were sent, since a lease may run out.
    """

    names: list[BlockName]
    blocks: list[memoryview]
    element: int
    valid: Callable[[], bool]
    attachment: Attachment
    lease: Lease


@dataclass(eq=False, slots=True)
class _HandOff:
    """A prefix that is kept for another node. `left`: its rows that are still to be sent, if that node wants them."""

    lease: Lease
    left: set[int]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a handed-off prefix lies: a node's address and incarnation. Travels with a request as opaque bytes.

    Clients may see and change what travels with a request. The fleet's secret proves that a node of it wrote a ticket,
    so that nobody else has a daemon connect to where they wish. Without one the tag proves nothing: see `PeerSource`.
    """

    node: str
    boot: bytes
    endpoint: Endpoint

    def pack(self, secret: Secret) -> bytes:
        body = cbor2.dumps([TICKET_FORMAT, self.node, self.boot, self.endpoint.host, self.endpoint.port])
        return secret.tag("tickets", body) + body

    @classmethod
    def unpack(cls, data: bytes, secret: Secret) -> "Ticket":
        """ProtocolError for what is no ticket of this format, Refused for one of another fleet, or of none."""
        if len(data) > MAX_TICKET:
            raise ProtocolError(f"field 'ticket': {len(data)} bytes are more than {MAX_TICKET}")
        tag, body = data[:TAG_BYTES], data[TAG_BYTES:]
        if not secret.proves(tag, "tickets", body):
            raise Refused("field 'ticket': no node with this node's cluster.secret_file wrote it")
        match decode_body(b"\xa1\x61t" + body).get("t"):
            case [2, str(node), bytes(boot), str(host), int(port)] if len(boot) == 16 and 0 < port < 65536:
                return cls(node, boot, Endpoint(host, port))
        raise ProtocolError("field 'ticket': it is none of this version's")


class Granting:
    """The daemon's answers to other nodes; on the loop's thread."""

    def __init__(
        self,
        settings: Settings,
        cache: Cache,
        transfer: Transfer,
        secret: Secret,
        *,
        boot: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._cache = cache
        self._transfer = transfer
        self._boot = boot
        self._clock = clock
        self._attachments: dict[tuple[bytes, str], Attachment] = {}
        self._handoffs: dict[int, _HandOff] = {}

    def _space(self, namespace: bytes, group: int) -> Space | None:
        for space in self._cache.residency.spaces:
            if space.fingerprint == namespace and space.group == group:
                return space if space.namespace.hash_algo in CRYPTOGRAPHIC else None
        return None

    def _attachment(self, space: Space, use: str) -> Attachment:
        """In whose name blocks are pinned. Each use has its own share of the pool: what is handed off and not fetched
        yet must leave room to those who fetch it.
        """
        known = self._attachments.get((space.fingerprint, use))
        if known is None:
            known = self._attachments[space.fingerprint, use] = self._cache.attach(space.namespace, 1, use)
            known.sessions = 1  # as long as the daemon lives
        return known

    async def leading(self, namespace: bytes, group: int, hashes: bytes, *, wait: float) -> int:
        """How many leading blocks of this piece of a chain are here now.

        `wait`: seconds to wait, at most, for those that are still being stored here, but only as long as the next one
        is, or may be: a prompt's engine may ask for its slots later than the one that it was handed to asks for them.
        """
        space = self._space(namespace, group)
        if space is None or len(hashes) % space.width:
            return 0
        residency = self._cache.residency
        index = residency.index
        keys = residency.keys(space, hashes)
        begun = now = self._clock()
        deadline, grace = now + wait, now + min(wait, GRACE_S)
        count = self._ready(space, keys)
        while count < len(keys):
            # Of a long prompt only the next block is looked at again and again: many may be waiting here at a time.
            (row,) = index.find(space.number, keys[count : count + 1])
            pending = row != NO_ROW and index.state[row] == RowState.PENDING
            left = (deadline if pending else grace) - now
            if left <= 0:
                break
            await asyncio.sleep(min(max(POLL_S, POLL_SHARE * (now - begun)), left))
            now = self._clock()
            if self._ready(space, keys[count : count + 1]):
                count += self._ready(space, keys[count:])
        rows = index.find(space.number, keys[:count])
        ready = residency.is_ready(rows)
        rows = residency.chained(rows if ready.all() else rows[: int(ready.argmin())])
        index.touch_up(rows)
        if wait:
            # Who has a ticket asks for what it lacks of the prefix, and fetches no more.
            asked = set(rows.tolist())
            for handoff in self._handoffs_of(space, asked):
                handoff.left &= asked
        return len(rows)

    def _handoffs_of(self, space: Space, rows: set[int]) -> list[_HandOff]:
        """Those that end with one of these rows."""
        every = self._handoffs.values()
        return [
            one for one in every if one.lease.space is space and len(one.lease.rows) and int(one.lease.rows[-1]) in rows
        ]

    def _ready(self, space: Space, keys: U64) -> int:
        """How many of the leading blocks of these are here now."""
        residency = self._cache.residency
        ready = residency.is_ready(residency.index.find(space.number, keys))
        return len(keys) if ready.all() else int(ready.argmin())

    async def grant(self, namespace: bytes, group: int, hashes: bytes) -> Grant | None:
        """Holds the leading blocks of a piece of a chain that are here, in memory; None where there is none."""
        space = self._space(namespace, group)
        if space is None or len(hashes) % space.width:
            return None
        cache, residency = self._cache, self._cache.residency
        attachment = self._attachment(space, "peers")
        lease = cache.hold(attachment, space, residency.keys(space, hashes), GRANT_S)
        try:
            # Who asks takes a node for dead that says nothing for so long; half of it is for what comes from disk.
            wait = self._settings.peers.deadline / 2
            await self._transfer.fetch(
                space, lambda: cache.leased_rows(attachment, lease.number, len(lease.rows)), wait
            )
            rows = cache.leased_rows(attachment, lease.number, len(lease.rows))
            there = (residency.index.dram[rows] != NO_SLOT) & (residency.index.state[rows] == RowState.READY)
            rows = rows if there.all() else rows[: int(there.argmin())]
            if not len(rows):
                cache.release(attachment, [lease.number])
                return None
        except BaseException:
            cache.release(attachment, [lease.number])
            raise
        pages = residency.index.dram[rows]
        generations = residency.dram.generations
        before = generations.of(pages).copy()
        width = space.width
        return Grant(
            names=[
                BlockName(space.fingerprint, space.group, hashes[n * width : (n + 1) * width]) for n in range(len(rows))
            ],
            blocks=[residency.dram.view(page, space.block_bytes).data for page in pages.tolist()],
            element=itemsize(space.namespace.kv_dtype),
            valid=lambda: bool((generations.of(pages) == before).all()),
            attachment=attachment,
            lease=lease,
        )

    def release(self, grant: Grant, *, sent: bool) -> None:
        """The blocks of a grant are read no more. `sent`: another node has them. The last of a hand-off end it."""
        self._cache.release(grant.attachment, [grant.lease.number])
        if not sent:
            return
        have = set(grant.lease.rows[: len(grant.names)].tolist())
        for handoff in list(self._handoffs.values()):
            if handoff.lease.space is grant.lease.space and handoff.left:
                handoff.left -= have
                if not handoff.left:
                    self._end_handoff(handoff.lease.number)

    # ---- hand-offs

    def ticket(self, space: Space, endpoint: Endpoint | None, node: str) -> bytes:
        """Whatever is handed off has the same; empty where hand-offs are refused."""
        if endpoint is None or space.namespace.hash_algo not in CRYPTOGRAPHIC:
            return b""
        return Ticket(node, self._boot, endpoint).pack(self._secret)

    def hand_off(self, space: Space, hashes: bytes, seconds: float, endpoint: Endpoint | None, node: str) -> bytes:
        """Pins a chain, as far as it is here or being stored here, for another node; its ticket."""
        if endpoint is None:
            raise Refused("handoff: peers.listen is not set, or could not be had, so no other node could fetch them")
        if space.namespace.hash_algo not in CRYPTOGRAPHIC:
            raise Refused(f"handoff: hashes of {space.namespace.hash_algo} may not leave the node")
        self._handoffs = {n: one for n, one in self._handoffs.items() if n in one.lease.attachment.leases}
        attachment = self._attachment(space, "hand-offs")
        keys = self._cache.residency.keys(space, hashes)
        lease = self._cache.hold(attachment, space, keys, min(seconds, MOST_HANDOFF_S), pending=True)
        self._handoffs[lease.number] = _HandOff(lease, set(lease.rows.tolist()))
        return Ticket(node, self._boot, endpoint).pack(self._secret)

    def _end_handoff(self, number: int) -> None:
        lease = self._handoffs.pop(number).lease
        self._cache.release(lease.attachment, [number])

    def status(self) -> dict[str, Any]:
        live = [one.lease for n, one in self._handoffs.items() if n in one.lease.attachment.leases]
        return {"handoffs": len(live), "handoff_blocks": sum(len(lease.rows) for lease in live)}
