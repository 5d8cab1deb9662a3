"""What a step costs beside the model: schedule, batch building and commit, in milliseconds.

32 running sequences decode; the runner only returns tokens. The bar is 1 ms a step.

    python benchmarks/micro/step.py [--json] [--steps 500] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
from time import perf_counter_ns
from typing import Any

import torch

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.batch import build_batch
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepResult
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.policies.registry import make_policy

NUM_SEQS = 32
BLOCK_SIZE = 16
CONTEXTS = (1_000, 4_000)
BAR_MS = 1.0


def open_scheduler(context: int, steps: int) -> Scheduler:
    """32 sequences that have read `context` tokens each and have `steps` steps to go."""
    max_model_len = context + 2 * steps + 100
    blocks = NUM_SEQS * -(-max_model_len // BLOCK_SIZE)
    events = EventLog()
    cache = KVCacheManager(blocks, BLOCK_SIZE, make_policy("lru", blocks), events)
    config = SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=NUM_SEQS, max_num_batched_tokens=2_048
    )
    scheduler = Scheduler(config, cache, events, RootKey(bytes(32)))
    rng = random.Random(0)
    for n in range(NUM_SEQS):
        prompt = tuple(rng.randrange(50_000) for _ in range(context - n))
        params = SamplingParams(max_tokens=None, temperature=0.0)
        scheduler.add(
            EngineRequest(request_id=f"request-{n}", prompt_token_ids=prompt, params=params)
        )
    return scheduler


def step(scheduler: Scheduler, device: torch.device) -> tuple[int, int, int, int]:
    """One step; nanoseconds at its start and after schedule, batch building and commit."""
    start = perf_counter_ns()
    plan = scheduler.schedule()
    scheduled = perf_counter_ns()
    batch = build_batch(plan, BLOCK_SIZE, device)
    built = perf_counter_ns()
    result = StepResult({request_id: 7 for request_id, _ in batch.samples})
    ran = perf_counter_ns()
    scheduler.commit(plan, result)
    return start, scheduled, built, perf_counter_ns() - (ran - built)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(context: int, steps: int, profile: cProfile.Profile | None) -> dict[str, Any]:
    device = torch.device("cpu")
    scheduler = open_scheduler(context, steps)
    # Reading the prompts, then some decoding until all is warm.
    for _ in range(NUM_SEQS * context // 2_048 + 40):
        step(scheduler, device)
    gc.collect()
    if profile is not None:
        profile.enable()
    times = [step(scheduler, device) for _ in range(steps)]
    if profile is not None:
        profile.disable()
    parts = {
        "schedule": [(b - a) / 1e6 for a, b, _, _ in times],
        "build_batch": [(c - b) / 1e6 for _, b, c, _ in times],
        "commit": [(d - c) / 1e6 for _, _, c, d in times],
        "step": [(d - a) / 1e6 for a, _, _, d in times],
    }
    return {
        "num_seqs": NUM_SEQS,
        "context_tokens": context,
        "steps": steps,
        **{
            f"{name}_{label}_ms": round(percentile(values, share), 4)
            for name, values in parts.items()
            for label, share in (("p50", 0.5), ("p90", 0.9))
        },
        "bar_ms": BAR_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    results = [measure(context, args.steps, profile) for context in CONTEXTS]
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for r in results:
            print(
                f"{r['num_seqs']} sequences of {r['context_tokens']} tokens:"
                f" {r['step_p50_ms']:.3f} ms a step (p90 {r['step_p90_ms']:.3f}; bar {BAR_MS}),"
                f" schedule {r['schedule_p50_ms']:.3f}, build_batch {r['build_batch_p50_ms']:.3f},"
                f" commit {r['commit_p50_ms']:.3f}"
            )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
