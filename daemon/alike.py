"""Whether engines of two nodes that share nothing were meant to: namespaces that are alike but for a field or two.

A namespace holds no name under which a model is served, so likeness is all there is to go by: the same model under
another dtype, block size, version or digest of its weights is most often a slip of who set it up. It is no fault of the
daemons, and may be meant; so it is a hint, told on both sides.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import cbor2

from kvcascade.config.errors import ProtocolError
from kvcascade.tiers.namespace import Namespace

from .protocol import decode_body, take

MOST: Final = 16  # namespaces that a node tells of
MAX_BYTES: Final = 32 << 10
FEW: Final = 2  # fields in which namespaces that are alike may differ
SHOWN: Final = 40  # characters of a value

Fields = Mapping[str, str]


def pack(boot: bytes, namespaces: Sequence[Namespace]) -> bytes:
    """What a node tells of its engines."""
    return cbor2.dumps({"boot": boot, "spaces": [one.to_map() for one in namespaces[:MOST]]})


def unpack(data: bytes) -> tuple[bytes, list[Fields]]:
    """Who told it, and the fields of each namespace, as text; they may be another version's. ProtocolError."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"field 'spaces': {len(data)} bytes are more than {MAX_BYTES}")
    values = decode_body(data)
    return take(values, "boot", bytes, hi=64), [flat(one) for one in take(values, "spaces", list, hi=MOST)]


def flat(namespace: Any) -> Fields:
    """The fields of a namespace's map, those of its groups by their places. ProtocolError for what is no such map."""
    fields: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, list | tuple):
            for place, inner in enumerate(value):
                add(f"{name}[{place}]", inner)
        else:
            fields[name[:SHOWN]] = str(value)

    if not isinstance(namespace, Mapping):
        raise ProtocolError("field 'spaces': there is one that is no namespace")
    add("", namespace)
    if not all(name.isprintable() and value.isprintable() for name, value in fields.items()):
        raise ProtocolError("field 'spaces': there is one that cannot be shown")
    return fields


def hints(ours: Iterable[Fields], theirs: Iterable[Fields], me: str, other: str) -> list[str]:
    """What keeps engines here and on another node from sharing: for each namespace that only we use, the one of theirs
    that is most like it and that we do not use, if it differs in few fields."""
    ours, theirs = list(ours), list(theirs)
    if len(theirs) >= MOST:
        return []  # there may be more, and ours among them
    strange = [one for one in theirs if one not in ours]
    found = []
    for mine in ours:
        if mine in theirs or not strange:
            continue
        differences = min((_differences(mine, one) for one in strange), key=len)
        if len(differences) <= FEW:
            what = "; ".join(f"{name} is {here} on {me}, {there} on {other}" for name, here, there in differences)
            found.append(f"engines on {me} and {other} share nothing though they are alike: {what}")
    return found


def _differences(one: Fields, other: Fields) -> list[tuple[str, str, str]]:
    names = dict.fromkeys([*one, *other])
    return [
        (name, _shown(one.get(name)), _shown(other.get(name))) for name in names if one.get(name) != other.get(name)
    ]


def _shown(value: str | None) -> str:
    if value is None:
        return "not known"
    return "empty" if not value else value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
