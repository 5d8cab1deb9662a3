"""What prompts share, and where they stop sharing.

Owns the reading of request logs and the comparison of prompts. Works on words, not on a model's
tokens: positions are near, causes are right, and no tokenizer is needed.

::

    A   You are helpful . Today is 2026-11-29 . Rules : …
    B   You are helpful . Today is 2026-11-30 . Rules : …
                                   ^ differs at word 6, and goes on the same: movable
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_WORD = re.compile(r"\d(?:[\d:.,/T+-]*\d)?|\w+|[^\w\s]")
_KINDS = (
    ("a date", re.compile(r"^\d{4}-\d\d?-\d\d?$|^\d\d?[./]\d\d?[./]\d{2,4}$")),
    (
        "a timestamp",
        re.compile(r"^\d{4}-\d\d-\d\dT?[\d:.+]*$|^\d\d?:\d\d(:\d\d)?[\d.]*$|^1\d{9,12}$"),
    ),
    ("an id", re.compile(r"^[0-9a-f]{8,}$|^(?=.*\d)(?=.*[a-z])\w{6,}$", re.IGNORECASE)),
    ("a number", re.compile(r"^[\d.,:/-]+$")),
)
_SAME_AFTER = 12
"""Words that must agree behind a difference to call it one that could be moved."""

_GAP = 8
"""Words that may differ in a row."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where neighbouring prompts first differ although they go on the same.

    Attributes
    ----------
    position : int
        Words before it; a word is about 1.3 tokens of English.
    kind : str
        ``"a date"``, ``"an id"``, ``"a word"``, …
    count : int
        Pairs of prompts in which it was seen.
    example : tuple of str
        What stood there in two of them, cut to 24 characters.
    """

    position: int
    kind: str
    count: int
    example: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a set of prompts has in common.

    Attributes
    ----------
    num_prompts, num_words : int
    shared_words : int
        Words that a prefix cache without limits would find: each prompt against all before it.
    quartiles : tuple of int
        Of the longest prefix, in words, that a prompt shares with any other: 25, 50, 75 %.
    movable_words : int
        Words behind early differences that would be shared if those stood at the end.
    differences : tuple of Difference
        Most frequent first.
    """

    num_prompts: int
    num_words: int
    shared_words: int
    quartiles: tuple[int, int, int]
    movable_words: int
    differences: tuple[Difference, ...]


def words(text: str) -> list[str]:
    """Cut a text into words, numbers and signs."""
    return _WORD.findall(text)


def compare_prompts(prompts: Sequence[str]) -> Sharing:
    """Compare prompts with each other. O(n log n) in their number, by sorting."""
    cut = sorted(words(prompt) for prompt in prompts)
    shared = [_common(a, b) for a, b in pairwise(cut)]
    longest = (
        sorted(max(before, after) for before, after in zip([0, *shared], [*shared, 0], strict=True))
        if len(cut) > 1
        else [0]
    )
    seen: Counter[tuple[int, str]] = Counter()
    examples: dict[tuple[int, str], tuple[str, str]] = {}
    movable = 0
    for (a, b), common in zip(pairwise(cut), shared, strict=True):
        gained = _goes_on(a, b, common)
        if gained == 0:
            continue
        kind = _kind(a[common], b[common])
        seen[common, kind] += 1
        examples.setdefault((common, kind), (a[common][:24], b[common][:24]))
        movable += gained
    return Sharing(
        num_prompts=len(cut),
        num_words=sum(map(len, cut)),
        shared_words=sum(shared),
        quartiles=(_at(longest, 0.25), _at(longest, 0.5), _at(longest, 0.75)),
        movable_words=movable,
        differences=tuple(
            Difference(position, kind, count, examples[position, kind])
            for (position, kind), count in seen.most_common(5)
        ),
    )


def read_prompts(lines: Iterable[str]) -> tuple[list[str], int]:
    """Read prompts from JSONL: OpenAI requests, bare or under ``body``, ``request`` or ``input``.

    Returns
    -------
    tuple
        Prompts, and how many lines held none. A last line that is cut off counts among those.
    """
    prompts: list[str] = []
    bad = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line))
        except ValueError:
            prompt = None
        if prompt is None:
            bad += 1
        else:
            prompts.append(prompt)
    return prompts, bad


def _prompt(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    for name in ("body", "request", "input"):
        if isinstance(record.get(name), dict):
            record = record[name]
            break
    messages = record.get("messages")
    if isinstance(messages, list):
        return "\n".join(_message(message) for message in messages if isinstance(message, dict))
    prompt = record.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _message(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text", "") for part in content if isinstance(part, dict))
        content = "\n".join(map(str, texts))
    return f"{message.get('role', '')}\n{content or ''}"


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def _goes_on(a: Sequence[str], b: Sequence[str], at: int) -> int:
    """Words that agree again behind a difference of at most `_GAP` words; 0 if they do not."""
    for skip_a in range(1, _GAP + 1):
        for skip_b in (skip_a, *range(1, skip_a), *range(skip_a + 1, _GAP + 1)):
            rest = _common(a[at + skip_a :], b[at + skip_b :])
            if rest >= _SAME_AFTER:
                return rest
    return 0


def _kind(one: str, other: str) -> str:
    for kind, pattern in _KINDS:
        if pattern.match(one) and pattern.match(other):
            return kind
    return "a word"


def _at(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
