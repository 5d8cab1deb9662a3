"""What happened between the device and its tiers, in numbers: a listener of the event log.

Owns the counts; names and texts are the server's. Hears what the log says, and asks the manager for
how full tiers are. No torch. Threads: step thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvist.events import (
    BlocksDemoted,
    BlocksPromoted,
    DemotionFailed,
    Event,
    EventLog,
    LoadFailed,
    TierLookedUp,
    TierSuspended,
)
from kvist.tiers.manager import TierState


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNumbers:
    """One tier as it stands, and what it did since the engine was opened.

    Attributes
    ----------
    medium : {"host", "disk", "remote"}
    capacity_bytes, used_bytes, num_blocks : int
        Capacity 0: the server's business.
    by_tenant : mapping of tenant to bytes
    num_jobs : int
        Loads and stores under way.
    bytes_per_s, latency_s : float
        What the next load is expected to cost.
    hits : int
        Blocks that were asked for and are there.
    misses : mapping of reason to int
    loaded_blocks, load_bytes, load_seconds
        Bytes as stored.
    failed_loads : mapping of outcome to int
    stored_blocks, store_bytes, store_seconds
    failed_stores : mapping of outcome to int
        ``refused`` among them: there already, or no room.
    suspensions : int
    """

    name: str
    medium: str
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    by_tenant: Mapping[str, int]
    num_jobs: int
    is_suspended: bool
    bytes_per_s: float
    latency_s: float
    hits: int
    misses: Mapping[str, int]
    loaded_blocks: int
    load_bytes: int
    load_seconds: float
    failed_loads: Mapping[str, int]
    stored_blocks: int
    store_bytes: int
    store_seconds: float
    failed_stores: Mapping[str, int]
    suspensions: int


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    loaded_blocks: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    failed_loads: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    failed_stores: Counter[str] = field(default_factory=Counter)
    suspensions: int = 0


class TierCounts:
    """Counts by tier.

    Parameters
    ----------
    events : EventLog
        Subscribed to.
    """

    def __init__(self, events: EventLog) -> None:
        self._tiers: dict[str, _Counts] = {}
        events.subscribe(self._hear)

    def numbers(self, states: tuple[TierState, ...]) -> tuple[TierNumbers, ...]:
        """Return the counts so far, with how the tiers stand."""
        return tuple(self._numbers(state) for state in states)

    def _numbers(self, state: TierState) -> TierNumbers:
        counts = self._of(state.name)
        return TierNumbers(
            name=state.name,
            medium=state.medium,
            capacity_bytes=state.usage.capacity_bytes,
            used_bytes=state.usage.used_bytes,
            num_blocks=state.usage.num_blocks,
            by_tenant=dict(state.usage.by_tenant),
            num_jobs=state.num_jobs,
            is_suspended=state.is_suspended,
            bytes_per_s=state.bytes_per_s,
            latency_s=state.latency_s,
            hits=counts.hits,
            misses=dict(counts.misses),
            loaded_blocks=counts.loaded_blocks,
            load_bytes=counts.load_bytes,
            load_seconds=counts.load_seconds,
            failed_loads=dict(counts.failed_loads),
            stored_blocks=counts.stored_blocks,
            store_bytes=counts.store_bytes,
            store_seconds=counts.store_seconds,
            failed_stores=dict(counts.failed_stores),
            suspensions=counts.suspensions,
        )

    def _of(self, tier: str) -> _Counts:
        return self._tiers.setdefault(tier, _Counts())

    def _hear(self, event: Event) -> None:
        match event:
            case TierLookedUp(tier, num_hits, misses):
                counts = self._of(tier)
                counts.hits += num_hits
                counts.misses.update(dict(misses))
            case BlocksPromoted(tier, num_blocks, stored_bytes, seconds):
                counts = self._of(tier)
                counts.loaded_blocks += num_blocks
                counts.load_bytes += stored_bytes
                counts.load_seconds += seconds
            case BlocksDemoted(tier, num_blocks, stored_bytes, seconds):
                counts = self._of(tier)
                counts.stored_blocks += num_blocks
                counts.store_bytes += stored_bytes
                counts.store_seconds += seconds
            case LoadFailed(tier, num_blocks, outcome):
                self._of(tier).failed_loads[outcome] += num_blocks
            case DemotionFailed(tier, num_blocks, outcome):
                self._of(tier).failed_stores[outcome] += num_blocks
            case TierSuspended(tier):
                self._of(tier).suspensions += 1
