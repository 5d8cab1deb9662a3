"""What a request asks of its logits before a token is chosen: masks, biases, penalties.

Owns the changes in place, in vLLM's order: grammar, allowed ids, forbidden ids, bias, penalties.
Knows nothing of drawing.

Everything but a mask is sparse: gather the logits of the tokens concerned, change, put back. Counts
of a vocabulary's size are never built (vLLM keeps [n, V] of them; a request has some hundred
different tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvist.engine.step import SampleRow


def is_special(row: SampleRow) -> bool:
    """Whether `adjust` would change the logits of this row."""
    params = row.params
    return bool(
        row.forbidden
        or row.counts
        or row.bitmask is not None
        or params.logit_bias
        or params.allowed_token_ids is not None
    )


def adjust(logits: Tensor, rows: Sequence[tuple[int, SampleRow]]) -> None:
    """Change the logits of some rows in place.

    Parameters
    ----------
    logits : Tensor
        float32 [n, V].
    rows : sequence of (row of `logits`, SampleRow)
        Those that are special.

    Notes
    -----
    A mask costs one pass over its row; the rest O(tokens concerned), all rows at once.
    """
    for i, row in rows:
        if row.bitmask is not None:
            logits[i].masked_fill_(~_allowed_by(row.bitmask, logits), -torch.inf)
        if row.params.allowed_token_ids is not None:
            ids = torch.tensor(row.params.allowed_token_ids, device=logits.device)
            kept = logits[i, ids]
            logits[i].fill_(-torch.inf)
            logits[i, ids] = kept
    _forbid(logits, rows)
    _bias(logits, rows)
    _penalize(logits, rows)


def _allowed_by(bitmask: bytes, logits: Tensor) -> Tensor:
    """One bit a token to bool [V]; tokens past the mask's end are not allowed."""
    vocab_size = logits.shape[-1]
    bits = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), bitorder="little")[:vocab_size]
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(bits)] = bits
    return torch.from_numpy(allowed).to(logits.device)


def _forbid(logits: Tensor, rows: Sequence[tuple[int, SampleRow]]) -> None:
    where = [(i, token_id) for i, row in rows for token_id in row.forbidden]
    if where:
        row_ids, token_ids = torch.tensor(where, device=logits.device).T
        logits[row_ids, token_ids] = -torch.inf


def _bias(logits: Tensor, rows: Sequence[tuple[int, SampleRow]]) -> None:
    entries = [(i, t, b) for i, row in rows for t, b in (row.params.logit_bias or {}).items()]
    if entries:
        # float64 holds every id exactly.
        columns = torch.tensor(entries, dtype=torch.float64, device=logits.device)
        row_ids, token_ids, values = columns.unbind(1)
        logits[row_ids.long(), token_ids.long()] += values.float()


def _penalize(logits: Tensor, rows: Sequence[tuple[int, SampleRow]]) -> None:
    """Repetition first, then frequency and presence, as in vLLM."""
    columns: list[tuple[np.ndarray, ...]] = []
    for i, row in rows:
        if not row.counts:
            continue
        params, size = row.params, len(row.counts)
        times = np.fromiter(row.counts.values(), np.float32, size)
        columns.append(
            (
                np.full(size, i, np.int64),
                np.fromiter(row.counts, np.int64, size),
                np.full(size, params.repetition_penalty, np.float32),
                params.frequency_penalty * times + params.presence_penalty * (times > 0),
            )
        )
    if not columns:
        return
    row_ids, token_ids, factor, off = (
        torch.from_numpy(np.concatenate(column)).to(logits.device)
        for column in zip(*columns, strict=True)
    )
    value = logits[row_ids, token_ids]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[row_ids, token_ids] = value - off.float()
