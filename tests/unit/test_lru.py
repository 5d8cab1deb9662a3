"""Least recently used, leaf first; and what every leaf-first policy shares with it."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError, IntegrityError
from kvist.policies.base import Candidate
from kvist.policies.lfu_da import LFUDAPolicy
from kvist.policies.lru import LRUPolicy
from kvist.policies.registry import make_policy


def block(name: str) -> Candidate:
    """Block of a chain that its name spells: "ab" continues "a"."""
    return Candidate(name.encode(), name[:-1].encode(), len(name) - 1)


def lru(*names: str) -> LRUPolicy:
    policy = LRUPolicy()
    for name in names:
        policy.add(block(name))
    return policy


def leaving(policy: LRUPolicy) -> list[str]:
    """Evict everything; say in which order."""
    order = []
    while (victim := policy.victim()) is not None:
        policy.evict(victim)
        policy.check()
        order.append(victim.decode())
    return order


def test_the_block_used_first_leaves_first():
    assert leaving(lru("c", "a", "b")) == ["c", "a", "b"]


def test_a_parent_stays_for_its_children_whatever_the_order_it_came_in():
    assert leaving(lru("a", "ab", "abc", "x")) == ["abc", "ab", "a", "x"]
    assert leaving(lru("abc", "ab", "a", "x")) == ["abc", "ab", "a", "x"]


def test_asking_for_the_victim_changes_nothing():
    policy = lru("c", "a")
    assert [policy.victim() for _ in range(3)] == [b"c"] * 3
    assert len(policy) == policy.num_offered == 2


@pytest.mark.parametrize("how", ["add", "touch"])
def test_a_block_used_again_goes_to_the_end(how: str):
    policy = lru("c", "a", "b")
    if how == "add":
        policy.add(block("c"))
    else:
        policy.touch(b"c")
    assert leaving(policy) == ["a", "b", "c"]


def test_a_withheld_block_stays_and_so_does_what_it_continues():
    policy = lru("a", "ab", "x")
    policy.withhold(b"ab")
    assert (policy.num_offered, len(policy)) == (2, 3)
    assert leaving(policy) == ["x"]
    policy.offer(b"ab")
    assert leaving(policy) == ["ab", "a"]


def test_offering_a_block_again_is_not_a_use():
    policy = lru("a", "b")
    policy.withhold(b"a")
    policy.offer(b"a")
    assert leaving(policy) == ["a", "b"]


def test_an_empty_order_has_no_victim():
    policy = lru()
    assert policy.victim() is None
    policy.add(block("a"))
    policy.forget(b"a")
    assert policy.victim() is None
    assert b"a" not in policy


def test_what_is_not_resident_cannot_be_evicted():
    with pytest.raises(KeyError):
        lru().evict(b"a")


def test_the_check_finds_a_leaf_that_could_never_leave():
    policy = lru("a")
    policy._leaves._heaps[0].clear()
    with pytest.raises(IntegrityError, match="never leave"):
        policy.check()


def test_the_registry_knows_it_and_names_what_it_does_not_know():
    assert isinstance(make_policy("lru", 8), LRUPolicy)
    assert isinstance(make_policy("lfu-da", 8), LFUDAPolicy)
    with pytest.raises(ConfigError, match=r"--eviction-policy 'clock'.*lfu-da, .*lru"):
        make_policy("clock", 8)
