"""What rounding weights costs: KL divergence from the model in its own dtype, over real text.

    python benchmarks/weights_kl.py [--weights int8 int4] [--tokens 8192] [--json]

Text is read from ``text/*.txt`` under the folder that KVIST_DATA names. Each model reads the same
windows of text once; at every position the whole distribution over the vocabulary is compared. The
bars are a mean KL of 0.01 nats for int8 and 0.02 for int4.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.config import EngineConfig
from kvist.engine.assemble import open_engine
from kvist.engine.batch import build_batch
from kvist.engine.step import Scheduled, StepPlan
from kvist.engine.tokenizer import Tokenizer

BARS = {"int8": 0.01, "int4": 0.02}
WINDOW = 512


def windows(folder: Path, tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Windows spread evenly over all files."""
    files = sorted((folder / "text").glob("*.txt"))
    if not files:
        raise SystemExit(f"no text/*.txt in {folder}; set KVIST_DATA to a folder that has some")
    count = -(-num_tokens // WINDOW)
    found = []
    for n in range(count):
        text = files[n % len(files)].read_text(encoding="utf-8", errors="ignore")
        start = len(text) * (n // len(files) + 1) // (count // len(files) + 2)
        found.append(tokenizer.encode(text[start : start + 8 * WINDOW])[:WINDOW])
    return found


def log_probs(model: str, weights: str, batches: list[list[int]]) -> tuple[list[Tensor], Any]:
    """Log probabilities fp32 [512, V] of each window."""
    config = EngineConfig(
        model=model,
        weights=weights,
        max_model_len=WINDOW,
        max_num_batched_tokens=WINDOW,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
    )
    opened = open_engine(config)
    runner, layout = opened.runner, opened.runner.layout
    table = list(range(-(-WINDOW // layout.block_size)))
    found = []
    for tokens in batches:
        plan = StepPlan(0, (Scheduled("text", tuple(tokens), 0, table, None),))
        batch = build_batch(plan, layout.block_size, torch.device("cpu"))
        with torch.inference_mode():
            context = runner._context(batch, opened.pool.tensor)
            logits = runner._forward(context, torch.arange(len(tokens)))
            found.append(logits.log_softmax(-1))
    return found, opened.bill


def measure(model: str, kinds: list[str], num_tokens: int) -> dict[str, Any]:
    folder = os.environ.get("KVIST_DATA")
    if not folder:
        raise SystemExit("set KVIST_DATA to a folder that has text/*.txt")
    from kvist.engine.weights.source import resolve

    batches = windows(Path(folder), Tokenizer(resolve(model).path), num_tokens)
    own, bill = log_probs(model, "auto", batches)
    results: dict[str, Any] = {
        "model": model,
        "tokens": sum(map(len, batches)),
        "own_weights_bytes": bill.weights_bytes,
    }
    for kind in kinds:
        gc.collect()
        rounded, bill = log_probs(model, kind, batches)
        divergence = torch.cat(
            [(p.exp() * (p - q)).sum(-1) for p, q in zip(own, rounded, strict=True)]
        )
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(own, rounded, strict=True)])
        results[kind] = {
            "mean_kl": float(divergence.mean()),
            "p99_kl": float(divergence.quantile(0.99)),
            "same_greedy_token": float(same.float().mean()),
            "weights_bytes": bill.weights_bytes,
            "bar": BARS[kind],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"], choices=sorted(BARS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(args.model, args.weights, args.tokens)
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{results['model']}, {results['tokens']} tokens of text")
    for kind in args.weights:
        r = results[kind]
        print(
            f"{kind}: mean KL {r['mean_kl']:.5f} nats (bar {r['bar']}), p99 {r['p99_kl']:.4f},"
            f" same greedy token {r['same_greedy_token']:.2%},"
            f" weights {r['weights_bytes'] / 1e6:.0f} MB of"
            f" {results['own_weights_bytes'] / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
