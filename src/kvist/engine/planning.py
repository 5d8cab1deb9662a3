"""From sequences to a plan: freeze what the scheduler chose.

Owns how the demands of a request become rows for the sampler: which tokens are forbidden now, what
was generated so often, what the grammar lets through. Knows no order and no room.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvist.blocks.table import BlockCopy
from kvist.cache import KVCacheManager
from kvist.engine.sequence import Sequence
from kvist.engine.step import PromptRows, SampleRow, Scheduled, StepPlan


def plan_step(
    step: int, sequences: Iterable[Sequence], cache: KVCacheManager, preempted: tuple[str, ...]
) -> StepPlan:
    """Freeze what the scheduler chose: sequences with `num_scheduled` tokens and an allocation.

    O(tokens + table bytes): the tables are copied, since they go on changing. A sequence with a
    grammar costs the mask of its next token, tens of microseconds to a millisecond.
    """
    scheduled: list[Scheduled] = []
    copies: list[BlockCopy] = []
    fresh: list[int] = []
    chosen = list(sequences)
    ones = [seq for seq in chosen if seq.num_scheduled == 1]
    for seq in (*ones, *(seq for seq in chosen if seq.num_scheduled != 1)):
        assert seq.table is not None
        assert seq.allocation is not None
        start = seq.num_computed
        end = start + seq.num_scheduled
        scheduled.append(
            Scheduled(
                request_id=seq.request_id,
                token_ids=tuple(seq.token_ids[start:end]),
                position=start,
                block_ids=seq.table.ids[: cache.blocks_for(end)],
                sample=sample_row(seq) if end == len(seq.token_ids) else None,
                prompt_rows=_prompt_rows(seq, start, end) if seq.needs_prompt_logprobs else None,
            )
        )
        if seq.allocation.fresh:  # fifteen decodes of sixteen have none
            copies.extend(seq.allocation.copies)
            fresh.extend(seq.allocation.fresh)
    return StepPlan(step, tuple(scheduled), tuple(copies), tuple(fresh), preempted)


def sample_row(seq: Sequence) -> SampleRow:
    """Return how the token after the known ones is to be chosen."""
    params = seq.params
    return SampleRow(
        params,
        seq.seed,
        len(seq.token_ids),
        seq.index,
        forbidden_ids(seq) if params.min_tokens or params.bad_words_token_ids else (),
        dict(seq.counts) if seq.counts is not None else None,
        seq.matcher.mask() if seq.matcher is not None else None,
    )


def forbidden_ids(seq: Sequence) -> tuple[int, ...]:
    """Return the tokens that may not come next. O(bad words)."""
    params = seq.params
    forbidden = seq.stop_ids if seq.num_output_tokens < params.min_tokens else ()
    for word in params.bad_words_token_ids:
        *before, last = word
        # As in vLLM, what the prompt ends with is no beginning of a bad word.
        if len(before) <= seq.num_output_tokens and (
            not before or seq.token_ids[-len(before) :] == before
        ):
            forbidden += (last,)
    return forbidden


def _prompt_rows(seq: Sequence, start: int, end: int) -> PromptRows | None:
    targets = tuple(seq.token_ids[start + 1 : min(end, seq.num_prompt_tokens - 1) + 1])
    return PromptRows(targets, seq.params.prompt_logprobs or 0) if targets else None
