"""Blocks from lower tiers for waiting sequences: found, loaded, adopted, given up.

Owns which sequence waits for which load, and what lower tiers were last said to have for it. The
only place where sequences and tiers meet. Knows neither queue nor budget: `engine.admission` asks
it who has something to load, `engine.scheduler` tells it what was computed. Threads: step thread
only.

A sequence with a load is running: it holds its table, computes what stands before the loaded blocks
(nothing, or the head of a split), and rests when that is done until the load is over::

    table    | device hits | head: computed |                      load_limit ─┐
    run                                     | LOADING … LOADING |              ▼
    adopt    | device hits | head           | loaded            | the rest is computed

What did not come, or not in time, is computed like anything else: a failed load is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvist.blocks.loading import LoadingRun
from kvist.cache import KVCacheManager, PrefixMatch
from kvist.engine.sequence import Sequence
from kvist.errors import IntegrityError
from kvist.events import EventLog, PrefixLoaded
from kvist.keys import HashChain
from kvist.tiers.demotion import Sealed
from kvist.tiers.manager import Choice, TierManager
from kvist.tiers.promotion import Found, Load

FRESH_S = 1.0
"""So old may be what tiers said they have."""

LOOKUP_S = 0.05
"""That a tier across a network gets to say what it has."""

MOST_FAILURES = 2
"""Loads that may fail before a sequence computes everything."""

FREE_SHARE = 0.02
"""Of the pool that is kept free by eviction ahead of need, where copies wait for eviction."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What lower tiers have for a sequence, beyond its device hits.

    Attributes
    ----------
    first : int
        Index of the first block to be loaded; those before it are on the device or to be computed.
    """

    first: int
    found: Found
    choice: Choice


@dataclass(slots=True)
class _Look:
    first: int
    found: Found
    at_s: float
    until_s: float
    step: int


@dataclass(slots=True)
class _Held:
    """A load and the sequence that waits for it; ``None``: nobody does."""

    run: LoadingRun
    load: Load
    seq: Sequence | None
    is_first: bool
    num_ready: int | None = None


class PrefixLoads:
    """Loads of one engine.

    Parameters
    ----------
    cache : KVCacheManager
    tiers : TierManager
    events : EventLog
    clock : callable
        Seconds, monotonic; the one of `tiers`.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        tiers: TierManager,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self._cache = cache
        self._events = events
        self._clock = clock
        self._step = 0
        self._looks: dict[str, _Look] = {}
        self._failures: dict[str, int] = {}
        self._held: dict[Load, _Held] = {}
        self._by_request: dict[str, _Held] = {}
        self.on_adopted: Callable[[Sequence, int], None] | None = None
        """Told of a sequence and how many leading blocks of it are full now."""

    @property
    def num_waiting(self) -> int:
        """Sequences that a load is under way for."""
        return len(self._by_request)

    # ------------------------------------------------------------------ coming

    def offer(self, seq: Sequence, match: PrefixMatch, *, fresh: bool = False) -> Offer | None:
        """Say what to load for a sequence; ``None``: a tier has yet to answer, ask again.

        REQUIRES a chain that covers its tokens. An offer of no blocks: compute everything.

        Parameters
        ----------
        fresh : bool
            Whether it is about to be taken, and must be as of this step. Else what tiers said a
            moment ago will do: those who wait for room are looked at in every step.
        """
        first = len(match.block_ids)
        found = self._look(seq, first, fresh=fresh)
        if found is None:
            return None
        if self._failures.get(seq.request_id, 0) >= MOST_FAILURES:
            found = Found()
        choice = self.tiers.choose(found)
        return Offer(first + choice.num_computed, found.since(choice.num_computed), choice)

    def _look(self, seq: Sequence, first: int, *, fresh: bool) -> Found | None:
        chain = _stored(seq)
        assert chain is not None
        limit = (seq.num_tokens - 1) // self._cache.block_size
        if first >= limit:
            return Found()
        now = self._clock()
        look = self._looks.get(seq.request_id)
        if (
            look is None
            or look.first > first
            or look.found.is_waiting
            or (look.step != self._step if fresh else now - look.at_s > FRESH_S)
        ):
            namespace = self.tiers.namespace(seq.request.salt)
            keys = chain.keys[first:limit]
            found = self.tiers.find(
                namespace, keys, allow_lossy=seq.is_approximate, tell=look is None
            )
            until_s = now + LOOKUP_S if look is None else look.until_s
            look = self._looks[seq.request_id] = _Look(first, found, now, until_s, self._step)
        if look.found.is_waiting and now < look.until_s:
            return None
        return look.found.since(first - look.first)

    def begin(self, seq: Sequence, offer: Offer, *, is_first: bool) -> None:
        """Load what was offered to a sequence that has its table now."""
        chain = _stored(seq)
        assert seq.chain is not None
        assert chain is not None
        first, n = offer.first, offer.choice.num_loaded
        keys = seq.chain.keys[first : first + n]
        run = self._cache.loading.begin(first, keys, seq.chain.parent(first), seq.token_ids)
        self._looks.pop(seq.request_id, None)
        if run is None:
            return
        namespace = self.tiers.namespace(seq.request.salt)
        load = self.tiers.load(
            namespace,
            chain.keys[first : first + n],
            run.block_ids,
            offer.found,
            offer.choice.deadline_s,
        )
        held = _Held(run, load, seq, is_first)
        self._held[load] = self._by_request[seq.request_id] = held
        seq.load_limit = first * self._cache.block_size
        seq.num_loading_blocks = n

    # ------------------------------------------------------------------ under way

    def poll(self) -> None:
        """See what has arrived, and whose patience is over. REQUIRES no plan in flight."""
        self._step += 1
        arrived = self.tiers.poll()
        for load, start, good in arrived:
            self._cache.loading.arrive(self._held[load].run, start, good)
        for load in {load for load, _, _ in arrived}:
            if self._held[load].seq is None and not load.jobs:
                del self._held[load]
        for held in list(self._by_request.values()):
            self._look_at(held)

    def _look_at(self, held: _Held) -> None:
        run = held.run
        if held.num_ready is None:
            late = self._clock() >= held.load.deadline_s
            if not run.is_decided and not late:
                return
            held.num_ready = run.num_ready
            if run.num_ready < len(run.keys):
                assert held.seq is not None
                self._failures[held.seq.request_id] = self._failures.get(held.seq.request_id, 0) + 1
                (self.tiers.expire if late else self.tiers.cancel)(held.load)
        if held.seq is not None:
            self.adopt(held.seq)

    def adopt(self, seq: Sequence) -> None:
        """Put what was loaded into the table of a sequence that has computed all before it."""
        held = self._by_request.get(seq.request_id)
        if held is None or held.num_ready is None:
            return
        if not held.num_ready:
            self._cache.loading.close(held.run)
            self._let_go(held, seq)
            return
        if seq.table is None or seq.num_computed != seq.load_limit:
            return
        start, n = seq.num_computed, held.num_ready
        seq.is_exact = seq.is_exact and all(held.load.exact)
        self._cache.adopt(seq.table, held.run, n)
        end = seq.num_computed
        self._let_go(held, seq)
        size = self._cache.block_size
        sources: dict[str, int] = {}
        for medium in held.load.media[:n]:
            sources[medium] = sources.get(medium, 0) + size
        reused = max(0, min(end, seq.num_prompt_tokens) - max(start, seq.num_seen))
        if held.is_first:
            seq.num_cached_tokens = (seq.num_cached_tokens or 0) + end - start
        self._events.emit(
            PrefixLoaded(
                seq.request_id, end - start, not held.is_first, reused, tuple(sources.items())
            )
        )
        if self.on_adopted is not None:
            self.on_adopted(seq, len(seq.table.ids))
        self.used(seq, start // size, end // size)
        self.sealed(seq, start // size, end // size)

    def _let_go(self, held: _Held, seq: Sequence) -> None:
        del self._by_request[seq.request_id]
        held.seq = None
        seq.load_limit = None
        seq.num_loading_blocks = 0
        if not held.load.jobs:
            del self._held[held.load]

    def abandon(self, seq: Sequence) -> None:
        """A sequence gives its blocks up: it waits for no load any more."""
        held = self._by_request.get(seq.request_id)
        if held is None:
            return
        self.tiers.cancel(held.load)
        self._cache.loading.close(held.run)
        self._let_go(held, seq)

    def forget(self, seq: Sequence) -> None:
        """A sequence is over."""
        self._looks.pop(seq.request_id, None)
        self._failures.pop(seq.request_id, None)

    # ------------------------------------------------------------------ down

    def sealed(self, seq: Sequence, start: int, end: int) -> None:
        """Blocks ``start .. end - 1`` of a sequence are findable now: copies may go down."""
        chain, table = seq.chain, seq.table
        if chain is None or table is None or start >= end or seq.is_approximate:
            # What comes of an approximate context stays on the device.
            return
        namespace = self.tiers.namespace(seq.request.salt)
        for index in range(start, end):
            block = Sealed(
                namespace, table.ids[index], chain.keys[index], chain.parent(index), index
            )
            self.tiers.sealed(block)

    def used(self, seq: Sequence, start: int, end: int) -> None:
        """Blocks of a sequence were found and not computed."""
        chain = _stored(seq)
        if chain is not None and start < end:
            namespace = self.tiers.namespace(seq.request.salt)
            self.tiers.used(namespace, chain.keys[start:end])

    def pump(self) -> None:
        """Let copies go down."""
        evictable = self.tiers.num_evictable
        if evictable:
            self._cache.evict_ahead(max(1, int(FREE_SHARE * self._cache.num_blocks)), evictable)
        self.tiers.pump()

    def observe(self, longest: int, num_tokens: int, seconds: float) -> None:
        """Learn how fast prompts are read, from a step whose longest run had so many tokens."""
        if longest > 1:
            self.tiers.prefill.observe(num_tokens, seconds)

    def tend(self, timeout_s: float) -> None:
        """Send copies down; where a load or a lookup is waited for, wait for news of it."""
        if timeout_s and (self._held or self._looks or self.has_unsent):
            self.tiers.wait(timeout_s)
        self.poll()
        self.pump()

    @property
    def has_unsent(self) -> bool:
        """Whether copies wait for room on their way down."""
        return self.tiers.num_unsent > 0

    def close(self, timeout_s: float) -> None:
        """Let the tiers take what is on its way to them, so long, and close them."""
        for held in self._by_request.values():
            self.tiers.cancel(held.load)
        self.tiers.drain(timeout_s)
        self.tiers.close()

    def check(self) -> None:
        """Raise `IntegrityError` unless loads, runs and tiers agree."""
        self.tiers.check()
        for request_id, held in self._by_request.items():
            seq = held.seq
            if seq is None or seq.request_id != request_id or not held.run.is_open:
                raise IntegrityError(f"a load of {request_id} that it does not hold")
            if seq.load_limit != held.run.first * self._cache.block_size:
                raise IntegrityError(f"{seq!r} may compute up to {seq.load_limit}, {held.run!r}")
        for held in self._held.values():
            if held.seq is None and not held.load.jobs:
                raise IntegrityError(f"a load that is over is remembered: {held.run!r}")


def _stored(seq: Sequence) -> HashChain | None:
    """Return the names that lower tiers know a sequence's blocks by, up to its last token."""
    if seq.is_approximate and seq.stored_chain is not None:
        seq.stored_chain.extend(seq.token_ids)
    return seq.stored_chain
