"""An engine without a model, the plain truth beside it, and every way to disturb it.

Owns `EngineRig`: one engine over the null runner, what each request should have produced, and the
assertions that hold after every step. Knows neither hypothesis nor pytest; a state machine and a
random driver both steer it. No torch. Threads: one.

What is compared with what::

    tokens of a request      null_generate(prompt), a loop without any memory
    tokens taken from cache  prefixes that a request with the same salt has computed before
    a plan                   budget, max_num_seqs, decode first, no slot written by two requests
    the books                Scheduler.check() after every step; 0 blocks in use when all is done
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.engine import Engine
from kvist.engine.null_runner import NullRunner, null_generate
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest, SequenceStatus
from kvist.engine.step import Update
from kvist.events import Event, EventLog, RequestPreempted, RequestScheduled
from kvist.keys import RootKey
from kvist.policies.registry import make_policy
from kvist.testing.disturbed import DisturbedRunner, RigConfig

ROOT = RootKey(bytes(32))


@dataclass(slots=True)
class Story:
    """One request as the plain model sees it.

    Attributes
    ----------
    expected : list of int
        All it should ever produce, from its prompt on.
    outputs : list of int
        What it produced, what its parent had produced at the fork included.
    forked : bool
        It is a fork or was forked.
    """

    request_id: str
    prompt: tuple[int, ...]
    salt: str
    expected: list[int]
    outputs: list[int] = field(default_factory=list)
    forked: bool = False
    preempted: bool = False
    finish_reason: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt, *self.outputs)


class EngineRig:
    """One engine and the truth about its requests.

    Parameters
    ----------
    config : RigConfig

    Attributes
    ----------
    counts : Counter of str
        What happened: forks, follows, hits, aborts by state, rollbacks by hand …

    Notes
    -----
    `AssertionError` where engine and truth disagree. A step costs O(context of what runs + blocks).
    """

    def __init__(self, config: RigConfig) -> None:
        self.config = config
        self.events = EventLog()
        self.cache = KVCacheManager(
            config.num_blocks,
            config.block_size,
            make_policy("lru"),
            self.events,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                scheduling_policy=config.scheduling_policy,
                kv_allocation=config.kv_allocation,
            ),
            self.cache,
            self.events,
            ROOT,
        )
        inner = NullRunner(config.num_blocks, config.block_size, config.vocab_size, verify=True)
        self.runner = DisturbedRunner(inner, config)
        self.engine = Engine(self.scheduler, self.runner, self.events)
        self.stories: dict[str, Story] = {}
        self.counts: Counter[str] = Counter()
        # (salt, tokens of whole blocks) that some request has computed.
        self._computed: set[tuple[str, tuple[int, ...]]] = set()
        self.events.subscribe(self._witness)

    # ------------------------------------------------------------------ queries

    @property
    def active(self) -> list[str]:
        """Unfinished requests, oldest first."""
        return [s.request_id for s in self.stories.values() if s.finish_reason is None]

    def state(self, request_id: str) -> str:
        """Where an unfinished request stands, in words for `counts`."""
        seq = self.scheduler._sequences[request_id]
        story = self.stories[request_id]
        if seq.status is SequenceStatus.RUNNING:
            base = "decode" if seq.num_remaining == 1 else "prefill"
            return f"{base}, forked" if story.forked else base
        return f"{seq.status.value}, preempted" if story.preempted else seq.status.value

    # ------------------------------------------------------------------ what may happen

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        *,
        priority: int = 0,
        salt: str = "",
        stop_token_ids: tuple[int, ...] = (),
    ) -> str:
        """Ask for a request, and work out what must come of it."""
        request_id = f"r{len(self.stories)}"
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids
        )
        self.engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                priority=priority,
                salt=salt,
            )
        )
        room = self.config.max_model_len - len(prompt)
        length = room if max_tokens is None else min(room, max_tokens)
        expected = null_generate(prompt, length, self.config.vocab_size)
        for index, token_id in enumerate(expected):
            if token_id in stop_token_ids:
                del expected[index + 1 :]
                break
        self.stories[request_id] = Story(request_id, prompt, salt, expected)
        return request_id

    def fork(self, request_id: str) -> str:
        """Fork a request: the new one must go on with exactly the same tokens."""
        parent = self.stories[request_id]
        child_id = f"r{len(self.stories)}"
        self.engine.fork(request_id, child_id)
        parent.forked = True
        self.stories[child_id] = Story(
            child_id,
            parent.prompt,
            parent.salt,
            parent.expected,
            list(parent.outputs),
            forked=True,
        )
        self.counts["forks"] += 1
        return child_id

    def abort(self, request_id: str) -> None:
        """Abort a request now, whatever its state."""
        self.counts[f"abort: {self.state(request_id)}"] += 1
        update = self.engine.abort_request(request_id)
        assert update is not None
        assert update.finish_reason == "abort"
        self._take(update)

    def abort_in_flight(self, choose: Callable[[], str]) -> None:
        """Abort whom `choose` names after the next plan was made and before it is recorded."""

        def now() -> None:
            request_id = choose()
            self.counts[f"abort in flight: {self.state(request_id)}"] += 1
            update = self.engine.abort_request(request_id)
            if update is not None:
                self._take(update)

        self.runner.in_flight.append(now)

    def step(self) -> None:
        """One step, and everything that must be true after it."""
        self.runner.in_flight.insert(0, self._count_followers)
        for update in self.engine.step():
            self._take(update)
        self._remember_computed()
        self.check()

    def step_until(self, condition: Callable[[], object], max_steps: int = 500) -> None:
        """Step until `condition` holds; it must within `max_steps`."""
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"still not so after {max_steps} steps")

    def schedule_and_roll_back(self) -> None:
        """Make a plan and take it back: nobody may have moved, except who was preempted."""
        before = self._books()
        plan = self.scheduler.schedule()
        for update in self.scheduler.rollback(plan):
            self._take(update)
        self.counts["rollbacks"] += bool(plan.scheduled)
        if not plan.preempted:
            assert self._books() == before
        self.check()

    def reset_prefix_cache(self) -> None:
        """Forget what nobody uses."""
        self.counts["blocks reset"] += self.cache.reset_prefix_cache()
        assert self.cache.stats().num_cached_blocks == 0
        self.check()

    def drain(self, max_steps: int = 5_000) -> None:
        """Let everything finish. What is poisoned stays so, and must fail alone."""
        self.runner.raise_next = 0
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"still unfinished after {max_steps} steps: {self.active}"
        assert self.active == [], "the engine forgot a request without a word"
        assert self.cache.num_used_blocks == 0
        self.check()

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Books, queues and numbers agree."""
        self.scheduler.check()
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.active)

    def _take(self, update: Update) -> None:
        story = self.stories[update.request_id]
        assert story.finish_reason is None, f"news after the end: {update}"
        story.outputs.extend(update.token_ids)
        assert story.outputs == story.expected[: len(story.outputs)], (
            f"{story.request_id} said {story.outputs}, should say {story.expected}"
        )
        reason = story.finish_reason = update.finish_reason
        if reason is None:
            assert len(story.outputs) < len(story.expected), f"{story.request_id} goes on too long"
            return
        self.counts[f"finish: {reason}"] += 1
        if reason in ("stop", "length"):
            assert story.outputs == story.expected
            assert story.request_id not in self.runner.poison | self.runner.not_finite
        elif reason == "error":
            guilty = self.runner.convicted | self.runner.not_finite
            assert story.request_id in guilty, f"an innocent failed: {update}"
            assert update.error
        if reason == "stop":
            assert update.stop_reason == story.outputs[-1]

    def _witness(self, event: Event) -> None:
        if isinstance(event, RequestPreempted):
            self.stories[event.request_id].preempted = True
        elif isinstance(event, RequestScheduled) and event.num_cached_tokens:
            story = self.stories[event.request_id]
            self.counts["hits after preemption" if event.resumed else "hits"] += 1
            assert event.num_cached_tokens < event.num_tokens, "nothing left to compute"
            prefix = story.tokens[: event.num_cached_tokens]
            assert (story.salt, prefix) in self._computed, (
                f"{story.request_id} was given {len(prefix)} tokens that nobody of its own computed"
            )

    def _count_followers(self) -> None:
        self.counts["follows"] += sum(
            seq.status is SequenceStatus.FOLLOWING for seq in self.scheduler._sequences.values()
        )

    def _remember_computed(self) -> None:
        plan = self.runner.last_plan
        if plan is None:
            return
        size = self.config.block_size
        for item in plan.scheduled:
            story = self.stories[item.request_id]
            tokens = story.tokens
            end = item.position + len(item.token_ids)
            for stop in range(item.position // size * size + size, end + 1, size):
                self._computed.add((story.salt, tokens[:stop]))

    def _books(self) -> tuple[object, ...]:
        stats = self.cache.stats()
        sequences = self.scheduler._sequences.values()
        return (
            stats.num_used_blocks,
            stats.filled_slots,
            self.cache.num_available_blocks,
            self.scheduler.num_running,
            [
                (s.request_id, s.status is SequenceStatus.RUNNING, s.num_tokens, s.num_computed)
                for s in sequences
            ],
            [(s.table.ids.tobytes(), s.table.num_sealed) for s in sequences if s.table],
            [s.num_cached_tokens for s in sequences],
        )
