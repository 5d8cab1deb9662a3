"""The smallest tier that keeps the contract: a dict, no threads, no codec, an injected clock.

Owns its bytes. What is submitted is done inside `poll` and nowhere else, in the order in which it
came: every run is the same run. For tests of whoever uses tiers, and the plain meaning that real
tiers are held against. Knows no fault; `kvist.testing.faulty_tier` adds them.

Threads: the caller's only.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvist.errors import ConfigError, IntegrityError
from kvist.keys import BlockKey
from kvist.tiers.base import (
    BlockMeta,
    Entry,
    JobDone,
    LoadJob,
    Lookup,
    LookupStatus,
    Namespace,
    Outcome,
    StoreJob,
    Tier,
    Usage,
)

Name = tuple[bytes, BlockKey]


@dataclass(slots=True)
class _Record:
    data: bytes
    meta: BlockMeta
    stored_s: float
    hits: int = 0
    locked_until_s: list[float] = field(default_factory=list)

    def locked(self, now: float) -> bool:
        return any(until > now for until in self.locked_until_s)


class MemoryTier(Tier):
    """Keeps blocks in a dict, the least recently useful first to go.

    Parameters
    ----------
    capacity_bytes : int
        Of raw bytes; keys are not counted.
    name : str
    clock : callable
        Seconds, monotonic.
    """

    def __init__(
        self,
        capacity_bytes: int,
        name: str = "memory",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.medium = "host"
        self.reads_in_place = True
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._spaces: dict[bytes, Namespace] = {}
        self._records: OrderedDict[Name, _Record] = OrderedDict()
        self._jobs: OrderedDict[int, LoadJob | StoreJob] = OrderedDict()
        self._cancelled: set[int] = set()
        self._ended: list[JobDone] = []
        self._waker: Callable[[], None] | None = None
        self._used_bytes = 0

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`."""
        known = self._spaces.setdefault(namespace.digest, namespace)
        if known.segment_bytes != namespace.segment_bytes:
            raise ConfigError(
                f"namespace {namespace.digest.hex()[:12]} is open with segments of"
                f" {known.segment_bytes} bytes, not {namespace.segment_bytes}"
            )

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`. Never RETRY; PENDING between `submit_store` and `poll`."""
        pending = {
            key
            for job in self._jobs.values()
            if isinstance(job, StoreJob) and job.namespace == namespace
            for key in job.keys
        }
        answers = []
        for key in keys:
            record = self._records.get((namespace, key))
            if record is not None:
                answers.append(Lookup(LookupStatus.HIT, len(record.data)))
            elif key in pending:
                answers.append(Lookup(LookupStatus.PENDING, reason="being_written"))
            else:
                answers.append(Lookup(LookupStatus.MISS, reason="absent"))
        return answers

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        self._space(job).check_load(job)
        self._accept(job)

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        self._space(job).check_store(job)
        self._accept(job)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        if job_id in self._jobs:
            self._cancelled.add(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`: does all that was submitted, first come first."""
        self._work()
        ended, self._ended = self._ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`. Called by `submit_*`: what was submitted can be polled at once."""
        self._waker = waker

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`."""
        found = [self._records.get((namespace, key)) for key in keys]
        for record in found:
            if record is not None:
                record.locked_until_s.append(self._clock() + ttl_s)
        return [record is not None for record in found]

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`."""
        for key in keys:
            record = self._records.get((namespace, key))
            if record is not None and record.locked_until_s:
                record.locked_until_s.remove(min(record.locked_until_s))

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        for key in reversed(keys):  # head last, so that it stays longest
            record = self._records.get((namespace, key))
            if record is not None:
                record.hits += 1
                self._records.move_to_end((namespace, key))

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`."""
        return sum(self._drop((namespace, key)) for key in keys)

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`."""
        now = self._clock()
        for (space, key), record in list(self._records.items()):
            if space == namespace:
                yield Entry(key, len(record.data), now - record.stored_s, record.hits)

    def usage(self) -> Usage:
        """See `Tier.usage`."""
        tenants: Counter[str] = Counter()
        for (space, _), record in self._records.items():
            tenants[self._spaces[space].tenant] += len(record.data)
        return Usage(self.capacity_bytes, self._used_bytes, len(self._records), dict(tenants))

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`: does all that was submitted."""
        self._work()
        return True

    def close(self) -> None:
        """See `Tier.close`. Jobs under way are told as CANCELLED by the next `poll`."""
        self._cancelled.update(self._jobs)

    def check(self) -> None:
        """See `Tier.check`."""
        total = sum(len(record.data) for record in self._records.values())
        if total != self._used_bytes or total > self.capacity_bytes:
            raise IntegrityError(
                f"{total} bytes are kept, {self._used_bytes} are on the books, "
                f"{self.capacity_bytes} are allowed"
            )

    def _space(self, job: LoadJob | StoreJob) -> Namespace:
        space = self._spaces.get(job.namespace)
        if space is None:
            raise IntegrityError(f"job {job.job_id} names a namespace that is not open")
        return space

    def _accept(self, job: LoadJob | StoreJob) -> None:
        if job.job_id in self._jobs:
            raise IntegrityError(f"job {job.job_id} is under way already")
        self._jobs[job.job_id] = job
        if self._waker is not None:
            self._waker()

    def _work(self) -> None:
        while self._jobs:
            job_id, job = self._jobs.popitem(last=False)
            if job_id in self._cancelled:
                self._ended.append(_done(job_id, [Outcome.CANCELLED] * len(job.keys), 0))
            elif isinstance(job, LoadJob):
                self._ended.append(self._load(job))
            else:
                self._ended.append(self._store(job))
        self._cancelled.clear()

    def _load(self, job: LoadJob) -> JobDone:
        start, end = self._spaces[job.namespace].span(job.segments)
        outcomes, nbytes = [], 0
        for key, buffer in zip(job.keys, job.buffers, strict=True):
            record = self._records.get((job.namespace, key))
            if job.deadline_s is not None and self._clock() >= job.deadline_s:
                outcomes.append(Outcome.LATE)
            elif record is None:
                outcomes.append(Outcome.MISS)
            else:
                buffer[:] = record.data[start:end]
                nbytes += end - start
                outcomes.append(Outcome.DONE)
        return _done(job.job_id, outcomes, nbytes)

    def _store(self, job: StoreJob) -> JobDone:
        outcomes: list[Outcome] = []
        nbytes = 0
        stored: list[Name] = []
        for key, buffer, meta in zip(job.keys, job.buffers, job.meta, strict=True):
            name = (job.namespace, key)
            if name in self._records or not self._make_room(buffer.nbytes, keep=stored):
                outcomes.append(Outcome.REFUSED)
                continue
            data = bytes(buffer)
            if key in job.lost:
                outcomes.append(Outcome.CANCELLED)
                continue
            self._records[name] = _Record(data, meta, self._clock())
            self._used_bytes += buffer.nbytes
            nbytes += buffer.nbytes
            stored.append(name)
            outcomes.append(Outcome.DONE)
        for name in reversed(stored):  # parents last, so that they stay longest
            self._records.move_to_end(name)
        return _done(job.job_id, outcomes, nbytes)

    def _make_room(self, nbytes: int, keep: Sequence[Name]) -> bool:
        now = self._clock()
        leaving: list[Name] = []
        free = self.capacity_bytes - self._used_bytes
        for name, record in self._records.items():
            if free >= nbytes:
                break
            if not record.locked(now) and name not in keep:
                leaving.append(name)
                free += len(record.data)
        if free < nbytes:
            return False
        for name in leaving:
            self._drop(name)
        return True

    def _drop(self, name: Name) -> bool:
        record = self._records.pop(name, None)
        if record is None:
            return False
        self._used_bytes -= len(record.data)
        return True


def _done(job_id: int, outcomes: list[Outcome], nbytes: int) -> JobDone:
    reason = next((str(outcome) for outcome in outcomes if outcome is not Outcome.DONE), "")
    return JobDone(job_id, tuple(outcomes), nbytes, 0.0, reason)
