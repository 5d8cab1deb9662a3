"""Ask an OpenAI-compatible server for a stream, and note when each piece of the answer came.

Owns the wire: HTTP/1.1, chunks, server-sent events, TLS. A connection a request, asyncio, no
library: what the client costs is part of what it measures. Knows no workload.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvist.errors import ConfigError

_MAX_LINE_BYTES = 1 << 22
_BROKEN = "the stream broke off"


@dataclass(slots=True)
class Answer:
    """What became of one request.

    Attributes
    ----------
    due_s, sent_s, end_s : float
        When it was to be sent, was, and had ended; `time.perf_counter`.
    piece_s : list of float
        When pieces of text came: one a token with most servers.
    status : int
        Of HTTP; 0 if there was none.
    failure : str or None
        Why there is no whole answer.
    prompt_tokens, completion_tokens, cached_tokens : int or None
        As the server counts them; ``None`` if it does not.
    """

    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    status: int = 0
    failure: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer came."""
        return self.failure is None and bool(self.piece_s)

    @property
    def ttft_s(self) -> float:
        """First token, from when the request was to be sent."""
        return self.piece_s[0] - self.due_s

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self.completion_tokens or len(self.piece_s)

    @property
    def tpot_s(self) -> float | None:
        """Time for each token after the first; ``None`` if there was only one."""
        if self.num_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Time between pieces."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]


class StreamClient:
    """Requests to one server.

    Parameters
    ----------
    url : str
        ``http://host:port``, with or without ``/v1``.
    api_key : str or None

    Raises
    ------
    ConfigError
        If the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server; write http://127.0.0.1:8000")
        self.url = url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def first_model(self) -> str:
        """Return the first model that the server names.

        Raises
        ------
        ConfigError
            If it cannot be reached, or names none.
        """
        try:
            async with asyncio.timeout(10):
                status, body = await self._get("/models")
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                f"cannot reach {self.url}: {reason or type(error).__name__}; is the server there?"
            ) from error
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self.url} answered {status} to GET {self._base}/models, and names no model;"
                " is it OpenAI-compatible? Does it want --api-key? Name one by --model"
            ) from error

    async def ask(
        self, path: str, body: Mapping[str, Any], due_s: float, timeout_s: float
    ) -> Answer:
        """Send a request with ``stream`` set and read its answer to the end.

        Never raises but for a cancellation: what goes wrong stands in the answer.
        """
        answer = Answer(due_s, sent_s=time.perf_counter())
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(path, json.dumps(body).encode(), answer)
        except TimeoutError:
            answer.failure = f"no end after {timeout_s:g} s"
        except asyncio.IncompleteReadError:
            answer.failure = _BROKEN
        except (OSError, ValueError) as error:
            answer.failure = f"connection: {error}"
        answer.end_s = time.perf_counter()
        if answer.failure is None and not answer.piece_s:
            answer.failure = "an answer without text"
        return answer

    async def _ask(self, path: str, content: bytes, answer: Answer) -> None:
        reader, writer = await self._open()
        try:
            writer.write(self._head("POST", path, len(content)) + content)
            await writer.drain()
            answer.status, headers = await _read_head(reader)
            lines = _lines(_body(reader, headers))
            if answer.status != 200:
                text = " ".join([line async for line in lines])
                answer.failure = f"status {answer.status}: {_message(text)}"
                return
            is_done = False
            async for line in lines:
                if line.startswith("data:"):
                    is_done = self._take(line[5:].strip(), answer) or is_done
            if not is_done:
                answer.failure = answer.failure or _BROKEN
        finally:
            writer.close()

    @staticmethod
    def _take(data: str, answer: Answer) -> bool:
        """Read one event; say whether it ends the answer."""
        if data == "[DONE]":
            return True
        event = json.loads(data)
        if event.get("error"):
            answer.failure = f"in the stream: {_message(data)}"
            return True
        usage = event.get("usage")
        if usage:
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.completion_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
                answer.piece_s.append(time.perf_counter())
                break
        return False

    async def _get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await self._open()
        try:
            writer.write(self._head("GET", path, 0))
            status, headers = await _read_head(reader)
            return status, b"".join([part async for part in _body(reader, headers)])
        finally:
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_MAX_LINE_BYTES
        )

    def _head(self, method: str, path: str, length: int) -> bytes:
        return (
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"{self._auth}Content-Type: application/json\r\nContent-Length: {length}\r\n"
            "Accept: application/json, text/event-stream\r\nConnection: close\r\n\r\n"
        ).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = (await reader.readline()).split()
    if len(status) < 2 or not status[0].startswith(b"HTTP/"):
        raise ValueError("no HTTP")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(status[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := await _chunk_size(reader):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(line, None)
    return int(line.split(b";")[0], 16)


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", errors="replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", errors="replace")


def _message(text: str) -> str:
    """Return what a server says of an error, in short."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200]
