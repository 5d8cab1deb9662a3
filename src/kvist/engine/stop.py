"""Stop strings, found in text as it grows.

Owns the text that may be the beginning of a stop string and is therefore held back. Knows no
tokens.

The match that is complete first counts, the longest of those that end together; so the text does
not depend on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Cuts a text at the first of several strings.

    Parameters
    ----------
    stop : sequence of str
        None of them empty. None at all: everything passes.
    include : bool
        Keep the string itself in the text.

    Attributes
    ----------
    matched : str or None
        The string that ended the text; after it nothing passes.

    Notes
    -----
    O(strings * their length) a piece. One thread a text.
    """

    __slots__ = ("_held", "_include", "_longest", "_stop", "matched")

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take a piece; return what is certain to be part of the text."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stop if s in text]
        if found:
            end, negative, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else end + negative]
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep]

    def skip(self, text: str) -> str:
        """Take a piece in which nothing is looked for; return all that is there."""
        text, self._held = self._held + text, ""
        return text

    def flush(self) -> str:
        """Return what is held, at the end of the text: it was no stop string after all."""
        return self.skip("")

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string may begin with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0
