"""One server or a cluster: which node holds which name, and which of them answer.

Owns the map from hash slots to nodes. Knows no blocks. Whether there is a cluster is not configured
but asked: a server without one says so.

Nobody waits for the map but those who learn it: `node_for` answers from what is known.

Threads: any; `learn` and `probe` talk to servers and belong to a thread that may wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from redis.crc import key_slot
from redis.exceptions import AskError, OutOfMemoryError, ResponseError

from kvist.errors import ConfigError
from kvist.tiers.redis.node import Command, RedisNode, make_pool

DEFAULT_PORT = 6379
NOT_CONNECTED = "not_connected"
SERVER_FULL = "server_full"
_NUM_SLOTS = 16384
_MAX_COMMANDS = 1000


@dataclass(frozen=True, slots=True)
class Absence:
    """Why there is no header, or no bytes.

    `down` tells that a server did not answer, rather than that it has none.
    """

    reason: str
    down: bool = False


Value: TypeAlias = Any
"""What a server said, or an `Absence`."""

Send: TypeAlias = tuple[bytes, Command]
"""The name that decides the node, and a command."""


class RedisServers:
    """The servers behind one tier.

    Parameters
    ----------
    url : str
        See `make_pool`; several hosts after one another with commas, any of which may be down.
    timeout_s : float
        Of silence on a connection, and of connecting.
    limit_s : float
        Longest that one exchange may take.
    clock : callable
        Seconds, monotonic.
    on_down : callable
        Called when a server was found not to answer: `probe` has to be called now and then.

    Raises
    ------
    ConfigError
        If the URL is none.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        limit_s: float,
        clock: Callable[[], float],
        on_down: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._limit_s = limit_s
        self._clock = clock
        self._on_down = on_down
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._urls = _one_url_a_host(url)
        self._nodes: dict[str, RedisNode] = {}
        self._slots: list[RedisNode | None] = []
        self._single: RedisNode | None = None
        self._stale = False
        self._seeds = [self._node(_label(one), one) for one in self._urls]

    @property
    def is_known(self) -> bool:
        """Whether it is known which node holds what."""
        return self._single is not None or bool(self._slots)

    @property
    def is_cluster(self) -> bool:
        """Whether there is a cluster, as far as is known."""
        return bool(self._slots)

    def nodes(self) -> list[RedisNode]:
        """Return the nodes that hold anything."""
        if self._single is not None:
            return [self._single]
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    def node_for(self, name: bytes) -> RedisNode | None:
        """Return the node of a name; None while that is not known. O(1)."""
        if self._single is not None:
            return self._single
        slots = self._slots
        return slots[key_slot(name)] if slots else None

    def trouble(self) -> str:
        """Say which servers do not answer, and why; ``""`` if all do."""
        nodes = self.nodes() or self._seeds
        return "; ".join(
            f"{node.label}: {node.breaker.reason}" for node in nodes if node.breaker.is_open
        )

    def unreachable(self) -> str:
        """Why nothing can be asked of anyone: no server is known, and none answers; else ``""``."""
        if self.is_known or not all(seed.breaker.is_open for seed in self._seeds):
            return ""
        return self._seeds[0].breaker.reason

    def send(self, sends: Sequence[Send]) -> list[Value]:
        """Send each command to the node of its name; return the answers in order.

        One exchange, and so one round trip, for each node and thousand commands.
        """
        values: list[Value] = [Absence(NOT_CONNECTED, down=True)] * len(sends)
        groups: dict[RedisNode, list[int]] = {}
        for index, (name, _) in enumerate(sends):
            node = self.node_for(name)
            if node is not None:
                groups.setdefault(node, []).append(index)
        for node, indexes in groups.items():
            for first in range(0, len(indexes), _MAX_COMMANDS):
                part = indexes[first : first + _MAX_COMMANDS]
                replies = node.exchange([sends[index][1] for index in part])
                if replies.down:
                    for index in indexes[first:]:
                        values[index] = Absence(replies.down, down=True)
                    break
                for index, value in zip(part, replies.values, strict=True):
                    values[index] = self._judge(value)
        return values

    def learn(self, *, probe: bool = False) -> None:
        """Ask which node holds what, if that is not known or old. One round trip if all is well."""
        with self._learning:
            if self.is_known and not self._stale:
                return
            for node in dict.fromkeys([*self.nodes(), *self._seeds]):
                replies = node.exchange([("CLUSTER", "SLOTS")], probe=probe)
                if replies.down:
                    continue
                (answer,) = replies.values
                if isinstance(answer, ResponseError):
                    self._single, self._slots, self._stale = node, [], False
                    return
                if self._map(answer, node):
                    self._single, self._stale = None, False
                    return
                node.fail(f"said nonsense to CLUSTER SLOTS: {str(answer)[:40]}")

    def probe_s(self) -> float | None:
        """When a server that is down is to be asked again; None if none is."""
        times = [node.breaker.probe_s for node in self._all()]
        return min((time for time in times if time is not None), default=None)

    def probe(self) -> None:
        """Ask servers that are down, if it is time. Where some were, slots may have moved."""
        due = [node for node in self._all() if node.breaker.probe_is_due()]
        for node in due:
            node.exchange([("PING",)], probe=True)
        if due and (self.is_cluster or not self.is_known):
            self._stale = True
        if self._stale or not self.is_known:
            self.learn()

    def watch(self) -> None:
        """Cut exchanges that take too long."""
        for node in self._all():
            node.watch()

    def close(self) -> None:
        """Cut and close every connection."""
        for node in self._all():
            node.close()

    def _all(self) -> list[RedisNode]:
        with self._lock:
            return list(self._nodes.values())

    def _judge(self, value: Any) -> Value:
        if isinstance(value, OutOfMemoryError):
            return Absence(SERVER_FULL)
        if isinstance(value, AskError):  # MOVED is one of them
            self._stale = True
            return Absence("moved", down=True)
        if isinstance(value, ResponseError):
            return Absence(f"{type(value).__name__}: {value}", down=True)
        return value

    def _node(self, label: str, url: str, **overrides: Any) -> RedisNode:
        with self._lock:
            node = self._nodes.get(label)
            if node is None:
                pool = make_pool(url, self._timeout_s, **overrides)
                node = RedisNode(pool, label, self._clock, self._limit_s, self._on_down)
                self._nodes[label] = node
            return node

    def _map(self, answer: Any, asked: RedisNode) -> bool:
        """Take over the answer to CLUSTER SLOTS; False if it is none, or of nobody's slots."""
        slots: list[RedisNode | None] = [None] * _NUM_SLOTS
        try:
            for first, last, master, *_ in answer:
                # A node that does not know its own name leaves it out: the one that was asked.
                host = master[0].decode() if master[0] else asked.label.rpartition(":")[0]
                port = int(master[1])
                node = self._node(f"{host}:{port}", self._urls[0], host=host, port=port)
                slots[first : last + 1] = [node] * (last + 1 - first)
        except (ValueError, TypeError, IndexError, AttributeError):
            return False
        if len(slots) != _NUM_SLOTS or not any(slots):
            return False
        self._slots = slots
        return True


def _one_url_a_host(url: str) -> list[str]:
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path:
        return [url]
    credentials, at, hosts = parts.netloc.rpartition("@")
    urls = [urlunsplit(parts._replace(netloc=credentials + at + host)) for host in hosts.split(",")]
    try:
        good = parts.scheme in ("redis", "rediss") and all(map(_label, urls))
    except ValueError:
        good = False
    if not good:
        shown = url.replace(credentials, "***") if credentials else url
        raise ConfigError(
            f"{shown!r} is no address of a Redis server; write redis://host:6379/0, with"
            " user:password@ before the host and rediss:// for TLS"
        )
    return urls


def _label(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname}:{parts.port or DEFAULT_PORT}" if parts.hostname else ""
