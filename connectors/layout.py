"""Between an engine's KV tensors and canonical slots: recognise a layout, then copy blocks out and in.

A canonical slot holds one block as `[KV head][layer][k, v][token][dim]` (MLA: one latent head, one plane). A rank
touches the bytes of its own heads only, which lie together in the slot. So a block that one rank stored is loaded by
two, and the other way round, and engines of different layouts share.

The rule: what is not recognised without doubt is refused by name (LayoutMismatch). An axis order is never guessed:
shapes that fit two readings are refused until the connector says which one holds, and strides that belong to no known
order, or layers that share memory, are refused as well.

Letters, as in vLLM's KVCacheLayout: L layer, B engine block (page), H KV head, N token of a block, K the planes (k, v),
D head dim, C content of a token and head (k then v, or the latent).
How the copies are made (CPU ms/GB, bf16, 2 busy cores AMD EPYC with glibc 2.36): one `np.copyto` a block over rows of
an opaque dtype as wide as a token's vector, so that the inner loop is a memcpy a row. With elements of 2 or 16 bytes it
is 1.2x dearer, through torch's `copy_` 1.1-1.4x, in a call a layer 1.1-1.3x, staged through the cache in any order
1.2-1.6x. Where the heads are innermost (`..NH.`, four or more), rows are stored through an index array instead, in the
engine's order: 113-121 against 145-174; with fewer heads or in other orders that was no cheaper. What remains is the
price of short rows: evenly spaced rows of 256 B-8 KiB take 127-146, of 16 KiB 120, of 64 KiB 112, whole blocks 97
(memcpy of large pieces need not read its destination first: the likely cause, not proven). As a share of memcpy's
throughput, 2 MiB blocks in `LKBNHD` are stored at 0.69-0.72 (0.82 from huge pages) and loaded at 0.75-0.86, in `LBHNC`
0.62-0.70 and 0.68-0.78; 64 KiB blocks of one pool 0.60-0.73 and 0.65-0.80, given as views 0.08 less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NewType, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvcascade.config.errors import LayoutMismatch
from kvcascade.tiers.block import Kind, KVGroup, committers, head_range, itemsize
from kvcascade.tiers.memory import REGISTER_CHUNK

Bytes: TypeAlias = NDArray[np.uint8]
Slot: TypeAlias = Bytes | torch.Tensor
LayoutId = NewType("LayoutId", str)

PAGE_SHIFT = 12
SCATTER_HEADS = 4
"""Heads a rank from which rows are stored in the engine's order where heads are innermost (module docstring)."""
STAGING_BYTES = 64 << 20
"""Device memory that one copy between a device and slots may take for itself by default."""

VLLM_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Memory orders of vLLM's KVCacheLayout, outermost first; tensors are registered as [B, H, N, C] with such strides."""
SPLIT_ORDERS = ("LKBNHD", "LKBHND", "LBKNHD", "LBKHND", "BLKNHD", "BLKHND")
"""Memory orders of tensors that keep K and V on an axis of their own, as vLLM's before 0.30 and other engines'."""
LATENT_ORDERS = ("LBNC", "BLNC")
"""Memory orders of MLA tensors registered as [B, N, C]."""
SEQUENCE_ORDER = LayoutId("transformers")
"""Keys and values of one sequence, a tensor each a layer, [1, heads, tokens, dim]."""

_ATTENTION_AXES = {"BHNC": VLLM_ORDERS, "KBNHD": SPLIT_ORDERS, "BKNHD": SPLIT_ORDERS, "BKHND": SPLIT_ORDERS}
_LATENT_AXES = {"BNC": LATENT_ORDERS, "BHNC": VLLM_ORDERS}
_CANONICAL = "BHKND"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one rank's KV tensors of one KV group lie in memory: what `describe_paged` or `describe_sequence` saw.

    `layout` is the memory order, outermost axis first; `axes` the order in which a tensor's shape lists its axes;
    `heads` those of this rank.
    """

    layout: LayoutId
    axes: str
    dtype: str
    block_tokens: int
    layers: int
    heads: int
    head_dim: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Slots named by page number in one mapped pool, as the daemon's replies name them.

    `pool` is the whole mapping in bytes, one dimension, on the host or a device; slot i begins at `pages[i] << 12`.
    Cheaper than a list of views where blocks are small.
    """

    pool: Slot
    pages: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.pages)


Layers: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values a layer of one sequence, each [1, heads, tokens, dim]."""
Slots: TypeAlias = Sequence[Slot] | PoolSlots
"""Some blocks' slots, in the order of the blocks: views of at least a block's bytes each, or page numbers. Where slots
are filled or engines' tensors lie on a device, they must be writable."""


def describe_paged(
    tensors: Sequence[torch.Tensor],
    group: KVGroup,
    kv_dtype: str,
    *,
    ranks: int = 1,
    rank: int = 0,
    axes: str | None = None,
) -> KVLayout:
    """Recognise paged KV tensors, one a layer of `group`, in layer order.

    A tensor that stacks the layers is passed as `list(stacked)`. Sizes must be those that the group has for this rank
    (`head_range`), dtype `kv_dtype` (an engine may keep an fp8 flavour as uint8). `axes` says how a tensor's shape
    reads (BHNC, KBNHD, BKNHD, BKHND; for MLA BNC or BHNC) and is needed only where sizes coincide. Strides say the
    memory order; pages may be padded. Raises LayoutMismatch, naming what was seen, for anything else.
    """
    _, heads = head_range(group.kv_heads, ranks, rank, group.kind)
    first = _same_tensors(tensors, group, kv_dtype)
    known = _ATTENTION_AXES if group.kind == "attention" else _LATENT_AXES
    if axes is not None and axes not in known:
        raise LayoutMismatch(f"axes {axes!r:.40} are not known for {group.kind}; known are {', '.join(known)}")
    sizes = _sizes(group, heads)
    fitting = [name for name in known if _fits(first.shape, name, sizes) and axes in (None, name)]
    if len(fitting) != 1:
        wanted = " or ".join(_spell(name, sizes) for name in (fitting or ([axes] if axes else known)))
        problem = f"read as {wanted}: declare which by axes=" if fitting else f"are not {wanted}"
        raise LayoutMismatch(f"{_seen(first)} {'can be ' if fitting else ''}{problem}")
    (axes,) = fitting
    order = _memory_order(tensors, axes, known[axes])
    return KVLayout(order, axes, kv_dtype, group.block_tokens, group.layers, heads, group.head_dim, group.kind)


def describe_sequence(layers: Layers, group: KVGroup, kv_dtype: str, *, ranks: int = 1, rank: int = 0) -> KVLayout:
    """Recognise a transformers cache: (keys, values) a layer of `group`, each [1, the rank's heads, tokens, head dim].

    Raises LayoutMismatch, naming the layer and what was seen, for another shape (a batch, keys and values of unlike
    head dim, latent caches) or dtype.
    """
    _, heads = head_range(group.kv_heads, ranks, rank, group.kind)
    if group.kind != "attention":
        raise LayoutMismatch(f"a transformers cache of kind {group.kind!r} is not known; known is attention")
    if len(layers) != group.layers:
        raise LayoutMismatch(f"{len(layers)} layers were given, the KV group has {group.layers}")
    tokens = layers[0][0].shape[-2] if layers[0][0].ndim == 4 else 0
    wanted = (1, heads, tokens, group.head_dim)
    for index, (keys, values) in enumerate(layers):
        for name, tensor in (("keys", keys), ("values", values)):
            if tuple(tensor.shape) != wanted or tensor.stride(-1) != 1:
                raise LayoutMismatch(
                    f"{name} of layer {index}: {_seen(tensor)} is not [batch 1, heads {heads}, tokens {tokens}, dim "
                    f"{group.head_dim}] with dim innermost"
                )
            _check_dtype(tensor, kv_dtype)
    return KVLayout(
        SEQUENCE_ORDER, "BHND", kv_dtype, group.block_tokens, group.layers, heads, group.head_dim, group.kind
    )


class _RankPart:
    """The part of each slot that one rank writes and reads, and how its rows are seen there."""

    def __init__(self, group: KVGroup, kv_dtype: str, ranks: int, rank: int) -> None:
        first, heads = head_range(group.kv_heads, ranks, rank, group.kind)
        size = itemsize(kv_dtype)
        self.block_bytes = group.block_bytes(size)
        self.begin = first * group.head_bytes(size)
        self.length = heads * group.head_bytes(size)
        # Rows of one token's vector each: [H, L, K, N].
        self.shape = (heads, group.layers, group.planes, group.block_tokens)
        self.row_bytes = group.head_dim * size
        self.row = np.dtype((np.void, self.row_bytes))

    def host_runs(self, slots: Slots) -> Iterator[tuple[int, NDArray[np.void]]]:
        """(first slot, rows [n, H, L, K, N]) for each run of slots that lie evenly spaced in host memory."""
        for start, run in _host_runs(slots, self.block_bytes, descending=True):
            part = run[:, self.begin : self.begin + self.length]
            yield start, part.view(self.row).reshape(len(part), *self.shape)

    def chunks(self, count: int, staging_bytes: int) -> Iterator[slice]:
        """Slices of `count` slots whose parts fit into `staging_bytes`, at least one slot each."""
        step = max(1, staging_bytes // self.length)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def staging(self, count: int, layers: int, device: torch.device) -> torch.Tensor:
        heads, _, planes, tokens = self.shape
        return torch.empty((count, heads, layers, planes, tokens, self.row_bytes), dtype=torch.uint8, device=device)

    def exchange(self, staging: torch.Tensor, slots: Slots, layers: slice, *, into_slots: bool) -> None:
        """Copy between `staging`, [n, H, layers, K, N, bytes], and those layers of slots, asynchronously if it can."""
        whole = staging.shape[2] == self.shape[1]
        for start, run in _torch_runs(slots, self.block_bytes):
            part = run[:, self.begin : self.begin + self.length]
            staged = staging[start : start + len(run)]
            if whole and part.is_contiguous():
                pairs = [(staged.view(len(run), -1), part)]
            elif whole:
                pairs = list(zip(staged.view(len(run), -1), part, strict=True))
            else:
                pairs = [(s, p.view(*self.shape, -1)[:, layers]) for s, p in zip(staged, part, strict=True)]
            for staged_part, slot_part in pairs:
                if into_slots:
                    slot_part.copy_(staged_part, non_blocking=True)
                else:
                    staged_part.copy_(slot_part, non_blocking=True)


class Gatherer:
    """Copies between a rank's paged KV tensors and slots.

    Bound to the tensors for as long as the engine keeps them: build it when they are registered, drop it when they are
    released. Copies may run in several threads at once when their blocks and slots differ; they release the GIL.

    On the CPU a call returns when its bytes are copied. On a device it makes `stream` (default: the current one) wait
    for the work that the engine has queued on its current stream, queues its own copies and returns: slots and blocks
    belong to the copy until the caller has synchronised with that stream, and only then may it commit or check
    generations. Copies on a device take up to `staging_bytes` of its memory (default: STAGING_BYTES); given on the CPU,
    it makes copies there take the same way.

    Raises LayoutMismatch if `tensors` are not of `layout` or not this rank's part of `group`.
    """

    def __init__(
        self,
        layout: KVLayout,
        tensors: Sequence[torch.Tensor],
        group: KVGroup,
        *,
        ranks: int = 1,
        rank: int = 0,
        staging_bytes: int | None = None,
    ) -> None:
        found = describe_paged(tensors, group, layout.dtype, ranks=ranks, rank=rank, axes=layout.axes)
        if found != layout:
            raise LayoutMismatch(f"these tensors are {found}, not {layout}")
        # Nothing here is changed after this.
        self._group, self._ranks, self._rank = group, ranks, rank
        self._part = _RankPart(group, layout.dtype, ranks, rank)
        self._device = tensors[0].device
        self._blocks = tensors[0].shape[layout.axes.index("B")]
        self._staging_bytes = STAGING_BYTES if staging_bytes is None else staging_bytes
        self._staged = self._device.type != "cpu" or staging_bytes is not None
        views = [_canonical(tensor, layout.axes, group.planes) for tensor in tensors]
        fused = _fuse_layers(views)
        # (layers, [B, H, l, K, N, bytes]): one part where layers lie evenly spaced in one storage, else a part each.
        self._parts = [(slice(index, index + 1), view.unsqueeze(2)) for index, view in enumerate(views)]
        if fused is not None:
            self._parts = [(slice(0, group.layers), fused)]
        self._host_parts: list[tuple[slice, NDArray[np.void]]] = []
        if not self._staged:
            self._host_parts = [(layers, part.numpy().view(self._part.row)[..., 0]) for layers, part in self._parts]
        # Where rows are written in the engine's order (module docstring): each row's place in the slot, by part.
        self._places: list[NDArray[np.intp]] | None = None
        if layout.layout.endswith(("NHD", "NHC")) and layout.heads >= SCATTER_HEADS:
            places = np.arange(np.prod(self._part.shape), dtype=np.intp).reshape(self._part.shape)
            self._places = [_heads_innermost(places[:, layers]).copy() for layers, _ in self._parts]

    @property
    def byte_range(self) -> tuple[int, int]:
        """[begin, end) of each slot that this rank touches."""
        return self._part.begin, self._part.begin + self._part.length

    def writes(self, block_index: int) -> bool:
        """Whether this rank is the one that stores its heads of block `block_index` of a chain.

        False for replicas whose turn it is not: they neither copy nor commit that block.
        """
        return self._rank in committers(self._group.kv_heads, self._ranks, block_index, self._group.kind)

    def store(self, block_ids: Sequence[int], slots: Slots, *, stream: torch.cuda.Stream | None = None) -> None:
        """Copy the engine's blocks `block_ids` into this rank's part of `slots`, one each.

        Other ranks' parts are not touched. Raises ValueError for a block id that there is not, for lists of unlike
        length and for a slot that is too short or not contiguous; nothing was copied then.
        """
        self._check(block_ids, slots)
        if self._staged:
            with self._queued_on(stream):
                self._store_staged(block_ids, slots)
            return
        for start, rows in self._part.host_runs(slots):
            ids = block_ids[start : start + len(rows)]
            for part, (layers, source) in enumerate(self._host_parts):
                if self._places is None:
                    for target, block in zip(rows[:, :, layers], ids, strict=True):
                        np.copyto(target, source[block])
                else:
                    places, in_engine_order = self._places[part], _heads_innermost(source)
                    for target, block in zip(rows.reshape(len(rows), -1), ids, strict=True):
                        target[places] = in_engine_order[block]

    def gather(self, block_ids: Sequence[int], into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of the engine's blocks on their own device, as `put` takes it.

        Queued on the current stream: what the engine queues behind it may overwrite the blocks. `into`: what an earlier
        call returned for as many blocks or more, to be filled again, since on the CPU memory that was never touched
        costs four times what the copy does. Raises ValueError for a block id that there is not.
        """
        self._check_blocks(block_ids)
        count = len(block_ids)
        staging = self._part.staging(count, self._group.layers, self._device) if into is None else into[:count]
        if self._host_parts:
            rows = staging.numpy().view(self._part.row)[..., 0]
            for layers, source in self._host_parts:
                for target, block in zip(rows[:, :, layers], block_ids, strict=True):
                    np.copyto(target, source[block])
            return staging
        ids = _ids(block_ids, self._device)
        for layers, part in self._parts:
            # Straight there: what it would return is as large again.
            torch.index_select(part, 0, ids, out=staging[:, :, layers])
        return staging

    def put(self, gathered: torch.Tensor, slots: Slots, wanted: Sequence[int] | None = None) -> None:
        """Copy what `gather` gave into this rank's part of `slots`, on the current stream.

        `wanted`: only these of its blocks, by their places in it. Raises ValueError for lists of unlike length and for
        a slot that is too short or not contiguous.
        """
        if wanted is None:
            wanted = range(len(gathered))
        _check_slots(slots, self._part.block_bytes, len(wanted), "blocks")
        for first, run in _neighbours(wanted):
            blocks = gathered[run.start : run.stop]
            targets = _sub_slots(slots, slice(first, first + len(blocks)))
            self._part.exchange(blocks, targets, slice(None), into_slots=True)

    def load(self, block_ids: Sequence[int], slots: Slots, *, stream: torch.cuda.Stream | None = None) -> None:
        """Copy this rank's part of `slots` into the engine's blocks `block_ids`, one each. Raises as `store` does.

        Whether the bytes were still those of the blocks asked for is known only afterwards, by the slots' generations.
        """
        self._check(block_ids, slots)
        if self._staged:
            with self._queued_on(stream):
                self._load_staged(block_ids, slots)
            return
        for start, rows in self._part.host_runs(slots):
            ids = block_ids[start : start + len(rows)]
            for layers, target in self._host_parts:
                for source, block in zip(rows[:, :, layers], ids, strict=True):
                    np.copyto(target[block], source)

    def _check(self, block_ids: Sequence[int], slots: Slots) -> None:
        _check_slots(slots, self._part.block_bytes, len(block_ids), "block ids")
        self._check_blocks(block_ids)

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        # A negative id would silently count from the end.
        if len(block_ids) and (min(block_ids) < 0 or max(block_ids) >= self._blocks):
            raise ValueError(f"block ids {min(block_ids)}..{max(block_ids)} are not within 0..{self._blocks - 1}")

    def _queued_on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def _store_staged(self, block_ids: Sequence[int], slots: Slots) -> None:
        for chunk in self._part.chunks(len(block_ids), self._staging_bytes):
            self._part.exchange(self.gather(block_ids[chunk]), _sub_slots(slots, chunk), slice(None), into_slots=True)

    def _load_staged(self, block_ids: Sequence[int], slots: Slots) -> None:
        for chunk in self._part.chunks(len(block_ids), self._staging_bytes):
            ids = _ids(block_ids[chunk], self._device)
            staging = self._part.staging(len(ids), self._group.layers, self._device)
            self._part.exchange(staging, _sub_slots(slots, chunk), slice(None), into_slots=False)
            for layers, part in self._parts:
                part[ids] = staging[:, :, layers]


def store_sequence(
    layers: Layers,
    slots: Slots,
    blocks: Sequence[int],
    block_tokens: int,
    *,
    kv_heads: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    staging_bytes: int | None = None,
) -> None:
    """Copy blocks of one sequence's keys and values into this rank's part of `slots`, one each.

    Block i is tokens [i * block_tokens, (i + 1) * block_tokens) of the tensors. `kv_heads` is the whole model's, by
    default as many as all ranks together would have of the tensors'. On the CPU a run of blocks and slots that lie
    evenly spaced in memory takes one strided copy a layer and plane. Layers or slots on a device are copied on its
    current stream: they belong to the copy until the caller has synchronised with it. `staging_bytes` as with
    `Gatherer`. Other ranks' parts are not touched. Raises LayoutMismatch as `describe_sequence` does, ValueError for
    blocks that the sequence does not have and for slots as `Gatherer.store` does; nothing was copied then.
    """
    part = _sequence_part(layers, block_tokens, kv_heads, ranks, rank)
    _check_slots(slots, part.block_bytes, len(blocks), "blocks")
    tokens = layers[0][0].shape[2]
    if len(blocks) and (min(blocks) < 0 or (max(blocks) + 1) * block_tokens > tokens):
        raise ValueError(f"blocks {min(blocks)}..{max(blocks)} are not within the sequence's {tokens} tokens")
    if staging_bytes is None and _on_host(layers, slots):
        planes = _host_planes(layers, block_tokens, part.row)
        for start, rows in part.host_runs(slots):
            for first, count, step in _even_runs(blocks[start : start + len(rows)], 1):
                index = blocks[start + first]
                wanted = slice(index, index + (count - 1) * step + 1, step)
                run = rows[first : first + count]
                for layer, plane, source in planes:
                    np.copyto(run[:, :, layer, plane], source[wanted])
        return
    for device, span in _by_device(layers):
        for chunk in part.chunks(len(blocks), STAGING_BYTES if staging_bytes is None else staging_bytes):
            ids = _ids(blocks[chunk], device)
            staging = part.staging(len(ids), span.stop - span.start, device)
            for layer, pair in enumerate(layers[span]):
                for plane, tensor in enumerate(pair):
                    staging[:, :, layer, plane].copy_(_blocked(tensor, block_tokens).index_select(0, ids))
            part.exchange(staging, _sub_slots(slots, chunk), span, into_slots=True)


def load_sequence(
    layers: Layers,
    slots: Slots,
    block_tokens: int,
    *,
    kv_heads: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    staging_bytes: int | None = None,
) -> None:
    """Copy this rank's part of `slots` into the first len(slots) * block_tokens tokens of `layers`.

    `layers` are the caller's own tensors (`empty_layers` makes them), so each load is an independent copy. Devices,
    `kv_heads`, `staging_bytes` and errors as with `store_sequence`.
    """
    part = _sequence_part(layers, block_tokens, kv_heads, ranks, rank)
    _check_slots(slots, part.block_bytes, len(slots), "slots")
    tokens = layers[0][0].shape[2]
    if len(slots) * block_tokens > tokens:
        raise ValueError(f"{len(slots)} blocks of {block_tokens} tokens are not within the sequence's {tokens}")
    if staging_bytes is None and _on_host(layers, slots):
        planes = _host_planes(layers, block_tokens, part.row)
        for start, rows in part.host_runs(slots):
            end = start + len(rows)
            for layer, plane, target in planes:
                np.copyto(target[start:end], rows[:, :, layer, plane])
        return
    for device, span in _by_device(layers):
        for chunk in part.chunks(len(slots), STAGING_BYTES if staging_bytes is None else staging_bytes):
            staging = part.staging(chunk.stop - chunk.start, span.stop - span.start, device)
            part.exchange(staging, _sub_slots(slots, chunk), span, into_slots=False)
            for layer, pair in enumerate(layers[span]):
                for plane, tensor in enumerate(pair):
                    _blocked(tensor, block_tokens)[chunk].copy_(staging[:, :, layer, plane])


def empty_layers(
    layers: int, heads: int, tokens: int, head_dim: int, kv_dtype: str, *, device: torch.device | str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """New (keys, values) a layer for `load_sequence`, [1, heads, tokens, head_dim], none sharing memory with another.

    Their content is undefined. Raises LayoutMismatch for an unknown dtype.
    """
    itemsize(kv_dtype)
    dtype: torch.dtype = getattr(torch, kv_dtype)
    shape = (1, heads, tokens, head_dim)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(layers)
    ]


def _sequence_part(layers: Layers, block_tokens: int, kv_heads: int | None, ranks: int, rank: int) -> _RankPart:
    if not layers or layers[0][0].ndim != 4:
        seen = _seen(layers[0][0]) if layers else "no layer"
        raise LayoutMismatch(f"{seen} is not [1, heads, tokens, dim]")
    keys = layers[0][0]
    _, heads, _, head_dim = keys.shape
    group = KVGroup(block_tokens, len(layers), heads * ranks if kv_heads is None else kv_heads, head_dim)
    kv_dtype = str(keys.dtype).removeprefix("torch.")
    describe_sequence(layers, group, kv_dtype, ranks=ranks, rank=rank)
    return _RankPart(group, kv_dtype, ranks, rank)


def _blocked(tensor: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """A view [blocks, H, N, bytes] of the whole blocks of [1, H, tokens, dim]."""
    whole = tensor.shape[2] // block_tokens * block_tokens
    return _split_axis(tensor[0, :, :whole].view(torch.uint8), 1, block_tokens).transpose(0, 1)


def _host_planes(layers: Layers, block_tokens: int, row: np.dtype[Any]) -> list[tuple[int, int, NDArray[np.void]]]:
    """(layer, plane, rows [blocks, H, N]) of each tensor in host memory.

    Made once and not for each run of slots: where each slot is a run of its own, making them again took four times as
    long as copying.
    """
    return [
        (layer, plane, _blocked(tensor, block_tokens).numpy().view(row)[..., 0])
        for layer, pair in enumerate(layers)
        for plane, tensor in enumerate(pair)
    ]


def _on_host(layers: Layers, slots: Slots) -> bool:
    places = [slots.pool] if isinstance(slots, PoolSlots) else slots
    return all(tensor.device.type == "cpu" for pair in layers for tensor in pair) and all(
        isinstance(place, np.ndarray) or place.device.type == "cpu" for place in places
    )


def _by_device(layers: Layers) -> Iterator[tuple[torch.device, slice]]:
    """Runs of layers on one device: a model may be spread over several."""
    start = 0
    for device, run in groupby(pair[0].device for pair in layers):
        count = sum(1 for _ in run)
        yield device, slice(start, start + count)
        start += count


def _ids(ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices on a device. From pinned memory, since else the caller waits for all that its stream has queued.

    torch itself keeps that memory until the copy is done.
    """
    if device.type != "cuda":
        return torch.tensor(ids, dtype=torch.int64, device=device)
    return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _neighbours(places: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(first, slice) for each run of places that follow one another by 1."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield start, slice(places[start], places[end - 1] + 1)
            start = end


def _heads_innermost(rows: NDArray[Any]) -> NDArray[Any]:
    """[.., H, L, K, N] as a view [.., L, K, N, H]."""
    return np.moveaxis(rows, -4, -1)


def _same_tensors(tensors: Sequence[torch.Tensor], group: KVGroup, kv_dtype: str) -> torch.Tensor:
    if len(tensors) != group.layers:
        raise LayoutMismatch(f"{len(tensors)} tensors were given, the KV group has {group.layers} layers")
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        _check_dtype(tensor, kv_dtype)
        like = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if like != (first.shape, first.stride(), first.dtype, first.device):
            raise LayoutMismatch(f"layer {index} is unlike layer 0: {_seen(tensor)}, {_seen(first)}")
    if first.ndim == 0 or first.numel() == 0:
        raise LayoutMismatch(f"{_seen(first)} holds no blocks")
    if first.stride(-1) != 1:
        raise LayoutMismatch(f"{_seen(first)} is not contiguous in its last axis")
    return first


def _check_dtype(tensor: torch.Tensor, kv_dtype: str) -> None:
    itemsize(kv_dtype)
    name = str(tensor.dtype).removeprefix("torch.")
    if name != kv_dtype and not (name == "uint8" and kv_dtype.startswith("float8_")):
        raise LayoutMismatch(f"{_seen(tensor)} is not of the declared KV dtype {kv_dtype}")


def _sizes(group: KVGroup, heads: int) -> dict[str, int]:
    return {
        "K": group.planes,
        "H": heads,
        "N": group.block_tokens,
        "D": group.head_dim,
        "C": group.planes * group.head_dim,
    }


def _fits(shape: Sequence[int], axes: str, sizes: dict[str, int]) -> bool:
    return len(shape) == len(axes) and all(
        name == "B" or sizes[name] == size for name, size in zip(axes, shape, strict=True)
    )


def _spell(axes: str, sizes: dict[str, int]) -> str:
    words = {"B": "blocks", "K": "planes", "H": "heads", "N": "tokens", "D": "dim", "C": "content"}
    return f"{axes} [{', '.join(words[a] if a == 'B' else f'{words[a]} {sizes[a]}' for a in axes)}]"


def _seen(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a tensor of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {dtype} on {tensor.device}"


def _memory_order(tensors: Sequence[torch.Tensor], axes: str, known: Sequence[str]) -> LayoutId:
    """Which known order the strides spell, axes of size 1 left aside; LayoutMismatch if none or if axes overlap."""
    first = tensors[0]
    steps = [
        (stride, size, name)
        for name, size, stride in zip(axes, first.shape, first.stride(), strict=True)
        if size > 1 or name == axes[-1]
    ]
    span = sum((size - 1) * stride for stride, size, _ in steps) + 1
    addresses = [tensor.data_ptr() for tensor in tensors]
    ascending = sorted(addresses)
    gap = min((b - a for a, b in pairwise(ascending)), default=None)
    layers_apart = gap is None or gap >= span * first.element_size()
    if not layers_apart:
        step = _layer_step(tensors)
        if step is None:
            raise LayoutMismatch(f"layers share or interleave memory unevenly: {_seen(first)}, {gap} bytes apart")
        steps.append((step, len(tensors), "L"))
    if any(stride == 0 for stride, _, _ in steps):
        raise LayoutMismatch(f"{_seen(first)}: an axis of stride 0 overlaps itself in memory")
    steps.sort(key=lambda entry: -entry[0])
    for (stride, _, outer), (inner_stride, inner_size, inner) in pairwise(steps):
        if stride < inner_stride * inner_size:
            raise LayoutMismatch(f"{_seen(first)}: axis {outer} overlaps axis {inner} in memory")
    order = ("L" if layers_apart and len(tensors) > 1 else "") + "".join(name for _, _, name in steps)
    for name in known:
        if "".join(letter for letter in name if letter in order) == order:
            return LayoutId(name)
    raise LayoutMismatch(f"{_seen(first)} lies in memory order {order}; known are {', '.join(known)}")


def _layer_step(tensors: Sequence[torch.Tensor]) -> int | None:
    """Elements from each layer to the next, where all lie evenly spaced and ascending in one storage; else None."""
    size = tensors[0].element_size()
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
        return None
    offsets = [tensor.data_ptr() for tensor in tensors]
    steps = {b - a for a, b in pairwise(offsets)}
    if len(steps) != 1:
        return None
    (step,) = steps
    return step // size if step > 0 and step % size == 0 else None


def _canonical(tensor: torch.Tensor, axes: str, planes: int) -> torch.Tensor:
    """A view [B, H, K, N, bytes of a vector] of a paged tensor."""
    view = tensor.view(torch.uint8)
    if axes[-1] == "C":
        view = _split_axis(view, view.ndim - 1, view.shape[-1] // planes)
        axes = axes[:-1] + "KD"
    for missing in _CANONICAL:
        if missing not in axes:
            view = view.unsqueeze(0)
            axes = missing + axes
    return view.permute([axes.index(name) for name in _CANONICAL])


def _split_axis(tensor: torch.Tensor, axis: int, inner: int) -> torch.Tensor:
    """A view with `axis` split in two, the inner of size `inner`."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    shape[axis : axis + 1] = [shape[axis] // inner, inner]
    strides[axis : axis + 1] = [strides[axis] * inner, strides[axis]]
    return tensor.as_strided(shape, strides)


def _fuse_layers(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view [B, H, L, K, N, bytes] of all layers, or None where they do not lie evenly spaced in one storage."""
    first = views[0]
    step = 0 if len(views) == 1 else _layer_step(views)
    if step is None:
        return None
    shape, strides = list(first.shape), list(first.stride())
    return first.as_strided([*shape[:2], len(views), *shape[2:]], [*strides[:2], step, *strides[2:]])


def _check_slots(slots: Slots, block_bytes: int, count: int, what: str) -> None:
    if len(slots) != count:
        raise ValueError(f"{count} {what}, but {len(slots)} slots")
    if isinstance(slots, PoolSlots):
        size = slots.pool.nbytes
        if count and (int(slots.pages.max()) << PAGE_SHIFT) + block_bytes > size:
            raise ValueError(f"page {slots.pages.max()}: its slot of {block_bytes} bytes ends beyond the pool's {size}")
        return
    for index, slot in enumerate(slots):
        contiguous = slot.flags.c_contiguous if isinstance(slot, np.ndarray) else slot.is_contiguous()
        if slot.ndim != 1 or slot.itemsize != 1 or not contiguous or len(slot) < block_bytes:
            raise ValueError(
                f"slot {index} is not a contiguous view of {block_bytes} bytes, but {slot.dtype} {list(slot.shape)}"
            )


def _sub_slots(slots: Slots, chunk: slice) -> Slots:
    return PoolSlots(slots.pool, slots.pages[chunk]) if isinstance(slots, PoolSlots) else slots[chunk]


def _even_runs(places: Sequence[int], least: int, *, descending: bool = False) -> Iterator[tuple[int, int, int]]:
    """(first, count, step) for each run of places that follow one another by one step of at least `least`.

    With `descending` the step may be as much less than 0: pools hand out freed slots last first.
    """
    start = 0
    while start < len(places):
        end, step = start + 1, least
        between = places[end] - places[start] if end < len(places) else 0
        if between >= least or (descending and between <= -least):
            step = between
            while end < len(places) and places[end] - places[end - 1] == step:
                end += 1
        yield start, end - start, step
        start = end


def _equal_runs(values: NDArray[np.int64]) -> Iterator[slice]:
    """The runs of one value."""
    edges = np.flatnonzero(np.diff(values)) + 1
    for start, end in pairwise([0, *edges.tolist(), len(values)]):
        yield slice(start, end)


def _host_runs(slots: Slots, block_bytes: int, *, descending: bool = False) -> Iterator[tuple[int, Bytes]]:
    """(first, bytes [n, block_bytes]) for each run of slots that lie evenly spaced in host memory.

    With `descending` they may lie last first; torch takes no such view.
    """
    if isinstance(slots, PoolSlots):
        pool = slots.pool if isinstance(slots.pool, np.ndarray) else slots.pool.numpy()
        places = (slots.pages.astype(np.int64) << PAGE_SHIFT).tolist()
        for start, count, step in _even_runs(places, block_bytes, descending=descending):
            # np.ndarray proves that the run lies within the pool.
            yield start, np.ndarray((count, block_bytes), np.uint8, pool, places[start], (step, 1))
        return
    views = [slot if isinstance(slot, np.ndarray) else slot.numpy() for slot in slots]
    addresses = [view.__array_interface__["data"][0] for view in views]
    for start, count, step in _even_runs(addresses, block_bytes, descending=descending):
        # Within the views' own bytes: what lies between two slots is stepped over.
        yield start, np.lib.stride_tricks.as_strided(views[start], (count, block_bytes), (step, 1))


def _torch_runs(slots: Slots, block_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """As `_host_runs`, for slots in any memory. No run of host memory reaches from one registration into another.

    A device copies one registration's bytes only, and each run may be one copy.
    """
    if isinstance(slots, PoolSlots) and isinstance(slots.pool, torch.Tensor):
        places = (slots.pages.astype(np.int64) << PAGE_SHIFT).tolist()
        pool = slots.pool.view(torch.uint8)
        for start, count, step in _even_runs(places, block_bytes):
            yield start, pool.as_strided((count, block_bytes), (step, 1), pool.storage_offset() + places[start])
    elif isinstance(slots, PoolSlots):
        pieces = (slots.pages.astype(np.int64) << PAGE_SHIFT) // REGISTER_CHUNK
        for start, run in _host_runs(slots, block_bytes):
            for piece in _equal_runs(pieces[start : start + len(run)]):
                yield start + piece.start, torch.from_numpy(run[piece])
    else:
        # Of several pools, as a rule: where one's registrations lie is not known here.
        for index, slot in enumerate(slots):
            tensor = torch.from_numpy(slot) if isinstance(slot, np.ndarray) else slot.view(torch.uint8)
            yield index, tensor[:block_bytes].unsqueeze(0)
