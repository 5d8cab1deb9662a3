"""One refusal answers those that ask for its like, for a moment; nobody else is touched by it.

Guards against refusing what could have been served (a smaller, a more patient, a later request, an
error that is no overload), and against paying a whole way to the engine for each of a flood.
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from kvist.server.api_errors import ApiError, unavailable
from kvist.server.refusals import HOLDS_S, MOST, RefuseAlike, read_ask

CHAT = "/v1/chat/completions"
BASE = {"max_tokens": 16, "timeout": 10, "prompt": "a" * 50}


class Rig:
    """The layer in front of an application that answers what it is told to."""

    def __init__(self):
        self.now = 0.0
        self.says = unavailable("7 wait", "overloaded")
        self.reached = 0
        self.refused = 0
        self.layer = RefuseAlike(self.app, self.note, lambda: self.now)

    def note(self):
        self.refused += 1

    async def app(self, scope, receive, send):
        self.reached += 1
        self.body = b""
        more = True
        while more:
            message = await receive()
            self.body += message["body"]
            more = message.get("more_body", False)
        await self.says.response()(scope, receive, send)

    def ask(self, body, path=CHAT, pieces=1):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        cut = max(1, -(-len(data) // pieces))
        parts = [data[i : i + cut] for i in range(0, len(data), cut)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        sent = []

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        asyncio.run(self.layer(scope, receive, send))
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


@pytest.fixture
def rig():
    return Rig()


def test_the_same_again_gets_the_same_answer_without_the_way(rig):
    first = rig.ask(BASE)
    rig.now += HOLDS_S / 2
    assert rig.ask(BASE, pieces=3) == first
    assert first[0] == 503
    assert first[1][b"retry-after"]
    assert (rig.reached, rig.refused) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 17},
        {"max_tokens": 8},
        {"prompt": "a" * 30},
        {"max_completion_tokens": 40},
        {"timeout": 9.5},
        {"n": 2},
        {"best_of": 3, "priority": 1},
        {"prompt": "a" * 51},
        {"priority": 4},
        {"max_tokens": None, "temperature": 0.5},
    ],
)
def test_who_asks_for_more_is_refused_likewise(rig, change):
    rig.ask(BASE)
    body = {name: value for name, value in {**BASE, **change}.items() if value is not None}
    rig.ask(body)
    assert (rig.reached, rig.refused) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 7},
        {"max_tokens": 16, "max_completion_tokens": 3},
        {"timeout": 11},
        {"timeout": None},
        {"prompt": "a"},
        {"priority": -1},
    ],
)
def test_who_asks_for_much_less_of_anything_goes_through(rig, change):
    rig.ask(BASE)
    rig.ask({name: value for name, value in {**BASE, **change}.items() if value is not None})
    assert (rig.reached, rig.refused) == (2, 0)


def test_fewer_answers_go_through(rig):
    rig.ask({**BASE, "n": 3})
    rig.ask({**BASE, "prompt": "a" * 80})
    assert (rig.reached, rig.refused) == (2, 0)


def test_another_route_goes_through(rig):
    rig.ask(BASE)
    rig.ask(BASE, "/v1/completions")
    rig.ask(BASE, "/tokenize")
    assert rig.reached == 3


def test_after_its_moment_a_refusal_is_forgotten(rig):
    rig.ask(BASE)
    rig.now += HOLDS_S
    rig.ask(BASE)
    assert (rig.reached, rig.refused) == (2, 0)


@pytest.mark.parametrize(
    "error",
    [
        unavailable("dead", "engine_dead"),
        ApiError(400, "no", code="overloaded"),
        ApiError(429, "no"),
        ApiError(504, "late", code="deadline_exceeded"),
    ],
)
def test_other_answers_hold_for_nobody_else(rig, error):
    rig.says = error
    rig.ask(BASE)
    rig.ask(BASE)
    assert (rig.reached, rig.refused) == (2, 0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"max_tokens": "x"}', b'{"n": 0}', b"\xff", b'{"timeout": 1e999}']
)
def test_what_cannot_be_read_is_for_those_who_can_say_why(rig, body):
    rig.ask(BASE)
    rig.ask(body)
    assert rig.reached == 2
    assert rig.body == body


def test_the_memory_is_bounded(rig):
    for number in range(MOST * 4):
        rig.ask({**BASE, "timeout": 100 + number})
    assert rig.reached == MOST * 4
    assert len(rig.layer._recent) == MOST


def test_what_a_body_does_not_say():
    ask = read_ask(CHAT, b"{}")
    assert ask is not None
    assert ask.most_tokens == ask.patience_s == float("inf")
    assert (ask.num_answers, ask.priority) == (1, 0)
