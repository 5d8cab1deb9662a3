"""Least recently used, leaf first."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.policies.lru import LRUPolicy
from kvist.policies.registry import make_policy


def test_the_block_added_first_leaves_first():
    policy = LRUPolicy()
    for block_id in (3, 1, 2):
        policy.add(block_id, depth=0)
    assert list(policy) == [3, 1, 2]
    assert policy.victim() == 3


def test_asking_for_the_victim_changes_nothing():
    policy = LRUPolicy()
    policy.add(3, 0)
    policy.add(1, 0)
    assert [policy.victim() for _ in range(3)] == [3, 3, 3]
    assert len(policy) == 2


def test_a_block_used_again_goes_to_the_end():
    policy = LRUPolicy()
    for block_id in (3, 1, 2):
        policy.add(block_id, depth=0)
    policy.remove(3)
    assert list(policy) == [1, 2]
    policy.add(3, depth=0)
    assert list(policy) == [1, 2, 3]


def test_an_empty_order_has_no_victim():
    policy = LRUPolicy()
    assert policy.victim() is None
    policy.add(0, 0)
    assert policy.victim() == 0, "block 0 is a block, not nothing"
    policy.remove(0)
    assert policy.victim() is None


def test_removing_what_is_not_held_is_an_error():
    with pytest.raises(KeyError):
        LRUPolicy().remove(7)


def test_the_registry_knows_it_and_names_what_it_does_not_know():
    assert isinstance(make_policy("lru"), LRUPolicy)
    with pytest.raises(ConfigError, match=r"--eviction-policy 'clock'.*lru"):
        make_policy("clock")
