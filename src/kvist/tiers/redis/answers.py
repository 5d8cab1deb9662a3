"""What is known for a moment: answers of servers, kept until they are too old or too many.

Owns bounded dicts with an age, and which answer is newer than which. Talks to nobody.

Threads: any.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kvist.tiers.base import Lookup, LookupStatus

_REMEMBER = 1 << 16
_HIT_S = 5.0
_MISS_S = 1.0
_DELETED_S = 10.0

V = TypeVar("V")


class ShortMemory(Generic[V]):
    """Values by name, each for `keep_s` seconds, the `limit` latest at most.

    Parameters
    ----------
    limit : int
    keep_s : float
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, limit: int, keep_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._clock = clock
        self._values: OrderedDict[bytes, tuple[float, V]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: bytes) -> V | None:
        """Return what was put, unless that is too long ago."""
        found = self._values.get(name)
        if found is None or self._clock() >= found[0]:
            return None
        return found[1]

    def put(self, name: bytes, value: V) -> None:
        """Remember a value from now on."""
        with self._lock:
            self._values[name] = (self._clock() + self._keep_s, value)
            self._values.move_to_end(name)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def forget(self, name: bytes) -> V | None:
        """Forget a value; return what was put last, however long ago, if it was still there."""
        with self._lock:
            found = self._values.pop(name, None)
        return None if found is None else found[1]


class Answers:
    """What was last heard of blocks, by name: digest of the namespace and key.

    A hit is remembered longer than a miss: a load finds out if it is gone, but nobody finds out
    that a block has come.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._hits: ShortMemory[Lookup] = ShortMemory(_REMEMBER, _HIT_S, clock)
        self._misses: ShortMemory[Lookup] = ShortMemory(_REMEMBER, _MISS_S, clock)
        self._deleted: ShortMemory[bool] = ShortMemory(_REMEMBER, _DELETED_S, clock)
        # Names that a server is to be asked for; the value plays no part.
        self._asked: dict[bytes, None] = {}
        # Two dicts change together: an answer that has come is not wanted any more.
        self._lock = threading.Lock()

    def get(self, name: bytes) -> Lookup | None:
        """Return what is known, if that is not too old."""
        return self._hits.get(name) or self._misses.get(name)

    def ask(self, name: bytes) -> Lookup | None:
        """Note that an answer is wanted, unless it has just come: then return it."""
        with self._lock:
            answer = self.get(name)
            if answer is None:
                self._asked[name] = None
            return answer

    def wanted(self) -> list[bytes]:
        """Return the names for which an answer is wanted."""
        with self._lock:
            return list(self._asked)

    def heard(self, name: bytes, answer: Lookup) -> None:
        """Remember what a server said, unless it was stored or deleted here since it was asked."""
        with self._lock:
            if name in self._asked:
                del self._asked[name]
                hit = answer.status is LookupStatus.HIT
                (self._hits if hit else self._misses).put(name, answer)

    def stored(self, name: bytes, hit: Lookup) -> None:
        """A block was stored from here."""
        with self._lock:
            self._misses.forget(name)
            # Deleted at the same time, it may or may not be there: better ask.
            if self._deleted.get(name) is None:
                self._asked.pop(name, None)
                self._hits.put(name, hit)

    def deleted(self, name: bytes, miss: Lookup) -> bool:
        """A block is about to be deleted from here; say whether it was last heard of as a hit."""
        with self._lock:
            self._misses.put(name, miss)
            self._deleted.put(name, True)
            self._asked.pop(name, None)
            return self._hits.forget(name) is not None

    def gone(self, name: bytes) -> None:
        """A load did not find what was a hit."""
        self._hits.forget(name)
