"""Prometheus text to numbers, whichever engine wrote it.

Owns the reading of the exposition format and the few names that engines give the same thing. Knows
no symptoms. Never raises on a line it cannot read: a target may be cut off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_PREFIXES = {"kvist": "kvist:", "vllm": "vllm:", "llama.cpp": "llamacpp:", "sglang": "sglang:"}

_COUNTERS = ("_total", "_sum", "_count", "_bucket")

Labels = Mapping[str, str]


@dataclass(slots=True)
class Exposition:
    """Samples by metric name, without the engine's prefix.

    Attributes
    ----------
    engine : str
        ``"kvist"``, ``"vllm"``, ``"llama.cpp"``, ``"sglang"``, or ``""`` if no name tells.
    samples : dict
        Name to (labels, value) pairs.
    """

    engine: str = ""
    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def total(self, *names: str) -> float | None:
        """Sum over labels of the first name that is there."""
        for name in names:
            found = self.samples.get(name)
            if found:
                return math.fsum(value for _, value in found)
        return None

    def peak(self, *names: str) -> float | None:
        """Largest over labels of the first name that is there: what a share needs."""
        for name in names:
            found = self.samples.get(name)
            if found:
                return max(value for _, value in found)
        return None

    def since(self, earlier: Exposition) -> Exposition:
        """Return what was counted after `earlier`; gauges are those of now.

        A counter that is smaller now was started anew: it counts from zero.
        """
        changed = Exposition(self.engine)
        for name, found in self.samples.items():
            if not name.endswith(_COUNTERS):
                changed.samples[name] = found
                continue
            before = {_labels_key(labels): value for labels, value in earlier.samples.get(name, ())}
            changed.samples[name] = [
                (labels, value - past if value >= past else value)
                for labels, value in found
                for past in (before.get(_labels_key(labels), 0.0),)
            ]
        return changed

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Values of a metric by one of its labels."""
        values: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            values[key] = values.get(key, 0.0) + value
        return values

    def info(self, name: str) -> Labels:
        """Labels of an info metric, empty if it is not there."""
        found = self.samples.get(name)
        return found[0][0] if found else {}

    def mean(self, name: str) -> float | None:
        """Mean of a histogram; ``None`` if nothing was counted."""
        count = self.total(f"{name}_count")
        total = self.total(f"{name}_sum")
        return total / count if count and total is not None else None

    def quantile(self, name: str, share: float) -> float | None:
        """Upper bound of the bucket that holds a quantile; ``None`` without counts."""
        buckets = self.by_label(f"{name}_bucket", "le")
        bounds = sorted((_number(bound), count) for bound, count in buckets.items())
        if not bounds or not bounds[-1][1]:
            return None
        wanted = share * bounds[-1][1]
        return next((bound for bound, count in bounds if count >= wanted), None)


def read_exposition(text: str) -> Exposition:
    """Read what ``/metrics`` answers. Lines that are no samples are passed over."""
    exposition = Exposition()
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        number = _number(value)
        if math.isnan(number):
            continue
        for engine, prefix in _PREFIXES.items():
            if name.startswith(prefix):
                exposition.engine = exposition.engine or engine
                name = name.removeprefix(prefix)
                break
        pairs = dict(_LABEL.findall(labels or ""))
        exposition.samples.setdefault(name, []).append((pairs, number))
    return exposition


def _labels_key(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
