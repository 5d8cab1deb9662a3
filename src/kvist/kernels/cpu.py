"""The C++ kernels, called with torch tensors.

Owns the seam to ``kvist._C``: whether it is there, which instructions it may use, and how tensors
are handed over. The arithmetic, and the checks of shapes and block ids, stand in ``csrc``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

# First torch, so that our extension binds to the OpenMP runtime that torch has loaded.
import torch
from torch import Tensor

from kvist.errors import BackendError, ConfigError
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.options import PLAIN, AttentionOptions
from kvist.spec import BlockLayout

ISA_VARIABLE = "KVIST_ISA"
"""Environment variable that names the instruction set to use: portable, avx2, avx512, avx512bf16 or
amx; else the highest that the processor has. Read when kernels are selected."""


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        return import_module("kvist._C"), None
    except ImportError as error:
        return None, str(error)


_C, _REASON = _load()


def obstacle(device: torch.device) -> str | None:
    """Why the C++ kernels cannot serve a pool on this device, or None if they can."""
    if device.type != "cpu":
        return f"the C++ kernels run on a CPU and the pool is on {device}"
    if _C is None:
        return f"kvist._C is not built: {_REASON}"
    return None


def available_isas() -> list[str]:
    """Names of the instruction sets that kernels and processor have, in ascending order."""
    names: list[str] = _extension().build_info()["isa"]
    return names


def chosen_isa() -> str:
    """Name of the instruction set that `ISA_VARIABLE` asks for, else the highest there is.

    Raises
    ------
    ConfigError
        If there is no such set, or this processor does not have it.
    """
    there = available_isas()
    asked = os.environ.get(ISA_VARIABLE, "")
    if asked and asked not in there:
        raise ConfigError(
            f"{ISA_VARIABLE}={asked}: the kernels and this processor have {', '.join(there)}; name "
            "one of them or unset it"
        )
    return str(_extension().chosen_isa().name)


def held_bytes() -> int:
    """Bytes that the C++ kernels hold in this process now; 0 where there are none."""
    return 0 if _C is None else int(_C.held_bytes())


@dataclass(frozen=True, eq=False)
class CpuKernels:
    """The C++ kernels for pools of one layout; make one with `CpuKernels.of`.

    Attributes
    ----------
    layout : BlockLayout
        That of the pool. Others are served too, a little slower.
    isa : str
        Instruction set in use.

    Notes
    -----
    Keeps memory that its calls share: one call at a time, on the thread that runs the model.
    """

    layout: BlockLayout
    isa: str
    _layout: Any
    _isa: Any
    _workspace: Any

    @classmethod
    def of(cls, layout: BlockLayout) -> CpuKernels:
        """Kernels for a layout, with the instruction set that `chosen_isa` names."""
        extension, name = _extension(), chosen_isa()
        isa = getattr(extension.Isa, name)
        return cls(layout, name, _native(layout), isa, extension.Workspace())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory kept between calls; as much as the largest call so far needed."""
        return int(self._workspace.nbytes)

    def describe(self) -> str:
        """What the kernels run on here, for the start-up log."""
        info = _extension().build_info()
        threads = (
            f"{info['threads']} threads" if info["openmp"] else "1 thread, built without OpenMP"
        )
        return f"{self.isa}, {threads}, {info['compiler']}"

    def write_kv(
        self,
        pool: Tensor,
        layout: BlockLayout,
        layer: int,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
    ) -> None:
        """See `reference.write_kv`."""
        key, value = _rows(key, pool.dtype), _rows(value, pool.dtype)
        _extension().write_kv(pool, self._native(layout), layer, key, value, slots)

    def rotate_write_kv(
        self,
        pool: Tensor,
        layout: BlockLayout,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """See `reference.rotate_write_kv`; the rows of `query` must lie side by side."""
        _extension().rotate_write_kv(
            query,
            pool,
            self._native(layout),
            layer,
            _rows(key, pool.dtype),
            _rows(value, pool.dtype),
            slots,
            _rows(cos, cos.dtype),
            _rows(sin, cos.dtype),
            self._isa,
        )

    def copy_blocks(self, pool: Tensor, src: Tensor, dst: Tensor) -> None:
        """See `reference.copy_blocks`."""
        _extension().copy_blocks(pool, src, dst)

    def decode(
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
        """Attention of the first ``num_decodes`` sequences; parameters as in `reference.attend`.

        Notes
        -----
        A context is split at fixed places and merged in order: bitwise the same result in any batch
        and with any thread count. Sums are fp32; products of bf16 with bf16 are exact, and then
        softmax weights are rounded to bf16, as torch's own attention does.
        """
        self._attend(
            _extension().decode, query, pool, layout, layer, batch, scale, out, lse, options
        )

    def prepare(
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
    ) -> Any:
        """Check what all layers of a step share, and return what attends in each.

        See `dispatch.PrepareKernel`. In a step of decodes alone, none of which reads the block in
        which another ends, the core that will read a token's K and V puts them into the pool: the
        same numbers, but the memory does not move from core to core.
        """
        return _extension().StepAttention(
            query,
            key,
            value,
            slots,
            pool,
            [_contexts(batch, window) for window in windows],
            out,
            self._native(layout),
            self._isa,
            self._workspace,
        )

    def prefill(
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
        """Attention of the sequences after the decodes; parameters as in `reference.attend`.

        Notes
        -----
        Each query goes through its context in steps at fixed places: bitwise the same result
        however a prompt is cut, in any batch and with any thread count.
        """
        self._attend(
            _extension().prefill, query, pool, layout, layer, batch, scale, out, lse, options
        )

    def _attend(
        self,
        kernel: Any,
        query: Tensor,
        pool: Tensor,
        layout: BlockLayout,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        options: AttentionOptions,
    ) -> None:
        kernel(
            _rows(query, query.dtype),
            pool,
            _contexts(batch, options.window or 0),
            out,
            lse,
            options.sinks,
            self._native(layout),
            layer,
            scale,
            options.softcap or 0.0,
            self._isa,
            self._workspace,
        )

    def _native(self, layout: BlockLayout) -> Any:
        return self._layout if layout is self.layout else _native(layout)


def _extension() -> ModuleType:
    if _C is None:
        raise BackendError(f"kvist._C is not built: {_REASON}; select() would have said so")
    return _C


def _native(layout: BlockLayout) -> Any:
    return _extension().Layout(
        layout.num_layers,
        layout.num_kv_heads,
        layout.key_dim,
        layout.value_dim,
        layout.block_size,
        layout.packing_id,
    )


def _contexts(batch: AttentionBatch, window: int) -> Any:
    """The batch as the kernels read it: checked and cut at its first layer, then kept with it."""
    name = ("cpp", window)
    contexts = batch.derived.get(name)
    if contexts is None:
        kind = _extension().Contexts
        rest = (batch.seq_lens, batch.query_start, batch.num_decodes, batch.block_size, window)
        if batch.runs is None:
            contexts = kind.of_tables(batch.block_tables, *rest)
        else:
            contexts = kind.of_runs(batch.runs, batch.run_start, *rest)
        batch.derived[name] = contexts
    return contexts


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype, each row of D elements side by side; strides before that are free."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
