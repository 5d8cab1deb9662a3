"""What a forward pass costs beside its products: 30 layers so narrow that they compute nothing.

Python, dispatch and waking threads, in milliseconds a step, for one sequence that decodes and for
32. The bar is 1 ms at one.

    python benchmarks/micro/forward.py [--json] [--steps 300] [--kernels auto] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvist.config import EngineConfig
from kvist.engine.assemble import open_engine
from kvist.engine.sampling import SamplingParams
from kvist.engine.step import SampleRow, Scheduled, StepPlan
from kvist.testing.models import tiny_model

BAR_MS = 1.0
NUM_LAYERS = 30
CONTEXT = 100


def plan_of(num_seqs: int, block_size: int, position: int) -> StepPlan:
    greedy = SamplingParams(temperature=0.0)
    blocks = -(-(position + 1) // block_size)
    return StepPlan(
        0,
        tuple(
            Scheduled(
                f"r{n}",
                (n + 1,),
                position,
                list(range(n * blocks, (n + 1) * blocks)),
                SampleRow(greedy, 0, position),
            )
            for n in range(num_seqs)
        ),
    )


def measure(folder: Path, num_seqs: int, args: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        kernels=args.kernels,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
    )
    opened = open_engine(config)
    runner, block_size = opened.runner, opened.runner.layout.block_size
    plan = plan_of(num_seqs, block_size, CONTEXT)
    for _ in range(30):
        runner.run(plan)
    profile = cProfile.Profile() if args.profile else None
    if profile is not None:
        profile.enable()
    times = []
    for _ in range(args.steps):
        start = perf_counter()
        runner.run(plan)
        times.append((perf_counter() - start) * 1e3)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)
    times.sort()
    return {
        "num_seqs": num_seqs,
        "layers": NUM_LAYERS,
        "run_p10_ms": round(times[len(times) // 10], 3),
        "run_p50_ms": round(times[len(times) // 2], 3),
        "bar_ms": BAR_MS if num_seqs == 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model("llama", Path(scratch) / "narrow", num_hidden_layers=NUM_LAYERS)
        results = [measure(folder, num_seqs, args) for num_seqs in (1, 32)]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{torch.get_num_threads()} threads")
    for r in results:
        print(
            f"{r['num_seqs']:>3} sequences, {r['layers']} layers: {r['run_p50_ms']:.3f} ms a step"
            f" (p10 {r['run_p10_ms']:.3f})" + (f"; bar {BAR_MS}" if r["bar_ms"] else "")
        )


if __name__ == "__main__":
    main()
