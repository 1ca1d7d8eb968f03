"""Values that travel between nodes: what was sent is what is believed, and nothing else."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import ConfigError
from kvcascade.tiers import value
from kvcascade.tiers.remote import BlockName, Secret, disproves
from kvcascade.tiers.value import HEADER_BYTES, BadValue

SECRET = Secret(b"sixteen bytes and more")
NAME = BlockName(b"n" * 32, 1, b"h" * 32)


def packed(secret: Secret, payload: bytes = b"payload" * 9, name: BlockName = NAME) -> bytes:
    raw = memoryview(payload)
    header = value.pack(name, b"p" * len(name.block_hash), raw, [raw[:10], raw[10:]], codec=0, element=2, secret=secret)
    assert len(header) == HEADER_BYTES
    return header + payload


def read(data: bytes, secret: Secret, name: BlockName = NAME, length: int = 63) -> bytes:
    header = value.parse(data, name, length)
    encoded = memoryview(data)[HEADER_BYTES:]
    value.prove(header, encoded, secret)
    value.verify(header, encoded)
    return bytes(encoded)


@pytest.mark.parametrize("secret", [SECRET, Secret()])
@pytest.mark.parametrize("width", [16, 32])
def test_what_was_sent_is_read(secret: Secret, width: int) -> None:
    name = BlockName(b"n" * 32, 7, os.urandom(width))
    data = packed(secret, name=name)
    assert read(data, secret, name) == b"payload" * 9
    header = value.parse(data, name, 63)
    assert header.element == 2
    assert data[88 : 88 + width] == b"p" * width


@given(st.data())
def test_no_change_of_an_authentic_value_is_believed(data: st.DataObject) -> None:
    good = packed(SECRET)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= data.draw(st.integers(1, 255))
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    for bad in (bytes(flipped), cut, good + b"x"):
        with pytest.raises(BadValue) as caught:
            read(bad, SECRET)
        assert disproves(str(caught.value))


@given(st.integers(HEADER_BYTES, HEADER_BYTES + 62), st.integers(1, 255))
def test_without_a_secret_a_changed_payload_is_not_believed(at: int, change: int) -> None:
    bad = bytearray(packed(Secret()))
    bad[at] ^= change
    with pytest.raises(BadValue, match="bad checksum"):
        read(bytes(bad), Secret())


@given(st.binary(max_size=300))
def test_garbage_is_no_value(data: bytes) -> None:
    with pytest.raises(BadValue):
        read(data, SECRET)


@pytest.mark.parametrize(
    ("name", "length", "reason"),
    [
        (BlockName(b"m" * 32, 1, b"h" * 32), 63, "another block"),
        (BlockName(b"n" * 32, 2, b"h" * 32), 63, "another block"),
        (BlockName(b"n" * 32, 1, b"i" * 32), 63, "another block"),
        (BlockName(b"n" * 32, 1, b"h" * 16), 63, "another block"),
        (NAME, 64, "another length"),
    ],
)
def test_another_block_is_refused(name: BlockName, length: int, reason: str) -> None:
    """An authentic value of another block, or under another name, is not the one asked for."""
    with pytest.raises(BadValue, match=reason):
        read(packed(SECRET), SECRET, name, length)


def test_another_version_is_told_apart() -> None:
    data = bytearray(packed(SECRET))
    data[4] += 1
    with pytest.raises(BadValue, match="another format version"):
        read(bytes(data), SECRET)


def test_the_tag_of_another_secret_or_of_none_is_refused() -> None:
    for other in (Secret(b"another secret, also long"), Secret()):
        with pytest.raises(BadValue, match="bad tag"):
            read(packed(other), SECRET)


def test_names_depend_on_all_their_parts_and_on_the_secret() -> None:
    names = [
        NAME,
        BlockName(b"m" * 32, 1, b"h" * 32),
        BlockName(b"n" * 32, 2, b"h" * 32),
        BlockName(b"n" * 32, 1, b"i" * 32),
    ]
    called = [secret.name_of(name) for secret in (SECRET, Secret()) for name in names]
    assert len(set(called)) == len(called)
    assert {len(one) for one in called} == {16}
    for secret in (SECRET, Secret()):
        hashes = [b"h" * 32, b"i" * 32, b"j" * 16]
        assert secret.names_of(b"n" * 32, 7, hashes) == [secret.name_of(BlockName(b"n" * 32, 7, one)) for one in hashes]


def test_a_tag_is_good_for_its_use_and_its_parts_alone() -> None:
    tag = SECRET.tag("peers", b"ab", b"c")
    assert SECRET.proves(tag, "peers", b"ab", b"c")
    assert not SECRET.proves(tag, "values", b"ab", b"c")
    assert not SECRET.proves(tag, "peers", b"a", b"bc")


def test_a_secret_is_read_from_a_file_that_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes and more\n")
    path.chmod(0o600)
    assert Secret.from_file(path).name_of(NAME) == SECRET.name_of(NAME)
    assert not Secret.from_file(None).shared
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"cluster\.secret_file: .* is open to others \(mode 0640\)"):
        Secret.from_file(path)
    path.chmod(0o600)
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match=r"cluster\.secret_file: .* holds 5 bytes"):
        Secret.from_file(path)
    with pytest.raises(ConfigError, match=r"cluster\.secret_file: .* cannot be read"):
        Secret.from_file(tmp_path / "none")
