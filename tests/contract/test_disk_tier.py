"""The disk tier keeps the contract of a bounded tier, with and without codec and tier key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.codecs.registry import make_codec
from kvist.policies.keeper import Keeper
from kvist.policies.registry import make_policy
from kvist.testing.bounded_tier_contract import BoundedTierContract
from kvist.testing.foreign_contract import MakeTier
from kvist.testing.tier_contract import A, B, TierContract
from kvist.testing.tier_driver import PATIENCE_S, TierDriver, chain
from kvist.tiers.base import Outcome, Tier
from kvist.tiers.disk.tier import DiskTier
from kvist.tiers.extents import EXTENT_BYTES

# One zone: room for 31 blocks of the contract's 40,000 bytes, and one extent for each descriptor.
SMALLEST = 9 << 20


class Disk(TierContract):
    """Each tier in a directory of its own."""

    codec: Codec = RawCodec()
    tier_key = ""

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[MakeTier]:
        numbers = count()
        made: list[Tier] = []

        def make(blocks: int) -> Tier:
            tier = DiskTier(
                tmp_path / str(next(numbers)), SMALLEST, codec=self.codec, tier_key=self.tier_key
            )
            made.append(tier)
            return tier

        yield make
        for tier in made:
            tier.close()


class TestRaw(Disk, BoundedTierContract):
    histories = 15


# What a codec saves is room for more blocks than the smallest store is to have by the contract.
class TestZstdKeyed(Disk):
    histories = 5
    codec = make_codec("zstd")
    tier_key = "secret"


def test_admission_and_age(tmp_path: Path) -> None:
    """What the keeper knows of holds here too: second offer admitted, idle blocks dropped."""
    now = [0.0]

    def keeper(capacity: int) -> Keeper:
        return Keeper(
            capacity,
            lambda room: make_policy("lru", room),
            min_hits=2,
            max_idle_s=10.0,
            clock=lambda: now[0],
        )

    tier = DiskTier(tmp_path, SMALLEST, keeper=keeper)
    driver = TierDriver(tier, A)
    keys = chain("x", 3)
    assert driver.store(A, keys[:2]) == (Outcome.REFUSED,) * 2
    assert driver.store(A, keys) == (Outcome.DONE, Outcome.DONE, Outcome.REFUSED)
    now[0] = 8.0
    tier.touch(A.digest, keys[:1])
    now[0] = 12.0
    give_up = time.monotonic() + PATIENCE_S
    while driver.hits(A, keys) != [True, False, False]:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    tier.check()
    tier.close()


def test_a_tenant_keeps_to_its_quota(tmp_path: Path) -> None:
    """Its own blocks make room for its own, also those of one batch and after a restart."""
    room = 4 * 2 * EXTENT_BYTES
    keepers = {"quota": room, "none": None}

    def tier(quota: int | None) -> TierDriver:
        def keeper(capacity: int) -> Keeper:
            return Keeper(capacity, lambda room: make_policy("lru", room), tenant_quota=quota)

        return TierDriver(DiskTier(tmp_path, SMALLEST, keeper=keeper), A, B)

    driver = tier(keepers["quota"])
    others = chain("others", 5)
    driver.store(A, others)
    driver.store(B, chain("x", 8))
    for number in range(4):
        driver.store(B, chain(number, 3))
        assert 0 < driver.tier.usage().by_tenant["someone"] <= room
        driver.tier.check()
    assert driver.hits(A, others) == [True] * 5
    driver.tier.close()
    driver = tier(keepers["none"])
    driver.store(B, chain("y", 8))
    driver.tier.close()
    driver = tier(keepers["quota"])
    driver.tier.check()
    driver.store(B, chain("z", 1))
    assert driver.tier.drain(PATIENCE_S)
    driver.tier.check()
    driver.tier.close()
