"""Recency and frequency, balanced by what was evicted too early."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.ghosts import Ghosts
from kvist.policies.leaf_first import LeafFirstPolicy
from kvist.policies.leaves import Resident

ONCE, OFTEN = 0, 1


class ARCPolicy(LeafFirstPolicy):
    """Two orders by recency, of blocks used once and of those used more often.

    Each remembers what left it. A block that comes back says that its order was too short, and the
    target for the share of `ONCE` moves a step that way.

    Megiddo and Modha, *ARC: a self-tuning, low overhead replacement cache* (2003). Ours differs:
    leaves only, so one order gives way where the other has no leaf; sizes, where theirs counts
    pages; and a ghost that came back moves the target, but not the next choice.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(num_queues=2)
        self._capacity = capacity
        self._target = 0.0
        self._ghosts = (Ghosts(capacity), Ghosts(2 * capacity))

    def _enter(self, block: Candidate, uses: int) -> None:
        once, often = self._ghosts
        if block.key in once:
            step = block.size * max(1.0, often.size / once.size)
            self._target = min(self._capacity, self._target + step)
            once.recall(block.key)
        elif block.key in often:
            step = block.size * max(1.0, once.size / often.size)
            self._target = max(0.0, self._target - step)
            often.recall(block.key)
        elif uses <= 1:
            self._leaves.insert(block, ONCE)
            return
        self._leaves.insert(block, OFTEN)

    def _used(self, key: bytes, uses: int) -> None:
        self._leaves.place(key, OFTEN)

    def _left(self, gone: Resident) -> None:
        once, often = self._ghosts
        self._ghosts[gone.queue].remember(gone.block.key, gone.block.size, 0)
        used_once = self._leaves.size(ONCE)
        residents = used_once + self._leaves.size(OFTEN)
        once.shrink(max(0, self._capacity - used_once))
        often.shrink(max(0, 2 * self._capacity - residents - once.size))

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`."""
        once, often = self._leaves.lowest(ONCE), self._leaves.lowest(OFTEN)
        if once is not None and (often is None or self._leaves.size(ONCE) > self._target):
            return once
        return often
