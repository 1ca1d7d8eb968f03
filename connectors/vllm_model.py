"""What a vLLM engine is to the daemon: which version, of which KV groups, under which namespace its blocks are kept.

Rule: what cannot be stored without doubt is refused by the name of the flag to change, and nothing is guessed. Versions
of vLLM are told apart by what they offer, here alone (`Offered`).
"""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base as hooks
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput

from kvcascade.config.errors import ConfigError, LayoutMismatch, Refused
from kvcascade.tiers.block import KEY_SCHEMES, BlockHash, Kind, KVGroup, default_seed, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace, model_digest

log = logging.getLogger(__name__)

PRODUCER = "vllm"
ALGO = "sha256_cbor"
TRIED = ("0.32", "0.33")

# In the order in which vLLM looks for them: a folder may hold the same weights in several formats.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_ROPE_BY_LENGTH = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class Offered:
    """What differs between versions of vLLM that can be served."""

    version: str
    sources: Any
    """The enumeration of where hits come from, for `vllm:prompt_tokens_cached_by_source`; None where there is none."""
    evicts: bool
    """Whether blocks can be thrown out of the engine's own prefix cache."""
    tells_of_sleep: bool
    """Whether a worker is told before the memory of its KV goes, and when it is back."""

    @classmethod
    def here(cls) -> "Offered":
        """Raises ConfigError for a version that lacks what the connector needs; notes one that was never tried."""
        version = str(getattr(vllm, "__version__", "unknown"))
        results = getattr(hooks, "KVConnectorTransferResults", None)
        needed = {
            "get_transfer_results": results is not None and "failed_recving" in _fields(results),
            "kv_connector_block_state": "kv_connector_block_state" in _fields(SchedulerOutput),
            "has_sync_kv_loads": "has_sync_kv_loads" in _fields(SchedulerOutput),
            "on_new_request": hasattr(hooks.KVConnectorBase_V1, "on_new_request"),
            "build_connector_worker_meta": hasattr(hooks.KVConnectorBase_V1, "build_connector_worker_meta"),
            "generate_block_hash_extra_keys": hasattr(kv_cache_utils, "generate_block_hash_extra_keys"),
        }
        missing = [name for name, offered in needed.items() if not offered]
        if missing:
            raise ConfigError(f"vllm {version} does not offer {', '.join(missing)}; use vllm {TRIED[0]} or newer")
        if not version.startswith(TRIED):
            log.warning("vllm %s was not tried with this connector (tried: %s); going on", version, ", ".join(TRIED))
        return cls(
            version,
            getattr(hooks, "CacheHitSource", None),
            hasattr(KVCacheManager, "evict_blocks"),
            hasattr(hooks.KVConnectorBase_V1, "unregister_kv_caches"),
        )


def _fields(kind: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


# ---- what is refused, and what the blocks are kept under


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV groups of an engine: the whole model's, and each one's layers by name, in the model's order."""

    groups: tuple[KVGroup, ...]
    layers: tuple[tuple[str, ...], ...]
    kv_dtype: str
    hash_ratios: tuple[int, ...]
    """How many of vLLM's block hashes make one block of the group."""
    windows: tuple[int, ...]
    """How many tokens before the end of a hit the group's attention sees; 0: all."""
    volatile: frozenset[int]


def refuse_unsupported(config: Any, options: Mapping[str, Any], offered: Offered) -> None:
    """Raises ConfigError, naming the flag to change, for what would be stored wrongly or never be found."""
    cache, parallel = config.cache_config, config.parallel_config
    algo = cache.prefix_caching_hash_algo
    if algo != ALGO:
        raise ConfigError(
            f"prefix_caching_hash_algo: this engine names blocks by {algo}, which other processes cannot reproduce: "
            f"start it with --prefix-caching-hash-algo {ALGO}"
        )
    wanted = options.get("seed")
    if wanted is not None and str(wanted) != (here := default_seed(ALGO)):
        raise ConfigError(
            f"seed: kv_connector_extra_config wants {wanted!r:.60}, this engine has {here!r:.60}: "
            f"start it with PYTHONHASHSEED={wanted}"
        )
    if (stages := parallel.pipeline_parallel_size) > 1:
        raise ConfigError(f"pipeline_parallel_size: {stages} stages; only --pipeline-parallel-size 1 is handled")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}: only --{name.replace('_', '-')} 1 is handled")
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError("nnodes: the ranks of one engine must be on one host, next to its daemon: use --nnodes 1")
    if getattr(parallel, "use_ray", False) and parallel.world_size > 1:
        raise ConfigError(
            "distributed_executor_backend: Ray may put the ranks of one engine on several hosts, and they must be on "
            "one, next to its daemon: use --distributed-executor-backend mp"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: KV scales that are computed at run time differ from engine to engine: "
            "start it without --calculate-kv-scales"
        )
    kv_dtype = str(cache.cache_dtype)
    if kv_dtype not in ("auto", "bfloat16", "float16", "float32", *_FP8):
        raise ConfigError(
            f"kv_cache_dtype: {kv_dtype} keeps scales beside the values; "
            f"use --kv-cache-dtype auto, bfloat16, float16, {', '.join(_FP8)}"
        )
    if kv_dtype in _FP8 and (flavour := current_platform.fp8_dtype()) != torch.float8_e4m3fn:
        # The same bytes are other numbers, and engines on other devices would take them for theirs.
        raise ConfigError(
            f"kv_cache_dtype: {kv_dtype} is {str(flavour).removeprefix('torch.')} on this device, which is not "
            "handled; use --kv-cache-dtype auto, bfloat16, float16"
        )
    if getattr(config.model_config, "enable_sleep_mode", False) and not offered.tells_of_sleep:
        raise ConfigError(
            f"enable_sleep_mode: vllm {offered.version} does not tell its connectors when the memory of the KV goes: "
            "start it without --enable-sleep-mode, or use vllm 0.33 or newer"
        )
    if config.model_config.is_encoder_decoder:
        raise ConfigError("model: encoder-decoder models are not handled")


def shape_of(config: Any, kv_cache_config: Any) -> Shape:
    """The engine's KV groups. Raises LayoutMismatch, naming a layer, for KV that is not plain attention."""
    cache, ranks = config.cache_config, config.parallel_config.tensor_parallel_size
    groups, layers, windows, dtypes, volatile = [], [], [], set(), set()
    for number, found in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(sorted(found.layer_names, key=_model_order))
        spec = _layer_spec(found.kv_cache_spec, names)
        kind = _kind(spec, names[0])
        heads = 1 if kind == "mla" else _all_heads(spec, config, ranks)
        dtypes.add(_FP8.get(str(cache.cache_dtype)) or str(spec.dtype).removeprefix("torch."))
        try:
            groups.append(KVGroup(spec.block_size, len(names), heads, spec.head_size, kind))
        except ValueError as error:
            raise LayoutMismatch(f"KV group {number} ({names[0]}): {error}") from error
        layers.append(names)
        # The token that comes next sees itself too; some are kept below that for drafters of several modules.
        window = spec.sliding_window - 1 if type(spec).__name__ == "SlidingWindowSpec" else 0
        windows.append(window + getattr(spec, "extra_retained_tokens", 0) if window else 0)
        if getattr(found, "is_eagle_group", False):
            volatile.add(number)
    if not groups:
        raise LayoutMismatch("the model has no KV cache")
    if len(dtypes) != 1:
        raise LayoutMismatch(f"KV groups of unlike dtypes: {', '.join(sorted(dtypes))}")
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    unit = resolve(kv_cache_config, config)[1] if resolve is not None else groups[0].block_tokens
    if any(group.block_tokens % unit for group in groups):
        raise LayoutMismatch(f"blocks are hashed by {unit} tokens, which KV groups are no multiples of")
    return Shape(
        tuple(groups),
        tuple(layers),
        dtypes.pop(),
        tuple(group.block_tokens // unit for group in groups),
        tuple(windows),
        frozenset(volatile),
    )


def _model_order(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _layer_spec(spec: Any, names: Sequence[str]) -> Any:
    """The one spec that all layers of a group have."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        return spec
    kinds = [inner[name] for name in names]
    if any(one != kinds[0] for one in kinds):
        odd = next(name for name, one in zip(names, kinds, strict=True) if one != kinds[0])
        raise LayoutMismatch(f"layer {odd} keeps other KV than layer {names[0]} of the same KV group")
    return kinds[0]


def _kind(spec: Any, layer: str) -> Kind:
    name = type(spec).__name__
    refused = f"layer {layer} keeps its KV as {name}"
    if name not in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec"):
        family = "a recurrent state" if "Mamba" in name else "not plain attention"
        raise LayoutMismatch(f"{refused}: {family}; it cannot be cached outside of vLLM by this connector")
    if getattr(spec, "non_causal", False):
        raise LayoutMismatch(f"{refused}, and its attention is not causal: a prefix has no KV of its own")
    mode = getattr(spec, "kv_quant_mode", 0)
    if int(mode) not in (0, 1):
        raise LayoutMismatch(f"{refused}, quantised as {getattr(mode, 'name', mode)}: its scales are not stored")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise LayoutMismatch(f"{refused}, of {spec.tokens_per_state} tokens a state; only 1 is handled")
    if name == "MLAAttentionSpec":
        if getattr(spec, "model_version", None) is not None:
            raise LayoutMismatch(f"{refused} of {spec.model_version}, a packed format that is not handled")
        return "mla"
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise LayoutMismatch(f"{refused} with keys of {spec.head_size} and values of {spec.head_size_v}")
    if getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads):
        raise LayoutMismatch(f"{refused} with {spec.num_head_slots} slots for {spec.num_kv_heads} heads")
    return "attention"


def _all_heads(spec: Any, config: Any, ranks: int) -> int:
    """The whole model's KV heads, where one rank has `spec.num_kv_heads` of them."""
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None:
        shards = max(1, config.model_config.get_total_num_kv_heads() // spec.num_kv_heads)
    return int(spec.num_kv_heads * min(ranks, shards))


def namespace_of(config: Any, shape: Shape, options: Mapping[str, Any]) -> Namespace:
    """What this engine's blocks are kept under: what the model is, never its path or served name.

    Raises ConfigError where that cannot be told, LayoutMismatch for what blocks cannot hold.
    """
    model = config.model_config
    root = none_hash(default_seed(ALGO), ALGO)
    rope = dict(getattr(model.hf_text_config, "rope_parameters", None) or {})
    text = json.dumps(rope, sort_keys=True, default=str) if rope else ""
    by_length = any(kind in text for kind in _ROPE_BY_LENGTH)
    given = options.get("model_identity")
    identity = model_identity(
        config, None if given is None else str(given), 'kv_connector_extra_config {"model_identity": "..."}'
    )
    scaled = shape.kv_dtype.startswith("float8_")
    try:
        return Namespace(
            model=identity,
            weights_epoch=str(options.get("weights_epoch", "")),
            kv_dtype=shape.kv_dtype,
            groups=shape.groups,
            # Scales come with the weights, which the identity covers; without any they are 1.
            kv_scales=hashlib.sha256(f"of the checkpoint {identity}".encode()).hexdigest() if scaled else "",
            rope=text if len(text) <= 256 else hashlib.sha256(text.encode()).hexdigest(),
            max_model_len=model.max_model_len if by_length else 0,
            quantisation=str(model.quantization or ""),
            producer=PRODUCER,
            hash_algo=ALGO,
            key_scheme=_key_scheme(root),
            none_hash=root,
        )
    except ValueError as error:
        raise LayoutMismatch(str(error)) from error


def model_identity(config: Any, given: str | None, how: str) -> str:
    """A digest of what the engine computes with: the effective config and the weight files, a draft model's too.

    `given`: the weights' name instead of their files, if somebody gave one; `how` says where that is done. Raises
    ConfigError where there is nothing to digest.
    """
    model, load = config.model_config, config.load_config
    draft = getattr(config.speculative_config, "draft_model_config", None)
    effective = _effective(model)
    files: list[Path] = []
    if given is not None:
        effective["kvcascade.model_identity"] = given
    elif load.load_format == "dummy":
        effective["kvcascade.dummy_seed"] = model.seed
    else:
        files = _weight_files(model, load, how)
    # Drafters without a model of their own name the target's.
    if draft is not None and _effective(draft) != _effective(model):
        # Its layers' KV lies in the same blocks.
        effective["kvcascade.draft"] = _effective(draft)
        if given is None and draft.model != model.model:
            files += _weight_files(draft, load, how)
    return model_digest(effective, files)


def _effective(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
    return config | {"kvcascade.compute_dtype": str(model.dtype)}


def _weight_files(model: Any, load: Any, how: str) -> list[Path]:
    place = Path(model.model)
    if place.is_file():
        return [place]
    if not place.is_dir():
        from huggingface_hub import snapshot_download

        try:
            place = Path(
                snapshot_download(
                    model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
                )
            )
        except Exception as error:  # a foreign library's, of many kinds, which all mean the same
            raise ConfigError(
                f"model: the files of {model.model!r:.80} are not on this machine, so its identity is not known: give "
                f"one with {how}"
            ) from error
    for pattern in _WEIGHTS:
        if files := sorted(place.glob(pattern)):
            return files
    raise ConfigError(
        f"model: {model.model!r:.80} has no weight files ({', '.join(_WEIGHTS)}), so its identity is not known: give "
        f"one with {how}"
    )


def _key_scheme(root: BlockHash) -> str:
    """The scheme by which this vLLM's own code names blocks; Refused where it is none that we know."""
    offered = own_probe(root)
    for scheme in KEY_SCHEMES:
        if probe_hashes(algo=ALGO, none_hash=root, key_scheme=scheme) == offered:
            return scheme
    raise Refused(
        f"key scheme: vllm {vllm.__version__} names blocks in a way that is not known (known are "
        f"{', '.join(KEY_SCHEMES)}): a newer kvcascade is needed"
    )


def own_probe(root: BlockHash) -> list[bytes]:
    """The hashes that vLLM's own functions give for the prompt of `probe_hashes`."""
    edges = (0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
    tokens = [*edges, *range(1000, 1032 - len(edges))]
    request = SimpleNamespace(
        lora_request=SimpleNamespace(lora_name="probe-adapter", lora_path="/probe/adapter"),
        mm_features=[
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for name, offset, length in (("probe-image", 5, 20), ("probe-sound", 26, 3))
        ],
        cache_salt="probe-sält",
        prompt_embeds=torch.arange(64, dtype=torch.uint8).reshape(32, 2),
        _prompt_embeds_per_block_hashes={},
    )
    function = get_hash_fn_by_name(ALGO)
    hashes: list[bytes] = []
    parent: bytes = root
    for start in (0, 16):
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + 16, 0)
        parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[start : start + 16], keys)
        hashes.append(bytes(parent))
    return hashes
