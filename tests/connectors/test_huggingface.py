"""The transformers connector: which models it takes, what identifies them, and what a generation gets from it.

Models are small and random, but real `transformers` models; the daemon is a real process.
"""

import copy
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcascade.config.errors import LayoutMismatch  # noqa: E402
from kvcascade.connectors import huggingface  # noqa: E402
from kvcascade.connectors.huggingface import Loaded, PrefixCache  # noqa: E402
from kvcascade.connectors.huggingface_model import check_cache, kv_shape, namespace_of, weights_digest  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def tiny_llama(seed: int = 0, **fields: Any) -> Any:
    """A random Llama that runs on real transformers code in a millisecond."""
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | fields)).eval()


def test_the_shape_is_what_the_model_itself_computes() -> None:
    shape = kv_shape(tiny_llama(head_dim=16).to(torch.bfloat16))
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (2, 2, 16)
    assert shape.dtype == torch.bfloat16
    assert [device.type for device in shape.devices] == ["cpu", "cpu"]


def bidirectional() -> Any:
    torch.manual_seed(0)
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return transformers.BertLMHeadModel(transformers.BertConfig(num_attention_heads=4, **fields)).eval()


def with_static_cache() -> Any:
    model = tiny_llama()
    model.generation_config.cache_implementation = "static"
    return model


def offloaded() -> Any:
    model = tiny_llama()
    model.lm_head.to("meta")
    return model


def with_adapter() -> Any:
    model = tiny_llama()
    model._hf_peft_config_loaded = True
    model.peft_config = {"sql": object()}
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding-window": (
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8)).eval(),
        "sliding-window attention",
    ),
    "recurrent": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
        ).eval(),
        "recurrent or linear attention",
    ),
    "hybrid": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8)).eval(),
        "hybrid cache",
    ),
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ).eval(),
        "encoder-decoder",
    ),
    "keys and values of different width": (
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **SMALL | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                moe_intermediate_size=16,
            )
        ).eval(),
        "widths must agree",
    ),
    "length-dependent rope": (
        lambda: tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "'dynamic' changes with the request's length",
    ),
    "bidirectional": (bidirectional, "not causal"),
    "static cache": (with_static_cache, "'static'"),
    "weights not in memory": (offloaded, "not in memory"),
    "adapters": (with_adapter, "sql"),
    "training": (lambda: tiny_llama().train(), "training mode"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers' own, about configs as small as these
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_kv_is_not_a_function_of_its_prefix_is_refused_by_name(kind: str) -> None:
    build, named = REFUSED[kind]
    with pytest.raises(LayoutMismatch, match=named):
        kv_shape(build())


def filled_cache(model: Any, tokens: int, batch: int = 1) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.arange(tokens)[None].repeat(batch, 1)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{kv_shape(model).argument: cache})
    return cache


def test_a_cache_of_one_sequence_is_accepted_and_its_length_told() -> None:
    model = tiny_llama()
    shape = kv_shape(model)
    assert check_cache(filled_cache(model, 7), shape) == 7
    assert check_cache(transformers.DynamicCache(config=model.config), shape) == 0


def test_a_cache_of_two_sequences_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(LayoutMismatch, match="batch of 2"):
        check_cache(filled_cache(model, 7, batch=2), kv_shape(model))


def test_a_cache_of_another_kind_is_refused_by_name() -> None:
    model = tiny_llama()
    with pytest.raises(LayoutMismatch, match="StaticCache"):
        check_cache(transformers.StaticCache(config=model.config, max_cache_len=8), kv_shape(model))


def test_a_cache_of_another_model_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(LayoutMismatch, match="3 layers"):
        check_cache(filled_cache(tiny_llama(num_hidden_layers=3), 4), kv_shape(model))
    with pytest.raises(LayoutMismatch, match="bfloat16"):
        check_cache(filled_cache(tiny_llama().to(torch.bfloat16), 4), kv_shape(model))


# ---- identity (fault B5)


def fingerprint(model: Any, **fields: Any) -> bytes:
    return namespace_of(model, kv_shape(model), **fields).fingerprint()


def test_equal_models_share_a_namespace_wherever_they_came_from(tmp_path: Any) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "one")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    again.config._name_or_path = "served-under-another-name"
    assert fingerprint(again) == fingerprint(model)


def test_two_fine_tunings_of_one_model_never_share_a_namespace() -> None:
    model = tiny_llama()
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert weights_digest(tuned) != weights_digest(model)
    assert fingerprint(tuned) != fingerprint(model)


@pytest.mark.parametrize(
    "changed",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ],
)
def test_a_config_that_changes_the_kv_changes_the_namespace(changed: dict[str, Any]) -> None:
    assert fingerprint(tiny_llama(**changed)) != fingerprint(tiny_llama())


def test_dtype_block_size_seed_and_epoch_each_have_a_namespace_of_their_own() -> None:
    model = tiny_llama()
    prints = {
        fingerprint(model),
        fingerprint(tiny_llama().to(torch.bfloat16)),
        fingerprint(model, block_tokens=32),
        fingerprint(model, seed="0"),
        fingerprint(model, weights_epoch="2026-11-30"),
    }
    assert len(prints) == 5


def test_the_seed_is_the_one_that_vllm_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert fingerprint(model) == fingerprint(model, seed="vllm-none-hash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert fingerprint(model) == fingerprint(model, seed="7")


# ---- with a daemon

# A block of 16 tokens of the small model: 2 layers, keys and values, 2 heads, 8 wide, float32.
BLOCK_BYTES = 16 * 2 * 2 * 2 * 8 * 4

Attach = Callable[..., PrefixCache]


@pytest.fixture
def attach(daemon: Any) -> Iterator[Attach]:
    """Attaches models to the daemon of the test; detached before it ends."""
    attached: list[PrefixCache] = []

    def to(model: Any, **options: Any) -> PrefixCache:
        attached.append(PrefixCache(model, **{"socket": daemon.socket, "timeout": 5.0, "wait": 10.0} | options))
        return attached[-1]

    yield to
    for prefixes in attached:
        prefixes.close()


def prompt_of(tokens: int, first: int = 1) -> Any:
    return (torch.arange(tokens)[None] * 7 + first) % 97


def generate(model: Any, ids: Any, new: int = 20, **arguments: Any) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **arguments
    )


def answer(prefixes: PrefixCache, model: Any, ids: Any, new: int = 20) -> tuple[Any, Loaded]:
    """The five lines of the README, but for attaching."""
    prompt = prefixes.lookup(ids)
    loaded = prefixes.load(prompt)
    output = generate(model, ids, new, **loaded.arguments)
    prefixes.store(output, loaded)
    return output, loaded


def kv_of(cache: Any) -> list[Any]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stored_prompt_is_computed_no_more_and_the_text_is_the_same(attach: Attach, dtype: str, device: str) -> None:
    model = tiny_llama().to(getattr(torch, dtype)).to(device)
    prefixes, ids = attach(model), prompt_of(90).to(device)
    plain = generate(model, ids)
    cold, first = answer(prefixes, model, ids)
    assert first.report.loaded_tokens == 0
    warm, second = answer(attach(model), model, ids)
    assert second.report.tokens == {"dram": 80}
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)


def test_loaded_kv_is_bit_for_bit_what_was_computed(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(50)
    _, computed = answer(prefixes, model, ids)
    loaded = prefixes.load(prefixes.lookup(ids))
    assert loaded.report.bytes == 3 * BLOCK_BYTES
    for early, late in zip(kv_of(computed.cache), kv_of(loaded.cache), strict=True):
        assert torch.equal(early[:, :, :48], late)


def test_another_process_finds_what_this_one_stored(attach: Attach, daemon: Any) -> None:
    model = tiny_llama()
    output, _ = answer(attach(model), model, prompt_of(90))
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_huggingface import *;"
        "model = tiny_llama(); prefixes = PrefixCache(model, socket=sys.argv[1], timeout=5.0);"
        "output, loaded = answer(prefixes, model, prompt_of(90)); prefixes.close();"
        "print(dict(loaded.report.tokens), output.tolist())"
    )
    command = [sys.executable, "-P", "-c", script, str(daemon.socket), str(Path(__file__).parent)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    assert said == f"{{'dram': 80}} {output.tolist()}"


def test_a_device_pool_and_dram_serve_one_prompt_together(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(hbm="4MiB", hbm_device="cpu", dram="64MiB")
    model = tiny_llama(num_hidden_layers=64)  # blocks of 128 KiB: the device pool holds 32
    ids = prompt_of(700)
    with PrefixCache(model, socket=daemon.socket, timeout=5.0, wait=10.0) as prefixes:
        answer(prefixes, model, ids, 1)
        _, loaded = answer(prefixes, model, ids, 1)
    assert loaded.report.loaded_tokens == 688
    assert set(loaded.report.tokens) == {"hbm", "dram"}


def test_after_a_restart_the_prompt_comes_from_disk_and_the_engine_attached_by_itself(
    attach: Attach, daemon: Any
) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    output, _ = answer(prefixes, model, ids)
    daemon.restart()
    again, loaded = answer(prefixes, model, ids)
    assert loaded.report.tokens == {"disk": 80}
    assert torch.equal(again, output)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 32, 33])
def test_at_least_one_token_is_always_left_to_compute(attach: Attach, tokens: int) -> None:
    """Fault E10; asking again says the same."""
    model = tiny_llama()
    prefixes = attach(model)
    answer(prefixes, model, prompt_of(64))
    for _ in range(2):
        prompt = prefixes.lookup(prompt_of(tokens)[0].tolist())
        loaded = prefixes.load(prompt)
        assert loaded.report.loaded_tokens == max(0, tokens - 1) // 16 * 16
        assert loaded.cache.get_seq_length() == loaded.report.loaded_tokens


def test_each_load_is_a_copy_of_its_own(attach: Attach) -> None:
    """Fault A19: generating on one must not change the other, nor what the daemon keeps."""
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    answer(prefixes, model, ids)
    prompt = prefixes.lookup(ids)
    one, two = prefixes.load(prompt), prefixes.load(prefixes.lookup(ids))
    untouched = [tensor.clone() for tensor in kv_of(two.cache)]
    output = generate(model, ids, **one.arguments)
    for tensor in kv_of(one.cache):
        tensor.zero_()
    for before, after in zip(untouched, kv_of(two.cache), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(generate(model, ids, **two.arguments), output)
    assert torch.equal(answer(prefixes, model, ids)[0], output)


def test_only_full_blocks_of_final_tokens_are_stored_and_none_twice(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(40)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, 25, **loaded.arguments)  # 65 tokens, of which the last has no KV: 4 blocks
    first = prefixes.store(output, loaded)
    assert (first.stored, first.here, first.bytes) == (4, 0, 4 * BLOCK_BYTES)
    again = prefixes.store(output, loaded)
    assert (again.stored, again.here) == (0, 4)


def test_a_token_whose_kv_is_not_in_the_cache_is_not_stored(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(47)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, 1, **loaded.arguments)  # 48 tokens, KV of 47
    assert prefixes.store(output, loaded).stored == 2


def test_the_next_turn_of_a_chat_loads_what_the_last_one_generated(attach: Attach) -> None:
    model = tiny_llama()
    prefixes = attach(model)
    output, _ = answer(prefixes, model, prompt_of(40), 30)
    turn = torch.cat([output, prompt_of(20, first=5)], dim=1)
    again, loaded = answer(prefixes, model, turn)
    assert loaded.report.loaded_tokens == 64
    assert torch.equal(again, generate(model, turn))


def test_an_output_that_does_not_go_on_from_the_prompt_is_refused(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(40)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, **loaded.arguments)
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        prefixes.store(output[:, 40:], loaded)


def test_batches_and_padding_are_refused_before_anything_is_generated(attach: Attach) -> None:
    prefixes = attach(tiny_llama())
    with pytest.raises(LayoutMismatch, match="batch of 2"):
        prefixes.lookup(prompt_of(40).repeat(2, 1))
    with pytest.raises(LayoutMismatch, match="padded"):
        prefixes.lookup(prompt_of(40), attention_mask=torch.tensor([[0] * 8 + [1] * 32]))


def test_a_generation_of_several_sequences_is_not_stored(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(40)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, num_beams=2, **loaded.arguments)
    with pytest.raises(LayoutMismatch, match="batch of 2"):
        prefixes.store(output, loaded)


def test_two_fine_tunings_under_one_name_have_no_hit_across(attach: Attach) -> None:
    """Fault B5."""
    model = tiny_llama()
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[0].self_attn.k_proj.weight.add_(1e-3)
    answer(attach(model), model, prompt_of(90))
    _, loaded = answer(attach(tuned), tuned, prompt_of(90))
    assert loaded.report.loaded_tokens == 0


def test_weights_changed_in_place_find_nothing_and_leave_nothing_to_others(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    answer(prefixes, model, ids)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, **loaded.arguments)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    report = prefixes.store(output, loaded)
    assert report.stored == 0
    assert "weights were changed" in report.missed
    _, after = answer(prefixes, model, ids)
    assert after.report.loaded_tokens == 0
    again, warm = answer(prefixes, model, ids)
    assert warm.report.loaded_tokens == 80
    assert torch.equal(again, generate(model, ids))
    assert prefixes.namespace.weights_epoch.startswith("private-")


def test_a_model_put_into_training_mode_only_misses(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    answer(prefixes, model, ids)
    model.train()
    _, loaded = answer(prefixes, model, ids)
    assert loaded.report.loaded_tokens == 0
    assert "training mode" in loaded.report.missed


def test_a_lookup_that_is_never_loaded_holds_nothing_once_released(attach: Attach, daemon: Any) -> None:
    """Fault C1."""
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    answer(prefixes, model, ids)
    assert daemon.status()["leases"]["live"] == 0
    prompts = [prefixes.lookup(ids) for _ in range(5)]
    assert daemon.status()["leases"]["live"] == 5
    for prompt in prompts:
        prefixes.release(prompt)
        prefixes.release(prompt)
    assert daemon.status()["leases"]["live"] == 0


def test_what_was_counted_adds_up(attach: Attach) -> None:
    model = tiny_llama()
    prefixes = attach(model)
    for _ in range(2):
        answer(prefixes, model, prompt_of(90))
    sums = prefixes.counters()
    assert (sums.lookups, sums.loads, sums.stores, sums.prompt_tokens) == (2, 2, 2, 180)
    assert dict(sums.tokens) == {"dram": 80}
    assert (sums.bytes_loaded, sums.bytes_stored) == (5 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    assert not sums.missed


# ---- a daemon in trouble costs recomputation, nothing else


def test_without_a_daemon_everything_is_computed_and_it_attaches_when_one_comes(attach: Attach, daemon: Any) -> None:
    now = [0.0]
    model = tiny_llama()
    ids = prompt_of(90)
    daemon.kill()
    prefixes = attach(model, clock=lambda: now[0])
    assert not prefixes.attached
    output, loaded = answer(prefixes, model, ids)
    assert loaded.report.loaded_tokens == 0
    assert loaded.report.missed.startswith("DaemonUnavailable")
    daemon.start()
    now[0] += 60  # the back-off is over
    answer(prefixes, model, ids)
    again, hit = answer(prefixes, model, ids)
    assert hit.report.loaded_tokens == 80
    assert torch.equal(again, output)


def test_a_daemon_killed_between_lookup_and_load_is_a_miss(attach: Attach, daemon: Any) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    output, _ = answer(prefixes, model, ids)
    prompt = prefixes.lookup(ids)
    daemon.kill()
    loaded = prefixes.load(prompt)
    assert loaded.report.loaded_tokens == 0
    assert torch.equal(generate(model, ids, **loaded.arguments), output)
    daemon.start()


def test_a_daemon_killed_during_the_copy_of_a_load_is_a_miss(
    attach: Attach, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    output, _ = answer(prefixes, model, ids)
    copy_in = huggingface.load_sequence

    def killed_meanwhile(*arguments: Any) -> None:
        daemon.kill()
        copy_in(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(huggingface, "load_sequence", killed_meanwhile)
        again, loaded = answer(prefixes, model, ids)
    assert loaded.report.loaded_tokens in (0, 80)  # noticed in time or not, the bytes are those that were asked for
    assert torch.equal(again, output)
    daemon.start()
    again, _ = answer(prefixes, model, ids)
    assert torch.equal(again, output)


def test_a_daemon_killed_during_a_store_costs_nothing(
    attach: Attach, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    loaded = prefixes.load(prefixes.lookup(ids))
    output = generate(model, ids, **loaded.arguments)
    copy_out = huggingface.store_sequence

    def killed_meanwhile(*arguments: Any) -> None:
        copy_out(*arguments)
        daemon.kill()

    with monkeypatch.context() as patched:
        patched.setattr(huggingface, "store_sequence", killed_meanwhile)
        report = prefixes.store(output, loaded)
    assert report.stored == 0
    assert report.missed
    daemon.start()


def test_a_stopped_daemon_is_left_alone_after_one_unanswered_question(attach: Attach, daemon: Any) -> None:
    """Fault D3."""
    now = [0.0]
    model = tiny_llama()
    ids = prompt_of(90)
    prefixes = attach(model, clock=lambda: now[0], timeout=0.3)
    output, _ = answer(prefixes, model, ids)
    os.kill(daemon.pid, signal.SIGSTOP)
    again, slow = answer(prefixes, model, ids)
    assert "no answer" in slow.report.missed
    _, left_alone = answer(prefixes, model, ids)
    assert "left alone" in left_alone.report.missed
    assert left_alone.report.lookup_seconds + left_alone.report.load_seconds < 0.3
    assert torch.equal(again, output)
    os.kill(daemon.pid, signal.SIGCONT)
    daemon.status()
    now[0] += 60
    assert answer(prefixes, model, ids)[1].report.loaded_tokens == 80


def fill(prefixes: PrefixCache, blocks: int, first: int) -> None:
    """Stores blocks that nobody will ask for."""
    ids = (torch.arange(blocks * 16)[None] * 31 + first) % 97
    loaded = prefixes.load(prefixes.lookup(ids))
    shape = (1, 2, blocks * 16, 8)
    for layer in range(2):
        loaded.cache.update(torch.zeros(shape), torch.zeros(shape), layer)
    prefixes.store(ids, loaded)


def test_a_slot_handed_on_during_the_copy_is_a_failed_load_and_then_a_miss(
    start_daemon: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault A10: the copy takes longer than its lease, and the daemon needs the slots for somebody else."""
    daemon = start_daemon(dram="1MiB", dram_slab="1MiB", disk="", disk_size="", leases_lookup="20ms")
    model = tiny_llama()
    ids = prompt_of(90)
    copy_in = huggingface.load_sequence
    with (
        PrefixCache(model, socket=daemon.socket, timeout=5.0) as prefixes,
        PrefixCache(model, socket=daemon.socket, timeout=5.0) as other,
    ):
        output, _ = answer(prefixes, model, ids)

        def overtaken(*arguments: Any) -> None:
            copy_in(*arguments)
            monkeypatch.setattr(huggingface, "load_sequence", copy_in)
            while daemon.status()["leases"]["live"]:
                pass
            # The pool has 256 slots: the colder blocks, which are ours, must go.
            fill(other, 200, first=3)
            fill(other, 200, first=4)

        monkeypatch.setattr(huggingface, "load_sequence", overtaken)
        loaded = prefixes.load(prefixes.lookup(ids))
        assert loaded.report.loaded_tokens < 80
        assert "handed on" in loaded.report.missed
        assert prefixes.counters().blocks_failed
        assert torch.equal(generate(model, ids, **loaded.arguments), output)
        assert prefixes.lookup(ids).matched_tokens <= loaded.report.loaded_tokens


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking while threads run, which is the point
def test_a_forked_child_gets_a_session_of_its_own(attach: Attach) -> None:
    model = tiny_llama()
    prefixes, ids = attach(model), prompt_of(90)
    answer(prefixes, model, ids)
    tokens = ids[0].tolist()
    if (child := os.fork()) == 0:
        os._exit(0 if prefixes.lookup(tokens).matched_tokens == 80 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert prefixes.lookup(tokens).matched_tokens == 80


# ---- a real model


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M and its tokenizer, as the demo makes them."""
    path = Path(__file__).parents[2] / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        folder = module.model_folder()
    except module.ModelMissing as error:
        pytest.skip(str(error))
    return transformers.AutoModelForCausalLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.engine
@pytest.mark.timeout(400)  # the first run converts the model
@pytest.mark.filterwarnings("ignore")  # of the libraries that read GGUF
def test_a_real_model_says_the_same_with_a_loaded_prefix_as_without(attach: Attach, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()[:1500]
    messages = [{"role": "user", "content": f"{licence}\n\nWhat is this text about?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    prefixes = attach(model)
    plain = generate(model, ids, 12)
    cold, _ = answer(prefixes, model, ids, 12)
    warm, loaded = answer(prefixes, model, ids, 12)
    assert loaded.report.loaded_tokens == (ids.shape[1] - 1) // 16 * 16
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)
