"""Refusing in a hurry: who asks for not much less than one who was just turned away.

Owns the memory of the last refusals. Knows neither engine nor queue: it passes on what they said.

To refuse is work too: parsing, the chat template, tokenizing, a way to the engine and back. At five
times the load that can be served, four of five requests are refused, and that work is taken from
those that are served, on the same cores. So an answer of 503 `overloaded` holds for a moment: a
request that comes within `HOLDS_S` and asks for not much less gets the same answer before any of it
is done. *Not much less*: the same route, at least half as many bytes, tokens and answers, no more
time, and no better priority. Half, since in a crowd the wait decides, and not the own size; what is
found in a cache is left out of that, as it is in the engine's own reckoning. Load balancers know
the like as a circuit breaker; this one opens for what was refused and its like, so that small,
patient and important requests still come through.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOLDS_S = 0.2
"""So long a refusal stands for others. A few steps: few sequences end in that time."""

SLACK = 0.5
"""Of what was refused: who asks for less than this is asked about."""

MOST = 16
"""Refusals that are remembered."""

PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Body(msgspec.Struct):
    """What of a body says how much is asked for. Anything else is passed over unread."""

    timeout: float | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    n: _Count | None = None
    best_of: _Count | None = None
    priority: int | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _Answer(msgspec.Struct):
    error: _Error


@dataclass(frozen=True, slots=True)
class Ask:
    """How much a request asks for.

    Attributes
    ----------
    path : str
    num_bytes : int
        Of the body.
    most_tokens : float
        Of its answer; infinite where it does not say.
    num_answers : int
    patience_s : float
        That it gives; infinite where it does not say.
    priority : int
        Lower is better.
    """

    path: str
    num_bytes: int
    most_tokens: float
    num_answers: int
    patience_s: float
    priority: int

    def is_hardly_less_than(self, other: Ask) -> bool:
        """Whether who has no room for the other has hardly any for this one."""
        return (
            self.path == other.path
            and self.num_bytes >= other.num_bytes * SLACK
            and self.most_tokens >= other.most_tokens * SLACK
            and self.num_answers >= other.num_answers * SLACK
            and self.patience_s <= other.patience_s
            and self.priority >= other.priority
        )


def read_ask(path: str, body: bytes) -> Ask | None:
    """Return what a body asks for; ``None`` if that cannot be read. Microseconds a kilobyte."""
    try:
        read = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        return None
    limits = (read.max_tokens, read.max_completion_tokens)
    return Ask(
        path,
        len(body),
        min((float(limit) for limit in limits if limit is not None), default=math.inf),
        max(read.n or 1, read.best_of or 1),
        math.inf if read.timeout is None else read.timeout,
        read.priority or 0,
    )


class RefuseAlike:
    """A layer of ASGI that answers who asks for not much less than one who was just refused.

    Stands where bodies come whole, in one piece or several.

    Parameters
    ----------
    app : ASGIApp
    on_refusal : callable
        Called for each request that is refused here.
    clock : callable
        Seconds; monotonic.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_refusal: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._on_refusal = on_refusal
        self._clock = clock
        self._recent: deque[tuple[float, Ask, Response]] = deque(maxlen=MOST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on and see what is said."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        messages: list[Message] = [await receive()]
        while messages[-1].get("more_body", False):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        refusal = self._refusal(scope["path"], body)
        if refusal is not None:
            self._on_refusal()
            await refusal(scope, receive, send)
            return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, _Listener(send, lambda said: self._note(scope, body, said)))

    def _refusal(self, path: str, body: bytes) -> Response | None:
        """Return what one who asked for hardly more was told a moment ago."""
        now = self._clock()
        while self._recent and self._recent[0][0] <= now:
            self._recent.popleft()
        if not self._recent:
            return None
        ask = read_ask(path, body)
        if ask is None:
            return None
        return next(
            (said for _, other, said in self._recent if ask.is_hardly_less_than(other)), None
        )

    def _note(self, scope: Scope, body: bytes, said: Response) -> None:
        ask = read_ask(scope["path"], body)
        if ask is not None:
            self._recent.append((self._clock() + HOLDS_S, ask, said))


class _Listener:
    """Passes an answer on, and keeps it if it is a refusal for want of room."""

    def __init__(self, send: Send, on_overload: Callable[[Response], None]) -> None:
        self._send = send
        self._on_overload = on_overload
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message if message["status"] == 503 else None
        elif self._start is not None and message["type"] == "http.response.body":
            self._hear(self._start, message.get("body", b""))
            self._start = None
        await self._send(message)

    def _hear(self, start: Message, body: bytes) -> None:
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except msgspec.DecodeError:
            return
        if answer.error.code == "overloaded":
            said = Response(body, start["status"])
            said.raw_headers = list(start["headers"])
            self._on_overload(said)
