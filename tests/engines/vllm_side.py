"""What runs in the environment of `make engines`: vLLM's real engine, or its real scheduler around a model of ours.

Run as a program, it takes steps over a pipe (its one argument is the descriptor) as `Engine` in vllm_engine.py asks.

The model of ours (`Lab`) has no weights and is exact: the KV of a token is a number that depends on the token and on
the KV of the token before it, read back from the blocks; every byte of a block holds it, and the token drawn next
depends on it. So whatever a wrong, late or torn block does to the KV shows in the tokens. Blocks that nobody owns are
filled with poison between the steps, and are looked at again before: a copy into a block that was freed is seen.
"""

import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import cbor2
import torch

MODULUS = 65_521  # exact in float32, with room for the pattern
POISON = -7.0
BLOCK_TOKENS = 16
HEADS, LAYERS, HEAD_DIM = 2, 2, 8


# ---- the model of ours


def next_value(before: int, token: int, position: int) -> int:
    """The KV of the token at `position`, where that of the token before it is `before`."""
    return (before * 31 + token * 17 + position + 1) % MODULUS


def in_window(value: int) -> int:
    """What the layers with a window keep of a token."""
    return (value * 7 + 1) % MODULUS


def drawn(value: int, window: list[int]) -> int:
    """The next token; `window` is what the layers with a window keep of the last tokens, none without such layers."""
    return (value + sum(window)) % 991


def expected(tokens: list[int], count: int, window: int = 0, flavour: int = 0) -> list[int]:
    """What the model draws after `tokens`, by itself. `flavour`: what an adapter or an image does to it."""
    values: list[int] = []
    tokens = list(tokens)
    out: list[int] = []
    while len(out) < count:
        for position in range(len(values), len(tokens)):
            values.append(next_value(values[-1] if values else flavour, tokens[position], position))
        kept = [in_window(value) for value in values[-window:]] if window else []
        out.append(drawn(values[-1], kept))
        tokens.append(out[-1])
    return out


class HeldPool:
    """Threads whose work waits while `held`: a copy, a lookup or a reservation that takes as long as a test likes."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def release(self) -> None:
        self._open.set()

    def submit(self, work: Any, *arguments: Any) -> Any:
        def later() -> None:
            self._open.wait(60)
            work(*arguments)

        return self._pool.submit(later)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._open.set()
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)


class Lab:
    """vLLM's scheduler and KV cache manager around the connector and the model of ours."""

    def __init__(
        self,
        model: str,
        socket: str,
        *,
        blocks: int = 64,
        prefix_caching: bool = True,
        policy: str = "recompute",
        max_tokens_a_step: int = 64,
        multi: str = "",
        sibling: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        role: str = "kv_both",
        events: bool = False,
        algo: str = "sha256_cbor",
        kv_dtype: str = "auto",
        stages: int = 1,
        executor: str = "",
        fp8: str = "float8_e4m3fn",
        window: int = 0,
        drafts: int = 0,
        eagle: bool = False,
        recurrent: bool = False,
        sleeps: bool = False,
    ) -> None:
        """`multi`: "chosen" or "sibling", whether ours is the child of a MultiConnector whose hit is taken; `sibling`:
        the other's options, see vllm_shelf.py.

        `window`: tokens that a second KV group's layers see, or 0 for one group alone. `drafts`: tokens that are
        guessed for each step, some of them wrong. `eagle`: the first group holds a drafter's layers too. `recurrent`:
        another group keeps a state. `sleeps`: started with sleep mode. `executor`: that of two ranks. `fp8`: what the
        device makes of it.
        """
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVEventsConfig,
            KVTransferConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        from kvcascade.connectors import vllm_model

        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        options = {"socket": socket, "sync_budget_bytes": 0, **(extra or {})}
        ours = {
            "kv_connector": "CascadeConnector",
            "kv_connector_module_path": "kvcascade.connectors.vllm",
            "kv_role": role,
            "kv_connector_extra_config": options,
        }
        if multi:
            other = {
                "kv_connector": "ShelfConnector",
                "kv_connector_module_path": "vllm_shelf",
                "kv_role": "kv_both",
                "kv_connector_extra_config": sibling or {},
            }
            children = [ours, other] if multi == "chosen" else [other, ours]
            ours = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": children},
            }
        cache = CacheConfig(
            block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching, prefix_caching_hash_algo=algo
        )
        cache.cache_dtype = kv_dtype
        cache.kv_cache_layout = "LBHNC"
        target = ModelConfig(model=model, dtype="float32", seed=0, skip_tokenizer_init=True)
        guesses = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, target_model_config=target,
            target_parallel_config=ParallelConfig(),
        ) if drafts else None  # fmt: skip
        self._drafts, self._chance = drafts, random.Random(0)
        self.config = VllmConfig(
            model_config=target,
            speculative_config=guesses,
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=max_tokens_a_step,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=cache,
            kv_transfer_config=KVTransferConfig(**ours, kv_load_failure_policy=policy),
            device_config=DeviceConfig("cpu"),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        )
        self.config.parallel_config.pipeline_parallel_size = stages
        if executor:
            self.config.parallel_config.distributed_executor_backend = executor
            self.config.parallel_config.world_size = 2
        vllm_model.current_platform = SimpleNamespace(fp8_dtype=lambda: getattr(torch, fp8))
        target.enable_sleep_mode = sleeps  # which a CPU has not: what vLLM then calls, `sleep` and `wake` do
        sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_DIM, "dtype": torch.float32}
        specs = [FullAttentionSpec(**sizes)]
        if window:
            specs.append(SlidingWindowSpec(**sizes, sliding_window=window))
        names = [
            [f"model.layers.{group * LAYERS + layer}.self_attn.attn" for layer in range(LAYERS)]
            for group in range(len(specs))
        ]
        groups = [KVCacheGroupSpec(mine, spec) for mine, spec in zip(names, specs, strict=True)]
        groups[0].is_eagle_group = eagle
        if recurrent:
            state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,))
            groups.append(KVCacheGroupSpec(["model.layers.9.mixer"], state))
        cached = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        cache.num_gpu_blocks = blocks
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cached,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        if events:
            self.scheduler.kv_event_publisher = self
        self.logging = KVConnectorLogging(self.config.kv_transfer_config)
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cached)
        self._window = window
        # [group, layer, block, ...]: a block's id is of one group at a time, but each group has a place for it.
        self.kv = torch.full((len(specs), LAYERS, blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), POISON)
        layers = {name: self.kv[group, layer] for group, mine in enumerate(names) for layer, name in enumerate(mine)}
        self.worker.register_kv_caches(layers)
        self._pattern = (torch.arange(HEADS)[:, None] * 64 + torch.arange(2 * HEAD_DIM)[None]) % 7
        self.requests: dict[str, Any] = {}
        self._flavours: dict[str, int] = {}
        self.accepted = 0  # of the tokens that were guessed
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.told: dict[str, Any] = {}  # what a request that ended gave its client
        self.faults: list[str] = []
        self.received: list[str] = []
        self.loads: list[str] = []  # in the background, as the scheduler began them
        self.events: list[dict[str, Any]] = []
        self.computed = 0
        self._poisoned: set[int] = set()
        self.counted: dict[str, int] = {}
        self.sources: dict[str, int] = {}

    def publish(self, batch: Any) -> None:
        """In place of vLLM's publisher: keep what it would send of blocks in host memory."""
        for event in batch.events:
            if event.medium == "CPU":
                plain = {name: getattr(event, name) for name in event.__struct_fields__}
                self.events.append(json.loads(json.dumps(plain, default=str)))

    def shutdown(self) -> None:
        """As a publisher's."""

    # ---- requests

    def add(
        self,
        name: str,
        tokens: list[int],
        count: int = 4,
        parameters: Any = None,
        skip: bool = False,
        flavour: int = 0,
        lora: str = "",
        image: str = "",
        salt: str = "",
        replaced: bool = False,
    ) -> None:
        """`flavour` must differ where `lora`, `image` or `salt` do. `replaced`: the adapter's weights are new."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        if parameters is not None:
            sampling.extra_args = {"kv_transfer_params": parameters}
        sampling.update_from_generation_config({}, 2)
        if skip:
            sampling.skip_reading_prefix_cache = True
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            lora_request=LoRARequest(lora, flavour, f"/adapters/{lora}", load_inplace=replaced) if lora else None,
            cache_salt=salt or None,
            mm_features=[MultiModalFeatureSpec(None, "image", image, PlaceholderRange(3, 40))] if image else None,
        )
        if image and not self.scheduler.max_num_encoder_input_tokens:
            self.scheduler.max_num_encoder_input_tokens = 4096
            self.scheduler.encoder_cache_manager = EncoderCacheManager(4096)
        self._flavours[name] = flavour
        self.requests[name] = request
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt_all(self) -> bool:
        """As a reset of the prefix cache does it to running requests."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=True))

    def sleep(self) -> None:
        """As the engine's level 1, but that the memory stays, to be looked at: nobody may write to it."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.worker.unregister_kv_caches()
        self.kv[:] = POISON

    def wake(self) -> bool:
        """Whether nobody has touched the memory."""
        untouched = bool((self.kv == POISON).all())
        self.worker.restore_kv_caches()
        return untouched

    def fail_in(self, method: str) -> None:
        """The connector's worker side raises in one of its methods from now on."""

        def fail(*_: Any) -> None:
            raise OSError(f"no {method}")

        setattr(self.worker._paged, method, fail)

    def finish_again(self, name: str) -> None:
        self.scheduler.connector.request_finished_all_groups(self.requests[name], ([],))

    def tamper(self) -> None:
        """Let the next load within a step copy other bytes than it should, and its slots' generations say so."""
        paged = self._ours[1]._paged
        prove, store = paged._gatherers[0].load, paged._gatherers[0]

        class Torn:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def load(self, blocks: Any, slots: Any) -> None:
                prove(blocks, slots)
                lab.kv[:, :, list(blocks)[-2:]] = 12345.0
                paged._gatherers[0] = store

        lab, session = self, paged._session
        intact = session.intact

        def torn(held: Any) -> Any:
            session.intact = intact
            found = intact(held)
            found[-2:] = False
            return found

        session.intact = torn
        paged._gatherers[0] = Torn()

    def reset(self, connector: bool = True) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=connector))

    # ---- steps

    def step(self) -> list[str]:
        """One step of the engine; the requests that computed in it."""
        waiting = self._waiting()
        planned = self.scheduler.schedule()
        self.loads += sorted(self._waiting() - waiting)
        self._look_at_poison()
        output = self._execute(planned)
        told = self.scheduler.update_from_output(planned, output)
        if self._drafts:
            self._guess(list(planned.num_scheduled_tokens))
        for outputs in told.values():
            if outputs.scheduler_stats is not None:
                counted = outputs.scheduler_stats.kv_connector_stats or {}
                self._count(counted)
                if counted:  # as the process that serves logs them
                    self.logging.observe(counted)
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
                    self.told[one.request_id] = one.kv_transfer_params
        return list(planned.num_scheduled_tokens)

    def _waiting(self) -> set[str]:
        requests = self.scheduler.requests.items()
        return {name for name, one in requests if one.status.name == "WAITING_FOR_REMOTE_KVS"}

    def _execute(self, planned: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        worker, meta = self.worker, planned.kv_connector_metadata
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if planned.has_sync_kv_loads:
            worker.start_load_kv(None)
        names = list(planned.num_scheduled_tokens)
        guessed = planned.scheduled_spec_decode_tokens
        sampled = [self._forward(name, planned.num_scheduled_tokens[name], guessed.get(name, [])) for name in names]
        if not planned.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(planned.finished_req_ids)
        self.received += sorted(results.finished_recving)
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=connector_output,
        )

    def _guess(self, names: list[str]) -> None:
        """What a drafter would say: the next tokens, mostly with an error among them."""
        from vllm.v1.outputs import DraftTokenIds

        guesses = []
        for name in names:
            tokens = list(self.requests[name].all_token_ids)
            right = expected(tokens, self._drafts, self._window, self._flavours[name])
            wrong = self._chance.randrange(self._drafts + 1)
            guesses.append([(token + (place == wrong)) % 991 for place, token in enumerate(right)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))

    def _forward(self, name: str, count: int, guessed: list[int]) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens  # the scheduler counts them before they are computed
        known = len(request.all_token_ids)
        tokens = [*request.all_token_ids, *guessed]
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        value = 0
        for position in range(end - count, end):
            before = self._read(0, tables, position - 1) if position else self._flavours[name]
            value = next_value(before, tokens[position], position)
            self._write(0, tables, position, value)
            if self._window:
                self._write(1, tables, position, in_window(value))
        self.computed += count
        if end < len(tokens):
            return []
        sampled = []
        for end in range(known, len(tokens) + 1):
            # vLLM's window counts the token itself.
            seen = range(max(0, end - self._window), end) if self._window else range(0)
            value = self._read(0, tables, end - 1)
            sampled.append(drawn(value, [self._read(1, tables, position) for position in seen]))
            if end < len(tokens) and sampled[-1] != tokens[end]:
                break
        self.accepted += len(sampled) - 1
        return sampled

    def _write(self, group: int, tables: Any, position: int, value: int) -> None:
        block = tables[group][position // BLOCK_TOKENS]
        self.kv[group, :, block, :, position % BLOCK_TOKENS] = value + self._pattern

    def _read(self, group: int, tables: Any, position: int) -> int:
        """The KV of one token; another number than was written if any byte of it is another."""
        block = tables[group][position // BLOCK_TOKENS]
        found = self.kv[group, :, block, :, position % BLOCK_TOKENS] - self._pattern
        first = found.flatten()[0]
        return int(first) if bool((found == first).all()) else -1

    def _look_at_poison(self) -> None:
        """Before a step: nobody has written to what nobody owned. After that, what nobody owns is poisoned."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for block in self._poisoned:
            if not bool((self.kv[:, :, block] == POISON).all()):
                self.faults.append(f"block {block} was written to while it was free")
        free = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is None}
        for block in free:
            self.kv[:, :, block] = POISON
        # What has an owner now is written to from this step on.
        self._poisoned = free - {pool.null_block.block_id}

    def run(self, *names: str, steps: int = 400) -> None:
        """Steps until these requests have ended, and until the scheduler holds nothing of them."""
        for _ in range(steps):
            if all(self.requests[name].is_finished() for name in names):
                self._push()
                return
            if not self.step():
                time.sleep(0.005)
        raise AssertionError(f"not finished: {[(n, str(self.requests[n].status)) for n in names]}")

    def _push(self) -> None:
        """As the engine does: steps while the connector asks for them, if a test does not hold it up."""
        while not getattr(self._pool("ask"), "held", False) and self.scheduler.connector.has_pending_push_work():
            if not self.step():
                time.sleep(0.005)

    def idle(self, steps: int = 400) -> int:
        """Steps until nothing is left; how many blocks are then still owned: none should be."""
        for _ in range(steps):
            if not self.scheduler.has_requests():
                break
            if not self.step():
                time.sleep(0.005)
        pool = self.scheduler.kv_cache_manager.block_pool
        return sum(block.ref_cnt > 0 for block in pool.blocks if block is not pool.null_block)

    def idle_step_seconds(self, requests: int, steps: int) -> list[float]:
        """What the connector takes of the scheduling thread in steps in which it has nothing to do: all decode."""
        scheduler, _ = self._ours
        spent = 0.0

        def measured(method: Any) -> Any:
            def call(*arguments: Any) -> Any:
                nonlocal spent
                began = time.perf_counter()
                try:
                    return method(*arguments)
                finally:
                    spent += time.perf_counter() - began

            return call

        for number in range(requests):
            self.add(f"decodes {number}", [number * 7 + i for i in range(3)], BLOCK_TOKENS * 2)
        self.step()
        names = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
                 "update_connector_output", "get_kv_connector_stats", "take_events")  # fmt: skip
        for name in names:
            setattr(scheduler, name, measured(getattr(scheduler, name)))
        found = []
        for _ in range(steps):
            spent = 0.0
            self.step()
            found.append(spent)
        return found

    # ---- what is slow

    @property
    def _ours(self) -> tuple[Any, Any]:
        scheduler, worker = self.scheduler.connector, self.worker
        if hasattr(scheduler, "_connectors"):
            scheduler, worker = (
                next(c for c in side._connectors if type(c).__name__ == "CascadeConnector")
                for side in (scheduler, worker)
            )
        return scheduler, worker

    def _threads(self, what: str) -> tuple[Any, str, int]:
        """Who has the pool that does it, by which name, and its threads."""
        scheduler, worker = self._ours
        return {
            "ask": (scheduler._paged._asker, "_asking", 1),
            "load": (scheduler._paged._loads, "_locator", 2),
            "copy": (worker._paged, "_copier", 2),
        }[what]

    def _pool(self, what: str) -> Any:
        side, name, _ = self._threads(what)
        return getattr(side, name)

    def hold(self, what: str) -> None:
        """Have `ask`, `load` (the daemon's answers) or `copy` (the worker's threads) wait until `release`."""
        side, name, threads = self._threads(what)
        pool = getattr(side, name)
        if not isinstance(pool, HeldPool):
            pool.submit(int).result(5)
            pool = HeldPool(threads)
            setattr(side, name, pool)
        pool.hold()

    def release(self, what: str) -> None:
        self._pool(what).release()

    # ---- what a test asks

    def computed_of(self, name: str) -> int:
        return int(self.requests[name].num_computed_tokens)

    def report(self, name: str) -> dict[str, Any]:
        request = self.requests[name]
        return {
            "tokens": self.outputs[name],
            "status": request.status.name,
            "reason": self.reasons.get(name, ""),
            "parameters": self.told.get(name),
        }

    def _count(self, found: dict[str, Any]) -> None:
        for key, value in found.items():
            if isinstance(value, dict):  # a MultiConnector's child
                self._count(value)
            else:
                self.counted[key] = self.counted.get(key, 0) + value

    def counters(self) -> dict[str, int]:
        """The connector's metrics since the start."""
        for side in self._ours:
            stats = side.get_kv_connector_stats()
            self._count(stats.data if stats else {})
        return self.counted

    def close(self) -> None:
        held = [pool for what in ("ask", "load", "copy") if isinstance(pool := self._pool(what), HeldPool)]
        for pool in held:
            pool.release()
        self.worker.shutdown()
        self.scheduler.shutdown()
        for pool in held:
            pool.shutdown(wait=False)


# ---- the real engine


class Real:
    """vLLM's engine with a real model on the CPU."""

    def __init__(
        self, model: str, socket: str, *, tp: int = 1, extra: dict[str, Any] | None = None, **more: Any
    ) -> None:
        from vllm import LLM

        connector = {
            "kv_connector": "CascadeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket, **(extra or {})},
        }
        arguments = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 32,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_transfer_config": connector if socket else None,
            "disable_log_stats": False,
            "seed": 0,
            "tensor_parallel_size": tp,
            **more,
        }
        self.llm = LLM(**arguments)

    def generate(self, prompts: list[list[int]], count: int = 16) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        found = self.llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        return [
            {"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens,
             "reason": one.outputs[0].finish_reason}
            for one in found
        ]  # fmt: skip

    def timed(self, prompts: list[list[int]], count: int = 1) -> dict[str, Any]:
        """As `generate`, all at once, with the seconds that it took."""
        began = time.perf_counter()
        found = self.generate(prompts, count)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cached": [one["cached"] for one in found], "tokens": [f["tokens"] for f in found]}

    def reset(self, connector: bool = False) -> bool:
        """Forget the engine's own prefix cache, and so have it ask ours."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in self.llm.get_metrics():
            if hasattr(one, "value"):
                label = ",".join(value for key, value in sorted(one.labels.items()) if key in ("source", "reason"))
                found[one.name + (f"{{{label}}}" if label else "")] = one.value
        return found

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


# ---- the program


class Side:
    """Steps of a test, by name; `lab_...` and `real_...` are those of the one that is open."""

    def __init__(self) -> None:
        self.open: Any = None

    def ping(self) -> str:
        import vllm

        return str(vllm.__version__)

    def tells_of_sleep(self) -> bool:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        return hasattr(KVConnectorBase_V1, "unregister_kv_caches")

    def debug(self) -> None:
        import logging

        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("kvcascade").setLevel(logging.DEBUG)

    def lab(self, *arguments: Any, **named: Any) -> None:
        self.open = Lab(*arguments, **named)

    def real(self, *arguments: Any, **named: Any) -> None:
        self.open = Real(*arguments, **named)

    def do(self, step: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.open, step)(*arguments, **named)

    def get(self, name: str) -> Any:
        return getattr(self.open, name)

    def close(self) -> None:
        opened, self.open = self.open, None
        if opened is not None:
            opened.close()

    def tiny(self, folder: str) -> None:
        """A model of two layers with random weights, always the same."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(int(sys.argv[1]), False)
    side = Side()
    while True:
        try:
            step, arguments, named = cbor2.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = ["done", getattr(side, step)(*arguments, **named)]
        except BaseException as error:
            import traceback

            traceback.print_exc()
            answer = ["raised", f"{type(error).__name__}: {error}"]
        pipe.send_bytes(cbor2.dumps(answer))
    side.close()


if __name__ == "__main__":
    main()
