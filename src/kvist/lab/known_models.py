"""Models that people ask about by name: facts, one row each.

Owns shapes and parameter counts as their publishers state them. Knows no weights and fetches
nothing; a name here says nothing of whether the engine can serve the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvist.errors import ModelError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What is published of a model.

    Parameters
    ----------
    name
        As `kvist plan` takes it.
    config
        Fields of its `config.json` that decide the size of its KV cache.
    num_parameters
        All of them: what has to be loaded.
    num_active_parameters
        Those that one token reads; fewer in a mixture of experts.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    num_parameters: int
    num_active_parameters: int


def _model(
    name: str,
    model_type: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    context: int,
    billions: float,
    *,
    active: float | None = None,
    dtype: str = "bfloat16",
    **extra: Any,
) -> KnownModel:
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "dtype": dtype,
        **extra,
    }
    total = round(billions * 1e9)
    return KnownModel(name, config, total, total if active is None else round(active * 1e9))


def _gemma3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    context: int,
    billions: float,
    head_dim: int,
    window: int,
) -> KnownModel:
    return _model(
        name,
        "gemma3_text",
        layers,
        heads,
        kv_heads,
        hidden,
        262_144,
        context,
        billions,
        head_dim=head_dim,
        sliding_window=window,
    )


_F16: dict[str, Any] = {"dtype": "float16"}
_MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_D64: dict[str, Any] = {"head_dim": 64}
_D128: dict[str, Any] = {"head_dim": 128}
_D256: dict[str, Any] = {"head_dim": 256}
_W128: dict[str, Any] = {"head_dim": 64, "sliding_window": 128}
_W4096: dict[str, Any] = {"sliding_window": 4096}
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}
_K128, _K160 = 131_072, 163_840

_ROWS = (
    _model("llama-2-7b", "llama", 32, 32, 32, 4096, 32_000, 4096, 6.738, **_F16),
    _model("llama-2-13b", "llama", 40, 40, 40, 5120, 32_000, 4096, 13.016, **_F16),
    _model("llama-2-70b", "llama", 80, 64, 8, 8192, 32_000, 4096, 68.977, **_F16),
    _model("llama-3-8b", "llama", 32, 32, 8, 4096, 128_256, 8192, 8.030),
    _model("llama-3-70b", "llama", 80, 64, 8, 8192, 128_256, 8192, 70.554),
    _model("llama-3.1-8b", "llama", 32, 32, 8, 4096, 128_256, _K128, 8.030),
    _model("llama-3.1-70b", "llama", 80, 64, 8, 8192, 128_256, _K128, 70.554),
    _model("llama-3.1-405b", "llama", 126, 128, 8, 16_384, 128_256, _K128, 405.853),
    _model("llama-3.2-1b", "llama", 16, 32, 8, 2048, 128_256, _K128, 1.236, **_D64),
    _model("llama-3.2-3b", "llama", 28, 24, 8, 3072, 128_256, _K128, 3.213, **_D128),
    _model("llama-3.3-70b", "llama", 80, 64, 8, 8192, 128_256, _K128, 70.554),
    _model("qwen2.5-0.5b", "qwen2", 24, 14, 2, 896, 151_936, 32_768, 0.494),
    _model("qwen2.5-1.5b", "qwen2", 28, 12, 2, 1536, 151_936, 32_768, 1.544),
    _model("qwen2.5-3b", "qwen2", 36, 16, 2, 2048, 151_936, 32_768, 3.086),
    _model("qwen2.5-7b", "qwen2", 28, 28, 4, 3584, 152_064, 32_768, 7.616),
    _model("qwen2.5-14b", "qwen2", 48, 40, 8, 5120, 152_064, 32_768, 14.770),
    _model("qwen2.5-32b", "qwen2", 64, 40, 8, 5120, 152_064, 32_768, 32.764),
    _model("qwen2.5-72b", "qwen2", 80, 64, 8, 8192, 152_064, 32_768, 72.706),
    _model("qwen3-0.6b", "qwen3", 28, 16, 8, 1024, 151_936, 40_960, 0.596, **_D128),
    _model("qwen3-1.7b", "qwen3", 28, 16, 8, 2048, 151_936, 40_960, 1.721, **_D128),
    _model("qwen3-4b", "qwen3", 36, 32, 8, 2560, 151_936, 40_960, 4.022, **_D128),
    _model("qwen3-8b", "qwen3", 36, 32, 8, 4096, 151_936, 40_960, 8.191, **_D128),
    _model("qwen3-14b", "qwen3", 40, 40, 8, 5120, 151_936, 40_960, 14.768, **_D128),
    _model("qwen3-32b", "qwen3", 64, 64, 8, 5120, 151_936, 40_960, 32.762, **_D128),
    _model(
        "qwen3-30b-a3b", "qwen3_moe", 48, 32, 4, 2048, 151_936, 40_960, 30.532, active=3.3, **_D128
    ),
    _model(
        "qwen3-235b-a22b",
        "qwen3_moe",
        94,
        64,
        4,
        4096,
        151_936,
        40_960,
        235.094,
        active=22,
        **_D128,
    ),
    _model("mistral-7b-v0.1", "mistral", 32, 32, 8, 4096, 32_000, 32_768, 7.242, **_W4096),
    _model("mistral-7b-v0.3", "mistral", 32, 32, 8, 4096, 32_768, 32_768, 7.248, **_NO_WINDOW),
    _model(
        "mistral-nemo-12b",
        "mistral",
        40,
        32,
        8,
        5120,
        131_072,
        _K128,
        12.248,
        **_D128,
        **_NO_WINDOW,
    ),
    _model(
        "mistral-small-24b",
        "mistral",
        40,
        32,
        8,
        5120,
        131_072,
        32_768,
        23.572,
        **_D128,
        **_NO_WINDOW,
    ),
    _model("mixtral-8x7b", "mixtral", 32, 32, 8, 4096, 32_000, 32_768, 46.703, active=12.9),
    _model("mixtral-8x22b", "mixtral", 56, 48, 8, 6144, 32_768, 65_536, 140.621, active=39.1),
    _model("gemma-2-2b", "gemma2", 26, 8, 4, 2304, 256_000, 8192, 2.614, **_D256, **_W4096),
    _model("gemma-2-9b", "gemma2", 42, 16, 8, 3584, 256_000, 8192, 9.242, **_D256, **_W4096),
    _model("gemma-2-27b", "gemma2", 46, 32, 16, 4608, 256_000, 8192, 27.227, **_D128, **_W4096),
    _gemma3("gemma-3-270m", 18, 4, 1, 640, 32_768, 0.268, 256, 512),
    _gemma3("gemma-3-1b", 26, 4, 1, 1152, 32_768, 1.000, 256, 512),
    _gemma3("gemma-3-4b", 34, 8, 4, 2560, _K128, 4.300, 256, 1024),
    _gemma3("gemma-3-12b", 48, 16, 8, 3840, _K128, 12.187, 256, 1024),
    _gemma3("gemma-3-27b", 62, 32, 16, 5376, _K128, 27.432, 128, 1024),
    _model("phi-2", "phi", 32, 32, 32, 2560, 51_200, 2048, 2.780, **_F16),
    _model("phi-3-mini-128k", "phi3", 32, 32, 32, 3072, 32_064, _K128, 3.821),
    _model("phi-4", "phi3", 40, 40, 10, 5120, 100_352, 16_384, 14.660),
    _model(
        "deepseek-v2-lite",
        "deepseek_v2",
        27,
        16,
        16,
        2048,
        102_400,
        _K160,
        15.706,
        active=2.4,
        **_MLA,
    ),
    _model(
        "deepseek-v2", "deepseek_v2", 60, 128, 128, 5120, 102_400, _K160, 235.741, active=21, **_MLA
    ),
    _model(
        "deepseek-v3", "deepseek_v3", 61, 128, 128, 7168, 129_280, _K160, 671.026, active=37, **_MLA
    ),
    _model(
        "deepseek-r1", "deepseek_v3", 61, 128, 128, 7168, 129_280, _K160, 671.026, active=37, **_MLA
    ),
    _model("gpt-oss-20b", "gpt_oss", 24, 64, 8, 2880, 201_088, _K128, 20.915, active=3.6, **_W128),
    _model(
        "gpt-oss-120b", "gpt_oss", 36, 64, 8, 2880, 201_088, _K128, 116.829, active=5.1, **_W128
    ),
    _model("smollm2-135m", "llama", 30, 9, 3, 576, 49_152, 8192, 0.1345),
    _model("smollm2-360m", "llama", 32, 15, 5, 960, 49_152, 8192, 0.3618),
    _model("smollm2-1.7b", "llama", 24, 32, 32, 2048, 49_152, 8192, 1.711),
    _model("smollm3-3b", "smollm3", 36, 16, 4, 2048, 128_256, 65_536, 3.075),
)

KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({row.name: row for row in _ROWS})
"""Every model of the table, by name."""


def find_known(name: str) -> KnownModel | None:
    """Return the row of a name, whatever its case and a trailing ``-instruct`` or ``-it``."""
    lowered = name.lower()
    for ending in ("", "-instruct", "-it", "-chat"):
        if lowered.endswith(ending):
            found = KNOWN_MODELS.get(lowered.removesuffix(ending))
            if found is not None:
                return found
    return None


def not_known(name: str) -> ModelError:
    """Return the error that says what is near `name`."""
    near = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=4, cutoff=0.4)
    return ModelError(
        f"{name!r} is no file or folder and no model that kvist knows by name"
        + (f"; near it: {', '.join(near)}" if near else "")
        + ". Give a config.json, a model folder, a hub id (organisation/name), or a name of"
        " kvist plan --list"
    )
