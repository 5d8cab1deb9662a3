"""Decide and record: who runs in the next step, and what is true after it.

Owns the waiting queue and the running sequences, and is the only caller of the cache's changes.
Knows no tensors and no text, and never runs anything.

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
from kvist.engine.queue import OrderedSequences, WaitingQueue
from kvist.engine.room import Room
from kvist.engine.sequence import EngineRequest, Sequence, SequenceStatus
from kvist.engine.step import Scheduled, StepPlan, StepResult, Update, plan_step
from kvist.errors import CapacityError, IntegrityError, RequestError
from kvist.events import (
    EventLog,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestScheduled,
    StepDone,
)
from kvist.keys import HashChain, RootKey, lane_key


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
        self._room = Room(config, cache)
        self._events = events
        self._root = root
        self._seed = seed
        by_priority = config.scheduling_policy == "priority"
        self._waiting = WaitingQueue(by_priority=by_priority)
        self._running = OrderedSequences(by_priority=by_priority)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: StepPlan | None = None
        # By the plan in flight, and whether for the first time.
        self._admitted: list[tuple[Sequence, bool]] = []
        self._arrivals = 0
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

    def add(self, request: EngineRequest) -> None:
        """Put a request in the queue.

        Raises
        ------
        RequestError
            If the prompt is empty, or leaves no room for one new token, or the id is in use.
        """
        limit = request.check(self.config.max_model_len)
        self._refuse_known(request.request_id)
        chain = None
        if self.cache.enable_prefix_caching:
            lane = lane_key(self._root, request.adapter, request.salt)
            chain = HashChain(self._root, lane, self.cache.block_size)
        seq = Sequence(request, self._take_arrival(), self._seed, limit, chain)
        self._sequences[seq.request_id] = seq
        self._waiting.push(seq)
        self._events.emit(RequestAdded(seq.request_id, seq.num_prompt_tokens))

    def abort(self, request_id: str) -> Update | None:
        """End a request and free what it holds.

        Returns
        -------
        Update or None
            ``None`` when there is no such request any more, or when it is part of the plan in
            flight: then its blocks are released, and the update comes, when that is recorded.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        if seq.num_scheduled:
            seq.abort_requested = True
            return None
        return self._finish(seq, "abort")

    def fail(self, request_id: str, error: str) -> Update:
        """End a request with an error. REQUIRES it is not part of a plan in flight."""
        return self._finish(self._sequences[request_id], "error", error=error)

    def fork(self, request_id: str, new_request_id: str) -> None:
        """Duplicate a request with all its tokens so far; blocks are shared, copied on write.

        Raises
        ------
        RequestError
            If there is no such request or the new id is in use.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            raise RequestError(f"there is no unfinished request {request_id!r}", "request_id")
        self._refuse_known(new_request_id)
        if self._in_flight is not None:
            raise IntegrityError("fork while a plan is in flight")
        child = seq.fork(new_request_id, self._take_arrival())
        self._sequences[new_request_id] = child
        self._events.emit(RequestAdded(new_request_id, child.num_prompt_tokens))
        # While the parent is still reading its prompt the child waits for it like anyone with the
        # same prefix; otherwise both would compute the rest of it.
        decoding = seq.table is not None and seq.num_remaining == 1
        if decoding and len(self._running) < self.config.max_num_seqs:
            assert seq.table is not None
            child.table = self.cache.fork(seq.table)
            self._set_running(child)
        else:
            self._waiting.push(child)

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
            while (allocation := self._room.reserve(seq, seq.num_computed + n)) is None:
                victim = self._running.last
                if chosen.pop(victim.request_id, None) is not None:
                    budget += victim.num_scheduled
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is seq:
                    break
            else:
                seq.num_scheduled = n
                seq.allocation = allocation
                chosen[seq.request_id] = seq
                budget -= n
        if not preempted:
            self._admit(budget, chosen, only)
        self._steps += 1
        self._in_flight = plan_step(self._steps, chosen.values(), self.cache, tuple(preempted))
        return self._in_flight

    def _admit(self, budget: int, chosen: dict[str, Sequence], only: Container[str] | None) -> None:
        ahead = None
        for seq in self._waiting:
            if budget == 0 or len(self._running) >= self.config.max_num_seqs:
                break
            if only and seq.request_id not in only:
                continue
            match = NO_MATCH
            if seq.chain is not None:
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
            seq.table = self.cache.open_table()
            allocation = self._room.reserve(seq, match.num_tokens + n, match)
            if allocation is None:
                raise IntegrityError(f"no room for {seq!r} although it was counted")
            self._waiting.remove(seq)
            self._set_running(seq)
            first = seq.num_cached_tokens is None
            self._admitted.append((seq, first))
            if first:
                seq.num_cached_tokens = match.num_tokens
            self._events.emit(
                RequestScheduled(seq.request_id, match.num_tokens, seq.num_tokens, not first)
            )
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
        for item in plan.scheduled:
            request_id = item.request_id
            due = item.sample is not None and request_id not in result.failed
            if due and request_id not in result.tokens:
                raise IntegrityError(f"step {plan.step} brought no token for {request_id!r}")
        self._take_flight(plan)
        self._admitted.clear()
        updates: list[Update] = []
        for item in plan.scheduled:
            seq = self._sequences[item.request_id]
            seq.num_scheduled = 0
            seq.allocation = None
            if seq.abort_requested:
                updates.append(self._finish(seq, "abort"))
            elif item.request_id in result.failed:
                updates.append(self._finish(seq, "error", error=result.failed[item.request_id]))
            else:
                self._record(seq, item)
                if item.sample is not None:
                    updates.append(self._append(seq, result.tokens[item.request_id]))
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
            assert seq.table is not None and seq.allocation is not None
            self.cache.cancel(seq.table, seq.allocation)
            seq.num_scheduled = 0
            seq.allocation = None
        for seq, first in self._admitted:
            self._let_go(seq)
            if first:
                seq.num_cached_tokens = None
            self._waiting.push(seq)
        self._admitted.clear()
        aborted = [self._sequences[item.request_id] for item in plan.scheduled]
        return [self._finish(seq, "abort") for seq in aborted if seq.abort_requested]

    def _take_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise IntegrityError(f"step {plan.step} is not the plan in flight")
        self._in_flight = None

    def _record(self, seq: Sequence, item: Scheduled) -> None:
        assert seq.table is not None
        num_tokens = item.position + len(item.token_ids)
        full = self.cache.commit(seq.table, num_tokens, seq.token_ids, seq.chain)
        self._waiting.fulfil(seq, full)

    def _append(self, seq: Sequence, token_id: int) -> Update:
        seq.token_ids.append(token_id)
        reason = seq.stop_reason(token_id)
        if reason is not None:
            stop = token_id if reason == "stop" else None
            return self._finish(seq, reason, (token_id,), stop_reason=stop)
        return Update(seq.request_id, (token_id,), num_cached_tokens=seq.num_cached_tokens or 0)

    # ------------------------------------------------------------------ inside

    def _refuse_known(self, request_id: str) -> None:
        if request_id in self._sequences:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")

    def _take_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _set_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        self._running.add(seq)

    def _preempt(self, seq: Sequence) -> None:
        self._events.emit(RequestPreempted(seq.request_id, seq.num_computed))
        seq.preemptions += 1
        self._let_go(seq)
        self._waiting.push(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence and take it off the running list."""
        assert seq.table is not None
        self._running.remove(seq)
        seq.num_scheduled = 0
        seq.allocation = None
        self._waiting.break_promises(seq)
        self.cache.release(seq.table)
        seq.table = None

    def _finish(
        self,
        seq: Sequence,
        reason: str,
        token_ids: tuple[int, ...] = (),
        *,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> Update:
        if seq.table is not None:
            self._let_go(seq)
        else:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        del self._sequences[seq.request_id]
        cached = seq.num_cached_tokens or 0
        self._events.emit(
            RequestFinished(
                seq.request_id, reason, seq.num_prompt_tokens, seq.num_output_tokens, cached
            )
        )
        return Update(seq.request_id, token_ids, reason, stop_reason, cached, error)

    def check(self) -> None:
        """Raise `IntegrityError` unless queue, running list and cache agree. For tests and idle."""
        self.cache.check()
        self._waiting.check(self._running)
        self._running.check()
        for seq in self._running:
            if seq.status is not SequenceStatus.RUNNING or seq.table is None:
                raise IntegrityError(f"among the running: {seq!r}")
            if self._in_flight is None and (seq.num_scheduled or seq.allocation):
                raise IntegrityError(f"scheduled by no plan: {seq!r}")
        if len(self._running) + len(self._waiting) != len(self._sequences):
            raise IntegrityError(
                f"{len(self._running)} running + {len(self._waiting)} waiting"
                f" != {len(self._sequences)} sequences"
            )
        if not self._running and self.cache.num_used_blocks:
            raise IntegrityError(f"{self.cache.num_used_blocks} blocks in use, nobody runs")
