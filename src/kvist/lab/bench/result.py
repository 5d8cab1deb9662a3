"""What a benchmark has to say, in one form for all of them: tables of spreads, and where from.

Owns the schema ``kvist.bench.v1`` and how values that were measured several times become one cell.
Knows neither engines nor how a table is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

SCHEMA = "kvist.bench.v1"


@dataclass(frozen=True, slots=True)
class Spread:
    """A value that was measured several times.

    Attributes
    ----------
    median, least, most : float
    repeats : int
    """

    median: float
    least: float
    most: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def to_dict(self) -> dict[str, float | int]:
        """Return it as the schema has it."""
        return {
            "median": self.median,
            "min": self.least,
            "max": self.most,
            "repeats": self.repeats,
        }


Cell = str | int | float | Spread | None


@dataclass(frozen=True, slots=True)
class Column:
    """What stands in a column.

    Attributes
    ----------
    name : str
        In the JSON; ends with its unit.
    title : str
        Above the column, unit and all.
    digits : int
        Behind the point, for people.
    scale : float
        From the unit of the JSON to that of the title.
    """

    name: str
    title: str
    digits: int = 2
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """How to draw some columns of a table.

    Attributes
    ----------
    title : str
    x : str
        Name of the column along the axis.
    y : tuple of str
        A line, or a group of bars, for each.
    y_title : str
    bars : bool
    log : bool
        Both axes logarithmic for lines, the upright one for bars.
    """

    title: str
    x: str
    y: tuple[str, ...]
    y_title: str
    bars: bool = False
    log: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells by the names of the columns; a cell that is missing was not measured."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Cell], ...]
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything that one run of a benchmark found.

    Attributes
    ----------
    bench : str
    question : str
    workload : mapping
        What was asked of the machine.
    tables : tuple of Table
    facts : tuple of str
        What follows from the tables, a sentence each.
    is_complete : bool
        False when it was stopped: then there are fewer rows, or fewer repeats of some.
    environment : mapping
        From `kvist.lab.report.environment`.
    summary : mapping
        What programs look for by name, at the top of the JSON; see `Summarized`.
    """

    bench: str
    question: str
    workload: Mapping[str, Any]
    tables: tuple[Table, ...]
    facts: tuple[str, ...]
    is_complete: bool
    environment: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the result in the schema ``kvist.bench.v1``."""
        return {
            "schema": SCHEMA,
            "bench": self.bench,
            "question": self.question,
            "complete": self.is_complete,
            "workload": dict(self.workload),
            "tables": {
                table.name: {
                    "title": table.title,
                    "columns": [asdict(column) for column in table.columns],
                    "rows": [
                        {c.name: _plain(row.get(c.name)) for c in table.columns}
                        for row in table.rows
                    ],
                }
                for table in self.tables
            },
            "facts": list(self.facts),
            "environment": dict(self.environment),
            **self.summary,
        }


def _plain(cell: Cell) -> Any:
    return cell.to_dict() if isinstance(cell, Spread) else cell


@dataclass(slots=True)
class Samples:
    """What was measured so far, by row and column.

    Filled while a benchmark runs and read at any time, so that a run that is stopped keeps it.
    """

    _rows: dict[str | int | float, dict[str, list[float]]] = field(default_factory=dict)
    _exact: dict[str | int | float, dict[str, Cell]] = field(default_factory=dict)

    def note(self, row: str | int | float, column: str, value: float) -> None:
        """Add one measurement of a cell."""
        self._rows.setdefault(row, {}).setdefault(column, []).append(value)

    def put(self, row: str | int | float, column: str, value: Cell) -> None:
        """Set a cell that is known without a spread."""
        self._rows.setdefault(row, {})
        self._exact.setdefault(row, {})[column] = value

    def median(self, row: str | int | float, column: str) -> float | None:
        """Return the median of a cell so far; ``None`` if there is nothing yet."""
        values = self._rows.get(row, {}).get(column)
        return statistics.median(values) if values else None

    def least(self, row: str | int | float, column: str) -> float | None:
        """Return the least value of a cell so far: what disturbs a measurement only adds to it."""
        return min(self._rows.get(row, {}).get(column, ()), default=None)

    def ratio(self, row: str | int | float, over: str, under: str) -> float | None:
        """Return the median of one column over that of another, in one row."""
        return quotient(self.median(row, over), self.median(row, under))

    def rows(self, key: str) -> tuple[dict[str, Cell], ...]:
        """Return the rows in the order in which they began; `key` names the column of their names.

        Counts in `put` cells win over measurements of the same name.
        """
        return tuple(
            {
                key: name,
                **{column: Spread.of(values) for column, values in cells.items()},
                **self._exact.get(name, {}),
            }
            for name, cells in self._rows.items()
        )


def quotient(over: float | None, under: float | None) -> float | None:
    """Divide what is there: ``None`` where something is missing, or by nothing."""
    return None if over is None or not under else over / under


Tell = Callable[[float, str], None]
"""Told the share of the work that is done, 0 to 1, and what is being done."""


class Bench(Protocol):
    """A benchmark: measures into itself, and can be read at any time."""

    @property
    def name(self) -> str:
        """As `kvist bench` calls it."""

    @property
    def question(self) -> str:
        """What it answers."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """What it asks of the machine."""

    def measure(self, tell: Tell) -> None:
        """Measure everything, in turn."""

    def tables(self) -> tuple[Table, ...]:
        """Return what was measured so far."""

    def facts(self) -> tuple[str, ...]:
        """Return what follows from it."""


@runtime_checkable
class Summarized(Protocol):
    """A benchmark some of whose numbers are promised under names of their own."""

    def summary(self) -> Mapping[str, Any]:
        """Return them; nothing while some are missing."""


def run_bench(
    bench: Bench, tell: Tell, environment: Callable[[], Mapping[str, Any]]
) -> BenchResult:
    """Run a benchmark; Ctrl-C ends it early, and what was measured by then is the result.

    Parameters
    ----------
    environment : callable
        Asked at the end, when everything that will be imported has been.
    """
    is_complete = True
    try:
        bench.measure(tell)
    except KeyboardInterrupt:
        is_complete = False
    return BenchResult(
        bench.name,
        bench.question,
        bench.workload,
        bench.tables(),
        bench.facts(),
        is_complete,
        environment(),
        bench.summary() if isinstance(bench, Summarized) else {},
    )
