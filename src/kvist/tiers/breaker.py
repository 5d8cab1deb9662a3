"""A circuit breaker: a server that is gone costs its users a bounded time once, then nothing.

Owns one bit, when to try again, and why. Knows no sockets and starts no threads: whoever owns it
sends a probe when one is due, beside the users, who are told at once that it is open::

          ┌────── succeed ──────┐
          ▼                     │
       CLOSED ──── fail ────▶ OPEN ── after wait_s ──▶ a probe is due ── fail: wait twice as long
     users go on          users are told                       └── succeed: CLOSED

The idea is M. Nygard's (*Release It!*, 2007). Ours differs in that no user is ever the probe, and
in that one failure opens it: a miss costs a recomputation, another wait for a dead server more.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

LEAST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


class CircuitBreaker:
    """Whether a server is to be used now.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    least_wait_s, longest_wait_s : float
        Between a failure and a probe: doubled with each failure.

    Attributes
    ----------
    reason : str
        Of the last failure; ``""`` while closed.
    num_failures : int
        In all, probes included.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        least_wait_s: float = LEAST_WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self.reason = ""
        self.num_failures = 0
        self._clock = clock
        self._least_s = least_wait_s
        self._longest_s = longest_wait_s
        self._wait_s = least_wait_s
        self._probe_s: float | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the server is not to be used."""
        return self._probe_s is not None

    @property
    def probe_s(self) -> float | None:
        """When a probe is due, on the clock; None while closed."""
        return self._probe_s

    def probe_is_due(self) -> bool:
        """Whether it is time to see if the server is back."""
        due = self._probe_s
        return due is not None and self._clock() >= due

    def fail(self, reason: str) -> None:
        """Tell that the server did not answer, or answered nonsense.

        A user that was under way while another one failed does not make the wait longer.
        """
        with self._lock:
            self.num_failures += 1
            self.reason = reason
            now = self._clock()
            if self._probe_s is None:
                self._wait_s = self._least_s
            elif now >= self._probe_s:
                self._wait_s = min(2 * self._wait_s, self._longest_s)
            else:
                return
            self._probe_s = now + self._wait_s

    def succeed(self) -> None:
        """Tell that the server answered a probe."""
        with self._lock:
            self.reason = ""
            self._probe_s = None
