"""The index: which slots hold what, in SQLite, for a quick start and for several processes at once.

Owns the database file and its bounds. It is a copy of what the headers in the slab say, plus
recency: when it is missing, damaged or of another boot, it is built anew from them. It holds a row
a slot; a freed slot keeps its row, so that whoever follows by `seq` sees that it was freed::

    slot  number of the first extent            seq   grows with every change: what is new since?
    state FREE · WRITING · LIVE                 header as in the slab, without padding
    hits, used  as of the last flush; `used` is a counter, not a clock, so clocks may jump

SQLite runs in WAL mode with ``mmap_size=0``: a truncated file is an error, not a signal. The file
is limited by ``max_page_count``, the log by `LOG_LIMIT_BYTES`.

Threads: one at a time. Everything may raise `sqlite3.Error`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kvist.errors import ConfigError
from kvist.tiers.disk.files import Files

INDEX_NAME = "kvist.index"
INDEX_VERSION = 1
PAGE_BYTES = 4096
LOG_LIMIT_BYTES = 2 << 20
MAX_ROWS_A_TRANSACTION = 64
_APPLICATION_ID = 0x4B565354
_BUSY_MS = 5_000
_LOG_TRIES = 3
_ROW_BYTES = 512
_BASE_PAGES = 64
# The log may be just under its limit when a transaction begins.
_TRANSACTION_BYTES = 4 << 20
_SHARED_MEMORY_BYTES = 64 << 10

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE slots (
    slot INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    state INTEGER NOT NULL,
    header BLOB,
    hits INTEGER NOT NULL DEFAULT 0,
    used INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX slots_by_seq ON slots (seq);
"""


def index_bytes(num_extents: int) -> int:
    """Return the most that the index of so many extents takes on the device, log and all."""
    return (
        _max_pages(num_extents) * PAGE_BYTES
        + LOG_LIMIT_BYTES
        + _TRANSACTION_BYTES
        + _SHARED_MEMORY_BYTES
    )


def _max_pages(num_extents: int) -> int:
    return _BASE_PAGES + -(-num_extents * _ROW_BYTES // PAGE_BYTES)


class State(IntEnum):
    """Of a slot."""

    FREE = 0
    WRITING = 1
    LIVE = 2


class Row(NamedTuple):
    """One slot, as the index has it."""

    slot: int
    seq: int
    state: int
    header: bytes | None
    hits: int = 0
    used: int = 0


class StaleIndexError(Exception):
    """The index is not one that can be used: of another slab, version or boot, or damaged."""


class Index:
    """An open index.

    Parameters
    ----------
    directory : Path
    num_extents : int
        For the limit on its size.
    slab_id : bytes
        Of the slab that it must belong to.
    boot_id : str
        An index of another boot may lack what was published before power was lost.

    Raises
    ------
    StaleIndexError
        If it must be built anew.
    ConfigError
        If the file is another program's database.
    """

    def __init__(
        self, files: Files, directory: Path, num_extents: int, slab_id: bytes, boot_id: str
    ) -> None:
        self.path = directory / INDEX_NAME
        self._log_path = self.path.with_name(INDEX_NAME + "-wal")
        self._files = files
        self._is_new = not self.path.exists()
        if self._is_new:
            # SQLite gives its log the mode of the database: 0600 from the first byte on.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000
        )
        try:
            self._prepare(num_extents, slab_id, boot_id)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # SQLite quotes what it cannot read, and that need not be text.
            self._db.close()
            raise StaleIndexError(str(error)) from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, num_extents: int, slab_id: bytes, boot_id: str) -> None:
        self._db.executescript(
            f"PRAGMA page_size={PAGE_BYTES}; PRAGMA mmap_size=0; PRAGMA journal_mode=WAL;"
            "PRAGMA synchronous=NORMAL; PRAGMA temp_store=MEMORY; PRAGMA cell_size_check=ON;"
            f"PRAGMA max_page_count={_max_pages(num_extents)};"
            f"PRAGMA journal_size_limit={LOG_LIMIT_BYTES // 2};"
            f"PRAGMA wal_autocheckpoint={LOG_LIMIT_BYTES // 4 // PAGE_BYTES};"
        )
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master")}
        if tables and not tables & {"facts", "slots"}:
            raise ConfigError(
                f"{self.path} is a database of another program (tables: {', '.join(sorted(tables))}"
                "); it was left alone. Name another directory"
            )
        if not tables:
            with self.transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.executemany(
                    "INSERT INTO facts VALUES (?, ?)",
                    [("version", INDEX_VERSION), ("slab", slab_id), ("boot", boot_id)],
                )
            if not self._is_new:
                raise StaleIndexError("the index was empty")
            self._db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            return
        facts = dict(self._db.execute("SELECT name, value FROM facts"))
        expected = {"version": INDEX_VERSION, "slab": slab_id, "boot": boot_id}
        if different := [name for name, value in expected.items() if facts.get(name) != value]:
            raise StaleIndexError(f"the index is of another {', '.join(different)}")

    @property
    def is_new(self) -> bool:
        """Whether the file was made just now and says nothing yet."""
        return self._is_new

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Be the only writer, of all processes; undo everything if the body raises."""
        self._begin()
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _begin(self) -> None:
        """Begin a transaction, the log written back before it outgrows its limit.

        Raises
        ------
        sqlite3.OperationalError
            If another process reads all the time, so that it cannot be.
        """
        for _ in range(_LOG_TRIES):
            if self._log_is_full():
                self.checkpoint()
            self._db.execute("BEGIN IMMEDIATE")
            # Looked at again: others who waited for their turn too have written since.
            if not self._log_is_full():
                return
            self._db.execute("ROLLBACK")
        raise sqlite3.OperationalError(
            f"the log of {self.path} holds {LOG_LIMIT_BYTES} bytes that others still read"
        )

    def _log_is_full(self) -> bool:
        return self._files.file_bytes(self._log_path) >= LOG_LIMIT_BYTES

    def checkpoint(self) -> None:
        """Write the log back into the database and cut it to nothing, as far as others let it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def version(self) -> int:
        """Return what changes when another process commits. A few µs."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def changes(self, after_seq: int) -> list[Row]:
        """Return the rows that changed after `after_seq`, oldest change first."""
        found = self._db.execute(
            "SELECT slot, seq, state, header, hits, used FROM slots WHERE seq > ? ORDER BY seq",
            (after_seq,),
        )
        return [Row(*fields) for fields in found]

    def rows(self) -> list[Row]:
        """Return all rows, by slot."""
        found = self._db.execute("SELECT slot, seq, state, header, hits, used FROM slots")
        return [Row(*fields) for fields in found]

    def last_seq(self) -> int:
        """Return the number of the last change."""
        return int(self._db.execute("SELECT coalesce(max(seq), 0) FROM slots").fetchone()[0])

    def put(self, rows: Iterable[Row]) -> None:
        """Write rows, whatever their slots held before."""
        self._db.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?)", rows)

    def move(self, slot: int, from_seq: int, state: State, seq: int) -> bool:
        """Change the state of a slot if its last change was `from_seq`; say whether it was."""
        header = "NULL" if state is State.FREE else "header"
        changed = self._db.execute(
            f"UPDATE slots SET state = ?, seq = ?, header = {header} WHERE slot = ? AND seq = ?",
            (state, seq, slot, from_seq),
        )
        return changed.rowcount == 1

    def note_uses(self, uses: Iterable[tuple[int, int, int, int]]) -> None:
        """Write (hits, used, slot, seq) where the slot has not changed since. No new `seq`."""
        self._db.executemany("UPDATE slots SET hits = ?, used = ? WHERE slot = ? AND seq = ?", uses)

    def is_sound(self) -> bool:
        """Let SQLite look at every page."""
        return bool(self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")

    def compact(self) -> None:
        """Drop rows of free slots. REQUIRES: nobody else follows."""
        with self.transaction():
            self._db.execute(
                "DELETE FROM slots WHERE state = ? AND seq < (SELECT max(seq) FROM slots)",
                (State.FREE,),
            )

    def close(self) -> None:
        """Write the log back and close."""
        with suppress(sqlite3.Error):
            self.checkpoint()
        self._db.close()


def is_damage(error: Exception) -> bool:
    """Whether the index itself is at fault, and not who else uses it or the room on the device."""
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def index_file_bytes(files: Files, directory: Path) -> int:
    """Return what the index takes on the device now, log and all."""
    return sum(
        files.file_bytes(directory / (INDEX_NAME + suffix)) for suffix in ("", "-wal", "-shm")
    )


def remove_index(directory: Path) -> None:
    """Delete the index. REQUIRES: nobody has it open."""
    for suffix in ("", "-wal", "-shm"):
        (directory / (INDEX_NAME + suffix)).unlink(missing_ok=True)
