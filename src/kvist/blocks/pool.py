"""The block pool: who uses which block, what is free, and who leaves next.

Owns the state of every block, the free list, the eviction order and the prefix index. Knows no
sequences, no requests and no bytes. Threads: step thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvist.blocks.block import Block, BlockState
from kvist.blocks.prefix import PrefixIndex
from kvist.errors import IntegrityError
from kvist.keys import BlockKey
from kvist.policies.base import Candidate, EvictionPolicy

FREE, OPEN, SEALED, CACHED, LOADING = BlockState


class BlockPool:
    """Books of `num_blocks` equal blocks.

    Parameters
    ----------
    num_blocks : int
    policy : EvictionPolicy
        Order in which CACHED blocks leave. Owned by the pool from here on.
    on_evict : callable, optional
        Told of every block that stops being findable to make room, before it is reused.

    Notes
    -----
    A block costs what the policy takes, O(log blocks), and O(1) besides.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        on_evict: Callable[[int, BlockKey], None] | None = None,
    ) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = PrefixIndex()
        self._policy = policy
        self._on_evict = on_evict
        # A stack: the block freed last is warm in cache and its page is there already.
        self._free = list(range(num_blocks - 1, -1, -1))

    # ------------------------------------------------------------------ queries

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are findable and used by nobody."""
        return self._policy.num_offered

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached."""
        return len(self._free) + self._policy.num_offered

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return len(self.blocks) - self.num_available

    def num_unused(self, block_ids: Iterable[int]) -> int:
        """How many of `block_ids` are CACHED, so that retaining them takes room away."""
        blocks = self.blocks
        return sum(blocks[i].refs == 0 for i in block_ids)

    # ------------------------------------------------------------------ changes

    def allocate(self, n: int, state: BlockState = OPEN) -> list[int] | None:
        """Hand out `n` blocks with one reference each, evicting as needed.

        Parameters
        ----------
        state : BlockState
            OPEN, or LOADING for blocks that a lower tier is to fill.

        Returns
        -------
        list of int or None
            ``None`` when fewer than `n` are available: never partly.
        """
        if n > self.num_available:
            return None
        free, blocks = self._free, self.blocks
        for _ in range(n - len(free)):
            self._evict_one()
        taken = free[: -n - 1 : -1] if n else []
        del free[len(free) - n :]
        for block_id in taken:
            block = blocks[block_id]
            block.state = state
            block.refs = 1
        return taken

    def retain(self, block_ids: Iterable[int], uses: int = 0) -> None:
        """Add one reference to each block. REQUIRES none of them is FREE.

        Parameters
        ----------
        uses : int
            1 when this is what the block is kept for: a request found it. 0 for a copy, a fork, a
            transfer, which say nothing of whether it will be wanted again.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.state is FREE:
                raise IntegrityError(f"retain of a free block: {block!r}")
            if block.state is CACHED and block.key is not None:
                self._policy.withhold(block.key)
                block.state = SEALED
            block.refs += 1
            block.uses += uses

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one reference from each block, given in token order.

        Works from the tail, so that leaves come first in the eviction order.
        """
        blocks, add = self.blocks, self._policy.add
        for block_id in reversed(block_ids):
            block = blocks[block_id]
            if block.refs <= 0:
                raise IntegrityError(f"release of an unused block: {block!r}")
            block.refs -= 1
            if block.refs:
                continue
            key, parent = block.key, block.parent
            if key is not None and parent is not None:
                block.state = CACHED
                add(Candidate(key, parent, block.depth), block.uses)
                block.uses = 0
            else:
                block.state = FREE
                self._free.append(block_id)

    def seal(
        self,
        block_id: int,
        key: BlockKey,
        parent: BlockKey,
        depth: int,
        token_ids: tuple[int, ...],
    ) -> int:
        """Make a full OPEN block, or a LOADING one that has arrived, immutable and findable.

        Returns
        -------
        int
            The block that stands for `key` from now on. When another block bore the key already,
            that one: the caller's reference has moved to it and `block_id` has lost one. So a key
            never has two blocks, and leaf-first order holds without exceptions.
        """
        block = self.blocks[block_id]
        if block.state is not OPEN and block.state is not LOADING:
            raise IntegrityError(f"only an OPEN or LOADING block can be sealed: {block!r}")
        twin = self.index.get(key)
        if twin is not None:
            self.retain((twin,), uses=1)
            self.release((block_id,))
            return twin
        block.state = SEALED
        block.key = key
        block.parent = parent
        block.depth = depth
        block.uses = 1
        block.token_ids = token_ids
        self.index.add(key, block_id)
        return block_id

    def evict_all(self) -> int:
        """Forget every CACHED block; return how many there were."""
        n = self.num_cached
        for _ in range(n):
            self._policy.forget(self._drop(self._policy.victim()))
        return n

    def evict_ahead(self, num_free: int, most: int) -> int:
        """Evict CACHED blocks, `most` at most, until `num_free` are free; return how many left."""
        wanted = min(num_free - len(self._free), most, self.num_cached)
        for _ in range(wanted):
            self._evict_one()
        return max(0, wanted)

    def _evict_one(self) -> None:
        self._policy.evict(self._drop(self._policy.victim()))

    def _drop(self, victim: bytes | None) -> BlockKey:
        """Make the block that is to leave free; return its key."""
        if victim is None:
            raise IntegrityError("nothing to evict although blocks are counted as available")
        block_id = self.index.take(victim, None)
        block = self.blocks[block_id] if block_id is not None else None
        if block_id is None or block is None or block.state is not CACHED or block.key is None:
            raise IntegrityError(f"block {victim.hex()[:8]} was to be evicted and is not cached")
        key = block.key
        if self._on_evict is not None:
            self._on_evict(block_id, key)
        block.state = FREE
        block.key = block.parent = None
        block.token_ids = ()
        self._free.append(block_id)
        return key

    # ------------------------------------------------------------------ check

    def check(self, references: Counter[int]) -> None:
        """Raise `IntegrityError` unless every invariant of the books holds.

        Parameters
        ----------
        references : Counter of block id
            References that the owners of tables, pins and copies know of.

        Notes
        -----
        O(blocks): for tests and idle moments.
        """
        self._policy.check()
        free, cached = set(self._free), set(self._policy.offered())
        if len(free) != len(self._free):
            raise IntegrityError("a block is listed twice as free")
        for block in self.blocks:
            self._check_block(block, references[block.block_id])
            if (block.state == FREE) != (block.block_id in free):
                raise IntegrityError(f"free list and state disagree: {block!r}")
            if (block.state == CACHED) != (block.key in cached):
                raise IntegrityError(f"eviction order and state disagree: {block!r}")
        self._check_index()
        self._check_leaf_first()
        if len(free) + len(cached) + self.num_used != self.num_blocks:
            raise IntegrityError(
                f"{len(free)} free + {len(cached)} cached + {self.num_used} used"
                f" != {self.num_blocks} blocks"
            )

    def _check_block(self, block: Block, known: int) -> None:
        if block.refs != known:
            raise IntegrityError(f"{block!r} but its owners know of {known} references")
        used = block.state in (OPEN, LOADING, SEALED)
        if used != (block.refs > 0):
            raise IntegrityError(f"references do not fit the state: {block!r}")
        if (block.key is not None) != (block.state in (SEALED, CACHED)):
            raise IntegrityError(f"key does not fit the state: {block!r}")

    def _check_index(self) -> None:
        keyed = sum(block.key is not None for block in self.blocks)
        if keyed != len(self.index):
            raise IntegrityError(f"{keyed} blocks bear a key, the index holds {len(self.index)}")
        for key, block_id in self.index.items():
            if self.blocks[block_id].key != key:
                raise IntegrityError(f"index entry {key.hex()[:8]} -> {self.blocks[block_id]!r}")

    def _check_leaf_first(self) -> None:
        victim = self._policy.victim()
        if (victim is None) != (self.num_cached == 0):
            raise IntegrityError(
                f"{self.num_cached} blocks are cached, but the first is {victim!r}"
            )
        for block in self.blocks:
            parent_id = None if block.parent is None else self.index.get(block.parent)
            if parent_id is None:
                continue
            if block.parent == victim:
                raise IntegrityError(f"{block!r} would be evicted after its parent")
            if block.state == SEALED and self.blocks[parent_id].state == CACHED:
                raise IntegrityError(f"{block!r} is in use and its parent may be evicted")
