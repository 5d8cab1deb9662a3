"""Every call that the disk tier makes on files, in one place.

Owns the translation to the operating system, and nothing of what the bytes mean. Tests put another
`Files` in its place that fails, tears, reorders or remembers; nothing else of the tier opens,
reads, writes or locks a file (SQLite does for its index, which is rebuilt when it comes out wrong).

Only `preadv` and `pwritev`, never a mapping: a mapped file that shrinks, or a sector that cannot be
read, kills the process with a signal, where a call answers with an error.

Threads: any; a `Files` has no state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from kvist.errors import ConfigError

_FLOCK = struct.Struct("@hhqqi0q")

NETWORK_FILESYSTEMS = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "fuse.ceph"),
        *("fuse.cephfs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"),
    }
)
"""Where locks and caches of other machines cannot be relied on."""


class Files:
    """Calls on files. Every one may raise `OSError`."""

    def open(self, path: Path, *, create: bool) -> int:
        """Open a regular file of our own to read and write, 0600; links are not followed.

        Raises
        ------
        ConfigError
            If it is no regular file, or another user's.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            os.close(fd)
            raise ConfigError(
                f"{path} is not a regular file of this user; choose another directory"
            )
        return fd

    def open_direct(self, fd: int) -> int | None:
        """Open the file behind `fd` once more, to write past the page cache.

        ``None`` where that cannot be. Locks taken through `fd` are not those of the other.
        """
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return None

    def restrict(self, fd: int) -> None:
        """Let nobody but the owner read or write the file."""
        os.fchmod(fd, 0o600)

    def close(self, fd: int) -> None:
        """Close; locks taken through `fd` go with it."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the length in bytes."""
        return os.fstat(fd).st_size

    def lies_at(self, fd: int, path: Path) -> bool:
        """Whether `path` still names the open file: it may have been deleted or moved away."""
        try:
            return os.path.samestat(os.fstat(fd), path.stat())
        except FileNotFoundError:
            return False

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` on; return the bytes read, fewer only at the file's end."""
        done = 0
        views = list(buffers)
        while views:
            count = os.preadv(fd, views, offset + done)
            if count == 0:
                break
            done += count
            views = _after(views, count)
        return done

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write `buffers` one after the other at `offset`."""
        done = os.pwritev(fd, buffers, offset)
        views = _after([memoryview(buffer) for buffer in buffers], done)
        while views:
            count = os.pwritev(fd, views, offset + done)
            done += count
            views = _after(views, count)

    def reserve(self, fd: int, length: int) -> None:
        """Make the first `length` bytes the file's own on the device: no later write lacks room."""
        os.posix_fallocate(fd, 0, length)

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file to `length` bytes."""
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """Return when what was written is on the device."""
        os.fdatasync(fd)

    def will_need(self, fd: int, offset: int, length: int) -> None:
        """Say that these bytes are read soon."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)

    def lock(self, fd: int, start: int, length: int, *, exclusive: bool) -> bool:
        """Try to lock a range, also one beyond the end; ``False`` if another holds it.

        The lock belongs to this opening of the file (an OFD lock): it ends with `unlock`, `close`
        or the process, however that ends. A lock held already is changed to the other kind.
        """
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, fd: int, start: int, length: int) -> None:
        """Let go of a range."""
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0)
        )

    def is_locked(self, fd: int, start: int, length: int) -> bool:
        """Whether somebody else has locked a part of a range."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def file_bytes(self, path: Path) -> int:
        """Return what a file takes on its device, 0 if there is none."""
        try:
            return path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def filesystem(self, path: Path) -> str:
        """Return the kind of the file system that `path` lies on, ``""`` if nobody says."""
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        for line in mounts.splitlines():
            fields, _, described = line.partition(" - ")
            if fields.split()[2] == wanted:
                return described.split()[0]
        return ""

    def boot_id(self) -> str:
        """Return what changes with every start of the machine, ``""`` if nobody says."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def make_private(directory: Path) -> None:
    """Make a directory that only its owner enters, or see that nobody else can write to one.

    Raises
    ------
    ConfigError
        If it cannot be made, is no directory, or is open to other users.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except OSError as error:
        raise ConfigError(f"disk tier at {directory}: {error.strerror}") from error
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"disk tier at {directory}: it has mode {stat.S_IMODE(facts.st_mode):04o} and belongs"
            f" to user {facts.st_uid}, so others can replace what lies in it; chmod 700 it as the"
            " user who serves, or name another"
        )


def require_local(files: Files, directory: Path) -> str:
    """Return the kind of file system that `directory` lies on.

    Raises
    ------
    ConfigError
        If it is one that other machines share.
    """
    kind = files.filesystem(directory)
    if kind in NETWORK_FILESYSTEMS:
        raise ConfigError(
            f"disk tier at {directory}: the file system is {kind}, shared between machines, where"
            " locks and caches cannot be relied on; name a local directory, or use a redis:// tier"
        )
    return kind
