"""Requests through scheduler, cache and tiers in virtual time.

Owns the clock: a step takes what the timing says, and between steps time passes to the next arrival
or the end of a transfer. Everything that is decided is decided by the engine's own code. Threads:
one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvist.engine.step import StepPlan
from kvist.errors import IntegrityError
from kvist.events import (
    BlockEvicted,
    BlocksDemoted,
    BlocksPromoted,
    Event,
    EventLog,
    LoadFailed,
    PrefixLoaded,
    RequestPreempted,
    RequestScheduled,
)
from kvist.lab.simulate.books import Machine, open_scheduler
from kvist.lab.simulate.script import Script, ScriptedRunner, make_request
from kvist.lab.simulate.tier import make_tiers, put_tiers
from kvist.lab.simulate.timing import StepTiming
from kvist.lab.simulate.workload import SimRequest, Workload

_PROGRESS_STEPS = 128


@dataclass(slots=True)
class Life:
    """When what happened to a request; virtual seconds since the first arrival."""

    arrival_s: float
    num_tokens: int
    begun_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    num_output: int = 0


@dataclass(slots=True)
class SimResult:
    """What a replay found.

    Attributes
    ----------
    lives : dict of request id to Life
    num_left_out : int
        Requests longer than the longest that is served.
    prompt_tokens : int
        Of all that began to run.
    tokens_from : Counter
        Where those came from: ``device``, ``host``, ``disk``; the rest was computed.
    moved_bytes : Counter
        By (tier, ``up`` or ``down``).
    num_evicted, num_preempted, num_late_blocks : int
        Blocks evicted, preemptions, blocks whose load failed.
    num_steps : int
    span_s : float
        From the first arrival to the last token.
    busy_s : float
        Of that, spent in steps.
    used_share, running : float
        Share of the pool in use, and sequences running; means over the time of steps.
    is_complete : bool
    """

    lives: dict[str, Life] = field(default_factory=dict)
    num_left_out: int = 0
    prompt_tokens: int = 0
    tokens_from: Counter[str] = field(default_factory=Counter)
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_evicted: int = 0
    num_preempted: int = 0
    num_late_blocks: int = 0
    num_steps: int = 0
    span_s: float = 0.0
    busy_s: float = 0.0
    used_share: float = 0.0
    running: float = 0.0
    is_complete: bool = False

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return sum(self.tokens_from.values()) / self.prompt_tokens if self.prompt_tokens else 0.0


def simulate(
    workload: Workload,
    machine: Machine,
    timing: StepTiming,
    *,
    tier_rates: Mapping[str, float] | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> SimResult:
    """Replay a workload.

    Parameters
    ----------
    tier_rates : mapping, optional
        See `make_tiers`.
    progress : callable
        Told the share that is done. After Ctrl-C what was found so far is returned.

    Raises
    ------
    CapacityError
        If the pool cannot hold one request of the longest kind.

    Notes
    -----
    About 15 µs a sequence and step, and 2 µs a block of a prompt.
    """
    run = _Run(workload, machine, timing, tier_rates or {})
    try:
        run.run(progress)
        run.result.is_complete = True
    except KeyboardInterrupt:
        pass
    return run.finish()


class _Run:
    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        timing: StepTiming,
        tier_rates: Mapping[str, float],
    ) -> None:
        self._workload = workload
        self._timing = timing
        self._size = machine.block_size
        self._max_len = machine.scheduler.max_model_len
        self._now = self._start = workload.requests[0].arrival_s if workload.requests else 0.0
        self._events = EventLog(capacity=1)
        self._tiers = make_tiers(machine, tier_rates, self._clock)
        self._scheduler = open_scheduler(
            machine,
            self._events,
            lambda cache: put_tiers(machine, self._tiers, cache, self._events, self._clock),
        )
        self._events.subscribe(self._hear)
        self._runner = ScriptedRunner(machine.block_size, workload.numbers)
        self._aborts: list[tuple[float, str]] = []
        # Of the step under way: who comes in with it is told of when it is over.
        self._began_s = self._now
        self.result = SimResult()

    def _clock(self) -> float:
        return self._now

    # ------------------------------------------------------------------ the loop

    def run(self, progress: Callable[[float], None]) -> None:
        requests, scheduler = self._workload.requests, self._scheduler
        arrived, num_ended = 0, 0
        while True:
            while arrived < len(requests) and requests[arrived].arrival_s <= self._now:
                num_ended += not self._arrive(requests[arrived])
                arrived += 1
            while self._aborts and self._aborts[0][0] <= self._now:
                _, request_id = heapq.heappop(self._aborts)
                num_ended += scheduler.abort(request_id) is not None
            if not scheduler.has_work:
                if arrived == len(requests):
                    return
                self._pass_to(requests[arrived].arrival_s)
                continue
            self._began_s = self._now
            plan = scheduler.schedule()
            if plan.scheduled:
                num_ended += self._step(plan)
            else:
                scheduler.rollback(plan)
                upcoming = [requests[arrived].arrival_s] if arrived < len(requests) else []
                self._wait(upcoming)
            if self.result.num_steps % _PROGRESS_STEPS == 0:
                progress(num_ended / len(requests))

    def _arrive(self, request: SimRequest) -> bool:
        """Put a request in the queue; say whether it can be served."""
        if request.num_prompt + request.max_tokens > self._max_len:
            self.result.num_left_out += 1
            return False
        # At its limit it ends by itself; a recorded one may have ended before.
        stops = request.num_output if request.num_output < request.max_tokens else None
        script = Script(request.num_prompt, request.blocks, stops or None)
        self._runner.scripts[request.request_id] = script
        self.result.lives[request.request_id] = Life(request.arrival_s, request.num_prompt)
        self._scheduler.add(
            make_request(
                request.request_id,
                script,
                self._size,
                request.max_tokens,
                priority=request.priority,
            )
        )
        if request.abort_s is not None:
            heapq.heappush(self._aborts, (request.abort_s, request.request_id))
        return True

    def _step(self, plan: StepPlan) -> int:
        """Carry a plan out; return how many sequences ended."""
        scheduler, result, lives = self._scheduler, self.result, self.result.lives
        decoded = read = context = pairs = longest = 0
        for item in plan.scheduled:
            n = len(item.token_ids)
            if n == 1:
                decoded += 1
                context += item.position + 1
            else:
                read += n
                pairs += n * item.position + n * (n + 1) // 2
                longest = max(longest, n)
        seconds = self._timing.seconds(decoded, read, context, pairs)
        done = self._runner.run(plan)
        self._now += seconds
        result.num_steps += 1
        result.busy_s += seconds
        result.used_share += seconds * scheduler.cache.num_used_blocks / scheduler.cache.num_blocks
        result.running += seconds * scheduler.num_running
        if scheduler.loads is not None:
            scheduler.loads.observe(max(1, longest), plan.num_tokens, seconds)
        ended = 0
        for update in scheduler.commit(plan, done):
            life = lives[update.request_id]
            life.num_output += 1
            if life.first_s is None:
                life.first_s = self._now
            if update.finish_reason is not None:
                life.end_s = self._now
                life.num_tokens += life.num_output
                del self._runner.scripts[update.request_id]
                ended += 1
        return ended

    def _wait(self, upcoming: list[float]) -> None:
        """Nothing can be computed: let time pass to what happens next."""
        upcoming += [end for tier in self._tiers if (end := tier.next_s) is not None]
        upcoming += [self._aborts[0][0]] if self._aborts else []
        later = [at for at in upcoming if at > self._now]
        if later:
            self._pass_to(min(later))
        elif self._tiers:
            # A load that is overdue, or copies that wait: patience has an end.
            self._pass_to(self._now + 0.02)
        else:
            raise IntegrityError(f"at {self._now:.3f} s nobody can run, and nothing is awaited")
        if self._scheduler.loads is not None:
            self._scheduler.loads.pump()

    def _pass_to(self, at_s: float) -> None:
        self._now = max(self._now, at_s)

    # ------------------------------------------------------------------ what is told

    def _hear(self, event: Event) -> None:
        result = self.result
        if isinstance(event, RequestScheduled):
            life = result.lives[event.request_id]
            if life.begun_s is None:
                life.begun_s = self._began_s
            if not event.resumed:
                result.prompt_tokens += life.num_tokens
                result.tokens_from["device"] += event.num_cached_tokens
        elif isinstance(event, PrefixLoaded):
            if not event.resumed:
                for medium, tokens in event.sources:
                    result.tokens_from[medium] += tokens
        elif isinstance(event, BlocksPromoted):
            result.moved_bytes[event.tier, "up"] += event.stored_bytes
        elif isinstance(event, BlocksDemoted):
            result.moved_bytes[event.tier, "down"] += event.stored_bytes
        elif isinstance(event, LoadFailed):
            result.num_late_blocks += event.num_blocks

    def finish(self) -> SimResult:
        """Return what was found."""
        result, counts = self.result, self._events.counts
        result.num_evicted = counts[BlockEvicted]
        result.num_preempted = counts[RequestPreempted]
        result.span_s = self._now - self._start
        if result.busy_s:
            result.used_share /= result.busy_s
            result.running /= result.busy_s
        return result
