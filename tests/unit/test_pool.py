"""The books of the blocks: each is in exactly one place, and nothing in use is ever handed out."""

from __future__ import annotations

from collections import Counter

import pytest

from kvist.blocks.block import BlockState
from kvist.blocks.pool import BlockPool
from kvist.blocks.prefix import PrefixIndex
from kvist.errors import IntegrityError
from kvist.keys import BlockKey
from kvist.policies.base import Candidate
from kvist.policies.lru import LRUPolicy


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(32, "big"))


LANE = key(0)


class Books:
    """A pool whose evictions are written down."""

    def __init__(self, num_blocks: int) -> None:
        self.evicted: list[tuple[int, BlockKey]] = []
        self.pool = BlockPool(
            num_blocks, LRUPolicy(), lambda block_id, key: self.evicted.append((block_id, key))
        )

    def chain(self, *names: int) -> list[int]:
        """Blocks in use that hold a chain of keys, sealed."""
        taken = self.pool.allocate(len(names))
        assert taken is not None
        for depth, name in enumerate(names):
            parent = key(names[depth - 1]) if depth else LANE
            taken[depth] = self.pool.seal(taken[depth], key(name), parent, depth, (name,))
        return taken


def test_allocate_hands_out_open_blocks_with_one_reference():
    pool = BlockPool(4, LRUPolicy())
    taken = pool.allocate(3)
    assert taken is not None
    assert len(set(taken)) == 3
    assert {pool.blocks[i].state for i in taken} == {BlockState.OPEN}
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 0, 3, 1)
    pool.check(Counter(taken))


def test_allocate_gives_all_or_nothing():
    pool = BlockPool(4, LRUPolicy())
    pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_a_released_open_block_is_free_a_sealed_one_stays_findable():
    books = Books(3)
    (sealed,) = books.chain(1)
    (opened,) = books.pool.allocate(1) or ()
    books.pool.release([sealed, opened])
    assert books.pool.blocks[opened].state is BlockState.FREE
    assert books.pool.blocks[sealed].state is BlockState.CACHED
    assert books.pool.index.get(key(1)) == sealed
    assert (books.pool.num_free, books.pool.num_cached, books.pool.num_used) == (2, 1, 0)
    books.pool.check(Counter())


def test_retaining_a_cached_block_saves_it_from_eviction():
    books = Books(2)
    (first,) = books.chain(1)
    books.pool.release([first])
    assert books.pool.num_unused([first]) == 1
    books.pool.retain([first])
    assert books.pool.num_unused([first]) == 0
    assert books.pool.allocate(2) is None
    assert books.pool.allocate(1) is not None
    assert books.evicted == []


def test_a_block_with_two_references_survives_one_release():
    books = Books(2)
    (block,) = books.chain(1)
    books.pool.retain([block])
    books.pool.release([block])
    assert books.pool.blocks[block].state is BlockState.SEALED
    books.pool.check(Counter({block: 1}))


def test_eviction_takes_leaves_before_their_parents_and_tells():
    books = Books(3)
    a, b, c = books.chain(1, 2, 3)
    books.pool.release([a, b, c])
    books.pool.check(Counter())
    books.pool.allocate(2)
    assert books.evicted == [(c, key(3)), (b, key(2))]
    assert books.pool.index.get(key(1)) == a
    assert books.pool.index.get(key(2)) is None


def test_free_blocks_go_before_cached_ones():
    books = Books(3)
    books.pool.release(books.chain(1))
    books.pool.allocate(2)
    assert books.evicted == []


def test_sealing_a_key_that_is_there_moves_the_reference_to_its_block():
    books = Books(3)
    (first,) = books.chain(1)
    (second,) = books.chain(1)
    assert second == first
    assert books.pool.num_used == 1
    books.pool.check(Counter({first: 2}))


def test_sealing_a_key_that_is_cached_brings_that_block_back():
    books = Books(3)
    (first,) = books.chain(1)
    books.pool.release([first])
    assert books.chain(1) == [first]
    assert books.pool.num_cached == 0
    books.pool.check(Counter({first: 1}))


def test_evict_all_spares_what_is_used():
    books = Books(4)
    books.chain(1)
    books.pool.release(books.chain(2, 3))
    assert books.pool.evict_all() == 2
    assert len(books.pool.index) == 1
    assert books.pool.num_free == 3


@pytest.mark.parametrize("wrong", ["retain free", "release free", "seal sealed"])
def test_misuse_is_an_integrity_error_that_shows_the_block(wrong: str):
    books = Books(2)
    (sealed,) = books.chain(1)
    free = 1 - sealed
    misuse = {
        "retain free": lambda: books.pool.retain([free]),
        "release free": lambda: books.pool.release([free]),
        "seal sealed": lambda: books.pool.seal(sealed, key(9), LANE, 0, (9,)),
    }[wrong]
    with pytest.raises(IntegrityError, match=r"<Block \d"):
        misuse()


class CountingPolicy(LRUPolicy):
    """How often the order was touched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def add(self, block: Candidate, uses: int = 1) -> None:
        self.calls += 1
        super().add(block, uses)

    def evict(self, key: bytes) -> None:
        self.calls += 1
        super().evict(key)

    def victim(self) -> bytes | None:
        self.calls += 1
        return super().victim()


def test_the_work_a_block_does_not_grow_with_the_pool():
    calls = []
    for num_blocks in (64, 4096):
        policy = CountingPolicy()
        pool = BlockPool(num_blocks, policy)
        taken = pool.allocate(num_blocks) or []
        for depth, block_id in enumerate(taken):
            pool.seal(block_id, key(depth + 1), key(depth), depth, ())
        pool.release(taken)
        policy.calls = 0
        pool.release(pool.allocate(8) or [])
        calls.append(policy.calls)
    assert calls[0] == calls[1] == 16


class ListeningPolicy(LRUPolicy):
    """How often each block was said to be used."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[int] = []

    def add(self, block: Candidate, uses: int = 1) -> None:
        self.uses.append(uses)
        super().add(block, uses)


def test_the_policy_is_told_how_often_a_block_was_found_since_it_was_last_unused():
    policy = ListeningPolicy()
    pool = BlockPool(2, policy)
    (block,) = pool.allocate(1) or []
    pool.seal(block, key(1), LANE, 0, ())
    pool.retain([block], uses=1)
    pool.retain([block])  # a fork: it was not found, it was there
    for _ in range(3):
        pool.release([block])
    assert policy.uses == [2]
    pool.retain([block], uses=1)
    pool.release([block])
    pool.retain([block])
    pool.release([block])
    assert policy.uses == [2, 1, 0]


# ----------------------------------------------------------------------------------------- check


def broken(damage: str) -> tuple[BlockPool, Counter[int]]:
    books = Books(4)
    pool = books.pool
    a, b = books.chain(1, 2)
    books.pool.release([b])
    if damage == "reference nobody knows":
        return pool, Counter()
    if damage == "lost block":
        pool._free.pop()
    elif damage == "listed twice":
        pool._free.append(pool._free[0])
    elif damage == "free but cached":
        pool._free.append(b)
    elif damage == "index entry of another block":
        pool.index._ids[key(1)] = b
    elif damage == "index entry too few":
        pool.index.take(key(1), None)
    elif damage == "parent leaves first":
        pool.release([a])
        pool._policy.forget(key(2))
        pool._policy.add(Candidate(key(2), parent=b"not what it continues"))
        return pool, Counter()
    elif damage == "key without seal":
        pool.blocks[a].state = BlockState.OPEN
    return pool, Counter([a])


@pytest.mark.parametrize(
    "damage",
    [
        "reference nobody knows",
        "lost block",
        "listed twice",
        "free but cached",
        "index entry of another block",
        "index entry too few",
        "parent leaves first",
        "key without seal",
    ],
)
def test_check_finds(damage: str):
    pool, references = broken(damage)
    with pytest.raises(IntegrityError):
        pool.check(references)


def test_check_is_content_with_sound_books():
    pool, references = broken("nothing")
    pool.check(references)


# ---------------------------------------------------------------------------------- prefix index


def test_the_longest_prefix_ends_at_the_first_gap_and_at_the_limit():
    index = PrefixIndex()
    for n in (1, 2, 4):
        index.add(key(n), n + 10)
    keys = [key(n) for n in (1, 2, 3, 4)]
    assert index.longest_prefix(keys, limit=4) == [11, 12]
    assert index.longest_prefix(keys, limit=1) == [11]
    assert index.longest_prefix(keys, limit=0) == []
    assert index.longest_prefix([key(4)], limit=9) == [14]
    assert index.longest_prefix([], limit=9) == []
