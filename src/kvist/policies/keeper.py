"""Who stays in a tier: an eviction order, with quotas, pins, locks, a limit of age, and admission.

Owns what a tier would otherwise keep beside its bytes: how much of the budget each block and tenant
takes, and who may not leave now. Knows sizes and opaque keys; where bytes lie is the tier's. Every
tier that evicts has one, so that all of this works the same everywhere.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvist.errors import IntegrityError
from kvist.policies.admission import MinimumHits
from kvist.policies.base import Candidate, EvictionPolicy

_SEEN_KEYS = 1 << 16


@dataclass(slots=True)
class _Group:
    """Blocks that compete for the same room: of one tenant with a quota, or all others."""

    policy: EvictionPolicy
    limit: int
    used: int = 0
    # Of that, what is neither pinned nor locked.
    loose: int = 0


@dataclass(slots=True)
class _Kept:
    block: Candidate
    tenant: str
    group: _Group
    used_s: float
    # Order of last uses across groups.
    tick: int
    pins: int = 0
    # When each lock runs out, soonest first.
    locks: list[float] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        return bool(self.pins or self.locks)


class Keeper:
    """Books of one tier's budget.

    Parameters
    ----------
    capacity : int
        Bytes, or whatever sizes are counted in.
    make : callable
        Builds an eviction policy from a capacity; see `registry.policy_factory`.
    tenant_quota : int, optional
        What each tenant may hold at most, but for the default one, ``""``. Who is over it evicts
        blocks of its own and no others.
    min_hits : int
        A block is admitted when it is offered for that time; 1 admits everything.
    max_idle_s : float, optional
        Blocks that were not of use for so long are named by `expire`.
    clock : callable
        Monotonic seconds.

    Notes
    -----
    Within a group its policy decides who leaves; between groups, recency of the groups' victims.
    Chains never cross tenants (a tenant's salt is in the keys), so leaf first holds throughout.
    Every call is O(log blocks) a block, and to evict O(tenants with a quota) besides. Threads: one,
    or under the owner's lock.
    """

    def __init__(
        self,
        capacity: int,
        make: Callable[[int], EvictionPolicy],
        *,
        tenant_quota: int | None = None,
        min_hits: int = 1,
        max_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._make = make
        self._tenant_quota = tenant_quota
        self._own: dict[str, _Group] = {}
        self._shared = _Group(make(capacity), capacity)
        self._admission = MinimumHits(min_hits, _SEEN_KEYS)
        self._max_idle_s = max_idle_s
        self._clock = clock
        # By last use, the longest idle first.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._by_tenant: dict[str, int] = {}
        self._used = self._tick = 0
        self._lock_ends: list[tuple[float, bytes]] = []

    # ------------------------------------------------------------------ queries

    @property
    def used(self) -> int:
        """Sizes of all blocks held."""
        return self._used

    def used_by_tenant(self) -> dict[str, int]:
        """Sizes by tenant; a copy."""
        return dict(self._by_tenant)

    def fits(self, size: int, tenant: str = "") -> bool:
        """Whether a block of `size` could be added now."""
        group = self._group(tenant)
        return self._used + size <= self.capacity and group.used + size <= group.limit

    def is_held(self, key: bytes) -> bool:
        """Whether a block is pinned or locked."""
        return self._kept[key].is_held

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    # ------------------------------------------------------------------ coming and going

    def admit(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a run of a chain are worth storing; counts them."""
        return self._admission.admit(keys)

    def make_room(self, block: Candidate, tenant: str = "") -> list[bytes]:
        """Evict until `block` fits; return what has to go, in that order.

        What it continues stays: a chain that is stored block by block must not eat its own head.
        Whether it fits then, `fits` says: nothing is evicted when it never could, and too little
        may go when what must stay stands in the way.
        """
        self._end_locks()
        parent = block.parent if block.parent in self._kept else None
        if parent is None:
            return self._make_room(block.size, tenant)
        self.pin(parent)
        try:
            return self._make_room(block.size, tenant)
        finally:
            self.unpin(parent)

    def add(self, block: Candidate, tenant: str = "", uses: int = 1) -> None:
        """Tell of a block that is held from now on. REQUIRES it `fits` and is not held.

        After a restart add those used longest ago first, each with the uses it had.
        """
        group = self._group(tenant)
        if block.key in self._kept or not self.fits(block.size, tenant):
            raise IntegrityError(
                f"block {block.key.hex()[:8]} of {block.size} added: held already, or {self._used}"
                f" of {self.capacity} and {group.used} of {group.limit} are used"
            )
        if group is not self._shared:
            self._own[tenant] = group
        group.policy.add(block, uses)
        self._tick += 1
        self._kept[block.key] = _Kept(block, tenant, group, self._clock(), self._tick)
        self._used += block.size
        group.used += block.size
        group.loose += block.size
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + block.size

    def remove(self, key: bytes) -> None:
        """Tell that a block is gone though nobody evicted it: deleted, or found damaged."""
        self._kept[key].group.policy.forget(key)
        self._drop(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell that blocks of a chain were of use, parents first. Unknown ones are ignored."""
        now = self._clock()
        for key in reversed(keys):
            kept = self._kept.get(key)
            if kept is None:
                continue
            kept.group.policy.touch(key)
            self._tick += 1
            kept.tick, kept.used_s = self._tick, now
            self._kept.move_to_end(key)

    def expire(self) -> list[bytes]:
        """Drop what was idle for too long, children before parents; return what has to go.

        What is pinned or locked stays, and what it continues. O(those idle for too long).
        """
        if self._max_idle_s is None:
            return []
        self._end_locks()
        before = self._clock() - self._max_idle_s
        idle: list[_Kept] = []
        for kept in self._kept.values():
            if kept.used_s >= before:
                break
            idle.append(kept)
        idle.sort(key=lambda kept: -kept.block.depth)
        gone = []
        for kept in idle:
            key = kept.block.key
            if not kept.is_held and kept.group.policy.is_leaf(key):
                self.remove(key)
                gone.append(key)
        return gone

    # ------------------------------------------------------------------ staying

    def pin(self, key: bytes) -> None:
        """Keep a block until `unpin`: its bytes are being read. REQUIRES it is held."""
        kept = self._kept[key]
        self._withhold(kept)
        kept.pins += 1

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`."""
        kept = self._kept[key]
        if not kept.pins:
            raise IntegrityError(f"unpin of block {key.hex()[:8]}, which is not pinned")
        kept.pins -= 1
        self._offer(kept)

    def lock(self, key: bytes, ttl_s: float) -> bool:
        """Keep a block until `unlock`, or for `ttl_s`; say whether it was there to be kept."""
        kept = self._kept.get(key)
        if kept is None:
            return False
        self._withhold(kept)
        end = self._clock() + ttl_s
        kept.locks.append(end)
        kept.locks.sort()
        heapq.heappush(self._lock_ends, (end, key))
        return True

    def unlock(self, key: bytes) -> None:
        """Undo one `lock`, that which ends soonest. Unknown and unlocked blocks are ignored."""
        kept = self._kept.get(key)
        if kept is not None and kept.locks:
            del kept.locks[0]
            self._offer(kept)

    # ------------------------------------------------------------------ check

    def check(self) -> None:
        """Raise `IntegrityError` unless sums, groups and orders agree. O(blocks)."""
        by_tenant: dict[str, int] = {}
        for group in (self._shared, *self._own.values()):
            group.policy.check()
            mine = [kept for kept in self._kept.values() if kept.group is group]
            used = sum(kept.block.size for kept in mine)
            loose = sum(kept.block.size for kept in mine if not kept.is_held)
            if (used, loose) != (group.used, group.loose) or used > group.limit:
                raise IntegrityError(
                    f"a group counts {group.used} used, {group.loose} loose, holds {used}, {loose};"
                    f" its limit is {group.limit}"
                )
            offered = {kept.block.key for kept in mine if not kept.is_held}
            if set(group.policy.offered()) != offered or len(group.policy) != len(mine):
                raise IntegrityError("an eviction order offers others than those that may leave")
        for kept in self._kept.values():
            by_tenant[kept.tenant] = by_tenant.get(kept.tenant, 0) + kept.block.size
        if by_tenant != self._by_tenant or sum(by_tenant.values()) != self._used:
            raise IntegrityError(f"{self._used} used by {self._by_tenant}, really {by_tenant}")
        if self._used > self.capacity:
            raise IntegrityError(f"{self._used} used of {self.capacity}")

    # ------------------------------------------------------------------ inside

    def _group(self, tenant: str) -> _Group:
        """Return who a tenant's blocks compete with; a new group is not entered yet."""
        if self._tenant_quota is None or not tenant:
            return self._shared
        return self._own.get(tenant) or _Group(self._make(self._tenant_quota), self._tenant_quota)

    def _make_room(self, size: int, tenant: str) -> list[bytes]:
        group = self._group(tenant)
        loose = self._shared.loose + sum(own.loose for own in self._own.values())
        victims: list[bytes] = []
        possible = self._used - loose + size <= self.capacity
        if not possible or group.used - group.loose + size > group.limit:
            return victims
        while not self.fits(size, tenant):
            over = group.used + size > group.limit
            key = self._victim((group,) if over else (self._shared, *self._own.values()))
            if key is None:
                break
            self._kept[key].group.policy.evict(key)
            self._drop(key)
            victims.append(key)
        return victims

    def _victim(self, groups: Sequence[_Group]) -> bytes | None:
        keys = [key for group in groups if (key := group.policy.victim()) is not None]
        return min(keys, key=lambda key: self._kept[key].tick, default=None)

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key)
        size = kept.block.size
        self._used -= size
        kept.group.used -= size
        if not kept.is_held:
            kept.group.loose -= size
        left = self._by_tenant[kept.tenant] - size
        if left:
            self._by_tenant[kept.tenant] = left
        else:
            del self._by_tenant[kept.tenant]
            self._own.pop(kept.tenant, None)

    def _withhold(self, kept: _Kept) -> None:
        """Call before the first reason to stay is noted."""
        if not kept.is_held:
            kept.group.policy.withhold(kept.block.key)
            kept.group.loose -= kept.block.size

    def _offer(self, kept: _Kept) -> None:
        """Call after a reason to stay is gone; perhaps it was the last."""
        if not kept.is_held:
            kept.group.policy.offer(kept.block.key)
            kept.group.loose += kept.block.size

    def _end_locks(self) -> None:
        now = self._clock()
        while self._lock_ends and self._lock_ends[0][0] <= now:
            _, key = heapq.heappop(self._lock_ends)
            kept = self._kept.get(key)
            # Otherwise that lock was undone, or its block is gone.
            while kept is not None and kept.locks and kept.locks[0] <= now:
                del kept.locks[0]
                self._offer(kept)
