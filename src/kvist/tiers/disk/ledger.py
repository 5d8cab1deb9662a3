"""Index and books as one: what is true of the slab, for this process and the others.

Owns the transactions, and that the books are up to date inside them. Several processes write one
index; each keeps books of its own and follows the index by the number of the last change it knows.
Knows where records lie and not what is in them.

Threads: the books under `lock`, from any; everything else from one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from kvist.tiers.disk.books import Books
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import MAX_ROWS_A_TRANSACTION, Index, Row, State
from kvist.tiers.disk.rebuild import open_index, rebuild_index
from kvist.tiers.disk.record import Record
from kvist.tiers.disk.slab import Slab


class Ledger:
    """See the module's description.

    Parameters
    ----------
    files : Files
    directory : Path
        Where the index lies, to be built anew.
    slab : Slab
        For headers to be cleared, and leases.
    index : Index
    books : Books
        As `index` says.
    """

    def __init__(
        self, files: Files, directory: Path, slab: Slab, index: Index, books: Books
    ) -> None:
        self._files = files
        self._directory = directory
        self.books = books
        self.index = index
        self.lock = Lock()
        self._slab = slab
        self._version = -1
        self._books_are_stale = False
        # Rows that contradict others or themselves, to be freed by the next change.
        self._untrue: list[Row] = []

    # ------------------------------------------------------------------ transactions

    @contextmanager
    def changing(self) -> Iterator[Iterator[int]]:
        """A transaction on the index, the books up to date in it; yields numbers for changes."""
        with self.index.transaction():
            self._follow()
            seq = self.index.last_seq()

            def numbers() -> Iterator[int]:
                nonlocal seq
                while True:
                    seq += 1
                    yield seq

            seqs = numbers()
            for row in self._untrue:
                self.index.move(row.slot, row.seq, State.FREE, next(seqs))
            yield seqs
            # Not the last number handed out: that may have been for nothing, and is another's then.
            known = self.index.last_seq()
        self._untrue.clear()
        with self.lock:
            self.books.last_seq = known

    def free(self, record: Record, seq: int) -> bool:
        """Free a slot and clear its header. REQUIRES: in `changing`.

        Only if nobody changed it meanwhile: a new owner has a new header there. Say whether.
        """
        if not self.index.move(record.slot, record.seq, State.FREE, seq):
            return False
        self._slab.clear_header(record.slot)
        return True

    def undo(self, placed: Sequence[Record]) -> None:
        """After `changing` raised: forget what was placed in the books, and take back the rest."""
        with self.lock:
            for record in placed:
                self.books.leave(record)
        # What was evicted to make room is in the index still.
        self._books_are_stale = True
        with suppress(sqlite3.Error):
            self._follow()

    def follow(self) -> None:
        """Take over what other processes published and evicted. A few µs if nothing."""
        version = self.index.version()
        if version != self._version or self._books_are_stale:
            self._follow()
            self._version = version

    def _follow(self) -> None:
        if self._books_are_stale:
            rows = self.index.rows()
            with self.lock:
                self._untrue = self.books.reconcile(rows)
            self._books_are_stale = False
        elif changes := self.index.changes(self.books.last_seq):
            with self.lock:
                self._untrue += self.books.apply(changes)

    # ------------------------------------------------------------------ upkeep

    def sweep(self) -> int:
        """Free the slots of doomed records that nobody reads, some at a time; return how many."""
        with self.lock:
            ready = [r for r in self.books.doomed.values() if not r.readers]
        return self._free_all(ready)

    def reclaim(self) -> int:
        """Free what processes that are gone were writing; return how many records."""
        with self.lock:
            foreign = [r for r in self.books.being_written() if not r.mine]
        return self._free_all([r for r in foreign if not self._slab.is_leased(r.slot)])

    def expire(self) -> int:
        """Doom what was of no use for too long; return how many records."""
        with self.lock:
            return self.books.expire()

    def _free_all(self, records: Sequence[Record]) -> int:
        records = records[:MAX_ROWS_A_TRANSACTION]
        if records:
            with self.changing() as seqs:
                for record in records:
                    self.free(record, next(seqs))
            with self.lock:
                for record in records:
                    self.books.leave(record)
        return len(records)

    def note_uses(self) -> None:
        """Write down what was used since the last time."""
        while True:
            with self.lock:
                chosen = list(self.books.touched.values())[:MAX_ROWS_A_TRANSACTION]
                uses = [(r.hits, r.used, r.slot, r.seq) for r in chosen]
            if not uses:
                return
            with self.index.transaction():
                self.index.note_uses(uses)
            with self.lock:
                for record in chosen:
                    self.books.touched.pop(record.slot, None)

    def renew(self) -> bool:
        """Build a damaged index anew; ``False`` while other processes use it, or it is not there.

        Raises
        ------
        sqlite3.Error, OSError, StaleIndexError
            If it cannot be built.
        """
        # In a directory that was deleted, and made again by others, the index is theirs.
        if not self._slab.is_in_place() or not self._slab.be_alone():
            return False
        with self.lock:
            doomed = list(self.books.doomed.values())
        for record in doomed:
            self._slab.clear_header(record.slot)
        self.index.close()
        rebuild_index(self._files, self._directory, self._slab)
        self.index = open_index(self._files, self._directory, self._slab)
        self._books_are_stale = True
        self.follow()
        self._slab.be_present()
        return True

    def close(self) -> None:
        """Write down what was used, and close the index."""
        with suppress(sqlite3.Error):
            self.note_uses()
        self.index.close()
