"""Attention beside the memory's speed: decode in GB/s of K and V, prefill in GFLOP/s.

The shape is SmolLM2-135M's: 30 layers, 9 query heads over 3 KV heads of 64. Blocks lie at random in
a pool of huge pages, as they do after some hours of serving; a step attends in all layers, each
called from Python. The bar: decode at 7,500 tokens of context, batch 1 and 8, reads at 65 % of what
the best of several loops that only read reaches over 1 GiB with the same threads, before or after;
medians of passes. Prefill is held against torch's attention over contiguous K and V.

    python benchmarks/micro/attention.py [--json] [--dtype bfloat16] [--threads 2] [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvist import _C
from kvist.formats.registry import resolve_format
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.cpu import chosen_isa
from kvist.kernels.dispatch import KernelSet, select
from kvist.spec import BlockLayout, LayerGroup, LayerKind
from kvist.tiers.device import DevicePool

LAYERS, KV_HEADS, QUERY_HEADS, DIM, BLOCK_SIZE = 30, 3, 9, 64, 16
CONTEXT = 7_500
BAR = 0.65
CPU = torch.device("cpu")


def seconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """How long each of some calls took; one before them does not count."""
    work()
    taken = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        taken.append(perf_counter() - start)
    return sorted(taken)


def read_bandwidth(num_bytes: int, repeats: int) -> tuple[float, str]:
    """Bytes a second of the fastest way to read, by the median of its passes, and which it was."""
    layout = BlockLayout(1, 1, DIM, DIM, BLOCK_SIZE, 4)
    pool = DevicePool(layout, num_bytes // layout.block_bytes, torch.float32, CPU)
    data = pool.tensor.view(-1)
    data.fill_(1.0)
    best: dict[str, float] = {}
    for isa in _C.build_info()["isa"]:
        for streams in (1, 2, 4):
            for ahead in (False, True):
                loop = [
                    _C.read_seconds(data, getattr(_C.Isa, isa), streams, ahead)
                    for _ in range(repeats)
                ]
                name = f"{isa}, {streams} streams a thread{', prefetched' if ahead else ''}"
                best[name] = data.nbytes / median(loop)
    name = max(best, key=lambda key: best[key])
    return best[name], name


class Bench:
    """A pool of one dtype with the contexts of some sequences in it."""

    def __init__(self, dtype: str, tokens: int) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        form = resolve_format("auto", dtype)
        group = LayerGroup(LayerKind.FULL, tuple(range(LAYERS)), KV_HEADS, DIM, DIM)
        self.layout = form.layout(group, BLOCK_SIZE)
        self.num_blocks = -(-tokens // BLOCK_SIZE)
        self.pool = DevicePool(self.layout, self.num_blocks, self.dtype, CPU).tensor
        row = torch.randn(1, self.layout.block_elements).to(self.dtype)
        for block in self.pool:
            block.copy_(row[0])
        self.order = torch.randperm(self.num_blocks, dtype=torch.int32)
        self.kernels: KernelSet = select(CPU, self.dtype, self.layout, QUERY_HEADS, "cpp")

    def decode(self, batch_size: int, repeats: int) -> dict[str, float]:
        """One token of each sequence through all layers."""
        blocks = -(-CONTEXT // BLOCK_SIZE)
        tables = self.order[: batch_size * blocks].view(batch_size, blocks)
        query = torch.randn(batch_size, QUERY_HEADS, DIM).to(self.dtype)

        def step() -> None:
            batch = AttentionBatch.build(
                [1] * batch_size, [CONTEXT] * batch_size, tables, BLOCK_SIZE
            )
            for layer in range(LAYERS):
                self.kernels.attention(query, self.pool, self.layout, layer, batch, DIM**-0.5)

        taken = seconds(step, repeats)
        read = batch_size * CONTEXT * LAYERS * KV_HEADS * 2 * DIM * self.layout.itemsize
        return {
            "batch": batch_size,
            "step_ms": 1e3 * median(taken),
            "gb_s": read / median(taken) / 1e9,
            "best_gb_s": read / taken[0] / 1e9,
        }

    def overhead(self, repeats: int) -> dict[str, float]:
        """One token with a context of one block: what a call costs beside reading."""
        query = torch.randn(1, QUERY_HEADS, DIM).to(self.dtype)
        key = torch.randn(1, KV_HEADS, DIM).to(self.dtype)
        batch = AttentionBatch.build([1], [BLOCK_SIZE], self.order[:1].view(1, 1), BLOCK_SIZE)
        slots = torch.tensor([int(self.order[0]) * BLOCK_SIZE])
        layers = range(LAYERS)

        def attend() -> None:
            for layer in layers:
                self.kernels.attention(query, self.pool, self.layout, layer, batch, DIM**-0.5)

        def write() -> None:
            for layer in layers:
                self.kernels.write_kv(self.pool, self.layout, layer, key, key, slots)

        return {
            "attention_us": 1e6 * median(seconds(attend, 10 * repeats)) / LAYERS,
            "write_us": 1e6 * median(seconds(write, 10 * repeats)) / LAYERS,
        }

    def prefill(self, new: int, cached: int, repeats: int) -> dict[str, float]:
        """One prompt through one layer, behind a cached prefix or none; and torch's attention."""
        context = new + cached
        tables = self.order[: -(-context // BLOCK_SIZE)].view(1, -1)
        batch = AttentionBatch.build([new], [context], tables, BLOCK_SIZE)
        query = torch.randn(new, QUERY_HEADS, DIM).to(self.dtype)
        ours = seconds(
            lambda: self.kernels.attention(query, self.pool, self.layout, 3, batch, DIM**-0.5),
            repeats,
        )
        turned = query.transpose(0, 1)[None]
        key, value = torch.randn(2, 1, KV_HEADS, context, DIM).to(self.dtype)
        mask = None if not cached else torch.ones(new, context, dtype=torch.bool).tril(cached)
        theirs = seconds(
            lambda: scaled_dot_product_attention(
                turned, key, value, attn_mask=mask, is_causal=not cached, enable_gqa=True
            ),
            repeats,
        )
        pairs = new * cached + new * (new + 1) / 2
        operations = 4 * pairs * QUERY_HEADS * DIM
        return {
            "new": new,
            "cached": cached,
            "gflop_s": operations / median(ours) / 1e9,
            "sdpa_gflop_s": operations / median(theirs) / 1e9,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bench = Bench(options.dtype, 8 * (CONTEXT + BLOCK_SIZE))
    before = read_bandwidth(1 << 30, 3)
    decode = [bench.decode(size, options.repeats) for size in (1, 8)]
    read, loop = max(before, read_bandwidth(1 << 30, 3))
    report: dict[str, Any] = {
        "isa": chosen_isa(),
        "threads": options.threads,
        "dtype": options.dtype,
        "read_gb_s": read / 1e9,
        "read_loop": loop,
        "decode": decode,
        "calls": bench.overhead(options.repeats),
        "prefill": [bench.prefill(*shape, options.repeats) for shape in ((4096, 0), (512, 7168))],
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{options.threads} threads, {report['isa']}, {options.dtype}")
    print(f"reading 1 GiB            {read / 1e9:6.1f} GB/s   ({loop})")
    for row in report["decode"]:
        share = row["gb_s"] * 1e9 / read
        print(
            f"decode, batch {row['batch']}, {CONTEXT}    {row['gb_s']:6.1f} GB/s"
            f"   {share:.0%} of it (bar {BAR:.0%}); {row['step_ms']:.2f} ms a step,"
            f" best {row['best_gb_s']:.1f} GB/s"
        )
    calls = report["calls"]
    print(
        f"a call for one block     attention {calls['attention_us']:.1f} µs, write"
        f" {calls['write_us']:.1f} µs"
    )
    for row in report["prefill"]:
        print(
            f"prefill {row['new']} after {row['cached']:<5}     {row['gflop_s']:6.0f} GFLOP/s;"
            f" torch over contiguous K and V {row['sdpa_gflop_s']:.0f}"
        )


if __name__ == "__main__":
    main()
