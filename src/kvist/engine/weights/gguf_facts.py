"""What a GGUF file says that transformers' loader leaves behind.

Owns four things the loader drops or gets wrong, each of which changes answers without a sound: all
end-of-sequence ids, scaled rope, how text is split before BPE, sampling defaults. Pure functions of
the header; no torch, no transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvist.engine.weights.gguf_header import GGUFHeader
from kvist.errors import ModelError

_CONTROL_TYPES = (3, 4)  # llama.cpp's CONTROL and USER_DEFINED
_END_TOKENS = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_sentence|>",
    "<｜end▁of▁sentence｜>",
)
"""Tokens that end a turn or a text in the models we know; they end a generation where the
vocabulary holds them as control tokens. Not `</s>`: it is a tag of HTML in Gemma's vocabulary, and
where it ends a text the file names it as its end of sequence."""

_ID_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)

_SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)

# Text split by llama.cpp's rule "every digit by itself, then GPT-2's expression".
_DIGIT_SPLITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# GPT-2's expression alone, which is what a byte-level tokenizer does by itself.
_PLAIN_SPLITS = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "trillion"})

# The scalings of Llama 3.1 and later, of which a GGUF keeps only the resulting factors.
_LLAMA3_FACTORS = (8.0, 32.0, 16.0)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def end_ids(header: GGUFHeader, config_eos: int | Sequence[int] | None) -> list[int]:
    """All ids that end a generation, without repeats, the file's own first.

    The file's end of sequence, turn and message; what the loader put in the config; and every
    control token of the vocabulary that is known to end a turn or text. One of them alone is a
    classic way to have a chat model talk to itself.
    """
    ids: list[int] = [header.metadata[key] for key in _ID_KEYS if key in header.metadata]
    if config_eos is not None:
        ids += [config_eos] if isinstance(config_eos, int) else list(config_eos)
    tokens = header.get("tokenizer.ggml.tokens", [])
    kinds = header.get("tokenizer.ggml.token_type", [])
    known = frozenset(_END_TOKENS)
    ids += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in _CONTROL_TYPES and token in known
    ]
    return list(dict.fromkeys(int(index) for index in ids))


def sampling_defaults(header: GGUFHeader) -> dict[str, float | int]:
    """Generation defaults that the file states, under transformers' names."""
    return {name: header.metadata[key] for key, name in _SAMPLING.items() if key in header.metadata}


def splits_digits(header: GGUFHeader) -> tuple[bool, str | None]:
    """Whether each digit is a word of its own, and a note if the rule is one we do not know.

    transformers knows the splitting rules of some vocabularies and takes GPT-2's for all others;
    SmolLM2's is among the others, and "2024" then tokenizes otherwise than in training.
    """
    if header.get("tokenizer.ggml.model") != "gpt2":
        return False, None
    rule = str(header.get("tokenizer.ggml.pre", "default"))
    if rule in _DIGIT_SPLITS:
        return True, None
    if rule in _PLAIN_SPLITS:
        return False, None
    return False, (
        f"text is split by transformers' reading of the rule {rule!r}; if the model was published "
        "with a tokenizer.json, prefer that directory"
    )


def rope_scaling(header: GGUFHeader, factors: Sequence[float] | None) -> dict[str, Any] | None:
    """Scaled rope as transformers' `rope_parameters` write it, or None where it is plain.

    The loader reads `rope.freq_base` only and drops the scaling, so that a model answers well for a
    few thousand tokens and then comes apart.

    Parameters
    ----------
    header
        Of the file.
    factors
        Values of the tensor `rope_freqs.weight`, by which each frequency is divided, or None.

    Raises
    ------
    ModelError
        If the file states a scaling that cannot be expressed.
    """
    if factors is not None:
        return _llama3_scaling(header, factors)
    kind = str(header.get("{arch}.rope.scaling.type", "none"))
    factor = header.get("{arch}.rope.scaling.factor")
    if kind == "none" or (factor is not None and float(factor) == 1.0):
        return None
    original = header.get("{arch}.rope.scaling.original_context_length")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and original:
        return {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
        }
    raise ModelError(
        f"the GGUF file scales rope by {kind!r} (factor {factor}, original context {original}), "
        "which cannot be carried over; use the model's own Hugging Face directory"
    )


def _llama3_scaling(header: GGUFHeader, factors: Sequence[float]) -> dict[str, Any]:
    base = float(header.get("{arch}.rope.freq_base", 10000.0))
    for factor in _LLAMA3_FACTORS:
        expected = llama3_factors(base, 2 * len(factors), factor)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL,
            }
    raise ModelError(
        f"the GGUF file carries {len(factors)} rope factors from {min(factors):.3g} to "
        f"{max(factors):.3g} that are none of Llama 3's scalings {_LLAMA3_FACTORS}; use the "
        "model's own Hugging Face directory"
    )


def llama3_factors(base: float, dim: int, factor: float) -> list[float]:
    """What Llama 3's scaling divides each of the `dim / 2` rope frequencies by.

    Long waves by `factor`, short ones by 1, those between by a blend of the two::

        wave length   |--- < original/high ---|--- blend ---|--- > original/low ---|
        divided by    1                        1 .. factor   factor
    """
    divisors = []
    for index in range(0, dim, 2):
        waves = _LLAMA3_ORIGINAL * base ** (-index / dim) / (2 * math.pi)
        blend = (waves - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        blend = min(1.0, max(0.0, blend))
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return divisors
