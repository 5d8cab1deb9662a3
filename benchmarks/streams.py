"""Tokens/s by number of streams, and time to first token with and without a shared prefix.

Everything runs in one process and in turn, several rounds of it; medians are printed. transformers'
own ``generate`` (one stream, bf16, its defaults) is measured beside it with the same threads.

    python benchmarks/streams.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvist import LLM, SamplingParams
from kvist.lab.report import environment

STREAMS = (1, 8, 32)
PROMPT = OUTPUT = 128
PREFIX = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    draw = random.Random(0)
    llm = LLM(args.model, kv_cache_memory_bytes="2GiB")
    theirs = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=torch.bfloat16).eval()

    def prompt(length: int) -> list[int]:
        return [draw.randrange(10, 40_000) for _ in range(length)]

    samples: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for streams in STREAMS:
            prompts = [prompt(PROMPT) for _ in range(streams)]
            samples.setdefault(f"tokens_per_s_{streams}", []).append(generate(llm, prompts))
        samples.setdefault("transformers_tokens_per_s_1", []).append(
            generate_transformers(theirs, prompt(PROMPT))
        )
        prefix = prompt(PREFIX)
        samples.setdefault("ttft_cold_s", []).append(first_token(llm, prefix + prompt(16), 0))
        shared = PREFIX // llm.pool.layout.block_size * llm.pool.layout.block_size
        samples.setdefault("ttft_warm_s", []).append(first_token(llm, prefix + prompt(16), shared))
    result: dict[str, Any] = {name: statistics.median(v) for name, v in samples.items()}
    result = {name: round(value, 3) for name, value in result.items()}
    if args.json:
        print(json.dumps({**result, "samples": samples, "environment": environment()}))
        return
    for name, value in result.items():
        low, high = min(samples[name]), max(samples[name])
        print(f"{name:<30} {value:>10.3f}   ({low:.3f} – {high:.3f})")


def generate(llm: LLM, prompts: list[list[int]]) -> float:
    """Return generated tokens a second, prefill included."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(o.outputs[0].token_ids) == OUTPUT for o in outputs)
    return len(prompts) * OUTPUT / elapsed


def generate_transformers(model: Any, prompt: list[int]) -> float:
    """The same for transformers' generate, one stream."""
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=OUTPUT,
        min_new_tokens=OUTPUT,
        do_sample=False,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - start
    assert out.shape[1] == len(prompt) + OUTPUT
    return OUTPUT / elapsed


def first_token(llm: LLM, prompt: list[int], cached: int) -> float:
    """Return seconds to the first token; check what came from the cache."""
    start = time.perf_counter()
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
    elapsed = time.perf_counter() - start
    assert output.num_cached_tokens == cached, (output.num_cached_tokens, cached)
    return elapsed


if __name__ == "__main__":
    main()
