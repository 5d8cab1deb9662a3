"""What every route needs: the engine, the tokenizer, the model's name, how much fits.

Owns the checks that all requests pass, and the way from prompts to engine requests under way. Knows
no form of answers.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvist.engine.bad_words import spell_bad_words
from kvist.engine.grammar import GrammarSpec
from kvist.engine.grammar_compiler import check_grammar
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import KvistError, RequestError
from kvist.server.api_errors import ApiError, as_api_error
from kvist.server.fields import CommonFields
from kvist.server.inflight import (
    Client,
    ClientGoneError,
    InflightRequest,
    InflightRequests,
    check_open,
)
from kvist.server.overflow import NOTHING, Dropped, Window
from kvist.server.schema import Kvist
from kvist.server.text import TextThread

CLIENT_GONE = 499
"""nginx's status for "nobody is there to read this"."""

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None = None
    dropped: Dropped = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What every route needs.

    Attributes
    ----------
    client : Client
    tokenizer : Tokenizer
        Used on `thread` for what takes time, and on the event loop for single tokens.
    thread : TextThread
    model_name : str
        By which clients know the model.
    defaults : mapping
        Sampling options of requests that do not say.
    window : Window
    chat_template : str or None
        Instead of the model's own.
    tool_format : str or None
        Key of `kvist.server.tools.FORMATS`; ``None`` where the chat template knows no tools.
    num_pool_tokens : int or None
        Slots of the KV pool, where they are known.
    """

    client: Client
    tokenizer: Tokenizer
    thread: TextThread
    model_name: str
    defaults: Mapping[str, Any]
    window: Window
    chat_template: str | None = None
    tool_format: str | None = None
    num_pool_tokens: int | None = None

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 if a client asks for another model."""
        if name not in (None, self.model_name):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def prepare_params(self, params: SamplingParams, shape: GrammarSpec | None) -> SamplingParams:
        """Check a grammar, and spell words as tokens. Takes time: on the text thread."""
        if shape is not None:
            check_grammar(shape)
        return spell_bad_words(params, self.tokenizer)

    def check_pool(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raise `RequestError` if the continuations of one prompt cannot lie in the pool together.

        Only where a limit was asked for: without one, they take turns.
        """
        pool, most, count = self.num_pool_tokens, params.max_tokens, params.num_samples
        if pool is None or most is None or count == 1:
            return
        each = min(most, max(0, self.window.max_model_len - num_prompt_tokens))
        needed = num_prompt_tokens + count * each
        if needed > pool:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name}={count} continuations of {each} tokens and a prompt of"
                f" {num_prompt_tokens} need {needed} slots of KV, the pool has {pool}; ask for"
                " fewer or shorter ones, or raise --kv-cache-memory-bytes",
                name,
            )

    def launch(
        self,
        http: Request,
        prefix: str,
        prompts: Sequence[Prepared],
        params: SamplingParams,
        body: CommonFields,
        shape: GrammarSpec | None,
    ) -> InflightRequests:
        """Hand prompts to the engine, all or none.

        Raises
        ------
        RequestError
            If one of them can never run.
        ApiError, EngineDeadError
            If the engine takes nothing now.
        """
        name = f"{prefix}-{uuid.uuid4().hex}"
        inflight: list[InflightRequest] = []
        try:
            for number, prepared in enumerate(prompts):
                check_open(self.client)
                self.check_pool(params, len(prepared.token_ids))
                request = EngineRequest(
                    request_id=name if len(prompts) == 1 else f"{name}-{number}",
                    prompt_token_ids=tuple(prepared.token_ids),
                    params=params,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                    priority=body.priority,
                    salt=body.cache_salt or "",
                    allow_lossy=body.allow_lossy,
                    grammar=shape,
                    timeout_s=body.timeout,
                )
                stream = self.client.submit(request)
                inflight.append(InflightRequest(request, prepared.text, stream, self.tokenizer))
        except BaseException:
            for one in inflight:
                one.close()
            raise
        return InflightRequests(http, inflight)


def remarks(prompts: Sequence[Prepared], inflight: InflightRequests) -> Kvist | msgspec.UnsetType:
    """Return what is to be said of prompts that were made to fit, or read with something lost."""
    exact = False if not inflight.are_exact else msgspec.UNSET
    if any(prepared.dropped for prepared in prompts):
        return Kvist(
            sum(prepared.dropped.turns for prepared in prompts),
            sum(prepared.dropped.tokens for prepared in prompts),
            exact,
        )
    return msgspec.UNSET if exact is msgspec.UNSET else Kvist(exact=exact)


def whole(answer: msgspec.Struct) -> Response:
    """Return an answer as JSON."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def event(answer: msgspec.Struct) -> bytes:
    """Return an answer as a server-sent event."""
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"


def stream(events: AsyncGenerator[bytes, None], inflight: InflightRequests) -> StreamingResponse:
    """Return events as a stream that always ends with [DONE], and aborts what is left when it ends.

    What goes wrong after the headers is an event.
    """
    return StreamingResponse(
        _guarded(events, inflight),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _guarded(
    events: AsyncGenerator[bytes, None], inflight: InflightRequests
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events) as inner:
            async for data in inner:
                yield data
        yield _DONE
    except ClientGoneError:
        return
    except (ApiError, KvistError) as error:
        yield as_api_error(error).event()
        yield _DONE
    finally:
        inflight.close()
