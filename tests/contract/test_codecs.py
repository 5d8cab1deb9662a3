"""Every codec passes the shipped contract, and pays where it says that it does."""

from __future__ import annotations

import struct

import pytest

np = pytest.importorskip("numpy", reason="codecs need the tiers extra")
zstandard = pytest.importorskip("zstandard", reason="codecs need the tiers extra")

from kvist.codecs.raw import RawCodec
from kvist.codecs.registry import CODEC_NAMES, decoder, make_codec
from kvist.codecs.zstd import ZstdCodec
from kvist.errors import ConfigError, DamageError
from kvist.testing.codec_contract import CodecContract, bf16_like


class TestRaw(CodecContract):
    def make(self):
        return RawCodec()


class TestZstd(CodecContract):
    def make(self):
        return ZstdCodec()


class TestZstdOfAnotherLevel(CodecContract):
    def make(self):
        return ZstdCodec(-3)


def test_raw_copies_nothing_on_encode():
    segment = memoryview(bytes(100))
    assert RawCodec().encode(segment, 2) is segment


def test_zstd_pays_on_numbers_and_leaves_noise_alone():
    codec = ZstdCodec()
    numbers = memoryview(bf16_like(360 << 10))
    assert len(codec.encode(numbers, 2)) < 0.70 * len(numbers)
    assert len(codec.encode(numbers, 2)) < len(ZstdCodec(1).encode(numbers, 2)), "few matches pay"
    assert len(codec.encode(numbers, 2)) < len(codec.encode(numbers, 1)), "planes should help"
    noise = memoryview(np.random.default_rng(0).bytes(360 << 10))
    assert codec.encode(noise, 2) == noise


def test_planes_are_little_endian_wherever_it_runs():
    """Golden: low bytes first. Records outlive the machine that wrote them."""
    segment = memoryview(b"\x01\x3f" * 50_000)
    data = memoryview(ZstdCodec().encode(segment, 2))
    low, high = struct.unpack_from("<2I", data)
    assert zstandard.decompress(data[8 : 8 + low]) == b"\x01" * 50_000
    assert zstandard.decompress(data[8 + low :]) == b"\x3f" * 50_000
    assert 8 + low + high == len(data)


def test_one_level_decodes_what_another_encoded():
    segment = memoryview(bf16_like(100_000))
    out = memoryview(bytearray(100_000))
    ZstdCodec(1).decode(memoryview(ZstdCodec(9).encode(segment, 2)), out, 2)
    assert out == segment


def test_a_frame_that_claims_gigabytes_is_refused_before_they_are_taken():
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    data = struct.pack("<2I", len(bomb), 10) + bomb + bytes(10)
    with pytest.raises(DamageError, match="claims to be 209715200"):
        ZstdCodec().decode(memoryview(data), memoryview(bytearray(100_000)), 2)


def test_wire_ids_and_names_never_change():
    assert [(name, make_codec(name).wire_id) for name in CODEC_NAMES] == [("raw", 0), ("zstd", 1)]
    assert [decoder(wire_id).name for wire_id in (0, 1)] == ["raw", "zstd"]
    assert decoder(250) is None


def test_a_level_can_be_asked_for():
    assert make_codec("zstd:3").level == 3
    assert make_codec("zstd").level is None


@pytest.mark.parametrize("text", ["lz5", "zstd:fast", "zstd:99", "raw:1", ""])
def test_an_unknown_codec_is_a_clear_error(text):
    with pytest.raises(ConfigError, match="zstd"):
        make_codec(text)
