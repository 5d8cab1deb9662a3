"""Where options come from, and how text becomes a value.

Owns the order of the sources, the file's form and the conversions; which options there are is
`kvist.config`'s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.sizes import parse_size

_NOT_FROM_ENVIRONMENT = ("host", "port")
"""Kubernetes sets KVIST_PORT=tcp://… beside a service of that name."""


def merge(
    known: Container[str],
    others: Container[str],
    options: Mapping[str, Any],
    config_file: Path | None,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Merge sources: `options` that are not ``None``, then environment, then TOML file.

    Parameters
    ----------
    known : container of str
        Names of the options.
    others : container of str
        Names that may stand in the file too, for somebody else.

    Raises
    ------
    ConfigError
        If the file cannot be read.
    """
    merged: dict[str, Any] = {}
    if config_file is not None:
        table = _read_toml(config_file)
        # They share the file; what neither knows is refused by both.
        merged.update({k: v for k, v in table.items() if k in known or k not in others})
    for variable, value in environ.items():
        name = variable.removeprefix("KVIST_").lower()
        if variable != "KVIST_" + name.upper() or name in _NOT_FROM_ENVIRONMENT:
            continue
        if name in known:
            merged[name] = value
    merged.update({k: v for k, v in options.items() if v is not None})
    return merged


def require(config: object, ok: bool, option: str, allowed: str) -> None:
    """Raise `ConfigError` unless `ok`, naming the flag, its value and what is allowed."""
    if not ok:
        flag = "--" + option.replace("_", "-")
        raise ConfigError(f"{flag}={getattr(config, option)!r} must be {allowed}")


def coerce(name: str, value: Any, annotation: Any, enums: Mapping[str, type[StrEnum]]) -> Any:
    """Turn text from the environment, a file or a flag into the type of the option.

    Raises
    ------
    ConfigError
        If it is none.
    """
    kind = str(annotation).split(" | ")[0]
    if kind.startswith("tuple[str"):
        return _texts(name, value)
    try:
        if (isinstance(value, float) and kind == "int") or isinstance(value, (list, dict)):
            raise TypeError(value)
        if name.endswith("_bytes"):
            return parse_size(value, name)
        if kind == "bool":
            return _parse_bool(value)
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
        if kind in enums:
            return enums[kind](value)
        return str(value)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if kind in enums:
            raise ConfigError(f"{name}={value!r} must be {' or '.join(enums[kind])}") from error
        raise ConfigError(f"{name}={value!r} is not of type {kind}") from error


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Read several values: a list, or one text with spaces between them."""
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(f"{name}={value!r} is not a list of texts")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"--config {path} is not TOML: {error}") from error
    return {name.replace("-", "_"): value for name, value in table.items()}


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)
