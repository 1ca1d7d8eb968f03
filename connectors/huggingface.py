"""A prefix cache for `transformers` language models, fed by the daemon: attach, look up, load, generate, store.

    prefixes = PrefixCache(model)                              # attach, once a process
    prompt = prefixes.lookup(inputs.input_ids)                 # what of it is there
    loaded = prefixes.load(prompt)                             # a cache of its own for this generation
    output = model.generate(**inputs, **loaded.arguments)      # computes only the rest
    prefixes.store(output, loaded)                             # the full blocks of what is final now

Rule: misuse raises before anything is generated; the daemon's troubles never do. A model whose KV is not a pure
function of the tokens before it, in plain tensors, is refused when it attaches (LayoutMismatch says what was seen). A
daemon that is absent, slow, killed or restarted is a miss, counted by reason; the next call attaches again by itself.
"""

import copy
import hashlib
import inspect
import json
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcascade.config.errors import CascadeError, DaemonUnavailable, LayoutMismatch, Refused
from kvcascade.daemon.attachment import Lookup, Session
from kvcascade.daemon.protocol import BlockState, Tier
from kvcascade.tiers.block import TAGGED, BlockHash, BlockHasher, KVGroup, default_seed, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace, model_digest

from .layout import Layers, describe_sequence, empty_layers, load_sequence, store_sequence
from .pools import PoolViews

T = TypeVar("T")

log = logging.getLogger(__name__)

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
    if adapters := _adapters(model):
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
    batch = len(_layers(cache)[0][0])
    if batch != 1:
        raise LayoutMismatch(f"a batch of {batch} sequences; only one at a time is handled")
    describe_sequence(_layers(cache), shape.group(BLOCK_TOKENS), shape.kv_dtype)
    return tokens


def _layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
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


def _adapters(model: Any) -> str:
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


class _Weights:
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


# ---- what a call found and did


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that was looked up. What was found is kept from eviction until it is loaded, or for some seconds."""

    tokens: list[int]
    hasher: BlockHasher
    """Holds the hashes of the prompt's full blocks; `store` goes on from a copy and hashes only what is new."""
    lookup: Lookup | None
    """The daemon's answer; None where it was not asked or gave none."""
    epoch: int
    """Which state of the weights it is about."""
    seconds: float
    missed: str
    """Why there is no answer; empty where there is one."""

    @property
    def matched_tokens(self) -> int:
        """The tokens whose KV is in some tier; a load may bring fewer, where they do not come up in time."""
        return self.lookup.matched * self.hasher.block_size if self.lookup else 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one lookup and load brought. At least one token of a prompt is always left to compute."""

    prompt_tokens: int
    tokens: Mapping[str, int]
    """Tokens loaded, by the tier that they were in when they were looked up: hbm, dram, disk."""
    bytes: int
    lookup_seconds: float
    load_seconds: float
    missed: str
    """Why blocks that could have come did not; empty where all came that were there."""

    @property
    def loaded_tokens(self) -> int:
        return sum(self.tokens.values())


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A cache that one generation may use and change: an independent copy, empty where nothing came."""

    cache: DynamicCache
    arguments: dict[str, Any]
    """For `model.generate` or the model itself: the cache under the name that this model takes it by."""
    prompt: Prompt
    report: LoadReport


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What one store did, in blocks: the full ones of final tokens are stored now, were there already, or refused."""

    stored: int
    here: int
    refused: int
    """No room, or another engine is storing them now."""
    bytes: int
    seconds: float
    missed: str
    """Why blocks that could have been stored were not."""


@dataclass(slots=True)
class Counters:
    """Sums since the cache was attached, for metrics."""

    lookups: int = 0
    loads: int = 0
    stores: int = 0
    prompt_tokens: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens loaded, by tier."""
    bytes_loaded: int = 0
    bytes_stored: int = 0
    blocks_failed: int = 0
    """Blocks whose slot was handed on while they were copied: computed again, and reported to the daemon."""
    missed: Counter[str] = field(default_factory=Counter)
    """Questions that the daemon did not answer or that were not asked, by reason."""


# ---- the cache


class PrefixCache:
    """One model's attachment to the daemon. Thread-safe: generations may run at once, each on a `Loaded` of its own.

    What blocks are named by is token ids alone: a generation that also depends on something else (images, embeddings,
    positions or masks of its own) must not use what `load` gives, nor be stored. Weights that are changed in place
    after attaching get a private namespace by themselves; weights that many processes update alike are named by
    `weights_epoch`.
    """

    def __init__(
        self,
        model: Any,
        *,
        socket: str | os.PathLike[str] | None = None,
        block_tokens: int = BLOCK_TOKENS,
        seed: str | None = None,
        weights_epoch: str = "",
        timeout: float = 1.0,
        wait: float = 2.0,
        ask: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Attach `model`, which must be in memory and in eval mode.

        Args:
            socket: the daemon's; without it KVCASCADE_SOCKET, else the default of this user.
            block_tokens: tokens a block; engines share blocks of the same size alone.
            seed: of the block hashes; without it PYTHONHASHSEED, else vLLM's constant.
            weights_epoch: the version of weights that are updated under the same name.
            timeout: seconds after which a question to the daemon counts as unanswered. Then it is left alone for a
                second, for two, up to 30, so that a stalled daemon costs little.
            wait: seconds that a load may take for blocks to come up from disk or from other nodes.
            ask: seconds that a lookup may take for other nodes and Redis to say what they have.

        No daemon is no error: every lookup is a miss until there is one. Raises LayoutMismatch for a model that is not
        handled (see `kv_shape`), Refused or ProtocolError where a daemon answers and contradicts.
        """
        self._model = model
        self._shape = kv_shape(model)
        self._block_tokens = block_tokens
        self._socket = socket
        self._timeout = timeout
        self._wait = wait
        self._ask_wait = ask
        self._clock = clock
        namespace = namespace_of(model, self._shape, block_tokens=block_tokens, seed=seed, weights_epoch=weights_epoch)
        gpus = (device for device in self._shape.devices if device.type == "cuda")
        self._views = PoolViews(next(gpus, torch.device("cpu")))
        # All of this changes under _lock, except what a session changes in itself.
        self._lock = threading.Lock()
        self._counters = Counters()
        self._namespace = namespace
        self._weights = _Weights(model)
        self._epoch = self._weights.epoch()
        self._session = self._new_session(namespace)
        self._pid = os.getpid()
        self._pause = 0.0
        self._not_before = 0.0
        try:
            attached = self._session.attach()
        except DaemonUnavailable as error:
            log.warning("no daemon, so every prompt is computed; attaching later by itself reason=%s", error)
        except CascadeError:
            self._session.close()
            raise
        else:
            for warning in attached.warnings:
                log.warning("the daemon warns: %s", warning)

    @property
    def namespace(self) -> Namespace:
        """What the blocks of this model are kept under."""
        return self._namespace

    @property
    def attached(self) -> bool:
        """Whether a daemon is connected, as far as known. Every call attaches by itself when one is there."""
        return self._session.attached

    def counters(self) -> Counters:
        """A copy of the sums so far."""
        with self._lock:
            return copy.deepcopy(self._counters)

    def close(self) -> None:
        """Detach. Never raises; idempotent. What was loaded stays good; later lookups miss."""
        self._session.close()
        self._views.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- look up

    def lookup(self, input_ids: Any, attention_mask: Any = None, *, ticket: bytes = b"") -> Prompt:
        """Ask which leading blocks of one prompt are there, and have them brought up and kept for a moment.

        `input_ids`: token ids, as a list or a tensor of shape [n] or [1, n]. `ticket`: another engine's `hand_off` of
        this prompt; blocks that are still being stored there are then waited for. Load next, or `release` what is not
        wanted. Raises LayoutMismatch for a batch and for padding; never for the daemon.
        """
        began = time.perf_counter()
        tokens = one_sequence(input_ids, attention_mask)
        hasher = BlockHasher(self._block_tokens, algo=ALGO, none_hash=self._namespace.none_hash)
        # [0, usable) blocks may be loaded: at least one token is computed, or there would be no logits (fault E10).
        usable = max(0, len(tokens) - 1) // self._block_tokens
        hashes = hasher.extend(tokens)[:usable]
        epoch = self._epoch_now()
        lookup, missed = None, ""
        if hashes:
            request = uuid.uuid4().bytes
            lookup, missed = self._ask(
                lambda session: session.lookup(
                    hashes,
                    request=request,
                    wait_ms=int(1000 * (self._wait if ticket else self._ask_wait)),
                    ticket=ticket,
                    timeout=self._timeout + (self._wait if ticket else self._ask_wait),
                ),
                epoch,
            )
        with self._lock:
            self._counters.lookups += 1
            self._counters.prompt_tokens += len(tokens)
        return Prompt(tokens, hasher, lookup, epoch, time.perf_counter() - began, missed)

    def release(self, prompt: Prompt) -> None:
        """Let go of what a lookup keeps from eviction, where the prompt will not be loaded. Idempotent."""
        lookup = prompt.lookup
        if lookup is not None and lookup.lease:
            self._ask(lambda session: session.release(lookup.lease, timeout=self._timeout), prompt.epoch)

    def computed(self, tokens: int, seconds: float, *, position: int = 0) -> None:
        """Say how long the model took to compute `tokens` of a prompt, of which the first is at `position`.

        What lies on other nodes is fetched where it arrives sooner than it could be computed; the daemon learns the
        speed from this. Never raises for the daemon.
        """
        self._ask(
            lambda session: session.computed(tokens, seconds, position=position, timeout=self._timeout), self._epoch
        )

    def hand_off(self, prompt: Prompt, *, keep: float = 60.0) -> bytes:
        """A ticket by which an engine of another node finds the prompt's blocks, also those that are being stored now.

        They stay here until fetched, or for `keep` seconds. Empty where no daemon serves other nodes.
        """
        hashes = prompt.hasher.hashes
        if not hashes:
            return b""
        ticket, missed = self._ask(
            lambda session: session.hand_off(hashes, keep_ms=int(keep * 1000), timeout=self._timeout), prompt.epoch
        )
        if missed:
            log.warning("not handed off reason=%s", missed)
        return ticket or b""

    # ---- load

    def load(self, prompt: Prompt) -> Loaded:
        """Copy what was found into a new cache, verified; what does not come in time or is doubted is left out.

        May be called again for another copy, as long as the lookup's lease lasts. Never raises for the daemon.
        """
        began = time.perf_counter()
        lookup, missed = prompt.lookup, prompt.missed
        # Without a config, which costs 0.4 ms to look through: its layers are DynamicLayers, and so are the model's.
        cache = DynamicCache()
        count = 0
        if lookup is not None and lookup.matched and not lookup.lease:
            missed = "what was found could not be kept from eviction: this engine holds as much as it may"
        elif lookup is not None and lookup.matched:
            usable = (len(prompt.tokens) - 1) // self._block_tokens
            wanted = min(lookup.matched, usable)
            lease = lookup.lease
            copied, missed = self._ask(lambda session: self._copy_in(session, lease, wanted), prompt.epoch)
            if copied is not None:
                layers, count, missed = copied
                if count:
                    _fill(cache, layers, count * self._block_tokens)
            self.release(prompt)
        tiers: Counter[str] = Counter()
        if lookup is not None:
            for tier in lookup.tiers[:count].tolist():
                tiers[Tier(tier).name.lower()] += self._block_tokens
        nbytes = count * self._namespace.block_bytes(0)
        with self._lock:
            self._counters.loads += 1
            self._counters.tokens += tiers
            self._counters.bytes_loaded += nbytes
        report = LoadReport(
            prompt_tokens=len(prompt.tokens),
            tokens=dict(tiers),
            bytes=nbytes,
            lookup_seconds=prompt.seconds,
            load_seconds=time.perf_counter() - began,
            missed=missed,
        )
        return Loaded(cache, {self._shape.argument: cache}, prompt, report)

    def _copy_in(self, session: Session, lease: int, wanted: int) -> tuple[Layers, int, str]:
        """The layers' keys and values, how many leading blocks of them are proven, and why not all that were wanted."""
        place = session.load(lease, wanted, wait_ms=int(self._wait * 1000), timeout=self._wait + self._timeout)
        missed = "" if place.count == wanted else f"{wanted - place.count} blocks did not come up in {self._wait:g} s"
        if not place.count:
            return [], 0, missed
        layers = _empty_layers(self._shape, place.count * self._block_tokens)
        with session.copying(place) as pools:
            slots = self._views.slots(pools, place.pools, place.pages, self._namespace.block_bytes(0))
            load_sequence(layers, slots, self._block_tokens)
            _synchronize(self._shape.devices)
        # Only now, when no byte moves any more, does a generation prove what was copied.
        intact = session.intact(place)
        if intact.all():
            return layers, place.count, missed
        count = int(intact.argmin())
        doubted = np.flatnonzero(~intact).astype(np.uint32)
        with self._lock:
            self._counters.blocks_failed += len(doubted)
        try:
            session.failed(lease, doubted, timeout=self._timeout)
        except CascadeError as error:
            log.debug("a failed load could not be reported reason=%s", error)
        return layers, count, f"{len(doubted)} blocks were handed on while they were copied"

    # ---- store

    def store(self, output: Any, loaded: Loaded) -> StoreReport:
        """Store the full blocks of the final tokens, those whose KV is in the cache that `generate` was given.

        `output`: the whole sequence, prompt first: what `generate` returned, or token ids. Blocks that were loaded are
        not looked at again; of the others the daemon takes those that it does not have. Raises ValueError for a
        sequence that does not go on from the prompt, LayoutMismatch for a batch or a cache of another kind; never for
        the daemon.
        """
        began = time.perf_counter()
        prompt = loaded.prompt
        tokens = one_sequence(getattr(output, "sequences", output))
        if tokens[: len(prompt.tokens)] != prompt.tokens:
            raise ValueError("the output does not begin with the prompt: pass generate's whole result, prompt first")
        # A token's KV is final once the token is and its KV is in the cache; the last one drawn has none yet.
        final = min(len(tokens), check_cache(loaded.cache, self._shape))
        hasher = copy.deepcopy(prompt.hasher)
        hasher.extend(tokens[len(prompt.tokens) :])
        blocks = final // self._block_tokens
        start = loaded.report.loaded_tokens // self._block_tokens
        done, missed = None, ""
        if start < blocks:
            hashes, ids = hasher.hashes[:blocks], tokens[: blocks * self._block_tokens]
            self._epoch_now()
            done, missed = self._ask(
                lambda session: self._copy_out(session, loaded.cache, hashes, ids, start), prompt.epoch
            )
        stored, here, refused = done or (0, 0, 0)
        nbytes = stored * self._namespace.block_bytes(0)
        with self._lock:
            self._counters.stores += 1
            self._counters.bytes_stored += nbytes
        return StoreReport(stored, start + here, refused, nbytes, time.perf_counter() - began, missed)

    def _copy_out(
        self, session: Session, cache: DynamicCache, hashes: list[BlockHash], tokens: list[int], start: int
    ) -> tuple[int, int, int]:
        """How many blocks were stored, were here, and were refused."""
        request = uuid.uuid4().bytes
        while True:
            reservation = session.reserve(
                hashes,
                request=request,
                start=start,
                tokens=np.asarray(tokens[start * self._block_tokens :], np.uint32),
                timeout=self._timeout,
            )
            if reservation.hole is None or reservation.hole >= start:
                break
            # Blocks that were loaded have been evicted since: store from there on, their KV is in the cache too.
            session.abort(reservation.lease, timeout=self._timeout)
            start = reservation.hole
        stored = 0
        if len(reservation.blocks):
            try:
                with session.copying(reservation) as pools:
                    nbytes = self._namespace.block_bytes(0)
                    slots = self._views.slots(pools, reservation.pools, reservation.pages, nbytes)
                    store_sequence(_layers(cache), slots, reservation.blocks.tolist(), self._block_tokens)
                    _synchronize(self._shape.devices)
            except BaseException:
                session.abort(reservation.lease, timeout=self._timeout)
                raise
            stored = session.commit(reservation.lease, reservation.blocks, timeout=self._timeout).ready
        here = int((reservation.states == BlockState.HERE).sum())
        return stored, here, len(reservation.states) - stored - here

    # ---- the daemon's troubles end here

    def _ask(self, question: Callable[[Session], T], epoch: int) -> tuple[T | None, str]:
        """What the daemon answered, or None and why. `epoch`: the state of the weights that the question is about."""
        try:
            session = self._session_now(epoch)
            if self._clock() < self._not_before:
                raise DaemonUnavailable("the daemon did not answer lately and is left alone")
            was_attached = session.attached
            try:
                answer = question(session)
            except DaemonUnavailable:
                if session.attached:
                    self._leave_alone()
                    raise
                if not was_attached:
                    raise
                # It went away since the last call, perhaps to come back at once.
                answer = question(session)
        except CascadeError as error:
            reason = f"{type(error).__name__}: {error}"
            log.debug("the daemon did not serve reason=%s", reason)
        except Exception as error:
            # Whatever a foreign process may cause in our copies and mappings, the generation goes on without it.
            reason = f"{type(error).__name__}: {error}"
            log.exception("unexpected error while using the daemon")
        else:
            self._pause = 0.0
            return answer, ""
        with self._lock:
            self._counters.missed[reason.partition(":")[0]] += 1
        return None, reason

    def _leave_alone(self) -> None:
        self._pause = min(30.0, max(1.0, 2 * self._pause))
        self._not_before = self._clock() + self._pause

    def _session_now(self, epoch: int) -> Session:
        """The session of this model in this process. Raises Refused where the model must not be used as it is now."""
        if self._model.training:
            raise Refused("the model is in training mode")
        if adapters := _adapters(self._model):
            raise Refused(f"the model carries adapters ({adapters})")
        with self._lock:
            if epoch != self._epoch:
                raise Refused("the weights were changed since the prompt was looked up")
            session = self._session
            forked, self._pid = self._pid != os.getpid(), os.getpid()
        if forked:
            session.attach()
        return session

    def _epoch_now(self) -> int:
        """The state of the weights; where it is a new one, blocks go to a private namespace from now on."""
        epoch = self._weights.epoch()
        with self._lock:
            if epoch == self._epoch:
                return epoch
            log.warning("the weights were changed in place: what they compute is shared with nobody from now on")
            old, self._epoch = self._session, epoch
            self._namespace = replace(self._namespace, weights_epoch=f"private-{uuid.uuid4().hex}")
            self._session = self._new_session(self._namespace)
        old.close()
        return epoch

    def _new_session(self, namespace: Namespace) -> Session:
        return Session(
            namespace=namespace.to_map(),
            probe=probe_hashes(algo=ALGO, none_hash=namespace.none_hash, key_scheme=namespace.key_scheme),
            engine=(PRODUCER, transformers.__version__),
            socket_path=self._socket,
            timeout=self._timeout,
            clock=self._clock,
        )


def _fill(cache: Any, layers: Layers, tokens: int) -> None:
    """Make the first `tokens` of `layers` the content of a new `cache`, without another copy."""
    for index, pair in enumerate(layers):
        keys, values = (tensor[:, :, :tokens] for tensor in pair)
        # No tokens at first: `update` sets the layer up, in any version, and would copy what it is given.
        cache.update(keys[:, :, :0], values[:, :, :0], index)
        cache.layers[index].keys, cache.layers[index].values = keys, values


def _empty_layers(shape: KVShape, tokens: int) -> Layers:
    sizes = (shape.kv_heads, tokens, shape.head_dim, shape.kv_dtype)
    return [pair for device in shape.devices for pair in empty_layers(1, *sizes, device=device)]


def _synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until the copies queued on GPUs are complete."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
