"""Paged attention in torch operations: what serves where no compiled kernel does.

Owns a decode that handles all sequences at once, in pieces of a fixed token count merged by
log-sum-exp, and a prefill that gathers one context and calls torch's fused attention. Runs on any
device. Writing and copying are the reference's own: they are already one indexed store.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvist.kernels import reference
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.options import PLAIN, AttentionOptions
from kvist.kernels.packing import LayerBlocks, layer_blocks
from kvist.spec import BlockLayout

_CHUNK_BYTES = 32 << 20
"""Most fp32 K and V that a decode gathers at a time."""

_QUERY_TILE = 256
"""Most queries handed to torch's attention at a time where a mask is needed."""

_SCORE_BYTES = 32 << 20
"""Most fp32 scores in a tile where torch has no fused kernel and writes them all out."""


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
    """Attention of the first ``num_decodes`` sequences; parameters as in `reference.attend`.

    Notes
    -----
    Each piece of a context is computed in fp32 by itself, and the pieces of a sequence are merged
    in their order: what else is in the batch changes a result only as far as torch's batched matrix
    product depends on the size of its batch. Splitting the context and merging by log-sum-exp is
    the idea of Flash-Decoding; ours differs in that the cut never depends on the load.
    """
    count = batch.num_decodes
    if count == 0:
        return
    if batch.runs is not None:
        reference.decode(query, pool, layout, layer, batch, scale, out, lse, options)
        return
    heads, group = layout.num_kv_heads, query.shape[1] // layout.num_kv_heads
    blocks = layer_blocks(pool, layout, layer)
    scaled = (query[:count].float() * scale).view(count, heads, group, layout.key_dim)
    pieces = batch.pieces(options.window)
    depth = 1 + (max(batch.context_lens[:count]) - 1) // (batch.piece_blocks * batch.block_size)
    parts = scaled.new_zeros(count, depth, heads, group, layout.value_dim)
    totals = scaled.new_full((count, depth, heads, group), float("-inf"))
    token_bytes = 4 * heads * (layout.key_dim + layout.value_dim)
    for piece in pieces:
        width_tokens = piece.blocks.shape[1] * layout.block_size
        slot = torch.arange(width_tokens, device=pool.device)
        step = max(1, _CHUNK_BYTES // (token_bytes * width_tokens))
        for begin in range(0, piece.sequence.shape[0], step):
            some = slice(begin, begin + step)
            sequence, rank = piece.sequence[some], piece.rank[some]
            key, value = _gather(blocks, piece.blocks[some])
            unused = slot >= piece.tokens[some, None]  # [P, W * S]
            if options.window is not None:
                unused |= slot < piece.begin[some, None]
            scores = scaled[sequence] @ key.transpose(-1, -2)
            if options.softcap is not None:
                scores = options.softcap * (scores / options.softcap).tanh_()
            scores.masked_fill_(unused[:, None, None, :], float("-inf"))
            total = scores.logsumexp(-1)
            # A weight of zero does not silence a NaN in a slot that was never written.
            value.masked_fill_(unused[:, None, :, None], 0.0)
            parts[sequence, rank] = (scores - total[..., None]).exp_() @ value
            totals[sequence, rank] = total
    top = totals.amax(1)
    weights = (totals - top[:, None]).exp_()
    # One addition after the other in the order of the pieces: a sum over the axis would round
    # according to the longest context in the batch.
    merged, norm = parts[:, 0] * weights[:, 0, ..., None], weights[:, 0]
    for later in range(1, depth):
        merged = merged + parts[:, later] * weights[:, later, ..., None]
        norm = norm + weights[:, later]
    total = top + norm.log()
    if options.sinks is not None:
        with_sink = torch.logaddexp(total, options.sinks.float().view(heads, group))
        norm, total = norm * (with_sink - total).exp(), with_sink
    out[:count] = (merged / norm[..., None]).flatten(1, 2).to(out.dtype)
    if lse is not None:
        lse[:count] = total.flatten(1, 2)


def _gather(blocks: LayerBlocks, taken: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of int64 [P, W] blocks as fp32 [P, H, W * S, D]."""
    key, value = (part.transpose(1, 2).float().flatten(2, 3) for part in blocks.read(taken))
    return key, value


def decode_gathered(
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
    """Attention of the first ``num_decodes`` sequences, by torch's own attention one at a time.

    Slower than `decode`, and of another use: it is the arithmetic of transformers. A prompt that
    runs alone gets the same bits as there, in 16 bit too, so that every difference left is a bug.
    """
    if lse is not None or batch.runs is not None or not options.is_plain:
        reference.decode(query, pool, layout, layer, batch, scale, out, lse, options)
        return
    blocks = layer_blocks(pool, layout, layer)
    for r in range(batch.num_decodes):
        key, value = _contiguous_context(blocks, batch, r, query.dtype)
        one = query[r][None, :, None]  # [1, Q, 1, Dk]
        done = scaled_dot_product_attention(one, key, value, scale=scale, enable_gqa=True)
        out[r] = done[0, :, 0]


def _contiguous_context(
    blocks: LayerBlocks, batch: AttentionBatch, r: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather K [1, H, context, Dk] and V of one sequence."""
    context = batch.context_lens[r]
    table = batch.block_tables[r, : -(-context // batch.block_size)].long()
    key, value = (
        part.transpose(0, 1).flatten(1, 2)[None, :, :context].to(dtype)
        for part in blocks.read(table)
    )
    return key, value


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
    """Attention of the sequences after the decodes; parameters as in `reference.attend`.

    Notes
    -----
    One sequence at a time. A prompt from position 0 is one causal call. With a cached prefix, tiles
    of at most 256 queries see the keys up to their last position under a mask of [256, context], so
    that the work beyond the diagonal is skipped and memory stays bounded. Where torch has no fused
    kernel (Dk and Dv differ; a mask or fp32 on a GPU) the tiles are smaller and the scores of one
    tile stay under 32 MiB. With a window a tile sees the keys from its first query's on, under a
    mask. Torch's attention does not return the log-sum-exp and knows neither caps nor sinks: with
    any of these, or a context of runs, the reference runs instead.
    """
    window = options.window
    capped = options.softcap is not None or options.sinks is not None
    if lse is not None or batch.runs is not None or capped:
        reference.prefill(query, pool, layout, layer, batch, scale, out, lse, options)
        return
    blocks = layer_blocks(pool, layout, layer)
    dtype = torch.promote_types(query.dtype, pool.dtype)
    on_cpu, same_dims = pool.device.type == "cpu", layout.key_dim == layout.value_dim
    fused_mask = same_dims and on_cpu
    fused_causal = same_dims and (on_cpu or dtype != torch.float32)
    for r in range(batch.num_decodes, len(batch.query_lens)):
        queries, context = batch.query_lens[r], batch.context_lens[r]
        start, first = batch.query_start_list[r], context - queries
        key, value = _contiguous_context(blocks, batch, r, dtype)
        mine = query[start : start + queries].transpose(0, 1)[None].to(dtype)  # [1, Q, t, Dk]
        if first == 0 and fused_causal and (window is None or queries <= window):
            done = scaled_dot_product_attention(
                mine, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            out[start : start + queries] = done[0].transpose(0, 1).to(out.dtype)
            continue
        tile = _QUERY_TILE
        if not fused_mask:
            tile = max(1, min(tile, _SCORE_BYTES // (4 * query.shape[1] * context)))
        for begin in range(0, queries, tile):
            end = min(queries, begin + tile)
            unseen = 0 if window is None else max(0, first + begin - window + 1)
            seen = slice(unseen, first + end)
            own = first + torch.arange(begin, end, device=pool.device)
            position = torch.arange(unseen, first + end, device=pool.device)
            allowed = position <= own[:, None]
            if window is not None:
                allowed &= position > own[:, None] - window
            done = scaled_dot_product_attention(
                mine[:, :, begin:end],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=allowed,
                scale=scale,
                enable_gqa=True,
            )
            out[start + begin : start + end] = done[0].transpose(0, 1).to(out.dtype)
