"""What lies in Redis: names, and the header of a block. Described in ``docs/formats.md``.

Owns every byte but the content of segments, in pure functions; does no I/O.

::

    kvist:1:SPACE                        descriptor of the namespace, JSON
    kvist:1:SPACE:{KEY}                  header of a block
    kvist:1:SPACE:{KEY}:NONCE:0, :1 …    its segments as stored, end to end, in chunks

SPACE are 32 hex digits of a digest of the namespace and of the tier key: who has another tier key
sees none of these blocks. KEY is the block key in hex. What stands in braces decides the slot in a
cluster, so all of a block lies on one node. NONCE is drawn by each writer: two that store the same
block never write into each other's chunks, and the header, set last and only if there is none, says
whose chunks count. A block without a header does not exist; what is left of it expires.

Threads: any.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from hashlib import blake2b

from kvist.errors import DamageError
from kvist.keys import KEY_BYTES, BlockKey
from kvist.tiers.base import BlockMeta, Namespace
from kvist.tiers.checksum import CHECKSUM_BYTES, SegmentChecksum

PREFIX = b"kvist:1:"
MAGIC = b"KvH1"
NONCE_BYTES = 8
CHUNK_BYTES = 1 << 20
"""Longest string that is written: a server does one thing at a time."""

MAX_SEGMENT_BYTES = 1 << 31
HEADER_INDEX = 0xFFFF_FFFF
"""What stands for the index of the segment in the checksum of a header."""

_HEAD = struct.Struct(f"<4sBBH{NONCE_BYTES}sI{KEY_BYTES}sIfd")
_SEGMENT = struct.Struct(f"<I{CHECKSUM_BYTES}s")
_EXACT = 1


def space_name(namespace: bytes, checksum: SegmentChecksum) -> bytes:
    """Name of the descriptor of a namespace, and the start of every other name in it."""
    digest = blake2b(namespace + checksum.key_id, digest_size=16, person=b"kvist.redis.v1")
    return PREFIX + digest.hexdigest().encode()


def header_name(space: bytes, key: BlockKey) -> bytes:
    """Name of the header of a block, from `space_name`."""
    return b"%s:{%s}" % (space, key.hex().encode())


def key_of(name: bytes, space: bytes) -> BlockKey | None:
    """Return the block key in the name of a header; None if it is the name of anything else."""
    inner = name[len(space) + 2 : -1]
    if name != b"%s:{%s}" % (space, inner) or len(inner) != 2 * KEY_BYTES:
        return None
    try:
        return BlockKey(bytes.fromhex(inner.decode("ascii")))
    except ValueError:
        return None


def descriptor(namespace: Namespace) -> bytes:
    """Return what is said of a namespace, for people and for `agrees`."""
    said = {
        "digest": namespace.digest.hex(),
        "model": namespace.model,
        "format": namespace.format,
        "tenant": namespace.tenant,
        "segment_bytes": list(namespace.segment_bytes),
        "itemsize": namespace.itemsize,
    }
    return json.dumps(said, sort_keys=True).encode()


def agrees(said: bytes, namespace: Namespace) -> bool:
    """Whether a descriptor found on the server is one of this namespace."""
    try:
        found = json.loads(said)
        return bool(
            found["digest"] == namespace.digest.hex()
            and found["segment_bytes"] == list(namespace.segment_bytes)
            and found["itemsize"] == namespace.itemsize
        )
    except (ValueError, TypeError, KeyError):
        return False


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a block on the server.

    Attributes
    ----------
    codec_id : int
        `Codec.wire_id` of what encoded it.
    exact : bool
    nonce : bytes
        Of the writer's chunks.
    chunk_bytes : int
        Length of every chunk but the last.
    meta : BlockMeta
    created_s : float
        Seconds since 1970, by the writer's clock.
    lengths : tuple of int
        Of the segments as stored.
    checksums : tuple of bytes
        Of the segments as stored.
    """

    codec_id: int
    exact: bool
    nonce: bytes
    chunk_bytes: int
    meta: BlockMeta
    created_s: float
    lengths: tuple[int, ...]
    checksums: tuple[bytes, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments as stored."""
        return sum(self.lengths)

    @property
    def num_chunks(self) -> int:
        """How many chunks there are."""
        return max(1, -(-self.stored_bytes // self.chunk_bytes))

    def chunk_name(self, name: bytes, index: int) -> bytes:
        """Name of a chunk, from the name of the header."""
        return b"%s:%s:%d" % (name, self.nonce.hex().encode(), index)

    def pack(self, namespace: bytes, key: BlockKey, checksum: SegmentChecksum) -> bytes:
        """Return the header's bytes, with a checksum at the end."""
        parts = [
            _HEAD.pack(
                MAGIC,
                self.codec_id,
                _EXACT * self.exact,
                len(self.lengths),
                self.nonce,
                self.chunk_bytes,
                self.meta.parent,
                self.meta.depth,
                self.meta.recompute_s,
                self.created_s,
            ),
            *map(_SEGMENT.pack, self.lengths, self.checksums),
        ]
        body = b"".join(parts)
        return body + checksum.digest(namespace, key, HEADER_INDEX, body)

    @staticmethod
    def unpack(data: bytes, namespace: bytes, key: BlockKey, checksum: SegmentChecksum) -> Header:
        """Read a header.

        Raises
        ------
        DamageError
            If it is not whole, or not the one of that block, or of another version.
        """
        body, check = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
        if len(body) < _HEAD.size or check != checksum.digest(namespace, key, HEADER_INDEX, body):
            raise DamageError(f"header of block {key.hex()[:8]}, {len(data)} bytes, is not whole")
        head = _HEAD.unpack_from(body)
        magic, codec_id, flags, num_segments, nonce, chunk_bytes, parent, depth = head[:8]
        if magic != MAGIC or len(body) != _HEAD.size + num_segments * _SEGMENT.size:
            raise DamageError(f"header of block {key.hex()[:8]} is of another version: {magic!r}")
        segments = list(_SEGMENT.iter_unpack(body[_HEAD.size :]))
        lengths = tuple(length for length, _ in segments)
        if not chunk_bytes or not lengths or max(lengths) > MAX_SEGMENT_BYTES:
            raise DamageError(f"header of block {key.hex()[:8]} has lengths {lengths[:4]}")
        parent = b"" if parent == bytes(KEY_BYTES) else parent
        return Header(
            codec_id=codec_id,
            exact=bool(flags & _EXACT),
            nonce=nonce,
            chunk_bytes=chunk_bytes,
            meta=BlockMeta(parent, depth, head[8]),
            created_s=head[9],
            lengths=lengths,
            checksums=tuple(check for _, check in segments),
        )
