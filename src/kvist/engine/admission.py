"""Who leaves the queue: the part of a decision that lets new sequences in, and takes it back.

Owns the manners of the queue: who may be passed, how often, and who follows whom. Knows neither
running sequences' needs (`engine.room` counts them) nor time. Threads: step thread only.

A sequence that does not fit may be passed by later ones that do, `MAX_PASSES` times in all; then it
blocks the queue until it fits::

    pool  [ r r r r r r . . ]      waiting  A(5)  b(1)  c(2)  d(1)
                                   b passes A, c and d pass A … after the eighth everyone waits,
                                   running ones end, and A comes in

so a big request never starves, and small ones do not wait behind it for nothing. A preempted one is
never passed: the room it gave up is not for those that came later. Skip counts of this kind are
known from batch schedulers; vLLM blocks the queue at once.
"""

from __future__ import annotations

from collections.abc import Container

from kvist.cache import NO_MATCH, KVCacheManager, PrefixMatch
from kvist.config import SchedulerConfig
from kvist.engine.loads import Offer, PrefixLoads
from kvist.engine.requests import RequestTable
from kvist.engine.sequence import Sequence
from kvist.errors import IntegrityError
from kvist.events import EventLog, RequestScheduled

MAX_PASSES = 8
"""So often may later ones be let in before a sequence that finds no room."""

MAX_LOOKS = 8
"""Sequences without room that are looked at in one step: it must stay cheap when all is full."""


class Admission:
    """Lets waiting sequences in while budget and room last.

    Parameters
    ----------
    config : SchedulerConfig
    cache : KVCacheManager
    events : EventLog
    requests : RequestTable
    loads : PrefixLoads or None
        Where there are tiers below the device.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        events: EventLog,
        requests: RequestTable,
        loads: PrefixLoads | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._events = events
        self._requests = requests
        self._loads = loads
        self._room = requests.room
        self._waiting, self._running = requests.waiting, requests.running
        # By the plan in flight: who was let in, whether for the first time, and how many of its
        # tokens were looked up; and who was passed, once for each time.
        self._admitted: list[tuple[Sequence, bool, int]] = []
        self._passed: list[Sequence] = []

    def admit(
        self, budget: int, rows: int, chosen: dict[str, Sequence], only: Container[str] | None
    ) -> None:
        """Let sequences in and add them to `chosen`, with their blocks reserved.

        Parameters
        ----------
        budget, rows : int
            Tokens, and tokens with prompt log probabilities, that the step has left.
        """
        no_room: list[Sequence] = []
        ahead = None
        for seq in self._waiting:
            if len(self._running) >= self._config.max_num_seqs:
                break
            # A load needs no budget, so with tiers the rest of the queue is looked at.
            if budget == 0 and (self._loads is None or no_room):
                break
            if only and seq.request_id not in only:
                continue
            if seq.needs_prompt_logprobs and rows == 0:
                continue
            match = NO_MATCH
            offer = None
            queried = 0
            if seq.chain is not None:
                # Before it is known whether it may come in: what it promises is read off it too.
                seq.chain.extend(seq.token_ids)
            # Logits are not cached: who wants those of the prompt computes all of it.
            if seq.chain is not None and not seq.needs_prompt_logprobs:
                match = self._cache.match(seq.chain.keys, seq.num_tokens)
                queried = seq.num_tokens
                if self._follows(seq, match):
                    continue
                if self._loads is not None:
                    offer = self._loads.offer(seq, match)
                    if offer is None:
                        continue
            loads = offer is not None and offer.choice.num_loaded > 0
            if budget == 0 and not loads:
                break
            if ahead is None:
                ahead = sum(map(self._room.ahead, self._running))
            if not self._room.admits(seq, match, ahead, alone=not len(self._running)):
                no_room.append(seq)
                if _may_not_be_passed(seq) or len(no_room) >= MAX_LOOKS:
                    break
                continue
            if self._loads is not None and offer is not None:
                offer = self._loads.offer(seq, match, fresh=True)
                if offer is None:
                    continue
                loads = offer.choice.num_loaded > 0
                if budget == 0 and not loads:
                    break
            n = min(seq.num_tokens - match.num_tokens, budget)
            if loads:
                assert offer is not None
                n = min(n, offer.first * self._cache.block_size - match.num_tokens)
            if seq.needs_prompt_logprobs:
                n = min(n, rows)
                rows -= n
            self._let_in(seq, match, n, queried, offer if loads else None)
            if n:
                chosen[seq.request_id] = seq
            budget -= n
            ahead += self._room.ahead(seq)
            for passed in no_room:
                passed.passes += 1
                self._passed.append(passed)
            if any(map(_may_not_be_passed, no_room)):
                break

    def _follows(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Park a sequence whose next block another one is computing; say whether that is so."""
        assert seq.chain is not None
        limit = (seq.num_tokens - 1) // self._cache.block_size
        leader = self._waiting.leader_key(seq.chain.keys, len(match.block_ids), limit)
        if leader is not None:
            self._waiting.follow(seq, leader)
        return leader is not None

    def _let_in(
        self, seq: Sequence, match: PrefixMatch, n: int, queried: int, offer: Offer | None
    ) -> None:
        seq.table = self._cache.open_table()
        allocation = self._room.reserve(seq, match.num_tokens + n, match)
        if allocation is None:
            raise IntegrityError(f"no room for {seq!r} although it was counted")
        self._waiting.remove(seq)
        self._requests.run(seq)
        if match.num_tokens and seq.is_approximate:
            # What it found may come of something lossy; nobody keeps account of that by the block.
            seq.is_exact = False
        first = seq.num_cached_tokens is None
        if first:
            seq.num_cached_tokens = match.num_tokens
        if offer is not None:
            assert self._loads is not None
            self._loads.begin(seq, offer, is_first=first)
        if n:
            self._admitted.append((seq, first, queried))
        else:
            # Not part of the plan: it computes nothing yet, and a failing step is none of its.
            self._tell(seq, first, queried)
        self._waiting.promise(seq, len(match.block_ids), seq.num_tokens // self._cache.block_size)
        if n:
            seq.num_scheduled = n
            seq.allocation = allocation

    def record(self) -> None:
        """The plan was carried out: tell who came in. To be called before anything is recorded."""
        for seq, first, queried in self._admitted:
            self._tell(seq, first, queried)
        self._admitted.clear()
        self._passed.clear()

    def _tell(self, seq: Sequence, first: bool, queried: int) -> None:
        cached = seq.num_computed
        reused = max(0, min(cached, seq.num_prompt_tokens) - seq.num_seen)
        self._events.emit(
            RequestScheduled(seq.request_id, cached, seq.num_tokens, not first, queried, reused)
        )
        if self._loads is not None:
            self._loads.used(seq, 0, cached // self._cache.block_size)

    def take_back(self) -> None:
        """The plan was not carried out: who came in waits again, at its old place."""
        for seq, first, _ in self._admitted:
            self._requests.let_go(seq)
            if first:
                seq.num_cached_tokens = None
            self._waiting.push(seq)
        for seq in self._passed:
            seq.passes -= 1
        self._admitted.clear()
        self._passed.clear()


def _may_not_be_passed(seq: Sequence) -> bool:
    return seq.preemptions > 0 or seq.passes >= MAX_PASSES
