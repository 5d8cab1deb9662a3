"""What happened, as JSON lines in a file: ``--event-log FILE``.

Owns the form of a line and the size of the file. Knows every event by its fields only, so that a
new one needs nothing here. Threads: step thread only.

A line is ``{"t": seconds since 1970, "event": name, ...}``. Keys are shortened hex, and token ids
are left out: what people wrote does not belong in a log. Lines are written once a second while
steps are run, sooner after the end of a request, and at once when something went wrong; at
`MAX_BYTES` the file becomes ``FILE.1``, and what was that is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvist.engine.line_file import LineFile, WhenFull
from kvist.events import (
    DemotionFailed,
    Event,
    LoadFailed,
    RequestFinished,
    StepDone,
    StepFailed,
    TierSuspended,
)

MAX_BYTES = 64 << 20
FLUSH_S = 1.0
SOON_S = 0.05
_URGENT = (LoadFailed, DemotionFailed, TierSuspended, StepFailed)
_LEFT_OUT = ("token_ids",)


class EventFile:
    """A listener of `EventLog` that writes a file.

    Parameters
    ----------
    path : Path
        Appended to; made 0600.
    max_bytes : int
    clock : callable
        Seconds since 1970.

    Raises
    ------
    ConfigError
        If the file cannot be opened. What fails later ends the log and nothing else.
    """

    def __init__(
        self, path: Path, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = LineFile(path, "--event-log", max_bytes, WhenFull.TURN_OVER, append=True)
        self._clock = clock
        self._flushed_s = clock()
        self._patience_s = FLUSH_S

    def __call__(self, event: Event) -> None:
        """Take note of an event. O(its fields); a write now and then."""
        if not self._file.is_open:
            return
        now = self._clock()
        line: dict[str, Any] = {"t": round(now, 6), "event": type(event).__name__}
        names = event._fields if isinstance(event, tuple) else event.__slots__
        for name in names:
            if name not in _LEFT_OUT:
                line[name] = _plain(getattr(event, name))
        self._file.add(json.dumps(line, separators=(",", ":")))
        if isinstance(event, RequestFinished):
            self._patience_s = SOON_S
        if isinstance(event, _URGENT) or (
            isinstance(event, StepDone) and now - self._flushed_s >= self._patience_s
        ):
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        self._flushed_s = self._clock()
        self._patience_s = FLUSH_S
        self._file.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()[:16]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
