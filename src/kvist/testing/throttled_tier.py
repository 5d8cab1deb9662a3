"""A tier as fast as it is told to be: for showing what is decided when a device is slow.

Owns time only; the bytes stay with the tier inside, which should be fast. Loads queue behind loads
and stores behind stores, as on a device that serves both directions at once::

    key 0 ├ latency ┤├ bytes / rate ┤key 1├ bytes / rate ┤ … ─▶ told when the last one is through

A key that is through after the job's deadline is LATE, and the job is told at the deadline.

Threads: the caller's, and a timer for the waker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvist.testing.wrapped_tier import WrappedTier
from kvist.tiers.base import (
    JobDone,
    LoadJob,
    Outcome,
    StoreJob,
    Tier,
)


@dataclass(slots=True)
class _Waiting:
    due_s: float
    done: JobDone


class ThrottledTier(WrappedTier):
    """`inner` behind a slow line.

    Parameters
    ----------
    inner : Tier
        To be driven through this tier only.
    bytes_per_s : float
        Of each direction; may be changed at any time.
    latency_s : float
        Of each job.
    clock : callable
        Seconds, monotonic. The waker is called by the real clock.
    """

    def __init__(
        self,
        inner: Tier,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._clock = clock
        self._jobs: dict[int, tuple[LoadJob | StoreJob, float]] = {}
        self._free_s = {LoadJob: 0.0, StoreJob: 0.0}
        self._waiting: list[_Waiting] = []
        self._waker: Callable[[], None] | None = None
        self._timers: list[threading.Timer] = []

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        self._jobs[job.job_id] = (job, self._clock())
        # The deadline is on the slow line: the inner tier would not know.
        self.inner.submit_load(replace(job, deadline_s=None))

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        self._jobs[job.job_id] = (job, self._clock())
        self.inner.submit_store(job)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`. What has gone through the inner tier is told at once, cancelled."""
        self.inner.cancel(job_id)
        for waiting in self._waiting:
            if waiting.done.job_id == job_id:
                outcomes = (Outcome.CANCELLED,) * len(waiting.done.outcomes)
                waiting.done = replace(waiting.done, outcomes=outcomes, reason="cancelled")
                waiting.due_s = self._clock()

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        for done in self.inner.poll():
            self._slow(done)
        now = self._clock()
        ended = [waiting.done for waiting in self._waiting if waiting.due_s <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting.due_s > now]
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`. Called when the inner tier is through, and again when it is due."""
        self._waker = waker
        self.inner.set_waker(waker)

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`. Does not wait for the line: the next `poll` tells what was on it."""
        reached = self.inner.drain(timeout_s)
        self._hurry()
        return reached

    def close(self) -> None:
        """See `Tier.close`. The waker is not called any more after it."""
        self.inner.close()
        self._waker = None
        self._hurry()
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _hurry(self) -> None:
        for done in self.inner.poll():
            self._slow(done)
        for waiting in self._waiting:
            waiting.due_s = self._clock()

    def _slow(self, done: JobDone) -> None:
        job, submitted_s = self._jobs.pop(done.job_id)
        line = LoadJob if isinstance(job, LoadJob) else StoreJob
        deadline = job.deadline_s if isinstance(job, LoadJob) else None
        begin = max(submitted_s, self._free_s[line])
        through = begin + self.latency_s
        moved = sum(outcome is Outcome.DONE for outcome in done.outcomes)
        each = done.stored_bytes / moved / self.bytes_per_s if moved else 0.0
        outcomes = list(done.outcomes)
        for index, outcome in enumerate(outcomes):
            if outcome is not Outcome.DONE:
                continue
            if deadline is not None and through + each > deadline:
                outcomes[index:] = [Outcome.LATE] * (len(outcomes) - index)
                through = max(begin, deadline)
                break
            through += each
        self._free_s[line] = through
        late = Outcome.LATE in outcomes
        done = replace(
            done,
            outcomes=tuple(outcomes),
            seconds=through - begin,
            reason=done.reason or ("late" if late else ""),
        )
        self._waiting.append(_Waiting(through, done))
        if self._waker is not None:
            timer = threading.Timer(max(0.0, through - self._clock()), self._waker)
            timer.daemon = True
            timer.start()
            self._timers = [*(t for t in self._timers if t.is_alive()), timer]
