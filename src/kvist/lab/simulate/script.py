"""A runner that computes nothing and says what a sequence is known to say.

Owns the way from block numbers to token ids. The scheduler, the chain of keys and the cache are the
real ones, so they want tokens; what counts of tokens is only which blocks are equal. A block is a
number, and stands as its *last* token among zeros, since that is the token that makes it full::

    numbers  7                 9                 (not full)
    tokens   0 0 … 0 7         0 0 … 0 9         0 0 …
             └ block size ┘

So two sequences share a key exactly where they share the numbers up to there, whoever generated the
tokens. No torch. Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest, TokenLogprobs
from kvist.engine.step import Scheduled, StepPlan, StepResult

STOP = 1
"""Token that ends a sequence; 0 fills blocks, and blocks are numbered from 2."""
FIRST_NUMBER = 2


class Numbers:
    """Numbers of blocks: the same for the same name, and new ones for what nobody else has."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._next = count(FIRST_NUMBER)

    def of(self, names: Iterable[object]) -> list[int]:
        """Return the numbers of named blocks."""
        known, following = self._known, self._next
        return [
            known[name] if name in known else known.setdefault(name, next(following))
            for name in names
        ]

    def new(self) -> int:
        """Return a number of which there is no other."""
        return next(self._next)


class Script:
    """What one sequence says.

    Parameters
    ----------
    num_prompt : int
        Tokens of its prompt.
    blocks : sequence of int
        Numbers of its full blocks as far as they are known, generated ones too.
    num_output : int or None
        Tokens after which it stops of itself; ``None``: when its limit is reached.
    fails_in : int or None
        Step in which it has no meaningful result.
    """

    __slots__ = ("_blocks", "_last", "fails_in", "num_prompt")

    def __init__(
        self,
        num_prompt: int,
        blocks: Sequence[int],
        num_output: int | None = None,
        fails_in: int | None = None,
    ) -> None:
        self.num_prompt = num_prompt
        self.fails_in = fails_in
        self._blocks = blocks
        self._last = -1 if num_output is None else num_prompt + num_output - 1

    def prompt(self, block_size: int) -> tuple[int, ...]:
        """Return its prompt."""
        zeros = (0,) * (block_size - 1)
        tokens: list[int] = []
        for number in self._blocks[: self.num_prompt // block_size]:
            tokens += zeros
            tokens.append(number)
        return (*tokens, *(0,) * (self.num_prompt - len(tokens)))

    def token(self, position: int, block_size: int, numbers: Numbers) -> int:
        """Return its token at a position behind the prompt."""
        if position == self._last:
            return STOP
        if (position + 1) % block_size:
            return 0
        index = position // block_size
        return self._blocks[index] if index < len(self._blocks) else numbers.new()


class ScriptedRunner:
    """Carries plans out by scripts.

    Parameters
    ----------
    block_size : int
    numbers : Numbers
        Those of the scripts.

    Attributes
    ----------
    scripts : dict of sequence id to Script
    step : int
        Which one is being run; see `Script`.
    """

    def __init__(self, block_size: int, numbers: Numbers) -> None:
        self.scripts: dict[str, Script] = {}
        self.step = 0
        self._block_size = block_size
        self._numbers = numbers

    def run(self, plan: StepPlan) -> StepResult:
        """Say the next token of every sequence that is due one. O(sequences)."""
        scripts, size, numbers = self.scripts, self._block_size, self._numbers
        tokens: dict[str, int] = {}
        failed: dict[str, str] = {}
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        for item in plan.scheduled:
            script = scripts[item.request_id]
            if script.fails_in == self.step:
                failed[item.request_id] = "it failed when it was recorded"
            elif item.sample is not None:
                tokens[item.request_id] = script.token(item.sample.position, size, numbers)
            if item.prompt_rows is not None:
                prompt_logprobs[item.request_id] = tuple(_sure(item))
        return StepResult(tokens, failed, prompt_logprobs=prompt_logprobs)


def _sure(item: Scheduled) -> Iterator[TokenLogprobs]:
    assert item.prompt_rows is not None
    return (TokenLogprobs(token_id, 0.0, 1) for token_id in item.prompt_rows.targets)


def make_request(
    request_id: str,
    script: Script,
    block_size: int,
    max_tokens: int | None,
    *,
    num_samples: int = 1,
    priority: int = 0,
    wants_prompt_logprobs: bool = False,
    arrived_s: float | None = None,
) -> EngineRequest:
    """Return the request that a script belongs to."""
    params = SamplingParams(
        n=num_samples,
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=(STOP,),
        prompt_logprobs=0 if wants_prompt_logprobs else None,
    )
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=script.prompt(block_size),
        params=params,
        priority=priority,
        arrived_s=arrived_s,
    )
