"""Chats: a conversation in, answers out, whole or as a stream.

Owns the form of a chat's answers, and the tool calls in them. Knows no routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvist.engine.grammar import GrammarSpec
from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError
from kvist.server.api_errors import ApiError
from kvist.server.chat_schema import ChatCompletionRequest, ChatFields, NamedChoice
from kvist.server.inflight import ClientGoneError, InflightRequests, Tail, check_open
from kvist.server.logprobs import chat_logprobs, prompt_logprobs
from kvist.server.overflow import NOTHING, Turn, keep_last
from kvist.server.response_format import asked_shape, forced_call
from kvist.server.schema import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    Delta,
    FunctionCall,
    Kvist,
    ToolCall,
)
from kvist.server.service import CLIENT_GONE, Prepared, Service, event, remarks, stream, whole
from kvist.server.tools import (
    FORMATS,
    REQUIRED,
    CallDelta,
    NamedCallParser,
    Piece,
    ToolParser,
)

Parser = ToolParser | NamedCallParser


async def answer_chat(service: Service, body: ChatCompletionRequest, http: Request) -> Response:
    """Answer a conversation.

    The headers of a stream are sent with its first token: a request that fails before that gets a
    status that says so.

    Raises
    ------
    ApiError, RequestError, EngineDeadError
        See `kvist.server.api_errors`.
    """
    try:
        check_open(service.client)
        service.check_model(body.model)
        body.refuse_what_is_not_served()
        body.check_tools()
        make_parser = _parsers(service, body)
        shape = _shape(body)
        params = _params(service, body)
        prepared, params = await service.thread.run(lambda: _prepare(service, body, params, shape))
        check_open(service.client)
        inflight = service.launch(http, "chatcmpl", [prepared], params, body, shape)
        return await _answer(_Turn(service, body, inflight, prepared, make_parser))
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except RequestError as error:
        # The engine speaks of a prompt; the client sent messages.
        param = "messages" if error.param == "prompt" else error.param
        raise ApiError(400, str(error), param=param) from error


async def _answer(turn: _Turn) -> Response:
    try:
        await turn.begin()
        if turn.body.stream:
            return stream(turn.events(), turn.inflight)
        return whole(await turn.completion())
    except BaseException:
        turn.inflight.close()
        raise


def render(service: Service, body: ChatFields, turns: list[Turn]) -> list[int]:
    """Return the ids of a conversation. Takes time: on the text thread."""
    return service.tokenizer.encode_chat(
        turns,
        tools=body.described_tools(),
        add_generation_prompt=body.opens_turn,
        chat_template=service.chat_template,
        template_kwargs=body.template_variables(),
    )


def _shape(body: ChatCompletionRequest) -> GrammarSpec | None:
    asked, forced = asked_shape(body), forced_call(body)
    if asked is not None and forced is not None:
        raise RequestError(
            "tool_choice demands a call, and another option another shape; send one of them",
            "tool_choice",
        )
    return asked or forced


def _params(service: Service, body: ChatCompletionRequest) -> SamplingParams:
    params = body.sampling_params(service.defaults)
    form = FORMATS.get(service.tool_format or "")
    if body.tools and body.tool_choice in (None, "auto") and form is not None and form.special:
        # The marks of a call are special tokens; left out, a call would look like text.
        body.skip_special_tokens = False
        params = body.sampling_params(service.defaults)
    return params


def _prepare(
    service: Service, body: ChatCompletionRequest, params: SamplingParams, shape: GrammarSpec | None
) -> tuple[Prepared, SamplingParams]:
    params = service.prepare_params(params, shape)
    turns, dropped, most = body.turns(), NOTHING, params.max_tokens
    if service.window.overflow == "drop-oldest-turns":
        token_ids, dropped = service.window.drop_turns(
            turns, lambda kept: render(service, body, list(kept)), most
        )
    else:
        token_ids = render(service, body, turns)
    if (keep := body.truncate_prompt_tokens) is not None:
        fits = service.window.max_model_len - 1
        token_ids = keep_last(
            token_ids, fits if keep == -1 else keep, service.tokenizer.bos_token_id
        )
    if service.window.overflow == "truncate":
        token_ids, dropped = service.window.truncate(
            token_ids, most, service.tokenizer.bos_token_id
        )
    return Prepared(token_ids, dropped=dropped), params


def _parsers(service: Service, body: ChatCompletionRequest) -> Callable[[], Parser] | None:
    """Return what makes the parser of each answer; ``None`` where an answer is text.

    Raises
    ------
    RequestError
        If the model would never hear of the tools.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedChoice):
        name = body.tool_choice.function.name
        return lambda: NamedCallParser(name)
    names = frozenset(tool.function.name for tool in body.tools)
    if body.tool_choice == "required":
        form = REQUIRED
    elif service.tool_format is None:
        raise RequestError(
            "tools: the chat template of this model has no place for them, so it would not hear of"
            " them; serve a model that was trained with tools, name a --chat-template and"
            ' --tool-call-parser, or send tool_choice="required", which needs no training',
            "tools",
        )
    else:
        form = FORMATS[service.tool_format]
    return lambda: ToolParser(form, names, several=body.parallel_tool_calls)


class _Voice:
    """One of the answers: text and calls as they are sent."""

    def __init__(self, tail: Tail, parser: Parser | None, *, is_named: bool) -> None:
        self.tail = tail
        self._parser = parser
        self._is_named = is_named

    def pieces(self) -> list[Piece]:
        """Return what is new."""
        text = self.tail.text()
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.push(text)
        if self.tail.output.finish_reason is not None:
            pieces += self._parser.flush()
        return pieces

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's: an answer that ends with calls says so, unless the call was named."""
        reason = self.tail.output.finish_reason
        called = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if called and reason == "stop" and not self._is_named else reason


class _Turn:
    """The answers to one conversation, and the two forms in which they are sent."""

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        inflight: InflightRequests,
        prepared: Prepared,
        make_parser: Callable[[], Parser] | None,
    ) -> None:
        self.body = body
        self.inflight = inflight
        self._service = service
        self._news = inflight.news()
        self._output = inflight.each[0].output
        self._make_parser = make_parser
        self._prepared = prepared
        self._created = int(time.time())

    async def begin(self) -> None:
        """Wait for the first news."""
        await anext(self._news)

    async def completion(self) -> ChatCompletion:
        """Wait for the end; return the answers."""
        async with aclosing(self._news) as news:
            async for _ in news:
                pass
        self.inflight.close()
        found = self._output.prompt_logprobs
        return ChatCompletion(
            id=self._output.request_id,
            created=self._created,
            model=self._service.model_name,
            choices=[self._choice(voice) for voice in self._voices()],
            usage=self.inflight.usage(),
            prompt_logprobs=UNSET if found is None else prompt_logprobs(found),
            kvist=remarks([self._prepared], self.inflight),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answers as events: roles, what grows, ends, usage."""
        voices = self._voices()
        kvist = remarks([self._prepared], self.inflight)
        for voice in voices:
            yield self._chunk(voice, Delta(role="assistant", content=""), kvist=kvist)
            kvist = UNSET
        for voice in voices:
            for data in self._grown(voice):
                yield data
        async with aclosing(self._news) as news:
            async for _, index in news:
                for data in self._grown(voices[index]):
                    yield data
        for voice in voices:
            for data in self._grown(voice):
                yield data
        if self.body.wants_usage:
            yield event(
                ChatCompletionChunk(
                    id=self._output.request_id,
                    created=self._created,
                    model=self._service.model_name,
                    choices=[],
                    usage=self.inflight.usage(),
                )
            )

    # ------------------------------------------------------------------ inside

    def _voices(self) -> list[_Voice]:
        make, is_named = self._make_parser, isinstance(self.body.tool_choice, NamedChoice)
        return [
            _Voice(Tail(output), None if make is None else make(), is_named=is_named)
            for output in self._output.outputs
        ]

    def _choice(self, voice: _Voice) -> Choice:
        texts: list[str] = []
        calls: list[ToolCall] = []
        for piece in voice.pieces():
            if isinstance(piece, str):
                texts.append(piece)
            elif piece.name is not None:
                function = FunctionCall(piece.name, piece.arguments)
                calls.append(ToolCall(function, id=piece.id, type="function"))
            else:
                function = calls[piece.index].function
                function.arguments = (function.arguments or "") + piece.arguments
        content = "".join(texts)
        output = voice.tail.output
        return Choice(
            index=output.index,
            message=AnswerMessage(
                "assistant", content if content or not calls else None, None, calls or UNSET
            ),
            finish_reason=voice.finish_reason,
            logprobs=self._logprobs(voice.tail),
            stop_reason=output.stop_reason,
        )

    def _grown(self, voice: _Voice) -> list[bytes]:
        """Return the events of what is new of an answer."""
        if voice.tail.is_over:
            return []
        pieces = voice.pieces()
        logprobs = self._logprobs(voice.tail)
        if logprobs is not None and not logprobs.content:
            logprobs = None
        if logprobs is not None and not pieces:
            # Tokens whose text is held back still have been chosen.
            pieces = [""]
        events = []
        for piece in pieces:
            events.append(self._chunk(voice, _delta(piece), logprobs))
            logprobs = None
        if voice.tail.output.finish_reason is not None:
            voice.tail.is_over = True
            # Said again at the end, if it is so: it may have become so on the way.
            exact = self.inflight.are_exact
            told = UNSET if exact else remarks([self._prepared], self.inflight)
            events.append(self._chunk(voice, Delta(), is_end=True, kvist=told))
        return events

    def _logprobs(self, tail: Tail) -> ChatLogprobs | None:
        new = tail.logprobs()
        if new is None:
            return None
        return chat_logprobs(*new, self.body.top_logprobs or 0, self._service.tokenizer)

    def _chunk(
        self,
        voice: _Voice,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        *,
        is_end: bool = False,
        kvist: Kvist | UnsetType = UNSET,
    ) -> bytes:
        output = voice.tail.output
        choice = ChunkChoice(
            output.index,
            delta,
            logprobs,
            voice.finish_reason if is_end else None,
            output.stop_reason if is_end else UNSET,
        )
        # OpenAI: null on every event but the last, where it was asked for; else left out.
        usage = None if self.body.wants_usage else UNSET
        return event(
            ChatCompletionChunk(
                id=self._output.request_id,
                created=self._created,
                model=self._service.model_name,
                choices=[choice],
                usage=self.inflight.usage() if self.body.wants_usage_always else usage,
                kvist=kvist,
            )
        )


def _delta(piece: Piece) -> Delta:
    match piece:
        case str():
            return Delta(content=piece)
        case CallDelta(index, arguments, call_id, name):
            kind = None if name is None else "function"
            call = ToolCall(FunctionCall(name, arguments), index, call_id, kind)
            return Delta(tool_calls=[call])
