"""Whole blocks to and from the servers: headers, chunks, expiry.

Owns the order of commands, which is what keeps a block from being seen before it is whole, or
changed after::

    store   chunks (SET EX) ─▶ all there? ─▶ header (SET NX EX) ─▶ somebody was faster? drop chunks
    load    header (GET) ─▶ the chunks that it names (GET, GETRANGE) ─▶ checksums ─▶ decode
    drop    header first, then its chunks

A step costs one round trip to each node, however many blocks it is for. Knows no jobs and no
caller; everything here waits for servers.

Threads: any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvist.codecs.base import Codec
from kvist.codecs.copying import join_bytes
from kvist.codecs.registry import decoder
from kvist.errors import DamageError
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, Namespace
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.redis.layout import (
    NONCE_BYTES,
    Header,
    agrees,
    descriptor,
    header_name,
    space_name,
)
from kvist.tiers.redis.node import Command
from kvist.tiers.redis.servers import Absence, RedisServers, Send, Value

ABSENT = "absent"
DAMAGED = "damaged"
EVICTED = "evicted"
THERE_ALREADY = "there_already"

_CHUNKS_OUTLIVE_MS = 60_000
"""A header goes first when time is up: what it names is there as long as it is."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as it is stored: its header, and its segments end to end."""

    name: bytes
    header: Header
    packed_header: bytes
    data: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, about."""
        return len(self.data) + len(self.packed_header)


class RedisBlocks:
    """Blocks on some servers.

    Parameters
    ----------
    servers : RedisServers
    codec : Codec
        Of what is stored from here; what others stored is decoded by what its header says.
    checksum : SegmentChecksum
    ttl_s : float
        How long a block stays without being of use.
    chunk_bytes : int
    wall : callable
        Seconds since 1970.
    """

    def __init__(
        self,
        servers: RedisServers,
        codec: Codec,
        checksum: SegmentChecksum,
        ttl_s: float,
        chunk_bytes: int,
        wall: Callable[[], float],
    ) -> None:
        self._servers = servers
        self._codec = codec
        self._checksum = checksum
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._chunk_bytes = chunk_bytes
        self._wall = wall
        self._decoders: dict[int, Codec | None] = {codec.wire_id: codec}

    def space_name(self, namespace: bytes) -> bytes:
        """Start of all names in a namespace."""
        return space_name(namespace, self._checksum)

    def name(self, namespace: bytes, key: BlockKey) -> bytes:
        """Name of the header of a block."""
        return header_name(space_name(namespace, self._checksum), key)

    # ------------------------------------------------------------------ headers

    def headers(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Header | Absence]:
        """Ask for the headers of blocks. A damaged one is dropped."""
        space = space_name(namespace, self._checksum)
        names = [header_name(space, key) for key in keys]
        headers: list[Header | Absence] = []
        damaged: list[Send] = []
        for name, key, value in zip(
            names, keys, self._servers.send([(name, ("GET", name)) for name in names]), strict=True
        ):
            if isinstance(value, Absence):
                headers.append(value)
            elif value is None:
                headers.append(Absence(ABSENT))
            else:
                try:
                    headers.append(Header.unpack(value, namespace, key, self._checksum))
                except (DamageError, TypeError):
                    headers.append(Absence(DAMAGED))
                    damaged.append((name, ("UNLINK", name)))
        self._servers.send(damaged)
        return headers

    def which_are_there(self, names: Sequence[bytes]) -> list[bool]:
        """Say which blocks need not be stored."""
        return [
            value == 1 for value in self._servers.send([(name, ("EXISTS", name)) for name in names])
        ]

    # ------------------------------------------------------------------ store

    def encode(
        self, space: Namespace, key: BlockKey, block: memoryview, meta: BlockMeta
    ) -> Encoded:
        """Encode a block. Talks to nobody."""
        parts = self._codec.encode_block(block, space.segment_bytes, space.itemsize)
        header = Header(
            codec_id=self._codec.wire_id,
            exact=self._codec.lossless,
            nonce=os.urandom(NONCE_BYTES),
            chunk_bytes=self._chunk_bytes,
            meta=meta,
            created_s=self._wall(),
            lengths=tuple(map(len, parts)),
            checksums=tuple(
                self._checksum.digest(space.digest, key, index, part)
                for index, part in enumerate(parts)
            ),
        )
        data = memoryview(parts[0]) if len(parts) == 1 else join_bytes(parts)
        packed = header.pack(space.digest, key, self._checksum)
        return Encoded(self.name(space.digest, key), header, packed, data)

    def store(self, blocks: Sequence[Encoded]) -> list[Absence | None]:
        """Store encoded blocks; say why each is not stored, None if it is."""
        sends: list[Send] = []
        owners: list[int] = []
        for number, block in enumerate(blocks):
            size = block.header.chunk_bytes
            for index in range(block.header.num_chunks):
                chunk = block.data[index * size : (index + 1) * size]
                at = block.header.chunk_name(block.name, index)
                ttl_ms = self._ttl_ms + _CHUNKS_OUTLIVE_MS
                sends.append((block.name, ("SET", at, chunk, "PX", ttl_ms)))
                owners.append(number)
        results: list[Absence | None] = [None] * len(blocks)
        for number, value in zip(owners, self._servers.send(sends), strict=True):
            if isinstance(value, Absence):
                results[number] = value
        whole = [number for number, result in enumerate(results) if result is None]
        headers: list[Send] = [
            (name, ("SET", name, blocks[number].packed_header, "NX", "PX", self._ttl_ms))
            for number in whole
            for name in (blocks[number].name,)
        ]
        for number, value in zip(whole, self._servers.send(headers), strict=True):
            if isinstance(value, Absence):
                results[number] = value
            elif value is None:
                results[number] = Absence(THERE_ALREADY)
        self._unlink_chunks(
            (block.name, block.header)
            for block, result in zip(blocks, results, strict=True)
            if result is not None and not result.down
        )
        return results

    # ------------------------------------------------------------------ load

    def load(
        self,
        space: Namespace,
        keys: Sequence[BlockKey],
        headers: Sequence[Header],
        segments: range,
        buffers: Sequence[memoryview],
    ) -> list[Absence | None]:
        """Fill buffers with segments of blocks; say why each could not be, None if it was.

        A block that turns out not to be what its header says is dropped.
        """
        sends: list[Send] = []
        counts: list[int] = []
        for key, header in zip(keys, headers, strict=True):
            name = self.name(space.digest, key)
            wanted = list(self._chunks(name, header, segments))
            sends += [(name, command) for command in wanted]
            counts.append(len(wanted))
        values = iter(self._servers.send(sends))
        results: list[Absence | None] = []
        for key, header, count, out in zip(keys, headers, counts, buffers, strict=True):
            chunks = [next(values) for _ in range(count)]
            result = self._take(space, key, header, segments, chunks, out)
            results.append(result)
            if result is not None and not result.down:
                self.drop_known([(self.name(space.digest, key), header)])
        return results

    # ------------------------------------------------------------------ keeping and dropping

    def extend(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float = 0.0) -> None:
        """Let blocks live on as if they were stored now, and `ttl_s` at least."""
        ttl_ms = max(self._ttl_ms, int(ttl_s * 1000))
        sends: list[Send] = []
        for key, header in zip(keys, self.headers(namespace, keys), strict=True):
            if isinstance(header, Absence):
                continue
            name = self.name(namespace, key)
            for index in range(header.num_chunks):
                at = header.chunk_name(name, index)
                sends.append((name, ("PEXPIRE", at, ttl_ms + _CHUNKS_OUTLIVE_MS)))
            sends.append((name, ("PEXPIRE", name, ttl_ms)))
        self._servers.send(sends)

    def drop(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """Drop blocks."""
        headers = self.headers(namespace, keys)
        self.drop_known(
            (self.name(namespace, key), header)
            for key, header in zip(keys, headers, strict=True)
            if isinstance(header, Header)
        )

    def drop_known(self, blocks: Iterable[tuple[bytes, Header]]) -> None:
        """Drop blocks whose headers are known: those first, so that none is seen half gone."""
        known = list(blocks)
        self._servers.send([(name, ("UNLINK", name)) for name, _ in known])
        self._unlink_chunks(known)

    def claim(self, namespace: Namespace) -> bool:
        """Leave a descriptor of a namespace; False if there is one that contradicts it."""
        name = space_name(namespace.digest, self._checksum)
        said = descriptor(namespace)
        commands: list[Command] = [
            ("SET", name, said, "NX", "PX", self._ttl_ms),
            ("GET", name),
            ("PEXPIRE", name, self._ttl_ms),
        ]
        _, found, _ = self._servers.send([(name, command) for command in commands])
        return not isinstance(found, bytes) or agrees(found, namespace)

    # ------------------------------------------------------------------ inside

    def _chunks(self, name: bytes, header: Header, segments: range) -> Iterator[Command]:
        """Yield what reads the bytes of `segments`, chunk by chunk."""
        start = sum(header.lengths[: segments.start])
        end = sum(header.lengths[: segments.stop])
        size = header.chunk_bytes
        for index in range(start // size, -(-end // size)):
            low, high = max(start - index * size, 0), min(end - index * size, size)
            at = header.chunk_name(name, index)
            yield ("GETRANGE", at, low, high - 1)

    def _take(
        self,
        space: Namespace,
        key: BlockKey,
        header: Header,
        segments: range,
        chunks: list[Value],
        out: memoryview,
    ) -> Absence | None:
        """Verify and decode what came."""
        for chunk in chunks:
            if isinstance(chunk, Absence):
                return chunk
            if not chunk:  # what is not there is empty to the server
                return Absence(EVICTED)
        codec = self._decoder(header.codec_id)
        if codec is None:
            return Absence(f"codec {header.codec_id} is not known here", down=True)
        if not all(isinstance(chunk, bytes) for chunk in chunks):
            return Absence(DAMAGED)
        data = memoryview(chunks[0] if len(chunks) == 1 else join_bytes(chunks))
        if len(header.lengths) != len(space.segment_bytes):
            return Absence("other_segments", down=True)
        position = filled = 0
        for index in segments:
            segment = data[position : position + header.lengths[index]]
            digest = self._checksum.digest(space.digest, key, index, segment)
            if digest != header.checksums[index]:
                return Absence(DAMAGED)
            target = out[filled : filled + space.segment_bytes[index]]
            try:
                codec.decode(segment, target, space.itemsize)
            except DamageError:
                return Absence(DAMAGED)
            position += len(segment)
            filled += len(target)
        return None

    def _decoder(self, codec_id: int) -> Codec | None:
        if codec_id not in self._decoders:
            self._decoders[codec_id] = decoder(codec_id)
        return self._decoders[codec_id]

    def _unlink_chunks(self, blocks: Iterable[tuple[bytes, Header]]) -> None:
        self._servers.send(
            [
                (name, ("UNLINK", header.chunk_name(name, index)))
                for name, header in blocks
                for index in range(header.num_chunks)
            ]
        )
