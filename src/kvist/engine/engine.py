"""The loop: schedule, run, commit.

Owns nothing but the order of the three, and what happens when a step fails. Knows no text, no
tensors and no wire. Threads: one thread calls everything here.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepPlan, StepResult, Update
from kvist.errors import RequestError
from kvist.events import EventLog, StepFailed

logger = logging.getLogger(__name__)


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
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, events: EventLog) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.events = events
        # Groups of requests to be run alone, because one of each group makes the step fail.
        self._suspects: deque[tuple[str, ...]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in the queue.

        Raises
        ------
        RequestError
            If it can never run: empty, too long, ids outside the vocabulary, or an id in use.
        """
        vocab_size = self.runner.vocab_size
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {vocab_size}", "prompt"
                )
        self.scheduler.add(request)

    def abort_request(self, request_id: str) -> Update | None:
        """End a request and free what it holds; ``None`` when there is no such request."""
        return self.scheduler.abort(request_id)

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
        fails alone ends with an error. The others lose time, nothing else.
        """
        group = frozenset(self._suspects.popleft()) if self._suspects else None
        plan = self.scheduler.schedule(only=group)
        if not plan.scheduled:
            return self.scheduler.rollback(plan)
        try:
            result = self.runner.run(plan)
        except Exception as error:
            return self._isolate(plan, error)
        return self.scheduler.commit(plan, result)

    def _isolate(self, plan: StepPlan, error: Exception) -> list[Update]:
        request_ids = tuple(item.request_id for item in plan.scheduled)
        news = self.scheduler.rollback(plan)
        message = f"{type(error).__name__}: {error}"
        self.events.emit(StepFailed(len(request_ids), message))
        if len(request_ids) == 1:
            logger.error("request %s failed", request_ids[0], exc_info=error)
            if request_ids[0] in self.scheduler:
                news.append(self.scheduler.fail(request_ids[0], message))
            return news
        logger.warning("a step of %d requests failed (%s); halving", len(request_ids), message)
        half = len(request_ids) // 2
        self._suspects.extend((request_ids[:half], request_ids[half:]))
        return news
