"""Every kind of attention that the engine does not compute is refused, with its reason."""

from __future__ import annotations

import pytest

from kvist.engine.weights.servable import check_servable
from kvist.errors import ModelError

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 8192,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
CHUNKED = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 512}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"model_type": "gemma2", "attn_logit_softcapping": None, "sliding_window": None},
        WINDOWED,
        {"model_type": "mistral"},  # a window by the family's default
        {"attn_logit_softcapping": 50.0},
        {"model_type": "gpt_oss"},
        {"final_logit_softcapping": 30.0},  # over logits: the model's head does it
        {"architectures": None},
        {"is_encoder_decoder": False, "alibi": False},
    ],
)
def test_causal_attention_is_served(change):
    check_servable(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_encoder_decoder": True, "model_type": "t5"}, "encoder-decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "predicts no next token"),
        ({"vision_config": {"hidden_size": 8}}, "multimodal"),
        ({"kv_lora_rank": 64, "qk_rope_head_dim": 16, "model_type": "deepseek_v3"}, "MLA"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"alibi": True}, "ALiBi"),
        ({"position_embedding_type": "alibi"}, "ALiBi"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "'longrope'"),
        ({"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 64}, "in chunks of 64"),
        ({"use_bidirectional_attention": True}, "attend to later"),
        ({"is_causal": False}, "attend to later"),
    ],
)
def test_the_rest_is_refused_with_the_reason(change, reason):
    with pytest.raises(ModelError, match=reason):
        check_servable(LLAMA | change)


def test_a_chunk_that_never_cuts_is_full_attention():
    check_servable(LLAMA | CHUNKED, max_model_len=512)
    with pytest.raises(ModelError, match=r"--max-model-len 512"):
        check_servable(LLAMA | CHUNKED, max_model_len=513)


def test_all_reasons_are_named_at_once():
    config = LLAMA | CHUNKED | {"alibi": True}
    with pytest.raises(ModelError, match=r"attend in chunks.*; it places tokens by ALiBi"):
        check_servable(config)
