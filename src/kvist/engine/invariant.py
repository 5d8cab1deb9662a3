"""``--batch-invariant``: the same bits whatever else is in the batch and however a prompt is cut.

Owns the change of a model's modules to that end. Knows no requests and no memory; that attention
computes every token by itself is the business of `engine.batch`.

Three things make the bits of a row depend on its neighbours, and each has its cure:

==================  ==========================================  ===================================
what                why                                         cure
==================  ==========================================  ===================================
matrix products     the library chooses blocks and threads by   tiles of `TILE_ROWS` rows, padded,
                    the number of rows                          so that every product has one shape
exp, tanh, sin …    the end of each thread's share goes         one row at a time
                    through other code than the rest
attention           prefill and decode are different kernels    every token is a decode
==================  ==========================================  ===================================

Norms, sums and scaling work on a row at a time with exact rounding, and need none. The idea of
fixing the shapes is that of "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025);
ours tiles any library's product instead of bringing kernels of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvist.errors import ModelError

TILE_ROWS = 16
"""Rows of every matrix product. Decode of fewer rows pays for the padding."""

ARITHMETIC = f"batch-invariant:{TILE_ROWS}"
"""What this adds to the root of all block keys: other bits, other blocks."""


def make_invariant(model: nn.Module) -> None:
    """Give every module of `model` that needs it a forward that is independent of the batch.

    Raises
    ------
    ModelError
        If the model multiplies by weights outside of linear layers (experts in one tensor).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            _replace(module, _in_tiles)
        elif isinstance(module, nn.Embedding | nn.Dropout | nn.Identity):
            continue
        elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            raise ModelError(
                f"{type(model).__name__}: {name} multiplies by weights of its own, which"
                " --batch-invariant cannot cut into tiles; leave the option out for this model"
            )
        elif not list(module.children()) and not list(module.parameters()):
            takes = inspect.signature(module.forward).parameters
            _replace(module, _positions_by_row if "position_ids" in takes else _by_row)


def _replace(
    module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    module.forward = wrapper(module.forward)


def _in_tiles(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tiled(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -count % TILE_ROWS))
        # A tile of its own memory: alignment may choose the code that runs.
        out = torch.cat([forward(tile.clone()) for tile in torch.split(padded, TILE_ROWS)])
        return out[:count].reshape(*x.shape[:-1], out.shape[-1])

    return tiled


def _by_row(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def one_by_one(x: Tensor) -> Tensor:
        rows = x.reshape(-1, 1, x.shape[-1])
        return torch.cat([forward(row.clone()) for row in rows]).reshape(x.shape)

    return one_by_one


def _positions_by_row(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Rope: cosine and sine of one position at a time. Other arguments are passed as they are."""

    def one_by_one(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs = [forward(x, p, *args, **kwargs) for p in torch.split(position_ids, 1, dim=-1)]
        if isinstance(pairs[0], Tensor):
            return torch.cat(pairs, dim=1)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))

    return one_by_one
