"""Every file that a loss of power may leave, counted out.

Between two syncs a device may write what it was given in any order, as often as it likes, and in
parts. What lies in a sector afterwards is therefore what was synced there, or any of the writes to
it since, independently of every other sector: reordering, losing and tearing writes are three names
for the same set of files. So the set is finite and can be counted out: cut the file at the ends of
all writes and at pages, and choose a version for each piece. (All orders of all subsets of the
writes, each torn anywhere at those cuts, reach the same files and no other, only many times over.)

Owns that arithmetic, and no idea of what the bytes mean. Threads: any; everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from kvist.testing.disk_files import Written

PAGE_BYTES = 4096


class Piece(NamedTuple):
    """A stretch of a file that reaches the device as one.

    `versions` are what may lie there, the synced one first; at least two, all of one length.
    """

    offset: int
    versions: tuple[bytes, ...]


def synced_image(blank_bytes: int, log: Sequence[Written], epoch: int) -> bytearray:
    """Return a file of zeros after all writes of the log that were synced before `epoch`."""
    image = bytearray(blank_bytes)
    for written in log:
        if written.epoch < epoch:
            image[written.offset : written.offset + len(written.data)] = written.data
    return image


def pieces_of(
    image: bytes | bytearray, log: Sequence[Written], epoch: int, *, tears: int | None = None
) -> list[Piece]:
    """Cut what was written in `epoch` and later into pieces.

    Parameters
    ----------
    image : bytes
        What was synced before; see `synced_image`.
    log : sequence of Written
        In the order of the calls.
    tears : int, optional
        Tear a write that is longer than so many pages only behind its first page and before its
        last, which keeps the number of files small; ``None`` tears it at every page.

    Returns
    -------
    list of Piece
        Those with one version only left out. Writes to one place that follow each other give it
        as many versions.
    """
    unsure = [written for written in log if written.epoch >= epoch]
    cuts: set[int] = set()
    for written in unsure:
        start, end = written.offset, written.offset + len(written.data)
        first, last = start - start % PAGE_BYTES + PAGE_BYTES, (end - 1) // PAGE_BYTES * PAGE_BYTES
        inside = range(first, end, PAGE_BYTES)
        cuts |= {start, end}
        cuts |= {first, last} if tears is not None and len(inside) >= tears else set(inside)
    found: list[Piece] = []
    ordered = sorted(cuts)
    for start, end in pairwise(ordered):
        versions = [bytes(image[start:end])]
        for written in unsure:
            at = start - written.offset
            if 0 <= at < len(written.data):
                versions.append(written.data[at : at + end - start])
        distinct = tuple(dict.fromkeys(versions))
        if len(distinct) > 1:
            found.append(Piece(start, distinct))
    return found


def count_files(pieces: Sequence[Piece]) -> int:
    """Return how many files `all_files` yields."""
    return prod(len(piece.versions) for piece in pieces)


def all_files(image: bytes | bytearray, pieces: Sequence[Piece]) -> Iterator[bytearray]:
    """Yield every file that a loss of power may leave, each a new one."""
    for chosen in product(*(piece.versions for piece in pieces)):
        yield with_versions(image, pieces, chosen)


def with_versions(
    image: bytes | bytearray, pieces: Sequence[Piece], chosen: Sequence[bytes]
) -> bytearray:
    """Return one such file: for each piece the version that was chosen."""
    file = bytearray(image)
    for piece, data in zip(pieces, chosen, strict=True):
        file[piece.offset : piece.offset + len(data)] = data
    return file
