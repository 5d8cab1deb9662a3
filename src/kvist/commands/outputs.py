"""Where the result of a benchmark goes: the terminal, JSON, Markdown, a picture.

Owns the three options that all benchmarks share. Imports no torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from typer.core import TyperCommand

from kvist.commands.terminal import err, out, plain_errors
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.lab.bench.result import Bench, BenchResult

_STDOUT = "-"

Report = Callable[["Bench"], None]
"""Runs a benchmark and sends its result where the command line says."""

_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "as_json": Annotated[
            str | None,
            typer.Option(
                "--json", metavar="[FILE.json]", help="Schema kvist.bench.v1; no file: printed."
            ),
        ],
        "markdown": Annotated[
            Path | None, typer.Option("--markdown", help="Write a Markdown section.")
        ],
        "png": Annotated[Path | None, typer.Option("--png", help="Draw it; needs matplotlib.")],
    }
)


def bench_command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], None]:
    """Add a benchmark to `app`: with the options of its outputs, which it gets as `report`."""

    def add(command: Callable[..., None]) -> None:
        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != "report"] + [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
            for option, annotation in _OPTIONS.items()
        ]

        def wrapped(
            as_json: str | None, markdown: Path | None, png: Path | None, **given: Any
        ) -> None:
            with plain_errors():
                _check(as_json, markdown, png)
                command(**given, report=lambda bench: _run(bench, as_json, markdown, png))

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, cls=_BenchCommand)(wrapped)

    return add


class _BenchCommand(TyperCommand):
    """A command whose ``--json`` may stand alone: what follows is its file only if it says so."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        return super().parse_args(ctx, list(_with_file(args)))


def _with_file(args: Sequence[str]) -> Sequence[str]:
    """Give a bare ``--json`` its value: standard output."""
    return [
        f"--json={_STDOUT}"
        if arg == "--json" and not (following.endswith(".json") or following == _STDOUT)
        else arg
        for arg, following in zip(args, [*args[1:], ""], strict=True)
    ]


def _check(as_json: str | None, markdown: Path | None, png: Path | None) -> None:
    """Raise `ConfigError` for an output that cannot be written: before anything is measured."""
    files = [Path(as_json) if as_json not in (None, _STDOUT) else None, markdown, png]
    for path in filter(None, files):
        if path.is_dir() or not _parent(path).is_dir():
            raise ConfigError(f"{path} cannot be written: its folder is not there, or it is one")
    if png is not None:
        from kvist.lab.bench.plots import check_plots

        check_plots()


def _run(bench: Bench, as_json: str | None, markdown: Path | None, png: Path | None) -> None:
    """Run a benchmark under a progress bar and send its result where it is wanted.

    Ctrl-C ends the measurement, not the report: what was measured comes out, and says so.
    """
    from kvist.lab.bench.result import run_bench
    from kvist.lab.report import environment

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        result = run_bench(
            bench,
            lambda share, what: bar.update(task, completed=share, description=what),
            environment,
        )
    _write(result, as_json, markdown, png)
    if not result.is_complete:
        raise typer.Exit(130)


def _write(
    result: BenchResult, as_json: str | None, markdown: Path | None, png: Path | None
) -> None:
    from kvist.lab.bench.view import show, to_markdown

    if as_json == _STDOUT:
        out.print_json(json.dumps(result.to_dict()))
    else:
        show(result, out)
    if as_json not in (None, _STDOUT):
        Path(as_json).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(to_markdown(result), encoding="utf-8")
    if png is not None:
        from kvist.lab.bench.plots import write_png

        write_png(result, png)


def _parent(path: Path) -> Path:
    return path.parent if str(path.parent) else Path()
