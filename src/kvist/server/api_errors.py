"""What is not 200: errors of ours, of the client and of the framework, in OpenAI's shape.

Owns the one table from error to status. Knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from kvist.errors import EngineDeadError, EngineStalledError, OverloadedError, RequestError
from kvist.server.schema import ErrorBody, ErrorResponse

RETRY_AFTER_S = 5
"""Suggested to clients that come while the server drains or is full."""


class ApiError(Exception):
    """An answer that is not 200.

    Parameters
    ----------
    status : int
        Of HTTP.
    message : str
        What happened, why, what to do.
    kind : str
        `type` in OpenAI's words.
    param, code : str or None
        As OpenAI has them.
    retry_after_s : int
        Said with status 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = ErrorResponse(
            error=ErrorBody(message=message, type=kind, param=param, code=code)
        )

    def event(self) -> bytes:
        """Return the error as an event of a stream whose headers are sent."""
        return b"data: " + self.body.model_dump_json().encode() + b"\n\n"

    def response(self, others: Mapping[str, str] | None = None) -> Response:
        """Return the error as an HTTP answer; `others` are headers of it."""
        headers = dict(others or {})
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.GATEWAY_TIMEOUT:
            # OpenAI's clients ask again after every 5xx; this is their word for no.
            headers["x-should-retry"] = "false"
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            self.body.model_dump_json(), self.status, headers, media_type="application/json"
        )


def unavailable(message: str, code: str) -> ApiError:
    """Return 503: not now."""
    return ApiError(503, message, "server_error", code=code)


def too_late(message: str) -> ApiError:
    """Return 504: the time that the request had is over."""
    return ApiError(504, message, "server_error", code="deadline_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told of an error."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case OverloadedError():
            message, retry_after_s = f"{error}; ask again later", error.retry_after_s
            return ApiError(
                503, message, "server_error", code="overloaded", retry_after_s=retry_after_s
            )
        case EngineDeadError():
            return unavailable(str(error), "engine_dead")
        case EngineStalledError():
            return unavailable(str(error), "engine_stalled")
        case _:
            return ApiError(500, "the server made an error; its log says which", "server_error")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return 400 for a body that is no such request, naming the first field that is wrong."""
    first = problems[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not JSON: {reason}, at byte {place[0] if place else 0}")
    if not place and first["type"] == "value_error":
        return ApiError(400, str(first["msg"]).removeprefix("Value error, "))
    if not place:
        return ApiError(
            400, "the body is no JSON object; send one, with Content-Type: application/json"
        )
    param = str(place[0]) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[1:]
    )
    reason = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason}", param=param)
