"""One chat completion: a conversation in, an answer out, whole or as a stream.

Owns the way of a request between HTTP and the engine: tokenize, submit, detokenize, abort when the
client goes. Knows no routes.

Threads: the event loop, and one thread that tokenizes, one prompt at a time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import KvistError
from kvist.server.failures import ApiError, as_api_error, unavailable
from kvist.server.schema import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
    Usage,
)
from kvist.server.stream import RequestStream
from kvist.server.text import Answer

CLIENT_GONE = 499
"""nginx's status for "nobody is there to read this"."""

_DONE = b"data: [DONE]\n\n"


class Client(Protocol):
    """What serving needs of an engine; `kvist.server.bridge.EngineClient` is one."""

    @property
    def death(self) -> str | None:
        """Why nothing can be served any more."""

    @property
    def refusal(self) -> str | None:
        """Why nothing is taken just now."""

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine."""


class ChatService:
    """Answers conversations.

    Parameters
    ----------
    client : Client
    tokenizer : Tokenizer
    model_name : str
        By which clients know the model.
    defaults : mapping
        Sampling options of requests that do not say.
    """

    def __init__(
        self, client: Client, tokenizer: Tokenizer, model_name: str, defaults: Mapping[str, Any]
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._defaults = dict(defaults)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def answer(self, body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a request.

        The headers of a stream are sent with its first token: a request that fails before that gets
        a status that says so.

        Raises
        ------
        ApiError, RequestError, EngineDeadError
            See `kvist.server.failures`.
        """
        self._check_open()
        request = await self._encode(body)
        self._check_open()
        stream = self._client.submit(request)
        watcher = asyncio.create_task(_abort_when_gone(http, stream))
        turn = _Turn(body, request, stream, watcher, Answer(self._tokenizer), self._model_name)
        try:
            first = await turn.next()
        except BaseException:
            turn.close()
            raise
        if first is None:
            turn.close()
            return Response(status_code=CLIENT_GONE)
        if body.stream:
            return StreamingResponse(
                turn.events(first),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        return await turn.whole(first)

    def _check_open(self) -> None:
        if self._client.death is not None:
            raise unavailable(self._client.death, "engine_dead")
        if self._client.refusal is not None:
            raise unavailable(self._client.refusal, "overloaded")

    async def _encode(self, body: ChatCompletionRequest) -> EngineRequest:
        if body.model not in (None, self._model_name):
            raise ApiError(
                404,
                f"the model {body.model!r} does not exist; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
            )
        body.refuse_what_is_not_served()
        params = body.sampling_params(self._defaults)
        messages = [message.for_template() for message in body.messages]
        token_ids = await asyncio.get_running_loop().run_in_executor(
            self._thread,
            lambda: self._tokenizer.encode_chat(
                messages, template_kwargs=body.chat_template_kwargs
            ),
        )
        return EngineRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(token_ids),
            params=params,
            eos_token_ids=self._tokenizer.eos_token_ids,
            priority=body.priority,
            salt=body.cache_salt or "",
        )


class _Turn:
    """An answer under way, and the two forms in which it is sent."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        request: EngineRequest,
        stream: RequestStream,
        watcher: asyncio.Task[None],
        answer: Answer,
        model_name: str,
    ) -> None:
        self._body = body
        self._request = request
        self._stream = stream
        self._watcher = watcher
        self._answer = answer
        self._model_name = model_name
        self._created = int(time.time())

    async def next(self) -> Update | None:
        """Return the next news, ``None`` if the client is gone.

        Raises
        ------
        ApiError
            If the request was ended by an error or by the server.
        """
        update = await anext(self._stream)
        if update.finish_reason == "abort":
            if self._watcher.done():
                return None
            raise unavailable("the server is shutting down; ask again", "aborted")
        if update.finish_reason == "error":
            raise ApiError(500, f"the request failed: {update.error}", "server_error")
        return update

    def close(self) -> None:
        """Stop watching, and abort what has not ended."""
        self._watcher.cancel()
        self._stream.abort()

    async def whole(self, first: Update) -> Response:
        """Collect the answer and send it."""
        try:
            update: Update | None = first
            pieces = [self._answer.take(first)]
            while self._answer.finish_reason is None:
                update = await self.next()
                if update is None:
                    return Response(status_code=CLIENT_GONE)
                pieces.append(self._answer.take(update))
            assert update is not None
        finally:
            self.close()
        completion = ChatCompletion(
            id=self._request.request_id,
            object="chat.completion",
            created=self._created,
            model=self._model_name,
            choices=[
                Choice(
                    index=0,
                    message=AnswerMessage(role="assistant", content="".join(pieces)),
                    finish_reason=self._answer.finish_reason,
                    logprobs=None,
                    stop_reason=update.stop_reason,
                )
            ],
            usage=self._usage(),
        )
        return Response(completion.model_dump_json(), media_type="application/json")

    async def events(self, first: Update) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events: role, texts, finish, usage, [DONE]."""
        try:
            yield self._chunk(Delta(role="assistant", content=""))
            update: Update | None = first
            while update is not None:
                text = self._answer.take(update)
                if text:
                    yield self._chunk(Delta(content=text))
                if self._answer.finish_reason is not None:
                    break
                update = await self.next()
            else:
                return
            yield self._chunk(Delta(), self._answer.finish_reason)
            if self._wants_usage:
                yield self._event([], self._usage())
            yield _DONE
        except (ApiError, KvistError) as error:
            yield as_api_error(error).event()
            yield _DONE
        finally:
            self.close()

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and options.include_usage

    def _usage(self) -> Usage:
        prompt, completion = len(self._request.prompt_token_ids), self._answer.num_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._answer.num_cached_tokens),
        )

    def _chunk(self, delta: Delta, finish_reason: str | None = None) -> bytes:
        return self._event(
            [ChunkChoice(index=0, delta=delta, finish_reason=finish_reason, logprobs=None)], None
        )

    def _event(self, choices: list[ChunkChoice], usage: Usage | None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._request.request_id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model_name,
            choices=choices,
            # OpenAI: null on every chunk but the last, where it was asked for; else left out.
            **({"usage": usage} if self._wants_usage else {}),
        )
        return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def _abort_when_gone(http: Request, stream: RequestStream) -> None:
    """Wait until the client disconnects, then abort. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stream.abort()
