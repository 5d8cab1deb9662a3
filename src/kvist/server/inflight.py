"""The engine requests behind one HTTP request, under way together.

Owns the way of news from the engine to text, the abort of what nobody waits for, and the end of a
continuation at a stop string. Knows nothing of the forms in which answers are sent.

Threads: the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from starlette.requests import Request

from kvist.engine.answer import Answer
from kvist.engine.messages import Stats
from kvist.engine.outputs import CompletionOutput, Logprobs, RequestOutput
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import RequestError
from kvist.server.api_errors import ApiError, too_late, unavailable
from kvist.server.schema import PromptTokensDetails, Usage
from kvist.server.stream import RequestStream


class ClientGoneError(Exception):
    """The client hung up: nobody is there to read an answer."""


class Client(Protocol):
    """What serving needs of an engine; `kvist.server.bridge.EngineClient` is one."""

    @property
    def death(self) -> str | None:
        """Why nothing can be served any more."""

    @property
    def stalled(self) -> str | None:
        """Why nothing comes of what is served, for the time being."""

    @property
    def refusal(self) -> str | None:
        """Why nothing is taken just now."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Requests that the engine never heard of, by why."""

    def turn_away(self, reason: str) -> None:
        """Note that a request was not submitted."""

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine."""

    async def stats(self) -> Stats:
        """Ask how the engine stands."""


def check_open(client: Client) -> None:
    """Raise `ApiError` 503 if the engine takes nothing."""
    if client.death is not None:
        raise unavailable(client.death, "engine_dead")
    if client.stalled is not None:
        raise unavailable(client.stalled, "engine_stalled")
    if client.refusal is not None:
        client.turn_away("open_reqs")
        raise unavailable(client.refusal, "overloaded")


class InflightRequest:
    """One engine request and the text of its continuations.

    Parameters
    ----------
    request : EngineRequest
    prompt : str or None
        The text of it, where it is known.
    stream : RequestStream
    tokenizer : Tokenizer

    Attributes
    ----------
    output : RequestOutput
        What has come so far.
    """

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        stream: RequestStream,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.output = RequestOutput(
            request.request_id, prompt, list(request.prompt_token_ids), outputs=[]
        )
        self._stream = stream
        self._answer = Answer(self.output, request.params, tokenizer)
        self._is_ranked = request.params.num_samples > request.params.n

    @property
    def is_done(self) -> bool:
        """Whether all continuations have ended; the best of several show with the last news."""
        if self._is_ranked:
            return self.output.finished
        return all(output.finish_reason is not None for output in self.output.outputs)

    async def advance(self, is_gone: asyncio.Event) -> int:
        """Wait for news and take them; return which continuation they are of.

        Raises
        ------
        ClientGoneError
            If the end came because the client went.
        ApiError
            If the request was ended by an error, or by the server.
        RequestError, EngineDeadError
            As `RequestStream`.
        """
        update = await anext(self._stream)
        if update.finish_reason == "error":
            raise self._failure(update)
        ended = self.output.outputs[update.index].finish_reason
        if update.finish_reason == "abort" and ended is None:
            if is_gone.is_set():
                raise ClientGoneError
            if update.fault == "deadline":
                raise too_late(f"the request was not done in time; {update.error}")
            raise unavailable("the server is shutting down; ask again", "aborted")
        if self._answer.take(update):
            self._stream.abort(update.index)
        return update.index

    def _failure(self, update: Update) -> Exception:
        if update.fault != "request":
            return ApiError(500, f"the request failed: {update.error}", "server_error")
        grammar = self.request.grammar
        return RequestError(str(update.error), grammar.param if grammar is not None else None)

    def close(self) -> None:
        """Abort what has not ended."""
        self._stream.abort()


class InflightRequests:
    """Several of them, and the connection that waits for them.

    Parameters
    ----------
    http : Request
        Its body must have been read.
    inflight : sequence of InflightRequest
        At least one.
    """

    def __init__(self, http: Request, inflight: Sequence[InflightRequest]) -> None:
        self.each = tuple(inflight)
        self._is_gone = asyncio.Event()
        self._watcher = asyncio.create_task(self._abort_when_gone(http))

    async def news(self) -> AsyncGenerator[tuple[int, int], None]:
        """Yield (request, continuation) for whatever has grown, until all have ended.

        Raises
        ------
        ClientGoneError, ApiError, RequestError, EngineDeadError
            As `InflightRequest.advance`.
        """
        if len(self.each) == 1:
            (one,) = self.each
            while not one.is_done:
                yield 0, await one.advance(self._is_gone)
            return
        waiting = {self._advance(number): number for number in range(len(self.each))}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number = waiting.pop(task)
                    index = task.result()
                    if not self.each[number].is_done:
                        waiting[self._advance(number)] = number
                    yield number, index
        finally:
            for task in waiting:
                task.cancel()
            # Their errors are looked at: the first one was told.
            await asyncio.gather(*waiting, return_exceptions=True)

    def _advance(self, number: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.each[number].advance(self._is_gone))

    def close(self) -> None:
        """Stop watching, and abort what has not ended."""
        self._watcher.cancel()
        for one in self.each:
            one.close()

    @property
    def are_exact(self) -> bool:
        """Whether nothing was read so far that a lossy codec brought back."""
        return all(one.output.exact for one in self.each)

    def usage(self, *, no_token: bool = False) -> Usage:
        """Return what was computed so far; `no_token` leaves out what was not asked for."""
        prompt = sum(len(one.output.prompt_token_ids) for one in self.each)
        generated = sum(len(o.token_ids) for one in self.each for o in one.output.outputs)
        completion = 0 if no_token else generated
        cached = sum(one.output.num_cached_tokens for one in self.each)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    async def _abort_when_gone(self, http: Request) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._is_gone.set()
        for one in self.each:
            one.close()


class Tail:
    """What of a continuation was not sent yet.

    Parameters
    ----------
    output : CompletionOutput
        As it grows.

    Attributes
    ----------
    is_over : bool
        Whether its end was sent; set by who sends it.
    """

    __slots__ = ("_num_letters", "_num_logprobs", "is_over", "output")

    def __init__(self, output: CompletionOutput) -> None:
        self.output = output
        self.is_over = False
        self._num_letters = 0
        self._num_logprobs = 0

    def text(self) -> str:
        """Return the new text."""
        text = self.output.text[self._num_letters :]
        self._num_letters += len(text)
        return text

    def logprobs(self) -> tuple[list[int], list[Logprobs]] | None:
        """Return the new tokens and their log probabilities, where these were asked for."""
        if self.output.logprobs is None:
            return None
        first, self._num_logprobs = self._num_logprobs, len(self.output.logprobs)
        return self.output.token_ids[first : self._num_logprobs], self.output.logprobs[first:]

    @property
    def num_letters(self) -> int:
        """Letters that were taken."""
        return self._num_letters
