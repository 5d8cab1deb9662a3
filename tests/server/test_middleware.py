"""Bodies that do not come, and an end in the middle of the work.

Guards against connections that hold a body's place for ever, and against traces of what was only
called off.
"""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from kvist.server import middleware
from kvist.server.middleware import BodyLimit, QuietEnd

POST = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Wire:
    """What comes, piece by piece with pauses before each, and what was answered."""

    def __init__(self, *pieces: tuple[float, bytes]) -> None:
        self.pieces = list(pieces)
        self.sent: list[dict] = []

    async def receive(self):
        if not self.pieces:
            await asyncio.sleep(60)
        pause_s, body = self.pieces.pop(0)
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": body, "more_body": True}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]


async def never(scope, receive, send):
    raise AssertionError("half a body was passed on")


def test_a_body_that_stays_half_is_408_and_holds_nothing(monkeypatch):
    monkeypatch.setattr(middleware, "GAP_S", 0.05)
    gate, wire = BodyLimit(never, 1000), Wire((0, b'{"mess'))
    asyncio.run(gate(POST, wire.receive, wire.send))
    assert wire.status == 408
    assert b"6 bytes of the body came" in wire.sent[1]["body"]
    assert gate._held_bytes == 0


def test_a_body_that_never_ends_is_408_though_it_never_rests(monkeypatch):
    monkeypatch.setattr(middleware, "WHOLE_S", 0.1)
    gate, wire = BodyLimit(never, 1000), Wire(*[(0.02, b" ")] * 500)
    asyncio.run(gate(POST, wire.receive, wire.send))
    assert wire.status == 408
    assert wire.pieces, "it was cut off before its end"


def cancelled(app) -> Wire:
    async def main():
        wire = Wire()
        task = asyncio.create_task(QuietEnd(app)(POST, wire.receive, wire.send))
        await asyncio.sleep(0)
        task.cancel()
        await task
        return wire

    return asyncio.run(main())


def test_who_waits_when_the_server_ends_at_once_is_told_so():
    async def app(scope, receive, send):
        await asyncio.sleep(60)

    assert cancelled(app).status == 503


def test_an_answer_that_has_begun_just_ends():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    assert [message["type"] for message in cancelled(app).sent] == ["http.response.start"]
