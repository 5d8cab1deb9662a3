"""What it would cost to have a block again, for the room that it takes."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.lfu_da import LFUDAPolicy


class CostAwarePolicy(LFUDAPolicy):
    """Evict the leaf of the lowest ``age + uses × value``: recompute seconds per byte.

    Value is relative to the mean of what came in so far, so that seconds, bytes and blocks cancel
    out, and one use of an ordinary block is worth 1. With equal costs and sizes, or none known,
    this is LFU-DA. It pays where blocks differ: compressed sizes, formats, long contexts (whose
    later blocks take more attention to compute), several models over one store.

    GreedyDual-Size with frequency (Cherkasova, 1998); RAGCache (Jin et al., 2024) put recompute
    seconds in for cost. Ours differs in what LFU-DA's differs in, and in the mean.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._seconds = 0.0
        self._sizes = 0

    def _enter(self, block: Candidate, uses: int) -> None:
        if block.recompute_s > 0:
            self._seconds += block.recompute_s
            self._sizes += block.size
        super()._enter(block, uses)

    def _worth(self, block: Candidate) -> float:
        if not block.recompute_s or not self._sizes:
            return 1
        return (block.recompute_s / block.size) / (self._seconds / self._sizes)
