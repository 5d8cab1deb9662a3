"""What choosing tokens costs: 32 rows of 49,152 logits, in milliseconds a step.

Greedy, then what a chat asks for (temperature, top-k 50, top-p 0.9), then the rest. The kinds take
turns, so that a busy machine slows all of them alike; the median is reported.

    python benchmarks/micro/sampler.py [--json] [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter_ns

import torch

from kvist.engine.sampler import sample
from kvist.engine.sampling import SamplingParams
from kvist.engine.step import SampleRow

NUM_ROWS, VOCAB_SIZE = 32, 49_152
PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.1}
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties over 500 tokens": {"temperature": 0.0, **PENALTIES},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def rows_of(kind: dict, step: int) -> list[SampleRow]:
    params = SamplingParams(**kind)
    counts = {97 * i: i % 3 for i in range(500)} if params.has_penalties else None
    return [SampleRow(params, seed, step, counts=counts) for seed in range(NUM_ROWS)]


def measure(steps: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    # Peaked like a language model's: by Zipf's law, most of the probability in some hundred tokens.
    rank = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator) for _ in range(NUM_ROWS)])
    logits = -1.3 * torch.log(rank + 1.0)
    times: dict[str, list[int]] = {name: [] for name in KINDS}
    with torch.inference_mode():
        for step in range(steps + 3):
            for name, kind in KINDS.items():
                rows, values = rows_of(kind, step), logits.clone()
                start = perf_counter_ns()
                sample(values, rows)
                if step >= 3:
                    times[name].append(perf_counter_ns() - start)
    return {name: statistics.median(taken) / 1e6 for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    found = measure(args.steps)
    if args.json:
        print(json.dumps({"rows": NUM_ROWS, "vocab_size": VOCAB_SIZE, "ms": found}))
        return
    for name, taken in found.items():
        print(f"{name:28} {taken:7.2f} ms   greedy + {taken - found['greedy']:6.2f}")


if __name__ == "__main__":
    main()
