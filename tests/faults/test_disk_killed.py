"""kill -9 with a write in flight, again and again, or at odd points; and two processes at once.

Guards: what was told to be stored is there and whole after any death; what was in flight is there
whole or not at all; its room comes back; processes that share a directory never read wrong bytes,
and together stay within one budget.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvist.keys import BlockKey
from kvist.testing.tier_driver import TierDriver, block_bytes, block_key, chain, space
from kvist.tiers.base import Outcome
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk import archive, care
from kvist.tiers.disk.index import INDEX_NAME
from kvist.tiers.disk.opening import open_store
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.tier import DiskTier

BUDGET = 16 << 20
MOST_BATCHES = 24
LABEL = space("killed")


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child that never returns into pytest; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - pytest's exit paths are not for the child
        print(f"child: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def store_for_ever(directory: Path, seed: int, told: int) -> None:
    """Store batches; write ``s N`` before and ``d N`` after each, N being how many blocks.

    So many at most as there is room for: on a busy machine the blow comes late, and who goes on
    until then evicts what is looked for afterwards.
    """
    driver = TierDriver(DiskTier(directory, BUDGET), LABEL)
    rng = random.Random(seed)
    number = 0
    for _ in range(MOST_BATCHES):
        keys = [block_key((seed, number + index)) for index in range(rng.randint(1, 4))]
        os.write(told, f"s {len(keys)}\n".encode())
        outcomes = driver.store(LABEL, keys)
        assert set(outcomes) == {Outcome.DONE}, outcomes
        os.write(told, f"d {len(keys)}\n".encode())
        number += len(keys)
    signal.pause()


def kill_loop(directory: Path, iterations: int) -> None:
    in_flight = survivors = seed = 0
    rng = random.Random(9)
    kept: list[BlockKey] = []
    while in_flight < iterations:
        seed += 1
        assert seed < 3 * iterations, f"{in_flight} of {seed} deaths were with a write in flight"
        listen, told = os.pipe()
        pid = in_child(lambda: store_for_ever(directory, seed, told))  # noqa: B023 - runs now
        os.close(told)
        lines = b""
        # Let it come to work, then strike at any moment of it.
        while lines.count(b"\n") < rng.randint(1, 12):
            chunk = os.read(listen, 4096)
            assert chunk, "the writer ended by itself"
            lines += chunk
        time.sleep(rng.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while chunk := os.read(listen, 4096):
            lines += chunk
        os.close(listen)
        told_lines = [line.split() for line in lines.decode().splitlines()]
        in_flight += told_lines[-1][0] == "s"
        done = sum(int(count) for what, count in told_lines if what == "d")
        begun = sum(int(count) for what, count in told_lines if what == "s")

        tier = DiskTier(directory, BUDGET)
        driver = TierDriver(tier, LABEL)
        keys = [block_key((seed, index)) for index in range(begun)]
        got = driver.load(LABEL, [*kept, *keys])
        right = [block_bytes(key) for key in [*kept, *keys]]
        sure = len(kept) + done
        assert got[:sure] == right[:sure], f"of {begun} begun some are gone or wrong"
        for found, wanted in zip(got[sure:], right[sure:], strict=True):
            assert found in (wanted, Outcome.MISS)
        survivors += done
        # Room for the next round; some blocks live through many deaths.
        gone = keys[2:] if len(kept) < 60 else [*kept, *keys]
        kept = [*kept, *keys[: min(2, done)]] if len(kept) < 60 else []
        tier.delete(LABEL.digest, [key for key in gone if key not in kept])
        assert tier.drain(20.0)
        tier.check()
        assert not tier._store.books.being_written(), "room of the dead was not reclaimed"
        tier.close()
    assert survivors > 0


def test_killed_while_writing(tmp_path: Path) -> None:
    kill_loop(tmp_path / "store", 20)


@pytest.mark.slow
def test_killed_while_writing_200_times(tmp_path: Path) -> None:
    kill_loop(tmp_path / "store", 200)


def at_work(directory: Path, copy: Path, what: str, rng: random.Random) -> None:
    """Do one thing to a store that is not the daily one."""
    if what in ("serve", "resize"):
        tier = DiskTier(directory, BUDGET if what == "serve" else rng.choice(SIZES))
        driver = TierDriver(tier, LABEL)
        driver.store(LABEL, rng.sample(KEYS, 8))
        tier.delete(LABEL.digest, rng.sample(KEYS, 3))
        tier.drain(1.0)
        tier.close()
    elif what == "repair":
        care.repair(directory, SegmentChecksum(), time.time())
    else:
        store = open_store(directory, None, rebuild=what == "rebuild").store
        if what == "gc":
            care.collect(store, directory, 0.01, time.time())
        elif what == "restore":
            archive.restore(store, copy)
        store.close()


SIZES = (9 << 20, 12 << 20, 18 << 20)
WORK = ("serve", "resize", "rebuild", "repair", "gc", "restore")
KEYS = [key for number in range(8) for key in chain(("odd", number), 4)]


def killed_at_odd_points(place: Path, deaths: int) -> None:
    directory, copy = place / "store", place / "copy"
    tier = DiskTier(directory, BUDGET)
    TierDriver(tier, LABEL).store(LABEL, KEYS[:16])
    tier.close()
    store = open_store(directory, None).store
    archive.backup(store, copy)
    store.close()
    rng = random.Random(4)
    died: Counter[str] = Counter()
    while died.total() < deaths or len(died) < len(WORK):
        what, seed = rng.choice(WORK), rng.random()
        pid = in_child(lambda: at_work(directory, copy, what, random.Random(seed)))  # noqa: B023
        time.sleep(rng.random() ** 2 * 0.05)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"{what} failed by itself"
        died[what] += code != 0

        budget = rng.choice(SIZES)
        tier = DiskTier(directory, budget)
        driver = TierDriver(tier, LABEL)
        for key, got in zip(KEYS, driver.load(LABEL, KEYS), strict=True):
            assert got in (block_bytes(key), Outcome.MISS)
        fresh = chain(("fresh", died.total(), seed), 2)
        assert driver.store(LABEL, fresh) == (Outcome.DONE,) * 2
        assert driver.load(LABEL, fresh) == [block_bytes(key) for key in fresh]
        tier.check()
        files = [directory, *directory.iterdir()]
        assert sum(file.stat().st_blocks * 512 for file in files) <= budget
        assert {file.name.split("-")[0] for file in files[1:]} == {SLAB_NAME, INDEX_NAME}
        tier.close()


def test_killed_while_opening_resizing_repairing(tmp_path: Path) -> None:
    killed_at_odd_points(tmp_path, 20)


@pytest.mark.slow
def test_killed_while_opening_resizing_repairing_200_times(tmp_path: Path) -> None:
    killed_at_odd_points(tmp_path, 200)


@pytest.mark.slow
def test_a_process_that_is_stopped_in_the_middle_of_a_transaction(tmp_path: Path) -> None:
    """It holds the index and cannot be told from one at work: reads go on, stores come back."""
    tier = DiskTier(tmp_path / "store", BUDGET)
    driver = TierDriver(tier, LABEL)
    keys = chain("x", 4)
    driver.store(LABEL, keys)
    listen, told = os.pipe()

    def stop_there() -> None:
        other = DiskTier(tmp_path / "store", BUDGET)
        other._store.ledger.index._db.execute("BEGIN IMMEDIATE")
        os.write(told, b"x")
        time.sleep(600)

    pid = in_child(stop_there)
    try:
        assert os.read(listen, 1)
        os.kill(pid, signal.SIGSTOP)
        assert driver.load(LABEL, keys) == [block_bytes(key) for key in keys]
        assert driver.store(LABEL, chain("y", 2)) == (Outcome.FAILED,) * 2
        assert driver.store(LABEL, chain("y", 2)) == (Outcome.REFUSED,) * 2
        assert driver.load(LABEL, keys) == [block_bytes(key) for key in keys]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    give_up = time.monotonic() + 20.0
    while driver.store(LABEL, chain("z", 2)) != (Outcome.DONE,) * 2:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    tier.check()
    tier.close()


def share(directory: Path, seed: int, seconds: float) -> None:
    """Store, load, delete and touch what the other does too, in a store too small for both."""
    tier = DiskTier(directory, 9 << 20)
    driver = TierDriver(tier, LABEL)
    rng = random.Random(seed)
    chains = [chain(("shared", index), 6) for index in range(12)]
    end = time.monotonic() + seconds
    hits = 0
    while time.monotonic() < end:
        keys = rng.choice(chains)[: rng.randint(1, 6)]
        kind = rng.random()
        if kind < 0.45:
            done = driver.wait(driver.begin_store(LABEL, {key: block_bytes(key) for key in keys}))
            assert set(done.outcomes) <= {Outcome.DONE, Outcome.REFUSED}, done.reason
        elif kind < 0.9:
            for key, got in zip(keys, driver.load(LABEL, keys), strict=True):
                assert got in (block_bytes(key), Outcome.MISS), got if got in Outcome else "wrong"
                hits += got is not Outcome.MISS
        elif kind < 0.95:
            tier.delete(LABEL.digest, keys)
        else:
            tier.touch(LABEL.digest, keys)
        tier.check()
    assert hits, "nothing was ever found"
    tier.close()


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    children = [in_child(lambda seed=seed: share(directory, seed, 3.0)) for seed in (1, 2)]
    most = 0
    ended: list[int] = []
    while len(ended) < len(children):
        if directory.exists():
            files = [directory, *directory.iterdir()]
            most = max(most, sum(f.stat().st_blocks * 512 for f in files if f.exists()))
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            ended.append(status)
        time.sleep(0.02)
    assert ended == [0, 0]
    assert 0 < most <= 9 << 20
    tier = DiskTier(directory, 9 << 20)
    assert tier.notes == ()
    driver = TierDriver(tier, LABEL)
    keys = [key for index in range(12) for key in chain(("shared", index), 6)]
    for key, got in zip(keys, driver.load(LABEL, keys), strict=True):
        assert got in (block_bytes(key), Outcome.MISS)
    tier.check()
    tier.close()


def test_what_one_process_stores_the_other_finds(tmp_path: Path) -> None:
    one, other = DiskTier(tmp_path, BUDGET), DiskTier(tmp_path, BUDGET)
    first, second = TierDriver(one, LABEL), TierDriver(other, LABEL)
    keys = chain("x", 4)
    first.store(LABEL, keys)
    give_up = time.monotonic() + 20.0
    while not all(second.hits(LABEL, keys)):
        assert time.monotonic() < give_up, "the other never found it"
    assert second.load(LABEL, keys) == [block_bytes(key) for key in keys]
    assert second.store(LABEL, keys[:1]) == (Outcome.REFUSED,)
    assert other.delete(LABEL.digest, keys[2:]) == 2
    while first.hits(LABEL, keys) != [True, True, False, False]:
        assert time.monotonic() < give_up, "the other's deletion was never seen"
    for tier in (one, other):
        tier.check()
        tier.close()
