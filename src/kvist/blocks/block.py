"""One block of the device pool, as the books see it."""

from __future__ import annotations

from enum import IntEnum

from kvist.keys import BlockKey


class BlockState(IntEnum):
    """Where a block stands in its life.

    ::

        FREE ─┬─allocate──▶ OPEN ────seal──▶ SEALED ──last release──▶ CACHED ──evict──▶ FREE
          ▲   └─allocate──▶ LOADING ─seal──▶   ▲                        │
          └─────last release──┘                └───────retain───────────┘

    ======= ==== ========= ======== =========================================
    state   refs findable  evictable meaning
    ======= ==== ========= ======== =========================================
    FREE    0    no        –        bytes mean nothing
    OPEN    ≥ 1  no        no       being filled, or full but not to be found
    LOADING ≥ 1  no        no       being filled from a lower tier
    SEALED  ≥ 1  yes       no       full, immutable, shareable
    CACHED  0    yes       yes      full, unused, leaves by policy
    ======= ==== ========= ======== =========================================
    """

    FREE = 0
    OPEN = 1
    SEALED = 2
    CACHED = 3
    LOADING = 4


class Block:
    """State of one block. `BlockPool` is the only writer."""

    __slots__ = (
        "block_id",
        "depth",
        "key",
        "parent",
        "refs",
        "state",
        "token_ids",
        "uses",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.state = BlockState.FREE
        self.refs = 0
        # The rest is what the index knows of a SEALED or CACHED block.
        self.key: BlockKey | None = None
        self.parent: BlockKey | None = None
        self.depth = 0
        self.token_ids: tuple[int, ...] = ()
        # Times it was found since the policy was last told.
        self.uses = 0

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key else "-"
        return f"<Block {self.block_id} {self.state.name} refs={self.refs} key={key}>"
