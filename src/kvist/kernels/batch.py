"""One step's batch, as attention sees it.

Owns the integers that say which query tokens belong to which sequence, how long each context is,
and which blocks hold it; and the cut of long contexts into pieces. Knows nothing of requests, of
tokens as ids, or of the bytes in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

PIECE_TOKENS = 512
"""Decode splits every context after each so many tokens. A fixed count, never a function of the
batch or of the number of threads, so that neither can change a result."""


@dataclass(frozen=True, eq=False)
class PieceGroup:
    """Pieces of decode contexts that are gathered at one common width.

    The width of a piece follows from its own length alone: which other pieces share its group never
    changes how it is computed.

    Attributes
    ----------
    sequence : Tensor
        int64 [P], the sequence that each piece belongs to.
    rank : Tensor
        int64 [P], which piece of its sequence it is, counted from 0.
    blocks : Tensor
        int64 [P, W], block ids; columns past the end of the context name block 0.
    tokens : Tensor
        int64 [P], how many of the W * S slots are context; at least 1.
    """

    sequence: Tensor
    rank: Tensor
    blocks: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The sequences of one step: decodes first, all their query tokens in one flat run.

    ::

        query tokens   | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        query_start 0 1 2 3 7 9
                       `-num_decodes-'

    Query token ``i`` of sequence ``r`` stands at position ``context_lens[r] - query_lens[r] + i``
    and attends to every position up to and including its own. K and V of the step's own tokens are
    in the pool before attention runs. Build one with `build`, which checks it; it is made once a
    step and shared by all layers.

    Attributes
    ----------
    query_start : Tensor
        int32 [R + 1] on the device: where the tokens of each sequence begin.
    seq_lens : Tensor
        int32 [R] on the device: context length, this step's tokens included.
    block_tables : Tensor
        int32 [R, B] on the device; entries past the end of a context are never used.
    query_lens, context_lens : tuple of int
        The same lengths on the host, so that no kernel has to wait for the device.
    query_start_list : tuple of int
        `query_start` on the host.
    num_decodes : int
        The first so many sequences have exactly one query token.
    block_size : int
        S, slots in a block.

    Notes
    -----
    Immutable, except that `pieces` is computed at its first use, on the thread that runs the model.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_start_list: tuple[int, ...]
    num_decodes: int
    block_size: int

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]] | Tensor,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Check the numbers of a step and lay them out on the device.

        Parameters
        ----------
        query_lens, context_lens : sequence of int
            [R]; ``1 <= query_lens[r] <= context_lens[r]``. Sequences with one query token should
            come first: the leading run of them is decoded.
        block_tables : sequence of sequences of int, or Tensor
            [R] tables, each with at least ``ceil(context_lens[r] / block_size)`` block ids, or an
            int32 tensor [R, B] that is used as it is.
        block_size : int
            S, slots in a block.
        device : torch.device or str
            Where the pool is.

        Raises
        ------
        ValueError
            If lengths disagree, are out of range, or a table is too short.

        Notes
        -----
        O(R * B) on the host, three small copies to the device; no wait for it.
        """
        num_seqs = len(query_lens)
        if len(context_lens) != num_seqs or len(block_tables) != num_seqs:
            raise ValueError(
                f"a batch of {num_seqs} query lengths came with {len(context_lens)} context "
                f"lengths and {len(block_tables)} block tables; give one of each per sequence"
            )
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least 1 slot")
        tables = block_tables if isinstance(block_tables, Tensor) else None
        for r, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            if not 1 <= queries <= context:
                raise ValueError(
                    f"sequence {r} has {queries} query tokens in a context of {context}; the "
                    "context includes this step's tokens, so 1 <= queries <= context must hold"
                )
            held = tables.shape[1] if tables is not None else len(block_tables[r])
            if held * block_size < context:
                raise ValueError(
                    f"sequence {r} has a context of {context} tokens but a table of {held} blocks "
                    f"(block_size={block_size}); allocate {-(-context // block_size)} blocks first"
                )
        starts = tuple(accumulate(query_lens, initial=0))
        if tables is None:
            width = max((len(table) for table in block_tables), default=0)
            rows = [[*table, *([0] * (width - len(table)))] for table in block_tables]
            tables = torch.tensor(rows, dtype=torch.int32).reshape(num_seqs, width)
        num_decodes = next((r for r, n in enumerate(query_lens) if n != 1), num_seqs)
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True),
            seq_lens=torch.tensor(list(context_lens), dtype=torch.int32).to(
                device, non_blocking=True
            ),
            block_tables=tables.to(device=device, dtype=torch.int32, non_blocking=True),
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            query_start_list=starts,
            num_decodes=num_decodes,
            block_size=block_size,
        )

    @property
    def num_tokens(self) -> int:
        """T, query tokens of the step."""
        return self.query_start_list[-1]

    @property
    def piece_blocks(self) -> int:
        """Blocks in a full piece of a context."""
        return max(1, PIECE_TOKENS // self.block_size)

    @cached_property
    def pieces(self) -> tuple[PieceGroup, ...]:
        """Contexts of the decode sequences, cut after every `PIECE_TOKENS` tokens.

        Pieces are gathered at three widths (all of a piece, a fourth, a sixteenth), so that a short
        context does not pay for 512 slots and the number of launches stays small.
        """
        full = self.piece_blocks
        rows: dict[int, list[tuple[int, int, int, int]]] = {
            width: [] for width in (-(-full // 16), -(-full // 4), full)
        }
        for sequence, context in enumerate(self.context_lens[: self.num_decodes]):
            blocks = -(-context // self.block_size)
            for rank, first in enumerate(range(0, blocks, full)):
                held = min(full, blocks - first)
                tokens = min(context - first * self.block_size, held * self.block_size)
                width = next(width for width in rows if width >= held)
                rows[width].append((sequence, rank, first, tokens))
        return tuple(self._gather(width, group) for width, group in rows.items() if group)

    def _gather(self, width: int, group: list[tuple[int, int, int, int]]) -> PieceGroup:
        device = self.block_tables.device
        sequence, rank, first, tokens = torch.tensor(group, dtype=torch.int64, device=device).T
        column = first[:, None] + torch.arange(width, device=device)
        blocks = self.block_tables.long()[
            sequence[:, None], column.clamp(max=self.block_tables.shape[1] - 1)
        ]
        inside = torch.arange(width, device=device) * self.block_size < tokens[:, None]
        return PieceGroup(sequence, rank, blocks.where(inside, 0), tokens)
