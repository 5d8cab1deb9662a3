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
from dataclasses import replace

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.admission import MAX_PASSES
from kvist.engine.engine import Engine
from kvist.engine.loads import PrefixLoads
from kvist.engine.null_runner import NullRunner, null_generate
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest, SequenceStatus
from kvist.engine.step import Update
from kvist.engine.telemetry import Telemetry
from kvist.events import Event, EventLog, PrefixLoaded, RequestPreempted, RequestScheduled
from kvist.keys import RootKey
from kvist.policies.registry import make_policy
from kvist.testing.disturbed import DisturbedRunner, RigConfig
from kvist.testing.rig_tiers import RigTiers
from kvist.testing.story import Story

ROOT = RootKey(bytes(32))


class EngineRig:
    """One engine and the truth about its requests.

    Parameters
    ----------
    config : RigConfig

    Attributes
    ----------
    counts : Counter of str
        What happened: forks, follows, hits, aborts by state, rollbacks by hand …
    now_s : float
        The engine's clock; a step takes one second.

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
            make_policy(config.eviction_policy, config.num_blocks),
            self.events,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.now_s = 0.0
        inner = NullRunner(config.num_blocks, config.block_size, config.vocab_size, verify=True)
        self.tiers = RigTiers(config, inner.memory, self.events, self) if config.num_tiers else None
        self.loads: PrefixLoads | None = None
        if self.tiers is not None:
            manager = self.tiers.manager
            self.loads = PrefixLoads(self.cache, manager, self.events, self.tiers.clock)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                scheduling_policy=config.scheduling_policy,
                kv_allocation=config.kv_allocation,
                watermark=config.watermark,
                max_num_queued_reqs=config.max_num_queued_reqs,
                max_num_queued_tokens=config.max_num_queued_tokens,
            ),
            self.cache,
            self.events,
            ROOT,
            loads=self.loads,
        )
        self.runner = DisturbedRunner(inner, config)
        self.engine = Engine(self.scheduler, self.runner, self.events, clock=lambda: self.now_s)
        self.telemetry = Telemetry(self.events, config.max_model_len, clock=lambda: self.now_s)
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
        view = self.scheduler.view(request_id)
        if view is None:
            return "expired"  # in the step under way, whose news are still to come
        story = self.stories[request_id]
        if view.status is SequenceStatus.RUNNING:
            base = "decode" if view.num_tokens - view.num_computed_tokens == 1 else "prefill"
            return f"{base}, forked" if story.forked else base
        return f"{view.status.value}, preempted" if story.preempted else view.status.value

    # ------------------------------------------------------------------ what may happen

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        *,
        priority: int = 0,
        salt: str = "",
        stop_token_ids: tuple[int, ...] = (),
        timeout_s: float | None = None,
    ) -> str | None:
        """Ask for a request, and work out what must come of it; ``None``: it was turned away."""
        request_id = f"r{len(self.stories)}"
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids
        )
        num_waiting, num_tokens = self.scheduler.num_waiting, self.scheduler.num_queued_tokens
        overload = self.engine.offer(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                priority=priority,
                salt=salt,
                timeout_s=timeout_s,
            )
        )
        reason = overload.reason if overload is not None else None
        self._check_door(reason, num_waiting, num_tokens + len(prompt), timeout_s)
        if overload is not None:
            assert 1 <= overload.retry_after_s <= 120
            self.counts[f"rejected: {reason}"] += 1
            return None
        room = self.config.max_model_len - len(prompt)
        length = room if max_tokens is None else min(room, max_tokens)
        expected = null_generate(prompt, length, self.config.vocab_size)
        for index, token_id in enumerate(expected):
            if token_id in stop_token_ids:
                del expected[index + 1 :]
                break
        story = self.stories[request_id] = Story(request_id, prompt, salt, expected)
        if timeout_s is not None:
            story.deadline_s = self.now_s + timeout_s
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
        start_s = self.now_s
        for update in self.engine.step():
            self._take(update)
        self.now_s += 1.0
        for request_id in self.active:
            deadline_s = self.stories[request_id].deadline_s
            assert deadline_s is None or deadline_s > start_s, f"{request_id} outlived its time"
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
        loading = self._num_loading()
        plan = self.scheduler.schedule()
        moved = self._num_loading() != loading
        for update in self.scheduler.rollback(plan):
            self._take(update)
        self.counts["rollbacks"] += bool(plan.scheduled)
        # Loads are no part of a plan: they begin, and end, whatever becomes of it.
        if not plan.preempted and not moved and not loading:
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
        for _ in range(self.config.max_delay_polls + 2):
            self.now_s += 1.0
            self.engine.tend()
        assert self.cache.num_used_blocks == 0
        self.check()

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Books, queues and numbers agree."""
        self.scheduler.check()
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.active)
        passes = [view.passes for view in self.scheduler.views()]
        assert max(passes, default=0) <= MAX_PASSES, "passed too often"
        self.counts["most passes"] = max(self.counts["most passes"], *passes, 0)

    def _check_door(
        self, reason: str | None, num_waiting: int, num_tokens: int, timeout_s: float | None
    ) -> None:
        """Who comes is turned away for a bound that is reached, and for no other reason."""
        most, most_tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        if most is not None and num_waiting >= most:
            assert reason == "queued_reqs"
        elif most_tokens is not None and num_waiting and num_tokens > most_tokens:
            assert reason == "queued_tokens"
        elif reason is not None:
            assert reason == "deadline"
            assert timeout_s is not None
            assert self.scheduler.has_work, "an idle engine begins whatever comes"

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
        elif reason == "abort" and update.error is not None:
            assert update.error.startswith("deadline")
            assert story.deadline_s is not None
            hopeless = self.now_s < story.deadline_s
            assert not (hopeless and story.outputs), "cut off before its time"
            self.counts["hopeless" if hopeless else "deadlines"] += 1
        elif reason == "error":
            guilty = self.runner.convicted | self.runner.not_finite
            assert story.request_id in guilty, f"an innocent failed: {update}"
            assert update.error
        if reason == "stop":
            assert update.stop_reason == story.outputs[-1]

    def _witness(self, event: Event) -> None:
        if isinstance(event, RequestPreempted):
            story = self.stories[event.request_id]
            # With tiers it may: while a transfer has blocks of who was preempted before, or when
            # its own were evicted ahead of need and it has to compute all of them again.
            if self.loads is None:
                assert len(story.outputs) != story.said_when_preempted, "twice without a token"
                story.said_when_preempted = len(story.outputs)
            story.preempted = True
        elif isinstance(event, RequestScheduled) and event.num_cached_tokens:
            story = self.stories[event.request_id]
            self.counts["hits after preemption" if event.resumed else "hits"] += 1
            assert event.num_cached_tokens < event.num_tokens, "nothing left to compute"
            self._check_given(story, event.num_cached_tokens)
        elif isinstance(event, PrefixLoaded):
            story = self.stories[event.request_id]
            self.counts["loads after preemption" if event.resumed else "loads"] += 1
            view = self.scheduler.view(event.request_id)
            assert view is not None
            assert view.num_computed_tokens < view.num_tokens, "nothing left to compute"
            assert sum(tokens for _, tokens in event.sources) == event.num_tokens
            self._check_given(story, view.num_computed_tokens)

    def _check_given(self, story: Story, num_tokens: int) -> None:
        prefix = story.tokens[:num_tokens]
        assert (story.salt, prefix) in self._computed, (
            f"{story.request_id} was given {len(prefix)} tokens that nobody of its own computed"
        )

    def _count_followers(self) -> None:
        self.counts["follows"] += sum(
            view.status is SequenceStatus.FOLLOWING for view in self.scheduler.views()
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

    def _num_loading(self) -> int:
        return self.cache.loading.num_held_blocks if self.loads is not None else 0

    def _books(self) -> tuple[object, ...]:
        stats = self.cache.stats()
        return (
            stats.num_used_blocks,
            stats.filled_slots,
            self.cache.num_available_blocks,
            self.scheduler.num_running,
            [
                # Waiting or following: that may change, it is found out anew in every step.
                replace(view, status=SequenceStatus.WAITING)
                if view.status is SequenceStatus.FOLLOWING
                else view
                for view in self.scheduler.views()
            ],
        )
