"""The in-memory tier of the tests keeps the contract, bare and wrapped without faults.

Guards: tests that are green over a tier that is unlike every real one.
"""

from __future__ import annotations

import pytest

from kvist.testing.bounded_tier_contract import BoundedTierContract
from kvist.testing.faulty_tier import FaultyTier, ScriptedFaults
from kvist.testing.memory_tier import MemoryTier
from kvist.testing.throttled_tier import ThrottledTier
from kvist.testing.tier_contract import A


class TestMemoryTier(BoundedTierContract):
    @pytest.fixture
    def make(self):
        return lambda num_blocks: MemoryTier(num_blocks * A.block_bytes)


class TestFaultyTierWithoutFaults(BoundedTierContract):
    @pytest.fixture
    def make(self):
        return lambda num_blocks: FaultyTier(
            MemoryTier(num_blocks * A.block_bytes), ScriptedFaults(delay=2)
        )


class TestThrottledTier(BoundedTierContract):
    histories = 10

    @pytest.fixture
    def make(self):
        return lambda num_blocks: ThrottledTier(MemoryTier(num_blocks * A.block_bytes), 1e9)
