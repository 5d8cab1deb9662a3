"""The server's side of the engine's process: starts it, talks to it, outlives it.

Owns the process, the two sockets and the requests that are open on them. Knows ids only; text is
`kvist.server.chat`'s. When the process dies, everyone who waits gets `EngineDeadError`, and so does
who comes later.

Threads: everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvist import errors
from kvist.config import EngineConfig
from kvist.engine.messages import (
    HIGH_WATER,
    PROTOCOL,
    Abort,
    Add,
    AskStats,
    Codec,
    Command,
    Failed,
    Launch,
    News,
    Ready,
    Refused,
    Stats,
    Stop,
    Stopped,
    Updates,
)
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.errors import (
    ConfigError,
    EngineDeadError,
    KvistError,
    OverloadedError,
    RequestError,
)
from kvist.server.stream import RequestStream

MAX_OPEN_REQUESTS = 4096
"""Each costs a prompt here and two messages in the socket at most: so the socket needs no limit."""

STOP_S = 5.0
"""That the engine gets to end its step before it is killed."""

LAST_WORDS_MS = 100
"""That a message of a dead process gets to arrive."""

_MAX_FOLDER_BYTES = 90
"""A Unix socket's path has room for 107 bytes; ours add at most 9."""

logger = logging.getLogger(__name__)


class EngineClient:
    """An engine in a process of its own.

    Parameters
    ----------
    config : EngineConfig
        Of the engine; `config.model` as the process should resolve it.
    command : sequence of str, optional
        What to run instead of the engine's process; it reads a `Launch` on stdin as that does.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] | None = None) -> None:
        self._config = config
        # -P: nothing in the working directory may pass for one of our imports.
        self._command = command or (sys.executable, "-P", "-m", "kvist.engine.worker")
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        self._folder = _private_folder()
        self._commands = self._bind(zmq.PUSH, "commands")
        self._news = self._bind(zmq.PULL, "news")
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Ready] | None = None
        self._ready: Ready | None = None
        self._death: str | None = None
        self._open: dict[str, RequestStream] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._asked: deque[asyncio.Future[Stats]] = deque()
        self._draining = False
        self._stopping = False

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        # What we say is bounded by MAX_OPEN_REQUESTS, so it never waits; what we hear is not.
        socket.set_hwm(0 if kind == zmq.PUSH else HIGH_WATER)
        socket.bind(self._endpoint(name))
        return socket

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the process. It is not ready yet: see `wait_ready`."""
        launch = Launch(
            protocol=PROTOCOL,
            config=self._config,
            commands=self._endpoint("commands"),
            news=self._endpoint("news"),
            parent_pid=os.getpid(),
        )
        self._opened = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE
        )
        self._reader = asyncio.create_task(self._read(self._process))
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(launch))
        with contextlib.suppress(ConnectionError):  # it died at once: the reader sees that
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def wait_ready(self) -> Ready:
        """Wait until the engine is open.

        Raises
        ------
        KvistError
            What the engine's process raised; `EngineDeadError` if it ended without a word.
        """
        assert self._opened is not None, "start() comes first"
        return await asyncio.shield(self._opened)

    async def drain(self, timeout_s: float) -> int:
        """Take no more requests and wait for those that are open, so long; then abort them.

        Returns
        -------
        int
            How many had to be aborted.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._none_open.wait(), timeout_s)
        left = [stream for stream in self._open.values() if not stream.is_over]
        for stream in left:
            stream.abort()
        return len(left)

    async def stop(self) -> None:
        """End the process and free all. Streams still open end with `EngineDeadError`."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            if self._ready is None:
                process.kill()  # it listens to nothing while it loads
            else:
                self._say(Stop())
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        try:
            if self._reader is not None:
                await self._reader
        finally:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ requests

    @property
    def death(self) -> str | None:
        """Why nothing can be served any more; ``None`` while the engine lives."""
        return self._death

    @property
    def has_failed(self) -> bool:
        """Whether the engine died by itself: not stopped from here, nor by a SIGTERM of its own."""
        process = self._process
        return self._death is not None and process is not None and process.returncode != 0

    @property
    def refusal(self) -> str | None:
        """Why no request is taken just now: draining, or full. ``None``: one may be submitted."""
        if self._draining:
            return "the server is shutting down"
        if len(self._open) >= MAX_OPEN_REQUESTS:
            return f"{len(self._open)} requests are open, as many as the server takes"
        return None

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine; its updates come from the stream.

        REQUIRES `refusal` is ``None``.

        Raises
        ------
        RequestError
            If it can never run, as far as can be told from here.
        EngineDeadError
            If the engine is dead.
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        assert self._ready is not None, "wait_ready() comes first"
        assert self.refusal is None, "look at `refusal` first"
        request.check(self._ready.max_model_len)
        if request.arrived_s is None:
            # The engine may hear of it a whole step later.
            request = replace(request, arrived_s=time.monotonic())
        self._say(Add(request))
        stream = RequestStream(
            request.request_id, lambda name, index: self._say(Abort(name, index))
        )
        self._open[request.request_id] = stream
        self._none_open.clear()
        return stream

    async def stats(self) -> Stats:
        """Ask the engine how full it is. It answers between two steps."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._say(AskStats())
        return await answer

    # ------------------------------------------------------------------ inside

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def _say(self, command: Command) -> None:
        """Send, without waiting: there is no limit on this socket. To the dead, nothing."""
        if self._death is None:
            self._commands.send(self._codec.encode(command))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Deal out the engine's news until the process ends, and then tell everybody."""
        exited = asyncio.create_task(process.wait())
        try:
            while not exited.done():
                arriving = asyncio.ensure_future(self._news.recv())
                await asyncio.wait({arriving, exited}, return_when=asyncio.FIRST_COMPLETED)
                if arriving.done():
                    self._take(self._codec.decode_news(arriving.result()))
                else:
                    arriving.cancel()
            while await self._news.poll(LAST_WORDS_MS):
                self._take(self._codec.decode_news(await self._news.recv()))
        finally:
            if process.returncode is None:
                process.kill()  # it says what we do not understand
            self._bury(process.returncode)

    def _take(self, news: News) -> None:
        match news:
            case Ready():
                self._ready = news
                self._settle(news)
            case Failed(kind, message):
                error = _revive(kind, message)
                self._death = str(error)
                self._settle(error)
            case Updates(updates):
                for update in updates:
                    self._deal(update)
            case Refused(request_id, message, param, None):
                self._close(request_id).fail(RequestError(message, param))
            case Refused(request_id, message, _, int(retry_after_s)):
                self._close(request_id).fail(OverloadedError(message, retry_after_s))
            case Stats():
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(news)
            case Stopped():
                self._death = "the engine was stopped"

    def _deal(self, update: Update) -> None:
        if update.is_last:
            self._close(update.request_id).push(update)
        else:
            self._open[update.request_id].push(update)

    def _close(self, request_id: str) -> RequestStream:
        stream = self._open.pop(request_id)
        if not self._open:
            self._none_open.set()
        return stream

    def _bury(self, returncode: int | None) -> None:
        """Tell everybody who waits, or will, that the engine is dead."""
        if self._death is None:
            self._death = _obituary(returncode)
        if not self._stopping:
            logger.error("%s", self._death)
        for request_id in list(self._open):
            self._close(request_id).fail(EngineDeadError(self._death))
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(EngineDeadError(self._death))
        self._settle(EngineDeadError(self._death))

    def _settle(self, outcome: Ready | KvistError) -> None:
        """Let `wait_ready` return, once."""
        assert self._opened is not None
        if self._opened.done():
            return
        if isinstance(outcome, Ready):
            self._opened.set_result(outcome)
        else:
            self._opened.set_exception(outcome)
            self._opened.exception()  # looked at: nobody may be waiting


def _private_folder() -> Path:
    """Make a folder for the sockets in which only this user may connect (mkdtemp: 0700)."""
    folder = Path(tempfile.mkdtemp(prefix="kvist-"))
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        folder.rmdir()
        raise ConfigError(
            f"the temporary folder {folder.parent} has too long a name for a socket in it; set"
            " TMPDIR to a shorter one"
        )
    return folder


def _revive(kind: str, message: str) -> KvistError:
    """Return the error that the engine's process told of: ours by its own class."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, KvistError):
        return known(message)
    return EngineDeadError(f"the engine broke: {kind}: {message}")


def _obituary(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
        return f"the engine's process was ended by {name}{hint}; start the server again"
    return (
        f"the engine's process ended with exit code {returncode}; its last words are in the log"
        " above. Start the server again"
    )
