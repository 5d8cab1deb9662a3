"""What a request passes before anything reads it: the key, and the size of its body.

Owns the layers of ASGI around the routes. Knows no routes but those that are open to all.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvist.server.api_errors import ApiError, unavailable

OPEN_PATHS = frozenset(("/health", "/ping", "/version", "/metrics"))
"""For those who watch the server. They cost nothing and tell of no prompt."""

GAP_S = 30.0
"""Between two pieces of a body at most."""

WHOLE_S = 300.0
"""For a whole body; one of the largest size takes that long over half a megabit a second."""

BODIES_AT_ONCE = 16
"""Bodies of the largest size that are held side by side; smaller ones in proportion."""


class QuietEnd:
    """Answers 503 for what is still at work when the server ends at once.

    Its tasks are cancelled then, and the web server would print a trace of each.

    Parameters
    ----------
    app : ASGIApp
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; do not pass a cancellation back."""
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:
                refusal = unavailable("the server is shutting down", "overloaded")
                await refusal.response()(scope, receive, send)


class BearerAuth:
    """Lets nobody in without the key; before the body is read.

    Parameters
    ----------
    app : ASGIApp
    api_key : str
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                refusal = ApiError(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads bodies, up to a size, and passes them on whole.

    Parameters
    ----------
    app : ASGIApp
    max_body_bytes : int
        Of one body. All that are held at a time may have `BODIES_AT_ONCE` times as many.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._most = max_body_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 413; 408 if it does not come, 503 if there is too much of all."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = 0
        messages: deque[Message] = deque()
        try:
            told = dict(scope["headers"]).get(b"content-length", b"")
            if told.isdigit() and len(told) < 20 and int(told) > self._most:
                await self._refuse(int(told)).response()(scope, receive, send)
                return
            more = True
            clock = asyncio.get_running_loop().time
            end_s = clock() + WHOLE_S
            while more:
                wait_s = min(GAP_S, end_s - clock())
                try:
                    message = await asyncio.wait_for(receive(), wait_s)
                except TimeoutError:
                    await self._late(taken).response()(scope, receive, send)
                    return
                more = message["type"] == "http.request" and message.get("more_body", False)
                size = len(message.get("body", b""))
                taken += size
                self._held_bytes += size
                if taken > self._most:
                    await self._refuse(taken).response()(scope, receive, send)
                    return
                if self._held_bytes > self._most * BODIES_AT_ONCE:
                    await self._crowded().response()(scope, receive, send)
                    return
                messages.append(message)

            async def replay() -> Message:
                return messages.popleft() if messages else await receive()

            await self._app(scope, replay, send)
        finally:
            self._held_bytes -= taken

    def _refuse(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes or more, the server takes {self._most}; send less, or raise"
            " --max-body-bytes",
            code="body_too_large",
        )

    def _late(self, size: int) -> ApiError:
        return ApiError(
            408,
            f"{size} bytes of the body came, and no more of it in time; it may rest for"
            f" {GAP_S:g} s, and take {WHOLE_S:g} s in all",
            code="body_timeout",
        )

    def _crowded(self) -> ApiError:
        return unavailable(
            f"{self._held_bytes} bytes of requests are held, as many as the server takes",
            "overloaded",
        )
