"""One HTML page in one file: no scripts, no fonts, no pictures from elsewhere.

Owns the frame, the style and the escaping: whatever text is given is shown, never run. Knows
nothing of what stands on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from kvist.errors import ConfigError

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #6b7075; --rule: #dfe2e5;
  --bar: #cfe3f1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e8; --paper: #16181a; --faint: #9aa0a6;
  --rule: #34383c; --bar: #1f3f55; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem;
  border-bottom: 1px solid var(--rule); padding-bottom: .2rem; } h3 { font-size: 1rem; }
p.faint, small { color: var(--faint); } p.lead { font-size: 1.05rem; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { font-weight: 600; }
td small { display: block; }
svg { width: 100%; height: auto; margin: .4rem 0; }
svg text { font-size: 12px; fill: var(--ink); }
svg .grid { stroke: var(--rule); } svg .frame { fill: none; stroke: currentColor; }
svg .edge { stroke: currentColor; stroke-width: 2; }
ol li { margin-bottom: .6rem; } .ok { color: #1a7f4b; } .warning { color: #b26a00; }
.bad { color: #c62828; font-weight: 600; } dl { margin: .2rem 0; }
dt { float: left; clear: left; width: 4rem; color: var(--faint); } dd { margin-left: 4.5rem; }
""".strip()


class Page:
    """A page that grows downwards.

    Parameters
    ----------
    title : str
    about : str
        Under the title: where and when.
    """

    def __init__(self, title: str, about: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if about:
            self._parts.append(f'<p class="faint">{escape(about)}</p>')

    def heading(self, text: str, level: int = 2) -> None:
        """Begin a section."""
        self._parts.append(f"<h{level}>{escape(text)}</h{level}>")

    def text(self, text: str, kind: str = "") -> None:
        """Add a paragraph; `kind` is ``"faint"``, ``"lead"``, ``"bad"`` …."""
        mark = f' class="{escape(kind)}"' if kind else ""
        self._parts.append(f"<p{mark}>{escape(text)}</p>")

    def points(self, items: Iterable[tuple[str, str]], ordered: bool = True) -> None:
        """Add a list of (what, more)."""
        rows = "".join(f"<li><b>{escape(what)}</b><br>{escape(more)}</li>" for what, more in items)
        if rows:
            tag = "ol" if ordered else "ul"
            self._parts.append(f"<{tag}>{rows}</{tag}>")

    def finding(self, number: int, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Add a titled list of (word, text)."""
        inside = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in rows)
        self._parts.append(f"<h3>{number}. {escape(title)}</h3><dl>{inside}</dl>")

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | tuple[str, str]]],
        bars: Sequence[Sequence[float | None]] = (),
    ) -> None:
        """Add a table.

        Parameters
        ----------
        rows : sequence of rows
            A cell is a text, or a text and something small below it.
        bars : sequence of rows, optional
            For each cell the share, 0 to 1, of a bar behind it; ``None`` for none.
        """
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        lines = []
        for number, row in enumerate(rows):
            shares = bars[number] if number < len(bars) else [None] * len(row)
            cells = (_cell(cell, share) for cell, share in zip(row, shares, strict=True))
            lines.append(f"<tr>{''.join(cells)}</tr>")
        self._parts.append(
            f'<div class="wide"><table><caption>{escape(title)}</caption><thead><tr>{head}</tr>'
            f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
        )

    def chart(self, svg: str, caption: str = "") -> None:
        """Add a chart from `kvist.lab.pages.svg`; nothing if it is empty."""
        if svg:
            small = f"<figcaption><small>{escape(caption)}</small></figcaption>" if caption else ""
            self._parts.append(f'<figure style="margin:0">{svg}{small}</figure>')

    def html(self) -> str:
        """Return the page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head><body>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page to a file.

        Raises
        ------
        ConfigError
            If that fails.
        """
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _cell(cell: str | tuple[str, str], share: float | None) -> str:
    text, small = cell if isinstance(cell, tuple) else (cell, "")
    below = f"<small>{escape(small)}</small>" if small else ""
    style = ""
    if share is not None:
        percent = f"{100 * min(1.0, max(0.0, share)):.0f}%"
        style = f' style="background:linear-gradient(90deg,var(--bar) {percent},transparent 0)"'
    return f"<td{style}>{escape(text)}{below}</td>"
