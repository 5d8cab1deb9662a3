"""A codec that loses something, as small as can be: for tests of what becomes of lossy copies.

Keeps the high half of every number of 4 bytes: of an fp32 number sign, exponent and 7 bits of the
mantissa, which makes it a bf16 one. Owns no idea worth shipping; the lossy codecs that are for use
know how K and V lie in a block.
"""

from __future__ import annotations

import numpy as np

from kvist.codecs.base import Codec
from kvist.errors import DamageError

_WIDTH = 4


class HalvingCodec(Codec):
    """Half of every number. Segments that are no numbers of 4 bytes stay as they are."""

    name = "halving"
    wire_id = 255
    lossless = False

    def encode(self, segment: memoryview, itemsize: int) -> bytes | memoryview:
        """See `Codec.encode`."""
        if not _is_halved(len(segment), itemsize):
            return segment
        return (np.frombuffer(segment, dtype="<u4") >> 16).astype("<u2").tobytes()

    def decode(self, data: memoryview, out: memoryview, itemsize: int) -> None:
        """See `Codec.decode`."""
        if not _is_halved(len(out), itemsize):
            if len(data) != len(out):
                raise DamageError(f"{len(data)} bytes for a segment of {len(out)}")
            out[:] = data
            return
        if 2 * len(data) != len(out):
            raise DamageError(f"{len(data)} bytes for half of {len(out)}")
        numbers = np.frombuffer(out, dtype="<u4")
        np.left_shift(np.frombuffer(data, dtype="<u2"), 16, out=numbers, dtype="<u4")


def _is_halved(nbytes: int, itemsize: int) -> bool:
    return itemsize == _WIDTH and nbytes % _WIDTH == 0
