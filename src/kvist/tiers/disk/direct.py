"""Writing past the page cache, where the file system can.

Owns a second opening of a file. Knows nothing of what is written.

What goes down to a disk lies on the device above at that time: another copy of it in memory would
be of no use, and costs more than all else that is done to store it, since its pages have to be
found, filled and written back. Loads go through the page cache: what is read again is there.

Threads: one at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvist.tiers.disk.files import Files

PAGE_BYTES = 4096


class DirectWrites:
    """Writes of whole pages to an open file.

    Parameters
    ----------
    files : Files
    fd : int
        The file; opened once more when the first write comes.
    """

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._direct: int | None = None
        self._gave_up = False

    def write(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Write `buffers` one after the other at `offset`; ``False`` where that cannot be.

        Then nothing, or a part, was written, and they are to be written through the cache.
        """
        if self._gave_up or any(len(buffer) % PAGE_BYTES for buffer in buffers):
            return False
        if self._direct is None:
            self._direct = self._files.open_direct(self._fd)
        if self._direct is not None:
            try:
                self._files.write(self._direct, buffers, offset)
            except OSError as error:
                # The device wants other borders, or memory that begins at others.
                if error.errno != errno.EINVAL:
                    raise
            else:
                return True
        self._gave_up = True
        return False

    def close(self) -> None:
        """Close what was opened."""
        if self._direct is not None:
            self._files.close(self._direct)
            self._direct = None
