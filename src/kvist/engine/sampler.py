"""Logits to token ids.

Owns the order of it: raw logits are looked at for faults and log probabilities, then adjusted
(`engine.logits`), then the greedy rows take the most likely token and the others draw
(`engine.draw`). Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvist.engine.draw import draw
from kvist.engine.logits import adjust, is_special
from kvist.engine.logprobs import describe
from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import SampleRow

NOT_FINITE = "the model gave logits that are not finite for this request"
NOTHING_LEFT = "no token is left that the request's grammar, allowed ids and bans let through"


_BLOCK = 256
"""Entries of a row whose highest is looked for first."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What came of every row.

    Attributes
    ----------
    token_ids : list of int
        One a row; meaningless where not `valid`.
    valid : list of bool
        False where the logits were not finite, or the request lets no token through.
    faults : mapping of row to reason
        For the rows that are not valid.
    logprobs : mapping of row to TokenLogprobs
        Where they were asked for.
    """

    token_ids: list[int]
    valid: list[bool]
    faults: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> SampledTokens:
    """Choose one token a row.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V]. Rows with masks, biases or penalties are changed in place.
    rows : sequence of SampleRow
        n of them.

    Notes
    -----
    Greedy rows cost one pass over the vocabulary and take the lowest id among equals.
    """
    wanting = [i for i, r in enumerate(rows) if r.params.num_logprobs is not None]
    special = [(i, r) for i, r in enumerate(rows) if is_special(r)]
    faults: dict[int, str] = {}
    raw = logits
    if special:
        highest = logits.amax(dim=-1)
        faults = {i: NOT_FINITE for i, ok in enumerate(torch.isfinite(highest).tolist()) if not ok}
        if wanting:
            raw = logits[torch.tensor(wanting, device=logits.device)]
        adjust(logits, special)
    best, choice = most_likely(logits)
    valid = torch.isfinite(best).tolist()
    for i, ok in enumerate(valid):
        if not ok:
            faults.setdefault(i, NOTHING_LEFT if is_special(rows[i]) else NOT_FINITE)
        elif i in faults:
            valid[i] = False
    token_ids = choice.tolist()
    drawn = [i for i, r in enumerate(rows) if valid[i] and not r.params.is_greedy]
    if drawn:
        part = logits
        if len(drawn) < len(rows):
            part = logits[torch.tensor(drawn, device=logits.device)]
        for i, token_id in zip(drawn, draw(part, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    logprobs: dict[int, TokenLogprobs] = {}
    if wanting:
        if raw is logits:
            raw = logits[torch.tensor(wanting, device=logits.device)]
        counts = [rows[i].params.num_logprobs or 0 for i in wanting]
        found = describe(raw, [token_ids[i] for i in wanting], counts)
        logprobs = dict(zip(wanting, found, strict=True))
    return SampledTokens(token_ids, valid, faults, logprobs)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the highest logit of each row, and the lowest id that has it.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V].

    Returns
    -------
    best : Tensor
        float32 [n]; NaN where a row has one.
    choice : Tensor
        int64 [n].

    Notes
    -----
    On a CPU torch looks for a maximum with its index entry by entry, without one many at a time: so
    the highest of each block of a row comes first, then the entry within one block.
    """
    size = logits.shape[-1]
    whole = size // _BLOCK * _BLOCK
    if logits.device.type != "cpu" or whole == 0:
        best, choice = logits.max(dim=-1)
        return best, choice
    blocks = logits[:, :whole].view(-1, whole // _BLOCK, _BLOCK)
    best, block = blocks.amax(dim=-1).max(dim=-1)
    inside = blocks[torch.arange(logits.shape[0]), block]
    choice = block * _BLOCK + inside.argmax(dim=-1)
    if whole < size:
        last, at = logits[:, whole:].max(dim=-1)
        choice = torch.where(last > best, at + whole, choice)
        best = torch.maximum(best, last)
    return best, choice
