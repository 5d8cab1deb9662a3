"""The driver's half of the conversation: one JSON object a line, stdin to stdout.

Runs in the interpreter of any peer, so the standard library is all it uses. Owns the loop; what an
engine does with a call is the driver's. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Generated:
    """What one call of an engine brought.

    Attributes
    ----------
    times : list of list of float
        By prompt, when each of its tokens was there, in seconds since the prompts were handed in.
    token_ids : list of list of int
        By prompt.
    cached : int or None
        Prompt tokens that were not computed; None where the engine does not say.
    """

    times: list[list[float]]
    token_ids: list[list[int]]
    cached: int | None = None


@dataclass
class Facts:
    """What a table has to say about an engine.

    Attributes
    ----------
    settings : dict
        What was set or found out, for the reader.
    kv_token_bytes : float or None
        Memory of K and V for a token, all layers; None where it cannot be found out.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    kv_token_bytes: float | None = None


Call = Callable[..., Any]


def serve(open_engine: Callable[[dict[str, Any]], Mapping[str, Call]]) -> None:
    """Open an engine by the first line's options, then answer calls until stdin ends.

    Parameters
    ----------
    open_engine : callable
        Given the options, returns the calls by name.

    Notes
    -----
    An exception answers its call, and the next one is waited for: one thing that an engine cannot
    do must not cost the others.
    """
    # By descriptor, since C++ libraries print too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    calls: Mapping[str, Call] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("call")
        try:
            if name == "open":
                calls = open_engine(asked)
                say(value=sorted(calls))
            else:
                value = calls[name](**asked)
                say(value=asdict(value) if isinstance(value, Generated | Facts) else value)
        except Exception as error:  # noqa: BLE001
            say(error=_in_one_line(error))


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
