"""The HTTP face: routes, who may use them, and how errors look.

Owns the FastAPI application. What happens in a completion is `kvist.server.chat`'s.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kvist.engine.tokenizer import Tokenizer
from kvist.errors import KvistError
from kvist.server.chat import ChatService, Client
from kvist.server.failures import ApiError, as_api_error, from_validation, unavailable
from kvist.server.schema import ChatCompletionRequest, ModelEntry, ModelList

logger = logging.getLogger(__name__)


def create_app(
    client: Client,
    tokenizer: Tokenizer,
    *,
    served_model_name: str,
    model_root: str,
    max_model_len: int,
    defaults: Mapping[str, Any],
    api_key: str | None = None,
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
    api_key : str, optional
        Asked for as a bearer token below ``/v1``.
    """
    app = FastAPI(title="kvist", docs_url=None, redoc_url=None)
    service = ChatService(client, tokenizer, served_model_name, defaults)
    entry = ModelEntry(
        id=served_model_name,
        created=int(time.time()),
        root=model_root,
        max_model_len=max_model_len,
    )
    if api_key is not None:
        app.add_middleware(BearerGate, api_key=api_key)

    @app.get("/health")
    async def health() -> Response:
        if client.death is not None:
            raise unavailable(client.death, "engine_dead")
        return Response(status_code=200)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[entry])

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_ours(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        return ApiError(error.status_code, f"{where}: {error.detail}").response()

    app.add_exception_handler(KvistError, on_ours)
    app.add_exception_handler(ApiError, on_ours)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    return app


class BearerGate:
    """Lets nobody below ``/v1`` without the key; before the body is read.

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
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
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
