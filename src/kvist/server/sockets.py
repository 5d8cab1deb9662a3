"""The folder in which the sockets between server and engine lie.

Owns its making, its privacy and its end. A server that is killed cannot clean up behind itself, so
the next one to start does. Knows nothing of what is said over the sockets. POSIX only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from kvist.errors import ConfigError

_PREFIX = "kvist-"
_LOCK = "lock"

_MAX_FOLDER_BYTES = 90
"""A Unix socket's path has room for 107 bytes; ours add at most 9."""


class SocketFolder:
    """A folder in which only this user may connect (mkdtemp: 0700).

    A lock in it is held as long as this process lives, however that ends. Abstract sockets would
    need no folder, and let every user of the machine in.

    Raises
    ------
    ConfigError
        If the temporary folder has too long a name for a socket in it.
    """

    def __init__(self) -> None:
        _remove_left_behind(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(self.path)) > _MAX_FOLDER_BYTES:
            self.path.rmdir()
            raise ConfigError(
                f"the temporary folder {self.path.parent} has too long a name for a socket in it;"
                " set TMPDIR to a shorter one"
            )
        # Locked before it bears the name that is looked for: none is taken for left behind.
        new = self.path / "new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def endpoint(self, name: str) -> str:
        """Return the address of a socket in it, as ZeroMQ wants it."""
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """Remove it and what is in it. The sockets should be closed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_left_behind(parent: Path) -> None:
    """Remove folders of ours whose server is gone."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its server lives, or somebody else was quicker
