"""What goes down and when, what a tier that misbehaves costs, and who shares with whom."""

from __future__ import annotations

import pytest

from kvist.engine.null_runner import SlotMemory
from kvist.errors import ConfigError
from kvist.events import BlockEvicted, BlocksDemoted, DemotionFailed, EventLog, TierSuspended
from kvist.keys import BlockKey, RootKey
from kvist.testing.faulty_tier import FaultyTier, ScriptedFaults
from kvist.testing.memory_tier import MemoryTier
from kvist.tiers.base import Outcome
from kvist.tiers.demotion import Sealed, WritePolicy
from kvist.tiers.manager import Identity, TierManager

ROOT = RootKey(bytes(32))
KEYS = [BlockKey(bytes([n]) * 32) for n in range(1, 9)]


class Setting:
    def __init__(
        self, policy="through", *, staging_blocks=8, names=("tier",), load="auto", in_place=False
    ):
        self.now_s = 0.0
        self.memory = SlotMemory(16, 4)
        self.events = EventLog()
        self.faults = ScriptedFaults()
        self.tiers = [
            FaultyTier(MemoryTier(1 << 20, name, lambda: self.now_s), self.faults) for name in names
        ]
        size = self.memory.block_bytes
        self.manager = TierManager(
            self.tiers,
            self.memory,
            Identity(ROOT, "null", "null", (size,), 8),
            self.events,
            write_policy=WritePolicy.parse(policy),
            load_policy=load,
            staging_blocks=staging_blocks,
            in_place=in_place,
            block_tokens=4,
            clock=lambda: self.now_s,
        )
        self.space = self.manager.namespace("")

    def seal(self, *numbers):
        for n in numbers:
            for slot in range(4):
                self.memory.write(4 * n + slot, n, n)
            self.manager.sealed(Sealed(self.space, n, KEYS[n], KEYS[n - 1], n))
        self.go()

    def go(self):
        self.manager.pump()
        self.manager.poll()
        self.manager.check()

    def stored(self, tier=0):
        return self.tiers[tier].usage().num_blocks

    def load(self, *numbers, deadline_s=10.0):
        keys = [KEYS[n] for n in numbers]
        found = self.manager.find(self.space, keys)
        ids = [n + 8 for n in numbers]
        return self.manager.load(self.space, keys[: len(found)], ids, found, deadline_s)

    def seen(self, kind):
        return [event for event in self.events.recent() if isinstance(event, kind)]


def test_what_is_sealed_goes_to_every_tier_and_comes_back():
    at = Setting(names=("one", "two"))
    at.seal(1, 2, 3)
    assert [at.stored(0), at.stored(1)] == [3, 3]
    load = at.load(1, 2, 3)
    assert load.media == ("host",) * 3
    assert at.manager.poll() == [(load, 0, [True] * 3)]
    assert [at.memory.at(4 * (n + 8)) for n in (1, 2, 3)] == [(n, n) for n in (1, 2, 3)]


def test_the_first_tier_that_has_a_block_gives_it():
    at = Setting(names=("one", "two"))
    at.seal(1, 2, 3)
    at.tiers[0].delete(at.space, [KEYS[2]])
    assert at.manager.find(at.space, KEYS[1:4]).links == (0, 1, 0)


def test_what_was_used_once_stays_out_until_it_is_used_again():
    at = Setting("hits:2")
    at.seal(1, 2)
    assert at.stored() == 0
    at.manager.used(at.space, [KEYS[1]])
    at.go()
    assert at.stored() == 1


def test_what_is_evicted_goes_down_only_then():
    at = Setting("evict")
    at.seal(1, 2)
    assert at.stored() == 0
    at.events.emit(BlockEvicted(1, KEYS[1]))
    at.go()
    assert at.stored() == 1
    assert at.manager.drain(1.0)
    assert at.stored() == 2, "the end of the engine is an eviction too"


def test_without_a_slot_a_block_waits_and_is_given_up_when_it_is_evicted():
    at = Setting(staging_blocks=1)
    at.faults.delay = 100
    at.seal(1, 2, 3)
    assert at.manager.num_unsent == 2
    at.events.emit(BlockEvicted(3, KEYS[3]))
    assert at.seen(DemotionFailed)[-1].outcome == "dropped"
    at.faults.delay = 0
    for _ in range(110):
        at.go()
    assert at.stored() == 2
    assert sum(event.num_blocks for event in at.seen(BlocksDemoted)) == 2


class TestInPlace:
    """Tiers read the device's blocks themselves, and must never keep what comes after them."""

    def evict(self, at, n):
        """What the cache does: tell, and write something else there."""
        at.events.emit(BlockEvicted(n, KEYS[n]))
        for slot in range(4):
            at.memory.write(4 * n + slot, 99, 99)

    def assert_right(self, at, *numbers):
        at.load(*numbers)
        at.manager.poll()
        there = [at.memory.at(4 * (n + 8)) for n in numbers]
        assert there == [(n, n) for n in numbers]

    def test_nothing_is_copied_to_lend_a_block(self):
        at = Setting(in_place=True)
        at.seal(1, 2, 3)
        assert at.stored() == 3
        assert at.manager.host_bytes == at.tiers[0].usage().used_bytes, "no slot was ever touched"
        self.assert_right(at, 1, 2, 3)

    def test_what_is_evicted_before_it_was_read_comes_as_a_copy(self):
        at = Setting(in_place=True, names=("one", "two"))
        for n in (1, 2, 3):
            for slot in range(4):
                at.memory.write(4 * n + slot, n, n)
            at.manager.sealed(Sealed(at.space, n, KEYS[n], KEYS[n - 1], n))
        at.manager.pump()
        self.evict(at, 2)
        self.evict(at, 3)
        for _ in range(3):
            at.go()
        assert [at.stored(0), at.stored(1)] == [3, 3]
        assert not at.seen(DemotionFailed), "it was late, and it was kept"
        assert sum(event.num_blocks for event in at.seen(BlocksDemoted)) == 6
        assert not at.manager.num_pending
        self.assert_right(at, 1, 2, 3)

    def test_what_is_evicted_and_finds_no_slot_is_given_up(self):
        at = Setting(in_place=True, staging_blocks=1)
        for slot in range(4):
            at.memory.write(4 + slot, 1, 1)
        at.faults.delay = 2
        at.manager.sealed(Sealed(at.space, 1, KEYS[1], KEYS[0], 1))
        at.manager.sealed(Sealed(at.space, 2, KEYS[2], KEYS[1], 2))
        at.manager.pump()
        self.evict(at, 2)  # was not sent yet: takes the slot
        self.evict(at, 1)  # was sent, and there is no slot any more
        for _ in range(4):
            at.go()
        assert at.stored() == 1
        assert [event.outcome for event in at.seen(DemotionFailed)] == ["cancelled"]
        assert not at.manager.num_pending

    def test_a_tier_that_does_not_ask_gets_copies(self):
        at = Setting(in_place=True, names=("one", "two"))
        at.tiers[1].reads_in_place = False
        at.manager.sealed(Sealed(at.space, 1, KEYS[1], KEYS[0], 1))
        for slot in range(4):
            at.memory.write(4 + slot, 1, 1)
        at.manager.pump()
        self.evict(at, 1)
        at.go()
        assert [at.stored(0), at.stored(1)] == [1, 1]
        self.assert_right(at, 1)


@pytest.mark.parametrize("policy", ["sometimes", "hits:", "hits:0", "hits:-1", "through:2"])
def test_a_write_policy_that_is_none(policy):
    with pytest.raises(ConfigError, match="tier-write-policy"):
        WritePolicy.parse(policy)


def test_a_load_that_is_overdue_costs_once_and_longer_each_time():
    at = Setting()
    at.seal(1, 2)
    at.faults.delay = 1000
    load = at.load(1, deadline_s=0.5)
    assert at.manager.poll() == []
    at.now_s = 0.6
    at.manager.expire(load)
    at.manager.expire(load)
    (suspended,) = at.seen(TierSuspended)
    assert len(at.manager.find(at.space, KEYS[1:3])) == 0
    at.seal(3)
    assert at.stored() == 2, "nothing is sent to it either"
    at.now_s = 1000.0
    assert len(at.manager.find(at.space, KEYS[1:3])) == 0, "its job is still overdue"
    at.faults.delay = 0
    for _ in range(1001):
        at.manager.poll()
    assert len(at.manager.find(at.space, KEYS[1:3])) == 2
    assert suspended.seconds == 1.0


def test_failures_in_a_row_suspend_and_one_success_forgives():
    at = Setting()
    at.seal(1, 2)
    at.faults.loads = {KEYS[1]: Outcome.FAILED}
    for _ in range(2):
        at.load(1)
        at.manager.poll()
    at.load(2)
    at.manager.poll()
    for _ in range(2):
        at.load(1)
        at.manager.poll()
    assert at.seen(TierSuspended) == []
    at.load(1)
    at.manager.poll()
    assert len(at.seen(TierSuspended)) == 1


def test_tenants_and_models_have_namespaces_of_their_own():
    one = Setting().manager
    spaces = [one.make_namespace(salt) for salt in ("", "a", "b")]
    assert len({space.digest for space in spaces}) == 3
    assert spaces[0].tenant == ""
    assert spaces[1].tenant not in ("", "a")
    size = SlotMemory(16, 4).block_bytes
    other = TierManager(
        [],
        SlotMemory(16, 4),
        Identity(RootKey(b"x" * 32), "null", "null", (size,), 8),
        EventLog(),
        write_policy=WritePolicy(),
    )
    assert other.make_namespace("a").digest != spaces[1].digest
    assert other.make_namespace("a").tenant != spaces[1].tenant


def test_two_tiers_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="one name"):
        Setting(names=("same", "same"))


@pytest.mark.parametrize(("policy", "loaded"), [("never", 0), ("always", 3)])
def test_the_extremes_are_what_they_say(policy, loaded):
    at = Setting(load=policy)
    at.seal(1, 2, 3)
    at.manager.prefill.observe(1000, 1.0)
    assert at.manager.choose(at.manager.find(at.space, KEYS[1:4])).num_loaded == loaded
