"""Jobs of the disk tier, cut into keys: loads for the readers, stores for the writer.

Owns the queues, their bounds, what became of each key, and which jobs have ended. Knows nothing of
disks. `kvist.tiers.jobs` gives a whole job to a thread; here the keys of one load are read by all
readers side by side, and the keys of many stores are written as one batch, because that is what a
device is fast at.

Threads: any.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, RLock
from typing import NamedTuple, TypeAlias

from kvist.errors import IntegrityError
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, JobDone, LoadJob, Namespace, Outcome, StoreJob

MAX_QUEUED_KEYS = 16_384
MAX_QUEUED_STORE_BYTES = 512 << 20


class Task:
    """A job under way.

    Attributes
    ----------
    cancelled : bool
        Asked to end early; looked at before each key.
    """

    __slots__ = ("cancelled", "job", "label", "left", "outcomes", "reason", "started", "stored")

    def __init__(self, job: LoadJob | StoreJob, label: Namespace) -> None:
        self.job = job
        self.label = label
        self.cancelled = False
        self.outcomes: list[Outcome | None] = [None] * len(job.keys)
        self.left = len(job.keys)
        self.reason = ""
        self.started: float | None = None
        self.stored = 0


class LoadItem(NamedTuple):
    """One key to be read."""

    task: Task
    at: int
    job: LoadJob

    @property
    def key(self) -> BlockKey:
        """The block."""
        return self.job.keys[self.at]


class StoreItem(NamedTuple):
    """One key to be written."""

    task: Task
    at: int
    job: StoreJob

    @property
    def key(self) -> BlockKey:
        """The block."""
        return self.job.keys[self.at]

    @property
    def meta(self) -> BlockMeta:
        """What is known of it."""
        return self.job.meta[self.at]

    @property
    def ident(self) -> bytes:
        """Its name among all namespaces."""
        return self.job.namespace + self.key


StoreEnd: TypeAlias = tuple[StoreItem, Outcome, int, str]
"""A key that was to be written, what became of it, bytes stored, and why not."""


class Queues:
    """See the module's description."""

    def __init__(self) -> None:
        self.closing = False
        # Over the same lock: a store is no reason for those who read to wake up, nor its end.
        lock = RLock()
        self._changed = Condition(lock)
        self._to_read = Condition(lock)
        self._to_write = Condition(lock)
        self._loads: deque[LoadItem] = deque()
        self._stores: deque[StoreItem] = deque()
        self._storing: dict[bytes, int] = {}
        self._store_bytes = 0
        self._tasks: dict[int, Task] = {}
        self._ended: list[JobDone] = []
        self._waker: Callable[[], None] | None = None

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self._waker = waker

    # ------------------------------------------------------------------ the caller's side

    def add_load(self, job: LoadJob, label: Namespace) -> None:
        """Queue the keys of a load, or answer them FAILED where there is no room."""
        task = self._add(job, label)
        with self._changed:
            why = self._why_not(len(self._loads) + len(job.keys) > MAX_QUEUED_KEYS)
            if not why:
                self._loads.extend(LoadItem(task, i, job) for i in range(len(job.keys)))
                self._to_read.notify(len(job.keys))
        if why or not job.keys:
            self._end_all(task, Outcome.FAILED, why)

    def add_store(self, job: StoreJob, label: Namespace, refused: str, admitted: int) -> None:
        """Queue the first `admitted` keys of a store, or none, for `refused` or for want of room.

        The others are answered REFUSED.
        """
        task = self._add(job, label)
        nbytes = label.block_bytes * admitted
        with self._changed:
            full = len(self._stores) + len(job.keys) > MAX_QUEUED_KEYS
            full |= bool(self._stores) and self._store_bytes + nbytes > MAX_QUEUED_STORE_BYTES
            why = refused or self._why_not(full)
            if not why:
                self._store_bytes += nbytes
                task.outcomes[admitted:] = [Outcome.REFUSED] * (len(job.keys) - admitted)
                task.left = admitted
                task.reason = "" if admitted == len(job.keys) else "not_admitted"
                for index in range(admitted):
                    item = StoreItem(task, index, job)
                    self._storing[item.ident] = self._storing.get(item.ident, 0) + 1
                    self._stores.append(item)
                self._to_write.notify()
        if why or not admitted:
            self._end_all(task, Outcome.REFUSED, why or task.reason)

    def is_storing(self, ident: bytes) -> bool:
        """Whether that block is on its way in."""
        return ident in self._storing

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancelled = True

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        if not self._ended:  # no lock where there is nothing: asked in every step
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait until every job has ended; say whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def close(self) -> None:
        """Let the threads end; jobs under way are cancelled, and told of."""
        with self._changed:
            self.closing = True
            for task in self._tasks.values():
                task.cancelled = True
            self._to_read.notify_all()
            self._to_write.notify_all()

    def _why_not(self, full: bool) -> str:
        return "closed" if self.closing else "queue_full" if full else ""

    def _add(self, job: LoadJob | StoreJob, label: Namespace) -> Task:
        task = Task(job, label)
        with self._changed:
            if job.job_id in self._tasks:
                raise IntegrityError(f"job {job.job_id} is under way already")
            self._tasks[job.job_id] = task
        return task

    # ------------------------------------------------------------------ the threads' side

    def next_load(self) -> LoadItem | None:
        """Wait for a key to read; ``None`` when there will be none any more."""
        with self._changed:
            while not self._loads:
                if self.closing:
                    return None
                self._to_read.wait()
            item = self._loads.popleft()
            self._start(item.task)
            return item

    def ahead(self, count: int) -> LoadItem | None:
        """Return the key that will be read in `count` turns; a look, not a removal."""
        with self._changed:
            return self._loads[count - 1] if count <= len(self._loads) else None

    def next_stores(self, max_keys: int, max_bytes: int, timeout_s: float) -> list[StoreItem]:
        """Take keys to write together, waiting a while for the first."""
        with self._changed:
            self._to_write.wait_for(lambda: self._stores or self.closing, timeout_s)
            batch: list[StoreItem] = []
            nbytes = 0
            while self._stores and len(batch) < max_keys:
                size = self._stores[0].task.label.block_bytes
                if batch and nbytes + size > max_bytes:
                    break
                nbytes += size
                item = self._stores.popleft()
                self._start(item.task)
                batch.append(item)
            return batch

    def end_load(self, item: LoadItem, outcome: Outcome, stored: int = 0, why: str = "") -> None:
        """Say what became of a key that was to be read."""
        self._end(item.task, item.at, outcome, stored, why)

    def end_stores(self, ends: Iterable[StoreEnd]) -> None:
        """Say what became of keys that were to be written."""
        before = len(self._ended)
        with self._changed:
            for item, outcome, stored, why in ends:
                self._store_bytes -= item.task.label.block_bytes
                ident = item.ident
                if self._storing[ident] == 1:
                    del self._storing[ident]
                else:
                    self._storing[ident] -= 1
                self._note(item.task, item.at, outcome, stored, why)
        if len(self._ended) > before:
            self._wake()

    def _start(self, task: Task) -> None:
        if task.started is None:
            task.started = time.perf_counter()

    def _end(self, task: Task, index: int, outcome: Outcome, stored: int, why: str) -> None:
        with self._changed:
            self._note(task, index, outcome, stored, why)
        if not task.left:
            self._wake()

    def _note(self, task: Task, index: int, outcome: Outcome, stored: int, why: str) -> None:
        task.outcomes[index] = outcome
        task.stored += stored
        task.left -= 1
        if outcome is not Outcome.DONE and not task.reason:
            task.reason = why or outcome.value
        if not task.left:
            self._tell(task)

    def _end_all(self, task: Task, outcome: Outcome, why: str) -> None:
        with self._changed:
            task.outcomes = [outcome] * len(task.outcomes)
            task.reason = why
            self._tell(task)
        self._wake()

    def _tell(self, task: Task) -> None:
        seconds = 0.0 if task.started is None else time.perf_counter() - task.started
        outcomes = tuple(outcome or Outcome.FAILED for outcome in task.outcomes)
        del self._tasks[task.job.job_id]
        self._ended.append(JobDone(task.job.job_id, outcomes, task.stored, seconds, task.reason))
        self._changed.notify_all()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker()
