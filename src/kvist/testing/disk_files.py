"""Files that fail, and files that remember: what the fault tests of the disk tier put in its place.

Owns two `Files`. `FailingFiles` answers chosen calls with an error; `LoggedFiles` notes what was
written and what was synced, so that a test can build every file that a loss of power may leave.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.tiers.disk.files import Files

SECTOR_BYTES = 512


class FailingFiles(Files):
    """Calls fail where a test wants it.

    Attributes
    ----------
    fails : callable
        From the name of a call and how often it was made to the error number to fail with, or 0.
        A write that fails has written its first half.
    counts : Counter
        Calls made.
    """

    def __init__(self, fails: Callable[[str, int], int] | None = None) -> None:
        self.fails = fails or (lambda name, count: 0)
        self.counts: Counter[str] = Counter()

    def open_direct(self, fd: int) -> int | None:
        """See `Files.open_direct`: not here, since half a block is what no device takes."""
        return None

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files.read`."""
        self._maybe_fail("read")
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """See `Files.write`."""
        try:
            self._maybe_fail("write")
        except OSError:
            whole = b"".join(buffers)
            super().write(fd, [whole[: len(whole) // 2]], offset)
            raise
        super().write(fd, buffers, offset)

    def reserve(self, fd: int, length: int) -> None:
        """See `Files.reserve`."""
        self._maybe_fail("reserve")
        super().reserve(fd, length)

    def sync(self, fd: int) -> None:
        """See `Files.sync`."""
        self._maybe_fail("sync")
        super().sync(fd)

    def will_need(self, fd: int, offset: int, length: int) -> None:
        """See `Files.will_need`."""
        self._maybe_fail("will_need")
        super().will_need(fd, offset, length)

    def lock(self, fd: int, start: int, length: int, *, exclusive: bool) -> bool:
        """See `Files.lock`."""
        self._maybe_fail("lock")
        return super().lock(fd, start, length, exclusive=exclusive)

    def _maybe_fail(self, name: str) -> None:
        self.counts[name] += 1
        number = self.fails(name, self.counts[name])
        if number:
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True)
class Written:
    """One write to a file; `epoch` counts the syncs before it."""

    offset: int
    data: bytes
    epoch: int


class LoggedFiles(Files):
    """Remembers what was written to the slab since `start`.

    Attributes
    ----------
    log : list of Written
    epoch : int
        Syncs so far: what was written before the last one is on the device whatever happens.
    """

    def __init__(self) -> None:
        self.log: list[Written] = []
        self.epoch = 0

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """See `Files.write`."""
        self.log.append(Written(offset, b"".join(buffers), self.epoch))
        super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """See `Files.sync`."""
        super().sync(fd)
        self.epoch += 1


def after_power_loss(
    path: Path, blank_bytes: int, log: Sequence[Written], lost: Callable[[int, int], bool]
) -> None:
    """Make the file at `path` what a loss of power may have left of it.

    Parameters
    ----------
    blank_bytes : int
        Length of the file; it is zeros where nothing was written.
    log : sequence of Written
        In the order in which the writes reach the device, whatever that is.
    lost : callable
        From the number of a write in `log` and of a sector in it to whether that sector never
        reached the device.
    """
    with path.open("wb") as file:
        file.truncate(blank_bytes)
        for number, written in enumerate(log):
            for start in range(0, len(written.data), SECTOR_BYTES):
                if not lost(number, start // SECTOR_BYTES):
                    file.seek(written.offset + start)
                    file.write(written.data[start : start + SECTOR_BYTES])
