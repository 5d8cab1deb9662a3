"""A store on disk: slab, index and books as one, with nothing half done in between.

Owns the order of things. A block becomes findable in four steps, so that whoever is killed between
two of them leaves nothing that looks whole and is not::

    1  index   WRITING, with the extents (evicting in the same transaction); lease on the slot
    2  slab    data
    3  slab    header: what it describes has been written
    4  index   LIVE; end of the lease

Steps 1 and 4 are one transaction for a whole batch. Nothing is synced in between: after a loss of
power a header may be there without its data, or the other way round, and the checksum over the
private copy that a reader will use tells. Freed slots lose their header before others may have
their extents.

Threads: `find`, `read` and what is said of uses from any; the rest, which writes, from one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

from kvist.codecs.base import Codec
from kvist.errors import DamageError
from kvist.keys import BlockKey
from kvist.policies.base import Candidate
from kvist.tiers.base import LOST, Namespace, Outcome
from kvist.tiers.disk.coding import RAW, Coder, Put
from kvist.tiers.disk.index import Row, State
from kvist.tiers.disk.layout import NO_PARENT, Header, max_runs
from kvist.tiers.disk.ledger import Ledger
from kvist.tiers.disk.record import Record
from kvist.tiers.disk.slab import Slab
from kvist.tiers.extents import EXTENT_BYTES, extents_for

_LEASE_TRIES = 5
_LEASE_PAUSE_S = 0.001

Placed: TypeAlias = tuple[int, Put, Record, Header]
"""Position in a batch, what is to be written, and where and how."""


class DiskStore:
    """An open store. Built by `kvist.tiers.disk.opening.open_store`.

    Parameters
    ----------
    slab : Slab
    ledger : Ledger
    codec : Codec
        For what is stored from now on; what lies there says itself how to decode it.
    wall : callable
        Wall clock, for people only.
    """

    def __init__(
        self,
        slab: Slab,
        ledger: Ledger,
        codec: Codec,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.slab = slab
        self.ledger = ledger
        self.books = ledger.books
        self.lock = ledger.lock
        self._wall = wall
        self.coder = Coder(codec, slab.checksum)
        self._checksum = slab.checksum
        self._unsynced = False

    # ------------------------------------------------------------------ reading, any thread

    def hold(self, namespace: bytes, key: BlockKey) -> Record | None:
        """Return the record of a block and keep it from eviction until `let_go`."""
        with self.lock:
            record = self.books.find(namespace, key)
            if record is not None:
                self.books.hold(record)
            return record

    def let_go(self, record: Record) -> None:
        """Undo `hold`."""
        with self.lock:
            self.books.let_go(record)

    def read(self, record: Record, label: Namespace, segments: range, out: memoryview) -> int:
        """Read segments of a held record into `out`, verify them there, and decode.

        Returns
        -------
        int
            Bytes read from the device.

        Raises
        ------
        DamageError
            If they are not what was stored.
        OSError
        """
        header = Header.unpack(record.data, self._checksum)
        if len(header.segments) != len(label.segment_bytes):
            raise DamageError(f"{len(header.segments)} segments where {label} has others")
        lengths = [length for length, _ in header.segments]
        start = sum(lengths[: segments.start])
        total = sum(lengths[segments.start : segments.stop])
        if header.wire_id == RAW:
            if total != len(out):
                raise DamageError(f"segments of {len(out)} bytes are stored raw as {total} bytes")
            source = out
        else:
            source = memoryview(bytearray(total))
        self.slab.read(header.runs, start, [source])
        self.coder.decode(header, label, segments, source, out)
        return total

    def read_stored(self, record: Record) -> memoryview:
        """Return a record's bytes as stored, verified. Raises as `read` does."""
        header = Header.unpack(record.data, self._checksum)
        data = memoryview(bytearray(header.stored_bytes))
        self.slab.read(header.runs, 0, [data])
        self.coder.verify(header, range(len(header.segments)), data)
        return data

    def expect(self, record: Record, label: Namespace, segments: range) -> None:
        """Let the device begin to read what `read` will read."""
        start, end = 0, record.stored_bytes
        if len(segments) < len(label.segment_bytes):
            header = Header.unpack(record.data, self._checksum)
            lengths = [length for length, _ in header.segments]
            start, end = sum(lengths[: segments.start]), sum(lengths[: segments.stop])
        self.slab.will_need(record.runs, start, end)

    def is_current(self, record: Record) -> bool:
        """Whether the slab still has what the books say: if not, another process evicted it."""
        try:
            return record.state is State.LIVE and self.slab.has_header(record.slot, record.data)
        except OSError:
            return False

    def discard(self, record: Record) -> bool:
        """Let a record be found no more; `sweep` frees it. Say whether it was there."""
        with self.lock:
            return self.books.doom(record)

    # ------------------------------------------------------------------ writing, one thread

    def write(
        self, puts: Sequence[Put], labels: dict[bytes, Namespace]
    ) -> list[tuple[Outcome, str]]:
        """Store a batch; all of it that goes is findable when this returns.

        Parameters
        ----------
        puts : sequence of Put
            A few dozen at most: one transaction takes them all. Parents before children.
        labels : dict
            Every namespace in `puts`, to be described where that was not done yet.

        Returns
        -------
        list of (Outcome, str)
            For each: DONE, REFUSED, or FAILED, and why.

        Raises
        ------
        sqlite3.Error, OSError
            If nothing could be stored: the index or the device did not do it.
        """
        answers = [(Outcome.REFUSED, "")] * (len(puts) + len(labels))
        placed: list[Placed] = []
        try:
            self._place(puts, labels, answers, placed)
            written: list[tuple[int, Record, Header]] = []
            for position, put, record, header in placed:
                try:
                    self.slab.write(record.runs, put.segments)
                    if put.key in put.lost:
                        answers[position] = (Outcome.CANCELLED, LOST)
                        continue
                    self.slab.write_header(record.slot, record.data)
                    written.append((position, record, header))
                except OSError as error:
                    answers[position] = (Outcome.FAILED, error.strerror or str(error))
            self._publish(written, answers)
        finally:
            for _, _, record, _ in placed:
                with self.lock:
                    if record.state is State.WRITING:
                        self.books.doom(record)
                with suppress(OSError):
                    self.slab.end_lease(record.slot)
        return answers[: len(puts)]

    def _place(
        self,
        puts: Sequence[Put],
        labels: dict[bytes, Namespace],
        answers: list[tuple[Outcome, str]],
        placed: list[Placed],
    ) -> None:
        """Step 1. Fills `placed`; on an error it is empty again, and the index as it was."""
        freed: list[Record] = []
        spared = {put.namespace for put in puts}
        spared |= {put.namespace + key for put in puts for key in (put.key, put.meta.parent)}
        try:
            with self.ledger.changing() as seqs:
                for position, put in self._with_labels(puts, labels):
                    with self.lock:
                        why = self._place_one(position, put, next(seqs), spared, placed, freed)
                    if why:
                        answers[position] = (Outcome.REFUSED, why)
                for record in freed:
                    self.ledger.free(record, next(seqs))
                self.ledger.index.put(
                    Row(record.slot, record.seq, State.WRITING, record.data)
                    for _, _, record, _ in placed
                )
        except BaseException:
            self.ledger.undo([record for _, _, record, _ in placed])
            for _, _, record, _ in placed:
                with suppress(OSError):
                    self.slab.end_lease(record.slot)
            placed.clear()
            raise

    def _with_labels(
        self, puts: Sequence[Put], labels: dict[bytes, Namespace]
    ) -> Iterator[tuple[int, Put]]:
        """Put descriptors that are missing before the blocks; their positions are beyond `puts`."""
        for number, namespace in enumerate(dict.fromkeys(put.namespace for put in puts)):
            with self.lock:
                there = self.books.shelf(namespace).descriptor is not None
                there = there or self.books.is_writing(namespace, BlockKey(NO_PARENT))
            if not there:
                yield len(puts) + number, self.coder.describe(labels[namespace])
        yield from enumerate(puts)

    def _place_one(
        self,
        position: int,
        put: Put,
        seq: int,
        spared: set[bytes],
        placed: list[Placed],
        freed: list[Record],
    ) -> str:
        """Find room for one record and lease it; return why not."""
        books = self.books
        if books.find(put.namespace, put.key):
            return "present"
        if books.is_writing(put.namespace, put.key):
            return "being_written"
        if any(r.ident == put.namespace + put.key for r in books.doomed.values()):
            # Others would see two of it.
            return "leaving"
        label = books.shelf(put.namespace).label
        room = EXTENT_BYTES * extents_for(put.stored_bytes)
        parent = put.namespace + put.meta.parent
        runs, evicted = books.allocate(
            Candidate(put.namespace + put.key, parent, put.meta.depth, room, put.meta.recompute_s),
            label.tenant if label else "",
            max_runs(len(put.segments)),
            spared,
        )
        freed += evicted
        if runs is None:
            return "no_room"
        try:
            leased = self._lease(runs[0][0])
        except OSError:
            books.arena.release(runs)
            raise
        if not leased:
            books.arena.release(runs)
            return "leased"
        header = Header(
            put.kind,
            put.exact,
            put.wire_id,
            seq,
            put.namespace,
            put.key,
            put.meta.parent,
            put.meta.depth,
            put.meta.recompute_s,
            self._wall(),
            tuple(zip(map(len, put.segments), put.digests, strict=True)),
            runs,
        )
        record = books.place(header, header.pack(self._checksum), seq)
        placed.append((position, put, record, header))
        return ""

    def _lease(self, slot: int) -> bool:
        for _ in range(_LEASE_TRIES):
            if self.slab.lease(slot):
                return True
            # Whoever published there is about to let go of it.
            time.sleep(_LEASE_PAUSE_S)
        return False

    def _publish(
        self, written: list[tuple[int, Record, Header]], answers: list[tuple[Outcome, str]]
    ) -> None:
        """Step 4."""
        if not written:
            return
        self._unsynced = True
        published: list[tuple[int, Record, Header, int]] = []
        with self.ledger.changing() as seqs:
            for position, record, header in written:
                seq = next(seqs)
                if self.ledger.index.move(record.slot, record.seq, State.LIVE, seq):
                    published.append((position, record, header, seq))
                else:
                    answers[position] = (Outcome.FAILED, "lost_lease")
        with self.lock:
            for position, record, header, seq in published:
                there = record.state is State.WRITING and self.books.publish(record, header, seq)
                answers[position] = (Outcome.DONE, "") if there else (Outcome.REFUSED, "no_room")

    # ------------------------------------------------------------------ upkeep, the same thread

    def make_durable(self) -> None:
        """Return when what was published survives a loss of power."""
        if self._unsynced:
            self._unsynced = False
            try:
                self.slab.sync()
            except OSError:
                self._unsynced = True
                raise

    def check(self) -> None:
        """Raise `IntegrityError` unless the books hold."""
        with self.lock:
            self.books.check()

    def close(self) -> None:
        """Let go of everything. What was published stays, also if power is lost now."""
        with suppress(OSError):  # what is not durable is the device's loss
            self.make_durable()
        self.ledger.close()
        self.slab.close()
