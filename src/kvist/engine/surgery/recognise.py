"""What a decoder layer is made of, told from its attributes and shapes and not from its name.

Owns the structure that a fused call can compute: RMS norm, attention over merged or separate
projections with biases and norms of heads allowed, RMS norm, gated MLP with SiLU; each half added
to the residual. Says in words why a layer is something else. An attribute that it does not know and
that is set is such a reason, since it may change what the layer computes. It reads the model and
changes nothing. That a layer looks alike does not prove that it computes alike: `operate` beside
this tries it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvist.engine.layers import find_stack
from kvist.kernels.linear import PANEL_OUTPUTS

Projection = tuple[Tensor, Tensor | None]
"""Weights [N, K] and bias [N]."""

_HARMLESS = frozenset(
    {
        "attention_dropout",
        "attention_type",
        "config",
        "forward",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "is_causal",
        "is_sliding",
        "layer_idx",
        "layer_type",
        "num_attention_heads",
        "num_heads",
        "num_key_value_groups",
        "num_key_value_heads",
        "scaling",
        "sliding_window",
        "use_rope",
    }
)
"""Attributes that are read here, or that servable models may have without another arithmetic."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class RmsNorm:
    """Weights [N] and epsilon of a norm ``x / rms(x) * weight``."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer, taken apart.

    Attributes
    ----------
    first, second : RmsNorm
        Before attention and before the MLP.
    query_norm, key_norm : RmsNorm or None
        Of each head, before rope.
    query, key, value, output, gate, up, down : Projection
    num_query_heads, num_kv_heads, head_dim, intermediate : int
    scale : float
        On ``query . key``.
    rotary : bool
        Whether this layer turns queries and keys.
    """

    first: RmsNorm
    second: RmsNorm
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    gate: Projection
    up: Projection
    down: Projection
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    scale: float
    rotary: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """What all layers of one stack have in common."""
        hidden = self.first.weight.shape[0]
        heads = (self.num_query_heads, self.num_kv_heads, self.head_dim)
        return (hidden, *heads, self.intermediate)


@dataclass(frozen=True)
class Skeleton:
    """What is around the layers: embedding, rope, last norm and head.

    Attributes
    ----------
    layers : nn.ModuleList
    embedding : nn.Embedding
    rotary : nn.Module
        Called with hidden states and position ids, gives cosines and sines.
    norm : RmsNorm
    head : nn.Linear
    tied : bool
        Embedding and head are one tensor.
    """

    layers: nn.ModuleList
    embedding: nn.Embedding
    rotary: nn.Module
    norm: RmsNorm
    head: nn.Linear
    tied: bool


class NotRecognisedError(Exception):
    """The reason, in words, why something is not what a fused call computes."""


def recognise_skeleton(model: nn.Module, num_layers: int) -> Skeleton:
    """Find what is around the layers of a causal language model.

    Raises
    ------
    NotRecognisedError
    """
    found = find_stack(model, num_layers)
    if found is None:
        raise NotRecognisedError("its stack of layers cannot be told for sure")
    parent, _, layers = found
    embedding = accessor(model, "get_input_embeddings")
    head = accessor(model, "get_output_embeddings")
    rotary = getattr(parent, "rotary_emb", None)
    if type(embedding) is not nn.Embedding:
        raise NotRecognisedError(f"its embedding is a {type(embedding).__name__}")
    if type(head) is not nn.Linear:
        raise NotRecognisedError(f"its head is a {type(head).__name__}")
    if not isinstance(rotary, nn.Module):
        raise NotRecognisedError("it has no rotary embedding beside its layers")
    norm = _norm(getattr(parent, "norm", None), "its last norm")
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    return Skeleton(layers, embedding, rotary, norm, head, tied)


def recognise_layer(layer: nn.Module) -> LayerParts:
    """Take a decoder layer apart.

    Raises
    ------
    NotRecognisedError
    """
    _no_surprise(layer, "it", {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
    projections = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
    _no_surprise(attention, "self_attn", projections)
    _no_surprise(
        mlp,
        "mlp",
        {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"},
    )
    _silu(mlp)
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim < 2:
        raise NotRecognisedError("self_attn has no head_dim")
    output = _linear(attention, "o_proj")
    query, key, value = _qkv(attention, output[0].shape[1])
    gate, up = _gate_up(mlp)
    down = _linear(mlp, "down_proj")
    query_norm = _head_norm(attention, "q_norm", head_dim)
    key_norm = _head_norm(attention, "k_norm", head_dim)
    first = _norm(getattr(layer, "input_layernorm", None), "input_layernorm")
    second = _norm(getattr(layer, "post_attention_layernorm", None), "post_attention_layernorm")
    if query_norm and key_norm and query_norm.epsilon != key_norm.epsilon:
        raise NotRecognisedError("q_norm and k_norm have different epsilons")
    widths = {
        "hidden size": first.weight.shape[0],
        "query width": query[0].shape[0],
        "KV width": key[0].shape[0],
        "MLP width": down[0].shape[1],
    }
    for name, width in widths.items():
        if width % PANEL_OUTPUTS:
            raise NotRecognisedError(f"its {name} of {width} is no multiple of {PANEL_OUTPUTS}")
    scale = getattr(attention, "scaling", None)
    return LayerParts(
        first=first,
        second=second,
        query_norm=query_norm,
        key_norm=key_norm,
        query=query,
        key=key,
        value=value,
        output=output,
        gate=gate,
        up=up,
        down=down,
        num_query_heads=query[0].shape[0] // head_dim,
        num_kv_heads=key[0].shape[0] // head_dim,
        head_dim=head_dim,
        intermediate=down[0].shape[1],
        scale=scale if isinstance(scale, float) else head_dim**-0.5,
        rotary=bool(getattr(attention, "use_rope", True)),
    )


def _no_surprise(module: nn.Module, name: str, children: set[str]) -> None:
    for child, inner in module.named_children():
        if child not in children and not isinstance(inner, nn.Dropout | nn.Identity):
            raise NotRecognisedError(f"{name} has a part {child} ({type(inner).__name__})")
    own = vars(module).items()
    surprises = sorted(
        key
        for key, value in own
        if key not in _MODULE_ATTRIBUTES | _HARMLESS and not key.startswith("_") and _is_set(value)
    )
    if surprises:
        raise NotRecognisedError(f"{name} has {', '.join(surprises)}")
    if next(module.parameters(recurse=False), None) is not None:
        raise NotRecognisedError(f"{name} has parameters of its own")


def _part(layer: nn.Module, name: str) -> nn.Module:
    module = getattr(layer, name, None)
    if not isinstance(module, nn.Module):
        raise NotRecognisedError(f"it has no {name}")
    return module


def _is_set(value: Any) -> bool:
    return not callable(value) and value is not None and value not in (False, 0, "")


def _linear(parent: nn.Module, name: str) -> Projection:
    module = getattr(parent, name, None)
    if type(module) is not nn.Linear:
        raise NotRecognisedError(f"{name} is {_kind(module)} and not a linear layer")
    return module.weight, module.bias


def _qkv(attention: nn.Module, query_width: int) -> tuple[Projection, Projection, Projection]:
    if hasattr(attention, "qkv_proj"):
        weight, bias = _linear(attention, "qkv_proj")
        kv_width = (weight.shape[0] - query_width) // 2
        widths = [query_width, kv_width, kv_width]
        if sum(widths) != weight.shape[0] or kv_width <= 0:
            raise NotRecognisedError("qkv_proj is not one query, key and value")
        weights = torch.split(weight, widths)
        biases = (None,) * 3 if bias is None else torch.split(bias, widths)
        merged = list(zip(weights, biases, strict=True))
        return merged[0], merged[1], merged[2]
    query, key, value = (_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
    if query[0].shape[0] != query_width or key[0].shape != value[0].shape:
        raise NotRecognisedError("keys and values are of different widths, or queries and output")
    if {query[1] is None, key[1] is None, value[1] is None} == {True, False}:
        raise NotRecognisedError("only some of q_proj, k_proj and v_proj have a bias")
    return query, key, value


def _gate_up(mlp: nn.Module) -> tuple[Projection, Projection]:
    if hasattr(mlp, "gate_up_proj"):
        weight, bias = _linear(mlp, "gate_up_proj")
        gate, up = torch.chunk(weight, 2)
        biases = (None, None) if bias is None else torch.chunk(bias, 2)
        return (gate, biases[0]), (up, biases[1])
    gate_projection, up_projection = _linear(mlp, "gate_proj"), _linear(mlp, "up_proj")
    if (gate_projection[1] is None) != (up_projection[1] is None):
        raise NotRecognisedError("only one of gate_proj and up_proj has a bias")
    return gate_projection, up_projection


def _silu(mlp: nn.Module) -> None:
    activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    x = torch.linspace(-8.0, 8.0, 33)
    if not callable(activation) or not torch.allclose(activation(x), nn.functional.silu(x)):
        raise NotRecognisedError(f"its activation is {_kind(activation)} and not SiLU")


def _norm(module: object, name: str) -> RmsNorm:
    if not isinstance(module, nn.Module) or "RMSNorm" not in type(module).__name__:
        raise NotRecognisedError(f"{name} is {_kind(module)} and not an RMS norm")
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(epsilon, float):
        raise NotRecognisedError(f"{name} is not a norm with one weight an element")
    if len(list(module.parameters())) != 1:
        raise NotRecognisedError(f"{name} has more than one parameter")
    return RmsNorm(weight, epsilon)


def _head_norm(attention: nn.Module, name: str, head_dim: int) -> RmsNorm | None:
    module = getattr(attention, name, None)
    if module is None:
        return None
    norm = _norm(module, name)
    if norm.weight.shape[0] != head_dim:
        raise NotRecognisedError(f"{name} is over {norm.weight.shape[0]} elements, not a head")
    return norm


def accessor(model: nn.Module, name: str) -> object:
    """What a model's getter of this name gives; None without one."""
    method = getattr(model, name, None)
    return method() if callable(method) else None


def _kind(module: object) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"
