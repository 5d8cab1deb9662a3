"""A tier that goes wrong on demand: any tier, wrapped.

Owns what goes wrong, and when; the bytes stay with the tier inside. Everything that the contract
allows a tier to say can be made to happen: blocks that are gone or damaged by the time they are
loaded, late and cancelled loads, refused and failed stores, lookups that answer later, and jobs
whose end is told many polls after it.

After anything but DONE the buffer is scribbled over, so that whoever uses it all the same is found.

Threads: the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from kvist.keys import BlockKey
from kvist.testing.wrapped_tier import WrappedTier
from kvist.tiers.base import (
    JobDone,
    LoadJob,
    Lookup,
    LookupStatus,
    Outcome,
    StoreJob,
    Tier,
)

SCRIBBLE = b"\xa5"

LOAD_FAULTS = (Outcome.MISS, Outcome.DAMAGED, Outcome.LATE, Outcome.CANCELLED, Outcome.FAILED)
STORE_FAULTS = (Outcome.REFUSED, Outcome.FAILED, Outcome.CANCELLED)
LOOKUP_FAULTS = (LookupStatus.MISS, LookupStatus.PENDING, LookupStatus.RETRY)


class Faults(Protocol):
    """Decides what goes wrong. ``None`` and 0 let things be."""

    def lookup(self, key: BlockKey) -> LookupStatus | None:
        """What to answer for a block that is there."""

    def load(self, key: BlockKey) -> Outcome | None:
        """How the load of one block ends."""

    def store(self, key: BlockKey) -> Outcome | None:
        """How the store of one block ends."""

    def delay_polls(self, job: LoadJob | StoreJob) -> int:
        """How many polls the end of a job is held back."""


@dataclass(slots=True)
class ScriptedFaults:
    """Faults by key, as a test writes them; mutable, so that it can change its mind."""

    lookups: Mapping[BlockKey, LookupStatus] = field(default_factory=dict)
    loads: Mapping[BlockKey, Outcome] = field(default_factory=dict)
    stores: Mapping[BlockKey, Outcome] = field(default_factory=dict)
    delay: int = 0

    def lookup(self, key: BlockKey) -> LookupStatus | None:
        """See `Faults.lookup`."""
        return self.lookups.get(key)

    def load(self, key: BlockKey) -> Outcome | None:
        """See `Faults.load`."""
        return self.loads.get(key)

    def store(self, key: BlockKey) -> Outcome | None:
        """See `Faults.store`."""
        return self.stores.get(key)

    def delay_polls(self, job: LoadJob | StoreJob) -> int:
        """See `Faults.delay_polls`."""
        return self.delay


@dataclass(slots=True)
class RandomFaults:
    """Each thing goes wrong with a probability of its own.

    Parameters
    ----------
    random : Random
        Seeded by the test, so that a red run can be run again.
    lookup_rate, load_rate, store_rate : float
    max_delay_polls : int
    """

    random: Random
    lookup_rate: float = 0.0
    load_rate: float = 0.0
    store_rate: float = 0.0
    max_delay_polls: int = 0

    def lookup(self, key: BlockKey) -> LookupStatus | None:
        """See `Faults.lookup`."""
        if self.random.random() < self.lookup_rate:
            return self.random.choice(LOOKUP_FAULTS)
        return None

    def load(self, key: BlockKey) -> Outcome | None:
        """See `Faults.load`."""
        return self.random.choice(LOAD_FAULTS) if self.random.random() < self.load_rate else None

    def store(self, key: BlockKey) -> Outcome | None:
        """See `Faults.store`."""
        return self.random.choice(STORE_FAULTS) if self.random.random() < self.store_rate else None

    def delay_polls(self, job: LoadJob | StoreJob) -> int:
        """See `Faults.delay_polls`."""
        return self.random.randint(0, self.max_delay_polls)


@dataclass(slots=True)
class _Held:
    job: LoadJob | StoreJob
    faults: tuple[Outcome | None, ...]
    delay_polls: int
    done: JobDone | None = None


class FaultyTier(WrappedTier):
    """`inner`, but for what `faults` says.

    Parameters
    ----------
    inner : Tier
        To be driven through this tier only.
    faults : Faults

    Attributes
    ----------
    num_faults : int
        How often something was made to go wrong: a test of faults without any proves nothing.
    """

    def __init__(self, inner: Tier, faults: Faults) -> None:
        super().__init__(inner)
        self.faults = faults
        self.num_faults = 0
        self._held: dict[int, _Held] = {}

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`; hits may be denied."""
        answers = self.inner.lookup(namespace, keys)
        for index, (key, answer) in enumerate(zip(keys, answers, strict=True)):
            if answer.status is LookupStatus.HIT and (status := self.faults.lookup(key)):
                self.num_faults += 1
                answers[index] = Lookup(status, reason="injected")
        return answers

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        self._hold(job, self.faults.load)
        self.inner.submit_load(job)

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        self._hold(job, self.faults.store)
        self.inner.submit_store(job)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`. The end of the job may be told much later still."""
        self.inner.cancel(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        for done in self.inner.poll():
            self._held[done.job_id].done = done
        ended = []
        for job_id, held in list(self._held.items()):
            if held.done is None:
                continue
            if held.delay_polls:
                held.delay_polls -= 1
                continue
            del self._held[job_id]
            ended.append(self._spoil(held, held.done))
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`. It is not called for ends that are held back: keep polling."""
        self.inner.set_waker(waker)

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`. Ends that were held back are told by the next `poll`."""
        for held in self._held.values():
            held.delay_polls = 0
        return self.inner.drain(timeout_s)

    def close(self) -> None:
        """See `Tier.close`."""
        for held in self._held.values():
            held.delay_polls = 0
        self.inner.close()

    def _hold(self, job: LoadJob | StoreJob, decide: Callable[[BlockKey], Outcome | None]) -> None:
        faults = tuple(decide(key) for key in job.keys)
        self._held[job.job_id] = _Held(job, faults, self.faults.delay_polls(job))

    def _spoil(self, held: _Held, done: JobDone) -> JobDone:
        outcomes = list(done.outcomes)
        gone = []
        for index, (key, fault) in enumerate(zip(held.job.keys, held.faults, strict=True)):
            if fault is not None and outcomes[index] is Outcome.DONE:
                self.num_faults += 1
                outcomes[index] = fault
                if isinstance(held.job, StoreJob) or fault in (Outcome.MISS, Outcome.DAMAGED):
                    gone.append(key)
            if isinstance(held.job, LoadJob) and outcomes[index] is not Outcome.DONE:
                buffer = held.job.buffers[index]
                buffer[:] = SCRIBBLE * buffer.nbytes
        self.inner.delete(held.job.namespace, gone)
        reason = done.reason
        if not reason and any(outcome is not Outcome.DONE for outcome in outcomes):
            reason = "injected"
        return replace(done, outcomes=tuple(outcomes), reason=reason)
