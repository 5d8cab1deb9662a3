"""How many parameters a model has, from its configuration alone.

Owns the count of a usual decoder: embeddings, attention, gated or plain MLP, experts. Norms and
biases are left out (below 0.1 %). Knows no weights; whoever has the files should count those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.spec import KVSpec, LayerGroup, LayerKind

_PLAIN_MLP = frozenset(
    {"gpt2", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "mpt", "falcon", "phi"}
    | {"starcoder2", "nemotron", "persimmon", "arcee"}
)
"""Two matrices in an MLP instead of three."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """All that has to be loaded, and what one token reads of it."""

    total: int
    active: int


def estimate_parameters(spec: KVSpec, config: Mapping[str, Any]) -> Parameters | None:
    """Count the parameters of a decoder; ``None`` where the configuration says too little.

    Also ``None`` for layers that keep state: their sizes differ too much from family to family.
    """
    inner = next((config[name] for name in ("text_config", "llm_config") if name in config), config)
    width = inner.get("intermediate_size") or inner.get("n_inner") or inner.get("ffn_dim")
    if not isinstance(width, int) or any(g.kind is LayerKind.STATE for g in spec.groups):
        return None
    hidden = spec.hidden_size
    matrices = 2 if spec.model_type in _PLAIN_MLP else 3
    tied = inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    embeddings = spec.vocab_size * hidden * (1 if tied else 2)
    attention = sum(_attention(group, spec, inner) for group in spec.groups)
    experts = inner.get("num_local_experts") or inner.get("num_experts")
    experts = experts or inner.get("n_routed_experts") or 0
    dense = matrices * hidden * width
    if not experts:
        total = embeddings + attention + spec.num_layers * dense
        return Parameters(total, total)
    chosen = int(inner.get("num_experts_per_tok") or 1)
    shared = int(inner.get("n_shared_experts") or 0)
    expert = matrices * hidden * int(inner.get("moe_intermediate_size") or width)
    first_dense = int(inner.get("first_k_dense_replace") or 0)
    sparse_layers = spec.num_layers - first_dense
    fixed = embeddings + attention + first_dense * dense + sparse_layers * shared * expert
    return Parameters(
        fixed + sparse_layers * experts * expert, fixed + sparse_layers * chosen * expert
    )


def _attention(group: LayerGroup, spec: KVSpec, config: Mapping[str, Any]) -> int:
    hidden, heads = spec.hidden_size, spec.num_query_heads
    if group.kind is LayerKind.LATENT:
        rope = int(config.get("qk_rope_head_dim") or 64)
        plain = int(config.get("qk_nope_head_dim") or 128)
        value = int(config.get("v_head_dim") or 128)
        rank = group.key_dim - rope
        query_rank = int(config.get("q_lora_rank") or 0)
        query = heads * (plain + rope) * (query_rank or hidden) + hidden * query_rank
        layer = query + hidden * group.key_dim + rank * heads * (plain + value)
        return group.num_layers * (layer + heads * value * hidden)
    keys = group.num_kv_heads * group.key_dim
    values = group.num_kv_heads * group.value_dim
    query = heads * group.key_dim
    out = heads * group.value_dim
    return group.num_layers * hidden * (query + keys + values + out)
