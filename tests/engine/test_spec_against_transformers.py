"""KVSpec equals transformers: its own reading of a config.json, and what its caches really hold.

The planner reads configurations without transformers, by a table of family defaults. Guards
against a default that differs, a rule for layer kinds that is off by one, and a geometry that is
not the one a model stores. `expected_layers` goes by transformers' resolved attributes alone;
`held_layers` runs a tiny random model and looks into its cache.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvist.errors import ModelError
from kvist.spec import KVSpec, LayerKind
from kvist.spec.families import FAMILIES, Pattern

KINDS = {
    "full_attention": {"full"},
    "indexed_attention": {"full"},
    "deepseek_sparse_attention": {"full"},
    "sliding_attention": {"sliding"},
    "chunked_attention": {"chunked"},
    "linear_attention": {"state"},
    "conv": {"state"},
    "hybrid": {"full", "state"},
    "dummy": set(),
    "mlp": set(),
    "moe": set(),
}


def known(family):
    """The family's configuration class; skips where this transformers has none."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return CONFIG_MAPPING[family]


def expected_layers(config):
    """Per layer {(kind, KV heads, key dim, value dim, window)} by resolved attributes."""
    names = getattr(config, "layer_types", None)
    per_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    # Newer versions have kv_sharing_modes; the field it comes from is in all.
    owners = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    cross = getattr(config, "cross_attention_layers", None) or []
    layers = []
    for index in range(config.num_hidden_layers):
        own = per_layer[index]
        name = names[index] if names is not None else None
        if name is None:
            window = getattr(own, "sliding_window", None)
            name = "sliding_attention" if window else "full_attention"
        if index in cross:
            # Its cache holds the image, not the text.
            name = "mlp"
        stored = set()
        for kind in KINDS[name] if index < owners else ():
            if kind == "state":
                stored.add(("state", 0, 0, 0, None))
            elif getattr(config, "kv_lora_rank", None):
                index_dim = getattr(config, "index_head_dim", None) or 0
                latent = config.kv_lora_rank + config.qk_rope_head_dim + index_dim
                stored.add(("latent", 1, latent, 0, None))
            else:
                heads, dim = attention_shape(own)
                window = {
                    "sliding": getattr(own, "sliding_window", None),
                    "chunked": getattr(own, "attention_chunk_size", None),
                }.get(kind)
                stored.add((kind, heads, dim, dim, window))
        layers.append(stored)
    return layers


def attention_shape(config):
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    if config.model_type == "falcon":
        heads = 1 if config.multi_query else queries
        if config.new_decoder_architecture:
            heads = config.num_kv_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // queries


def read_layers(spec):
    layers = [set() for _ in range(spec.num_layers)]
    for group in spec.groups:
        for layer in group.layers:
            layers[layer].add(
                (str(group.kind), group.num_kv_heads, group.key_dim, group.value_dim, group.window)
            )
    return layers


def assert_same(config, raw):
    spec = KVSpec.from_config(raw)
    assert read_layers(spec) == expected_layers(config)
    assert spec.num_layers == config.num_hidden_layers
    assert spec.hidden_size == config.hidden_size
    assert spec.vocab_size == config.vocab_size
    # MPT calls it max_seq_len and maps no name to it.
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    assert spec.max_position == limit
    if any(group.kind is not LayerKind.STATE for group in spec.groups):
        assert spec.num_query_heads == config.num_attention_heads


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_left_out_are_those_of_transformers(family):
    """A config.json that says nothing but its type is read as transformers reads it."""
    config = known(family)()
    raw = {"model_type": family}
    if FAMILIES[family].pattern is Pattern.NAMED:
        with pytest.raises(ModelError, match="num_hidden_layers"):
            KVSpec.from_config(raw)
    else:
        assert_same(config, raw)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_config_is_read_as_transformers_reads_it(family):
    config = known(family)()
    raw = config.to_diff_dict()
    assert_same(config, raw)
    if FAMILIES[family].pattern is not Pattern.NAMED:
        assert KVSpec.from_config(raw).groups == KVSpec.from_config({"model_type": family}).groups


# Every rule for layer kinds and KV heads, away from its default.
VARIANTS = [
    ("llama", {"num_key_value_heads": 4, "hidden_size": 2048, "head_dim": 64}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "hidden_size": 1024}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 77, "head_dim": None, "num_key_value_heads": 4}),
    ("mixtral", {"sliding_window": 512}),
    ("phi3", {"sliding_window": 2047}),
    ("starcoder2", {"sliding_window": 4096}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 30}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 96, "max_window_layers": 3}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 7}),
    ("qwen3", {"use_sliding_window": True, "head_dim": 64}),
    ("qwen3_moe", {"use_sliding_window": True}),
    ("gemma2", {"num_hidden_layers": 7}),
    ("gemma3_text", {"num_hidden_layers": 13, "sliding_window": 512}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 13}),
    ("gemma3n_text", {"num_kv_shared_layers": 0}),
    ("gemma3n_text", {"num_kv_shared_layers": 10}),
    ("gemma4_text", {"num_hidden_layers": 14, "global_head_dim": 384}),
    ("gemma4_text", {"num_kv_shared_layers": 12}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("cohere2", {"num_hidden_layers": 9, "sliding_window_pattern": 3}),
    ("exaone4", {"sliding_window_pattern": 3}),
    ("gpt_oss", {"num_hidden_layers": 5}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64}),
    ("smollm3", {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64}),
    ("llama4_text", {"num_hidden_layers": 6, "no_rope_layers": [1, 0, 1, 1, 0, 1]}),
    ("llama4_text", {"attention_chunk_size": 1024, "num_hidden_layers": 10}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    ("gpt_bigcode", {"multi_query": False}),
    ("deepseek_v3", {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "num_hidden_layers": 5}),
    ("longcat_flash", {"num_layers": 3, "num_hidden_layers": 6}),
    ("qwen3_next", {"full_attention_interval": 3, "num_hidden_layers": 10}),
    ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 0}),
    ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    ("lfm2", {"full_attn_idxs": [2, 5, 8]}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 16}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*-ME*"}),
]


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_rules_agree_away_from_their_defaults(family, fields):
    config = known(family)(**fields)
    assert_same(config, {"model_type": family, **fields})
    assert_same(config, config.to_diff_dict())


# ------------------------------------------------------------------------------------ tiny models

LAYERS, TOKENS = 6, 7

TINY = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "sliding_window": 5,
    "attention_chunk_size": 4,
    "num_kv_shared_layers": 2,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * LAYERS,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attn_layer_indices": [2, 5],
    "full_attn_idxs": [1, 4],
}
"""Small values for every field of every family; a class takes those that it has."""

SPECIAL = {
    # One KV head a query head: MLA expands to all of them, Helium ties heads to the hidden size.
    **{
        family: {"num_key_value_heads": 4, "head_dim": 8}
        for family in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3")
    },
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 40,
    },
    "helium": {"head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 3},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention"] * 2},
}

TINY_FAMILIES = [
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "phi", "phi3", "gpt_neox", "gpt2", "gptj",
    "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "starcoder2", "olmo2", "olmo3", "stablelm",
    "cohere2", "granite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3",
    "gpt_oss", "smollm3", "llama4_text", "glm4", "exaone4", "helium", "nemotron", "qwen3_next",
    "qwen3_5_text", "jamba", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2",
]  # fmt: skip


@cache
def tiny_config(family):
    """A small configuration of a family, and the config.json fields that make it."""
    cls = known(family)
    names = {field.name for field in dataclasses.fields(cls)}
    fields = {name: value for name, value in TINY.items() if name in names}
    fields |= SPECIAL.get(family, {})
    return cls(**fields), {"model_type": family, **fields}


def held_layers(config):
    """What each layer's cache holds after a forward pass, as sets like `expected_layers`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    store = DynamicCache(config=config)
    # The argument has had this name in all versions that we support; 5.24 accepts it still.
    with torch.no_grad():
        output = model(
            input_ids=torch.arange(1, TOKENS + 1)[None], past_key_values=store, use_cache=True
        )
    assert output.logits.shape[1] == TOKENS
    layers = []
    for layer in store.layers:
        held = {}
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel():
            indexer = getattr(layer, "indexer_keys", None)
            extra = indexer.shape[-1] if indexer is not None else 0
            held["kv"] = (keys.shape[1], keys.shape[-1] + extra, layer.values.shape[-1])
        states = [getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states")]
        sizes = tuple(
            sum(state[0].numel() for state in kind.values() if state is not None) for kind in states
        )
        if any(sizes):
            held["state"] = sizes
        layers.append(held)
    return layers


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_running_model_holds_what_the_spec_says(family):
    config, raw = tiny_config(family)
    spec = KVSpec.from_config(raw)
    assert spec.groups == KVSpec.from_config(config.to_diff_dict()).groups
    expected = [{} for _ in range(spec.num_layers)]
    for group in spec.groups:
        for layer in group.layers:
            if group.kind is LayerKind.STATE:
                expected[layer]["state"] = (group.state_elements, group.state_fp32_elements)
            elif group.kind is LayerKind.LATENT:
                # transformers hands the latent over as K, the rope key as V, the indexer key apart.
                expected[layer]["kv"] = (1, group.key_dim)
            else:
                expected[layer]["kv"] = (group.num_kv_heads, group.key_dim, group.value_dim)
    held = held_layers(config)
    # Older versions make no cache layer for the last layers if these share another's.
    held += [{} for _ in range(spec.num_layers - len(held))]
    for layer, group_kind in enumerate(read_layers(spec)):
        if any(use[0] == "latent" for use in group_kind):
            if "deepseek_sparse_attention" in (getattr(config, "layer_types", None) or ()):
                pytest.skip(f"transformers {transformers.__version__} caches {family} expanded")
            heads, key_dim, value_dim = held[layer]["kv"]
            held[layer]["kv"] = (heads, key_dim + value_dim)
    assert held == expected
