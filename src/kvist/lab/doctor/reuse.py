"""How much of what is asked for was there before, and how large a cache must be to find it.

Owns the arithmetic over chains of block ids: what an endless cache finds, what one of a given size
finds with LRU, and the size from where on more brings little. Knows no prompts and no servers.

Distances are those of LRU stacks: how many other blocks were used since a block was last used
(Mattson et al., 1970; counted with a Fenwick tree over the times of last use, O(log n) a use). A
block behind a miss is no hit, since a prefix ends at its first missing block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ENOUGH = 0.9
"""A size is enough if it finds so much of what an endless cache finds."""

_HOT_USES = 4
"""A block that came so often is hot."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What was asked for, in blocks.

    Attributes
    ----------
    block_tokens : float
        Tokens a block.
    num_blocks : int
        Asked for in all.
    distances : tuple of int
        Sorted; for each block that had been used before, the size of cache, in blocks, from where
        on LRU would still have had it *and all before it*.
    hot_blocks : int
        How many blocks came at least `_HOT_USES` times.
    hot_distances : tuple of int
        As `distances`, of hot blocks only.
    """

    block_tokens: float
    num_blocks: int
    distances: tuple[int, ...]
    hot_blocks: int
    hot_distances: tuple[int, ...]

    @property
    def attainable(self) -> float:
        """Share of all blocks that an endless cache finds."""
        return len(self.distances) / self.num_blocks if self.num_blocks else 0.0

    def rate(self, capacity_tokens: float) -> float:
        """Share that LRU of a size finds."""
        blocks = capacity_tokens / self.block_tokens
        return bisect_right(self.distances, blocks) / self.num_blocks if self.num_blocks else 0.0

    def hot_rate(self, capacity_tokens: float) -> float:
        """Share of the uses of hot blocks that LRU of a size finds."""
        blocks = capacity_tokens / self.block_tokens
        return bisect_right(self.hot_distances, blocks) / max(1, len(self.hot_distances))

    def enough_tokens(self) -> int:
        """Return the size, in tokens, that finds `ENOUGH` of what there is to find."""
        if not self.distances:
            return 0
        at = min(len(self.distances) - 1, int(ENOUGH * len(self.distances)))
        return int((self.distances[at] + 1) * self.block_tokens)


def measure_reuse(chains: Iterable[Sequence[Hashable]], block_tokens: float) -> Reuse:
    """Walk through chains in order of arrival. O(n log n) in blocks."""
    chains = [tuple(chain) for chain in chains]
    uses = Counter(block for chain in chains for block in chain)
    total = sum(map(len, chains))
    tree = _Fenwick(total)
    last: dict[Hashable, int] = {}
    distances: list[int] = []
    hot: list[int] = []
    now = 0
    for chain in chains:
        needed = 0
        broken = False
        for block in chain:
            at = last.get(block)
            if at is None:
                broken = True
            elif not broken:
                # All blocks used after it, itself, and nothing of this chain's later part.
                needed = max(needed, tree.above(at) + 1)
                distances.append(needed)
                if uses[block] >= _HOT_USES:
                    hot.append(needed)
        # A prefix's first block is the last to leave: the chain is used from its end.
        for block in reversed(chain):
            if (at := last.get(block)) is not None:
                tree.add(at, -1)
            tree.add(now, 1)
            last[block] = now
            now += 1
    num_hot = sum(count >= _HOT_USES for count in uses.values())
    return Reuse(block_tokens, total, tuple(sorted(distances)), num_hot, tuple(sorted(hot)))


class _Fenwick:
    """Counts at times, and how many stand after one."""

    __slots__ = ("_size", "_sum", "_tree")

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * (size + 1)
        self._sum = 0

    def add(self, at: int, amount: int) -> None:
        self._sum += amount
        at += 1
        while at <= self._size:
            self._tree[at] += amount
            at += at & -at

    def above(self, at: int) -> int:
        at += 1
        total = 0
        while at > 0:
            total += self._tree[at]
            at -= at & -at
        return self._sum - total
