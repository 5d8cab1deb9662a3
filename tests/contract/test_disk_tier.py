"""The disk tier keeps the contract of a bounded tier, with and without codec and tier key."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.codecs.registry import make_codec
from kvist.testing.bounded_tier_contract import BoundedTierContract
from kvist.testing.foreign_contract import MakeTier
from kvist.testing.tier_contract import TierContract
from kvist.tiers.base import Tier
from kvist.tiers.disk.tier import DiskTier

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
