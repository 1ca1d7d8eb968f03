"""Engine tensors to canonical slots and back: every known layout byte for byte, every other one refused by name."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcascade.config.errors import LayoutMismatch
from kvcascade.connectors import layout as layout_module
from kvcascade.connectors.layout import (
    SPLIT_ORDERS,
    VLLM_ORDERS,
    Gatherer,
    KVLayout,
    LayoutId,
    PoolSlots,
    Slots,
    describe_paged,
    describe_sequence,
    empty_layers,
    load_sequence,
    store_sequence,
)
from kvcascade.tiers.block import KVGroup, head_range

PAGE = 4096
BLOCKS = 7
GROUP = KVGroup(block_tokens=4, layers=3, kv_heads=8, head_dim=16, kind="attention")
LATENT = KVGroup(block_tokens=4, layers=3, kv_heads=1, head_dim=24, kind="mla")
UNTOUCHED = 0xEE


def pattern(group: KVGroup, block: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """A block in canonical order, [H, L, K, N, D], whose every element says where it belongs."""
    shape = (group.kv_heads, group.layers, group.planes, group.block_tokens, group.head_dim)
    elements = int(np.prod(shape))
    return (torch.arange(elements) * 7 + block * 1009).to(torch.int16).view(dtype).reshape(shape)


def canonical_bytes(group: KVGroup, block: int) -> NDArray[np.uint8]:
    return pattern(group, block).contiguous().view(torch.uint8).reshape(-1).numpy()


def in_memory_order(order: str, sizes: dict[str, int], dtype: torch.dtype, padding: int) -> torch.Tensor:
    """A zeroed tensor whose axes are named by `order`, with `padding` elements more from block to block."""
    shape = [sizes[name] for name in order]
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
        if order[axis] == "B":
            strides[axis] += padding
    storage = torch.zeros(strides[0] * shape[0] + padding, dtype=dtype)
    return storage.as_strided(shape, strides)


def paged(
    order: str,
    axes: str,
    group: KVGroup,
    *,
    ranks: int = 1,
    rank: int = 0,
    blocks: int = BLOCKS,
    padding: int = 0,
    apart: bool = False,
    fill: bool = True,
) -> list[torch.Tensor]:
    """An engine's tensors, one a layer, of axes `axes`, in memory as `order` says; block b holds pattern b."""
    first, heads = head_range(group.kv_heads, ranks, rank, group.kind)
    sizes = {
        "L": group.layers,
        "B": blocks,
        "H": heads,
        "N": group.block_tokens,
        "K": group.planes,
        "D": group.head_dim,
        "C": group.planes * group.head_dim,
    }
    whole = in_memory_order(order, sizes, torch.bfloat16, padding)
    layers = list(whole.permute([order.index(name) for name in "L" + axes]))
    if apart:
        layers = [layer.clone(memory_format=torch.preserve_format) for layer in layers]
    if fill:
        for block, layer in product(range(blocks), range(group.layers)):
            source = pattern(group, block, torch.bfloat16)[first : first + heads, layer]  # [H, K, N, D]
            page = layers[layer].select(axes.index("B"), block)
            rest = axes.replace("B", "")
            if "C" in axes:
                source = source.permute(0, 2, 1, 3).reshape(heads, group.block_tokens, -1)  # [H, N, C]
                page.copy_(source if "H" in axes else source[0])
            else:
                page.copy_(source.permute(["HKND".index(name) for name in rest]))
    return layers


def new_slots(group: KVGroup, count: int) -> tuple[NDArray[np.uint8], PoolSlots]:
    """A pool whose slots are page-aligned and longer than a block, in no order."""
    stride = -(-group.block_bytes(2) // PAGE) * PAGE
    pool = np.full(stride * (count + 2), UNTOUCHED, np.uint8)
    pages = (np.random.default_rng(count).permutation(count + 2)[:count] * (stride >> 12)).astype(np.uint32)
    return pool, PoolSlots(pool, pages)


def as_views(slots: PoolSlots, group: KVGroup) -> list[NDArray[np.uint8]]:
    assert isinstance(slots.pool, np.ndarray)
    return [slots.pool[page << 12 :][: group.block_bytes(2)] for page in slots.pages.tolist()]


def gatherer(tensors: list[torch.Tensor], group: KVGroup, axes: str, **place: int) -> Gatherer:
    layout = describe_paged(
        tensors, group, "bfloat16", axes=axes, ranks=place.get("ranks", 1), rank=place.get("rank", 0)
    )
    return Gatherer(layout, tensors, group, **place)


LAYOUTS = [
    *((order, "BHNC", GROUP) for order in VLLM_ORDERS),
    *((order, axes, GROUP) for order in SPLIT_ORDERS for axes in ("KBNHD", "BKNHD", "BKHND")),
    *((order, "BNC", LATENT) for order in ("LBNC", "BLNC")),
    *((order, "BHNC", LATENT) for order in ("LBHNC", "BLHNC")),
]


@pytest.mark.parametrize(("order", "axes", "group"), LAYOUTS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("padding", [0, 48], ids=["", "padded"])
@pytest.mark.parametrize("staging_bytes", [None, 1, 1 << 20], ids=["direct", "staged singly", "staged"])
def test_every_known_layout_is_byte_exact_both_ways(
    order: str, axes: str, group: KVGroup, padding: int, staging_bytes: int | None
) -> None:
    # Fault J1: a known pattern for each (token, layer, head, k/v).
    tensors = paged(order, axes, group, padding=padding)
    layout = describe_paged(tensors, group, "bfloat16", axes=axes)
    assert layout.layout == order or group is LATENT
    ids = [5, 0, 6, 2]
    pool, slots = new_slots(group, len(ids))
    engine = Gatherer(layout, tensors, group, staging_bytes=staging_bytes)
    engine.store(ids, slots)
    for block, view in zip(ids, as_views(slots, group), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(group, block))
    touched = sum(int((view != UNTOUCHED).sum()) for view in as_views(slots, group))
    assert int((pool != UNTOUCHED).sum()) == touched

    empty = paged(order, axes, group, padding=padding, fill=False)
    Gatherer(describe_paged(empty, group, "bfloat16", axes=axes), empty, group, staging_bytes=staging_bytes).load(
        ids, slots
    )
    for mine, theirs in zip(empty, tensors, strict=True):
        for block in range(BLOCKS):
            page = mine.select(axes.index("B"), block).view(torch.int16)
            assert torch.equal(page, theirs.select(axes.index("B"), block).view(torch.int16)) == (block in ids)


@pytest.mark.parametrize(("order", "axes", "group"), LAYOUTS, ids=lambda value: value if isinstance(value, str) else "")
def test_blocks_are_copied_aside_into_the_memory_of_earlier_ones(order: str, axes: str, group: KVGroup) -> None:
    engine = gatherer(paged(order, axes, group), group, axes)
    pool, slots = new_slots(group, 3)
    before = engine.gather([5, 6, 2, 0])
    aside = engine.gather([4, 1, 3], before)
    assert (len(aside), aside.data_ptr()) == (3, before.data_ptr())
    engine.put(aside, slots)
    for block, view in zip([4, 1, 3], as_views(slots, group), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(group, block))
    assert (pool == UNTOUCHED).sum() >= len(pool) - 3 * group.block_bytes(2)


def test_no_copy_of_a_device_reaches_from_one_registration_of_host_memory_into_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots that lie side by side are one copy; where it crosses two registrations, CUDA refuses it."""
    stride = 2 * PAGE
    monkeypatch.setattr(layout_module, "REGISTER_CHUNK", 4 * stride)
    pool = np.zeros(12 * stride, np.uint8)
    places = [1, 2, 3, 4, 5, 6, 7, 8, 10, 0]
    runs = list(layout_module._torch_runs(PoolSlots(pool, np.array(places, np.uint32) * (stride >> 12)), stride))
    begin = torch.from_numpy(pool).data_ptr()
    lain = [((run.data_ptr() - begin) // stride, len(run)) for _, run in runs]
    assert lain == [(1, 3), (4, 4), (8, 1), (10, 1), (0, 1)]
    assert [first for first, _ in runs] == [0, 3, 7, 8, 9]
    # Views do not say to which pool they belong.
    views = [pool[place * stride :][:stride] for place in places]
    assert [len(run) for _, run in layout_module._torch_runs(views, stride)] == [1] * len(places)


def test_some_of_what_was_copied_aside_goes_to_slots() -> None:
    engine = gatherer(paged("LBNHC", "BHNC", GROUP), GROUP, "BHNC")
    pool, slots = new_slots(GROUP, 4)
    engine.put(engine.gather([5, 6, 2, 0, 4, 3]), slots, [0, 1, 3, 5])
    for block, view in zip([5, 6, 0, 3], as_views(slots, GROUP), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))
    assert (pool == UNTOUCHED).sum() >= len(pool) - 4 * GROUP.block_bytes(2)
    with pytest.raises(ValueError, match="3 blocks, but 4 slots"):
        engine.put(engine.gather([5, 6, 2, 0]), slots, [0, 1, 3])


@pytest.mark.parametrize(
    "views", ["pages", "views", "adjacent views", "descending pages", "descending views", "tensors"]
)
def test_slots_are_given_as_pages_of_a_pool_or_as_views(views: str) -> None:
    tensors = paged("LBNHC", "BHNC", GROUP)
    ids = [1, 2, 3]
    _, pages = new_slots(GROUP, len(ids))
    given: PoolSlots | list[NDArray[np.uint8]] | list[torch.Tensor] = pages
    if views == "views":
        given = as_views(pages, GROUP)
    elif views == "tensors":
        given = [torch.from_numpy(view) for view in as_views(pages, GROUP)]
    elif views.startswith("descending"):
        pages = given = PoolSlots(pages.pool, np.sort(pages.pages)[::-1].copy())
        given = given if views == "descending pages" else as_views(pages, GROUP)
    elif views == "adjacent views":
        given = list(np.zeros((len(ids), GROUP.block_bytes(2)), np.uint8))
    engine = gatherer(tensors, GROUP, "BHNC")
    engine.store(ids, given)
    stored = as_views(given, GROUP) if isinstance(given, PoolSlots) else given
    for block, view in zip(ids, stored, strict=True):
        np.testing.assert_array_equal(np.asarray(view), canonical_bytes(GROUP, block))
    target = paged("LBNHC", "BHNC", GROUP, fill=False)
    gatherer(target, GROUP, "BHNC").load(ids, given)
    assert torch.equal(target[2][1:4], tensors[2][1:4])


@pytest.mark.parametrize(("order", "axes"), [("LBHNC", "BHNC"), ("LBNHC", "BHNC"), ("LKBNHD", "KBNHD")])
def test_layers_in_storages_of_their_own_are_as_good(order: str, axes: str) -> None:
    tensors = paged(order, axes, GROUP, apart=True)
    _, slots = new_slots(GROUP, 2)
    engine = gatherer(tensors, GROUP, axes)
    engine.store([3, 6], slots)
    for block, view in zip([3, 6], as_views(slots, GROUP), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))
    target = paged(order, axes, GROUP, apart=True, fill=False)
    gatherer(target, GROUP, axes).load([3, 6], slots)
    assert all(
        torch.equal(a.select(axes.index("B"), 6), b.select(axes.index("B"), 6))
        for a, b in zip(target, tensors, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(["attention", "mla"]),
    layers=st.integers(1, 3),
    tokens=st.sampled_from([1, 4, 16]),
    writers=st.sampled_from([1, 2, 4, 8]),
    readers=st.sampled_from([1, 2, 4, 8]),
    orders=st.tuples(st.sampled_from(VLLM_ORDERS), st.sampled_from(VLLM_ORDERS)),
)
def test_what_some_ranks_stored_any_number_of_ranks_load(
    kv_heads: int, kind: str, layers: int, tokens: int, writers: int, readers: int, orders: tuple[str, str]
) -> None:
    group = KVGroup(tokens, layers, 1 if kind == "mla" else kv_heads, 8, "mla" if kind == "mla" else "attention")
    blocks = 3
    _, slots = new_slots(group, blocks)
    written = np.zeros((blocks, group.block_bytes(2)), np.uint8)
    for rank in range(writers):
        tensors = paged(orders[0], "BHNC", group, ranks=writers, rank=rank, blocks=blocks)
        engine = gatherer(tensors, group, "BHNC", ranks=writers, rank=rank)
        begin, end = engine.byte_range
        turns = [block for block in range(blocks) if engine.writes(block)]
        before = [view.copy() for view in as_views(slots, group)]
        engine.store(turns, PoolSlots(slots.pool, slots.pages[turns]))
        written[turns, begin:end] += 1
        for view, old in zip(as_views(slots, group), before, strict=True):
            np.testing.assert_array_equal(view[:begin], old[:begin])
            np.testing.assert_array_equal(view[end:], old[end:])
    # Replicated heads and latents are written once, and nothing is left out.
    assert (written == 1).all()
    for block, view in enumerate(as_views(slots, group)):
        np.testing.assert_array_equal(view, canonical_bytes(group, block))

    for rank in range(readers):
        wanted = paged(orders[1], "BHNC", group, ranks=readers, rank=rank, blocks=blocks)
        target = paged(orders[1], "BHNC", group, ranks=readers, rank=rank, blocks=blocks, fill=False)
        gatherer(target, group, "BHNC", ranks=readers, rank=rank).load(list(range(blocks)), slots)
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(target, wanted, strict=True))


def sequence(
    group: KVGroup, blocks: int, *, extra: int = 0, ranks: int = 1, rank: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A transformers cache of `blocks` pattern blocks and `extra` tokens more."""
    first, heads = head_range(group.kv_heads, ranks, rank, group.kind)
    whole = torch.stack([pattern(group, block, torch.bfloat16) for block in range(blocks)])
    layers = []
    for layer in range(group.layers):
        pair = []
        for plane in range(2):
            part = whole[:, first : first + heads, layer, plane].transpose(0, 1).reshape(1, heads, -1, group.head_dim)
            pair.append(torch.cat([part, torch.zeros(1, heads, extra, group.head_dim, dtype=part.dtype)], dim=2))
        layers.append((pair[0], pair[1]))
    return layers


@pytest.mark.parametrize("staging_bytes", [None, 1, 1 << 20], ids=["direct", "staged singly", "staged"])
@pytest.mark.parametrize("views", ["scattered", "adjacent", "descending"])
def test_a_sequence_goes_to_slots_and_comes_back_as_new_tensors(staging_bytes: int | None, views: str) -> None:
    layers = sequence(GROUP, 6, extra=3)
    pool, slots = new_slots(GROUP, 6)
    if views == "adjacent":
        slots = PoolSlots(pool, np.sort(slots.pages))
    if views == "descending":
        slots = PoolSlots(pool, np.sort(slots.pages)[::-1].copy())
    store_sequence(layers, slots, range(6), 4, staging_bytes=staging_bytes)
    for block, view in enumerate(as_views(slots, GROUP)):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))
    loaded = empty_layers(3, 8, 4 * 4, 16, "bfloat16")
    load_sequence(loaded, PoolSlots(pool, slots.pages[1:5]), 4, staging_bytes=staging_bytes)
    again = empty_layers(3, 8, 4 * 4, 16, "bfloat16")
    load_sequence(again, as_views(slots, GROUP)[1:5], 4, staging_bytes=staging_bytes)
    pool[:] = UNTOUCHED  # the tensors are no views of the pool
    storages = set()
    for (keys, values), (k, v), pair in zip(layers, loaded, again, strict=True):
        assert torch.equal(k, keys[:, :, 4:20]) and torch.equal(v, values[:, :, 4:20])
        assert torch.equal(pair[0], k) and torch.equal(pair[1], v)
        storages |= {t.untyped_storage().data_ptr() for t in (k, v, *pair)}
    assert len(storages) == 4 * GROUP.layers


def test_slots_in_a_row_are_one_run_from_either_end_and_each_tensor_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Freed slots are handed out last first; a view of each tensor for each slot took four times as long as copying.
    made: list[int] = []
    blocked = layout_module._blocked
    monkeypatch.setattr(layout_module, "_blocked", lambda *given: made.append(1) or blocked(*given))
    layers = empty_layers(3, 8, 6 * 4, 16, "bfloat16")
    pool, slots = new_slots(GROUP, 6)
    load_sequence(layers, slots, 4)
    assert len(made) == 2 * GROUP.layers
    for pages in (np.sort(slots.pages)[:3], np.sort(slots.pages)[:3][::-1].copy()):
        step = int(pages[1]) - int(pages[0])
        even = PoolSlots(pool, (pages[0] + step * np.arange(2)).astype(np.uint32))
        assert len(list(layout_module._host_runs(even, GROUP.block_bytes(2), descending=True))) == 1


@pytest.mark.parametrize("blocks", [[3, 4], [0, 1, 3, 4], [0, 2, 4], [4, 1, 0]])
@pytest.mark.parametrize("staging_bytes", [None, 1 << 20], ids=["direct", "staged"])
def test_the_blocks_of_a_sequence_are_stored_with_gaps_and_in_any_order(
    blocks: list[int], staging_bytes: int | None
) -> None:
    layers = sequence(GROUP, 5, extra=1)
    pool, slots = new_slots(GROUP, len(blocks))
    slots = PoolSlots(pool, np.sort(slots.pages))
    store_sequence(layers, slots, blocks, 4, staging_bytes=staging_bytes)
    for block, view in zip(blocks, as_views(slots, GROUP), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))


def test_blocks_that_a_sequence_does_not_have_are_refused() -> None:
    layers = sequence(GROUP, 5, extra=3)
    _, slots = new_slots(GROUP, 2)
    for blocks, message in (
        ([4, 5], r"blocks 4\.\.5 are not within the sequence's 23 tokens"),
        ([-1, 0], r"blocks -1\.\.0"),
        ([1], "1 blocks, but 2 slots"),
    ):
        with pytest.raises(ValueError, match=message):
            store_sequence(layers, slots, blocks, 4)
    with pytest.raises(ValueError, match="2 blocks of 4 tokens are not within the sequence's 7"):
        load_sequence(empty_layers(3, 8, 7, 16, "bfloat16"), slots, 4)
    with pytest.raises(LayoutMismatch, match="no layer"):
        load_sequence([], slots, 4)
    with pytest.raises(LayoutMismatch, match="float4"):
        empty_layers(3, 8, 7, 16, "float4")


def test_a_sequence_of_one_engine_is_paged_in_by_two_ranks_of_another() -> None:
    _, slots = new_slots(GROUP, BLOCKS)
    store_sequence(sequence(GROUP, BLOCKS), slots, range(BLOCKS), 4)
    for rank in range(2):
        target = paged("BLHNC", "BHNC", GROUP, ranks=2, rank=rank, fill=False)
        gatherer(target, GROUP, "BHNC", ranks=2, rank=rank).load(list(range(BLOCKS)), slots)
        wanted = paged("BLHNC", "BHNC", GROUP, ranks=2, rank=rank)
        assert all(torch.equal(a, b) for a, b in zip(target, wanted, strict=True))


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_a_sequence_split_over_ranks_fills_the_same_slots(ranks: int) -> None:
    _, slots = new_slots(GROUP, 2)
    heads = max(1, 8 // ranks)
    for rank in range(ranks):
        store_sequence(sequence(GROUP, 2, ranks=ranks, rank=rank), slots, [0, 1], 4, kv_heads=8, ranks=ranks, rank=rank)
    for block, view in enumerate(as_views(slots, GROUP)):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))
    for rank in range(ranks):
        loaded = empty_layers(3, heads, 8, 16, "bfloat16")
        load_sequence(loaded, slots, 4, kv_heads=8, ranks=ranks, rank=rank)
        wanted = sequence(GROUP, 2, ranks=ranks, rank=rank)
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(loaded, wanted, strict=True))


@pytest.mark.parametrize(
    "kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
)
def test_every_dtype_of_slots_is_copied_as_it_is(kv_dtype: str) -> None:
    group = KVGroup(4, 2, 2, 8, "attention")
    dtype: torch.dtype = getattr(torch, kv_dtype)
    raw = torch.arange(2 * 5 * 2 * 4 * 16 * dtype.itemsize).to(torch.uint8)
    tensors = list(raw.view(dtype).reshape(2, 5, 2, 4, 16))
    layout = describe_paged(tensors, group, kv_dtype)
    slots = [np.zeros(group.block_bytes(dtype.itemsize), np.uint8)]
    Gatherer(layout, tensors, group).store([2], slots)
    target = [torch.zeros_like(tensor) for tensor in tensors]
    Gatherer(layout, target, group).load([2], slots)
    assert all(
        torch.equal(a[2].view(torch.uint8), b[2].view(torch.uint8)) for a, b in zip(target, tensors, strict=True)
    )


def test_an_engine_may_keep_fp8_as_plain_bytes_but_no_other_dtype() -> None:
    group = KVGroup(4, 1, 2, 8, "attention")
    tensors = [torch.zeros(5, 2, 4, 16, dtype=torch.uint8)]
    assert describe_paged(tensors, group, "float8_e4m3fn").dtype == "float8_e4m3fn"
    for wrong in ("bfloat16", "int8"):
        with pytest.raises(LayoutMismatch, match=f"uint8 on cpu is not of the declared KV dtype {wrong}"):
            describe_paged(tensors, group, wrong)
    with pytest.raises(LayoutMismatch, match="float4"):
        describe_paged(tensors, group, "float4")


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def layers_of(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return [make() for _ in range(GROUP.layers)]


SHARED = torch.zeros(BLOCKS, 8, 4, 32, dtype=torch.bfloat16)
REFUSED = {
    "another shape": (layers_of(lambda: bf16(7, 4, 8, 33)), r"shape \[7, 4, 8, 33\].*are not BHNC .*heads 8.*tokens 4"),
    "heads of all ranks": (layers_of(lambda: bf16(7, 16, 4, 32)), r"\[7, 16, 4, 32\]"),
    "five axes in no known order": (layers_of(lambda: bf16(7, 4, 2, 8, 16)), r"\[7, 4, 2, 8, 16\]"),
    "a latent": (layers_of(lambda: bf16(7, 4, 576)), r"\[7, 4, 576\].*are not BHNC"),
    "no blocks": (layers_of(lambda: bf16(0, 8, 4, 32)), "holds no blocks"),
    "a scalar": (layers_of(lambda: bf16()), "holds no blocks"),
    "content not innermost": (layers_of(lambda: bf16(7, 8, 32, 4).transpose(2, 3)), "not contiguous in its last axis"),
    "tokens outermost": (
        layers_of(lambda: bf16(4, 7, 8, 32).permute(1, 2, 0, 3)),
        "memory order LNBHC; known are LBHNC",
    ),
    "overlapping pages": (
        layers_of(lambda: torch.zeros(4096, dtype=torch.bfloat16).as_strided((7, 8, 4, 32), (512, 128, 32, 1))),
        "axis B overlaps axis H",
    ),
    "a broadcast axis": (layers_of(lambda: bf16(7, 1, 4, 32).expand(7, 8, 4, 32)), "overlaps"),
    "layers in one memory": ([SHARED] * 3, "layers share or interleave memory"),
    "too few layers": ([bf16(7, 8, 4, 32)] * 2, "2 tensors were given, the KV group has 3 layers"),
    "unlike layers": ([*layers_of(lambda: bf16(7, 8, 4, 32))[:2], bf16(8, 8, 4, 32)], "layer 2 is unlike layer 0"),
    "another dtype": (
        layers_of(lambda: bf16(7, 8, 4, 32).half()),
        "float16 on cpu is not of the declared KV dtype bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_layout_is_refused_by_what_was_seen(name: str) -> None:
    tensors, message = REFUSED[name]
    with pytest.raises(LayoutMismatch, match=message):
        describe_paged(tensors, GROUP, "bfloat16")


def test_a_shape_that_reads_two_ways_is_refused_until_declared() -> None:
    # As many tokens as heads: (B, 2, N, H, D) and (B, 2, H, N, D) are one shape.
    group = KVGroup(block_tokens=8, layers=2, kv_heads=8, head_dim=16, kind="attention")
    tensors = list(torch.zeros(2, 7, 2, 8, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(LayoutMismatch, match=r"BKNHD .* or BKHND .*declare which by axes="):
        describe_paged(tensors, group, "bfloat16")
    assert describe_paged(tensors, group, "bfloat16", axes="BKNHD").layout == "LBKNHD"
    assert describe_paged(tensors, group, "bfloat16", axes="BKHND").layout == "LBKHND"
    with pytest.raises(LayoutMismatch, match="axes 'HBKND' are not known for attention"):
        describe_paged(tensors, group, "bfloat16", axes="HBKND")
    # Two blocks: (2, B, N, H, D) and (B, 2, N, H, D) are one shape.
    two = list(torch.zeros(3, 2, 2, 4, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(LayoutMismatch, match=r"KBNHD .* or BKNHD "):
        describe_paged(two, GROUP, "bfloat16")


def test_a_declared_reading_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"\[7, 2, 4, 8, 16\].* are not KBNHD \[planes 2, blocks, tokens 4"):
        describe_paged(layers_of(lambda: bf16(7, 2, 4, 8, 16)), GROUP, "bfloat16", axes="KBNHD")


def test_the_axes_of_one_head_or_token_do_not_hide_the_order() -> None:
    group = KVGroup(block_tokens=1, layers=1, kv_heads=1, head_dim=16, kind="attention")
    assert describe_paged([bf16(7, 1, 1, 32)], group, "bfloat16").layout == "LBHNC"


def test_a_batch_and_uneven_caches_are_refused() -> None:
    good = sequence(GROUP, 2)
    for bad, message in (
        ([(torch.cat([k, k]), torch.cat([v, v])) for k, v in good], r"keys of layer 0: .*\[2, 8, 8, 16\]"),
        ([good[0], (good[1][0], good[1][1][:, :, :5]), good[2]], r"values of layer 1: .*\[1, 8, 5, 16\]"),
        ([good[0], good[1]], "2 layers were given, the KV group has 3"),
        ([(k.float(), v.float()) for k, v in good], "not of the declared KV dtype bfloat16"),
        ([(k[0], v[0]) for k, v in good], r"\[8, 8, 16\]"),
    ):
        with pytest.raises(LayoutMismatch, match=message):
            describe_sequence(bad, GROUP, "bfloat16")
    with pytest.raises(LayoutMismatch, match="kind 'mla'"):
        describe_sequence(good, LATENT, "bfloat16")


def test_a_gatherer_is_bound_to_tensors_of_its_layout_and_rank() -> None:
    tensors = paged("LBHNC", "BHNC", GROUP)
    layout = describe_paged(tensors, GROUP, "bfloat16")
    with pytest.raises(LayoutMismatch, match="LBNHC"):
        Gatherer(layout, paged("LBNHC", "BHNC", GROUP), GROUP)
    with pytest.raises(LayoutMismatch, match="heads 4"):
        Gatherer(layout, tensors, GROUP, ranks=2, rank=1)


def test_bad_blocks_and_slots_are_refused_before_a_byte_moves() -> None:
    engine = gatherer(paged("LBHNC", "BHNC", GROUP), GROUP, "BHNC")
    size = GROUP.block_bytes(2)
    slots = [np.full(size, UNTOUCHED, np.uint8) for _ in range(2)]
    cases: list[tuple[list[int], Slots, str]] = [
        ([0, -1], slots, r"block ids -1\.\.0 are not within 0\.\.6"),
        ([0, 7], slots, r"block ids 0\.\.7"),
        ([0], slots, "1 block ids, but 2 slots"),
        ([0, 1], [slots[0], slots[1][1:]], f"slot 1 is not a contiguous view of {size} bytes"),
        ([0, 1], [slots[0], np.zeros(2 * size, np.uint8)[::2]], "slot 1 is not a contiguous view"),
        ([0, 1], [slots[0], slots[1].view(np.uint16)], "slot 1 is not a contiguous view"),
        ([0], PoolSlots(slots[0], np.array([1], np.uint32)), "page 1: its slot of .* ends beyond the pool's"),
    ]
    for ids, places, message in cases:
        for call in (engine.store, engine.load):
            with pytest.raises(ValueError, match=message):
                call(ids, places)
    assert all((slot == UNTOUCHED).all() for slot in slots)
    engine.store([], [])
    engine.load([], PoolSlots(slots[0], np.array([], np.uint32)))


def test_a_layout_names_what_it_saw() -> None:
    tensors = paged("BLNHC", "BHNC", GROUP, ranks=2, rank=1)
    seen = describe_paged(tensors, GROUP, "bfloat16", ranks=2, rank=1)
    assert seen == KVLayout(LayoutId("BLNHC"), "BHNC", "bfloat16", 4, layers=3, heads=4, head_dim=16, kind="attention")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("order", "axes"), [("LBNHC", "BHNC"), ("LKBNHD", "KBNHD")])
@pytest.mark.parametrize("place", ["host", "device"])
def test_blocks_on_a_device_come_and_go_on_a_stream(order: str, axes: str, place: str) -> None:
    device = torch.device("cuda")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    tensors = list(torch.stack(paged(order, axes, GROUP)).to(device))
    _, slots = new_slots(GROUP, 3)
    given = slots if place == "host" else PoolSlots(torch.from_numpy(slots.pool).to(device), slots.pages)
    layout = describe_paged(tensors, GROUP, "bfloat16", axes=axes)
    Gatherer(layout, tensors, GROUP).store([4, 1, 3], given, stream=stream)
    stream.synchronize()
    host = given.pool if isinstance(given.pool, np.ndarray) else given.pool.cpu().numpy()
    for block, view in zip([4, 1, 3], as_views(PoolSlots(host, slots.pages), GROUP), strict=True):
        np.testing.assert_array_equal(view, canonical_bytes(GROUP, block))
    target = list(torch.zeros_like(torch.stack(tensors)))
    Gatherer(layout, target, GROUP).load([4, 1, 3], given, stream=stream)
    stream.synchronize()
    for block in (4, 1, 3):
        assert torch.equal(target[1].select(axes.index("B"), block), tensors[1].select(axes.index("B"), block))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gathering_and_loading_do_not_wait_for_what_the_device_has_to_do() -> None:
    tensors = list(torch.stack(paged("LBNHC", "BHNC", GROUP)).to("cuda"))
    engine = Gatherer(describe_paged(tensors, GROUP, "bfloat16", axes="BHNC"), tensors, GROUP)
    _, slots = new_slots(GROUP, 3)
    given = PoolSlots(torch.from_numpy(slots.pool).to("cuda"), slots.pages)
    for queued in (0, 4_000_000_000):  # once before, for what is allocated then
        torch.cuda.synchronize()
        torch.cuda._sleep(queued)
        gathered = engine.gather([4, 1, 3])
        engine.put(gathered, given)
        engine.load([0, 2, 5], given)
        if queued:
            assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(tensors[1][[0, 2, 5]], tensors[1][[4, 1, 3]])
