"""What a long job says while it runs, and how a person sees it.

Owns the callback type and its drawing on a terminal. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all). From one thread, a few times."""


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """Draw a bar with the running step and the time spent, on stderr, gone when done.

    Appears with the first report, so a job that finds its work done draws nothing. Where stderr is
    no terminal, each step is one plain line instead, so that a log says what took the time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None)
    started = False

    def report(what: str, done: int, total: int) -> None:
        nonlocal started
        if not console.is_terminal:
            console.print(f"kvist: {what}", highlight=False, markup=False)
            return
        if not started:
            bar.start()
            started = True
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield report
    finally:
        if started:
            bar.stop()
