"""What the server and the engine's process say to each other.

Owns the words and their encoding (msgpack). Plain values only, so that either side can be written
in anything. Every `Add` is answered by exactly one end: `Refused`, or an `Update` that `is_last`.
Imports no torch: the server speaks this too.

::

    server ──▶ engine    Launch (once, on stdin), then Add · Abort · AskStats · Stop
    server ◀── engine    Ready or Failed, then Updates · Refused · Stats · Alive, at the end Stopped
"""

from __future__ import annotations

import msgspec

from kvist.blocks.occupancy import CacheStats
from kvist.config import EngineConfig
from kvist.engine.bill import MemoryUse, StartupBill
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.engine.telemetry import TelemetryCounts
from kvist.engine.tier_counts import TierNumbers

PROTOCOL = 6
"""Raised with every change to what follows. Both ends must have the same."""

BEAT_S = 1.0
"""An engine that is silent for longer is in a long step, or hangs."""

HIGH_WATER = 1024
"""Messages that wait in a socket at most."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's process needs to begin.

    Attributes
    ----------
    commands, news : str
        Endpoints of the two sockets, bound by the parent.
    parent_pid : int
        The engine ends when this is no longer its parent.
    """

    protocol: int
    config: EngineConfig
    commands: str
    news: str
    parent_pid: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Put a request in the queue."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request and free its blocks. No such request (it ended already): nothing happens.

    Attributes
    ----------
    index : int or None
        Only this one of its continuations.
    """

    request_id: str
    index: int | None = None


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for `Stats`, answered between two steps."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Stop between two steps, whatever is running. Who wants to drain waits before saying it."""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is open.

    Attributes
    ----------
    vocab_size : int
        Ids in prompts are below it.
    """

    protocol: int
    pid: int
    max_model_len: int
    vocab_size: int
    bill: StartupBill


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be opened, or broke. The process ends after it.

    Attributes
    ----------
    kind : str
        Class name of the error.
    """

    kind: str
    message: str


class Updates(msgspec.Struct, frozen=True, tag=True):
    """All news of one step."""

    updates: tuple[Update, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that the engine does not take, and why.

    Attributes
    ----------
    retry_after_s : int or None
        When to come again, if it is the queue and not the request.
    """

    request_id: str
    message: str
    param: str | None
    retry_after_s: int | None = None


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How the engine stands, and what has happened since it was opened.

    Attributes
    ----------
    num_running, num_waiting : int
        Sequences that hold blocks, and that hold none.
    num_following : int
        Of those that wait: for a prefix that another one is computing.
    num_loading : int
        Of those that run: with blocks on their way from a lower tier.
    num_awaiting_grammar : int
        Requests that are no sequences yet.
    num_queued_tokens : int
        Known tokens of the waiting sequences.
    num_used_blocks, num_blocks : int
        Of the pool; as in `cache`.
    tiers : tuple of TierNumbers
        Below the device.
    """

    num_running: int
    num_waiting: int
    num_following: int
    num_awaiting_grammar: int
    num_queued_tokens: int
    num_used_blocks: int
    num_blocks: int
    cache: CacheStats
    memory: MemoryUse
    counts: TelemetryCounts
    bill: StartupBill
    tiers: tuple[TierNumbers, ...] = ()
    num_loading: int = 0


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The loop goes round. Said between two steps, where nothing else was said for `BEAT_S`."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that ends as it was asked to."""


Command = Add | Abort | AskStats | Stop
News = Ready | Failed | Updates | Refused | Stats | Alive | Stopped


class Codec:
    """Encodes and decodes messages; one a thread.

    `decode_command` and `decode_news` raise `msgspec.DecodeError` for bytes that are no message.
    """

    __slots__ = ("_commands", "_encoder", "_news")

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)

    def encode(self, message: Command | News) -> bytes:
        """Return the bytes of a message."""
        return self._encoder.encode(message)

    def decode_command(self, data: bytes) -> Command:
        """Return what the server said."""
        return self._commands.decode(data)

    def decode_news(self, data: bytes) -> News:
        """Return what the engine said."""
        return self._news.decode(data)
