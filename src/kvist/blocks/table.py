"""Block table of one sequence: which block holds its n-th run of S tokens.

::

    tokens   0 ........ S-1 | S ....... 2S-1 | 2S ... num_tokens
    blocks   ids[0] SEALED  | ids[1] SEALED  | ids[2] OPEN       | ids[3] reserved, empty

A plain record; `KVCacheManager` is its only writer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvist.blocks.block import Block, BlockState
from kvist.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` over block `target`, before the forward pass."""

    source: int
    target: int


class BlockTable:
    """Blocks and filled tokens of one sequence.

    Attributes
    ----------
    ids : array of int32
        Block ids in token order. An array and not a list, so that a plan can take a snapshot and
        the batch builder can view it at the speed of memcpy.
    num_tokens : int
        Tokens whose K and V are recorded as written.
    num_sealed : int
        Leading blocks that are SEALED (or full, when the sequence is not to be found).
    num_shared : int
        Leading blocks that came from a match which is not yet recorded as a hit.
    num_reserved : int
        Tokens up to which a reservation that is not yet recorded may write; 0 when there is none.
    copies : list of (index, source id)
        Copy-on-write made by a reservation that is not yet recorded: ``ids[index]`` is the new
        block; the source keeps the table's reference until then.
    """

    __slots__ = ("copies", "ids", "num_reserved", "num_sealed", "num_shared", "num_tokens")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.num_tokens = 0
        self.num_sealed = 0
        self.num_shared = 0
        self.num_reserved = 0
        self.copies: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.ids)

    def holds_beyond(self, num_tokens: int, index: int, block_id: int) -> bool:
        """Whether its ``index``-th block is `block_id` and has, or may get, more than `num_tokens`.

        The source of a copy in flight counts with what is recorded: a step that fails gives it
        back, and what was written in it meanwhile must not show.
        """
        if index < len(self.ids) and self.ids[index] == block_id:
            return max(self.num_tokens, self.num_reserved) > num_tokens
        return self.num_tokens > num_tokens and (index, block_id) in self.copies

    def check(self, block_size: int, blocks: Sequence[Block]) -> None:
        """Raise `IntegrityError` unless the counts fit each other, and the `blocks` of the pool."""
        if len(set(self.ids)) != len(self.ids):
            raise IntegrityError(f"{self!r} lists a block twice")
        if self.num_tokens > len(self.ids) * block_size:
            raise IntegrityError(f"{self!r} holds more tokens than its blocks have slots")
        if self.num_sealed > self.num_tokens // block_size:
            raise IntegrityError(f"{self!r} counts {self.num_sealed} sealed blocks")
        for index, block_id in enumerate(self.ids):
            state = blocks[block_id].state
            if state in (BlockState.FREE, BlockState.CACHED, BlockState.LOADING):
                raise IntegrityError(f"{self!r} uses {blocks[block_id]!r}")
            if index > self.num_tokens // block_size and state != BlockState.OPEN:
                raise IntegrityError(f"{self!r} reserved {blocks[block_id]!r}")

    def __repr__(self) -> str:
        return f"<BlockTable {self.num_tokens} tokens in {len(self.ids)} blocks>"
