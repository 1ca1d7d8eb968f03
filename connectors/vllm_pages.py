"""What vLLM's own pages are to the daemon: cut and named as vLLM's config says, under a namespace of their own.

Rule: whatever changes the bytes of a page, or its key, is in the namespace; what cannot be told, or cannot be shared,
is refused by the name of the flag to change.
"""

import json
import os
import sys
from hashlib import sha256
from types import FrameType
from typing import Any, Final

import vllm
from vllm.platforms import current_platform

from kvcascade.config.errors import ConfigError
from kvcascade.daemon.protocol import PAGE
from kvcascade.tiers.block import CRYPTOGRAPHIC, TAGGED, KVGroup, default_seed, none_hash
from kvcascade.tiers.namespace import Namespace

from .vllm_model import model_identity

PRODUCER: Final = "vllm-offload"


def engine_config(spec: Any) -> tuple[Any, Any]:
    """The engine's VllmConfig and KVCacheConfig, or (None, None).

    vLLM hands a tier an excerpt without hash algorithm, weights, quantisation and rope; all of them change what a block
    is. The whole is a local variable of the constructor that is making us, and proves to be the one that `spec` was cut
    from by holding the very same extra config.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        transfer = getattr(config, "kv_transfer_config", None)
        if transfer is not None and transfer.kv_connector_extra_config is spec.config.extra_config:
            return config, frame.f_locals.get("kv_cache_config")
        frame = frame.f_back
    return None, None


def page_namespace(
    spec: Any, row_bytes: int, chained: dict[int, bool], engine: Any, *, model: str, weights_epoch: str, hash_algo: str
) -> Namespace:
    """The namespace of vLLM's own pages under this config: whatever changes their bytes or their keys.

    Raises ConfigError naming the field that cannot be used.
    """
    config, parallel = spec.config, spec.config.parallel
    pages = {
        # Pages may be cut anew by any version but a bug fix.
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "row": row_bytes,
        "hash_tokens": config.cache.tokens_per_hash,
        "chunk_blocks": config.cache.blocks_per_chunk,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout or "",
        # Some arrange the bytes of a page in a way of their own, under a layout that says nothing of it.
        "platform": current_platform.device_name + (" fnuz" if current_platform.is_fp8_fnuz() else ""),
        "canonical": bool(config.canonical_layout),
        "replicated": bool(spec.replicated_layout),
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names), chained[group.group_id]]
            for group in config.groups
        ],
        "parallel": "any"
        if parallel.is_parallelism_agnostic
        else [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
    }
    quantisation = str(getattr(getattr(engine, "model_config", None), "quantization", None) or "")
    identity = [_model(engine, model), _engine_identity(engine), pages]
    seed = default_seed(hash_algo)
    try:
        return Namespace(
            model=sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
            weights_epoch=weights_epoch,
            kv_dtype="uint8",
            groups=tuple(
                KVGroup(
                    block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
                    layers=row_bytes // PAGE,
                    kv_heads=1,
                    head_dim=PAGE,
                    kind="pages",
                )
                for group in config.groups
            ),
            kv_scales="",
            rope="",
            max_model_len=0,
            quantisation=quantisation,
            producer=PRODUCER,
            hash_algo=hash_algo,
            key_scheme=TAGGED,
            none_hash=none_hash(seed, hash_algo),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _model(engine: Any, given: str) -> str:
    if engine is not None:
        return model_identity(engine, given or None, 'the tier\'s config: "model": "..."')
    if not given:
        raise ConfigError('model: vLLM\'s config is not in reach; name the model in the tier\'s config: "model": "..."')
    return given


def _engine_identity(engine: Any) -> dict[str, Any]:
    """What of the engine's config changes the content of a page, beside weights and what the pages themselves tell."""
    if engine is None:
        return {}
    model, text = engine.model_config, engine.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_length = "dynamic" in str(rope) or "longrope" in str(rope)
    return {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "attention": str(getattr(getattr(engine, "attention_config", None), "backend", None) or ""),
        "max_model_len": model.max_model_len if by_length else 0,
    }


def refuse_computed_scales(engine: Any) -> None:
    """Raises ConfigError for KV whose scales are computed at run time, which no version from 0.32 on does."""
    if engine is not None and getattr(engine.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: scales computed at run time differ from engine to engine: "
            "start it without --calculate-kv-scales"
        )


def hash_algo_of(engine: Any, declared: str) -> str:
    """vLLM's hash algorithm. Raises ConfigError for one that cannot be shared, naming the flag."""
    actual = engine.cache_config.prefix_caching_hash_algo if engine is not None else declared or "sha256_cbor"
    if declared and declared != actual:
        raise ConfigError(f"hash_algo: the tier's config says {declared}, vLLM uses {actual}")
    if actual not in CRYPTOGRAPHIC:
        if "PYTHONHASHSEED" not in os.environ:
            raise ConfigError(
                f"PYTHONHASHSEED: unset, so {actual} has a random root in each process and no block is ever found "
                "again; pass --prefix-caching-hash-algo sha256_cbor"
            )
        raise ConfigError(
            f"hash_algo: {actual} can collide, and vLLM gives tiers no token ids to compare; "
            "pass --prefix-caching-hash-algo sha256_cbor"
        )
    if actual == "sha256" and declared != "sha256":
        raise ConfigError(
            "hash_algo: sha256 hashes pickles, which differ between Python versions: pass --prefix-caching-hash-algo "
            'sha256_cbor, or accept it by "hash_algo": "sha256" in the tier\'s config'
        )
    return str(actual)


def chained_groups(spec: Any, kv_cache: Any) -> dict[int, bool]:
    """Which KV groups keep whole chains. Where nobody says, none: blocks that stand alone are always right."""
    chained: dict[int, bool] = {}
    for group in spec.config.groups:
        if hasattr(group, "sliding_window_size_in_chunks"):  # since 0.33
            chained[group.group_id] = group.sliding_window_size_in_chunks is None
        elif kv_cache is not None:
            from vllm.v1.kv_cache_interface import is_full_attention_spec

            whole = is_full_attention_spec(kv_cache.kv_cache_groups[group.group_id].kv_cache_spec)
            chained[group.group_id] = bool(whole)
        else:
            chained[group.group_id] = False
    return chained
