"""Every unfinished sequence, and which of them belong to one request.

Owns the waiting queue, the running list, and what happens to a sequence between them: it comes,
runs, is preempted, has children, ends. Decides neither who runs nor when. Threads: step thread
only.

A request with several continuations comes as one sequence. When its prompt is computed, the others
are made of it::

    prompt ........ last token ─┬─ 0: goes on
                                ├─ 1: shares all blocks, computes the last prompt token again,
                                └─ 2: and draws by its own index

so the prompt is computed once. Who finds no room waits in the queue, and finds the prefix there.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.grammar import Matcher
from kvist.engine.loads import PrefixLoads
from kvist.engine.queue import OrderedSequences, WaitingQueue
from kvist.engine.recording import Recorder
from kvist.engine.room import Room
from kvist.engine.sequence import EngineRequest, Sequence, SequenceStatus, TokenLogprobs
from kvist.engine.step import StepResult, Update
from kvist.errors import IntegrityError, RequestError
from kvist.events import EventLog, RequestAdded, RequestFinished, RequestPreempted
from kvist.keys import HashChain, RootKey, lane_key


class RequestTable:
    """Sequences by id, by state and by request. Parameters as in `Scheduler`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        events: EventLog,
        root: RootKey,
        seed: int,
        loads: PrefixLoads | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        by_priority = config.scheduling_policy == "priority"
        self.waiting = WaitingQueue(by_priority=by_priority)
        self.running = OrderedSequences(by_priority=by_priority)
        self.sequences: dict[str, Sequence] = {}
        self.room = Room(config, cache)
        self._config = config
        self._cache = cache
        self._events = events
        self._root = root
        self._seed = seed
        self._loads = loads
        self._recorder = recorder
        self._by_owner: dict[str, dict[int, Sequence]] = {}
        self._arrivals = 0

    def samples(self, request_id: str) -> Mapping[int, Sequence]:
        """Return the unfinished continuations of a request, by index."""
        return self._by_owner.get(request_id, {})

    # ------------------------------------------------------------------ coming

    def add(self, request: EngineRequest, matcher: Matcher | None) -> None:
        """Make a sequence of a request and let it wait.

        Raises
        ------
        RequestError
            If it can never run, or its id is in use.
        """
        limit = self.refuse(request)
        chain = stored = None
        if self._cache.enable_prefix_caching:
            chain = self._chain(request, approximate=False)
            if request.allow_lossy and self._loads is not None and self._loads.tiers.are_lossy:
                chain, stored = self._chain(request, approximate=True), chain
        seq = Sequence(request, self._take_arrival(), self._seed, limit, chain, stored)
        seq.matcher = matcher
        if self._recorder is not None:
            self._recorder.added(seq)
        self._enter(seq)
        self.waiting.push(seq)

    def _chain(self, request: EngineRequest, *, approximate: bool) -> HashChain:
        lane = lane_key(self._root, request.adapter, request.salt, approximate=approximate)
        return HashChain(self._root, lane, self._cache.block_size)

    def refuse(self, request: EngineRequest) -> int:
        """Raise `RequestError` if a request can never run; return how long it may get."""
        limit = request.check(self._config.max_model_len, self._config.max_logprobs)
        self._refuse_known(request.request_id, request.params.num_samples)
        return limit

    def fork(self, parent: Sequence, new_request_id: str) -> None:
        """Duplicate a sequence with all its tokens so far, as a request of its own."""
        self._refuse_known(new_request_id, parent.params.num_samples)
        child = parent.fork(new_request_id, self._take_arrival())
        if self._recorder is not None:
            self._recorder.forked(parent, child)
        self._enter(child)
        # While the parent is still reading its prompt the child waits for it like anyone with the
        # same prefix; otherwise both would compute the rest of it.
        if parent.table is not None and parent.num_remaining == 1 and self._has_place:
            child.table = self._cache.fork(parent.table)
            self.run(child)
        else:
            self.waiting.push(child)

    def spawn(self, parent: Sequence) -> None:
        """Make the other continuations of a request whose prompt was just computed.

        REQUIRES a running sequence without output, all of whose tokens are recorded.
        """
        assert parent.table is not None
        for index in range(1, parent.params.num_samples):
            child = parent.sample(index, self._take_arrival())
            self._enter(child)
            # One block to copy the last one into, and one to grow.
            ahead = sum(map(self.room.ahead, self.running))
            if self._has_place and ahead + 2 <= self._cache.num_available_blocks:
                child.table = self._cache.fork(parent.table)
                self._cache.truncate(child.table, child.num_tokens - 1)
                self.run(child)
            else:
                self.waiting.push(child)

    # ------------------------------------------------------------------ running and not

    @property
    def _has_place(self) -> bool:
        return len(self.running) < self._config.max_num_seqs

    def run(self, seq: Sequence) -> None:
        """Put a sequence that has a table on the running list."""
        seq.status = SequenceStatus.RUNNING
        self.running.add(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits at its old place."""
        self._events.emit(RequestPreempted(seq.request_id, seq.num_computed))
        seq.preemptions += 1
        seq.output_at_preemption = seq.num_output_tokens
        self.let_go(seq)
        self.waiting.push(seq)

    def let_go(self, seq: Sequence) -> None:
        """Release the blocks of a running sequence and take it off the running list."""
        assert seq.table is not None
        self.running.remove(seq)
        seq.num_scheduled = 0
        seq.allocation = None
        self.waiting.break_promises(seq)
        if self._loads is not None:
            self._loads.abandon(seq)
        self._cache.release(seq.table)
        seq.table = None

    def append(self, seq: Sequence, result: StepResult) -> list[Update]:
        """Take a new token, of a recorded step, and say what is new."""
        first = seq.num_output_tokens == 0
        if first and seq.index == 0 and seq.params.num_samples > 1:
            self.spawn(seq)
        token_id = result.tokens[seq.request_id]
        seq.append(token_id)
        if seq.matcher is not None and not seq.matcher.advance(token_id):
            why = seq.matcher.failure
            if why is not None:
                return self.fail(seq, why, "request")
            return self.fail(seq, f"token {token_id} does not follow the grammar")
        found = result.logprobs.get(seq.request_id)
        logprobs = None if found is None else (found,)
        held = seq.prompt_logprobs
        prompt_logprobs = tuple(held) if first and held is not None else None
        reason = seq.stop_reason(token_id)
        if reason is not None:
            update = self.finish(
                seq,
                reason,
                (token_id,),
                stop_reason=token_id if reason == "stop" and token_id in seq.stop_ids else None,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        else:
            self.room.token_came(seq)
            update = Update(
                seq.owner_id,
                (token_id,),
                num_cached_tokens=seq.num_cached_tokens or 0,
                exact=seq.is_exact,
                index=seq.index,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        return [update]

    # ------------------------------------------------------------------ ending

    def finish(
        self,
        seq: Sequence,
        reason: str,
        token_ids: tuple[int, ...] = (),
        *,
        stop_reason: int | None = None,
        error: str | None = None,
        fault: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> Update:
        """End a sequence, free what it holds, and return its last news."""
        if seq.table is not None:
            self.let_go(seq)
        else:
            self.waiting.remove(seq)
        if self._loads is not None:
            self._loads.forget(seq)
        seq.status = SequenceStatus.FINISHED
        del self.sequences[seq.request_id]
        others = self._by_owner[seq.owner_id]
        del others[seq.index]
        if not others:
            del self._by_owner[seq.owner_id]
        if self._recorder is not None:
            self._recorder.ended(seq, reason)
        cached = seq.num_cached_tokens or 0
        self._events.emit(
            RequestFinished(
                seq.request_id, reason, seq.num_prompt_tokens, seq.num_output_tokens, cached
            )
        )
        return Update(
            seq.owner_id,
            token_ids,
            reason,
            stop_reason,
            cached,
            error,
            seq.index,
            not others,
            logprobs,
            prompt_logprobs,
            fault,
            seq.is_exact,
        )

    def abort(
        self, request_id: str, index: int | None = None, error: str | None = None
    ) -> Update | None:
        """End a request, or one of its continuations; those in a plan end when it is recorded.

        Returns
        -------
        Update or None
            The last news of what was asked for; ``None`` if they come later, or nothing is there.
        """
        update = None
        for seq in list(self.samples(request_id).values()):
            if index is not None and seq.index != index:
                continue
            if seq.num_scheduled:
                seq.abort_requested = True
            else:
                update = self.finish(seq, "abort", error=error)
        return update if index is not None or (update is not None and update.is_last) else None

    def fail(self, seq: Sequence, error: str, fault: str | None = None) -> list[Update]:
        """End a sequence with an error, and with it the whole request."""
        updates = [self.finish(seq, "error", error=error, fault=fault)]
        if (rest := self.abort(seq.owner_id)) is not None:
            updates.append(rest)
        return updates

    # ------------------------------------------------------------------ inside

    def _enter(self, seq: Sequence) -> None:
        self.sequences[seq.request_id] = seq
        self._by_owner.setdefault(seq.owner_id, {})[seq.index] = seq
        self._events.emit(
            RequestAdded(seq.request_id, seq.num_prompt_tokens, seq.request.arrived_s)
        )

    def _take_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _refuse_known(self, request_id: str, num_samples: int) -> None:
        owner, _, index = request_id.rpartition("#")
        names = (request_id, *(f"{request_id}#{i}" for i in range(1, num_samples)))
        # By request too: its first continuation may have ended before the others.
        taken = request_id in self._by_owner or (owner in self._by_owner and index.isdecimal())
        if taken or any(name in self.sequences for name in names):
            raise RequestError(f"request id {request_id!r} is in use", "request_id")

    def check(self, plan_in_flight: bool) -> None:
        """Raise `IntegrityError` unless queue, running list and cache agree. For tests and idle."""
        self._cache.check()
        self.waiting.check(self.running)
        self.running.check()
        for seq in self.running:
            if seq.status is not SequenceStatus.RUNNING or seq.table is None:
                raise IntegrityError(f"among the running: {seq!r}")
            if not plan_in_flight and (seq.num_scheduled or seq.allocation):
                raise IntegrityError(f"scheduled by no plan: {seq!r}")
        if len(self.running) + len(self.waiting) != len(self.sequences):
            raise IntegrityError(
                f"{len(self.running)} running + {len(self.waiting)} waiting"
                f" != {len(self.sequences)} sequences"
            )
        if sum(map(len, self._by_owner.values())) != len(self.sequences):
            raise IntegrityError(f"{self._by_owner!r} are not the {len(self.sequences)} sequences")
        lent = self._cache.loading.num_held_blocks
        if not self.running and self._cache.num_used_blocks != lent:
            raise IntegrityError(
                f"{self._cache.num_used_blocks} blocks in use, {lent} lent, nobody runs"
            )
