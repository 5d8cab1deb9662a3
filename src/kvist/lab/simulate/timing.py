"""How long a step takes: five numbers, given, estimated, or fitted to a recording.

Owns the model and its fit. Knows no requests. No torch, no numpy: five unknowns are solved by hand.

::

    seconds = base + decode · sequences that decode     + context · tokens those attend to
                   + read   · tokens of longer runs     + pair    · (query, key) pairs of those

The kind of model that engine simulators use (Vidur, 2405.05465, fits one a layer and operation);
ours is one line a step, because that is what a recording has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from kvist.errors import ConfigError
from kvist.lab.plan import Model
from kvist.lab.simulate.recording import StepRow, is_recording, read_recording

_LEAST_ROWS = 20
_MOST_ROWS = 20_000
"""Of a longer recording so many are taken, evenly: a fit of that many takes about two seconds."""
_ROUNDS = 16
"""Weighted fits in a row; the numbers stand still long before."""
_NEAR = 0.02
"""Errors below this share count alike: a median between steps that fit exactly is no better."""
_TIE = 0.3
"""What the prior weighs beside a step that fits: enough to decide where nothing is recorded."""

COMPUTE_FLOPS = 150e12
BANDWIDTH_BYTES_PER_S = 2.0e12
"""As `kvist plan` assumes where nothing is said: what an A100 80GB sustains."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of a step. See the module."""

    base_s: float
    decode_s: float = 0.0
    read_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, decoded: int, read: int, context: int, pairs: int) -> float:
        """Return how long a step takes that holds so much; see `StepRow`."""
        return (
            self.base_s
            + self.decode_s * decoded
            + self.read_s * read
            + self.context_s * context
            + self.pair_s * pairs
        )

    @classmethod
    def of_model(
        cls,
        model: Model,
        token_bytes: float,
        prefill_tokens_per_s: float | None = None,
        decode_step_s: float | None = None,
    ) -> StepTiming:
        """Estimate from a model's size: reading bound by compute, decoding by memory.

        Parameters
        ----------
        token_bytes : float
            KV bytes a token.
        prefill_tokens_per_s, decode_step_s : float, optional
            Measured, in place of `COMPUTE_FLOPS` and `BANDWIDTH_BYTES_PER_S`.
        """
        if decode_step_s is None:
            decode_step_s = (model.active_bytes or 0) / BANDWIDTH_BYTES_PER_S
        if prefill_tokens_per_s is not None:
            read_s = 1 / prefill_tokens_per_s
        else:
            read_s = 2 * (model.num_active_parameters or 0) / COMPUTE_FLOPS
        return cls(decode_step_s, 0.0, read_s, token_bytes / BANDWIDTH_BYTES_PER_S)

    @classmethod
    def fit(cls, rows: Sequence[StepRow]) -> StepTiming:
        """Fit to steps that were measured.

        The least sum of the *absolute* logarithms of found over measured, no number below 0: a
        decode of 20 ms counts as much as a chunk of 2 s, and a step during which another program
        ran, or the clock was low, no more than one that was a little off. A token computed alone
        is taken to cost what it costs in a longer run as far as the steps say nothing else: where
        nobody decoded beside others, the cost of one more could not be told from the base.

        Raises
        ------
        ConfigError
            If there are too few steps.

        Notes
        -----
        Steps of one short time know one speed of the machine. Where that changes by the minute,
        record longer than that.
        """
        rows = [row for row in rows if row.seconds > 0]
        if len(rows) < _LEAST_ROWS:
            raise ConfigError(
                f"{len(rows)} steps are too few to fit a timing to; {_LEAST_ROWS} at least"
            )
        rows = rows[:: -(-len(rows) // _MOST_ROWS)]
        lines = [(1.0, row.decoded, row.read, row.context, row.pairs) for row in rows]
        seconds = [row.seconds for row in rows]
        tied = [(1.0, line[1] + line[2], line[3], line[4]) for line in lines]
        _, token_s, _, _ = _least_absolute(tied, seconds)
        ties = [(0.0, _TIE / token_s, -_TIE / token_s, 0.0, 0.0)] if token_s else []
        return cls(*_least_absolute(lines, seconds, ties))

    def of(self, row: StepRow) -> float:
        """Return how long a recorded step should have taken."""
        return self.seconds(row.decoded, row.read, row.context, row.pairs)


def read_timing(path: Path) -> StepTiming:
    """Read a timing: fitted to a recording, or a JSON object of `StepTiming`'s numbers.

    Raises
    ------
    ConfigError
        If it is neither.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--timing {path}: {error.strerror}") from error
    if is_recording(text):
        return StepTiming.fit(list(read_recording(path).steps.values()))
    names = [field.name for field in fields(StepTiming)]
    try:
        values = json.loads(text)
        timing = StepTiming(**{name: float(value) for name, value in values.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--timing {path}: neither a recording nor an object of {', '.join(names)}"
        ) from error
    if any(getattr(timing, name) < 0 for name in names):
        raise ConfigError(f"--timing {path}: seconds below 0")
    return timing


def _least_absolute(
    lines: Sequence[Sequence[float]],
    seconds: Sequence[float],
    ties: Sequence[Sequence[float]] = (),
) -> list[float]:
    """Find numbers whose products with the lines are the seconds: squares, weighted anew each time.

    Each of `ties` times the numbers should be 0, as strongly as a step should fit.
    """
    scaled = [[x / s for x in line] for line, s in zip(lines, seconds, strict=True)]
    weights = [1.0] * len(scaled)
    numbers: list[float] = []
    for _ in range(_ROUNDS):
        numbers = _solve(scaled, weights, ties)
        weights = []
        for line in scaled:
            share = max(sum(n * x for n, x in zip(numbers, line, strict=True)), 1e-9)
            off = max(abs(math.log(share)), _NEAR)
            weights.append(off / max(abs(share - 1), _NEAR) ** 2)
    return numbers


def _solve(
    lines: Sequence[Sequence[float]], weights: Sequence[float], ties: Sequence[Sequence[float]]
) -> list[float]:
    """Weighted least squares against 1, no number below 0; those that would be are left out."""
    size = len(lines[0])
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for line, weight in zip(lines, weights, strict=True):
        for i, x in enumerate(line):
            if x:
                x *= weight
                right[i] += x
                row = normal[i]
                for j in range(i, size):
                    row[j] += x * line[j]
    for line in ties:
        for i in range(size):
            for j in range(i, size):
                normal[i][j] += line[i] * line[j]
    active = [i for i in range(size) if normal[i][i]]
    while True:
        part = [[normal[min(i, j)][max(i, j)] for j in active] for i in active]
        solution = _gauss(part, [right[i] for i in active])
        worst = min(range(len(active)), key=lambda i: solution[i] * part[i][i] ** 0.5)
        if solution[worst] >= 0 or len(active) == 1:
            break
        del active[worst]
    numbers = [0.0] * size
    for index, value in zip(active, solution, strict=True):
        numbers[index] = max(0.0, value)
    return numbers


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive semidefinite system; what cannot be told apart is taken as 0."""
    n = len(right)
    scale = [matrix[i][i] ** 0.5 or 1.0 for i in range(n)]
    rows = [
        [matrix[i][j] / scale[i] / scale[j] for j in range(n)] + [right[i] / scale[i]]
        for i in range(n)
    ]
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-9:
            rows[column] = [float(j == column) for j in range(n)] + [0.0]
        for i in range(n):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [rows[i][n] / rows[i][i] / scale[i] for i in range(n)]
