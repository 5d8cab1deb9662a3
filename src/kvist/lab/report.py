"""Where a number comes from: machine, versions, command. And one way to print tables.

Imports no torch; says its version only where something else has imported it.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    """Return what a reader needs to repeat a measurement."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "versions": {
            name: version
            for name in ("kvist", "torch", "transformers")
            if (version := _version(name)) is not None
        },
    }


def describe_run() -> str:
    """Return when, with what command and by which version, in one line."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{now} · kvist {_version('kvist') or 'not installed'} · {environment()['command']}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console | None = None,
) -> None:
    """Print a table; the first column is text, the others numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)
