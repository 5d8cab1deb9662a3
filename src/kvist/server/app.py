"""The HTTP face: routes, and how errors look.

Owns the FastAPI application. What happens in a completion is `kvist.server.chat`'s and
`kvist.server.completions`'s; who may come in, `kvist.server.middleware`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvist import __version__
from kvist.config import ServerConfig
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import KvistError
from kvist.server.api_errors import ApiError, as_api_error, from_validation, unavailable
from kvist.server.chat import answer_chat, render
from kvist.server.chat_schema import ChatCompletionRequest
from kvist.server.completion_schema import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from kvist.server.completions import answer_completion
from kvist.server.inflight import Client
from kvist.server.metrics import add_metric_routes
from kvist.server.middleware import BearerAuth, BodyLimit, QuietEnd
from kvist.server.overflow import Window
from kvist.server.prefetch import PrefetchRequest, answer_prefetch
from kvist.server.refusals import RefuseAlike
from kvist.server.schema import Detokenized, ErrorResponse, ModelEntry, ModelList, Tokens, Version
from kvist.server.service import Service
from kvist.server.text import TextThread
from kvist.server.tools import format_of

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "/v1/embeddings": "embeddings need a model that was trained to make them",
        "/v1/responses": "the Responses API keeps conversations; send them to /v1/chat/completions",
        "/v1/rerank": "ranking needs a model that was trained for it",
        "/v1/score": "scores need a model that was trained to make them",
        "/v1/moderations": "moderation needs a model that was trained for it",
        "/v1/images/generations": "this model writes text only",
        "/v1/audio/speech": "this model writes text only",
        "/v1/audio/transcriptions": "this model reads text only",
    }
)
"""Routes of OpenAI's API that clients try, and why they are none of ours."""


def create_app(
    client: Client,
    tokenizer: Tokenizer,
    *,
    served_model_name: str,
    model_root: str,
    max_model_len: int,
    defaults: Mapping[str, Any],
    config: ServerConfig | None = None,
    num_pool_tokens: int | None = None,
) -> FastAPI:
    """Make the application.

    Parameters
    ----------
    client : Client
        The engine.
    tokenizer : Tokenizer
    served_model_name, model_root : str
        The model's name for clients, and where it came from.
    max_model_len : int
        Tokens of prompt and answer.
    defaults : mapping
        Sampling options of requests that do not say.
    config : ServerConfig, optional
        Who may come in, how much, and how prompts and answers are read.
    num_pool_tokens : int, optional
        Slots of the KV pool.

    Raises
    ------
    ConfigError
        If the chat template cannot be read.
    """
    config = config if config is not None else ServerConfig()
    app = FastAPI(title="kvist", version=__version__, docs_url=None, redoc_url=None)
    service = make_service(
        client,
        tokenizer,
        config,
        model_name=served_model_name,
        max_model_len=max_model_len,
        defaults=defaults,
        num_pool_tokens=num_pool_tokens,
    )
    app.add_middleware(RefuseAlike, on_refusal=lambda: client.turn_away("like_refused"))
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    if config.api_key is not None:
        app.add_middleware(BearerAuth, api_key=config.api_key)
    app.add_middleware(QuietEnd)
    _add_routes_of_the_model(app, service, model_root)
    _add_routes_of_text(app, service)
    add_metric_routes(app, client, served_model_name)
    _add_errors(app)
    return app


def make_service(
    client: Client,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    model_name: str,
    max_model_len: int,
    defaults: Mapping[str, Any],
    num_pool_tokens: int | None,
) -> Service:
    """Gather what every route needs."""
    template = config.read_chat_template()
    tool_format: str | None = config.tool_call_parser
    if tool_format == "auto":
        tool_format = format_of(template if template is not None else tokenizer.chat_template)
    return Service(
        client=client,
        tokenizer=tokenizer,
        thread=TextThread(),
        model_name=model_name,
        defaults=dict(defaults),
        window=Window(max_model_len, config.context_overflow),
        chat_template=template,
        tool_format=tool_format,
        num_pool_tokens=num_pool_tokens,
    )


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in statuses}


def _add_routes_of_the_model(app: FastAPI, service: Service, model_root: str) -> None:
    entry = ModelEntry(
        id=service.model_name,
        created=int(time.time()),
        root=model_root,
        max_model_len=service.window.max_model_len,
    )

    @app.get("/health", responses=_errors(503))
    @app.get("/ping", responses=_errors(503))
    @app.post("/ping", responses=_errors(503))
    async def health() -> Response:
        if service.client.death is not None:
            raise unavailable(service.client.death, "engine_dead")
        if service.client.stalled is not None:
            raise unavailable(service.client.stalled, "engine_stalled")
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[entry])

    # A name may be a path.
    @app.get("/v1/models/{name:path}", responses=_errors(404))
    async def model(name: str) -> ModelEntry:
        service.check_model(name)
        return entry

    refused = _errors(400, 413, 503, 504)

    @app.post("/v1/kv/prefetch", response_model=None, responses={**refused, **_errors(404)})
    async def prefetch(body: PrefetchRequest, request: Request) -> Response:
        return await answer_prefetch(service, body, request)

    @app.post("/v1/chat/completions", response_model=None, responses={**refused, **_errors(404)})
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await answer_chat(service, body, request)

    @app.post("/v1/completions", response_model=None, responses={**refused, **_errors(404)})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answer_completion(service, body, request)

    def refuse(path: str, reason: str) -> None:
        @app.post(path, response_model=None, responses=refused, include_in_schema=False)
        async def refusal() -> Response:
            raise ApiError(400, f"{path} is not served: {reason}", code="not_served")

    for path, reason in _REFUSED.items():
        refuse(path, reason)


def _add_routes_of_text(app: FastAPI, service: Service) -> None:
    statuses = _errors(400, 404, 413, 503)

    @app.post("/tokenize", responses=statuses)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        service.check_model(body.model)
        tokenizer = service.tokenizer

        def work() -> Tokens:
            if body.prompt is None:
                ids = render(service, body, body.turns())
            else:
                ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
            spelled = None
            if body.return_token_strs:
                spelled = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
            return Tokens(
                count=len(ids),
                max_model_len=service.window.max_model_len,
                tokens=ids,
                token_strs=spelled,
            )

        return await service.thread.run(work)

    @app.post("/detokenize", responses=statuses)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        service.check_model(body.model)

        def work() -> Detokenized:
            for token_id in body.tokens:
                if not 0 <= token_id < service.tokenizer.vocab_size:
                    raise ApiError(
                        400,
                        f"tokens: id {token_id} is outside the vocabulary of"
                        f" {service.tokenizer.vocab_size}",
                        param="tokens",
                    )
            return Detokenized(
                prompt=service.tokenizer.decode(body.tokens, skip_special_tokens=False)
            )

        return await service.thread.run(work)


def _add_errors(app: FastAPI) -> None:
    async def on_ours(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        headers = dict(error.headers or {})
        return ApiError(error.status_code, f"{where}: {error.detail}").response(headers)

    # What nobody expected: the framework logs it, with its traceback.
    app.add_exception_handler(Exception, on_ours)
    app.add_exception_handler(KvistError, on_ours)
    app.add_exception_handler(ApiError, on_ours)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
