"""What the injector and the slow line do to a tier.

Guards: a test of faults in which nothing goes wrong, or in which what goes wrong is not what real
tiers may say.
"""

from __future__ import annotations

from random import Random

from kvist.testing.faulty_tier import SCRIBBLE, FaultyTier, RandomFaults, ScriptedFaults
from kvist.testing.memory_tier import MemoryTier
from kvist.testing.throttled_tier import ThrottledTier
from kvist.testing.tier_driver import GUARD_BYTES, TierDriver, block_bytes, block_key, chain, space
from kvist.tiers.base import LookupStatus, Outcome

A = space("a")
BLOCK = A.block_bytes


def test_each_load_fault_is_told_and_the_buffer_scribbled_over():
    faults = ScriptedFaults()
    driver = TierDriver(FaultyTier(MemoryTier(10 * BLOCK), faults), A)
    keys = chain("x", 4)
    driver.store(A, keys)
    faults.loads = {keys[0]: Outcome.LATE, keys[1]: Outcome.DAMAGED, keys[2]: Outcome.MISS}
    job_id, wholes = driver.begin_load(A, keys)
    done = driver.wait(job_id)
    assert done.outcomes == (Outcome.LATE, Outcome.DAMAGED, Outcome.MISS, Outcome.DONE)
    assert done.reason == "injected"
    assert wholes[0][GUARD_BYTES:-GUARD_BYTES] == SCRIBBLE * BLOCK
    assert driver.taken(done, wholes)[3] == block_bytes(keys[3])
    assert driver.hits(A, keys) == [True, False, False, True], "damaged and gone ones are dropped"
    assert driver.tier.num_faults == 3


def test_a_store_that_failed_is_not_there():
    keys = chain("x", 2)
    faults = ScriptedFaults(stores={keys[1]: Outcome.FAILED})
    driver = TierDriver(FaultyTier(MemoryTier(10 * BLOCK), faults), A)
    assert driver.store(A, keys) == (Outcome.DONE, Outcome.FAILED)
    assert driver.hits(A, keys) == [True, False]


def test_a_hit_can_be_denied():
    (key,) = chain("x", 1)
    faults = ScriptedFaults()
    driver = TierDriver(FaultyTier(MemoryTier(10 * BLOCK), faults), A)
    driver.store(A, [key])
    for status in (LookupStatus.PENDING, LookupStatus.RETRY, LookupStatus.MISS):
        faults.lookups = {key: status}
        (answer,) = driver.tier.lookup(A.digest, [key])
        assert (answer.status, answer.reason) == (status, "injected")


def test_the_end_of_a_job_is_told_later_even_of_a_cancelled_one():
    driver = TierDriver(FaultyTier(MemoryTier(10 * BLOCK), ScriptedFaults(delay=3)), A)
    job_id, _ = driver.begin_load(A, chain("x", 1))
    driver.tier.cancel(job_id)
    for _ in range(3):
        driver.poll()
        assert not driver.ended
    driver.poll()
    assert driver.ended[job_id].outcomes == (Outcome.CANCELLED,)


def test_random_faults_are_of_every_kind_and_the_same_for_a_seed():
    def play():
        faults = RandomFaults(Random(7), 0.3, 0.5, 0.3, max_delay_polls=3)
        driver = TierDriver(FaultyTier(MemoryTier(10 * BLOCK), faults), A)
        seen = []
        for index in range(200):
            key = block_key(index % 5)
            seen += driver.store(A, [key])
            seen += [answer.status for answer in driver.tier.lookup(A.digest, [key])]
            job_id, _ = driver.begin_load(A, [key])
            seen += driver.wait(job_id).outcomes
        return seen

    first = play()
    assert set(first) == set(Outcome) | set(LookupStatus)
    assert play() == first


def test_a_slow_line_takes_its_time_in_order():
    now = [100.0]
    inner = MemoryTier(10 * BLOCK)
    tier = ThrottledTier(inner, bytes_per_s=BLOCK, latency_s=0.5, clock=lambda: now[0])
    driver = TierDriver(tier, A)
    keys = chain("x", 2)
    store = driver.begin_store(A, {key: block_bytes(key) for key in keys})
    driver.poll()
    now[0] += 2.4
    driver.poll()
    assert not driver.ended, "two blocks at a block a second, after half a second"
    now[0] += 0.1
    assert driver.wait(store).seconds == 2.5
    first, _ = driver.begin_load(A, keys[:1])
    second, _ = driver.begin_load(A, keys[1:])
    driver.poll()
    now[0] += 1.5
    driver.poll()
    assert list(driver.ended) == [first], "the second waits behind the first"
    now[0] += 1.5
    assert driver.wait(second).outcomes == (Outcome.DONE,)


def test_what_is_not_through_by_the_deadline_is_late():
    now = [0.0]
    tier = ThrottledTier(MemoryTier(10 * BLOCK), bytes_per_s=BLOCK, clock=lambda: now[0])
    driver = TierDriver(tier, A)
    keys = chain("x", 3)
    store = driver.begin_store(A, {key: block_bytes(key) for key in keys})
    driver.poll()
    now[0] = 10.0
    driver.wait(store)
    job_id, wholes = driver.begin_load(A, keys, deadline_s=12.5)
    driver.poll()
    now[0] = 12.4
    driver.poll()
    assert not driver.ended
    now[0] = 12.5
    done = driver.wait(job_id)
    assert done.outcomes == (Outcome.DONE, Outcome.DONE, Outcome.LATE)
    assert done.reason == "late"
    assert driver.taken(done, wholes)[:2] == [block_bytes(key) for key in keys[:2]]
