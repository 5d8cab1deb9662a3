"""Symptoms in Kvist's own event log (``--event-log FILE``): the one target that tells of blocks.

Owns the counting. Reads the lines as they are written, without the classes behind them, so that a
log of another version is read as far as it goes.

A block that is stored again after it was evicted was evicted too early; how many other blocks were
stored in between is how much larger the cache would have had to be.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.reading import Reading
from kvist.lab.doctor.server import examine_server
from kvist.lab.doctor.slope import examine_decode
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Thresholds

_MIN_RETURNS = 20
_RETURN_SHARE = 0.2
"""Of all stored blocks, so many were stored again after an eviction before it is a symptom."""

_HOT_RETURNS = 3
_MIN_OUTPUT = 16
"""Tokens of an answer from where on it has a pace."""


@dataclass(slots=True)
class _Count:
    num_stored: int = 0
    evicted_at: dict[str, int] = field(default_factory=dict)
    returns: Counter[str] = field(default_factory=Counter)
    gaps: list[int] = field(default_factory=list)
    num_evicted: int = 0
    added: dict[str, float] = field(default_factory=dict)
    durations: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    first_token: dict[str, float] = field(default_factory=dict)
    points: list[tuple[float, float]] = field(default_factory=list)


def read_events(
    lines: Iterable[str], thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> tuple[list[Finding], Reading, int]:
    """Return what an event log tells, by expected gain; its counts; and how many lines were none.

    One pass.
    """
    reading, count, bad = Reading(engine="kvist"), _Count(), 0
    for line in lines:
        try:
            event = json.loads(line)
            _take(event, reading, count)
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += bool(line.strip())
    reading.stored_blocks = count.num_stored
    reading.evicted_blocks = count.num_evicted
    if count.durations:
        reading.latency_s = sum(count.durations) / len(count.durations)
        reading.num_latencies = len(count.durations)
    if count.lengths:
        count.lengths.sort()
        reading.need_tokens = count.lengths[int(0.99 * (len(count.lengths) - 1))]
        reading.num_sized = len(count.lengths)
    span = max(count.times) - min(count.times) if count.times else 0.0
    reading.requests_per_s = reading.finished / span if span > 0 else None
    if count.waiting:
        # The usual step: a moment in which somebody waits is none.
        reading.waiting = median(count.waiting)
        reading.running = median(count.running)
    # First, so that of two findings of one symptom the one that counted blocks is kept.
    found = [
        *_returns(count, reading),
        *examine_server(reading, thresholds),
        *examine_decode(count.points),
    ]
    return by_gain(found), reading, bad


def _take(event: dict[str, Any], r: Reading, c: _Count) -> None:
    kind = event["event"]
    c.times.append(float(event["t"]))
    if kind == "BlockStored":
        key = event["key"]
        if key in c.evicted_at:
            c.returns[key] += 1
            c.gaps.append(c.num_stored - c.evicted_at.pop(key))
        c.num_stored += 1
    elif kind == "BlockEvicted":
        c.num_evicted += 1
        c.evicted_at[event["key"]] = c.num_stored
    elif kind == "RequestAdded":
        c.added[event["request_id"]] = float(event["t"])
    elif kind == "RequestScheduled" and not event["resumed"]:
        r.queried_tokens += event["num_queried_tokens"]
        r.hit_tokens += event["num_cached_tokens"]
    elif kind == "RequestPreempted":
        r.preemptions += 1
        r.recomputed_tokens += event["num_computed_tokens"]
        c.first_token[event["request_id"]] = math.nan  # its pace is not that of decoding
    elif kind == "StepDone":
        c.waiting.append(event["num_waiting"])
        c.running.append(event["num_sequences"])
        for name in event["sampled"]:
            c.first_token.setdefault(name, float(event["t"]))
    elif kind == "RequestFinished":
        r.finished += 1
        r.ended += 1
        r.cut += event["reason"] == "length"
        c.lengths.append(event["num_prompt_tokens"] + event["num_output_tokens"])
        if (start := c.added.pop(event["request_id"], None)) is not None:
            c.durations.append(float(event["t"]) - start)
        _pace(event, c)


def _pace(event: dict[str, Any], c: _Count) -> None:
    """Note the context and the milliseconds a token of a request that is done."""
    start = c.first_token.pop(event["request_id"], math.nan)
    tokens = event["num_output_tokens"]
    if tokens >= _MIN_OUTPUT and not math.isnan(start):
        spent_ms = 1e3 * (float(event["t"]) - start)
        c.points.append((event["num_prompt_tokens"] + tokens / 2, spent_ms / (tokens - 1)))


def _returns(c: _Count, r: Reading) -> list[Finding]:
    returned, stored = sum(c.returns.values()), int(r.stored_blocks)
    if returned < max(_MIN_RETURNS, _RETURN_SHARE * stored):
        return []
    hot = {key: n for key, n in c.returns.items() if n >= _HOT_RETURNS}
    more = sorted(c.gaps)[int(0.9 * (len(c.gaps) - 1))]
    seen = (
        f"{returned:,} of {stored:,} stored blocks had been there before and were evicted in"
        " between"
    )
    resident = stored - c.num_evicted
    if hot and sum(hot.values()) > returned / 2 and len(hot) <= resident / 2:
        return [
            Finding(
                SYMPTOMS["hot-prefixes-evicted"],
                f"{seen}; {len(hot):,} of them came back {_HOT_RETURNS} times or more, and about"
                f" {resident:,} blocks stay at a time",
                "what is used once pushes out what is used again and again",
                "--protected-share 0.25, or a lower tier (--tier host:4GiB)",
            )
        ]
    return [
        Finding(
            SYMPTOMS["cache-too-small"],
            seen,
            "prefixes leave before they come again",
            f"room for about {more:,} blocks more would have kept 90 % of them: more"
            " --kv-cache-memory-bytes, or --tier host:4GiB",
        )
    ]
