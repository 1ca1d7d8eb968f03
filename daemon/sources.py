"""The two kinds of places that a prefix may come from: Redis, and the nodes that the fleet's directory names."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvcascade.config.errors import Refused, TierUnavailable
from kvcascade.config.settings import Endpoint
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Fetch, Secret

from .cost import Link
from .fleet import Fleet
from .granting import Ticket
from .peers import Peers
from .plans import Space
from .protocol import Tier
from .remote import Found, answers
from .together import Together

log = logging.getLogger("kvcascade.sources")

CANDIDATES = 2  # nodes that are asked exactly, of those that the directory names
DOUBTED = 64  # addresses that are told of once
LINKS = 1024  # nodes whose speed is remembered
# A node that has served this one before answers a question in about the latency of its link. One that takes so many
# times as long, and a while that busy machines may take, hangs: waiting for it on would cost the other sources, or the
# engine, that time.
HANGS = 50
HANGS_S = 1.0


class RedisSource:
    """Blocks whose payloads lie in Redis."""

    tier = Tier.REDIS

    def __init__(self, redis: RedisTier) -> None:
        self._redis = redis
        self.link = Link()
        self._alone = Together(redis.which)

    async def find(self, space: Space, hashes: bytes, ticket: bytes, timeout: float) -> list[Found]:
        """How many leading blocks Redis has. TierUnavailable while it is away."""
        width = space.width
        # Not a list: the tier's thread makes them, 0.6 us each.
        names = (
            BlockName(space.fingerprint, space.group, hashes[start : start + width])
            for start in range(0, len(hashes), width)
        )
        if len(hashes) == width:
            # Of blocks that are no chain each is a question of its own: hundreds at once.
            there = await self._alone.one(next(names), timeout)
            if isinstance(there, TierUnavailable):
                raise there
            count = int(there)
        else:
            count = await self._redis.present(names, timeout)
        return [Found("redis", self.tier, count, self.link, self._fetch, self._redis.forget)] if count else []

    async def _fetch(self, jobs: Sequence[Fetch], timeout: float) -> list[str | None]:
        return await self._redis.fetch(jobs, timeout, observe=self.link.observe)


class PeerSource:
    """Blocks in the DRAM and on the disks of other nodes."""

    tier = Tier.PEER

    def __init__(
        self,
        peers: Peers,
        fleet: Fleet | None,
        secret: Secret,
        *,
        address_of: Callable[[bytes, float], Awaitable[Endpoint | None]] | None = None,
        codec: Callable[[Link], Codec | None] = lambda link: None,
    ) -> None:
        """`address_of`: where an incarnation is known to be, within so many seconds; no ticket is believed that says
        otherwise. None where a ticket's tag, or the other side's certificate, is proof enough. `codec`: how payloads
        had better be packed for a link.
        """
        self._peers = peers
        self._secret = secret
        self._fleet = fleet
        self._address_of = address_of
        self._codec = codec
        self.links: dict[bytes, Link] = {}
        self._doubted: set[Endpoint] = set()  # that the log has named

    async def find(self, space: Space, hashes: bytes, ticket: bytes, timeout: float) -> list[Found]:
        """What the nodes have that the directory or a ticket names, by their own word.

        CascadeError when the directory cannot be read, or when none of the nodes answers.
        """
        began = time.monotonic()
        if ticket:
            named = Ticket.unpack(ticket, self._secret)
            await self._believe(named, timeout)
            # So long for blocks that are still being stored there.
            left = 1.5 * timeout - (time.monotonic() - began)
            return [await self._ask(named.node, named.endpoint, named.boot, space, hashes, timeout, left)]
        if self._fleet is None:
            return []
        holders = await self._fleet.find(space.fingerprint, space.group, hashes, space.width, timeout)
        left = timeout - (time.monotonic() - began)
        founds, errors = await answers(
            self._ask(one.name, one.address, one.boot, space, hashes[: count * space.width], 0.0, left)
            for one, count in holders[:CANDIDATES]
            if one.address is not None
        )
        if not founds and errors:
            raise errors[0]
        return [one for one in founds if one.blocks]

    async def _believe(self, ticket: Ticket, timeout: float) -> None:
        """Refused for a ticket that anybody may have written, if nothing else says that its node is there.

        Whoever may name an address has this node connect there, and take the bytes for what a prompt's hashes name.
        """
        if self._address_of is None:
            return
        address = await self._address_of(ticket.boot, timeout)
        if address == ticket.endpoint:
            return
        known = "no node is known there" if address is None else f"that node is at {address}"
        error = Refused(
            f"field 'ticket': a hand-off names {ticket.endpoint}, but {known}: give all nodes one cluster.secret_file, "
            "or have them meet in one Redis"
        )
        if ticket.endpoint not in self._doubted:
            log.warning("a hand-off is not believed reason=%s", error)
            self._doubted = {*self._doubted, ticket.endpoint} if len(self._doubted) < DOUBTED else {ticket.endpoint}
        raise error

    async def _ask(
        self, name: str, endpoint: Endpoint, boot: bytes, space: Space, hashes: bytes, wait: float, timeout: float
    ) -> Found:
        known = self.links.get(boot)
        if known is not None and known.observed and not wait:
            timeout = min(timeout, max(HANGS_S, HANGS * known.latency))
        told = await self._peers.ask(endpoint, boot, space.fingerprint, space.group, hashes, wait=wait, timeout=timeout)
        count = min(told, len(hashes) // space.width)
        link = self.links.get(boot)
        if link is None:
            if len(self.links) >= LINKS:
                self.links.pop(next(iter(self.links)))
            link = self.links[boot] = Link()
        return Found(f"node {name}", self.tier, count, link, partial(self._fetch, endpoint, boot, link))

    async def _fetch(
        self, endpoint: Endpoint, boot: bytes, link: Link, jobs: Sequence[Fetch], timeout: float
    ) -> list[str | None]:
        codec = self._codec(link)
        return await self._peers.fetch(endpoint, boot, jobs, timeout, codec=codec, observe=link.observe)
