"""No codec: bytes as they are."""

from __future__ import annotations

from kvist.codecs.base import Codec
from kvist.codecs.copying import copy_bytes
from kvist.errors import DamageError


class RawCodec(Codec):
    """Keeps segments as they are. Encoding is free, decoding one copy."""

    name = "raw"
    wire_id = 0

    def encode(self, segment: memoryview, itemsize: int) -> memoryview:
        """See `Codec.encode`; returns `segment`."""
        return segment

    def decode(self, data: memoryview, out: memoryview, itemsize: int) -> None:
        """See `Codec.decode`."""
        if len(data) != len(out):
            raise DamageError(f"a raw segment of {len(out)} bytes came as {len(data)} bytes")
        copy_bytes(out, data)
