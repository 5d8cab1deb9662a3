"""Checksums of segments: what is read is what was stored, under the name it was stored by.

Owns the choice of the function and what goes into it. Knows no layout of any tier.

A checksum covers the identity of a segment as well as its bytes::

    H(namespace digest ‖ block key ‖ index of the segment (u32) ‖ bytes as stored)

so that a sound record in another record's place is found out too. H is XXH3-128: it finds every
accident at the speed of memory, and no malice. Where others can write to a store (a shared disk, a
server on a network) a *tier key* makes it keyed BLAKE3 instead: without the key nobody can make
bytes that pass. Both are cut to, or are, 16 bytes.

Threads: any; no state is shared, and the interpreter lock is let go over the bytes.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TypeAlias

import blake3
import xxhash

from kvist.keys import BlockKey

CHECKSUM_BYTES = 16
Bytes: TypeAlias = bytes | bytearray | memoryview
_INDEX = struct.Struct("<I")


class SegmentChecksum:
    """The checksum that one tier uses.

    Parameters
    ----------
    tier_key : str
        Secret shared by all who use the store; ``""`` for none.

    Attributes
    ----------
    scheme : str
        ``"xxh3-128"`` or ``"blake3-keyed-128"``, for descriptors: a store made with one is not
        read with the other.
    key_id : bytes
        8 bytes that tell two tier keys apart and betray neither; zeros without one.
    """

    def __init__(self, tier_key: str = "") -> None:
        self.scheme = "blake3-keyed-128" if tier_key else "xxh3-128"
        self._key = b""
        self.key_id = bytes(8)
        if tier_key:
            secret = tier_key.encode()
            self._key = blake2b(secret, digest_size=32, person=b"kvist.tierkey.v1").digest()
            self.key_id = blake2b(self._key, digest_size=8, person=b"kvist.tierid.v1").digest()

    def digest(self, namespace: bytes, key: BlockKey, index: int, data: Bytes) -> bytes:
        """Return the 16 bytes for segment `index` of a block.

        Parameters
        ----------
        namespace : bytes
            Digest of the namespace.
        key : BlockKey
        index : int
            Of the segment in its block. An owner that guards something else besides (a header)
            takes a number that no segment has.
        data : bytes-like
            The bytes as stored, contiguous.

        Notes
        -----
        Tens of GB/s without a tier key, about 5 GB/s with one.
        """
        identity = namespace + key + _INDEX.pack(index)
        if self._key:
            return blake3.blake3(identity, key=self._key).update(data).digest(CHECKSUM_BYTES)
        state = xxhash.xxh3_128(identity)
        state.update(data)
        return state.digest()
