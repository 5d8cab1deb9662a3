"""One tier as the manager sees it: its jobs, its speed, and whether it is to be trusted now.

Owns the ids of jobs, what is under way, and the patience with a tier that does not answer. Knows
neither blocks nor policies. Threads: step thread only; `woken` is called by the tier's threads.

A tier that is late with a load, or fails several times in a row, is *suspended*: for a while it is
asked nothing. Each suspension is twice as long as the one before, and while a job is overdue it
does not end. So a dead tier costs a bounded time once, and then nothing until it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvist.events import EventLog, TierSuspended
from kvist.keys import BlockKey
from kvist.tiers.base import (
    BlockMeta,
    JobDone,
    LoadJob,
    Lookup,
    LookupStatus,
    Outcome,
    StoreJob,
    Tier,
)
from kvist.tiers.speed import LoadSpeed

PRIORS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"host": (1e-4, 4e9), "disk": (1e-3, 5e8), "remote": (5e-3, 1e8)}
)
"""Medium -> (seconds, bytes a second) of a load, until there are measurements."""

FIRST_SUSPENSION_S = 1.0
LONGEST_SUSPENSION_S = 60.0
FAILURES_IN_A_ROW = 3


@dataclass(slots=True)
class _Job:
    on_done: Callable[[JobDone], None]
    num_keys: int
    expected_bytes: int
    is_load: bool


class TierLink:
    """Jobs of one tier.

    Parameters
    ----------
    tier : Tier
    clock : callable
        Seconds, monotonic; the one that deadlines are of.
    events : EventLog
    """

    def __init__(self, tier: Tier, clock: Callable[[], float], events: EventLog) -> None:
        self.tier = tier
        self.speed = LoadSpeed(*PRIORS.get(tier.medium, PRIORS["remote"]))
        self.load_bytes = 0
        """Stored bytes that loads under way are still to bring."""
        self._clock = clock
        self._events = events
        self._jobs: dict[int, _Job] = {}
        self._overdue: set[int] = set()
        self._next_id = 0
        self._failures = 0
        self._suspension_s = FIRST_SUSPENSION_S
        self._suspended_until_s = float("-inf")
        self.woken_s = 0.0

    @property
    def name(self) -> str:
        """Of the tier."""
        return self.tier.name

    @property
    def medium(self) -> str:
        """Of the tier."""
        return self.tier.medium

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    @property
    def is_suspended(self) -> bool:
        """Whether it is left alone for now."""
        return bool(self._overdue) or self._clock() < self._suspended_until_s

    def woken(self) -> None:
        """Note when the tier last had something to tell. Any thread."""
        self.woken_s = self._clock()

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """Ask the tier; while it is suspended it has nothing."""
        if self.is_suspended:
            return [Lookup(LookupStatus.MISS, reason="suspended")] * len(keys)
        return self.tier.lookup(namespace, keys)

    def load(
        self,
        namespace: bytes,
        keys: tuple[BlockKey, ...],
        segments: range,
        buffers: tuple[memoryview, ...],
        deadline_s: float,
        expected_bytes: int,
        on_done: Callable[[JobDone], None],
        *,
        allow_lossy: bool = False,
    ) -> int:
        """Begin to read; `on_done` is called by `poll`."""
        job_id = self._accept(_Job(on_done, len(keys), expected_bytes, is_load=True))
        self.load_bytes += expected_bytes
        self.tier.submit_load(
            LoadJob(job_id, namespace, keys, segments, buffers, deadline_s, allow_lossy)
        )
        return job_id

    def store(
        self,
        namespace: bytes,
        keys: tuple[BlockKey, ...],
        buffers: tuple[memoryview, ...],
        meta: tuple[BlockMeta, ...],
        on_done: Callable[[JobDone], None],
        lost: Container[BlockKey] = frozenset(),
    ) -> int:
        """Begin to keep; `on_done` is called by `poll`."""
        job_id = self._accept(_Job(on_done, len(keys), 0, is_load=False))
        self.tier.submit_store(StoreJob(job_id, namespace, keys, buffers, meta, lost))
        return job_id

    def _accept(self, job: _Job) -> int:
        self._next_id += 1
        self._jobs[self._next_id] = job
        return self._next_id

    def cancel(self, job_id: int) -> None:
        """Ask a job to end early. Its end is told all the same."""
        if job_id in self._jobs:
            self.tier.cancel(job_id)

    def expire(self, job_id: int) -> None:
        """A load was waited for too long: cancel it, and lose patience with the tier."""
        if job_id in self._jobs and job_id not in self._overdue:
            self._overdue.add(job_id)
            self.tier.cancel(job_id)
            self._suspend("a load is overdue")

    def poll(self) -> None:
        """Tell those who wait of the jobs that ended."""
        for done in self.tier.poll():
            job = self._jobs.pop(done.job_id)
            self._overdue.discard(done.job_id)
            self.load_bytes -= job.expected_bytes
            self._judge(done)
            job.on_done(done)

    def check(self) -> None:
        """Raise `IntegrityError` unless the tier's books hold."""
        self.tier.check()

    def _judge(self, done: JobDone) -> None:
        if Outcome.LATE in done.outcomes:
            self._suspend("a load was late")
        elif Outcome.FAILED in done.outcomes:
            self._failures += 1
            if self._failures >= FAILURES_IN_A_ROW:
                self._suspend(done.reason or "it fails")
        elif Outcome.DONE in done.outcomes:
            self._failures = 0
            if not self._overdue:
                self._suspension_s = FIRST_SUSPENSION_S

    def _suspend(self, reason: str) -> None:
        if self._clock() < self._suspended_until_s:
            return
        self._suspended_until_s = self._clock() + self._suspension_s
        self._events.emit(TierSuspended(self.name, self._suspension_s, reason))
        self._suspension_s = min(2 * self._suspension_s, LONGEST_SUSPENSION_S)
        self._failures = 0
