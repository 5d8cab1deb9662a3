"""Copies of bytes that do not hold the interpreter lock, as slice assignment does."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Bytes: TypeAlias = bytes | bytearray | memoryview


def copy_bytes(out: memoryview, data: Bytes) -> None:
    """Fill `out` with `data`, which is as long. Both contiguous, items of one byte.

    A thread that moves megabytes beside the thread that runs the model must not stop it: numpy
    lets go of the lock for all but the shortest copies.
    """
    np.copyto(np.frombuffer(out, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))


def join_bytes(parts: list[Bytes]) -> memoryview:
    """Return one run of bytes made of `parts`, as ``b"".join`` does."""
    whole = np.empty(sum(map(len, parts)), dtype=np.uint8)
    position = 0
    for part in parts:
        whole[position : position + len(part)] = np.frombuffer(part, dtype=np.uint8)
        position += len(part)
    return whole.data
