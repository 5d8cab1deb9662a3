"""Raw `config.json` to named fields: nesting, spellings, family defaults, types.

Owns how a field is found. Knows nothing of layers (`kvist.spec.layers`). transformers writes a
configuration without what equals a default, and reads it back with the defaults of the family, so
a field that is absent and one that is null mean different things: absent takes the family's
default, null says "none".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvist.errors import ModelError
from kvist.spec.families import FAMILIES, UNKNOWN_FAMILY, Family

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
"""Checkpoint and compute dtypes, with bytes an element."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "talker_config")
"""Where a multimodal configuration keeps its language model, first found wins."""

_SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
        "hidden_size": ("n_embd", "n_embed", "d_model"),
        "head_dim": ("kv_channels", "attention_head_dim"),
        "vocab_size": ("padded_vocab_size",),
        "max_position_embeddings": (
            "n_positions",
            "max_seq_len",
            "seq_length",
            "model_max_length",
            "n_ctx",
        ),
        "sliding_window": ("sliding_window_size", "attention_window_size", "window_size"),
        "sliding_window_pattern": ("_sliding_window_pattern",),
        "layer_types": ("layers_block_type",),
        "state_size": ("mamba_d_state", "ssm_state_size"),
        "conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache"),
        "expand": ("mamba_expand",),
        "n_groups": ("mamba_n_groups", "mamba_ngroups"),
        "mamba_num_heads": ("mamba_n_heads", "n_mamba_heads"),
        "mamba_head_dim": ("mamba_d_head", "mamba_headdim"),
        "dtype": ("torch_dtype",),
    }
)
"""Other names that families give the same field."""


class ConfigReader:
    """Typed access to the language model inside a raw configuration.

    Parameters
    ----------
    config
        The parsed `config.json`.

    Attributes
    ----------
    family
        Defaults and layer rule of the model type; `UNKNOWN_FAMILY` if it is not in the table.
    where
        The file in words, to begin an error with.
    notes
        What had to be assumed; grows while fields are read.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ModelError(f"a model configuration is an object, got {type(config).__name__}")
        self._outer = config
        self._config, self.model_type = _language_model(config)
        self.where = f"config.json of {self.model_type or 'the model'}"
        architectures = config.get("architectures")
        if not isinstance(architectures, list):
            architectures = []
        self.architecture = str(architectures[0]) if architectures else ""
        self.notes: list[str] = []
        self.family: Family = FAMILIES.get(self.model_type, UNKNOWN_FAMILY)
        if self.family is UNKNOWN_FAMILY:
            self.note(
                f"model_type {self.model_type!r} is not in the family table: read by its fields"
            )

    def note(self, text: str) -> None:
        """Keep what had to be assumed; once, however many layers say it."""
        if text not in self.notes:
            self.notes.append(text)

    def get(self, name: str) -> Any:
        """The value of a field under any of its spellings, else the family's default, else None."""
        for spelling in (name, *_SPELLINGS.get(name, ())):
            if spelling in self._config:
                return self._config[spelling]
        return self.family.default(name)

    def whole(self, name: str, number: object) -> int:
        """`number` as an integer; an error that names the field if it is none."""
        if isinstance(number, bool) or not (
            isinstance(number, int) or (isinstance(number, float) and number.is_integer())
        ):
            raise ModelError(f"{self.where}: {name} should be a whole number, got {number!r}")
        return int(number)

    def optional_integer(self, name: str) -> int | None:
        """A positive integer, or None where the field is absent without default, null, 0 or -1."""
        number = self.get(name)
        if number is None:
            return None
        whole = self.whole(name, number)
        return whole if whole > 0 else None

    def optional_list(self, name: str) -> Sequence[Any] | None:
        """A list, or None where the field is absent without default, or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise ModelError(f"{self.where}: {name} is no list: {value!r}")
        return value

    def integer(self, name: str) -> int:
        """A positive integer that must be there."""
        number = self.optional_integer(name)
        if number is None:
            spellings = ", ".join((name, *_SPELLINGS.get(name, ())))
            raise ModelError(
                f"{self.where} does not say {name} (looked for {spellings}), and the KV cache "
                "cannot be sized without it; add the field or fetch the model's own config.json"
            )
        return number

    def dtype(self) -> str:
        """The checkpoint's dtype; float32 where nothing is said, as transformers takes it."""
        value = self.get("dtype") or self._outer.get("dtype") or self._outer.get("torch_dtype")
        name = str(value or "").removeprefix("torch.")
        if name in DTYPE_BYTES:
            return name
        if not name:
            self.note("config.json names no dtype: taken as float32")
            return "float32"
        self.note(f"dtype {name!r} is a storage type of weights: K and V taken as bfloat16")
        return "bfloat16"


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The innermost language-model object and its model type."""
    model_type = str(config.get("model_type") or "")
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            inner_config, inner_type = _language_model(inner)
            # Files from before the inner type was written: the language model of "gemma3" is
            # "gemma3_text", that of "llava" has the field or is a Llama by transformers' default.
            if not inner_type:
                named = f"{model_type}_text"
                inner_type = named if named in FAMILIES else "llama"
            return inner_config, inner_type
    return config, model_type
