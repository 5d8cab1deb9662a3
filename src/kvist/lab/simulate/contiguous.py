"""The same requests in one piece of memory each: what fragmentation would cost.

Owns an allocator of contiguous regions of any size, first fit or best fit, and what is measured of
it. A request takes one region for all its tokens when it begins and gives it back when it ends; how
long it runs is known from the paged replay. Its final length is taken as known beforehand, which no
server knows: the best case for such an allocator. A queue is served in order::

    memory   | r r r r | . | r r | . . | r r r r r | . |       5 free, and no room for 3 in a row
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvist.errors import ConfigError

FITS = ("first", "best")


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A request as memory sees it: when it comes, how long it runs, how many tokens it holds."""

    arrival_s: float
    run_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ContiguousResult:
    """What an allocator did; means over the time in which somebody waited or ran.

    Attributes
    ----------
    fit : str
    used_share : float
        Of the memory.
    unusable_share : float
        Share of the free memory in holes that are too small for the median request; the mean while
        requests waited, when free memory counts.
    blocked_share : float
        Share of the requests that had to wait although there was enough free memory in all.
    num_holes : float
    """

    fit: str
    used_share: float
    unusable_share: float
    blocked_share: float
    num_holes: float


class Regions:
    """Free holes of one memory.

    Parameters
    ----------
    capacity : int
    fit : {"first", "best"}
        The lowest hole that is large enough, or the smallest one.
    """

    def __init__(self, capacity: int, fit: str) -> None:
        if fit not in FITS:
            raise ConfigError(f"fit={fit!r} must be {' or '.join(FITS)}")
        self._best = fit == "best"
        # (start, size), by start.
        self.holes: list[tuple[int, int]] = [(0, capacity)]
        self.num_free = capacity

    def take(self, size: int) -> int | None:
        """Return the start of a region, or ``None``. O(holes)."""
        fitting = ((length, i) for i, (_, length) in enumerate(self.holes) if length >= size)
        found = min(fitting, default=None) if self._best else next(fitting, None)
        if found is None:
            return None
        length, index = found
        start = self.holes[index][0]
        if length == size:
            del self.holes[index]
        else:
            self.holes[index] = (start + size, length - size)
        self.num_free -= size
        return start

    def give(self, start: int, size: int) -> None:
        """Give a region back; it grows together with the holes beside it."""
        low, high = 0, len(self.holes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.holes[middle][0] < start else (low, middle)
        self.num_free += size
        if low < len(self.holes) and self.holes[low][0] == start + size:
            size += self.holes.pop(low)[1]
        if low and sum(self.holes[low - 1]) == start:
            start, length = self.holes.pop(low - 1)
            size, low = size + length, low - 1
        self.holes.insert(low, (start, size))


def replay_contiguous(
    tenancies: Sequence[Tenancy], capacity: int, fit: str, max_running: int
) -> ContiguousResult:
    """Serve requests in order from one memory.

    Parameters
    ----------
    capacity : int
        Tokens.
    max_running : int
        Requests side by side at most.
    """
    served = sorted((t for t in tenancies if t.num_tokens <= capacity), key=lambda t: t.arrival_s)
    regions = Regions(capacity, fit)
    typical = median(t.num_tokens for t in served) if served else 0
    ends: list[tuple[float, int, int]] = []
    queue: deque[Tenancy] = deque()
    blocked: set[int] = set()
    spent_s = used = holes = waited_s = unusable = 0.0
    arrived, now = 0, served[0].arrival_s if served else 0.0
    while arrived < len(served) or queue or ends:
        while arrived < len(served) and served[arrived].arrival_s <= now:
            queue.append(served[arrived])
            arrived += 1
        while queue and len(ends) < max_running:
            start = regions.take(queue[0].num_tokens)
            if start is None:
                if regions.num_free >= queue[0].num_tokens:
                    blocked.add(id(queue[0]))
                break
            begun = queue.popleft()
            heapq.heappush(ends, (now + begun.run_s, start, begun.num_tokens))
        upcoming = [served[arrived].arrival_s] if arrived < len(served) else []
        upcoming += [ends[0][0]] if ends else []
        if not upcoming:
            break
        passed_s = min(upcoming) - now
        if ends:
            spent_s += passed_s
            used += passed_s * (1 - regions.num_free / capacity)
            holes += passed_s * len(regions.holes)
        if queue and len(ends) < max_running and regions.num_free:
            small = sum(size for _, size in regions.holes if size < typical)
            waited_s += passed_s
            unusable += passed_s * small / regions.num_free
        now += passed_s
        while ends and ends[0][0] <= now:
            _, start, size = heapq.heappop(ends)
            regions.give(start, size)
    return ContiguousResult(
        fit,
        used / spent_s if spent_s else 0.0,
        unusable / waited_s if waited_s else 0.0,
        len(blocked) / len(served) if served else 0.0,
        holes / spent_s if spent_s else 0.0,
    )
