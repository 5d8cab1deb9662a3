"""What to do with a prompt that does not fit: ``--context-overflow``.

Owns the choice of what is left out. Knows neither HTTP nor tokenizers: it is given a function that
counts.

What is left out is left out in steps of a quarter of the context, so that a conversation that goes
on growing keeps its new beginning for many turns, and with it the cached KV of its prefix::

    full     |sys|t1|t2|t3|t4|t5|t6|          over by a little
    sent     |sys|     |t3|t4|t5|t6|          a quarter was dropped, not only t1
    next     |sys|     |t3|t4|t5|t6|t7|       the same beginning: a hit

Dropping only what must be dropped would move the beginning with every turn, and never hit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Turn = dict[str, Any]

_KEPT_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was left out."""

    turns: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return self.tokens > 0


NOTHING = Dropped()


@dataclass(frozen=True, slots=True)
class Window:
    """How much fits, and what happens with more.

    Attributes
    ----------
    max_model_len : int
        Tokens of prompt and answer.
    overflow : {"error", "truncate", "drop-oldest-turns"}
    """

    max_model_len: int
    overflow: str = "error"

    def num_surplus(self, length: int, max_tokens: int | None) -> int:
        """Return how many tokens of a prompt are to be left out at least; 0 if it fits.

        A prompt that has to be shortened leaves room for the answer: for `max_tokens`, a quarter of
        the context at most.
        """
        if length < self.max_model_len:
            return 0
        step = max(1, self.max_model_len // 4)
        room = step if max_tokens is None else max(1, min(max_tokens, step))
        return -(-(length + room - self.max_model_len) // step) * step

    def truncate(
        self, token_ids: Sequence[int], max_tokens: int | None, bos: int | None
    ) -> tuple[list[int], Dropped]:
        """Leave out the oldest tokens, the one that begins a text excepted."""
        surplus = self.num_surplus(len(token_ids), max_tokens)
        if not surplus:
            return list(token_ids), NOTHING
        kept = keep_last(token_ids, len(token_ids) - surplus, bos)
        return kept, Dropped(0, len(token_ids) - len(kept))

    def drop_turns(
        self,
        turns: Sequence[Turn],
        encode: Callable[[Sequence[Turn]], list[int]],
        max_tokens: int | None,
    ) -> tuple[list[int], Dropped]:
        """Leave out the oldest turns of a conversation, from one user message to the next.

        What the system says at the beginning stays, and so does the last turn; if that is too much
        still, it is for the engine to refuse. `encode` is called O(log turns) times.
        """
        token_ids = encode(turns)
        surplus = self.num_surplus(len(token_ids), max_tokens)
        if not surplus:
            return token_ids, NOTHING
        opening, later = _split(turns)
        begins = [i for i, turn in enumerate(later) if i == 0 or turn.get("role") == "user"]
        tried: dict[int, list[int]] = {0: token_ids}

        def without(count: int) -> list[int]:
            if count not in tried:
                tried[count] = encode([*opening, *later[begins[count] :]])
            return tried[count]

        count = bisect_left(
            range(len(begins) - 1), surplus, key=lambda n: len(token_ids) - len(without(n))
        )
        kept = without(count)
        return kept, Dropped(count, len(token_ids) - len(kept))


def keep_last(token_ids: Sequence[int], most: int, bos: int | None) -> list[int]:
    """Return the last `most` tokens; if the text began with `bos`, the first of them is that."""
    if most >= len(token_ids):
        return list(token_ids)
    if bos is not None and most > 1 and token_ids[0] == bos:
        return [bos, *token_ids[len(token_ids) - most + 1 :]]
    return list(token_ids[len(token_ids) - max(0, most) :])


def _split(turns: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
    """Tell what the system says at the beginning from the conversation."""
    num_opening = 0
    while num_opening < len(turns) and turns[num_opening].get("role") in _KEPT_ROLES:
        num_opening += 1
    return list(turns[:num_opening]), list(turns[num_opening:])
