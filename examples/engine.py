"""An engine process: it answers chat prompts with a `transformers` model, one JSON line in, one out.

    {"messages": [{"role": "user", "content": "..."}], "max_new_tokens": 32}

With `--socket` it uses kvcascade, in the five marked lines; without, every prompt is computed whole. It ends when its
input ends, so it never outlives whoever started it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from kvcascade.connectors.huggingface import PrefixCache


class FirstToken(BaseStreamer):
    """Notes when the first new token is there: `generate` hands over the prompt, then each token."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder for from_pretrained")
    parser.add_argument("--socket", type=Path, help="where the kvcascade daemon listens; without it, no kvcascade")
    arguments = parser.parse_args()

    # More threads than cores that are ours slow a small model down by an order of magnitude.
    torch.set_num_threads(min(8, len(os.sched_getaffinity(0))))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
    if torch.cuda.is_available():
        model.to("cuda")
    # On a CPU a prompt takes seconds to compute: the disk is worth more waiting than by default.
    prefixes = (
        PrefixCache(model, socket=arguments.socket, timeout=5, wait=20) if arguments.socket else None
    )  # 1: attach

    def answer(messages: list[dict[str, str]], max_new_tokens: int) -> dict[str, Any]:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        first = FirstToken()
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "streamer": first}
        began = time.perf_counter()
        if prefixes is None:
            output = model.generate(**inputs, **limits)
            report: dict[str, Any] = {"tokens": {}, "stored": 0, "missed": ""}
        else:
            prompt = prefixes.lookup(inputs["input_ids"])  # 2: look up
            loaded = prefixes.load(prompt)  # 3: load
            output = model.generate(**inputs, **limits, **loaded.arguments)  # 4: generate
            stored = prefixes.store(output, loaded)  # 5: store
            computed = inputs["input_ids"].shape[1] - loaded.report.loaded_tokens
            if computed >= 64:  # a few tokens say little of the speed
                spent = loaded.report.lookup_seconds + loaded.report.load_seconds
                prefixes.computed(computed, first.at - began - spent, position=loaded.report.loaded_tokens)
            report = {
                "tokens": dict(loaded.report.tokens),
                "stored": stored.stored,
                "missed": loaded.report.missed or stored.missed,
                "lookup": loaded.report.lookup_seconds,
                "load": loaded.report.load_seconds,
                "bytes": loaded.report.bytes,
            }
        length = inputs["input_ids"].shape[1]
        text = tokenizer.decode(output[0, length:], skip_special_tokens=True)
        return {"text": text, "prompt_tokens": length, "first_token": first.at - began, **report}

    # The first run pays for what torch sets up once; it must not leave a prefix behind.
    model.generate(**tokenizer("Hello", return_tensors="pt").to(model.device), max_new_tokens=2, do_sample=False)
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not come between the replies
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=replies, flush=True)
    if prefixes is not None:
        prefixes.close()


if __name__ == "__main__":
    main()
