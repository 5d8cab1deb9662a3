"""What the kernels mean, in plain torch.

Owns the definition: fp32 arithmetic, gather through the block table, explicit softmax. Every other
backend is tested against it. Runs on any device, for any head size and any ratio of query heads to
KV heads. Knows nothing of speed, except that its temporaries stay bounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.kernels.batch import AttentionBatch
from kvist.kernels.options import PLAIN, AttentionOptions
from kvist.kernels.packing import layer_blocks
from kvist.spec import BlockLayout

_TILE_BYTES = 16 << 20
"""Scores of one tile of queries; softmax holds about three such at a time."""


def write_kv(
    pool: Tensor, layout: BlockLayout, layer: int, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Write the K and V of T tokens into their slots; no other byte of the pool changes.

    Parameters
    ----------
    pool, layout, layer
        As in `packing.layer_blocks`.
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
    blocks = layer_blocks(pool, layout, layer)
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
    blocks.write(slots // layout.block_size, slots % layout.block_size, key, value)


def rotate_write_kv(
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
    """Turn queries, in place, and keys to their positions, and write K and V as `write_kv` does.

    ::

        row   | a [D'/2] | b [D'/2] | rest |   ->   a cos - b sin | b cos + a sin | rest

    Parameters
    ----------
    pool, layout, layer, key, value, slots
        As in `write_kv`; `key` itself is not changed.
    query : Tensor
        [T, Q, Dk], float; overwritten.
    cos, sin : Tensor
        [T, D'] with D' even, of the first D' elements of a head, as transformers computes them: an
        angle an element, the second half a copy of the first.

    Raises
    ------
    ValueError, IndexError
        As `write_kv`, and if `query`, `cos` or `sin` do not fit.

    Notes
    -----
    In fp32, rounded once; transformers rounds each product to the model's dtype.
    """
    rotary = cos.shape[-1]
    tokens = slots.shape[0]
    fits = tuple(cos.shape) == tuple(sin.shape) == (tokens, rotary) and rotary % 2 == 0
    if not fits or not 2 <= rotary <= layout.key_dim:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be [{tokens}, D'] with "
            f"an even D' of at most {layout.key_dim}"
        )
    if query.shape[0] != tokens or query.shape[-1] != layout.key_dim:
        raise ValueError(
            f"query {tuple(query.shape)} must be [{tokens}, Q, {layout.key_dim}] for these slots"
        )
    write_kv(pool, layout, layer, _rotated(key, cos, sin), value, slots)
    query.copy_(_rotated(query, cos, sin))


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    turned, rest = rows[..., :rotary].float(), rows[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat([-second, first], -1)
    result = turned * cos.float()[:, None] + across * sin.float()[:, None]
    return torch.cat([result.to(rows.dtype), rest], -1)


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
    options: AttentionOptions = PLAIN,
) -> None:
    """Attention of some of the batch's sequences, written into `out`.

    Parameters
    ----------
    query : Tensor
        [T, Q, Dk], any float dtype; Q is a multiple of H.
    pool, layout, layer
        As in `packing.layer_blocks`.
    batch : AttentionBatch
        All sequences of the step.
    scale : float
        Factor on ``query . key`` before the softmax.
    out : Tensor
        [T, Q, Dv]; only the rows of `sequences` are written.
    lse : Tensor or None
        fp32 [T, Q], natural log of the sum of ``exp(score)``, a sink included; written if given.
    sequences : range
        Which sequences of the batch.
    options : AttentionOptions
        What the layer asks beside softmax over scaled scores.

    Notes
    -----
    Only slots that belong to a context are read: whatever an unwritten slot holds, NaN included,
    cannot reach a result. A KV head and a tile of queries at a time; apart from one head's K and V
    of one context in fp32, temporaries stay under 64 MiB. A query that sees nothing (a context of
    holes, without a sink) gets zeros, and minus infinity.
    """
    blocks = layer_blocks(pool, layout, layer)
    group = query.shape[1] // layout.num_kv_heads
    for r in sequences:
        queries, context = batch.query_lens[r], batch.context_lens[r]
        first = context - queries
        table, index, positions = batch.places(r)
        tile = max(1, _TILE_BYTES // (4 * group * max(1, len(positions))))
        for head in range(layout.num_kv_heads):
            key, value = (part.flatten(0, 1)[index].float() for part in blocks.read(table, head))
            mine = slice(head * group, (head + 1) * group)
            for begin in range(0, queries, tile):
                end = min(queries, begin + tile)
                rows = slice(batch.query_start_list[r] + begin, batch.query_start_list[r] + end)
                scores = query[rows, mine].float().transpose(0, 1) @ key.T * scale  # [G, t, C]
                if options.softcap is not None:
                    scores = options.softcap * (scores / options.softcap).tanh()
                own = (first + torch.arange(begin, end, device=pool.device))[:, None]
                unseen = positions > own
                if options.window is not None:
                    unseen |= positions <= own - options.window
                scores = scores.masked_fill(unseen, float("-inf"))
                total = scores.logsumexp(-1)
                if options.sinks is not None:
                    total = torch.logaddexp(total, options.sinks[mine].float()[:, None])
                norm = total.masked_fill(total == float("-inf"), 0.0)
                weights = (scores - norm[..., None]).exp_()
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
    options: AttentionOptions = PLAIN,
) -> None:
    """`attend` for the sequences with one query token; parameters as there."""
    sequences = range(batch.num_decodes)
    attend(query, pool, layout, layer, batch, scale, out, lse, sequences, options)


def prefill(
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
    """`attend` for the sequences after the decodes; parameters as there."""
    rest = range(batch.num_decodes, len(batch.query_lens))
    attend(query, pool, layout, layer, batch, scale, out, lse, rest, options)
