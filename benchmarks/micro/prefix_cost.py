"""What prefix caching costs when nothing is shared.

Two engines over one model, one with prefix caching and one without, take the same steps in turn:
first the one, then the other, and the other way round in the next pair. Every prompt is different,
so nothing is ever shared and caching can only cost. Pairing step by step cancels what the machine
does meanwhile; the interval is a bootstrap over blocks of pairs.

    python benchmarks/micro/prefix_cost.py --json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time

from kvist.build import open_cache
from kvist.config import CacheConfig, SchedulerConfig
from kvist.engine.engine import Engine
from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.events import BlocksShared, BlockStored, EventLog
from kvist.keys import RootKey
from kvist.lab.report import environment

BLOCK_PAIRS = 8
"""Neighbouring pairs go together into the bootstrap: their noise is related."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens an answer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    llm = LLM(args.model, kv_cache_memory_bytes="2GiB")
    pairs: list[tuple[float, float]] = []
    draw = random.Random(0)
    stored = 0
    for _ in range(args.rounds):
        prompts = [
            tuple(draw.randrange(10, 40_000) for _ in range(args.prompt))
            for _ in range(args.streams)
        ]
        engines = {on: build(llm, enable_prefix_caching=on) for on in (True, False)}
        for engine, _ in engines.values():
            for index, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
                engine.add_request(
                    EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params)
                )
        while engines[True][0].has_work:
            seconds = {}
            for on in (True, False) if len(pairs) % 2 else (False, True):
                start = time.perf_counter()
                engines[on][0].step()
                seconds[on] = time.perf_counter() - start
            pairs.append((seconds[True], seconds[False]))
        counts = engines[True][1].counts
        assert not counts[BlocksShared], "a prompt was shared: the measurement means nothing"
        stored += counts[BlockStored]
    low, middle, high = interval(pairs)
    result = {
        "pairs": len(pairs),
        "blocks_stored": stored,
        "cost": round(middle, 5),
        "cost_95_low": round(low, 5),
        "cost_95_high": round(high, 5),
        "bar": 0.01,
        "seconds_with": round(sum(a for a, _ in pairs), 2),
        "seconds_without": round(sum(b for _, b in pairs), 2),
    }
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
    else:
        print(
            f"prefix caching with nothing shared costs {middle:+.2%} of step time"
            f" (95 % interval {low:+.2%} to {high:+.2%}, {len(pairs)} alternated pairs; bar 1 %)"
        )


def build(llm: LLM, *, enable_prefix_caching: bool) -> tuple[Engine, EventLog]:
    """Put books of their own over the model and its pool; the bytes in it do not matter here."""
    events = EventLog()
    cache = open_cache(
        CacheConfig(
            num_blocks=llm.pool.num_blocks,
            block_size=llm.pool.layout.block_size,
            enable_prefix_caching=enable_prefix_caching,
        ),
        events,
    )
    # Small chunks: steps of like length, so that every pair weighs the same.
    config = SchedulerConfig(max_model_len=llm.max_model_len, max_num_batched_tokens=128)
    return Engine(Scheduler(config, cache, events, RootKey(bytes(32))), llm.runner, events), events


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the trimmed mean of the relative cost, between the ends of its 95 % interval.

    A step that was interrupted says nothing about caching: the outer tenth of the ratios on either
    side is left out, in the estimate as in every draw of the bootstrap.
    """
    ratios = [math.log(a / b) for a, b in pairs]
    blocks = [ratios[i : i + BLOCK_PAIRS] for i in range(0, len(ratios), BLOCK_PAIRS)]
    draw = random.Random(1)
    means = sorted(
        trimmed_mean([r for block in draw.choices(blocks, k=len(blocks)) for r in block])
        for _ in range(2000)
    )
    return (
        math.expm1(means[50]),
        math.expm1(trimmed_mean(ratios)),
        math.expm1(means[1949]),
    )


def trimmed_mean(values: list[float]) -> float:
    ordered = sorted(values)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])


if __name__ == "__main__":
    main()
