"""What every command shares: the two consoles, and errors as one clear line.

Exit codes: 0 fine, 1 failed or found something, 2 misuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from kvist.errors import ConfigError, KvistError, ModelError

out = Console()
err = Console(stderr=True)

DEFAULT_MODEL = "smollm2-135m-instruct"
MODEL_HELP = "Registry name, local directory, .gguf file, or hub id."


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn our own errors into one clear line; a traceback is for bugs."""
    try:
        yield
    except KvistError as error:
        err.print(f"[bold red]kvist:[/] {type(error).__name__}: ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        # A model that nobody knows, or that cannot be served, is misuse as an option is.
        raise typer.Exit(2 if isinstance(error, (ConfigError, ModelError)) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("kvist", ""):
            raise
        err.print(
            f"[bold red]kvist:[/] this command needs {error.name}, which is not installed;"
            " pip install 'kvist\\[engine,server]'"
        )
        raise typer.Exit(1) from None


@contextmanager
def bad_input() -> Iterator[None]:
    """As `plain_errors`, for commands whose exit code 1 means that something was found."""
    with plain_errors():
        try:
            yield
        except KvistError as error:
            raise ConfigError(str(error)) from error
