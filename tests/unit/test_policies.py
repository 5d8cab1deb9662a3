"""The one idea of each eviction policy, on chains small enough to follow by hand.

That all of them keep to the contract is `tests/property/test_policies.py`; that they pay on real
traces `tests/unit/test_replay.py`.
"""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.policies.admission import MinimumHits
from kvist.policies.arc import ARCPolicy
from kvist.policies.base import Candidate, EvictionPolicy
from kvist.policies.cost import CostAwarePolicy
from kvist.policies.ghosts import Ghosts
from kvist.policies.lfu_da import GHOSTS_PER_CAPACITY, MAX_USES, LFUDAPolicy
from kvist.policies.lru import LRUPolicy
from kvist.policies.protected import ProtectedPolicy
from kvist.policies.registry import make_policy, policy_factory
from kvist.policies.s3_fifo import S3FIFOPolicy
from kvist.policies.sieve import SievePolicy


def block(name: str, size: int = 1, recompute_s: float = 0.0) -> Candidate:
    """The first block of a chain of its own."""
    return Candidate(name.encode(), b"", 0, size, recompute_s)


def use(policy: EvictionPolicy, names: str) -> None:
    """Let single blocks be used one after the other."""
    for name in names:
        policy.add(block(name))


def evict(policy: EvictionPolicy, times: int = 1) -> str:
    """Evict; say whom."""
    gone = ""
    for _ in range(times):
        victim = policy.victim()
        assert victim is not None
        policy.evict(victim)
        gone += victim.decode()
    return gone


# ------------------------------------------------------------------------------------------ LFU-DA


def test_lfu_da_prefers_what_was_used_more_often_and_then_what_was_used_later():
    policy = LFUDAPolicy(4)
    use(policy, "aabcb")
    assert evict(policy, 3) == "cab"


def test_lfu_da_what_was_hot_long_ago_is_overtaken():
    policy = LFUDAPolicy(2)
    use(policy, "aaaa")
    # Each of these leaves at once and ages the order by one.
    assert [evict_after(policy, name) for name in "bcdefg"] == ["b", "c", "d", "a", "e", "f"]


def test_lfu_da_the_most_popular_block_goes_when_it_is_no_longer_wanted():
    policy = LFUDAPolicy(2)
    policy.add(block("a"), uses=1_000_000)
    gone = [evict_after(policy, f"one-off {n}") for n in range(MAX_USES + 1)]
    assert gone.index("a") == MAX_USES - 1


def evict_after(policy: EvictionPolicy, name: str) -> str:
    policy.add(block(name))
    return evict(policy)


def test_lfu_da_remembers_uses_of_what_left_within_bounds():
    policy = LFUDAPolicy(1)
    use(policy, "aab")
    assert evict(policy, 2) == "ba"
    use(policy, "xa")
    assert evict(policy) == "x", "the third use of a"
    evict(policy)
    for n in range(GHOSTS_PER_CAPACITY):
        policy.add(Candidate(f"one-off {n}".encode()))
        evict(policy)
    use(policy, "ax")
    assert evict(policy) == "a", "forgotten: four others left since"


def test_lfu_da_forgetting_a_block_forgets_its_uses():
    policy = LFUDAPolicy(4)
    use(policy, "aaa")
    policy.forget(b"a")
    use(policy, "ab")
    assert evict(policy) == "a"


def test_lfu_da_counts_several_uses_at_once():
    policy = LFUDAPolicy(4)
    policy.add(block("a"), uses=3)
    use(policy, "bb")
    assert evict(policy) == "b"


# -------------------------------------------------------------------------------------------- cost


def test_cost_keeps_what_is_dear_for_its_size():
    policy = CostAwarePolicy(100)
    policy.add(block("a", size=10, recompute_s=1.0))
    policy.add(block("b", size=10, recompute_s=3.0))
    policy.add(block("c", size=1, recompute_s=1.0))
    assert evict(policy, 3) == "abc"


def test_cost_without_costs_is_lfu_da():
    first, second = CostAwarePolicy(3), LFUDAPolicy(3)
    for policy in (first, second):
        use(policy, "abacabadabacaba")
    assert evict(first, 4) == evict(second, 4)


# --------------------------------------------------------------------------------------------- ARC


def test_arc_lets_blocks_used_once_leave_first():
    policy = ARCPolicy(3)
    use(policy, "aab")
    assert evict(policy) == "b"


def test_arc_learns_from_what_it_evicted_too_early():
    policy = ARCPolicy(4)
    use(policy, "aabbcd")
    assert evict(policy) == "c", "the target for blocks used once is nothing"
    use(policy, "c")
    use(policy, "e")
    assert evict(policy) == "d"
    use(policy, "d")
    use(policy, "f")
    assert evict(policy) == "a", "two came back: blocks used once get room for two"


def test_arc_remembers_no_more_than_twice_its_capacity():
    policy = ARCPolicy(4)
    for n in range(100):
        policy.add(Candidate(bytes([n])))
        if n % 3 == 0:
            policy.touch(bytes([n]))
        while len(policy) > 4:
            evict_key = policy.victim()
            assert evict_key is not None
            policy.evict(evict_key)
        once, often = policy._ghosts
        assert len(policy) + once.size + often.size <= 8


# ------------------------------------------------------------------------------- S3-FIFO and SIEVE


def test_s3_fifo_takes_one_offs_from_the_small_queue_and_spares_what_was_used_twice():
    policy = S3FIFOPolicy(10)
    use(policy, "aaabcb")
    assert evict(policy, 3) == "bca", "b was used again once only"


def test_s3_fifo_puts_what_comes_back_soon_into_the_main_queue():
    policy = S3FIFOPolicy(10)
    use(policy, "a")
    evict(policy)
    use(policy, "abc")
    assert evict(policy, 3) == "bca"


def test_s3_fifo_gives_another_round_a_use():
    policy = S3FIFOPolicy(10)
    use(policy, "ab")
    evict(policy, 2)
    use(policy, "aba")
    assert evict(policy, 2) == "ba"


def test_sieve_takes_what_was_not_used_since_the_hand_came_by():
    policy = SievePolicy()
    use(policy, "abcda")
    assert evict(policy) == "b"
    use(policy, "e")
    # The hand goes on behind b: a has lost its bit, but it stands behind the hand.
    assert evict(policy, 4) == "cdea"


def test_sieve_goes_round_twice_when_everything_was_used():
    policy = SievePolicy()
    use(policy, "abab")
    assert evict(policy) == "a"


# --------------------------------------------------------------------------------------- protected


def protected(share: float = 0.5, capacity: int = 4) -> ProtectedPolicy:
    return ProtectedPolicy(lambda capacity: LRUPolicy(), capacity, share)


def test_what_was_used_twice_outlives_any_number_of_one_offs():
    policy = protected()
    use(policy, "aabb")
    for name in "cdefghijk":
        use(policy, name)
        assert evict(policy) == name
    assert evict(policy, 2) == "ab", "and leaves when nothing else can"


def test_the_share_is_kept_by_those_used_last():
    policy = protected()
    use(policy, "aabbcc")
    use(policy, "d")
    assert evict(policy) == "a", "c came in, a had to go, and stands where its last use put it"


def test_a_parent_of_a_protected_block_is_safe_though_it_is_loose_itself():
    policy = protected(share=0.25)
    policy.add(Candidate(b"parent"))
    child = Candidate(b"child", b"parent", 1)
    for _ in range(2):
        policy.add(child)
    use(policy, "x")
    assert policy.victim() == b"x"
    policy.evict(b"x")
    assert policy.victim() == b"child"


def test_a_share_must_leave_room_for_others():
    with pytest.raises(ConfigError, match=r"--protected-share 1.0 must be at least 0 and below 1"):
        policy_factory("lru", 1.0)
    assert isinstance(make_policy("lru", 4, 0.25), ProtectedPolicy)


# ---------------------------------------------------------------------------- ghosts and admission


def test_ghosts_are_bounded_by_size_and_the_oldest_is_forgotten_first():
    ghosts = Ghosts(5)
    ghosts.remember(b"a", 2, 10)
    ghosts.remember(b"b", 2, 20)
    ghosts.remember(b"a", 2, 11)
    ghosts.remember(b"c", 2, 30)
    assert b"b" not in ghosts
    assert (ghosts.recall(b"a"), ghosts.recall(b"a")) == (11, None)
    assert (ghosts.size, len(ghosts)) == (2, 1)


def test_a_block_is_admitted_when_it_is_offered_often_enough():
    admission = MinimumHits(2, memory=10)
    assert admission.admit([b"a", b"b"]) == 0
    assert admission.admit([b"a", b"c"]) == 1
    assert admission.admit([b"a", b"b", b"c"]) == 3


def test_nothing_is_admitted_behind_a_gap():
    admission = MinimumHits(2, memory=10)
    admission.admit([b"b"])
    assert admission.admit([b"a", b"b"]) == 0


def test_a_minimum_of_one_admits_everything_and_remembers_nothing():
    admission = MinimumHits(1, memory=10)
    assert admission.admit([b"a", b"b"]) == 2
    assert len(admission._seen) == 0
