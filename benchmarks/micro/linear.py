"""Products with packed weights beside torch's own: GB/s of weights and GFLOP/s, by rows.

Each pass goes through `--copies` different matrices, so that weights come from memory as they do in
a model. oneDNN's row is its prepacked weights, aten's what `nn.Linear` does.

    python benchmarks/micro/linear.py [--json] [--outputs 3072] [--inputs 576] [--copies 60]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvist import _C

ROWS = (1, 8, 32, 256, 2048)
KINDS = ("bfloat16", "int8", "int4")


def packed_linear(weight: Tensor, kind: str) -> tuple[Any, int]:
    outputs, inputs = weight.shape
    packed = torch.empty(_C.packed_bytes(kind, inputs, outputs), dtype=torch.uint8)
    _C.pack(weight, kind, packed)
    return _C.Linear(kind, inputs, outputs, packed, None, False), packed.numel()


def best_seconds(passes: Callable[[], None], seconds: float) -> float:
    passes()
    best, end = float("inf"), perf_counter() + seconds
    while perf_counter() < end:
        start = perf_counter()
        passes()
        best = min(best, perf_counter() - start)
    return best


def measure(outputs: int, inputs: int, copies: int, seconds: float) -> list[dict[str, Any]]:
    weights = [torch.randn(outputs, inputs).to(torch.bfloat16) for _ in range(copies)]
    results: list[dict[str, Any]] = []

    def record(name: str, rows: int, used: int, matrix_bytes: int, taken: float) -> None:
        each = taken / used
        results.append(
            {
                "backend": name,
                "rows": rows,
                "microseconds": round(each * 1e6, 2),
                "weights_gb_s": round(matrix_bytes / each / 1e9, 2),
                "gflop_s": round(2 * rows * outputs * inputs / each / 1e9, 1),
            }
        )

    with torch.inference_mode():
        for kind in KINDS:
            linears = [packed_linear(w, kind) for w in weights]
            for rows in ROWS:
                some = linears[: max(2, copies * 8 // max(8, rows))]
                x = torch.randn(rows, inputs).to(torch.bfloat16)
                out = torch.empty(rows, outputs, dtype=torch.bfloat16)

                def ours(some: list[Any] = some, x: Tensor = x, out: Tensor = out) -> None:
                    for linear, _ in some:
                        linear.multiply(x, out)

                taken = best_seconds(ours, seconds)
                record(f"kvist {kind}", rows, len(some), linears[0][1], taken)
            del linears
        for rows in ROWS:
            some_weights = weights[: max(2, copies * 8 // max(8, rows))]
            x = torch.randn(rows, inputs).to(torch.bfloat16)

            def aten(some: list[Tensor] = some_weights, x: Tensor = x) -> None:
                for weight in some:
                    torch.nn.functional.linear(x, weight)

            nbytes = weights[0].numel() * 2
            record("aten bfloat16", rows, len(some_weights), nbytes, best_seconds(aten, seconds))
            packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in some_weights]

            def onednn(some: list[Tensor] = packed, x: Tensor = x) -> None:
                for weight in some:
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

            record("oneDNN bfloat16", rows, len(packed), nbytes, best_seconds(onednn, seconds))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--copies", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5, help="per number of rows and backend")
    args = parser.parse_args()
    results = measure(args.outputs, args.inputs, args.copies, args.seconds)
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{args.outputs} x {args.inputs}, {torch.get_num_threads()} threads")
    for r in results:
        print(
            f"{r['backend']:<16} rows {r['rows']:>5}: {r['microseconds']:>9.1f} us"
            f" {r['weights_gb_s']:>7.1f} GB/s {r['gflop_s']:>8.1f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
