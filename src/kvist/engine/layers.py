"""Finding the stack of decoder layers inside a transformers model.

Recognised by structure, not by name: the one `ModuleList` that has as many children as the model
has layers. Knows nothing of what a layer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def find_stack(model: nn.Module, num_layers: int) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """Return the module that has the stack, its name there, and the stack; None if in doubt."""
    stacks = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    return stacks[0] if len(stacks) == 1 else None


@contextmanager
def only_first_layers(model: nn.Module, num_layers: int, keep: int) -> Iterator[None]:
    """Let a model run with its first `keep` of `num_layers` layers, for as long as the block lasts.

    A model whose stack cannot be told for sure keeps all of them.
    """
    found = find_stack(model, num_layers)
    if found is None or keep >= num_layers:
        yield
        return
    parent, name, stack = found
    setattr(parent, name, stack[:keep])
    try:
        yield
    finally:
        setattr(parent, name, stack)
