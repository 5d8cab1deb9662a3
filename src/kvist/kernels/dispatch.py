"""Which kernel runs each operation, and why.

Owns the choice, made once at start-up, and the sentence about it in the log. The only module that
others import to compute with the pool. Knows which backends exist; none of their arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvist.errors import BackendError, ConfigError
from kvist.kernels import cpu, paged, reference
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.options import PLAIN, AttentionOptions
from kvist.spec import BlockLayout

BACKENDS = ("cpp", "torch", "sdpa", "reference")
OPERATIONS = ("write_kv", "rotate_write_kv", "copy_blocks", "decode", "prefill")

WriteKernel = Callable[[Tensor, BlockLayout, int, Tensor, Tensor, Tensor], None]
RotateWriteKernel = Callable[
    [Tensor, BlockLayout, int, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None
]
CopyKernel = Callable[[Tensor, Tensor, Tensor], None]


class AttendKernel(Protocol):
    """Attention of the decode or of the prefill sequences of a batch, into given tensors."""

    def __call__(
        self,
        query: Tensor,
        pool: Tensor,
        layout: BlockLayout,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        options: AttentionOptions = PLAIN,
    ) -> None:
        """Write the rows of its sequences into `out`; see `reference.attend`."""
        ...


class StepAttention(Protocol):
    """Attention of one step, the tensors of which all layers share; see `PrepareKernel`."""

    def attend(
        self, layer: int, scale: float, window: int, softcap: float, sinks: Tensor | None
    ) -> None:
        """Write K and V into a layer of the pool, then all rows of `out`.

        0 stands for no window and no softcap; sinks are fp32 [Q].
        """


class PrepareKernel(Protocol):
    """What is the same in all layers of a step, checked once."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        pool: Tensor,
        layout: BlockLayout,
        batch: AttentionBatch,
        out: Tensor,
        windows: Sequence[int] = (0,),
    ) -> StepAttention:
        """Take the tensors of a step: query and out [T, Q, D], key and value [T, H, D], slots [T].

        They hold the numbers of one layer after the other. `windows` are those that layers will ask
        for; 0 stands for none.
        """
        ...


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one pool, chosen once.

    Attributes
    ----------
    write_kv : callable
        ``(pool, layout, layer, key, value, slots)``; see `reference.write_kv`.
    rotate_write_kv : callable
        ``(pool, layout, layer, query, key, value, slots, cos, sin)``; see
        `reference.rotate_write_kv`.
    copy_blocks : callable
        ``(pool, src, dst)``; see `reference.copy_blocks`.
    decode, prefill : AttendKernel
        The two halves of `attention`.
    report : tuple of (operation, backend, why)
        For the start-up log, in the order of `OPERATIONS`.
    prepare : PrepareKernel or None
        `write_kv` and attention in one object a step, which `linear.Stack` can run layers with.
    """

    write_kv: WriteKernel
    rotate_write_kv: RotateWriteKernel
    copy_blocks: CopyKernel
    decode: AttendKernel
    prefill: AttendKernel
    report: tuple[tuple[str, str, str], ...]
    prepare: PrepareKernel | None = None

    def attention(
        self,
        query: Tensor,
        pool: Tensor,
        layout: BlockLayout,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        return_lse: bool = False,
        options: AttentionOptions = PLAIN,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from every query token of the step to its own context in the pool.

        Parameters
        ----------
        query : Tensor
            [T, Q, Dk], any strides; T is the batch's token count, Q a multiple of H.
        pool : Tensor
            [N, block elements]; the K and V of this step's tokens are already written.
        layout : BlockLayout
            Where K and V lie in a block.
        layer : int
            Which layer of the group.
        batch : AttentionBatch
            The sequences of the step.
        scale : float
            Factor on ``query . key`` before the softmax.
        return_lse : bool
            Also return the log-sum-exp of the scores, by which parts can be merged.
        options : AttentionOptions
            Window, softcap and sinks of the layer.

        Returns
        -------
        out : Tensor
            [T, Q, Dv] in the dtype of `query`.
        lse : Tensor
            fp32 [T, Q], only with `return_lse`.

        Raises
        ------
        ValueError
            If query, batch and layout do not fit together.

        Notes
        -----
        Call on the thread that runs the model. Decode reads every K and V of its contexts once.
        """
        tokens, num_query_heads, dim = query.shape
        if tokens != batch.num_tokens or dim != layout.key_dim:
            raise ValueError(
                f"query has shape {tuple(query.shape)}; the batch has {batch.num_tokens} tokens "
                f"and the layout a key_dim of {layout.key_dim}"
            )
        if num_query_heads % layout.num_kv_heads or batch.block_size != layout.block_size:
            raise ValueError(
                f"{num_query_heads} query heads over {layout.num_kv_heads} KV heads, batch "
                f"block_size {batch.block_size} over layout block_size {layout.block_size}: the "
                "first must be a multiple, the second equal"
            )
        out = query.new_empty((tokens, num_query_heads, layout.value_dim))
        lse = (
            torch.empty((tokens, num_query_heads), dtype=torch.float32, device=query.device)
            if return_lse
            else None
        )
        if batch.num_decodes:
            self.decode(query, pool, layout, layer, batch, scale, out, lse, options)
        if batch.num_decodes < len(batch.query_lens):
            self.prefill(query, pool, layout, layer, batch, scale, out, lse, options)
        return out if lse is None else (out, lse)

    def describe(self) -> str:
        """One line an operation, for the start-up log."""
        return "\n".join(f"{name}: {backend} ({why})" for name, backend, why in self.report)


def select(
    device: torch.device,
    dtype: torch.dtype,
    layout: BlockLayout,
    num_query_heads: int,
    prefer: str | None = None,
) -> KernelSet:
    """Choose the kernels for a pool.

    Parameters
    ----------
    device : torch.device
        Where the pool is.
    dtype : torch.dtype
        Dtype of the pool: bfloat16, float16 or float32.
    layout : BlockLayout
        Where K and V lie in a block.
    num_query_heads : int
        Q, a multiple of the layout's KV heads.
    prefer : str, optional
        ``"cpp"``, ``"torch"``, ``"sdpa"``, ``"reference"``; else the fastest that can run here.

    Raises
    ------
    ConfigError
        If `prefer` names no backend.
    BackendError
        If the backend asked for cannot run here, or none can.
    """
    if prefer is not None and prefer not in BACKENDS:
        raise ConfigError(
            f"kernel backend {prefer!r} does not exist; choose one of {', '.join(BACKENDS)}"
        )
    _check(dtype, layout, num_query_heads)
    obstacle = cpu.obstacle(device)
    if prefer == "cpp" and obstacle is not None:
        raise BackendError(
            f"kernel backend 'cpp' cannot run here: {obstacle}; choose 'torch', or leave the "
            "choice open"
        )
    if prefer == "reference":
        return KernelSet(
            reference.write_kv,
            reference.rotate_write_kv,
            reference.copy_blocks,
            reference.decode,
            reference.prefill,
            tuple((name, "reference", "asked for") for name in OPERATIONS),
        )
    if prefer == "sdpa":
        return KernelSet(
            reference.write_kv,
            reference.rotate_write_kv,
            reference.copy_blocks,
            paged.decode_gathered,
            paged.prefill,
            tuple(
                (name, "sdpa", "asked for: the arithmetic of transformers") for name in OPERATIONS
            ),
        )
    torch_prefill = "gathers each context, then torch's own attention"
    if prefer == "torch" or obstacle is not None:
        why = "asked for" if obstacle is None or prefer else f"because {obstacle}"
        return KernelSet(
            reference.write_kv,
            reference.rotate_write_kv,
            reference.copy_blocks,
            paged.decode,
            paged.prefill,
            (
                *((name, "torch", why) for name in OPERATIONS[:-1]),
                ("prefill", "torch", torch_prefill),
            ),
        )
    native = cpu.CpuKernels.of(layout)
    return KernelSet(
        native.write_kv,
        native.rotate_write_kv,
        native.copy_blocks,
        native.decode,
        native.prefill,
        tuple((name, "cpp", native.describe()) for name in OPERATIONS),
        native.prepare,
    )


def held_bytes() -> int:
    """Bytes of host memory that compiled kernels hold in this process now.

    Workspaces and buffers between their calls, as much as the largest call so far needed. What
    torch holds is not in here: packed weights are tensors, and other backends use torch's
    allocator. Microseconds; any thread.
    """
    return cpu.held_bytes()


def _check(dtype: torch.dtype, layout: BlockLayout, num_query_heads: int) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise BackendError(
            f"no kernel reads a pool of {dtype}; choose bfloat16, float16 or float32"
        )
    if layout.value_dim == 0:
        raise BackendError("latent layers, which store no V of their own, have no kernel here yet")
    if dtype.itemsize != layout.itemsize:
        raise BackendError(
            f"a pool of {dtype} has {dtype.itemsize} bytes an element, the layout says "
            f"{layout.itemsize}"
        )
    if num_query_heads < 1 or num_query_heads % layout.num_kv_heads:
        raise BackendError(
            f"{num_query_heads} query heads cannot share {layout.num_kv_heads} KV heads evenly"
        )
