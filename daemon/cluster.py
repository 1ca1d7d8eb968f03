"""This node among others: the one place where Redis, the peers, the fleet's directory and the cache meet.

Everything is off unless the settings name a Redis or an address to listen on. Whatever is away, slow or refused here is
a state that `status` shows: the daemon starts, serves and ends without it.
"""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from kvcascade.config import VERSION
from kvcascade.config.errors import ConfigError
from kvcascade.config.settings import Endpoint, Settings
from kvcascade.tiers.block import CRYPTOGRAPHIC
from kvcascade.tiers.codec import Codec, CodecChoice
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import Secret

from .cost import Link
from .fleet import Fleet, NodeInfo
from .granting import Granting
from .peer_server import PeerServer
from .peers import Peers
from .plans import Space
from .protocol import MOST_LISTED
from .remote import Remote, Source
from .sharing import Sharing
from .sources import PeerSource, RedisSource

if TYPE_CHECKING:
    from .server import Daemon

log = logging.getLogger("kvcascade.cluster")

LISTEN_AGAIN_S = 2.0  # how often an address that was lost is tried
# The daemon's own attachments: what it gives to other nodes, keeps for them, and gets.
OURS = frozenset({"peers", "hand-offs", "kvcascade"})


class Cluster:
    """All parts of a node that deal with other nodes. Use as an async context manager, after the cache and transfer."""

    def __init__(self, daemon: "Daemon") -> None:
        """ConfigError for what can never work: certificates, secrets and addresses that cannot be used."""
        settings = daemon.settings
        self._settings = settings
        self._daemon = daemon
        self._secret = Secret.from_file(settings.cluster.secret_file)
        self._choice = CodecChoice(settings.cluster.codec)
        self._name = settings.cluster.node or socket.gethostname()[:64]
        self._stack = AsyncExitStack()
        self.redis: RedisTier | None = None
        self.fleet: Fleet | None = None
        self.server: PeerServer | None = None
        self.peers: Peers
        self.remote: Remote
        self.sharing: Sharing
        self.granting: Granting
        self._sources: list[Source] = []
        self._redis_link: Link | None = None
        self._sent = Link()  # to Redis
        self._unheard = ""  # why other nodes are not served
        self._listening_again: asyncio.Task[None] | None = None
        listen = settings.peers.listen
        if listen is not None and listen.host in ("0.0.0.0", "::") and settings.peers.advertise is None:
            raise ConfigError(f"peers.advertise: peers.listen is {listen}, so say at which address others reach it")

    @staticmethod
    def wanted(settings: Settings) -> bool:
        """Whether the settings name anything outside of this node; a secret alone is enough to fetch hand-offs."""
        return bool(settings.redis.url or settings.peers.listen or settings.cluster.secret_file)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_listening_again()
        await self._stack.aclose()

    async def _open(self, stack: AsyncExitStack) -> None:
        settings, daemon = self._settings, self._daemon
        if settings.cluster.codec == "auto":
            await asyncio.to_thread(self._choice.measure)
        self.granting = Granting(
            settings, daemon.cache, daemon.transfer, self._secret, boot=daemon.boot, clock=daemon.clock
        )
        if settings.peers.listen is not None:
            self.server = PeerServer(
                settings.peers, self._secret, self.info, self.granting, codec=self._peer_codec, met=self._met
            )
            await stack.enter_async_context(self.server)
        self.peers = await stack.enter_async_context(Peers(settings.peers, self._secret, self.info, met=self._met))
        if settings.redis.url:
            await self._open_redis(stack)
        directory = self.fleet if settings.redis.store in ("directory", "both") else None
        # A node that has neither secret nor certificate could be anybody.
        proven = self._secret.shared or settings.peers.tls_cert is not None
        self._peer_source = PeerSource(
            self.peers,
            directory,
            self._secret,
            address_of=None if proven else self._address_of,
            codec=lambda link: self._choice.choose(link.speed),
        )
        self._sources.append(self._peer_source)
        self.remote = await stack.enter_async_context(
            Remote(settings.cluster, daemon.cache, daemon.transfer, self._sources, clock=daemon.clock)
        )
        payload = self.redis if settings.redis.store in ("payload", "both") else None
        low = settings.dram.low_watermark.of(daemon.residency.dram.pool.capacity)
        self.sharing = await stack.enter_async_context(
            Sharing(settings.redis, daemon.cache, payload, directory, slack=2 * low, timeout=settings.cluster.deadline)
        )

    async def _open_redis(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        redis = self.redis = RedisTier(settings.redis, self._secret, codec=self._redis_codec, sent=self._sent.observe)
        await redis.open()
        stack.push_async_callback(redis.close)
        if settings.redis.store in ("payload", "both"):
            source = RedisSource(redis)
            self._redis_link = source.link
            self._sources.append(source)
        # Whatever is kept in Redis, nodes that meet there compare how they name blocks.
        self.fleet = await stack.enter_async_context(
            Fleet(redis, self._secret, self.info(), entry_ttl=settings.redis.ttl, timeout=settings.redis.deadline)
        )
        self.fleet.namespaces = self._namespaces

    def info(self) -> NodeInfo:
        """What this node says of itself to others."""
        daemon = self._daemon
        return NodeInfo(
            name=self._name,
            boot=daemon.boot,
            address=self.address,
            version=VERSION,
            hash_algo=daemon.settings.daemon.hash_algo,
            key_scheme=daemon.settings.daemon.key_scheme,
            none_hash=daemon.none_hash,
        )

    @property
    def address(self) -> Endpoint | None:
        """Where other nodes reach this one; None while it serves nobody."""
        if self.server is None or not self.server.listens:
            return None
        if self._settings.peers.advertise is not None:
            return self._settings.peers.advertise
        return self.server.endpoint

    async def _address_of(self, boot: bytes, timeout: float) -> Endpoint | None:
        """Where an incarnation is, by what is known without its own word."""
        if boot == self._daemon.boot:
            return self.address
        return None if self.fleet is None else await self.fleet.address_of(boot, timeout)

    def _namespaces(self) -> list[Namespace]:
        """Those of the engines that are attached, which may leave the node."""
        spaces = {
            attachment.spaces[0].fingerprint: attachment.spaces[0].namespace
            for attachment in self._daemon.cache.attachments.values()
            if attachment.engine not in OURS and attachment.spaces[0].namespace.hash_algo in CRYPTOGRAPHIC
        }
        return [spaces[fingerprint] for fingerprint in sorted(spaces)]

    def _met(self, info: NodeInfo) -> None:
        if self.fleet is not None:
            self.fleet.note(info)

    def _redis_codec(self) -> Codec:
        fetched = None if self._redis_link is None else self._redis_link.speed
        return self._choice.choose(self._sent.speed or fetched)

    def _peer_codec(self, asked: Codec | None) -> Codec:
        """Who fetches sees the link; what this node's own limit makes of it, before that is seen too."""
        own = self._choice.choose(self._settings.peers.bandwidth or None)
        return asked if asked is not None and own == Codec.RAW and self._settings.cluster.codec == "auto" else own

    def hand_off(self, space: Space, hashes: bytes, seconds: float) -> bytes:
        """A ticket for these blocks; see `Granting.hand_off`."""
        return self.granting.hand_off(space, hashes, seconds, self.address, self._name)

    def ticket(self, space: Space) -> bytes:
        """That of every hand-off; empty where no other node could fetch these blocks."""
        return self.granting.ticket(space, self.address, self._name)

    async def pause(self, timeout: float) -> bool:
        """Begins nothing any more, and ends what is under way; whether it has ended within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        await self._stop_listening_again()
        if self.fleet is not None:
            await self.fleet.stop(timeout / 2)
        if self.server is not None:
            await self.server.stop(max(0.0, end - loop.time()))
        await self.remote.pause()
        return await self.sharing.pause(max(0.0, end - loop.time()))

    def resume(self) -> None:
        """Ends a pause."""
        if not self._listen():
            self._listening_again = asyncio.create_task(self._listen_again(), name="listen again")
        self._join()
        self.remote.resume()
        self.sharing.resume()

    def _listen(self) -> bool:
        """Whether others are served again, if they are to be; another process may have the address."""
        try:
            if self.server is not None:
                self.server.start()
        except ConfigError as error:
            if not self._unheard:
                log.error("other nodes are not served now reason=%s", error)
            self._unheard = str(error)
            return False
        self._unheard = ""
        return True

    async def _listen_again(self) -> None:
        while True:
            await asyncio.sleep(LISTEN_AGAIN_S)
            if self._listen():
                break
        log.info("other nodes are served again")
        if self.fleet is not None:
            await self.fleet.stop()
            self._join()
            self.fleet.forgotten()  # what was to be named meanwhile was not

    async def _stop_listening_again(self) -> None:
        if self._listening_again is not None:
            self._listening_again.cancel()
            await asyncio.wait([self._listening_again])
            self._listening_again = None

    def _join(self) -> None:
        if self.fleet is not None:
            self.fleet.me = self.info()
            self.fleet.start()

    # ---- what people see

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "node": self._name,
            "secret": self._secret.shared,
            "fetch": self._settings.cluster.fetch,
            "redis": {} if self.redis is None else self.redis.status(),
            "fleet": {} if self.fleet is None else self.fleet.status(),
            "server": {} if self.server is None else self.server.status(),
            "peers": [one | {"bandwidth": self._bandwidth_of(one["boot"])} for one in self.peers.status()],
            "links": self._links(),
            "remote": self.remote.status(),
            "sharing": self.sharing.status(),
            "handoffs": self.granting.status(),
        }
        return status

    def _bandwidth_of(self, boot: str) -> float:
        """0.0: not known yet. A node's bytes over the time of its fetches is too little, as they run side by side."""
        link = self._peer_source.links.get(bytes.fromhex(boot))
        return link.now().bandwidth if link is not None and link.observed else 0.0

    def _links(self) -> list[dict[str, Any]]:
        named = [] if self._redis_link is None else [("redis", self._redis_link)]
        links = list(self._peer_source.links.items())[-MOST_LISTED:]
        named += [(f"node {boot.hex()[:8]}", link) for boot, link in links]
        return [{"name": name, **link.shown()} for name, link in named]

    def problems(self) -> list[str]:
        problems = [f"other nodes are not served: {self._unheard}"] if self._unheard else []
        if self.redis is not None:
            problems += self.redis.problems()
        if self.fleet is not None:
            problems += self.fleet.problems()
        problems += self.peers.problems()
        if self.server is not None:
            problems += self.server.problems()
        return problems
