"""A tier that holds no bytes, in virtual time: books, room and the time that its channel takes.

Owns what is stored and when jobs are over. Everything above it (lookup, load or recompute, write
policies, staging) is the engine's own. Threads: one.

A tier has one channel up and one down. A job waits for those before it in its direction, and takes
``latency + bytes / rate``.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvist.cache import KVCacheManager
from kvist.engine.loads import PrefixLoads
from kvist.errors import ConfigError
from kvist.events import EventLog
from kvist.keys import BlockKey, RootKey
from kvist.lab.simulate.books import Machine
from kvist.policies.base import Candidate
from kvist.policies.keeper import Keeper
from kvist.policies.registry import DEFAULT_POLICY, policy_factory
from kvist.tiers.base import (
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
from kvist.tiers.demotion import WritePolicy
from kvist.tiers.link import PRIORS
from kvist.tiers.manager import Identity, TierManager
from kvist.tierspec import TierSpec, parse_tier

_STAGING_BYTES = 64 << 20
_LEAST_STAGING_BLOCKS = 16
_UNLIMITED_BYTES = 1 << 62
"""Room of a server: it is the server's, and nobody here knows how much there is."""
_MISS = Lookup(LookupStatus.MISS, reason="absent")
_PENDING = Lookup(LookupStatus.PENDING, reason="being_written")


class BytelessTier(Tier):
    """Keeps names of blocks and the room they would take.

    Parameters
    ----------
    name, medium : str
    keeper : Keeper
        Of the tier's budget.
    block_bytes : int
        That every block would take.
    latency_s, bytes_per_s : float
        Of its channels.
    clock : callable
        Virtual seconds.
    """

    def __init__(
        self,
        name: str,
        medium: str,
        keeper: Keeper,
        block_bytes: int,
        latency_s: float,
        bytes_per_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.medium = medium
        self._keeper = keeper
        self._block_bytes = block_bytes
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._hit = Lookup(LookupStatus.HIT, block_bytes)
        self._pending: set[BlockKey] = set()
        self._cancelled: set[int] = set()
        # (when it is over, when it began, job), in order, and when the channel is free.
        self._loads: deque[tuple[float, float, LoadJob]] = deque()
        self._stores: deque[tuple[float, float, StoreJob]] = deque()
        self._up_s = self._down_s = 0.0
        self._waker: Callable[[], None] | None = None

    @property
    def next_s(self) -> float | None:
        """When the next job will be over; ``None``: none is under way."""
        ends = [queue[0][0] for queue in (self._loads, self._stores) if queue]
        return min(ends, default=None)

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`. There is one root, so that keys never meet."""

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`."""
        keeper, pending = self._keeper, self._pending
        return [
            self._hit if key in keeper else _PENDING if key in pending else _MISS for key in keys
        ]

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        begin_s = max(self._clock(), self._up_s)
        self._up_s = begin_s + self._seconds(len(job.keys))
        self._loads.append((self._up_s, begin_s, job))

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        begin_s = max(self._clock(), self._down_s)
        self._down_s = begin_s + self._seconds(len(job.keys))
        self._stores.append((self._down_s, begin_s, job))
        self._pending.update(job.keys)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`. The channel is taken all the same."""
        jobs = (job for queue in (self._loads, self._stores) for _, _, job in queue)
        if any(job.job_id == job_id for job in jobs):
            self._cancelled.add(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        now, done = self._clock(), []
        self._keeper.expire()
        while self._loads and self._loads[0][0] <= now:
            end_s, begin_s, load = self._loads.popleft()
            done.append(self._told(load, end_s - begin_s, self._load(load)))
        while self._stores and self._stores[0][0] <= now:
            end_s, begin_s, store = self._stores.popleft()
            self._pending.difference_update(store.keys)
            done.append(self._told(store, end_s - begin_s, self._store(store)))
        if done and self._waker is not None:
            self._waker()
        return done

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self._waker = waker

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`."""
        return [self._keeper.lock(key, ttl_s) for key in keys]

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`."""
        for key in keys:
            self._keeper.unlock(key)

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        self._keeper.touch(keys)

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`."""
        there = [key for key in keys if key in self._keeper]
        for key in there:
            self._keeper.remove(key)
        return len(there)

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`. Ages and hits are not kept."""
        return iter(())

    def usage(self) -> Usage:
        """See `Tier.usage`."""
        return Usage(self._keeper.capacity, self._keeper.used, len(self._keeper))

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`. Time passes elsewhere."""
        return not (self._loads or self._stores)

    def close(self) -> None:
        """See `Tier.close`. What is under way is cancelled, and told by the next poll."""
        for queue in (self._loads, self._stores):
            self._cancelled.update(job.job_id for _, _, job in queue)
        self._loads = deque((self._clock(), begin_s, job) for _, begin_s, job in self._loads)
        self._stores = deque((self._clock(), begin_s, job) for _, begin_s, job in self._stores)

    def check(self) -> None:
        """See `Tier.check`."""
        self._keeper.check()

    def _seconds(self, num_blocks: int) -> float:
        return self._latency_s + num_blocks * self._block_bytes / self._bytes_per_s

    def _load(self, job: LoadJob) -> list[Outcome]:
        if job.job_id in self._cancelled:
            return [Outcome.CANCELLED] * len(job.keys)
        if job.deadline_s is not None and self._clock() >= job.deadline_s:
            return [Outcome.LATE] * len(job.keys)
        return [Outcome.DONE if key in self._keeper else Outcome.MISS for key in job.keys]

    def _store(self, job: StoreJob) -> list[Outcome]:
        if job.job_id in self._cancelled:
            return [Outcome.CANCELLED] * len(job.keys)
        keeper, outcomes = self._keeper, []
        admitted = keeper.admit(job.keys)
        for index, (key, meta) in enumerate(zip(job.keys, job.meta, strict=True)):
            block = Candidate(key, meta.parent, meta.depth, self._block_bytes, meta.recompute_s)
            if index >= admitted or key in keeper:
                outcomes.append(Outcome.REFUSED)
                continue
            keeper.make_room(block)
            fits = keeper.fits(self._block_bytes)
            if fits:
                keeper.add(block)
            outcomes.append(Outcome.DONE if fits else Outcome.REFUSED)
        return outcomes

    def _told(self, job: LoadJob | StoreJob, seconds: float, outcomes: list[Outcome]) -> JobDone:
        self._cancelled.discard(job.job_id)
        moved = sum(outcome is Outcome.DONE for outcome in outcomes) * self._block_bytes
        reason = next((o.value for o in outcomes if o is not Outcome.DONE), "")
        return JobDone(job.job_id, tuple(outcomes), moved, seconds, reason)


class _NoBytes:
    """A device without memory. Its landing is room that nobody writes to, so that none is taken."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._landing = memoryview(mmap.mmap(-1, block_bytes))

    def read(self, block_id: int, out: memoryview) -> None:
        """See `kvist.tiers.promotion.DeviceBytes`: nothing to copy."""

    def landing(self, block_id: int) -> memoryview:
        """See `kvist.tiers.promotion.DeviceBytes`."""
        return self._landing

    def land(self, block_id: int, landing: memoryview) -> None:
        """See `kvist.tiers.promotion.DeviceBytes`: nothing came."""


def make_tiers(
    machine: Machine, rates: Mapping[str, float], clock: Callable[[], float]
) -> list[BytelessTier]:
    """Open the tiers of a machine.

    Parameters
    ----------
    rates : mapping of tier name or kind to bytes a second
        Where not the usual ones of the medium, `kvist.tiers.link.PRIORS`.

    Raises
    ------
    ConfigError
        For a tier that cannot be simulated, or a rate of no tier.
    """
    tiers: list[BytelessTier] = []
    unused = set(rates)
    for spec in map(parse_tier, machine.tiers):
        taken = {tier.name for tier in tiers}
        name = spec.name or next(
            name
            for name in (spec.kind, *(f"{spec.kind}{n}" for n in range(2, len(taken) + 3)))
            if name not in taken
        )
        medium = "remote" if spec.kind == "redis" else spec.kind
        latency_s, usual = PRIORS[medium]
        key = name if name in rates else spec.kind
        unused.discard(key)
        tiers.append(
            BytelessTier(
                name,
                medium,
                _keeper(spec, clock),
                machine.block_bytes,
                latency_s,
                rates.get(key, usual),
                clock,
            )
        )
    if unused:
        raise ConfigError(f"--tier-rate {min(unused)}: there is no such tier")
    return tiers


def put_tiers(
    machine: Machine,
    tiers: Sequence[BytelessTier],
    cache: KVCacheManager,
    events: EventLog,
    clock: Callable[[], float],
) -> PrefixLoads | None:
    """Put opened tiers under a cache; ``None`` where there are none."""
    if not tiers:
        return None
    identity = Identity(
        RootKey(bytes(32)), machine.model, machine.kv_format, (machine.block_bytes,), 2
    )
    manager = TierManager(
        tiers,
        _NoBytes(machine.block_bytes),
        identity,
        events,
        write_policy=WritePolicy.parse(machine.tier_write_policy),
        load_policy=machine.tier_load_policy,
        staging_blocks=max(_LEAST_STAGING_BLOCKS, _STAGING_BYTES // machine.block_bytes),
        block_tokens=machine.block_size,
        clock=clock,
    )
    return PrefixLoads(cache, manager, events, clock)


def _keeper(spec: TierSpec, clock: Callable[[], float]) -> Keeper:
    # No quotas: they are of tenants, and traces have none.
    return Keeper(
        spec.capacity_bytes or _UNLIMITED_BYTES,
        policy_factory(spec.policy or DEFAULT_POLICY, spec.protected_share),
        min_hits=spec.min_hits,
        max_idle_s=spec.ttl_s,
        clock=clock,
    )
