"""``POST /v1/kv/prefetch``: have a prompt's KV there before somebody asks.

Owns the body and its answer. A prefetch is a request for one token at the lowest priority: what
tiers have is loaded, the rest is computed, and all of it goes down as the write policy says.
"""

from __future__ import annotations

from contextlib import aclosing

from fastapi import Request, Response
from pydantic import Field, model_validator

from kvist.engine.sampling import SamplingParams
from kvist.server.chat import render
from kvist.server.chat_schema import ChatFields, Message
from kvist.server.completion_schema import Prompts
from kvist.server.fields import CommonFields
from kvist.server.inflight import ClientGoneError, check_open
from kvist.server.schema import Prefetched
from kvist.server.service import CLIENT_GONE, Prepared, Service, whole

_LAST = 2**31 - 1
"""Priority, where priorities count: whoever waits for an answer goes first."""


class PrefetchRequest(ChatFields):
    """Body of ``POST /v1/kv/prefetch``: prompts, or a conversation."""

    prompt: Prompts | None = None
    messages: list[Message] = Field(default_factory=list)
    add_special_tokens: bool = True
    cache_salt: str | None = None
    timeout: float | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PrefetchRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("send prompt or messages, one of them")
        return self


async def answer_prefetch(service: Service, body: PrefetchRequest, http: Request) -> Response:
    """Load or compute prompts; answer when they are there.

    Raises
    ------
    ApiError, RequestError, EngineDeadError
        See `kvist.server.api_errors`.
    """
    check_open(service.client)
    service.check_model(body.model)
    prepared = await service.thread.run(lambda: _prepare(service, body))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    asked = CommonFields(priority=_LAST, cache_salt=body.cache_salt, timeout=body.timeout)
    inflight = service.launch(http, "prefetch", prepared, params, asked, None)
    try:
        async with aclosing(inflight.news()) as news:
            async for _ in news:
                pass
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    finally:
        inflight.close()
    usage = inflight.usage(no_token=True)
    cached = usage.prompt_tokens_details.cached_tokens
    return whole(Prefetched(usage.prompt_tokens, cached, usage.prompt_tokens - cached))


def _prepare(service: Service, body: PrefetchRequest) -> list[Prepared]:
    if body.prompt is None:
        return [Prepared(render(service, body, body.turns()))]
    encode = service.tokenizer.encode
    return [
        Prepared(encode(prompt, body.add_special_tokens))
        if isinstance(prompt, str)
        else Prepared(list(prompt))
        for prompt in body.prompt
    ]
