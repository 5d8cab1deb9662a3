"""A working set four times the device's pool: what a disk tier saves.

Twelve coding sessions take turns, a request each, up to twelve requests; lengths are scaled so that
the longest is 8,192 tokens, tokens are drawn from (session, block of the trace), and every request
asks for 32 tokens. The pool holds a quarter of all distinct tokens. Counted are the prompt tokens
that went through the model, against the least there could be with a cache without bounds.

Without ``--model`` the books alone run, over a null model and a tier in memory: the counts are
exact, and the same on every machine. With it, a model and a disk, and tokens/s besides; how far it
is goes to standard error every ten seconds.

    KVIST_DATA=… python benchmarks/working_set.py
    KVIST_DATA=… python benchmarks/working_set.py --model smollm2-135m-instruct --longest 8160

(That model knows 8,192 positions, answer included.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.lab.report import environment

LONGEST, OUTPUT, BLOCK, SHARE = 8192, 32, 16, 4
TRACE_BLOCK = 64
PROGRESS_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--model", help="run it, instead of the books alone")
    parser.add_argument("--tiers", nargs="*", choices=("none", "disk"), default=("none", "disk"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = os.environ.get("KVIST_DATA")
    if not folder:
        sys.exit("KVIST_DATA is not set: there are no traces to read")
    prompts = read_prompts(Path(folder) / "traces" / "claude_code_kv_cache_tester", args)
    distinct, least = count(prompts)
    pool = max(distinct // SHARE, -(-(args.longest + OUTPUT) // BLOCK) * BLOCK)
    result: dict[str, Any] = {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "distinct_tokens": distinct,
        "pool_tokens": pool,
        "least_prefill_tokens": least,
    }
    run = run_model if args.model else run_books
    for tier in args.tiers:
        row = run(args, prompts, pool, with_tier=tier == "disk")
        row["to_least"] = round(row["prefill_tokens"] / least, 3)
        result[tier] = row
    if "none" in result and "disk" in result:
        tokens = [result[tier]["prefill_tokens"] for tier in ("none", "disk")]
        result["prefill_ratio"] = round(tokens[0] / tokens[1], 2)
    if "prompt_tokens_per_s" in result.get("none", {}) and "disk" in result:
        rates = [result[tier]["prompt_tokens_per_s"] for tier in ("disk", "none")]
        result["throughput_ratio"] = round(rates[0] / rates[1], 2)
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
    else:
        for name, value in result.items():
            print(f"{name:<22} {value}")


def read_prompts(folder: Path, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the prompts in the order in which they come: round robin over the sessions."""
    sessions = []
    for path in sorted(folder.glob("trace_*.json"))[: args.sessions]:
        trace = json.loads(path.read_text())
        requests = [r for r in trace["requests"] if r.get("hash_ids")]
        sessions.append((trace["id"], requests[: args.rounds]))
    longest = max(r["in"] for _, requests in sessions for r in requests)
    scale = args.longest / longest
    prompts = []
    for turn in range(args.rounds):
        for name, requests in sessions:
            if turn < len(requests):
                request = requests[turn]
                length = max(1, round(request["in"] * scale))
                prompts.append(tokens_of(name, request["hash_ids"], scale)[:length])
    return prompts


def tokens_of(session: str, hash_ids: list[int], scale: float) -> tuple[int, ...]:
    """Draw tokens: what a block of the trace stands for depends on session and block alone."""
    tokens: list[int] = []
    for index, hash_id in enumerate(hash_ids):
        share = round((index + 1) * TRACE_BLOCK * scale) - round(index * TRACE_BLOCK * scale)
        rng = random.Random(f"{session}/{hash_id}")
        tokens += [rng.randrange(49_000) for _ in range(share)]
    return tuple(tokens)


def count(prompts: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return distinct tokens in whole blocks, and the tokens that must be computed at least."""
    known: set[tuple[int, ...]] = set()
    least = 0
    for prompt in prompts:
        hit = 0
        while hit + BLOCK < len(prompt) and prompt[: hit + BLOCK] in known:
            hit += BLOCK
        least += len(prompt) - hit
        known.update(prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK))
    return len(known) * BLOCK, least


def requests(prompts: list[tuple[int, ...]]) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    return [
        EngineRequest(request_id=str(n), prompt_token_ids=prompt, params=params)
        for n, prompt in enumerate(prompts)
    ]


def run_books(
    args: argparse.Namespace, prompts: list[tuple[int, ...]], pool: int, *, with_tier: bool
) -> dict[str, Any]:
    from kvist.config import EngineConfig
    from kvist.engine.books import open_books
    from kvist.engine.loads import PrefixLoads
    from kvist.engine.null_runner import NullRunner
    from kvist.engine.telemetry import Telemetry
    from kvist.keys import RootKey
    from kvist.testing.memory_tier import MemoryTier
    from kvist.tiers.demotion import WritePolicy
    from kvist.tiers.manager import Identity, TierManager

    root, num_blocks = RootKey(bytes(32)), pool // BLOCK
    config = EngineConfig(block_size=BLOCK, max_num_seqs=8)
    books = open_books(config, num_blocks, args.longest + OUTPUT)
    telemetry = Telemetry(books.events, books.max_model_len)
    runner = NullRunner(num_blocks, BLOCK, 50_000)
    loads = None
    if with_tier:
        block_bytes = runner.memory.block_bytes
        manager = TierManager(
            [MemoryTier(1 << 40)],
            runner.memory,
            Identity(root, "null", "null", (block_bytes,), 8),
            books.events,
            write_policy=WritePolicy(),
            load_policy="always",
            staging_blocks=512,
            block_tokens=BLOCK,
        )
        loads = PrefixLoads(books.cache, manager, books.events)
    engine = books.open_engine(config, root, runner, None, loads)
    for request in requests(prompts):
        engine.add_request(request)
    while engine.has_work:
        engine.step()
    counters = telemetry.counts().counters
    return {
        "prefill_tokens": counters["prompt_computed"] + counters["recomputed"],
        "loaded_tokens": counters["cached_host"],
        "preemptions": counters["preemptions"],
    }


def run_model(
    args: argparse.Namespace, prompts: list[tuple[int, ...]], pool: int, *, with_tier: bool
) -> dict[str, Any]:
    from kvist.config import EngineConfig
    from kvist.engine.assemble import open_engine
    from kvist.engine.telemetry import Telemetry
    from kvist.engine.weights.source import resolve
    from kvist.spec import KVSpec

    with tempfile.TemporaryDirectory(prefix="kvist-working-set-") as folder:
        options = {
            "model": args.model,
            "max_model_len": args.longest + OUTPUT,
            "max_num_seqs": 8,
            "tiers": [f"disk:8GiB:{folder}/kv"] if with_tier else [],
        }
        config = EngineConfig.resolve(options)
        token_bytes = KVSpec.from_config(resolve(args.model).config).token_bytes()
        memory = pool // BLOCK * BLOCK * token_bytes
        opened = open_engine(dataclasses.replace(config, kv_cache_memory_bytes=memory))
        telemetry = Telemetry(opened.engine.events, opened.max_model_len)
        start = time.perf_counter()
        for request in requests(prompts):
            opened.engine.add_request(request)
        told_s, ended = start, 0
        while opened.engine.has_work:
            ended += sum(update.is_last for update in opened.engine.step())
            if (now := time.perf_counter()) - told_s >= PROGRESS_S:
                told_s = now
                side = "disk" if with_tier else "none"
                print(f"{side}: {ended} of {len(prompts)}, {now - start:.0f} s", file=sys.stderr)
        seconds = time.perf_counter() - start
        counters = telemetry.counts().counters
        opened.close()
    return {
        "prefill_tokens": counters["prompt_computed"] + counters["recomputed"],
        "loaded_tokens": counters["cached_disk"],
        "preemptions": counters["preemptions"],
        "pool_blocks": opened.bill.num_blocks,
        "seconds": round(seconds, 2),
        "prompt_tokens_per_s": round(sum(map(len, prompts)) / seconds, 1),
    }


if __name__ == "__main__":
    main()
