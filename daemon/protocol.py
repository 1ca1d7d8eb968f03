"""The control protocol: frames, bodies, the operations and their fields; nothing here does IO.

Rule: whatever comes from the other side is refused by size, depth and type before anything is decoded or allocated for
it. Both sides use this module: the daemon on its loop, the client inside engines and in the CLI, so it imports neither
torch nor numpy until an array is asked for.

A frame is a fixed header of 24 bytes and a body::

    magic "KVCS" | version u8 | kind u8 | descriptors u16 | correlation id u64 | body length u64      (little-endian)

``descriptors`` says how many file descriptors came with the frame by SCM_RIGHTS; it is 0 in requests. A reply carries
the correlation id of its request; an event carries 0. The body is one CBOR map with text keys, of definite lengths,
without tags. A request's map holds ``op``, an event's ``event``, an ERROR's ``error`` (the class) and ``message``.
Arrays travel as one byte string, little-endian: ``hashes`` is the whole chain from block 0, concatenated.

==============  ==========================================================  ==========================================
operation       request                                                     reply
==============  ==========================================================  ==========================================
attach          protocol, role ("engine", "scheduler", "rank", "tool"),     boot 16 B, session 16 B (token),
                engine {family, version}, ranks, rank, attachment 16 B      attachment 16 B, namespace 32 B,
                (the one that a rank joins), resume 16 B (token of an       pools [{id, tier, device, bytes}],
                earlier session of this process, none of whose copies       warnings [text], lease_ms; and by
                still runs), namespace (map), probe (hashes), pid. A        descriptor, a pool: its memory, then its
                tool sends protocol, role, engine and pid alone, and gets   generations (read-only)
                boot, session and warnings
ping            --                                                          boot
lookup          hashes, group, request (<= 128 B; asking again with it      lease u64 (0: nothing pinned), matched
                renews its one lease), pin, promote, tokens u32; each:      (leading blocks in some local tier), ready
                the hashes are no chain, find each by itself; remote (ask   (leading blocks in memory), tiers
                other nodes for the rest; with each for the first 256       u8[matched], deadline_ms; asking; found
                that are missing), ticket, wait_ms (for their answers)      u32[matched]
                                                                            (their places among the hashes), with each
load            lease, count, wait_ms (for promotions)                      count (leading part in memory), pools u8,
                                                                            pages u32, generations u32
release         leases u64                                                  -- (idempotent)
reserve         hashes, group, start, tokens u32 of [start, n) or empty     lease, states u8 of [start, n); pools u8,
                (of [0, n) with a hash that can collide), request           pages u32, generations u32, an entry a
                                                                            SLOT; hole (a missing parent block < start
                                                                            or n), if any
commit          lease, blocks u32 (indices in the chain)                    ready (became ready), gone (expired)
abort           lease, blocks u32 (empty: all)                              --
failed          lease, blocks u32: copies whose bytes were doubted          -- (dropped; the next lookup misses)
where           hashes, group, namespace 32 B or empty for all (tools)      namespaces [{namespace, tiers u8[n], a bit
                                                                            a tier}]
fenced          fence u64: no copy into the fenced leases' slots runs,      --
                none will begin
status          --                                                          what ``kvcascade status`` shows
check           --                                                          violations [text]
detach          --                                                          --
takeover        step: "begin" {format}, "freeze", "read" {part, at},        what handover.py says, and by descriptor:
                "commit", "serving" (another daemon of this user alone)     the DRAM pool (begin), pidfds (read), the
                                                                            lock and the listening socket (commit)
==============  ==========================================================  ==========================================

Events: ``fence`` {fence u64, leases u64}: end or give up the copies into these leases' slots, then answer ``fenced``.
``ready`` {lease, ready}: promoted blocks came up. ``bye`` {reason}: the daemon drains.

A lease's and a fence's id is never used again, by no later daemon either (the upper half is drawn at start), so that a
late release, commit or ``fenced`` can only miss. A ``resume`` token that the daemon does not know is ignored.
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast, overload

import cbor2

from kvcascade.config import errors
from kvcascade.config.errors import CascadeError, ProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
D = TypeVar("D")

PROTOCOL_VERSION: Final = 1
MAGIC: Final = b"KVCS"
HEADER: Final = struct.Struct("<4sBBHQQ")
MAX_BODY: Final = 8 << 20
MAX_DEPTH: Final = 8
MAX_ITEMS: Final = 65536
MOST_LISTED: Final = 256  # entries of each of `status`' lists of other nodes: all that it says stays below MAX_ITEMS
MAX_DESCRIPTORS: Final = 16
MAX_ERROR_TEXT: Final = 4096
MAX_REQUEST_ID: Final = 128

PAGE: Final = 4096
NO_SLOT: Final = 0xFFFFFFFF

OP_ATTACH: Final = "attach"
OP_PING: Final = "ping"
OP_LOOKUP: Final = "lookup"
OP_LOAD: Final = "load"
OP_RELEASE: Final = "release"
OP_RESERVE: Final = "reserve"
OP_COMMIT: Final = "commit"
OP_ABORT: Final = "abort"
OP_FAILED: Final = "failed"
OP_WHERE: Final = "where"
OP_FENCED: Final = "fenced"
OP_STATUS: Final = "status"
OP_CHECK: Final = "check"
OP_DETACH: Final = "detach"
OP_TAKEOVER: Final = "takeover"
OP_COMPUTED: Final = "computed"
OP_HANDOFF: Final = "handoff"
OP_EXPLAIN: Final = "explain"

EVENT_FENCE: Final = "fence"
EVENT_READY: Final = "ready"
EVENT_BYE: Final = "bye"

ROLE_ENGINE: Final = "engine"
ROLE_SCHEDULER: Final = "scheduler"
ROLE_RANK: Final = "rank"
ROLE_TOOL: Final = "tool"
ROLES: Final = (ROLE_ENGINE, ROLE_SCHEDULER, ROLE_RANK, ROLE_TOOL)

POOL_DRAM: Final = 0
POOL_HBM: Final = 1


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    EVENT = 4


class Tier(IntEnum):
    """Where a matched block lies; in a ``where`` reply the tier's bit is ``1 << tier``."""

    HBM = 0
    DRAM = 1
    DISK = 2
    REDIS = 3
    PEER = 4  # no tier but a source: another node's daemon


class BlockState(IntEnum):
    """What ``reserve`` says of a block: already stored, a slot to fill, being stored by somebody else, no room now."""

    HERE = 0
    SLOT = 1
    IN_FLIGHT = 2
    NO_ROOM = 3


_KINDS: Final = frozenset(int(kind) for kind in Kind)


class Frame(NamedTuple):
    """One frame, its header checked and its body not yet decoded."""

    kind: int
    correlation: int
    body: bytes
    descriptors: int


# ---------------------------------------------------------------------------------------------------------- frames


def encode(kind: int, correlation: int, body: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """Return a whole frame. ``descriptors`` must be the number of file descriptors sent along with it.

    Raises ProtocolError for a body above MAX_BODY or with values that CBOR does not have.
    """
    try:
        encoded = cbor2.dumps(body)
    except (cbor2.CBOREncodeError, ValueError, TypeError) as error:
        raise ProtocolError(f"a body that cannot be encoded: {error}") from error
    if len(encoded) > MAX_BODY:
        raise ProtocolError(f"a body of {len(encoded)} bytes; at most {MAX_BODY} are allowed")
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, descriptors, correlation, len(encoded)) + encoded


def encode_request(correlation: int, op: str, body: Mapping[str, Any] | None = None) -> bytes:
    return encode(Kind.REQUEST, correlation, {"op": op, **body} if body else {"op": op})


def encode_event(event: str, body: Mapping[str, Any] | None = None) -> bytes:
    return encode(Kind.EVENT, 0, {"event": event, **body} if body else {"event": event})


def encode_error(correlation: int, error: BaseException) -> bytes:
    """Return the ERROR frame for ``error``; what is not one of our errors crosses as a bare CascadeError."""
    known = isinstance(error, CascadeError)
    name = type(error).__name__ if known else CascadeError.__name__
    text = str(error) if known else f"internal error {type(error).__name__}: {error}"
    # Lone surrogates (a path from the file system) have no UTF-8 form.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_ERROR_TEXT]
    return encode(Kind.ERROR, correlation, {"error": name, "message": text})


_ERRORS: Final[dict[str, type[CascadeError]]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CascadeError)
}


def error_from(body: Mapping[str, Any]) -> CascadeError:
    """Return (not raise) the error that an ERROR body describes; an unknown class becomes a bare CascadeError."""
    name = take(body, "error", str, hi=128)
    text = take(body, "message", str, default="", hi=MAX_ERROR_TEXT)
    kind = _ERRORS.get(name)
    return kind(text) if kind is not None else CascadeError(f"{name}: {text}")


class FrameDecoder:
    """Cuts a byte stream into frames. Not thread-safe; one belongs to one connection.

    ``feed`` takes any piece of the stream and returns the frames that it completed; a part of a frame stays here for
    the next piece. It raises ProtocolError as soon as a header is wrong, before one byte of that frame's body is kept;
    framing is lost then and the connection must be closed. Memory held: at most one frame and one piece.
    """

    def __init__(self, max_body: int = MAX_BODY, max_descriptors: int = 0) -> None:
        # Changed by feed() alone.
        self._buffer = bytearray()
        self._wanted = HEADER.size
        self._max_body = max_body
        self._max_descriptors = max_descriptors

    @property
    def buffered(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        size = HEADER.size
        if not self._buffer and len(data) >= size:
            # The usual case, a piece that is exactly one frame, costs one slice.
            kind, descriptors, correlation, length = self._header(data, 0)
            if len(data) == size + length:
                return [Frame(kind, correlation, data[size:], descriptors)]
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= self._wanted:
            kind, descriptors, correlation, length = self._header(buffer, start)
            end = start + size + length
            if len(buffer) < end:
                self._wanted = size + length
                break
            frames.append(Frame(kind, correlation, bytes(memoryview(buffer)[start + size : end]), descriptors))
            self._wanted = size
            start = end
        if start:
            del buffer[:start]
        magic = bytes(buffer[: len(MAGIC)])
        if magic != MAGIC[: len(magic)]:
            raise ProtocolError(f"bad magic {magic!r}; this socket speaks {MAGIC!r}")
        return frames

    def _header(self, data: bytes | bytearray, at: int) -> tuple[int, int, int, int]:
        magic, version, kind, descriptors, correlation, length = HEADER.unpack_from(data, at)
        if magic != MAGIC:
            raise ProtocolError(f"bad magic {magic!r}; this socket speaks {MAGIC!r}")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version}; this side speaks version {PROTOCOL_VERSION}")
        if kind not in _KINDS:
            raise ProtocolError(f"unknown frame kind {kind}")
        if descriptors > self._max_descriptors:
            raise ProtocolError(f"a frame with {descriptors} descriptors; at most {self._max_descriptors} are allowed")
        if length > self._max_body:
            raise ProtocolError(f"a body of {length} bytes; at most {self._max_body} are allowed")
        return kind, descriptors, correlation, length


# ---------------------------------------------------------------------------------------------------------- bodies

_TEXT: Final = range(0x60, 0x7C)
_STRING_HEADS: Final = {0x58: 1, 0x59: 2, 0x5A: 4, 0x5B: 8, 0x78: 1, 0x79: 2, 0x7A: 4, 0x7B: 8}


def _skips() -> bytes:
    """For each first byte of an item: its whole size where that byte alone tells it, else 0."""
    table = bytearray(256)
    for major in (0x00, 0x20):
        table[major : major + 24] = bytes([1] * 24)
        table[major + 24 : major + 28] = bytes([2, 3, 5, 9])
    for major in (0x40, 0x60):
        table[major : major + 24] = bytes(range(1, 25))
    table[0xF4:0xF7] = bytes([1] * 3)  # false, true, null
    table[0xF9:0xFC] = bytes([3, 5, 9])  # floats
    return bytes(table)


_SKIP: Final = _skips()


def _scan_flat(data: bytes) -> int | None:
    """As ``_scan`` for the usual body, a short map of scalars and strings; None: not such a one, look closer.

    Measured on a lookup of 256 hashes: 0.8 us, where ``_scan`` takes 2.4 us and cbor2 itself 1.3 us.
    """
    end = len(data)
    fields = data[0] - 0xA0 if end else 24
    if not 0 <= fields < 24:
        return None
    position = 1
    try:
        for _ in range(fields):
            head = data[position]
            if not 0x60 <= head < 0x78:
                return None
            position += head - 0x5F
            head = data[position]
            skip = _SKIP[head]
            if skip:
                position += skip
            elif head == 0x58:
                position += 2 + data[position + 1]
            elif head == 0x59:
                position += 3 + (data[position + 1] << 8 | data[position + 2])
            else:
                return None
    except IndexError:
        return None
    return fields if position == end else None


def _scan(data: bytes) -> int:
    """Walk the items of ``data`` without building them; return the number of fields of the outer map.

    Raises ProtocolError for what ``decode_body`` refuses.
    """
    end = len(data)
    if not end or data[0] >> 5 != 5:
        raise ProtocolError("a body that is not a CBOR map")
    position = 0
    items = 0
    fields = 0
    left = 1  # items still to come in the container that we are in
    keyed = False  # that container is a map: an even `left` means that a key is next
    outer: list[tuple[int, bool]] = []
    while True:
        while not left:
            if not outer:
                if position != end:
                    raise ProtocolError(f"{end - position} bytes after the end of the body")
                return fields
            left, keyed = outer.pop()
        if position >= end:
            raise ProtocolError("a body that ends in the middle of an item")
        head = data[position]
        if keyed and not left & 1 and head not in _TEXT:
            raise ProtocolError(f"a map key that is not text, at byte {position}")
        left -= 1
        skip = _SKIP[head]
        if skip:
            position += skip
        elif head in _STRING_HEADS:
            width = _STRING_HEADS[head]
            start = position + 1 + width
            position = start + int.from_bytes(data[position + 1 : start], "big")
        elif 0x80 <= head < 0x9C or 0xA0 <= head < 0xBC:
            short = head & 0x1F
            start = position + 1
            if short < 24:
                count = short
            else:
                start += 1 << (short - 24)
                count = int.from_bytes(data[position + 1 : start], "big")
            if not outer:
                fields = count
            if head >= 0xA0:
                count *= 2
            items += count
            if items > MAX_ITEMS:
                raise ProtocolError(f"a body of more than {MAX_ITEMS} items")
            if len(outer) >= MAX_DEPTH:
                raise ProtocolError(f"a body nested deeper than {MAX_DEPTH}")
            outer.append((left, keyed))
            position, left, keyed = start, count, head >= 0xA0
        else:
            what = "a tag" if head >> 5 == 6 else "an indefinite length" if head & 0x1F == 31 else "an unknown item"
            raise ProtocolError(f"{what} (0x{head:02x}) at byte {position} of a body")
        if position > end:
            raise ProtocolError(f"an item that ends {position - end} bytes past the end of the body")


def decode_body(data: bytes) -> dict[str, Any]:
    """Return the map that ``data`` encodes, nested values as plain dicts and lists.

    Refused by ProtocolError before anything is built: what is not one map with text keys, depth above MAX_DEPTH, more
    than MAX_ITEMS items, lengths past the end, indefinite lengths, tags, undefined and unknown simple values, bytes
    after the end. A name given twice in the outer map and text that is not UTF-8 are refused too.
    """
    fields = _scan_flat(data)
    if fields is None:
        fields = _scan(data)
    try:
        body = cbor2.loads(data)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise ProtocolError(f"a body that cannot be decoded: {error}") from error
    if len(body) != fields:
        raise ProtocolError("a body that gives one field twice")
    return cast(dict[str, Any], body)


# ---------------------------------------------------------------------------------------------------------- fields


class _Required:
    """No default: the field must be there."""


REQUIRED: Final = _Required()
_NAMES: Final[dict[type, str]] = {
    int: "an integer",
    bytes: "a byte string",
    str: "a text",
    bool: "true or false",
    float: "a number",
    list: "a list",
    dict: "a map",
}


@overload
def take(
    body: Mapping[str, Any], name: str, kind: type[T], *, lo: float | None = None, hi: float | None = None
) -> T: ...
@overload
def take(
    body: Mapping[str, Any], name: str, kind: type[T], *, default: D, lo: float | None = None, hi: float | None = None
) -> T | D: ...
def take(
    body: Mapping[str, Any],
    name: str,
    kind: type[T],
    *,
    default: D | _Required = REQUIRED,
    lo: float | None = None,
    hi: float | None = None,
) -> T | D:
    """Return field ``name`` of ``body``, which must be of type ``kind`` (true and false are no integers).

    ``lo`` and ``hi`` (inclusive) bound a number's value and the length of anything else. An absent or null field gives
    ``default``, unbounded. Raises ProtocolError naming the field.
    """
    value = body.get(name)
    if value is None:
        if isinstance(default, _Required):
            raise ProtocolError(f"field {name!r}: missing")
        return default
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ProtocolError(f"field {name!r}: an integer too large for a number") from None
    if type(value) is not kind:
        raise ProtocolError(f"field {name!r}: {_NAMES.get(kind, kind.__name__)} is wanted, not {type(value).__name__}")
    if lo is not None or hi is not None:
        _bound(name, value, lo, hi)
    return value


def _bound(name: str, value: Any, lo: float | None, hi: float | None) -> None:
    numeric = isinstance(value, int | float)
    size = value if numeric else len(value)
    # Written so that a NaN fails too.
    if not ((lo is None or size >= lo) and (hi is None or size <= hi)):
        what = f"{value}" if numeric else f"length {size}"
        span = f"[{'' if lo is None else lo}, {'' if hi is None else hi}]"
        raise ProtocolError(f"field {name!r}: {what} is outside {span}")


_FORMATS: Final = {1: "B", 4: "I", 8: "Q"}


def _pack(values: Any, width: int) -> bytes:
    if isinstance(values, bytes):
        if len(values) % width:
            raise ProtocolError(f"{len(values)} bytes are not a packed array of u{8 * width}")
        return values
    if hasattr(values, "__array_interface__"):
        import numpy as np

        array = np.asarray(values)
        if array.dtype.kind not in "ui" and array.size:
            raise ProtocolError(f"an array of {array.dtype} where u{8 * width} is wanted")
        if array.dtype.kind == "i" or array.dtype.itemsize > width:
            low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
            if low < 0 or high >> (8 * width):
                raise ProtocolError(f"values in [{low}, {high}] do not fit u{8 * width}")
        return array.astype(f"<u{width}", copy=False).tobytes()
    items = list(values)
    try:
        return struct.pack(f"<{len(items)}{_FORMATS[width]}", *items)
    except struct.error as error:
        raise ProtocolError(f"values that do not fit u{8 * width}: {error}") from error


def pack_u8(values: "bytes | Iterable[int] | NDArray[Any]") -> bytes:
    """Return the packed form of ``values``; bytes are taken as packed already. ProtocolError for what does not fit."""
    return _pack(values, 1)


def pack_u32(values: "bytes | Iterable[int] | NDArray[Any]") -> bytes:
    """As ``pack_u8``, four bytes an entry."""
    return _pack(values, 4)


def pack_u64(values: "bytes | Iterable[int] | NDArray[Any]") -> bytes:
    """As ``pack_u8``, eight bytes an entry."""
    return _pack(values, 8)


def _take_packed(body: Mapping[str, Any], name: str, width: int, count: int | None, hi: int | None) -> Any:
    import numpy as np

    packed = take(body, name, bytes, default=b"")
    if len(packed) % width:
        raise ProtocolError(f"field {name!r}: {len(packed)} bytes are not a packed array of u{8 * width}")
    entries = len(packed) // width
    if count is not None and entries != count:
        raise ProtocolError(f"field {name!r}: {entries} entries, {count} are wanted")
    if hi is not None and entries > hi:
        raise ProtocolError(f"field {name!r}: {entries} entries, at most {hi} are allowed")
    return np.frombuffer(packed, f"<u{width}")


def take_u8(
    body: Mapping[str, Any], name: str, *, count: int | None = None, hi: int | None = None
) -> "NDArray[np.uint8]":
    """Return the packed array ``name`` as a read-only view; absent is empty. ``count`` entries exactly, ``hi`` at most.

    Raises ProtocolError naming the field.
    """
    return cast("NDArray[np.uint8]", _take_packed(body, name, 1, count, hi))


def take_u32(
    body: Mapping[str, Any], name: str, *, count: int | None = None, hi: int | None = None
) -> "NDArray[np.uint32]":
    """As ``take_u8``, four bytes an entry."""
    return cast("NDArray[np.uint32]", _take_packed(body, name, 4, count, hi))


def take_u64(
    body: Mapping[str, Any], name: str, *, count: int | None = None, hi: int | None = None
) -> "NDArray[np.uint64]":
    """As ``take_u8``, eight bytes an entry."""
    return cast("NDArray[np.uint64]", _take_packed(body, name, 8, count, hi))


def take_hashes(body: Mapping[str, Any], name: str, width: int, *, lo: int = 0, hi: int | None = None) -> bytes:
    """Return the packed hashes ``name``: whole hashes of ``width`` bytes, between ``lo`` and ``hi`` of them.

    Raises ProtocolError naming the field.
    """
    packed = take(body, name, bytes)
    count, rest = divmod(len(packed), width)
    if rest:
        raise ProtocolError(f"field {name!r}: {len(packed)} bytes are not whole hashes of {width} bytes")
    if count < lo or (hi is not None and count > hi):
        raise ProtocolError(f"field {name!r}: {count} hashes are outside [{lo}, {'' if hi is None else hi}]")
    return packed


def split_hashes(packed: bytes, width: int) -> Iterator[bytes]:
    """Yield the hashes of a packed chain, each ``width`` bytes."""
    return (packed[at : at + width] for at in range(0, len(packed), width))


# ---------------------------------------------------------------------------------------------------------- address


def default_socket_path() -> Path:
    """Return where the daemon of this user listens when nobody says otherwise; it reads the environment, no files."""
    uid = os.getuid()
    if uid == 0:
        return Path("/run/kvcascade/kvcascade.sock")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():  # another is to be ignored, says the standard
        return runtime / "kvcascade" / "kvcascade.sock"
    return _fallback(uid)


def _fallback(uid: int) -> Path:
    return Path(f"/tmp/kvcascade-{uid}/kvcascade.sock")


def distrust(path: Path) -> str:
    """Say why the socket is not to be used, or "": anybody can make the fallback's folder under /tmp before us.

    Whoever owns it could put a daemon of their own there, which would be given every prompt's KV. A folder that was
    chosen by a setting is the operator's business.
    """
    uid = os.getuid()
    if path != _fallback(uid):
        return ""
    try:
        folder = path.parent.lstat()
    except OSError:
        return ""  # not there: nor is a daemon
    if stat.S_ISDIR(folder.st_mode) and folder.st_uid == uid and not folder.st_mode & 0o022:
        return ""
    return f"{path.parent} belongs to another user, or others can write to it; set XDG_RUNTIME_DIR or KVCASCADE_SOCKET"
