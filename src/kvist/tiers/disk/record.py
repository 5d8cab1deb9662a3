"""What is remembered of a record and of a namespace while a store is open.

Owns the two notes, and no rule about them: those are the books'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.keys import BlockKey
from kvist.tiers.base import Namespace
from kvist.tiers.disk.index import State
from kvist.tiers.disk.layout import Header
from kvist.tiers.extents import EXTENT_BYTES


class Record:
    """A record, and what this process does with it.

    Attributes
    ----------
    data : bytes
        The packed header. Unpacked, and so verified, for every read: a tenth of the memory.
    seq : int
        Of its row in the index: not the one in the header.
    mine : bool
        Whether this process writes it.
    readers : int
        Reads under way.
    room_bytes : int
        Bytes of the extents it occupies.
    """

    __slots__ = (
        "created_s", "data", "exact", "hits", "key", "kind", "mine", "namespace", "readers",
         "room_bytes", "runs", "seq", "state", "stored_bytes", "used",
    )  # fmt: skip

    def __init__(self, header: Header, data: bytes, seq: int, *, mine: bool) -> None:
        self.data = data
        self.seq = seq
        self.mine = mine
        self.kind = header.kind
        self.namespace = header.namespace
        self.key = header.key
        self.runs = header.runs
        self.exact = header.exact
        self.room_bytes = EXTENT_BYTES * header.num_extents
        self.stored_bytes = header.stored_bytes
        self.created_s = header.created_s
        self.state = State.WRITING
        self.hits = 0
        self.used = 0
        self.readers = 0

    @property
    def slot(self) -> int:
        """Number of its header slot."""
        return self.runs[0][0]

    @property
    def ident(self) -> bytes:
        """Its name among all namespaces."""
        return self.namespace + self.key


@dataclass(slots=True)
class Shelf:
    """The records of one namespace.

    `label` is what was said of it, here or by whoever stored; `descriptor` is the record with it.
    """

    label: Namespace | None = None
    descriptor: Record | None = None
    blocks: dict[BlockKey, Record] = field(default_factory=dict)
    num_writing: int = 0
    room_bytes: int = 0
