"""The contract of a codec, on generated segments. Needs hypothesis and numpy; no torch.

Owns the checks. Subclass `CodecContract`, say how the codec is made, and pytest runs them. Knows
no codec by name.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvist.codecs.base import Codec
from kvist.errors import DamageError

GUARD = 64


def bf16_like(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes of normally distributed bf16 numbers: what K and V look like to a codec."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(num_bytes // 2, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def segments() -> st.SearchStrategy[bytes]:
    """Segments of all kinds: empty, odd lengths, constant, noise, numbers."""
    return st.one_of(
        st.binary(max_size=512),
        st.builds(lambda byte, times: byte * times, st.binary(max_size=5), st.integers(0, 20_000)),
        st.builds(bf16_like, st.integers(0, 70_000), st.integers(0, 5)),
        st.builds(lambda n: np.random.default_rng(n).bytes(n), st.integers(0, 70_000)),
    )


class CodecContract:
    """Subclass it, say how the codec is made, and name the subclass ``Test...``."""

    def make(self) -> Codec:
        """Return the codec under test."""
        raise NotImplementedError

    def test_what_went_in_comes_out_and_is_never_longer(self) -> None:
        """A lossless codec gives the bytes back; no segment takes more room than was promised."""

        @given(segment=segments(), itemsize=st.sampled_from([1, 2, 3, 4, 8]))
        def check(segment: bytes, itemsize: int) -> None:
            codec = self.make()
            data = codec.encode(memoryview(segment), itemsize)
            assert len(data) <= codec.max_encoded_bytes(len(segment))
            out = memoryview(bytearray(b"\xaa" * len(segment)))
            codec.decode(memoryview(data), out, itemsize)
            if codec.lossless:
                assert out == segment

        check()

    def test_a_block_is_encoded_as_its_segments_are(self) -> None:
        """Segments of all lengths, side by side: none takes from its neighbour."""

        @given(
            parts=st.lists(segments(), max_size=4),
            itemsize=st.sampled_from([1, 2, 4]),
        )
        def check(parts: list[bytes], itemsize: int) -> None:
            codec = self.make()
            lengths = [len(part) for part in parts]
            encoded = codec.encode_block(memoryview(b"".join(parts)), lengths, itemsize)
            assert len(encoded) == len(parts)
            for part, data in zip(parts, encoded, strict=True):
                assert len(data) <= codec.max_encoded_bytes(len(part))
                out = memoryview(bytearray(len(part)))
                codec.decode(memoryview(data), out, itemsize)
                if codec.lossless:
                    assert out == part

        check()

    def test_damage_is_told_or_harmless_and_stays_inside(self) -> None:
        """Cut, flipped or grown data: `DamageError` or wrong bytes, nothing else, none outside."""

        @given(
            segment=segments(),
            itemsize=st.sampled_from([1, 2, 4]),
            flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=4),
            keep=st.floats(0, 1),
            more=st.binary(max_size=8),
        )
        def check(
            segment: bytes, itemsize: int, flips: list[tuple[float, int]], keep: float, more: bytes
        ) -> None:
            codec = self.make()
            encoded = bytearray(codec.encode(memoryview(segment), itemsize))
            for where, mask in flips:
                if encoded:
                    encoded[int(where * (len(encoded) - 1))] ^= mask
            encoded = encoded[: round(keep * len(encoded))] + more
            whole = bytearray(b"\xaa" * (len(segment) + 2 * GUARD))
            out = memoryview(whole)[GUARD : GUARD + len(segment)]
            with contextlib.suppress(DamageError):
                codec.decode(memoryview(encoded), out, itemsize)
            assert whole[:GUARD] == whole[-GUARD:] == b"\xaa" * GUARD

        check()

    def test_garbage_does_no_harm(self) -> None:
        """Bytes that no encoder made."""

        @given(garbage=st.binary(max_size=400), out_bytes=st.integers(0, 600))
        def check(garbage: bytes, out_bytes: int) -> None:
            whole = bytearray(b"\xaa" * (out_bytes + GUARD))
            with contextlib.suppress(DamageError):
                self.make().decode(memoryview(garbage), memoryview(whole)[:out_bytes], 2)
            assert whole[out_bytes:] == b"\xaa" * GUARD

        check()

    def test_threads_share_a_codec(self) -> None:
        """State kept in the codec between calls would mix segments of two threads."""
        codec = self.make()
        wrong: list[int] = []

        def work(seed: int) -> None:
            segment = bf16_like(40_000, seed)
            for _ in range(30):
                data = codec.encode(memoryview(segment), 2)
                out = memoryview(bytearray(len(segment)))
                codec.decode(memoryview(data), out, 2)
                if codec.lossless and out != segment:
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
