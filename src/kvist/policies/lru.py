"""Least recently used, leaf first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LRUPolicy:
    """Evict the block whose last use lies furthest back.

    A sequence releases its blocks tail first, and using a block means using all its ancestors, so
    a parent's last use is never before its child's: plain recency order *is* leaf-first order,
    without a tree (the trick is vLLM's). Ours differs in that blocks that can never be found again
    do not enter the order at all; they go straight back to the free list.
    """

    def __init__(self) -> None:
        # An OrderedDict, not a dict: the first key of a dict costs O(deleted before it).
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int, depth: int) -> None:
        """See `EvictionPolicy.add`; `depth` plays no part in recency."""
        self._order[block_id] = None

    def remove(self, block_id: int) -> None:
        """See `EvictionPolicy.remove`."""
        del self._order[block_id]

    def victim(self) -> int | None:
        """See `EvictionPolicy.victim`."""
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
