"""What prompts share, and where they stop sharing.

Owns the comparison of prompts. Works on words, not on a model's tokens: positions are near, causes
are right, and no tokenizer is needed.

::

    A   You are helpful . Today is 2026-11-29 . Rules : …
    B   You are helpful . Today is 2026-11-30 . Rules : …
                                   ^ differs at word 6, and goes on the same: movable
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

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

ORDER = "the order of passages"
"""The kind of a difference behind which the same passages come, one before the other."""

_GAP = 8
"""Words that may differ in a row and still be one thing; more are a passage."""

_FAR = 2048
"""Words to look through for the end of a passage that differs."""

_MOST_PAIRS = 1000


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
    longest : tuple of int
        Sorted; for each prompt the longest prefix, in words, that it shares with any other.
    movable_words : int
        Words behind early differences that would be shared if those stood at the end.
    differences : tuple of Difference
        Most frequent first.
    """

    num_prompts: int
    num_words: int
    shared_words: int
    longest: tuple[int, ...]
    movable_words: int
    differences: tuple[Difference, ...]

    @property
    def rate(self) -> float:
        """Share of all words that others had before."""
        return self.shared_words / self.num_words if self.num_words else 0.0

    @property
    def quartiles(self) -> tuple[int, int, int]:
        """Of `longest`: 25, 50 and 75 %."""
        return _at(self.longest, 0.25), _at(self.longest, 0.5), _at(self.longest, 0.75)

    def distribution(self) -> list[tuple[int, int]]:
        """Return how many prompts share less than 1, 2, 4, 8 … words, by upper bound."""
        rows: list[tuple[int, int]] = []
        bound, done = 1, 0
        while done < len(self.longest):
            below = bisect_left(self.longest, bound)
            rows.append((bound, below - done))
            bound, done = bound * 2, below
        return rows


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
    # All pairs of a large log would take minutes, and tell nothing more.
    stride = max(1, len(shared) // _MOST_PAIRS)
    for (a, b), common in islice(zip(pairwise(cut), shared, strict=True), 0, None, stride):
        gap, gained, moved = _goes_on(a, b, common)
        if gained == 0:
            continue
        kind = ORDER if moved else "a passage"
        if not moved and gap <= _GAP:
            kind = _kind(a[common], b[common])
        seen[common, kind] += stride
        examples.setdefault((common, kind), (a[common][:24], b[common][:24]))
        movable += gained * stride
    return Sharing(
        num_prompts=len(cut),
        num_words=sum(map(len, cut)),
        shared_words=sum(shared),
        longest=tuple(longest),
        movable_words=movable,
        differences=tuple(
            Difference(position, kind, count, examples[position, kind])
            for (position, kind), count in seen.most_common(5)
        ),
    )


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def _goes_on(a: Sequence[str], b: Sequence[str], at: int) -> tuple[int, int, bool]:
    """Return how many words differ, how many agree again, and whether in another order.

    The second is 0 if none agree again.
    """
    for skip_a in range(1, _GAP + 1):
        for skip_b in (skip_a, *range(1, skip_a), *range(skip_a + 1, _GAP + 1)):
            rest = _common(a[at + skip_a :], b[at + skip_b :])
            if rest >= _SAME_AFTER:
                return skip_a, rest, False
    # Not a word but a passage, or passages in another order: runs of words that come again in the
    # other, wherever they stand there.
    runs: dict[tuple[str, ...], int] = {}
    for start in range(at + 1, min(len(b) - _SAME_AFTER, at + _FAR) + 1):
        runs.setdefault(tuple(b[start : start + _SAME_AFTER]), start)
    first, same, start = 0, 0, at + 1
    end, moved = 0, False
    while runs and start <= min(len(a) - _SAME_AFTER, at + _FAR):
        other = runs.get(tuple(a[start : start + _SAME_AFTER]))
        if other is None:
            start += 1
            continue
        run = _common(a[start:], b[other:])
        first = first or start - at
        same += run
        moved |= other < end
        end = other + run
        start += run
    return first, same, moved


def _kind(one: str, other: str) -> str:
    for kind, pattern in _KINDS:
        if pattern.match(one) and pattern.match(other):
            return kind
    return "a word"


def _at(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
