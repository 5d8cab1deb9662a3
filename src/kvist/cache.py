"""The heart: marries the books of blocks with the sequences that use them.

`KVCacheManager` answers three questions for the engine: what of this prompt is here already
(`match`), is there room for the next tokens (`allocate`), and what is true now that they were
written (`commit`). It knows no model, no request queue and no tensor.

Order of calls for one sequence, per step::

    match? ─▶ allocate ─▶ (the model writes K and V) ─▶ commit
                    └────── the step failed ─────────▶ cancel
    between steps: fork, truncate, release, adopt

What lies in a tier below the device is loaded into blocks of `KVCacheManager.loading`, and comes
into a table by `adopt`.

Threads: step thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.blocks.block import BlockState
from kvist.blocks.loading import LoadBooks, LoadingRun
from kvist.blocks.occupancy import CacheStats, count
from kvist.blocks.pool import BlockPool
from kvist.blocks.table import BlockCopy, BlockTable
from kvist.errors import IntegrityError
from kvist.events import BlockEvicted, BlocksShared, BlockStored, EventLog
from kvist.keys import BlockKey, HashChain
from kvist.policies.base import EvictionPolicy


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks that hold a prefix. True until the next call that changes the cache."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


NO_MATCH = PrefixMatch()


@dataclass(frozen=True, slots=True)
class Allocation:
    """A reservation: room in a table that is not yet recorded as written.

    Attributes
    ----------
    fresh : tuple of int
        Blocks newly handed out; their bytes mean nothing yet.
    copies : tuple of BlockCopy
        To be done before anything is written.
    num_blocks_before : int
        Length of the table before, for `KVCacheManager.cancel`.
    """

    fresh: tuple[int, ...]
    copies: tuple[BlockCopy, ...]
    num_blocks_before: int


class KVCacheManager:
    """Block tables over one pool of equal blocks, with prefix sharing and copy-on-write.

    Parameters
    ----------
    num_blocks, block_size : int
    policy : EvictionPolicy
        Owned by the cache from here on.
    events : EventLog
    enable_prefix_caching : bool
        When false nothing is ever findable and blocks go straight back to the free list.

    Attributes
    ----------
    loading : LoadBooks
        Blocks that lower tiers are filling.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        events: EventLog,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._events = events
        self._pool = BlockPool(num_blocks, policy, self._emit_evicted)
        self.loading = LoadBooks(self._pool, block_size, self._emit_stored)
        self._tables: set[BlockTable] = set()

    # ------------------------------------------------------------------ queries

    @property
    def num_blocks(self) -> int:
        """All blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out now, evicting what nobody uses."""
        return self._pool.num_available

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one table refers to."""
        return self._pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or touch."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix of a sequence of `num_tokens` tokens.

        Always leaves at least one token to compute, because the model must run to say what comes
        next. Changes nothing. O(blocks found).
        """
        if not self.enable_prefix_caching:
            return NO_MATCH
        limit = (num_tokens - 1) // self.block_size
        found = self._pool.index.longest_prefix(keys, limit)
        return PrefixMatch(tuple(found), len(found) * self.block_size)

    def blocks_taken(self, num_tokens: int, match: PrefixMatch = NO_MATCH) -> int:
        """Blocks that a new table takes from those available, with `match`, up to `num_tokens`."""
        fresh = self.blocks_for(num_tokens) - len(match.block_ids)
        return fresh + self._pool.num_unused(match.block_ids)

    # ------------------------------------------------------------------ changes

    def open_table(self) -> BlockTable:
        """Return an empty table. Ends with `release`."""
        table = BlockTable()
        self._tables.add(table)
        return table

    def allocate(
        self, table: BlockTable, num_tokens: int, match: PrefixMatch = NO_MATCH
    ) -> Allocation | None:
        """Make room for a table to grow to `num_tokens` tokens.

        Parameters
        ----------
        match : PrefixMatch
            Blocks to share first. REQUIRES an empty table, and a match found since the last change.

        Returns
        -------
        Allocation or None
            ``None`` when there is no room: then nothing has changed.

        Notes
        -----
        When the next token falls into a block that is sealed (after `truncate`), or in which
        another table holds more than this one, the block is copied first: so of `n` tables over the
        same tokens the first to write stays, and n - 1 copy. O(blocks added), and O(tables) while
        a block is shared.
        """
        if match.block_ids and (table.ids or table.num_tokens):
            raise IntegrityError(f"a match can only open an empty table, not {table!r}")
        pool, size = self._pool, self.block_size
        before = len(table.ids)
        write_index, filled = divmod(table.num_tokens, size)
        copy_on_write = (
            filled != 0
            and num_tokens > table.num_tokens
            and not self._may_write(table, write_index)
        )
        missing = max(0, -(-num_tokens // size) - before - len(match.block_ids))
        if not (missing or copy_on_write or match.block_ids):
            # Fifteen decodes of sixteen: the token goes into a block that is there.
            table.num_reserved = num_tokens
            return Allocation((), (), before)
        if missing + copy_on_write + pool.num_unused(match.block_ids) > pool.num_available:
            return None
        if match.block_ids:
            pool.retain(match.block_ids, uses=1)
            table.ids.extend(match.block_ids)
            table.num_tokens = match.num_tokens
            table.num_sealed = len(match.block_ids)
            table.num_shared = len(match.block_ids)
        fresh = pool.allocate(missing + copy_on_write)
        if fresh is None:
            raise IntegrityError("room was counted and is not there")
        copies: tuple[BlockCopy, ...] = ()
        grown = fresh
        if copy_on_write:
            *grown, target = fresh
            source = table.ids[write_index]
            table.ids[write_index] = target
            table.copies.append((write_index, source))
            copies = (BlockCopy(source, target),)
        table.ids.extend(grown)
        table.num_reserved = num_tokens
        return Allocation(tuple(fresh), copies, before)

    def commit(
        self,
        table: BlockTable,
        num_tokens: int,
        token_ids: Sequence[int],
        chain: HashChain | None,
    ) -> int:
        """Record that K and V of the first `num_tokens` tokens are written.

        Parameters
        ----------
        token_ids : sequence of int
            Tokens of the sequence, at least `num_tokens`.
        chain : HashChain or None
            Keys of its full blocks. ``None``: its blocks are never to be found.

        Returns
        -------
        int
            Leading blocks that are full now.

        Notes
        -----
        Full blocks are sealed; one whose key another block bears already is replaced by that one.
        O(blocks that became full).
        """
        size = self.block_size
        if num_tokens < table.num_tokens or num_tokens > len(table.ids) * size:
            raise IntegrityError(f"commit of {num_tokens} tokens does not fit {table!r}")
        table.num_reserved = 0
        if table.copies:
            self._settle(table)
        if table.num_shared:
            self._events.emit(BlocksShared(table.num_shared, table.num_shared * size))
            table.num_shared = 0
        table.num_tokens = num_tokens
        full = num_tokens // size
        if chain is not None and self.enable_prefix_caching and full > table.num_sealed:
            chain.extend(token_ids)
            keys, ids = chain.keys, table.ids
            seal, emit = self._pool.seal, self._events.emit
            parent = chain.parent(table.num_sealed)
            for index in range(table.num_sealed, full):
                tokens = tuple(token_ids[index * size : (index + 1) * size])
                block_id, key = ids[index], keys[index]
                stands = seal(block_id, key, parent, index, tokens)
                if stands == block_id:
                    emit(BlockStored(block_id, key, parent, index, tokens))
                else:
                    ids[index] = stands
                parent = key
        table.num_sealed = full
        return full

    def cancel(self, table: BlockTable, allocation: Allocation) -> None:
        """Take back the latest reservation of a table, as if it had never been made.

        A match that opened the table stays: `release` the table to let go of that too.
        """
        for index, source in table.copies:
            self._pool.release((table.ids[index],))
            table.ids[index] = source
        table.copies.clear()
        table.num_reserved = 0
        keep = max(allocation.num_blocks_before, self.blocks_for(table.num_tokens))
        self._drop_tail(table, keep)

    def adopt(self, table: BlockTable, run: LoadingRun, num_blocks: int) -> None:
        """Put the first `num_blocks` blocks of a run behind a table's own, and close the run.

        REQUIRES they are ready, and that the table holds exactly the full blocks before them.
        """
        if not len(table.ids) == table.num_sealed == run.first == self.blocks_for(table.num_tokens):
            raise IntegrityError(f"{run!r} does not continue {table!r}")
        table.ids.extend(self.loading.take(run, num_blocks))
        table.num_sealed = len(table.ids)
        table.num_tokens = table.num_sealed * self.block_size

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same tokens; whoever writes first need not copy.

        REQUIRES no reservation in flight. O(blocks).
        """
        if table.num_reserved > table.num_tokens:
            raise IntegrityError(
                f"fork of {table!r} while {table.num_reserved} tokens are reserved; commit or"
                " cancel them first"
            )
        other = self.open_table()
        other.ids = table.ids[: self.blocks_for(table.num_tokens)]
        other.num_tokens = table.num_tokens
        other.num_sealed = table.num_sealed
        self._pool.retain(other.ids)
        return other

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Forget the tokens from `num_tokens` on and give back the blocks that held only them."""
        if num_tokens > table.num_tokens:
            raise IntegrityError(f"truncate of {table!r} to {num_tokens} tokens")
        self._settle(table)
        self._drop_tail(table, self.blocks_for(num_tokens))
        table.num_tokens = num_tokens
        table.num_reserved = 0
        table.num_sealed = min(table.num_sealed, num_tokens // self.block_size)

    def release(self, table: BlockTable) -> None:
        """Let go of everything a table refers to. The table must not be used again."""
        if table not in self._tables:
            raise IntegrityError(f"{table!r} was released before, or is not of this cache")
        self._settle(table)
        self._drop_tail(table, 0)
        table.num_tokens = table.num_sealed = 0
        self._tables.remove(table)

    def evict_ahead(self, num_free: int, most: int) -> int:
        """Evict unused blocks, `most` at most, until `num_free` are free; return how many left."""
        return self._pool.evict_ahead(num_free, most)

    def reset_prefix_cache(self) -> int:
        """Forget every block that nobody uses; return how many there were."""
        return self._pool.evict_all()

    # ------------------------------------------------------------------ looks

    def stats(self) -> CacheStats:
        """Count blocks and slots. O(tables + blocks that are not full)."""
        return count(self._pool, self.block_size, self._tables, self.loading.references())

    def check(self) -> None:
        """Raise `IntegrityError` unless books and tables agree. O(blocks): for tests, and idle."""
        references = self.loading.references()
        for table in self._tables:
            references.update(table.ids)
            references.update(source for _, source in table.copies)
            table.check(self.block_size, self._pool.blocks)
        self._pool.check(references)

    # ------------------------------------------------------------------ inside

    def _may_write(self, table: BlockTable, index: int) -> bool:
        """Whether a table's next token may go into its ``index``-th block as it stands.

        It may where nobody has, or may get in this step, anything behind the table's own tokens:
        others that share the block read no further than their own, and copy it when they write.
        """
        block = self._pool.blocks[table.ids[index]]
        if block.state is not BlockState.OPEN:
            return False
        return block.refs == 1 or not any(
            other.holds_beyond(table.num_tokens, index, block.block_id)
            for other in self._tables
            if other is not table
        )

    def _settle(self, table: BlockTable) -> None:
        """Copies of the last reservation are done: their sources are no longer needed."""
        if table.copies:
            self._pool.release([source for _, source in table.copies])
            table.copies.clear()

    def _drop_tail(self, table: BlockTable, keep: int) -> None:
        if keep < len(table.ids):
            self._pool.release(table.ids[keep:])
            del table.ids[keep:]

    def _emit_evicted(self, block_id: int, key: BlockKey) -> None:
        self._events.emit(BlockEvicted(block_id, key))

    def _emit_stored(
        self, block_id: int, key: BlockKey, parent: BlockKey, depth: int, tokens: tuple[int, ...]
    ) -> None:
        self._events.emit(BlockStored(block_id, key, parent, depth, tokens))
