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
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache

from kvcascade.config.errors import CascadeError, DaemonUnavailable, Refused
from kvcascade.daemon.attachment import Lookup, Session
from kvcascade.daemon.protocol import BlockState, Tier
from kvcascade.tiers.block import BlockHash, BlockHasher, probe_hashes
from kvcascade.tiers.namespace import Namespace

from .huggingface_model import (
    ALGO,
    BLOCK_TOKENS,
    PRODUCER,
    KVShape,
    Weights,
    adapters_of,
    check_cache,
    kv_shape,
    layers_of,
    namespace_of,
    one_sequence,
)
from .layout import Layers, empty_layers, load_sequence, store_sequence
from .pools import PoolViews

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        self._weights = Weights(model)
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
        self._session.close()  # with its pools, from which no copy runs any more, go their views

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
                    store_sequence(layers_of(cache), slots, reservation.blocks.tolist(), self._block_tokens)
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
        if adapters := adapters_of(self._model):
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
