"""What a model's own modules made of a few tokens, layer by layer: the measure of its replacement.

Owns the hooks for one forward pass and what they saw. Takes them away again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvist.engine.attention import StepContext
from kvist.engine.layers import find_stack


@dataclass(eq=False)
class Recording:
    """One forward pass by the model's own code.

    Attributes
    ----------
    context : StepContext
        The step; its pool holds nothing that anybody needs.
    inputs, outputs : list of Tensor
        Hidden states [1, T, hidden] into and out of each layer.
    turns : list of (cos, sin) or None
        What each layer was told of positions.
    logits : Tensor or None
        [n, V] of the wanted rows.
    """

    context: StepContext
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    turns: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    logits: Tensor | None = None


@contextmanager
def record_layers(model: nn.Module, num_layers: int, recording: Recording) -> Iterator[None]:
    """Write down what goes into and comes out of each layer, for as long as the block lasts.

    A model whose stack of layers cannot be told for sure leaves the recording empty.
    """
    found = find_stack(model, num_layers)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        output = out if isinstance(out, Tensor) else out[0]
        if not isinstance(hidden, Tensor) or not isinstance(output, Tensor):
            return
        turns = kwargs.get("position_embeddings")
        recording.inputs.append(hidden.clone())
        recording.outputs.append(output.clone())
        recording.turns.append(turns if isinstance(turns, tuple) and len(turns) == 2 else None)

    handles = [
        layer.register_forward_hook(hook, with_kwargs=True) for layer in (found[2] if found else ())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
