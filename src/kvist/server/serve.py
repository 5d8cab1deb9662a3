"""`kvist serve`: from options to a running server, and back to nothing.

Owns start-up, in the order that makes it short, and shutdown, in the order that loses no answer.
Knows neither routes nor the engine's inside.

::

    start      take the port ─▶ resolve the model ─▶ start the engine's process ──▶ ready ─▶ serve
                                                  └▶ web framework, tokenizer ──────┘
    SIGTERM    new requests get 503 ─▶ open ones finish, or are aborted in the end
               ─▶ connections close ─▶ the engine's process stops

Whoever connects while the engine loads waits for it: the port is held from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvist.config import EngineConfig, ServerConfig
from kvist.engine.bill import StartupBill
from kvist.engine.defaults import generation_defaults
from kvist.engine.weights.source import ModelSource, resolve
from kvist.errors import ConfigError, EngineDeadError
from kvist.server.bridge import EngineClient

if TYPE_CHECKING:
    import uvicorn

    from kvist.engine.messages import Ready
    from kvist.engine.tokenizer import Tokenizer

_BACKLOG = 2048
_CLOSE_S = 5
"""That connections get to take the rest of their answers, once no request is open."""
_AT_ONCE_S = 0.5
"""The same, after a second signal."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What `serve` was asked for, and what came of it."""

    name: str
    port: int
    config: ServerConfig


def serve(config: EngineConfig, options: ServerConfig | None = None) -> int:
    """Serve a model over HTTP until SIGINT or SIGTERM.

    Parameters
    ----------
    config : EngineConfig
    options : ServerConfig, optional
        Its `shutdown_timeout` begins with the first signal. A second one ends all at once.

    Returns
    -------
    int
        Exit code: 0 after the first signal, 128 + signal after a second one.

    Raises
    ------
    ConfigError
        If the port or the chat template cannot be had, before anything is loaded; or as the engine.
    ModelError, DownloadError
        If the model cannot be had.
    EngineDeadError
        After a shutdown before which the engine had died. Until the signal comes the server
        answers 503, so that whoever watches ``/health`` can see it.

    Notes
    -----
    Main thread only: it takes the signals. Wants a process of its own: see `load_tokenizer`.
    """
    options = options if options is not None else ServerConfig()
    options.read_chat_template()  # an error in it should not wait for the model
    listener = _listen(options.host, options.port)
    with listener:
        source = resolve(config.model)
        asked = _Options(
            name=config.served_model_name or config.model,
            port=listener.getsockname()[1],
            config=options,
        )
        return asyncio.run(_run(config, source, listener, asked))


async def _run(
    config: EngineConfig, source: ModelSource, listener: socket.socket, options: _Options
) -> int:
    with _Signals() as signals:
        client = EngineClient(
            dataclasses.replace(config, model=str(source.path)),
            engine_timeout_s=options.config.engine_timeout,
        )
        try:
            await client.start()
            opening = asyncio.gather(client.wait_ready(), asyncio.to_thread(_prepare_text, source))
            if not await signals.or_done(opening):
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                return 0
            ready, tokenizer = opening.result()
            server = _make_server(client, ready, tokenizer, source, options)
            _announce(ready, source, options)
            code = await _serve_until_signal(server, client, listener, signals, options)
            if client.has_failed:
                raise EngineDeadError(client.death)
            return code
        finally:
            await client.stop()


async def _serve_until_signal(
    server: uvicorn.Server,
    client: EngineClient,
    listener: socket.socket,
    signals: _Signals,
    options: _Options,
) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    if await signals.or_done(serving):
        await serving  # raises what ended it
        return 1
    console = Console(highlight=False)
    console.print(
        f"kvist: shutting down; open requests get {options.config.shutdown_timeout:g} s to finish",
        markup=False,
    )
    draining = asyncio.create_task(_drain(server, client, serving, options.config.shutdown_timeout))
    if await signals.or_done(draining):
        await draining
        return 0
    draining.cancel()
    await client.drain(0)  # who waits is told
    server.should_exit = server.force_exit = True
    await asyncio.wait({serving}, timeout=_AT_ONCE_S)
    serving.cancel()
    return 128 + signals.seen[1]


async def _drain(
    server: uvicorn.Server, client: EngineClient, serving: asyncio.Task[None], timeout_s: float
) -> None:
    await client.drain(timeout_s)
    server.should_exit = True
    await asyncio.shield(serving)


class _Signals:
    """SIGINT and SIGTERM as something to wait for."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._arrived = asyncio.Event()

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._note, signum)
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)

    def _note(self, signum: int) -> None:
        self.seen.append(signum)
        self._arrived.set()

    async def or_done(self, work: asyncio.Future[Any]) -> bool:
        """Wait for the end of `work` (True; it may have raised) or the next signal (False)."""
        self._arrived.clear()
        arrived = asyncio.create_task(self._arrived.wait())
        try:
            await asyncio.wait({work, arrived}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
        return work.done()


def _prepare_text(source: ModelSource) -> Tokenizer:
    """Import what serving needs and load the tokenizer, while the engine loads weights."""
    from kvist.server import app  # noqa: F401  (its import is the work)
    from kvist.server.text import load_tokenizer

    tokenizer = load_tokenizer(source.path)
    # What is made at first use is made now, by the only thread there is.
    tokenizer.encode("")
    return tokenizer


def _make_server(
    client: EngineClient,
    ready: Ready,
    tokenizer: Tokenizer,
    source: ModelSource,
    options: _Options,
) -> uvicorn.Server:
    import uvicorn

    from kvist.server.app import create_app

    class Server(uvicorn.Server):
        """Leaves the signals to us: its own handlers would cut off what is to be drained."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    app = create_app(
        client,
        tokenizer,
        served_model_name=options.name,
        model_root=source.name,
        max_model_len=ready.max_model_len,
        defaults=generation_defaults(source.path),
        config=options.config,
        num_pool_tokens=ready.bill.num_blocks * ready.bill.block_size,
    )
    return Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=_CLOSE_S)
    )


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything costs time."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"--host={host} is no address of this machine: {error.strerror}; use 127.0.0.1, or"
            " 0.0.0.0 for all"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: two sockets may be bound to one port as long as nobody listens.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port={port}: another process listens on {host}:{port}; stop it, or choose"
                " another port (0: any that is free)"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _announce(ready: Ready, source: ModelSource, options: _Options) -> None:
    """Print the bill, and how to try it."""
    notes = tuple(dict.fromkeys(source.notes + ready.bill.notes))
    bill: StartupBill = dataclasses.replace(
        ready.bill, model=source.name, origin=source.origin, notes=notes
    )
    host = options.config.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    body = {"model": options.name, "messages": [{"role": "user", "content": "What is a cache?"}]}
    curl = [f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'"]
    if options.config.api_key is not None:
        curl.append('-H "Authorization: Bearer $KVIST_API_KEY"')
    curl.append(f"-d '{json.dumps(body)}'")
    console = Console(highlight=False)
    lines = (
        f"kvist: {source.name} ({source.origin})",
        bill.describe(),
        f"kvist: serving {options.name} on {url}; try",
        "  " + " ".join(curl),
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
