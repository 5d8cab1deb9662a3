"""How full the pool is: blocks by state, and slots by whether a token is in them.

Knows no names and no order, and changes nothing. Threads: step thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvist.blocks.block import BlockState
from kvist.blocks.pool import BlockPool
from kvist.blocks.table import BlockTable


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A look at the pool. Blocks shared by several tables count once."""

    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    filled_slots: int
    allocated_slots: int

    @property
    def usage(self) -> float:
        """Share of the pool that sequences use now, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


def count(
    pool: BlockPool, block_size: int, tables: Iterable[BlockTable], loading: Iterable[int]
) -> CacheStats:
    """Count blocks and slots. O(tables + blocks that are not full).

    Parameters
    ----------
    tables : iterable of BlockTable
        All that refer to blocks of `pool`.
    loading : iterable of int
        Blocks that lower tiers are filling.
    """
    fill: dict[int, int] = {}
    for table in tables:
        for index in range(table.num_tokens // block_size, len(table.ids)):
            block_id = table.ids[index]
            filled = min(block_size, max(0, table.num_tokens - index * block_size))
            if pool.blocks[block_id].state is BlockState.SEALED:
                filled = block_size  # a shorter table, over a block that others hold whole
            fill[block_id] = max(fill.get(block_id, 0), filled)
    for block_id in loading:
        if pool.blocks[block_id].state is BlockState.LOADING:
            fill[block_id] = 0
    used = pool.num_used
    return CacheStats(
        num_blocks=pool.num_blocks,
        block_size=block_size,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_used_blocks=used,
        filled_slots=(used - len(fill)) * block_size + sum(fill.values()),
        allocated_slots=used * block_size,
    )
