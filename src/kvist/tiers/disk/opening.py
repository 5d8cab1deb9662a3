"""From a directory and a budget to an open store: made, resized, or its index built anew.

Owns the arithmetic of the budget and the order of opening. Everything here happens with the slab's
SETUP lock held, so that two processes that start together do it one after the other.

    budget = superblocks + zones · (headers + 64 extents) + the most the index may take

Threads: one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.errors import ConfigError, DamageError
from kvist.policies.keeper import Keeper
from kvist.policies.registry import DEFAULT_POLICY, policy_factory
from kvist.sizes import format_size
from kvist.tiers.base import Namespace
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.books import Books
from kvist.tiers.disk.coding import parse_label
from kvist.tiers.disk.files import Files, make_private, require_local
from kvist.tiers.disk.index import (
    INDEX_NAME,
    StaleIndexError,
    index_bytes,
    remove_index,
)
from kvist.tiers.disk.layout import Kind, kind_of, num_extents, slab_bytes
from kvist.tiers.disk.ledger import Ledger
from kvist.tiers.disk.rebuild import open_index, rebuild_index
from kvist.tiers.disk.record import Record
from kvist.tiers.disk.slab import Slab, open_slab
from kvist.tiers.disk.store import DiskStore

_DIRECTORY_BYTES = 64 << 10


def budget_for(num_zones: int) -> int:
    """Return the most that a store of so many zones takes on the device."""
    return slab_bytes(num_zones) + index_bytes(num_extents(num_zones)) + _DIRECTORY_BYTES


def zones_for(budget_bytes: int) -> int:
    """Return how many zones fit into a budget together with the index of them, 0 if none does."""
    low, high = 0, max(0, budget_bytes) // slab_bytes(1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if budget_for(middle) <= budget_bytes else (low, middle)
    return low if low and budget_for(low) <= budget_bytes else 0


def plain_keeper(capacity: int) -> Keeper:
    """Return a keeper with the default order, and nothing else."""
    return Keeper(capacity, policy_factory(DEFAULT_POLICY))


@dataclass(slots=True)
class Opened:
    """A store and what happened when it was opened.

    Attributes
    ----------
    notes : list of str
        For people, at start-up: rebuilt, resized, an unusual file system.
    """

    store: DiskStore
    notes: list[str] = field(default_factory=list)


def open_store(
    directory: Path,
    budget_bytes: int | None,
    *,
    codec: Codec | None = None,
    keeper: Callable[[int], Keeper] = plain_keeper,
    checksum: SegmentChecksum | None = None,
    files: Files | None = None,
    wall: Callable[[], float] = time.time,
    rebuild: bool = False,
) -> Opened:
    """Open the store in `directory`, or make one.

    Parameters
    ----------
    budget_bytes : int or None
        What slab, index and log may take on the device together. ``None`` takes the store as it is
        and makes none.
    keeper : callable
        From a capacity in bytes to an empty keeper.
    rebuild : bool
        Build the index anew even if it looks well.

    Raises
    ------
    ConfigError
        If the directory cannot be used, and why.
    """
    files = files or Files()
    checksum = checksum or SegmentChecksum()
    num_zones = None
    if budget_bytes is not None:
        num_zones = zones_for(budget_bytes)
        if not num_zones:
            raise ConfigError(
                f"disk tier of {format_size(budget_bytes)} at {directory}: the least is"
                f" {format_size(budget_for(1))}, for one zone of the slab and the index"
            )
        make_private(directory)
    notes: list[str] = []
    if directory.is_dir():
        kind = require_local(files, directory)
        if kind.startswith("fuse"):
            notes.append(f"{directory} is on {kind}: make sure that only this machine uses it")
    slab, created = open_slab(files, directory, num_zones, checksum, wall())
    try:
        if created:
            remove_index(directory)
        elif num_zones is not None and num_zones != slab.superblock.num_zones:
            rebuild |= _resize(slab, num_zones, notes)
        store = _with_index(
            files, directory, slab, codec or RawCodec(), keeper, wall, notes, rebuild=rebuild
        )
        slab.end_setup()
    except (OSError, sqlite3.Error) as error:
        slab.close()
        raise ConfigError(f"cannot use {directory}: {error}") from error
    except BaseException:
        slab.close()
        raise
    return Opened(store, notes)


def _resize(slab: Slab, num_zones: int, notes: list[str]) -> bool:
    """Give a slab another size; say whether records may have been cut off."""
    old = slab.superblock.num_zones
    if not slab.be_alone():
        raise ConfigError(
            f"{slab.path} is in use with {format_size(slab_bytes(old))} and was now asked to have"
            f" {format_size(slab_bytes(num_zones))}; give all processes the same size, or stop them"
        )
    slab.resize(num_zones)
    slab.be_present()
    notes.append(
        f"{slab.path} went from {format_size(slab_bytes(old))} to"
        f" {format_size(slab_bytes(num_zones))}"
    )
    return num_zones < old


def _with_index(
    files: Files,
    directory: Path,
    slab: Slab,
    codec: Codec,
    keeper: Callable[[int], Keeper],
    wall: Callable[[], float],
    notes: list[str],
    *,
    rebuild: bool,
) -> DiskStore:
    extents = num_extents(slab.superblock.num_zones)

    def attempt() -> DiskStore:
        index = open_index(files, directory, slab)
        try:
            if not index.is_sound():
                raise StaleIndexError("its pages are damaged")
            books = Books(extents, keeper, slab.checksum)
            ledger = Ledger(files, directory, slab, index, books)
            store = DiskStore(slab, ledger, codec, wall)
            rows = index.rows()
            # Whose the blocks are has to be known before they are counted.
            untrue = books.apply(row for row in rows if kind_of(row.header) is Kind.NAMESPACE)
            _read_labels(store)
            untrue += books.apply(rows)
            if untrue:
                raise StaleIndexError(f"{len(untrue)} of its {len(rows)} rows are damaged")
            books.doom_bare_labels()
        except Exception as error:
            index.close()
            if isinstance(error, StaleIndexError):
                raise
            # sqlite3.Error, or whatever else rows of garbage lead to.
            raise StaleIndexError(str(error)) from error
        return store

    if not rebuild and (directory / INDEX_NAME).exists():
        try:
            return attempt()
        except StaleIndexError as error:
            notes.append(f"the index in {directory} is built anew: {error}")
    if not slab.be_alone():
        raise ConfigError(
            f"the index in {directory} has to be built anew while another process uses the store;"
            " stop that one, then start again"
        )
    kept = rebuild_index(files, directory, slab)
    if kept:
        notes.append(f"{kept} records were found by their headers")
    slab.be_present()
    try:
        return attempt()
    except StaleIndexError as error:
        raise ConfigError(f"the index in {directory} cannot be built: {error}") from error


def _read_labels(store: DiskStore) -> None:
    """Read the descriptors of the namespaces; one that is damaged is written again when due."""
    for shelf in store.books.shelves.values():
        if shelf.descriptor is None:
            continue
        label = read_label(store, shelf.descriptor)
        if label is None:
            store.books.doom(shelf.descriptor)
        else:
            shelf.label = label


def read_label(store: DiskStore, record: Record) -> Namespace | None:
    """Return what a descriptor says, ``None`` if it is damaged."""
    try:
        return parse_label(record.namespace, bytes(store.read_stored(record)))
    except (DamageError, OSError):
        return None
