"""Engines of two nodes that share nothing though they were meant to: the field that differs is named on both."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cbor2
import pytest
from engines.nodes import Start, node
from engines.redis_server import RedisServer, serve
from engines.scripted import eventually, group, namespace

from kvcascade.config.errors import ProtocolError
from kvcascade.daemon import alike

ONE = namespace()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


def hints(ours: Any, theirs: Any) -> list[str]:
    boot, told = alike.unpack(alike.pack(b"boot", theirs))
    assert boot == b"boot"
    return alike.hints([alike.flat(one.to_map()) for one in ours], told, "a", "b")


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("kv_dtype", "float16", "kv_dtype is bfloat16 on a, float16 on b"),
        ("groups", (group(layers=3),), "groups[0].layers is 2 on a, 3 on b"),
        ("groups", (replace(group(), block_tokens=32),), "groups[0].block_tokens is 16 on a, 32 on b"),
        ("model", "f" * 64, f"on a, {'f' * 40}... on b"),
        ("weights_epoch", "2", "weights_epoch is empty on a, 2 on b"),
        ("producer", "other", "producer is"),
        ("quantisation", "awq", "quantisation is empty on a, awq on b"),
    ],
)
def test_the_field_that_differs_is_named_with_both_sides_values(field: str, value: Any, shown: str) -> None:
    (hint,) = hints([ONE], [replace(ONE, **{field: value})])
    assert shown in hint and "a and b share nothing" in hint


def test_there_is_no_hint_where_things_are_shared_or_unlike() -> None:
    other = replace(ONE, kv_dtype="float16")
    assert hints([ONE], [ONE]) == []
    # Ours is theirs too, and what they have besides is their own.
    assert hints([ONE], [ONE, other]) == []
    assert hints([ONE, other], [ONE, other]) == []
    assert hints([], [ONE]) == [] == hints([ONE], [])
    unlike = replace(ONE, kv_dtype="float16", model="f" * 64, groups=(group(layers=7, kv_heads=2),), producer="other")
    assert hints([ONE], [unlike]) == []


def test_of_several_the_one_that_is_most_like_it_is_told() -> None:
    near, far = replace(ONE, kv_dtype="float16"), replace(ONE, kv_dtype="float16", weights_epoch="3")
    (hint,) = hints([ONE], [far, near])
    assert "weights_epoch" not in hint


def test_a_field_that_another_version_does_not_know_is_a_difference_by_name() -> None:
    theirs = {name: value for name, value in ONE.to_map().items() if name != "kv_scales"} | {"new_field": "x"}
    _, told = alike.unpack(cbor2.dumps({"boot": b"boot", "spaces": [theirs]}))
    (hint,) = alike.hints([alike.flat(ONE.to_map())], told, "a", "b")
    assert "new_field is not known on a, x on b" in hint and "kv_scales is empty on a, not known on b" in hint


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x81" * 200,
        bytes(64 << 10),
        cbor2.dumps({"boot": b"b"}),
        cbor2.dumps({"boot": b"b", "spaces": ["x"]}),
        cbor2.dumps({"boot": b"b", "spaces": [{"model": "\x1b[2J"}]}),
        cbor2.dumps({"boot": b"b", "spaces": [{}] * 17}),
    ],
)
def test_what_no_node_tells_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        alike.unpack(data)


def test_two_nodes_whose_engines_differ_in_a_field_say_so_both(
    start_daemon: Start, start_engine: Start, redis: RedisServer
) -> None:
    a, b = node(start_daemon, redis, "a"), node(start_daemon, redis, "b")
    one, other = start_engine(a), start_engine(b, weights_epoch="2")
    one.attach()
    other.attach()

    def told(daemon: Any) -> list[str]:
        found: list[str] = daemon.status()["cluster"]["fleet"]["hints"]
        return found

    (here,), (there,) = (eventually(lambda daemon=daemon: told(daemon), 90) for daemon in (a, b))
    assert "weights_epoch is empty on a, 2 on b" in here
    assert "weights_epoch is 2 on b, empty on a" in there
    # It is a hint: nothing is wrong with the nodes.
    assert a.status()["problems"] == [] == b.status()["problems"]
