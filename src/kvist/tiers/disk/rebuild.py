"""From the headers in the slab to an index, when there is none that can be used.

Owns who wins where headers contradict each other: after a loss of power a header may be there of a
record whose extents others had since. The later number wins; what lies in ruins is cleared.

Threads: one.
"""

from __future__ import annotations

from pathlib import Path

from kvist.errors import IntegrityError
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import MAX_ROWS_A_TRANSACTION, Index, Row, State, remove_index
from kvist.tiers.disk.layout import Header, num_extents
from kvist.tiers.disk.slab import Slab
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
