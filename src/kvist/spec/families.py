"""What each model family leaves unsaid in its `config.json`: data, one row a model type.

Owns defaults and the rule by which layers differ. Every row is a fact about the family's
configuration class in transformers; `tests/engine/test_spec_against_transformers.py` holds the
table to it. Knows nothing of how the values are used (`kvist.spec.layers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

Default = int | bool | tuple[int, ...]
"""What a configuration field may be by default."""


class Pattern(StrEnum):
    """Rule for the kinds of layers where the configuration has no `layer_types`.

    `UNIFORM` all alike: windowed if a window is set, else chunked if a chunk is set, else full;
    `LAST_FULL` the last of every `period` layers is full; `FIRST_FULL` the first of every `period`;
    `TAIL` windowed from `max_window_layers` on; `EVEN_HEAD` windowed at even indices before
    `max_window_layers`; `NO_ROPE` decided by `no_rope_layers`; `OFFSET` full at
    `attn_layer_offset` modulo `attn_layer_period`; `LISTED` full at the listed indices;
    `HYBRID` attention and state in every layer; `STATE` state in every layer; `NAMED` only ever
    spelled out in the configuration.
    """

    UNIFORM = "uniform"
    LAST_FULL = "last_full"
    FIRST_FULL = "first_full"
    TAIL = "tail"
    EVEN_HEAD = "even_head"
    NO_ROPE = "no_rope"
    OFFSET = "offset"
    LISTED = "listed"
    HYBRID = "hybrid"
    STATE = "state"
    NAMED = "named"


class Mixer(StrEnum):
    """What carries the state in layers that do not attend; decides its size."""

    MAMBA = "mamba"
    MAMBA2 = "mamba2"
    DELTA = "delta"
    CONV = "conv"
    LIGHTNING = "lightning"


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults of one model type; None where the configuration must say, or "none" is meant.

    `kv_heads` None means as many as query heads, `head_dim` None means `hidden // heads`.
    `extra` holds defaults of fields that few families have.
    """

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    positions: int | None = None
    window: int | None = None
    pattern: Pattern = Pattern.UNIFORM
    period: int | None = None
    mixer: Mixer | None = None
    extra: tuple[tuple[str, Default], ...] = ()

    def default(self, field: str) -> Default | None:
        """Default of a configuration field, None if there is none."""
        named: dict[str, Default | None] = {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "sliding_window": self.window,
        }
        return named[field] if field in named else dict(self.extra).get(field)


UNKNOWN_FAMILY = Family()
"""Stands for a model type that has no row: only what the configuration says counts."""

_OFF = ("use_sliding_window", False)
_TAIL28 = (_OFF, ("max_window_layers", 28))
_TAIL80 = (_OFF, ("max_window_layers", 80))
_MLA = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
_MINICPM3 = (("kv_lora_rank", 256), ("qk_rope_head_dim", 32))
_PAIRS = (*_MLA, ("layers_are_pairs", True))
_DSA = (*_MLA, ("index_head_dim", 128))
_MQA = (("multi_query", True),)
_CHUNKS = (("attention_chunk_size", 8192),)
_GEMMA4 = (("global_head_dim", 512), ("last_full", True))
_CROSS = (("cross_attention_layers", (3, 8, 13, 18, 23, 28, 33, 38)),)
_SHARED15 = (("num_kv_shared_layers", 15),)
_DELTA = (
    ("conv_kernel", 4),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
)
_MAMBA = (("conv_kernel", 4), ("expand", 2), ("state_size", 16))
_MAMBA2 = (("conv_kernel", 4), ("expand", 2), ("state_size", 256), ("n_groups", 1))
_MAMBA2_8 = (("conv_kernel", 4), ("expand", 2), ("state_size", 128), ("n_groups", 8))
_NEMOTRON = (*_MAMBA2_8, ("mamba_num_heads", 128), ("mamba_head_dim", 64))
_FALCON_H1 = (*_MAMBA2, ("mamba_d_ssm", 1024))
_LFM2 = (("conv_kernel", 3),)
_JAMBA = (*_MAMBA, ("attn_layer_period", 8), ("attn_layer_offset", 4))

_LAST, _FIRST, _TAIL, _EVEN = (
    Pattern.LAST_FULL,
    Pattern.FIRST_FULL,
    Pattern.TAIL,
    Pattern.EVEN_HEAD,
)
_NO_ROPE, _OFFSET, _LISTED = Pattern.NO_ROPE, Pattern.OFFSET, Pattern.LISTED
_STATE, _HYBRID, _NAMED = Pattern.STATE, Pattern.HYBRID, Pattern.NAMED
_M1, _M2, _GDN = Mixer.MAMBA, Mixer.MAMBA2, Mixer.DELTA

# Columns: layers, heads, KV heads, head dim, hidden, vocab, positions, window, pattern, period,
# mixer, extra.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(32, 32, None, None, 4096, 32000, 2048),
        "mistral": Family(32, 32, 8, None, 4096, 32000, 131072, 4096),
        "ministral": Family(32, 32, 8, None, 4096, 32000, 131072, 4096),
        "ministral3": Family(34, 32, 8, 128, 4096, 131072, 262144),
        "mixtral": Family(32, 32, 8, None, 4096, 32000, 131072),
        "qwen2": Family(32, 32, 32, None, 4096, 151936, 32768, 4096, _TAIL, extra=_TAIL28),
        "qwen2_moe": Family(24, 16, 16, None, 2048, 151936, 32768, 4096, _EVEN, extra=_TAIL28),
        "qwen2_vl_text": Family(80, 64, 8, None, 8192, 152064, 32768, 4096, _TAIL, extra=_TAIL80),
        "qwen2_5_vl_text": Family(80, 64, 8, None, 8192, 152064, 32768, 4096, _TAIL, extra=_TAIL80),
        "qwen3": Family(32, 32, 32, 128, 4096, 151936, 32768, 4096, _TAIL, extra=_TAIL28),
        "qwen3_moe": Family(24, 32, 4, None, 2048, 151936, 32768, 4096, extra=(_OFF,)),
        "qwen3_vl_text": Family(32, 32, 32, 128, 4096, 151936, 128000),
        "qwen3_vl_moe_text": Family(24, 16, 16, None, 2048, 151936, 128000),
        "qwen3_next": Family(48, 16, 2, 256, 2048, 151936, 32768, None, _LAST, 4, _GDN, _DELTA),
        "qwen3_5_text": Family(32, 16, 4, 256, 4096, 248320, 32768, None, _LAST, 4, _GDN, _DELTA),
        "qwen3_5_moe_text": Family(
            40, 16, 2, 256, 2048, 248320, 32768, None, _LAST, 4, _GDN, _DELTA
        ),
        "gemma": Family(28, 16, 16, 256, 3072, 256000, 8192),
        "gemma2": Family(26, 8, 4, 256, 2304, 256000, 8192, 4096, _LAST, 2),
        "vaultgemma": Family(26, 8, 4, 256, 2304, 256000, 8192, 4096, _LAST, 2),
        "gemma3_text": Family(26, 8, 4, 256, 2304, 262208, 131072, 4096, _LAST, 6),
        "gemma3n_text": Family(35, 8, 2, 256, 2048, 262400, 32768, 512, _LAST, 5, extra=_SHARED15),
        "gemma4_text": Family(30, 8, 4, 256, 2304, 262144, 131072, 512, _LAST, 6, extra=_GEMMA4),
        "phi": Family(24, 32, None, None, 2048, 51200, 2048),
        "phi3": Family(32, 32, None, None, 3072, 32064, 4096),
        "phimoe": Family(32, 32, 8, None, 4096, 32064, 131072),
        "gpt_neox": Family(44, 64, None, None, 6144, 50432, 2048),
        "gpt2": Family(12, 12, None, None, 768, 50257, 1024),
        "gptj": Family(28, 16, None, None, 4096, 50400, 2048),
        "gpt_bigcode": Family(12, 12, None, None, 768, 50257, 1024, extra=_MQA),
        "codegen": Family(28, 16, None, None, 4096, 50400, 2048),
        "opt": Family(12, 12, None, None, 768, 50272, 2048),
        "bloom": Family(2, 8, None, None, 64, 250880),
        "mpt": Family(24, 16, None, None, 2048, 50368, 2048),
        "falcon": Family(32, 71, None, None, 4544, 65024, 2048, extra=_MQA),
        "starcoder2": Family(30, 24, 2, None, 3072, 49152, 4096),
        "olmo": Family(32, 32, None, None, 4096, 50304, 2048),
        "olmo2": Family(32, 32, None, None, 4096, 50304, 2048),
        "olmo3": Family(32, 32, None, None, 4096, 50304, 2048, 4096, _LAST, 4),
        "olmoe": Family(16, 16, None, None, 2048, 50304, 4096),
        "stablelm": Family(32, 32, 32, None, 2560, 50304, 4096),
        "cohere": Family(40, 64, None, None, 8192, 256000, 8192),
        "cohere2": Family(40, 64, None, None, 8192, 256000, 8192, 4096, _LAST, 4),
        "cwm": Family(64, 48, 8, 128, 6144, 128256, 131072, 8192, _FIRST, 4),
        "granite": Family(32, 32, None, None, 4096, 32000, 2048),
        "granitemoe": Family(32, 32, None, None, 4096, 32000, 2048),
        "granitemoeshared": Family(32, 32, None, None, 4096, 32000, 2048),
        "granitemoehybrid": Family(
            32, 32, None, None, 4096, 32000, 2048, None, _STATE, None, _M2, _MAMBA2
        ),
        "deepseek_v2": Family(32, 32, None, None, 4096, 102400, 2048, extra=_MLA),
        "deepseek_v3": Family(61, 128, 128, None, 7168, 129280, 4096, extra=_MLA),
        "deepseek_v32": Family(61, 128, 128, None, 7168, 129280, 163840, extra=_DSA),
        "glm_moe_dsa": Family(78, 64, 64, None, 6144, 154880, 202752, extra=_DSA),
        "glm4_moe_lite": Family(47, 20, 20, None, 2048, 154880, 202752, extra=_MLA),
        "longcat_flash": Family(56, 64, None, None, 6144, 131072, 131072, extra=_PAIRS),
        "minicpm3": Family(62, 40, 40, None, 2560, 73448, 32768, extra=_MINICPM3),
        "gpt_oss": Family(36, 64, 8, 64, 2880, 201088, 131072, 128, _LAST, 2),
        "smollm3": Family(36, 16, 4, None, 2048, 128256, 32768, None, _NO_ROPE, 4, extra=(_OFF,)),
        "llama4_text": Family(
            48, 40, 8, 128, 5120, 202048, 131072, None, _NO_ROPE, 4, extra=_CHUNKS
        ),
        "mllama_text_model": Family(40, 32, 8, None, 4096, 128256, 131072, extra=_CROSS),
        "glm": Family(40, 32, 2, 128, 4096, 151552, 131072),
        "glm4": Family(40, 32, 2, 128, 4096, 151552, 131072),
        "glm4_moe": Family(46, 96, 8, None, 4096, 151552, 131072),
        "internlm3": Family(48, 32, 2, 128, 4096, 128512, 32768),
        "exaone4": Family(32, 32, 32, None, 4096, 102400, 2048, 4096, _LAST, 4),
        "ernie4_5": Family(18, 16, 2, 128, 1024, 103424, 131072),
        "ernie4_5_moe": Family(28, 20, 4, None, 2560, 103424, 131072),
        "seed_oss": Family(64, 80, 8, 128, 4096, 155136, 524288),
        "nemotron": Family(32, 48, None, None, 6144, 256000, 4096),
        "persimmon": Family(36, 64, None, None, 4096, 262144, 16384),
        "helium": Family(24, 20, 20, 128, 2560, 48000, 4096),
        "arcee": Family(32, 32, None, None, 2560, 32000, 4096),
        "apertus": Family(32, 32, None, None, 4096, 131072, 65536),
        "bitnet": Family(30, 20, 5, None, 2560, 128256, 2048),
        "hunyuan_v1_dense": Family(32, 32, None, None, 4096, 290943, 2048),
        "hunyuan_v1_moe": Family(32, 32, None, None, 4096, 290943, 2048),
        "minimax_m2": Family(62, 48, 8, 128, 3072, 200064, 196608),
        "minimax": Family(32, 32, 8, None, 4096, 32000, 131072, None, _FIRST, 2, Mixer.LIGHTNING),
        "jamba": Family(32, 32, 8, None, 4096, 65536, 262144, None, _OFFSET, None, _M1, _JAMBA),
        "bamba": Family(32, 32, 8, None, 4096, 128000, 262144, None, _LISTED, None, _M2, _MAMBA2),
        "falcon_h1": Family(
            32, 32, 8, None, 4096, 128000, 8192, None, _HYBRID, None, _M2, _FALCON_H1
        ),
        "nemotron_h": Family(
            None, 32, 8, 128, 4096, 131072, 4096, None, _NAMED, None, _M2, _NEMOTRON
        ),
        "lfm2": Family(
            32, 32, 8, None, 2560, 65536, 128000, None, _LISTED, None, Mixer.CONV, _LFM2
        ),
        "mamba": Family(32, None, None, None, 768, 50280, None, None, _STATE, None, _M1, _MAMBA),
        "falcon_mamba": Family(
            32, None, None, None, 768, 50280, None, None, _STATE, None, _M1, _MAMBA
        ),
        "mamba2": Family(
            64, None, None, None, 4096, 32768, None, None, _STATE, None, _M2, _MAMBA2_8
        ),
    }
)
