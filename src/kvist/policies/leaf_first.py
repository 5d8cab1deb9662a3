"""What all leaf-first policies share: everything but their one idea.

Owns the calls of `EvictionPolicy` over one `Leaves`. A policy says where a new block stands, where
a used one goes, what remains of one that left, and who is first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvist.policies.base import Candidate
from kvist.policies.leaves import Leaves, Resident


class LeafFirstPolicy(ABC):
    """Base of the policies. See `EvictionPolicy` for what its methods promise."""

    def __init__(self, num_queues: int = 1) -> None:
        self._leaves = Leaves(num_queues)

    @abstractmethod
    def _enter(self, block: Candidate, uses: int) -> None:
        """Insert a block that is not resident."""

    @abstractmethod
    def _used(self, key: bytes, uses: int) -> None:
        """Move a resident that was used."""

    def _left(self, gone: Resident) -> None:  # noqa: B027 - most remember nothing
        """Remember a block that was evicted, and where it stood."""

    def _forgotten(self, key: bytes) -> None:  # noqa: B027 - most remember nothing
        """Drop what is known of a block that is gone."""

    @abstractmethod
    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`."""

    def add(self, block: Candidate, uses: int = 1) -> None:
        """See `EvictionPolicy.add`."""
        if not self._leaves.has(block.key):
            self._enter(block, uses)
        else:
            if uses:
                self._used(block.key, uses)
            self._leaves.offer(block.key)

    def touch(self, key: bytes, uses: int = 1) -> None:
        """See `EvictionPolicy.touch`."""
        self._used(key, uses)

    def withhold(self, key: bytes) -> None:
        """See `EvictionPolicy.withhold`."""
        self._leaves.withhold(key)

    def offer(self, key: bytes) -> None:
        """See `EvictionPolicy.offer`."""
        self._leaves.offer(key)

    def evict(self, key: bytes) -> None:
        """See `EvictionPolicy.evict`."""
        self._left(self._leaves.remove(key))

    def forget(self, key: bytes) -> None:
        """See `EvictionPolicy.forget`."""
        self._forgotten(key)
        self._leaves.remove(key)

    @property
    def num_offered(self) -> int:
        """See `EvictionPolicy.num_offered`."""
        return self._leaves.num_offered

    def is_leaf(self, key: bytes) -> bool:
        """See `EvictionPolicy.is_leaf`."""
        return self._leaves.is_leaf(key)

    def __contains__(self, key: object) -> bool:
        return self._leaves.has(key)

    def __len__(self) -> int:
        return len(self._leaves)

    def offered(self) -> Iterator[bytes]:
        """See `EvictionPolicy.offered`."""
        return self._leaves.offered()

    def check(self) -> None:
        """See `EvictionPolicy.check`."""
        self._leaves.check()
