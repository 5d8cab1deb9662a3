"""Our attention under the model code of transformers.

transformers lets an attention function be registered by name; every model then calls it with query,
key and value after rope, and hands down any keyword it does not know itself. So the step travels as
one keyword argument, `kvist_step`: no global state, no patched model. (vLLM, SGLang and
transformers' own continuous batching plug in the same way; ours differs in writing K and V from
inside the function and in refusing every extra that it does not understand.)

Masks are skipped by transformers itself for a name that has no mask function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kvist.engine.batch import ForwardBatch
from kvist.errors import ModelError
from kvist.kernels.dispatch import KernelSet
from kvist.kernels.options import AttentionOptions
from kvist.spec import BlockLayout

NAME = "kvist"
"""Of the attention function. Contains no name of a built-in one: those are found by substring."""

HARMLESS = frozenset(
    {
        "is_causal",
        "position_ids",
        "output_attentions",
        "output_router_logits",
        "use_cache",
        "cache_position",
        "logits_to_keep",
    }
)
"""Extras that say nothing a causal, unmasked, paged step does not know already."""


@dataclass(eq=False)
class StepContext:
    """What attention needs to know of the step in progress.

    Attributes
    ----------
    batch : ForwardBatch
    pool : Tensor
        [N, block elements].
    layout : BlockLayout
    kernels : KernelSet
    max_context : int
        Longest context there can be; a window at least as long cuts nothing.
    calls : list of int
        Layer indices in the order in which they were attended; for the start-up check.
    asked : dict of int to AttentionOptions
        What each layer that was attended as a module asked for; windows that cut nothing left out.
    """

    batch: ForwardBatch
    pool: Tensor
    layout: BlockLayout
    kernels: KernelSet
    max_context: int
    calls: list[int] = field(default_factory=list)
    asked: dict[int, AttentionOptions] = field(default_factory=dict)


def kvist_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    kvist_step: StepContext | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Write K and V of the step's tokens into their slots, then attend through the block tables.

    Parameters
    ----------
    query : Tensor
        [1, Q, T, D], rope applied.
    key, value : Tensor
        [1, H, T, D], rope applied to the key.
    sliding_window : int, optional
        Positions that a query sees, its own included.
    softcap : float, optional
        Bound of the scaled scores, by tanh.
    s_aux : Tensor, optional
        [Q], a logit a head that takes part in the softmax and has no value.

    Returns
    -------
    Tensor
        [1, T, Q, Dv].

    Raises
    ------
    ModelError
        For a mask, an extra or sinks whose meaning would be lost, or when the step did not come
        down.
    """
    if kvist_step is None:
        raise ModelError(
            f"{type(module).__name__} was not given the step in progress: its model code does not"
            " hand unknown keywords down to attention, so it cannot be served"
        )
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} passes a mask, which paged attention cannot honour"
        )
    unknown = {k for k, v in extras.items() if v is not None and k not in HARMLESS}
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks attention for {', '.join(sorted(unknown))}, which is not"
            " supported yet; serving it would give wrong text"
        )
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ModelError(
            f"{type(module).__name__} has attention sinks and does not hand them down to attention;"
            " serving it would give wrong text"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    step = kvist_step
    step.calls.append(layer)
    window = sliding_window
    if window is not None and window >= step.max_context:
        window = None
    options = step.asked[layer] = AttentionOptions(
        window, softcap, None if s_aux is None else s_aux.float()
    )
    queries = query[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    step.kernels.write_kv(
        step.pool,
        step.layout,
        layer,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.batch.slots,
    )
    out = step.kernels.attention(
        queries, step.pool, step.layout, layer, step.batch.attention, scale, options=options
    )
    assert isinstance(out, Tensor)
    return out[None], None


def register() -> None:
    """Make the function known to transformers. Doing it twice does no harm."""
    AttentionInterface.register(NAME, kvist_attention)
