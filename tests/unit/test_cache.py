"""The cache by hand: what is shared, what is copied, what is refused, and what each call costs.

`kvist.testing.cache_machine` tries these calls in every order; here stands what one call promises.
"""

from __future__ import annotations

import pytest

from kvist.blocks.block import BlockState
from kvist.blocks.table import BlockCopy, BlockTable
from kvist.cache import NO_MATCH, Allocation, KVCacheManager, PrefixMatch
from kvist.errors import IntegrityError
from kvist.events import BlockEvicted, BlocksShared, BlockStored, EventLog
from kvist.keys import HashChain, RootKey, lane_key
from kvist.policies.lru import LRUPolicy

ROOT = RootKey(bytes(32))
SIZE = 4


def open_cache(num_blocks: int = 8, *, caching: bool = True) -> tuple[KVCacheManager, EventLog]:
    events = EventLog()
    cache = KVCacheManager(num_blocks, SIZE, LRUPolicy(), events, enable_prefix_caching=caching)
    return cache, events


def chain_of(tokens: list[int]) -> HashChain:
    chain = HashChain(ROOT, lane_key(ROOT), SIZE)
    chain.extend(tokens)
    return chain


def filled(cache: KVCacheManager, tokens: list[int], *, findable: bool = True) -> BlockTable:
    """A table that holds `tokens`, after whatever of them is there already."""
    chain = chain_of(tokens)
    match = cache.match(chain.keys, len(tokens)) if findable else NO_MATCH
    table = cache.open_table()
    assert cache.allocate(table, len(tokens), match) is not None
    cache.commit(table, len(tokens), tokens, chain if findable else None)
    return table


# ----------------------------------------------------------------------------------------- match


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(12, 8), (13, 12), (11, 8), (5, 4), (4, 0), (1, 0), (20, 12)]
)
def test_a_match_is_whole_blocks_and_leaves_a_token_to_compute(num_tokens: int, hit: int):
    cache, _ = open_cache()
    table = filled(cache, list(range(13)))
    tokens = list(range(num_tokens))
    match = cache.match(chain_of(tokens).keys, num_tokens)
    assert match.num_tokens == hit
    assert list(match.block_ids) == list(table.ids[: hit // SIZE])


def test_a_match_ends_where_the_tokens_differ():
    cache, _ = open_cache()
    filled(cache, list(range(13)))
    tokens = [0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11, 12]
    assert cache.match(chain_of(tokens).keys, 13).num_tokens == 4


def test_what_was_released_is_still_found_until_its_room_is_needed():
    cache, events = open_cache(num_blocks=3)
    cache.release(filled(cache, list(range(12))))
    keys = chain_of(list(range(13))).keys
    assert cache.match(keys, 13).num_tokens == 12
    table = cache.open_table()
    assert cache.allocate(table, 1) is not None
    assert cache.match(keys, 13).num_tokens == 8, "the leaf went first"
    assert events.counts[BlockEvicted] == 1


def test_without_prefix_caching_nothing_is_found_and_nothing_stays():
    cache, events = open_cache(caching=False)
    table = filled(cache, list(range(12)))
    assert cache.match(chain_of(list(range(13))).keys, 13) is NO_MATCH
    cache.release(table)
    assert cache.stats().num_free_blocks == 8
    assert events.counts[BlockStored] == 0


def test_a_sequence_without_a_chain_is_never_found():
    cache, _ = open_cache()
    filled(cache, list(range(12)), findable=False)
    assert cache.match(chain_of(list(range(13))).keys, 13).num_tokens == 0


# -------------------------------------------------------------------------------------- allocate


def test_a_match_is_shared_at_once_and_only_the_rest_is_new():
    cache, events = open_cache()
    first = filled(cache, list(range(13)))
    chain = chain_of(list(range(13)))
    table = cache.open_table()
    allocation = cache.allocate(table, 13, cache.match(chain.keys, 13))
    assert allocation is not None
    assert len(allocation.fresh) == 1
    assert table.ids[:3] == first.ids[:3]
    assert table.num_tokens == 12
    assert cache.num_used_blocks == 5
    # A reservation is no hit yet: it may be rolled back, and would be counted twice.
    assert BlocksShared(3, 12) not in events.recent()
    cache.commit(table, 13, list(range(13)), chain)
    assert BlocksShared(3, 12) in events.recent()
    cache.commit(table, 13, list(range(13)), chain)
    assert events.counts[BlocksShared] == 1


@pytest.mark.parametrize(("num_tokens", "fits"), [(32, True), (33, False)])
def test_room_is_given_to_the_last_block_and_then_refused(num_tokens: int, fits: bool):
    cache, _ = open_cache()
    table = cache.open_table()
    before = repr(cache.stats())
    assert (cache.allocate(table, num_tokens) is not None) is fits
    if not fits:
        assert repr(cache.stats()) == before
        assert len(table) == 0


def test_cached_blocks_of_the_match_itself_are_not_counted_as_room():
    """Three cached blocks, all of them matched: none of them can be evicted for the rest."""
    cache, _ = open_cache(num_blocks=3)
    cache.release(filled(cache, list(range(12))))
    chain = chain_of(list(range(13)))
    match = cache.match(chain.keys, 13)
    assert cache.blocks_taken(13, match) == 4
    before = repr(cache.stats())
    assert cache.allocate(cache.open_table(), 13, match) is None
    assert repr(cache.stats()) == before


def test_allocating_what_is_there_already_changes_nothing():
    cache, _ = open_cache()
    table = filled(cache, list(range(6)))
    allocation = cache.allocate(table, 8)
    assert allocation is not None
    assert allocation.fresh == ()


def test_a_match_can_only_open_an_empty_table():
    cache, _ = open_cache()
    table = filled(cache, list(range(6)))
    with pytest.raises(IntegrityError, match="6 tokens in 2 blocks"):
        cache.allocate(table, 9, PrefixMatch((0,), 4))


# ---------------------------------------------------------------------------------------- commit


def test_full_blocks_are_sealed_and_told_in_order():
    cache, events = open_cache()
    tokens = list(range(9))
    table = filled(cache, tokens)
    stored = [event for event in events.recent() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [event.depth for event in stored] == [0, 1]
    assert stored[0].parent == lane_key(ROOT)
    assert stored[1].parent == stored[0].key
    assert [event.block_id for event in stored] == list(table.ids[:2])


def test_two_that_computed_the_same_end_up_with_one_block():
    cache, events = open_cache()
    tables = [cache.open_table() for _ in range(2)]
    tokens = list(range(8))
    for table in tables:
        assert cache.allocate(table, 8) is not None
    assert cache.num_used_blocks == 4
    for table in tables:
        cache.commit(table, 8, tokens, chain_of(tokens))
    assert tables[0].ids == tables[1].ids
    assert cache.num_used_blocks == 2
    assert events.counts[BlockStored] == 2
    cache.check()


@pytest.mark.parametrize("num_tokens", [3, 9])
def test_commit_of_fewer_than_before_or_more_than_there_is_room_is_misuse(num_tokens: int):
    cache, _ = open_cache()
    table = filled(cache, list(range(5)))
    with pytest.raises(
        IntegrityError, match=f"commit of {num_tokens} tokens.*5 tokens in 2 blocks"
    ):
        cache.commit(table, num_tokens, list(range(9)), None)


def test_each_block_is_hashed_and_sealed_once_however_often_commit_is_called():
    cache, events = open_cache()
    table, chain = cache.open_table(), HashChain(ROOT, lane_key(ROOT), SIZE)
    tokens = list(range(20))
    for n in range(1, 21):
        assert cache.allocate(table, n) is not None
        assert cache.commit(table, n, tokens[:n], chain) == n // SIZE
    assert events.counts[BlockStored] == 5


# ---------------------------------------------------------------------------- fork, copy on write


def test_a_fork_takes_no_room_and_the_first_to_write_stays():
    cache, _ = open_cache()
    parent = filled(cache, list(range(6)))
    child = cache.fork(parent)
    assert cache.num_used_blocks == 2
    shared = parent.ids[1]
    allocation = cache.allocate(parent, 7)
    assert allocation is not None
    assert allocation.copies == ()
    cache.commit(parent, 7, list(range(7)), None)
    later = cache.allocate(child, 7)
    assert later is not None
    assert later.copies == (BlockCopy(shared, child.ids[1]),), "the parent has a seventh token"
    assert parent.ids[0] == child.ids[0]
    cache.commit(child, 7, list(range(7)), None)
    for table in (parent, child):
        assert cache.allocate(table, 8) == Allocation((), (), 2), "each is alone now"
    cache.check()


@pytest.mark.parametrize("num_tables", [2, 3, 5])
@pytest.mark.parametrize("writes_first", ["parent", "child"])
def test_of_n_that_write_in_one_step_all_but_one_copy(num_tables: int, writes_first: str):
    cache, _ = open_cache()
    parent = filled(cache, list(range(6)))
    source = parent.ids[1]
    tables = [parent, *(cache.fork(parent) for _ in range(num_tables - 1))]
    if writes_first == "child":
        tables.reverse()
    copies = []
    for table in tables:
        allocation = cache.allocate(table, 7)
        assert allocation is not None
        copies += allocation.copies
    assert [copy.source for copy in copies] == [source] * (num_tables - 1)
    assert [copy.target for copy in copies] == [table.ids[1] for table in tables[1:]]
    cache.check()
    for table in tables:
        cache.commit(table, 7, list(range(7)), None)
    assert cache.num_used_blocks == 1 + num_tables
    cache.check()


@pytest.mark.parametrize("writes_first", ["parent", "child"])
def test_who_would_write_over_another_copies_even_where_that_one_copies_too(writes_first: str):
    """A child that lacks the last token: should the parent's step fail, it reads that one again."""
    cache, _ = open_cache()
    parent = filled(cache, list(range(7)))
    child = cache.fork(parent)
    cache.truncate(child, 6)
    order = (parent, child) if writes_first == "parent" else (child, parent)
    made = {table: cache.allocate(table, table.num_tokens + 1) for table in order}
    assert made[parent] == Allocation((), (), 2)
    copied = made[child]
    assert copied is not None
    assert copied.copies == (BlockCopy(parent.ids[1], child.ids[1]),)


def test_what_a_copier_would_get_back_is_not_written_over():
    """The shorter of two is not asked before the copy of the longer one is recorded."""
    cache, _ = open_cache()
    longest = filled(cache, list(range(6)))
    longer, shorter = cache.fork(longest), cache.fork(longest)
    cache.truncate(shorter, 5)
    assert cache.allocate(longest, 7) is not None
    allocation = cache.allocate(longer, 7)
    assert allocation is not None
    assert len(allocation.copies) == 1
    cache.release(longest)
    in_flight = cache.allocate(shorter, 6)
    assert in_flight is not None
    assert len(in_flight.copies) == 1, "`longer` would find the sixth token overwritten"
    cache.cancel(shorter, in_flight)
    cache.commit(longer, 7, list(range(7)), None)
    assert cache.allocate(shorter, 6) == Allocation((), (), 2)
    cache.check()


def test_a_fork_at_the_border_of_a_block_copies_nothing():
    cache, _ = open_cache()
    parent = filled(cache, list(range(8)))
    child = cache.fork(parent)
    for table in (parent, child):
        allocation = cache.allocate(table, 9)
        assert allocation is not None
        assert allocation.copies == ()


def test_a_fork_does_not_share_blocks_that_are_reserved_and_empty():
    cache, _ = open_cache()
    parent = cache.open_table()
    assert cache.allocate(parent, 20) is not None
    cache.commit(parent, 3, [0, 1, 2], None)
    assert len(cache.fork(parent)) == 1


def test_a_copy_needs_room_and_is_refused_without():
    cache, _ = open_cache(num_blocks=2)
    parent = filled(cache, list(range(6)))
    child = cache.fork(parent)
    assert cache.allocate(parent, 7) is not None
    before = child.ids.tobytes()
    assert cache.allocate(child, 7) is None
    assert child.ids.tobytes() == before


def test_no_fork_while_a_reservation_is_in_flight():
    """Both would write behind the same tokens, and neither know of the other."""
    cache, _ = open_cache()
    parent = filled(cache, list(range(6)))
    allocation = cache.allocate(parent, 7)
    assert allocation is not None
    with pytest.raises(IntegrityError, match="7 tokens are reserved"):
        cache.fork(parent)
    cache.cancel(parent, allocation)
    cache.fork(parent)


# ------------------------------------------------------------------------------ cancel, truncate


def test_cancel_gives_back_new_blocks_and_takes_the_copy_back():
    cache, _ = open_cache()
    parent = filled(cache, list(range(6)))
    child = cache.fork(parent)
    assert cache.allocate(parent, 7) is not None
    before = (child.ids.tobytes(), repr(cache.stats()))
    allocation = cache.allocate(child, 12)
    assert allocation is not None
    assert len(allocation.fresh) == 2
    assert len(allocation.copies) == 1
    cache.cancel(child, allocation)
    assert (child.ids.tobytes(), repr(cache.stats())) == before
    cache.check()


def test_cancel_of_an_opening_keeps_the_match_until_release():
    cache, _ = open_cache()
    cache.release(filled(cache, list(range(9))))
    before = cache.stats()
    table = cache.open_table()
    allocation = cache.allocate(table, 12, cache.match(chain_of(list(range(9))).keys, 9))
    assert allocation is not None
    cache.cancel(table, allocation)
    assert (len(table), table.num_tokens) == (2, 8)
    cache.release(table)
    assert cache.stats() == before


def test_truncate_gives_blocks_back_and_the_next_write_spares_the_sealed_one():
    cache, _ = open_cache()
    table = filled(cache, list(range(12)))
    sealed = table.ids[1]
    cache.truncate(table, 6)
    assert (len(table), table.num_tokens, table.num_sealed) == (2, 6, 1)
    allocation = cache.allocate(table, 7)
    assert allocation is not None
    assert allocation.copies[0].source == sealed
    cache.commit(table, 7, [0, 1, 2, 3, 4, 5, 99], chain_of(list(range(4))))
    assert cache.match(chain_of(list(range(13))).keys, 13).num_tokens == 12, "still as it was"
    cache.check()


def test_truncate_cannot_make_a_table_longer():
    cache, _ = open_cache()
    with pytest.raises(IntegrityError, match=r"5 tokens in 2 blocks.* to 6 tokens"):
        cache.truncate(filled(cache, list(range(5))), 6)


# ----------------------------------------------------------------------------------- release, look


def test_releasing_twice_or_elsewhere_is_misuse():
    cache, _ = open_cache()
    other, _ = open_cache()
    table = filled(cache, list(range(5)))
    with pytest.raises(IntegrityError, match="not of this cache"):
        other.release(table)
    cache.release(table)
    with pytest.raises(IntegrityError, match="released before"):
        cache.release(table)


def test_reset_forgets_what_nobody_uses():
    cache, _ = open_cache()
    kept = filled(cache, list(range(8)))
    cache.release(filled(cache, list(range(50, 58))))
    assert cache.reset_prefix_cache() == 2
    assert cache.num_used_blocks == len(kept)
    assert cache.match(chain_of(list(range(50, 59))).keys, 9).num_tokens == 0
    assert cache.match(chain_of(list(range(9))).keys, 9).num_tokens == 8


def test_stats_count_shared_blocks_once_and_empty_slots_as_allocated():
    cache, _ = open_cache()
    parent = filled(cache, list(range(6)))
    cache.fork(parent)
    reserved = cache.open_table()
    assert cache.allocate(reserved, 9) is not None
    cache.commit(reserved, 5, [9] * 5, None)
    stats = cache.stats()
    assert stats.num_used_blocks == 2 + 3
    assert stats.allocated_slots == 5 * SIZE
    assert stats.filled_slots == 6 + 5
    assert stats.usage == 5 / 8


def test_check_finds_a_table_that_nobody_accounts_for():
    cache, _ = open_cache()
    table = filled(cache, list(range(6)))
    cache._tables.discard(table)
    with pytest.raises(IntegrityError, match="0 references"):
        cache.check()


@pytest.mark.parametrize("damage", ["twice", "too many tokens", "sealed count", "free block"])
def test_check_finds_a_damaged_table(damage: str):
    cache, _ = open_cache()
    table = filled(cache, list(range(6)))
    if damage == "twice":
        table.ids[1] = table.ids[0]
    elif damage == "too many tokens":
        table.num_tokens = 9
    elif damage == "sealed count":
        table.num_sealed = 2
    else:
        table.ids[1] = next(
            block.block_id for block in cache._pool.blocks if block.state is BlockState.FREE
        )
    with pytest.raises(IntegrityError):
        cache.check()
