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
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from kvist.config import EngineConfig
from kvist.engine.messages import (
    HIGH_WATER,
    PROTOCOL,
    Abort,
    Add,
    Alive,
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
    EngineDeadError,
    EngineStalledError,
    KvistError,
    OverloadedError,
    RequestError,
)
from kvist.server.last_words import obituary, revive
from kvist.server.sockets import SocketFolder
from kvist.server.stream import RequestStream

MAX_OPEN_REQUESTS = 4096
"""Each costs a prompt here and two messages in the socket at most: so the socket needs no limit."""

STOP_S = 5.0
"""That the engine gets to end its step before it is killed."""

STATS_S = 10.0
"""That the engine gets to answer a question: a step or two, where they are long."""

GLANCE_S = 0.5
"""Between two looks at whether the engine still speaks."""

LAST_WORDS_MS = 100
"""That a message of a dead process gets to arrive."""

logger = logging.getLogger(__name__)


class EngineClient:
    """An engine in a process of its own.

    Parameters
    ----------
    config : EngineConfig
        Of the engine; `config.model` as the process should resolve it.
    command : sequence of str, optional
        What to run instead of the engine's process; it reads a `Launch` on stdin as that does.
    engine_timeout_s : float
        So long may the engine be silent, in one step; then it hangs, until it speaks again.
    """

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str] | None = None,
        *,
        engine_timeout_s: float = 120.0,
    ) -> None:
        self._config = config
        self._timeout_s = engine_timeout_s
        # Counted while somebody watches: a machine that slept makes no engine hang.
        self._silent_s = 0.0
        # -P: nothing in the working directory may pass for one of our imports.
        self._command = command or (sys.executable, "-P", "-m", "kvist.engine.worker")
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        self._folder = SocketFolder()
        self._commands = self._bind(zmq.PUSH, "commands")
        self._news = self._bind(zmq.PULL, "news")
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Ready] | None = None
        self._ready: Ready | None = None
        self._death: str | None = None
        self._said_farewell = False
        self._open: dict[str, RequestStream] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._asked: deque[asyncio.Future[Stats]] = deque()
        self._turned_away = Counter[str]()
        self._draining = False
        self._stopping = False

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        # What we say is bounded by MAX_OPEN_REQUESTS, so it never waits; what we hear is not.
        socket.set_hwm(0 if kind == zmq.PUSH else HIGH_WATER)
        socket.bind(self._folder.endpoint(name))
        return socket

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the process. It is not ready yet: see `wait_ready`."""
        launch = Launch(
            protocol=PROTOCOL,
            config=self._config,
            commands=self._folder.endpoint("commands"),
            news=self._folder.endpoint("news"),
            parent_pid=os.getpid(),
        )
        self._opened = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE
        )
        self._reader = asyncio.create_task(self._read(self._process))
        self._watchdog = asyncio.create_task(self._watch())
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
        if self._watchdog is not None:
            self._watchdog.cancel()
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
            self._folder.remove()

    # ------------------------------------------------------------------ requests

    @property
    def death(self) -> str | None:
        """Why nothing can be served any more; ``None`` while the engine lives."""
        return self._death

    @property
    def stalled(self) -> str | None:
        """Why nothing can be served now although the engine lives: its loop does not go round."""
        if self._ready is None or self._death is not None or self._silent_s <= self._timeout_s:
            return None
        return (
            f"the engine has ended no step for {self._silent_s:.0f} s; its process hangs or is"
            " stopped. If steps of this model take longer, raise"
            f" --engine-timeout={self._timeout_s:g}; otherwise start the server again"
        )

    @property
    def has_failed(self) -> bool:
        """Whether the engine died by itself: not stopped from here, nor by a SIGTERM of its own."""
        return self._death is not None and not self._said_farewell

    @property
    def refusal(self) -> str | None:
        """Why no request is taken just now: draining, or full. ``None``: one may be submitted."""
        if self._draining:
            return "the server is shutting down"
        if len(self._open) >= MAX_OPEN_REQUESTS:
            return f"{len(self._open)} requests are open, as many as the server takes"
        return None

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Requests that the engine never heard of, by why."""
        return self._turned_away

    def turn_away(self, reason: str) -> None:
        """Note that a request was not submitted. While draining that is no news."""
        self._turned_away[reason] += not self._draining

    def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine; its updates come from the stream.

        REQUIRES `refusal` is ``None``.

        Raises
        ------
        RequestError
            If it can never run, as far as can be told from here.
        EngineDeadError, EngineStalledError
            If the engine is dead, or hangs.
        """
        self._check_engine()
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
        """Ask the engine how full it is. It answers between two steps.

        Raises
        ------
        EngineDeadError, EngineStalledError
            If the engine is dead, or does not answer in time.
        """
        self._check_engine()
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._say(AskStats())
        try:
            return await asyncio.wait_for(answer, STATS_S)
        except TimeoutError:
            raise EngineStalledError(
                f"the engine has not answered for {STATS_S:g} s; it is in a long step, or hangs"
            ) from None

    def _check_engine(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if (stalled := self.stalled) is not None:
            raise EngineStalledError(stalled)

    # ------------------------------------------------------------------ inside

    def _say(self, command: Command) -> None:
        """Send, without waiting: there is no limit on this socket. To the dead, nothing."""
        if self._death is None:
            self._commands.send(self._codec.encode(command))

    async def _watch(self) -> None:
        """Tell those who wait when the engine hangs. Should it wake, their requests are aborted."""
        while True:
            glanced_s = time.monotonic()
            await asyncio.sleep(GLANCE_S)
            self._silent_s += min(time.monotonic() - glanced_s, 2 * GLANCE_S)
            if (stalled := self.stalled) is None:
                continue
            waiting = [stream for stream in self._open.values() if not stream.is_over]
            if waiting:
                logger.error("%s", stalled)
            for stream in waiting:
                self._say(Abort(stream.request_id))
                stream.fail(EngineStalledError(stalled))

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
        self._silent_s = 0.0
        match news:
            case Ready():
                self._ready = news
                self._settle(news)
            case Failed(kind, message):
                error = revive(kind, message)
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
            case Alive():
                pass  # it was heard, and that is all it says
            case Stopped():
                self._death = "the engine was stopped"
                self._said_farewell = True

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
            self._death = obituary(returncode)
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
