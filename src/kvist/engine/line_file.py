"""A file of lines that grows while the engine runs, and never gets in its way.

Owns the descriptor, the size and what happens when the file is full or the disk fails. Knows
nothing of what the lines say. Threads: step thread only.

Lines are kept until `flush`, which is one `write`: some tens of microseconds for what comes
together in a second. Who writes decides when; the file decides what happens at `max_bytes`.
"""

from __future__ import annotations

import logging
import os
from enum import Enum
from pathlib import Path

from kvist.errors import ConfigError

logger = logging.getLogger(__name__)


class WhenFull(Enum):
    """What becomes of a file that has reached its size."""

    TURN_OVER = "the newest lines are kept: FILE becomes FILE.1, and what was that is lost"
    STOP = "the oldest lines are kept: nothing more is written"


class LineFile:
    """Lines on their way into a file.

    Parameters
    ----------
    path : Path
        Made 0600 if need be.
    option : str
        Flag that named it, for messages.
    max_bytes : int
    when_full : WhenFull
    append : bool
        Whether what is there stays.

    Raises
    ------
    ConfigError
        If the file cannot be opened. What fails later ends the file and nothing else.
    """

    def __init__(
        self, path: Path, option: str, max_bytes: int, when_full: WhenFull, *, append: bool
    ) -> None:
        self._path = path
        self._option = option
        self._max_bytes = max_bytes
        self._when_full = when_full
        self._lines: list[str] = []
        try:
            self._fd = self._open(0 if append else os.O_TRUNC)
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise ConfigError(f"{option}={path}: {error.strerror}; name another file") from error

    @property
    def is_open(self) -> bool:
        """Whether lines are still taken."""
        return self._fd >= 0

    def add(self, line: str) -> None:
        """Take a line, without its end. Nothing is written yet."""
        if self.is_open:
            self._lines.append(line)

    def flush(self) -> None:
        """Write what is not written yet."""
        if not self._lines or not self.is_open:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        self._lines.clear()
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                if self._when_full is WhenFull.STOP:
                    self._end(f"it has {self._size} bytes, and {self._max_bytes} are allowed")
                    return
                self._turn_over()
            self._size += os.write(self._fd, data)
        except OSError as error:
            self._end(error.strerror or str(error))

    def close(self) -> None:
        """Write the rest and let go of the file. Harmless when done again."""
        self.flush()
        if self.is_open:
            os.close(self._fd)
            self._fd = -1

    def _open(self, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _turn_over(self) -> None:
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        os.close(self._fd)
        self._fd = -1
        self._fd = self._open(0)
        self._size = 0

    def _end(self, why: str) -> None:
        logger.warning("%s %s: %s; no more is written", self._option, self._path, why)
        if self.is_open:
            os.close(self._fd)
            self._fd = -1
