"""What a server is asked, and when: open loops of drawn requests, and traces.

Owns arrivals and texts. A text is made of plain words, and a probe of the server says how many
tokens those are: no tokenizer is needed, and any model can be asked. Knows no wire.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.errors import ConfigError
from kvist.lab.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

_WORDS = (
    "river stone letter garden winter engine silver window harbour lantern meadow copper village"
    " mirror thunder basket candle forest bridge orchard feather granite island kettle ladder"
    " marble needle orange pepper quarry ribbon saddle timber valley walnut anchor barrel cellar"
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be sent.

    Attributes
    ----------
    due_s : float
        Since the start.
    text : str
    max_tokens : int
    """

    due_s: float
    text: str
    max_tokens: int


class Words:
    """Texts of about so many tokens.

    Parameters
    ----------
    tokens_per_word : float
    seed : int
    """

    def __init__(self, tokens_per_word: float, seed: int) -> None:
        self._tokens_per_word = tokens_per_word
        self._seed = seed
        self._draw = random.Random(seed)
        self._words = _WORDS.split()

    def fresh(self, tokens: int) -> str:
        """Return a text that nobody had before."""
        return self._of(self._draw, tokens)

    def named(self, name: object, tokens: int) -> str:
        """Return the text of a name: the same every time."""
        return self._of(random.Random(f"{self._seed} {name}"), tokens)

    def _of(self, draw: random.Random, tokens: int) -> str:
        return " ".join(draw.choices(self._words, k=max(1, round(tokens / self._tokens_per_word))))


def open_loop(
    words: Words,
    *,
    rate: float,
    seconds: float,
    prompt_tokens: int,
    shared_tokens: int,
    prefixes: int,
    max_tokens: int,
    seed: int,
) -> list[Arrival]:
    """Draw arrivals of a Poisson process; each begins with one of a few shared texts."""
    draw = random.Random(seed)
    arrivals = []
    due_s = draw.expovariate(rate)
    while due_s < seconds:
        own = max(1, prompt_tokens - shared_tokens)
        parts = [words.fresh(own)]
        if shared_tokens:
            parts.insert(0, words.named(draw.randrange(prefixes), shared_tokens))
        arrivals.append(Arrival(due_s, " ".join(parts), max_tokens))
        due_s += draw.expovariate(rate)
    if not arrivals:
        raise ConfigError(f"--rate {rate:g} for {seconds:g} s brings no request; raise either")
    return arrivals


def from_trace(
    words: Words, requests: Sequence[TraceRequest], *, count: int, speed: float, shrink: float
) -> list[Arrival]:
    """Turn the first requests of a trace into arrivals: the same sharing, shorter and faster.

    Parameters
    ----------
    count : int
        Requests of the trace to take.
    speed : float
        Divides the times between them.
    shrink : float
        Divides all lengths.
    """
    if not requests:
        raise ConfigError("the trace has no requests")
    first_s = requests[0].arrival_s
    block_tokens = MOONCAKE_BLOCK_TOKENS / shrink
    arrivals = []
    for request in requests[:count]:
        left = request.input_tokens / shrink
        parts = []
        for block in request.blocks:
            parts.append(words.named(block, round(min(left, block_tokens))))
            left -= block_tokens
        arrivals.append(
            Arrival(
                (request.arrival_s - first_s) / speed,
                " ".join(parts),
                max(1, round(request.output_tokens / shrink)),
            )
        )
    return arrivals
