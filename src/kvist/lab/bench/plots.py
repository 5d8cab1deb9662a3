"""The charts of a result as one picture. Needs matplotlib, the extra ``plots``.

Owns nothing but how charts look: medians as lines or bars, least and most as a band or whiskers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.bench.result import BenchResult, Cell, Chart, Column, Spread, Table

_COLORS = ("#2f6f9f", "#d1702b", "#4d8f4a", "#8a5a9e", "#b23a48", "#6b6b6b")


def check_plots() -> None:
    """Raise `ConfigError` if no picture can be drawn: better before a measurement than after."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "--png needs matplotlib, which is not installed; pip install 'kvist[plots]'"
        ) from None


def write_png(result: BenchResult, path: Path) -> None:
    """Draw every chart of a result, side by side, into one PNG.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or there is nothing to draw.
    """
    check_plots()
    from matplotlib.figure import Figure

    charts = [(table, chart) for table in result.tables for chart in table.charts if table.rows]
    if not charts:
        raise ConfigError(f"--png: {result.bench} was stopped before there was anything to draw")
    figure = Figure(figsize=(6.4 * len(charts), 4.4), layout="constrained")
    axes = figure.subplots(1, len(charts), squeeze=False)[0]
    for axis, (table, chart) in zip(axes, charts, strict=True):
        _bars(axis, table, chart) if chart.bars else _lines(axis, table, chart)
        axis.set_title(chart.title, fontsize=11)
        axis.set_ylabel(chart.y_title)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if len(chart.y) > 1:
            # Below the axis, where it hides nothing.
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": len(chart.y)}
            axis.legend(frameon=False, fontsize=9, **place)
    where = f"{result.environment['cpu']}, {result.environment['cores']} cores"
    stopped = "" if result.is_complete else " (stopped before the end)"
    figure.suptitle(f"kvist bench {result.bench}{stopped}   {where}", fontsize=9, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _lines(axis: Any, table: Table, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    columns = {column.name: column for column in table.columns}
    ticks: list[float] = []
    for color, name in zip(_COLORS, chart.y, strict=False):
        points = [
            (float(str(row[chart.x])), _ends(row.get(name), columns[name]))
            for row in table.rows
            if row.get(name) is not None
        ]
        xs = [x for x, _ in points]
        ticks = ticks or xs
        axis.plot(
            xs, [m for _, (m, _, _) in points], "o-", color=color, label=_label(columns[name])
        )
        low, high = [low for _, (_, low, _) in points], [high for _, (_, _, high) in points]
        axis.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set_xlabel(columns[chart.x].title)
    if chart.log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    else:
        # Turns and tokens are whole, and the highest point is no part of the frame.
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])


def _bars(axis: Any, table: Table, chart: Chart) -> None:
    columns = {column.name: column for column in table.columns}
    width = 0.8 / len(chart.y)
    for index, (color, name) in enumerate(zip(_COLORS, chart.y, strict=False)):
        shown = [
            (place, _ends(row.get(name), columns[name]))
            for place, row in enumerate(table.rows)
            if row.get(name) is not None
        ]
        offset = (index - (len(chart.y) - 1) / 2) * width
        heights = [middle for _, (middle, _, _) in shown]
        down = [middle - low for _, (middle, low, _) in shown]
        up = [high - middle for _, (middle, _, high) in shown]
        bars = axis.bar(
            [place + offset for place, _ in shown],
            heights,
            width * 0.92,
            yerr=(down, up) if any(down) or any(up) else None,
            error_kw={"elinewidth": 1, "ecolor": "#333333"},
            color=color,
            label=_label(columns[name]),
        )
        digits = columns[name].digits
        axis.bar_label(bars, [f"{height:,.{digits}f}" for height in heights], padding=3, fontsize=8)
    axis.set_xlabel(columns[chart.x].title)
    names = [str(row[chart.x]) for row in table.rows]
    long = sum(map(len, names)) > 50
    axis.set_xticks(
        range(len(names)), names, rotation=20 if long else 0, ha="right" if long else "center"
    )
    if chart.log:
        axis.set_yscale("log")
    axis.margins(y=0.12)
    if not chart.log and axis.get_ylim()[0] < 0:
        # All bars are 0: around that a frame has no size of its own.
        axis.set_ylim(0, 100 if chart.y_title == "%" else 1)


def _label(column: Column) -> str:
    """Without the unit, which stands at the axis."""
    return column.title.rsplit(",", 1)[0]


def _ends(cell: Cell, column: Column) -> tuple[float, float, float]:
    if isinstance(cell, Spread):
        values = (cell.median, cell.least, cell.most)
    else:
        values = (float(str(cell)),) * 3
    median, least, most = (value * column.scale for value in values)
    return median, least, most
