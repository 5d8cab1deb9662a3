"""What is remembered of blocks that are gone: bounded, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict


class Ghosts:
    """A number for each of the blocks that left last, whose sizes sum up to at most `capacity`.

    O(1) amortised. About 200 bytes a ghost, the key included.
    """

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._values: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Sizes of the remembered blocks."""
        return self._size

    def remember(self, key: bytes, size: int, value: int) -> None:
        """Remember `value` for a block that left just now."""
        known = self._values.pop(key, None)
        if known is not None:
            self._size -= known[0]
        self._values[key] = (size, value)
        self._size += size
        if self._size > self._capacity:
            self.shrink(self._capacity)

    def recall(self, key: bytes) -> int | None:
        """Return what is remembered of a block and forget it, or ``None``."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._size -= found[0]
        return found[1]

    def shrink(self, size: float) -> None:
        """Forget the oldest until no more than `size` is left."""
        while self._size > size:
            _, (gone, _) = self._values.popitem(last=False)
            self._size -= gone

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
