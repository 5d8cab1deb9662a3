"""All tiers below the device as one: what they have, what goes up, what goes down.

Owns the order of the tiers, their namespaces, and the choice between loading and computing. Knows
keys, sizes and places for bytes; neither tables nor sequences, which are `kvist.engine.loads`'s.

Threads: step thread only. The tiers have threads of their own, which `wait` can wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvist.errors import ConfigError
from kvist.events import BlockEvicted, Event, EventLog
from kvist.keys import BlockKey, RootKey
from kvist.tiers.base import Namespace, Tier, Usage
from kvist.tiers.demotion import Demotions, Sealed, WritePolicy
from kvist.tiers.link import TierLink
from kvist.tiers.promotion import Arrived, DeviceBytes, Found, Load, Promotions
from kvist.tiers.speed import PrefillSpeed
from kvist.tiers.split import choose_cut
from kvist.tiers.staging import Staging

LOAD_POLICIES = ("auto", "always", "never")

_PATIENCE = 4.0
"""A load may take so many times what was expected of it."""
_LEAST_PATIENCE_S = 0.5
_MOST_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What all blocks of an engine have in common; see `Namespace`."""

    root: RootKey
    model: str
    format: str
    segment_bytes: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do about blocks that lower tiers have.

    Attributes
    ----------
    num_computed : int
        Leading blocks to compute all the same.
    num_loaded : int
        Blocks to load behind them; 0: compute all.
    deadline_s : float
        When the load is no longer waited for.
    """

    num_computed: int
    num_loaded: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier as it stands.

    Attributes
    ----------
    bytes_per_s, latency_s : float
        What loads are expected to cost.
    """

    name: str
    medium: str
    usage: Usage
    num_jobs: int
    is_suspended: bool
    bytes_per_s: float
    latency_s: float


class TierManager:
    """Tiers in the order in which they are asked, the fastest first.

    Parameters
    ----------
    tiers : sequence of Tier
        Owned by the manager from here on: `close` closes them.
    device : DeviceBytes
    identity : Identity
    events : EventLog
    write_policy : WritePolicy
    load_policy : {"auto", "always", "never"}
        ``auto`` decides between loading and computing; the others are what it is measured against.
    staging_blocks : int
        Blocks on their way down at most.
    in_place : bool
        Whether tiers may read blocks of the device where they lie, instead of copies.
    block_tokens : int
        Tokens a block, for the time that computing one takes.
    clock : callable
        Seconds, monotonic.

    Attributes
    ----------
    prefill : PrefillSpeed
        Fed by whoever runs steps.
    load_policy : str
        May be changed between two calls.

    Raises
    ------
    ConfigError
        If two tiers have one name.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        device: DeviceBytes,
        identity: Identity,
        events: EventLog,
        *,
        write_policy: WritePolicy,
        load_policy: str = "auto",
        staging_blocks: int = 128,
        in_place: bool = False,
        block_tokens: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) != len(names):
            raise ConfigError(f"two tiers have one name: {', '.join(names)}")
        self.prefill = PrefillSpeed()
        self._identity = identity
        self.load_policy = load_policy
        self._block_tokens = block_tokens
        self._clock = clock
        self._links = tuple(TierLink(tier, clock, events) for tier in tiers)
        segments = range(len(identity.segment_bytes))
        self._promotions = Promotions(self._links, device, segments, events, clock)
        self._staging = Staging(staging_blocks, device.block_bytes)
        self._demotions = Demotions(
            self._links, device, self._staging, events, write_policy, in_place=in_place
        )
        self._namespaces: dict[str, bytes] = {}
        self._woken = threading.Event()
        for link in self._links:
            link.tier.set_waker(self._waker(link))
        events.subscribe(self._hear)

    def _waker(self, link: TierLink) -> Callable[[], None]:
        def wake() -> None:
            link.woken()
            self._woken.set()

        return wake

    def _hear(self, event: Event) -> None:
        if isinstance(event, BlockEvicted):
            self._demotions.evicted(event.block_id, event.key)

    # ------------------------------------------------------------------ namespaces

    def namespace(self, salt: str) -> bytes:
        """Return the digest of a tenant's namespace, opened in every tier.

        The salt itself goes nowhere: a tenant is known by a digest of it.
        """
        digest = self._namespaces.get(salt)
        if digest is None:
            made = self.make_namespace(salt)
            for link in self._links:
                link.tier.open_namespace(made)
            digest = self._namespaces[salt] = made.digest
        return digest

    def make_namespace(self, salt: str) -> Namespace:
        """Say what a tenant's blocks have in common. Opens nothing."""
        identity = self._identity
        # Bound to the root, so that one tenant cannot be followed from model to model.
        tenant = blake2b(
            salt.encode(), digest_size=8, key=identity.root, person=b"kvist.tenant.v1"
        ).hexdigest()
        digest = blake2b(digest_size=32, key=identity.root, person=b"kvist.space.v1")
        digest.update(salt.encode())
        return Namespace(
            digest.digest(),
            identity.model,
            identity.format,
            tenant if salt else "",
            identity.segment_bytes,
            identity.itemsize,
        )

    # ------------------------------------------------------------------ up

    @property
    def are_lossy(self) -> bool:
        """Whether some tier makes copies that are not exact."""
        return not all(link.tier.lossless for link in self._links)

    def find(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        *,
        allow_lossy: bool = False,
        tell: bool = True,
    ) -> Found:
        """Return the longest run of keys, from the first, of which each is in some tier.

        `allow_lossy`: whether copies of lossy codecs count. `tell`: whether to count it; not when
        the same is asked again.
        """
        return self._promotions.find(namespace, keys, allow_lossy=allow_lossy, tell=tell)

    def choose(self, found: Found) -> Choice:
        """Decide what of a run to load, and what to compute meanwhile."""
        now = self._clock()
        if not len(found) or self.load_policy == "never":
            return Choice(0, 0, now)
        load_s = self._promotions.seconds(found)
        compute_s = self.compute_s
        cut = 0
        if self.load_policy == "auto":
            cut, _ = choose_cut(load_s, compute_s, self.prefill.step_s)
        if cut == len(found):
            return Choice(cut, 0, now)
        patience = max(_LEAST_PATIENCE_S, _PATIENCE * load_s[cut])
        if compute_s is not None and self.load_policy == "auto":
            patience = min(patience, max(_LEAST_PATIENCE_S, (len(found) - cut) * compute_s))
        # While the head is computed nobody waits for the tail.
        head_s = cut * compute_s if compute_s is not None else 0.0
        deadline = now + head_s + min(patience, _MOST_PATIENCE_S)
        return Choice(cut, len(found) - cut, deadline)

    @property
    def compute_s(self) -> float | None:
        """Seconds to compute one block; ``None`` before anything was measured."""
        rate = self.prefill.tokens_per_s
        return None if rate is None else self._block_tokens / rate

    def load(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        found: Found,
        deadline_s: float,
    ) -> Load:
        """Load blocks into places on the device, lent until `poll` tells of them."""
        return self._promotions.begin(namespace, keys, block_ids, found, deadline_s)

    def cancel(self, load: Load) -> None:
        """Nobody waits for a load any more; its blocks stay lent until `poll` tells of them."""
        self._promotions.cancel(load)

    def expire(self, load: Load) -> None:
        """The deadline of a load has passed; the tiers that did not keep it are left alone."""
        self._promotions.expire(load)

    def poll(self) -> list[Arrived]:
        """Return the parts of loads that are over; free the slots of stores that are."""
        self._woken.clear()
        for link in self._links:
            link.poll()
        return self._promotions.arrived()

    def wait(self, timeout_s: float) -> None:
        """Wait until a tier has something to tell, at most so long."""
        self._woken.wait(timeout_s)

    # ------------------------------------------------------------------ down

    def sealed(self, block: Sealed) -> None:
        """A block became findable on the device."""
        self._demotions.sealed(block)

    def used(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """Blocks of the device were found: they are of use below too."""
        self._demotions.used(keys)
        for link in self._links:
            if link.medium != "remote" and not link.is_suspended:
                link.tier.touch(namespace, keys)

    @property
    def num_evictable(self) -> int:
        """Blocks that are better evicted now, and copied, than in the step that needs them."""
        return self._demotions.num_evictable

    def pump(self) -> None:
        """Hand pending copies to the tiers, as far as there is room for them."""
        self._demotions.recompute_s = self.compute_s or 0.0
        self._demotions.pump()

    @property
    def num_unsent(self) -> int:
        """Copies that are yet to be made."""
        return self._demotions.num_pending

    @property
    def num_pending(self) -> int:
        """Copies that are yet to be made, or under way."""
        return self._demotions.num_pending + self._demotions.num_sent

    # ------------------------------------------------------------------ looks

    @property
    def host_bytes(self) -> int:
        """Host memory that tiers and copies on their way down take now."""
        return self._staging.touched_bytes + sum(
            link.tier.usage().used_bytes for link in self._links if link.medium == "host"
        )

    @property
    def host_reserved_bytes(self) -> int:
        """Host memory that they may take."""
        return self._staging.nbytes + sum(
            link.tier.usage().capacity_bytes for link in self._links if link.medium == "host"
        )

    def states(self) -> tuple[TierState, ...]:
        """Look at every tier."""
        return tuple(
            TierState(
                link.name,
                link.medium,
                link.tier.usage(),
                link.num_jobs,
                link.is_suspended,
                link.speed.bytes_per_s,
                link.speed.latency_s,
            )
            for link in self._links
        )

    def check(self) -> None:
        """Raise `IntegrityError` unless the books of all tiers and copies hold."""
        self._demotions.check()
        for link in self._links:
            link.check()

    # ------------------------------------------------------------------ end

    def drain(self, timeout_s: float) -> bool:
        """Copy what is pending and wait until tiers have it; say whether that was reached in time.

        REQUIRES no load is under way. Blocks.
        """
        until = self._clock() + timeout_s
        self._demotions.flush()
        while self.num_pending and self._clock() < until:
            self.pump()
            for link in self._links:
                if not link.is_suspended:
                    link.tier.drain(max(0.0, until - self._clock()))
            self.poll()
        return not self.num_pending

    def close(self) -> None:
        """Close the tiers. What is under way is lost; `drain` comes first where that matters."""
        for link in self._links:
            link.tier.close()
