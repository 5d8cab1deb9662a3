"""Logits to token ids.

Every draw is one uniform number, a hash of (seed, position), put through the inverse of the
cumulative distribution. So the same seed gives the same token whatever else is in the batch, after
a preemption, and on every machine whose logits agree; there is no generator to save or restore.

Order as in vLLM: temperature, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.engine.step import SampleRow

_MASK = (1 << 64) - 1
NUCLEUS_CANDIDATES = 256
"""Most likely tokens looked at for top-p without top-k; a row whose nucleus is larger is sorted
whole."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Attributes
    ----------
    token_ids : list of int
        One a row; meaningless where not `valid`.
    valid : list of bool
        False where the logits were not finite.
    """

    token_ids: list[int]
    valid: list[bool]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its arguments alone.

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood, 2014); ours feeds it a counter
    made of seed and position instead of a running state.
    """
    x = (seed & _MASK) ^ ((seed >> 64) & _MASK)
    for word in (0, position):
        x = (x + (word + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> SampledTokens:
    """Choose one token a row.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V].
    rows : sequence of SampleRow
        n of them.

    Notes
    -----
    Greedy rows cost one pass over the vocabulary and take the lowest id among equals. Rows with
    temperature alone cost a cumulative sum; rows with top-k or top-p a partial selection. Nothing
    sorts the vocabulary unless a nucleus holds more than `NUCLEUS_CANDIDATES` tokens.
    """
    best, choice = logits.max(dim=-1)
    valid = torch.isfinite(best).tolist()
    token_ids = choice.tolist()
    plain = [i for i, r in enumerate(rows) if valid[i] and not r.params.is_greedy]
    full = [i for i in plain if rows[i].params.top_k <= 0 and rows[i].params.top_p >= 1.0]
    cut = [i for i in plain if i not in set(full)]
    for group, draw in ((full, _draw_full), (cut, _draw_cut)):
        if group:
            chosen = [rows[i] for i in group]
            for i, token_id in zip(group, draw(_scale(logits, group, chosen), chosen), strict=True):
                token_ids[i] = token_id
    return SampledTokens(token_ids, valid)


def _scale(logits: Tensor, group: list[int], rows: list[SampleRow]) -> Tensor:
    temperature = torch.tensor([r.params.temperature for r in rows], device=logits.device)
    return logits[torch.tensor(group, device=logits.device)] / temperature[:, None]


def _targets(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    draws = [uniform(r.seed, r.position) for r in rows]
    return torch.tensor(draws, dtype=torch.float64, device=device)[:, None]


def _pick(weights: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Index of the first entry at which the cumulative weight passes the draw. int64 [n]."""
    cumulative = weights.double().cumsum(dim=-1)
    target = _targets(rows, weights.device) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target at the very end: the last entry that has weight is meant.
    last = (weights > 0).cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(index, last)


def _draw_full(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    drawn: list[int] = _pick(torch.softmax(logits, dim=-1), rows).tolist()
    return drawn


def _draw_cut(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    vocab_size = logits.shape[-1]
    top_k = [r.params.top_k if r.params.top_k > 0 else vocab_size for r in rows]
    wanted = max((k for k in top_k if k < vocab_size), default=0)
    if any(k == vocab_size for k in top_k):
        wanted = max(wanted, NUCLEUS_CANDIDATES)
    drawn, done = _draw_from_top(logits, rows, top_k, min(wanted, vocab_size))
    rest = [i for i, ok in enumerate(done) if not ok]
    if rest:
        exact, _ = _draw_from_top(
            logits[torch.tensor(rest, device=logits.device)],
            [rows[i] for i in rest],
            [top_k[i] for i in rest],
            vocab_size,
        )
        for i, token_id in zip(rest, exact, strict=True):
            drawn[i] = token_id
    return drawn


def _draw_from_top(
    logits: Tensor, rows: list[SampleRow], top_k: list[int], candidates: int
) -> tuple[list[int], list[bool]]:
    """Draw from the `candidates` most likely tokens; tell which rows needed no more of them."""
    values, ids = logits.topk(candidates, dim=-1)
    # Equal logits in order of id, so that a draw does not depend on how the selection broke ties.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    limits = torch.tensor(top_k, device=logits.device)[:, None]
    values = values.masked_fill(
        torch.arange(candidates, device=logits.device) >= limits, -torch.inf
    )
    # A row with top-k is normalised over what is kept; without, over the whole vocabulary.
    whole = (limits >= logits.shape[-1])[:, 0]
    total = torch.where(whole, logits.logsumexp(dim=-1), values.logsumexp(dim=-1))
    probs = (values - total[:, None]).exp()
    before = probs.cumsum(dim=-1) - probs
    top_p = torch.tensor([r.params.top_p for r in rows], device=logits.device)[:, None]
    done = ~whole | (probs.sum(dim=-1) >= top_p[:, 0])
    # The most likely token always stays.
    keep = (before < top_p) | (torch.arange(candidates, device=logits.device) == 0)
    index = _pick(probs.where(keep, 0.0), rows)
    drawn: list[int] = ids.gather(-1, index[:, None])[:, 0].tolist()
    return drawn, (done | torch.tensor(candidates == logits.shape[-1])).tolist()
