"""How much room a sequence asks for, and whether it may come in.

The only place where paged allocation and its baselines differ: reserve the maximum, keep nothing.
Knows the cache's numbers; neither queue nor order. Threads: step thread only.
"""

from __future__ import annotations

from kvist.cache import NO_MATCH, Allocation, KVCacheManager, PrefixMatch
from kvist.config import KVAllocation, SchedulerConfig
from kvist.engine.sequence import Sequence
from kvist.errors import CapacityError


class Room:
    """Asks the cache for blocks on behalf of sequences.

    Parameters
    ----------
    config : SchedulerConfig
    cache : KVCacheManager

    Raises
    ------
    CapacityError
        If the pool cannot hold one request of `max_model_len`: it would wait, or preempt itself,
        for ever.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        needed, there = cache.blocks_for(config.max_model_len), cache.num_blocks
        if needed > there:
            lower = f" or lower --max-model-len to {there * cache.block_size}" if there else ""
            raise CapacityError(
                f"one request of max_model_len={config.max_model_len} needs {needed} blocks, the"
                f" pool has {there} (block_size={cache.block_size}); raise --kv-cache-memory-bytes"
                f"{lower}"
            )
        self._cache = cache
        reserves = config.kv_allocation is KVAllocation.RESERVE
        self._keeps_nothing = config.kv_allocation is KVAllocation.NONE
        self._reserved_tokens = config.max_model_len if reserves else 0
        # Who has room to the end needs none kept free.
        self._watermark_blocks = 0 if reserves else int(config.watermark * there)

    def reserve(
        self, seq: Sequence, num_tokens: int, match: PrefixMatch = NO_MATCH
    ) -> Allocation | None:
        """Make room for a running sequence to grow to `num_tokens`; ``None`` when there is none."""
        assert seq.table is not None
        return self._cache.allocate(seq.table, max(num_tokens, self._reserved_tokens), match)

    def token_came(self, seq: Sequence) -> None:
        """Note that a running sequence has its next token; without a KV cache, forget the others.

        A long context that is read in chunks keeps K and V from chunk to chunk of the same token.
        """
        if self._keeps_nothing and seq.table is not None:
            self._cache.truncate(seq.table, 0)

    def admits(self, seq: Sequence, match: PrefixMatch, ahead: int, *, alone: bool) -> bool:
        """Whether a waiting sequence may start now.

        It may if all its known tokens fit beside the `ahead` blocks that running sequences will ask
        for soon, and the watermark stays free, unless it is `alone`. Without the look ahead a
        prompt would come in, and push out someone, only to be pushed out itself a few steps later.
        """
        wanted = self._cache.blocks_taken(max(seq.num_tokens, self._reserved_tokens), match)
        kept = 0 if alone else self._watermark_blocks
        return wanted + ahead + kept <= self._cache.num_available_blocks

    def ahead(self, seq: Sequence) -> int:
        """Blocks a running sequence will ask for soon: the rest of its prompt, and one to grow.

        Those that are being loaded for it are taken already.
        """
        assert seq.table is not None
        soon = min(seq.num_tokens + self._cache.block_size, seq.max_num_tokens)
        held = len(seq.table.ids) + seq.num_loading_blocks
        return max(0, self._cache.blocks_for(soon) - held)
