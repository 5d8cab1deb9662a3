"""From the headers in the slab to an index, when there is none that can be used.

Owns who wins where headers contradict each other: after a loss of power a header may be there of a
record whose extents others had since. The later number wins; what lies in ruins is cleared.

Threads: one.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvist.errors import ConfigError, IntegrityError
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import MAX_ROWS_A_TRANSACTION, Index, Row, State, remove_index
from kvist.tiers.disk.layout import DATA_START, ZONE_BYTES, Header, Superblock, num_extents
from kvist.tiers.disk.slab import SLAB_NAME, Slab, read_superblock, write_superblock
from kvist.tiers.extents import ExtentArena


def open_index(files: Files, directory: Path, slab: Slab) -> Index:
    """Open the index that belongs to a slab; see `Index` for what it raises."""
    facts = slab.superblock
    extents = num_extents(facts.num_zones)
    return Index(files, directory, extents, facts.slab_id, files.boot_id())


def rebuild_index(files: Files, directory: Path, slab: Slab) -> int:
    """Make an index from the headers; return how many records they tell of. REQUIRES: alone.

    Slots whose header is damaged, or contradicts a later one, become empty. May raise `OSError` and
    `sqlite3.Error`.
    """
    found: list[Header] = []
    for slot, header in slab.headers():
        if header is None:
            slab.clear_header(slot)
        else:
            found.append(header)
    found.sort(key=lambda header: -header.seq)
    arena = ExtentArena(num_extents(slab.superblock.num_zones))
    names: set[bytes] = set()
    kept: list[Header] = []
    for header in found:
        name = header.namespace + header.key
        # The later record has the extents; what claims them too lies in ruins under it.
        if name in names or not _claimed(arena, header):
            slab.clear_header(header.slot)
        else:
            names.add(name)
            kept.append(header)
    kept.reverse()
    remove_index(directory)
    index = open_index(files, directory, slab)
    try:
        for start in range(0, len(kept), MAX_ROWS_A_TRANSACTION):
            with index.transaction():
                index.put(
                    Row(h.slot, h.seq, State.LIVE, h.pack(slab.checksum), 0, start + offset + 1)
                    for offset, h in enumerate(kept[start : start + MAX_ROWS_A_TRANSACTION])
                )
    finally:
        index.close()
    return len(kept)


def _claimed(arena: ExtentArena, header: Header) -> bool:
    for done, run in enumerate(header.runs):
        try:
            arena.claim([run])
        except IntegrityError:
            arena.release(header.runs[:done])
            return False
    return True


def mend_superblock(files: Files, directory: Path, checksum: SegmentChecksum, now_s: float) -> bool:
    """Write a new superblock where both copies are damaged; say whether that was so.

    Size and headers say what it must have said: the headers prove that the slab is one, and that
    the tier key is the right one.

    Raises
    ------
    ConfigError
        If there is no slab, no header can be read, or another process uses it.
    """
    path = directory / SLAB_NAME
    try:
        fd = files.open(path, create=False)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    try:
        try:
            read_superblock(files, fd, path)
            return False
        except ConfigError as error:
            num_zones = (files.size(fd) - DATA_START) // ZONE_BYTES
            superblock = Superblock(
                num_zones, os.urandom(16), checksum.scheme, checksum.key_id, now_s
            )
            slab = Slab(files, fd, path, superblock, checksum)
            if not slab.be_alone() or not any(header for _, header in slab.headers()):
                raise error
        write_superblock(files, fd, superblock)
        return True
    except OSError as error:
        raise ConfigError(f"cannot mend {path}: {error.strerror}") from error
    finally:
        files.close(fd)
