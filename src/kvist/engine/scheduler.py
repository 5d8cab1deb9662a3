"""Decide and record: who runs in the next step, and what is true after it.

Owns the order of a step; who there is stands in `engine.requests`. The two are the only callers of
the cache's changes. Knows no tensors and no text, and never runs anything.

One step::

    plan   = scheduler.schedule()        decide: may reserve in the books
    result = runner.run(plan)            do
    news   = scheduler.commit(plan, result)      record: only now it is final
    (or)     scheduler.rollback(plan)            the books are as before `schedule`

Decode first, then prompts that are under way, then new ones while budget and room last
(`engine.admission`). No room for a running sequence: the one that should run last gives its blocks
up (*release*; its sealed blocks stay findable) and returns to its old place in the queue. There is
no swap path.

Threads: step thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.admission import Admission
from kvist.engine.grammar import Matcher
from kvist.engine.loads import PrefixLoads
from kvist.engine.planning import plan_step
from kvist.engine.recording import Recorder
from kvist.engine.requests import RequestTable
from kvist.engine.sequence import EngineRequest, Sequence, SequenceStatus
from kvist.engine.step import Scheduled, StepPlan, StepResult, Update
from kvist.engine.views import SequenceView
from kvist.errors import IntegrityError, RequestError
from kvist.events import EventLog, StepDone
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
    loads : PrefixLoads or None
        Where there are tiers below the device.
    recorder : Recorder or None
        Told what the scheduler is given.

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
        loads: PrefixLoads | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self._events = events
        self._requests = RequestTable(config, cache, events, root, seed, loads, recorder)
        self._room = self._requests.room
        self._waiting, self._running = self._requests.waiting, self._requests.running
        self._sequences = self._requests.sequences
        self._admission = Admission(config, cache, events, self._requests, loads)
        self.loads = loads
        self._recorder = recorder
        if loads is not None:
            loads.on_adopted = self._waiting.fulfil
        self._in_flight: StepPlan | None = None
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

    @property
    def num_following(self) -> int:
        """Waiting sequences whose prefix another one is computing."""
        return self._waiting.num_following

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens of all that wait. O(waiting)."""
        return sum(seq.num_tokens for seq in self._waiting.everyone())

    @property
    def num_unread_tokens(self) -> int:
        """Known tokens that are not computed, of all but those that decode. O(sequences)."""
        return sum(seq.num_unread for seq in self._sequences.values())

    def num_ahead(self, priority: int) -> int:
        """Waiting sequences that would run before a new one. O(waiting) where priorities count."""
        if self.config.scheduling_policy != "priority":
            return len(self._waiting)
        return sum(seq.priority <= priority for seq in self._waiting.everyone())

    def has_begun(self, request_id: str) -> bool:
        """Whether something was computed for a sequence; also when there is no such one."""
        seq = self._sequences.get(request_id)
        return seq is None or seq.num_cached_tokens is not None

    def work_left(self, request_id: str) -> tuple[int, int] | None:
        """Tokens that a running sequence has to read before its next one, and may yet generate.

        ``None`` if it does not run.
        """
        seq = self._sequences.get(request_id)
        if seq is None or seq.table is None:
            return None
        return seq.num_unread, seq.max_num_tokens - seq.num_tokens

    def view(self, request_id: str) -> SequenceView | None:
        """How an unfinished sequence stands; ``None`` if there is no such one."""
        seq = self._sequences.get(request_id)
        return SequenceView.of(seq) if seq is not None else None

    def views(self) -> list[SequenceView]:
        """How everyone stands, by arrival."""
        return [SequenceView.of(seq) for seq in self._sequences.values()]

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
        self._requests.add(request, matcher)

    def refuse(self, request: EngineRequest) -> None:
        """Raise what `add` would raise; change nothing."""
        self._requests.refuse(request)

    def abort(
        self, request_id: str, index: int | None = None, error: str | None = None
    ) -> Update | None:
        """End a request, or one of its continuations, and free what it holds.

        Parameters
        ----------
        error : str or None
            Why, where it was not asked for by whoever asked for the request.

        Returns
        -------
        Update or None
            ``None`` when there is no such request any more, or when it is part of the plan in
            flight: then its blocks are released, and the update comes, when that is recorded.
        """
        if self._recorder is not None:
            self._recorder.aborted(request_id, index)
        return self._requests.abort(request_id, index, error)

    def fail(self, request_id: str, error: str) -> list[Update]:
        """End a request with an error. `request_id` is a plan's; REQUIRES none is in flight."""
        if self._recorder is not None:
            self._recorder.failed(request_id)
        return self._requests.fail(self._sequences[request_id], error)

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
        self._requests.fork(seq, new_request_id)

    # ------------------------------------------------------------------ decide

    def schedule(self, only: Collection[str] | None = None) -> StepPlan:
        """Choose what the next step computes, and reserve its blocks.

        Parameters
        ----------
        only : collection of str, optional
            Request ids that may run; others rest. Used to find which request makes a step fail.

        Returns
        -------
        StepPlan
            Possibly empty. REQUIRES the last plan was committed or rolled back.
        """
        if self._in_flight is not None:
            raise IntegrityError(f"step {self._in_flight.step} is not recorded yet")
        if self._recorder is not None:
            self._recorder.planning(only)
        if self.loads is not None:
            self.loads.poll()
        budget = self.config.max_num_batched_tokens
        rows = PROMPT_LOGPROB_TOKENS
        chosen: dict[str, Sequence] = {}
        preempted: list[str] = []
        decoding: list[tuple[Sequence, int]] = []
        prefilling: list[tuple[Sequence, int]] = []
        for seq in self._running:
            remaining = seq.num_remaining
            if seq.load_limit is not None:
                remaining = seq.load_limit - seq.num_computed
            if remaining:
                (decoding if remaining == 1 else prefilling).append((seq, remaining))
        for seq, remaining in (*decoding, *prefilling):
            if budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING or (only and seq.request_id not in only):
                continue
            n = min(remaining, budget)
            if seq.prompt_logprobs is not None and seq.needs_prompt_logprobs:
                if rows == 0:
                    continue
                n = min(n, rows)
                rows -= n
            while (allocation := self._room.reserve(seq, seq.num_computed + n)) is None:
                victim = self._running.victim()
                if chosen.pop(victim.request_id, None) is not None:
                    budget += victim.num_scheduled
                self._requests.preempt(victim)
                preempted.append(victim.request_id)
                if victim is seq:
                    break
            else:
                seq.num_scheduled = n
                seq.allocation = allocation
                chosen[seq.request_id] = seq
                budget -= n
        try:
            if not preempted:
                self._admission.admit(budget, rows, chosen, only)
            plan = plan_step(self._steps + 1, chosen.values(), self.cache, tuple(preempted))
        except Exception:
            # A request that cannot be planned must not leave the others' blocks reserved.
            self._take_back(chosen.values())
            raise
        self._steps += 1
        self._in_flight = plan
        return plan

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
        self._admission.record()
        updates: list[Update] = []
        num_prompt = num_again = 0
        sampled: list[str] = []
        for item in plan.scheduled:
            seq = self._sequences[item.request_id]
            seq.num_scheduled = 0
            seq.allocation = None
            if seq.abort_requested:
                updates.append(self._requests.finish(seq, "abort"))
            elif item.request_id in result.failed:
                updates += self._requests.fail(seq, result.failed[item.request_id])
            else:
                new, again = self._record(seq, item, result)
                num_prompt += new
                num_again += again
                if item.sample is not None:
                    sampled.append(seq.request_id)
                    updates += self._requests.append(seq, result)
        self._events.emit(
            StepDone(
                plan.num_tokens,
                len(plan.scheduled),
                len(self._waiting),
                num_prompt,
                num_again,
                tuple(sampled),
            )
        )
        if self.loads is not None:
            self.loads.pump()
        if self._recorder is not None:
            self._recorder.recorded(plan, len(self._sequences))
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
        if self._recorder is not None:
            self._recorder.rolled_back(plan)
        planned = [self._sequences[item.request_id] for item in plan.scheduled]
        self._take_back(planned)
        return [self._requests.finish(seq, "abort") for seq in planned if seq.abort_requested]

    def _take_back(self, planned: Iterable[Sequence]) -> None:
        """Undo the reservations of a step that did not take place."""
        for seq in planned:
            assert seq.table is not None
            assert seq.allocation is not None
            self.cache.cancel(seq.table, seq.allocation)
            seq.num_scheduled = 0
            seq.allocation = None
        self._admission.take_back()

    def _take_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise IntegrityError(f"step {plan.step} is not the plan in flight")
        self._in_flight = None

    def _record(self, seq: Sequence, item: Scheduled, result: StepResult) -> tuple[int, int]:
        """Record a run; return how many tokens of it `Sequence.see` calls new and not new."""
        assert seq.table is not None
        num_tokens = item.position + len(item.token_ids)
        seen = seq.see(num_tokens)
        sealed = seq.table.num_sealed
        full = self.cache.commit(seq.table, num_tokens, seq.token_ids, seq.chain)
        if seq.promised:
            self._waiting.fulfil(seq, full)
        if self.loads is not None:
            self.loads.sealed(seq, sealed, full)
            self.loads.adopt(seq)
        if item.prompt_rows is not None and seq.prompt_logprobs is not None:
            # After a preemption the first of them are known already.
            known = len(seq.prompt_logprobs) - item.position
            seq.prompt_logprobs += result.prompt_logprobs[item.request_id][max(0, known) :]
        return seen

    def check(self) -> None:
        """Raise `IntegrityError` unless queue, running list and cache agree. For tests and idle."""
        self._requests.check(self._in_flight is not None)
        if self.loads is not None:
            self.loads.check()
