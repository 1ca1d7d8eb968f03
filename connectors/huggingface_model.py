"""What a `transformers` model must be to have a prefix cache, and which one it is.

Rule: what is not recognised is refused by LayoutMismatch, which says what was seen. A model's KV is looked at rather
than guessed from its config, and its blocks are named by what it is, never by its path or name.
"""

import hashlib
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcascade.config.errors import LayoutMismatch
from kvcascade.tiers.block import TAGGED, KVGroup, default_seed, none_hash
from kvcascade.tiers.namespace import Namespace, model_digest

from .layout import describe_sequence

PRODUCER = "transformers"
ALGO = "sha256_cbor"
BLOCK_TOKENS = 16

# Rotary embeddings that change with the length of the whole request: a prefix then has no KV of its own.
_ROPE_BY_LENGTH = ("dynamic", "longrope")

# Fields of a config that say where a model came from or how text is drawn from it, and never change its KV.
_NOT_KV = frozenset(
    {
        "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id",
        "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "torch_dtype",
        "transformers_version", "unk_token_id", "use_cache",
    }
)  # fmt: skip


# ---- what a model must be


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one model as its own forward pass showed it."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """One a layer: a model may be spread over devices."""
    argument: str
    """Under which name the model takes its cache: `cache`, or `past_key_values` in older versions."""

    @property
    def kv_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def group(self, block_tokens: int) -> KVGroup:
        """The one KV group of such a model. Raises LayoutMismatch for sizes that a block cannot have."""
        try:
            return KVGroup(block_tokens, self.layers, self.kv_heads, self.head_dim)
        except ValueError as error:
            raise LayoutMismatch(str(error)) from error


def kv_shape(model: Any) -> KVShape:
    """Look at `model` and run it on two tokens, to learn its KV rather than to guess it from a config.

    Raises LayoutMismatch, naming what was seen, for everything whose KV is not one key and one value tensor a layer
    that depend on token ids alone: encoder-decoder and multi-modal models, sliding-window, recurrent, hybrid, shared,
    static, offloaded or quantised caches, keys and values of different width, rotary embeddings that change with the
    request's length, attention that looks ahead, adapters, training mode, weights that are not in memory.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutMismatch(f"{type(model).__name__} is an encoder-decoder model; only causal decoders are handled")
    if model.training:
        raise LayoutMismatch("the model is in training mode, whose dropout makes every KV unique; call model.eval()")
    if adapters := adapters_of(model):
        raise LayoutMismatch(f"the model carries adapters ({adapters}), which can be switched; merge them first")
    implementation = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise LayoutMismatch(f"generation_config.cache_implementation is {implementation!r}; only 'dynamic' is handled")
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise LayoutMismatch(f"{type(model).__name__} is multi-modal: token ids do not tell images apart")
    if kind := next((kind for kind in _rope_kinds(text) if kind in _ROPE_BY_LENGTH), None):
        raise LayoutMismatch(f"rope type {kind!r} changes with the request's length: a prefix has no KV of its own")
    if off := next((name for name, weight in model.named_parameters() if weight.device.type == "meta"), None):
        raise LayoutMismatch(f"the weight {off} is not in memory (offloaded to disk or never loaded)")
    if getattr(model, "_is_stateful", False):
        raise LayoutMismatch(f"{type(model).__name__} keeps a state besides its KV (recurrent or linear attention)")
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    one, two = (_probe(model, text, argument, tokens) for tokens in (1, 2))
    keys, values = two.layers[0].keys, two.layers[0].values
    shape = KVShape(
        layers=len(two.layers),
        kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        dtype=keys.dtype,
        devices=tuple(layer.keys.device for layer in two.layers),
        argument=argument,
    )
    if values.shape != keys.shape:
        raise LayoutMismatch(f"keys are {tuple(keys.shape)} and values {tuple(values.shape)}: their widths must agree")
    check_cache(two, shape)
    alone, followed = one.layers[-1].keys, two.layers[-1].keys[:, :, :1]
    tolerance = max(1e-3, 8 * torch.finfo(shape.dtype).eps)
    if (alone - followed).abs().max() > tolerance * alone.abs().max():
        raise LayoutMismatch("the KV of a token changes with the tokens after it: the attention is not causal")
    return shape


def _probe(model: Any, text_config: Any, argument: str, tokens: int) -> Any:
    try:
        cache = DynamicCache(config=text_config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LayoutMismatch(f"{type(model).__name__} has no standard cache: {error!r}") from error
    _check_layers(cache)
    ids = torch.arange(tokens, device=model.get_input_embeddings().weight.device)[None]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{argument: cache})
    except Exception as error:  # a foreign model's forward may raise anything; what it means is always the same
        raise LayoutMismatch(f"{type(model).__name__} does not run on a DynamicCache: {error!r}") from error
    if cache.get_seq_length() != tokens:
        raise LayoutMismatch(f"{type(model).__name__} does not keep its KV in the DynamicCache that it is given")
    return cache


def _check_layers(cache: Any) -> None:
    """Raises LayoutMismatch unless each layer is a DynamicLayer itself: subclasses are windows, indexes, hybrids."""
    kinds = [type(layer).__name__ for layer in cache.layers]
    foreign = {kind: kinds.index(kind) for kind in reversed(kinds) if kind != DynamicLayer.__name__}
    if not foreign:
        return
    seen = ", ".join(f"layer {index} is a {kind} ({_family(kind)})" for kind, index in sorted(foreign.items()))
    mixed = "a hybrid cache: " if len(set(kinds)) > 1 else ""
    raise LayoutMismatch(f"{mixed}{seen}; only full attention in DynamicLayer is handled")


def _family(kind: str) -> str:
    for part, family in (
        ("LinearAttentionAnd", "hybrid"), ("Linear", "recurrent or linear attention"), ("Mamba", "recurrent"),
        ("Sliding", "sliding-window attention"), ("Chunked", "chunked attention"), ("Static", "static"),
        ("Quant", "quantised"), ("Fp8", "quantised"), ("Indexed", "indexed attention"), ("Dummy", "no KV of its own"),
    ):  # fmt: skip
        if part in kind:
            return family
    return "not known"


def check_cache(cache: Any, shape: KVShape) -> int:
    """Return how many tokens `cache` holds in every layer.

    Raises LayoutMismatch where it is not a plain DynamicCache of one sequence with the model's shape.
    """
    if type(cache) is not DynamicCache:
        raise LayoutMismatch(f"a {type(cache).__name__} is not a DynamicCache; only that one is handled")
    if getattr(cache, "offloading", False):
        raise LayoutMismatch("an offloaded cache: its layers come and go while it is in use")
    _check_layers(cache)
    tokens = int(cache.get_seq_length())
    if not tokens:
        return 0
    batch = len(layers_of(cache)[0][0])
    if batch != 1:
        raise LayoutMismatch(f"a batch of {batch} sequences; only one at a time is handled")
    describe_sequence(layers_of(cache), shape.group(BLOCK_TOKENS), shape.kv_dtype)
    return tokens


def layers_of(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer, as they lie in memory."""
    return [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]


def one_sequence(input_ids: Any, attention_mask: Any = None) -> list[int]:
    """The token ids of one prompt, given as a list or as a tensor of shape [n] or [1, n].

    Raises LayoutMismatch for a batch, and for a mask that leaves tokens out: padded positions have another KV.
    """
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
        raise LayoutMismatch("the prompt is padded or masked; only whole sequences are handled")
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if ids and isinstance(ids[0], list):
        if len(ids) != 1:
            raise LayoutMismatch(f"a batch of {len(ids)} prompts; only one at a time is handled")
        ids = ids[0]
    return list(ids)


def adapters_of(model: Any) -> str:
    """The names of the adapters that a model carries; empty for none."""
    if getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None):
        return ", ".join(getattr(model, "peft_config", None) or ["?"])
    return ""


def _rope(text_config: Any) -> dict[str, Any]:
    """The rotary embedding's parameters, under the name of transformers 5 or of 4; empty where there is none."""
    for name in ("rope_parameters", "rope_scaling"):
        if found := getattr(text_config, name, None):
            return {"rope_theta": getattr(text_config, "rope_theta", None), **found}
    return {"rope_theta": theta} if (theta := getattr(text_config, "rope_theta", None)) else {}


def _rope_kinds(text_config: Any) -> Iterator[str]:
    rope = _rope(text_config)
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):  # or one for each layer type
        yield str(part.get("rope_type", part.get("type", "default")))


# ---- which model it is


def weights_digest(model: Any) -> str:
    """A digest of the name, shape, dtype and content of every weight as it is in memory, the same on any device.

    Headers and sizes of the files that a model came from cannot tell two fine-tunings of it apart, and a model may have
    been changed since it was read: so the content takes part, by the exact sum of its bits as integers (measured at
    30 GB/s) and by a sample of 256 elements of each weight. Raises LayoutMismatch for one that is not plain bits.
    """
    digest = hashlib.sha256()
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module and prefixes every name
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, Tensor):
            continue
        try:
            content = _content(weight.detach())
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise LayoutMismatch(f"the weight {name} cannot be read: {error}") from error
        digest.update(f"{name}\0{tuple(weight.shape)}\0{weight.dtype}\0".encode() + content)
    return digest.hexdigest()


def _content(weight: Tensor) -> bytes:
    flat = weight.contiguous().reshape(-1)
    bits = flat.view(torch.uint8)
    whole = bits.numel() // 8 * 8
    words = bits[:whole] if bits.storage_offset() % 8 == 0 else bits[:whole].clone()
    total = int(words.view(torch.int64).sum()) if whole else 0
    sample = torch.cat([flat[:: max(1, flat.numel() // 256)][:256].contiguous().view(torch.uint8), bits[whole:]])
    return total.to_bytes(8, "little", signed=True) + sample.cpu().numpy().tobytes()


class Weights:
    """Tells when a model's weights were replaced, or written to through torch: training, another checkpoint.

    Looking costs 0.1 us a weight, since every lookup pays for it; walking through the modules costs ten times that.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._epoch = 0
        self._lock = threading.Lock()
        self._note()

    def _note(self) -> None:
        self._parts: list[tuple[dict[str, Any], str, object]] = []
        self._weights: list[Tensor] = []
        for module in self._model.modules():
            for slots in (module._modules, module._parameters):
                self._parts += [(slots, name, part) for name, part in slots.items()]
            # Inference tensors have no version, and cannot be written to outside inference mode.
            weights = [weight for weight in module._parameters.values() if weight is not None]
            self._weights += [weight for weight in weights if not weight.is_inference()]
        self._versions = [weight._version for weight in self._weights]

    def epoch(self) -> int:
        """A number that is another one after each change."""
        with self._lock:
            replaced = any(slots.get(name) is not part for slots, name, part in self._parts)
            if replaced or [weight._version for weight in self._weights] != self._versions:
                self._epoch += 1
                self._note()
            return self._epoch


def namespace_of(
    model: Any, shape: KVShape, *, block_tokens: int = BLOCK_TOKENS, seed: str | None = None, weights_epoch: str = ""
) -> Namespace:
    """The namespace of `model`'s blocks: built from what the model is, never from its path or name.

    `seed` defaults to PYTHONHASHSEED, else to vLLM's constant. Raises LayoutMismatch for what blocks cannot hold.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_KV and name[0] != "_"}
    quantisation = config.pop("quantization_config", None)
    identity = hashlib.sha256(f"{model_digest(config, ())} {weights_digest(model)}".encode())
    try:
        return Namespace(
            model=identity.hexdigest(),
            weights_epoch=weights_epoch,
            kv_dtype=shape.kv_dtype,
            groups=(shape.group(block_tokens),),
            kv_scales="",
            rope=_described(_rope(model.config)),
            max_model_len=0,
            quantisation=_described(quantisation or {}),
            producer=PRODUCER,
            hash_algo=ALGO,
            key_scheme=TAGGED,
            none_hash=none_hash(default_seed(ALGO) if seed is None else seed, ALGO),
        )
    except ValueError as error:
        raise LayoutMismatch(str(error)) from error


def _described(values: Mapping[str, Any]) -> str:
    """The values as text for people, or their digest where that is long; empty for none."""
    text = json.dumps(values, sort_keys=True, default=str) if values else ""
    return text if len(text) <= 256 else hashlib.sha256(text.encode()).hexdigest()
