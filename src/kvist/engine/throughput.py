"""How fast the engine has been lately: the ground of every promise about time.

Owns what is learned from events: how long steps take, how long answers get, how much of a prompt
is found in the cache, and how often a sequence leaves a queue that is never empty. Those that were
cut off count as much as those that finished: else the slower everything is, the fewer slow ones
would be heard of. Knows no requests beyond their ids. No torch. Threads: step thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvist.engine.step_cost import StepCost
from kvist.events import Event, RequestFinished, RequestScheduled, StepDone

_WINDOW = 64
_ENOUGH = 4
"""Fewer observations than this are no estimate."""
_WEIGHT = 0.05
"""Of the newest observation in the averages."""
_MEMORY_TOKENS = 8192
"""Generated tokens over which the lengths of answers are remembered."""


class Throughput:
    """A listener of `EventLog`.

    Parameters
    ----------
    clock : callable
        Seconds; monotonic.

    Notes
    -----
    Holds one entry for each unfinished sequence that has begun. O(1) an event.
    """

    __slots__ = (
        "_begun",
        "_busy_since",
        "_clock",
        "_cost",
        "_exposure",
        "_last_s",
        "_left",
        "_read",
        "_reading",
        "_stops",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cost = StepCost()
        self._busy_since: float | None = None
        self._left: deque[float] = deque(maxlen=_WINDOW)
        self._begun: set[str] = set()
        # End of the last step, if the next one begins there: when there is work left.
        self._last_s: float | None = None
        self._reading = 0.0
        self._read = 1.0
        self._stops = 1.0
        self._exposure = 1.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, StepDone):
            self._note_step(event)
        elif isinstance(event, RequestScheduled):
            if self._busy_since is not None:
                self._left.append(self._clock())
            self._begun.add(event.request_id)
            read = 1 - event.num_cached_tokens / event.num_tokens
            self._read += _WEIGHT * (read - self._read)
        elif isinstance(event, RequestFinished):
            self._begun.discard(event.request_id)
            self._stops += event.reason == "stop"

    def _note_step(self, event: StepDone) -> None:
        now = self._clock()
        reading = event.num_prompt_tokens + event.num_recomputed_tokens
        if self._last_s is not None:
            self._cost.observe(event.num_tokens - reading, reading, now - self._last_s)
        self._last_s = now if self._begun or event.num_waiting else None
        self._reading += _WEIGHT * (reading - self._reading)
        kept = 1 - len(event.sampled) / _MEMORY_TOKENS
        self._stops = max(1.0, self._stops * kept)
        self._exposure = self._exposure * kept + len(event.sampled)
        if event.num_waiting == 0:
            # With an empty queue the rate would be that at which requests come.
            self._busy_since = None
            self._left.clear()
        elif self._busy_since is None:
            self._busy_since = now

    @property
    def leave_rate(self) -> float | None:
        """Sequences that leave the queue in a second; ``None`` while it is, or was just, empty."""
        if self._busy_since is None or len(self._left) < _ENOUGH:
            return None
        start = self._left[0] if len(self._left) == _WINDOW else self._busy_since
        elapsed = self._clock() - start
        return len(self._left) / elapsed if elapsed > 0 else None

    def num_output_tokens(self, max_tokens: int) -> float:
        """Return how many tokens an answer of at most `max_tokens` is expected to get.

        As if each token were the last with the same chance, which is that of late.
        """
        stop = min(1.0, self._stops / self._exposure)
        return float((1 - (1 - stop) ** max_tokens) / stop)

    def run_s(self, num_tokens: float, max_tokens: int, num_running: int) -> float | None:
        """Return seconds from the first step of a sequence to its last; ``None``: unknown.

        Parameters
        ----------
        num_tokens : float
            To be read before its first token, others' included where they are read before.
        max_tokens : int
        num_running : int
            Sequences that run beside each other, this one included.
        """
        step_s = self._cost.step_s(num_running, self._reading)
        if step_s is None:
            return None
        return (
            self._cost.read_s(num_tokens * self._read) + self.num_output_tokens(max_tokens) * step_s
        )
