"""One call of a function, read while it is being written: ``{"name": …, "arguments": {…}}``.

Owns the reading of that one object, letter by letter, so that its arguments can be passed on before
they are complete. Knows nothing of what stands around it; `kvist.server.tools` does.
"""

from __future__ import annotations

import json
from enum import Enum

_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    BEGIN = "begin"
    KEY = "key"
    IN_KEY = "in a key"
    COLON = "colon"
    VALUE = "value"
    IN_VALUE = "in a value"
    END = "end"
    BROKEN = "broken"


class CallReader:
    """Reads one object.

    Attributes
    ----------
    name : str or None
        Of the function, as soon as it is complete.
    has_arguments : bool
        Whether they have begun.

    Notes
    -----
    A model writes the name first, and then the arguments can be had as they come. Where it does
    not, they are kept until the name is there. Arguments that are a text (JSON in JSON) are taken
    at their end. O(1) a letter.
    """

    __slots__ = (
        "_at",
        "_depth",
        "_escaped",
        "_held",
        "_in_text",
        "_key",
        "_raw",
        "has_arguments",
        "name",
    )

    def __init__(self) -> None:
        self._at = _At.BEGIN
        self._key = ""
        self._raw: list[str] = []
        self._held: list[str] = []
        self._depth = 0
        self._in_text = self._escaped = False
        self.name: str | None = None
        self.has_arguments = False

    @property
    def is_done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.END

    @property
    def is_between(self) -> bool:
        """Whether a value has ended, and neither the object nor another key has begun to."""
        return self._at is _At.KEY

    @property
    def is_broken(self) -> bool:
        """Whether it is no such object."""
        return self._at is _At.BROKEN

    def push(self, letter: str) -> str:
        """Take one letter; return the part of the arguments that is certain and was not returned.

        REQUIRES neither `is_done` nor `is_broken`.
        """
        if self._at is _At.IN_VALUE:
            self._take(letter)
        elif self._at is _At.IN_KEY:
            self._take_key(letter)
        elif not letter.isspace():
            self._take_between(letter)
        if self.name is None or not self._held:
            return ""
        fragment = "".join(self._held)
        self._held.clear()
        return fragment

    def _take_between(self, letter: str) -> None:
        match self._at, letter:
            case (_At.BEGIN, "{") | (_At.KEY, ","):
                self._at = _At.KEY
            case _At.KEY, '"':
                self._at = _At.IN_KEY
                self._raw = ['"']
            case _At.KEY, "}":
                self._at = _At.END
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, _:
                self._begin_value(letter)
            case _:
                self._at = _At.BROKEN

    def _take_key(self, letter: str) -> None:
        self._raw.append(letter)
        if self._ends_text(letter):
            key = _parsed("".join(self._raw))
            self._key = key if isinstance(key, str) else ""
            self._at = _At.COLON

    def _begin_value(self, letter: str) -> None:
        self._at = _At.IN_VALUE
        self._raw = []
        self._depth = 0
        self._in_text = self._escaped = False
        if self._key in _ARGUMENTS:
            self.has_arguments = True
        self._take(letter)

    def _take(self, letter: str) -> None:
        """Take a letter of a value; see whether it ends there."""
        is_first = not self._raw
        if self._in_text:
            self._keep(letter)
            if self._ends_text(letter):
                self._in_text = False
                if self._depth == 0:
                    self._end_value()
            return
        if letter == '"' and (is_first or self._depth):
            self._in_text = True
            self._keep(letter)
        elif letter in "{[":
            self._depth += 1
            self._keep(letter)
        elif letter in "}]" and self._depth:
            self._depth -= 1
            self._keep(letter)
            if self._depth == 0:
                self._end_value()
        elif self._depth == 0 and (letter in ",}" or letter.isspace()):
            # A number, true, false or null; what ended it is not its own.
            self._end_value()
            if not letter.isspace() and self._at is _At.KEY:
                self._take_between(letter)
        else:
            self._keep(letter)

    def _keep(self, letter: str) -> None:
        self._raw.append(letter)
        if self._key in _ARGUMENTS and self._raw[0] == "{":
            self._held.append(letter)

    def _ends_text(self, letter: str) -> bool:
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = letter == "\\"
        return letter == '"'

    def _end_value(self) -> None:
        self._at = _At.KEY
        if self._key == "name":
            name = _parsed("".join(self._raw))
            if isinstance(name, str) and name:
                self.name = name
            else:
                self._at = _At.BROKEN
        elif self._key in _ARGUMENTS and self._raw[0] != "{":
            value = _parsed("".join(self._raw))
            self._held.append(value if isinstance(value, str) else "".join(self._raw))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
