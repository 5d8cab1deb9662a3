"""The contract of an eviction order.

A policy sees ids and reuse, never bytes, tiers or requests. It holds exactly the blocks that are
CACHED: full, findable, and used by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order in which cached blocks leave the device.

    REQUIRES: the pool adds the blocks of one sequence tail first, and a block is never used
    without its ancestors. ENSURES: `victim` is a *leaf*: no block that continues it is held. A
    parent that left before its child would make the child unreachable and waste its room.

    Threads: step thread only. Every method is O(1) amortised on the step path.
    """

    def add(self, block_id: int, depth: int) -> None:
        """Block `block_id`, `depth` blocks from the start of its chain, came to be unused."""

    def remove(self, block_id: int) -> None:
        """Forget `block_id`: it is used again, or was evicted. REQUIRES it is held."""

    def victim(self) -> int | None:
        """Return the block that should leave first; a look, not a removal."""

    def __len__(self) -> int:
        """Return the number of blocks held."""

    def __iter__(self) -> Iterator[int]:
        """Iterate over the held blocks in the order in which they would leave."""
