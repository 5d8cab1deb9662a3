"""What is left out of a prompt that does not fit.

Guards: more or less is left out than has to be; the last question is lost; a conversation that goes
on growing gets a new beginning with every turn, so that its KV is never found again.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from kvist.server.overflow import Window, keep_last

LENGTH = 64


def turn(role, content):
    return {"role": role, "content": content}


def encode(turns):
    return [ord(letter) for t in turns for letter in t["content"]]


def conversation(num_turns, size=5):
    for n in range(num_turns):
        yield turn("user", chr(ord("a") + n % 26) * size)
        yield turn("assistant", chr(ord("A") + n % 26) * size)


def test_what_fits_is_left_alone():
    window = Window(LENGTH, "drop-oldest-turns")
    turns = [turn("user", "x" * (LENGTH - 1))]
    assert window.drop_turns(turns, encode, None) == (encode(turns), window.truncate([], 1, 0)[1])
    assert window.truncate([1] * (LENGTH - 1), None, 1)[0] == [1] * (LENGTH - 1)


def test_system_and_last_turn_stay_and_whole_turns_go():
    window = Window(LENGTH, "drop-oldest-turns")
    turns = [turn("system", "S" * 4), *conversation(7), turn("user", "last?")]
    ids, dropped = window.drop_turns(turns, encode, 8)
    text = "".join(map(chr, ids))
    assert text.startswith("SSSS")
    assert text.endswith("last?")
    assert (dropped.turns, text[4]) == (4, "e")
    # 79 tokens and 8 to come in 64: 23 too many, so two steps of 16.
    assert dropped.tokens == 79 - len(ids) == 40
    assert len(ids) + 8 <= LENGTH


def test_what_cannot_be_dropped_is_left_for_the_engine_to_refuse():
    window = Window(LENGTH, "drop-oldest-turns")
    turns = [turn("user", "a" * 10), turn("user", "b" * 100)]
    ids, dropped = window.drop_turns(turns, encode, None)
    assert ids == [ord("b")] * 100
    assert (dropped.turns, dropped.tokens) == (1, 10)
    only_system = [turn("system", "s" * 100)]
    assert window.drop_turns(only_system, encode, None)[0] == encode(only_system)


def test_a_conversation_that_grows_keeps_its_beginning_for_many_turns():
    window = Window(4096, "drop-oldest-turns")
    turns = list(conversation(200, size=50))
    beginnings = []
    for length in range(1, len(turns), 2):
        ids, _ = window.drop_turns(turns[:length], encode, 64)
        assert len(ids) < 4096
        beginnings.append(tuple(ids[:50]))
    runs = [len(list(run)) for _, run in itertools.groupby(beginnings)]
    # Ten times the turns of a quarter of the context. Dropping one at a time would give runs of 1.
    assert sum(runs) / len(runs) > 8
    assert min(runs[1:-1]) > 8


@given(
    st.integers(8, 200),
    st.lists(st.tuples(st.sampled_from(("system", "user", "assistant")), st.integers(0, 60))),
    st.none() | st.integers(1, 300),
)
def test_turns_are_dropped_from_the_front_and_no_more_than_need_be(length, sizes, max_tokens):
    window = Window(length, "drop-oldest-turns")
    turns = [turn(role, chr(97 + i % 26) * size) for i, (role, size) in enumerate(sizes)]
    full = encode(turns)
    ids, dropped = window.drop_turns(turns, encode, max_tokens)
    assert dropped.tokens == len(full) - len(ids)
    assert bool(dropped) == (dropped.tokens > 0)
    if len(full) < length:
        assert ids == full
    # What is left is what was there, in order, with one piece cut out.
    num_opening = next((i for i, t in enumerate(turns) if t["role"] != "system"), len(turns))
    opening = encode(turns[:num_opening])
    assert ids[: len(opening)] == opening
    rest = ids[len(opening) :]
    assert rest == full[len(full) - len(rest) :]


@given(st.integers(2, 300), st.integers(0, 400), st.none() | st.integers(1, 300))
def test_truncation_leaves_room(length, num_tokens, max_tokens):
    ids = [7, *range(100, 100 + num_tokens)]
    kept, dropped = Window(length, "truncate").truncate(ids, max_tokens, 7)
    assert len(kept) < length
    assert dropped.tokens == len(ids) - len(kept)
    if dropped:
        assert kept == ([7, *ids[len(ids) - len(kept) + 1 :]] if len(kept) > 1 else ids[-1:])


@pytest.mark.parametrize(
    ("most", "bos", "kept"),
    [
        (9, 1, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (2, 1, [1, 4]),
        (1, 1, [4]),
        (2, 5, [3, 4]),
    ],
)
def test_the_last_tokens_are_kept(most, bos, kept):
    assert keep_last([1, 2, 3, 4], most, bos) == kept


# ---------------------------------------------------------------------- over the wire


def ask(wire, overflow, body, path, **others):
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, body, path, config={"context_overflow": overflow}, **others)
    return answer, client


CHAT = {"messages": [turn("system", "S"), *conversation(10), turn("user", "last?")]}


def test_by_default_a_prompt_that_does_not_fit_is_refused(wire):
    answer, client = ask(wire, "error", CHAT, "/v1/chat/completions")
    assert answer.status_code == 400
    assert wire.error_of(answer)["param"] == "messages"
    assert "max_model_len=64" in wire.error_of(answer)["message"]
    assert client.requests == []


@pytest.mark.parametrize("overflow", ["truncate", "drop-oldest-turns"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x" * 100})],
)
def test_what_was_left_out_is_said(wire, overflow, path, body):
    answer, client = ask(wire, overflow, body, path)
    said = answer.json()["kvist"]
    is_by_turns = overflow == "drop-oldest-turns" and path.startswith("/v1/chat")
    assert (said["dropped_turns"] > 0) == is_by_turns
    sent = len(client.requests[0].prompt_token_ids)
    given_ = 106 if "chat" in path else 100
    assert said["dropped_tokens"] == given_ - sent > 0
    assert answer.json()["usage"]["prompt_tokens"] == sent
    streamed, _ = ask(wire, overflow, {**body, "stream": True}, path)
    first, *others = wire.events_of(streamed)
    assert first["kvist"] == said
    assert not any("kvist" in event for event in others)


def test_nothing_is_said_where_nothing_was_left_out(wire):
    answer, _ = ask(wire, "truncate", {"prompt": "x"}, "/v1/completions")
    assert "kvist" not in answer.json()
