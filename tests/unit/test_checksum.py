"""Checksums of segments: bound to identity, the same everywhere, keyed where asked."""

from __future__ import annotations

import pytest

pytest.importorskip("xxhash", reason="tiers need the tiers extra")
pytest.importorskip("blake3", reason="tiers need the tiers extra")

from kvist.keys import BlockKey
from kvist.tiers.checksum import CHECKSUM_BYTES, SegmentChecksum

SPACE, KEY, DATA = b"n" * 32, BlockKey(b"k" * 32), bytes(range(256)) * 8


@pytest.mark.parametrize("tier_key", ["", "secret"])
def test_every_part_of_the_identity_and_every_byte_counts(tier_key):
    """A sound record under another name is as wrong as a flipped bit."""
    checksum = SegmentChecksum(tier_key)
    sums = {
        checksum.digest(SPACE, KEY, 0, DATA),
        checksum.digest(b"m" * 32, KEY, 0, DATA),
        checksum.digest(SPACE, BlockKey(b"l" * 32), 0, DATA),
        checksum.digest(SPACE, KEY, 1, DATA),
        checksum.digest(SPACE, KEY, 0, DATA[:-1]),
        checksum.digest(SPACE, KEY, 0, DATA[:-1] + b"\x00"),
        SegmentChecksum("another").digest(SPACE, KEY, 0, DATA),
    }
    assert len(sums) == 7
    assert {len(value) for value in sums} == {CHECKSUM_BYTES}


def test_a_store_outlives_the_process():
    """Golden vectors: whoever changes one of these makes every store unreadable."""
    plain, keyed = SegmentChecksum(), SegmentChecksum("secret")
    assert plain.digest(SPACE, KEY, 3, DATA).hex() == "79c2f1cc62a55b0abf3a42b5bfffff39"
    assert keyed.digest(SPACE, KEY, 3, memoryview(DATA)).hex() == "615ca996d17fac9139891b4b485c7ef4"
    assert (plain.scheme, plain.key_id) == ("xxh3-128", bytes(8))
    assert (keyed.scheme, keyed.key_id.hex()) == ("blake3-keyed-128", "719e39bcf1e64f88")
