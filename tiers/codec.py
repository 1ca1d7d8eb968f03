"""Lossless packing of KV for slow links: byte planes apart, the exponents packed, the mantissas as they are.

In floats the byte with the sign and the exponent repeats itself and the others are noise: general compressors find
nothing in them mixed (lz4 on bf16 KV: ratio 1.00), and half of the first alone. Numbers of one byte (fp8) are packed as
they lie. A payload that does not shrink is sent as it is.

An encoded payload is a head (how the packed bytes are packed, how many they are), the packed bytes, and the rest as it
is. Under the raw length, which the receiver knows, it is self-delimiting: nothing in it decides how much memory is
taken. Encoding and decoding release the GIL over the bytes; they belong into data threads.

Measured on KV of SmolLM2 (`make bench`), one core: bf16 by zstd 1.42, by lz4 1.15; fp16, whose first byte has two bits
of the mantissa, by zstd 1.15, by lz4 nothing; float32 by zstd 1.18. Higher levels of zstd gain nothing on exponents,
and the bytes of the mantissas shrink by nothing with any of them.
"""

import struct
import threading
import time
from enum import IntEnum
from typing import Final

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard

from kvcascade.config.errors import CascadeError

Bytes = bytes | memoryview
Plane = npt.NDArray[np.uint8]

ZSTD_LEVEL: Final = 1
_HEAD: Final = struct.Struct("<BI")  # how the first plane is packed, and its packed length
_PACKED: Final = 1
_MOST: Final = 1 << 30  # bytes; lz4 takes no more than twice that at once
_SAMPLE_BYTES: Final = 1 << 20
_GAIN: Final = 0.97  # what packs to more than this share is sent as it is

_local = threading.local()


class CodecError(CascadeError):
    """The bytes do not decode to what was promised."""


class Codec(IntEnum):
    """How a payload is packed. The numbers are part of the value format."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2


def encode(payload: memoryview, codec: Codec, element: int) -> tuple[Codec, list[Bytes]]:
    """The parts to send in order, and the codec that they are in: RAW, the payload itself, where packing gains nothing.

    `payload`: contiguous bytes, which the parts may refer to. `element`: bytes of one number.
    """
    if codec == Codec.RAW or not 0 < len(payload) <= _MOST:
        return Codec.RAW, [payload]
    if _planes(len(payload), element):
        high, low = _split(payload, element)
        packed = _pack(codec, high)
        parts: list[Bytes] = [_HEAD.pack(_PACKED, len(packed)), packed, low.data.cast("B")]
    else:
        packed = _pack(codec, np.frombuffer(payload, dtype=np.uint8))
        parts = [_HEAD.pack(_PACKED, len(packed)), packed]
    if sum(map(len, parts)) > _GAIN * len(payload):
        return Codec.RAW, [payload]
    return codec, parts


def decode(encoded: memoryview, codec: int, element: int, into: memoryview) -> None:
    """Writes the payload into `into`, whose length is the payload's; CodecError unless it decodes to exactly that."""
    if codec == Codec.RAW:
        if len(encoded) != len(into):
            raise CodecError("cannot be decoded")
        np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(encoded, dtype=np.uint8))
        return
    if codec not in (Codec.LZ4, Codec.ZSTD) or len(encoded) < _HEAD.size:
        raise CodecError("cannot be decoded")
    how, length = _HEAD.unpack(encoded[: _HEAD.size])
    packed, rest = encoded[_HEAD.size : _HEAD.size + length], encoded[_HEAD.size + length :]
    planes = _planes(len(into), element)
    size = len(into) // element if planes else len(into)
    if how != _PACKED or len(packed) != length or len(rest) != len(into) - size:
        raise CodecError("cannot be decoded")
    unpacked = np.frombuffer(_unpack(Codec(codec), packed, size), dtype=np.uint8)
    if planes:
        _join(unpacked, np.frombuffer(rest, dtype=np.uint8), into, element)
    else:
        np.copyto(np.frombuffer(into, dtype=np.uint8), unpacked)


def _planes(length: int, element: int) -> bool:
    return element in (2, 4, 8) and length % element == 0


def _split(payload: memoryview, element: int) -> tuple[Plane, Plane]:
    """The last byte of each number (little-endian: sign and exponent), and the others in their order."""
    if element == 2:
        # Shifts run at three times the speed of strided copies (10 and 3.3 GB/s).
        numbers = np.frombuffer(payload, dtype="<u2")
        return (numbers >> 8).astype(np.uint8), numbers.astype(np.uint8)
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(-1, element)
    return np.ascontiguousarray(rows[:, -1]), np.ascontiguousarray(rows[:, :-1])


def _join(high: Plane, low: Plane, into: memoryview, element: int) -> None:
    if element == 2:
        numbers = np.frombuffer(into, dtype="<u2")
        np.left_shift(high, 8, out=numbers, dtype=np.uint16)
        np.bitwise_or(numbers, low, out=numbers)
    else:
        rows = np.frombuffer(into, dtype=np.uint8).reshape(-1, element)
        np.copyto(rows[:, -1], high)
        np.copyto(rows[:, :-1], low.reshape(-1, element - 1))


def _pack(codec: Codec, plane: Plane) -> bytes:
    if codec == Codec.LZ4:
        packed: bytes = lz4.block.compress(plane.data, store_size=False)
        return packed
    return _zstd()[0].compress(plane.data)


def _unpack(codec: Codec, packed: memoryview, size: int) -> bytes:
    try:
        if codec == Codec.LZ4:
            plain: bytes = lz4.block.decompress(packed, uncompressed_size=size)
        else:
            # A frame says itself how much memory its content takes: believe it only if it is what was asked for.
            if zstandard.frame_content_size(packed) != size:
                raise CodecError("cannot be decoded")
            plain = _zstd()[1].decompress(packed, max_output_size=size)
    except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError, MemoryError) as error:
        raise CodecError("cannot be decoded") from error
    if len(plain) != size:
        raise CodecError("cannot be decoded")
    return plain


def _zstd() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
    """This thread's own: neither may be used by two threads at once."""
    if not hasattr(_local, "zstd"):
        _local.zstd = (zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor())
    pair: tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor] = _local.zstd
    return pair


class CodecChoice:
    """The codec for a link, as an operator has said or, for "auto", by the link's speed and this machine's.

    Packing pays where the time it saves on the link is more than what it takes here and there, one after the other. The
    ratio and the rates are measured once, on numbers that look like KV (normal, bf16: 1.45 where KV has 1.42), by
    `measure`, in a data thread; before that, and for a link of unknown speed, nothing is packed.
    """

    def __init__(self, wanted: str = "auto") -> None:
        self._wanted = wanted
        self._rates: dict[Codec, tuple[float, float]] = {}  # bytes/s in and out together, packed share

    def measure(self) -> None:
        """Takes some 20 ms, without the GIL for most of it."""
        numbers = np.random.default_rng(1).standard_normal(_SAMPLE_BYTES // 2, dtype=np.float32)
        sample = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8).data
        into = memoryview(bytearray(len(sample)))
        rates = {}
        for codec in (Codec.LZ4, Codec.ZSTD):
            quickest, size = float("inf"), len(sample)
            for _ in range(2):  # the first one sets up, and meets cold memory
                began = time.perf_counter()
                used, parts = encode(sample, codec, 2)
                decode(memoryview(b"".join(parts)), used, 2, into)
                quickest, size = min(quickest, time.perf_counter() - began), sum(map(len, parts))
            rates[codec] = (len(sample) / quickest, size / len(sample))
        self._rates = rates

    def choose(self, link: float | None) -> Codec:
        """The codec for a link of so many bytes a second; None: it is not known yet."""
        if self._wanted != "auto":
            return Codec[self._wanted.upper()]
        best, best_seconds = Codec.RAW, 1 / link if link else 0.0
        if not link:
            return best
        for codec, (rate, share) in self._rates.items():
            seconds = 1 / rate + share / link
            if seconds < best_seconds:
                best, best_seconds = codec, seconds
        return best
