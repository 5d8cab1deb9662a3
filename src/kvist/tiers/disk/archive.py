"""A store in one file, and back: `kvist inspect --backup` and `--restore`.

Owns the format of that file; ``docs/formats.md`` describes it. A backup is taken while others
serve: every record in it was whole when it was read, and what left meanwhile is not in it. Nothing
in a backup is believed but what its checksums say.

Threads: one.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from kvist.errors import ConfigError, DamageError
from kvist.tiers.base import BlockMeta, Namespace, Outcome
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.care import stored_records
from kvist.tiers.disk.coding import Put, parse_label
from kvist.tiers.disk.layout import HEADER_BYTES, Header, Kind
from kvist.tiers.disk.opening import budget_for
from kvist.tiers.disk.store import DiskStore

MAGIC = b"KVISTBAK"
BACKUP_VERSION = 1
_U32 = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_BATCH_RECORDS = 32
_BATCH_BYTES = 16 << 20
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What went from one place to the other.

    `left_out` records were damaged or gone when they were read; `refused` ones were there already,
    or found no room.
    """

    num_records: int = 0
    num_bytes: int = 0
    left_out: int = 0
    refused: int = 0


def backup(store: DiskStore, path: Path) -> Copied:
    """Write all that is published and whole to `path`, 0600, whole or not at all.

    Raises
    ------
    ConfigError
        If the file cannot be written, or lies in the store's own directory: what is in there is
        bounded.
    """
    if path.resolve().parent == store.slab.path.resolve().parent:
        raise ConfigError(
            f"{path} lies in the directory of the tier, whose size is bounded; write the backup"
            " to another one"
        )
    partial = path.with_name(path.name + ".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            copied = _write(store, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the backup {path}: {error.strerror}") from error
    return copied


def _write(store: DiskStore, file: BinaryIO) -> Copied:
    facts = store.slab.superblock
    about = json.dumps(
        {
            "version": BACKUP_VERSION,
            "checksums": facts.scheme,
            "key_id": facts.key_id.hex(),
            "budget_bytes": budget_for(facts.num_zones),
        }
    ).encode()
    file.write(MAGIC + _U32.pack(len(about)) + about)
    count = nbytes = left_out = 0
    for record, data in stored_records(store):
        if data is None:
            left_out += 1
            continue
        file.write(_U32.pack(len(record.data)))
        file.write(record.data)
        file.write(data)
        count += 1
        nbytes += len(data)
    file.write(_U32.pack(0) + _COUNT.pack(count))
    return Copied(count, nbytes, left_out)


def budget_in(path: Path) -> int:
    """Return the budget of the store that a backup is of.

    Raises
    ------
    ConfigError
        If it is no backup.
    """
    with _opened(path) as file:
        return int(_about(file, path)["budget_bytes"])


def restore(store: DiskStore, path: Path) -> Copied:
    """Store what a backup holds, beside what is there. Works while others serve.

    Raises
    ------
    ConfigError
        If it is no backup, is of another tier key, or is cut short: what came before the cut was
        restored.
    """
    labels: dict[bytes, Namespace] = {}
    total = Copied()
    batch: list[Put] = []
    try:
        for put in _puts(path, store.slab.checksum):
            if put is None:
                total = replace(total, left_out=total.left_out + 1)
            elif put.kind is Kind.NAMESPACE:
                label = parse_label(put.namespace, bytes(put.segments[0]))
                labels.update({} if label is None else {label.digest: label})
            elif put.namespace not in labels:
                # Without its descriptor nobody knows how to cut a block.
                total = replace(total, left_out=total.left_out + 1)
            else:
                batch.append(put)
            full = sum(one.stored_bytes for one in batch) > _BATCH_BYTES
            if full or len(batch) == _BATCH_RECORDS:
                total = _store_batch(store, batch, labels, total)
                batch = []
    except ConfigError:
        # Cut short: what came before the cut is as good as any.
        _store_batch(store, batch, labels, total)
        raise
    return _store_batch(store, batch, labels, total)


def _store_batch(
    store: DiskStore, batch: list[Put], labels: dict[bytes, Namespace], total: Copied
) -> Copied:
    if not batch:
        return total
    try:
        answers = store.write(batch, {put.namespace: labels[put.namespace] for put in batch})
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"the restore stopped after {total.num_records} blocks: {error}"
        ) from error
    stored = [put for put, (what, _) in zip(batch, answers, strict=True) if what is Outcome.DONE]
    return replace(
        total,
        num_records=total.num_records + len(stored),
        num_bytes=total.num_bytes + sum(put.stored_bytes for put in stored),
        refused=total.refused + len(batch) - len(stored),
    )


def _puts(path: Path, checksum: SegmentChecksum) -> Iterator[Put | None]:
    """Iterate over the records of a backup; ``None`` for one that is damaged."""
    with _opened(path) as file:
        about = _about(file, path)
        if about["key_id"] != checksum.key_id.hex():
            raise ConfigError(f"{path} was made with another --tier-key; give that one")
        count = 0
        while length := _U32.unpack(_exactly(file, _U32.size, path))[0]:
            if length > HEADER_BYTES:
                raise ConfigError(f"{path} is damaged after {count} records")
            count += 1
            data = _exactly(file, length, path)
            header = Header.unpack(data, checksum)
            body = memoryview(_exactly(file, header.stored_bytes, path))
            yield _put(header, body, checksum)
        (expected,) = _COUNT.unpack(_exactly(file, _COUNT.size, path))
        if expected != count:
            raise ConfigError(f"{path} ends with {count} of {expected} records")


def _put(header: Header, body: memoryview, checksum: SegmentChecksum) -> Put | None:
    segments: list[memoryview] = []
    position = 0
    for index, (length, digest) in enumerate(header.segments):
        segment = body[position : position + length]
        if checksum.digest(header.namespace, header.key, index, segment) != digest:
            return None
        segments.append(segment)
        position += length
    return Put(
        header.namespace,
        header.key,
        BlockMeta(header.parent, header.depth, header.recompute_s),
        tuple(segments),
        tuple(digest for _, digest in header.segments),
        header.exact,
        header.wire_id,
        header.kind,
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a backup; what cannot be read, or is not believed, is one kind of error."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read the backup {path}: {error.strerror}") from error
    except DamageError as error:
        raise ConfigError(f"{path} is damaged, or of another tier key: {error}") from error


def _about(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Read what stands at the beginning of a backup."""
    if _exactly(file, len(MAGIC), path) != MAGIC:
        raise ConfigError(f"{path} is no backup of a disk tier")
    (length,) = _U32.unpack(_exactly(file, _U32.size, path))
    try:
        about: dict[str, Any] = json.loads(_exactly(file, min(length, 1 << 16), path))
        version = about["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged at its beginning") from error
    if version != BACKUP_VERSION:
        raise ConfigError(f"{path} has version {version}, this Kvist reads {BACKUP_VERSION}")
    return about


def _exactly(file: BinaryIO, length: int, path: Path) -> bytes:
    # Bit by bit: a length that somebody made up must not take the memory.
    parts: list[bytes] = []
    while length:
        part = file.read(min(length, _READ_BYTES))
        if not part:
            raise ConfigError(f"{path} is cut short; what came before the cut was restored")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
