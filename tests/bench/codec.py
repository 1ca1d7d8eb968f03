"""Lossless packing on real KV: what the demo's model computes for a text, cut into slots, packed and unpacked.

Rates are of one thread by its own CPU time, against a plain copy of the same bytes, turn by turn.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvcascade.tiers.codec import Codec, decode, encode

from .harness import GB, ROOT, Bench, Engine, Row, check, median_ratio

TOKENS = 512
BLOCK = 16
ELEMENT = 2
DTYPES = ("bfloat16", "float16")
CONVERTING_S = 300.0


def run(bench: Bench) -> list[Row]:
    bench.say("packing: the demo's model computes KV (the first time it is converted)")
    rows = []
    with Engine(compute, TOKENS // 4 if bench.quick else TOKENS) as engine:
        for dtype in DTYPES:
            slots = engine.receive(CONVERTING_S)
            for codec in (Codec.LZ4, Codec.ZSTD):
                bench.say(f"packing {dtype} by {codec.name.lower()}")
                rows += measure(bench, dtype, codec, slots)
    return rows


def measure(bench: Bench, dtype: str, codec: Codec, slots: np.ndarray[Any, Any]) -> list[Row]:
    payloads = [memoryview(slot) for slot in slots]
    into = np.zeros_like(slots)
    encoded = [encode(payload, codec, ELEMENT) for payload in payloads]
    whole = [memoryview(b"".join(parts)) for _, parts in encoded]

    def pack() -> None:
        for payload in payloads:
            encode(payload, codec, ELEMENT)

    def unpack() -> None:
        for (used, _), data, slot in zip(encoded, whole, into, strict=True):
            decode(data, used, ELEMENT, memoryview(slot))

    def copy() -> None:
        np.copyto(into, slots)

    unpack()
    check(bool((into == slots).all()), f"{dtype} packed by {codec.name} does not come back")
    times: dict[Callable[[], None], list[float]] = {pack: [], unpack: [], copy: []}
    for _ in range(bench.rounds(9, 3)):
        for way, taken in times.items():
            start = time.thread_time()
            way()
            taken.append(time.thread_time() - start)
    what = f"{dtype} KV of SmolLM2, {codec.name.lower()}"
    size = slots.nbytes / GB
    rows = [Row(f"{what}: bytes / packed bytes", slots.nbytes / sum(map(len, whole)), "x")]
    for name, way in (("packing", pack), ("unpacking", unpack)):
        rate, copied = (size / statistics.median(times[one]) for one in (way, copy))
        rows.append(Row(f"{what}: {name} / copying", rate, "GB/s", copied, median_ratio(times[copy], times[way])))
    return rows


def compute(connection: Connection, tokens: int) -> None:
    """In a process of its own: the KV of a text at each dtype, a row of bytes a slot."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    import transformers
    from smollm2 import model_folder

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(min(8, len(os.sched_getaffinity(0))))
    folder = model_folder()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]
    count = ids.shape[1] // BLOCK
    for dtype in DTYPES:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        with torch.no_grad():
            layers = model(ids, use_cache=True).past_key_values.layers
        # [layer][k, v][head][token][dim], as in a slot: [block][head][layer][k, v][token][dim]
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
        kv = kv[:, :, :, : count * BLOCK].unflatten(3, (count, BLOCK)).permute(3, 2, 0, 1, 4, 5).contiguous()
        connection.send(kv.view(torch.uint8).flatten(1).numpy())
