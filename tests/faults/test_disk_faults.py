"""Whatever happens to the files under a disk tier: right bytes, or none, and it goes on.

Guards: flipped bits, lost tails, lost, torn and reordered writes, calls that fail, full and
read-only devices, clocks that jump. Each test stores blocks, breaks something, and then asks for
every block: what comes is what was stored, or a miss; and the store takes new blocks again.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvist.errors import ConfigError, DamageError
from kvist.keys import BlockKey
from kvist.testing.disk_files import FailingFiles, LoggedFiles, after_power_loss
from kvist.testing.tier_driver import TierDriver, block_bytes, chain, space
from kvist.tiers.base import BlockMeta, LookupStatus, Namespace, Outcome
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import INDEX_NAME
from kvist.tiers.disk.layout import slab_bytes
from kvist.tiers.disk.opening import open_store
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.store import DiskStore
from kvist.tiers.disk.tier import DiskTier

BUDGET = 9 << 20
LABEL = Namespace(blake2b(b"faults", digest_size=32).digest(), "m", "bf16", "", (30_000, 20_000))
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
NUM_BLOCKS = 12


def key_of(number: int) -> BlockKey:
    return BlockKey(blake2b(str(number).encode(), digest_size=32).digest())


def bytes_of(number: int) -> bytes:
    return Random(number).randbytes(LABEL.block_bytes)


def write(store: DiskStore, *numbers: int) -> list[tuple[Outcome, str]]:
    puts = [
        store.coder.encode(LABEL, key_of(n), memoryview(bytes_of(n)), BlockMeta(key_of(n - 1), n))
        for n in numbers
    ]
    return store.write(puts, {LABEL.digest: LABEL})


def read(store: DiskStore, number: int) -> bytes | None:
    record = store.hold(LABEL.digest, key_of(number))
    if record is None:
        return None
    out = bytearray(LABEL.block_bytes)
    try:
        store.read(record, LABEL, range(2), memoryview(out))
    except (DamageError, OSError):
        store.discard(record)
        return None
    finally:
        store.let_go(record)
    return bytes(out)


def found_right(store: DiskStore, numbers: range = range(NUM_BLOCKS)) -> int:
    """Read all; none is wrong; return how many were there."""
    got = {number: read(store, number) for number in numbers}
    for number, data in got.items():
        assert data is None or data == bytes_of(number), f"block {number} came back wrong"
    return sum(data is not None for data in got.values())


def goes_on(store: DiskStore) -> None:
    """The books hold, and what is stored now is found now."""
    while store.ledger.sweep():
        pass
    store.check()
    numbers = range(100, 104)
    answers = write(store, *numbers)
    assert all(o is Outcome.DONE or why == "present" for o, why in answers), answers
    assert found_right(store, numbers) == len(numbers)
    store.check()


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    """A closed store with NUM_BLOCKS blocks; tests break copies of it."""
    directory = Path(tempfile.mkdtemp(prefix="kvist-disk-", dir=FAST))
    store = open_store(directory, BUDGET).store
    assert {o for o, _ in write(store, *range(NUM_BLOCKS))} == {Outcome.DONE}
    store.close()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def bench() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvist-disk-", dir=FAST))
    yield directory
    shutil.rmtree(directory)


def copy_of(pristine: Path, bench: Path) -> Path:
    target = bench / "store"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(pristine, target)
    return target


# ---------------------------------------------------------------------- damage


# Where the slab holds something: superblocks, headers, records; and anywhere.
places = st.one_of(
    st.integers(0, 8191),
    st.integers(32 << 10, (32 << 10) + 30 * 512),
    st.integers(64 << 10, (64 << 10) + 25 * (32 << 10)),
    st.integers(0, slab_bytes(1) - 1),
)


Flips = list[tuple[int, int]]


def flips_at(places: st.SearchStrategy[int]) -> st.SearchStrategy[Flips]:
    return st.lists(st.tuples(places, st.integers(0, 7)), min_size=1, max_size=8)


def opened(directory: Path, may_refuse: bool) -> DiskStore | None:
    """Open; ``None`` if it is refused with a message that says why, where it may be."""
    try:
        return open_store(directory, BUDGET).store
    except ConfigError as error:
        if may_refuse and any(word in str(error) for word in ("superblock", "format", "no slab")):
            return None
        raise


@settings(max_examples=25)
@given(flips=flips_at(places), old=st.booleans())
def test_flipped_bits_in_the_slab(pristine: Path, bench: Path, flips: Flips, old: bool) -> None:
    directory = copy_of(pristine, bench)
    with (directory / SLAB_NAME).open("r+b") as file:
        for place, bit in flips:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))
    if not old:
        (directory / INDEX_NAME).unlink()
    store = opened(directory, may_refuse=sum(place < 8192 for place, _ in flips) >= 2)
    if store is None:
        return
    assert found_right(store) >= NUM_BLOCKS - len(flips)
    goes_on(store)
    store.close()


@settings(max_examples=25)
@given(flips=flips_at(st.integers(0, 1 << 20)))
@example(flips=[(3983, 7)])  # in the schema: SQLite quotes it in an error that is no text
def test_flipped_bits_in_the_index(pristine: Path, bench: Path, flips: Flips) -> None:
    directory = copy_of(pristine, bench)
    path = directory / INDEX_NAME
    data = bytearray(path.read_bytes())
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    store = open_store(directory, BUDGET).store
    found_right(store)
    goes_on(store)
    store.close()
    # And what it wrote since is sound.
    store = open_store(directory, BUDGET).store
    found_right(store)
    goes_on(store)
    store.close()


@settings(max_examples=30)
@given(name=st.sampled_from([SLAB_NAME, INDEX_NAME]), share=st.floats(0, 1), noise=st.booleans())
def test_a_lost_tail(pristine: Path, bench: Path, name: str, share: float, noise: bool) -> None:
    """Of either file; or garbage instead of it."""
    directory = copy_of(pristine, bench)
    path = directory / name
    length = path.stat().st_size
    kept = int(share * length)
    with path.open("r+b") as file:
        file.truncate(kept)
        if noise:
            file.seek(kept)
            file.write(Random(kept).randbytes(min(length - kept, 1 << 16)))
    store = opened(directory, may_refuse=name == SLAB_NAME and kept < 8192)
    if store is None:
        return
    found_right(store)
    goes_on(store)
    store.close()


@settings(max_examples=20)
@given(name=st.sampled_from([SLAB_NAME, INDEX_NAME, INDEX_NAME + "-wal"]), share=st.floats(0, 1))
def test_a_tail_lost_while_in_use(pristine: Path, bench: Path, name: str, share: float) -> None:
    """An error at most, no signal; and after a new start all is well."""
    directory = copy_of(pristine, bench)
    store = open_store(directory, BUDGET).store
    write(store, 50, 51)
    path = directory / name
    os.truncate(path, int(share * path.stat().st_size))
    found_right(store)
    for number in range(60, 63):
        with suppress(sqlite3.Error, OSError):
            write(store, number)
            store.ledger.follow()
    found_right(store)
    store.close()
    store = opened(directory, may_refuse=name == SLAB_NAME and share * slab_bytes(1) < 8192)
    if store is None:
        return
    found_right(store)
    found_right(store, range(50, 63))
    goes_on(store)
    store.close()


def test_damage_is_told_and_the_block_can_be_stored_again(tmp_path: Path) -> None:
    """The tier says DAMAGED, not another thing, and not twice."""
    tier = DiskTier(tmp_path, BUDGET)
    label = space("damaged")
    driver = TierDriver(tier, label)
    keys = chain("x", 3)
    driver.store(label, keys)
    with (tmp_path / SLAB_NAME).open("r+b") as file:
        data = file.read()
        place = data.index(block_bytes(keys[1])[:64])
        file.seek(place + 1000)
        file.write(b"\0" * 100)
    got = driver.load(label, keys)
    assert got == [block_bytes(keys[0]), Outcome.DAMAGED, block_bytes(keys[2])]
    assert driver.hits(label, keys) == [True, False, True]
    assert driver.store(label, [keys[1]]) == (Outcome.DONE,)
    assert driver.load(label, keys) == [block_bytes(key) for key in keys]
    tier.check()
    tier.close()


def test_an_index_found_damaged_while_in_use_is_built_anew(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, BUDGET)
    label = space("mended")
    driver = TierDriver(tier, label)
    keys = chain("x", 5)
    driver.store(label, keys)
    assert tier.drain(20.0)
    tier._store.ledger.index._db.execute("PRAGMA cache_size = 0")
    with (tmp_path / INDEX_NAME).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (1 << 16))
    assert tier.delete(label.digest, keys[4:]) == 1
    # Whether this one fails, or the house-keeping before it: after it, the index is new.
    driver.store(label, chain("y", 1))
    assert driver.load(label, keys[:4]) == [block_bytes(key) for key in keys[:4]]
    for _ in range(100):
        outcomes = driver.store(label, chain("z", 2))
        if Outcome.FAILED not in outcomes and not tier._writer.trouble():
            break
        time.sleep(0.05)
    assert driver.hits(label, [*keys, *chain("z", 2)]) == [True] * 4 + [False] + [True] * 2
    tier.check()
    tier.close()
    tier = DiskTier(tmp_path, BUDGET)
    driver = TierDriver(tier, label)
    assert driver.load(label, keys) == [*(block_bytes(key) for key in keys[:4]), Outcome.MISS]
    tier.close()


# ---------------------------------------------------------------------- loss of power


class _OtherBoot(Files):
    def boot_id(self) -> str:
        return "another"


@settings(max_examples=25)
@given(data=st.data(), rebooted=st.booleans())
def test_lost_torn_and_reordered_writes(bench: Path, data: st.DataObject, rebooted: bool) -> None:
    """Any part of what was not synced, in any order, beside an index as old as you like.

    SQLite keeps its own promise: after a loss of power the index is as it was after some commit.
    The slab promises nothing that was not synced.
    """
    directory, snapshots = bench / "live", bench / "snapshots"
    for path in (directory, snapshots):
        shutil.rmtree(path, ignore_errors=True)
    snapshots.mkdir()
    files = LoggedFiles()
    store = open_store(directory, BUDGET, files=files).store
    synced: set[int] = set()
    written: set[int] = set()
    batches = data.draw(
        st.lists(st.lists(st.integers(0, NUM_BLOCKS * 3), min_size=1, max_size=5), max_size=8)
    )
    for number, batch in enumerate(batches):
        write(store, *dict.fromkeys(batch))
        written |= set(batch)
        if data.draw(st.booleans()):
            record = store.hold(LABEL.digest, key_of(batch[0]))
            if record is not None:
                store.let_go(record)
                store.discard(record)
                store.ledger.sweep()
                written.discard(batch[0])
                synced.discard(batch[0])
        if data.draw(st.integers(0, 3)) == 0:
            store.make_durable()
            synced |= written
        copy = sqlite3.connect(snapshots / str(number))
        store.ledger.index._db.backup(copy)
        copy.close()
    log, epoch = list(files.log), files.epoch
    store.close()

    sure = [entry for entry in log if entry.epoch < epoch]
    unsure = data.draw(st.permutations([entry for entry in log if entry.epoch == epoch]))
    tears = data.draw(st.integers(0, 2**32))
    mode = data.draw(st.sampled_from(["none", "whole", "sectors"]))

    def lost(number: int, sector: int) -> bool:
        if number < len(sure) or mode == "none":
            return False
        return Random(f"{tears} {number} {sector if mode == 'sectors' else 0}").random() < 0.5

    after_power_loss(directory / SLAB_NAME, slab_bytes(1), sure + unsure, lost)
    (directory / SLAB_NAME).chmod(0o600)
    for suffix in ("", "-wal", "-shm"):
        (directory / (INDEX_NAME + suffix)).unlink(missing_ok=True)
    if batches and data.draw(st.booleans()):
        which = data.draw(st.integers(0, len(batches) - 1))
        shutil.copy(snapshots / str(which), directory / INDEX_NAME)
    store = open_store(directory, BUDGET, files=_OtherBoot() if rebooted else Files()).store
    found = found_right(store, range(NUM_BLOCKS * 3 + 1))
    if rebooted and not unsure:
        assert found >= len(synced), "what was synced was lost"
    goes_on(store)
    store.close()


# ---------------------------------------------------------------------- calls that fail


@settings(max_examples=25)
@given(
    name=st.sampled_from(["read", "write", "sync", "will_need", "lock"]),
    start=st.integers(1, 30),
    length=st.integers(1, 40),
    number=st.sampled_from([errno.EIO, errno.EROFS, errno.ENOSPC]),
)
def test_calls_that_fail_for_a_while(
    pristine: Path, bench: Path, name: str, start: int, length: int, number: int
) -> None:
    directory = copy_of(pristine, bench)
    files = FailingFiles()
    store = open_store(directory, BUDGET, files=files).store
    files.counts.clear()
    failing = range(start, start + length)
    files.fails = lambda call, count: number if call == name and count in failing else 0
    for block in range(20, 40):
        with suppress(OSError):
            write(store, block)
            store.ledger.follow()
            store.ledger.sweep()
            store.make_durable()
        read(store, block - 3)
        found_right(store, range(block - 1, block + 1))
    files.fails = lambda call, count: 0
    found_right(store)
    found_right(store, range(20, 40))
    goes_on(store)
    store.close()
    store = open_store(directory, BUDGET).store
    found_right(store, range(40))
    goes_on(store)
    store.close()


@pytest.mark.parametrize("name", ["write", "sync", "reserve", "lock", "read"])
def test_a_store_that_cannot_be_made_says_so_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    for nth in range(1, 6):
        directory = tmp_path / f"{name}-{nth}"
        wanted = (name, nth)
        files = FailingFiles(lambda *call, wanted=wanted: errno.EIO if call == wanted else 0)
        with suppress(ConfigError):
            open_store(directory, BUDGET, files=files).store.close()
        store = open_store(directory, BUDGET).store
        goes_on(store)
        store.close()


def test_a_tier_whose_device_fails_refuses_for_a_while_and_serves_on(tmp_path: Path) -> None:
    now = [100.0]
    files = FailingFiles()
    tier = DiskTier(tmp_path, BUDGET, files=files, clock=lambda: now[0])
    label = space("failing")
    driver = TierDriver(tier, label)
    keys = chain("x", 6)
    assert driver.store(label, keys[:2]) == (Outcome.DONE,) * 2
    files.fails = lambda call, count: errno.EIO if call == "write" else 0
    assert driver.store(label, keys[2:4]) == (Outcome.FAILED,) * 2
    assert driver.store(label, keys[2:4]) == (Outcome.REFUSED,) * 2
    assert driver.load(label, keys[:3]) == [
        block_bytes(keys[0]),
        block_bytes(keys[1]),
        Outcome.MISS,
    ]
    files.fails = lambda call, count: 0
    now[0] += 60.0
    assert driver.store(label, keys[2:]) == (Outcome.DONE,) * 4
    files.fails = lambda call, count: errno.EIO if call == "read" else 0
    assert driver.load(label, keys) == [Outcome.FAILED] * 6
    files.fails = lambda call, count: 0
    assert driver.load(label, keys) == [block_bytes(key) for key in keys]
    tier.check()
    tier.close()


# ---------------------------------------------------------------------- devices and clocks


class SlowFiles(Files):
    """Every read takes so long, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.read_s = 0.0

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.now_s += self.read_s
        return super().read(fd, buffers, offset)


def test_a_slow_device_is_late_with_some_and_wrong_with_none(tmp_path: Path) -> None:
    files = SlowFiles()
    tier = DiskTier(tmp_path, BUDGET, files=files, clock=lambda: files.now_s, threads=2)
    label = space("slow")
    driver = TierDriver(tier, label)
    keys = chain("x", 6)
    driver.store(label, keys)
    files.read_s = 1.0
    job_id, _ = driver.begin_load(label, keys, deadline_s=files.now_s + 3.5)
    outcomes = driver.wait(job_id).outcomes
    done = outcomes.count(Outcome.DONE)
    assert 0 < done < len(keys)
    assert outcomes == (Outcome.DONE,) * done + (Outcome.LATE,) * (len(keys) - done)
    assert driver.load(label, keys) == [block_bytes(key) for key in keys]
    tier.close()


def test_a_device_too_small_is_seen_before_use(small_device: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs .* left"):
        DiskTier(small_device / "store", 64 << 20)
    assert (small_device / "store" / SLAB_NAME).stat().st_blocks == 0
    tier = DiskTier(small_device / "store", BUDGET)
    tier.close()


def test_a_device_that_others_fill_up(small_device: Path) -> None:
    """The slab is reserved; the index may lack room: then nothing more is stored, and no more."""
    directory = small_device / "store"
    tier = DiskTier(directory, BUDGET)
    label = space("full")
    driver = TierDriver(tier, label)
    first = chain("first", 5)
    assert driver.store(label, first) == (Outcome.DONE,) * 5
    subprocess.run(["cp", "/dev/zero", str(small_device / "hog")], check=False, capture_output=True)
    for number in range(30):
        keys = chain(number, 4)
        outcomes = driver.store(label, keys)
        assert set(outcomes) <= {Outcome.DONE, Outcome.FAILED, Outcome.REFUSED}
        got = driver.load(label, keys)
        for key, outcome, data in zip(keys, outcomes, got, strict=True):
            assert data in ((block_bytes(key),) if outcome is Outcome.DONE else (Outcome.MISS,))
    assert all(
        data in (block_bytes(key), Outcome.MISS)
        for key, data in zip(first, driver.load(label, first), strict=True)
    )
    tier.close()
    (small_device / "hog").unlink()
    tier = DiskTier(directory, BUDGET)
    driver = TierDriver(tier, label)
    assert driver.store(label, chain("again", 3)) == (Outcome.DONE,) * 3
    tier.check()
    tier.close()


def test_a_device_that_became_read_only(small_device: Path) -> None:
    directory = small_device / "store"
    files = FailingFiles()
    tier = DiskTier(directory, BUDGET, files=files)
    label = space("frozen")
    driver = TierDriver(tier, label)
    keys = chain("x", 4)
    driver.store(label, keys)
    # The kernel remounts a damaged device under open files; a mount call may not. What they see:
    files.fails = lambda call, count: errno.EROFS if call in ("write", "sync", "reserve") else 0
    tier._store.ledger.index._db.execute("PRAGMA query_only = ON")
    assert driver.store(label, chain("y", 2)) == (Outcome.FAILED,) * 2
    assert driver.load(label, keys) == [block_bytes(key) for key in keys]
    assert tier.delete(label.digest, keys[3:]) == 1
    assert driver.hits(label, keys) == [True, True, True, False]
    assert not tier.drain(0.5), "nothing can be made durable there"
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_device)], check=True)
    with pytest.raises(ConfigError, match="Read-only"):
        DiskTier(directory, BUDGET)
    subprocess.run(["mount", "-o", "remount,rw", str(small_device)], check=True)
    tier = DiskTier(directory, BUDGET)
    driver = TierDriver(tier, label)
    assert driver.load(label, keys[:3]) == [block_bytes(key) for key in keys[:3]]
    tier.check()
    tier.close()


@settings(max_examples=20)
@given(jumps=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=12))
def test_clocks_that_jump(bench: Path, jumps: list[float]) -> None:
    """Wall clock and monotonic clock alike; order of eviction and answers do not depend on them."""
    shutil.rmtree(bench / "clock", ignore_errors=True)
    now = [1e9]
    tier = DiskTier(bench / "clock", BUDGET, clock=lambda: now[0], wall=lambda: now[0])
    label = space("clock")
    driver = TierDriver(tier, label)
    for number, jump in enumerate(jumps):
        keys = chain(number, 3)
        assert driver.store(label, keys) == (Outcome.DONE,) * 3
        tier.lock(label.digest, keys, ttl_s=1.0)
        now[0] += jump
        tier.unlock(label.digest, keys)
        tier.touch(label.digest, keys)
        assert driver.load(label, keys, deadline_s=now[0] + 1e6) == [block_bytes(k) for k in keys]
        assert driver.load(label, keys, deadline_s=now[0] - 1.0) == [Outcome.LATE] * 3
        assert all(entry.age_s >= 0 for entry in tier.entries(label.digest))
        answers = driver.lookup(label, keys)
        assert all(answer.status is LookupStatus.HIT for answer in answers)
        tier.check()
    tier.close()
