"""Least recently used, leaf first."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.leaf_first import LeafFirstPolicy


class LRUPolicy(LeafFirstPolicy):
    """Evict the leaf whose last use lies furthest back.

    On the device a sequence releases its blocks tail first, and using a block means using all its
    ancestors, so that there plain recency order *is* leaf-first order (vLLM builds on that alone).
    Ours differs in that it keeps the forest: a tier stores parents before their children and may be
    told of a part of a chain, and the promise holds there too.
    """

    def _enter(self, block: Candidate, uses: int) -> None:
        self._leaves.insert(block)

    def _used(self, key: bytes, uses: int) -> None:
        self._leaves.place(key)

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`."""
        return self._leaves.lowest()
