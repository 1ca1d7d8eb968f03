"""Block hashes equal vLLM's, whatever way they are asked for; and every head of every block has one writer."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import ConfigError, LayoutMismatch
from kvcascade.tiers.block import (
    DEFAULT_SEED,
    HASH_BYTES,
    KEY_SCHEMES,
    TAGGED,
    UNTAGGED,
    BlockHasher,
    KVGroup,
    Lora,
    MultiModalItem,
    block_hashes,
    committers,
    default_seed,
    extra_keys,
    hash_self_test,
    head_range,
    itemsize,
    none_hash,
    probe_hashes,
)

ALGOS = tuple(HASH_BYTES)
# Made by vLLM 0.33.0's own code on Python 3.11 with cbor2 6.3.0.
VECTORS = json.loads((Path(__file__).parent.parent / "fixtures" / "hash_vectors.json").read_text())["vectors"]


def plain_hashes(
    tokens: list[int], size: int, algo: str, seed: str, keys: list[tuple[Any, ...] | None] | None = None
) -> list[bytes]:
    """The chain as the contract words it, one call a block."""

    def digest(value: object) -> bytes:
        data = cbor2.dumps(value, canonical=True) if "cbor" in algo else pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return hashlib.sha256(data).digest() if "sha" in algo else xxhash.xxh3_128_digest(data)

    parent, hashes = digest(seed), []
    for index in range(len(tokens) // size):
        key = keys[index] if keys else None
        parent = digest((parent, tuple(tokens[index * size : (index + 1) * size]), key))
        hashes.append(parent)
    return hashes


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def vector_keys(vector: dict[str, Any]) -> list[tuple[Any, ...] | None]:
    return [from_json(key) for key in vector["extra_keys"]]


def built_keys(vector: dict[str, Any], scheme: str = TAGGED) -> list[tuple[Any, ...] | None]:
    embeds = vector["prompt_embeds_f32"]
    return extra_keys(
        len(vector["token_ids"]),
        vector["block_size"],
        scheme=scheme,
        lora=Lora(**vector["lora"]) if vector["lora"] else None,
        mm=[MultiModalItem(**item) for item in vector["mm"]],
        cache_salt=vector["cache_salt"],
        prompt_embeds=None if embeds is None else np.array(embeds, np.float32),
    )


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
class TestVectorsOfVllm:
    def test_the_root_is_equal(self, vector: dict[str, Any]) -> None:
        assert none_hash(vector["effective_seed"], vector["algo"]).hex() == vector["none_hash"]
        environ = {} if vector["pythonhashseed"] is None else {"PYTHONHASHSEED": vector["pythonhashseed"]}
        assert default_seed(vector["algo"], environ) == vector["effective_seed"]

    def test_extra_keys_are_equal_in_each_block(self, vector: dict[str, Any]) -> None:
        expected = vector_keys(vector)
        built = built_keys(vector)
        if vector["lookahead"]:
            # An engine with a connector never hashes ahead; where its events do, each key is (keys, next tokens...),
            # and here no item begins in the tokens ahead but the one in the block's last place.
            size, ahead = vector["block_size"], vector["lookahead"]
            tokens = vector["token_ids"]
            built = [(key, *tokens[(index + 1) * size : (index + 1) * size + ahead]) for index, key in enumerate(built)]
        assert built == expected

    def test_hashes_are_equal_asked_for_as_a_whole(self, vector: dict[str, Any]) -> None:
        hashes = block_hashes(
            vector["token_ids"],
            vector["block_size"],
            algo=vector["algo"],
            seed=vector["effective_seed"],
            extra_keys=vector_keys(vector),
        )
        assert [each.hex() for each in hashes] == vector["block_hashes"]
        if not vector["lookahead"]:
            built = block_hashes(
                vector["token_ids"],
                vector["block_size"],
                algo=vector["algo"],
                seed=vector["effective_seed"],
                extra_keys=built_keys(vector),
            )
            assert built == hashes

    @pytest.mark.parametrize("step", [1, 7, 33])
    def test_hashes_are_equal_asked_for_as_the_request_grows(self, vector: dict[str, Any], step: int) -> None:
        hasher = BlockHasher(vector["block_size"], algo=vector["algo"], none_hash=bytes.fromhex(vector["none_hash"]))
        tokens, keys = vector["token_ids"], vector_keys(vector)
        for start in range(0, len(tokens), step):
            end = min(len(tokens), start + step)
            done = len(hasher.hashes)
            hasher.extend(tokens[start:end], keys[done : end // vector["block_size"]])
        assert [each.hex() for each in hasher.hashes] == vector["block_hashes"]


class TestChain:
    @given(
        tokens=st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300) | st.integers(0, 2**80), max_size=90),
        size=st.sampled_from([1, 2, 16, 23, 24, 30]),
        algo=st.sampled_from(ALGOS),
    )
    def test_equals_the_plain_encoding_for_ids_of_any_size(self, tokens: list[int], size: int, algo: str) -> None:
        assert block_hashes(tokens, size, algo=algo, seed="0") == plain_hashes(tokens, size, algo, "0")

    def test_no_token_can_imitate_the_separator_of_the_fast_path(self) -> None:
        # CBOR of 2^72 - 1 is a tag and the nine bytes 0xff that separate blocks; all-ones ids come as near as they can.
        for tokens in ([2**72 - 1] * 8, [2**64 - 1, 2**72 - 1, 0, 1] * 2, [2**64 - 1, 2**32 - 1] * 4):
            assert block_hashes(tokens, 4, seed="0") == plain_hashes(tokens, 4, "sha256_cbor", "0")
        keys: list[tuple[Any, ...] | None] = [(b"\xff" * 9,), (("mm", b"\x49" + b"\xff" * 9, 3),)]
        assert block_hashes([1, 2, 3, 4], 2, seed="0", extra_keys=keys) == plain_hashes(
            [1, 2, 3, 4], 2, "sha256_cbor", "0", keys
        )

    @pytest.mark.parametrize("size", [255, 256, 4096, 65536])
    def test_equals_the_plain_encoding_for_long_blocks(self, size: int) -> None:
        tokens = [token * 7919 % 128_000 for token in range(2 * size + 3)]
        assert block_hashes(tokens, size, seed="0") == plain_hashes(tokens, size, "sha256_cbor", "0")

    @given(data=st.data(), algo=st.sampled_from(ALGOS))
    def test_a_growing_request_has_the_hashes_of_the_whole_one(self, data: st.DataObject, algo: str) -> None:
        size = data.draw(st.integers(1, 9))
        pieces = data.draw(st.lists(st.lists(st.integers(0, 2**33), max_size=25), max_size=6))
        tokens = [token for piece in pieces for token in piece]
        salted = extra_keys(len(tokens), size, scheme=TAGGED, lora=Lora("a", "a"), cache_salt="s")
        hasher = BlockHasher(size, algo=algo, seed="7")
        new: list[bytes] = []
        length = 0
        for piece in pieces:
            length += len(piece)
            new += hasher.extend(piece, salted[len(new) : length // size])
        assert hasher.hashes == new == block_hashes(tokens, size, algo=algo, seed="7", extra_keys=salted)

    def test_tokens_may_come_in_any_sequence_of_whole_numbers(self) -> None:
        tokens = [5, 300, 70_000, 2**32 - 1]
        expected = block_hashes(tokens, 2, algo="sha256", seed="0")
        same: Any
        for same in (tuple(tokens), np.array(tokens), [5, *map(np.int64, tokens[1:])], iter(tokens)):
            assert block_hashes(same, 2, algo="sha256", seed="0") == expected

    def test_pickled_hashes_depend_on_values_and_not_on_which_objects_hold_them(self) -> None:
        text = "".join(["ab", "cd"])
        shared = [(("mm", text, 0), ("mm", text, 4))]
        apart = [(("mm", "ab" + text[2:], 0), ("".join(["m", "m"]), "a" + text[1:], 4))]
        assert block_hashes([1], 1, algo="sha256", seed="0", extra_keys=shared) == block_hashes(
            [1], 1, algo="sha256", seed="0", extra_keys=apart
        )

    def test_lists_of_keys_that_crossed_a_wire_hash_as_tuples(self) -> None:
        keys: Any = [["mm", "x", -3]]
        for algo in ALGOS:
            listed = block_hashes([1], 1, algo=algo, seed="0", extra_keys=[keys])
            assert listed == block_hashes([1], 1, algo=algo, seed="0", extra_keys=[(("mm", "x", -3),)])

    def test_an_earlier_token_salt_or_seed_changes_every_later_hash(self) -> None:
        # L4: a salt in the first block must keep the whole chain apart.
        tokens = list(range(64))
        base = block_hashes(tokens, 16, seed="0")
        salted = extra_keys(64, 16, scheme=TAGGED, cache_salt="tenant")
        for other in (
            block_hashes([1, *tokens[1:]], 16, seed="0"),
            block_hashes(tokens, 16, seed="1"),
            block_hashes(tokens, 16, seed="0", extra_keys=salted),
        ):
            assert not set(base) & set(other)

    @pytest.mark.parametrize("count", [0, 1, 15])
    def test_less_than_a_block_has_no_hash(self, count: int) -> None:
        assert block_hashes([1] * count, 16, seed="0") == []
        assert extra_keys(count, 16, scheme=TAGGED, lora=Lora("a", "b"), cache_salt="s") == []

    def test_exactly_a_block_has_one(self) -> None:
        assert len(block_hashes([1] * 16, 16, seed="0")) == 1


class TestBadInput:
    def test_a_negative_id_is_named_by_its_index(self) -> None:
        with pytest.raises(ValueError, match=r"token_ids\[3\] is negative: -5"):
            block_hashes([1, 2, 3, -5, 2**70], 2, seed="0")
        with pytest.raises(ValueError, match=r"token_ids\[1\]"):
            block_hashes([2**70, -1], 16, seed="0")

    def test_what_is_no_number_is_named_by_its_index(self) -> None:
        for bad in (1.0, "1", None):
            tokens: list[Any] = [1, bad]
            with pytest.raises(TypeError, match=r"token_ids\[1\] must be a whole number"):
                block_hashes(tokens, 2, seed="0")

    @pytest.mark.parametrize("size", [0, -1, True, 1.5])
    def test_a_block_size_that_is_none_is_refused_by_name(self, size: Any) -> None:
        with pytest.raises(ValueError, match="block_size"):
            block_hashes([1, 2], size, seed="0")

    def test_block_size_0_has_no_extra_keys(self) -> None:
        with pytest.raises(ValueError, match="block_size"):
            extra_keys(4, 0, scheme=TAGGED)

    def test_unknown_algorithms_and_schemes_are_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match="'md5' is not known; known are sha256, "):
            none_hash("0", "md5")
        with pytest.raises(ValueError, match=r"'tagged' is not known; known are tagged-0\.31, untagged-0\.19"):
            extra_keys(16, 16, scheme="tagged")

    def test_a_seed_that_is_a_number_is_refused(self) -> None:
        seed: Any = 0
        with pytest.raises(TypeError, match="seed must be text"):
            none_hash(seed)

    def test_a_hasher_needs_one_root_of_the_right_width(self) -> None:
        for arguments in ({}, {"seed": "0", "none_hash": bytes(32)}, {"none_hash": bytes(16)}):
            with pytest.raises(ValueError, match="none_hash"):
                BlockHasher(16, **arguments)

    def test_keys_of_another_number_or_kind_leave_the_chain_as_it_was(self) -> None:
        hasher = BlockHasher(2, seed="0")
        hasher.extend([1])
        bad: Any
        for bad, error in (([], ValueError), ([None, None], ValueError), (["lora"], TypeError), ([(1.5,)], TypeError)):
            with pytest.raises(error, match="extra_keys"):
                hasher.extend([2], bad)
        with pytest.raises(ValueError, match="negative"):
            hasher.extend([-2])
        assert hasher.extend([2]) == block_hashes([1, 2], 2, seed="0")


class TestSeed:
    def test_any_set_seed_is_taken_as_it_stands(self) -> None:
        # B1: vLLM takes even the empty seed and the word "random" literally.
        for seed in ("", "0", "42", "random"):
            assert default_seed("xxhash", {"PYTHONHASHSEED": seed}) == seed

    def test_an_unset_seed_is_a_constant_for_sha256_and_an_error_for_xxhash(self) -> None:
        assert default_seed("sha256_cbor", {}) == default_seed("sha256", {}) == DEFAULT_SEED
        for algo in ("xxhash", "xxhash_cbor"):
            with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
                default_seed(algo, {})


texts = st.text(st.characters(codec="utf-8"), max_size=3) | st.sampled_from(["lora", "mm", "cache_salt", "a", "é"])
items = st.builds(MultiModalItem, texts, st.integers(0, 40), st.integers(1, 30))
requests = st.fixed_dictionaries(
    {
        "lora": st.none() | st.builds(Lora, texts, texts),
        "mm": st.lists(items, max_size=3, unique_by=lambda item: item.offset),
        "cache_salt": st.none() | texts,
        "prompt_embeds": st.none() | st.binary(min_size=34, max_size=34),
    }
)


def normal(request: dict[str, Any]) -> tuple[Any, ...]:
    """A request of 34 tokens without what lies outside of its two full blocks of 16."""
    mm = {(item.identifier, item.offset, (min(item.offset + item.length, 32) - 1) // 16) for item in request["mm"]}
    embeds = request["prompt_embeds"]
    return (
        request["lora"],
        frozenset(item for item in mm if item[1] < 32),
        request["cache_salt"] or None,
        embeds and embeds[:32],
    )


class TestExtraKeys:
    @given(a=requests, b=requests)
    def test_unlike_requests_have_unlike_tagged_keys(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        same = extra_keys(34, 16, scheme=TAGGED, **a) == extra_keys(34, 16, scheme=TAGGED, **b)
        assert same == (normal(a) == normal(b))

    def test_unlike_kinds_with_one_value_never_collide_when_tagged(self) -> None:
        keys = [
            extra_keys(16, 16, scheme=TAGGED, lora=Lora("x", "")),
            extra_keys(16, 16, scheme=TAGGED, lora=Lora("", "x")),
            extra_keys(16, 16, scheme=TAGGED, cache_salt="x"),
            extra_keys(16, 16, scheme=TAGGED, mm=[MultiModalItem("x", 0, 1)]),
        ]
        assert len({block_hashes([0] * 16, 16, seed="0", extra_keys=each)[0] for each in keys}) == len(keys)

    def test_untagged_keys_are_bare_values_in_the_same_order(self) -> None:
        embeds = np.arange(64, dtype=np.float32).reshape(32, 2)
        keys = extra_keys(
            32,
            16,
            scheme=UNTAGGED,
            lora=Lora("sql", "/adapters/sql"),
            mm=[MultiModalItem("b", 20, 30), MultiModalItem("a", 2, 16)],
            cache_salt="tenant",
            prompt_embeds=embeds,
        )
        rows = [hashlib.sha256(embeds[start : start + 16].tobytes()).digest() for start in (0, 16)]
        assert keys == [("sql", ("a", 2), "tenant", rows[0]), ("sql", ("a", -14), ("b", 4), rows[1])]

    @given(requests)
    def test_untagged_keys_are_the_tagged_ones_without_tag_and_path(self, request: dict[str, Any]) -> None:
        def bare(key: tuple[Any, ...]) -> Any:
            return key[1:] if key[0] == "mm" else key[1]

        tagged = extra_keys(34, 16, scheme=TAGGED, **request)
        assert extra_keys(34, 16, scheme=UNTAGGED, **request) == [
            None if key is None else tuple(bare(part) for part in key) for key in tagged
        ]

    @given(items, st.integers(1, 20), st.integers(0, 80))
    def test_an_item_is_in_every_block_it_touches_and_in_no_other(
        self, item: MultiModalItem, size: int, count: int
    ) -> None:
        touched = {token // size for token in range(item.offset, item.offset + item.length)}
        keys = extra_keys(count, size, scheme=TAGGED, mm=[item])
        assert {index for index, key in enumerate(keys) if key} == {i for i in touched if i < count // size}

    def test_images_whose_digests_share_their_ends_have_unlike_keys(self) -> None:
        # B8: an identity cut to its last bits, or one without its place, mixes two pictures.
        tokens = [7] * 48
        digests = ["%064x" % ((n << 64) | 0xABCD) for n in (1, 2)] + ["%064x" % ((1 << 200) | 0xABCD)]
        chains = [
            block_hashes(tokens, 16, seed="0", extra_keys=extra_keys(48, 16, scheme=scheme, mm=mm))
            for scheme in KEY_SCHEMES
            for mm in (
                *([MultiModalItem(digest, 5, 20)] for digest in digests),
                [MultiModalItem(digests[0], 6, 20)],
                [MultiModalItem(digests[0], 5, 5), MultiModalItem(digests[1], 10, 15)],
                [MultiModalItem(digests[1], 5, 5), MultiModalItem(digests[0], 10, 15)],
            )
        ]
        for place in (0, 1, 2):
            assert len({chain[place] for chain in chains}) == len(chains)

    def test_overlapping_items_both_enter_their_blocks(self) -> None:
        video, sound = MultiModalItem("video", 0, 40), MultiModalItem("sound", 4, 2)
        assert extra_keys(32, 16, scheme=UNTAGGED, mm=[video, sound]) == [
            (("video", 0), ("sound", 4)),
            (("video", -16),),
        ]

    def test_numbers_below_their_bounds_are_refused(self) -> None:
        for item in (MultiModalItem("x", -1, 3), MultiModalItem("x", 1, -3)):
            with pytest.raises(ValueError, match="offset and length"):
                extra_keys(16, 16, scheme=TAGGED, mm=[item])
        with pytest.raises(ValueError, match="n_tokens"):
            extra_keys(-1, 16, scheme=TAGGED)


class TestProbe:
    def test_any_difference_of_algorithm_seed_or_scheme_shows(self) -> None:
        # B1: a fleet in which these differ would never hit; the probe says so at attach.
        probes = [
            tuple(probe_hashes(algo=algo, none_hash=none_hash(seed, algo), key_scheme=scheme))
            for algo in ALGOS
            for seed in ("", "0", "42", DEFAULT_SEED)
            for scheme in KEY_SCHEMES
        ]
        assert len(set(probes)) == len(probes)
        assert all(len(probe) == 2 for probe in probes)

    def test_an_engine_with_the_same_rules_sends_the_same(self) -> None:
        root = none_hash("42")
        assert probe_hashes(algo="sha256_cbor", none_hash=root, key_scheme=TAGGED) == probe_hashes(
            algo="sha256_cbor", none_hash=bytes(bytearray(root)), key_scheme=TAGGED
        )


class TestSelfTest:
    def test_passes_with_the_installed_libraries(self) -> None:
        hash_self_test()

    def test_refuses_an_encoder_that_writes_another_form(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # N2: a library that changes its encoding must stop the start, not empty the cache.
        encode = cbor2.dumps
        monkeypatch.setattr(cbor2, "dumps", lambda value, **options: encode(value, **options) + b"\xf6")
        with pytest.raises(ConfigError, match=r"self-test.*cbor2"):
            hash_self_test()

    def test_refuses_an_encoder_whose_maps_are_not_canonical(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encode = cbor2.dumps
        monkeypatch.setattr(cbor2, "dumps", lambda value, canonical=False: encode(value))
        with pytest.raises(ConfigError, match="canonical"):
            hash_self_test()


class TestShape:
    def test_a_block_is_its_heads_and_a_head_its_layers_planes_tokens_and_dims(self) -> None:
        group = KVGroup(block_tokens=16, layers=30, kv_heads=3, head_dim=64)
        assert group.planes == 2
        assert group.head_bytes(2) == 30 * 2 * 16 * 64 * 2
        assert group.block_bytes(2) == 3 * group.head_bytes(2)
        latent = KVGroup(block_tokens=64, layers=61, kv_heads=1, head_dim=576, kind="mla")
        assert (latent.planes, latent.block_bytes(2)) == (1, 61 * 64 * 576 * 2)

    def test_fields_out_of_bounds_are_named(self) -> None:
        good: dict[str, Any] = {"block_tokens": 16, "layers": 2, "kv_heads": 2, "head_dim": 8, "kind": "attention"}
        bad: Any
        for name in ("block_tokens", "layers", "kv_heads", "head_dim"):
            for bad in (0, -1, 1 << 40, True, 1.0, "2", None):
                with pytest.raises(ValueError, match=name):
                    KVGroup(**{**good, name: bad})
        for bad in ("", "mamba", None, []):
            with pytest.raises(ValueError, match="kind"):
                KVGroup(**{**good, "kind": bad})
        for kind in ("mla", "pages"):
            with pytest.raises(ValueError, match=f"kv_heads of kind {kind}"):
                KVGroup(**{**good, "kind": kind})

    def test_pages_are_bytes_of_which_only_the_number_is_known(self) -> None:
        pages = KVGroup(block_tokens=1056, layers=20485, kv_heads=1, head_dim=4096, kind="pages")
        assert (pages.planes, pages.block_bytes(1)) == (1, 20485 * 4096)
        assert (committers(1, 2, 1, "pages"), head_range(1, 2, 1, "pages")) == ((1,), (0, 1))
        with pytest.raises(ValueError, match="layers"):
            KVGroup(block_tokens=16, layers=1 << 19, kv_heads=1, head_dim=4096, kind="pages")

    def test_dtypes_that_slots_cannot_hold_are_refused_by_name(self) -> None:
        assert (itemsize("float32"), itemsize("bfloat16"), itemsize("float8_e4m3fn")) == (4, 2, 1)
        with pytest.raises(LayoutMismatch, match="'fp8'"):
            itemsize("fp8")


ranked = st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda pair: (pair[0], pair[0] * pair[1]))
splits = st.tuples(ranked, st.booleans()).map(lambda drawn: drawn[0] if drawn[1] else drawn[0][::-1])


class TestRanks:
    @given(splits, st.integers(0, 1000))
    def test_every_head_of_every_block_is_written_exactly_once(self, split: tuple[int, int], index: int) -> None:
        heads, ranks = split
        written: list[int] = []
        for rank in committers(heads, ranks, index, "attention"):
            first, count = head_range(heads, ranks, rank, "attention")
            written += range(first, first + count)
        assert written == list(range(heads))

    @given(st.integers(1, 64), st.integers(0, 1000))
    def test_the_latent_of_every_block_is_written_exactly_once(self, ranks: int, index: int) -> None:
        assert committers(1, ranks, index, "mla") == (index % ranks,)
        assert all(head_range(1, ranks, rank, "mla") == (0, 1) for rank in range(ranks))

    @given(splits)
    def test_replicas_take_turns(self, split: tuple[int, int]) -> None:
        heads, ranks = split
        turns = max(1, ranks // heads)
        writers = [rank for index in range(turns) for rank in committers(heads, ranks, index, "attention")]
        assert sorted(writers) == list(range(ranks))

    def test_ranges_follow_the_engines_numbering(self) -> None:
        assert [head_range(8, 2, rank, "attention") for rank in range(2)] == [(0, 4), (4, 4)]
        assert [head_range(2, 8, rank, "attention")[0] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_splits_that_do_not_divide_and_ranks_that_are_none_are_refused(self) -> None:
        for heads, ranks in ((8, 3), (3, 8), (8, 0), (0, 2), (4, -1)):
            with pytest.raises(LayoutMismatch, match=str(ranks)):
                committers(heads, ranks, 0, "attention")
        for rank in (-1, 2):
            with pytest.raises(LayoutMismatch, match="is not one of 2 ranks"):
                head_range(8, 2, rank, "attention")
        with pytest.raises(LayoutMismatch, match="'mamba'"):
            head_range(8, 2, 0, "mamba")


def test_hashing_cbor_loads_neither_numpy_nor_torch_nor_pickle() -> None:
    program = (
        "import sys; from kvcascade.tiers.block import block_hashes; block_hashes(range(64), 16, seed='0');"
        "print([name for name in ('numpy', 'torch', 'pickle', 'xxhash') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
