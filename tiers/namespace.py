"""Which blocks may stand for one another: the namespace, whose fingerprint is a part of every block key.

This is the one place where it is built. It holds every field that changes a block's bytes or its hash, and none that
does not: not the tensor-parallel size nor an engine's own layout, because slots are canonical. A name in it is an
identity (a digest, a dtype), never a path or the name under which a model is served.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from operator import index
from pathlib import Path
from typing import Any

import cbor2

from kvcascade.config.errors import ConfigError, LayoutMismatch, ProtocolError

from .block import HASH_BYTES, KEY_SCHEMES, KVGroup, itemsize

SLOT_FORMAT = 1
"""Version of what a slot's bytes mean: `[kv head][layer][k, v][token][dim]`, C-contiguous."""

MAX_GROUPS = 64
MAX_TEXT = 512
MAX_BLOCK_BYTES = 1 << 30

_KiB = 1 << 10
_OPTIONAL_TEXT = frozenset({"weights_epoch", "kv_scales", "rope", "quantisation"})
_NOT_IDENTITY = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that two engines must have in common to share blocks. Raises ValueError naming a field that is wrong.

    `model` is `model_digest()` or the operator's own identity; `weights_epoch` names the version of weights that are
    updated in place, empty where they never are; `kv_scales` is the hex digest of the KV scales, empty where KV is
    unscaled (scales computed at run time have no digest: such an engine cannot attach); `rope` describes the rope
    scaling, or is a digest of a long description, and `max_model_len` is 0 unless it changes the scaling;
    `quantisation` is the weights'; `producer` is the engine family, since families compute unlike bytes. `none_hash` is
    the chain's root, as wide as `hash_algo` makes it.
    """

    model: str
    weights_epoch: str
    kv_dtype: str
    groups: tuple[KVGroup, ...]
    kv_scales: str
    rope: str
    max_model_len: int
    quantisation: str
    producer: str
    hash_algo: str
    key_scheme: str
    none_hash: bytes
    slot_format: int = SLOT_FORMAT

    def __post_init__(self) -> None:
        for name in ("model", "weights_epoch", "kv_scales", "rope", "quantisation", "producer"):
            _check_text(name, getattr(self, name))
        _check_number("max_model_len", self.max_model_len, 0, (1 << 31) - 1)
        _check_number("slot_format", self.slot_format, 1, (1 << 16) - 1)
        _check_choice("hash_algo", self.hash_algo, tuple(HASH_BYTES))
        _check_choice("key_scheme", self.key_scheme, KEY_SCHEMES)
        if self.kv_scales and not (16 <= len(self.kv_scales) <= 128 and _is_hex(self.kv_scales)):
            raise ValueError(f"kv_scales must be empty or a digest in lower-case hex, got {self.kv_scales!r:.80}")
        if not isinstance(self.none_hash, bytes) or len(self.none_hash) != HASH_BYTES[self.hash_algo]:
            raise ValueError(f"none_hash must be the {HASH_BYTES[self.hash_algo]} bytes that {self.hash_algo} gives")
        try:
            item = itemsize(self.kv_dtype)
        except LayoutMismatch as error:
            raise ValueError(str(error)) from None
        if not isinstance(self.groups, tuple) or not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"groups must be a tuple of 1 to {MAX_GROUPS} KV groups")
        for place, group in enumerate(self.groups):
            if not isinstance(group, KVGroup):
                raise ValueError(f"groups[{place}] must be a KVGroup, got {type(group).__name__}")
            size = group.block_bytes(item)
            if size > MAX_BLOCK_BYTES:
                raise ValueError(f"groups[{place}]: a block of {size} bytes is beyond the limit of {MAX_BLOCK_BYTES}")

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of the KV group with this index."""
        return self.groups[group].block_bytes(itemsize(self.kv_dtype))

    def fingerprint(self) -> bytes:
        """32 bytes that stand for all fields: the SHA-256 of `to_map()` in canonical CBOR."""
        return sha256(cbor2.dumps(self.to_map(), canonical=True)).digest()

    def to_map(self) -> dict[str, Any]:
        """The fields as text, numbers and lists, for CBOR and JSON alike; `none_hash` in hex. `from_map` reads it."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["none_hash"] = self.none_hash.hex()
        values["groups"] = [
            {field.name: getattr(group, field.name) for field in fields(group)} for group in self.groups
        ]
        return values

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> "Namespace":
        """The namespace that another process described.

        Raises ProtocolError naming the field that is missing, not known or out of bounds, and for a slot format that
        this version does not have: what is not recognised is refused.
        """
        known = _checked_fields("namespace", values, cls)
        groups = known["groups"]
        if not isinstance(groups, list | tuple) or not 1 <= len(groups) <= MAX_GROUPS:
            raise ProtocolError(f"namespace field groups must be a list of 1 to {MAX_GROUPS} KV groups")
        root = known["none_hash"]
        if not isinstance(root, str) or len(root) > 64 or len(root) % 2 or not _is_hex(root):
            raise ProtocolError(f"namespace field none_hash must be lower-case hex, got {root!r:.80}")
        known["none_hash"] = bytes.fromhex(root)
        if known["slot_format"] != SLOT_FORMAT:
            raise ProtocolError(f"namespace field slot_format must be {SLOT_FORMAT}, got {known['slot_format']!r:.80}")
        built = []
        for place, group in enumerate(groups):
            where = f"groups[{place}]"
            try:
                built.append(KVGroup(**_checked_fields(where, group, KVGroup)))
            except ValueError as error:
                raise ProtocolError(f"namespace field {where}: {error}") from None
        known["groups"] = tuple(built)
        try:
            return cls(**known)
        except ValueError as error:
            raise ProtocolError(f"namespace field {error}") from None


def model_digest(config: Mapping[str, Any], weight_files: Sequence[Path]) -> str:
    """A model's identity in hex: the same wherever the files lie and whatever they and the model are called.

    It covers `config` (the effective one, as JSON; what only names or dates a model is left out) and of each weight
    file the size, the header and samples of the weights: fine-tunes of one base have equal headers and sizes, so 1 KiB
    from the middle of each tensor (safetensors), or both ends and 63 samples between (other files), tell them apart at
    the cost of a few MB read. An update of a few elements in place can escape the samples: `weights_epoch` names those.
    Raises ConfigError for a config that is not JSON and for a file that cannot be read.
    """
    try:
        text = json.dumps(_identity(config), sort_keys=True, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config cannot be digested: {error}") from error
    files = []
    for path in weight_files:
        try:
            files.append(_file_digest(path))
        except OSError as error:
            raise ConfigError(f"weight file {path} cannot be read: {error.strerror}") from error
    return sha256(cbor2.dumps([text, sorted(files)], canonical=True)).hexdigest()


def _identity(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _identity(part) for key, part in value.items() if key not in _NOT_IDENTITY}
    if isinstance(value, list | tuple):
        return [_identity(part) for part in value]
    return value


def _file_digest(path: Path) -> bytes:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        samples = _safetensors_samples(file.fileno(), size) or _even_samples(size)
        digest = sha256(size.to_bytes(8, "big"))
        for offset, length in samples:
            part = os.pread(file.fileno(), length, offset)
            digest.update(offset.to_bytes(8, "big") + len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _safetensors_samples(fd: int, size: int) -> list[tuple[int, int]]:
    """(offset, length) of the header and the middle of each tensor; empty if this is no safetensors file."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    data = 8 + length
    if not 2 <= length <= min(size - 8, 100 << 20):  # the format's own limit of a header
        return []
    try:
        header = json.loads(os.pread(fd, length, 8))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        spans = [(index(begin), index(end)) for begin, end in offsets]
        samples = [(data + (begin + max(begin, end - _KiB)) // 2, min(_KiB, end - begin)) for begin, end in spans]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    if not all(data <= offset <= size and length >= 0 for offset, length in samples):
        return []
    return [(0, data), *sorted(samples)]


def _even_samples(size: int) -> list[tuple[int, int]]:
    ends = [(0, 64 * _KiB), (max(0, size - 64 * _KiB), 64 * _KiB)]
    return [*ends, *((size * step // 64, 4 * _KiB) for step in range(1, 64))]


def _checked_fields(where: str, values: object, cls: type[Any]) -> dict[str, Any]:
    """A copy of `values`, whose keys are exactly the fields of `cls`."""
    if not isinstance(values, Mapping):
        raise ProtocolError(f"{where} must be a map, got {type(values).__name__}")
    names = [field.name for field in fields(cls)]
    for name in names:
        if name not in values:
            raise ProtocolError(f"{where} field {name} is missing")
    for name in values:
        if name not in names:
            raise ProtocolError(f"{where} field {name!r:.80} is not known")
    return dict(values)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be printable text of at most {MAX_TEXT} characters, got {value!r:.80}")
    if not value and name not in _OPTIONAL_TEXT:
        raise ValueError(f"{name} must not be empty")


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r:.80}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} {value!r:.80} is not known; known are {', '.join(choices)}")


def _is_hex(text: str) -> bool:
    return set(text) <= set("0123456789abcdef")
