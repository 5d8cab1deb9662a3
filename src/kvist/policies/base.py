"""The contract of an eviction order, the same for the device pool and for every tier.

A policy sees opaque keys, sizes and uses; never bytes, tiers or requests. A block that it knows is
*resident*; one that may leave is *offered* as well::

    add ─▶ resident, offered ──withhold──▶ resident, withheld ──offer──▶ resident, offered
                 │                                │
                 └──────────── evict · forget ────┘ ─▶ unknown; after `evict` perhaps a ghost
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """What a policy is told of a block.

    Attributes
    ----------
    key : bytes
        Its name.
    parent : bytes
        Name of the block it continues; anything that is no key of a block for the first one.
    depth : int
        Blocks between it and the start of its chain.
    size : int
        At least 1, in the unit of the policy's capacity: blocks on the device, bytes in a tier.
    recompute_s : float
        Seconds that computing it again would take; 0 where unknown.
    """

    key: bytes
    parent: bytes = b""
    depth: int = 0
    size: int = 1
    recompute_s: float = 0.0


class EvictionPolicy(Protocol):
    """Order in which blocks leave.

    REQUIRES: blocks of one sequence are told of tail first, so that of two equal ones the deeper
    leaves first. ENSURES: `victim` is a *leaf*: no resident block continues it. A parent that left
    before its child would make the child unreachable and waste its room.

    Threads: one, the owner's. Every method but iteration and `check` is O(log n) amortised.
    """

    def add(self, block: Candidate, uses: int = 1) -> None:
        """Tell of a block that was used `uses` times and may leave from now on.

        Of a resident one too: it may have been withheld meanwhile.
        """

    def touch(self, key: bytes, uses: int = 1) -> None:
        """Tell that a resident block was used; whether it may leave does not change."""

    def withhold(self, key: bytes) -> None:
        """Keep a resident block from leaving, and with it all blocks that it continues."""

    def offer(self, key: bytes) -> None:
        """Undo `withhold`. Not a use: it stands where it would stand without."""

    def victim(self) -> bytes | None:
        """Return the block that should leave first; a look, not a removal.

        ``None`` when nothing may leave: all are withheld, or are continued by such.
        """

    def evict(self, key: bytes) -> None:
        """Forget an offered block that left to make room; what it was worth may be remembered."""

    def forget(self, key: bytes) -> None:
        """Forget a resident block that is gone for another reason, with all that was known."""

    @property
    def num_offered(self) -> int:
        """Blocks that may leave."""

    def is_leaf(self, key: bytes) -> bool:
        """Whether no resident block continues `key`."""

    def __contains__(self, key: object) -> bool:
        """Whether a block is resident."""

    def __len__(self) -> int:
        """Return the number of resident blocks."""

    def offered(self) -> Iterator[bytes]:
        """Iterate over the blocks that may leave, in no order. O(residents)."""

    def check(self) -> None:
        """Raise `IntegrityError` unless the order is sound. O(residents): for tests, and idle."""
