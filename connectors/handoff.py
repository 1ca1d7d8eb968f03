"""What a request takes from the engine that computed its prompt to the one that decodes: values for vLLM's field
`kv_transfer_params`, which clients and proxies carry as JSON.

    to the prefill engine    {"do_remote_decode": true}, with max_tokens 1, as other connectors' proxies send it
    from it, in the answer   {"kvcascade_handoff": {"version", "ticket", "namespace", "tokens", "last"}}
    to the decode engine     the same, as it came

The ticket says to the decode engine's daemon where the blocks lie; the rest lets the decode engine see that they are
those of its own prompt before it waits for them. It carries no block ids and no shape of the engine: blocks are the
daemons', and so prefill and decode may differ in their tensor parallel size.

Rule: whoever sends a request may have made these values up. What is not understood is refused by the name of the
field, and the prompt is computed.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvcascade.config.errors import ProtocolError, Refused
from kvcascade.tiers.block import BlockHash

PARAMETERS: Final = "kv_transfer_params"
WISH: Final = "kvcascade"
HANDOFF: Final = "kvcascade_handoff"
REFUSED: Final = "kvcascade_refused"
ASKED: Final = "do_remote_decode"
VERSION: Final = 1
MOST_TOKENS: Final = 1 << 32
MOST_TEXT: Final = 2048
MOST_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class HandOff:
    """`ticket`: the daemon's, opaque. `namespace`: the fingerprint of what the blocks are kept under.

    `tokens`: how many leading tokens of the prompt are handed off. `last`: the hash of the last of their blocks in the
    first KV group, which stands for all of them.
    """

    ticket: bytes
    namespace: bytes
    tokens: int
    last: bytes

    def to_parameters(self) -> dict[str, Any]:
        return {
            HANDOFF: {
                "version": VERSION,
                "ticket": b64encode(self.ticket).decode(),
                "namespace": self.namespace.hex(),
                "tokens": self.tokens,
                "last": self.last.hex(),
            }
        }

    @classmethod
    def from_parameters(cls, value: object) -> Self:
        """ProtocolError for what is no hand-off of this version."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"{HANDOFF}: must be a map, got {_shown(value)}")
        version = value.get("version")
        if type(version) is not int or version != VERSION:
            raise ProtocolError(f"{HANDOFF}.version: must be {VERSION}, got {_shown(version)}")
        tokens = value.get("tokens")
        if type(tokens) is not int or not 0 < tokens < MOST_TOKENS:
            raise ProtocolError(f"{HANDOFF}.tokens: must be a number of tokens, got {_shown(tokens)}")
        try:
            ticket = b64decode(_text(value, "ticket"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ProtocolError(f"{HANDOFF}.ticket: {error}") from None
        return cls(ticket, _hex(value, "namespace"), tokens, _hex(value, "last"))

    def prove(self, namespace: bytes, hashes: Sequence[BlockHash], block_tokens: int) -> None:
        """Raises Refused where these are not the blocks of the prompt with `hashes` in `namespace` (b"": not known)."""
        if namespace and self.namespace != namespace:
            raise Refused(
                f"{HANDOFF}.namespace: {self.namespace.hex()[:16]} is not this engine's, {namespace.hex()[:16]}: "
                "another model, KV dtype, block size, hash seed or weights version"
            )
        blocks = self.tokens // block_tokens
        if not 0 < blocks <= len(hashes):
            raise Refused(
                f"{HANDOFF}.tokens: {self.tokens} tokens are handed off, the prompt has {len(hashes)} whole blocks of "
                f"{block_tokens}"
            )
        if hashes[blocks - 1] != self.last:
            raise Refused(f"{HANDOFF}.last: the first {self.tokens} tokens are of another prompt")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request's parameters ask for. `refused` names what of them was not understood."""

    reads: bool = True
    writes: bool = True
    hands_off: bool = False
    handoff: HandOff | None = None
    refused: str = ""

    @classmethod
    def of(cls, parameters: object) -> Self:
        """Never raises. Whoever wishes something unknown is neither loaded nor stored; any other part is left out."""
        if parameters is None:
            return cls()
        if not isinstance(parameters, Mapping):
            return cls(refused=f"{PARAMETERS}: must be a map, got {_shown(parameters)}")
        wish = parameters.get(WISH, "on")
        if not isinstance(wish, str) or wish not in ("on", "off", "read", "write"):
            refused = f"{PARAMETERS}.{WISH}: must be on, off, read or write, got {_shown(wish)}"
            return cls(reads=False, writes=False, refused=refused)
        reads, writes = wish in ("on", "read"), wish in ("on", "write")
        asked = parameters.get(ASKED)
        if asked is not None and type(asked) is not bool:
            return cls(reads, writes, refused=f"{PARAMETERS}.{ASKED}: must be true or false, got {_shown(asked)}")
        try:
            value = parameters.get(HANDOFF)
            return cls(reads, writes, bool(asked), None if value is None else HandOff.from_parameters(value))
        except ProtocolError as error:
            return cls(reads, writes, bool(asked), refused=str(error))


def _shown(value: object) -> str:
    """A value for a message; by its type alone where showing it could take long, or fail: it may be nested at will."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:MOST_SHOWN])
    if isinstance(value, int) and abs(value) < 1 << 64:
        return repr(value)
    return f"a value of type {type(value).__name__:.40}"


def _text(value: Mapping[Any, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= MOST_TEXT:
        raise ProtocolError(f"{HANDOFF}.{name}: must be a text of at most {MOST_TEXT} characters, got {_shown(text)}")
    return text


def _hex(value: Mapping[Any, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(_text(value, name))
    except ValueError as error:
        raise ProtocolError(f"{HANDOFF}.{name}: {error}") from None
