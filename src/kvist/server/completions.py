"""Completions: prompts in, continuations out, whole or as a stream.

Owns the form of a completion's answers, with the prompt before them where it is echoed. Knows no
routes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvist.engine.grammar import GrammarSpec
from kvist.engine.sampling import SamplingParams
from kvist.server.completion_schema import CompletionRequest, Prompt
from kvist.server.inflight import (
    ClientGoneError,
    InflightRequest,
    InflightRequests,
    Tail,
    check_open,
)
from kvist.server.logprobs import completion_logprobs, prompt_logprobs
from kvist.server.overflow import NOTHING, keep_last
from kvist.server.response_format import asked_shape
from kvist.server.schema import Completion, CompletionChoice, CompletionLogprobs, Kvist, Usage
from kvist.server.service import CLIENT_GONE, Prepared, Service, event, remarks, stream, whole


async def answer_completion(service: Service, body: CompletionRequest, http: Request) -> Response:
    """Continue one prompt, or several side by side.

    Raises
    ------
    ApiError, RequestError, EngineDeadError
        See `kvist.server.api_errors`.
    """
    check_open(service.client)
    service.check_model(body.model)
    body.refuse_what_is_not_served()
    shape = asked_shape(body)
    params = body.sampling_params(service.defaults)
    prepared, params = await service.thread.run(lambda: _prepare(service, body, params, shape))
    check_open(service.client)
    inflight = service.launch(http, "cmpl", prepared, params, body, shape)
    try:
        run = _Run(service, body, inflight, prepared)
        await run.begin()
        if body.stream:
            return stream(run.events(), inflight)
        return whole(await run.completion())
    except ClientGoneError:
        inflight.close()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        inflight.close()
        raise


def _prepare(
    service: Service, body: CompletionRequest, params: SamplingParams, shape: GrammarSpec | None
) -> tuple[list[Prepared], SamplingParams]:
    params = service.prepare_params(params, shape)
    return [
        _prepare_one(service, body, prompt, params.max_tokens) for prompt in body.prompt
    ], params


def _prepare_one(
    service: Service, body: CompletionRequest, prompt: Prompt, max_tokens: int | None
) -> Prepared:
    tokenizer, bos = service.tokenizer, service.tokenizer.bos_token_id
    text: str | None
    if isinstance(prompt, str):
        text, token_ids = prompt, tokenizer.encode(prompt, body.add_special_tokens)
    else:
        text, token_ids = None, list(prompt)
    num_given, dropped = len(token_ids), NOTHING
    if (keep := body.truncate_prompt_tokens) is not None:
        fits = service.window.max_model_len - 1
        token_ids = keep_last(token_ids, fits if keep == -1 else keep, bos)
    if service.window.overflow != "error":
        # There are no turns to drop in plain text.
        token_ids, dropped = service.window.truncate(token_ids, max_tokens, bos)
    if body.echo and (text is None or len(token_ids) < num_given):
        text = tokenizer.decode(token_ids)
    return Prepared(token_ids, text, dropped)


class _Run:
    """The continuations of all prompts, and the two forms in which they are sent."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        inflight: InflightRequests,
        prepared: Sequence[Prepared],
    ) -> None:
        self._service = service
        self._body = body
        self._inflight = inflight
        self._news = inflight.news()
        self._id = inflight.each[0].output.request_id.removesuffix("-0")
        self._prepared = prepared
        self._created = int(time.time())

    async def begin(self) -> None:
        """Wait for the first news."""
        await anext(self._news)

    async def completion(self) -> Completion:
        """Wait for the end; return the continuations."""
        async with aclosing(self._news) as news:
            async for _ in news:
                pass
        self._inflight.close()
        choices = [
            self._choice(number, one, Tail(output), is_first=True)
            for number, one in enumerate(self._inflight.each)
            for output in one.output.outputs
        ]
        return self._completion(choices, self._usage(), remarks(self._prepared, self._inflight))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the continuations as events: what grows, with its end, then usage."""
        tails = [[Tail(o) for o in one.output.outputs] for one in self._inflight.each]
        begun: set[tuple[int, int]] = set()
        kvist = remarks(self._prepared, self._inflight)

        def grown(number: int, index: int) -> bytes | None:
            nonlocal kvist
            tail = tails[number][index]
            if tail.is_over:
                return None
            is_first = (number, index) not in begun
            choice = self._choice(number, self._inflight.each[number], tail, is_first=is_first)
            has_logprobs = choice.logprobs is not None and bool(choice.logprobs.tokens)
            if not choice.text and not has_logprobs and choice.finish_reason is None:
                return None
            begun.add((number, index))
            tail.is_over = choice.finish_reason is not None
            usage = None if self._body.wants_usage else UNSET
            told, kvist = kvist, UNSET
            if tail.is_over and not self._inflight.are_exact:
                told = remarks(self._prepared, self._inflight)  # it may have become so
            return event(
                self._completion(
                    [choice], self._usage() if self._body.wants_usage_always else usage, told
                )
            )

        everything = [(n, i) for n, each in enumerate(tails) for i in range(len(each))]
        for number, index in everything:
            if (data := grown(number, index)) is not None:
                yield data
        async with aclosing(self._news) as news:
            async for number, index in news:
                if (data := grown(number, index)) is not None:
                    yield data
        for number, index in everything:
            if (data := grown(number, index)) is not None:
                yield data
        if self._body.wants_usage:
            yield event(self._completion([], self._usage(), UNSET))

    # ------------------------------------------------------------------ inside

    def _usage(self) -> Usage:
        return self._inflight.usage(no_token=self._body.wants_no_token)

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        kvist: Kvist | UnsetType,
    ) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._service.model_name,
            choices=choices,
            usage=usage,
            kvist=kvist,
        )

    def _choice(
        self, number: int, one: InflightRequest, tail: Tail, *, is_first: bool
    ) -> CompletionChoice:
        """Return what is new of a continuation; the first time with what stands before it."""
        output, before = tail.output, tail.num_letters
        text = tail.text()
        if self._body.wants_no_token:
            text = ""
        echoed = (one.output.prompt or "") if self._body.echo else ""
        choice = CompletionChoice(
            index=number * len(one.output.outputs) + output.index,
            text=echoed + text if is_first else text,
            logprobs=self._logprobs(one, tail, len(echoed) + before, is_first=is_first),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        found = one.output.prompt_logprobs
        if is_first and self._body.prompt_logprobs is not None and found is not None:
            choice.prompt_logprobs = prompt_logprobs(found)
        return choice

    def _logprobs(
        self, one: InflightRequest, tail: Tail, offset: int, *, is_first: bool
    ) -> CompletionLogprobs | None:
        new = tail.logprobs()
        if new is None:
            return None
        token_ids, found = new
        if self._body.wants_no_token:
            token_ids, found = [], []
        num_top, tokenizer = self._body.logprobs or 0, self._service.tokenizer
        answer = completion_logprobs(token_ids, found, num_top, offset, tokenizer)
        if not (is_first and self._body.echo and one.output.prompt_logprobs):
            return answer
        prompt_ids, of_prompt = one.output.prompt_token_ids, one.output.prompt_logprobs
        echo = completion_logprobs(prompt_ids, of_prompt, num_top, 0, tokenizer)
        return CompletionLogprobs(
            echo.text_offset + answer.text_offset,
            echo.token_logprobs + answer.token_logprobs,
            echo.tokens + answer.tokens,
            echo.top_logprobs + answer.top_logprobs,
        )
