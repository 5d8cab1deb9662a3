"""What the kernels mean, in plain torch.

Owns the definition: fp32 arithmetic, gather through the block table, explicit softmax. Every other
backend is tested against it. Runs on any device, for any head size and any ratio of query heads to
KV heads. Knows nothing of speed, except that its temporaries stay bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.batch import AttentionBatch
from kvist.spec import BlockLayout

_TILE_BYTES = 16 << 20
"""Scores of one tile of queries; softmax holds about three such at a time."""


def layer_views(pool: Tensor, layout: BlockLayout, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of one layer, as views of the pool.

    ::

        block | layer 0: head 0 [K: S x Dk | V: S x Dv], head 1 [...], ... | layer 1: ... |

    Parameters
    ----------
    pool : Tensor
        [N, block elements], bf16, fp16 or fp32, contiguous.
    layout : BlockLayout
        Where K and V lie in a block.
    layer : int
        Which layer of the group, ``0 <= layer < layout.num_layers``.

    Returns
    -------
    key, value : Tensor
        [N, H, S, Dk] and [N, H, S, Dv]; writing to them writes to the pool.

    Raises
    ------
    ValueError
        If the pool is not contiguous or its rows are not blocks of this layout.
    IndexError
        If there is no such layer.
    """
    heads, slots = layout.num_kv_heads, layout.block_size
    key_dim, value_dim = layout.key_dim, layout.value_dim
    head_elements = slots * (key_dim + value_dim)
    block_elements = layout.num_layers * heads * head_elements
    if pool.dim() != 2 or pool.shape[1] != block_elements or not pool.is_contiguous():
        raise ValueError(
            f"the pool has shape {tuple(pool.shape)} and strides {pool.stride()}; layout "
            f"{layout.packing_id} needs a contiguous [N, {block_elements}]"
        )
    if not 0 <= layer < layout.num_layers:
        raise IndexError(f"layer {layer} of a layout with {layout.num_layers} layers")
    start = pool.storage_offset() + layer * heads * head_elements
    key = pool.as_strided(
        (pool.shape[0], heads, slots, key_dim), (block_elements, head_elements, key_dim, 1), start
    )
    value = pool.as_strided(
        (pool.shape[0], heads, slots, value_dim),
        (block_elements, head_elements, value_dim, 1),
        start + slots * key_dim,
    )
    return key, value


def write_kv(
    pool: Tensor, layout: BlockLayout, layer: int, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Write the K and V of T tokens into their slots; no other byte of the pool changes.

    Parameters
    ----------
    pool, layout, layer
        As in `layer_views`.
    key, value : Tensor
        [T, H, Dk] and [T, H, Dv], any strides; cast to the pool's dtype.
    slots : Tensor
        int64 [T], ``block * S + slot``, all different.

    Raises
    ------
    ValueError
        If shapes disagree.
    IndexError
        If a slot lies outside the pool (checked on CPU; on other devices this would be a wait).
    """
    key_pool, value_pool = layer_views(pool, layout, layer)
    tokens = slots.shape[0]
    wanted_key = (tokens, layout.num_kv_heads, layout.key_dim)
    wanted_value = (tokens, layout.num_kv_heads, layout.value_dim)
    if tuple(key.shape) != wanted_key or tuple(value.shape) != wanted_value:
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not match {tokens} slots: "
            f"the layout needs {wanted_key} and {wanted_value}"
        )
    if tokens == 0:
        return
    if slots.device.type == "cpu":
        low, high = (int(bound) for bound in slots.aminmax())
        total = pool.shape[0] * layout.block_size
        if low < 0 or high >= total:
            raise IndexError(f"slots {low}..{high} do not lie in a pool of {total} slots")
    block = slots // layout.block_size
    slot = slots - block * layout.block_size
    key_pool.transpose(1, 2)[block, slot] = key.to(pool.dtype)
    value_pool.transpose(1, 2)[block, slot] = value.to(pool.dtype)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks, all layers: ``pool[dst[i]] = pool[src[i]]``.

    Parameters
    ----------
    pool : Tensor
        [N, block elements].
    src, dst : Tensor
        int64 [n]. No block may be written twice, none both read and written: the order of the
        copies is then of no account. On a GPU this check waits for the device; copies are rare.

    Raises
    ------
    ValueError
        If lengths differ, or a block is written twice or both read and written.
    IndexError
        If a block id lies outside the pool.
    """
    sources, targets = src.tolist(), dst.tolist()
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source blocks for {len(targets)} destination blocks")
    if len(set(targets)) != len(targets):
        raise ValueError(f"a destination block is named twice in {targets}")
    if both := set(sources) & set(targets):
        raise ValueError(f"blocks {sorted(both)} are both read and written; copy them in two calls")
    for block in (*sources, *targets):
        if not 0 <= block < pool.shape[0]:
            raise IndexError(f"block {block} does not lie in a pool of {pool.shape[0]} blocks")
    pool[dst] = pool[src]


def attend(
    query: Tensor,
    pool: Tensor,
    layout: BlockLayout,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    sequences: range,
) -> None:
    """Attention of some of the batch's sequences, written into `out`.

    Parameters
    ----------
    query : Tensor
        [T, Q, Dk], any float dtype; Q is a multiple of H.
    pool, layout, layer
        As in `layer_views`.
    batch : AttentionBatch
        All sequences of the step.
    scale : float
        Factor on ``query . key`` before the softmax.
    out : Tensor
        [T, Q, Dv]; only the rows of `sequences` are written.
    lse : Tensor or None
        fp32 [T, Q], natural log of the sum of ``exp(scaled score)``; written if given.
    sequences : range
        Which sequences of the batch.

    Notes
    -----
    Only slots that belong to a context are read: whatever an unwritten slot holds, NaN included,
    cannot reach a result. A KV head and a tile of queries at a time; apart from one head's K and V
    of one context in fp32, temporaries stay under 64 MiB.
    """
    key_pool, value_pool = layer_views(pool, layout, layer)
    group = query.shape[1] // layout.num_kv_heads
    for r in sequences:
        queries, context = batch.query_lens[r], batch.context_lens[r]
        first = context - queries
        table = batch.block_tables[r, : -(-context // layout.block_size)].long()
        positions = torch.arange(context, device=pool.device)
        tile = max(1, _TILE_BYTES // (4 * group * context))
        for head in range(layout.num_kv_heads):
            key = key_pool[table, head].flatten(0, 1)[:context].float()
            value = value_pool[table, head].flatten(0, 1)[:context].float()
            mine = slice(head * group, (head + 1) * group)
            for begin in range(0, queries, tile):
                end = min(queries, begin + tile)
                rows = slice(batch.query_start_list[r] + begin, batch.query_start_list[r] + end)
                scores = query[rows, mine].float().transpose(0, 1) @ key.T * scale  # [G, t, C]
                own = first + torch.arange(begin, end, device=pool.device)
                scores = scores.masked_fill(positions > own[:, None], float("-inf"))
                total = scores.logsumexp(-1)
                weights = (scores - total[..., None]).exp_()
                out[rows, mine] = (weights @ value).transpose(0, 1).to(out.dtype)
                if lse is not None:
                    lse[rows, mine] = total.T


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
    """`attend` for the sequences with one query token; parameters as there."""
    attend(query, pool, layout, layer, batch, scale, out, lse, range(batch.num_decodes))


def prefill(
    query: Tensor,
    pool: Tensor,
    layout: BlockLayout,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """`attend` for the sequences after the decodes; parameters as there."""
    rest = range(batch.num_decodes, len(batch.query_lens))
    attend(query, pool, layout, layer, batch, scale, out, lse, rest)
