"""The memory of the host tier: one mapping, cut into extents.

Owns the bytes. Knows neither which extents are free nor whose they are.

One mapping rather than an allocation a block: records come and go in all lengths for days, and
`malloc` would leave holes that no budget sees. It is not touched in advance, so it costs what was
used at most so far, and never more than its size.

Threads: any, each with extents of its own; the interpreter lock is let go over the bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvist.codecs.copying import Bytes, copy_bytes
from kvist.errors import CapacityError
from kvist.tiers.extents import EXTENT_BYTES, Run

Pin = Callable[[memoryview], Callable[[], None]]
"""Pins memory so that a device can read it directly; returns what undoes it."""


class HostRoom:
    """`num_extents` extents of memory.

    Parameters
    ----------
    num_extents : int
    pin : Pin, optional
        Called once with the whole mapping. Pinning touches all of it.

    Raises
    ------
    CapacityError
        If the machine does not give so much.
    """

    def __init__(self, num_extents: int, pin: Pin | None = None) -> None:
        nbytes = num_extents * EXTENT_BYTES
        try:
            self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"a host tier of {nbytes} bytes could not be mapped: {error};"
                " give it less, as in --tier host:1GiB"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._whole = memoryview(self._mapping)
        self._unpin = pin(self._whole) if pin is not None else None

    def write(self, runs: Sequence[Run], parts: Sequence[Bytes]) -> None:
        """Lay `parts` end to end into `runs`."""
        pieces = self._pieces(runs)
        piece = next(pieces)
        for part in parts:
            rest = memoryview(part)
            while rest:
                if not piece:
                    piece = next(pieces)
                taken = min(len(rest), len(piece))
                copy_bytes(piece[:taken], rest[:taken])
                piece, rest = piece[taken:], rest[taken:]

    def read(self, runs: Sequence[Run], start: int, end: int) -> memoryview:
        """Return bytes ``[start, end)`` of what lies in `runs`.

        A view of the memory itself where they lie together, else a copy.
        """
        parts = list(self._parts(runs, start, end))
        if len(parts) == 1:
            return parts[0]
        whole = np.empty(end - start, dtype=np.uint8).data
        position = 0
        for part in parts:
            copy_bytes(whole[position : position + len(part)], part)
            position += len(part)
        return whole

    def close(self) -> None:
        """Give the memory back. REQUIRES that no view of it is in use."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._whole.release()
        self._mapping.close()

    def _pieces(self, runs: Sequence[Run]) -> Iterator[memoryview]:
        for first, count in runs:
            yield self._whole[first * EXTENT_BYTES : (first + count) * EXTENT_BYTES]

    def _parts(self, runs: Sequence[Run], start: int, end: int) -> Iterator[memoryview]:
        position = 0
        for piece in self._pieces(runs):
            low, high = max(start - position, 0), min(end - position, len(piece))
            if low < high:
                yield piece[low:high]
            position += len(piece)
