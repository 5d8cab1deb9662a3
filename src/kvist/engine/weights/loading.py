"""Weights into memory, as a transformers model.

Owns the compute dtype and the loading. Where the weights are, `source` beside this says; whether
the engine can run them, `kvist.engine.weights.servable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvist.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from kvist.engine.weights.source import ModelSource

_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        "float16": "float16",
        "half": "float16",
        "fp16": "float16",
        "float32": "float32",
        "float": "float32",
        "fp32": "float32",
    }
)
# Trained in bf16, their activations leave fp16's range; vLLM refuses fp16 for the same families.
_NO_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "plamo2", "glm4"})


def resolve_dtype(config: Mapping[str, Any], dtype: str, device: str) -> str:
    """The dtype to compute in: "bfloat16", "float16" or "float32".

    "auto" is vLLM's rule: a bf16 or fp16 checkpoint is computed as it is, an fp32 one (or one that
    does not say) in bf16. Ours differs on CPUs, where an fp16 checkpoint is computed in bf16: few
    of them multiply fp16 in hardware and the others are many times slower; ask for "float16" to
    have it all the same.

    Parameters
    ----------
    config
        Raw `config.json`.
    dtype
        "auto", or one of vLLM's names: bfloat16, float16, half, float32, float (bf16, fp16 and
        fp32 are understood too).
    device
        As torch writes it: "cpu", "cuda", "cuda:1".

    Raises
    ------
    ConfigError
        If the name is none of these, or the family's values do not fit fp16.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    family = str(inner.get("model_type") or config.get("model_type") or "")
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise ConfigError(
                f"dtype={dtype!r} is unknown; use auto, bfloat16, float16 (half) or float32 (float)"
            )
        named = _DTYPES[dtype]
        if named == "float16" and family in _NO_FLOAT16:
            raise ConfigError(
                f"dtype={dtype!r} does not fit {family}: its activations exceed fp16's 65504; use "
                "bfloat16 or float32"
            )
        return named
    stated = (
        inner.get("dtype")
        or inner.get("torch_dtype")
        or config.get("dtype")
        or config.get("torch_dtype")
    )
    checkpoint = str(stated or "float32").removeprefix("torch.")
    on_cpu = device.split(":", maxsplit=1)[0] == "cpu"
    if checkpoint == "float16" and not on_cpu and family not in _NO_FLOAT16:
        return "float16"
    return "bfloat16"


def load_model(
    source: ModelSource, dtype: str, device: str, attn_implementation: str
) -> torch.nn.Module:
    """Load a model to serve: in eval mode, without gradients, on `device`.

    Parameters
    ----------
    source
        From `resolve`.
    dtype
        From `resolve_dtype`.
    device
        As torch writes it.
    attn_implementation
        Name under which the attention function is registered with transformers.

    Raises
    ------
    ModelError
        If the folder cannot be loaded, or its weights do not fill the model: a parameter that
        transformers would leave at random must never serve.

    Notes
    -----
    Nothing is fetched and no code of the model's folder is run. Cost: the weights are mapped, read
    once and, where the checkpoint has another dtype, converted.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.path,
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # a broken folder makes the libraries raise all there is
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot load {source.name} from {source.path}: {reason}; if a file is damaged, fetch"
            " the model again"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{source.path} has no weights for {len(missing)} parameters of "
            f"{type(model).__name__}, the first {missing[0]}; the folder is incomplete, or its "
            "config.json belongs to another model"
        )
    model.requires_grad_(requires_grad=False)
    loaded: torch.nn.Module = model.to(device).eval()
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar: the start-up log says what was loaded."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
