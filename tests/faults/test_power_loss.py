"""Power is lost: every file that may be left, and not some of them.

`test_disk_faults` breaks a store by chance; here short histories are counted out. For each, every
mixture of what was written since the last sync (`kvist.testing.power_loss` says why that is every
order and every tear) is opened as after a start of the machine. Guards: no read brings other bytes
than were put; what was synced and not let go since is there; the books hold, and it goes on.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from hashlib import blake2b
from itertools import permutations, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import DamageError
from kvist.keys import BlockKey
from kvist.testing.disk_files import LoggedFiles, Written
from kvist.testing.power_loss import (
    PAGE_BYTES,
    Piece,
    all_files,
    count_files,
    pieces_of,
    synced_image,
    with_versions,
)
from kvist.tiers.base import BlockMeta, Namespace, Outcome
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import INDEX_NAME
from kvist.tiers.disk.layout import slab_bytes
from kvist.tiers.disk.opening import open_store
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.store import DiskStore
from kvist.tiers.extents import EXTENT_BYTES

BUDGET = 9 << 20
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Two pages of one extent; and so much that three fill the store, in two pieces or more.
SMALL = Namespace(blake2b(b"small", digest_size=32).digest(), "m", "bf16", "", (3_000, 5_000))
LARGE = Namespace(
    blake2b(b"large", digest_size=32).digest(), "m", "bf16", "", (10 * EXTENT_BYTES,) * 2
)


class AfterBoot(Files):
    """The machine was started again: nothing that was not synced need be there."""

    def boot_id(self) -> str:
        return "the boot after"


def key_of(name: str) -> BlockKey:
    return BlockKey(blake2b(name.encode(), digest_size=32).digest())


@cache
def bytes_of(label: Namespace, name: str) -> bytes:
    return Random(name).randbytes(label.block_bytes)


def put(store: DiskStore, label: Namespace, names: str) -> None:
    """As the tier's writer does: what was found damaged leaves first."""
    while store.ledger.sweep():
        pass
    puts = [
        store.coder.encode(label, key_of(n), memoryview(bytes_of(label, n)), BlockMeta(b"", number))
        for number, n in enumerate(names)
    ]
    answers = store.write(puts, {label.digest: label})
    assert all(o is Outcome.DONE or why == "present" for o, why in answers), answers


def drop(store: DiskStore, label: Namespace, name: str) -> None:
    record = store.hold(label.digest, key_of(name))
    if record is not None:
        store.let_go(record)
        store.discard(record)
        store.ledger.sweep()


def findable(store: DiskStore, label: Namespace) -> set[BlockKey]:
    shelf = store.books.shelves.get(label.digest)
    return set(shelf.blocks) if shelf else set()


def found(store: DiskStore, label: Namespace, names: str) -> set[BlockKey]:
    """Read all; whatever comes is what was put."""
    there: set[BlockKey] = set()
    for name in names:
        record = store.hold(label.digest, key_of(name))
        if record is None:
            continue
        out = bytearray(label.block_bytes)
        try:
            store.read(record, label, range(len(label.segment_bytes)), memoryview(out))
        except DamageError:
            store.discard(record)
        else:
            assert out == bytes_of(label, name), f"block {name} came back wrong"
            there.add(key_of(name))
        finally:
            store.let_go(record)
    return there


class Tried:
    """A history, run once; and what may be left of it, opened.

    `history` is words: ``+ab`` puts blocks a and b in one batch, ``-a`` drops a, ``|`` syncs.
    """

    def __init__(self, place: Path, label: Namespace, history: Sequence[str]) -> None:
        self.place, self.label = place, label
        self.names = "".join(sorted({n for word in history for n in word if n.isalpha()}))
        files = LoggedFiles()
        store = self.opened(files)
        self.durable: set[BlockKey] = set()
        for word in history:
            if word == "|":
                store.make_durable()
                self.durable = findable(store, label)
            elif word[0] == "+":
                put(store, label, word[1:])
            else:
                drop(store, label, word[1:])
            # What was let go, or pushed out, since it was synced may be gone.
            self.durable &= findable(store, label)
        # What closing syncs is not a part of it.
        self.log: list[Written] = list(files.log)
        self.epoch = files.epoch
        store.close()
        self.image = synced_image(slab_bytes(1), self.log, self.epoch)

    def opened(self, files: Files) -> DiskStore:
        shutil.rmtree(self.place, ignore_errors=True)
        return open_store(self.place, BUDGET, files=files).store

    def pieces(self, tears: int | None = None) -> list[Piece]:
        return pieces_of(self.image, self.log, self.epoch, tears=tears)

    def num_unsynced(self) -> int:
        return sum(written.epoch >= self.epoch for written in self.log)

    def opens_right(self, file: bytes | bytearray) -> int:
        """Open one file that may be left; return how many of the blocks are there."""
        (self.place / INDEX_NAME).unlink(missing_ok=True)
        (self.place / SLAB_NAME).write_bytes(file)
        with closing(open_store(self.place, BUDGET, files=AfterBoot()).store) as store:
            there = found(store, self.label, self.names)
            assert self.durable <= there, "what was synced is gone"
            store.check()
            # And it goes on, over what lies in ruins.
            put(store, self.label, "xy")
            assert found(store, self.label, "xy") == {key_of("x"), key_of("y")}
            assert there <= found(store, self.label, self.names) or self.label is LARGE
            store.check()
        return len(there)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvist-power-", dir=FAST))
    yield directory / "store"
    shutil.rmtree(directory)


def histories(length: int) -> Iterator[tuple[str, ...]]:
    """Yield all histories up to that length that do something, after one in which a was synced.

    Blocks come in alphabetical order, which is all that their names mean.
    """
    for count in range(1, length + 1):
        for words in product(("+a", "+b", "+bc", "+c", "-a", "-b", "|"), repeat=count):
            there = {"a"}
            says = words[0] != "|" and words[-1] != "|"
            seen = "a"
            for before, word in zip(("", *words), words, strict=False):
                if word == "|":
                    says &= before != "|"
                elif word[0] == "+":
                    says &= not there & set(word[1:])
                    there |= set(word[1:])
                    seen += "".join(n for n in word[1:] if n not in seen)
                else:
                    says &= word[1:] in there
                    there -= set(word[1:])
            if says and seen == "".join(sorted(seen)):
                yield words


def count_out(place: Path, length: int, most_writes: int) -> tuple[int, int, int]:
    """Try all histories; return how many, the files opened, and those that had some block lost."""
    num_histories = num_files = num_lossy = 0
    for words in histories(length):
        # The namespace is known and synced, so that every write counted is a block's.
        tried = Tried(place, SMALL, ("+a", "|", *words))
        if tried.num_unsynced() > most_writes:
            continue
        num_histories += 1
        pieces = tried.pieces()
        counts = [tried.opens_right(file) for file in all_files(tried.image, pieces)]
        assert len(counts) == count_files(pieces)
        num_files += len(counts)
        num_lossy += sum(count < max(counts) for count in counts)
    return num_histories, num_files, num_lossy


def test_every_file_that_may_be_left_of_short_histories(place: Path) -> None:
    num_histories, num_files, num_lossy = count_out(place, 3, 6)
    print(f"{num_histories} histories, {num_files} files, {num_lossy} with a block lost")
    assert num_histories >= 40
    assert num_files >= 1_000
    assert num_lossy > num_files / 2


@pytest.mark.slow
def test_every_file_that_may_be_left_of_longer_histories(place: Path) -> None:
    num_histories, num_files, _ = count_out(place, 5, 6)
    print(f"{num_histories} histories, {num_files} files")
    assert num_histories >= 200


def test_a_first_batch_with_the_label_of_its_namespace(place: Path) -> None:
    """Six writes: a descriptor and two blocks, each data and header, nothing synced."""
    tried = Tried(place, SMALL, ("+ab",))
    assert tried.num_unsynced() == 6
    counts = [tried.opens_right(file) for file in all_files(tried.image, tried.pieces())]
    assert len(counts) == 2**8
    assert set(counts) == {0, 1, 2}


def test_blocks_in_pieces_over_evicted_ones(place: Path) -> None:
    """Synced blocks leave, and others are written over them: old headers over new bytes."""
    tried = Tried(place, LARGE, ("+abc", "|", "-b", "+d", "+e"))
    pieces = tried.pieces(tears=2)
    assert any(len(piece.versions) > 2 for piece in pieces) or len(pieces) >= 8
    counts = [tried.opens_right(file) for file in all_files(tried.image, pieces)]
    print(f"{len(counts)} files, blocks found {sorted(set(counts))}")
    assert len(counts) >= 500
    assert len(set(counts)) > 1


def test_a_store_that_was_closed_loses_nothing(place: Path) -> None:
    """Whatever unsynced writes it ended with: closing syncs."""
    files = LoggedFiles()
    shutil.rmtree(place, ignore_errors=True)
    store = open_store(place, BUDGET, files=files).store
    put(store, SMALL, "ab")
    drop(store, SMALL, "a")
    put(store, SMALL, "c")
    store.close()
    image = synced_image(slab_bytes(1), files.log, files.epoch)
    assert not pieces_of(image, files.log, files.epoch)
    assert bytes(image) == (place / SLAB_NAME).read_bytes()
    with closing(open_store(place, BUDGET, files=AfterBoot()).store) as store:
        assert found(store, SMALL, "abc") == {key_of("b"), key_of("c")}


def test_a_store_being_made(place: Path) -> None:
    """Of the first start of all, at each of its syncs: it is made again, and nobody is asked."""
    files = LoggedFiles()
    shutil.rmtree(place, ignore_errors=True)
    open_store(place, BUDGET, files=files).store.close()
    num_files = 0
    for epoch in range(files.epoch + 1):
        log = [written for written in files.log if written.epoch <= epoch]
        image = synced_image(slab_bytes(1), log, epoch)
        sectors = [
            Written(written.offset + at, written.data[at : at + 512], written.epoch)
            for written in log
            for at in range(0, len(written.data), 512)
        ]
        for file in all_files(image, pieces_of(image, sectors, epoch)):
            # Also a length that did not arrive.
            for length in (len(file), 8192, 4096) if epoch == 0 else (len(file),):
                (place / INDEX_NAME).unlink(missing_ok=True)
                (place / SLAB_NAME).write_bytes(file[:length])
                with closing(open_store(place, BUDGET, files=AfterBoot()).store) as store:
                    put(store, SMALL, "ab")
                    assert len(found(store, SMALL, "ab")) == 2
                num_files += 1
    assert num_files >= 10


words = st.lists(
    st.one_of(
        st.text("abcdefgh", min_size=1, max_size=4).map(lambda names: "+" + names),
        st.sampled_from("abcdefgh").map(lambda name: "-" + name),
        st.just("|"),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=50)
@given(data=st.data(), label=st.sampled_from([SMALL, LARGE]))
def test_longer_histories_and_power_lost_again_and_again(
    place: Path, data: st.DataObject, label: Namespace
) -> None:
    """Beyond what can be counted out: any history, any file, and from there on once more."""
    shutil.rmtree(place, ignore_errors=True)
    image = bytearray(0)
    promised: set[BlockKey] = set()
    for boot in range(data.draw(st.integers(1, 3))):
        files = LoggedFiles()
        store = open_store(place, BUDGET, files=_boot(files, boot)).store
        assert promised <= found(store, label, "abcdefgh")
        durable = set(promised)
        for word in data.draw(words):
            if word == "|":
                store.make_durable()
                durable = findable(store, label)
            elif word[0] == "+":
                names = "".join(dict.fromkeys(word[1:]))
                for name in names if label is LARGE else (names,):
                    put(store, label, name)
            else:
                drop(store, label, word[1:])
            durable &= findable(store, label)
        found(store, label, "abcdefgh")
        log, epoch = list(files.log), files.epoch
        store.close()
        length = slab_bytes(1)
        synced = synced_image(length, log, epoch) if not image else bytearray(image)
        if image:
            for written in log:
                if written.epoch < epoch:
                    synced[written.offset : written.offset + len(written.data)] = written.data
        pieces = pieces_of(synced, log, epoch)
        rng = Random(data.draw(st.integers(0, 2**32)))
        image = with_versions(synced, pieces, [rng.choice(piece.versions) for piece in pieces])
        promised = durable
        (place / SLAB_NAME).write_bytes(image)
    with closing(open_store(place, BUDGET, files=AfterBoot()).store) as store:
        assert promised <= found(store, label, "abcdefgh")
        store.check()
        put(store, label, "x")
        assert found(store, label, "x") == {key_of("x")}


def _boot(files: LoggedFiles, number: int) -> LoggedFiles:
    files.boot_id = lambda: f"boot {number}"  # type: ignore[method-assign]
    return files


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_left_of_the_index_it_is_built_anew(place: Path, data: st.DataObject) -> None:
    """Pages of database and log of any age side by side, with the slab that goes with the last."""
    shutil.rmtree(place, ignore_errors=True)
    versions: dict[str, list[bytes]] = {INDEX_NAME: [b""], INDEX_NAME + "-wal": [b""]}
    store = open_store(place, BUDGET).store
    for word in data.draw(words):
        if word == "|":
            store.make_durable()
            store.ledger.index.checkpoint()
        elif word[0] == "+":
            put(store, SMALL, "".join(dict.fromkeys(word[1:])))
        else:
            drop(store, SMALL, word[1:])
        for name, ages in versions.items():
            path = place / name
            ages.append(path.read_bytes() if path.exists() else b"")
    there = findable(store, SMALL)
    slab = (place / SLAB_NAME).read_bytes()
    store.close()
    rng = Random(data.draw(st.integers(0, 2**32)))
    shutil.rmtree(place)
    place.mkdir(mode=0o700)
    (place / SLAB_NAME).write_bytes(slab)
    for name, ages in versions.items():
        length = len(rng.choice(ages))
        pages = []
        for start in range(0, length, PAGE_BYTES):
            page = rng.choice(ages)[start : start + PAGE_BYTES]
            pages.append(page.ljust(PAGE_BYTES, b"\0"))
        (place / name).write_bytes(b"".join(pages)[:length])
    with closing(open_store(place, BUDGET, files=AfterBoot()).store) as store:
        assert found(store, SMALL, "abcdefgh") == there
        assert store.ledger.index.is_sound()
        store.check()
    with closing(sqlite3.connect(place / INDEX_NAME)) as database:
        facts = dict(database.execute("SELECT name, value FROM facts"))
    assert facts["boot"] == AfterBoot().boot_id()


def test_orders_of_writes_add_no_file() -> None:
    """What the counting stands on: all orders of all subsets, torn at every cut, are its files."""
    page = PAGE_BYTES
    log = [
        Written(0, b"a" * page * 2, 1),
        Written(page, b"b" * page * 2, 1),
        Written(page, b"c" * page, 1),
    ]
    image = bytes(4 * page)
    counted = {bytes(file) for file in all_files(image, pieces_of(image, log, 1))}
    torn = [
        Written(written.offset + at, written.data[at : at + page], 1)
        for written in log
        for at in range(0, len(written.data), page)
    ]
    reached: set[bytes] = set()
    for order in permutations(torn):
        for size in range(len(order) + 1):
            file = bytearray(image)
            for written in order[:size]:
                file[written.offset : written.offset + page] = written.data
            reached.add(bytes(file))
    assert counted == reached
    assert len(counted) == 2 * 4 * 2
