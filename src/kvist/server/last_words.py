"""What is said of an engine's process that failed or ended, in words that help.

Knows neither sockets nor who waits.
"""

from __future__ import annotations

import signal

from kvist import errors
from kvist.errors import EngineDeadError, KvistError


def revive(kind: str, message: str) -> KvistError:
    """Return the error that the engine's process told of: ours by its own class."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, KvistError):
        return known(message)
    return EngineDeadError(f"the engine broke: {kind}: {message}")


def obituary(returncode: int | None) -> str:
    """Return why a process is gone that said nothing."""
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
        return f"the engine's process was ended by {name}{hint}; start the server again"
    return (
        f"the engine's process ended with exit code {returncode}; its last words are in the log"
        " above. Start the server again"
    )
