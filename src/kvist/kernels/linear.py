"""Weight matrices packed once for products with any number of rows, and stacks of layers over them.

Owns the seam to the part of ``kvist._C`` that multiplies: what it can run, what a packed matrix
holds, in which forms weights come. The packing and the arithmetic stand in ``csrc``. Knows no
model.

==========  =============================================  ==================================
weights     stored                                         rounding
==========  =============================================  ==================================
float32     as they are                                    none
bfloat16    as they are                                    none of bf16 weights
int8        a scale for each output                        symmetric, 127 steps to each side;
                                                           bf16 rows as 16-bit whole numbers
int4        fp16 scale and minimum for each 32 inputs      16 steps from least to greatest
==========  =============================================  ==================================

int4 is the grid of GGUF's Q4_1: a model that comes from there is found again almost exactly. Ours
differs in the order of the bytes, and in a least-squares fit of each group's line where that is
nearer to the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvist.kernels import cpu
from kvist.kernels.dispatch import StepAttention

WEIGHT_KINDS = ("float32", "bfloat16", "int8", "int4")
PANEL_OUTPUTS = 32
GROUP_INPUTS = 32
"""Inputs of a packed matrix are a multiple of this."""


class Linear(Protocol):
    """A packed matrix of the extension; see `PackedMatrix`."""

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Out [T, N] = x [T, K] times the transposed matrix, plus bias."""

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Unpack the weights of outputs `ids` into out [n, K]."""


class Stack(Protocol):
    """Decoder layers of the extension, without their attention; see ``csrc/stack.hpp``.

    ::

        begin()  enter(0)  <attention>  advance(0)  <attention>  ...  leave(last)  finish()
        begin()  run(0, last, attention)                                         finish()

    Tensors are handed over once and kept: all contiguous, on the CPU, of the stack's dtype where
    nothing else is said. Every method raises a ValueError, TypeError or IndexError for what does
    not fit.
    """

    def add_layer(
        self,
        first: Tensor,
        first_epsilon: float,
        second: Tensor,
        second_epsilon: float,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        head_epsilon: float,
        qkv: Linear,
        output: Linear,
        gate_up: Linear,
        down: Linear,
        rotary: bool,
    ) -> None:
        """Put a layer behind those there are. Gates and ups come in turn, 16 outputs each."""

    def set_attention(
        self,
        number: int,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        """Say what a layer asks of attention, for `run`; `layer` is that of the pool.

        0 stands for no window and no softcap; sinks are fp32 [Q].
        """

    def set_embedding(self, embedding: Linear) -> None:
        """Set the packed rows that `begin` takes."""

    def set_head(self, norm: Tensor, epsilon: float, head: Linear) -> None:
        """Set the last norm and the projection to logits."""

    def bind(
        self,
        ids: Tensor,
        residual: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Use these buffers of a step of T tokens.

        int64 [T], [T, hidden], [T, Q, D], twice [T, H, D], [T, Q, D], twice [T, rotary dims].
        """

    def want(self, rows: Tensor, logits: Tensor) -> None:
        """Set rows int64 [n] of T, read when `finish` runs, and the fp32 [n, V] it writes."""

    def begin(self) -> None:
        """Write rows of the embedding into the residual."""

    def enter(self, layer: int) -> None:
        """Make query, key and value of a layer from the residual."""

    def leave(self, layer: int) -> None:
        """Bring what was attended in a layer, and its MLP, into the residual."""

    def advance(self, layer: int) -> None:
        """Leave a layer, then enter the next."""

    def run(self, first: int, last: int, attention: StepAttention) -> None:
        """Enter `first`, attend and advance layer after layer, leave `last`: in one call.

        `attention` is over the buffers of `bind`.
        """

    def finish(self) -> None:
        """Write the logits of the wanted rows."""


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why packed matrices cannot be used, or None if they can."""
    reason = cpu.obstacle(device)
    if reason is not None:
        return reason
    if dtype not in (torch.bfloat16, torch.float32):
        return f"packed products take bfloat16 and float32 activations, not {dtype}"
    return None


def describe() -> str:
    """How bf16 activations are multiplied here: few rows, many rows."""
    native = cpu._extension()
    few, many = native.multiply_path(1, False), native.multiply_path(64, False)
    names = {"portable": "fp32 lanes", "dots": "AVX-512 bf16 dot products", "tiles": "AMX tiles"}
    return names[few] if few == many else f"{names[few]}, {names[many]} for many rows"


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Weights [N, K] in packed form.

    Attributes
    ----------
    kind : str
        One of `WEIGHT_KINDS`.
    inputs, outputs : int
        K and N.
    packed : Tensor
        uint8.
    bias : Tensor or None
        fp32 [N].
    native : Linear
        What multiplies. Keeps the tensors alive.
    """

    kind: str
    inputs: int
    outputs: int
    packed: Tensor
    bias: Tensor | None
    native: Linear

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def multiply(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x [T, K] times the transposed weights, plus bias: [T, N].

        Sums are fp32 and rounded once, to `out_dtype` or the dtype of `x`: bfloat16 or float32.
        """
        out = torch.empty((x.shape[0], self.outputs), dtype=out_dtype or x.dtype)
        self.native.multiply(x, out)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of outputs `ids`, int64 [n], as they count in products: [n, K]."""
        out = torch.empty((ids.shape[0], self.inputs), dtype=dtype)
        self.native.rows(ids, out)
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether weights [N, K] have a packed form."""
    return (
        weight.ndim == 2
        and weight.shape[0] > 0
        and weight.shape[1] > 0
        and weight.shape[1] % GROUP_INPUTS == 0
        and weight.dtype in (torch.bfloat16, torch.float32)
    )


def pack(
    weight: Tensor, kind: str, bias: Tensor | None = None, *, alone: bool = False
) -> PackedMatrix:
    """Pack weights.

    Parameters
    ----------
    weight : Tensor
        [N, K], bfloat16 or float32, on a CPU; see `can_pack`. Not kept.
    kind : str
        One of `WEIGHT_KINDS`.
    bias : Tensor, optional
        [N].
    alone : bool
        Multiply so that no row's sums depend on how many rows there are, bit by bit. Slower for
        many rows.

    Raises
    ------
    ValueError, TypeError
        If the weights have no such form.

    Notes
    -----
    Reads the weights once or twice, on all threads; another order than quantizing tensor libraries,
    the same grid.
    """
    native = cpu._extension()
    outputs, inputs = weight.shape
    weight = weight.detach()
    packed = torch.empty(native.packed_bytes(kind, inputs, outputs), dtype=torch.uint8)
    native.pack(weight if weight.stride(-1) == 1 else weight.contiguous(), kind, packed)
    wide = None if bias is None else bias.detach().float().contiguous()
    linear = native.Linear(kind, inputs, outputs, packed, wide, alone)
    return PackedMatrix(kind, inputs, outputs, packed, wide, linear)


def new_stack(
    hidden: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate: int,
    rotary_dim: int,
    dtype: torch.dtype,
) -> Stack:
    """Make an empty stack of decoder layers; see ``csrc/stack.hpp``.

    Raises
    ------
    ValueError
        If a width is no multiple of 32.
    """
    stack: Stack = cpu._extension().Stack(
        hidden,
        num_query_heads,
        num_kv_heads,
        head_dim,
        intermediate,
        rotary_dim,
        dtype == torch.bfloat16,
    )
    return stack
