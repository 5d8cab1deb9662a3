"""Three queues: a small one to be proven in, a main one, and ghosts."""

from __future__ import annotations

from kvist.policies.base import Candidate
from kvist.policies.ghosts import Ghosts
from kvist.policies.leaf_first import LeafFirstPolicy
from kvist.policies.leaves import Resident

SMALL, MAIN = 0, 1
SMALL_SHARE = 0.1
MAX_USES = 3
TO_MAIN_USES = 2


class S3FIFOPolicy(LeafFirstPolicy):
    """Evict first-in-first-out from a tenth of the room; what is used there moves to the rest.

    ::

        new ─▶ small (10 %) ──used twice?──▶ main ─┐ used since it last came up:
                  │ no                        ▲    │ once more round, one use less
                  ▼                           └────┘
               ghosts ──comes back──▶ main         no ─▶ gone

    Yang et al., *FIFO queues are all you need for cache eviction* (2023). Ours differs: only leaves
    come up, so a queue is not left strictly in its order, and the place in it costs O(log n).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(num_queues=2)
        self._small = SMALL_SHARE * capacity
        self._ghosts = Ghosts(capacity - self._small)
        # Uses since a block came in, or came up last.
        self._uses: dict[bytes, int] = {}

    def _enter(self, block: Candidate, uses: int) -> None:
        known = self._ghosts.recall(block.key) is not None
        self._uses[block.key] = min(MAX_USES, max(0, uses - 1))
        self._leaves.insert(block, MAIN if known else SMALL)

    def _used(self, key: bytes, uses: int) -> None:
        self._uses[key] = min(MAX_USES, self._uses[key] + uses)

    def _left(self, gone: Resident) -> None:
        del self._uses[gone.block.key]
        if gone.queue == SMALL:
            self._ghosts.remember(gone.block.key, gone.block.size, 0)

    def _forgotten(self, key: bytes) -> None:
        del self._uses[key]

    def victim(self) -> bytes | None:
        """See `EvictionPolicy.victim`. Moves what comes up and was used: amortised over uses."""
        while True:
            small, main = self._leaves.lowest(SMALL), self._leaves.lowest(MAIN)
            if small is not None and (main is None or self._leaves.size(SMALL) >= self._small):
                if self._uses[small] < TO_MAIN_USES:
                    return small
                self._uses[small] = 0
                self._leaves.place(small, MAIN)
            elif main is not None and self._uses[main]:
                self._uses[main] -= 1
                self._leaves.place(main, MAIN)
            else:
                return main
