"""Blocks that a lower tier fills: who refers to them, and when others may find them.

`kvist.testing.cache_machine` tries the calls in every order; here stands what one call promises.
"""

from __future__ import annotations

import pytest

from kvist.blocks.block import BlockState
from kvist.blocks.loading import LoadingRun
from kvist.cache import KVCacheManager
from kvist.errors import IntegrityError
from kvist.events import BlockStored, EventLog
from kvist.keys import HashChain, RootKey, lane_key
from kvist.policies.lru import LRUPolicy

ROOT = RootKey(bytes(32))
SIZE = 4
TOKENS = list(range(17))


def open_cache(num_blocks: int = 8) -> tuple[KVCacheManager, EventLog]:
    events = EventLog()
    return KVCacheManager(num_blocks, SIZE, LRUPolicy(), events), events


def chain() -> HashChain:
    made = HashChain(ROOT, lane_key(ROOT), SIZE)
    made.extend(TOKENS)
    return made


def begin(cache: KVCacheManager, first: int = 0, n: int = 4) -> LoadingRun:
    known = chain()
    run = cache.loading.begin(first, known.keys[first : first + n], known.parent(first), TOKENS)
    assert run is not None
    return run


def states(cache: KVCacheManager, run: LoadingRun) -> list[BlockState]:
    return [cache._pool.blocks[i].state for i in run.block_ids]


def test_what_is_loaded_can_be_found_only_when_it_was_taken():
    cache, events = open_cache()
    run = begin(cache)
    assert states(cache, run) == [BlockState.LOADING] * 4
    cache.loading.arrive(run, 0, [True] * 4)
    assert cache.match(chain().keys, 17).num_tokens == 0
    table = cache.open_table()
    cache.adopt(table, run, 4)
    assert (table.num_tokens, table.num_sealed) == (16, 4)
    assert cache.match(chain().keys, 17).num_tokens == 16
    assert events.counts[BlockStored] == 4
    cache.check()
    cache.release(table)
    assert cache.num_used_blocks == 0
    cache.check()


def test_a_hole_ends_what_is_ready_and_the_rest_goes_back():
    cache, _ = open_cache()
    run = begin(cache)
    cache.loading.arrive(run, 0, [True, False])
    assert run.is_decided
    cache.loading.arrive(run, 2, [True, True])
    assert run.num_ready == 1
    table = cache.open_table()
    cache.adopt(table, run, 1)
    assert len(table.ids) == 1
    assert cache.num_used_blocks == 1
    cache.check()


def test_no_block_is_given_away_under_a_transfer():
    cache, _ = open_cache(num_blocks=4)
    run = begin(cache)
    cache.loading.close(run)
    assert cache.num_available_blocks == 0, "the transfer may still write"
    table = cache.open_table()
    assert cache.allocate(table, 1) is None
    cache.loading.arrive(run, 0, [True] * 4)
    assert cache.num_available_blocks == 4
    assert cache.match(chain().keys, 17).num_tokens == 0, "nobody waited: not kept"
    cache.check()


def test_who_goes_away_leaves_what_is_ready():
    cache, _ = open_cache()
    run = begin(cache)
    cache.loading.arrive(run, 0, [True, True])
    cache.loading.close(run)
    assert cache.match(chain().keys, 17).num_tokens == 8
    cache.loading.arrive(run, 2, [True, True])
    assert cache.num_used_blocks == 0
    cache.check()


def test_a_tail_without_its_head_is_not_findable():
    cache, _ = open_cache()
    run = begin(cache, first=2, n=2)
    cache.loading.arrive(run, 0, [True, True])
    cache.loading.close(run)
    assert cache.stats().num_cached_blocks == 0
    cache.check()


def test_a_tail_comes_behind_the_head_that_was_computed_meanwhile():
    cache, _ = open_cache()
    run = begin(cache, first=2, n=2)
    table, known = cache.open_table(), chain()
    cache.allocate(table, 8)
    cache.commit(table, 8, TOKENS, known)
    cache.loading.arrive(run, 0, [True, True])
    cache.adopt(table, run, 2)
    assert table.num_tokens == 16
    assert cache.match(known.keys, 17).block_ids == tuple(table.ids)
    cache.check()


def test_a_block_that_another_computed_meanwhile_stands():
    cache, events = open_cache()
    run = begin(cache, n=2)
    other = cache.open_table()
    cache.allocate(other, 8)
    cache.commit(other, 8, TOKENS, chain())
    cache.loading.arrive(run, 0, [True, True])
    table = cache.open_table()
    cache.adopt(table, run, 2)
    assert table.ids == other.ids
    assert events.counts[BlockStored] == 2
    cache.check()


def test_no_room_changes_nothing():
    cache, _ = open_cache(num_blocks=3)
    before = cache.stats()
    known = chain()
    assert cache.loading.begin(0, known.keys[:4], known.parent(0), TOKENS) is None
    assert cache.stats() == before
    cache.check()


def test_misuse_is_an_error():
    cache, _ = open_cache()
    run = begin(cache)
    table = cache.open_table()
    with pytest.raises(IntegrityError, match="taken"):
        cache.adopt(table, run, 1)
    cache.loading.arrive(run, 0, [True])
    with pytest.raises(IntegrityError, match="twice"):
        cache.loading.arrive(run, 0, [True])
    cache.loading.close(run)
    with pytest.raises(IntegrityError, match="closed"):
        cache.loading.close(run)


def test_slots_of_a_block_that_loads_are_not_filled():
    cache, _ = open_cache()
    begin(cache)
    stats = cache.stats()
    assert (stats.num_used_blocks, stats.filled_slots, stats.allocated_slots) == (4, 0, 16)
