"""How the slab file is laid out: positions, the superblock, and the header of a record.

Owns every byte of the format but the records' content, in pure functions; does no I/O. The format
is described for people in ``docs/formats.md``.

::

    ┌────────────┬──────────────────────── zone 0 ────────────────────────┬── zone 1 ── …
    │ superblock │ 64 header slots of 512 B │ extent 0 │ … │ extent 63    │
    │ (two)      │ = one extent             │ 32 KiB each                 │
    └────────────┴────────────────────────────────────────────────────────┴─────────────

A record's header lies in the slot with the number of the record's first extent. A slab grows and
shrinks by whole zones at its end, without moving anything.

Threads: any; everything here is pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from kvist.errors import DamageError
from kvist.keys import KEY_BYTES, BlockKey
from kvist.tiers.base import NAMESPACE_BYTES
from kvist.tiers.checksum import CHECKSUM_BYTES, SegmentChecksum
from kvist.tiers.extents import EXTENT_BYTES, Run

FORMAT_VERSION = 1
MAGIC = b"KVISTSLB"
RECORD_MAGIC = b"KvR1"
HEADER_BYTES = 512
ZONE_EXTENTS = EXTENT_BYTES // HEADER_BYTES
ZONE_BYTES = (1 + ZONE_EXTENTS) * EXTENT_BYTES
SUPERBLOCK_BYTES = 4096
SUPERBLOCK_OFFSETS = (0, SUPERBLOCK_BYTES)
SECTOR_BYTES = 512
DATA_START = EXTENT_BYTES

HEADER_INDEX = 0xFFFF_FFFF
"""What stands for the index of the segment in the checksum of a header."""

NO_PARENT = bytes(KEY_BYTES)

_SUPER = struct.Struct("<8sIIIII16s16s8sd")
_HEAD = struct.Struct(f"<4sHBBQ{NAMESPACE_BYTES}s{KEY_BYTES}s{KEY_BYTES}sIfdHH")
_SEGMENT = struct.Struct(f"<I{CHECKSUM_BYTES}s")
_RUN = struct.Struct("<IH")
_ROOM = HEADER_BYTES - _HEAD.size - CHECKSUM_BYTES
_MIN_RUNS = 8
MAX_RECORD_BYTES = 0xFFFF * EXTENT_BYTES
"""Longest record that a header can describe."""

MAX_SEGMENTS = (_ROOM - _MIN_RUNS * _RUN.size) // _SEGMENT.size


def max_runs(num_segments: int) -> int:
    """Return how many pieces a record of so many segments may lie in."""
    return (_ROOM - num_segments * _SEGMENT.size) // _RUN.size


class Kind(IntEnum):
    """What a record holds."""

    BLOCK = 0
    NAMESPACE = 1


class Piece(NamedTuple):
    """A stretch of the slab file."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Superblock:
    """What is true of a whole slab.

    `scheme` and `key_id` are those of the `SegmentChecksum` that it was made with; `created_s` is
    the wall clock then.
    """

    num_zones: int
    slab_id: bytes
    scheme: str
    key_id: bytes
    created_s: float

    def pack(self) -> bytes:
        """Return the bytes of one copy."""
        body = _SUPER.pack(
            MAGIC,
            FORMAT_VERSION,
            EXTENT_BYTES,
            HEADER_BYTES,
            ZONE_EXTENTS,
            self.num_zones,
            self.slab_id,
            self.scheme.encode(),
            self.key_id,
            self.created_s,
        )
        padded = body.ljust(SUPERBLOCK_BYTES - CHECKSUM_BYTES, b"\0")
        # Not keyed: a wrong tier key is to be told from a damaged slab.
        return padded + xxhash.xxh3_128_digest(padded)

    @staticmethod
    def unpack(data: bytes) -> Superblock | None:
        """Read one copy; ``None`` if it is not whole. The version has been looked at before."""
        padded, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
        if len(data) != SUPERBLOCK_BYTES or xxhash.xxh3_128_digest(padded) != checksum:
            return None
        fields = _SUPER.unpack_from(padded)
        num_zones, slab_id, scheme, key_id, created_s = fields[5:]
        return Superblock(
            num_zones, slab_id, scheme.rstrip(b"\0").decode(errors="replace"), key_id, created_s
        )


def is_torn_superblock(data: bytes) -> bool:
    """Whether a copy is one of this version of which some sectors never reached the device.

    What is written of a superblock lies in its first sector and at its very end.
    """
    start, middle = data[:SECTOR_BYTES], data[SECTOR_BYTES:-CHECKSUM_BYTES]
    is_ours = not any(start) or version_of(start) == FORMAT_VERSION
    return is_ours and not any(middle) and Superblock.unpack(data) is None


def version_of(data: bytes) -> int | None:
    """Return the format version that a superblock claims, ``None`` if it is none at all."""
    if len(data) < 12 or data[:8] != MAGIC:
        return None
    return int.from_bytes(data[8:12], "little")


@dataclass(frozen=True, slots=True)
class Header:
    """What is written about one record; everything that is needed to find, read and verify it.

    Attributes
    ----------
    kind : Kind
    exact : bool
        False if a lossy codec made the bytes.
    wire_id : int
        Of the codec.
    seq : int
        Grows with every record of the slab: of two that claim an extent the later one is right.
    namespace, key, parent : bytes
    depth : int
    recompute_s, created_s : float
        `created_s` on the wall clock, for people.
    segments : tuple of (int, bytes)
        Stored length and checksum of each, in order. They follow each other without gaps.
    runs : tuple of Run
        Where the bytes lie; the first extent is the record's slot.
    """

    kind: Kind
    exact: bool
    wire_id: int
    seq: int
    namespace: bytes
    key: BlockKey
    parent: bytes
    depth: int
    recompute_s: float
    created_s: float
    segments: tuple[tuple[int, bytes], ...]
    runs: tuple[Run, ...]

    @property
    def slot(self) -> int:
        """Number of the header slot: the first extent."""
        return self.runs[0][0]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments as stored."""
        return sum(length for length, _ in self.segments)

    @property
    def num_extents(self) -> int:
        """Extents that the record occupies."""
        return sum(length for _, length in self.runs)

    def pack(self, checksum: SegmentChecksum) -> bytes:
        """Return the header without padding; `padded` makes a slot of it."""
        parts = [
            _HEAD.pack(
                RECORD_MAGIC,
                (self.kind << 8) | self.exact,
                self.wire_id,
                0,
                self.seq,
                self.namespace,
                self.key,
                self.parent.ljust(KEY_BYTES, b"\0"),
                self.depth,
                self.recompute_s,
                self.created_s,
                len(self.segments),
                len(self.runs),
            )
        ]
        parts.extend(_SEGMENT.pack(length, digest) for length, digest in self.segments)
        parts.extend(_RUN.pack(start, length) for start, length in self.runs)
        body = b"".join(parts)
        return body + checksum.digest(self.namespace, self.key, HEADER_INDEX, body)

    @staticmethod
    def unpack(data: bytes | memoryview, checksum: SegmentChecksum) -> Header:
        """Read a header, padded or not.

        Raises
        ------
        DamageError
            If it is not what `pack` made with the same tier key.
        """
        if len(data) < _HEAD.size or data[:4] != RECORD_MAGIC:
            raise DamageError(f"{len(data)} bytes that begin with {bytes(data[:4])!r}: no header")
        (_, flags, wire_id, _, seq, namespace, key, parent, depth, recompute_s, created_s) = (
            _HEAD.unpack_from(data)[:11]
        )
        num_segments, num_runs = _HEAD.unpack_from(data)[11:]
        runs_at = _HEAD.size + num_segments * _SEGMENT.size
        end = runs_at + num_runs * _RUN.size
        digest = checksum.digest(namespace, key, HEADER_INDEX, data[:end])
        if (
            flags >> 8 > Kind.NAMESPACE
            or not num_runs
            or len(data) < end + CHECKSUM_BYTES
            or data[end:][:CHECKSUM_BYTES] != digest
        ):
            raise DamageError(f"header of record {key.hex()[:8]} (seq {seq}) fails its checksum")
        return Header(
            Kind(flags >> 8),
            bool(flags & 1),
            wire_id,
            seq,
            namespace,
            BlockKey(key),
            parent,
            depth,
            recompute_s,
            created_s,
            tuple(_SEGMENT.iter_unpack(data[_HEAD.size : runs_at])),
            tuple(_RUN.iter_unpack(data[runs_at:end])),
        )


def kind_of(header: bytes | None) -> Kind | None:
    """Return what a packed header says it is of, unverified; ``None`` if there is no telling."""
    kind = header[5] if header is not None and len(header) > 5 else -1
    return Kind(kind) if kind in (Kind.BLOCK, Kind.NAMESPACE) else None


def padded(header: bytes) -> bytes:
    """Return a header as it lies in its slot."""
    return header.ljust(HEADER_BYTES, b"\0")


EMPTY_SLOT = bytes(HEADER_BYTES)


def num_extents(num_zones: int) -> int:
    """Return how many extents for records so many zones have."""
    return num_zones * ZONE_EXTENTS


def slab_bytes(num_zones: int) -> int:
    """Return the length of the file."""
    return DATA_START + num_zones * ZONE_BYTES


def slot_offset(slot: int) -> int:
    """Return where header slot `slot` begins."""
    zone, index = divmod(slot, ZONE_EXTENTS)
    return DATA_START + zone * ZONE_BYTES + index * HEADER_BYTES


def extent_offset(extent: int) -> int:
    """Return where extent `extent` begins."""
    zone, index = divmod(extent, ZONE_EXTENTS)
    return DATA_START + zone * ZONE_BYTES + (1 + index) * EXTENT_BYTES


def pieces(runs: Sequence[Run], start: int, end: int) -> list[Piece]:
    """Return where bytes `start` to `end` of a record lie, in order.

    A run that goes on in the next zone is two pieces: the headers of that zone lie between.
    """
    found: list[Piece] = []
    position = 0
    for first, length in runs:
        extent, left = first, length
        while left and position < end:
            count = min(left, ZONE_EXTENTS - extent % ZONE_EXTENTS)
            nbytes = count * EXTENT_BYTES
            low, high = max(start, position), min(end, position + nbytes)
            if low < high:
                found.append(Piece(extent_offset(extent) + low - position, high - low))
            position += nbytes
            extent += count
            left -= count
    return found
