"""A plan as flat tensors: all scheduled tokens in one row ``[1, T]``.

::

    plan        a: 1 token at 40 | b: 1 token at 7 | c: 3 tokens at 0
    input_ids   a40                b7                c0 c1 c2
    positions   40                 7                 0  1  2
    slots       where K and V of each token go: block * S + slot
    sample_rows 0                  1                 4      (the last token of each, if due)

Knows plans and tensors; neither model nor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.engine.step import PromptRows, SampleRow, StepPlan
from kvist.kernels.batch import AttentionBatch


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """What one forward pass needs.

    Attributes
    ----------
    input_ids, position_ids : Tensor
        int64 [1, T].
    slots : Tensor
        int64 [T].
    attention : AttentionBatch
    sample_rows : Tensor
        int64 [n], rows of T whose logits are wanted.
    samples : tuple of (request id, SampleRow)
        In the order of `sample_rows`.
    prompt_rows : Tensor
        int64 [m], rows of T whose logits are wanted for log probabilities of the prompt.
    prompts : tuple of (request id, PromptRows)
        In the order of `prompt_rows`.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    attention: AttentionBatch
    sample_rows: Tensor
    samples: tuple[tuple[str, SampleRow], ...]
    prompt_rows: Tensor
    prompts: tuple[tuple[str, PromptRows], ...]


def build_batch(
    plan: StepPlan, block_size: int, device: torch.device, *, one_by_one: bool = False
) -> ForwardBatch:
    """Lay a plan out flat. REQUIRES it schedules something.

    Parameters
    ----------
    one_by_one : bool
        Let every token attend as a decode of its own, so that its result does not depend on the run
        that it is part of.

    Notes
    -----
    O(T + R * B) with numpy's constants: block tables are copied, not walked.
    """
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    query_lens = [len(item.token_ids) for item in scheduled]
    num_tokens = sum(query_lens)
    width = max(len(item.block_ids) for item in scheduled)
    tables = np.zeros((num_seqs, width), dtype=np.int32)
    input_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    owners = np.repeat(np.arange(num_seqs), query_lens)
    samples: list[tuple[str, SampleRow]] = []
    sample_rows: list[int] = []
    prompts: list[tuple[str, PromptRows]] = []
    prompt_rows: list[int] = []
    start = 0
    for row, item in enumerate(scheduled):
        n = query_lens[row]
        tables[row, : len(item.block_ids)] = item.block_ids
        if n == 1:
            input_ids[start] = item.token_ids[0]
            positions[start] = item.position
        else:
            input_ids[start : start + n] = item.token_ids
            positions[start : start + n] = np.arange(item.position, item.position + n)
        if item.prompt_rows is not None:
            prompts.append((item.request_id, item.prompt_rows))
            prompt_rows.extend(range(start, start + len(item.prompt_rows.targets)))
        start += n
        if item.sample is not None:
            samples.append((item.request_id, item.sample))
            sample_rows.append(start - 1)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    contexts = [item.position + n for item, n in zip(scheduled, query_lens, strict=True)]
    if one_by_one:
        query_lens, contexts = [1] * num_tokens, (positions + 1).tolist()
        tables = tables[owners]
    return ForwardBatch(
        input_ids=on_device(input_ids)[None],
        position_ids=on_device(positions)[None],
        slots=on_device(slots),
        attention=AttentionBatch.build(
            query_lens,
            contexts,
            torch.from_numpy(tables),
            block_size,
            device,
        ),
        sample_rows=on_device(np.asarray(sample_rows, dtype=np.int64)),
        samples=tuple(samples),
        prompt_rows=on_device(np.asarray(prompt_rows, dtype=np.int64)),
        prompts=tuple(prompts),
    )
