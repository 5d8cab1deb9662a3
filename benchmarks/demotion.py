"""What copies on their way down cost: tokens/s with a write-through tier, over those without one.

Engines over one model stand in one process, one without tiers and one for each tier. In every round
each tier's engine and the one without run the same load with fresh prompts one right after the
other, in an order that chance draws: a machine that others use is now fast, now slow. Printed are
the geometric mean of the ratios and its 95 % interval, and their median and its own: where the
clock of a machine jumps between two speeds, some pairs straddle a jump, and the median does not
mind them. ``none again`` is a second engine without tiers: how far chance alone gets.

Two loads, neither of which reuses anything: ``mixed`` (prompts of 128 tokens, 64 of output, eight
at once) and ``prefill`` (prompts of 2,048 tokens, 4 of output). Between two turns the tiers get
time to finish; ``behind_s`` is what they took, and ``kept`` the share of blocks that they stored.

    python benchmarks/demotion.py --rounds 20 --json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.config import EngineConfig
from kvist.engine.assemble import OpenEngine, open_engine
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.events import BlocksDemoted, Event
from kvist.lab.report import environment

LOADS = {"mixed": (12, 128, 64), "prefill": (1, 2048, 4)}
"""Requests, tokens of a prompt, tokens of an answer."""

TIERS = {
    "none again": None,
    "host raw": "host:512MiB",
    "host zstd": "host:512MiB:zstd",
    "disk raw": "disk:2GiB:{folder}/raw",
    "disk zstd": "disk:2GiB:{folder}/zstd:zstd",
}


@dataclass
class Side:
    """One engine, and what it did."""

    opened: OpenEngine
    rates: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)
    stored: int = 0
    filled: int = 0

    def hear(self, event: Event) -> None:
        if isinstance(event, BlocksDemoted):
            self.stored += event.num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--tiers", nargs="*", choices=TIERS, default=list(TIERS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="kvist-demotion-") as folder:
        sides = {"none": open_side(args.model, None, Path(folder))}
        sides |= {name: open_side(args.model, TIERS[name], Path(folder)) for name in args.tiers}
        result: dict[str, Any] = {
            load: measure(sides, load, args.rounds, rng) for load in args.loads
        }
        for side in sides.values():
            side.opened.close()
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
        return
    for load, rows in result.items():
        for name, row in rows.items():
            print(f"{load:<8} {name:<10}", *(f"{key}={value}" for key, value in row.items()))


def open_side(model: str, tier: str | None, folder: Path) -> Side:
    options = {
        "model": model,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": "256MiB",
        "tiers": [] if tier is None else [tier.format(folder=folder)],
    }
    side = Side(open_engine(EngineConfig.resolve(options)))
    side.opened.engine.events.subscribe(side.hear)
    return side


def measure(
    sides: dict[str, Side], load: str, rounds: int, rng: random.Random
) -> dict[str, dict[str, Any]]:
    for side in sides.values():
        turn(side, load, rng)  # what happens only once, happens now
        while is_filling(side):  # memory that is touched for the first time, too
            turn(side, load, rng)
        side.rates.clear()
        side.behind_s.clear()
        side.stored = side.filled = 0
    none = sides["none"]
    base: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in rng.sample([name for name in sides if name != "none"], len(sides) - 1):
            for side in rng.sample([none, sides[name]], 2):
                turn(side, load, rng)
            base[name].append(none.rates[-1])
    rows: dict[str, dict[str, Any]] = {
        "none": {"tokens_per_s": round(statistics.median(none.rates), 1)}
    }
    for name, side in sides.items():
        if side is none:
            continue
        ratios = [mine / theirs for mine, theirs in zip(side.rates, base[name], strict=True)]
        mean, low, high = interval(ratios)
        rows[name] = {
            "to_none": round(mean, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "pairs": rounds,
            "median": [round(ratio, 4) for ratio in median_interval(ratios)],
        }
        if side.opened.engine.scheduler.loads is not None:
            rows[name]["kept"] = round(side.stored / side.filled, 3)
            rows[name]["behind_s"] = round(statistics.median(side.behind_s), 3)
    return rows


def is_filling(side: Side) -> bool:
    """Whether a tier in host memory has memory left that was never used."""
    loads = side.opened.engine.scheduler.loads
    return loads is not None and any(
        state.medium == "host" and state.usage.used_bytes < 0.9 * state.usage.capacity_bytes
        for state in loads.tiers.states()
    )


def turn(side: Side, load: str, rng: random.Random) -> None:
    """Run a load once and note how fast it went."""
    count, prompt_tokens, output_tokens = LOADS[load]
    vocab, block = side.opened.runner.vocab_size, side.opened.pool.layout.block_size
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    engine = side.opened.engine
    requests = [
        EngineRequest(
            request_id=str(rng.getrandbits(64)),
            prompt_token_ids=tuple(rng.randrange(vocab) for _ in range(prompt_tokens)),
            params=params,
        )
        for _ in range(count)
    ]
    start = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    side.rates.append(count * (prompt_tokens + output_tokens) / seconds)
    # The last token of an answer is never computed: its K and V are nowhere.
    side.filled += count * ((prompt_tokens + output_tokens - 1) // block)
    if engine.scheduler.loads is not None:
        start = time.perf_counter()
        engine.scheduler.loads.tiers.drain(30)
        side.behind_s.append(time.perf_counter() - start)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean and its 95 % interval, by Student's t on the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    n, z = len(logs), 1.96
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    mean, half = statistics.fmean(logs), t * statistics.stdev(logs) / math.sqrt(n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def median_interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, by the ranks alone (binomial)."""
    ordered, n = sorted(ratios), len(ratios)
    below, rank = 0.5**n, 0
    while below <= 0.025:
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    # Fewer than six pairs say nothing at 95 %: the interval is all of them.
    low = max(0, rank - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


if __name__ == "__main__":
    main()
