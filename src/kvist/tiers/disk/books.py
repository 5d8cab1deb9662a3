"""What this process knows of a store: which records there are, where, and who may leave first.

Owns a copy in memory of the index (the truth that several processes share), the arena, the eviction
order, and what only this process knows: who is being read, locked, and was used lately. Does no
I/O. A record's way::

    place ─▶ WRITING ──publish──▶ LIVE ──doom──▶ DOOMED ──leave──▶ gone
                └──────────────── doom ────────────┘   (its extents stay taken until the index
                                                        says that they are free)

An evicted record skips DOOMED: the transaction that takes its extents also frees its slot.

Threads: none of its own; every call under the owner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from kvist.errors import DamageError, IntegrityError
from kvist.keys import BlockKey
from kvist.policies.base import Candidate
from kvist.policies.keeper import Keeper
from kvist.tiers.base import NAMESPACE_BYTES
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.disk.index import Row, State
from kvist.tiers.disk.layout import Header, Kind
from kvist.tiers.disk.record import Record, Shelf
from kvist.tiers.extents import EXTENT_BYTES, ExtentArena, Run


class Books:
    """See the module's description.

    Parameters
    ----------
    num_extents : int
    make_keeper : callable
        From a capacity in bytes to an empty keeper.
    checksum : SegmentChecksum
    """

    def __init__(
        self, num_extents: int, make_keeper: Callable[[int], Keeper], checksum: SegmentChecksum
    ) -> None:
        self.arena = ExtentArena(num_extents)
        self.keeper = make_keeper(num_extents * EXTENT_BYTES)
        self.shelves: dict[bytes, Shelf] = {}
        self.by_slot: dict[int, Record] = {}
        self.doomed: dict[int, Record] = {}
        self.touched: dict[int, Record] = {}
        self.last_seq = 0
        self.num_blocks = 0
        self._writing: dict[bytes, Record] = {}
        self._clock = 0
        self._checksum = checksum

    # ------------------------------------------------------------------ queries

    def shelf(self, namespace: bytes) -> Shelf:
        """Return the shelf of a namespace, a new one if need be."""
        return self.shelves.setdefault(namespace, Shelf())

    def find(self, namespace: bytes, key: BlockKey) -> Record | None:
        """Return the LIVE record of a block."""
        shelf = self.shelves.get(namespace)
        return None if shelf is None else shelf.blocks.get(key)

    def is_writing(self, namespace: bytes, key: BlockKey) -> bool:
        """Whether a record of that block is being written, here or elsewhere."""
        return namespace + key in self._writing

    def being_written(self) -> list[Record]:
        """Return the records that are being written."""
        return list(self._writing.values())

    # ------------------------------------------------------------------ uses

    def touch(self, records: Sequence[Record]) -> None:
        """Blocks of a chain were used, parents first."""
        live = [r for r in records if r.state is State.LIVE and r.slot not in self.doomed]
        for record in reversed(live):  # the head last, so that it stays longest
            self._clock += 1
            record.used = self._clock
            record.hits += 1
            self.touched[record.slot] = record
        self.keeper.touch([record.ident for record in live])

    def hold(self, record: Record) -> None:
        """Keep a LIVE block from eviction: it is being read."""
        record.readers += 1
        self.keeper.pin(record.ident)

    def let_go(self, record: Record) -> None:
        """Undo one `hold`. The block may be gone meanwhile: deleted, or evicted by others."""
        record.readers -= 1
        if self.find(record.namespace, record.key) is record:
            self.keeper.unpin(record.ident)

    # ------------------------------------------------------------------ changes

    def allocate(
        self, block: Candidate, tenant: str, max_runs: int, spared: Collection[bytes]
    ) -> tuple[tuple[Run, ...] | None, list[Record]]:
        """Take extents for a block, evicting others for it.

        Parameters
        ----------
        block : Candidate
            Its size is that of the extents it needs.
        spared : collection of bytes
            Idents of blocks, and digests of namespaces, that are not to leave for this.

        Returns
        -------
        runs : tuple of Run or None
            ``None`` if those that may leave do not make the room.
        evicted : list of Record
            Gone from the books; to be freed in the index together with the use of their extents.
        """
        count = block.size // EXTENT_BYTES
        evicted: list[Record] = []
        pinned: list[bytes] | None = None
        wanted = block.size
        while True:
            if self.keeper.fits(block.size, tenant):
                runs = self.arena.allocate(count, max_runs)
                if runs is not None:
                    break
            if pinned is None:  # only now: while there is room nobody leaves
                pinned = [ident for ident in spared if ident in self.keeper]
                for ident in pinned:
                    self.keeper.pin(ident)
            # Extents that no block in the keeper has: of records on their way in or out.
            others = self.arena.num_used * EXTENT_BYTES - self.keeper.used
            leaving = self.keeper.make_room(block._replace(size=wanted + others), tenant)
            if not leaving:
                runs = None
                break
            for ident in leaving:
                evicted += self._evict(ident, spared)
            # Room enough, and in too many pieces for a header: more has to go.
            wanted += EXTENT_BYTES * (self.arena.num_free >= count)
        for ident in pinned or ():
            self.keeper.unpin(ident)
        return runs, evicted

    def expire(self) -> int:
        """Doom what was of no use for too long; return how many."""
        gone = [self._by_ident(ident) for ident in self.keeper.expire()]
        for record in gone:
            self.doom(record)
        return len(gone)

    def place(self, header: Header, data: bytes, seq: int) -> Record:
        """Enter a record that this process is about to write, in extents it has allocated."""
        record = Record(header, data, seq, mine=True)
        self._enter(record, header, State.WRITING)
        return record

    def publish(self, record: Record, header: Header, seq: int) -> bool:
        """Make a written record findable; ``False``, and doomed, if its tenant's room is full now.

        Several blocks of one tenant may have been on their way in side by side.
        """
        self._leave_state(record)
        record.seq = seq
        if record.kind is Kind.BLOCK and not self._fits(record):
            self.doomed[record.slot] = record
            return False
        self._enter_state(record, header, State.LIVE)
        return True

    def doom(self, record: Record) -> bool:
        """Let a record be found no more; its extents follow. Say whether it was there."""
        if record.state is State.FREE or record.slot in self.doomed:
            return False
        self._leave_state(record)
        self.doomed[record.slot] = record
        record.state = State.WRITING
        return True

    def doom_bare_labels(self) -> None:
        """Doom the descriptors of namespaces that hold no blocks."""
        for namespace, shelf in self.shelves.items():
            if shelf.descriptor is not None and self._is_bare(namespace):
                self.doom(shelf.descriptor)

    def leave(self, record: Record) -> None:
        """Forget a record, in whatever state, and free its extents."""
        if record.state is not State.FREE:
            self._remove(record)

    def apply(self, rows: Iterable[Row]) -> list[Row]:
        """Take over what the index says; return the rows that cannot be true.

        What left has left before what came comes: extents move from one to the other.
        """
        came: list[Row] = []
        for row in rows:
            self.last_seq = max(self.last_seq, row.seq)
            known = self.by_slot.get(row.slot)
            if known is not None:
                if known.seq == row.seq:
                    continue
                self.leave(known)
            if row.state != State.FREE:
                came.append(row)
        came.sort(key=lambda row: row.used)
        return [row for row in came if not self._adopt(row)]

    def reconcile(self, rows: list[Row]) -> list[Row]:
        """Make the books what all `rows` say, whatever they were; see `apply`."""
        seqs = {row.slot: row.seq for row in rows}
        for slot, record in list(self.by_slot.items()):
            if seqs.get(slot) != record.seq:
                self.leave(record)
        return self.apply(rows)

    # ------------------------------------------------------------------ check

    def check(self) -> None:
        """Raise `IntegrityError` unless everything here agrees with everything else. O(records)."""
        self.arena.check(record.runs for record in self.by_slot.values())
        self.keeper.check()
        seen = 0
        for digest, shelf in self.shelves.items():
            room = 0
            for key, record in shelf.blocks.items():
                seen += 1
                room += record.room_bytes
                if record.state is not State.LIVE or self.by_slot.get(record.slot) is not record:
                    raise IntegrityError(f"block {key.hex()[:8]} is findable and is not there")
                if digest + key not in self.keeper:
                    raise IntegrityError(f"block {key.hex()[:8]} can never be evicted")
            if room != shelf.room_bytes:
                raise IntegrityError(f"blocks take {room} bytes, {shelf.room_bytes} are counted")
        if not seen == self.num_blocks == len(self.keeper):
            raise IntegrityError(
                f"{seen} blocks, {self.num_blocks} counted, {len(self.keeper)} in eviction order"
            )
        labels = sum(shelf.descriptor is not None for shelf in self.shelves.values())
        if len(self.by_slot) != seen + labels + len(self._writing) + len(self.doomed):
            raise IntegrityError(
                f"{len(self.by_slot)} records are {seen} blocks, {labels} descriptors,"
                f" {len(self._writing)} being written and {len(self.doomed)} doomed"
            )

    # ------------------------------------------------------------------ inside

    def _adopt(self, row: Row) -> bool:
        try:
            data = row.header or b""
            header = Header.unpack(data, self._checksum)
            if header.slot != row.slot or self._knows(header):
                return False
            self._claim(header.runs)
        except (DamageError, IntegrityError):
            return False
        record = Record(header, data, row.seq, mine=False)
        record.hits, record.used = row.hits, row.used
        self._clock = max(self._clock, row.used)
        if row.state == State.LIVE and header.kind is Kind.BLOCK and not self._fits(record):
            # The quota was lowered, or another process has none.
            self.by_slot[record.slot] = self.doomed[record.slot] = record
        else:
            self._enter(record, header, State(row.state))
        return True

    def _fits(self, record: Record) -> bool:
        return self.keeper.fits(record.room_bytes, self._tenant(record.namespace))

    def _tenant(self, namespace: bytes) -> str:
        label = self.shelf(namespace).label
        return label.tenant if label else ""

    def _knows(self, header: Header) -> bool:
        if header.namespace + header.key in self._writing:
            return True
        if header.kind is Kind.NAMESPACE:
            return self.shelf(header.namespace).descriptor is not None
        return self.find(header.namespace, header.key) is not None

    def _claim(self, runs: tuple[Run, ...]) -> None:
        for index, run in enumerate(runs):
            try:
                self.arena.claim([run])
            except IntegrityError:
                self.arena.release(runs[:index])
                raise

    def _enter(self, record: Record, header: Header, state: State) -> None:
        self.by_slot[record.slot] = record
        self._enter_state(record, header, state)

    def _enter_state(self, record: Record, header: Header, state: State) -> None:
        record.state = state
        shelf = self.shelf(record.namespace)
        if state is State.WRITING:
            self._writing[record.ident] = record
            shelf.num_writing += 1
        elif record.kind is Kind.NAMESPACE:
            shelf.descriptor = record
        else:
            if record.used == 0:
                self._clock += 1
                record.used = self._clock
            shelf.blocks[record.key] = record
            shelf.room_bytes += record.room_bytes
            self.num_blocks += 1
            parent = record.namespace + header.parent
            candidate = Candidate(
                record.ident, parent, header.depth, record.room_bytes, header.recompute_s
            )
            self.keeper.add(candidate, self._tenant(record.namespace), record.hits + 1)

    def _leave_state(self, record: Record) -> None:
        """Take a record off every list but `by_slot`."""
        shelf = self.shelves[record.namespace]
        self.touched.pop(record.slot, None)
        if self.doomed.get(record.slot) is record:
            del self.doomed[record.slot]
        elif record.state is State.WRITING:
            del self._writing[record.ident]
            shelf.num_writing -= 1
        elif record.kind is Kind.NAMESPACE:
            shelf.descriptor = None
        else:
            del shelf.blocks[record.key]
            shelf.room_bytes -= record.room_bytes
            self.num_blocks -= 1
            if record.ident in self.keeper:  # not if it was the keeper who let it go
                self.keeper.remove(record.ident)

    def _evict(self, ident: bytes, spared: Collection[bytes]) -> list[Record]:
        """Take a block off the books that has left the keeper, and a label nobody needs then."""
        record = self._by_ident(ident)
        self._remove(record)
        label = self.shelves[record.namespace].descriptor
        if label is None or record.namespace in spared or not self._is_bare(record.namespace):
            return [record]
        self._remove(label)
        return [record, label]

    def _by_ident(self, ident: bytes) -> Record:
        namespace, key = ident[:NAMESPACE_BYTES], BlockKey(ident[NAMESPACE_BYTES:])
        return self.shelves[namespace].blocks[key]

    def _remove(self, record: Record) -> None:
        self._leave_state(record)
        record.state = State.FREE
        del self.by_slot[record.slot]
        self.arena.release(record.runs)

    def _is_bare(self, namespace: bytes) -> bool:
        shelf = self.shelves[namespace]
        return not shelf.blocks and not shelf.num_writing
