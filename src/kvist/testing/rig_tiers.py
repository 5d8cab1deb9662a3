"""The tiers below a rig: in memory, in virtual time, and as wrong as they are told to be.

Owns the tiers, their faults and their manager; the rig owns the clock. No torch. Threads: one.
"""

from __future__ import annotations

from random import Random
from typing import Protocol

from kvist.engine.null_runner import SlotMemory
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.testing.disturbed import RigConfig
from kvist.testing.faulty_tier import FaultyTier, RandomFaults
from kvist.testing.memory_tier import MemoryTier
from kvist.tiers.demotion import WritePolicy
from kvist.tiers.manager import Identity, TierManager
from kvist.tiers.speed import LoadSpeed, PrefillSpeed

ROOT = RootKey(bytes(32))


class Clock(Protocol):
    """Whoever knows what time it is."""

    now_s: float


class _FixedSpeed(PrefillSpeed):
    """Says what it was told, whatever steps take."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__()
        self._speed = LoadSpeed(0.0, tokens_per_s)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn nothing."""


class RigTiers:
    """`num_tiers` faulty memory tiers and a manager over them.

    Parameters
    ----------
    config : RigConfig
    memory : SlotMemory
        The device's bytes.
    events : EventLog
    clock : Clock
    """

    def __init__(
        self, config: RigConfig, memory: SlotMemory, events: EventLog, clock: Clock
    ) -> None:
        self._rig = clock
        rate = config.fault_rate
        self.faulty = [
            FaultyTier(
                MemoryTier(
                    config.tier_blocks * memory.block_bytes,
                    f"tier{number}",
                    self.clock,
                ),
                RandomFaults(
                    Random(config.seed + number), rate, rate, rate, config.max_delay_polls
                ),
            )
            for number in range(config.num_tiers)
        ]
        self.manager = TierManager(
            self.faulty,
            memory,
            Identity(ROOT, "null", "null", (memory.block_bytes,), 8),
            events,
            write_policy=WritePolicy.parse(config.tier_write_policy),
            load_policy=config.tier_load_policy,
            staging_blocks=config.staging_blocks,
            in_place=config.in_place,
            block_tokens=config.block_size,
            clock=self.clock,
        )
        if config.compute_s is not None:
            self.manager.prefill = _FixedSpeed(config.block_size / config.compute_s)
        # Time is virtual: whoever waits for a tier comes back with the next step.
        self.manager.wait = lambda timeout_s: None  # type: ignore[method-assign]

    def clock(self) -> float:
        """Seconds for tiers: a step is a twentieth, so that loads are in time but for some."""
        return self._rig.now_s / 20
