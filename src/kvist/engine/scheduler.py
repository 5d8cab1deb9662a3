"""Decide and record: who runs in the next step, and what is true after it.

Owns the order of a step; who there is stands in `engine.roster`. The two are the only callers of
the cache's changes. Knows no tensors and no text, and never runs anything.

One step::

    plan   = scheduler.schedule()        decide: may reserve in the books
    result = runner.run(plan)            do
    news   = scheduler.commit(plan, result)      record: only now it is final
    (or)     scheduler.rollback(plan)            the books are as before `schedule`

Decode first, then prompts that are under way, then new ones while budget and room last. No room for
a running sequence: the one that should run last gives its blocks up (*release*; its sealed blocks
stay findable) and returns to its old place in the queue. There is no swap path.

Threads: step thread only.
"""

from __future__ import annotations

from collections.abc import Container

from kvist.cache import NO_MATCH, KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.grammar import Matcher
from kvist.engine.planning import plan_step
from kvist.engine.roster import Roster
from kvist.engine.sequence import EngineRequest, Sequence, SequenceStatus
from kvist.engine.step import Scheduled, StepPlan, StepResult, Update
from kvist.errors import IntegrityError, RequestError
from kvist.events import EventLog, RequestScheduled, StepDone
from kvist.keys import RootKey

PROMPT_LOGPROB_TOKENS = 128
"""Tokens of prompts whose log probabilities are asked for, a step: their logits are [tokens, V]."""


class Scheduler:
    """Continuous batching with chunked prefill over one `KVCacheManager`.

    Parameters
    ----------
    config : SchedulerConfig
    cache : KVCacheManager
    events : EventLog
    root : RootKey
        Root of all block keys of this engine.
    seed : int
        Base of the seeds of requests that bring none.

    Raises
    ------
    CapacityError
        If the pool cannot hold one request of `max_model_len`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        events: EventLog,
        root: RootKey,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.cache = cache
        self._events = events
        self._roster = Roster(config, cache, events, root, seed)
        self._room = self._roster.room
        self._waiting, self._running = self._roster.waiting, self._roster.running
        self._sequences = self._roster.sequences
        self._in_flight: StepPlan | None = None
        # By the plan in flight, and whether for the first time.
        self._admitted: list[tuple[Sequence, bool]] = []
        self._steps = 0

    # ------------------------------------------------------------------ queries

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none, those that follow another included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineRequest, matcher: Matcher | None = None) -> None:
        """Put a request in the queue.

        Parameters
        ----------
        matcher : Matcher or None
            At the beginning of the request's grammar, if it has one.

        Raises
        ------
        RequestError
            If the prompt is empty, or leaves no room for one new token, or the id is in use.
        """
        self._roster.add(request, matcher)

    def refuse(self, request: EngineRequest) -> None:
        """Raise what `add` would raise; change nothing."""
        self._roster.refuse(request)

    def abort(self, request_id: str, index: int | None = None) -> Update | None:
        """End a request, or one of its continuations, and free what it holds.

        Returns
        -------
        Update or None
            ``None`` when there is no such request any more, or when it is part of the plan in
            flight: then its blocks are released, and the update comes, when that is recorded.
        """
        return self._roster.abort(request_id, index)

    def fail(self, request_id: str, error: str) -> list[Update]:
        """End a request with an error. `request_id` is a plan's; REQUIRES none is in flight."""
        return self._roster.fail(self._sequences[request_id], error)

    def fork(self, request_id: str, new_request_id: str) -> None:
        """Duplicate a request with all its tokens so far; blocks are shared, copied on write.

        Of a request with several continuations, the first one.

        Raises
        ------
        RequestError
            If there is no such request or the new id is in use.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            raise RequestError(f"there is no unfinished request {request_id!r}", "request_id")
        if self._in_flight is not None:
            raise IntegrityError("fork while a plan is in flight")
        self._roster.fork(seq, new_request_id)

    # ------------------------------------------------------------------ decide

    def schedule(self, only: Container[str] | None = None) -> StepPlan:
        """Choose what the next step computes, and reserve its blocks.

        Parameters
        ----------
        only : container of str, optional
            Request ids that may run; others rest. Used to find which request makes a step fail.

        Returns
        -------
        StepPlan
            Possibly empty. REQUIRES the last plan was committed or rolled back.
        """
        if self._in_flight is not None:
            raise IntegrityError(f"step {self._in_flight.step} is not recorded yet")
        budget = self.config.max_num_batched_tokens
        rows = PROMPT_LOGPROB_TOKENS
        chosen: dict[str, Sequence] = {}
        preempted: list[str] = []
        decoding = [s for s in self._running if s.num_remaining == 1]
        prefilling = [s for s in self._running if s.num_remaining > 1]
        for seq in (*decoding, *prefilling):
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING or (only and seq.request_id not in only):
                continue
            n = min(seq.num_remaining, budget)
            if seq.needs_prompt_logprobs:
                if rows == 0:
                    continue
                n = min(n, rows)
                rows -= n
            while (allocation := self._room.reserve(seq, seq.num_computed + n)) is None:
                victim = self._running.last
                if chosen.pop(victim.request_id, None) is not None:
                    budget += victim.num_scheduled
                self._roster.preempt(victim)
                preempted.append(victim.request_id)
                if victim is seq:
                    break
            else:
                seq.num_scheduled = n
                seq.allocation = allocation
                chosen[seq.request_id] = seq
                budget -= n
        if not preempted:
            self._admit(budget, rows, chosen, only)
        self._steps += 1
        self._in_flight = plan_step(self._steps, chosen.values(), self.cache, tuple(preempted))
        return self._in_flight

    def _admit(
        self, budget: int, rows: int, chosen: dict[str, Sequence], only: Container[str] | None
    ) -> None:
        ahead = None
        for seq in self._waiting:
            if budget == 0 or len(self._running) >= self.config.max_num_seqs:
                break
            if only and seq.request_id not in only:
                continue
            if seq.needs_prompt_logprobs and rows == 0:
                continue
            match = NO_MATCH
            # Logits are not cached: who wants those of the prompt computes all of it.
            if seq.chain is not None and not seq.needs_prompt_logprobs:
                seq.chain.extend(seq.token_ids)
                keys = seq.chain.keys
                match = self.cache.match(keys, seq.num_tokens)
                limit = (seq.num_tokens - 1) // self.cache.block_size
                leader = self._waiting.leader_key(keys, len(match.block_ids), limit)
                if leader is not None:
                    self._waiting.follow(seq, leader)
                    continue
            if ahead is None:
                ahead = sum(map(self._room.ahead, self._running))
            if not self._room.admits(seq, match, ahead):
                break
            n = min(seq.num_tokens - match.num_tokens, budget)
            if seq.needs_prompt_logprobs:
                n = min(n, rows)
                rows -= n
            seq.table = self.cache.open_table()
            allocation = self._room.reserve(seq, match.num_tokens + n, match)
            if allocation is None:
                raise IntegrityError(f"no room for {seq!r} although it was counted")
            self._waiting.remove(seq)
            self._roster.run(seq)
            first = seq.num_cached_tokens is None
            self._admitted.append((seq, first))
            if first:
                seq.num_cached_tokens = match.num_tokens
            self._waiting.promise(
                seq, len(match.block_ids), seq.num_tokens // self.cache.block_size
            )
            seq.num_scheduled = n
            seq.allocation = allocation
            chosen[seq.request_id] = seq
            budget -= n
            ahead += self._room.ahead(seq)

    # ------------------------------------------------------------------ record

    def commit(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Make a plan's reservations final and tell what came of it.

        Raises
        ------
        IntegrityError
            If `plan` is not the plan in flight, or a token is missing.
        """
        result.check(plan)
        self._take_flight(plan)
        for seq, first in self._admitted:
            self._events.emit(
                RequestScheduled(seq.request_id, seq.num_computed, seq.num_tokens, not first)
            )
        self._admitted.clear()
        updates: list[Update] = []
        for item in plan.scheduled:
            seq = self._sequences[item.request_id]
            seq.num_scheduled = 0
            seq.allocation = None
            if seq.abort_requested:
                updates.append(self._roster.finish(seq, "abort"))
            elif item.request_id in result.failed:
                updates += self._roster.fail(seq, result.failed[item.request_id])
            else:
                self._record(seq, item, result)
                if item.sample is not None:
                    updates += self._append(seq, result)
        self._events.emit(StepDone(plan.num_tokens, len(plan.scheduled), len(self._waiting)))
        return updates

    def rollback(self, plan: StepPlan) -> list[Update]:
        """Restore the books to what they were before `schedule`.

        Who was admitted by the plan waits again; who was preempted stays preempted.

        Returns
        -------
        list of Update
            Requests that were aborted while the plan was in flight.
        """
        self._take_flight(plan)
        for item in plan.scheduled:
            seq = self._sequences[item.request_id]
            assert seq.table is not None
            assert seq.allocation is not None
            self.cache.cancel(seq.table, seq.allocation)
            seq.num_scheduled = 0
            seq.allocation = None
        for seq, first in self._admitted:
            self._roster.let_go(seq)
            if first:
                seq.num_cached_tokens = None
            self._waiting.push(seq)
        self._admitted.clear()
        aborted = [self._sequences[item.request_id] for item in plan.scheduled]
        return [self._roster.finish(seq, "abort") for seq in aborted if seq.abort_requested]

    def _take_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise IntegrityError(f"step {plan.step} is not the plan in flight")
        self._in_flight = None

    def _record(self, seq: Sequence, item: Scheduled, result: StepResult) -> None:
        assert seq.table is not None
        num_tokens = item.position + len(item.token_ids)
        full = self.cache.commit(seq.table, num_tokens, seq.token_ids, seq.chain)
        self._waiting.fulfil(seq, full)
        if item.prompt_rows is not None and seq.prompt_logprobs is not None:
            # After a preemption the first of them are known already.
            known = len(seq.prompt_logprobs) - item.position
            seq.prompt_logprobs += result.prompt_logprobs[item.request_id][max(0, known) :]

    def _append(self, seq: Sequence, result: StepResult) -> list[Update]:
        first = seq.num_output_tokens == 0
        if first and seq.index == 0 and seq.params.num_samples > 1:
            self._roster.spawn(seq)
        token_id = result.tokens[seq.request_id]
        seq.append(token_id)
        if seq.matcher is not None and not seq.matcher.advance(token_id):
            return self._roster.fail(seq, f"token {token_id} does not follow the grammar")
        found = result.logprobs.get(seq.request_id)
        logprobs = None if found is None else (found,)
        held = seq.prompt_logprobs
        prompt_logprobs = tuple(held) if first and held is not None else None
        reason = seq.stop_reason(token_id)
        if reason is not None:
            update = self._roster.finish(
                seq,
                reason,
                (token_id,),
                stop_reason=token_id if reason == "stop" and token_id in seq.stop_ids else None,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        else:
            update = Update(
                seq.owner_id,
                (token_id,),
                num_cached_tokens=seq.num_cached_tokens or 0,
                index=seq.index,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        return [update]

    def check(self) -> None:
        """Raise `IntegrityError` unless queue, running list and cache agree. For tests and idle."""
        self._roster.check(self._in_flight is not None)
