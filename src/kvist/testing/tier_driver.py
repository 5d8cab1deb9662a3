"""Drives a tier as a caller would, waiting for what it answers: for tests that read top down.

Owns job ids and buffers; knows no concrete tier.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import count
from random import Random

from kvist.keys import BlockKey
from kvist.tiers.base import (
    BlockMeta,
    JobDone,
    LoadJob,
    Lookup,
    LookupStatus,
    Namespace,
    Outcome,
    StoreJob,
    Tier,
)

PATIENCE_S = 20.0
SEGMENT_BYTES = (12_000, 20_000, 8_000)
GUARD_BYTES = 32


def space(name: str = "a", tenant: str = "", segments: Sequence[int] = SEGMENT_BYTES) -> Namespace:
    """Return a namespace for tests, its identity taken from `name`."""
    digest = blake2b(name.encode(), digest_size=32).digest()
    return Namespace(digest, f"model-{name}", "bf16", tenant, tuple(segments))


def block_key(name: object) -> BlockKey:
    """Return a key for tests, the same for the same `name`."""
    return BlockKey(blake2b(repr(name).encode(), digest_size=32).digest())


def block_bytes(key: BlockKey, nbytes: int = sum(SEGMENT_BYTES)) -> bytes:
    """Return what a block of that key holds: half noise, half something a codec can shorten."""
    noise = Random(key).randbytes(nbytes // 2)
    return (noise + key * (nbytes // len(key) + 1))[:nbytes]


def chain(name: object, length: int) -> list[BlockKey]:
    """Return keys of blocks that continue each other."""
    return [block_key((name, index)) for index in range(length)]


def metas(keys: Sequence[BlockKey]) -> tuple[BlockMeta, ...]:
    """Return the meta of a chain that starts with ``keys[0]``."""
    parents = [b"", *keys]
    return tuple(BlockMeta(parents[index], index) for index in range(len(keys)))


class TierDriver:
    """Calls one tier and waits for its answers.

    Parameters
    ----------
    tier : Tier
        Driven by nobody else.
    spaces : sequence of Namespace
        Opened at once.

    Attributes
    ----------
    ended : dict of int to JobDone
        Jobs that were told and not taken by `wait`.
    """

    def __init__(self, tier: Tier, *spaces: Namespace) -> None:
        self.tier = tier
        self.ended: dict[int, JobDone] = {}
        self.num_told = 0
        self._ids = count(1)
        for namespace in spaces:
            tier.open_namespace(namespace)

    def begin_store(
        self,
        namespace: Namespace,
        blocks: Mapping[BlockKey, bytes],
        meta: Sequence[BlockMeta] | None = None,
    ) -> int:
        """Submit a store; return its id."""
        keys = tuple(blocks)
        job_id = next(self._ids)
        buffers = tuple(memoryview(data) for data in blocks.values())
        meta = tuple(meta) if meta is not None else metas(keys)
        self.tier.submit_store(StoreJob(job_id, namespace.digest, keys, buffers, meta))
        return job_id

    def begin_load(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        segments: range | None = None,
        deadline_s: float | None = None,
    ) -> tuple[int, list[bytearray]]:
        """Submit a load; return its id and its buffers, each between two guards."""
        segments = range(len(namespace.segment_bytes)) if segments is None else segments
        start, end = namespace.span(segments)
        wholes = [bytearray(b"\xee" * (end - start + 2 * GUARD_BYTES)) for _ in keys]
        views = tuple(memoryview(whole)[GUARD_BYTES:-GUARD_BYTES] for whole in wholes)
        job_id = next(self._ids)
        job = LoadJob(job_id, namespace.digest, tuple(keys), segments, views, deadline_s)
        self.tier.submit_load(job)
        return job_id, wholes

    def wait(self, job_id: int) -> JobDone:
        """Poll until a job has ended."""
        give_up = time.monotonic() + PATIENCE_S
        while job_id not in self.ended:
            self.poll()
            assert time.monotonic() < give_up, f"job {job_id} was not told in {PATIENCE_S} s"
            if job_id not in self.ended:
                time.sleep(0.0002)
        return self.ended.pop(job_id)

    def poll(self) -> None:
        """Poll once."""
        for done in self.tier.poll():
            assert done.job_id not in self.ended, f"job {done.job_id} was told twice"
            self.ended[done.job_id] = done
            self.num_told += 1

    def store(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        meta: Sequence[BlockMeta] | None = None,
    ) -> tuple[Outcome, ...]:
        """Store a chain of blocks, each with the bytes of `block_bytes`."""
        blocks = {key: block_bytes(key, namespace.block_bytes) for key in keys}
        return self.wait(self.begin_store(namespace, blocks, meta)).outcomes

    def load(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        segments: range | None = None,
        deadline_s: float | None = None,
    ) -> list[bytes | Outcome]:
        """Load blocks; return the bytes of each, or why there are none."""
        job_id, wholes = self.begin_load(namespace, keys, segments, deadline_s)
        return self.taken(self.wait(job_id), wholes)

    def taken(self, done: JobDone, wholes: Sequence[bytearray]) -> list[bytes | Outcome]:
        """Return what a load brought, and see that nothing was written beside the buffers."""
        assert len(done.outcomes) == len(wholes)
        for whole in wholes:
            guards = whole[:GUARD_BYTES] + whole[-GUARD_BYTES:]
            assert guards == b"\xee" * (2 * GUARD_BYTES), "bytes were written beside the buffer"
        return [
            bytes(whole[GUARD_BYTES:-GUARD_BYTES]) if outcome is Outcome.DONE else outcome
            for outcome, whole in zip(done.outcomes, wholes, strict=True)
        ]

    def lookup(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[Lookup]:
        """Look up, asking again while the answer is on its way or the block is being written."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            answers = self.tier.lookup(namespace.digest, keys)
            unsettled = (LookupStatus.RETRY, LookupStatus.PENDING)
            if not any(answer.status in unsettled for answer in answers):
                return answers
            assert time.monotonic() < give_up, f"no answer to a lookup in {PATIENCE_S} s"
            self.poll()
            time.sleep(0.0002)

    def hits(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Say for each key whether it is a hit."""
        return [answer.status is LookupStatus.HIT for answer in self.lookup(namespace, keys)]
