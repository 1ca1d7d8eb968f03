"""What travels with a request from prefill to decode: whoever sends it may have made it up."""

import json
from typing import Any

import pytest

from kvcascade.config.errors import Refused
from kvcascade.connectors.base import lone_prefill
from kvcascade.connectors.handoff import HANDOFF, HandOff, Wishes
from kvcascade.tiers.block import BlockHash

NAMESPACE, TICKET = bytes(range(32)), b"a daemon's ticket"
HASHES = [BlockHash(bytes([number]) * 32) for number in range(6)]
GIVEN = HandOff(TICKET, NAMESPACE, 4 * 16, HASHES[3])


def parameters(**changed: Any) -> dict[str, Any]:
    """As they come, through a proxy's JSON."""
    given: dict[str, Any] = json.loads(json.dumps(GIVEN.to_parameters()))
    given[HANDOFF] |= changed
    return given


def test_a_hand_off_arrives_as_it_was_given() -> None:
    wishes = Wishes.of({"do_remote_prefill": True, "remote_host": None} | parameters())
    assert wishes == Wishes(handoff=GIVEN)
    GIVEN.prove(NAMESPACE, HASHES, 16)
    GIVEN.prove(b"", HASHES, 16)
    assert len(json.dumps(parameters())) < 400


@pytest.mark.parametrize(
    ("asked", "wishes"),
    [
        (None, Wishes()),
        ({}, Wishes()),
        ({"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}, Wishes(hands_off=True)),
        ({"do_remote_decode": False}, Wishes()),
        ({"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}, Wishes()),  # another connector's
        ({"kvcascade": "read"}, Wishes(writes=False)),
        ({"kvcascade": "write", "do_remote_decode": True}, Wishes(reads=False, hands_off=True)),
        ({"kvcascade": "off"}, Wishes(reads=False, writes=False)),
    ],
)
def test_what_a_request_asks_for_is_understood(asked: Any, wishes: Wishes) -> None:
    assert Wishes.of(asked) == wishes


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (["do_remote_decode"], "kv_transfer_params"),
        ("on", "kv_transfer_params"),
        ({"do_remote_decode": "yes"}, "kv_transfer_params.do_remote_decode"),
        ({"do_remote_decode": [1]}, "kv_transfer_params.do_remote_decode"),
        ({HANDOFF: "x" * 10_000}, HANDOFF),
        ({HANDOFF: [1]}, HANDOFF),
        (parameters(version=2), f"{HANDOFF}.version"),
        (parameters(version=None), f"{HANDOFF}.version"),
        (parameters(ticket=""), f"{HANDOFF}.ticket"),
        (parameters(ticket="not base64!"), f"{HANDOFF}.ticket"),
        (parameters(ticket="ä"), f"{HANDOFF}.ticket"),
        (parameters(ticket="A" * 5000), f"{HANDOFF}.ticket"),
        (parameters(ticket=7), f"{HANDOFF}.ticket"),
        (parameters(namespace="0x"), f"{HANDOFF}.namespace"),
        (parameters(namespace=None), f"{HANDOFF}.namespace"),
        (parameters(last="zz"), f"{HANDOFF}.last"),
        (parameters(tokens=0), f"{HANDOFF}.tokens"),
        (parameters(tokens=True), f"{HANDOFF}.tokens"),
        (parameters(tokens=1.5), f"{HANDOFF}.tokens"),
        (parameters(tokens=1 << 70), f"{HANDOFF}.tokens"),
    ],
)
def test_what_is_not_understood_is_refused_by_the_fields_name_and_nothing_else(asked: Any, field: str) -> None:
    found = Wishes.of(asked)
    assert found.refused.startswith(f"{field}: ") and len(found.refused) < 200
    assert found == Wishes(refused=found.refused)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD = {
    "huge": 10**5000,
    "deep": _nested(100_000),
    "long": [0] * 100_000,
    "map": {1: 2},
    "nan": float("nan"),
    "bytes": b"\xff",
    "surrogates": "\ud800" * 99,
}


@pytest.mark.parametrize("odd", list(ODD.values()), ids=list(ODD))
def test_nothing_that_a_request_says_raises_in_the_engine(odd: Any) -> None:
    # An error in a scheduler ends the engine for all of its requests.
    told = [Wishes.of(odd), Wishes.of({"kvcascade": odd}), Wishes.of({"do_remote_decode": odd})]
    told += [Wishes.of({HANDOFF: odd})] + [Wishes.of(parameters(**{name: odd})) for name in parameters()[HANDOFF]]
    for one in told:
        assert (one.refused or one == Wishes()) and len(one.refused) < 400 and one.handoff is None


def test_a_wish_that_is_not_understood_is_taken_for_the_strictest() -> None:
    found = Wishes.of({"kvcascade": "Off"} | parameters())
    assert found.refused.startswith("kv_transfer_params.kvcascade: ")
    assert (found.reads, found.writes, found.handoff) == (False, False, None)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (HandOff(TICKET, bytes(32), 64, HASHES[3]), "namespace"),
        (HandOff(TICKET, NAMESPACE, 64, HASHES[2]), "last"),
        (HandOff(TICKET, NAMESPACE, 7 * 16, HASHES[3]), "tokens"),
        (HandOff(TICKET, NAMESPACE, 15, HASHES[0]), "tokens"),
    ],
)
def test_a_hand_off_of_another_prompt_or_model_is_refused(given: HandOff, field: str) -> None:
    with pytest.raises(Refused, match=rf"^{HANDOFF}\.{field}: "):
        given.prove(NAMESPACE, HASHES, 16)


@pytest.mark.parametrize(
    ("scheduled", "whose"),
    [
        ({}, None),
        ({"a": 255}, None),
        ({"a": 256}, "a"),
        ({"d": 1, "a": 500, "e": 1}, "a"),
        ({f"d{number}": 1 for number in range(300)}, None),
        ({"a": 256, "b": 256}, None),
        ({"a": 256} | {f"d{number}": 1 for number in range(28)}, "a"),
        ({"a": 256} | {f"d{number}": 1 for number in range(29)}, None),
    ],
)
def test_only_a_step_that_does_little_else_says_how_fast_prompts_are_computed(
    scheduled: dict[str, int], whose: str | None
) -> None:
    assert lone_prefill(scheduled, sum(scheduled.values())) == whose
