"""Tool calls in what a model writes, by the form it was trained to write them in.

Owns the forms, and a parser that tells calls from text while both grow. Knows no requests.

::

    hermes       text <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3_json  {"name": "f", "parameters": {...}}; {...}        nothing but calls
    mistral      text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
                 text [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}        from version 11 on
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kvist.server.json_call import CallReader


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are marked.

    Attributes
    ----------
    begin : str
        What stands before them; empty where the whole output is calls.
    end : str
        What stands after each.
    named : bool
        Whether the name may stand before its arguments, outside of the object.
    known_only : bool
        Only names of tools are calls: where nothing else marks them, any JSON would be one.
    special : bool
        Whether the marks are special tokens, which must not be left out of the text.
    short_ids : bool
        Ids of nine letters and digits, which some templates of this form insist on.
    """

    begin: str
    end: str = ""
    named: bool = False
    known_only: bool = False
    special: bool = False
    short_ids: bool = False


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("<tool_call>", "</tool_call>"),
        "llama3_json": ToolFormat("", known_only=True, special=True),
        "mistral": ToolFormat("[TOOL_CALLS]", named=True, special=True, short_ids=True),
    }
)

REQUIRED = ToolFormat("")
"""What `kvist.server.response_format.forced_call` lets come: a list of calls, and nothing else."""

_PYTHON_TAG = "<|python_tag|>"
_WORD = frozenset(string.ascii_letters + string.digits + "_-.")


def format_of(template: str | None) -> str | None:
    """Return the name of the form that a chat template teaches; ``None`` if it knows no tools."""
    if not template or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if _PYTHON_TAG in template or '"parameters"' in template:
        return "llama3_json"
    # The form of Hermes, Qwen and most others.
    return "hermes"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a call: its id and name at first, then pieces of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta


class _At(Enum):
    TEXT = "text"
    BETWEEN = "between calls"
    NAME = "name before arguments"
    CALL = "in a call"
    AFTER = "after a call"


class ToolParser:
    """Tells calls from text in one output.

    Parameters
    ----------
    form : ToolFormat
    known : collection of str
        Names of the tools.
    several : bool
        Whether more than one call is passed on.

    Attributes
    ----------
    num_calls : int
        That were passed on.

    Notes
    -----
    What turns out to be no call after all is text. White space beside calls is dropped. How the
    output is cut into pieces does not show in what comes out, pieces joined.
    """

    def __init__(self, form: ToolFormat, known: Collection[str], *, several: bool = True) -> None:
        self._form = form
        self._known = known
        self._several = several
        # Without a mark calls may begin at once, and only there.
        self._at = _At.TEXT if form.begin else _At.BETWEEN
        self._raw = ""
        self._held = ""
        self._space = ""
        self._reader = CallReader()
        self._is_told = self._is_wrapped = False
        self._pieces: list[Piece] = []
        self._num_seen = 0
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take new text; return what is certain, in order."""
        for letter in text:
            self._take(letter)
        return self._taken()

    def flush(self) -> list[Piece]:
        """Return the rest, at the end of the output. A call that is cut off stays so."""
        if self._at is _At.TEXT:
            self._say(self._held)
        elif not self._is_told and self._at is not _At.AFTER:
            self._say(self._raw)
        if self._space and not self.num_calls:
            self._pieces.append(self._space)
        self._raw = self._held = self._space = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._pieces:
            if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += piece
            elif isinstance(piece, CallDelta) and pieces:
                pieces += _joined(pieces.pop(), piece)
            else:
                pieces.append(piece)
        self._pieces = []
        return pieces

    # ------------------------------------------------------------------ letters

    def _take(self, letter: str) -> None:
        match self._at:
            case _At.TEXT:
                self._take_text(letter)
            case _At.BETWEEN:
                self._take_between(letter)
            case _At.NAME:
                self._take_name(letter)
            case _At.CALL:
                self._take_call(letter)
            case _At.AFTER:
                self._take_after(letter)

    def _take_text(self, letter: str) -> None:
        begin = self._form.begin
        if not begin:
            self._say(letter)
            return
        self._held += letter
        while not begin.startswith(self._held):
            self._say(self._held[0])
            self._held = self._held[1:]
        if self._held == begin:
            self._begin_calls()

    def _begin_calls(self) -> None:
        self._raw, self._held = self._form.begin, ""
        self._space = ""
        self._at = _At.BETWEEN
        self._is_told = False

    def _take_between(self, letter: str) -> None:
        """Look for the next call; `_held` may be the beginning of a mark."""
        self._raw += letter
        self._held += letter
        if letter == "{" and self._held == "{":
            self._begin_call()
            return
        marks = [mark for mark in (self._form.begin, self._form.end, _PYTHON_TAG) if mark]
        if any(mark.startswith(self._held) for mark in marks):
            if self._held == self._form.end:
                self._at, self._held, self._raw = _At.TEXT, "", ""
            elif self._held in marks:
                self._held = ""
            return
        first, rest = self._held[0], self._held[1:]
        self._held = ""
        if first.isspace() or first in "[],;":
            # Before a call it may still turn out to be text; after one it is what parts them.
            self._raw = "" if self._num_seen else self._raw[: len(self._raw) - len(rest)]
            for other in rest:
                self._take(other)
        elif self._form.named and first in _WORD:
            self._at, self._held = _At.NAME, first
            for other in rest:
                self._take_name(other)
        else:
            self._give_up()

    def _take_name(self, letter: str) -> None:
        self._raw += letter
        if letter != "{":
            self._held += letter
            return
        # Versions 11 and 13 of the form: f{...}, f[ARGS]{...}, f[CALL_ID]123456789[ARGS]{...}
        name = self._held.partition("[")[0].strip()
        if not name or not _WORD.issuperset(name):
            self._give_up()
            return
        self._begin_call(name)

    def _begin_call(self, name: str | None = None) -> None:
        self._held = ""
        self._at = _At.CALL
        self._is_told = False
        self._reader = CallReader()
        # Made whole, so that one reader reads both forms.
        opening = "{" if name is None else f'{{"name": "{name}", "arguments": {{'
        self._is_wrapped = name is not None
        self._feed(opening)

    def _take_call(self, letter: str) -> None:
        self._raw += letter
        self._feed(letter)

    def _feed(self, letters: str) -> None:
        reader = self._reader
        for letter in letters:
            fragment = reader.push(letter)
            if reader.is_broken:
                self._give_up()
                return
            if reader.name is not None and reader.has_arguments and not self._is_told:
                if self._form.known_only and reader.name not in self._known:
                    self._give_up()
                    return
                self._tell(CallDelta(self._num_seen, "", self._make_id(), reader.name))
                self._is_told = True
            if fragment:
                self._tell(CallDelta(self._num_seen, fragment))
        wrapped_end = self._is_wrapped and self._is_told and reader.is_between
        if reader.is_done or wrapped_end:
            self._end_call()

    def _end_call(self) -> None:
        reader = self._reader
        if not self._is_told:
            if reader.name is None or self._form.known_only:
                self._give_up()
                return
            self._tell(CallDelta(self._num_seen, "{}", self._make_id(), reader.name))
        self._num_seen += 1
        self._raw = self._held = ""
        self._is_told = False
        self._at = _At.AFTER if self._form.end else _At.BETWEEN

    def _take_after(self, letter: str) -> None:
        """Wait for the mark after a call; without it, what comes is text."""
        self._held += letter
        self._held = self._held.lstrip()
        if self._held == self._form.end:
            self._at, self._held = _At.TEXT, ""
        elif not self._form.end.startswith(self._held):
            held, self._held = self._held, ""
            self._at = _At.TEXT
            for other in held:
                self._take_text(other)

    # ------------------------------------------------------------------ what comes of them

    def _give_up(self) -> None:
        """What was read is no call: it is text, unless a part of it was told already."""
        raw, self._raw, self._held = self._raw, "", ""
        if self._is_told:
            self._num_seen += 1
            raw = ""
        self._is_told = False
        self._at = _At.TEXT
        self._say(raw)

    def _say(self, text: str) -> None:
        """Pass text on, white space only once there is text after it."""
        text = self._space + text
        kept = len(text.rstrip()) if not text.isspace() else 0
        self._space = text[kept:]
        if kept:
            self._pieces.append(text[:kept])

    def _tell(self, delta: CallDelta) -> None:
        if delta.index and not self._several:
            return
        if delta.name is not None:
            self.num_calls += 1
        self._pieces.append(delta)

    def _make_id(self) -> str:
        if self._form.short_ids:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class NamedCallParser:
    """The one call that was demanded by name: all of the output is its arguments.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Take new text; return it as arguments."""
        if not text:
            return []
        if self.num_calls:
            return [CallDelta(0, text)]
        self.num_calls = 1
        return [CallDelta(0, text, f"call_{secrets.token_hex(12)}", self._name)]

    def flush(self) -> list[Piece]:
        """Return the rest: none."""
        return []


def _joined(before: Piece, delta: CallDelta) -> list[Piece]:
    """One delta of two that follow each other in one call."""
    if isinstance(before, CallDelta) and before.index == delta.index and delta.name is None:
        arguments = before.arguments + delta.arguments
        return [CallDelta(before.index, arguments, before.id, before.name)]
    return [before, delta]
