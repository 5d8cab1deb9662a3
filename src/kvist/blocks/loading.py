"""Blocks that a transfer fills: from a lower tier's hit to a block that can be found.

Owns the LOADING blocks and who refers to them. Knows neither tiers nor bytes, and of sequences only
that one holds each run open. Threads: step thread only.

::

    chain     0 ......... first ............................ first + n
    blocks    (a table's)  | loaded | loaded | lent | lost | lent |
                            └─ ready ────────┘

Every block of a run has two references: the run's, until it is closed, and the transfer's while the
block is *lent*, so that nobody is given a block into which a transfer may still write. A run is
closed when its sequence takes the ready blocks into its table, or goes away.

A loaded block becomes findable only behind a parent that is findable: what hangs in the air could
never be found, and would upset the order of eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum

from kvist.blocks.block import BlockState
from kvist.blocks.pool import BlockPool
from kvist.errors import IntegrityError
from kvist.keys import BlockKey

OnStored = Callable[[int, BlockKey, BlockKey, int, tuple[int, ...]], None]
"""Told of a block that became findable: id, key, parent, depth, token ids."""


class Arrival(IntEnum):
    """Where the bytes of one block of a run are."""

    LENT = 0
    LOADED = 1
    LOST = 2


class LoadingRun:
    """Consecutive blocks of one chain that are being loaded. `LoadBooks` is its only writer.

    Attributes
    ----------
    first : int
        Index of the first block in its chain.
    keys : tuple of BlockKey
    parent : BlockKey
        Of the first block.
    block_ids : list of int
    is_open : bool
        Whether a sequence still wants it.
    """

    __slots__ = ("_tokens", "arrivals", "block_ids", "first", "is_open", "keys", "parent")

    def __init__(
        self,
        first: int,
        keys: tuple[BlockKey, ...],
        parent: BlockKey,
        tokens: tuple[tuple[int, ...], ...],
        block_ids: list[int],
    ) -> None:
        self.first = first
        self.keys = keys
        self.parent = parent
        self.block_ids = block_ids
        self.is_open = True
        self.arrivals = [Arrival.LENT] * len(keys)
        self._tokens = tokens

    @property
    def num_ready(self) -> int:
        """Leading blocks that are loaded."""
        arrivals = self.arrivals
        return next(
            (i for i, arrival in enumerate(arrivals) if arrival != Arrival.LOADED), len(arrivals)
        )

    @property
    def num_lent(self) -> int:
        """Blocks into which a transfer may still write."""
        return self.arrivals.count(Arrival.LENT)

    @property
    def is_decided(self) -> bool:
        """Whether no further arrival can change `num_ready`."""
        ready = self.num_ready
        return ready == len(self.arrivals) or self.arrivals[ready] == Arrival.LOST

    def tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of block `index` of the run."""
        return self._tokens[index]

    def parent_of(self, index: int) -> BlockKey:
        """Key before block `index` of the run."""
        return self.keys[index - 1] if index else self.parent

    def __repr__(self) -> str:
        return f"<LoadingRun {self.first}+{len(self.keys)} ready={self.num_ready}>"


class LoadBooks:
    """Runs of LOADING blocks over one pool.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
    on_stored : callable
        Told of every loaded block that became findable.
    """

    def __init__(self, pool: BlockPool, block_size: int, on_stored: OnStored) -> None:
        self._pool = pool
        self._block_size = block_size
        self._on_stored = on_stored
        self._runs: set[LoadingRun] = set()

    @property
    def num_lent_blocks(self) -> int:
        """Blocks into which transfers may write. O(blocks of runs)."""
        return sum(run.num_lent for run in self._runs)

    @property
    def num_held_blocks(self) -> int:
        """Distinct blocks that runs and transfers refer to. O(blocks of runs)."""
        return len(self.references())

    def begin(
        self,
        first: int,
        keys: Sequence[BlockKey],
        parent: BlockKey,
        token_ids: Sequence[int],
    ) -> LoadingRun | None:
        """Hand out LOADING blocks for ``keys``, all of them lent.

        Parameters
        ----------
        first : int
            Index of ``keys[0]`` in its chain.
        parent : BlockKey
            Key before ``keys[0]``.
        token_ids : sequence of int
            All tokens of the sequence.

        Returns
        -------
        LoadingRun or None
            ``None`` when there is no room: then nothing has changed. Ends with `take` or `close`,
            and with an `arrive` for every block.
        """
        block_ids = self._pool.allocate(len(keys), BlockState.LOADING)
        if block_ids is None:
            return None
        self._pool.retain(block_ids)
        size = self._block_size
        tokens = tuple(
            tuple(token_ids[i * size : (i + 1) * size]) for i in range(first, first + len(keys))
        )
        run = LoadingRun(first, tuple(keys), parent, tokens, block_ids)
        self._runs.add(run)
        return run

    def arrive(self, run: LoadingRun, start: int, good: Sequence[bool]) -> None:
        """Record that the transfer of blocks ``start .. start + len(good)`` is over.

        Parameters
        ----------
        good : sequence of bool
            Whether each holds the right bytes now.
        """
        for index, is_good in enumerate(good, start):
            if run.arrivals[index] != Arrival.LENT:
                raise IntegrityError(f"block {index} of {run!r} arrived twice")
            run.arrivals[index] = Arrival.LOADED if is_good else Arrival.LOST
        self._pool.release(run.block_ids[start : start + len(good)])
        self._forget_if_over(run)

    def take(self, run: LoadingRun, num_blocks: int) -> list[int]:
        """Close a run and hand the references of its first `num_blocks` blocks to the caller.

        REQUIRES they are ready and the run's parent is findable. The caller's blocks are SEALED;
        where another block bears the key by now it is that one.
        """
        self._refuse_closed(run)
        if num_blocks > run.num_ready or not self._is_findable(run, 0):
            raise IntegrityError(f"{num_blocks} blocks taken of {run!r}")
        self._seal(run, num_blocks)
        taken = run.block_ids[:num_blocks]
        self._close(run, num_blocks)
        return taken

    def close(self, run: LoadingRun) -> None:
        """Let go of a run. What is ready stays findable, what is lent goes when it arrives."""
        self._refuse_closed(run)
        if self._is_findable(run, 0):
            self._seal(run, run.num_ready)
        self._close(run, 0)

    def references(self) -> Counter[int]:
        """Count the references of runs and transfers, by block. O(blocks of runs)."""
        references: Counter[int] = Counter()
        for run in self._runs:
            if run.is_open:
                references.update(run.block_ids)
            references.update(
                block_id
                for block_id, arrival in zip(run.block_ids, run.arrivals, strict=True)
                if arrival == Arrival.LENT
            )
        return references

    # ------------------------------------------------------------------ inside

    def _is_findable(self, run: LoadingRun, index: int) -> bool:
        """Whether what stands before block `index` can be found; before block 0 nothing need be."""
        return run.first + index == 0 or self._pool.index.get(run.parent_of(index)) is not None

    def _seal(self, run: LoadingRun, num_blocks: int) -> None:
        for index in range(num_blocks):
            block_id, key, parent = run.block_ids[index], run.keys[index], run.parent_of(index)
            depth, tokens = run.first + index, run.tokens(index)
            stands = self._pool.seal(block_id, key, parent, depth, tokens)
            run.block_ids[index] = stands
            if stands == block_id:
                self._on_stored(block_id, key, parent, depth, tokens)

    def _refuse_closed(self, run: LoadingRun) -> None:
        if not run.is_open:
            raise IntegrityError(f"{run!r} was closed before")

    def _close(self, run: LoadingRun, keep: int) -> None:
        run.is_open = False
        self._pool.release(run.block_ids[keep:])
        self._forget_if_over(run)

    def _forget_if_over(self, run: LoadingRun) -> None:
        if not run.is_open and not run.num_lent:
            self._runs.remove(run)
