"""Tiny random models of many families, as folders that anything of the house can load.

Owns their sizes, their weights and a byte-level tokenizer. Knows nothing of engines. Needs
transformers and tokenizers. Threads: any, one at a time (torch's default dtype is not touched, its
random state is put back).

What comes out of such a model means nothing, but it is not constant either: weights are drawn wide
enough that the most likely token depends on all of the context, so a wrong key, value, position or
mask shows in greedy output within a few tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BOS, EOS = "<|begin|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 256 + len((BOS, EOS, *ROLES))

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
)

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "qwen2": {},
        # Heads wider than hidden_size / heads, and norms on queries and keys.
        "qwen3": {"head_dim": 32},
        "mistral": {"sliding_window": None},
        "phi3": {},
        # Rope on a quarter of each head; attention and MLP side by side.
        "gpt_neox": {"num_key_value_heads": None},
        "starcoder2": {"sliding_window": None},
        "olmo2": {},
        "gemma": {"head_dim": 256, "num_key_value_heads": 1, "hidden_activation": "gelu_tanh"},
        "granite": {"attention_multiplier": 0.2, "logits_scaling": 0.5},
        # Rope on every other layer only.
        "smollm3": {"no_rope_layers": [1, 0]},
        # Learned positions instead of rope; spelled in its own way.
        "gpt2": {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 4096,
            "hidden_size": None,
            "intermediate_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "max_position_embeddings": None,
        },
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": None},
        "olmo": {"clip_qkv": 3.0},
        "qwen3_moe": {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        "mixtral": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    }
)
"""What each family needs beside the common sizes; ``None`` takes a common size away."""

WINDOW = 24
"""Of the models in `BEYOND_PLAIN`: ends within a block, and most tests' prompts are longer."""

_SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}

BEYOND_PLAIN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # A window in every layer.
        "mistral": {"sliding_window": WINDOW},
        "phi3": {"sliding_window": WINDOW},
        "starcoder2": {"sliding_window": WINDOW},
        "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        # In some.
        "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "qwen3": {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            **_SLIDING_THEN_FULL,
        },
        "smollm3": {
            "no_rope_layers": [1, 0],
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "cohere2": {"sliding_window": WINDOW, **_SLIDING_THEN_FULL},
        "olmo3": {"sliding_window": WINDOW, **_SLIDING_THEN_FULL},
        "exaone4": {"sliding_window": WINDOW, **_SLIDING_THEN_FULL},
        # With a rope of their own for windows; with scores that are capped; with sinks.
        "gemma3_text": {"head_dim": 32, "sliding_window": WINDOW, **_SLIDING_THEN_FULL},
        "gemma2": {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 0.5,
            **_SLIDING_THEN_FULL,
        },
        "gpt_oss": {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 4096,
            **_SLIDING_THEN_FULL,
        },
    }
)
"""Families, and what makes them ask attention for more than softmax over all that came before."""


def tiny_model(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny random model and its tokenizer in float32.

    Parameters
    ----------
    family : str
        A model type of transformers; those of `FAMILIES` are known to work.
    folder : Path
        Made if need be.
    seed : int
        Of the weights. The same seed gives the same weights in every process.
    **overrides
        Fields of the configuration.

    Returns
    -------
    Path
        `folder`.

    Raises
    ------
    KeyError
        If this transformers has no such family.

    Notes
    -----
    About a quarter of a megabyte and a tenth of a second.
    """
    sizes = {**_SIZES, **FAMILIES.get(family, {})}
    # Taken away; but a window of None is a value.
    sizes = {
        k: v for k, v in sizes.items() if v is not None or k not in _SIZES or k == "pad_token_id"
    }
    special = {"bos_token_id": 256, "eos_token_id": 257}
    config = CONFIG_MAPPING[family](**{**sizes, **special, **overrides})
    with torch.random.fork_rng(devices=()):
        # Families that share a block of code do not share weights too.
        torch.manual_seed(zlib.crc32(family.encode()) + seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, begin and end of text, and three roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _draw(name: str, parameter: nn.Parameter) -> None:
    """Wide weights: a matrix keeps the scale of what goes through it, times a little more."""
    if name.endswith("sinks"):
        # As strong as a whole context of small scores.
        parameter.add_(torch.randn_like(parameter) + 4.0)
    elif parameter.ndim < 2:
        # Norms and biases: away from what they are made as, so that a lost one shows.
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        parameter.normal_(0.0, 1.0)
    else:
        parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
