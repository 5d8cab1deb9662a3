"""By when requests must be done.

Owns the order of deadlines. Knows neither clock nor scheduler. Threads: step thread only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class Deadlines:
    """Deadlines of unfinished requests, soonest first.

    Notes
    -----
    A sorted list: a change is O(log n) comparisons and a memmove.
    """

    __slots__ = ("_order", "_when")

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []
        self._when: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, request_id: str, when_s: float) -> None:
        """Set a deadline. REQUIRES the request has none."""
        self._when[request_id] = when_s
        insort(self._order, (when_s, request_id))

    def forget(self, request_id: str) -> None:
        """The request has ended. Nothing happens if it has no deadline."""
        when_s = self._when.pop(request_id, None)
        if when_s is not None:
            del self._order[bisect_left(self._order, (when_s, request_id))]

    def until(self, when_s: float) -> list[tuple[float, str]]:
        """Return (deadline, request id) of those up to `when_s`, soonest first."""
        order = self._order
        if not order or order[0][0] > when_s:
            return []
        return order[: bisect_right(order, when_s, key=lambda entry: entry[0])]
