"""From the name a person types to a format.

Owns the spellings. A new format is one file and one line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvist.errors import ConfigError
from kvist.formats.base import KVFormat
from kvist.formats.plain import BF16, FP16, FP32
from kvist.formats.quantized import QUANTIZED, QuantizedFormat

FORMATS: Mapping[str, KVFormat] = MappingProxyType({form.name: form for form in (BF16, FP16, FP32)})
"""Every format that can run, by name."""

_PLANNED_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int8_per_token_head": "int8"}
)

_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
    }
)
"""Other spellings, as vLLM takes them."""


def resolve_format(kv_cache_dtype: str, compute_dtype: str) -> KVFormat:
    """The format that `--kv-cache-dtype` asks for.

    Parameters
    ----------
    kv_cache_dtype
        A format's name, vLLM's spelling of it, or "auto": the compute dtype itself.
    compute_dtype
        What the model computes in, in any of the same spellings but "auto".

    Raises
    ------
    ConfigError
        If there is no such format; the message lists those that exist.
    """
    option, asked = "kv_cache_dtype", kv_cache_dtype
    if kv_cache_dtype == "auto":
        option, asked = "dtype", compute_dtype
    name = _SPELLINGS.get(asked, _PLANNED_SPELLINGS.get(asked, asked))
    if name in QUANTIZED:
        raise ConfigError(
            f"{option}={asked!r}: this version sizes {name} (kvist plan) and cannot run it yet; use"
            f" one of {', '.join(FORMATS)}"
        )
    if name not in FORMATS:
        spellings = ", ".join(sorted(_SPELLINGS))
        raise ConfigError(
            f"{option}={asked!r} is no KV format of this version; there are "
            f"{', '.join(FORMATS)} (also spelled {spellings})"
            + (" and auto, the compute dtype" if option == "kv_cache_dtype" else "")
        )
    return FORMATS[name]


def planned_format(name: str, checkpoint_dtype: str) -> KVFormat | QuantizedFormat:
    """The format that a plan is to count with: one that runs, or one whose numbers are known.

    Raises
    ------
    ConfigError
        If there is no such format; the message lists those that exist.
    """
    planned = QUANTIZED.get(_PLANNED_SPELLINGS.get(name, name))
    if planned is not None:
        return planned
    if name != "auto" and _SPELLINGS.get(name, name) not in FORMATS:
        raise ConfigError(
            f"kv_cache_dtype={name!r} is no KV format; there are auto,"
            f" {', '.join((*FORMATS, *QUANTIZED))}"
        )
    return resolve_format(name, checkpoint_dtype)
