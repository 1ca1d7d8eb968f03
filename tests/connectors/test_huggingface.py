"""The transformers connector: which models it takes, what identifies them, and what a generation gets from it."""

import copy
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcascade.config.errors import LayoutMismatch  # noqa: E402
from kvcascade.connectors.huggingface import check_cache, kv_shape, namespace_of, weights_digest  # noqa: E402

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
