"""What is the same for every way to another node: names of blocks, jobs, the fleet's secret, and why a job failed.

With a secret the names of blocks in Redis are keyed, so that who reads there cannot confirm a guessed prompt, and all
that comes from Redis or a peer carries a tag that only the fleet can make. Without one the same code runs under a key
that everybody knows: names are as long and tags as many, but they prove nothing about who made them.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvcascade.config.errors import ConfigError
from kvcascade.config.private import read_private

MIN_SECRET: Final = 16  # bytes
MAX_SECRET: Final = 1024
TAG_BYTES: Final = 32
NAME_BYTES: Final = 16

# Reasons that prove that the bytes are not those asked for; all others say that they could not be had now.
UNTRUE: Final = frozenset(
    {
        "bad checksum",
        "bad tag",
        "no value of ours",
        "another format version",
        "another block",
        "another length",
        "cannot be decoded",
    }
)


def disproves(reason: str) -> bool:
    """Whether a job's reason is a proof against the bytes that came, rather than trouble on the way."""
    return reason in UNTRUE


def contradicts(reason: str) -> bool:
    """Whether such bytes are of use to nobody: a value of another format version is to nodes of that version."""
    return reason in UNTRUE and reason != "another format version"


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block as every node names it: its namespace's fingerprint (32 B), its KV group, its hash (16 or 32 B)."""

    namespace: bytes
    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receive one block's payload into `into`: writable, contiguous, as long as the payload.

    The memory is the caller's, and may be written until the job's future is done; what a failed job leaves there is
    undefined.
    """

    name: BlockName
    into: memoryview


@dataclass(frozen=True, slots=True)
class Send:
    """Send one block. `parent`: the hash of the block before it in its chain, empty for the first one.

    The payload must not change until the job's future is done. `element`: bytes of one number of the KV dtype.
    """

    name: BlockName
    parent: bytes
    payload: memoryview
    element: int


class Secret:
    """The key that the nodes of a fleet share, or, where `shared` is False, one that everybody knows.

    Each use has a key of its own, so that no tag of one kind is ever good for another.
    """

    __slots__ = ("_keys", "shared")

    def __init__(self, secret: bytes = b"") -> None:
        self.shared = bool(secret)
        root = blake2b(secret, digest_size=32, person=b"kvcascade-root").digest()
        uses = ("names", "values", "veils", "peers", "nodes", "tickets")
        self._keys = {use: blake2b(use.encode(), key=root, digest_size=32).digest() for use in uses}

    @classmethod
    def from_file(cls, path: Path | None) -> "Secret":
        """The file's content without the white space around it. ConfigError where it is no secret."""
        if path is None:
            return cls()
        secret = read_private("cluster.secret_file", path)
        if not MIN_SECRET <= len(secret) <= MAX_SECRET:
            raise ConfigError(
                f"cluster.secret_file: {path} holds {len(secret)} bytes: write {MIN_SECRET} to {MAX_SECRET}"
            )
        return cls(secret)

    def name_of(self, name: BlockName) -> bytes:
        """What the block is called outside of this node: 16 bytes."""
        keyed = blake2b(name.namespace, key=self._keys["names"], digest_size=NAME_BYTES)
        keyed.update(name.group.to_bytes(4, "little") + name.block_hash)
        return keyed.digest()

    def names_of(self, namespace: bytes, group: int, block_hashes: Iterable[bytes]) -> list[bytes]:
        """As `name_of` for each block of one namespace and group, in a third of the time."""
        begun = blake2b(namespace, key=self._keys["names"], digest_size=NAME_BYTES)
        begun.update(group.to_bytes(4, "little"))
        names = []
        for block_hash in block_hashes:
            keyed = begun.copy()
            keyed.update(block_hash)
            names.append(keyed.digest())
        return names

    def veil_of(self, name: BlockName) -> bytes:
        """96 bytes that only the fleet knows, to hide what a value says of its block where others may read it."""
        key, name_bytes = self._keys["veils"], self.name_of(name)
        return blake2b(b"\0" + name_bytes, key=key).digest() + blake2b(b"\1" + name_bytes, key=key).digest()[:32]

    def tag(self, use: str, *parts: bytes | memoryview) -> bytes:
        """A tag over the parts, 32 bytes; lengths are part of it. Releases the GIL over large parts (1 s a GB)."""
        keyed = blake2b(key=self._keys[use], digest_size=TAG_BYTES)
        for part in parts:
            keyed.update(len(part).to_bytes(8, "little"))
            keyed.update(part)
        return keyed.digest()

    def tag_joined(self, use: str, head: bytes, parts: Iterable[bytes | memoryview]) -> bytes:
        """As `tag(use, head, b"".join(parts))`, without joining them: how the bytes are cut is not told apart."""
        parts = list(parts)
        keyed = blake2b(key=self._keys[use], digest_size=TAG_BYTES)
        keyed.update(len(head).to_bytes(8, "little") + head + sum(map(len, parts)).to_bytes(8, "little"))
        for part in parts:
            keyed.update(part)
        return keyed.digest()

    def proves(self, tag: bytes, use: str, *parts: bytes | memoryview) -> bool:
        """Whether this is the tag over the parts; takes as long for a wrong one."""
        return hmac.compare_digest(tag, self.tag(use, *parts))
