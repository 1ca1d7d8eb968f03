"""Every setting of kvcascade: one tree of frozen dataclasses, one for each section of the file.

File, environment and flags reach these constructors and no others (`load.py`), and so does code that builds a
daemon by itself. A constructor takes the value or the text an operator would write (`capacity=1 << 30` or
`capacity="1GiB"`), so what is refused in the file is refused in code too. `kvcascade.toml` beside this file
is the reference for operators: it lists every setting with its default.
"""

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

from .errors import ConfigError

T = TypeVar("T")

SIZE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
MAX_BYTES = 1 << 60

MAX_DIRECTORIES = 64

# The smallest pool that is of any use: a slab of the smallest size.
MIN_POOL = 1 << 20

_QUANTITY = re.compile(r"(\d{1,19}(?:\.\d{1,9})?)\s*([A-Za-z%]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole that is known only on the machine: `Share(0.25)` is written `25%`."""

    fraction: float

    def of(self, whole: int) -> int:
        return int(self.fraction * whole)

    def __str__(self) -> str:
        return f"{self.fraction * 100:g}%"


Capacity = int | Share


def bytes_of(capacity: Capacity, whole: int) -> int:
    """The capacity in bytes, a share being taken of `whole` bytes."""
    return capacity.of(whole) if isinstance(capacity, Share) else capacity


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to `name`, or None where none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def did_you_mean(name: str | None) -> str:
    return f"; did you mean {name!r}?" if name else ""


# ---- readers: from a value or an operator's text to the value; each refuses with ValueError and says what to write.
# They take their own results too, because the constructors run them on whatever they are given.


def _quantity(text: str, what: str, units: Iterable[str], example: str) -> tuple[Decimal, str]:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not {what}: write {example}")
    number, unit = found.groups()
    if unit not in units and not (unit == "" and Decimal(number) == 0):
        reason = f"has the unknown unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"{text!r} {reason}: write {example} (units: {', '.join(units)})")
    return Decimal(number), unit


def _share(lo: float, hi: float) -> Callable[[object], Share]:
    def read(value: object) -> Share:
        if isinstance(value, str):
            number, _ = _quantity(value, "a share", ["%"], "a percentage such as 25%")
            value = Share(float(number) / 100)
        if not isinstance(value, Share):
            raise ValueError(f"{value!r} is not a share: write a percentage such as 25%")
        if not lo <= value.fraction <= hi:
            raise ValueError(f"{value} is out of range: from {lo * 100:g}% to {hi * 100:g}%")
        return value

    return read


def _size(lo: int, *, off: bool = False) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, str):
            number, unit = _quantity(value, "a size", SIZE_UNITS, "a number and a unit, such as 64GiB or 500MB")
            value = int(number * SIZE_UNITS.get(unit, 1))
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a size: write a number and a unit, such as 64GiB or 500MB")
        if not (lo <= value <= MAX_BYTES or (off and value == 0)):
            least = f"{format_bytes(lo)}{' (or 0 for off)' if off else ''}"
            raise ValueError(f"{value} bytes is out of range: at least {least}, at most {format_bytes(MAX_BYTES)}")
        return value

    return read


def _capacity(lo: int) -> Callable[[object], Capacity]:
    size, share = _size(lo), _share(0.0001, 1)

    def read(value: object) -> Capacity:
        if isinstance(value, Share) or (isinstance(value, str) and value.strip().endswith("%")):
            return share(value)
        return size(value)

    return read


def _duration(lo: float, hi: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, str):
            number, unit = _quantity(value, "a duration", DURATION_UNITS, "a number and a unit, such as 250ms or 30s")
            value = float(number) * DURATION_UNITS.get(unit, 0.0)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a duration: write a number and a unit, such as 250ms or 30s")
        if not lo <= value <= hi:
            raise ValueError(f"{value:g}s is out of range: from {lo:g}s to {hi:g}s")
        return float(value)

    return read


def _count(lo: int, hi: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a whole number")
        if not lo <= value <= hi:
            raise ValueError(f"{value} is out of range: from {lo} to {hi}")
        return value

    return read


def _flag(value: object) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


def _choice(*words: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            known = ", ".join(words)
            raise ValueError(f"{value!r} is not one of {known}{did_you_mean(nearest(str(value), words))}")
        return value

    return read


def _optional_path(value: object) -> Path | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is not a path")
    try:
        return Path(_text(str(value))).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{str(value)!r} names the home of an unknown user") from error


def _directories(value: object) -> tuple[Path, ...]:
    """One path, or several apart by commas, as a file's list reaches it too."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value.strip() else []
    parts = [value] if isinstance(value, Path) else value
    if not isinstance(parts, list | tuple):
        raise ValueError(f"{value!r} is not a path or a list of paths")
    found: list[Path] = []
    for part in parts:
        path = _optional_path(part)
        if path is None:
            raise ValueError("one of its paths is empty")
        if path in found:
            raise ValueError(f"{path} is named twice")
        found.append(path)
    if len(found) > MAX_DIRECTORIES:
        raise ValueError(f"{len(found)} directories are too many: at most {MAX_DIRECTORIES}")
    return tuple(found)


def _socket_mode(value: object) -> int:
    # Nobody but the owner and, where asked, one group: the socket hands out the memory of every prompt on the node.
    modes = {"0600": 0o600, "0660": 0o660}
    if isinstance(value, str) and value in modes:
        value = modes[value]
    if not isinstance(value, int) or value not in modes.values():
        raise ValueError(f'{value!r} is not one of "0600" (the owner alone) and "0660" (and socket_group)')
    return value


def _device(value: object) -> str:
    text = _text(value)
    if not re.fullmatch(r"|cpu|cuda:\d{1,3}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a device: write cpu or cuda:N")
    return text


class Endpoint(NamedTuple):
    """A host, by name or number, and a TCP port; written `10.0.0.7:7400` or `[::1]:7400`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_possible(self) -> bool:
        """Whether the host may have an address.

        A name with an empty part, or one of over 63 characters, has none; nor have numbers that are no IP address.
        """
        try:
            if re.fullmatch(r"[0-9.]+|.*:.*", self.host):
                ipaddress.ip_address(self.host)
            else:
                self.host.encode("idna")
        except ValueError:
            return False
        return True

    @property
    def is_one_host(self) -> bool:
        """Whether others could mean one host by it: not all of its own addresses, nor a group's."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return not (address.is_unspecified or address.is_multicast)


def _endpoint(*, any_port: bool) -> Callable[[object], Endpoint | None]:
    def read(value: object) -> Endpoint | None:
        if value is None or value == "":
            return None
        if isinstance(value, Endpoint):
            return value
        text = _text(value).strip()
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})", text, re.ASCII)
        if found is None:
            raise ValueError(f"{text!r} is not an address: write host:port, such as 10.0.0.7:7400 or [::1]:7400")
        port = int(found[3])
        if not (0 if any_port else 1) <= port <= 65535:
            raise ValueError(f"{port} is not a port: write one from 1 to 65535")
        endpoint = Endpoint(found[1] or found[2], port)
        if not endpoint.is_possible:
            raise ValueError(
                f"{endpoint.host!r} is no name of a host, whose parts have 1 to 63 characters each, and no IP address"
            )
        if not (any_port or endpoint.is_one_host):
            raise ValueError(f"{endpoint.host} is the address of no one host: write the one that others reach")
        return endpoint

    return read


def _networks(value: object) -> tuple[str, ...]:
    """Networks in CIDR form, apart by commas or as a list; a single address is the network of that one."""
    if value is None or value == "":
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError(f"{value!r} is not a list of networks: write 10.0.0.0/8, for example")
    try:
        return tuple(str(ipaddress.ip_network(_text(part).strip())) for part in parts)
    except ValueError as error:
        raise ValueError(f"{error}: write networks such as 10.0.0.0/8 or 192.168.1.7") from error


REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


def _redis_url(value: object) -> str:
    text = _text(value).strip()
    if text:
        # The text may hold a password, so it is never part of a message.
        try:
            parts = urlsplit(text)
            place = parts.path if parts.scheme == "unix" else parts.hostname
        except ValueError as error:
            raise ValueError("it is no URL: write redis://host:6379/0, for example") from error
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(f"the scheme {parts.scheme!r} is not one of {', '.join(REDIS_SCHEMES)}")
        if not place:
            raise ValueError(f"it names no {'path' if parts.scheme == 'unix' else 'host'}")
    return text


def _name(value: object) -> str:
    text = _text(value)
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", text, re.ASCII):
        raise ValueError(f"{text!r} is not a name: at most 64 letters, digits, dots, dashes and underscores")
    return text


def setting(default: str, read: Callable[[object], T], doc: str) -> T:
    """A field of a section: the default as an operator would write it, how a value is read, what it is for."""
    return dataclasses.field(default=read(default), metadata={"default": default, "read": read, "doc": doc})


class SettingError(ConfigError):
    """One setting's value cannot be used. `setting` is its dotted name and `reason` what is wrong and what to write."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting}: {reason}")
        self.setting = setting
        self.reason = reason


class Section:
    """What the sections share: each field is read, and so checked, by the constructor, which raises SettingError."""

    __slots__ = ()
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for field in _fields(self):
            try:
                object.__setattr__(self, field.name, field.metadata["read"](getattr(self, field.name)))
            except ValueError as error:
                raise SettingError(f"{self.name}.{field.name}", str(error)) from error


def _fields(section: Any) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(section)


@dataclass(frozen=True, slots=True)
class DaemonSettings(Section):
    """The process: its socket, how it stops, and the keys that its engines are expected to use."""

    name: ClassVar[str] = "daemon"
    socket: Path | None = setting("", _optional_path, "the unix socket; empty: in /run for root, else the user's own")
    socket_mode: int = setting("0600", _socket_mode, "who may connect: 0600 the owner, 0660 also socket_group")
    socket_group: str = setting("", _text, "the group of the socket and its directory (name or number)")
    drain_deadline: float = setting("10s", _duration(0, 3600), "how long SIGTERM may take to write dirty blocks down")
    seed: str = setting("", _text, "the seed of the block hashes (PYTHONHASHSEED of the engines)")
    hash_algo: str = setting(
        "sha256_cbor", _choice("sha256_cbor", "sha256", "xxhash", "xxhash_cbor"), "the engines' block hash"
    )
    key_scheme: str = setting(
        "tagged-0.31", _choice("tagged-0.31", "untagged-0.19"), "how the engines build the extra keys of a block"
    )
    log_level: str = setting("info", _choice("debug", "info", "warning", "error"), "the least serious event to log")


@dataclass(frozen=True, slots=True)
class DramSettings(Section):
    """The pool in host memory that engines map: every block passes through it."""

    name: ClassVar[str] = "dram"
    capacity: Capacity = setting("25%", _capacity(MIN_POOL), "size, or share of the memory available at start")
    slab: int = setting("32MiB", _size(MIN_POOL), "the unit that moves between block sizes; a block must fit in one")
    huge_pages: bool = setting("false", _flag, "use reserved huge pages where there are enough")
    lock: bool = setting("true", _flag, "keep the pool from being swapped, where the limit allows")
    low_watermark: Share = setting("5%", _share(0, 0.5), "share of free slots below which blocks are copied down")
    write_policy: str = setting("back", _choice("back", "through"), "when blocks in hbm are copied here")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.slab & (self.slab - 1):
            raise SettingError(
                "dram.slab", f"{format_bytes(self.slab)} is not a power of two: write 32MiB, for example"
            )
        if isinstance(self.capacity, int) and self.capacity < self.slab:
            raise SettingError(
                "dram.capacity",
                f"{format_bytes(self.capacity)} does not hold one slab of {format_bytes(self.slab)}: "
                "raise it or lower dram.slab",
            )


@dataclass(frozen=True, slots=True)
class DiskSettings(Section):
    """The tier below DRAM, off while it has no directory."""

    name: ClassVar[str] = "disk"
    directory: tuple[Path, ...] = setting("", _directories, "where the blocks lie; empty for no disk tier")
    capacity: Capacity = setting("10%", _capacity(MIN_POOL), "size, or share of its file system, for each directory")
    reserve: Capacity = setting("5%", _capacity(0), "size, or share of a file system, that stays free whoever fills it")
    threads: int = setting("8", _count(1, 64), "threads that read and write, for each directory")
    old_format: str = setting(
        "discard", _choice("discard", "refuse"), "what becomes of a directory that an earlier version wrote"
    )
    write_policy: str = setting("back", _choice("back", "through", "on-reuse"), "when blocks in dram are copied here")


@dataclass(frozen=True, slots=True)
class HbmSettings(Section):
    """The pool in device memory, off by default: beside an engine with a prefix cache it takes that engine's memory."""

    name: ClassVar[str] = "hbm"
    capacity: int = setting("0", _size(MIN_POOL, off=True), "size; 0 for no pool")
    device: str = setting("", _device, "cuda:N, or cpu for the same pool in shared memory")
    low_watermark: Share = setting("5%", _share(0, 0.5), "share of free slots below which blocks are copied down")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.capacity and not self.device:
            raise SettingError("hbm.device", "hbm.capacity is set, so say where: cuda:N or cpu")


@dataclass(frozen=True, slots=True)
class ClusterSettings(Section):
    """What the nodes of a fleet agree on, and when blocks of another node are fetched rather than recomputed."""

    name: ClassVar[str] = "cluster"
    node: str = setting("", _name, "this node's name in the fleet; empty for the host's name")
    secret_file: Path | None = setting("", _optional_path, "a file with the secret that all nodes of the fleet share")
    fetch: str = setting("cost", _choice("cost", "always", "never"), "when blocks that lie elsewhere are fetched")
    deadline: float = setting("5s", _duration(0.01, 600), "how long a prefix may take to arrive; then it is recomputed")
    codec: str = setting("auto", _choice("auto", "raw", "lz4", "zstd"), "how payloads are packed for the way")


@dataclass(frozen=True, slots=True)
class RedisSettings(Section):
    """The tier that nodes share, and the directory of who has what; off while it has no url."""

    name: ClassVar[str] = "redis"
    url: str = setting("", _redis_url, "redis://host:6379/0, unix://, rediss://, redis+sentinel://, redis+cluster://")
    username: str = setting("", _text, "the user to log in as, where the url names none")
    password_file: Path | None = setting("", _optional_path, "a file with the password, where the url holds none")
    sentinel_username: str = setting("", _text, "the user to log in as at the sentinels")
    sentinel_password_file: Path | None = setting("", _optional_path, "a file with the sentinels' password")
    sentinel_tls: str = setting("auto", _choice("auto", "on", "off"), "TLS to the sentinels; auto: as to Redis")
    tls_ca: Path | None = setting("", _optional_path, "certificates to trust instead of the system's")
    tls_cert: Path | None = setting("", _optional_path, "this node's certificate, where Redis wants one")
    tls_key: Path | None = setting("", _optional_path, "and its key")
    key_prefix: str = setting("kvcascade", _name, "what all our keys in Redis begin with")
    ttl: float = setting("24h", _duration(1, 30 * 86400), "how long an unused block stays")
    store: str = setting("both", _choice("payload", "directory", "both"), "blocks, or who has them, or both")
    write_policy: str = setting(
        "through", _choice("through", "on-reuse", "on-evict"), "when blocks in dram are copied to Redis"
    )
    daily_bytes: int = setting(
        "0", _size(MIN_POOL, off=True), "bytes this node may write a day, from its start on; 0: no limit"
    )
    connect_timeout: float = setting("1s", _duration(0.01, 60), "how long a connection may take to be made")
    deadline: float = setting(
        "2s", _duration(0.01, 60), "how long Redis may take to answer, and no byte of a block may move"
    )
    threads: int = setting(
        "2", _count(1, 32), "connections that bring payloads, each in a thread; half as many more send"
    )


@dataclass(frozen=True, slots=True)
class PeerSettings(Section):
    """Other nodes' daemons: what this one serves to them. Off while it listens nowhere; fetching needs no listener."""

    name: ClassVar[str] = "peers"
    listen: Endpoint | None = setting("", _endpoint(any_port=True), "address and port to serve other nodes on")
    advertise: Endpoint | None = setting("", _endpoint(any_port=False), "the address that they reach it at")
    tls_cert: Path | None = setting("", _optional_path, "this node's certificate; with it connections are encrypted")
    tls_key: Path | None = setting("", _optional_path, "and its key")
    tls_ca: Path | None = setting("", _optional_path, "who signs the certificates of the fleet's nodes")
    allow: tuple[str, ...] = setting("", _networks, "networks that may connect; empty for all")
    bandwidth: int = setting("0", _size(MIN_POOL, off=True), "bytes a second sent to all peers; 0 for no limit")
    deadline: float = setting(
        "5s", _duration(0.01, 60), "how long a peer may take to answer, and no byte of a block may move"
    )
    threads: int = setting("2", _count(1, 32), "connections to one peer that carry payloads")

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.advertise is not None and self.listen is None:
            raise SettingError(
                "peers.listen", "peers.advertise is set, so say where to listen: 0.0.0.0:7400, for example"
            )


@dataclass(frozen=True, slots=True)
class LeaseSettings(Section):
    """How long engines may hold blocks, and how much of a pool one process may hold."""

    name: ClassVar[str] = "leases"
    reservation: float = setting("30s", _duration(0.01, 3600), "time to copy into reserved slots and commit")
    lookup: float = setting("10s", _duration(0.01, 3600), "time that a looked-up prefix stays put")
    budget_share: Share = setting("50%", _share(0.001, 1), "share of a pool that one process may pin")
    quarantine_share: Share = setting("25%", _share(0.001, 1), "share of a pool that late writers of one process hold")


@dataclass(frozen=True, slots=True)
class PromotionSettings(Section):
    """How much may be on its way up at once: promoting for every waiting request would thrash DRAM."""

    name: ClassVar[str] = "promotion"
    budget_share: Share = setting("25%", _share(0.001, 1), "share of dram that promotions in flight may take")


@dataclass(frozen=True, slots=True)
class LimitSettings(Section):
    """Bounds on what clients may take of the daemon itself."""

    name: ClassVar[str] = "limits"
    sessions: int = setting("1024", _count(1, 65536), "attached processes")


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole tree; `Settings()` is every default."""

    daemon: DaemonSettings = DaemonSettings()
    dram: DramSettings = DramSettings()
    disk: DiskSettings = DiskSettings()
    hbm: HbmSettings = HbmSettings()
    cluster: ClusterSettings = ClusterSettings()
    redis: RedisSettings = RedisSettings()
    peers: PeerSettings = PeerSettings()
    leases: LeaseSettings = LeaseSettings()
    promotion: PromotionSettings = PromotionSettings()
    limits: LimitSettings = LimitSettings()


SECTIONS: dict[str, type[Section]] = {
    cls.name: cls
    for cls in (
        DaemonSettings,
        DramSettings,
        DiskSettings,
        HbmSettings,
        ClusterSettings,
        RedisSettings,
        PeerSettings,
        LeaseSettings,
        PromotionSettings,
        LimitSettings,
    )
}


# Short names of the settings that most people set, as flags (`--dram 8GiB`) and as variables (`KVCASCADE_DRAM`).
SHORTHANDS = {
    "socket": "daemon.socket",
    "dram": "dram.capacity",
    "disk": "disk.directory",
    "disk-size": "disk.capacity",
    "hbm": "hbm.capacity",
    "redis": "redis.url",
    "listen": "peers.listen",
}


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as a file, an environment or a command line names it."""

    section: str
    key: str
    default: str
    doc: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        return f"KVCASCADE_{self.section}_{self.key}".upper()

    @property
    def flag(self) -> str:
        return f"--{self.section}-{self.key}".replace("_", "-")


def all_settings() -> Iterator[SettingInfo]:
    """Every setting, in the order of the reference file."""
    for section, cls in SECTIONS.items():
        for field in _fields(cls):
            yield SettingInfo(section, field.name, field.metadata["default"], field.metadata["doc"])


def format_bytes(size: int) -> str:
    """A size for people: `1.5 GiB`; exact below 1 KiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= SIZE_UNITS[unit]:
            return f"{size / SIZE_UNITS[unit]:.4g} {unit}"
    return f"{size} B"
