"""One connection to a Redis, owned by one thread, and where the keys of a Redis lie.

redis-py makes the connection: addresses, TLS, Sentinel's word, the slot table of a cluster. After that the
socket is ours: commands are packed by hand, and payloads go straight between it and the caller's memory (3-4 times the
speed of redis-py's own replies for 2 MiB values). A connection on which anything went wrong is closed, never used
again: a reply that was not read would be taken for the answer to a later question.
"""

import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, NoReturn, cast
from urllib.parse import parse_qs, unquote, urlsplit

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.config.private import check_private, read_private
from kvcascade.config.settings import RedisSettings

from .wire import SOCKET_BYTES, Bytes, TimedSocket, reason_of

log = logging.getLogger("kvcascade.redis")

Node = tuple[str, int]

BUFFER_BYTES: Final = 4096  # read ahead: of a large payload this much is copied once more
MAX_LINE: Final = 4096
MAX_ITEMS: Final = 1 << 17  # of a list in a reply
MAX_DEPTH: Final = 4
MAX_SMALL: Final = 64 << 10  # a value that is no block; a reply may hold a thousand of them
MAX_VALUE: Final = 512 << 20  # Redis' own limit
DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379


class RedisSaysNo(TierUnavailable):
    """An error reply; `code` is its first word, such as MOVED or OOM. The connection is still good."""

    def __init__(self, text: str) -> None:
        super().__init__(f"redis: {text}")
        self.code, _, self.rest = text.partition(" ")


class Wire:
    """A connection that is connected and logged in. Every call ends by its deadline, a time of `time.monotonic`.

    Any error but RedisSaysNo leaves it closed. For one thread, but for `cut`.
    """

    def __init__(self, connection: AbstractConnection, timeout: float) -> None:
        """TierUnavailable when Redis cannot be reached or does not let us in; the login has `timeout` seconds."""
        self._connection = connection
        try:
            connection.connect()  # type: ignore[no-untyped-call]
            sock: socket.socket = cast(Any, connection)._sock
        except (RedisError, OSError) as error:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise TierUnavailable(f"redis: {error}") from error
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self._sock = TimedSocket(sock)
        self._ahead = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._ahead)
        self._start = self._end = 0
        self._closing = Lock()  # over the end of the descriptor that `cut` names
        self.closed = False
        self.stale = False  # set by any thread: the next call goes over another connection
        self._log_in(cast(Any, connection), time.monotonic() + timeout)

    def _log_in(self, connection: Any, deadline: float) -> None:
        """In one trip and by one deadline: redis-py gives each of its questions the whole time again."""
        self.until(deadline)
        asked = []
        if connection.password is not None:
            user = [connection.username.encode()] if connection.username else []
            asked.append(command(b"AUTH", *user, connection.password.encode()))
        if connection.db:
            asked.append(command(b"SELECT", b"%d" % connection.db))
        try:
            self.send(asked)
            for _ in asked:
                self.reply()
        except RedisSaysNo as error:
            self.close()
            raise TierUnavailable(f"redis: login: {error.code} {error.rest}") from error

    def close(self) -> None:
        """Idempotent."""
        with self._closing:
            self.closed = True
            self._connection.disconnect()  # type: ignore[no-untyped-call]

    def cut(self) -> None:
        """Ends it from another thread: that which reads or sends finds it closed at once."""
        with self._closing, suppress(OSError):
            if not self.closed:
                self._sock.cut()

    def idle(self) -> bool:
        """Whether nothing has come that nobody asked for, an end included."""
        return not self.closed and self._start == self._end and self._sock.idle()

    def until(self, deadline: float, silence: float = math.inf) -> None:
        """Sets the time by which the next calls end, and for how long no byte may move in them."""
        self._sock.until(deadline, silence)

    def send(self, parts: Sequence[Bytes]) -> None:
        """Sends all parts, in order."""
        try:
            self._sock.send(parts)
        except OSError as error:
            self._fail(error)

    def reply(self, most: int = MAX_SMALL, depth: int = 0) -> Any:
        """One small reply: an int, bytes, None, text, or a list of these. RedisSaysNo for an error.

        Bytes of which there are more than `most` are read past: an error of kind WRONGTYPE.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            raise RedisSaysNo(rest.decode("utf-8", "replace"))
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            size = self._number(rest)
            if size == -1:
                return None
            if not 0 <= size <= MAX_VALUE:
                self._fail(OSError("a reply of a size that cannot be"))
            if size > most:
                # Somebody's value at one of our keys must not make the others unreadable.
                self.skip(size)
                self.end_of_value()
                raise RedisSaysNo(f"WRONGTYPE a value of {size} bytes is none of ours")
            data = bytearray(size)
            self.read_into(memoryview(data))
            self.end_of_value()
            return bytes(data)
        if kind != b"*":
            self._fail(OSError("not the Redis protocol"))
        count = self._number(rest)
        if count == -1:
            return None
        if not 0 <= count <= MAX_ITEMS or depth == MAX_DEPTH:
            self._fail(OSError("a reply of a size that cannot be"))
        return [self._item(most, depth + 1) for _ in range(count)]

    def _item(self, most: int, depth: int) -> Any:
        try:
            return self.reply(most, depth)
        except RedisSaysNo as error:
            return error

    def _number(self, digits: bytes) -> int:
        if not 0 < len(digits) <= 20 or not digits.removeprefix(b"-").isdigit():
            self._fail(OSError("not the Redis protocol"))
        return int(digits)

    def value(self) -> int | None:
        """The length of a value that follows, to be read by `read_into`, `skip` and `end_of_value`; None: no value."""
        line = self._line()
        if line[:1] == b"-":
            raise RedisSaysNo(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            self._fail(OSError("not the Redis protocol"))
        size = self._number(line[1:])
        if size < -1:
            self._fail(OSError("not the Redis protocol"))
        return None if size == -1 else size

    def end_of_value(self) -> None:
        """Reads what closes a value."""
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            self._fail(OSError("not the Redis protocol"))

    def _line(self) -> bytes:
        line = b""
        while True:
            end = self._ahead.find(b"\n", self._start, self._end)
            if end >= 0:
                line += self._ahead[self._start : end]
                self._start = end + 1
                if not line.endswith(b"\r"):
                    self._fail(OSError("not the Redis protocol"))
                return line[:-1]
            line += self._ahead[self._start : self._end]
            if len(line) > MAX_LINE:
                self._fail(OSError("not the Redis protocol"))
            self._fill()

    def _fill(self) -> None:
        try:
            count = self._sock.receive(self._buffer)
        except OSError as error:
            self._fail(error)
        self._start, self._end = 0, count

    def read_into(self, into: memoryview) -> None:
        """Reads exactly as many bytes as `into` has."""
        ahead = min(len(into), self._end - self._start)
        into[:ahead] = self._buffer[self._start : self._start + ahead]
        self._start += ahead
        try:
            while ahead < len(into):
                # With what follows, so that the next reply's head costs no call of its own.
                count = self._sock.receive(into[ahead:], self._buffer)
                self._start, self._end = 0, max(0, ahead + count - len(into))
                ahead += count - self._end
        except OSError as error:
            self._fail(error)

    def skip(self, count: int) -> None:
        """Reads past so many bytes."""
        waste = memoryview(bytearray(min(count, 1 << 16)))
        while count:
            piece = waste[: min(count, len(waste))]
            self.read_into(piece)
            count -= len(piece)

    def _fail(self, error: OSError) -> NoReturn:
        self.close()
        raise TierUnavailable(f"redis: {reason_of(error)}") from error


def command(*words: bytes) -> bytes:
    """A command as Redis reads it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Topology:
    """Which node of a Redis has a key, and how to connect to it. Blocking, where it says so: for the tier's threads.

    A standalone Redis has one node. Sentinel is asked for the master at each new connection. A cluster's slot table is
    read by `learn`, which is due at first and again after `doubt`; until then a key that moved is known by `moved`.
    """

    is_cluster = False
    due = False
    version = 0  # another one after each change of what is known

    def __init__(self, settings: RedisSettings) -> None:
        """ConfigError for settings that can never work."""
        self._settings = settings
        self.url = urlsplit(settings.url)
        self.scheme = self.url.scheme.partition("+")[0]
        self._options = self._common()

    def _common(self) -> dict[str, Any]:
        settings = self._settings
        password: str | None = unquote(self.url.password) if self.url.password else None
        if password is None:
            password = _read_password("password_file", settings.password_file)
        options: dict[str, Any] = {
            "username": unquote(self.url.username) if self.url.username else settings.username or None,
            "password": password,
            "socket_connect_timeout": settings.connect_timeout,
            "socket_timeout": settings.connect_timeout,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": lambda _: None,  # the login is Wire's
        }
        return options | (self._tls_files() if self.scheme == "rediss" else {})

    def _tls_files(self) -> dict[str, str | None]:
        settings = self._settings
        _check_tls(settings.tls_ca, settings.tls_cert, settings.tls_key)
        files = {
            "ssl_ca_certs": settings.tls_ca,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
        }
        return {option: None if file is None else str(file) for option, file in files.items()}

    @property
    def redacted(self) -> str:
        """The URL as people may see it."""
        place = self.url.path if self.scheme == "unix" else self.url.netloc.rpartition("@")[2]
        return f"{self.url.scheme}://{place}" + ("" if self.scheme == "unix" else self.url.path)

    @property
    def nodes(self) -> list[Node]:
        """All that are known."""
        return [("", 0)]

    def node_of(self, key: bytes) -> Node:
        """The node that has a key; TierUnavailable when that is not known now."""
        return ("", 0)

    def moved(self, key: bytes, node: Node) -> None:
        """Another node says that this one has the key."""

    def doubt(self) -> None:
        """What is known of nodes may be out of date."""

    def learn(self) -> None:
        """Reads anew what is out of date. Blocking. TierUnavailable."""

    def check(self) -> None:
        """ConfigError for a URL that can never work."""
        self._connection(("localhost", 1), 1.0)

    def connect(self, node: Node, timeout: float) -> Wire:
        """A new connection to a node. Blocking. TierUnavailable."""
        limit = max(0.001, min(timeout, self._settings.connect_timeout))
        return Wire(self._connection(node, limit), limit)

    def _connection(self, node: Node, timeout: float) -> AbstractConnection:
        db = parse_qs(self.url.query).get("db", [""])[0]
        if self.scheme == "unix":
            kind: Any = UnixDomainSocketConnection  # typed as if it were abstract
            return cast(AbstractConnection, kind(path=self.url.path, db=_number(db), **self._within(timeout)))
        place = (self.url.hostname or "localhost", self.url.port or DEFAULT_PORT)
        return self._tcp(place, timeout, db=_number(db or self.url.path.strip("/")))

    def _within(self, timeout: float) -> dict[str, Any]:
        return self._options | {"socket_connect_timeout": timeout, "socket_timeout": timeout}

    def _tcp(self, node: Node, timeout: float, **more: Any) -> AbstractConnection:
        kind = SSLConnection if self.scheme == "rediss" else Connection
        return kind(host=node[0], port=node[1], **self._within(timeout), **more)

    def _hosts(self, port: int) -> list[Node]:
        """The URL's hosts, divided by commas."""
        found = []
        for text in self.url.netloc.rpartition("@")[2].split(","):
            host = urlsplit(f"//{text}")
            if not host.hostname:
                raise ConfigError("redis.url: write its hosts as host:port,host:port")
            found.append((host.hostname, host.port or port))
        return found


class Sentinels(Topology):
    """redis+sentinel://host:26379[,host:26379]/master[?db=0]

    Sentinels have users and passwords of their own; what stands in the URL is for Redis.
    """

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        tls = self.scheme == "rediss" if settings.sentinel_tls == "auto" else settings.sentinel_tls == "on"
        self._sentinel_options: dict[str, Any] = {
            "username": settings.sentinel_username or None,
            "password": _read_password("sentinel_password_file", settings.sentinel_password_file),
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": True,
            **({"ssl": True, **self._tls_files()} if tls else {}),
        }
        self._sentinels = self._hosts(SENTINEL_PORT)  # the one first that knew the master last

    def check(self) -> None:
        if not self.url.path.strip("/"):
            raise ConfigError("redis.url: it names no master: write redis+sentinel://host:26379/name")

    def _connection(self, node: Node, timeout: float) -> AbstractConnection:
        return self._tcp(self._master(timeout), timeout, db=_number(parse_qs(self.url.query).get("db", [""])[0]))

    def _master(self, timeout: float) -> Node:
        """What the first Sentinel says that knows one. Each has `timeout` seconds."""
        limits: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        troubles = []
        for host, port in self._sentinels:
            asked: Redis = Redis(host=host, port=port, **self._sentinel_options, **limits)
            try:
                # Not by redis-py's `Sentinel`, whose errors tell all options of a connection.
                found: Any = asked.sentinel_get_master_addr_by_name(self.url.path.strip("/"))
            except (RedisError, OSError) as error:
                troubles.append(f"{host}:{port}: {error}")
                continue
            finally:
                asked.close()
            if found is not None:
                self._sentinels = [(host, port), *(one for one in self._sentinels if one != (host, port))]
                return str(found[0]), int(found[1])
            troubles.append(f"{host}:{port} knows no such master")
        raise TierUnavailable(f"redis: sentinel: {'; '.join(troubles)}")


class Cluster(Topology):
    """redis+cluster://host:6379[,host:6379], any nodes of it."""

    is_cluster = True

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._table: dict[int, Node] = {}
        self.due = True

    def check(self) -> None:
        self._hosts(DEFAULT_PORT)

    @property
    def nodes(self) -> list[Node]:
        return list(dict.fromkeys(list(self._table.values())))

    def node_of(self, key: bytes) -> Node:
        node = self._table.get(key_slot(key))
        if node is None:
            raise TierUnavailable("redis: no node of the cluster serves the key's slot")
        return node

    def moved(self, key: bytes, node: Node) -> None:
        self._table[key_slot(key)] = node
        self.due = True
        self.version += 1

    def doubt(self) -> None:
        self.due = True

    def learn(self) -> None:
        if not self.due:
            return
        trouble = "no node of it is known"
        for host, port in dict.fromkeys([*self._hosts(DEFAULT_PORT), *self.nodes]):
            try:
                self._table = self._ask(host, port)
                self.version += 1
            except (RedisError, RedisClusterException, OSError) as error:  # the second is none of the first
                trouble = str(error)
                continue
            self.due = False
            return
        raise TierUnavailable(f"redis: {trouble}")

    def _ask(self, host: str, port: int) -> dict[int, Node]:
        options = {name: value for name, value in self._options.items() if value is not None} | {"protocol": 2}
        del options["redis_connect_func"]
        if self.scheme == "rediss":
            options["ssl"] = True
        cluster = RedisCluster(
            host=host, port=port, require_full_coverage=False, dynamic_startup_nodes=False, **options
        )
        try:
            # A node whose address is not known to the others has none here.
            return {
                slot: (str(nodes[0].host or host), int(nodes[0].port))
                for slot, nodes in cluster.nodes_manager.slots_cache.items()
            }
        finally:
            cluster.close()

    def _connection(self, node: Node, timeout: float) -> AbstractConnection:
        return self._tcp(node, timeout)


def topology(settings: RedisSettings) -> Topology:
    """That of the URL. ConfigError for settings that can never work."""
    try:
        found = _topology(settings)
        found.check()
    except ValueError as error:
        raise ConfigError(f"redis.url: {error}") from error
    return found


def _topology(settings: RedisSettings) -> Topology:
    kinds: dict[str, Callable[[RedisSettings], Topology]] = {"sentinel": Sentinels, "cluster": Cluster}
    return kinds.get(urlsplit(settings.url).scheme.partition("+")[2], Topology)(settings)


def _number(db: str) -> int:
    if db and not db.isdigit():
        raise ConfigError(f"redis.url: {db!r} is no number of a database")
    return int(db or 0)


def _read_password(setting: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return read_private(f"redis.{setting}", path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"redis.{setting}: {path} cannot be read: {error}") from error


def _check_tls(tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None) -> None:
    for setting, path in (("tls_ca", tls_ca), ("tls_cert", tls_cert), ("tls_key", tls_key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"redis.{setting}: {path} is no file")
    if tls_key is not None:
        check_private("redis.tls_key", tls_key)
    elif tls_cert is not None:
        check_private("redis.tls_cert", tls_cert)  # it holds the key, too
    context = ssl.create_default_context()
    setting = "tls_ca"
    try:
        if tls_ca is not None:
            context.load_verify_locations(tls_ca)
        setting = "tls_cert"
        if tls_cert is not None:
            context.load_cert_chain(tls_cert, tls_key)
    except OSError as error:
        raise ConfigError(f"redis.{setting}: it cannot be used: {error.strerror or error}") from error
