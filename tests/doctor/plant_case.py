"""What a planted case is made of, and words to fill it with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_WORDS = [
    "ledger",
    "harbour",
    "meadow",
    "invoice",
    "turbine",
    "lantern",
    "orchard",
    "velocity",
    "ceramic",
    "glacier",
    "pencil",
    "summit",
    "quarrel",
    "cabin",
    "thunder",
    "walnut",
    "mirror",
    "courier",
    "basil",
    "granite",
    "ferry",
    "violin",
    "copper",
    "anchor",
    "plaster",
    "engine",
    "garden",
    "mountain",
    "window",
    "contract",
    "shipment",
    "river",
    "teacher",
    "bridge",
    "doctor",
    "station",
    "cotton",
    "market",
    "silver",
    "valley",
    "winter",
    "carpet",
    "bottle",
    "hammer",
    "ticket",
    "season",
    "letter",
    "kitchen",
    "planet",
    "corner",
]
_VERBS = [
    "carries",
    "follows",
    "explains",
    "rejects",
    "measures",
    "returns",
    "replaces",
    "describes",
    "prevents",
]


@dataclass(frozen=True)
class Case:
    """A target of the doctor, what must be found first in it (``None``: nothing), and why."""

    name: str
    first: str | None
    how: str
    files: dict[str, str]
    options: tuple[str, ...] = ()


def prose(rng: random.Random, num_words: int) -> str:
    """Return sentences that mean nothing and share nothing with others, of about so many words."""
    sentences: list[str] = []
    count = 0
    while count < num_words:
        subject, thing, place, mark = rng.sample(_WORDS, 4)
        sentences.append(
            f"The {subject} {rng.choice(_VERBS)} {rng.choice(('no', 'every', 'a second'))}"
            f" {thing} near the {place}, as the {mark} of {rng.randrange(1000, 9999)} shows."
        )
        count += 15
    return " ".join(sentences)


def histogram(name: str, labels: str, mean: float, count: int, edges: list[float]) -> list[str]:
    """Return lines of a Prometheus histogram, exponential around the mean."""
    lines = [f"# TYPE {name} histogram"]
    for edge in edges:
        share = 1 - 2.718281828 ** (-edge / mean) if mean else 1.0
        lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {float(int(count * share))}')
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {float(count)}')
    lines += [f"{name}_count{{{labels}}} {float(count)}", f"{name}_sum{{{labels}}} {mean * count}"]
    return lines


def process_lines() -> list[str]:
    """Return what every Python server says of itself beside."""
    return [
        "# TYPE python_gc_objects_collected_total counter",
        'python_gc_objects_collected_total{generation="0"} 9351.0',
        'python_info{implementation="CPython",major="3",minor="12",version="3.12.3"} 1.0',
        "# TYPE process_resident_memory_bytes gauge",
        "process_resident_memory_bytes 9.81467136e+08",
        "process_start_time_seconds 1.76371220431e+09",
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1894.0',
        'http_requests_total{handler="/metrics",method="GET",status="2xx"} 512.0',
    ]


def labelled(pairs: dict[str, Any]) -> str:
    """Return labels as Prometheus writes them."""
    return ",".join(f'{key}="{value}"' for key, value in pairs.items())
