"""One request as its reader sees it: updates between the engine's pace and the client's.

Owns what has come and is not yet read. Knows nothing of processes and sockets.

Threads: one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import Update
from kvist.errors import KvistError


class _Pending:
    """News of one continuation that nobody has read yet."""

    __slots__ = ("_logprobs", "_prompt_logprobs", "_token_ids", "_update")

    def __init__(self, update: Update) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.add(update)

    def add(self, update: Update) -> None:
        self._update = update
        self._token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *update.logprobs]
        self._prompt_logprobs = update.prompt_logprobs or self._prompt_logprobs

    def merged(self) -> Update:
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        return replace(
            self._update,
            token_ids=tuple(self._token_ids),
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


class RequestStream:
    """The updates of one request, as they come: an asynchronous iterator, to be used in a ``with``.

    A reader slower than the engine finds what it missed in one update for each continuation, so an
    unread stream holds the request's output and no more. The update that `is_last` is read last.
    Leaving the ``with`` block before the end aborts the request.

    Parameters
    ----------
    request_id : str
    on_abort : callable
        Called with the request's id, and the index of a continuation or ``None`` for all of them,
        when it is aborted from here.

    Raises
    ------
    RequestError, EngineDeadError
        From the iteration: the request was refused; the engine died.
    """

    __slots__ = ("_arrived", "_error", "_on_abort", "_over", "_pending", "request_id")

    def __init__(self, request_id: str, on_abort: Callable[[str, int | None], None]) -> None:
        self.request_id = request_id
        self._on_abort = on_abort
        self._arrived = asyncio.Event()
        # In the order in which they are to be read.
        self._pending: dict[int, _Pending] = {}
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
        pending = self._pending.pop(update.index, None)
        if pending is None:
            pending = _Pending(update)
        else:
            pending.add(update)
        self._pending[update.index] = pending
        self._over = update.is_last
        self._arrived.set()

    def fail(self, error: KvistError) -> None:
        """End the stream with an error, raised once the news before it are read."""
        if not self._over:
            self._over = True
            self._error = error
            self._arrived.set()

    def abort(self, index: int | None = None) -> None:
        """End the request, if it has not ended. Who reads the stream is told at once.

        With an `index`, only that continuation: its end comes from the engine.
        """
        if self._over:
            return
        self._on_abort(self.request_id, index)
        if index is None:
            self.push(Update(self.request_id, finish_reason="abort", is_last=True))

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Update:
        while True:
            if self._pending:
                index = next(iter(self._pending))
                return self._pending.pop(index).merged()
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
