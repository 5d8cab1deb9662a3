"""The host tier: the shipped contract, and what is its own: extents, codecs, damage, budget."""

from __future__ import annotations

import threading
from random import Random

import pytest

pytest.importorskip("numpy", reason="tiers need the tiers extra")
pytest.importorskip("zstandard", reason="tiers need the tiers extra")

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.codecs.zstd import ZstdCodec
from kvist.errors import ConfigError
from kvist.policies.keeper import Keeper
from kvist.policies.registry import POLICIES, policy_factory
from kvist.testing.bounded_tier_contract import BoundedTierContract
from kvist.testing.tier_contract import ROOM_BLOCKS, A, B
from kvist.testing.tier_driver import TierDriver, block_bytes, block_key, chain, space
from kvist.tiers.base import BlockMeta, LoadJob, LookupStatus, Outcome
from kvist.tiers.extents import EXTENT_BYTES
from kvist.tiers.host import HostTier
from kvist.tiers.host_books import EXTENT_CHARGE

EXTENTS_A_BLOCK = -(-A.block_bytes // EXTENT_BYTES)


def keeper(policy="lru", **options):
    return lambda capacity: Keeper(capacity, policy_factory(policy), **options)


def host(num_blocks=ROOM_BLOCKS, *, policy="lru", extents=EXTENTS_A_BLOCK, keep=None, **options):
    capacity = num_blocks * extents * EXTENT_CHARGE
    return HostTier(capacity, keep or keeper(policy), **options)


class TestHostTier(BoundedTierContract):
    @pytest.fixture
    def make(self):
        return host


class TestWithTwoThreads(BoundedTierContract):
    @pytest.fixture
    def make(self):
        return lambda num_blocks: host(num_blocks, num_threads=2)


class TestCompressed(BoundedTierContract):
    histories = 20

    @pytest.fixture
    def make(self):
        return lambda num_blocks: host(num_blocks, codec=ZstdCodec())


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "lru"])
class TestEveryPolicy:
    """The contract's rooms under other orders: leaf first, within budget, sound."""

    def test_chains_leave_from_their_ends(self, policy):
        driver = TierDriver(host(policy=policy), A)
        BoundedTierContract().test_no_block_outlives_the_one_it_continues(driver)
        driver.tier.close()

    def test_the_budget_holds(self, policy):
        driver = TierDriver(host(policy=policy), A)
        BoundedTierContract().test_a_budget_is_never_exceeded(driver)
        driver.tier.close()


def test_compression_buys_room():
    """The same budget holds more blocks, since a record takes what it needs."""
    large = space("large", segments=(EXTENT_BYTES, 3 * EXTENT_BYTES))

    def held(codec):
        driver = TierDriver(host(8, extents=4, codec=codec), large)
        for index in range(40):
            driver.store(large, chain(index, 1))
        usage = driver.tier.usage()
        driver.tier.close()
        assert usage.used_bytes <= usage.capacity_bytes
        return usage.num_blocks

    assert held(RawCodec()) == 8
    assert held(ZstdCodec()) == 10, "its second half repeats itself: 3 extents instead of 4"


def test_records_in_scattered_extents_come_back_whole():
    """Room that is free in pieces is room."""
    tier = host(ROOM_BLOCKS)
    large = space("large", segments=(40_000, 60_000, 20_000))
    driver = TierDriver(tier, A, large)
    fillers = chain("filler", ROOM_BLOCKS)
    driver.store(A, fillers)
    tier.delete(A.digest, fillers[::2])
    keys = chain("x", ROOM_BLOCKS // 4)
    assert driver.store(large, keys) == (Outcome.DONE,) * len(keys)
    assert len(tier._books.find(large.digest + keys[0]).runs) == 2
    whole = [block_bytes(key, large.block_bytes) for key in keys]
    assert driver.load(large, keys) == whole
    assert driver.load(large, keys, range(1, 2)) == [data[40_000:100_000] for data in whole]
    assert all(driver.hits(A, fillers[1::2])), "nobody had to leave"
    tier.check()
    tier.close()


def test_a_stray_write_costs_a_miss():
    """The memory is shared with a C++ engine: bytes that changed are found out and dropped."""
    tier = host()
    driver = TierDriver(tier, A)
    keys = chain("x", 2)
    driver.store(A, keys)
    record = tier._books.find(A.digest + keys[0])
    ((first, _),) = record.runs
    tier._room._whole[first * EXTENT_BYTES + 15_000] ^= 1
    assert driver.load(A, keys[:1], range(1)) == [block_bytes(keys[0])[:12_000]], "elsewhere"
    job_id, wholes = driver.begin_load(A, keys)
    done = driver.wait(job_id)
    assert done.outcomes == (Outcome.DAMAGED, Outcome.DONE)
    assert "segment 1" in done.reason
    assert driver.taken(done, wholes)[1] == block_bytes(keys[1])
    assert driver.hits(A, keys) == [False, True], "what is damaged is dropped"
    tier.check()
    tier.close()


class SlowCodec(Codec):
    """Raw, but waits in the middle of encoding or decoding until it is let go."""

    name, wire_id = "slow", 255

    def __init__(self, what):
        self.what, self.inside, self.go = what, threading.Event(), threading.Event()

    def encode(self, segment, itemsize):
        if self.what == "encode":
            self.inside.set()
            self.go.wait(20)
        return bytes(segment)

    def decode(self, data, out, itemsize):
        if self.what == "decode":
            self.inside.set()
            self.go.wait(20)
        out[:] = data


def test_a_block_is_pending_until_it_is_whole_and_no_call_waits_for_it():
    codec = SlowCodec("encode")
    tier = host(codec=codec)
    driver = TierDriver(tier, A)
    (key,) = chain("x", 1)
    job_id = driver.begin_store(A, {key: block_bytes(key)})
    assert codec.inside.wait(20)
    (answer,) = tier.lookup(A.digest, [key])
    assert (answer.status, answer.reason) == (LookupStatus.PENDING, "being_written")
    assert tier.lock(A.digest, [key], 60.0) == [False]
    assert tier.delete(A.digest, [key]) == 0
    assert tier.poll() == []
    codec.go.set()
    driver.wait(job_id)
    assert driver.hits(A, [key]) == [True]
    tier.close()


@pytest.mark.parametrize("end", ["cancelled", "refused"])
def test_a_store_that_came_to_nothing_leaves_no_pending_block(end):
    codec = SlowCodec("encode")
    tier = host(1, codec=codec)
    driver = TierDriver(tier, A)
    blocker, key = chain("blocker", 1), block_key("x")
    first = driver.begin_store(A, {blocker[0]: block_bytes(blocker[0])})
    assert codec.inside.wait(20)
    second = driver.begin_store(A, {key: block_bytes(key)}, [BlockMeta()])
    if end == "cancelled":
        tier.cancel(second)
    codec.go.set()
    driver.wait(first)
    if end == "refused":
        driver.wait(second)
        tier.delete(A.digest, [key])
        tier.lock(A.digest, blocker, 60.0)
        driver.store(A, blocker)
        tier.lock(A.digest, blocker, 60.0)
        second = driver.begin_store(A, {key: block_bytes(key)}, [BlockMeta()])
    assert driver.wait(second).outcomes == (Outcome(end),)
    assert tier.lookup(A.digest, [key])[0].status is LookupStatus.MISS
    tier.check()
    tier.close()


def test_a_block_deleted_while_it_is_read_goes_when_that_is_done():
    codec = SlowCodec("decode")
    tier = host(codec=codec)
    driver = TierDriver(tier, A)
    (key,) = chain("x", 1)
    driver.store(A, [key])
    used = tier.usage().used_bytes
    job_id, wholes = driver.begin_load(A, [key])
    assert codec.inside.wait(20)
    assert tier.delete(A.digest, [key]) == 1
    assert driver.hits(A, [key]) == [False]
    assert tier.usage().used_bytes == used, "its room is not given to anybody yet"
    tier.check()
    codec.go.set()
    assert driver.taken(driver.wait(job_id), wholes) == [block_bytes(key)]
    assert tier.usage().used_bytes == 0
    tier.check()
    tier.close()


def test_an_error_of_a_codec_is_an_outcome_and_leaves_the_books_sound():
    class Broken(RawCodec):
        def encode(self, segment, itemsize):
            raise MemoryError("no memory to encode")

    tier = host(codec=Broken())
    driver = TierDriver(tier, A)
    assert driver.store(A, chain("x", 2)) == (Outcome.FAILED, Outcome.FAILED)
    assert driver.hits(A, chain("x", 2)) == [False, False]
    assert tier.usage().used_bytes == 0
    tier.check()
    tier.close()


def test_a_child_is_not_kept_at_the_cost_of_its_parent():
    tier = host(1)
    driver = TierDriver(tier, A)
    keys = chain("x", 2)
    metas = [BlockMeta(b"", 0), BlockMeta(keys[0], 1)]
    driver.store(A, keys[:1])
    assert driver.store(A, keys[1:], metas[1:]) == (Outcome.REFUSED,)
    assert driver.hits(A, keys) == [True, False]
    tier.close()


def test_blocks_of_one_job_do_not_push_each_other_out():
    driver = TierDriver(host(3), A)
    keys = chain("x", 6)
    outcomes = driver.store(A, keys)
    assert outcomes == (Outcome.DONE,) * 3 + (Outcome.REFUSED,) * 3
    assert driver.hits(A, keys) == [True] * 3 + [False] * 3
    driver.tier.close()


def test_a_tenant_keeps_to_its_quota():
    quota = 2 * EXTENTS_A_BLOCK * EXTENT_CHARGE
    driver = TierDriver(host(keep=keeper(tenant_quota=quota)), A, B)
    driver.store(A, chain("y", 3))
    for index in range(8):
        driver.store(B, chain(index, 1))
    usage = driver.tier.usage()
    assert usage.by_tenant["someone"] == quota
    assert driver.hits(A, chain("y", 3)) == [True] * 3, "others are not pushed out for it"
    driver.tier.close()


def test_a_block_offered_once_is_not_admitted_where_twice_is_asked_for():
    driver = TierDriver(host(keep=keeper(min_hits=2)), A)
    keys = chain("x", 2)
    job_id = driver.begin_store(A, {key: block_bytes(key) for key in keys})
    done = driver.wait(job_id)
    assert (done.outcomes, done.reason) == ((Outcome.REFUSED,) * 2, "not_admitted")
    assert driver.store(A, keys) == (Outcome.DONE,) * 2
    driver.tier.close()


def test_a_lookup_and_a_load_are_no_use():
    """Queries change nothing: what was stored first leaves first, however often it is asked for."""
    driver = TierDriver(host(2), A)
    first, second, third = (block_key(index) for index in range(3))
    driver.store(A, [first])
    driver.store(A, [second])
    for _ in range(5):
        driver.hits(A, [first])
        list(driver.tier.entries(A.digest))
    driver.store(A, [third])
    assert driver.hits(A, [first, second, third]) == [False, True, True]
    driver.tier.close()


def test_the_memory_is_pinned_and_unpinned_by_a_hook():
    calls = []

    def pin(whole):
        calls.append(("pin", whole.nbytes))
        return lambda: calls.append(("unpin",))

    tier = host(4, pin=pin)
    assert calls == [("pin", 4 * EXTENTS_A_BLOCK * EXTENT_BYTES)]
    tier.close()
    assert calls[1:] == [("unpin",)]


def test_too_little_memory_for_anything_is_said_at_once():
    with pytest.raises(ConfigError, match="33 KiB"):
        HostTier(1_000, keeper())


def test_a_block_larger_than_the_tier_is_refused():
    big = space("big", segments=(10 * EXTENT_BYTES,))
    driver = TierDriver(host(2), big)
    assert driver.store(big, chain("x", 1)) == (Outcome.REFUSED,)
    assert driver.tier.usage().num_blocks == 0
    driver.tier.close()


def test_what_the_tier_is_charged_for_its_index_covers_the_index():
    """The budget is all of it: an index entry must not cost more than each extent is charged."""
    import tracemalloc

    small = space("small", segments=(100,))
    num_blocks = 500
    driver = TierDriver(host(num_blocks, extents=2), small)
    blocks = [chain(index, 1) for index in range(num_blocks)]
    driver.store(small, blocks[0])
    tracemalloc.start()
    for keys in blocks[1:]:
        driver.store(small, keys)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert driver.tier.usage().num_blocks == num_blocks
    assert taken < (num_blocks - 1) * 2 * (EXTENT_CHARGE - EXTENT_BYTES)
    driver.tier.close()


def test_a_buffer_of_another_kind_is_misuse():
    from kvist.errors import IntegrityError

    tier = host()
    tier.open_namespace(A)
    doubles = memoryview(bytearray(A.block_bytes)).cast("d")
    with pytest.raises(IntegrityError, match="single bytes"):
        tier.submit_load(LoadJob(1, A.digest, (block_key(1),), range(3), (doubles,)))
    tier.close()


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_a_load_ends_between_two_blocks(end):
    """A long load is not carried to its end for nobody."""
    now = [0.0]
    codec = SlowCodec("decode")
    tier = host(codec=codec, clock=lambda: now[0])
    driver = TierDriver(tier, A)
    keys = chain("x", 3)
    driver.store(A, keys)
    job_id, wholes = driver.begin_load(A, keys, deadline_s=10.0)
    assert codec.inside.wait(20)
    if end == "cancelled":
        tier.cancel(job_id)
    else:
        now[0] = 10.0
    codec.go.set()
    done = driver.wait(job_id)
    assert done.outcomes == (Outcome.DONE, Outcome(end), Outcome(end))
    assert driver.taken(done, wholes)[0] == block_bytes(keys[0])
    tier.check()
    tier.close()


def test_what_continues_a_block_that_found_no_room_is_not_kept():
    """Though it would fit itself: nobody would ever find it."""
    large = space("large", segments=(4 * EXTENT_BYTES,))
    tier = host(1, extents=2, codec=ZstdCodec())
    driver = TierDriver(tier, large)
    parent, child = chain("x", 2)
    noise = Random(0).randbytes(large.block_bytes)
    job_id = driver.begin_store(large, {parent: noise, child: bytes(large.block_bytes)})
    done = driver.wait(job_id)
    assert (done.outcomes, done.reason) == ((Outcome.REFUSED,) * 2, "no_room")
    job_id = driver.begin_store(large, {child: bytes(large.block_bytes)}, [BlockMeta(parent, 1)])
    assert driver.wait(job_id).outcomes == (Outcome.DONE,), "it may be continued from elsewhere"
    tier.close()
