"""What happened, as frozen values: the one vocabulary of the house.

The cache and the engine emit; metrics count, traces record, the simulator replays, the doctor
reads, connectors translate. Nobody scrapes another's insides. Owns the words and a bounded log;
knows no one who emits or listens.

Threads: `EventLog` belongs to the step thread; listeners run on it and must be quick.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvist.keys import BlockKey


class BlockStored(NamedTuple):
    """A full block became immutable and findable.

    A tuple, as `BlockEvicted` is: one is made for every block, and a frozen dataclass takes twice
    as long to make.
    """

    block_id: int
    key: BlockKey
    parent: BlockKey
    depth: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksShared:
    """A sequence took `num_blocks` blocks that were there already, instead of computing them."""

    num_blocks: int
    num_tokens: int


class BlockEvicted(NamedTuple):
    """The device copy of a block was forgotten to make room."""

    block_id: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class TierLookedUp:
    """A tier was asked for the blocks that a sequence lacks.

    `misses` counts those it does not have, or may not give, by reason.
    """

    tier: str
    num_hits: int
    misses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksPromoted:
    """Blocks were read from a tier into the device. Bytes are as stored there."""

    tier: str
    num_blocks: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Blocks that a tier was said to have did not come, or came damaged or late: a miss."""

    tier: str
    num_blocks: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefixLoaded:
    """A sequence has blocks from lower tiers in its table, which it needs not compute.

    `sources` says how many tokens came from which medium; `num_reused_tokens` of them are tokens
    that this request never had before; `resumed` as in `RequestScheduled`.
    """

    request_id: str
    num_tokens: int
    resumed: bool
    num_reused_tokens: int
    sources: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BlocksDemoted:
    """Copies of blocks are in a tier now, and may be found there. Bytes are as stored."""

    tier: str
    num_blocks: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DemotionFailed:
    """Copies of blocks are not in a tier: it refused or failed, or they were gone before."""

    tier: str
    num_blocks: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class TierSuspended:
    """A tier does not answer as it should, and is left alone for so long."""

    tier: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """A request entered the waiting queue.

    `arrived_s` is when it reached the service (monotonic clock), if that is known to be earlier.
    """

    request_id: str
    num_prompt_tokens: int
    arrived_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request was turned away, for the reason given; it may come again later."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestExpired:
    """The deadline of a request passed; what is unfinished of it ends as aborted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestScheduled:
    """A request left the waiting queue.

    `num_cached_tokens` of its tokens came from the cache. `resumed` tells a request that ran
    before, or is a fork of one that did: its hits are its own blocks, not reuse.
    `num_queried_tokens` is how many were looked up: all of them, or 0 where nobody asked the cache.
    `num_reused_tokens` of the hits are tokens that this request never had before.
    """

    request_id: str
    num_cached_tokens: int
    num_tokens: int
    resumed: bool
    num_queried_tokens: int
    num_reused_tokens: int


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request gave its blocks up; `num_computed_tokens` may have to be computed again."""

    request_id: str
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left the engine, for the reason given (stop, length, abort, error)."""

    request_id: str
    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """One engine step was recorded.

    Of the `num_tokens` that went through the model, `num_prompt_tokens` were read for the first
    time and `num_recomputed_tokens` had been computed before (by a sequence that was preempted, or
    forked); the rest are newly generated ones on their way in. `sampled` names the sequences that
    have one token more now.
    """

    num_tokens: int
    num_sequences: int
    num_waiting: int
    num_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    sampled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A forward pass raised; the books were restored."""

    num_sequences: int
    error: str


Event = (
    BlockStored
    | BlocksShared
    | BlockEvicted
    | TierLookedUp
    | BlocksPromoted
    | LoadFailed
    | PrefixLoaded
    | BlocksDemoted
    | DemotionFailed
    | TierSuspended
    | RequestAdded
    | RequestRejected
    | RequestExpired
    | RequestScheduled
    | RequestPreempted
    | RequestFinished
    | StepDone
    | StepFailed
)
Listener = Callable[[Event], None]


class EventLog:
    """Hand every event to its listeners and remember the last ones.

    Parameters
    ----------
    capacity : int
        Events remembered; older ones are dropped and counted in `num_dropped`.

    Notes
    -----
    `emit` is O(number of listeners). `counts` says how often each kind was emitted so far.
    """

    __slots__ = ("_listeners", "_recent", "counts")

    def __init__(self, capacity: int = 4096) -> None:
        self._recent: deque[Event] = deque(maxlen=capacity)
        self._listeners: list[Listener] = []
        self.counts: Counter[type] = Counter()

    @property
    def num_dropped(self) -> int:
        """Events that are counted and no longer remembered."""
        return self.counts.total() - len(self._recent)

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` on the step thread for every event from now on."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Record `event` and tell the listeners."""
        self._recent.append(event)
        self.counts[type(event)] += 1
        for listener in self._listeners:
            listener(event)

    def recent(self) -> tuple[Event, ...]:
        """Return the remembered events, oldest first."""
        return tuple(self._recent)
