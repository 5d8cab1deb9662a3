"""The words for a grammar that an output must follow, and what runs beside a sequence that has one.

Knows neither who compiles a grammar (`engine.grammar_compiler`) nor logits.

A matcher moves only when a token is recorded, so a step that is taken back leaves it as it was, and
a preempted sequence keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the output must look like.

    Attributes
    ----------
    kind : {"json_object", "json_schema", "regex", "choice", "grammar"}
    text : str
        The schema as JSON; the expression; the choices as a JSON list of texts; or a grammar in
        Lark (llguidance's dialect) or GBNF. Empty for ``"json_object"``.
    param : str
        The field of the request that says so, for errors.
    """

    kind: str
    text: str = ""
    param: str = field(default="response_format", compare=False)


class Matcher(Protocol):
    """Where an output stands in its grammar."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more may follow."""

    def mask(self) -> bytes:
        """One bit a token, lowest bit first: whether it may come next. Changes nothing."""

    def advance(self, token_id: int) -> bool:
        """Take a token; false if the grammar does not allow it."""

    @property
    def failure(self) -> str | None:
        """Why nothing can follow any more, where that is the grammar's doing: it is too large."""

    def fork(self) -> Matcher:
        """Return a matcher that stands at the same place and goes its own way."""
