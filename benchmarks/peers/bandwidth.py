"""How fast this machine reads memory with the threads that the engines get.

Owns the programs that read, and their building. The best loop counts: what a kernel is held
against is the memory, not a loop.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_DRIVERS = Path(__file__).resolve().parent / "drivers"
_BYTES = 5 << 28
_ROUNDS = 5
_LIMIT_S = 120


class Rate(NamedTuple):
    """Bytes a second of work done several times: the middle one, and the fastest."""

    median: float
    fastest: float


def rate_of(passes: Sequence[float]) -> Rate:
    """Return middle and fastest of some passes."""
    return Rate(statistics.median(passes), max(passes))


def read_bandwidth(threads: int) -> dict[str, Rate]:
    """Return how fast each loop reads; empty if none could run.

    Reads 1.25 GiB, several times a loop. The loops in C need a compiler.
    """
    found: dict[str, list[float]] = {}
    numbers = [str(threads), str(_BYTES), str(_ROUNDS)]
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "read_loops"
        source = str(_DRIVERS / "read_loops.c")
        flags = ["-O3", "-march=native", "-fopenmp", source, "-o", str(program)]
        if compiler is not None and _output([compiler, *flags]) is not None:
            found.update(json.loads(_output([str(program), *numbers]) or "{}"))
    script = [sys.executable, str(_DRIVERS / "read_loops.py")]
    found.update(json.loads(_output([*script, *numbers]) or "{}"))
    return {name: rate_of(passes) for name, passes in found.items()}


def best_read(threads: int) -> Rate | None:
    """Return the median of the loop with the best, and the fastest pass of any; None without."""
    rates = read_bandwidth(threads).values()
    return Rate(*map(max, zip(*rates, strict=True))) if rates else None


def _output(command: list[str]) -> str | None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout
