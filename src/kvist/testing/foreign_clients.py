"""Other engines' ideas of a tier, over any of ours: what says that the contract is wide enough.

Owns three fakes with the calls, and the rules, of

- vLLM's `SecondaryTierManager`: one key a lookup, jobs by chunk of one large view, results polled
  and never waited for;
- SGLang's `HiCacheStorage`: blocking, pages of a registered host pool, the number of *consecutive*
  keys that exist;
- LMCache's L2 adapter: tasks, three event descriptors, a bitmap for each result, lookups that lock.

They are written from the shape of those interfaces and hold none of their code. Real connectors
need more than these (configuration, metrics, layouts); the calls are the same.

Threads: one for each fake, as in the engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from itertools import count

from kvist.keys import KEY_BYTES, BlockKey
from kvist.testing.tier_driver import PATIENCE_S
from kvist.tiers.base import (
    BlockMeta,
    JobDone,
    LoadJob,
    LookupStatus,
    Namespace,
    Outcome,
    StoreJob,
    Tier,
)

LOCK_TTL_S = 60.0


def foreign_key(name: bytes | str) -> BlockKey:
    """Return the key for another engine's name of a block: itself, if it is one of 32 bytes."""
    raw = name.encode() if isinstance(name, str) else name
    if len(raw) == KEY_BYTES:
        return BlockKey(raw)
    return BlockKey(blake2b(raw, digest_size=KEY_BYTES, person=b"kvist.foreign.v1").digest())


# ------------------------------------------------------------------------------------------- vLLM


class VllmLookup(Enum):
    """The four answers that vLLM's scheduler understands."""

    HIT = auto()
    MISS = auto()
    HIT_PENDING = auto()
    RETRY = auto()


_VLLM_ANSWERS = {
    LookupStatus.HIT: VllmLookup.HIT,
    LookupStatus.MISS: VllmLookup.MISS,
    LookupStatus.PENDING: VllmLookup.HIT_PENDING,
    LookupStatus.RETRY: VllmLookup.RETRY,
}


@dataclass(frozen=True, slots=True)
class VllmTransfer:
    """Chunks of the primary view to or from the tier."""

    job_id: int
    keys: tuple[bytes, ...]
    chunk_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VllmResult:
    """A transfer that ended."""

    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...]
    transfer_time: float
    transfer_bytes: int


class VllmSecondaryTier:
    """A tier as a secondary tier of vLLM's offloading connector.

    Parameters
    ----------
    tier : Tier
    namespace : Namespace
        Opened here.
    primary_kv_view : memoryview
        Writable bytes; chunk c is row c of as many bytes as a block has.
    """

    def __init__(self, tier: Tier, namespace: Namespace, primary_kv_view: memoryview) -> None:
        self.medium = {"host": "CPU"}.get(tier.medium, "STORAGE")
        self._tier = tier
        self._space = namespace
        self._view = primary_kv_view
        self._jobs: dict[int, VllmTransfer] = {}
        tier.open_namespace(namespace)

    def lookup(self, key: bytes) -> VllmLookup:
        """Answer at once, from within the scheduler."""
        (answer,) = self._tier.lookup(self._space.digest, [foreign_key(key)])
        return _VLLM_ANSWERS[answer.status]

    def submit_store(self, job: VllmTransfer) -> None:
        """Begin to store."""
        self._jobs[job.job_id] = job
        meta = (BlockMeta(),) * len(job.keys)
        self._tier.submit_store(
            StoreJob(job.job_id, self._space.digest, _keys(job.keys), self._rows(job), meta)
        )

    def submit_load(self, job: VllmTransfer) -> None:
        """Begin to load."""
        self._jobs[job.job_id] = job
        segments = range(len(self._space.segment_bytes))
        self._tier.submit_load(
            LoadJob(job.job_id, self._space.digest, _keys(job.keys), segments, self._rows(job))
        )

    def get_finished_jobs(self) -> Iterable[VllmResult]:
        """Tell what ended since the last call, at once."""
        for done in self._tier.poll():
            job = self._jobs.pop(done.job_id)
            fine = tuple(
                key
                for key, outcome in zip(job.keys, done.outcomes, strict=True)
                if outcome is Outcome.DONE
            )
            yield VllmResult(
                done.job_id, len(fine) == len(job.keys), fine, done.seconds, done.stored_bytes
            )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell of use."""
        self._tier.touch(self._space.digest, _keys(keys))

    def has_pending_work(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait for all transfers."""
        self._tier.drain(PATIENCE_S)

    def shutdown(self) -> None:
        """Let go."""
        self._tier.close()

    def _rows(self, job: VllmTransfer) -> tuple[memoryview, ...]:
        size = self._space.block_bytes
        return tuple(self._view[chunk * size : (chunk + 1) * size] for chunk in job.chunk_ids)


# ----------------------------------------------------------------------------------------- SGLang


class SGLangStorage:
    """A tier as a storage backend of SGLang's HiCache.

    Parameters
    ----------
    tier : Tier
    namespace : Namespace
        Opened here.
    """

    def __init__(self, tier: Tier, namespace: Namespace) -> None:
        self._tier = tier
        self._space = namespace
        self._pool = memoryview(b"")
        self._ids = count(1)
        tier.open_namespace(namespace)

    def register_mem_pool_host(self, pool: memoryview) -> None:
        """Take the host pool: page i is row i of as many bytes as a block has."""
        self._pool = pool

    def exists(self, key: str) -> bool:
        """Whether one page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str]) -> int:
        """How many of the first pages are there, up to the first that is not."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            answers = self._tier.lookup(self._space.digest, _keys(keys))
            statuses = [answer.status for answer in answers]
            if LookupStatus.RETRY not in statuses or time.monotonic() > give_up:
                break
            self._tier.poll()
            time.sleep(0.0005)
        hits = [status is LookupStatus.HIT for status in statuses]
        return hits.index(False) if False in hits else len(hits)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Sequence[int]) -> list[bool]:
        """Copy pages into the host pool; say which came."""
        segments = range(len(self._space.segment_bytes))
        job = LoadJob(
            next(self._ids), self._space.digest, _keys(keys), segments, self._pages(host_indices)
        )
        self._tier.submit_load(job)
        return self._wait(job.job_id)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Sequence[int]) -> list[bool]:
        """Keep pages of the host pool; say which are kept."""
        meta = (BlockMeta(),) * len(keys)
        job = StoreJob(
            next(self._ids), self._space.digest, _keys(keys), self._pages(host_indices), meta
        )
        self._tier.submit_store(job)
        return self._wait(job.job_id)

    def clear(self) -> None:
        """Drop everything."""
        held = [entry.key for entry in self._tier.entries(self._space.digest)]
        self._tier.delete(self._space.digest, held)

    def get_stats(self) -> dict[str, int]:
        """Return sizes for metrics."""
        usage = self._tier.usage()
        return {"used_bytes": usage.used_bytes, "capacity_bytes": usage.capacity_bytes}

    def close(self) -> None:
        """Let go."""
        self._tier.close()

    def _pages(self, host_indices: Sequence[int]) -> tuple[memoryview, ...]:
        size = self._space.block_bytes
        return tuple(self._pool[index * size : (index + 1) * size] for index in host_indices)

    def _wait(self, job_id: int) -> list[bool]:
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            for done in self._tier.poll():
                if done.job_id == job_id:
                    return [outcome is Outcome.DONE for outcome in done.outcomes]
            time.sleep(0.0005)
        raise TimeoutError(f"job {job_id} did not end in {PATIENCE_S} s")


# ---------------------------------------------------------------------------------------- LMCache

Bitmap = tuple[bool, ...]


class LMCacheAdapter:
    """A tier as an L2 adapter of LMCache.

    A tier wakes without saying for what, so a wake-up sets all three descriptors: each says "ask
    again", which is all that the engine takes from it.

    Parameters
    ----------
    tier : Tier
    namespace : Namespace
        Opened here.
    """

    def __init__(self, tier: Tier, namespace: Namespace) -> None:
        self._tier = tier
        self._space = namespace
        self._ids = count(1)
        self._fds = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3))
        self._stores: dict[int, Bitmap | None] = {}
        self._loads: dict[int, Bitmap | None] = {}
        self._lookups: dict[int, tuple[BlockKey, ...]] = {}
        tier.open_namespace(namespace)
        tier.set_waker(self._signal)

    def get_store_event_fd(self) -> int:
        """Descriptor that is readable when a store may have ended."""
        return self._fds[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        """Descriptor that is readable when a lookup may have been answered."""
        return self._fds[1]

    def get_load_event_fd(self) -> int:
        """Descriptor that is readable when a load may have ended."""
        return self._fds[2]

    def submit_store_task(self, keys: Sequence[bytes], objects: Sequence[memoryview]) -> int:
        """Begin to store."""
        task = next(self._ids)
        self._stores[task] = None
        meta = (BlockMeta(),) * len(keys)
        self._tier.submit_store(
            StoreJob(task, self._space.digest, _keys(keys), tuple(objects), meta)
        )
        return task

    def pop_completed_store_tasks(self) -> dict[int, Bitmap]:
        """Return the stores that ended, once."""
        self._poll()
        ended = {task: result for task, result in self._stores.items() if result is not None}
        for task in ended:
            del self._stores[task]
        return ended

    def submit_lookup_and_lock_task(self, keys: Sequence[bytes]) -> int:
        """Begin to look up; hits are locked."""
        task = next(self._ids)
        self._lookups[task] = _keys(keys)
        self._signal()
        return task

    def query_lookup_and_lock_result(self, task: int) -> Bitmap | None:
        """Return which keys are there and locked now; None while that is not known."""
        self._poll()
        keys = self._lookups[task]
        statuses = [answer.status for answer in self._tier.lookup(self._space.digest, keys)]
        if LookupStatus.RETRY in statuses:
            return None
        del self._lookups[task]
        hits = [key for key, s in zip(keys, statuses, strict=True) if s is LookupStatus.HIT]
        locked = dict(zip(hits, self._tier.lock(self._space.digest, hits, LOCK_TTL_S), strict=True))
        return tuple(locked.get(key, False) for key in keys)

    def submit_unlock(self, keys: Sequence[bytes]) -> None:
        """Undo the lock of a lookup."""
        self._tier.unlock(self._space.digest, _keys(keys))

    def submit_load_task(self, keys: Sequence[bytes], objects: Sequence[memoryview]) -> int:
        """Begin to load."""
        task = next(self._ids)
        self._loads[task] = None
        segments = range(len(self._space.segment_bytes))
        self._tier.submit_load(
            LoadJob(task, self._space.digest, _keys(keys), segments, tuple(objects))
        )
        return task

    def query_load_result(self, task: int) -> Bitmap | None:
        """Return which keys came, once; None while the load goes on."""
        self._poll()
        result = self._loads[task]
        if result is not None:
            del self._loads[task]
        return result

    def submit_touch(self, keys: Sequence[bytes]) -> None:
        """Tell of use."""
        self._tier.touch(self._space.digest, _keys(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """Drop blocks."""
        return self._tier.delete(self._space.digest, _keys(keys))

    def close(self) -> None:
        """Let go of tier and descriptors."""
        self._tier.close()
        for fd in self._fds:
            os.close(fd)

    def _signal(self) -> None:
        for fd in self._fds:
            os.eventfd_write(fd, 1)

    def _poll(self) -> None:
        for done in self._tier.poll():
            results = self._stores if done.job_id in self._stores else self._loads
            results[done.job_id] = _bitmap(done)


def _bitmap(done: JobDone) -> Bitmap:
    return tuple(outcome is Outcome.DONE for outcome in done.outcomes)


def _keys(names: Sequence[bytes] | Sequence[str]) -> tuple[BlockKey, ...]:
    return tuple(foreign_key(name) for name in names)
