"""State machines over eviction policies and over `Keeper`, against plain dicts.

Own the plain truth: who is resident, who may leave, who continues whom. What a policy prefers is
its own business; that it holds to its contract is ours. Need hypothesis; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvist.policies.base import Candidate, EvictionPolicy
from kvist.policies.keeper import Keeper
from kvist.policies.registry import POLICIES, make_policy, policy_factory

PROTECTED_SHARES = (0.0, 0.3, 0.7)
_TENANTS = "DPQ"
_CHAINS = st.text("ab", min_size=1, max_size=5)


def candidate(name: str, size: int = 1, recompute_s: float = 0.0) -> Candidate:
    """Block of a chain that its name spells: ``"ab"`` continues ``"a"``."""
    return Candidate(name.encode(), name[:-1].encode(), len(name) - 1, size, recompute_s)


def _tenant(initial: str) -> str:
    return "" if initial == "D" else initial


def prefixes(name: str) -> list[str]:
    """Names of the blocks of a chain, parents first."""
    return [name[: end + 1] for end in range(len(name))]


class PolicyMachine(RuleBasedStateMachine):
    """Blocks come, are used, kept, offered and leave, in any order; whatever leaves is a leaf."""

    policy: EvictionPolicy

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        share=st.sampled_from(PROTECTED_SHARES),
        capacity=st.integers(1, 20),
    )
    def build(self, name: str, share: float, capacity: int) -> None:
        """Choose the policy. Nothing forces an owner to stay within the capacity."""
        self.policy = make_policy(name, capacity, share)
        # Resident -> may leave.
        self.offered: dict[str, bool] = {}

    def _has_residents(self) -> bool:
        return bool(self.offered)

    def _pick(self, n: int) -> str:
        return sorted(self.offered)[n % len(self.offered)]

    @rule(
        name=_CHAINS,
        parents_first=st.booleans(),
        uses=st.integers(0, 3),
        size=st.integers(1, 3),
        recompute_s=st.sampled_from((0.0, 0.1, 2.0)),
    )
    def add(self, name: str, parents_first: bool, uses: int, size: int, recompute_s: float) -> None:
        """A chain comes, or comes back, tail first as it should or not."""
        chain = prefixes(name)
        for block in chain if parents_first else reversed(chain):
            self.policy.add(candidate(block, size, recompute_s), uses)
            self.offered[block] = True

    @precondition(_has_residents)
    @rule(n=st.integers(0, 99), uses=st.integers(1, 3))
    def touch(self, n: int, uses: int) -> None:
        """A resident is used."""
        self.policy.touch(self._pick(n).encode(), uses)

    @precondition(_has_residents)
    @rule(n=st.integers(0, 99))
    def withhold(self, n: int) -> None:
        """A resident must stay, twice perhaps."""
        name = self._pick(n)
        self.policy.withhold(name.encode())
        self.offered[name] = False

    @precondition(_has_residents)
    @rule(n=st.integers(0, 99))
    def offer(self, n: int) -> None:
        """A resident may leave, perhaps as before."""
        name = self._pick(n)
        self.policy.offer(name.encode())
        self.offered[name] = True

    @precondition(_has_residents)
    @rule(n=st.integers(0, 99))
    def forget(self, n: int) -> None:
        """Any resident is gone, a parent perhaps: it was damaged."""
        name = self._pick(n)
        self.policy.forget(name.encode())
        del self.offered[name]

    @rule(times=st.integers(1, 6))
    def evict(self, times: int) -> None:
        """Room is needed."""
        for _ in range(times):
            victim = self._victim()
            if victim is None:
                break
            self.policy.evict(victim.encode())
            del self.offered[victim]

    def _victim(self) -> str | None:
        """The victim, which must be a leaf; none only where no leaf may leave."""
        leaves = {name for name, offered in self.offered.items() if offered and self._leaf(name)}
        victim = self.policy.victim()
        assert (victim is None) == (not leaves)
        assert victim is None or victim.decode() in leaves
        assert self.policy.victim() == victim, "asking again gives another answer"
        return None if victim is None else victim.decode()

    def _leaf(self, name: str) -> bool:
        return not any(other[:-1] == name for other in self.offered)

    @invariant()
    def agrees(self) -> None:
        """Counts, members and order agree with the truth."""
        if not hasattr(self, "policy"):
            return
        self.policy.check()
        assert len(self.policy) == len(self.offered)
        assert self.policy.num_offered == sum(self.offered.values())
        assert {key.decode() for key in self.policy.offered()} == {
            name for name, offered in self.offered.items() if offered
        }
        for name in self.offered:
            assert name.encode() in self.policy
            assert self.policy.is_leaf(name.encode()) == self._leaf(name)

    def teardown(self) -> None:
        """When nothing is withheld everything can leave."""
        if not hasattr(self, "policy"):
            return
        for name in self.offered:
            self.policy.offer(name.encode())
            self.offered[name] = True
        while self.offered:
            self.evict(1)
        assert self.policy.victim() is None
        assert len(self.policy) == 0


class KeeperMachine(RuleBasedStateMachine):
    """Tenants store, use, pin and lock blocks; budgets hold and what must stay stays."""

    keeper: Keeper

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        share=st.sampled_from(PROTECTED_SHARES),
        capacity=st.integers(4, 40),
        tenant_quota=st.sampled_from((None, 3, 12)),
        max_idle_s=st.sampled_from((None, 5.0)),
    )
    def build(
        self,
        name: str,
        share: float,
        capacity: int,
        tenant_quota: int | None,
        max_idle_s: float | None,
    ) -> None:
        """Choose the budget."""
        self.now_s = 0.0
        self.capacity, self.tenant_quota, self.max_idle_s = capacity, tenant_quota, max_idle_s
        self.keeper = Keeper(
            capacity,
            policy_factory(name, share),
            tenant_quota=tenant_quota,
            max_idle_s=max_idle_s,
            clock=lambda: self.now_s,
        )
        self.sizes: dict[str, int] = {}
        self.used_s: dict[str, float] = {}
        self.pins: dict[str, int] = {}
        self.locks: dict[str, list[float]] = {}

    def _has_blocks(self) -> bool:
        return bool(self.sizes)

    def _pick(self, n: int) -> str:
        return sorted(self.sizes)[n % len(self.sizes)]

    def _held(self, name: str) -> bool:
        locked = any(end > self.now_s for end in self.locks.get(name, ()))
        return locked or bool(self.pins.get(name))

    def _used(self, tenant: str | None = None) -> int:
        return sum(n for name, n in self.sizes.items() if tenant is None or name[0] == tenant)

    def _limit(self, tenant: str) -> int:
        """``D`` is the default tenant, who has no quota."""
        return self.capacity if tenant == "D" else self.tenant_quota or self.capacity

    def _fits(self, size: int, tenant: str) -> bool:
        fits = self._used(tenant) + size <= self._limit(tenant)
        return self._used() + size <= self.capacity and fits

    def _gone(self, names: Iterable[str]) -> None:
        for name in names:
            assert not self._held(name), "what must stay has left"
            assert not any(other[:-1] == name for other in self.sizes), "a parent left first"
            del self.sizes[name], self.used_s[name]
            self.pins.pop(name, None)
            self.locks.pop(name, None)

    @rule(tenant=st.sampled_from(_TENANTS), chain=_CHAINS, size=st.integers(1, 9))
    def store(self, tenant: str, chain: str, size: int) -> None:
        """A tenant stores a chain, parents first; every name begins with the tenant's."""
        who = _tenant(tenant)
        for name in prefixes(tenant + chain):
            if name in self.sizes:
                continue
            before = dict(self.sizes)
            over = self._used(tenant) + size > self._limit(tenant)
            block = candidate(name, size)
            victims = [key.decode() for key in self.keeper.make_room(block, who)]
            assert not any(name.startswith(victim) for victim in victims), "ate its own head"
            if over and victims and self._limit(tenant) < self.capacity:
                assert victims[0][0] == tenant, "a tenant over its quota took another's room"
            self._gone(victims)
            fits = self._fits(size, tenant)
            assert self.keeper.fits(size, who) == fits
            if size > min(self.capacity, self._limit(tenant)):
                assert self.sizes == before, "evicted for what can never fit"
            elif not any(name.startswith(o) or self._held(o) for o in self.sizes):
                assert fits, "room is refused though everything may leave"
            if not fits:
                break
            self.keeper.add(block, who)
            self.sizes[name], self.used_s[name] = size, self.now_s

    @rule(tenant=st.sampled_from(_TENANTS), chain=_CHAINS)
    def touch(self, tenant: str, chain: str) -> None:
        """A chain is of use, as far as it is there."""
        names = prefixes(tenant + chain)
        self.keeper.touch([name.encode() for name in names])
        self.used_s.update({name: self.now_s for name in names if name in self.sizes})

    @precondition(_has_blocks)
    @rule(n=st.integers(0, 99))
    def pin(self, n: int) -> None:
        """A load begins."""
        name = self._pick(n)
        self.keeper.pin(name.encode())
        self.pins[name] = self.pins.get(name, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(n=st.integers(0, 99))
    def unpin(self, n: int) -> None:
        """A load ends."""
        pinned = sorted(name for name, pins in self.pins.items() if pins)
        name = pinned[n % len(pinned)]
        self.keeper.unpin(name.encode())
        self.pins[name] -= 1

    @rule(tenant=st.sampled_from(_TENANTS), chain=_CHAINS, ttl_s=st.sampled_from((1.0, 4.0)))
    def lock(self, tenant: str, chain: str, ttl_s: float) -> None:
        """Somebody wants a block to stay, there or not."""
        name = tenant + chain
        assert self.keeper.lock(name.encode(), ttl_s) == (name in self.sizes)
        if name in self.sizes:
            ends = [end for end in self.locks.get(name, ()) if end > self.now_s]
            self.locks[name] = sorted([*ends, self.now_s + ttl_s])

    @rule(tenant=st.sampled_from(_TENANTS), chain=_CHAINS)
    def unlock(self, tenant: str, chain: str) -> None:
        """Somebody needs it no longer, or never did."""
        name = tenant + chain
        self.keeper.unlock(name.encode())
        ends = [end for end in self.locks.get(name, ()) if end > self.now_s]
        self.locks[name] = ends[1:]

    @precondition(_has_blocks)
    @rule(n=st.integers(0, 99))
    def remove(self, n: int) -> None:
        """A block is deleted, whoever continues it."""
        name = self._pick(n)
        if not self._held(name):
            self.keeper.remove(name.encode())
            del self.sizes[name], self.used_s[name]
            self.pins.pop(name, None)
            self.locks.pop(name, None)

    @rule(seconds=st.sampled_from((0.5, 2.0, 6.0)))
    def wait(self, seconds: float) -> None:
        """Time goes by; what was idle for too long has to go."""
        self.now_s += seconds
        idle: set[str] = set()
        for name in sorted(self.sizes, key=len, reverse=True):
            children = {other for other in self.sizes if other[:-1] == name}
            late = self.max_idle_s is not None and self.used_s[name] < self.now_s - self.max_idle_s
            if late and not self._held(name) and children <= idle:
                idle.add(name)
        gone = [key.decode() for key in self.keeper.expire()]
        assert set(gone) == idle
        self._gone(gone)

    @invariant()
    def agrees(self) -> None:
        """Budget, sums and members agree with the truth."""
        if not hasattr(self, "keeper"):
            return
        self.keeper.check()
        assert len(self.keeper) == len(self.sizes)
        assert self.keeper.used == self._used() <= self.capacity
        by_tenant = {_tenant(t): used for t in _TENANTS if (used := self._used(t))}
        assert self.keeper.used_by_tenant() == by_tenant
        for tenant in _TENANTS:
            assert self._used(tenant) <= self._limit(tenant)
        for name in self.sizes:
            assert name.encode() in self.keeper
