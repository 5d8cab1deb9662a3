"""A share of the room that only blocks in repeated use may hold, around any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvist.errors import IntegrityError
from kvist.policies.base import Candidate, EvictionPolicy
from kvist.policies.lru import LRUPolicy


class ProtectedPolicy:
    """Keep up to `share` of the capacity for blocks that were used at least twice.

    ::

        all residents ─┬─ loose      leave by the inner policy
                       └─ protected  leave only when nothing loose can; the least
                                     recently used becomes loose when they outgrow their share

    However many one-off prompts come by, they compete with each other for the loose part. The idea
    is segmented LRU (Karedla et al., 1994). Ours differs: the loose part may follow any policy,
    which goes on hearing of protected blocks, so that one which becomes loose stands there by its
    merits; and leaf first holds across both parts, because both orders know every resident.
    """

    def __init__(
        self, make: Callable[[int], EvictionPolicy], capacity: int, share: float, min_uses: int = 2
    ) -> None:
        self._loose = make(capacity)
        self._protected = LRUPolicy()
        self._room = share * capacity
        self._min_uses = min_uses
        self._blocks: dict[bytes, Candidate] = {}
        self._uses: dict[bytes, int] = {}
        self._hot: set[bytes] = set()
        self._hot_size = 0
        self._withheld: set[bytes] = set()

    def add(self, block: Candidate, uses: int = 1) -> None:
        """See `EvictionPolicy.add`."""
        key = block.key
        self._blocks.setdefault(key, block)
        self._withheld.discard(key)
        self._loose.add(block, uses)
        self._protected.add(block, uses)
        self._sort(key, uses)

    def touch(self, key: bytes, uses: int = 1) -> None:
        """See `EvictionPolicy.touch`."""
        self._loose.touch(key, uses)
        self._protected.touch(key, uses)
        self._sort(key, uses)

    def withhold(self, key: bytes) -> None:
        """See `EvictionPolicy.withhold`."""
        self._withheld.add(key)
        self._loose.withhold(key)
        self._protected.withhold(key)

    def offer(self, key: bytes) -> None:
        """See `EvictionPolicy.offer`."""
        self._withheld.discard(key)
        self._place(key)

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`."""
        victim = self._loose.victim()
        return victim if victim is not None else self._protected.victim()

    def evict(self, key: bytes) -> None:
        """See `EvictionPolicy.evict`."""
        self._drop(key)
        self._loose.evict(key)
        self._protected.evict(key)

    def forget(self, key: bytes) -> None:
        """See `EvictionPolicy.forget`."""
        self._drop(key)
        self._loose.forget(key)
        self._protected.forget(key)

    @property
    def num_offered(self) -> int:
        """See `EvictionPolicy.num_offered`."""
        return len(self._blocks) - len(self._withheld)

    def is_leaf(self, key: bytes) -> bool:
        """See `EvictionPolicy.is_leaf`."""
        return self._loose.is_leaf(key)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def offered(self) -> Iterator[bytes]:
        """See `EvictionPolicy.offered`."""
        return (key for key in self._blocks if key not in self._withheld)

    def check(self) -> None:
        """See `EvictionPolicy.check`."""
        self._loose.check()
        self._protected.check()
        loose, protected = set(self._loose.offered()), set(self._protected.offered())
        if loose & protected or (loose | protected) != set(self.offered()):
            raise IntegrityError("a block that may leave is in no order, or in both")
        size = sum(self._blocks[key].size for key in self._hot)
        if size != self._hot_size or size > self._room:
            raise IntegrityError(f"{size} of {self._room} are protected, counted {self._hot_size}")

    def _sort(self, key: bytes, uses: int) -> None:
        """After a use: protect what has earned it, and make loose what that leaves no room for."""
        self._uses[key] = self._uses.get(key, 0) + uses
        if key not in self._hot and self._uses[key] >= self._min_uses:
            self._hot.add(key)
            self._hot_size += self._blocks[key].size
        self._place(key)
        while self._hot_size > self._room:
            least = self._protected.victim()
            # What is withheld counts against the share and cannot be asked to go: then it is the
            # newcomer that finds no room.
            self._unprotect(least if least is not None else key)

    def _unprotect(self, key: bytes) -> None:
        self._hot.remove(key)
        self._hot_size -= self._blocks[key].size
        self._place(key)

    def _place(self, key: bytes) -> None:
        """Offer a block in the order that it belongs to, and in that only."""
        self._loose.withhold(key)
        self._protected.withhold(key)
        if key not in self._withheld:
            (self._protected if key in self._hot else self._loose).offer(key)

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        del self._uses[key]
        self._withheld.discard(key)
        if key in self._hot:
            self._hot.remove(key)
            self._hot_size -= block.size
