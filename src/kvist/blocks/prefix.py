"""Index of findable blocks by content address.

Owns key -> block id. Knows nothing of references, room or order; `BlockPool` keeps it true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvist.keys import BlockKey


class PrefixIndex:
    """Find the longest known prefix of a chain of keys. Threads: step thread only."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        # The dict's own: they are called for every block that comes or goes.
        self.get: Callable[[BlockKey], int | None] = self._ids.get
        """Return the block that holds a key, or ``None``."""
        self.add: Callable[[BlockKey, int], None] = self._ids.__setitem__
        """Make a block findable. REQUIRES its key is not known."""
        self.take: Callable[[bytes, None], int | None] = self._ids.pop
        """Forget a key; return its block, or the second argument where it is not known."""

    def longest_prefix(self, keys: Sequence[BlockKey], limit: int) -> list[int]:
        """Return the blocks of the longest known prefix of ``keys[:limit]``.

        Notes
        -----
        O(blocks found + 1); changes nothing.
        """
        ids = self._ids
        found: list[int] = []
        for index in range(min(limit, len(keys))):
            block_id = ids.get(keys[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def __len__(self) -> int:
        return len(self._ids)

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over every key and its block."""
        return iter(self._ids.items())
