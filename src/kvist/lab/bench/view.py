"""A result as people read it: cells, Markdown, and the console.

Owns the rounding. Knows no benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvist.lab.bench.result import BenchResult, Cell, Column, Spread, Table
from kvist.lab.report import print_table
from kvist.sizes import format_size

_CONSOLE_COLUMNS = 6
"""Beside the first one: more are printed as a table of their own."""

_PARTIAL = "Stopped before the end: some rows are missing, or rest on fewer repeats."


def cell_text(cell: Cell, column: Column) -> str:
    """Return a cell in the unit of its column's title: the median, then least and most."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Spread):
        text = _number(cell.median, column)
        if cell.repeats > 1:
            text += f" ({_number(cell.least, column)}–{_number(cell.most, column)})"
        return text
    return _number(cell, column)


def to_markdown(result: BenchResult) -> str:
    """Return the whole result as a section of a page."""
    lines = [f"## kvist bench {result.bench}", "", result.question, ""]
    if not result.is_complete:
        lines += [f"**{_PARTIAL}**", ""]
    for table in result.tables:
        lines += [f"**{table.title}**", "", *_markdown(table), ""]
    lines += [f"- {fact}" for fact in result.facts]
    lines += ["", describe_environment(result.environment), ""]
    asked = ", ".join(f"{name}={value}" for name, value in result.workload.items())
    lines += [f"Workload: {asked}. Cells: median (least–most).", ""]
    return "\n".join(lines)


def show(result: BenchResult, console: Console) -> None:
    """Print the result for somebody at a terminal: medians, since spreads make tables too wide."""
    for table in result.tables:
        first, *others = table.columns
        for start in range(0, len(others), _CONSOLE_COLUMNS):
            columns = [first, *others[start : start + _CONSOLE_COLUMNS]]
            rows = [[cell_text(_middle(row.get(c.name)), c) for c in columns] for row in table.rows]
            titles = [column.title for column in columns]
            print_table(f"{result.bench}: {table.title}", titles, rows, console)
    console.print("Medians; --json and --markdown have the spread.", style="dim", highlight=False)
    for fact in result.facts:
        console.print(fact, highlight=False, markup=False, soft_wrap=True)
    if not result.is_complete:
        console.print(_PARTIAL, style="bold", highlight=False)


def describe_environment(environment: Mapping[str, Any]) -> str:
    """Return machine, versions and command in a sentence or two."""
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items())
    memory = environment.get("memory_bytes")
    return (
        f"`{environment['command']}` on {environment['cpu']}, {environment['cores']} cores"
        f"{f', {format_size(memory)}' if memory else ''}; {versions},"
        f" Python {environment['python']}."
    )


def _middle(cell: Cell) -> Cell:
    return cell.median if isinstance(cell, Spread) else cell


def _markdown(table: Table) -> list[str]:
    head = "| " + " | ".join(column.title for column in table.columns) + " |"
    rule = "| --- |" + " ---: |" * (len(table.columns) - 1)
    rows = [
        "| " + " | ".join(cell_text(row.get(c.name), c) for c in table.columns) + " |"
        for row in table.rows
    ]
    return [head, rule, *rows]


def _number(value: float, column: Column) -> str:
    scaled = value * column.scale
    if isinstance(value, int) and column.scale == 1:
        return f"{value:,}"
    return f"{scaled:,.{column.digits}f}"
