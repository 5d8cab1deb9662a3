"""Step-locked replay: a recorded run again, step by step, nothing measured and nothing guessed.

Owns when recorded operations are applied: each after as many plans as had been made then. What
comes of it is the scheduler's and the cache's own doing, so that hits must equal those of the run,
token for token: a recording holds none.

Not so with tiers below the device: when a load is done depends on time. Such a recording is
replayed without them, and that is said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.engine.step import StepPlan
from kvist.events import Event, EventLog, RequestFinished, RequestPreempted
from kvist.lab.simulate.books import Machine, open_scheduler
from kvist.lab.simulate.recording import Operation, Recording
from kvist.lab.simulate.script import ScriptedRunner, make_request

_PROGRESS_STEPS = 256


@dataclass(slots=True)
class LockedResult:
    """What a replay found.

    Attributes
    ----------
    hit_tokens : dict of sequence id to int
        Prompt tokens that came from the cache when it first ran; of those that ended.
    num_prompt_tokens : int
        Of those.
    num_steps : int
        Steps that were run again.
    num_different : int
        Of those, steps that held other numbers of tokens than the recorded ones: 0, unless tiers
        had a say, or the recording is of another version of Kvist.
    num_preemptions : int
    is_complete : bool
        Whether everything that was recorded was replayed.
    """

    hit_tokens: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_steps: int = 0
    num_different: int = 0
    num_preemptions: int = 0
    is_complete: bool = False

    @property
    def num_hit_tokens(self) -> int:
        """Sum of `hit_tokens`."""
        return sum(self.hit_tokens.values())


def replay_locked(
    recording: Recording, progress: Callable[[float], None] = lambda done: None
) -> LockedResult:
    """Run a recording again.

    Parameters
    ----------
    progress : callable
        Told the share that is done. When it raises `KeyboardInterrupt`, or Ctrl-C does, what was
        found so far is returned.

    Raises
    ------
    ConfigError
        If the header is damaged.

    Notes
    -----
    Some 20 µs a sequence and step.
    """
    replay = _Replay(recording)
    try:
        replay.run(progress)
    except KeyboardInterrupt:
        return replay.result
    replay.result.is_complete = True
    return replay.result


class _Replay:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        machine = Machine.from_header(recording.header)
        self._block_size = machine.block_size
        events = EventLog(capacity=1)
        events.subscribe(self._hear)
        self._scheduler = open_scheduler(machine, events)
        self._runner = ScriptedRunner(machine.block_size, recording.numbers)
        self._operations = deque(recording.operations)
        self.result = LockedResult()

    def run(self, progress: Callable[[float], None]) -> None:
        scheduler, recording = self._scheduler, self._recording
        last = recording.last_step
        step = 0
        while True:
            while self._operations and self._operations[0].step <= step:
                self._apply(self._operations.popleft())
            if not scheduler.has_work:
                if not self._operations:
                    return
                # Plans that were made meanwhile were empty: somebody waited for a grammar.
                step = self._operations[0].step
                continue
            if step >= last:
                return
            step += 1
            self._step(step)
            if step % _PROGRESS_STEPS == 0:
                progress(step / last)

    def _step(self, step: int) -> None:
        scheduler, recording = self._scheduler, self._recording
        plan = scheduler.schedule(recording.only.get(step))
        if not plan.scheduled or step in recording.rollbacks:
            scheduler.rollback(plan)
            return
        self._runner.step = step
        result = self._runner.run(plan)
        scheduler.commit(plan, result)
        self.result.num_steps += 1
        row = recording.steps.get(step)
        if row is None or (row.decoded, row.read) != _tokens(plan):
            self.result.num_different += 1

    def _apply(self, operation: Operation) -> None:
        scheduler, request_id = self._scheduler, operation.request_id
        if operation.kind == "add":
            given = self._recording.given[request_id]
            scripts = self._runner.scripts
            for index in range(given.num_samples):
                name = f"{request_id}#{index}" if index else request_id
                scripts[name] = self._recording.script(name)
            scheduler.add(
                make_request(
                    request_id,
                    scripts[request_id],
                    self._block_size,
                    given.max_tokens,
                    num_samples=given.num_samples,
                    priority=given.priority,
                    wants_prompt_logprobs=given.wants_prompt_logprobs,
                )
            )
        elif operation.kind == "fork":
            self._runner.scripts[request_id] = self._recording.script(request_id)
            scheduler.fork(operation.of, request_id)
        elif operation.kind == "abort":
            scheduler.abort(request_id, operation.index)
        elif request_id in scheduler:
            scheduler.fail(request_id, "it failed when it was recorded")

    def _hear(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            self.result.hit_tokens[event.request_id] = event.num_cached_tokens
            self.result.num_prompt_tokens += event.num_prompt_tokens
            self._runner.scripts.pop(event.request_id, None)
        elif isinstance(event, RequestPreempted):
            self.result.num_preemptions += 1


def _tokens(plan: StepPlan) -> tuple[int, int]:
    lengths = [len(item.token_ids) for item in plan.scheduled]
    return sum(n == 1 for n in lengths), sum(n for n in lengths if n != 1)
