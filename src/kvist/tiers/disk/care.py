"""Looking after a store: what is in it, is it whole, mend it, sweep it. For people and cron.

Owns what `kvist inspect` computes. Everything but `repair` works beside processes that serve from
the same directory: to them it is one more process. Needs no model and no torch.

Threads: one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvist.errors import ConfigError, DamageError
from kvist.tiers.base import Namespace
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import State, index_file_bytes
from kvist.tiers.disk.layout import Header, Kind, slab_bytes
from kvist.tiers.disk.opening import budget_for, open_store
from kvist.tiers.disk.rebuild import mend_superblock
from kvist.tiers.disk.record import Record
from kvist.tiers.disk.store import DiskStore
from kvist.tiers.extents import EXTENT_BYTES


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """One namespace in a store. `model` is ``""`` where no descriptor is left."""

    digest: str
    model: str
    format: str
    tenant: str
    num_blocks: int
    stored_bytes: int
    room_bytes: int
    hits: int
    oldest_s: float
    newest_s: float


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store as it is now. Bytes of `room` are extents; `index_bytes` is on the device, with log.

    `checksums` is their scheme; `age_s` counts from when the store was made.
    """

    directory: str
    budget_bytes: int
    slab_bytes: int
    index_bytes: int
    room_bytes: int
    used_room_bytes: int
    num_blocks: int
    checksums: str
    age_s: float
    namespaces: tuple[NamespaceFacts, ...]


@dataclass(slots=True)
class Verdict:
    """What reading everything came to.

    Attributes
    ----------
    num_records, num_bytes : int
        Read, and found whole.
    damaged : list of str
        Keys of blocks that are not what was stored.
    lost_headers : int
        Records that are whole and would not be found again if the index were lost.
    index_is_sound : bool
    """

    num_records: int = 0
    num_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    lost_headers: int = 0
    index_is_sound: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing is amiss."""
        return not self.damaged and not self.lost_headers and self.index_is_sound


def inspect(store: DiskStore, directory: Path, now_s: float) -> StoreFacts:
    """Say what is in a store. O(records), from memory. `now_s` is the wall clock."""
    facts = store.slab.superblock
    with store.lock:
        books = store.books
        namespaces = tuple(
            _namespace(digest, shelf.label, list(shelf.blocks.values()), now_s)
            for digest, shelf in books.shelves.items()
            if shelf.blocks
        )
        return StoreFacts(
            str(directory),
            budget_for(facts.num_zones),
            slab_bytes(facts.num_zones),
            index_file_bytes(Files(), directory),
            books.arena.num_extents * EXTENT_BYTES,
            books.arena.num_used * EXTENT_BYTES,
            books.num_blocks,
            facts.scheme,
            max(0.0, now_s - facts.created_s),
            tuple(sorted(namespaces, key=lambda one: -one.room_bytes)),
        )


def _namespace(
    digest: bytes, label: Namespace | None, blocks: list[Record], now_s: float
) -> NamespaceFacts:
    made = [block.created_s for block in blocks]
    return NamespaceFacts(
        digest.hex(),
        label.model if label else "",
        label.format if label else "",
        label.tenant if label else "",
        len(blocks),
        sum(block.stored_bytes for block in blocks),
        sum(block.room_bytes for block in blocks),
        sum(block.hits for block in blocks),
        max(0.0, now_s - min(made)),
        max(0.0, now_s - max(made)),
    )


def stored_records(store: DiskStore) -> Iterator[tuple[Record, memoryview | None]]:
    """Iterate over the records that are published now, with their bytes, verified.

    Descriptors first, then blocks as they came, so that parents come before their children.
    ``None`` instead of the bytes where they are not what was stored; if another process evicted
    the record meanwhile, its state is no longer LIVE.
    """
    with store.lock:
        records = [r for r in store.books.by_slot.values() if r.state is State.LIVE]
    records.sort(key=lambda record: (record.kind is not Kind.NAMESPACE, record.seq))
    for record in records:
        try:
            data = store.read_stored(record)
        except DamageError:
            data = None
        if data is None or not store.is_current(record):
            store.ledger.follow()
        if record.state is State.LIVE:
            yield record, data


def verify(store: DiskStore) -> Verdict:
    """Read and check every record. Reads the whole of what is stored.

    Raises
    ------
    OSError
        If the device cannot be read.
    """
    verdict = Verdict(index_is_sound=store.ledger.index.is_sound())
    for record, data in stored_records(store):
        if data is None:
            verdict.damaged.append(record.key.hex())
        else:
            verdict.num_records += 1
            verdict.num_bytes += len(data)
            verdict.lost_headers += not store.is_current(record)
    return verdict


def repair(
    directory: Path, checksum: SegmentChecksum, now_s: float, files: Files | None = None
) -> Verdict:
    """Save what can be saved: superblock, then index from the headers, then drop what is damaged.

    Parameters
    ----------
    now_s : float
        Wall clock.

    Returns
    -------
    Verdict
        `damaged` was dropped.

    Raises
    ------
    ConfigError
        If it is no store, or another process uses it.
    """
    files = files or Files()
    mend_superblock(files, directory, checksum, now_s)
    opened = open_store(directory, None, checksum=checksum, files=files, rebuild=True)
    store = opened.store
    try:
        verdict = verify(store)
        for record, data in stored_records(store):
            if data is None:
                store.discard(record)
        while store.ledger.sweep():
            pass
        store.make_durable()
        store.check()
    except OSError as error:
        raise ConfigError(f"{directory} cannot be repaired: {error.strerror}") from error
    finally:
        store.close()
    return verdict


@dataclass(frozen=True, slots=True)
class Swept:
    """What `collect` took away.

    `old` blocks that were stored too long ago, `reclaimed` records of writers that are gone,
    `labels` of namespaces without blocks, index bytes before and after.
    """

    old: int
    reclaimed: int
    labels: int
    index_bytes_before: int
    index_bytes_after: int


def collect(
    store: DiskStore, directory: Path, max_age_s: float | None = None, now_s: float = 0.0
) -> Swept:
    """Free what nobody needs: slots of dead writers, labels without blocks, rows of free slots.

    The index shrinks only while no other process uses the store.

    Parameters
    ----------
    max_age_s : float, optional
        Blocks that were stored longer ago go too, with all that continue them.
    now_s : float
        Wall clock.
    """
    before = index_file_bytes(Files(), directory)
    ledger = store.ledger
    ledger.follow()
    reclaimed = 0
    while count := ledger.reclaim():
        reclaimed += count
    old = 0 if max_age_s is None else _drop_old(store, now_s - max_age_s)
    with store.lock:
        store.books.doom_bare_labels()
        labels = len(store.books.doomed)
    while ledger.sweep():
        pass
    if store.slab.be_alone():
        ledger.index.compact()
        store.slab.be_present()
    ledger.index.checkpoint()
    return Swept(old, reclaimed, labels, before, index_file_bytes(Files(), directory))


def _drop_old(store: DiskStore, before_s: float) -> int:
    """Drop blocks stored before that, and those that nobody would find without them."""
    dropped: set[bytes] = set()
    with store.lock:
        live = [r for r in store.books.by_slot.values() if r.state is State.LIVE]
        blocks = [
            (header.depth, record, record.namespace + header.parent)
            for record in live
            if record.kind is not Kind.NAMESPACE
            for header in (Header.unpack(record.data, store.slab.checksum),)
        ]
        for _, record, parent in sorted(blocks, key=lambda block: block[0]):
            if record.created_s < before_s or parent in dropped:
                dropped.add(record.ident)
                store.books.doom(record)
    return len(dropped)
