"""Results of benchmarks on a page, whichever benchmark wrote them.

Owns the reading of schema ``kvist.bench.v1`` as far as a page needs it: tables of cells that are
texts, numbers, or spreads of several measurements. Knows no benchmark by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.pages.page import Page

SCHEMA = "kvist.bench.v1"


def read_bench(path: Path) -> Mapping[str, Any]:
    """Read a result that ``kvist bench … --json`` wrote.

    Raises
    ------
    ConfigError
        If it cannot be read, or is something else.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{path} is no result of kvist bench: schema {schema!r}, not {SCHEMA}")
    if not isinstance(result.get("tables"), dict):
        raise ConfigError(f"{path} has no tables; was it cut off?")
    found: Mapping[str, Any] = result
    return found


def add_bench(page: Page, result: Mapping[str, Any]) -> None:
    """Add a section about one result.

    Raises
    ------
    ConfigError
        If a table in it is none.
    """
    name = str(result.get("bench", "?"))
    page.heading(f"Benchmark: {name}")
    if result.get("question"):
        page.text(str(result["question"]), "lead")
    if result.get("complete") is False:
        page.text("It was stopped: this is what it had measured by then.", "warning")
    try:
        for table in result["tables"].values():
            _add_table(page, table)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"the result of {name} has a table that is none: {error!r}") from error
    facts = result.get("facts")
    for fact in facts if isinstance(facts, list) else ():
        page.text(str(fact))
    for title in ("workload", "environment"):
        page.text(_line(title, result.get(title)), "faint")


def _add_table(page: Page, table: Mapping[str, Any]) -> None:
    columns: Sequence[Mapping[str, Any]] = table["columns"]
    rows: Sequence[Mapping[str, Any]] = table["rows"]
    names = [column["name"] for column in columns]
    scales = [float(column.get("scale", 1)) for column in columns]
    middles = [[_middle(row.get(name)) for name in names] for row in rows]
    # Bars compare what stands in one column; a column of names, or of one value, has none.
    most = [
        max((m for m in column if m is not None), default=0.0)
        for column in zip(*middles, strict=True)
    ]
    drawn = [
        i > 0 and top > 0 and len({row[i] for row in middles}) > 1 for i, top in enumerate(most)
    ]
    page.table(
        str(table.get("title", "")),
        # A name ends with the unit of the JSON, a title with that of the scaled number.
        [str(column["title"] if "scale" in column else column["name"]) for column in columns],
        [
            [_text(row.get(n), scale) for n, scale in zip(names, scales, strict=True)]
            for row in rows
        ],
        [
            [
                value / most[i] if drawn[i] and value is not None and value >= 0 else None
                for i, value in enumerate(row)
            ]
            for row in middles
        ],
    )


def _middle(cell: Any) -> float | None:
    if isinstance(cell, dict):
        cell = cell.get("median")
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return None
    return float(cell)


def _text(cell: Any, scale: float) -> str | tuple[str, str]:
    if isinstance(cell, dict):
        low, middle, high = (_number(cell[name], scale) for name in ("min", "median", "max"))
        return middle, f"{low} – {high}, {cell['repeats']} times" if cell["repeats"] > 1 else ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if cell is None:
        return "–"
    return _number(cell, scale) if isinstance(cell, (int, float)) else str(cell)


def _number(value: float, scale: float) -> str:
    value *= scale
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _line(title: str, values: Any) -> str:
    if not isinstance(values, dict):
        return ""
    parts = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        if value is not None:
            parts.append(f"{name}: {value}")
    return f"{title} — " + "; ".join(parts)
