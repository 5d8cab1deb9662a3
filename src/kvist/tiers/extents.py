"""The arena that the host tier and the disk tier share: a fixed room cut into equal extents.

Owns which extents are free, in integers. Knows no bytes, no files and no keys. A record occupies
extents that need not be adjacent, so a room is full only when it is full: records of any length
fit into holes of any shape, and what a codec saves is room for more records::

    0        1        2        3        4        5        6        7
    [ rec A ][ rec A ][ rec B ][  free  ][ rec A ][ rec C ][  free  ][  free  ]

    A = ((0, 2), (4, 1))      free = {3: 1, 6: 2}

Paging is the idea of the block pool, applied to records of unequal length. It differs in that
neighbours are kept together where that costs nothing, since one long read beats many short ones:
a record goes whole into the hole that fits best by size class, and is split only when no hole is
long enough.

Threads: none of its own; whoever owns an arena guards it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

from kvist.errors import IntegrityError

EXTENT_BYTES = 32 << 10

Run: TypeAlias = tuple[int, int]
"""First extent and how many: ``(4, 2)`` is extents 4 and 5."""


def extents_for(nbytes: int) -> int:
    """Return how many extents `nbytes` occupy; at least one."""
    return max(1, -(-nbytes // EXTENT_BYTES))


class ExtentArena:
    """Free extents of a room of fixed size.

    Parameters
    ----------
    num_extents : int
        Size of the room; extents are numbered from 0.

    Notes
    -----
    Every call takes O(runs · log holes), and a short memmove, whatever the size of the room. Memory
    goes with the number of holes, not of extents.
    """

    __slots__ = ("_classes", "_lengths", "_starts", "num_extents", "num_free")

    def __init__(self, num_extents: int) -> None:
        self.num_extents = num_extents
        self.num_free = 0
        # Maximal free runs: their first extents in order, their lengths, and their first extents
        # by power of two of the length. A dict and not a set: `popitem`-like access to the last
        # one in is O(1), and the order is the same in every run of the program.
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(num_extents.bit_length() + 1)]
        if num_extents:
            self._insert(0, num_extents)

    @property
    def num_used(self) -> int:
        """Extents that belong to records."""
        return self.num_extents - self.num_free

    @property
    def num_holes(self) -> int:
        """Maximal runs of free extents."""
        return len(self._starts)

    def allocate(self, count: int, max_runs: int | None = None) -> tuple[Run, ...] | None:
        """Take `count` extents, in as few pieces as is cheap to find.

        Parameters
        ----------
        count : int
            At least 1.
        max_runs : int, optional
            Pieces at most, where the owner has room to note only so many.

        Returns
        -------
        tuple of Run or None
            ``None``, and nothing taken, if there are not so many, or only in more pieces.
        """
        if count < 1 or count > self.num_free:
            return None
        taken: list[Run] = []
        missing = count
        while missing:
            if len(taken) == max_runs:
                self.release(taken)
                return None
            start = self._hole_for(missing)
            length = self._lengths[start]
            self._remove(start)
            if length > missing:
                self._insert(start + missing, length - missing)
                length = missing
            taken.append((start, length))
            missing -= length
        return tuple(taken)

    def claim(self, runs: Iterable[Run]) -> None:
        """Take exactly these extents: those of a record that somebody else placed.

        Raises
        ------
        IntegrityError
            If one of them is not free. Runs before it stay taken.
        """
        for start, length in runs:
            index = bisect_right(self._starts, start) - 1
            hole = self._starts[index] if index >= 0 else -1
            end, hole_end = start + length, hole + self._lengths.get(hole, 0)
            if length < 1 or end > hole_end or hole < 0:
                raise IntegrityError(
                    f"extents {start}..{end - 1} of {self.num_extents} are claimed by one record "
                    "and belong to another"
                )
            self._remove(hole)
            if start > hole:
                self._insert(hole, start - hole)
            if hole_end > end:
                self._insert(end, hole_end - end)

    def release(self, runs: Iterable[Run]) -> None:
        """Give extents back.

        Raises
        ------
        IntegrityError
            If one of them is free already or does not exist. Runs before it stay released.
        """
        for start, length in runs:
            end = start + length
            index = bisect_right(self._starts, start)
            before = self._starts[index - 1] if index else None
            after = self._starts[index] if index < len(self._starts) else None
            before_end = 0 if before is None else before + self._lengths[before]
            room_end = self.num_extents if after is None else after
            if length < 1 or start < before_end or end > room_end:
                raise IntegrityError(
                    f"extents {start}..{end - 1} of {self.num_extents} are released, but some "
                    "are free already or do not exist"
                )
            if before is not None and before_end == start:
                self._remove(before)
                start = before
            if after == end:
                end += self._lengths[after]
                self._remove(after)
            self._insert(start, end - start)

    def check(self, records: Iterable[Iterable[Run]] | None = None) -> None:
        """Raise `IntegrityError` unless the books hold. O(holes), or O(records) with `records`.

        Parameters
        ----------
        records : iterable of iterable of Run, optional
            Runs of every record there is: together with the holes they must cover the room, each
            extent once.
        """
        lengths, starts = self._lengths, self._starts
        if starts != sorted(lengths):
            raise IntegrityError(f"order of {len(starts)} holes and their lengths disagree")
        for start, following in pairwise(starts):
            if start + lengths[start] >= following:
                raise IntegrityError(f"hole {start}+{lengths[start]} runs into hole {following}")
        if sum(lengths.values()) != self.num_free:
            raise IntegrityError(f"holes add up to {sum(lengths.values())}, not {self.num_free}")
        by_class = {(_size_class(length), start) for start, length in lengths.items()}
        if by_class != {(c, start) for c, holes in enumerate(self._classes) for start in holes}:
            raise IntegrityError("holes are filed under other lengths than they have")
        if records is not None:
            self._check_cover(run for record in records for run in record)

    def _check_cover(self, used: Iterable[Run]) -> None:
        end = 0
        for start, length in sorted([*used, *self._lengths.items()]):
            if start != end:
                what = "belong to nobody" if start > end else "belong to two"
                raise IntegrityError(f"extents {min(start, end)}..{max(start, end) - 1} {what}")
            end = start + length
        if end != self.num_extents:
            raise IntegrityError(f"records and holes end at extent {end} of {self.num_extents}")

    def _hole_for(self, count: int) -> int:
        """Start of the hole to take `count` from: one that is long enough, or the longest class.

        The last hole of the own class may be long enough, every one of a longer class is: looking
        at more of the own class would find tighter fits and cost a search.
        """
        own = _size_class(count)
        if self._classes[own]:
            start = next(reversed(self._classes[own]))
            if self._lengths[start] >= count:
                return start
        for holes in self._classes[own + 1 :]:
            if holes:
                return next(reversed(holes))
        longest = next(holes for holes in reversed(self._classes) if holes)
        return next(reversed(longest))

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
        self._classes[_size_class(length)][start] = None
        self.num_free += length

    def _remove(self, start: int) -> None:
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._classes[_size_class(length)][start]
        self.num_free -= length


def _size_class(length: int) -> int:
    return length.bit_length() - 1
