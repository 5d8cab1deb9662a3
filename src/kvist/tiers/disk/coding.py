"""Between a block as the caller has it and its segments as they are stored.

Owns codec and checksums, both ways, and how a namespace is described. Does no I/O.

Threads: any; see `kvist.codecs.base`.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import asdict, dataclass

from kvist.codecs.base import Codec
from kvist.codecs.registry import decoder
from kvist.errors import DamageError
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, Namespace
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.layout import NO_PARENT, Header, Kind

RAW = 0
"""`Codec.wire_id` of no codec: such segments are read where they are wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """A record on its way in: encoded, and not yet anywhere.

    `segments` are the encoded bytes of each segment, `digests` their checksums; `lost` is that of
    its `StoreJob`.
    """

    namespace: bytes
    key: BlockKey
    meta: BlockMeta
    segments: tuple[memoryview | bytes, ...]
    digests: tuple[bytes, ...]
    exact: bool
    wire_id: int
    kind: Kind = Kind.BLOCK
    lost: Container[BlockKey] = frozenset()

    @property
    def stored_bytes(self) -> int:
        """Bytes as stored."""
        return sum(len(segment) for segment in self.segments)


class Coder:
    """See the module's description.

    Parameters
    ----------
    codec : Codec
        For what is stored from now on; what lies there says itself how to decode it.
    checksum : SegmentChecksum
    """

    def __init__(self, codec: Codec, checksum: SegmentChecksum) -> None:
        self._codec = codec
        self._checksum = checksum
        self._decoders: dict[int, Codec] = {codec.wire_id: codec}

    def encode(
        self,
        label: Namespace,
        key: BlockKey,
        block: memoryview,
        meta: BlockMeta,
        lost: Container[BlockKey] = frozenset(),
    ) -> Put:
        """Encode a block and compute its checksums; keeps views of `block`."""
        segments = self._codec.encode_block(block, label.segment_bytes, label.itemsize)
        return Put(
            label.digest,
            key,
            meta,
            tuple(segments),
            tuple(
                self._checksum.digest(label.digest, key, index, data)
                for index, data in enumerate(segments)
            ),
            self._codec.lossless,
            self._codec.wire_id,
            lost=lost,
        )

    def describe(self, label: Namespace) -> Put:
        """Return the descriptor of a namespace, as a record."""
        facts = {name: value for name, value in asdict(label).items() if name != "digest"}
        data = json.dumps(facts).encode()
        key = BlockKey(NO_PARENT)
        digest = self._checksum.digest(label.digest, key, 0, data)
        return Put(label.digest, key, BlockMeta(), (data,), (digest,), True, RAW, Kind.NAMESPACE)

    def decode(
        self,
        header: Header,
        label: Namespace,
        segments: range,
        source: memoryview,
        out: memoryview,
    ) -> None:
        """Verify stored segments where they were read to, and decode them into `out`.

        Parameters
        ----------
        source : memoryview
            The stored bytes of `segments`; `out` itself if they are raw.

        Raises
        ------
        DamageError
            If they are not what was stored.
        """
        position = out_position = 0
        self.verify(header, segments, source)
        if source is out:
            return
        for index in segments:
            length = header.segments[index][0]
            raw_length = label.segment_bytes[index]
            data = source[position : position + length]
            view = out[out_position : out_position + raw_length]
            self._decoder(header.wire_id).decode(data, view, label.itemsize)
            position += length
            out_position += raw_length

    def verify(self, header: Header, segments: range, source: memoryview) -> None:
        """Raise `DamageError` unless `source` is what was stored as `segments` of a record."""
        position = 0
        for index in segments:
            length, digest = header.segments[index]
            data = source[position : position + length]
            if self._checksum.digest(header.namespace, header.key, index, data) != digest:
                raise DamageError(
                    f"segment {index} of block {header.key.hex()[:8]} fails its checksum"
                )
            position += length

    def _decoder(self, wire_id: int) -> Codec:
        found = self._decoders.get(wire_id) or decoder(wire_id)
        if found is None:
            raise DamageError(f"stored with codec {wire_id}, which this Kvist does not have")
        self._decoders[wire_id] = found
        return found


def parse_label(namespace: bytes, data: bytes) -> Namespace | None:
    """Return what a descriptor says; ``None`` if it says nothing that can be understood."""
    try:
        facts = json.loads(data)
        return Namespace(
            digest=namespace,
            model=str(facts["model"]),
            format=str(facts["format"]),
            tenant=str(facts["tenant"]),
            segment_bytes=tuple(map(int, facts["segment_bytes"])),
            itemsize=int(facts["itemsize"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
