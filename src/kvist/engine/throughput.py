"""How fast the engine has been lately: the ground of every promise about time.

Owns two estimates, made of events: how often a sequence leaves a queue that is never empty, and how
long one runs. Knows no requests beyond their ids. No torch. Threads: step thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvist.events import Event, RequestFinished, RequestScheduled, StepDone

_WINDOW = 64
_ENOUGH = 4
"""Fewer observations than this are no estimate."""
_WEIGHT = 0.05
"""Of the newest run in the averages."""


class Throughput:
    """A listener of `EventLog`.

    Parameters
    ----------
    clock : callable
        Seconds; monotonic.

    Notes
    -----
    Holds one entry for each running sequence. O(1) an event.
    """

    __slots__ = ("_busy_since", "_clock", "_left", "_num_runs", "_run_s", "_run_tokens", "_started")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._left: deque[float] = deque(maxlen=_WINDOW)
        self._started: dict[str, float] = {}
        self._num_runs = 0
        self._run_s = 0.0
        self._run_tokens = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, StepDone):
            if event.num_waiting == 0:
                # With an empty queue the rate would be that at which requests come.
                self._busy_since = None
                self._left.clear()
            elif self._busy_since is None:
                self._busy_since = self._clock()
        elif isinstance(event, RequestScheduled):
            now = self._clock()
            if self._busy_since is not None:
                self._left.append(now)
            self._started.setdefault(event.request_id, now)
        elif isinstance(event, RequestFinished):
            started = self._started.pop(event.request_id, None)
            if started is not None and event.reason in ("stop", "length"):
                self._note_run(self._clock() - started, event.num_output_tokens)

    def _note_run(self, run_s: float, num_tokens: int) -> None:
        self._num_runs += 1
        weight = max(_WEIGHT, 1 / self._num_runs)
        self._run_s += weight * (run_s - self._run_s)
        self._run_tokens += weight * (num_tokens - self._run_tokens)

    @property
    def leave_rate(self) -> float | None:
        """Sequences that leave the queue in a second; ``None`` while it is, or was just, empty."""
        if self._busy_since is None or len(self._left) < _ENOUGH:
            return None
        start = self._left[0] if len(self._left) == _WINDOW else self._busy_since
        elapsed = self._clock() - start
        return len(self._left) / elapsed if elapsed > 0 else None

    def run_s(self, max_tokens: int | None = None) -> float | None:
        """Seconds that a request runs, by the average of those that finished; ``None``: unknown.

        Parameters
        ----------
        max_tokens : int or None
            Makes it shorter in proportion, if it is below the average output.
        """
        if self._num_runs < _ENOUGH:
            return None
        if max_tokens is None or max_tokens >= self._run_tokens:
            return self._run_s
        return self._run_s * max_tokens / self._run_tokens
