"""`kvist bench paging`: what paged allocation buys over reserving the maximum.

One engine, one budget, one list of requests; three ways to allocate:

- ``reserve``: every request takes room for ``max_model_len`` when it starts;
- ``reserve_longest``: the same, with ``max_model_len`` set to the longest request there is, which
  an operator cannot know beforehand;
- ``paged``: blocks as they are needed.

They differ in the size asked of the cache in one call of the scheduler, and nowhere else.
Utilization and concurrency come from the NullRunner and are exact; tokens/s from a real model.
The comparison is that of the PagedAttention paper (Kwon et al., 2023); ours runs the baseline in
the same engine, so that nothing but allocation differs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvist.build import open_cache
from kvist.config import CacheConfig, KVAllocation, SchedulerConfig
from kvist.engine.engine import Engine, Runner
from kvist.engine.null_runner import NullRunner
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.events import EventLog, RequestPreempted
from kvist.keys import RootKey

VOCAB_SIZE = 49_152
MODES = {
    "reserve": (KVAllocation.RESERVE, 4096),
    "reserve_longest": (KVAllocation.RESERVE, 2048),
    "paged": (KVAllocation.PAGED, 4096),
}
"""Mode -> (allocation, max_model_len)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingWorkload:
    """Requests and budget of the benchmark.

    Attributes
    ----------
    num_requests : int
        All of them arrive at once.
    shortest, longest : int
        Total lengths are uniform between these; half of each is prompt.
    slots : int
        Budget of the pool, in tokens.
    """

    num_requests: int = 256
    shortest: int = 128
    longest: int = 2048
    slots: int = 16_384
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.slots // self.block_size

    def requests(self) -> list[EngineRequest]:
        """Draw the requests: the same list every time."""
        draw = random.Random(self.seed)
        requests = []
        for index in range(self.num_requests):
            total = draw.randint(self.shortest, self.longest)
            prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(total // 2))
            params = SamplingParams(
                temperature=0.0, max_tokens=total - len(prompt), ignore_eos=True
            )
            requests.append(
                EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params)
            )
        return requests


@dataclass(frozen=True, slots=True)
class PagingResult:
    """Averages over the steady window: from the first finished request while others wait.

    Attributes
    ----------
    utilization : float
        Filled / allocated slots of running sequences, averaged over steps; shared blocks once.
    concurrency : float
        Running sequences.
    preemptions : int
    tokens_per_s : float or None
        Generated tokens a second; recomputed ones are not generated again and do not count.
    """

    utilization: float
    concurrency: float
    preemptions: int
    tokens_per_s: float | None


def run_mode(
    mode: str,
    workload: PagingWorkload,
    runner: Runner | None = None,
    *,
    seconds: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> PagingResult:
    """Run the workload in one mode.

    Parameters
    ----------
    runner : Runner, optional
        With a pool of `workload.num_blocks`; a fresh NullRunner when left out.
    seconds : float, optional
        Stop after that much of the steady window, and report tokens/s.
    progress : callable, optional
        Told the share of the work that is done, 0 to 1.
    """
    engine, events = _engine(mode, workload, runner)
    for request in workload.requests():
        engine.add_request(request)
    finished = steps = tokens = 0
    utilization = concurrency = 0.0
    start: float | None = None
    while engine.has_work:
        updates = engine.step()
        finished += sum(u.finish_reason is not None for u in updates)
        if engine.scheduler.num_waiting == 0:
            break
        if start is None:
            # Steady from here: the pool is as full as it gets, and lengths are mixed.
            start = time.perf_counter() if finished else None
            continue
        stats = engine.scheduler.cache.stats()
        steps += 1
        tokens += sum(len(u.token_ids) for u in updates)
        utilization += stats.filled_slots / max(1, stats.allocated_slots)
        concurrency += engine.scheduler.num_running
        elapsed = time.perf_counter() - start
        if progress is not None:
            progress(elapsed / seconds if seconds else finished / workload.num_requests)
        if seconds is not None and elapsed >= seconds:
            break
    elapsed = time.perf_counter() - start if start is not None else 0.0
    return PagingResult(
        utilization=utilization / max(1, steps),
        concurrency=concurrency / max(1, steps),
        preemptions=events.counts[RequestPreempted],
        tokens_per_s=tokens / elapsed if seconds is not None and elapsed else None,
    )


def _engine(mode: str, workload: PagingWorkload, runner: Runner | None) -> tuple[Engine, EventLog]:
    allocation, max_model_len = MODES[mode]
    events = EventLog()
    cache = open_cache(
        CacheConfig(num_blocks=workload.num_blocks, block_size=workload.block_size), events
    )
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        kv_allocation=allocation,
    )
    # A root of its own for every run: blocks of an earlier mode must not be found.
    root = RootKey(mode.encode().ljust(32, b"\0"))
    scheduler = Scheduler(config, cache, events, root)
    if runner is None:
        runner = NullRunner(workload.num_blocks, workload.block_size, VOCAB_SIZE)
    return Engine(scheduler, runner, events), events


def compare(
    exact: dict[str, PagingResult], measured: dict[str, PagingResult] | None
) -> dict[str, dict[str, float | int | None]]:
    """Put the modes side by side: exact books, measured speed, and paged over reserve."""
    table: dict[str, dict[str, float | int | None]] = {}
    for mode, result in exact.items():
        speed = measured[mode].tokens_per_s if measured else None
        table[mode] = {
            "utilization": round(result.utilization, 4),
            "concurrency": round(result.concurrency, 2),
            "tokens_per_s": round(speed, 1) if speed is not None else None,
            "preemptions": result.preemptions,
        }
    ratio: dict[str, float | int | None] = {}
    for name in ("utilization", "concurrency", "tokens_per_s"):
        paged, reserve = table["paged"][name], table["reserve"][name]
        ratio[name] = round(paged / reserve, 2) if paged and reserve else None
    table["ratio"] = ratio
    return table
