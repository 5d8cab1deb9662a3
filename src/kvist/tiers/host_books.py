"""What lies in the host tier: which record of which block, in which extents, and who may leave.

Owns index, arena and keeper, and the one lock that guards them; it is held for microseconds and
never over bytes. Knows no bytes, codecs or jobs. A record's way::

    place ─▶ on its way in ──publish──▶ findable ──evicted, or dropped and used by nobody──▶ gone
                  └───────────────────── release(damaged) ────────────────────────────────────┘

The budget pays for the index too, whose entries are Python objects of 1.2 KB: see `charge_for`.

Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvist.errors import IntegrityError
from kvist.policies.base import Candidate
from kvist.policies.keeper import Keeper
from kvist.tiers.base import BlockMeta
from kvist.tiers.extents import EXTENT_BYTES, ExtentArena, Run, extents_for

EXTENT_CHARGE = EXTENT_BYTES + (1 << 10)
"""What an extent costs of the budget: itself, and a share for the index."""

_LEAST_CHARGED = 2
"""Extents that a record is charged at least: its index entry takes up to the shares of two."""


def charge_for(nbytes: int) -> int:
    """Return what a record of `nbytes` costs of the budget."""
    return max(extents_for(nbytes), _LEAST_CHARGED) * EXTENT_CHARGE


@dataclass(slots=True, eq=False)
class Record:
    """One block.

    Attributes
    ----------
    name : bytes
        Digest of the namespace and key.
    runs : tuple of Run
    ends : tuple of int
        Where each segment ends in the record, as stored.
    checksums : tuple of bytes
        One a segment.
    users : int
        Threads at work on its bytes.
    dropped : bool
        It goes with its last user.
    """

    name: bytes
    runs: tuple[Run, ...]
    ends: tuple[int, ...]
    checksums: tuple[bytes, ...]
    stored_s: float
    hits: int = 0
    users: int = 1
    dropped: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments as stored."""
        return self.ends[-1]


class HostBooks:
    """See the module's description.

    Parameters
    ----------
    num_extents : int
    make_keeper : callable
        From a capacity in bytes to an empty keeper.
    """

    def __init__(self, num_extents: int, make_keeper: Callable[[int], Keeper]) -> None:
        self._lock = threading.Lock()
        self._keeper = make_keeper(num_extents * EXTENT_CHARGE)
        self._arena = ExtentArena(num_extents)
        self._findable: dict[bytes, Record] = {}
        # On their way in, or dropped under a user: they take room and cannot be found.
        self._hidden: set[Record] = set()

    def find(self, name: bytes) -> Record | None:
        """Return the record of a block, to look at."""
        return self._findable.get(name)

    def holds(self, name: bytes) -> bool:
        """Whether a record of a block takes room, be it findable or not."""
        with self._lock:
            return name in self._keeper

    def records(self, namespace: bytes) -> list[Record]:
        """Return the records of a namespace, to look at. O(records)."""
        with self._lock:
            held = self._findable.values()
            return [record for record in held if record.name.startswith(namespace)]

    def usage(self) -> tuple[int, int, dict[str, int]]:
        """Return bytes used, findable blocks, and bytes used by tenant."""
        with self._lock:
            return self._keeper.used, len(self._findable), self._keeper.used_by_tenant()

    def admit(self, names: Sequence[bytes]) -> int:
        """Return how many leading blocks of a run of a chain are worth storing."""
        with self._lock:
            return self._keeper.admit(names)

    def place(
        self,
        name: bytes,
        parent: bytes,
        meta: BlockMeta,
        ends: Sequence[int],
        checksums: Sequence[bytes],
        tenant: str,
        now: float,
    ) -> Record | None:
        """Take room for a record, evicting others; None if those that may leave do not make it.

        The block that it continues is not evicted for it. The caller is a user of the record.
        """
        size, num_extents = charge_for(ends[-1]), extents_for(ends[-1])
        with self._lock:
            if name in self._keeper:  # another job was first, or it was dropped under a user
                return None
            candidate = Candidate(name, parent, meta.depth, size, meta.recompute_s)
            for victim in self._keeper.make_room(candidate, tenant):
                self._arena.release(self._findable.pop(victim).runs)
            if not self._keeper.fits(size, tenant):
                return None
            runs = self._arena.allocate(num_extents)
            if runs is None:
                raise IntegrityError(
                    f"{num_extents} extents were made free, {self._arena.num_free} are"
                )
            self._keeper.add(candidate, tenant)
            self._keeper.pin(name)
            record = Record(name, runs, tuple(ends), tuple(checksums), now)
            self._hidden.add(record)
            return record

    def publish(self, record: Record) -> None:
        """Make a record findable; its bytes lie there now. The caller stays a user."""
        with self._lock:
            self._hidden.discard(record)
            self._findable[record.name] = record

    def retain(self, name: bytes) -> Record | None:
        """Return the record of a block and become a user: it stays until `release`."""
        with self._lock:
            record = self._findable.get(name)
            if record is not None:
                record.users += 1
                self._keeper.pin(name)
            return record

    def release(self, record: Record, *, damaged: bool = False) -> None:
        """Be a user no longer."""
        with self._lock:
            record.users -= 1
            self._keeper.unpin(record.name)
            if damaged or record.dropped:
                self._drop(record)

    def drop(self, names: Iterable[bytes]) -> int:
        """Let blocks be found no more; return how many were. Their room follows their users."""
        with self._lock:
            found = [record for name in names if (record := self._findable.get(name)) is not None]
            for record in found:
                self._drop(record)
        return len(found)

    def lock(self, names: Iterable[bytes], ttl_s: float) -> list[bool]:
        """Keep blocks from being evicted; say which are there."""
        with self._lock:
            return [name in self._findable and self._keeper.lock(name, ttl_s) for name in names]

    def unlock(self, names: Iterable[bytes]) -> None:
        """Undo one `lock` of each."""
        with self._lock:
            for name in names:
                self._keeper.unlock(name)

    def touch(self, names: Iterable[bytes]) -> None:
        """Blocks of a chain were of use, parents first."""
        with self._lock:
            found = [record for name in names if (record := self._findable.get(name)) is not None]
            self._keeper.touch([record.name for record in found])
            for record in found:
                record.hits += 1

    def check(self) -> None:
        """Raise `IntegrityError` unless index, arena and keeper agree. O(records)."""
        with self._lock:
            held = [*self._findable.values(), *self._hidden]
            self._keeper.check()
            self._arena.check(record.runs for record in held)
            kept = sum(record.name in self._keeper for record in held)
            if not kept == len(held) == len(self._keeper):
                raise IntegrityError(
                    f"{len(held)} records, {kept} of them kept; {len(self._keeper)} are in all"
                )
            for record in held:
                if (record in self._hidden and not record.users) or record.users < 0:
                    raise IntegrityError(f"record {record.name.hex()[:8]} is hidden for nobody")

    def _drop(self, record: Record) -> None:
        if self._findable.get(record.name) is record:
            del self._findable[record.name]
        if record.users:
            record.dropped = True
            self._hidden.add(record)
            return
        self._hidden.discard(record)
        self._keeper.remove(record.name)
        self._arena.release(record.runs)
