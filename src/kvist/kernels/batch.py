"""One step's batch, as attention sees it.

Owns the integers that say which query tokens belong to which sequence, how long each context is,
and which blocks hold it; and the cut of long contexts into pieces. Knows nothing of requests, of
tokens as ids, or of the bytes in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

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
    begin : Tensor
        int64 [P], the first of them that a window shows; 0 without one.
    """

    sequence: Tensor
    rank: Tensor
    blocks: Tensor
    tokens: Tensor
    begin: Tensor


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
    runs : Tensor or None
        int32 [M, 4] on the device, in place of block tables: (block id, first slot, count, position
        of the first token), see `of_runs`.
    run_start : Tensor or None
        int32 [R + 1] on the device: where the runs of each sequence begin.
    run_start_list : tuple of int
        `run_start` on the host.
    derived : dict
        What backends made of this batch at its first layer, for the others; each under keys of its
        own.

    Notes
    -----
    Immutable, except that `derived` is filled in at first uses, on the thread that runs the model.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    query_start_list: tuple[int, ...]
    num_decodes: int
    block_size: int
    runs: Tensor | None = None
    run_start: Tensor | None = None
    run_start_list: tuple[int, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

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

    @classmethod
    def of_runs(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        runs: Sequence[Sequence[tuple[int, int, int, int]]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Like `build`, for contexts with holes.

        ::

            run        block 7, slot 0, 4 tokens, position 0    block 3, slot 2, 6 tokens, 90
            attended   positions 0 .. 3 and 90 .. 95 of a context of 96

        Parameters
        ----------
        query_lens, context_lens, block_size, device
            As in `build`; a context length is the position of its last token and one more, however
            few tokens are attended.
        runs : sequence of sequences of (block id, first slot, count, position)
            [R] lists. Each run lies in one block; positions ascend and do not overlap.

        Raises
        ------
        ValueError
            As in `build`, and if a run leaves its block or its context, or goes back.
        """
        if len(runs) != len(query_lens):
            raise ValueError(f"{len(query_lens)} sequences came with {len(runs)} lists of runs")
        for r, own in enumerate(runs):
            ends = [0, *(position + count for _, _, count, position in own)]
            for (_, slot, count, position), end in zip(own, ends, strict=False):
                if slot < 0 or count < 1 or slot + count > block_size or position < end:
                    raise ValueError(
                        f"sequence {r} has a run of {count} tokens from slot {slot} on at position "
                        f"{position}; it must lie in a block of {block_size} slots and begin at "
                        f"position {end} or later"
                    )
            if ends[-1] > context_lens[r]:
                raise ValueError(
                    f"the runs of sequence {r} end at position {ends[-1]}, its context at "
                    f"{context_lens[r]}"
                )
        blocks = [-(-context // block_size) for context in context_lens]
        tables = torch.zeros(len(runs), max(blocks, default=0), dtype=torch.int32)
        plain = cls.build(query_lens, context_lens, tables, block_size, device)
        starts = tuple(accumulate((len(own) for own in runs), initial=0))
        rows = [run for own in runs for run in own]
        return replace(
            plain,
            runs=torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device),
            run_start=torch.tensor(starts, dtype=torch.int32).to(device),
            run_start_list=starts,
            derived={},
        )

    def places(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the attended tokens of a sequence lie.

        Returns
        -------
        blocks : Tensor
            int64 [B], block ids.
        index : Tensor
            int64 [C], slots of the tokens, counted through these blocks.
        positions : Tensor
            int64 [C].
        """
        device = self.block_tables.device
        if self.runs is None:
            context = self.context_lens[r]
            table = self.block_tables[r, : -(-context // self.block_size)].long()
            index = torch.arange(context, device=device)
            return table, index, index
        begin, end = self.run_start_list[r : r + 2]
        blocks, slots, counts, positions = self.runs[begin:end].long().unbind(1)
        slot = torch.arange(self.block_size, device=device)
        held = (slot >= slots[:, None]) & (slot < (slots + counts)[:, None])  # [M, S]
        index = held.flatten().nonzero().flatten()
        return blocks, index, ((positions - slots)[:, None] + slot)[held]

    @property
    def num_tokens(self) -> int:
        """T, query tokens of the step."""
        return self.query_start_list[-1]

    @property
    def piece_blocks(self) -> int:
        """Blocks in a full piece of a context."""
        return max(1, PIECE_TOKENS // self.block_size)

    def pieces(self, window: int | None = None) -> tuple[PieceGroup, ...]:
        """Contexts of the decode sequences, cut after every `PIECE_TOKENS` tokens.

        Pieces are gathered at three widths (all of a piece, a fourth, a sixteenth), so that a short
        context does not pay for 512 slots and the number of launches stays small. Those that lie
        before a window of so many tokens are left out. Made once and kept.
        """
        key = ("pieces", window)
        found: tuple[PieceGroup, ...] | None = self.derived.get(key)
        if found is None:
            found = self.derived[key] = self._pieces(window)
        return found

    def _pieces(self, window: int | None) -> tuple[PieceGroup, ...]:
        full = self.piece_blocks
        rows: dict[int, list[tuple[int, int, int, int, int]]] = {
            width: [] for width in (-(-full // 16), -(-full // 4), full)
        }
        for sequence, context in enumerate(self.context_lens[: self.num_decodes]):
            blocks = -(-context // self.block_size)
            hidden = 0 if window is None else max(0, context - window)
            for rank, first in enumerate(range(0, blocks, full)):
                held = min(full, blocks - first)
                tokens = min(context - first * self.block_size, held * self.block_size)
                begin = max(0, hidden - first * self.block_size)
                if begin < tokens:
                    width = next(width for width in rows if width >= held)
                    rows[width].append((sequence, rank, first, tokens, begin))
        return tuple(self._gather(width, group) for width, group in rows.items() if group)

    def _gather(self, width: int, group: list[tuple[int, int, int, int, int]]) -> PieceGroup:
        device = self.block_tables.device
        sequence, rank, first, tokens, begin = torch.tensor(
            group, dtype=torch.int64, device=device
        ).T
        column = first[:, None] + torch.arange(width, device=device)
        blocks = self.block_tables.long()[
            sequence[:, None], column.clamp(max=self.block_tables.shape[1] - 1)
        ]
        inside = torch.arange(width, device=device) * self.block_size < tokens[:, None]
        return PieceGroup(sequence, rank, blocks.where(inside, 0), tokens, begin)
