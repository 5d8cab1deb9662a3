"""A tier around a tier, for those that change one thing. Passes every call on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvist.keys import BlockKey
from kvist.tiers.base import Entry, JobDone, LoadJob, Lookup, Namespace, StoreJob, Tier, Usage


class WrappedTier(Tier):
    """`inner` as it is. Subclass it and change what should be different.

    Parameters
    ----------
    inner : Tier
        To be driven through this tier only.
    """

    def __init__(self, inner: Tier) -> None:
        self.name = inner.name
        self.medium = inner.medium
        self.lossless = inner.lossless
        self.reads_in_place = inner.reads_in_place
        self.inner = inner

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`."""
        self.inner.open_namespace(namespace)

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`."""
        return self.inner.lookup(namespace, keys)

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        self.inner.submit_load(job)

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        self.inner.submit_store(job)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        self.inner.cancel(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        return self.inner.poll()

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self.inner.set_waker(waker)

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`."""
        return self.inner.lock(namespace, keys, ttl_s)

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`."""
        self.inner.unlock(namespace, keys)

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        self.inner.touch(namespace, keys)

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`."""
        return self.inner.delete(namespace, keys)

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`."""
        return self.inner.entries(namespace)

    def usage(self) -> Usage:
        """See `Tier.usage`."""
        return self.inner.usage()

    def trouble(self) -> str:
        """See `Tier.trouble`."""
        return self.inner.trouble()

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`."""
        return self.inner.drain(timeout_s)

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()

    def check(self) -> None:
        """See `Tier.check`."""
        self.inner.check()
