"""Logits to tokens by chance: temperature, min-p, top-k, top-p, and one number from a hash.

Owns the arithmetic of drawing. Knows nothing of greedy rows, masks and log probabilities.

Every draw is one uniform number, a hash of (seed, index, position), put through the inverse of the
cumulative distribution. So the same seed gives the same token whatever else is in the batch, after
a preemption, and on every machine whose logits agree; there is no generator to save or restore.

Order as in vLLM: temperature, min-p, top-k, top-p. The distribution of a row is computed from that
row alone: how many candidates are looked at follows from its own parameters, equal logits are
ordered by id, and sums are in float64, where the order of addition does not decide a draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.engine.step import SampleRow

_MASK = (1 << 64) - 1

CANDIDATES = (64, 256, 1024)
"""Most likely tokens looked at: the first of these above top-k."""

NUCLEUS_CANDIDATES = 256
"""The same for top-p without top-k."""

WIDER = 8
"""A row whose kept tokens do not show among its candidates for sure looks at so many times more, in
the end at all."""

_SHORT = 32
"""Entries of a block whose maximum stands for them where the highest are looked for."""

_BLOCK = 256
"""Entries of a long cumulative sum that are added up first."""


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its arguments alone.

    Rounds of the SplitMix64 finalizer (Steele, Lea and Flood, 2014); ours feeds it a counter made
    of seed, index and position instead of a running state.
    """
    x = (seed & _MASK) ^ ((seed >> 64) & _MASK)
    for word in (0, index, position):
        x = (x + (word + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Choose one token a row.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V]; every row has a finite maximum. Not changed.
    rows : sequence of SampleRow
        n of them, none greedy.

    Notes
    -----
    Temperature (and min-p) alone costs a softmax and a cumulative sum; top-k and top-p a partial
    selection. Nothing sorts the vocabulary unless what is kept does not fit the candidates.
    """
    vocab_size = logits.shape[-1]
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_num_candidates(row, vocab_size), []).append(i)
    token_ids = [0] * len(rows)
    for size, group in groups.items():
        chosen = [rows[i] for i in group]
        part = logits if len(group) == len(rows) else logits[_index(group, logits)]
        if size == 0:
            drawn, done = _draw_full(part, chosen), [True] * len(group)
        else:
            drawn, done = _draw_from_top(part, chosen, size)
        while rest := [k for k, ok in enumerate(done) if not ok]:
            size = min(vocab_size, size * WIDER)
            again, settled = _draw_from_top(
                part[_index(rest, part)], [chosen[k] for k in rest], size
            )
            for k, token_id, ok in zip(rest, again, settled, strict=True):
                drawn[k], done[k] = token_id, ok
        for i, token_id in zip(group, drawn, strict=True):
            token_ids[i] = token_id
    return token_ids


def _num_candidates(row: SampleRow, vocab_size: int) -> int:
    """How many of the most likely tokens to look at; 0 for a row that cuts none by rank."""
    top_k = row.params.top_k
    if 0 < top_k < vocab_size:
        return min(vocab_size, next((c for c in CANDIDATES if c > top_k), vocab_size))
    return min(vocab_size, NUCLEUS_CANDIDATES) if row.params.top_p < 1.0 else 0


def _draw_full(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    scaled = logits / _column([r.params.temperature for r in rows], logits)
    if any(r.params.min_p > 0 for r in rows):
        scaled.masked_fill_(scaled < _floor(scaled, rows), -torch.inf)
    drawn: list[int] = _pick(torch.softmax(scaled, dim=-1), rows).tolist()
    return drawn


def _draw_from_top(
    logits: Tensor, rows: list[SampleRow], size: int
) -> tuple[list[int], list[bool]]:
    """Draw from the `size` most likely tokens; tell which rows needed no more of them."""
    vocab_size = logits.shape[-1]
    raw, ids = _top(logits, size)
    temperature = _column([r.params.temperature for r in rows], logits)
    top_k = [r.params.top_k if r.params.top_k > 0 else vocab_size for r in rows]
    limits = torch.tensor(top_k, device=logits.device)[:, None]
    rank = torch.arange(size, device=logits.device)
    # Some equals of the last candidate may be missing: it and they are not known in order.
    known = torch.ones_like(raw, dtype=torch.bool) if size == vocab_size else raw > raw[:, -1:]
    scaled = raw / temperature
    floor = _floor(scaled, rows)
    kept = (rank < limits) & known & (scaled >= floor)
    top = scaled[:, :1]
    weights = (scaled - top).exp().double().where(kept, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    # A row without top-k is normalised over the vocabulary.
    whole = [i for i, k in enumerate(top_k) if k >= vocab_size]
    if whole and size < vocab_size:
        at = _index(whole, logits)
        everything = logits[at] / temperature[at]
        spread = (everything - top[at]).exp()
        low = everything < _floor(everything, [rows[i] for i in whole])
        total[at] = spread.masked_fill_(low, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    probs = weights / total
    before = probs.cumsum(dim=-1) - probs
    top_p = _column([r.params.top_p for r in rows], logits).double()
    reached = probs.sum(dim=-1, keepdim=True) >= top_p
    by_rank = (limits < vocab_size) & (known.sum(dim=-1, keepdim=True) >= limits)
    cut = scaled[:, -1:] < floor
    done = (by_rank | reached | cut)[:, 0] | (size == vocab_size)
    # The most likely token always stays.
    keep = kept & ((before < top_p) | (rank == 0))
    index = _pick(probs.where(keep, 0.0), rows)
    drawn: list[int] = ids.gather(-1, index[:, None])[:, 0].tolist()
    return drawn, done.tolist()


def _floor(scaled: Tensor, rows: list[SampleRow]) -> Tensor:
    """Lowest scaled logit that min-p keeps. float32 [n, 1]."""
    return scaled.amax(dim=-1, keepdim=True) + _column(
        [math.log(r.params.min_p) if r.params.min_p > 0 else -math.inf for r in rows], scaled
    )


def _top(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return values and ids of the most likely tokens, equal ones in order of id.

    So a draw does not depend on how the selection broke ties.
    """
    if size == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = _highest(logits, size)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _highest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the highest logits and their ids, in no order; which of equal last ones is open.

    A logit above the last of them lies in one of the `size` blocks with the highest maxima: if
    that many other blocks had a maximum as high, it would not be among them. So only the entries of
    those blocks are compared, where they are few beside the vocabulary.
    """
    count, vocab_size = logits.shape
    num_blocks = vocab_size // _SHORT
    if size * 4 > num_blocks:
        values, ids = logits.topk(size, dim=-1, sorted=False)
        return values, ids
    whole = num_blocks * _SHORT
    blocks = logits[:, :whole].view(count, num_blocks, _SHORT)
    chosen = blocks.amax(dim=-1).topk(size, dim=-1, sorted=False).indices
    entries = torch.arange(_SHORT, device=logits.device)
    ids = (chosen[:, :, None] * _SHORT + entries).view(count, -1)
    rest = torch.arange(whole, vocab_size, device=logits.device).expand(count, -1)
    ids = torch.cat((ids, rest), dim=-1)
    values, places = logits.gather(-1, ids).topk(size, dim=-1, sorted=False)
    return values, ids.gather(-1, places)


def _pick(weights: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Index of the first entry at which the cumulative weight passes the draw. int64 [n]."""
    draws = [uniform(r.seed, r.index, r.position) for r in rows]
    target = torch.tensor(draws, dtype=torch.float64, device=weights.device)[:, None]
    count, width = weights.shape
    if width <= 16 * _BLOCK:
        cumulative = weights.double().cumsum(dim=-1)
        return _first_above(cumulative, target * cumulative[:, -1:])[:, 0]
    # First the block, then the entry in it: sums are many times quicker than a cumulative sum.
    blocks = torch.nn.functional.pad(weights, (0, -width % _BLOCK)).view(count, -1, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    cumulative = sums.cumsum(dim=-1)
    target = target * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = cumulative.gather(-1, block) - sums.gather(-1, block)
    inside = blocks[torch.arange(count, device=weights.device), block[:, 0]].double()
    entry = _first_above(inside.cumsum(dim=-1), (target - before).clamp_(min=0.0))
    return (block * _BLOCK + entry)[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index at which a row passes its target; int64 [n, 1].

    Rounding may put the target at the very end: then the last entry that adds anything is meant. In
    a row of zeros, which is not drawn from for good, the last index.
    """
    target = torch.minimum(target, cumulative[:, -1:].nextafter(target.new_zeros(())))
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[-1] - 1)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _index(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)
