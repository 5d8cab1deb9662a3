"""What breaks sharing in a prompt template, before anything is served.

Owns the words that change from request to request and the slots of templates. Knows no requests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TemplateIssue:
    """Something in a prompt template that breaks sharing."""

    line: int
    text: str
    why: str


_CHANGING = re.compile(
    r"\b(now|today|timestamp|datetime|strftime(?:_now)?|time|date|current_time|current_date|uuid4?"
    r"|request_id|session_id|trace_id|nonce|random|user_name|username|user_id|user)\b",
    re.IGNORECASE,
)
_CHUNKS = re.compile(
    r"\b(context|documents?|docs|chunks?|passages?|results?|question|query)\b", re.IGNORECASE
)
_SLOT = re.compile(r"\{\{(.+?)\}\}|\{%(.+?)%\}|(?<!\{)\{([A-Za-z_][\w.]*)\}(?!\})")
_MUCH = 400
"""Characters of fixed text behind a passage that are worth moving before it: about 100 tokens."""


def lint_template(text: str) -> list[TemplateIssue]:
    """Return what changes from request to request and stands before what does not.

    Understands ``{{ jinja }}``, ``{% tags %}`` and ``{python}`` slots. A slot in the last tenth of
    the template is where it belongs.
    """
    issues: list[TemplateIssue] = []
    last = max(1, int(len(text) * 0.9))
    for match in _SLOT.finditer(text):
        inside = next(group for group in match.groups() if group is not None)
        behind = text[match.end() :]
        fixed = len(_SLOT.sub("", behind).strip())
        changing = _CHANGING.search(inside)
        if match.start() >= last:
            continue
        if changing is not None:
            why = (
                f"{changing.group(0)!r} changes with every request; the {len(behind)} characters"
                " behind it are never found in the cache. Move it to the end"
            )
        elif (passage := _CHUNKS.search(inside)) is not None and fixed >= _MUCH:
            why = (
                f"{passage.group(0)!r} is another text in most requests; {fixed} characters behind"
                " it are always the same. Move them before it"
            )
        else:
            continue
        line = text.count("\n", 0, match.start()) + 1
        issues.append(TemplateIssue(line, match.group(0)[:60], why))
    return issues
