"""KVSpec: published sizes of known models, windows counted right, bad configurations refused.

Guards against the classic sizing mistakes: query heads counted as KV heads, MLA sized by heads,
windows ignored or applied to every layer, a null taken for a default.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import ConfigError, ModelError
from kvist.spec import LAYER_PACKING, PAIR_PACKING, BlockLayout, KVSpec, LayerGroup, LayerKind

KIB, GIB = 1024, 1024**3
CONTEXT = 131_072

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
LLAMA_31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LLAMA_31_70B = {
    **LLAMA_31_8B,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
GEMMA_3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        pytest.param(LLAMA_2_7B, 512 * KIB, id="llama-2-7b"),
        pytest.param(LLAMA_31_8B, 128 * KIB, id="llama-3.1-8b"),
        pytest.param(LLAMA_31_70B, 320 * KIB, id="llama-3.1-70b"),
        pytest.param(SMOLLM2_135M, 23_040, id="smollm2-135m"),
        pytest.param(DEEPSEEK_V3, 70_272, id="deepseek-v3"),
    ],
)
def test_bytes_a_token_are_the_published_ones(config, token_bytes):
    assert KVSpec.from_config(config).token_bytes() == token_bytes


def test_long_contexts_are_the_published_ones():
    assert KVSpec.from_config(LLAMA_31_8B).kv_bytes(CONTEXT) == 16 * GIB
    assert KVSpec.from_config(LLAMA_31_70B).kv_bytes(CONTEXT) == 40 * GIB
    assert KVSpec.from_config(LLAMA_31_8B).kv_bytes(CONTEXT, concurrency=3) == 48 * GIB
    assert KVSpec.from_config(LLAMA_31_8B).kv_bytes(CONTEXT, itemsize=1) == 8 * GIB


def test_gemma_3_holds_ten_full_layers_and_windows_of_the_rest():
    spec = KVSpec.from_config(GEMMA_3_27B)
    assert [(g.kind, g.num_layers, g.window) for g in spec.groups] == [
        (LayerKind.SLIDING, 52, 1024),
        (LayerKind.FULL, 10, None),
    ]
    layer = 2 * 16 * 128 * 2
    assert spec.kv_bytes(CONTEXT) == layer * (10 * CONTEXT + 52 * 1024)
    assert spec.kv_bytes(CONTEXT) < 0.17 * 62 * layer * CONTEXT
    assert spec.kv_bytes(1000) == 62 * layer * 1000 == 1000 * spec.token_bytes()
    assert (spec.model_type, spec.dtype, spec.vocab_size) == ("gemma3_text", "bfloat16", 262208)


def test_a_nested_model_that_names_nothing_takes_its_family_defaults():
    # The published 4B file leaves out heads, KV heads and head size.
    spec = KVSpec.from_config(
        {
            "model_type": "gemma3",
            "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        }
    )
    assert (spec.num_query_heads, spec.groups[0].num_kv_heads, spec.groups[0].key_dim) == (
        8,
        4,
        256,
    )
    assert sum(group.num_layers for group in spec.groups) == 34
    assert KVSpec.from_config({"model_type": "llava", "text_config": {"vocab_size": 32064}}).groups


@pytest.mark.parametrize(
    ("window", "kind"),
    [({}, "sliding"), ({"sliding_window": None}, "full"), ({"sliding_window": 0}, "full")],
)
def test_an_absent_window_takes_the_default_and_a_null_one_means_none(window, kind):
    spec = KVSpec.from_config({"model_type": "mistral", **window})
    assert [group.kind for group in spec.groups] == [kind]


def test_mla_is_one_vector_a_token_whatever_the_heads():
    (group,) = KVSpec.from_config(DEEPSEEK_V3).groups
    assert (group.kind, group.num_kv_heads, group.key_dim, group.value_dim) == (
        LayerKind.LATENT,
        1,
        576,
        0,
    )


def test_sparse_mla_counts_its_indexer_keys_and_says_so():
    spec = KVSpec.from_config({"model_type": "deepseek_v32", "dtype": "bfloat16"})
    assert spec.token_bytes() == 61 * (576 + 128) * 2
    assert any("indexer" in note for note in spec.notes)


def test_layers_that_read_another_layers_kv_own_no_bytes():
    spec = KVSpec.from_config({"model_type": "gemma3n_text", "dtype": "bfloat16"})
    owners = {layer for group in spec.groups for layer in group.layers}
    assert owners == set(range(20))
    assert dict(spec.shared_layers) == {i: 19 if (i + 1) % 5 == 0 else 18 for i in range(20, 35)}
    assert spec.token_bytes() == 20 * 2 * 2 * 256 * 2


def test_wider_heads_in_full_layers_make_a_group_of_their_own():
    spec = KVSpec.from_config(
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 12,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        }
    )
    assert [(g.kind, g.num_layers, g.num_kv_heads, g.key_dim) for g in spec.groups] == [
        ("sliding", 10, 4, 256),
        ("full", 2, 1, 512),
    ]


def test_chunked_layers_hold_one_chunk():
    spec = KVSpec.from_config({"model_type": "llama4_text", "dtype": "bfloat16"})
    assert [(g.kind, g.num_layers, g.window) for g in spec.groups] == [
        ("chunked", 36, 8192),
        ("full", 12, None),
    ]
    assert spec.kv_bytes(CONTEXT) == 2 * 8 * 128 * 2 * (36 * 8192 + 12 * CONTEXT)


def test_state_does_not_grow_with_the_context():
    spec = KVSpec.from_config({"model_type": "qwen3_next", "dtype": "bfloat16"})
    state, full = spec.groups
    assert (state.kind, state.num_layers, full.kind, full.num_layers) == ("state", 36, "full", 12)
    assert spec.kv_groups == (full,)
    assert spec.token_bytes() == 12 * 2 * 2 * 256 * 2
    convolution, recurrent = (2 * 16 * 128 + 32 * 128) * 4, 32 * 128 * 128
    assert spec.state_bytes() == 36 * (convolution * 2 + recurrent * 4)
    assert spec.state_bytes(concurrency=5) == 5 * spec.state_bytes()
    assert spec.kv_bytes(1000) == 1000 * spec.token_bytes()


def test_a_layer_with_attention_and_state_is_in_two_groups():
    spec = KVSpec.from_config({"model_type": "falcon_h1", "num_hidden_layers": 3})
    assert {(group.kind, group.layers) for group in spec.groups} == {
        (LayerKind.FULL, (0, 1, 2)),
        (LayerKind.STATE, (0, 1, 2)),
    }


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        pytest.param({"num_kv_heads": 71}, 1, id="7b: multi_query decides"),
        pytest.param({"new_decoder_architecture": True, "num_kv_heads": 8}, 8, id="40b"),
        pytest.param({"multi_query": False}, 71, id="rw"),
    ],
)
def test_falcon_has_three_ways_to_count_kv_heads(fields, kv_heads):
    assert KVSpec.from_config({"model_type": "falcon", **fields}).groups[0].num_kv_heads == kv_heads


def test_cross_attention_layers_store_nothing_of_the_text():
    spec = KVSpec.from_config({"model_type": "mllama_text_model", "cross_attention_layers": [3, 8]})
    assert spec.num_layers == 40
    assert spec.groups[0].num_layers == 38
    assert 38 not in KVSpec.from_config({"model_type": "mllama_text_model"}).groups[0].layers
    assert any("cross-attention" in note for note in spec.notes)


def test_layers_that_do_not_attend_store_nothing():
    spec = KVSpec.from_config({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-E"})
    assert {(group.kind, group.layers) for group in spec.groups} == {
        ("state", (0, 2)),
        ("full", (3,)),
    }


def test_an_unknown_family_is_read_by_its_fields_and_says_so():
    # The fields of a ChatGLM file, which transformers itself does not know.
    spec = KVSpec.from_config(
        {
            "model_type": "chatglm",
            "num_layers": 40,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "padded_vocab_size": 151552,
            "seq_length": CONTEXT,
            "torch_dtype": "bfloat16",
        }
    )
    assert spec.token_bytes() == 40 * 2 * 2 * 128 * 2
    assert (spec.vocab_size, spec.max_position) == (151552, CONTEXT)
    assert "'chatglm'" in spec.notes[0]


def test_an_unknown_family_with_a_window_is_windowed_unless_switched_off():
    fields = {
        "model_type": "brand_new",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
        "sliding_window": 32,
    }
    assert KVSpec.from_config(fields).groups[0].window == 32
    off = KVSpec.from_config({**fields, "use_sliding_window": False})
    assert off.groups[0].kind is LayerKind.FULL


@pytest.mark.parametrize(
    "missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_field_is_named(missing):
    fields = {
        "model_type": "brand_new",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    assert KVSpec.from_config(fields)
    del fields[missing]
    with pytest.raises(ModelError, match=missing):
        KVSpec.from_config(fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": "32"}, "num_hidden_layers should be a whole number, got '32'"),
        # Not to be refused when they have all been listed.
        ({"num_hidden_layers": 10**9}, "1000000000 layers are more than any model has"),
        ({"num_attention_heads": 4.5}, "num_attention_heads should be a whole number"),
        ({"layer_types": ["full_attention"] * 31}, "31 entries for num_hidden_layers=32"),
        ({"layer_types": ["telepathy"] * 32}, "layer 0 is of type 'telepathy'"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({"layer_types": "full_attention"}, "layer_types is no list"),
        ({"num_key_value_heads": 33}, "33 KV heads"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers=32"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"dtype": "bfloat16", "hidden_size": None}, "hidden_size"),
    ],
)
def test_a_contradiction_is_refused_with_its_field(fields, said):
    with pytest.raises(ModelError, match=said):
        KVSpec.from_config({"model_type": "llama", **fields})


JUNK = [
    None,
    "x",
    "",
    -1,
    0,
    1,
    1.5,
    float("inf"),
    float("nan"),
    True,
    [],
    ["x"],
    [None],
    {},
    {"x": 1},
]


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma3_text", "gemma4_text", "llama4_text", "falcon",
               "deepseek_v3", "jamba", "bamba", "nemotron_h", "qwen3_next", "unheard_of"]
)  # fmt: skip
def test_junk_in_any_field_is_a_model_error_or_is_read(family):
    """A config.json comes from a stranger: no field may end the planner with a traceback."""
    fields = {
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_size", "vocab_size", "max_position_embeddings", "sliding_window",
        "use_sliding_window", "sliding_window_pattern", "layer_types", "no_rope_layers",
        "per_layer_config", "attn_config", "num_kv_shared_layers", "attn_layer_indices",
        "attn_layer_period", "hybrid_override_pattern", "max_window_layers", "kv_lora_rank",
        "attention_chunk_size", "mamba_d_head", "cross_attention_layers", "text_config",
        "architectures", "dtype", "model_type", "multi_query",
    }  # fmt: skip
    outcomes = set()
    for field in sorted(fields):
        for junk in JUNK:
            try:
                spec = KVSpec.from_config({"model_type": family, field: junk})
            except ModelError:
                outcomes.add("refused")
            else:
                outcomes.add("read")
                assert spec.token_bytes() >= 0
    assert "refused" in outcomes


def test_a_configuration_is_an_object():
    with pytest.raises(ModelError, match="list"):
        KVSpec.from_config([])


@pytest.mark.parametrize(
    ("fields", "dtype", "noted"),
    [
        ({"torch_dtype": "torch.float16"}, "float16", False),
        ({"dtype": "bfloat16"}, "bfloat16", False),
        ({"dtype": "float8_e4m3fn"}, "bfloat16", True),
        ({}, "float32", True),
    ],
)
def test_the_dtype_is_read_in_all_spellings(fields, dtype, noted):
    spec = KVSpec.from_config({"model_type": "llama", **fields})
    assert (spec.dtype, bool(spec.notes)) == (dtype, noted)


def test_a_directory_or_its_file_can_be_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMOLLM2_135M), encoding="utf-8")
    expected = KVSpec.from_config(SMOLLM2_135M)
    assert KVSpec.from_path(tmp_path) == KVSpec.from_path(str(file)) == expected


@pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff\xfe"])
def test_an_unreadable_file_is_a_model_error(tmp_path, content):
    file = tmp_path / "config.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        KVSpec.from_path(tmp_path)


def test_a_format_may_say_its_own_bytes():
    spec = KVSpec.from_config(GEMMA_3_27B)

    def packed(group):
        return group.num_layers * 100

    assert spec.token_bytes(packed=packed) == 6200
    assert spec.kv_bytes(2048, packed=packed) == 100 * (52 * 1024 + 10 * 2048)
    with pytest.raises(ConfigError, match="not both"):
        spec.token_bytes(2, packed=packed)
    with pytest.raises(ConfigError, match="itemsize"):
        spec.token_bytes(0)
    with pytest.raises(ConfigError, match="context_tokens=-1"):
        spec.kv_bytes(-1)


def test_whole_blocks_are_counted_when_a_block_size_is_given():
    spec = KVSpec.from_config(SMOLLM2_135M)
    assert spec.kv_bytes(17, block_size=16) == 32 * spec.token_bytes()
    assert spec.kv_bytes(16, block_size=16) == 16 * spec.token_bytes()
    assert spec.kv_bytes(0, block_size=16) == 0


@given(
    kind=st.sampled_from([LayerKind.SLIDING, LayerKind.CHUNKED]),
    window=st.integers(1, 40),
    block_size=st.integers(1, 16),
    context=st.integers(0, 150),
)
def test_live_blocks_are_the_most_that_a_window_touches_on_its_way(
    kind, window, block_size, context
):
    group = LayerGroup(kind, (0,), 1, 8, 8, window)
    most_tokens = most_blocks = 0
    for length in range(1, context + 1):
        start = max(0, length - window)
        if kind is LayerKind.CHUNKED:
            start = (length - 1) // window * window
        touched = {token // block_size for token in range(start, length)}
        most_tokens, most_blocks = max(most_tokens, length - start), max(most_blocks, len(touched))
    assert group.live_tokens(context) == most_tokens
    blocks = group.live_blocks(context, block_size)
    # Chunks start at fixed places, so a length that no block size divides may never meet the worst.
    exact = kind is LayerKind.SLIDING or window % block_size == 0
    assert blocks == most_blocks if exact else most_blocks <= blocks <= most_blocks + 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": ()}, "ascending"),
        ({"layers": (1, 0)}, "ascending"),
        ({"layers": (0, 0)}, "ascending"),
        ({"num_kv_heads": 0}, "num_kv_heads >= 1"),
        ({"window": 5}, "no window"),
        ({"kind": LayerKind.SLIDING}, "window of at least 1"),
        ({"kind": LayerKind.SLIDING, "window": 0}, "window of at least 1"),
        ({"kind": LayerKind.STATE}, "nothing a token"),
        ({"state_elements": 1}, "only a state"),
    ],
)
def test_a_group_whose_numbers_contradict_its_kind_is_refused(fields, said):
    good = {
        "kind": LayerKind.FULL,
        "layers": (0, 1),
        "num_kv_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
    }
    assert LayerGroup(**good).token_elements == 64
    with pytest.raises(ConfigError, match=said):
        LayerGroup(**{**good, **fields})


def test_negative_state_is_refused():
    with pytest.raises(ConfigError, match="negative"):
        LayerGroup(LayerKind.STATE, (0,), 0, 0, 0, state_elements=-1)


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(0, 9),
    block_size=st.integers(1, 9),
)
def test_the_runs_of_a_block_cover_it_once_in_order(layers, heads, key_dim, value_dim, block_size):
    layout = BlockLayout(layers, heads, key_dim, value_dim, block_size, itemsize=2)
    end = 0
    for layer in range(layers):
        assert layer * layout.layer_elements == end
        for head in range(heads):
            assert layout.key_offset(layer, head) == end
            assert layout.value_offset(layer, head) == end + block_size * key_dim
            end += block_size * (key_dim + value_dim)
    assert layout.block_elements == end
    assert layout.block_bytes == 2 * end


def test_the_packing_has_a_name_that_is_never_reused():
    layout = BlockLayout(1, 1, 8, 8, 16, 2)
    assert layout.packing_id == LAYER_PACKING == "lhkv-1"
    assert PAIR_PACKING == "lhkv-2"
    with pytest.raises(ConfigError, match="'lhkv-3' is unknown"):
        BlockLayout(1, 1, 8, 8, 16, 2, packing_id="lhkv-3")


@pytest.mark.parametrize(("block_size", "key_dim"), [(8, 64), (24, 64), (16, 9)])
def test_pairs_need_whole_tiles_and_even_keys(block_size, key_dim):
    with pytest.raises(ConfigError, match=f"block_size={block_size} and key_dim={key_dim}"):
        BlockLayout(1, 1, key_dim, 8, block_size, 2, packing_id=PAIR_PACKING)


@pytest.mark.parametrize("packing", [LAYER_PACKING, PAIR_PACKING])
@pytest.mark.parametrize(("key_dim", "value_dim", "block_size"), [(6, 5, 16), (4, 8, 32)])
def test_every_element_of_a_block_has_a_place_of_its_own(packing, key_dim, value_dim, block_size):
    layout = BlockLayout(2, 2, key_dim, value_dim, block_size, 2, packing_id=packing)
    places = [
        index(layer, head, slot, dim)
        for layer in range(2)
        for head in range(2)
        for index, dims in ((layout.key_index, key_dim), (layout.value_index, value_dim))
        for slot in range(block_size)
        for dim in range(dims)
    ]
    assert sorted(places) == list(range(layout.block_elements))


def test_golden_places_of_packing_lhkv_2():
    """A vector of 32 elements: two dims of sixteen keys; two slots of sixteen dims of V."""
    layout = BlockLayout(1, 1, 64, 64, 32, 2, packing_id=PAIR_PACKING)
    assert [
        layout.key_index(0, 0, slot, dim) for slot, dim in ((0, 0), (0, 1), (1, 0), (15, 1))
    ] == [
        0,
        1,
        2,
        31,
    ]
    assert layout.key_index(0, 0, 0, 2) == 32
    assert layout.key_index(0, 0, 16, 0) == 16 * 64
    start = 32 * 64
    assert layout.value_index(0, 0, 0, 0) == start
    assert layout.value_index(0, 0, 1, 0) == start + 1
    assert layout.value_index(0, 0, 0, 1) == start + 2
    assert layout.value_index(0, 0, 2, 0) == start + 128
    with pytest.raises(ConfigError, match="slot 32"):
        layout.value_index(0, 0, 32, 0)


@pytest.mark.parametrize(
    "field", ["num_layers", "num_kv_heads", "key_dim", "block_size", "itemsize"]
)
def test_a_layout_refuses_a_number_below_one(field):
    good = dataclasses.asdict(BlockLayout(1, 1, 1, 1, 1, 1))
    with pytest.raises(ConfigError, match=f"{field} >= 1, got 0"):
        BlockLayout(**{**good, field: 0})
    with pytest.raises(ConfigError, match="value_dim >= 0, got -1"):
        BlockLayout(**{**good, "value_dim": -1})


@pytest.mark.parametrize(("layer", "head"), [(2, 0), (0, 3), (-1, 0), (0, -1)])
def test_an_offset_outside_the_block_is_refused(layer, head):
    with pytest.raises(ConfigError, match="outside a block of 2 layers and 3 heads"):
        BlockLayout(2, 3, 8, 8, 16, 2).key_offset(layer, head)
