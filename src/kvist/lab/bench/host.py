"""One loaded model under many books: each mode of a benchmark gets a cache and a scheduler anew.

Owns the clock and the counting of tokens as they come. A pool, and the model over it, are opened
once; whatever differs between modes is in the books, so nothing else differs. Knows no tensors: the
runner may as well be one without a model, and then time is virtual and every number exact.

Threads: one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvist.build import open_cache
from kvist.cache import KVCacheManager
from kvist.config import CacheConfig, EngineConfig, KVAllocation, SchedulerConfig
from kvist.engine.books import recording_facts
from kvist.engine.engine import Engine, Runner
from kvist.engine.null_runner import NullRunner
from kvist.engine.recording import Recorder
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest, TokenLogprobs
from kvist.engine.step import StepPlan, Update
from kvist.events import EventLog, RequestPreempted
from kvist.keys import RootKey
from kvist.policies.registry import DEFAULT_POLICY


@dataclass(slots=True)
class Timeline:
    """When the tokens of one request came.

    Attributes
    ----------
    added_s : float
    token_s : list of float
        Of the first continuation.
    token_ids : list of int
    logprobs : list of TokenLogprobs
        Of these, where they were asked for.
    num_cached : int
        Prompt tokens that came from the cache.
    is_finished : bool
    """

    added_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    is_finished: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.added_s

    @property
    def gaps_s(self) -> list[float]:
        """Time from each token to the next."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


class Session:
    """An engine, and a note of when what came out of it.

    Parameters
    ----------
    engine : Engine
    clock : callable
        Seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.timelines: dict[str, Timeline] = {}
        self._clock = clock

    @property
    def cache(self) -> KVCacheManager:
        """The books."""
        return self.engine.scheduler.cache

    @property
    def num_preemptions(self) -> int:
        """Since the session was opened."""
        return self.engine.events.counts[RequestPreempted]

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        continuations: int = 1,
        logprobs: int | None = None,
    ) -> Timeline:
        """Put a request in the queue; greedy, and nothing ends it early."""
        request_id = str(len(self.timelines))
        line = self.timelines[request_id] = Timeline(self._clock())
        # Equal continuations would be one; whoever branches draws.
        params = SamplingParams(
            temperature=0.0 if continuations == 1 else 1.0,
            seed=0,
            n=continuations,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
        )
        self.engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params)
        )
        return line

    def step(self) -> list[Update]:
        """Run one step and note what came of it."""
        updates = self.engine.step()
        now = self._clock()
        for update in updates:
            line = self.timelines[update.request_id]
            if update.error is not None:
                raise RuntimeError(f"request {update.request_id}: {update.error}")
            if update.index == 0:
                line.token_s += [now] * len(update.token_ids)
                line.token_ids += update.token_ids
                line.logprobs += update.logprobs or ()
                line.num_cached = update.num_cached_tokens
            line.is_finished = line.is_finished or update.is_last
        return updates

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.engine.has_work:
            self.step()

    def one(
        self, prompt: Sequence[int], max_tokens: int, *, logprobs: int | None = None
    ) -> Timeline:
        """Run one request by itself."""
        line = self.add(prompt, max_tokens, logprobs=logprobs)
        self.finish()
        return line


class Host:
    """A runner over a pool, and what its books need to know.

    Parameters
    ----------
    runner : Runner
        Over a pool of `num_blocks` blocks of `block_size` tokens.
    num_blocks, block_size, max_model_len : int
    model : str
        Its name.
    kv_token_bytes : int
    clock : callable
    wait : callable
        Lets so many seconds pass.
    kv_format : str
        Name of the pool's.

    Attributes
    ----------
    record : Path or None
        Where sessions are recorded from now on, for `kvist simulate`: the first in that file, the
        others in files beside it, numbered from 2.
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        model: str,
        kv_token_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], None] = time.sleep,
        kv_format: str = "auto",
    ) -> None:
        self.record: Path | None = None
        self.runner = runner
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.model = model
        self.kv_token_bytes = kv_token_bytes
        self.clock = clock
        self.wait = wait
        self._kv_format = kv_format
        self._draw = random.Random(0)
        self._sessions = 0
        self._recorders: list[Recorder] = []

    def open(
        self,
        *,
        prefix_caching: bool = False,
        allocation: KVAllocation = KVAllocation.PAGED,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        policy: str = DEFAULT_POLICY,
        protected_share: float = 0.0,
    ) -> Session:
        """Open books over the pool, or over the first `num_blocks` blocks of it.

        Blocks of an earlier session are never found by a later one. REQUIRES the earlier one has
        nothing left to do.
        """
        events = EventLog()
        pool = CacheConfig(
            num_blocks=num_blocks or self.num_blocks,
            block_size=self.block_size,
            eviction_policy=policy,
            protected_share=protected_share,
            enable_prefix_caching=prefix_caching,
        )
        cache = open_cache(pool, events)
        config = SchedulerConfig(
            max_model_len=max_model_len or self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_allocation=allocation,
        )
        self._sessions += 1
        root = RootKey(self._sessions.to_bytes(32, "big"))
        recorder = self._open_recorder(pool, config)
        scheduler = Scheduler(config, cache, events, root, recorder=recorder)
        return Session(Engine(scheduler, self.runner, events), self.clock)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Draw token ids that nobody had before: two prompts share nothing."""
        return tuple(self._draw.randrange(self.runner.vocab_size) for _ in range(num_tokens))

    def warm_up(self, num_tokens: int = 256) -> None:
        """Run something once: what happens only once is none of the measurement's."""
        record, self.record = self.record, None
        self.open().one(self.prompt(min(num_tokens, self.max_model_len - 9)), 8)
        self.record = record

    def close(self) -> None:
        """Write the rest of the recordings. REQUIRES all sessions have nothing left to do."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders.clear()

    def _open_recorder(self, pool: CacheConfig, config: SchedulerConfig) -> Recorder | None:
        if self.record is None:
            return None
        number = len(self._recorders) + 1
        path = self.record
        if number > 1:
            path = path.with_name(f"{path.stem}-{number}{path.suffix}")
        block_bytes = self.block_size * self.kv_token_bytes
        options = asdict(EngineConfig()) | asdict(pool) | asdict(config)
        facts = recording_facts((self.model, self._kv_format), block_bytes, options)
        recorder = Recorder(path, facts, clock=self.clock)
        self._recorders.append(recorder)
        return recorder


def null_host(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    step_seconds: Callable[[StepPlan], float] = lambda plan: 0.01 + 0.0005 * plan.num_tokens,
) -> Host:
    """Return a host without a model, in virtual time: a step costs what `step_seconds` says."""
    runner = NullRunner(num_blocks, block_size, 50_000, step_seconds=step_seconds)

    def wait(seconds: float) -> None:
        runner.now_s += seconds

    return Host(
        runner,
        num_blocks,
        block_size,
        max_model_len,
        model="null",
        kv_token_bytes=16,
        clock=lambda: runner.now_s,
        wait=wait,
    )
