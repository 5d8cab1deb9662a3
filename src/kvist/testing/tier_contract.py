"""The contract of a tier: what every place for blocks must do. Needs pytest and hypothesis.

Owns the checks. Subclass `TierContract`, say how a tier is made, and pytest runs all of them. Knows
no tier by name. A tier that keeps to a budget itself, rather than a server behind it, also passes
`kvist.testing.bounded_tier_contract`. What is particular to a medium (damage, restarts, servers
that hang) is for the tests of that tier.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import ConfigError, IntegrityError
from kvist.keys import BlockKey
from kvist.testing.foreign_contract import ForeignContract, MakeTier
from kvist.testing.tier_driver import (
    PATIENCE_S,
    TierDriver,
    block_bytes,
    block_key,
    chain,
    metas,
    space,
)
from kvist.testing.tier_history import NUM_KEYS, History, Step
from kvist.tiers.base import BlockMeta, LoadJob, LookupStatus, Outcome, StoreJob

A, B = space("a"), space("b", tenant="someone")
ROOM_BLOCKS = 12


class _Overwriting:
    """Nothing was lost yet; but now that somebody has asked, the block gets other bytes."""

    def __init__(self, blocks: dict[BlockKey, bytearray]) -> None:
        self.blocks = blocks

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        block = self.blocks.pop(BlockKey(key))
        block[:] = bytes(len(block))
        return False


class TierContract(ForeignContract):
    """Subclass it, override `make`, set what differs, and name the subclass ``Test...``.

    Attributes
    ----------
    counts : bool
        Whether `usage` tells blocks and tenants: a server keeps no such books.
    histories : int
        How many random histories to try.
    """

    counts = True
    histories = 40

    @pytest.fixture
    def driver(self, make: MakeTier) -> Iterator[TierDriver]:
        """Return a driver of a tier of `ROOM_BLOCKS` blocks with namespaces A and B."""
        driver = TierDriver(make(ROOM_BLOCKS), A, B)
        yield driver
        driver.tier.close()

    # ---- bytes

    def test_what_was_stored_is_found_and_loaded(self, driver: TierDriver) -> None:
        """Byte for byte, in any order, together with what is not there."""
        keys, stranger = chain("x", 3), block_key("stranger")
        assert driver.hits(A, keys) == [False] * 3
        assert driver.store(A, keys) == (Outcome.DONE,) * 3
        answers = driver.lookup(A, keys)
        assert all(answer.status is LookupStatus.HIT for answer in answers)
        assert all(0 < answer.stored_bytes <= A.block_bytes * 1.01 for answer in answers)
        assert all(answer.exact for answer in answers)
        wanted = [keys[2], stranger, keys[0]]
        assert driver.load(A, wanted) == [
            block_bytes(keys[2]),
            Outcome.MISS,
            block_bytes(keys[0]),
        ]
        driver.tier.check()

    def test_a_miss_says_why(self, driver: TierDriver) -> None:
        """Whoever debugs a cold cache asks the events."""
        (answer,) = driver.lookup(A, [block_key("absent")])
        assert answer.status is LookupStatus.MISS
        assert answer.reason == "absent"

    def test_a_load_takes_the_segments_it_names(self, driver: TierDriver) -> None:
        """The head can be loaded while the tail is computed."""
        (key,) = chain("x", 1)
        driver.store(A, [key])
        whole = block_bytes(key)
        for segments in (range(1), range(1, 2), range(1, 3), range(3)):
            start, end = A.span(segments)
            assert driver.load(A, [key], segments) == [whole[start:end]]

    def test_a_block_twice_in_a_load_is_loaded_twice(self, driver: TierDriver) -> None:
        """Two sequences may want the same block in one step."""
        (key,) = chain("x", 1)
        driver.store(A, [key])
        assert driver.load(A, [key, key]) == [block_bytes(key)] * 2

    def test_storing_again_changes_nothing(self, driver: TierDriver) -> None:
        """A sealed block never changes, so the first copy is as good as any."""
        (key,) = chain("x", 1)
        driver.store(A, [key])
        assert driver.store(A, [key])[0] in (Outcome.REFUSED, Outcome.DONE)
        assert driver.load(A, [key]) == [block_bytes(key)]
        assert driver.tier.usage().num_blocks == self.counts
        driver.tier.check()

    def test_a_block_twice_in_a_store_is_kept_once(self, driver: TierDriver) -> None:
        """Two jobs that race with the same block."""
        (key,) = chain("x", 1)
        data = {key: block_bytes(key)}
        first, second = driver.begin_store(A, data), driver.begin_store(A, data)
        outcomes = {driver.wait(first).outcomes[0], driver.wait(second).outcomes[0]}
        assert Outcome.DONE in outcomes
        assert driver.load(A, [key]) == [block_bytes(key)]
        driver.tier.check()

    def test_the_buffer_of_a_store_is_the_callers_again_when_it_is_told(
        self, driver: TierDriver
    ) -> None:
        """A block is reused as soon as its demotion was told."""
        (key,) = chain("x", 1)
        data = bytearray(block_bytes(key))
        job = StoreJob(10**6, A.digest, (key,), (memoryview(data),), (BlockMeta(),))
        driver.tier.submit_store(job)
        assert driver.wait(10**6).outcomes == (Outcome.DONE,)
        data[:] = bytes(len(data))
        assert driver.load(A, [key]) == [block_bytes(key)]

    def test_a_block_that_is_lost_while_it_is_read_is_not_kept(self, driver: TierDriver) -> None:
        """A block that was lent as it lay on the device, and evicted under the tier's eyes."""
        if not driver.tier.reads_in_place:
            return  # it is lent copies only
        keys = tuple(chain("x", 3))
        blocks = tuple(memoryview(bytearray(block_bytes(key))) for key in keys)
        driver.tier.submit_store(
            StoreJob(10**6, A.digest, keys, blocks, metas(keys), frozenset(keys[1:2]))
        )
        done = driver.wait(10**6)
        assert done.outcomes == (Outcome.DONE, Outcome.CANCELLED, Outcome.DONE)
        assert driver.hits(A, keys) == [True, False, True]
        assert driver.store(A, keys[1:2])[0] is Outcome.DONE, "it can be stored again"
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]
        driver.tier.check()

    def test_whether_a_block_is_lost_is_asked_when_its_bytes_were_read(
        self, driver: TierDriver
    ) -> None:
        """Asked before, the block could change between the answer and the reading."""
        if not driver.tier.reads_in_place:
            return
        keys = tuple(chain("x", 3))
        blocks = {key: bytearray(block_bytes(key)) for key in keys}
        buffers = tuple(memoryview(block).toreadonly() for block in blocks.values())
        asked = _Overwriting(blocks)
        driver.tier.submit_store(StoreJob(10**6, A.digest, keys, buffers, metas(keys), asked))
        assert driver.wait(10**6).outcomes == (Outcome.DONE,) * 3
        assert not asked.blocks, "it asked for all of them"
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]

    # ---- identity

    def test_namespaces_share_nothing(self, driver: TierDriver) -> None:
        """Two models, formats or tenants; even where their keys are equal."""
        (key,) = chain("x", 1)
        driver.store(A, [key])
        assert driver.hits(B, [key]) == [False]
        assert driver.load(B, [key]) == [Outcome.MISS]
        assert driver.tier.delete(B.digest, [key]) == 0
        assert driver.hits(A, [key]) == [True]

    def test_a_namespace_is_opened_twice_but_not_with_other_segments(
        self, driver: TierDriver
    ) -> None:
        """An identity that lies about its layout would give bytes to the wrong layers."""
        driver.tier.open_namespace(A)
        with pytest.raises(ConfigError, match="segments"):
            driver.tier.open_namespace(space("a", segments=(40_000,)))

    def test_misuse_is_an_error(self, driver: TierDriver) -> None:
        """A buffer of the wrong length, a namespace that nobody opened, segments there are not."""
        key, short = block_key("x"), memoryview(bytearray(100))
        whole = memoryview(bytearray(A.block_bytes))
        meta = (BlockMeta(),)
        tier = driver.tier
        with pytest.raises(IntegrityError):
            tier.submit_store(StoreJob(10**6, A.digest, (key,), (short,), meta))
        with pytest.raises(IntegrityError):
            tier.submit_store(StoreJob(10**6, bytes(32), (key,), (whole,), meta))
        with pytest.raises(IntegrityError):
            tier.submit_load(LoadJob(10**6, A.digest, (key,), range(3), (short,)))
        with pytest.raises(IntegrityError):
            tier.submit_load(LoadJob(10**6, A.digest, (key,), range(2, 4), (whole[:8_000],)))
        with pytest.raises(IntegrityError):
            tier.submit_load(
                LoadJob(10**6, A.digest, (key,), range(3), (memoryview(bytes(A.block_bytes)),))
            )

    # ---- listing and counting

    def test_delete_drops_and_counts(self, driver: TierDriver) -> None:
        """And leaves the others."""
        keys = chain("x", 3)
        driver.store(A, keys)
        assert driver.tier.delete(A.digest, [keys[2], block_key("stranger")]) == 1
        assert driver.hits(A, keys) == [True, True, False]
        assert driver.tier.delete(A.digest, [keys[2]]) == 0
        assert driver.store(A, keys)[2] is Outcome.DONE, "it can be stored again"
        assert driver.load(A, keys) == [block_bytes(key) for key in keys]
        driver.tier.check()

    def test_entries_are_those_of_the_namespace(self, driver: TierDriver) -> None:
        """For people who look into a store."""
        keys = chain("x", 3)
        driver.store(A, keys)
        driver.store(B, chain("y", 2))
        entries = list(driver.tier.entries(A.digest))
        assert {entry.key for entry in entries} == set(keys)
        assert all(0 < entry.stored_bytes <= A.block_bytes * 1.01 for entry in entries)
        assert all(entry.age_s >= 0 for entry in entries)

    def test_usage_is_by_tenant(self, driver: TierDriver) -> None:
        """The labels of the namespaces; what is dropped is off the bill."""
        empty = driver.tier.usage()
        driver.store(A, chain("x", 3))
        driver.store(B, chain("y", 2))
        usage = driver.tier.usage()
        if not self.counts:
            assert usage.num_blocks == 0
            assert usage.by_tenant == {}
            return
        assert usage.num_blocks == 5
        assert usage.by_tenant[""] > usage.by_tenant["someone"] > 0
        driver.tier.delete(A.digest, chain("x", 3))
        driver.tier.delete(B.digest, chain("y", 2))
        after = driver.tier.usage()
        assert after.num_blocks == 0
        assert not any(after.by_tenant.values())
        assert after.used_bytes <= usage.used_bytes
        assert empty.num_blocks == 0

    # ---- jobs

    def test_a_load_that_is_late_before_it_begins(self, driver: TierDriver) -> None:
        """A deadline on the tier's clock, long past."""
        (key,) = chain("x", 1)
        driver.store(A, [key])
        assert driver.load(A, [key], deadline_s=-1.0) == [Outcome.LATE]

    def test_a_cancelled_job_ends_once_and_says_what_came_of_it(self, driver: TierDriver) -> None:
        """Whether or not it was in time; ids that are not under way are ignored."""
        keys = chain("x", 3)
        driver.store(A, keys)
        job_id, wholes = driver.begin_load(A, keys)
        driver.tier.cancel(job_id)
        driver.tier.cancel(job_id + 10**6)
        for key, got in zip(keys, driver.taken(driver.wait(job_id), wholes), strict=True):
            assert got in (Outcome.CANCELLED, block_bytes(key))
        driver.tier.cancel(job_id)
        more = chain("y", 2)
        job_id = driver.begin_store(A, {key: block_bytes(key) for key in more})
        driver.tier.cancel(job_id)
        outcomes = driver.wait(job_id).outcomes
        assert set(outcomes) <= {Outcome.CANCELLED, Outcome.DONE}
        assert driver.hits(A, more) == [outcome is Outcome.DONE for outcome in outcomes]
        driver.tier.check()

    def test_drained_means_told_by_the_next_poll(self, driver: TierDriver) -> None:
        """At shutdown, and before a restart that should be warm."""
        jobs = [
            driver.begin_store(A, {key: block_bytes(key)}) for key in chain("x", ROOM_BLOCKS // 2)
        ]
        assert driver.tier.drain(PATIENCE_S)
        driver.poll()
        assert set(jobs) <= driver.ended.keys()

    def test_the_waker_is_called(self, driver: TierDriver) -> None:
        """Whoever sleeps until something happens must be woken."""
        woken = threading.Event()
        driver.tier.set_waker(woken.set)
        driver.begin_store(A, {block_key("x"): block_bytes(block_key("x"))})
        assert woken.wait(PATIENCE_S)

    def test_closing_tells_every_job_and_ends_every_thread(self, make: MakeTier) -> None:
        """No buffer stays lent, no thread stays behind; twice is harmless."""
        before = set(threading.enumerate())
        driver = TierDriver(make(ROOM_BLOCKS), A)
        keys = chain("x", 6)
        jobs = [driver.begin_store(A, {key: block_bytes(key)}) for key in keys]
        jobs += [driver.begin_load(A, keys)[0] for _ in range(3)]
        driver.tier.close()
        driver.poll()
        assert driver.ended.keys() == set(jobs)
        driver.tier.close()
        assert set(threading.enumerate()) <= before

    def test_any_history_is_that_of_a_dict(self, make: MakeTier) -> None:
        """Random jobs, many at once: what a load brings is what was stored, or an outcome."""
        index = st.integers(0, NUM_KEYS - 1)
        some = st.lists(index, min_size=1, max_size=4, unique=True)
        step = st.tuples(
            st.sampled_from(
                ["store", "load", "delete", "lock", "unlock", "touch", "cancel", "wait"]
            ),
            st.sampled_from([A, B]),
            some,
        )

        @settings(max_examples=self.histories)
        @given(st.lists(step, max_size=40))
        def check(steps: list[Step]) -> None:
            driver = TierDriver(make(ROOM_BLOCKS), A, B)
            try:
                History(driver).play(steps, (A, B))
            finally:
                driver.tier.close()

        check()
