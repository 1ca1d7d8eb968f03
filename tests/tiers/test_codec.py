"""Lossless packing: every byte comes back, and hostile bytes cost an error and nothing else."""

import struct

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.tiers.block import ITEMSIZES
from kvcascade.tiers.codec import Codec, CodecChoice, CodecError, decode, encode

CODECS = list(Codec)


def bf16(count: int, seed: int = 1) -> bytes:
    numbers = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def round_trip(payload: bytes, codec: Codec, element: int) -> tuple[Codec, int]:
    used, parts = encode(memoryview(payload), codec, element)
    into = bytearray(len(payload))
    encoded = b"".join(parts)
    decode(memoryview(encoded), used, element, memoryview(into))
    assert bytes(into) == payload
    return used, len(encoded)


@given(st.binary(max_size=2000), st.sampled_from(CODECS), st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_come_back(payload: bytes, codec: Codec, element: int) -> None:
    used, size = round_trip(payload, codec, element)
    assert used in (codec, Codec.RAW)
    assert size <= len(payload)


@given(
    count=st.integers(0, 3000),
    odd=st.integers(0, 7),
    noise=st.integers(0, 8),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 1 << 30),
)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZES))
def test_numbers_of_every_dtype_come_back(
    dtype: str, count: int, odd: int, noise: int, codec: Codec, seed: int
) -> None:
    """Any pattern of bits (NaNs, infinities, subnormal numbers), more or less of it noise, and odd lengths."""
    width = ITEMSIZES[dtype]
    generator = np.random.default_rng(seed)
    numbers = generator.integers(0, 256, count * width + odd, dtype=np.uint8)
    quiet = numbers[width - 1 :: width]
    quiet[generator.integers(0, 8, len(quiet)) >= noise] = 0x3F
    round_trip(numbers.tobytes(), codec, width)


LETTERS = b"abcd" * 24
NUMBERS = bytes(0x3F if n % 2 else n * 7 % 256 for n in range(96))


@pytest.mark.parametrize(
    ("codec", "element", "payload", "encoded"),
    [
        (Codec.LZ4, 1, LETTERS, "010e000000 4f61626364040044506461626364"),
        (Codec.ZSTD, 1, LETTERS, "0113000000 28b52ffd206055000020616263640100f9e488"),
        (Codec.LZ4, 2, NUMBERS, "010b000000 1f3f010017503f3f3f3f3f" + NUMBERS[::2].hex()),
        (Codec.ZSTD, 2, NUMBERS, "0111000000 28b52ffd2030450000103f3f01009b000b" + NUMBERS[::2].hex()),
    ],
)
def test_what_an_earlier_version_wrote_is_still_read(codec: Codec, element: int, payload: bytes, encoded: str) -> None:
    """Another way to pack needs another number: values outlive the version that wrote them."""
    into = bytearray(len(payload))
    decode(memoryview(bytes.fromhex(encoded)), codec, element, memoryview(into))
    assert into == payload


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_two_byte_floats_shrink(codec: Codec) -> None:
    payload = bf16(1 << 18)
    used, size = round_trip(payload, codec, 2)
    assert used == codec
    assert size < 0.9 * len(payload)


def test_four_byte_floats_shrink() -> None:
    payload = np.random.default_rng(1).standard_normal(1 << 17, dtype=np.float32).tobytes()
    used, size = round_trip(payload, Codec.ZSTD, 4)
    assert used == Codec.ZSTD
    assert size < 0.9 * len(payload)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_noise_is_sent_as_it_is_and_not_copied(codec: Codec) -> None:
    noise = memoryview(np.random.default_rng(2).bytes(1 << 16))
    used, parts = encode(noise, codec, 2)
    assert used == Codec.RAW
    assert parts == [noise]
    assert parts[0] is noise


@given(st.data())
@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_what_was_changed_decodes_to_an_error_or_to_the_right_length(codec: Codec, data: st.DataObject) -> None:
    used, parts = encode(memoryview(bf16(4096)), codec, 2)
    encoded = bytearray(b"".join(parts))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for bad in (encoded, encoded[:cut]):
        try:
            decode(memoryview(bytes(bad)), used, 2, memoryview(bytearray(8192)))
        except CodecError:
            pass


@given(st.binary(max_size=400), st.integers(0, 9), st.sampled_from([1, 2, 4]))
def test_garbage_raises_nothing_but_a_codec_error(data: bytes, codec: int, element: int) -> None:
    try:
        decode(memoryview(data), codec, element, memoryview(bytearray(64)))
    except CodecError:
        pass


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_bomb_takes_no_memory(codec: Codec) -> None:
    """A payload that would unpack to far more than was promised (fault L6)."""
    huge = bytes(1 << 26)
    packed = (
        lz4.block.compress(huge, store_size=False) if codec == Codec.LZ4 else zstandard.ZstdCompressor().compress(huge)
    )
    bomb = struct.pack("<BI", 1, len(packed)) + packed
    with pytest.raises(CodecError):
        decode(memoryview(bomb), codec, 1, memoryview(bytearray(4096)))


def test_a_fast_link_gets_raw_bytes_and_a_slow_one_packed_ones() -> None:
    choice = CodecChoice()
    assert choice.choose(1e6) == Codec.RAW  # this machine was not measured yet
    choice.measure()
    assert choice.choose(None) == Codec.RAW
    assert choice.choose(100e9) == Codec.RAW
    assert choice.choose(1e5) != Codec.RAW


def test_the_operators_word_decides() -> None:
    assert CodecChoice("zstd").choose(100e9) == Codec.ZSTD
    assert CodecChoice("raw").choose(1.0) == Codec.RAW
