"""vLLM's real tiered offloading with our tier below, driven as its scheduler drives it; no GPU and no model run.

Runs under a Python that has vLLM, as a process that takes one JSON line a command on stdin and answers with one on
stdout. A manager is made by vLLM's own OffloadingConnector (scheduler side) from a VllmConfig, so that everything down
to our tier's constructor is vLLM's. What GPU workers would do is done here: they write a pattern that depends on the
key alone into the chunks of a store, and the chunks of a load must hold the pattern of their keys.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import get_hash_fn_by_name, sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

HEAD = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FINE = 16  # tokens a hash


def write_model(folder: Path, name: str) -> None:
    """A config and a file of weights: enough for a ModelConfig, and for an identity."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 4096, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    content = hashlib.sha512(name.encode()).digest()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)


def pattern(key: bytes, size: int) -> np.ndarray:
    """The bytes of a chunk: they depend on each byte of its key."""
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def window(group: dict[str, Any]) -> int:
    """How many chunks the group's window reaches back."""
    return -(-int(group["window"]) // int(group["tokens"]))


class Manager:
    """One engine's offloading."""

    def __init__(self, spec: dict[str, Any]) -> None:
        folder = Path(spec["model"])
        write_model(folder, spec.get("weights", folder.name))
        self.groups: list[dict[str, Any]] = spec["groups"]
        self.times: deque[tuple[str, float]] = deque()
        self.trace: list[str] = []
        algo = spec.get("algo", "sha256_cbor")
        groups = []
        for place, group in enumerate(self.groups):
            block = {"block_size": group["tokens"], **HEAD}
            # Pages of one size in each group, as in vLLM's hybrid models: fewer heads where blocks are longer.
            block["head_size"] = HEAD["head_size"] * self.groups[0]["tokens"] // group["tokens"]
            kind = SlidingWindowSpec(**block, sliding_window=group["window"]) if group.get("window") else None
            groups.append(KVCacheGroupSpec([f"layer{place}"], kind or FullAttentionSpec(**block)))
        cache = CacheConfig(
            block_size=self.groups[0]["tokens"], enable_prefix_caching=True, prefix_caching_hash_algo=algo,
            **spec.get("cache", {}),
        )  # fmt: skip
        cache.kv_cache_layout = "LBHNC"
        for name, value in spec.get("cache_has", {}).items():  # in other versions of vLLM
            setattr(cache, name, value)
        page = groups[0].kv_cache_spec.page_size_bytes * len(groups)
        row = -(-page // 4096) * 4096
        tier = {"type": "CascadeTier", "module_path": "kvcascade.connectors.vllm_tier", **spec.get("tier", {})}
        extra = spec.get("extra") or {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [tier],
        }
        extra["cpu_bytes_to_use"] = row * spec["chunks"]
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        config = VllmConfig(
            model_config=ModelConfig(model=str(folder), dtype="float32", seed=0, skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=4096, enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=cache,
            kv_transfer_config=transfer,
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip
        self.blocks = cache.num_gpu_blocks = spec.get("blocks", 400)
        kv = KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(spec.get("root", algo)))
        self.connector = self._connect(config, kv)
        self.manager = self.connector.connector_scheduler.manager
        self.tier = self.manager.secondary_tiers[0]
        self.totals: Counter[str] = Counter()
        self._take_stats, self.tier.get_stats = self.tier.get_stats, self._get_stats
        self.view = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        for name in (
            "on_new_request", "lookup", "submit_store", "submit_load", "on_schedule_end", "get_finished_jobs",
            "on_request_finished", "drain_jobs", "shutdown",
        ):  # fmt: skip
            setattr(self.tier, name, self._spied(name, getattr(self.tier, name)))

    def _connect(self, config: VllmConfig, kv: KVCacheConfig) -> OffloadingConnector:
        return OffloadingConnector(config, KVConnectorRole.SCHEDULER, kv)

    def _spied(self, name: str, call: Any) -> Any:
        def spied(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            self.times.append((name, time.perf_counter() - begin))
            said = f"{name} -> {result.name}" if name == "lookup" else name
            if name != "get_finished_jobs" or result:
                self.trace.append(said)
            return result

        return spied

    def keys(self, tokens: list[int]) -> list[list[bytes]]:
        """The keys of all whole chunks, a list a group."""
        fine, parent = [], None
        for start in range(0, len(tokens) // FINE * FINE, FINE):
            parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, tokens[start : start + FINE])
            fine.append(parent)
        found = []
        for place, group in enumerate(self.groups):
            step = group["tokens"] // FINE
            found.append([make_offload_key(each, place) for each in fine[step - 1 :: step]])
        return found

    def context(self, name: str, tokens: list[int], params: Any) -> tuple[ReqContext, list[list[bytes]]]:
        context = ReqContext(req_id=name, kv_transfer_params=params)
        self.manager.on_new_request(context)
        return context, self._grow(context, tokens)

    def _grow(self, context: ReqContext, tokens: list[int]) -> list[list[bytes]]:
        keys = self.keys(tokens)
        for group, mine in zip(self.groups, keys, strict=True):
            for place, key in enumerate(mine):
                context.set_offload_key_position(key, (place + 1) * group["tokens"])
        return keys

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, seconds: float) -> bool:
        """Steps until nothing is pending."""
        end = time.monotonic() + seconds
        while self.manager.has_pending_work() and time.monotonic() < end:
            self.step()
            time.sleep(0.005)
        return not self.manager.has_pending_work()

    def store(
        self, name: str, tokens: list[int], skip: int = 0, params: Any = None, wait: float = 30.0, unnamed: int = 0
    ) -> dict[str, Any]:
        """The workers have computed the prompt: its chunks but the first `skip` of full groups go to vLLM's memory.

        The places of the first `unnamed` chunks are not told.
        """
        context, keys = self.context(name, tokens, params)
        for key in keys[0][:unnamed]:
            del context._offload_key_positions[key]
        offered = []
        for group, mine in zip(self.groups, keys, strict=True):
            kept = mine[-window(group) :] if group.get("window") else mine[skip:]
            offered += kept
        output = self.manager.prepare_store(offered, context)
        if output is None:
            self.manager.on_request_finished(context)
            return {"stored": 0}
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids.tolist(), strict=True):
            self.view[chunk] = pattern(key, self.view.shape[1])
        self.step()
        if output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return {"stored": len(output.keys_to_store), "settled": self.settle(wait)}

    def load(self, name: str, tokens: list[int], wait: float = 30.0, params: Any = None) -> dict[str, Any]:
        """A request that starts with these tokens: what is found is brought up, and proved against the pattern."""
        return self._load(*self.context(name, tokens, params), wait)

    def _load(self, context: ReqContext, keys: list[list[bytes]], wait: float) -> dict[str, Any]:
        end, steps, begin = time.monotonic() + wait, 0, time.monotonic()
        while True:
            hits, again = [], False
            for group, mine in zip(self.groups, keys, strict=True):
                found, later = (self._window if group.get("window") else self._prefix)(group, mine, context)
                hits.append(found)
                again |= later
            if not again or time.monotonic() > end:
                break
            self.step()
            steps += 1
            time.sleep(0.002)
        wanted = [key for found in hits for key in found]
        good = 0
        if wanted and not again:
            spec = self.manager.prepare_load(wanted, context)
            for key, chunk in zip(wanted, spec.chunk_ids.tolist(), strict=True):
                good += bool(np.array_equal(self.view[chunk], pattern(key, self.view.shape[1])))
            self.manager.complete_load(wanted, context)
        self.step()
        self.manager.on_request_finished(context)
        settled = self.settle(wait)
        return {
            "hits": [len(found) for found in hits], "good": good, "waiting": again, "steps": steps,
            "seconds": time.monotonic() - begin, "settled": settled,
        }  # fmt: skip

    def _prefix(self, group: dict[str, Any], keys: list[bytes], context: ReqContext) -> tuple[list[bytes], bool]:
        found, later = [], False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            later |= result is not LookupResult.HIT
            found.append(key)
        return found, later

    def _window(self, group: dict[str, Any], keys: list[bytes], context: ReqContext) -> tuple[list[bytes], bool]:
        found, later = [], False
        for key in keys[-window(group) :]:
            result = self.manager.lookup(key, context)
            later |= result in (LookupResult.RETRY, LookupResult.HIT_PENDING)
            if result is not LookupResult.MISS:
                found.append(key)
        return found, later

    def begin_load(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Steps until the loads are submitted, and no further."""
        context, keys = self.context(name, tokens, None)
        self.open = (context, keys)
        for _ in range(2000):
            results = [self.manager.lookup(key, context) for key in keys[0]]
            self.step()
            if LookupResult.RETRY not in results:
                return {"results": [result.name for result in results]}
            time.sleep(0.002)
        return {"results": ["RETRY"]}

    def begin_lookup(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """One step of questions; `load_primed` goes on."""
        context, keys = self.context(name, tokens, None)
        self.open = (context, keys)
        results = [self.manager.lookup(key, context).name for key in keys[0]]
        self.step()
        return {"results": results}

    def prime(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Steps until the tier has answered, without asking for more."""
        context, keys = self.context(name, tokens, None)
        self.open = (context, keys)
        self.manager.lookup(keys[0][0], context)
        self.step()
        time.sleep(0.3)
        return {}

    def load_primed(self, wait: float) -> dict[str, Any]:
        """The rest of `load` for the request that was primed."""
        context, keys = self.open
        return self._load(context, keys, wait)

    def contract(self, without: str = "", method: str = "") -> str:
        """What is said of a vLLM that lacks a field of a job's result, or has a further abstract method."""
        from kvcascade.connectors import vllm_tier

        kept = vllm_tier.JobResult, vllm_tier.SecondaryTierManager.__abstractmethods__
        try:
            if without:
                names = [each.name for each in dataclasses.fields(kept[0]) if each.name != without]
                vllm_tier.JobResult = dataclasses.make_dataclass("JobResult", names)
            if method:
                vllm_tier.SecondaryTierManager.__abstractmethods__ = kept[1] | {method}
            vllm_tier.check_contract()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            vllm_tier.JobResult, vllm_tier.SecondaryTierManager.__abstractmethods__ = kept
        return ""

    def poison_and_reset(self) -> dict[str, Any]:
        """A reset in the middle of whatever runs: afterwards vLLM's memory is its own again."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()
        self.view[:] = 0xA5
        time.sleep(0.3)
        return {"clean": bool((self.view == 0xA5).all()), "jobs": len(self.manager._jobs)}

    def slowest(self) -> dict[str, float]:
        """The longest that each call of the tier took, without what may block (drain, shutdown)."""
        longest: dict[str, float] = {}
        for name, seconds in self.times:
            longest[name] = max(longest.get(name, 0.0), seconds)
        self.times.clear()
        return longest

    def stats(self) -> dict[str, float]:
        self.tier.get_stats()
        totals, self.totals = dict(self.totals), Counter()
        return totals

    def _get_stats(self) -> Any:
        """vLLM's scheduler takes the counts in each step; here they are summed up besides."""
        stats = self._take_stats()
        for name, value in {} if stats is None else stats.reduce().items():
            self.totals[name.rsplit("_kvcascade_")[1]] += value
        return stats

    def take_trace(self) -> list[str]:
        trace, self.trace = self.trace, []
        return trace

    def close(self) -> dict[str, Any]:
        self.view = None
        self.connector.shutdown()
        return {}


class Engine(Manager):
    """As Manager, under vLLM's real Scheduler: its block pool, its hashes, its offloading connector.

    A GPU block is a row of an array. What a model would compute into a full block is the pattern of the block's key,
    and whenever a request is scheduled all full blocks before its new tokens must hold theirs.
    """

    def _connect(self, config: VllmConfig, kv: KVCacheConfig) -> OffloadingConnector:
        config.scheduler_config.max_num_batched_tokens = 64
        scheduler_tokens, hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(kv, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_tokens, sha256_cbor)
        self.stores: dict[int, Any] = {}
        self.gpu: Any = None
        return self.scheduler.connector

    def serve(self, name: str, tokens: list[int], drawn: int = 2, limit: float = 60.0) -> dict[str, Any]:
        """Runs one request to its end, and on until nothing of it is pending."""
        if self.gpu is None:
            self.gpu = np.full((self.blocks, self.view.shape[1]), 0xEE, np.uint8)
        sampling = SamplingParams(max_tokens=drawn, ignore_eos=True)
        sampling.update_from_generation_config({}, 2)
        request = Request(
            request_id=name, prompt_token_ids=tokens, sampling_params=sampling, pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        computed, wrong, steps, end = 0, 0, 0, time.monotonic() + limit
        while not request.is_finished() or self.connector.has_pending_push_work():
            assert time.monotonic() < end, "the request does not end"
            output = self.scheduler.schedule()
            computed += output.num_scheduled_tokens.get(name, 0)
            wrong += self._run(output)
            steps += 1
            if not output.num_scheduled_tokens:
                time.sleep(0.002)
        return {"computed": computed, "wrong": wrong, "steps": steps}

    def _run(self, output: Any) -> int:
        """A step of workers and model; returns how many blocks did not hold what they must."""
        meta, done, received, wrong = output.kv_connector_metadata, {}, set(), 0
        for job in meta.jobs_to_flush or ():
            if job in meta.store_jobs:
                self.stores[job] = meta.store_jobs.pop(job)
        for job, entry in self.stores.items():
            for block, chunk in zip(entry.src_spec.block_ids.tolist(), entry.dst_spec.chunk_ids.tolist(), strict=True):
                self.view[chunk] = self.gpu[block]
            done[job] = 1
        self.stores = {}
        for job, entry in meta.load_jobs.items():
            for chunk, block in zip(entry.src_spec.chunk_ids.tolist(), entry.dst_spec.block_ids.tolist(), strict=True):
                self.gpu[block] = self.view[chunk]
            done[job] = 1
            received.add(entry.req_id)
        for name, new in output.num_scheduled_tokens.items():
            wrong += self._compute(self.scheduler.requests[name], new)
        self.stores.update(meta.store_jobs)
        ids = list(output.num_scheduled_tokens)
        drawn = [
            [7] if self.scheduler.requests[each].num_computed_tokens >= self.scheduler.requests[each].num_tokens else []
            for each in ids
        ]
        worker = OffloadingWorkerMetadata()
        for job in done:
            worker.mark_completed(job)
        transfers = KVConnectorOutput(
            finished_recving=received or None, kv_connector_worker_meta=worker if done else None
        )
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: place for place, each in enumerate(ids)}, sampled_token_ids=drawn,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=None, kv_connector_output=transfers,
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)
        return wrong

    def _compute(self, request: Request, new: int) -> int:
        end, wrong = request.num_computed_tokens, 0
        tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        keys = self.keys(request.all_token_ids)
        for group, table, mine in zip(self.groups, tables, keys, strict=True):
            reach = group.get("window") or end
            for place, key in enumerate(mine[: end // group["tokens"]]):
                block, after = table[place], (place + 1) * group["tokens"]
                if block == 0:
                    continue
                if after > end - new:
                    self.gpu[block] = pattern(key, self.gpu.shape[1])
                elif after > end - new - reach:
                    wrong += not np.array_equal(self.gpu[block], pattern(key, self.gpu.shape[1]))
        return wrong

    def close(self) -> dict[str, Any]:
        self.view = None
        self.scheduler.shutdown()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    managers: dict[str, Manager] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name, op = command.pop("manager"), command.pop("op")
        try:
            if op == "make":
                for variable, value in command.pop("environ", {}).items():
                    os.environ.pop(variable, None)
                    if value is not None:
                        os.environ[variable] = value
                managers[name] = (Engine if command.pop("engine", False) else Manager)(command)
                answer: Any = {"chained": managers[name].tier._chained}
            else:
                answer = getattr(managers[name], op)(**command)
                if op == "close":
                    del managers[name]
            reply = {"answer": answer}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
