"""Threads that do a tier's jobs: what is urgent first, and every job is told exactly once.

Owns queue, threads, cancellation, deadlines and the list of jobs that ended. Knows no bytes and no
keys: a tier gives a function that does the work of one job.

::

    submit ─▶ urgent │ other ─▶ thread: work(ticket) ─▶ ended ─▶ poll
              (loads)  (stores)         └ asks ticket.verdict() between keys

A load keeps a sequence waiting and a store keeps nobody, so a store is begun only when no load
waits. Both queues are bounded: what finds its queue full is answered at once.

Threads: `submit`, `cancel`, `poll`, `drain` and `close` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.tiers.base import JobDone, LoadJob, Outcome, StoreJob

QUEUE_FULL = "queue_full"
MAX_QUEUED_JOBS = 4096


@dataclass(slots=True, eq=False)
class Ticket:
    """What the work of one job sees of its job.

    Attributes
    ----------
    cancelled : bool
        Set by another thread; looked at between keys.
    """

    job_id: int
    num_keys: int
    deadline_s: float | None
    clock: Callable[[], float]
    cancelled: bool = False

    def verdict(self) -> Outcome | None:
        """Say what becomes of the keys not yet worked on, if they are to be given up."""
        if self.cancelled:
            return Outcome.CANCELLED
        if self.deadline_s is not None and self.clock() >= self.deadline_s:
            return Outcome.LATE
        return None


@dataclass(slots=True)
class Report:
    """What the work of a job came to, collected key by key.

    Attributes
    ----------
    outcomes : list of Outcome
        One a key, in order.
    stored_bytes : int
    reason : str
        Of the first outcome that is not DONE.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    stored_bytes: int = 0
    reason: str = ""

    def add(self, outcome: Outcome, stored_bytes: int = 0, reason: str = "") -> None:
        """Note how it went with the next key."""
        self.outcomes.append(outcome)
        self.stored_bytes += stored_bytes
        if outcome is not Outcome.DONE and not self.reason:
            self.reason = reason or outcome.value


Work = Callable[[Ticket], Report]


class JobThreads:
    """A few threads that work on the jobs of one tier.

    Parameters
    ----------
    name : str
        Of the tier: the threads bear it.
    num_threads : int
    clock : callable
        Seconds, monotonic: what deadlines are on.
    max_queued_jobs : int
        Of each kind.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        clock: Callable[[], float] = time.monotonic,
        max_queued_jobs: int = MAX_QUEUED_JOBS,
    ) -> None:
        self._name = name
        self._clock = clock
        self._max_queued = max_queued_jobs
        self._changed = threading.Condition()
        self._urgent: deque[tuple[Ticket, Work]] = deque()
        self._other: deque[tuple[Ticket, Work]] = deque()
        self._tickets: dict[int, Ticket] = {}
        self._ended: list[JobDone] = []
        self._waker: Callable[[], None] | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvist-{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self._waker = waker

    def submit(self, job: LoadJob | StoreJob, work: Work) -> None:
        """Queue a job: loads before stores. `work` runs on a thread of this object."""
        load = isinstance(job, LoadJob)
        deadline = job.deadline_s if isinstance(job, LoadJob) else None
        ticket = Ticket(job.job_id, len(job.keys), deadline, self._clock)
        with self._changed:
            queue = self._urgent if load else self._other
            full = len(queue) >= self._max_queued
            if not full and not self._closing:
                self._tickets[job.job_id] = ticket
                queue.append((ticket, work))
                self._changed.notify()
                return
        reason = QUEUE_FULL if full else "closed"
        self.answer(job.job_id, _all(ticket, Outcome.FAILED if load else Outcome.REFUSED, reason))

    def answer(self, job_id: int, report: Report, seconds: float = 0.0) -> None:
        """Tell of a job that ended, whether or not it was queued before."""
        done = JobDone(job_id, tuple(report.outcomes), report.stored_bytes, seconds, report.reason)
        with self._changed:
            self._tickets.pop(job_id, None)
            self._ended.append(done)
            self._changed.notify_all()
        if self._waker is not None:
            self._waker()

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`. A job that runs ends at its next key."""
        with self._changed:
            ticket = self._tickets.get(job_id)
            if ticket is not None:
                ticket.cancelled = True

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        if not self._ended:  # no lock where there is nothing: asked in every step
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    @property
    def num_unfinished(self) -> int:
        """Jobs that did not end yet."""
        return len(self._tickets)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is unfinished; say whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tickets, timeout_s)

    def close(self) -> None:
        """Cancel all jobs, wait for the threads. What ended can still be polled."""
        with self._changed:
            self._closing = True
            for ticket in self._tickets.values():
                ticket.cancelled = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            ticket, work = taken
            start = time.perf_counter()
            report = self._do(ticket, work)
            self.answer(ticket.job_id, report, time.perf_counter() - start)

    def _take(self) -> tuple[Ticket, Work] | None:
        with self._changed:
            while not self._urgent and not self._other:
                if self._closing:
                    return None
                self._changed.wait()
            return (self._urgent or self._other).popleft()

    def _do(self, ticket: Ticket, work: Work) -> Report:
        if (verdict := ticket.verdict()) is not None:
            return _all(ticket, verdict)
        try:
            return work(ticket)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a miss and not the end
            return _all(ticket, Outcome.FAILED, f"{type(error).__name__}: {error}")


def _all(ticket: Ticket, outcome: Outcome, reason: str = "") -> Report:
    report = Report()
    for _ in range(ticket.num_keys):
        report.add(outcome, reason=reason)
    return report
