"""The contract of a codec: the bytes of one segment to what a tier keeps, and back.

Owns the interface. A codec knows neither keys nor tiers, and nothing of where the bytes go; it is
not what attention reads (that is a *format*).

Codecs are lossless or lossy. What a lossless one decodes is bit for bit what it was given. A lossy
one gives other bytes of the same length and packing: such a copy is `Lookup.exact` = False, is
used only for requests that allow it, and lives on the device under a root of its own, so no exact
sequence ever finds it. A lossy codec needs to know how K and V lie in a segment; it takes that in
its constructor, from whoever assembles the tiers, and the tiers stay ignorant of it.

Threads: a codec is shared by the threads of a tier, so its methods may run side by side. They let
go of the interpreter lock for whatever takes longer than some ten microseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Codec(ABC):
    """Encodes and decodes segments.

    Attributes
    ----------
    name : str
        As written in ``--tier disk:20GiB:/data:NAME`` and in descriptors, parameters left out:
        whatever the parameters of the encoder were, any codec of that name decodes.
    wire_id : int
        0 to 255. Stands for `name` in binary headers, so it never changes and is never reused.
    lossless : bool
    """

    name: str
    wire_id: int
    lossless: bool = True

    @abstractmethod
    def encode(self, segment: memoryview, itemsize: int) -> bytes | memoryview:
        """Encode one segment.

        Parameters
        ----------
        segment : memoryview
            Contiguous bytes; not changed.
        itemsize : int
            Bytes of one stored number.

        Returns
        -------
        bytes or memoryview
            At most `max_encoded_bytes` long; may be `segment` itself.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: memoryview, itemsize: int) -> None:
        """Fill `out` with the segment that `data` encodes.

        Parameters
        ----------
        data : memoryview
            What `encode` returned. Trusted no further than its checksum: whatever it holds,
            nothing is written beyond `out` and no more memory is taken than twice its length.
        out : memoryview
            Writable, contiguous, as long as the segment was.
        itemsize : int
            As it was encoded.

        Raises
        ------
        DamageError
            If `data` is no encoding of a segment of that length; `out` means nothing then.
        """

    def encode_block(
        self, block: memoryview, segment_bytes: Sequence[int], itemsize: int
    ) -> list[bytes | memoryview]:
        """Encode the segments of a block, each as `encode` would.

        For codecs that are cheaper by the block: who lets go of the interpreter lock beside a busy
        thread waits 5 ms to get it back, so a few long stretches without it beat many short ones.

        Parameters
        ----------
        block : memoryview
            Contiguous bytes: the segments end to end.
        segment_bytes : sequence of int
            Length of each.
        itemsize : int
        """
        encoded: list[bytes | memoryview] = []
        position = 0
        for length in segment_bytes:
            encoded.append(self.encode(block[position : position + length], itemsize))
            position += length
        return encoded

    def max_encoded_bytes(self, segment_bytes: int) -> int:
        """Longest encoding of a segment of that many bytes: no codec may lose room."""
        return segment_bytes
