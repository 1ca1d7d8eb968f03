"""Namespaces are alike only if every field is; what is not recognised is refused by name."""

import json
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import ConfigError, ProtocolError
from kvcascade.tiers.block import HASH_BYTES, ITEMSIZES, KEY_SCHEMES, KVGroup, none_hash
from kvcascade.tiers.namespace import MAX_TEXT, SLOT_FORMAT, Namespace, model_digest

SMOL = Namespace(
    model="a" * 64,
    weights_epoch="",
    kv_dtype="bfloat16",
    groups=(KVGroup(block_tokens=16, layers=30, kv_heads=3, head_dim=64),),
    kv_scales="",
    rope="",
    max_model_len=0,
    quantisation="",
    producer="transformers",
    hash_algo="sha256_cbor",
    key_scheme="tagged-0.31",
    none_hash=none_hash("0"),
)

words = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8)
attention = st.builds(KVGroup, *[st.integers(1, 64)] * 4)
latent = st.builds(KVGroup, st.integers(1, 64), st.integers(1, 64), st.just(1), st.integers(1, 64), st.just("mla"))
values = {
    "model": words,
    "weights_epoch": words,
    "kv_dtype": st.sampled_from(sorted(ITEMSIZES)),
    "groups": st.lists(attention | latent, min_size=1, max_size=3).map(tuple),
    "kv_scales": st.just("") | st.binary(min_size=16, max_size=32).map(bytes.hex),
    "rope": words,
    "max_model_len": st.integers(0, 2**31 - 1),
    "quantisation": words,
    "producer": words,
    "key_scheme": st.sampled_from(KEY_SCHEMES),
    "slot_format": st.integers(1, 9),
}


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    algo = draw(st.sampled_from(sorted(HASH_BYTES)))
    drawn: dict[str, Any] = {name: draw(strategy) for name, strategy in values.items()}
    return Namespace(**drawn, hash_algo=algo, none_hash=none_hash(draw(words), algo))


class TestFingerprint:
    @given(a=namespaces(), b=namespaces())
    def test_is_equal_only_if_all_fields_are(self, a: Namespace, b: Namespace) -> None:
        assert (a.fingerprint() == b.fingerprint()) == (a == b)
        assert len(a.fingerprint()) == 32

    @given(namespaces(), st.data())
    def test_changes_with_any_one_field(self, namespace: Namespace, data: st.DataObject) -> None:
        # B5: another revision, dtype, shape or producer under one name must not share.
        name = data.draw(st.sampled_from([field.name for field in fields(Namespace)]))
        if name == "hash_algo":
            same_width = [algo for algo, width in HASH_BYTES.items() if width == HASH_BYTES[namespace.hash_algo]]
            other = replace(namespace, hash_algo=next(algo for algo in same_width if algo != namespace.hash_algo))
        elif name == "none_hash":
            other = replace(namespace, none_hash=namespace.none_hash[1:] + bytes([namespace.none_hash[0] ^ 1]))
        else:
            value = data.draw(values[name].filter(lambda value: value != getattr(namespace, name)))
            change: dict[str, Any] = {name: value}
            other = replace(namespace, **change)
        assert other.fingerprint() != namespace.fingerprint()

    @given(namespaces(), st.sampled_from(["block_tokens", "layers", "kv_heads", "head_dim"]))
    def test_changes_with_any_number_of_a_group(self, namespace: Namespace, name: str) -> None:
        first = replace(namespace.groups[0], kind="attention")
        before = replace(namespace, groups=(first, *namespace.groups[1:]))
        after = replace(namespace, groups=(replace(first, **{name: getattr(first, name) + 1}), *namespace.groups[1:]))
        assert before.fingerprint() != after.fingerprint()

    def test_stays_what_stored_blocks_were_named_with(self) -> None:
        # A change here makes every disk directory cold: it needs a new slot format, not a new constant.
        assert SMOL.fingerprint().hex() == "8c4225c2ddb47ad3d663db1faf4e1c01d31a02b63046c0db570e3e3c40540e72"

    def test_text_cannot_move_between_fields(self) -> None:
        assert (
            replace(SMOL, rope="ab", quantisation="").fingerprint()
            != replace(SMOL, rope="a", quantisation="b").fingerprint()
            != replace(SMOL, rope="", quantisation="ab").fingerprint()
        )


class TestMap:
    @given(namespaces().map(lambda namespace: replace(namespace, slot_format=SLOT_FORMAT)))
    def test_survives_cbor_and_json(self, namespace: Namespace) -> None:
        assert Namespace.from_map(cbor2.loads(cbor2.dumps(namespace.to_map(), canonical=True))) == namespace
        assert Namespace.from_map(json.loads(json.dumps(namespace.to_map()))) == namespace

    @pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
    def test_a_missing_field_is_named(self, name: str) -> None:
        described = SMOL.to_map()
        del described[name]
        with pytest.raises(ProtocolError, match=f"field {name} is missing"):
            Namespace.from_map(described)

    def test_an_unknown_field_is_named(self) -> None:
        with pytest.raises(ProtocolError, match="field 'tp_size' is not known"):
            Namespace.from_map({**SMOL.to_map(), "tp_size": 2})
        described = SMOL.to_map()
        described["groups"][0]["window"] = 128
        with pytest.raises(ProtocolError, match=r"groups\[0\] field 'window' is not known"):
            Namespace.from_map(described)

    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            ("model", ""),
            ("model", "x" * (MAX_TEXT + 1)),
            ("model", "line\nbreak"),
            ("model", "\x1b[31m"),
            ("model", "\ud800"),
            ("model", b"bytes"),
            ("weights_epoch", 1),
            ("producer", ""),
            ("kv_dtype", "fp8"),
            ("kv_dtype", []),
            ("kv_scales", "dynamic"),
            ("kv_scales", "ABCDEF0123456789"),
            ("rope", None),
            ("max_model_len", -1),
            ("max_model_len", 1 << 31),
            ("max_model_len", True),
            ("max_model_len", 1.0),
            ("hash_algo", "sha1"),
            ("hash_algo", {}),
            ("key_scheme", "untagged"),
            ("none_hash", "ab"),
            ("none_hash", bytes(32)),
            ("none_hash", "AB" * 32),
            ("none_hash", "a" * 63),
            ("none_hash", "00 " * 21 + "0"),
            ("none_hash", "0" * 1000),
            ("slot_format", SLOT_FORMAT + 1),
            ("slot_format", True),
            ("slot_format", "1"),
            ("groups", []),
            ("groups", {}),
            ("groups", "attention"),
            ("groups", [SMOL.to_map()["groups"][0]] * 65),
            ("groups", [[]]),
            ("groups", [{**SMOL.to_map()["groups"][0], "layers": 0}]),
            ("groups", [{**SMOL.to_map()["groups"][0], "kind": "mamba"}]),
            ("groups", [{**SMOL.to_map()["groups"][0], "layers": 4096, "block_tokens": 65536}]),
        ],
    )
    def test_a_field_out_of_bounds_is_named(self, name: str, bad: object) -> None:
        with pytest.raises(ProtocolError, match=name):
            Namespace.from_map({**SMOL.to_map(), name: bad})

    def test_a_field_that_is_much_too_long_makes_a_short_message(self) -> None:
        with pytest.raises(ProtocolError) as refused:
            Namespace.from_map({**SMOL.to_map(), "rope": "x" * 1_000_000})
        assert len(str(refused.value)) < 300

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from([*SMOL.to_map(), "kind", "layers"]), inner, max_size=4)
            ),
            max_leaves=10,
        ),
        st.sampled_from([None, *SMOL.to_map()]),
    )
    def test_anything_else_is_refused_and_nothing_else_is_raised(self, junk: Any, name: str | None) -> None:
        described = junk if name is None else {**SMOL.to_map(), name: junk}
        try:
            accepted = Namespace.from_map(described)
        except ProtocolError:
            return
        assert Namespace.from_map(accepted.to_map()) == accepted

    def test_the_same_bounds_hold_when_built_here(self) -> None:
        for name, bad in (
            ("none_hash", bytes(16)),
            ("groups", ()),
            ("groups", (1,)),
            ("model", ""),
            ("slot_format", 0),
        ):
            change: dict[str, Any] = {name: bad}
            with pytest.raises(ValueError, match=name):
                replace(SMOL, **change)

    def test_block_bytes_follow_the_groups_and_the_dtype(self) -> None:
        assert SMOL.block_bytes(0) == 30 * 2 * 16 * 64 * 3 * 2
        assert replace(SMOL, kv_dtype="float8_e5m2").block_bytes(0) * 2 == SMOL.block_bytes(0)


def safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return path


class TestModelDigest:
    config: dict[str, Any] = {"hidden_size": 576, "rope_theta": 1e5, "text_config": {"layers": 30}}  # noqa: RUF012

    def test_is_the_same_wherever_the_files_lie(self, tmp_path: Path) -> None:
        one = [safetensors(tmp_path / "a" / f"model-{n}.safetensors", {"w": bytes([n]) * 5000}) for n in (1, 2)]
        two = [safetensors(tmp_path / "b" / f"other-{n}", {"w": bytes([n]) * 5000}) for n in (2, 1)]
        moved = {**self.config, "_name_or_path": "/models/b", "transformers_version": "9.9"}
        moved["text_config"] = {"_name_or_path": "/models/b", **self.config["text_config"]}
        assert model_digest(self.config, one) == model_digest(moved, two)

    def test_tells_fine_tunes_of_one_base_apart(self, tmp_path: Path) -> None:
        # B5: one served name, equal config, header and sizes; only the weights differ.
        base = {"embed": b"\1" * 9000, "head": b"\2" * 9000}
        tuned = {**base, "head": b"\3" * 9000}
        digests = {
            model_digest(self.config, [safetensors(tmp_path / f"{n}", tensors)])
            for n, tensors in enumerate((base, tuned, {"embed": base["head"], "head": base["embed"]}))
        }
        assert len(digests) == 3

    def test_tells_other_files_apart_by_size_ends_and_samples(self, tmp_path: Path) -> None:
        body = bytearray(3 << 20)
        variants = [bytes(body), bytes(body) + b"\0", b"G" + bytes(body[1:]), bytes(body[:-1]) + b"G"]
        half = len(body) // 2
        variants.append(bytes(body[:half]) + b"G" * 4096 + bytes(body[half + 4096 :]))
        digests = set()
        for variant in variants:
            path = tmp_path / "model.gguf"
            path.write_bytes(variant)
            digests.add(model_digest(self.config, [path]))
        assert len(digests) == len(variants)

    def test_covers_the_config(self) -> None:
        other = {**self.config, "rope_theta": 1e6}
        nested = {**self.config, "text_config": {"layers": 31}}
        assert len({model_digest(config, []) for config in (self.config, other, nested)}) == 3

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\1",
            struct.pack("<Q", 1 << 60) + b"x" * 100,
            struct.pack("<Q", 5) + b"{nope",
            struct.pack("<Q", 2) + b"[]",
            struct.pack("<Q", 4) + b"null",
            struct.pack("<Q", 46) + b'{"w": {"data_offsets": [-99999999999, -1]}}   ',
            struct.pack("<Q", 46) + b'{"w": {"data_offsets": [9e99, 1, 2, 3]}}      ',
            struct.pack("<Q", 46) + b'{"w": {"data_offsets": [0.5, 1.5]}}           ',
            struct.pack("<Q", 46) + b'{"w": {"data_offsets": [5, 2]}}               ',
        ],
    )
    def test_a_file_of_any_content_has_a_digest(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "weights"
        path.write_bytes(data)
        assert len(model_digest(self.config, [path])) == 64

    def test_what_cannot_be_digested_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"weight file .*missing"):
            model_digest(self.config, [tmp_path / "missing"])
        with pytest.raises(ConfigError, match="model config"):
            model_digest({"dtype": object()}, [])
