"""One request as its reader sees it: updates between the engine's pace and the client's.

Owns what has come and is not yet read. Knows nothing of processes and sockets.

Threads: one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from kvist.engine.step import Update
from kvist.errors import KvistError


class RequestStream:
    """The updates of one request, as they come: an asynchronous iterator, to be used in a ``with``.

    A reader slower than the engine finds what it missed in one update, so an unread stream holds
    the request's output and no more. Leaving the ``with`` block before the end aborts the request.

    Parameters
    ----------
    request_id : str
    on_abort : callable
        Called with the request's id when it is aborted from here.

    Raises
    ------
    RequestError, EngineDeadError
        From the iteration: the request was refused; the engine died.
    """

    __slots__ = ("_arrived", "_error", "_news", "_on_abort", "_over", "_token_ids", "request_id")

    def __init__(self, request_id: str, on_abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._on_abort = on_abort
        self._arrived = asyncio.Event()
        self._token_ids: list[int] = []
        self._news: Update | None = None
        self._error: KvistError | None = None
        self._over = False

    @property
    def is_over(self) -> bool:
        """Whether the last news came; they may still be unread."""
        return self._over

    def push(self, update: Update) -> None:
        """Add news to what is not read yet. News after the end are dropped."""
        if self._over:
            return
        self._token_ids.extend(update.token_ids)
        self._news = update
        self._over = update.finish_reason is not None
        self._arrived.set()

    def fail(self, error: KvistError) -> None:
        """End the stream with an error, raised once the news before it are read."""
        if not self._over:
            self._over = True
            self._error = error
            self._arrived.set()

    def abort(self) -> None:
        """End the request, if it has not ended. Who reads the stream is told at once."""
        if not self._over:
            self._on_abort(self.request_id)
            self.push(Update(self.request_id, finish_reason="abort"))

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Update:
        while True:
            if (update := self._news) is not None:
                merged = replace(update, token_ids=tuple(self._token_ids))
                self._news = None
                self._token_ids.clear()
                return merged
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
