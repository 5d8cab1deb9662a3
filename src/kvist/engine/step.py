"""What passes between deciding, doing and recording: frozen values.

::

    StepPlan    scheduler ──▶ runner      what to compute, where K and V lie
    StepResult  runner    ──▶ scheduler   the tokens that came of it
    Update      scheduler ──▶ whoever asked for the request
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist.blocks.table import BlockCopy
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import TokenLogprobs
from kvist.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to choose the token that follows a scheduled run.

    Attributes
    ----------
    params : SamplingParams
    seed : int
        The request's own, or what the engine picked for it.
    position : int
        Index of the new token in the sequence. The draw depends on (seed, index, position) alone,
        so that neither batch nor preemption changes it.
    index : int
        Which continuation of its request it is.
    forbidden : tuple of int
        Tokens that may not come now: the ends of bad words, and what would stop the text before
        ``min_tokens``.
    counts : mapping of token id to int, or None
        For penalties: how often each token was generated, 0 for those of the prompt alone.
    bitmask : bytes or None
        One bit a token, lowest first: whether the grammar lets it come now.
    """

    params: SamplingParams
    seed: int
    position: int
    index: int = 0
    forbidden: tuple[int, ...] = ()
    counts: Mapping[int, int] | None = None
    bitmask: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a run whose logits say how likely the prompt's next token was.

    Attributes
    ----------
    targets : tuple of int
        The token after each of the first ``len(targets)`` tokens of the run.
    num_top : int
        Most likely tokens to report beside it.
    """

    targets: tuple[int, ...]
    num_top: int


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
    prompt_rows : PromptRows or None
        Where log probabilities of the prompt are wanted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    position: int
    block_ids: array[int]
    sample: SampleRow | None
    prompt_rows: PromptRows | None = None


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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    Attributes
    ----------
    tokens : mapping of request id to token id
        One for every run that had a `SampleRow` and did not fail.
    failed : mapping of request id to reason
        Rows that have no meaningful result (logits that are not finite). Only these fail.
    logprobs : mapping of request id to TokenLogprobs
        Of the tokens, where they were asked for.
    prompt_logprobs : mapping of request id to tuple of TokenLogprobs
        One for each of the `PromptRows` of the run.
    """

    tokens: Mapping[str, int]
    failed: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def check(self, plan: StepPlan) -> None:
        """Raise `IntegrityError` if a run of `plan` did not fail and lacks what it was to bring."""
        for item in plan.scheduled:
            if item.request_id in self.failed:
                continue
            if item.sample is not None and item.request_id not in self.tokens:
                raise IntegrityError(f"step {plan.step} brought no token for {item.request_id!r}")
            if item.prompt_rows is None:
                continue
            if len(self.prompt_logprobs.get(item.request_id, ())) != len(item.prompt_rows.targets):
                raise IntegrityError(
                    f"step {plan.step} brought no log probabilities for {item.request_id!r}"
                )


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request, or of one of its continuations.

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
        Why, when the reason is ``"error"``, or ``"abort"`` and nobody asked for it.
    index : int
        Which continuation; below ``params.num_samples``.
    fault : {"deadline", "request"} or None
        Whose doing the error is: its time was over; what was asked cannot be done. ``None``: ours.
    is_last : bool
        Nothing more comes for this request: every request gets exactly one such update. (An abort
        of the whole request, or an error of one continuation, may end others without a word.)
    logprobs : tuple of TokenLogprobs or None
        Of the new tokens, where they were asked for.
    prompt_logprobs : tuple of TokenLogprobs or None
        Of prompt tokens 1, 2, … with the first news, where they were asked for.
    exact : bool
        False once it has read something that a lossy codec brought back.
    fault : {"deadline", "request"} or None
        What the error comes of: time that is over, or something that was asked and cannot be done.
        ``None``: of neither.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    index: int = 0
    is_last: bool = False
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    fault: str | None = None
    exact: bool = True
