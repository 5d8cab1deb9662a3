"""The contract of a tier that keeps to a budget of its own. Needs pytest and hypothesis.

Owns the checks of room: eviction, locks, refusal. Subclass `BoundedTierContract` instead of
`TierContract`. Knows no tier and no policy by name.
"""

from __future__ import annotations

from kvist.testing.tier_contract import ROOM_BLOCKS, A, TierContract
from kvist.testing.tier_driver import TierDriver, block_bytes, block_key, chain
from kvist.tiers.base import Outcome


class BoundedTierContract(TierContract):
    """`TierContract`, and what holds where room is short."""

    def test_a_budget_is_never_exceeded(self, driver: TierDriver) -> None:
        """Five times as much as there is room for; what is a hit is whole."""
        keys = chain("x", 5 * ROOM_BLOCKS)
        for start in range(0, len(keys), 4):
            driver.store(A, keys[start : start + 4])
            usage = driver.tier.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            driver.tier.check()
        hits = [key for key, hit in zip(keys, driver.hits(A, keys), strict=True) if hit]
        assert ROOM_BLOCKS // 2 <= len(hits) == driver.tier.usage().num_blocks < len(keys)
        assert driver.load(A, hits) == [block_bytes(key) for key in hits]

    def test_a_job_larger_than_the_tier_leaves_it_sound(self, driver: TierDriver) -> None:
        """What does not fit is refused; what is DONE is there."""
        keys = chain("x", 4 * ROOM_BLOCKS)
        outcomes = driver.store(A, keys)
        assert Outcome.DONE in outcomes
        hits = driver.hits(A, keys)
        assert any(hits)
        assert not any(
            hit and outcome is not Outcome.DONE for hit, outcome in zip(hits, outcomes, strict=True)
        )
        driver.tier.check()

    def test_no_block_outlives_the_one_it_continues(self, driver: TierDriver) -> None:
        """Without its parent a block is never found again, and wastes its room."""
        chains = [chain(name, 4) for name in range(ROOM_BLOCKS)]
        for keys in chains:
            driver.store(A, keys)
            for other in chains:
                hits = driver.hits(A, other)
                assert hits == sorted(hits, reverse=True), "a child without its parent"

    def test_what_is_locked_stays(self, driver: TierDriver) -> None:
        """Between match and load nothing may leave; after unlock it may."""
        keys, stranger = chain("kept", ROOM_BLOCKS // 3), block_key("stranger")
        driver.store(A, keys)
        locked = driver.tier.lock(A.digest, [*keys, stranger], ttl_s=3600.0)
        assert locked == [True] * len(keys) + [False]
        self._flood(driver, "first")
        assert driver.hits(A, keys) == [True] * len(keys)
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]
        driver.tier.unlock(A.digest, [*keys, stranger])
        self._flood(driver, "second")
        assert not all(driver.hits(A, keys))
        driver.tier.check()

    def test_a_lock_runs_out(self, driver: TierDriver) -> None:
        """Whoever locked may have died."""
        keys = chain("kept", ROOM_BLOCKS // 3)
        driver.store(A, keys)
        driver.tier.lock(A.digest, keys, ttl_s=0.0)
        self._flood(driver, "first")
        assert not all(driver.hits(A, keys))
        driver.tier.unlock(A.digest, keys)
        driver.tier.check()

    def test_locks_of_everything_refuse_and_do_not_break(self, driver: TierDriver) -> None:
        """No room and nothing that may leave: a value, not an error."""
        self._flood(driver, "first")
        keys = [entry.key for entry in driver.tier.entries(A.digest)]
        driver.tier.lock(A.digest, keys, ttl_s=3600.0)
        more = chain("more", 3 * ROOM_BLOCKS)
        assert Outcome.REFUSED in driver.store(A, more)
        assert driver.hits(A, keys) == [True] * len(keys)
        driver.tier.check()

    def test_what_is_of_use_stays_longer(self, driver: TierDriver) -> None:
        """Half the tier is touched again and again while others come and go."""
        hot = chain("hot", ROOM_BLOCKS // 3)
        driver.store(A, hot)
        for index in range(3 * ROOM_BLOCKS):
            driver.tier.touch(A.digest, [*hot, block_key("stranger")])
            driver.store(A, chain(("cold", index), 1))
        assert driver.hits(A, hot) == [True] * len(hot)

    def _flood(self, driver: TierDriver, name: str) -> None:
        for index in range(4 * ROOM_BLOCKS):
            driver.store(A, chain((name, index), 1))
