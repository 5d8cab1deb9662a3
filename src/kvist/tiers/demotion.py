"""The way down: copies of blocks go to every tier that lacks them.

Owns the blocks that are yet to be copied, and the copies under way. Knows neither tables nor
sequences. Threads: step thread only.

::

    sealed ──▶ pending ──copy──▶ staging slot ──▶ StoreJob to each tier that lacks it ──▶ slot free
                  └─ evicted before there was a slot: it is not kept, and that is told

When a block becomes pending is the policy's:

- ``through``: when it is sealed, so that a crash loses little;
- ``hits:K``: when it was used for the K-th time, sealing included: one-off prompts stay out;
- ``evict``: when it is evicted. The engine evicts ahead of need then, while slots are free, so that
  no step waits for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


class Demotions:
    """Stores to several tiers.

    Parameters
    ----------
    links : sequence of TierLink
    device : DeviceBytes
    staging : Staging
    events : EventLog
    policy : WritePolicy

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
    ) -> None:
        self.recompute_s = 0.0
        self._links = links
        self._device = device
        self._staging = staging
        self._events = events
        self._policy = policy
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
    def num_staged(self) -> int:
        """Blocks whose copies are under way."""
        return self._staging.num_slots - self._staging.num_free

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
        block = self._known.pop(key, None)
        self._uses.pop(key, None)
        pending = self._pending.pop(key, None)
        if pending is not None:
            self._lose("no slot was free before it was evicted")
        elif block is not None and self._policy.on_eviction:
            self._send([block], "no slot was free when it was evicted")

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
        """Copy pending blocks, oldest first, as slots are free, and hand them to the tiers."""
        while self._pending and self._staging.num_free:
            namespace = next(iter(self._pending.values())).namespace
            blocks: list[Sealed] = []
            for block in self._pending.values():
                if block.namespace != namespace or len(blocks) >= self._job_blocks:
                    break
                blocks.append(block)
            del blocks[self._staging.num_free :]
            for block in blocks:
                del self._pending[block.key]
            self._send(blocks, "")

    def _send(self, blocks: list[Sealed], excuse: str) -> None:
        """Stage blocks of one namespace that some tier lacks."""
        namespace = blocks[0].namespace
        wanted = [self._lacking(link, namespace, blocks) for link in self._links]
        slots: dict[BlockKey, int] = {}
        for block in blocks:
            if not any(block.key in keys for keys in wanted):
                continue
            slot = self._staging.take()
            if slot is None:
                self._lose(excuse)
                continue
            self._device.read(block.block_id, self._staging.view(slot))
            slots[block.key] = slot
        for number, keys in enumerate(wanted):
            mine = [block for block in blocks if block.key in keys and block.key in slots]
            if mine:
                self._store(number, namespace, mine, [slots[block.key] for block in mine])
        for slot in slots.values():
            self._staging.release(slot)

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

    def _store(self, number: int, namespace: bytes, blocks: list[Sealed], slots: list[int]) -> None:
        link = self._links[number]
        for slot in slots:
            self._staging.retain(slot)

        def on_done(done: JobDone) -> None:
            for slot in slots:
                self._staging.release(slot)
            self._tell(link, done)

        link.store(
            namespace,
            tuple(block.key for block in blocks),
            tuple(self._staging.view(slot).toreadonly() for slot in slots),
            tuple(BlockMeta(block.parent, block.depth, self.recompute_s) for block in blocks),
            on_done,
        )

    def _tell(self, link: TierLink, done: JobDone) -> None:
        outcomes = Counter(done.outcomes)
        stored = outcomes.pop(Outcome.DONE, 0)
        if stored:
            event = BlocksDemoted(link.name, stored, done.stored_bytes, done.seconds)
            self._events.emit(event)
        for outcome, times in outcomes.items():
            self._events.emit(DemotionFailed(link.name, times, outcome.value, done.reason))

    def _lose(self, reason: str) -> None:
        self._events.emit(DemotionFailed("all", 1, "dropped", reason))

    def check(self) -> None:
        """Raise `IntegrityError` unless slots and jobs agree."""
        self._staging.check()
        if self.num_staged and not any(link.num_jobs for link in self._links):
            raise IntegrityError(f"{self.num_staged} slots are lent and no job is under way")
