"""The C++ kernels, called with torch tensors.

Owns the seam to ``kvist._C``: whether it is there, what it can run, and how tensors are handed
over. The arithmetic, and the checks of shapes and block ids, stand in ``csrc``.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# First torch, so that our extension binds to the OpenMP runtime that torch has loaded.
import torch
from torch import Tensor

from kvist.errors import BackendError
from kvist.kernels.batch import PIECE_TOKENS, AttentionBatch
from kvist.spec import BlockLayout


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


def describe() -> str:
    """What the extension runs on here, for the start-up log."""
    info = _extension().build_info()
    isa = [name for name in ("avx512f", "avx2") if name in info["processor_isa"]]
    threads = f"{info['threads']} threads" if info["openmp"] else "1 thread, built without OpenMP"
    return f"{isa[0] if isa else 'baseline'}, {threads}, {info['compiler']}"


def write_kv(
    pool: Tensor, layout: BlockLayout, layer: int, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """See `reference.write_kv`. Rows are copied where K and V already have the pool's dtype."""
    _extension().write_kv(
        pool,
        _rows(key, pool.dtype),
        _rows(value, pool.dtype),
        slots,
        layer,
        layout.num_layers,
        layout.block_size,
    )


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `reference.copy_blocks`."""
    _extension().copy_blocks(pool, src, dst)


def decode(
    query: Tensor,
    pool: Tensor,
    layout: BlockLayout,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of the first ``num_decodes`` sequences; parameters as in `reference.attend`.

    Notes
    -----
    fp32 arithmetic on K and V as they are stored. A context is split after every `PIECE_TOKENS`
    tokens and merged in order: bitwise the same result in any batch and with any thread count.
    """
    count = batch.num_decodes
    asked = query[:count].float().contiguous()
    # The kernel writes fp32; where that is what the caller holds, it writes there at once.
    direct = out.dtype == torch.float32
    found = out[:count] if direct else asked.new_empty((count, *out.shape[1:]))
    _extension().decode(
        asked,
        pool,
        batch.block_tables[:count],
        batch.seq_lens[:count],
        found,
        None if lse is None else lse[:count],
        layer,
        layout.num_layers,
        layout.num_kv_heads,
        layout.key_dim,
        layout.block_size,
        PIECE_TOKENS,
        scale,
    )
    if not direct:
        out[:count] = found


def _extension() -> ModuleType:
    if _C is None:
        raise BackendError(f"kvist._C is not built: {_REASON}; select() would have said so")
    return _C


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the pool's dtype, each row of D elements side by side; strides before that are free."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
