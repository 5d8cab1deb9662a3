"""The way down: copies of blocks go to every tier that lacks them.

Owns the blocks that are yet to be copied, and the copies under way. Knows neither tables nor
sequences. Threads: step thread only.

::

    sealed ──▶ pending ──lend──▶ StoreJob to each tier that lacks it ──▶ kept
                  │                 └─ evicted meanwhile: lost ──copy──▶ staging slot, and once more
                  └─ evicted before it was sent ──copy──▶ staging slot ──▶ StoreJob ──▶ slot free

Where the device's memory is the host's, tiers read the block itself: no thread copies anything to
lend it. An evicted block is told of as *lost* before its bytes change, and copied to a slot then; a
tier that asks for lost blocks after its last look at the bytes can therefore trust what it read.
Where the memory is a GPU's, or a tier asks for nothing, every block is copied to a slot first. What
is evicted when no slot is free is not kept, and that is told. This is a seqlock, of which the
writer is the evicting thread; ours differs in that a reader that comes too late is handed a copy.

When a block becomes pending is the policy's:

- ``through``: when it is sealed, so that a crash loses little;
- ``hits:K``: when it was used for the K-th time, sealing included: one-off prompts stay out;
- ``evict``: when it is evicted. The engine evicts ahead of need then, while slots are free, so that
  no step waits for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvist.errors import ConfigError, IntegrityError
from kvist.events import BlocksDemoted, DemotionFailed, EventLog
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, JobDone, LookupStatus, Outcome
from kvist.tiers.link import TierLink
from kvist.tiers.promotion import JOB_BYTES, DeviceBytes
from kvist.tiers.staging import Staging


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """When copies of a block go down. See the module."""

    min_uses: int = 1
    on_eviction: bool = False

    @classmethod
    def parse(cls, text: str) -> WritePolicy:
        """Read ``through``, ``hits:K`` or ``evict``.

        Raises
        ------
        ConfigError
            If it is none of them.
        """
        if text == "through":
            return cls()
        if text == "evict":
            return cls(on_eviction=True)
        name, _, number = text.partition(":")
        if name == "hits" and number.isdecimal() and int(number) >= 1:
            return cls(min_uses=int(number))
        raise ConfigError(
            f"--tier-write-policy={text!r} must be through, hits:K (K of 1 or more) or evict"
        )


@dataclass(frozen=True, slots=True)
class Sealed:
    """A findable block of the device.

    Attributes
    ----------
    namespace : bytes
    block_id : int
    key, parent : BlockKey
    depth : int
    """

    namespace: bytes
    block_id: int
    key: BlockKey
    parent: BlockKey
    depth: int


@dataclass(slots=True, eq=False)
class _Flight:
    """Blocks lent to tiers as they lie on the device.

    `lost` were evicted meanwhile; what of them found a slot in time is in `saved`.
    """

    blocks: dict[BlockKey, Sealed]
    num_jobs: int = 0
    lost: set[BlockKey] = field(default_factory=set)
    saved: dict[BlockKey, int] = field(default_factory=dict)


class Demotions:
    """Stores to several tiers.

    Parameters
    ----------
    links : sequence of TierLink
    device : DeviceBytes
    staging : Staging
    events : EventLog
    policy : WritePolicy
    in_place : bool
        Whether tiers may read blocks where `DeviceBytes.landing` says that they lie.

    Attributes
    ----------
    recompute_s : float
        What computing one block again would take; told to tiers, 0 while unknown.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        device: DeviceBytes,
        staging: Staging,
        events: EventLog,
        policy: WritePolicy,
        *,
        in_place: bool = False,
    ) -> None:
        self.recompute_s = 0.0
        self._links = links
        self._device = device
        self._staging = staging
        self._events = events
        self._policy = policy
        self._in_place = in_place
        self._flights: dict[BlockKey, _Flight] = {}
        self._keeps_books = policy.on_eviction or policy.min_uses > 1
        self._pending: OrderedDict[BlockKey, Sealed] = OrderedDict()
        # Of findable blocks, where the policy has to know them later.
        self._known: dict[BlockKey, Sealed] = {}
        self._uses: Counter[BlockKey] = Counter()
        self._job_blocks = max(1, JOB_BYTES // device.block_bytes)

    @property
    def num_pending(self) -> int:
        """Blocks that wait for a slot."""
        return len(self._pending)

    @property
    def num_sent(self) -> int:
        """Blocks that tiers have yet to read, or to say what became of."""
        return self._staging.num_slots - self._staging.num_free + len(self._flights)

    # ------------------------------------------------------------------ what happened

    def sealed(self, block: Sealed) -> None:
        """A block became findable on the device."""
        if self._keeps_books:
            self._known[block.key] = block
            self.used((block.key,))
        else:
            self._pending[block.key] = block

    def used(self, keys: Iterable[BlockKey]) -> None:
        """Blocks of the device were found again."""
        if self._policy.min_uses == 1:
            return
        for key in keys:
            block = self._known.get(key)
            if block is None:
                continue
            self._uses[key] += 1
            if self._uses[key] == self._policy.min_uses:
                self._pending[key] = block

    def evicted(self, block_id: int, key: BlockKey) -> None:
        """A block leaves the device; its bytes are still there during the call."""
        if self._keeps_books:
            block = self._known.pop(key, None)
            self._uses.pop(key, None)
            if block is not None and self._policy.on_eviction:
                self._copy_and_send([block])
        flight = self._flights.get(key)
        if flight is not None and key not in flight.lost:
            flight.lost.add(key)
            slot = self._copy(flight.blocks[key])
            if slot is not None:
                flight.saved[key] = slot
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._copy_and_send([pending])

    @property
    def num_evictable(self) -> int:
        """Blocks that could be evicted now and kept below; 0 where eviction is not waited for."""
        return self._staging.num_free if self._policy.on_eviction else 0

    def flush(self) -> None:
        """Make everything pending that the policy has kept back until eviction."""
        if self._policy.on_eviction:
            self._pending.update(self._known)
            self._known.clear()

    # ------------------------------------------------------------------ sending

    def pump(self) -> None:
        """Hand pending blocks to the tiers, oldest first, as far as there is room for copies."""
        while self._pending and (room := self._staging.num_slots - self.num_sent) > 0:
            namespace = next(iter(self._pending.values())).namespace
            blocks: list[Sealed] = []
            for block in self._pending.values():
                if block.namespace != namespace or len(blocks) >= min(room, self._job_blocks):
                    break
                blocks.append(block)
            for block in blocks:
                del self._pending[block.key]
            self._send(blocks)

    def _send(self, blocks: list[Sealed]) -> None:
        """Lend blocks of one namespace to the tiers that lack them, or copies if need be."""
        namespace = blocks[0].namespace
        wanted = [self._lacking(link, namespace, blocks) for link in self._links]
        if not self._in_place or not all(
            link.tier.reads_in_place for link, keys in zip(self._links, wanted, strict=True) if keys
        ):
            self._send_copies(blocks, wanted)
            return
        flight = _Flight({})
        for number, keys in enumerate(wanted):
            mine = [block for block in blocks if block.key in keys]
            if mine:
                flight.num_jobs += 1
                flight.blocks.update((block.key, block) for block in mine)
                self._lend(number, mine, flight)
        self._flights.update(dict.fromkeys(flight.blocks, flight))

    def _copy_and_send(self, blocks: list[Sealed]) -> None:
        """Copy blocks of one namespace that some tier lacks: they are about to be overwritten."""
        wanted = [self._lacking(link, blocks[0].namespace, blocks) for link in self._links]
        self._send_copies(blocks, wanted)

    def _send_copies(self, blocks: list[Sealed], wanted: list[frozenset[BlockKey]]) -> None:
        slots: dict[BlockKey, int] = {}
        for block in blocks:
            if any(block.key in keys for keys in wanted):
                slot = self._copy(block)
                if slot is None:
                    self._lose("no slot was free before it was evicted")
                else:
                    slots[block.key] = slot
        for number, keys in enumerate(wanted):
            mine = [block for block in blocks if block.key in keys and block.key in slots]
            if mine:
                self._store(number, mine, [slots[block.key] for block in mine])
        for slot in slots.values():
            self._staging.release(slot)

    def _copy(self, block: Sealed) -> int | None:
        """Return a slot with a copy of a block, and a reference; ``None`` if none is free."""
        slot = self._staging.take()
        if slot is not None:
            self._device.read(block.block_id, self._staging.view(slot))
        return slot

    def _lacking(
        self, link: TierLink, namespace: bytes, blocks: list[Sealed]
    ) -> frozenset[BlockKey]:
        if link.is_suspended:
            return frozenset()
        keys = [block.key for block in blocks]
        answers = link.lookup(namespace, keys)
        there = (LookupStatus.HIT, LookupStatus.PENDING)
        return frozenset(
            key
            for key, answer in zip(keys, answers, strict=True)
            if answer.status not in there or (link.tier.lossless and not answer.exact)
        )

    def _lend(self, number: int, blocks: list[Sealed], flight: _Flight) -> None:
        """Let a tier read blocks where they lie; what is lost meanwhile is sent again, copied."""
        link = self._links[number]

        def on_done(done: JobDone) -> None:
            outcomes = Counter(done.outcomes)
            saved = [
                block
                for block, outcome in zip(blocks, done.outcomes, strict=True)
                if outcome is Outcome.CANCELLED and block.key in flight.saved
            ]
            if saved:
                outcomes[Outcome.CANCELLED] -= len(saved)
                self._store(number, saved, [flight.saved[block.key] for block in saved])
            self._tell(link, done, outcomes)
            flight.num_jobs -= 1
            if not flight.num_jobs:
                self._land(flight)

        link.store(
            blocks[0].namespace,
            tuple(block.key for block in blocks),
            tuple(self._device.landing(block.block_id).toreadonly() for block in blocks),
            tuple(BlockMeta(block.parent, block.depth, self.recompute_s) for block in blocks),
            on_done,
            flight.lost,
        )

    def _land(self, flight: _Flight) -> None:
        for slot in flight.saved.values():
            self._staging.release(slot)
        for key in flight.blocks:
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _store(self, number: int, blocks: list[Sealed], slots: list[int]) -> None:
        link = self._links[number]
        for slot in slots:
            self._staging.retain(slot)

        def on_done(done: JobDone) -> None:
            for slot in slots:
                self._staging.release(slot)
            self._tell(link, done, Counter(done.outcomes))

        link.store(
            blocks[0].namespace,
            tuple(block.key for block in blocks),
            tuple(self._staging.view(slot).toreadonly() for slot in slots),
            tuple(BlockMeta(block.parent, block.depth, self.recompute_s) for block in blocks),
            on_done,
        )

    def _tell(self, link: TierLink, done: JobDone, outcomes: Counter[Outcome]) -> None:
        stored = outcomes.pop(Outcome.DONE, 0)
        if stored:
            event = BlocksDemoted(link.name, stored, done.stored_bytes, done.seconds)
            self._events.emit(event)
        for outcome, times in (+outcomes).items():
            self._events.emit(DemotionFailed(link.name, times, outcome.value, done.reason))

    def _lose(self, reason: str) -> None:
        self._events.emit(DemotionFailed("all", 1, "dropped", reason))

    def check(self) -> None:
        """Raise `IntegrityError` unless slots and jobs agree."""
        self._staging.check()
        if self.num_sent and not any(link.num_jobs for link in self._links):
            raise IntegrityError(f"{self.num_sent} blocks are lent and no job is under way")
