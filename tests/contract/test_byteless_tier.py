"""The simulator's tier keeps the books that every tier keeps.

Guards: a simulation whose tiers store, evict, lock, cancel or refuse unlike those that it stands
for. It holds no bytes and knows one root, so here bytes and namespaces are lent to it; what asks
for more than books is left out below, by name and with the reason.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvist.keys import BlockKey
from kvist.lab.simulate.tier import BytelessTier
from kvist.policies.keeper import Keeper
from kvist.policies.registry import DEFAULT_POLICY, policy_factory
from kvist.testing.bounded_tier_contract import BoundedTierContract
from kvist.testing.tier_contract import A, B
from kvist.testing.wrapped_tier import WrappedTier
from kvist.tiers.base import JobDone, LoadJob, Outcome, StoreJob


class Lent(WrappedTier):
    """A byteless tier with bytes, and with a key of its own for each namespace's."""

    def __init__(self, inner: BytelessTier) -> None:
        super().__init__(inner)
        self._bytes: dict[BlockKey, bytes] = {}
        self._jobs: dict[int, LoadJob | StoreJob] = {}

    @staticmethod
    def own(namespace: bytes, key: bytes) -> BlockKey:
        return BlockKey(namespace[:16] + key) if key else BlockKey(b"")

    def _keys(self, namespace, keys):
        return [self.own(namespace, key) for key in keys]

    def lookup(self, namespace, keys):
        return self.inner.lookup(namespace, self._keys(namespace, keys))

    def submit_load(self, job):
        self._jobs[job.job_id] = job
        keys = tuple(self._keys(job.namespace, job.keys))
        self.inner.submit_load(
            LoadJob(job.job_id, job.namespace, keys, job.segments, job.buffers, job.deadline_s)
        )

    def submit_store(self, job):
        self._jobs[job.job_id] = job
        meta = tuple(replace(m, parent=self.own(job.namespace, m.parent)) for m in job.meta)
        keys = tuple(self._keys(job.namespace, job.keys))
        self.inner.submit_store(StoreJob(job.job_id, job.namespace, keys, job.buffers, meta))

    def poll(self):
        done = self.inner.poll()
        for told in done:
            self._carry(told)
        return done

    def _carry(self, told: JobDone) -> None:
        job = self._jobs.pop(told.job_id)
        for key, buffer, outcome in zip(job.keys, job.buffers, told.outcomes, strict=True):
            own = self.own(job.namespace, key)
            if outcome is not Outcome.DONE:
                continue
            if isinstance(job, StoreJob):
                self._bytes[own] = bytes(buffer)
            else:
                space = {A.digest: A, B.digest: B}[job.namespace]
                start, end = space.span(job.segments)
                buffer[:] = self._bytes[own][start:end]

    def lock(self, namespace, keys, ttl_s):
        return self.inner.lock(namespace, self._keys(namespace, keys), ttl_s)

    def unlock(self, namespace, keys):
        self.inner.unlock(namespace, self._keys(namespace, keys))

    def touch(self, namespace, keys):
        self.inner.touch(namespace, self._keys(namespace, keys))

    def delete(self, namespace, keys):
        return self.inner.delete(namespace, self._keys(namespace, keys))

    def drain(self, timeout_s):
        """Virtual time passes elsewhere: here, while somebody waits."""
        end_s = time.monotonic() + timeout_s
        while not self.inner.drain(0.0) and time.monotonic() < end_s:
            time.sleep(0.001)
            if self.inner.next_s is not None and self.inner.next_s <= time.monotonic():
                return True  # told by the next poll
        return self.inner.drain(0.0)


def make_tier(num_blocks: int) -> Lent:
    keeper = Keeper(num_blocks * A.block_bytes, policy_factory(DEFAULT_POLICY, 0.0))
    return Lent(BytelessTier("t", "host", keeper, A.block_bytes, 1e-5, 1e10, time.monotonic))


class TestBytelessTier(BoundedTierContract):
    @pytest.fixture
    def make(self):
        return make_tier

    # It checks no buffers and opens no namespaces: there is one root, and nothing is copied.
    test_misuse_is_an_error = None
    test_a_namespace_is_opened_twice_but_not_with_other_segments = None
    # Traces have no tenants, and nobody looks into a store that is none.
    test_usage_is_by_tenant = None
    test_entries_are_those_of_the_namespace = None
    # Time is virtual: jobs end when somebody asks, and who asks is awake.
    test_the_waker_is_called = None
    # Other engines' connectors want bytes.
    test_vllm_demotes_and_promotes = None
    test_sglang_backs_up_and_prefetches = None
    test_lmcache_stores_locks_and_loads = None
