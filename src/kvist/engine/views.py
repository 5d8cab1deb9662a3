"""What may be seen of the scheduler from outside: frozen views, nothing to hold on to."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One unfinished sequence as it stands.

    Attributes
    ----------
    num_tokens, num_computed_tokens : int
        Known, and recorded as computed.
    block_ids : tuple of int
        What it holds; empty while it waits.
    num_cached_tokens : int or None
        Taken from the cache when it first ran; ``None``: it has not run.
    preemptions, passes : int
        How often it gave its blocks up, and how often later ones were let in before it.
    """

    request_id: str
    status: SequenceStatus
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    num_cached_tokens: int | None
    preemptions: int
    passes: int

    @classmethod
    def of(cls, seq: Sequence) -> SequenceView:
        """Look at a sequence. O(its blocks)."""
        return cls(
            seq.request_id,
            seq.status,
            seq.num_tokens,
            seq.num_computed,
            tuple(seq.table.ids) if seq.table is not None else (),
            seq.num_cached_tokens,
            seq.preemptions,
            seq.passes,
        )
