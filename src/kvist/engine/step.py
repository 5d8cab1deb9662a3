"""What passes between deciding, doing and recording: frozen values.

::

    StepPlan    scheduler ──▶ runner      what to compute, where K and V lie
    StepResult  runner    ──▶ scheduler   the tokens that came of it
    Update      scheduler ──▶ whoever asked for the request
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvist.blocks.table import BlockCopy
from kvist.cache import KVCacheManager
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to choose the token that follows a scheduled run.

    Attributes
    ----------
    params : SamplingParams
    seed : int
        The request's own, or what the engine picked for it.
    position : int
        Index of the new token in the sequence. The draw depends on (seed, position) alone, so that
        neither batch nor preemption changes it.
    """

    params: SamplingParams
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A run of consecutive tokens of one sequence.

    ::

        0 ......... position ................. position + len(token_ids)
        | in blocks | computed by this step    |

    Attributes
    ----------
    token_ids : tuple of int
    position : int
        Tokens before these; their K and V are in the blocks.
    block_ids : array of int32
        Snapshot of the block table, long enough for the run. Not to be changed.
    sample : SampleRow or None
        ``None`` when this is not yet the end of the known tokens (a chunk of a long prompt).
    """

    request_id: str
    token_ids: tuple[int, ...]
    position: int
    block_ids: array[int]
    sample: SampleRow | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: runs of one token first, then the longer ones.

    Attributes
    ----------
    copies : tuple of BlockCopy
        To be done before the forward pass.
    fresh : tuple of int
        Blocks whose bytes mean nothing yet.
    preempted : tuple of str
        Requests that gave their blocks up for this step.
    """

    step: int
    scheduled: tuple[Scheduled, ...]
    copies: tuple[BlockCopy, ...] = ()
    fresh: tuple[int, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this step."""
        return sum(len(s.token_ids) for s in self.scheduled)


def plan_step(
    step: int, sequences: Iterable[Sequence], cache: KVCacheManager, preempted: tuple[str, ...]
) -> StepPlan:
    """Freeze what the scheduler chose: sequences with `num_scheduled` tokens and an allocation.

    O(tokens + table bytes): the tables are copied, since they go on changing.
    """
    scheduled: list[Scheduled] = []
    copies: list[BlockCopy] = []
    fresh: list[int] = []
    for seq in sorted(sequences, key=lambda s: s.num_scheduled > 1):
        assert seq.table is not None and seq.allocation is not None
        start, end = seq.num_computed, seq.num_computed + seq.num_scheduled
        is_last = end == seq.num_tokens
        scheduled.append(
            Scheduled(
                request_id=seq.request_id,
                token_ids=tuple(seq.token_ids[start:end]),
                position=start,
                block_ids=seq.table.ids[: cache.blocks_for(end)],
                sample=SampleRow(seq.params, seq.seed, end) if is_last else None,
            )
        )
        copies.extend(seq.allocation.copies)
        fresh.extend(seq.allocation.fresh)
    return StepPlan(step, tuple(scheduled), tuple(copies), tuple(fresh), preempted)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    Attributes
    ----------
    tokens : mapping of request id to token id
        One for every run that had a `SampleRow` and did not fail.
    failed : mapping of request id to reason
        Rows that have no meaningful result (logits that are not finite). Only these fail.
    """

    tokens: Mapping[str, int]
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request.

    Attributes
    ----------
    token_ids : tuple of int
        New tokens.
    finish_reason : str or None
        ``"stop"``, ``"length"``, ``"abort"``, ``"error"``; ``None`` while it goes on.
    stop_reason : int or None
        The token id that stopped it.
    num_cached_tokens : int
        Prompt tokens that came from the cache when the request first ran.
    error : str or None
        Why, when the reason is ``"error"``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
