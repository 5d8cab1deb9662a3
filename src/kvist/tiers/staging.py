"""Room for copies of blocks on their way down.

Owns one buffer of fixed size, cut into slots of one block. A block that is to be demoted is copied
here by the step thread (tens of microseconds), and tiers read it from here: so the device's block
may be evicted at any time, and a tier that hangs holds nothing but its slots.

Threads: step thread only; the bytes of a slot may be read by a tier's threads while it is lent.
"""

from __future__ import annotations

import mmap

from kvist.errors import IntegrityError


class Staging:
    """Slots of `block_bytes`, each lent to one or several jobs.

    Parameters
    ----------
    num_slots, block_bytes : int
        The memory arrives when slots are first written.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._memory = memoryview(mmap.mmap(-1, max(1, num_slots * block_bytes)))
        self._free = list(range(num_slots - 1, -1, -1))
        self._lent: dict[int, int] = {}
        self._touched = 0

    @property
    def touched_bytes(self) -> int:
        """Bytes that were ever written, and are there: slots are reused, the lowest first."""
        return self._touched * self.block_bytes

    @property
    def num_free(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes set aside."""
        return self.num_slots * self.block_bytes

    def take(self) -> int | None:
        """Return a slot with one reference; ``None`` when all are lent."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._touched = max(self._touched, slot + 1)
        self._lent[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """Add a reference."""
        self._lent[slot] += 1

    def release(self, slot: int) -> None:
        """Take a reference; the last one frees the slot."""
        self._lent[slot] -= 1
        if not self._lent[slot]:
            del self._lent[slot]
            self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        start = slot * self.block_bytes
        return self._memory[start : start + self.block_bytes]

    def check(self) -> None:
        """Raise `IntegrityError` unless every slot is free or lent, and not both."""
        if len(self._free) + len(self._lent) != self.num_slots or set(self._free) & set(self._lent):
            raise IntegrityError(f"{len(self._free)} free + {len(self._lent)} lent slots")
