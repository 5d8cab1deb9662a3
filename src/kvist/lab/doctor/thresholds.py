"""From where on a number is a symptom, and how people set it.

Owns the two levels of each key figure and the single thresholds beside them. Knows no server.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError


class Level(StrEnum):
    """How a number stands against its limits."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "–"
    """Not there, or it says nothing here."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Two levels; which side is the good one is told by their order."""

    warning: float
    bad: float

    def level(self, value: float | None) -> Level:
        """Grade a number."""
        if value is None:
            return Level.UNKNOWN
        sign = 1 if self.bad > self.warning else -1
        if sign * value >= sign * self.bad:
            return Level.BAD
        return Level.WARNING if sign * value >= sign * self.warning else Level.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """All of them. The first five are the key figures.

    Attributes
    ----------
    mean_latency_s, requests_per_s, kv_pool_use, hit_rate, preemptions_per_request : Limit
        `hit_rate` counts only where prompts share, `requests_per_s` only where requests wait: a
        server that nobody asks for more has no low throughput.
    answers_cut : float
        Share of answers that end at their length limit, where requests reach the context's end.
    max_model_len_over_need : float
        Context length as a multiple of the 99th percentile of prompt and answer.
    min_requests, min_queried_tokens : int
        Below them a share says nothing.
    min_preemptions : int
    min_shared : float
        Share of prompt words that others have before them, from where on prompts share.
    """

    mean_latency_s: Limit = Limit(2.0, 5.0)
    requests_per_s: Limit = Limit(100.0, 50.0)
    kv_pool_use: Limit = Limit(0.8, 0.9)
    hit_rate: Limit = Limit(0.7, 0.5)
    preemptions_per_request: Limit = Limit(0.1, 0.5)
    answers_cut: float = 0.5
    max_model_len_over_need: float = 4.0
    min_requests: int = 20
    min_queried_tokens: int = 5_000
    min_preemptions: int = 5
    min_shared: float = 0.05

    def to_dict(self) -> dict[str, Any]:
        """Return them as they are written: pairs for the key figures."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: [v.warning, v.bad] if isinstance(v, Limit) else v for k, v in values.items()}


DEFAULT_THRESHOLDS = Thresholds()


def read_thresholds(file: Path | None = None, given: Iterable[str] = ()) -> Thresholds:
    """Read thresholds: `given` (``name=warning,bad``) over a TOML file over the defaults.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a name or value is none.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values.update(tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is no TOML: {error}") from error
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--limit {text!r}: write NAME=WARNING,BAD, as mean_latency_s=2,5")
        values[name.strip()] = [part.strip() for part in value.split(",")]
    return _merge(values)


def _merge(values: Mapping[str, Any]) -> Thresholds:
    known = {field.name: getattr(DEFAULT_THRESHOLDS, field.name) for field in fields(Thresholds)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{name!r} is no threshold; there are {', '.join(known)}")
        default = known[name]
        parts = value if isinstance(value, list) else [value]
        numbers = [_number(name, part) for part in parts]
        wanted = 2 if isinstance(default, Limit) else 1
        if len(numbers) != wanted:
            example = "two numbers, warning and bad" if wanted == 2 else "one number"
            raise ConfigError(f"{name}={value}: {example} are wanted")
        if isinstance(default, Limit):
            changes[name] = _limit(name, default, *numbers)
        else:
            changes[name] = type(default)(numbers[0])
    return replace(DEFAULT_THRESHOLDS, **changes)


def _limit(name: str, default: Limit, warning: float, bad: float) -> Limit:
    rises = default.bad > default.warning
    if warning == bad or (bad > warning) != rises:
        order = "above" if rises else "below"
        raise ConfigError(f"{name}={warning:g},{bad:g}: bad must be {order} warning")
    return Limit(warning, bad)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str) and value.endswith("%"):
            number = float(value[:-1]) / 100
        elif isinstance(value, bool):
            raise TypeError(value)
        else:
            number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r} is no number") from error
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{name}={value!r} must be a number from 0 on")
    return number
