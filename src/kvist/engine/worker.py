"""The engine's process: ``python -m kvist.engine.worker``, with a `Launch` (JSON) on stdin.

Owns the loop around `Engine.step` and the engine's end of the two sockets. Knows no text and no
HTTP. The server starts it, talks to it (`kvist.engine.messages`) and decides when it ends.

One thread does everything: commands are taken between steps, without waiting while there is work.
The news of a step is one message. A step is not begun before the news of the last one is on its
way: when the server does not read, the sockets fill (`HIGH_WATER` messages) and the engine rests,
instead of growing, until the server reads again, or is gone.

How it ends:

- `Stop`: between two steps.
- SIGTERM: takes no more requests, finishes those it has, then ends. So a supervisor that signals
  every process of the service does not cut off what the server is still draining.
- SIGINT: ignored. At a terminal it comes to both processes, and the server decides.
- The server is gone: at once.
- An error that is not one request's own: `Failed`, and exit code 1.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import msgspec
import zmq

from kvist.config import EngineConfig
from kvist.engine.bill import MemoryUse, StartupBill
from kvist.engine.engine import Engine
from kvist.engine.messages import (
    BEAT_S,
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
from kvist.engine.telemetry import Telemetry
from kvist.engine.tier_counts import TierCounts
from kvist.errors import ConfigError, EngineDeadError, KvistError, RequestError

GLANCE_MS = 500
"""Between two looks at whether the server is still there, when nothing else happens."""

CLOSE_S = 3.0
"""That tiers get at the end to take what is on its way; the server waits a little longer."""

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class Link:
    """The engine's end of the two sockets.

    Parameters
    ----------
    launch : Launch

    Raises
    ------
    EngineDeadError
        From `send` and `receive`, when the server is gone.
    """

    def __init__(self, launch: Launch) -> None:
        self._parent_pid = launch.parent_pid
        self._codec = Codec()
        self._sent_s = time.monotonic()
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._news = self._context.socket(zmq.PUSH)
        for socket, endpoint in ((self._commands, launch.commands), (self._news, launch.news)):
            socket.set_hwm(HIGH_WATER)
            socket.connect(endpoint)

    def send(self, news: News) -> None:
        """Send a message; wait while the server does not read."""
        while not self._news.poll(GLANCE_MS, zmq.POLLOUT):
            self.check_parent()
        self._news.send(self._codec.encode(news))
        self._sent_s = time.monotonic()

    def beat(self) -> None:
        """Say that the loop goes round, unless something was said just now."""
        if time.monotonic() - self._sent_s >= BEAT_S:
            self.send(Alive())

    def receive(self, timeout_ms: int) -> Command | None:
        """Return the next command; ``None`` if there is none within the time."""
        if not self._commands.poll(timeout_ms):
            return None
        return self._codec.decode_command(self._commands.recv())

    def check_parent(self) -> None:
        """Raise `EngineDeadError` if the server is gone."""
        if os.getppid() != self._parent_pid:
            raise EngineDeadError("the server is gone; nobody waits for this engine's tokens")

    def close(self) -> None:
        """Close; what was sent still gets a second to arrive."""
        self._context.destroy(linger=1000)


class Worker:
    """Runs an engine for the server at the other end of a link.

    Parameters
    ----------
    opened : Opened
    link : Link
    """

    def __init__(self, opened: Opened, link: Link) -> None:
        self._opened = opened
        self._engine = opened.engine
        self._telemetry = Telemetry(opened.engine.events, opened.max_model_len)
        self._tier_counts = TierCounts(opened.engine.events)
        self._link = link
        self._stopping = False
        self._finishing = False

    def finish(self, signum: int, frame: FrameType | None) -> None:
        """Take no more requests and end after those there are. A signal handler."""
        self._finishing = True

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            self._take_commands()
            if self._stopping or (self._finishing and not self._engine.has_work):
                break
            self._link.check_parent()
            if self._engine.has_work:
                self._tell(self._engine.step())
            else:
                self._engine.tend()
            self._link.beat()
        self._opened.close(CLOSE_S)
        self._link.send(Stopped())

    def _take_commands(self) -> None:
        """Carry out what was asked: all that is there, or the first to come when idle."""
        timeout_ms = 0 if self._engine.has_work or self._finishing else GLANCE_MS
        while not self._stopping and (command := self._link.receive(timeout_ms)) is not None:
            timeout_ms = 0
            match command:
                case Add(request):
                    # While finishing: no answer now; the server tells those who wait when we end.
                    if not self._finishing:
                        self._offer(request)
                case Abort(request_id, index):
                    update = self._engine.abort_request(request_id, index)
                    if update is not None:
                        self._tell([update])
                case AskStats():
                    self._link.send(self._stats())
                case Stop():
                    self._stopping = True

    def _offer(self, request: EngineRequest) -> None:
        request_id = request.request_id
        try:
            overload = self._engine.offer(request)
        except RequestError as error:
            self._link.send(Refused(request_id, str(error), error.param))
            return
        if overload is not None:
            self._link.send(Refused(request_id, overload.message, None, overload.retry_after_s))

    def _tell(self, updates: list[Update]) -> None:
        if updates:
            self._link.send(Updates(tuple(updates)))

    def _stats(self) -> Stats:
        scheduler = self._engine.scheduler
        cache = scheduler.cache.stats()
        loads = scheduler.loads
        tiers = self._tier_counts.numbers(loads.tiers.states()) if loads is not None else ()
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_following=scheduler.num_following,
            num_loading=loads.num_waiting if loads is not None else 0,
            num_awaiting_grammar=self._engine.num_awaiting_grammar,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_used_blocks=cache.num_used_blocks,
            num_blocks=cache.num_blocks,
            cache=cache,
            memory=self._opened.memory(),
            counts=self._telemetry.counts(),
            bill=self._opened.bill,
            tiers=tiers,
        )


class Opened(Protocol):
    """What the process needs of an engine; `kvist.engine.assemble.OpenEngine` is one."""

    @property
    def engine(self) -> Engine:
        """The engine."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer."""

    @property
    def bill(self) -> StartupBill:
        """What its memory is spent on."""

    def memory(self) -> MemoryUse:
        """Look at what of that is there now. A few milliseconds."""

    def close(self, timeout_s: float) -> None:
        """Let the tiers below the device take what is on its way to them, and close them."""


def run(open_engine: Callable[[EngineConfig], Opened]) -> int:
    """Read a `Launch` from stdin, open the engine and run it.

    Parameters
    ----------
    open_engine : callable
        Called once. What it raises is told to the server.

    Returns
    -------
    int
        Exit code: 0 if the engine ended as it was asked to.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="kvist engine: %(levelname)s: %(message)s", level=logging.WARNING)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    _die_with_parent()
    link = Link(launch)
    try:
        link.check_parent()
        worker = _open(launch, link, open_engine)
        signal.signal(signal.SIGTERM, worker.finish)
        worker.run()
    except EngineDeadError as error:
        logger.warning("%s", error)
        return 1
    except KvistError as error:
        link.send(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine broke; this is a bug in kvist")
        link.send(Failed(type(error).__name__, str(error)))
        return 1
    finally:
        link.close()
    return 0


def _open(launch: Launch, link: Link, open_engine: Callable[[EngineConfig], Opened]) -> Worker:
    """Open the engine and tell the server that it is there."""
    if launch.protocol != PROTOCOL:
        raise ConfigError(
            f"the server speaks protocol {launch.protocol}, this engine {PROTOCOL}: two versions"
            " of kvist are installed; install one"
        )
    opened = open_engine(launch.config)
    link.send(
        Ready(
            protocol=PROTOCOL,
            pid=os.getpid(),
            max_model_len=opened.max_model_len,
            vocab_size=opened.engine.runner.vocab_size,
            bill=opened.bill,
        )
    )
    return Worker(opened, link)


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent's thread ends; elsewhere the glances must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run the engine that the `Launch` describes."""
    return run(_open_with_model)


def _open_with_model(config: EngineConfig) -> Opened:
    # What is imported and built here stays until the end, so nothing of it is garbage to look for:
    # looking took a sixth of the start, and would come back with every full collection later.
    gc.disable()
    try:
        # Here, not above: it takes seconds, and the server should hear of what goes wrong in it.
        from kvist.engine.assemble import open_engine

        return open_engine(config)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
