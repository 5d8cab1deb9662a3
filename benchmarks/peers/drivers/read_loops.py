"""Reductions of torch over memory, bytes a second a pass: what a machine without a compiler shows.

Usage: ``read_loops.py THREADS BYTES ROUNDS``
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

_WIDTH = 1024


def main() -> None:
    threads, size, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    data = torch.ones(size // (4 * _WIDTH), _WIDTH)
    vector = torch.ones(_WIDTH)
    loops: dict[str, Callable[[], torch.Tensor]] = {
        "torch sum": data.sum,
        "torch matrix times vector": lambda: data @ vector,
    }
    found: dict[str, list[float]] = {name: [] for name in loops}
    for name, loop in loops.items():
        for _ in range(rounds):
            start_s = time.perf_counter()
            loop()
            found[name].append(data.nbytes / (time.perf_counter() - start_s))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
