"""Least frequently used, with dynamic aging and counts that outlive the block."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.ghosts import Ghosts
from kvist.policies.leaf_first import LeafFirstPolicy
from kvist.policies.leaves import Resident

GHOSTS_PER_CAPACITY = 4
# Counting further would change nothing on real traces, and what was hot once could stay for ever.
MAX_USES = 32


class LFUDAPolicy(LeafFirstPolicy):
    """Evict the leaf of the lowest ``age + uses``.

    ``age`` is the priority of the block evicted last, taken when a block is used: what was used
    often but not lately is overtaken by what comes in, and nothing is ever halved or scanned.

    Dynamic aging is Arlitt et al., *Evaluating content management techniques for Web proxy caches*
    (2000). Ours differs: counts are remembered for blocks of `GHOSTS_PER_CAPACITY` times the
    capacity after they left, since most blocks of a conversation come back only after a turn;
    they end at `MAX_USES`, so that what is no longer wanted is gone after the room was turned over
    that many times, however popular it was; leaves only; equals leave by recency, the deeper first.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._uses: dict[bytes, int] = {}
        self._ghosts = Ghosts(GHOSTS_PER_CAPACITY * capacity)
        self._age: float = 0

    def _enter(self, block: Candidate, uses: int) -> None:
        known = self._ghosts.recall(block.key)
        if known is not None:
            uses += known
        if uses > MAX_USES:
            uses = MAX_USES
        self._uses[block.key] = uses
        self._leaves.insert(block, priority=self._age + uses * self._worth(block))

    def _used(self, key: bytes, uses: int) -> None:
        uses = self._uses[key] = min(MAX_USES, self._uses[key] + uses)
        worth = self._worth(self._leaves.block(key))
        self._leaves.place(key, priority=self._age + uses * worth)

    def _worth(self, block: Candidate) -> float:
        """Worth of one use."""
        return 1

    def _left(self, gone: Resident) -> None:
        # Never back: a block may be evicted out of turn, by a quota or by an operator.
        if gone.priority > self._age:
            self._age = gone.priority
        key = gone.block.key
        self._ghosts.remember(key, gone.block.size, self._uses.pop(key))

    def _forgotten(self, key: bytes) -> None:
        del self._uses[key]

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`."""
        return self._leaves.lowest()
