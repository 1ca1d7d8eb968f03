"""One connection of the control socket: from frames to the cache and back, and the process behind it.

Requests are answered in the order in which they come, on the loop's thread; only those that may wait for bytes or for
other nodes (`load`, `lookup`, `explain`) do so in tasks of their own, and replies are matched by correlation id.
Whatever a client sends ends in a reply or an error that names the field, and where framing is lost in an error and the
end of the connection. A session ends with its *process*, which is watched by a pidfd: a closed socket may leave a live
process in the middle of a copy, a forked child may keep a dead one's open.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvcascade.config.errors import CascadeError, ProtocolError, Refused
from kvcascade.tiers.block import HASH_BYTES, probe_hashes
from kvcascade.tiers.namespace import Namespace

from . import protocol
from .cache import Match, Reserved
from .cost import FASTEST, SLOWEST
from .granting import MAX_TICKET
from .lease import Attachment, Writer
from .plans import Slots
from .protocol import Frame, FrameDecoder, Kind, take, take_u32, take_u64
from .remote import Question

if TYPE_CHECKING:
    from .server import Daemon

log = logging.getLogger("kvcascade.session")

SO_PEERPIDFD = 77  # Linux 6.5; works across pid namespaces, where SO_PEERCRED says pid 0
MAX_WAIT_MS = 60_000
MAX_KEEP_MS = 600_000
MAX_PENDING = 64  # requests of one session that are still waiting; more are not read until some have ended
MAX_ALONE = 256  # questions to other nodes that one lookup of blocks that are no chain may open
REFUSAL_GRACE_S = 1.0  # how long a connection that may not stay may take to ask for something
MAX_UNREAD = 16 << 20  # bytes of replies that a client has not read; a client that is so far behind is cut off


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What a lookup asks, kept while its answer waits."""

    attachment: Attachment
    group: int
    hashes: bytes
    request: bytes
    pin: bool
    tokens: bytes
    promote: bool
    each: bool


class Session(asyncio.Protocol):
    """The daemon's end of one connection."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.token = secrets.token_bytes(16)
        self.since = daemon.clock()
        self.pid = self.uid = 0
        self.role = ""
        self.engine: dict[str, Any] = {}
        self.rank = 0
        self.attachment: Attachment | None = None
        self.writer: Writer | None = None
        self.pidfd: int | None = None
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._pending: set[asyncio.Task[None]] = set()
        self._frozen = False
        self._refusal: Refused | None = None  # why it may not stay
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            protocol.OP_PING: lambda body: {"boot": daemon.boot},
            protocol.OP_RELEASE: self._release,
            protocol.OP_RESERVE: self._reserve,
            protocol.OP_COMMIT: self._commit,
            protocol.OP_ABORT: self._abort,
            protocol.OP_FAILED: self._failed,
            protocol.OP_WHERE: self._where,
            protocol.OP_STATUS: lambda body: daemon.status(),
            protocol.OP_DETACH: self._detach,
            protocol.OP_FENCED: self._fenced,
            protocol.OP_COMPUTED: self._computed,
            protocol.OP_HANDOFF: self._hand_off,
        }

    @property
    def writers(self) -> list[Writer]:
        """As what its process writes into slots: at most one."""
        return [] if self.writer is None else [self.writer]

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio.Transport in all but their bases.
        self._transport = cast(asyncio.Transport, transport)
        try:
            with self._socket() as sock:
                credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                self.pid, self.uid, _ = struct.unpack("iII", credentials)
                self.pidfd = _peer_pidfd(sock, self.pid)
        except OSError as error:
            # Out of descriptors. Whoever it is finds no daemon, as one whose connection cannot even be accepted does.
            self._daemon.counters["connections_lost"] += 1
            log.warning("connection refused reason=%s", error.strerror)
            self.kill()
            return
        try:
            self._daemon.enter(self)
        except Refused as error:
            # Told in reply to its first request: what comes before one a client takes for late and drops.
            self._refusal = error
            asyncio.get_running_loop().call_later(REFUSAL_GRACE_S, self.kill)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._handle(frame)
        except ProtocolError as error:
            self._daemon.counters["protocol_errors"] += 1
            self.reply_error(0, error)
            self._close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for task in self._pending:
            task.cancel()
        self._daemon.leave(self)

    def freeze(self) -> None:
        """Reads no more requests until `thaw`; they wait in the socket."""
        self._frozen = True
        if self._transport is not None:
            self._transport.pause_reading()

    def thaw(self) -> None:
        self._frozen = False
        if self._transport is not None and len(self._pending) < MAX_PENDING and not self._transport.is_closing():
            self._transport.resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def kill(self) -> None:
        """Ends the connection at once: its process is dead, or the daemon ends."""
        if self._transport is not None:
            self._transport.abort()

    @contextlib.contextmanager
    def _socket(self) -> Any:
        # Neither asyncio's nor uvloop's transport socket can pass descriptors or be asked for every option.
        assert self._transport is not None
        sock = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        try:
            yield sock
        finally:
            sock.close()

    def process_is_dead(self) -> bool:
        """Whether the process behind this session is known to have ended."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    # ---- requests

    def _handle(self, frame: Frame) -> None:
        if frame.kind != Kind.REQUEST:
            raise ProtocolError(f"a frame of kind {frame.kind} from a client; only requests are allowed")
        if self._refusal is not None:
            self.reply_error(frame.correlation, self._refusal)
            self._close()
            return
        try:
            body = protocol.decode_body(frame.body)
            op = take(body, "op", str, hi=32)
            if op == protocol.OP_ATTACH:
                self._attach(frame.correlation, body)
            elif op == protocol.OP_TAKEOVER:
                self._daemon.hand_over(self, frame.correlation, body)
            elif op == protocol.OP_LOOKUP:
                self._start_lookup(frame.correlation, body)
            elif op == protocol.OP_LOAD:
                self._start_load(frame.correlation, body)
            elif op == protocol.OP_EXPLAIN:
                self._start_explain(frame.correlation, body)
            elif op == protocol.OP_CHECK:
                self._start(self._check(frame.correlation), "check")
            else:
                operation = self._operations.get(op)
                if operation is None:
                    raise ProtocolError(f"field 'op': {op!r} is no operation of protocol {protocol.PROTOCOL_VERSION}")
                self.reply(frame.correlation, operation(body))
        except CascadeError as error:
            self._daemon.counters["refused_requests"] += 1
            self.reply_error(frame.correlation, error)
        except Exception as error:
            # A defect of ours must neither leave the engine waiting nor end the daemon.
            log.exception("request failed pid=%s", self.pid)
            self._daemon.counters["internal_errors"] += 1
            self.reply_error(frame.correlation, error)
        self._daemon.send_fences()

    def reply(self, correlation: int, body: dict[str, Any]) -> None:
        """Answers a request."""
        self._write(protocol.encode(Kind.REPLY, correlation, body))

    def reply_error(self, correlation: int, error: BaseException) -> None:
        """Answers a request that cannot be done."""
        self._write(protocol.encode_error(correlation, error))

    def send_event(self, event: str, body: dict[str, Any]) -> None:
        """Tells the client something that it did not ask for."""
        self._write(protocol.encode_event(event, body))

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNREAD:
            log.warning("session cut off pid=%s reason=it reads no replies", self.pid)
            self._transport.abort()

    # ---- attaching

    def _attach(self, correlation: int, body: dict[str, Any]) -> None:
        daemon = self._daemon
        version = take(body, "protocol", int)
        if version != protocol.PROTOCOL_VERSION:
            raise Refused(f"protocol: the client speaks {version}, this daemon {protocol.PROTOCOL_VERSION}")
        if self.role:
            raise Refused("attach: this session is attached already")
        if daemon.draining:
            raise Refused("attach: the daemon is ending")
        role = take(body, "role", str, hi=16)
        if role not in protocol.ROLES:
            raise ProtocolError(f"field 'role': {role!r} is not one of {', '.join(protocol.ROLES)}")
        engine = take(body, "engine", dict, default={})
        self.engine = {name: take(engine, name, str, default="", hi=128) for name in ("family", "version")}
        reply: dict[str, Any] = {"boot": daemon.boot, "session": self.token, "warnings": []}
        if role == protocol.ROLE_TOOL:
            self.role = role
            self.reply(correlation, reply)
            return
        if self.pidfd is None:
            raise Refused("attach: the kernel gives no pidfd of this process, so its death could not be noticed")
        namespace = self._agreed_namespace(body, reply["warnings"])
        resume = take(body, "resume", bytes, default=b"", hi=16)
        if resume:
            daemon.resume(self, resume)
        self._enter_attachment(role, namespace, body)
        assert self.attachment is not None
        reply |= {
            "attachment": self.attachment.token,
            "namespace": namespace.fingerprint(),
            "lease_ms": int(daemon.settings.leases.lookup * 1000),
            "ticket": daemon.cluster.ticket(self.attachment.spaces[0]) if daemon.cluster is not None else b"",
        }
        self._send_with_pools(correlation, reply)

    def _agreed_namespace(self, body: dict[str, Any], warnings: list[str]) -> Namespace:
        namespace = Namespace.from_map(take(body, "namespace", dict))
        probe = protocol.take_hashes(body, "probe", HASH_BYTES[namespace.hash_algo], lo=1)
        expected = b"".join(
            probe_hashes(algo=namespace.hash_algo, none_hash=namespace.none_hash, key_scheme=namespace.key_scheme)
        )
        if probe != expected:
            raise Refused(
                f"probe: the engine declares {namespace.hash_algo}, {namespace.key_scheme} and the chain root "
                f"{namespace.none_hash.hex()[:16]}, which give {expected.hex()[-16:]} for the probe's last block; "
                f"its own hashes end in {probe.hex()[-16:]}. Its blocks could never be found by others"
            )
        warnings += self._daemon.differences(namespace)
        return namespace

    def _enter_attachment(self, role: str, namespace: Namespace, body: dict[str, Any]) -> None:
        cache = self._daemon.cache
        ranks = take(body, "ranks", int, default=1, lo=1, hi=4096)
        if role == protocol.ROLE_RANK:
            token = take(body, "attachment", bytes, lo=16, hi=16)
            attachment = cache.attachments.get(token)
            if attachment is None:
                raise Refused("attachment: there is none of that token (its scheduler has ended or re-attached)")
            if attachment.spaces[0].fingerprint != namespace.fingerprint():
                raise Refused(
                    f"namespace: the rank's is {namespace.fingerprint().hex()[:16]}, its scheduler's "
                    f"{attachment.spaces[0].fingerprint.hex()[:16]}"
                )
            if ranks != attachment.ranks:
                raise Refused(f"ranks: the rank says {ranks}, its scheduler {attachment.ranks}")
        else:
            if role == protocol.ROLE_ENGINE and ranks != 1:
                raise Refused("ranks: an engine of several ranks attaches as a scheduler and ranks")
            engine = " ".join(self.engine.values()).strip()
            attachment = cache.attach(namespace, ranks, engine, process=self.pid)
            self._daemon.register_namespace(namespace)
        if role != protocol.ROLE_SCHEDULER:
            self.rank = take(body, "rank", int, default=0, lo=0)
            self.writer = cache.join(attachment, self.rank)
            self.token = self.writer.token
            self._daemon.writer_entered(self)
        self.role = role
        self.attachment = attachment
        attachment.sessions += 1

    def _send_with_pools(self, correlation: int, reply: dict[str, Any]) -> None:
        pools: list[dict[str, Any]] = []
        descriptors: list[int] = []
        try:
            for number, tier in self._daemon.pools():
                pools.append(
                    {"id": number, "tier": tier.name, "device": tier.memory.device, "bytes": tier.pool.capacity}
                )
                descriptors += tier.export()
            self.reply_with_descriptors(correlation, reply | {"session": self.token, "pools": pools}, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def reply_with_descriptors(self, correlation: int, body: dict[str, Any], descriptors: list[int]) -> None:
        """Answers a request and gives copies of `descriptors` along. Refused while earlier replies are unread."""
        if self._transport is None:
            raise Refused("the connection is lost")
        frame = protocol.encode(Kind.REPLY, correlation, body, len(descriptors))
        if self._transport.get_write_buffer_size():
            raise Refused("replies to earlier requests are still unread")
        with self._socket() as sock:
            try:
                sent = socket.send_fds(sock, [frame], descriptors)
            except OSError as error:  # the client gave up while the request waited
                raise Refused(f"the connection is lost: {error.strerror}") from error
        if sent < len(frame):
            self._write(frame[sent:])

    def _detach(self, body: dict[str, Any]) -> dict[str, Any]:
        """All copies of the client have ended: nothing of this session needs to be quarantined."""
        self._daemon.detach(self)
        return {}

    # ---- operations of an attachment

    def _attached(self) -> Attachment:
        if self.attachment is None:
            raise Refused("this session is not attached to a namespace: send 'attach' first")
        return self.attachment

    def _writing(self) -> Writer:
        self._attached()
        if self.writer is None:
            raise Refused(f"a session of role {self.role!r} writes no slots")
        return self.writer

    def _start_lookup(self, correlation: int, body: dict[str, Any]) -> None:
        """Answers at once, or within `wait_ms` where other nodes are being asked for the rest of the prefix."""
        attachment = self._attached()
        wait = min(take(body, "wait_ms", int, default=0, lo=0), MAX_WAIT_MS) / 1000
        ticket = take(body, "ticket", bytes, default=b"", hi=MAX_TICKET)
        lookup = _Lookup(
            attachment,
            take(body, "group", int, default=0),
            take(body, "hashes", bytes),
            _request_id(body),
            take(body, "pin", bool, default=True),
            take(body, "tokens", bytes, default=b""),
            take(body, "promote", bool, default=True),
            take(body, "each", bool, default=False),
        )
        match = self._match(lookup)
        questions: list[Question] = []
        if take(body, "remote", bool, default=True):
            questions = self._ask(lookup, match, ticket)
        if not wait or not any(question.asking for question in questions):
            self._reply_match(correlation, lookup, match, questions)
            return
        self._start(self._answer_lookup(correlation, lookup, questions, wait), "lookup")

    async def _answer_lookup(
        self, correlation: int, lookup: "_Lookup", questions: Sequence[Question], wait: float
    ) -> None:
        await asyncio.wait([question.task for question in questions], timeout=wait)
        try:
            self._reply_match(correlation, lookup, self._match(lookup), questions)
        except CascadeError as error:
            self.reply_error(correlation, error)

    def _match(self, lookup: "_Lookup") -> Match:
        match = self._daemon.cache.lookup(
            lookup.attachment,
            lookup.group,
            lookup.hashes,
            request=lookup.request,
            pin=lookup.pin,
            tokens=lookup.tokens,
            each=lookup.each,
            final=False,
        )
        if match.ready < match.matched and match.lease and lookup.promote:
            lease = self._daemon.cache.lease(lookup.attachment, match.lease)
            self._daemon.transfer.promote(lease.space, lease.rows)
        return match

    def _ask(self, lookup: "_Lookup", match: Match, ticket: bytes) -> list[Question]:
        """The question for the blocks behind those that are here, where there is anybody to ask.

        Of blocks that are no chain each that is missing is a question of its own, the first MAX_ALONE of them; the
        sources ask for all of one moment together.
        """
        cluster, space = self._daemon.cluster, lookup.attachment.spaces[lookup.group]
        if cluster is None:
            return []
        if match.found is None:
            chains = [(lookup.hashes, match.matched)] if len(lookup.hashes) > match.matched * space.width else []
        else:
            blocks = range(len(lookup.hashes) // space.width)
            missing = sorted(set(blocks).difference(match.found.tolist()))[:MAX_ALONE]
            chains = [(lookup.hashes[one * space.width : (one + 1) * space.width], 0) for one in missing]
        asked = [cluster.remote.ask(lookup.attachment, space, hashes, first, ticket=ticket) for hashes, first in chains]
        return [question for question in asked if question is not None]

    def _reply_match(self, correlation: int, lookup: "_Lookup", match: Match, questions: Sequence[Question]) -> None:
        asking = any(question.asking for question in questions)
        if not asking:
            self._daemon.cache.settle(lookup.attachment, lookup.attachment.spaces[lookup.group], match)
        self.reply(
            correlation,
            {
                "lease": match.lease,
                "matched": match.matched,
                "ready": match.ready,
                "tiers": match.tiers.tobytes(),
                "asking": asking,
                "deadline_ms": int(self._daemon.settings.leases.lookup * 1000),
                **({} if match.found is None else {"found": match.found.astype("<u4").tobytes()}),
            },
        )

    def _computed(self, body: dict[str, Any]) -> dict[str, Any]:
        """What an engine says of its own speed."""
        cluster, attachment = self._daemon.cluster, self._attached()
        tokens = take(body, "tokens", int, lo=1, hi=1 << 32)
        micros = take(body, "micros", int, lo=1, hi=1 << 40)
        position = take(body, "position", int, default=0, lo=0, hi=1 << 32)
        if not FASTEST <= micros / 1e6 / tokens <= SLOWEST:
            raise ProtocolError(f"field 'micros': no engine computes {tokens} tokens in {micros} us")
        if cluster is not None:
            cluster.remote.prefill(attachment).observe(tokens, micros / 1e6, position)
        return {}

    def _hand_off(self, body: dict[str, Any]) -> dict[str, Any]:
        attachment = self._attached()
        group = take(body, "group", int, default=0, lo=0, hi=len(attachment.spaces) - 1)
        seconds = take(body, "keep_ms", int, lo=1, hi=MAX_KEEP_MS) / 1000
        if self._daemon.cluster is None:
            raise Refused("handoff: peers.listen is not set, so no other node could fetch these blocks")
        ticket = self._daemon.cluster.hand_off(attachment.spaces[group], take(body, "hashes", bytes), seconds)
        return {"ticket": ticket}

    def _start_explain(self, correlation: int, body: dict[str, Any]) -> None:
        """For people: what a lookup of these hashes would fetch from where, and why."""
        hashes = take(body, "hashes", bytes)
        group = take(body, "group", int, default=0, lo=0)
        wanted = take(body, "namespace", bytes, default=b"", hi=32)
        self._start(self._explain(correlation, hashes, group, wanted), "explain")

    async def _explain(self, correlation: int, hashes: bytes, group: int, wanted: bytes) -> None:
        residency, cluster = self._daemon.residency, self._daemon.cluster
        found = []
        for space in list(residency.spaces):
            if space.group != group or (wanted and space.fingerprint != wanted) or len(hashes) % space.width:
                continue
            here = residency.where(space, hashes)
            first = len(here) if here.all() else int((here != 0).argmin())
            one: dict[str, Any] = {"namespace": space.fingerprint, "here": first}
            if cluster is not None and first < len(here):
                one |= await cluster.remote.explain(space, hashes, first)
            found.append(one)
        self.reply(correlation, {"namespaces": found, "cluster": cluster is not None})

    def _start_load(self, correlation: int, body: dict[str, Any]) -> None:
        cache = self._daemon.cache
        attachment = self._attached()
        number = take(body, "lease", int)
        count = take(body, "count", int, lo=0)
        wait = min(take(body, "wait_ms", int, default=0, lo=0), MAX_WAIT_MS) / 1000
        lease = cache.lease(attachment, number)
        if wait and not cache.in_memory(lease, count):
            cache.renew(lease, wait)
            self._start(self._load(correlation, attachment, number, count, wait), "load")
        else:
            self.reply(correlation, _slots(cache.located(lease, count)))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._pending.add(task)
        task.add_done_callback(self._ended)
        if len(self._pending) == MAX_PENDING and self._transport is not None:
            self._transport.pause_reading()

    async def _check(self, correlation: int) -> None:
        try:
            self.reply(correlation, {"violations": await self._daemon.check_aside()})
        except CascadeError as error:
            self.reply_error(correlation, error)

    async def _load(self, correlation: int, attachment: Attachment, number: int, count: int, wait: float) -> None:
        cache = self._daemon.cache
        try:
            # The lease may be released or renewed while we wait.
            await self._daemon.transfer.fetch(
                cache.lease(attachment, number).space, lambda: cache.leased_rows(attachment, number, count), wait
            )
            self.reply(correlation, _slots(cache.located(cache.lease(attachment, number), count)))
        except CascadeError as error:
            self.reply_error(correlation, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed pid=%s", task.get_name(), self.pid, exc_info=task.exception())
            self._daemon.counters["internal_errors"] += 1
        if len(self._pending) == MAX_PENDING - 1 and not self._frozen:
            self.thaw()

    def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        self._daemon.cache.release(self._attached(), take_u64(body, "leases", hi=65536).tolist())
        return {}

    def _reserve(self, body: dict[str, Any]) -> dict[str, Any]:
        attachment = self._attached()
        if self._daemon.draining or self._daemon.handing_over:
            raise Refused("reserve: the daemon is ending")
        reserved: Reserved = self._daemon.cache.reserve(
            attachment,
            take(body, "group", int, default=0),
            take(body, "hashes", bytes),
            take(body, "start", int, default=0, lo=0),
            take(body, "tokens", bytes, default=b""),
        )
        return {
            "lease": reserved.lease,
            "states": reserved.states.tobytes(),
            **({} if reserved.hole is None else {"hole": reserved.hole}),
            **_slots(reserved.slots),
        }

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        blocks = take_u32(body, "blocks")
        ready, gone = self._daemon.cache.commit(self._attached(), self._writing(), take(body, "lease", int), blocks)
        return {"ready": ready, "gone": gone}

    def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        blocks = take_u32(body, "blocks")
        self._daemon.cache.abort(
            self._attached(), self.writer, take(body, "lease", int), blocks if len(blocks) else None
        )
        return {}

    def _failed(self, body: dict[str, Any]) -> dict[str, Any]:
        self._daemon.cache.failed(self._attached(), take(body, "lease", int), take_u32(body, "blocks"))
        return {}

    def _fenced(self, body: dict[str, Any]) -> dict[str, Any]:
        self._daemon.cache.fenced(self._writing(), take(body, "fence", int))
        return {}

    # ---- operations of tools

    def _where(self, body: dict[str, Any]) -> dict[str, Any]:
        residency = self._daemon.residency
        hashes = take(body, "hashes", bytes)
        group = take(body, "group", int, default=0, lo=0)
        wanted = take(body, "namespace", bytes, default=b"", hi=32)
        found = []
        for space in residency.spaces:
            if space.group != group or (wanted and space.fingerprint != wanted) or len(hashes) % space.width:
                continue
            found.append({"namespace": space.fingerprint, "tiers": residency.where(space, hashes).tobytes()})
        return {"namespaces": found}


def _request_id(body: dict[str, Any]) -> bytes:
    request = body.get("request")
    if isinstance(request, str):
        request = request.encode()
    if request is None:
        return b""
    return take({"request": request}, "request", bytes, hi=protocol.MAX_REQUEST_ID)


def _slots(slots: Slots) -> dict[str, Any]:
    return {
        "count": len(slots.pages),
        "pools": slots.pools.tobytes(),
        "pages": slots.pages.astype("<u4").tobytes(),
        "generations": slots.generations.astype("<u4").tobytes(),
    }


def _peer_pidfd(sock: socket.socket, pid: int) -> int | None:
    """A pidfd of the process at the other end, or None where the kernel gives none. The caller closes it.

    OSError when there are no descriptors left.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # Before Linux 6.5, or the process is gone.
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
