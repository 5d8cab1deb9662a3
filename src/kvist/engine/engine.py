"""The loop: schedule, run, commit.

Owns nothing but the order of the three, and what happens when a step fails. Knows no text, no
tensors and no wire. Threads: one thread calls everything here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Protocol

from kvist.engine.grammar import GrammarSpec, Matcher
from kvist.engine.grammar_queue import GrammarQueue
from kvist.engine.overload import Overload, OverloadGuard
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepPlan, StepResult, Update
from kvist.errors import RequestError
from kvist.events import EventLog, RequestExpired, RequestRejected, StepFailed

logger = logging.getLogger(__name__)

TIER_WAIT_S = 0.02
"""How long a step that has nothing to compute waits for a lower tier."""

GRAMMAR_WAIT_S = 0.05
"""How long a step without other work waits for a grammar."""


class Runner(Protocol):
    """What carries a plan out."""

    vocab_size: int

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan. May raise: then nothing of it counts."""


class Engine:
    """Turns requests into tokens.

    Parameters
    ----------
    scheduler : Scheduler
    runner : Runner
    events : EventLog
    compile_grammar : callable or None
        From `GrammarSpec` to `Matcher`; ``None`` for an engine without a vocabulary. Called on a
        thread of its own, one at a time.
    request_timeout_s : float or None
        From arrival to the last token at most; a request may ask for less.
    clock : callable
        Seconds, monotonic; the one that `EngineRequest.arrived_s` is of.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        events: EventLog,
        compile_grammar: Callable[[GrammarSpec], Matcher] | None = None,
        *,
        request_timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.events = events
        # Groups of requests to be run alone, because one of each group makes the step fail.
        self._suspects: deque[tuple[str, ...]] = deque()
        self._grammar_queue = GrammarQueue(compile_grammar) if compile_grammar is not None else None
        self._clock = clock
        self._with_grammar: dict[str, EngineRequest] = {}
        self._overload = OverloadGuard(scheduler, events, clock, request_timeout_s)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work or bool(self._with_grammar)

    @property
    def num_awaiting_grammar(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._with_grammar)

    def offer(self, request: EngineRequest) -> Overload | None:
        """Put a request in the queue if the queue has a place for it.

        Returns
        -------
        Overload or None
            Why it was not taken; ``None``: it was.

        Raises
        ------
        RequestError
            As `add_request`, whether there is a place or not.
        """
        request = self._overload.stamp(request)
        overload = self._overload.overload(request, len(self._with_grammar))
        if overload is None:
            self.add_request(request)
            return None
        self._refuse(request)
        self.events.emit(RequestRejected(request.request_id, overload.reason))
        return overload

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in the queue, however long that is.

        Raises
        ------
        RequestError
            If it can never run: empty, too long, ids outside the vocabulary, or an id in use.
        """
        request = self._overload.stamp(request)
        self._refuse(request)
        if request.grammar is None:
            self.scheduler.add(request)
        else:
            assert self._grammar_queue is not None
            self._with_grammar[request.request_id] = request
            self._grammar_queue.enter(request.request_id, request.grammar)
        self._overload.watch(request)

    def _refuse(self, request: EngineRequest) -> None:
        """Raise `RequestError` if a request can never run."""
        vocab_size = self.runner.vocab_size
        named = (("prompt", token_id) for token_id in request.prompt_token_ids)
        for param, token_id in chain(named, request.params.token_ids()):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}", param
                )
        if request.request_id in self._with_grammar:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        if request.grammar is not None and self._grammar_queue is None:
            raise RequestError("response_format: this engine has no vocabulary", "response_format")
        self.scheduler.refuse(request)

    def abort_request(self, request_id: str, index: int | None = None) -> Update | None:
        """End a request, or one of its continuations, and free what it holds.

        Returns
        -------
        Update or None
            ``None`` when there is no such request, or it is part of a step in progress.
        """
        update = self._end(request_id, index)
        if update is not None and update.is_last:
            self._overload.forget(request_id)
        return update

    def _end(
        self, request_id: str, index: int | None = None, error: str | None = None
    ) -> Update | None:
        if self._grammar_queue is not None and self._grammar_queue.leave(request_id):
            del self._with_grammar[request_id]
            return Update(request_id, finish_reason="abort", error=error, is_last=True)
        return self.scheduler.abort(request_id, index, error)

    def fork(self, request_id: str, new_request_id: str) -> None:
        """Continue a request twice: the new one shares all blocks, copied on write.

        A request without a seed draws differently from its fork; a greedy or seeded one does not.

        Raises
        ------
        RequestError
            If there is no such request, or the new id is in use.
        """
        self.scheduler.fork(request_id, new_request_id)

    def step(self) -> list[Update]:
        """Run one step and return its news.

        A step that raises is taken back, its requests are run again in halves, and the one that
        fails alone ends with an error. The others lose time, nothing else. Whose deadline has
        passed ends before the step.
        """
        news = self._expire() + self._step()
        for update in news:
            if update.is_last:
                self._overload.forget(update.request_id)
        return news

    def _expire(self) -> list[Update]:
        """End those whose time is over."""
        ended: list[Update] = []
        for request_id, why in self._overload.over():
            self.events.emit(RequestExpired(request_id))
            update = self._end(request_id, error=why)
            if update is not None:
                ended.append(replace(update, fault="deadline"))
        return ended

    def _step(self) -> list[Update]:
        refused = self._admit_with_grammar() if self._with_grammar else []
        if refused:
            return refused
        group = frozenset(self._suspects.popleft()) if self._suspects else None
        plan = self.scheduler.schedule(only=group)
        if not plan.scheduled:
            news = self.scheduler.rollback(plan)
            self.tend(TIER_WAIT_S)
            return news
        start_s = self._clock()
        try:
            result = self.runner.run(plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, only its request may fail
            return self._isolate(plan, error)
        if self.scheduler.loads is not None:
            longest = max(len(item.token_ids) for item in plan.scheduled)
            self.scheduler.loads.observe(longest, plan.num_tokens, self._clock() - start_s)
        return self.scheduler.commit(plan, result)

    def tend(self, timeout_s: float = 0.0) -> None:
        """Move what is under way between tiers; wait for it, at most so long.

        For a step that has nothing to compute, and for an engine without requests.
        """
        loads = self.scheduler.loads
        if loads is not None:
            loads.tend(timeout_s)

    def settle(self, timeout_s: float) -> None:
        """Let copies of what was computed get on their way down, at most so long."""
        loads = self.scheduler.loads
        until_s = self._clock() + timeout_s
        while loads is not None and loads.has_unsent and self._clock() < until_s:
            loads.tend(TIER_WAIT_S)

    def _admit_with_grammar(self) -> list[Update]:
        """Let in whose grammar is compiled; tell of those that are wrong."""
        assert self._grammar_queue is not None
        refused: list[Update] = []
        for request_id, found in self._grammar_queue.ready(
            0.0 if self.scheduler.has_work else GRAMMAR_WAIT_S
        ):
            request = self._with_grammar.pop(request_id)
            if not isinstance(found, Exception):
                self.scheduler.add(request, found)
                continue
            if not isinstance(found, RequestError):
                logger.error("the grammar of request %s failed", request_id, exc_info=found)
            fault = "request" if isinstance(found, RequestError) else None
            refused.append(
                Update(
                    request_id, finish_reason="error", error=str(found), is_last=True, fault=fault
                )
            )
        return refused

    def _isolate(self, plan: StepPlan, error: Exception) -> list[Update]:
        request_ids = tuple(item.request_id for item in plan.scheduled)
        news = self.scheduler.rollback(plan)
        message = f"{type(error).__name__}: {error}"
        self.events.emit(StepFailed(len(request_ids), message))
        if len(request_ids) == 1:
            logger.error("request %s failed", request_ids[0], exc_info=error)
            if request_ids[0] in self.scheduler:
                news += self.scheduler.fail(request_ids[0], message)
            return news
        logger.warning("a step of %d requests failed (%s); halving", len(request_ids), message)
        half = len(request_ids) // 2
        self._suspects.extend((request_ids[:half], request_ids[half:]))
        return news
