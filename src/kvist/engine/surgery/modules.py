"""Modules with packed weights, for models and layers that run module by module.

Owns what takes the place of a linear layer or an embedding, and heads whose logits are not rounded.
Knows nothing of which models there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvist.kernels.linear import PackedMatrix

_HEAD_ROWS = 8192
"""Outputs of a head that are widened to fp32 at a time where no kernel sums in fp32."""


class PackedWeights(nn.Module):
    """Holds packed weights, so that they are counted among a model's buffers.

    Parameters
    ----------
    matrix : PackedMatrix
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self.matrix = matrix
        for name, tensor in _tensors(matrix):
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weights [N, K] as they count in products, unpacked anew each time: slow."""
        return self.matrix.rows(torch.arange(self.matrix.outputs), torch.float32)


class PackedLinear(PackedWeights):
    """A linear layer.

    Parameters
    ----------
    matrix : PackedMatrix
    out_dtype : torch.dtype, optional
        float32 for a head: sums are fp32 and are then not rounded.
    """

    def __init__(self, matrix: PackedMatrix, out_dtype: torch.dtype | None = None) -> None:
        super().__init__(matrix)
        self.in_features = matrix.inputs
        self.out_features = matrix.outputs
        self._out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the transposed weights, plus bias: [..., N]."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = self.matrix.multiply(rows, self._out_dtype)
        return out.reshape(*x.shape[:-1], self.out_features)


class PackedEmbedding(PackedWeights):
    """An embedding that is packed because it is the head's weights too.

    Parameters
    ----------
    matrix : PackedMatrix
    dtype : torch.dtype
        Of what it gives.
    """

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__(matrix)
        self._out_dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows [..., K] of int64 ids."""
        found = self.matrix.rows(ids.reshape(-1), self._out_dtype)
        return found.reshape(*ids.shape, self.matrix.inputs)


class FusedLayer(nn.Module):
    """What is left of a layer that the stack runs: its weights, so that they are counted.

    Parameters
    ----------
    matrices : list of PackedMatrix
    norms : list of Tensor
    """

    def __init__(self, matrices: list[PackedMatrix], norms: list[Tensor]) -> None:
        super().__init__()
        self.matrices = nn.ModuleList([PackedWeights(matrix) for matrix in matrices])
        for number, norm in enumerate(norms):
            self.register_buffer(f"norm_{number}", norm, persistent=False)


def keep_logits_wide(head: nn.Linear) -> None:
    """Give a head that stays a module a forward whose logits are fp32 and never rounded.

    Notes
    -----
    On a GPU the product itself sums and returns fp32. On a CPU without our kernels the weights are
    widened part by part in every call, which is slow and takes 4 bytes for each of up to 8192 x K
    weights.
    """
    if head.weight.dtype == torch.float32:
        return

    def wide(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weight, bias = head.weight, head.bias
        if weight.device.type == "cuda":
            out = torch.mm(rows, weight.T, out_dtype=torch.float32)
        else:
            parts = torch.split(weight, _HEAD_ROWS)
            out = torch.cat([rows.float() @ part.float().T for part in parts], dim=-1)
        if bias is not None:
            out += bias.float()
        return out.reshape(*x.shape[:-1], out.shape[-1])

    head.forward = wide  # type: ignore[method-assign, assignment]


def _tensors(matrix: PackedMatrix) -> Iterator[tuple[str, Tensor]]:
    for name in ("packed", "bias"):
        tensor = getattr(matrix, name)
        if tensor is not None:
            yield name, tensor
