"""What a block is: its name (vLLM's chained hash) and its shape (one KV group, split over ranks).

A hash here is a function of values alone and equal, byte for byte, to the one that vLLM computes for the same
request, so that any engine can name a prefix that another one stored (contract: vLLM 0.33.0; key schemes since 0.19).

    NONE_HASH = H(seed)        h_i = H((h_{i-1} or NONE_HASH, tokens of block i, extra keys of block i or None))

Engines and the CLI import this module: it costs a few milliseconds and never loads numpy or torch.
"""

import operator
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NewType, cast

import cbor2

from kvcascade.config.errors import ConfigError, LayoutMismatch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

BlockHash = NewType("BlockHash", bytes)
Kind = Literal["attention", "mla", "pages"]
_KINDS = ("attention", "mla", "pages")

HASH_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
CRYPTOGRAPHIC = frozenset({"sha256", "sha256_cbor"})
PORTABLE = frozenset({"sha256_cbor", "xxhash_cbor"})
"""The others hash a pickle, which may differ between Python versions."""

TAGGED, UNTAGGED = KEY_SCHEMES = ("tagged-0.31", "untagged-0.19")
"""How vLLM writes extra keys: since 0.31 each says what it is, from 0.19 to 0.30 they are bare values."""

DEFAULT_SEED = "vllm-none-hash"
"""vLLM's own root (since 0.29) for the SHA-256 algorithms when PYTHONHASHSEED is unset."""

ITEMSIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element by KV dtype. The fp8 flavours are unlike dtypes: the same byte means another number."""

# Ends each block in one long CBOR encoding of many, which is then split at it. Nine bytes 0xff cannot occur within
# integers below 2^64 (a head byte is at most 0x1b and eight bytes follow it at most), so no token can imitate it.
_SEPARATOR = b"\xff" * 9
_ENCODED_SEPARATOR = b"\x49" + _SEPARATOR
_BLOCK_END = (None, _SEPARATOR)

_TAGS = {tag: tag for tag in ("lora", "mm", "cache_salt", "prompt_embeds")}


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a request, as the engine knows it."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image, sound or video whose placeholders are the tokens [offset, offset + length) of the request."""

    identifier: str
    offset: int
    length: int


def none_hash(seed: str, algo: str = "sha256_cbor") -> BlockHash:
    """The root of every chain under `seed`: what stands for the parent's hash in the first block.

    Raises ValueError for an unknown algorithm, TypeError for a seed that is not text (`0` and `"0"` are unlike roots).
    """
    if not isinstance(seed, str):
        raise TypeError(f"seed must be text, as in PYTHONHASHSEED, got {type(seed).__name__}")
    _hash_bytes(algo)
    preimage = cbor2.dumps(seed, canonical=True) if algo in PORTABLE else _pickle()(seed)
    return BlockHash(_digest(algo)(preimage))


def default_seed(algo: str, environ: Mapping[str, str] = os.environ) -> str:
    """The seed that a vLLM (since 0.29) in this environment takes: PYTHONHASHSEED, even when empty or "random".

    Without one the SHA-256 algorithms have a constant. Raises ConfigError for the others: vLLM draws their root at
    random in each process, so no two processes could share a block.
    """
    _hash_bytes(algo)
    seed = environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algo in CRYPTOGRAPHIC:
        return DEFAULT_SEED
    raise ConfigError(
        f"hash algorithm {algo} has a random root in each process unless PYTHONHASHSEED is set: "
        "set it to the same number for the daemon and every engine, or use sha256_cbor"
    )


def block_hashes(
    token_ids: Iterable[int],
    block_size: int,
    *,
    algo: str = "sha256_cbor",
    seed: str,
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
) -> list[BlockHash]:
    """The hashes of the full blocks of a request, first to last; tokens after the last full block have none.

    `extra_keys` holds one tuple or None for each full block. Raises as `BlockHasher` does.
    """
    return BlockHasher(block_size, algo=algo, seed=seed).extend(token_ids, extra_keys)


class BlockHasher:
    """The hashes of a request that grows: each block is hashed once, when its last token comes.

    The chain starts from `seed` or, where only the root is known, from `none_hash`; exactly one must be given. Raises
    ValueError for a block size below 1, an unknown algorithm, and a root whose width is not the algorithm's.
    """

    __slots__ = ("_tail", "algo", "block_size", "hashes", "none_hash")

    def __init__(
        self, block_size: int, *, algo: str = "sha256_cbor", seed: str | None = None, none_hash: bytes | None = None
    ) -> None:
        width = _hash_bytes(algo)
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size must be a whole number of at least 1, got {block_size!r}")
        if none_hash is None:
            if seed is None:
                raise ValueError("one of seed and none_hash must be given")
            none_hash = _root(seed, algo)
        elif seed is not None:
            raise ValueError("only one of seed and none_hash may be given")
        elif len(none_hash) != width:
            raise ValueError(f"none_hash of {algo} has {width} bytes, got {len(none_hash)}")
        self.block_size = block_size
        self.algo = algo
        self.none_hash = BlockHash(bytes(none_hash))
        # Changed by extend() alone. `_tail` holds the tokens after the last full block.
        self.hashes: list[BlockHash] = []
        self._tail: list[int] = []

    def extend(
        self, token_ids: Iterable[int], extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    ) -> list[BlockHash]:
        """Append tokens; return the hashes of the blocks that this completed, also appended to `hashes`.

        `extra_keys` holds one tuple or None for each block that this completes, and nothing for earlier ones. Ids of
        any size are hashed as vLLM hashes them. Raises ValueError for a negative id (naming its index in `token_ids`)
        and for extra keys of another number, TypeError for what cannot be a token id or part of a key; the chain is
        then as before.
        """
        tokens = _whole_numbers(token_ids)
        if self._tail:
            tokens = self._tail + tokens
        count = len(tokens) // self.block_size
        extras = None if extra_keys is None else _plain_extras(extra_keys, count)
        end = count * self.block_size
        new = self._chain(tokens, end, extras) if count else []
        self.hashes += new
        self._tail = tokens[end:]
        return new

    def _chain(self, tokens: list[int], end: int, extras: list[tuple[Any, ...] | None] | None) -> list[BlockHash]:
        size = self.block_size
        digest = _digest(self.algo)
        parent: bytes = self.hashes[-1] if self.hashes else self.none_hash
        hashes: list[Any] = []
        if self.algo in PORTABLE:
            width = len(parent)
            before_parent = b"\x83" + _cbor_head(0x40, width)
            after_parent = _cbor_head(0x80, size)
            for rest in _cbor_rests(tokens, size, end, extras):
                parent = digest(before_parent + parent + after_parent + rest)
                hashes.append(parent)
        else:
            dumps = _pickle()
            for index, start in enumerate(range(0, end, size)):
                extra = _unshared(extras[index]) if extras else None
                parent = digest(dumps((parent, tuple(tokens[start : start + size]), extra)))
                hashes.append(parent)
        return hashes


def extra_keys(
    n_tokens: int,
    block_size: int,
    *,
    scheme: str,
    lora: Lora | None = None,
    mm: Sequence[MultiModalItem] = (),
    cache_salt: str | None = None,
    prompt_embeds: "NDArray[Any] | ReadableBuffer | None" = None,
) -> list[tuple[Any, ...] | None]:
    """The extra keys of each full block of a request, None where a block has none, in vLLM's order.

    A LoRA enters every block; an item of `mm` every block that one of its tokens lies in, with its offset from that
    block's start (negative where it began earlier), so that two items differ by their whole identifier and their place.
    Items may overlap and come in any order. A salt enters the first block, and through the chain all; an empty one is
    none. `prompt_embeds` is a C-contiguous array with a row a token (of a torch tensor:
    `tensor.view(torch.uint8).numpy()`); each block takes the SHA-256 of its rows' bytes. Raises ValueError for an
    unknown scheme and for numbers below their bounds.
    """
    if scheme not in KEY_SCHEMES:
        raise ValueError(f"key scheme {scheme!r} is not known; known are {', '.join(KEY_SCHEMES)}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if n_tokens < 0:
        raise ValueError(f"n_tokens must be at least 0, got {n_tokens}")
    tagged = scheme == TAGGED
    keys: list[list[Any]] = [[] for _ in range(n_tokens // block_size)]
    if lora is not None:
        lora_key = ("lora", lora.name, lora.path) if tagged else lora.name
        for key in keys:
            key.append(lora_key)
    for item in sorted(mm, key=lambda item: item.offset):
        if item.offset < 0 or item.length < 0:
            raise ValueError(f"multi-modal item {item.identifier!r}: offset and length must be at least 0")
        after = min(len(keys), -(-(item.offset + item.length) // block_size))
        for index in range(item.offset // block_size, after):
            place = item.offset - index * block_size
            keys[index].append(("mm", item.identifier, place) if tagged else (item.identifier, place))
    if cache_salt and keys:
        keys[0].append(("cache_salt", cache_salt) if tagged else cache_salt)
    if prompt_embeds is not None:
        rows = memoryview(cast("ReadableBuffer", prompt_embeds))
        for index, key in enumerate(keys):
            digest = sha256(rows[index * block_size : (index + 1) * block_size]).digest()
            key.append(("prompt_embeds", digest) if tagged else digest)
    # Equal keys are one object, which the hasher checks and encodes once.
    shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    return [shared.setdefault(tuple(key), tuple(key)) if key else None for key in keys]


def probe_hashes(*, algo: str, none_hash: bytes, key_scheme: str) -> list[BlockHash]:
    """The hashes of a fixed prompt of two blocks of 16 tokens with every kind of extra key.

    An engine sends them when it attaches. They are the daemon's own only if algorithm, root and key scheme agree, so
    that a fleet in which they differ is told so and never just misses. Raises ValueError as `BlockHasher` and
    `extra_keys` do.
    """
    edges = (0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
    tokens = [*edges, *range(1000, 1032 - len(edges))]
    keys = extra_keys(
        len(tokens),
        16,
        scheme=key_scheme,
        lora=Lora("probe-adapter", "/probe/adapter"),
        mm=(MultiModalItem("probe-image", 5, 20), MultiModalItem("probe-sound", 26, 3)),
        cache_salt="probe-sält",
        prompt_embeds=memoryview(bytes(range(64))).cast("B", (32, 2)),
    )
    return BlockHasher(16, algo=algo, none_hash=none_hash).extend(tokens, keys)


def hash_self_test() -> None:
    """Prove that the installed libraries still encode and hash as when the names of all stored blocks were made.

    Raises ConfigError otherwise: serving would mean that nothing stored is ever found, silently. Takes under 1 ms.
    """
    # The last hash of a chain depends on all before it: integers of each width, other text than ASCII, bytes, nesting.
    tokens = [*range(20, 29), *(2**bits + step for bits in (8, 16, 31, 32, 63, 64) for step in (-1, 0, 1))]
    keys = (
        (("lora", "sql", "/adapters/sql"), ("cache_salt", "租户-é")),
        None,
        (("mm", "image", -(2**31)), ("mm", b"\xff" * 9, 2**64), (None, (1, -24, -25))),
    )
    expected = {
        "sha256_cbor": "bc8400c4143dfdce94935e092ba2a82b028a51ad7affc106c7f521a81cdee6f6",
        "xxhash_cbor": "e02a9c9273769e8c314d0191130597b7",
    }
    for algo, golden in expected.items():
        last = block_hashes(tokens, 9, algo=algo, seed="42", extra_keys=keys)[-1].hex()
        if last != golden:
            raise ConfigError(f"hash self-test: {algo} gives {last} instead of {golden}; {_LIBRARIES}")
    # Namespace fingerprints hash a canonical map: shorter keys first, then by bytes.
    if cbor2.dumps({"bb": 1, "c": [None], "a": ""}, canonical=True).hex() != "a3616160616381f6626262" + "01":
        raise ConfigError(f"hash self-test: a map is not encoded canonically; {_LIBRARIES}")


_LIBRARIES = "the installed cbor2 or xxhash does not fit this version of kvcascade (cbor2>=6,<7, xxhash>=3.4)"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The shape of one KV group: layers whose blocks are cut, stored and evicted together.

    `kv_heads` and `head_dim` are the whole model's, before any split over ranks; MLA has one latent head, whose
    `head_dim` is the length of its latent. A block of kind "pages" is an engine's own bytes, of which nothing is known
    but their number: `layers` pieces of `head_dim` elements, whatever `block_tokens` is. Raises ValueError for a field
    out of bounds, naming it.
    """

    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    kind: Kind = "attention"

    def __post_init__(self) -> None:
        bounds = _GROUP_BOUNDS | _PAGES_BOUNDS if self.kind == "pages" else _GROUP_BOUNDS
        for name, highest in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
                raise ValueError(f"{name} must be a whole number from 1 to {highest}, got {value!r:.80}")
        if self.kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {self.kind!r:.80}")
        if self.kind != "attention" and self.kv_heads != 1:
            raise ValueError(f"kv_heads of kind {self.kind} must be 1, got {self.kv_heads}")

    @property
    def planes(self) -> int:
        """How many vectors a token has in each head and layer: K and V, or the one latent."""
        return 2 if self.kind == "attention" else 1

    def head_bytes(self, itemsize: int) -> int:
        """Bytes of one KV head's part of a block, which lie together in a canonical slot."""
        tokens = 1 if self.kind == "pages" else self.block_tokens
        return self.layers * self.planes * tokens * self.head_dim * itemsize

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of a whole block."""
        return self.kv_heads * self.head_bytes(itemsize)


_GROUP_BOUNDS = {"block_tokens": 1 << 16, "layers": 1 << 12, "kv_heads": 1 << 12, "head_dim": 1 << 16}
_PAGES_BOUNDS = {"layers": 1 << 18}  # pages of 4 KiB may add up to 1 GiB


def itemsize(kv_dtype: str) -> int:
    """Bytes of one element of `kv_dtype`. Raises LayoutMismatch for a dtype that slots cannot hold."""
    try:
        return ITEMSIZES[kv_dtype]
    except (KeyError, TypeError):
        raise LayoutMismatch(f"kv_dtype {kv_dtype!r:.80} is not known; known are {', '.join(ITEMSIZES)}") from None


def committers(kv_heads: int, ranks: int, block_index: int, kind: str) -> tuple[int, ...]:
    """The ranks of a tensor-parallel engine that write block `block_index` of a chain, ascending.

    Together they write each head exactly once: all ranks where each has heads of its own, one of each head's replicas
    where there are more ranks than heads (every latent is a replica), in turn by block. Raises LayoutMismatch as
    `head_range` does.
    """
    _, replicas = _split(kv_heads, ranks, kind)
    return tuple(range(block_index % replicas, ranks, replicas))


def head_range(kv_heads: int, ranks: int, rank: int, kind: str) -> tuple[int, int]:
    """(first, count): the KV heads that `rank` holds, in the whole model's numbering.

    Raises LayoutMismatch if heads cannot be split evenly over ranks nor ranks over heads, and for a rank that there is
    not.
    """
    heads, replicas = _split(kv_heads, ranks, kind)
    if not 0 <= rank < ranks:
        raise LayoutMismatch(f"rank {rank} is not one of {ranks} ranks")
    return rank // replicas * heads, heads


def _split(kv_heads: int, ranks: int, kind: str) -> tuple[int, int]:
    """(heads a rank, ranks a head), one of which is 1."""
    if kind not in _KINDS:
        raise LayoutMismatch(f"KV group kind {kind!r:.80} is not known; known are {', '.join(_KINDS)}")
    if ranks < 1 or kv_heads < 1:
        raise LayoutMismatch(f"{kv_heads} KV heads cannot be split over {ranks} ranks")
    if kind != "attention":
        return 1, ranks
    if kv_heads % ranks == 0:
        return kv_heads // ranks, 1
    if ranks % kv_heads == 0:
        return 1, ranks // kv_heads
    raise LayoutMismatch(f"{kv_heads} KV heads and {ranks} ranks: one must be a multiple of the other")


def _hash_bytes(algo: str) -> int:
    width = HASH_BYTES.get(algo)
    if width is None:
        raise ValueError(f"hash algorithm {algo!r} is not known; known are {', '.join(HASH_BYTES)}")
    return width


_root = none_hash  # for BlockHasher.__init__, whose parameter has the function's name


def _digest(algo: str) -> Callable[[bytes], bytes]:
    if algo in CRYPTOGRAPHIC:
        return _sha256_digest
    from xxhash import xxh3_128_digest  # only fleets that chose it pay for its import

    return xxh3_128_digest


def _sha256_digest(preimage: bytes) -> bytes:
    return sha256(preimage).digest()


def _pickle() -> Callable[[object], bytes]:
    import pickle  # only fleets that chose it pay for its import; nothing is ever unpickled

    return partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


def _whole_numbers(token_ids: Iterable[int]) -> list[int]:
    tokens: list[int]
    if isinstance(token_ids, list):
        tokens = token_ids
    else:  # an array or tensor gives Python's integers by tolist(), numpy's by iteration
        tolist = getattr(token_ids, "tolist", None)
        tokens = list(token_ids) if tolist is None else tolist()
    try:
        array("Q", tokens)  # proves 0 <= id < 2^64 in 5 ns an id
    except (OverflowError, TypeError):
        pass  # a negative id, one of 2^64 or more, or no number at all: told apart one by one
    else:
        # One number of another type, such as numpy's, would be pickled as such: silently another hash.
        if {int}.issuperset(map(type, tokens)):
            return tokens
    whole = []
    for index, token in enumerate(tokens):
        try:
            value = operator.index(token)
        except TypeError:
            raise TypeError(f"token_ids[{index}] must be a whole number, got {type(token).__name__}") from None
        if value < 0:
            raise ValueError(f"token_ids[{index}] is negative: {value}")
        whole.append(value)
    return whole


def _plain_extras(keys: Sequence[tuple[Any, ...] | None], count: int) -> list[tuple[Any, ...] | None]:
    """The keys of each block with lists as tuples; a tuple that comes again stays the same object."""
    if len(keys) != count:
        raise ValueError(f"extra_keys must have one entry for each of the {count} new full blocks, got {len(keys)}")
    plain: list[tuple[Any, ...] | None] = []
    previous: object = None
    for index, key in enumerate(keys):
        if key is None:
            plain.append(None)
        elif key is previous:
            plain.append(plain[-1])
        elif isinstance(key, tuple | list):
            plain.append(_plain(key, index))
        else:
            raise TypeError(f"extra_keys[{index}] must be a tuple or None, got {type(key).__name__}")
        previous = key
    return plain


def _plain(value: Any, index: int) -> Any:
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, tuple | list):
        return tuple(_plain(part, index) for part in value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"extra_keys[{index}] holds a {type(value).__name__}, not text, bytes, whole numbers or tuples")
    return operator.index(value)


def _unshared(value: Any, leading: bool = False) -> Any:
    """The same value in objects of its own, but for the tags of keys.

    A pickle refers back to an object that it has met, so its bytes depend on which equal parts are one object. An
    engine's requests arrive over a pipe with every string in an object of its own, while its tags are constants.
    """
    if isinstance(value, tuple):
        return tuple(_unshared(part, index == 0) for index, part in enumerate(value))
    if isinstance(value, str):
        return _TAGS[value] if leading and value in _TAGS else value.encode().decode()
    return bytes(bytearray(value)) if isinstance(value, bytes) else value


def _cbor_head(major: int, length: int) -> bytes:
    if length < 24:
        return bytes((major + length,))
    width = next(power for power in range(4) if length < 1 << (8 << power))
    return bytes((major + 24 + width,)) + length.to_bytes(1 << width, "big")


def _cbor_rests(tokens: list[int], size: int, end: int, extras: list[tuple[Any, ...] | None] | None) -> list[bytes]:
    """What follows the head of the token array in each block's preimage: its tokens, then its extra keys or null.

    All blocks are encoded in one call and the result is cut: 128k tokens take 14 ms in all, 19 in a call a block.
    """
    flat: list[Any] = []
    for start in range(0, end, size):
        flat += tokens[start : start + size]
        flat += _BLOCK_END
    encoded = cbor2.dumps(flat)[len(_cbor_head(0x80, len(flat))) :]
    rests = encoded.split(_ENCODED_SEPARATOR)
    rests.pop()
    if len(rests) != end // size:  # a token of 2^64 or more holds the separator
        skip = len(_cbor_head(0x80, size))
        rests = [cbor2.dumps(tokens[start : start + size])[skip:] + b"\xf6" for start in range(0, end, size)]
    if extras is not None:
        previous: tuple[Any, ...] | None = None
        suffix = b""
        for index, key in enumerate(extras):
            if key is not None:
                if key != previous:
                    suffix, previous = cbor2.dumps(key, canonical=True), key
                rests[index] = rests[index][:-1] + suffix
    return rests
