"""Budget, quotas, pins, locks and age of a tier's blocks; the state machine knows the rest."""

from __future__ import annotations

import pytest

from kvist.errors import IntegrityError
from kvist.policies.base import Candidate
from kvist.policies.keeper import Keeper
from kvist.policies.registry import policy_factory


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keeper(capacity: int = 100, policy: str = "lru", **options: object) -> Keeper:
    return Keeper(capacity, policy_factory(policy), **options)  # type: ignore[arg-type]


def store(books: Keeper, name: str, size: int = 40, tenant: str = "") -> str:
    """Store a block ("ab" continues "a"); say who had to go for it, or that it was refused."""
    block = Candidate(name.encode(), name[:-1].encode(), len(name) - 1, size)
    gone = " ".join(key.decode() for key in books.make_room(block, tenant))
    if not books.fits(size, tenant):
        return f"{gone} refused".strip()
    books.add(block, tenant)
    return gone


def test_the_budget_is_hard_and_the_policy_says_who_goes():
    books = keeper()
    assert [store(books, name) for name in ("a", "b", "c")] == ["", "", "a"]
    books.touch([b"b"])
    assert store(books, "d") == "c"
    assert (books.used, len(books)) == (80, 2)


def test_what_can_never_fit_evicts_nothing():
    books = keeper(tenant_quota=50)
    store(books, "a")
    assert store(books, "b", size=101) == "refused"
    assert store(books, "c", size=51, tenant="small") == "refused"
    assert len(books) == 1


def test_a_chain_does_not_eat_its_own_head():
    books = keeper()
    store(books, "a")
    store(books, "ab")
    assert store(books, "abc") == "refused"
    assert store(books, "x") == "ab"


def test_a_tenant_over_its_quota_evicts_its_own_blocks_only():
    books = keeper(tenant_quota=40)
    store(books, "a", tenant="other")
    store(books, "b", tenant="t")
    assert store(books, "c", tenant="t") == "b"
    assert books.used_by_tenant() == {"other": 40, "t": 40}


def test_the_default_tenant_has_no_quota():
    books = keeper(tenant_quota=40)
    assert [store(books, name) for name in ("a", "b", "c")] == ["", "", "a"]


def test_between_tenants_recency_decides():
    books = keeper(tenant_quota=80)
    store(books, "a", tenant="t")
    store(books, "b")
    assert store(books, "c") == "a"
    assert books.used_by_tenant() == {"": 80}


def test_a_pinned_block_stays_until_its_last_unpin():
    books = keeper()
    store(books, "a")
    books.pin(b"a")
    books.pin(b"a")
    books.unpin(b"a")
    store(books, "b")
    assert store(books, "c") == "b"
    books.unpin(b"a")
    assert store(books, "d") == "a"
    with pytest.raises(IntegrityError, match="not pinned"):
        books.unpin(b"c")


def test_a_lock_holds_until_it_runs_out_or_is_undone():
    clock = Clock()
    books = keeper(capacity=40, clock=clock)
    assert not books.lock(b"a", ttl_s=9)
    store(books, "a")
    assert books.lock(b"a", ttl_s=5)
    assert books.lock(b"a", ttl_s=9)
    clock.now_s = 6.0
    assert store(books, "b") == "refused"
    books.unlock(b"a")
    assert store(books, "b") == "a"
    books.lock(b"b", ttl_s=5)
    clock.now_s = 11.0
    assert store(books, "c") == "b"
    books.unlock(b"b")


def test_a_pin_outlives_the_locks():
    clock = Clock()
    books = keeper(capacity=40, clock=clock)
    store(books, "a")
    books.lock(b"a", ttl_s=1)
    books.pin(b"a")
    clock.now_s = 2.0
    assert store(books, "b") == "refused"
    books.unlock(b"a")
    assert books.is_held(b"a")


def test_idle_blocks_expire_children_first_and_live_ones_keep_their_parents():
    clock = Clock()
    books = keeper(max_idle_s=10, clock=clock)
    for name in ("a", "ab", "x", "xy"):
        store(books, name, size=10)
    clock.now_s = 5.0
    books.touch([b"xy"])
    clock.now_s = 11.0
    assert books.expire() == [b"ab", b"a"]
    assert b"x" in books, "what continues it was used"
    clock.now_s = 16.0
    assert books.expire() == [b"xy", b"x"]
    assert books.used == 0


def test_without_a_limit_of_age_nothing_expires():
    clock = Clock()
    books = keeper(clock=clock)
    store(books, "a")
    clock.now_s = 1e9
    assert books.expire() == []


def test_adding_without_room_is_misuse():
    books = keeper()
    store(books, "a", size=90)
    with pytest.raises(IntegrityError, match="90 of 100"):
        books.add(Candidate(b"b", size=20))
    with pytest.raises(IntegrityError, match="held already"):
        books.add(Candidate(b"a", size=1))


def test_a_removed_block_gives_its_room_back_held_or_not():
    books = keeper()
    store(books, "a")
    books.pin(b"a")
    books.remove(b"a")
    assert books.used == 0
    assert books.used_by_tenant() == {}
    books.check()


def test_admission_is_by_offerings():
    books = keeper(min_hits=2)
    assert [books.admit([b"a"]) for _ in range(2)] == [0, 1]


def test_uses_before_a_restart_count():
    books = keeper(policy="lfu-da")
    books.add(Candidate(b"a", size=40), uses=5)
    store(books, "b")
    assert store(books, "c") == "b"
