"""Two stores on one directory against a dict: stored, found, evicted, deleted, killed, reopened.

Guards: no read ever brings other bytes than were stored; the books of both hold after every step;
what was published survives a reopening and a rebuilding of the index; `du` stays within the budget.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvist.codecs.registry import make_codec
from kvist.errors import ConfigError, DamageError
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, Namespace, Outcome
from kvist.tiers.disk.opening import open_store
from kvist.tiers.disk.store import DiskStore

SMALLEST, LARGER = 9 << 20, 12 << 20
NUM_KEYS = 40
# Where syncing costs nothing, if there is such a place.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LABELS = [
    Namespace(blake2b(b"small", digest_size=32).digest(), "m", "bf16", "", (9_000, 11_000)),
    Namespace(blake2b(b"large", digest_size=32).digest(), "m", "bf16", "t", (150_000,) * 3),
]


def key_of(number: int) -> BlockKey:
    return BlockKey(blake2b(str(number).encode(), digest_size=32).digest())


def bytes_of(label: Namespace, number: int) -> bytes:
    noise = Random(f"{label.digest!r}{number}").randbytes(label.block_bytes // 3)
    return (noise * 4)[: label.block_bytes]


class DiskMachine(RuleBasedStateMachine):
    """Stores A and B; a model of what may be found."""

    @initialize(codec=st.sampled_from(["raw", "zstd"]))
    def start(self, codec: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvist-disk-", dir=FAST))
        self.budget = SMALLEST
        self.codec = make_codec(codec)
        self.stores: list[DiskStore | None] = [None, None]
        self.reopen(0)

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            if store is not None:
                store.close()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    def open(self, *, rebuild: bool = False) -> DiskStore:
        return open_store(self.directory, self.budget, codec=self.codec, rebuild=rebuild).store

    def reopen(self, which: int) -> None:
        store = self.stores[which]
        if store is not None:
            store.close()
        self.stores[which] = self.open()

    def store(self, which: int) -> DiskStore:
        store = self.stores[which]
        if store is None:
            store = self.stores[which] = self.open()
        return store

    def read(self, store: DiskStore, label: Namespace, number: int) -> bytes | None:
        record = store.hold(label.digest, key_of(number))
        if record is None:
            return None
        out = bytearray(label.block_bytes)
        try:
            store.read(record, label, range(len(label.segment_bytes)), memoryview(out))
        except DamageError:
            # Only what another process evicted: nothing here breaks bytes.
            assert not store.is_current(record)
            store.discard(record)
            return None
        finally:
            store.let_go(record)
        return bytes(out)

    which = st.integers(0, 1)
    label = st.sampled_from(LABELS)
    numbers = st.lists(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=8, unique=True)

    @rule(which=which, label=label, numbers=numbers)
    def write(self, which: int, label: Namespace, numbers: list[int]) -> None:
        store = self.store(which)
        while store.ledger.sweep():
            pass
        puts = [
            store.coder.encode(
                label,
                key_of(number),
                memoryview(bytes_of(label, number)),
                BlockMeta(key_of(number - 1) if number % 4 else b"", number % 4),
            )
            for number in numbers
        ]
        answers = store.write(puts, {label.digest: label})
        for number, (outcome, why) in zip(numbers, answers, strict=True):
            if outcome is Outcome.DONE or why == "present":
                assert self.read(store, label, number) == bytes_of(label, number)
            else:
                assert why in ("no_room", "being_written")

    @rule(which=which, label=label, number=st.integers(0, NUM_KEYS - 1))
    def look(self, which: int, label: Namespace, number: int) -> None:
        assert self.read(self.store(which), label, number) in (None, bytes_of(label, number))

    @rule(which=which, label=label, number=st.integers(0, NUM_KEYS - 1))
    def delete(self, which: int, label: Namespace, number: int) -> None:
        store = self.store(which)
        record = store.hold(label.digest, key_of(number))
        if record is not None:
            store.let_go(record)
            assert store.discard(record)
            assert store.hold(label.digest, key_of(number)) is None

    @rule(which=which, label=label, numbers=numbers)
    def touch(self, which: int, label: Namespace, numbers: list[int]) -> None:
        store = self.store(which)
        found = [store.books.find(label.digest, key_of(number)) for number in numbers]
        store.books.touch([record for record in found if record is not None])
        store.ledger.note_uses()

    @rule(which=which)
    def keep_house(self, which: int) -> None:
        store = self.store(which)
        store.ledger.follow()
        rows = {row.slot: row.seq for row in store.ledger.index.rows() if row.state}
        assert rows == {slot: record.seq for slot, record in store.books.by_slot.items()}
        store.ledger.sweep()
        store.ledger.reclaim()

    @rule(which=which)
    def close_and_open(self, which: int) -> None:
        """What the index says is what is found, before and after."""
        store = self.store(which)
        while store.ledger.sweep():
            pass
        store.ledger.follow()
        before = {(d, k) for d, shelf in store.books.shelves.items() for k in shelf.blocks}
        self.reopen(which)
        after = self.store(which).books
        assert before == {(d, k) for d, shelf in after.shelves.items() for k in shelf.blocks}

    @rule(which=which, label=label, numbers=numbers, steps=st.integers(1, 3))
    def die_while_writing(
        self, which: int, label: Namespace, numbers: list[int], steps: int
    ) -> None:
        """As if killed after step 1, 2 or 3: nothing runs that would clean up."""
        store = self.store(which)
        puts = [
            store.coder.encode(label, key_of(n), memoryview(bytes_of(label, n)), BlockMeta())
            for n in numbers
        ]
        placed: list = []
        answers = [(Outcome.REFUSED, "")] * (len(puts) + 1)
        store._place(puts, {label.digest: label}, answers, placed)
        for _, put, record, _ in placed:
            if steps > 1:
                store.slab.write(record.runs, put.segments)
            if steps > 2:
                store.slab.write_header(record.slot, record.data)
        store.ledger.index.close()
        store.slab.close()
        self.stores[which] = None
        other = self.stores[1 - which]
        if other is not None:
            other.ledger.follow()
            while other.ledger.reclaim():
                pass
            assert not other.books.being_written()

    @rule()
    def rebuild(self) -> None:
        """Everything published is in the headers."""
        for which in (0, 1):
            store = self.stores[which]
            if store is not None:
                while store.ledger.sweep():
                    pass
                store.close()
                self.stores[which] = None
        store = self.open()
        while store.ledger.reclaim():
            pass
        before = {(d, k) for d, shelf in store.books.shelves.items() for k in shelf.blocks}
        store.close()
        self.stores[0] = self.open(rebuild=True)
        shelves = self.stores[0].books.shelves
        assert before <= {(d, k) for d, shelf in shelves.items() for k in shelf.blocks}

    @rule(budget=st.sampled_from([SMALLEST, LARGER]))
    def resize(self, budget: int) -> None:
        for which in (0, 1):
            store = self.stores[which]
            if store is not None:
                store.close()
                self.stores[which] = None
        self.budget = budget
        self.reopen(0)

    @precondition(lambda self: all(getattr(self, "stores", [None])))
    @rule()
    def another_size_is_refused_while_in_use(self) -> None:
        other = SMALLEST if self.budget == LARGER else LARGER
        with pytest.raises(ConfigError, match="in use"):
            open_store(self.directory, other)

    @invariant()
    def all_is_well(self) -> None:
        for store in getattr(self, "stores", []):
            if store is not None:
                store.check()
        if hasattr(self, "directory"):
            files = [self.directory, *self.directory.iterdir()]
            assert sum(file.stat().st_blocks * 512 for file in files) <= self.budget


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=20, stateful_step_count=25)
