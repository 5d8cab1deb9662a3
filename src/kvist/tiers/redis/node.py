"""One server: connections, exchanges of commands and replies, and whether it answers at all.

Owns sockets and the breaker of one server. Knows no blocks and no cluster. The client library is
used for addresses, TLS, authentication and the protocol; commands are sent and replies read here,
so that every exchange can be given up after a time, whatever the server does with it: the library's
timeout is one of silence, and a server that sends a byte a second is never silent.

Threads: `exchange` from any, `watch` from a watchdog.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from kvist.tiers.breaker import CircuitBreaker

Command: TypeAlias = tuple[bytes | memoryview | int | float | str, ...]

BREAKER_OPEN = "breaker_open"
CLOSED = "closed"

_NOT_SERVING = (ClusterDownError, MasterDownError, NoPermissionError, ReadOnlyError)
"""Error replies that say that a server is there and serves nobody, or not us. The others of that
kind, such as that of a server that is still loading, are connection errors to the library."""


@dataclass(frozen=True, slots=True)
class Replies:
    """What came of an exchange.

    Attributes
    ----------
    values : list
        One a command: what the server said, or a `ResponseError` of this command alone.
    down : str
        Why there is none; ``""`` if there are.
    """

    values: list[Any] = field(default_factory=list)
    down: str = ""


class RedisNode:
    """One server.

    Parameters
    ----------
    pool : ConnectionPool
        Made by `make_pool`.
    label : str
        ``host:port``, for people.
    clock : callable
        Seconds, monotonic.
    limit_s : float
        Longest that an exchange may take.
    on_down : callable
        Called when the breaker opened: somebody has to probe.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        label: str,
        clock: Callable[[], float],
        limit_s: float,
        on_down: Callable[[], None],
    ) -> None:
        self.label = label
        self.breaker = CircuitBreaker(clock)
        self._pool = pool
        self._clock = clock
        self._limit_s = limit_s
        self._on_down = on_down
        # Connections of the library, which gives their methods no types.
        self._idle: list[Any] = []
        self._busy: dict[Any, float] = {}
        self._closed = False
        self._lock = threading.Lock()

    def exchange(self, commands: Sequence[Command], *, probe: bool = False) -> Replies:
        """Send commands in one go and read a reply for each: one round trip.

        Where the breaker is open only a `probe` is sent, and only a probe closes it.
        """
        if self.breaker.is_open and not probe:
            return Replies(down=BREAKER_OPEN)
        connection = self._take()
        if connection is None:
            return Replies(down=CLOSED)
        try:
            values = self._exchange(connection, commands)
        except Exception as error:  # noqa: BLE001 - garbage makes the parser raise all sorts
            return self._fail(f"{type(error).__name__}: {error}")
        for value in values:
            if isinstance(value, _NOT_SERVING):
                return self._fail(f"{type(value).__name__}: {value}")
        if probe:
            self.breaker.succeed()
        return Replies(values)

    def watch(self) -> None:
        """Cut exchanges that take too long; their callers see a failure. Called now and then."""
        if self._busy:
            self._cut(float("inf") if self._closed else self._clock() - self._limit_s)

    def close(self) -> None:
        """Cut every exchange, close all connections; what is asked from now on fails.

        An exchange that is just connecting is cut by the next `watch`.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._cut(float("inf"))
        for connection in idle:
            connection.disconnect()

    def _take(self) -> Any:
        """Return a connection for one exchange, watched from now on; None once closed."""
        with self._lock:
            if self._closed:
                return None
            connection = self._idle.pop() if self._idle else self._pool.make_connection()
            self._busy[connection] = self._clock()
            return connection

    def _exchange(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        try:
            connection.connect()
            if _is_spoilt(connection):
                connection.disconnect()
                connection.connect()
            connection.send_packed_command(connection.pack_commands(commands))
            values = [_read(connection) for _ in commands]
        except BaseException:
            # Half an exchange is on the wire: the next user would read our replies.
            connection.disconnect()
            raise
        finally:
            with self._lock:
                del self._busy[connection]
                if not self._closed:
                    self._idle.append(connection)
            if self._closed:
                connection.disconnect()
        return values

    def fail(self, reason: str) -> None:
        """Use the server no more until it has answered a probe."""
        self.breaker.fail(reason)
        self._on_down()

    def _fail(self, reason: str) -> Replies:
        self.fail(reason)
        return Replies(down=reason)

    def _cut(self, since_s: float) -> None:
        with self._lock:
            stuck = [connection for connection, start in self._busy.items() if start < since_s]
        for connection in stuck:
            # Its thread reads the end of the stream and puts everything in order itself. That of
            # the library's own `disconnect` from here would take the parser apart under it.
            found = getattr(connection, "_sock", None)
            if found is not None:
                with suppress(OSError):
                    socket.socket.shutdown(found, socket.SHUT_RDWR)


def make_pool(url: str, timeout_s: float, **overrides: Any) -> ConnectionPool:
    """Return what makes connections to the server at a URL; makes none yet.

    Parameters
    ----------
    url : str
        ``redis://[user[:password]@]host[:port][/db]``, ``rediss://`` for TLS, ``unix://path``;
        options of the client library after ``?``.
    timeout_s : float
        Of silence, and of connecting.
    overrides
        Such as `host` and `port` of another node with the same credentials.
    """
    pool = ConnectionPool.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
        health_check_interval=0,
    )
    pool.connection_kwargs.update(overrides)
    return pool


def _is_spoilt(connection: Any) -> bool:
    """Whether something is left over on it, or the server closed it while nobody looked."""
    try:
        return bool(connection.can_read())
    except (RedisError, OSError):
        return True


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error
