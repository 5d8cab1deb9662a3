"""A tier serves other engines: their calls, in their order. Needs pytest; knows no tier by name.

Subclassed by `TierContract`: whoever passes that has passed this.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvist.testing.foreign_clients import (
    LMCacheAdapter,
    SGLangStorage,
    VllmLookup,
    VllmResult,
    VllmSecondaryTier,
    VllmTransfer,
)
from kvist.testing.tier_driver import PATIENCE_S, block_bytes, block_key, space
from kvist.tiers.base import Tier

T = TypeVar("T")

MakeTier = Callable[[int], Tier]
"""From a number of blocks of `space` to a tier with room for them, and for not many more."""

SPACE = space("foreign")
SIZE = SPACE.block_bytes


class ForeignContract:
    """Subclass it and override `make`."""

    @pytest.fixture
    def make(self) -> MakeTier:
        """Return a function that makes an empty tier; called more than once in a test."""
        raise NotImplementedError

    def test_vllm_demotes_and_promotes(self, make: MakeTier) -> None:
        """Its scheduler stores chunks, later finds them and loads them into other chunks."""
        primary = memoryview(bytearray(8 * SIZE))
        tier = VllmSecondaryTier(make(8), SPACE, primary)
        # vLLM's keys are a hash and the number of a group.
        keys = tuple(bytes([index]) * 32 + b"\x00\x00\x00\x01" for index in range(4))
        for chunk, key in enumerate(keys):
            primary[chunk * SIZE : (chunk + 1) * SIZE] = block_bytes(block_key(key))
        tier.submit_store(VllmTransfer(1, keys, (0, 1, 2, 3)))
        (stored,) = _until(lambda: list(tier.get_finished_jobs()))
        assert (stored.job_id, stored.success, stored.successful_keys) == (1, True, keys)
        assert _settled(tier, b"nobody") is VllmLookup.MISS
        assert [_settled(tier, key) for key in keys] == [VllmLookup.HIT] * 4
        tier.submit_load(VllmTransfer(2, (keys[2], b"nobody", keys[0]), (7, 6, 5)))
        (loaded,) = _until(lambda: list(tier.get_finished_jobs()))
        assert isinstance(loaded, VllmResult)
        assert not loaded.success
        assert loaded.successful_keys == (keys[2], keys[0])
        assert primary[7 * SIZE :] == block_bytes(block_key(keys[2]))
        assert primary[5 * SIZE : 6 * SIZE] == block_bytes(block_key(keys[0]))
        tier.touch(keys)
        tier.drain_jobs()
        assert not tier.has_pending_work()
        tier.shutdown()

    def test_sglang_backs_up_and_prefetches(self, make: MakeTier) -> None:
        """It backs pages up, asks how long a prefix is there, and prefetches that."""
        pool = memoryview(bytearray(8 * SIZE))
        storage = SGLangStorage(make(8), SPACE)
        storage.register_mem_pool_host(pool)
        keys = [f"{index:064x}" for index in range(4)]
        for page, key in enumerate(keys):
            pool[page * SIZE : (page + 1) * SIZE] = block_bytes(block_key(key))
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1([*keys[:2], keys[3]], [0, 1, 3]) == [True] * 3
        assert storage.batch_exists(keys) == 2, "consecutive: the third is not there"
        assert storage.exists(keys[3])
        assert storage.batch_get_v1(keys[:3], [4, 5, 6]) == [True, True, False]
        assert pool[4 * SIZE : 5 * SIZE] == block_bytes(block_key(keys[0]))
        assert pool[5 * SIZE : 6 * SIZE] == block_bytes(block_key(keys[1]))
        assert storage.get_stats()["used_bytes"] >= 0
        storage.clear()
        assert storage.batch_exists(keys) == 0
        storage.close()

    def test_lmcache_stores_locks_and_loads(self, make: MakeTier) -> None:
        """It sleeps on descriptors; results are bitmaps, objects are its own memory."""
        adapter = LMCacheAdapter(make(8), SPACE)
        keys = [b"model@1@0@" + bytes([index]) * 20 for index in range(3)]
        objects = [memoryview(bytearray(block_bytes(block_key(key)))) for key in keys]
        task = adapter.submit_store_task(keys[:2], objects[:2])
        _sleep_on(adapter.get_store_event_fd())
        stores = _until(adapter.pop_completed_store_tasks)
        assert stores == {task: (True, True)}
        assert adapter.pop_completed_store_tasks() == {}
        task = adapter.submit_lookup_and_lock_task(keys)
        _sleep_on(adapter.get_lookup_and_lock_event_fd())
        found = _until(lambda: adapter.query_lookup_and_lock_result(task))
        assert found == (True, True, False)
        targets = [memoryview(bytearray(SIZE)) for _ in keys]
        task = adapter.submit_load_task(keys, targets)
        _sleep_on(adapter.get_load_event_fd())
        assert _until(lambda: adapter.query_load_result(task)) == (True, True, False)
        assert targets[:2] == objects[:2]
        adapter.submit_unlock(keys[:2])
        adapter.submit_touch(keys)
        assert adapter.delete(keys[:1]) in (0, 1), "0: a tier that deletes behind the scenes"
        adapter.close()


def _until(ask: Callable[[], T]) -> T:
    give_up = time.monotonic() + PATIENCE_S
    while not (answer := ask()):
        assert time.monotonic() < give_up, f"nothing came in {PATIENCE_S} s"
        time.sleep(0.0005)
    return answer


def _settled(tier: VllmSecondaryTier, key: bytes) -> VllmLookup:
    def ask() -> VllmLookup | None:
        list(tier.get_finished_jobs())
        answer = tier.lookup(key)
        return answer if answer in (VllmLookup.HIT, VllmLookup.MISS) else None

    settled = _until(ask)
    assert settled is not None
    return settled


def _sleep_on(fd: int) -> None:
    readable, _, _ = select.select([fd], [], [], PATIENCE_S)
    assert readable, f"no wake-up in {PATIENCE_S} s"
