"""Stop strings: where the text is cut, however it arrives.

Guards against a stop string that is missed because a token border runs through it, text that is let
out although it is the beginning of one, and text that is held back for ever.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.stop import StopChecker

# Few letters: matches, near misses and overlaps are common.
TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def cut_of(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: read letter by letter; the first moment at which the text ends in a stop."""
    for end in range(1, len(text) + 1):
        endings = [s for s in stop if text[:end].endswith(s)]
        if endings:
            found = max(endings, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@given(TEXT, STOPS, st.booleans(), st.lists(st.integers(0, 100), max_size=8))
def test_the_cut_does_not_depend_on_the_pieces(text, stop, include, cuts):
    checker = StopChecker(stop, include)
    out = "".join(map(checker.push, pieces_of(text, cuts))) + checker.flush()
    assert (out, checker.matched) == cut_of(text, stop, include)


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_what_is_let_out_is_never_taken_back_and_only_beginnings_are_held(text, stop, cuts):
    checker = StopChecker(stop)
    out, seen = "", ""
    for piece in pieces_of(text, cuts):
        seen += piece
        out += checker.push(piece)
        if checker.matched is not None:
            break
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_after_the_match_nothing_passes():
    checker = StopChecker(["\n\n"])
    assert checker.push("one\n") == "one"
    assert checker.push("\ntwo") == ""
    assert checker.push("three") == ""
    assert checker.flush() == ""
    assert checker.matched == "\n\n"


@pytest.mark.parametrize(("include", "text"), [(True, "say END"), (False, "say ")])
def test_the_string_itself_is_kept_if_that_is_asked_for(include, text):
    checker = StopChecker(["END"], include)
    assert checker.push("say EN") + checker.push("D now") == text


def test_skipped_text_is_not_searched():
    checker = StopChecker(["ab"])
    assert checker.skip("ab") == "ab"
    assert checker.matched is None
    assert checker.push("xab") == "x"
