"""Names and headers in Redis: the same for every process, and read only if they are whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("xxhash", reason="tiers need the tiers extra")

from kvist.errors import DamageError
from kvist.keys import BlockKey
from kvist.testing.tier_driver import space
from kvist.tiers.base import BlockMeta
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.redis.layout import (
    Header,
    agrees,
    descriptor,
    header_name,
    key_of,
    space_name,
)

KEY, OTHER = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
SPACE = b"n" * 32
PLAIN, KEYED = SegmentChecksum(), SegmentChecksum("secret")
HEADER = Header(
    codec_id=1,
    exact=True,
    nonce=b"12345678",
    chunk_bytes=1000,
    meta=BlockMeta(b"p" * 32, 7, 0.25),
    created_s=1_700_000_000.5,
    lengths=(1500, 700),
    checksums=(b"a" * 16, b"b" * 16),
)


def test_names_outlive_the_process():
    """Golden: whoever changes one makes every block on every server unreachable."""
    assert space_name(SPACE, PLAIN) == b"kvist:1:10f7e587d1f47a30ec7b92358042df78"
    assert space_name(SPACE, KEYED) == b"kvist:1:857aeaac3686cee6ef32d8eb2bf6a4bc"
    assert header_name(b"kvist:1:0", KEY) == b"kvist:1:0:{" + b"6b" * 32 + b"}"
    assert HEADER.chunk_name(b"name", 2) == b"name:3132333435363738:2"


def test_a_header_outlives_the_process():
    packed = HEADER.pack(SPACE, KEY, PLAIN)
    assert packed.hex() == (
        "4b764831010102003132333435363738e803000070707070707070707070707070707070707070707070"
        "70707070707070707070070000000000803e00002040fc54d941dc050000616161616161616161616161"
        "61616161bc02000062626262626262626262626262626262d4fd142ceb1621d3b314968cb1fd9e23"
    )
    assert Header.unpack(packed, SPACE, KEY, PLAIN) == HEADER
    assert (HEADER.stored_bytes, HEADER.num_chunks) == (2200, 3)


def test_a_block_without_parent_and_a_lossy_copy_come_back_as_such():
    header = replace(HEADER, exact=False, meta=BlockMeta())
    assert Header.unpack(header.pack(SPACE, KEY, KEYED), SPACE, KEY, KEYED) == header


@pytest.mark.parametrize("checksum", [PLAIN, KEYED], ids=["plain", "keyed"])
def test_a_header_is_read_for_its_own_block_only(checksum):
    packed = HEADER.pack(SPACE, KEY, checksum)
    for namespace, key, wrong in (
        (b"m" * 32, KEY, checksum),
        (SPACE, OTHER, checksum),
        (SPACE, KEY, SegmentChecksum("another")),
    ):
        with pytest.raises(DamageError):
            Header.unpack(packed, namespace, key, wrong)


def test_a_header_that_is_cut_or_grown_is_damaged():
    packed = HEADER.pack(SPACE, KEY, PLAIN)
    for data in (packed[:length] for length in range(len(packed))):
        with pytest.raises(DamageError):
            Header.unpack(data, SPACE, KEY, PLAIN)
    with pytest.raises(DamageError):
        Header.unpack(packed + b"\x00", SPACE, KEY, PLAIN)


def test_a_sound_header_of_another_version_is_not_read():
    """A later kvist wrote it, and its checksum holds."""
    body = b"KvH2" + HEADER.pack(SPACE, KEY, PLAIN)[4:-16]
    data = body + PLAIN.digest(SPACE, KEY, 0xFFFF_FFFF, body)
    with pytest.raises(DamageError, match="another version"):
        Header.unpack(data, SPACE, KEY, PLAIN)


@pytest.mark.parametrize(
    "name",
    [b"kvist:1:0", b"kvist:1:0:{6b}", b"kvist:1:0:{" + b"zz" * 32 + b"}", b"other:{}", b"",
     b"kvist:1:0:{" + b"6b" * 32 + b"}:00:1"],
)  # fmt: skip
def test_only_names_of_headers_name_blocks(name):
    assert key_of(name, b"kvist:1:0") is None


def test_the_name_of_a_header_names_its_block():
    assert key_of(header_name(b"kvist:1:0", KEY), b"kvist:1:0") == KEY


def test_a_descriptor_agrees_with_its_own_layout_only():
    ours = space("a")
    assert agrees(descriptor(ours), ours)
    assert agrees(descriptor(replace(ours, model="renamed", tenant="x")), ours), "labels"
    assert not agrees(descriptor(replace(ours, segment_bytes=(1,))), ours)
    assert not agrees(descriptor(replace(ours, itemsize=1)), ours)
    assert not agrees(descriptor(space("b")), ours)
    for nonsense in (b"", b"{}", b"[]", b"\xff", b"null", b"7"):
        assert not agrees(nonsense, ours)
