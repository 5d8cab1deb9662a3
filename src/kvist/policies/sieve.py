"""One queue, one bit, and a hand that moves."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.leaf_first import LeafFirstPolicy
from kvist.policies.leaves import Resident


class SievePolicy(LeafFirstPolicy):
    """A hand goes from the oldest to the newest and takes the first that nobody used meanwhile.

    Used ones lose their bit and keep their place, so new ones that are never used are sifted out
    quickly. Zhang et al., *SIEVE is simpler than LRU* (2024). Ours differs: only leaves come under
    the hand. The blocks that it has passed stand in a second queue until it starts anew.
    """

    def __init__(self) -> None:
        super().__init__(num_queues=2)
        self._ahead, self._behind = 0, 1
        self._visited: set[bytes] = set()

    def _enter(self, block: Candidate, uses: int) -> None:
        self._leaves.insert(block, self._ahead)
        if uses > 1:
            self._visited.add(block.key)

    def _used(self, key: bytes, uses: int) -> None:
        self._visited.add(key)

    def _left(self, gone: Resident) -> None:
        self._visited.discard(gone.block.key)

    def _forgotten(self, key: bytes) -> None:
        self._visited.discard(key)

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`. Moves the hand; amortised over uses."""
        # To the end, once around to take every bit, and once more to find one without.
        for _ in range(3):
            while (key := self._leaves.lowest(self._ahead)) is not None:
                if key not in self._visited:
                    return key
                self._visited.remove(key)
                self._leaves.move(key, self._behind)
            self._ahead, self._behind = self._behind, self._ahead
        return None
