"""The slab file: bytes of records and their headers, read and written at exact places.

Owns the file, its superblock, its size, and the locks on it. Knows nothing of which records there
are; what a reader gets is what lies there, verified by whoever asked.

Locks are OFD locks on this opening of the file, gone with the process that holds them::

    byte of a header slot    exclusive: a record is being written there (its lease)
    PRESENCE                 shared: a process uses the store · exclusive: and it is the only one
    SETUP                    exclusive: opening, creating, resizing, rebuilding

Threads: any; one that writes. Callers see to it that nobody reads what another writes, or verify
what they read.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvist.errors import ConfigError, DamageError
from kvist.sizes import format_size
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.direct import DirectWrites
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.layout import (
    DATA_START,
    EMPTY_SLOT,
    FORMAT_VERSION,
    HEADER_BYTES,
    RECORD_MAGIC,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    ZONE_BYTES,
    ZONE_EXTENTS,
    Header,
    Superblock,
    is_torn_superblock,
    padded,
    pieces,
    slab_bytes,
    slot_offset,
    version_of,
)
from kvist.tiers.extents import EXTENT_BYTES, Run

SLAB_NAME = "kvist.slab"
_PRESENCE = 1 << 62
_SETUP = _PRESENCE + 1
_SETUP_WAIT_S = 10.0


class Slab:
    """An open slab file. Built by `open_slab`.

    Parameters
    ----------
    files : Files
    fd : int
    path : Path
    superblock : Superblock
    checksum : SegmentChecksum
        For headers; the records' own checksums are the caller's.
    """

    def __init__(
        self, files: Files, fd: int, path: Path, superblock: Superblock, checksum: SegmentChecksum
    ) -> None:
        self._files = files
        self._fd = fd
        self.path = path
        self.superblock = superblock
        self.checksum = checksum
        self._direct = DirectWrites(files, fd)

    # ------------------------------------------------------------------ records

    def read(self, runs: Sequence[Run], start: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes of a record from byte `start` of it on.

        Raises
        ------
        DamageError
            If the file ends before.
        OSError
        """
        end = start + sum(map(len, buffers))
        for (offset, length), views in zip(
            found := pieces(runs, start, end), _cut(buffers, found), strict=True
        ):
            if (count := self._files.read(self._fd, views, offset)) != length:
                raise DamageError(
                    f"{self.path} was cut short: it ends {length - count} bytes before a record"
                )

    def write(self, runs: Sequence[Run], buffers: Sequence[memoryview | bytes]) -> None:
        """Write the bytes of a record."""
        found = pieces(runs, 0, sum(map(len, buffers)))
        views = [memoryview(buffer) for buffer in buffers]
        for (offset, _), part in zip(found, _cut(views, found), strict=True):
            if not self._direct.write(part, offset):
                self._files.write(self._fd, part, offset)

    def will_need(self, runs: Sequence[Run], start: int, end: int) -> None:
        """Let the device begin to read a stretch of a record."""
        for offset, length in pieces(runs, start, end):
            self._files.will_need(self._fd, offset, length)

    # ------------------------------------------------------------------ headers

    def write_header(self, slot: int, header: bytes) -> None:
        """Write a packed header into its slot."""
        self._files.write(self._fd, [padded(header)], slot_offset(slot))

    def has_header(self, slot: int, header: bytes) -> bool:
        """Whether a slot holds this packed header."""
        buffer = bytearray(len(header))
        self._files.read(self._fd, [memoryview(buffer)], slot_offset(slot))
        return buffer == header

    def clear_header(self, slot: int) -> None:
        """Make a slot empty."""
        self._files.write(self._fd, [EMPTY_SLOT], slot_offset(slot))

    def headers(self) -> Iterator[tuple[int, Header | None]]:
        """Iterate over the slots that are not empty: slot, and its header or ``None`` if damaged.

        Reads 1/65 of the slab.
        """
        buffer = memoryview(bytearray(EXTENT_BYTES))
        for zone in range(self.superblock.num_zones):
            first = zone * ZONE_EXTENTS
            count = self._files.read(self._fd, [buffer], slot_offset(first))
            for index in range(count // HEADER_BYTES):
                data = buffer[index * HEADER_BYTES :][:HEADER_BYTES]
                if data[: len(RECORD_MAGIC)] == RECORD_MAGIC:
                    yield first + index, self._header(first + index, bytes(data))
                elif data != EMPTY_SLOT:
                    yield first + index, None

    def _header(self, slot: int, data: bytes) -> Header | None:
        try:
            header = Header.unpack(data, self.checksum)
        except DamageError:
            return None
        return header if header.slot == slot else None

    # ------------------------------------------------------------------ locks

    def lease(self, slot: int) -> bool:
        """Take the lease on a slot; ``False`` if another has it."""
        return self._files.lock(self._fd, slot_offset(slot), HEADER_BYTES, exclusive=True)

    def end_lease(self, slot: int) -> None:
        """Let go of the lease on a slot."""
        self._files.unlock(self._fd, slot_offset(slot), HEADER_BYTES)

    def is_leased(self, slot: int) -> bool:
        """Whether somebody else has the lease on a slot."""
        return self._files.is_locked(self._fd, slot_offset(slot), HEADER_BYTES)

    def be_alone(self) -> bool:
        """Try to become the only process that uses the store; the others stay where it fails."""
        return self._files.lock(self._fd, _PRESENCE, 1, exclusive=True)

    def be_present(self) -> None:
        """Use the store beside others."""
        self._files.lock(self._fd, _PRESENCE, 1, exclusive=False)

    def end_setup(self) -> None:
        """Let others open, resize or rebuild the store."""
        self._files.unlock(self._fd, _SETUP, 1)

    # ------------------------------------------------------------------ the whole

    def resize(self, num_zones: int) -> None:
        """Grow, or cut zones off the end with what is in them. REQUIRES: alone.

        Raises
        ------
        ConfigError
            If the device has no room.
        """
        old = self.superblock
        self.superblock = Superblock(num_zones, old.slab_id, old.scheme, old.key_id, old.created_s)
        if num_zones > old.num_zones:
            _reserve(self._files, self._fd, self.path, slab_bytes(num_zones))
        write_superblock(self._files, self._fd, self.superblock)
        if num_zones < old.num_zones:
            self._files.truncate(self._fd, slab_bytes(num_zones))

    def is_in_place(self) -> bool:
        """Whether the next process that opens the store would find this file."""
        return self._files.lies_at(self._fd, self.path)

    def sync(self) -> None:
        """Return when all that was written is on the device."""
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the file and end all locks."""
        self._direct.close()
        self._files.close(self._fd)


def open_slab(
    files: Files,
    directory: Path,
    num_zones: int | None,
    checksum: SegmentChecksum,
    now_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Slab, bool]:
    """Open the slab of a store, or create it, with SETUP held and presence told.

    Parameters
    ----------
    num_zones : int or None
        Size if it is created; ``None`` refuses to create.
    now_s : float
        Wall clock.

    Returns
    -------
    slab : Slab
        Of the size that it has; `Slab.resize` changes it.
    created : bool

    Raises
    ------
    ConfigError
        If there is none and none shall be made; if it is foreign, of another version, of another
        tier key, damaged at the root; if the device has no room or another process holds SETUP.
    """
    path = directory / SLAB_NAME
    try:
        fd = files.open(path, create=num_zones is not None)
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} holds no store: there is no {SLAB_NAME} in it") from error
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    try:
        waited = 0.0
        while not files.lock(fd, _SETUP, 1, exclusive=True):
            if waited >= _SETUP_WAIT_S:
                raise ConfigError(f"{path} is being set up by another process for {waited:.0f} s")
            sleep(0.05)
            waited += 0.05
        created = _is_blank(files, fd)
        if created:
            if num_zones is None:
                raise ConfigError(f"{path} is empty; it holds no store")
            superblock = _create(files, fd, path, num_zones, checksum, now_s)
        else:
            superblock = read_superblock(files, fd, path)
            _require_key(path, superblock, checksum)
            # Where a hole was punched or the end was cut off, writes must not meet a full device.
            _reserve(files, fd, path, slab_bytes(superblock.num_zones))
        slab = Slab(files, fd, path, superblock, checksum)
        slab.be_present()
    except OSError as error:
        files.close(fd)
        raise ConfigError(f"cannot use {path}: {error.strerror}") from error
    except BaseException:
        files.close(fd)
        raise
    return slab, created


def _is_blank(files: Files, fd: int) -> bool:
    """Whether the file is new, or somebody's who ended before the superblock was written.

    `write_superblock` begins with the second copy and syncs it; power lost before leaves sectors of
    that one, and no headers. A slab that has headers and lost both copies is one to be repaired.
    """
    buffer = bytearray(DATA_START)
    files.read(fd, [memoryview(buffer)], 0)
    second = slice(SUPERBLOCK_BYTES, 2 * SUPERBLOCK_BYTES)
    torn = bytes(buffer[second])
    buffer[second] = bytes(SUPERBLOCK_BYTES)
    if any(buffer) or not is_torn_superblock(torn):
        return False
    for zone in range(max(0, files.size(fd) - DATA_START) // ZONE_BYTES):
        files.read(fd, [memoryview(buffer)], slot_offset(zone * ZONE_EXTENTS))
        if any(buffer):
            return False
    return True


def _create(
    files: Files,
    fd: int,
    path: Path,
    num_zones: int,
    checksum: SegmentChecksum,
    now_s: float,
) -> Superblock:
    superblock = Superblock(num_zones, os.urandom(16), checksum.scheme, checksum.key_id, now_s)
    files.restrict(fd)
    files.truncate(fd, 0)
    try:
        _reserve(files, fd, path, slab_bytes(num_zones))
        # Written last: what has none was never used, should this process end here.
        write_superblock(files, fd, superblock)
    except BaseException:
        files.truncate(fd, 0)
        raise
    return superblock


def _reserve(files: Files, fd: int, path: Path, length: int) -> None:
    try:
        files.reserve(fd, length)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        facts = os.statvfs(path)
        raise ConfigError(
            f"the disk tier needs {format_size(length)} at {path}, and the device has"
            f" {format_size(facts.f_bavail * facts.f_frsize)} left; give it less, or another place"
        ) from error


def write_superblock(files: Files, fd: int, superblock: Superblock) -> None:
    """Write both copies, synced."""
    # The copies one after the other, so that one is whole at any time.
    for offset in reversed(SUPERBLOCK_OFFSETS):
        files.write(fd, [superblock.pack()], offset)
        files.sync(fd)


def read_superblock(files: Files, fd: int, path: Path) -> Superblock:
    """Return what the first whole copy says.

    Raises
    ------
    ConfigError
        If the file is foreign, of another version, or both copies are damaged.
    """
    copies: list[bytes] = []
    for offset in SUPERBLOCK_OFFSETS:
        buffer = bytearray(SUPERBLOCK_BYTES)
        files.read(fd, [memoryview(buffer)], offset)
        copies.append(bytes(buffer))
    whole = [found for copy in copies if (found := Superblock.unpack(copy)) is not None]
    versions = {version for copy in copies if (version := version_of(copy)) is not None}
    if whole:
        files.restrict(fd)
        return whole[0]
    if not versions:
        raise ConfigError(
            f"{path} begins with {copies[0][:8]!r} and is no slab of Kvist; it was left alone."
            " Name another directory"
        )
    if versions and FORMAT_VERSION not in versions:
        raise ConfigError(
            f"{path} has format {max(versions)}, this Kvist reads format {FORMAT_VERSION};"
            " use the Kvist that wrote it, or another directory"
        )
    raise ConfigError(
        f"both superblocks of {path} are damaged; `kvist inspect --repair {path.parent}` finds out"
        " what can be saved, or remove the directory: everything in it can be computed again"
    )


def _require_key(path: Path, superblock: Superblock, checksum: SegmentChecksum) -> None:
    if superblock.scheme != checksum.scheme:
        raise ConfigError(
            f"{path} was made with {superblock.scheme} checksums, this tier uses {checksum.scheme};"
            " give the --tier-key that it was made with (or none), or another directory"
        )
    if superblock.key_id != checksum.key_id:
        raise ConfigError(f"{path} was made with another --tier-key; give that one")


def _cut(buffers: Sequence[memoryview], found: Sequence[tuple[int, int]]) -> list[list[memoryview]]:
    """Cut buffers into as many bytes as each piece has."""
    if len(found) == 1:
        return [list(buffers)]
    parts: list[list[memoryview]] = []
    views = list(buffers)
    for _, length in found:
        part: list[memoryview] = []
        missing = length
        while missing:
            view = views.pop(0)
            if len(view) > missing:
                views.insert(0, view[missing:])
                view = view[:missing]
            part.append(view)
            missing -= len(view)
        parts.append(part)
    return parts
