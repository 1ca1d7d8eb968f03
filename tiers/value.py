"""A block on its way: a fixed header that says what follows, then the payload. The same in Redis and between peers,
but that in Redis, where others may read, the names in it (bytes 24 to 120) are hidden when there is a secret.

All numbers are little-endian.

    0   magic "kvcv", format version (u8), codec (u8), element bytes (u8), bytes of a hash (u8)
    8   payload's raw length (u32), encoded length (u32), KV group (u32), 4 bytes of zeros
    24  namespace fingerprint (32)
    56  block hash (32, short ones padded with zeros), parent's hash (32, zeros for none)
    120 xxh3-64 checksum of the raw payload (u64)
    128 authentication tag over the first 128 bytes and the encoded payload (32); zeros without a secret
    160 the encoded payload

Nothing is believed before it was checked: who asked knows the name and the raw length, and both must be those of the
header; the checksum and, with a secret, the tag must be those of the bytes that came. The tag costs about 1 s of CPU a
GB; a checksum under a key would be cheaper and prove nothing, since collisions of xxh3 can be built.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvcascade.config.errors import CascadeError

from .remote import TAG_BYTES, BlockName, Secret

MAGIC: Final = b"kvcv"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sBBBBIII4x32s32s32sQ")
_TAGGED: Final = _FIELDS.size  # what the tag covers of the header
HEADER_BYTES: Final = _TAGGED + TAG_BYTES
_NAMES: Final = slice(24, 120)

VOID: Final = bytes(HEADER_BYTES)  # in a header's place between peers: what stood there is gone

assert _TAGGED == 128


class BadValue(CascadeError):
    """What came is not the block asked for; the message is one of the reasons that `remote.disproves` knows."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header that fits what was asked for. The payload is still to be proved by `prove`."""

    codec: int
    element: int
    raw_bytes: int
    encoded_bytes: int
    checksum: int
    tag: bytes
    tagged: bytes


def pack(
    name: BlockName,
    parent: bytes,
    payload: memoryview,
    encoded: Sequence[memoryview | bytes],
    *,
    codec: int,
    element: int,
    secret: Secret,
) -> bytes:
    """The header of a block whose raw `payload` is sent as `encoded`. Runs over all bytes: for a data thread."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        codec,
        element,
        len(name.block_hash),
        len(payload),
        sum(map(len, encoded)),
        name.group,
        name.namespace,
        name.block_hash,
        parent,
        xxhash.xxh3_64_intdigest(payload),
    )
    return fields + (secret.tag_joined("values", fields, encoded) if secret.shared else bytes(TAG_BYTES))


def parse(data: bytes | memoryview, name: BlockName, raw_bytes: int) -> Header:
    """The header in the first HEADER_BYTES of `data`; BadValue unless it is that of this block with this length."""
    if len(data) < HEADER_BYTES:
        raise BadValue("no value of ours")
    fields = bytes(data[:_TAGGED])
    (magic, version, codec, element, width, raw, encoded, group, namespace, block_hash, _, checksum) = _FIELDS.unpack(
        fields
    )
    if magic != MAGIC:
        raise BadValue("no value of ours")
    if version != VERSION:
        raise BadValue("another format version")
    if width != len(name.block_hash):
        raise BadValue("another block")
    if (namespace, group, block_hash[:width]) != (name.namespace, name.group, name.block_hash) or any(
        block_hash[width:]
    ):
        raise BadValue("another block")
    if raw != raw_bytes or encoded > raw_bytes + HEADER_BYTES:
        raise BadValue("another length")
    return Header(codec, element, raw, encoded, checksum, bytes(data[_TAGGED:HEADER_BYTES]), fields)


def veiled(header: bytes | memoryview, name: BlockName, secret: Secret) -> bytes:
    """The header as it lies where others may read, and from that the header again: with a secret its names are hidden.

    Who reads there and guesses a prompt could compute its hashes, and find them in a bare header.
    """
    if not secret.shared:
        return bytes(header)
    names = int.from_bytes(header[_NAMES], "little") ^ int.from_bytes(secret.veil_of(name), "little")
    return bytes(header[: _NAMES.start]) + names.to_bytes(96, "little") + bytes(header[_NAMES.stop :])


def prove(header: Header, encoded: memoryview, secret: Secret) -> None:
    """BadValue unless the encoded payload is that which a holder of the secret sent with this header.

    Without a secret there is nothing to prove here. To be asked before anything is decoded.
    """
    if len(encoded) != header.encoded_bytes:
        raise BadValue("another length")
    if secret.shared and not secret.proves(header.tag, "values", header.tagged, encoded):
        raise BadValue("bad tag")


def verify(header: Header, payload: memoryview) -> None:
    """BadValue unless the decoded payload has the header's length and checksum."""
    if len(payload) != header.raw_bytes:
        raise BadValue("another length")
    if xxhash.xxh3_64_intdigest(payload) != header.checksum:
        raise BadValue("bad checksum")
