"""How likely the model thought a token, from its raw logits.

Owns the numbers of `TokenLogprobs`. "Raw" is vLLM's default: before temperature, masks, biases and
penalties. Knows nothing of choosing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.engine.sequence import TokenLogprobs

_MARGIN = 16
"""More candidates than asked for, so that equals at the edge come in order of id unless there are
very many of them."""

_ROWS = 32
"""Rows at a time, so that temporaries stay a few MiB for any number of rows."""


def describe(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return what the model thought of one token a row.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V].
    token_ids : sequence of int
        n of them.
    num_top : sequence of int
        Most likely tokens to list, for each row.

    Notes
    -----
    Three passes over the vocabulary and, where a list is asked for, a partial selection.
    """
    found: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), _ROWS):
        some = slice(begin, begin + _ROWS)
        found += _describe(logits[some], list(token_ids[some]), list(num_top[some]))
    return found


def _describe(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    logprobs = (chosen - total)[:, 0].tolist()
    tops = _tops(logits, total, min(max(num_top), logits.shape[-1]))
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top[:count]))
        for token_id, logprob, rank, top, count in zip(
            token_ids, logprobs, ranks, tops, num_top, strict=True
        )
    ]


def _tops(logits: Tensor, total: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Pairs of (token id, log probability), the most likely first."""
    if count == 0:
        return [[] for _ in range(logits.shape[0])]
    values, ids = logits.topk(min(count + _MARGIN, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    pairs = zip(ids.gather(-1, order).tolist(), (values - total).tolist(), strict=True)
    return [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
