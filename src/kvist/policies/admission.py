"""What is worth keeping at all: blocks that were wanted more than once."""

from __future__ import annotations

from collections.abc import Sequence

from kvist.policies.ghosts import Ghosts


class MinimumHits:
    """Admit a block when it is offered for the `min_hits`-th time.

    Three of four blocks of a chat are never used again: writing them to a disk costs wear and
    bandwidth and pushes others out. The idea is the *doorkeeper* of TinyLFU (Einziger et al.,
    2017); ours differs in that it keeps exact keys, the `memory` offered last, rather than a Bloom
    filter that is reset: a wrong "seen before" costs a write, and 200 bytes a key are cheap beside
    blocks of a megabyte.

    O(1) a key. Threads: one, the owner's.
    """

    def __init__(self, min_hits: int, memory: int) -> None:
        self.min_hits = min_hits
        self._seen = Ghosts(memory)

    def admit(self, keys: Sequence[bytes]) -> int:
        """Count one offering of each block of a run of a chain, parents first.

        Returns
        -------
        int
            How many leading ones are to be kept. Never one behind a gap: it could not be reached.
        """
        if self.min_hits <= 1:
            return len(keys)
        admitted = 0
        for index, key in enumerate(keys):
            times = (self._seen.recall(key) or 0) + 1
            self._seen.remember(key, 1, times)
            if times >= self.min_hits and admitted == index:
                admitted += 1
        return admitted
