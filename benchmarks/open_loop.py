"""A client that sends chats whether the server keeps up or not, and notes what became of each.

Owns connections and arrivals. One thread, asyncio, raw protocol: an answer is looked at twice, when
its first bytes come and when its last ones do, so the client costs little beside a server on the
same cores. Connections are kept and used again. `kvist bench serve` has another client, which reads
every piece as it comes and knows any server: that is what it measures. Several times overloaded, on
the server's own cores, its reading would be part of the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

WORDS = ("river", "stone", "letter", "garden", "winter", "engine", "silver", "window", "harbour")


@dataclass(frozen=True)
class Chats:
    """What is asked: short chats, each of other words, so that no two share more than a beginning.

    Attributes
    ----------
    words : int
        Of one prompt.
    tokens : tuple of int
        Least and most `max_tokens`; the model may not stop before.
    """

    model: str
    words: int
    tokens: tuple[int, int]

    def request(self, draw: random.Random, deadline_s: float | None) -> bytes:
        """Return one HTTP request."""
        text = " ".join(draw.choices(WORDS, k=self.words))
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": draw.randint(*self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if deadline_s is not None:
            body["timeout"] = deadline_s
        content = json.dumps(body).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )


@dataclass
class Tally:
    """What became of the requests of one run.

    Attributes
    ----------
    sent : int
        By an open loop.
    ends : Counter
        ``finished`` (all of the answer came), ``refused`` (503), ``cut off`` (504, or the stream
        ended without its answer), ``lost`` (no answer, or the client did not get through),
        and other statuses by number.
    finished : list of (float, float)
        End, and how long it took from when it was to be sent, in seconds.
    refused_s : list of float
        How long a refusal took.
    without_retry_after : int
        Refusals that did not say when to come again.
    late_s : list of float
        How long after its time the client sent a request: whether it keeps up.
    """

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    finished: list[tuple[float, float]] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    late_s: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._answer is not None and not self._answer.done() and self._is_whole():
            self._answer.set_result(bytes(self._data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the answer was whole"))
        self._transport = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> bytes:
        """Return the whole answer, heads and all."""
        if self._transport is None:
            raise ConnectionError("closed")
        self._data.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _is_whole(self) -> bool:
        if self._data.endswith(b"\r\n0\r\n\r\n"):
            return True
        head, blank, body = self._data[:2048].partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if not blank or at < 0:
            return False
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return len(self._data) - len(head) - 4 >= length if body or not length else False


class Client:
    """Sends chats and tallies them.

    Parameters
    ----------
    port : int
    chats : Chats
    seed : int
        Of the words, the lengths and the arrivals.
    """

    def __init__(self, port: int, chats: Chats, seed: int = 0) -> None:
        self._port = port
        self._chats = chats
        self._draw = random.Random(seed)
        self._idle: list[_Connection] = []

    async def closed_loop(self, clients: int, seconds: float) -> Tally:
        """Let so many clients ask again as soon as they are answered; without deadlines."""
        tally, end_s = Tally(), time.monotonic() + seconds

        async def ask_again() -> None:
            while time.monotonic() < end_s:
                await self._ask(time.monotonic(), None, tally)

        await asyncio.gather(*(ask_again() for _ in range(clients)))
        return tally

    async def open_loop(
        self, rate: float, seconds: float, deadline_s: float, at_half: Callable[[], None]
    ) -> Tally:
        """Send `rate` requests a second for `seconds`, at random times; wait for their ends.

        Nobody asks a second time. `at_half` is called in the middle, in a thread.
        """
        tally, loop = Tally(), asyncio.get_running_loop()
        half = loop.call_later(seconds / 2, lambda: loop.run_in_executor(None, at_half))
        tasks: set[asyncio.Task[None]] = set()
        async for due_s in self._arrivals(rate, seconds):
            task = asyncio.create_task(self._ask(due_s, deadline_s, tally))
            tasks.add(task)
            tally.sent += 1
            task.add_done_callback(tasks.discard)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=deadline_s + 10)
            for task in late:
                task.cancel()
            tally.ends["lost"] += len(late)
        half.cancel()
        return tally

    async def _arrivals(self, rate: float, seconds: float) -> AsyncIterator[float]:
        due_s = time.monotonic()
        end_s = due_s + seconds
        while (due_s := due_s + self._draw.expovariate(rate)) < end_s:
            # Also when late: those who are answered must be heard.
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            yield due_s

    async def _ask(self, due_s: float, deadline_s: float | None, tally: Tally) -> None:
        connection = None
        try:
            connection = await self._connection()
            tally.late_s.append(time.monotonic() - due_s)
            answer = await connection.ask(self._chats.request(self._draw, deadline_s))
        except OSError:
            tally.ends["lost"] += 1
            await asyncio.sleep(0.01)  # a closed loop must not spin
            return
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        self._idle.append(connection)
        now = time.monotonic()
        status = answer[9:12].decode()
        if status == "200":
            is_whole = b'"finish_reason":"length"' in answer or b'"finish_reason":"stop"' in answer
            tally.ends["finished" if is_whole else "cut off"] += 1
            if is_whole:
                tally.finished.append((now, now - due_s))
        elif status == "503":
            tally.ends["refused"] += 1
            tally.refused_s.append(now - due_s)
            tally.without_retry_after += b"\r\nretry-after:" not in answer[:2048].lower()
        else:
            tally.ends["cut off" if status == "504" else status] += 1

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        return connection

    def close(self) -> None:
        """Close what is open."""
        for connection in self._idle:
            connection.close()
