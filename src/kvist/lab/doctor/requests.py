"""Symptoms in a log of requests, and in prompt templates.

Owns thresholds over what `compare_prompts` found. Knows no server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.prompts import Sharing

TOKENS_A_WORD = 1.3
EARLY_SHARE = 0.5
"""A difference is early if it stands in the first half of what could be shared."""


def examine_requests(sharing: Sharing, block_size: int = 16) -> list[Finding]:
    """Return what a request log tells, by expected gain.

    Parameters
    ----------
    block_size : int
        Of the server: what is shared below one block is never found.
    """
    if sharing.num_prompts < 2 or sharing.num_words == 0:
        return []
    found: list[Finding] = []
    rate = sharing.shared_words / sharing.num_words
    movable = sharing.movable_words / sharing.num_words
    if sharing.differences and movable > 0.2 and movable > EARLY_SHARE * rate:
        found.append(_early(sharing, rate, movable))
    median = sharing.quartiles[1] * TOKENS_A_WORD
    if not found and 0 < median < block_size and sharing.quartiles[2] > 0:
        found.append(
            Finding(
                SYMPTOMS["block-larger-than-prefix"],
                f"half of the prompts share about {median:.0f} tokens, a block has {block_size}",
                "only whole blocks are found again",
                "a smaller --block-size (8 or 16), or a longer common beginning",
            )
        )
    if not found and rate < 0.05:
        found.append(
            Finding(
                SYMPTOMS["prompts-share-nothing"],
                f"{sharing.num_prompts} prompts share {rate:.1%} of their words",
                "each prompt is new from its first words on",
                "no cache helps here; save memory with a shorter --max-model-len instead",
            )
        )
    return by_gain(found)


def _early(sharing: Sharing, rate: float, movable: float) -> Finding:
    top = sharing.differences[0]
    token = round(top.position * TOKENS_A_WORD)
    one, other = top.example
    return Finding(
        SYMPTOMS["prefix-differs-early"],
        f"{top.kind} at about token {token} differs in {top.count} of"
        f" {sharing.num_prompts - 1} neighbouring prompts ({one!r} / {other!r}); behind it"
        f" {movable:.0%} of all words are the same again, {rate:.0%} are shared now",
        "what stands behind the first difference has another name in the cache, however equal",
        f"put {top.kind} at the end of the prompt, or into the last message; a date without the"
        " time of day is enough for most",
    )


@dataclass(frozen=True, slots=True)
class TemplateIssue:
    """Something in a prompt template that breaks sharing."""

    line: int
    text: str
    why: str


_CHANGING = re.compile(
    r"\b(now|today|timestamp|datetime|strftime|time|date|uuid|request_id|session_id|nonce|random"
    r"|user_name|username|user_id)\b",
    re.IGNORECASE,
)
_SLOT = re.compile(r"\{\{(.+?)\}\}|\{%(.+?)%\}|(?<!\{)\{([A-Za-z_][\w.]*)\}(?!\})")


def lint_template(text: str) -> list[TemplateIssue]:
    """Return what changes from request to request and stands before what does not.

    Understands ``{{ jinja }}``, ``{% tags %}`` and ``{python}`` slots. A slot in the last tenth of
    the template is where it belongs.
    """
    issues: list[TemplateIssue] = []
    last = max(1, int(len(text) * 0.9))
    for match in _SLOT.finditer(text):
        inside = next(group for group in match.groups() if group is not None)
        changing = _CHANGING.search(inside)
        if changing is None or match.start() >= last:
            continue
        behind = len(text) - match.end()
        issues.append(
            TemplateIssue(
                text.count("\n", 0, match.start()) + 1,
                match.group(0)[:60],
                f"{changing.group(0)!r} changes with every request; the {behind} characters behind"
                " it are never found in the cache. Move it to the end",
            )
        )
    return issues
