"""The user cache folder, and how a folder in it comes to be: whole, once, or not at all.

Owns where the cache is, its locks and its publishing. Does not know what is put there.

::

    <cache>/models/<key>/          a converted model; there, so complete
    <cache>/models/.<key>.*.tmp    one being made; removed by the next who holds the lock
    <cache>/locks/<key>.lock       held while <key> is being made
    <cache>/digests/<path>.json    digests of model files that could not be kept beside them
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.errors import ConfigError


def cache_dir() -> Path:
    """The user cache: `KVIST_CACHE`, else `$XDG_CACHE_HOME/kvist`, else `~/.cache/kvist`.

    Not created here. An empty variable counts as unset.
    """
    own = os.environ.get("KVIST_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (base / "kvist").absolute()


def make_dir(path: Path) -> Path:
    """Create a folder of the cache with its parents.

    Raises
    ------
    ConfigError
        If that fails; names the folder and the variable that moves the cache elsewhere.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the cache folder {path}: {error.strerror or error}; set KVIST_CACHE to "
            "a folder that can be written"
        ) from error
    return path


@contextmanager
def locked(key: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `key` among all processes of this user.

    Blocks until it is free and calls `on_wait` once before it does. The kernel lets the lock go
    when the holder dies, so a killed process leaves no lock behind (the empty file stays).
    """
    path = make_dir(cache_dir() / "locks") / f"{key}.lock"
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def publish_dir(
    target: Path, build: Callable[[Path], None], on_wait: Callable[[], None] | None = None
) -> Path:
    """Make the folder `target` by `build(work)`, atomically, unless it is already there.

    `build` fills `work / "out"`, which becomes `target`; whatever else it leaves in `work` is
    thrown away. Everything is on disk before the rename, so after a crash the target is there
    whole or not at all. Of several processes one builds and the others wait and find it made.

    Parameters
    ----------
    target
        The folder to make, inside the cache.
    build
        Called with an empty folder beside the target, holding the lock. May raise.
    on_wait
        Called once if another process is at it.
    """
    if target.is_dir():
        return target
    make_dir(target.parent)
    with locked(target.name, on_wait):
        if target.is_dir():
            return target
        # We hold the lock, so whatever is left over has no owner any more.
        for leftover in target.parent.glob(f".{target.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        try:
            out = work / "out"
            out.mkdir()
            build(work)
            _sync_tree(out)
            out.rename(target)
            _sync(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that a reader sees the old one or the new one.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_tree(root: Path) -> None:
    """Flush every file and folder below `root`, readable by whom the umask of `root` lets in."""
    # safetensors writes 0600 whatever the umask is; others on the machine may share a cache.
    mode = root.stat().st_mode & 0o666
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            path.chmod(mode)
            _sync(path)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
