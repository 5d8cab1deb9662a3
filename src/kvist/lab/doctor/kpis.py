"""The key figures of a server against two levels each: one small table before the findings.

Owns which figures there are and when one of them says nothing. Reads a `Reading`; finds no causes.

A figure is graded only where it can be wrong: throughput where requests wait, a hit rate where
prompts share. Pool use is the share of the KV pool that running requests hold, never of the GPU's
memory, which a server takes when it starts and never gives back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvist.lab.doctor.reading import Reading
from kvist.lab.doctor.thresholds import Level, Limit, Thresholds


@dataclass(frozen=True, slots=True)
class Kpi:
    """One figure.

    Attributes
    ----------
    name : str
        As in `Thresholds`.
    title : str
    value : float or None
    limit : Limit
    level : Level
        ``UNKNOWN`` where it is not there or says nothing.
    unit : str
        ``"s"``, ``"/s"``, ``"%"`` or ``""``.
    remark : str
        Why it is not graded, or what it was counted over.
    """

    name: str
    title: str
    value: float | None
    limit: Limit
    level: Level
    unit: str
    remark: str = ""

    def text(self, value: float | None) -> str:
        """Write a value of this figure."""
        if value is None:
            return "–"
        if self.unit == "%":
            return f"{100 * value:.3g} %"
        return f"{value:.3g} {self.unit}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "name": self.name,
            "value": self.value,
            "warning": self.limit.warning,
            "bad": self.limit.bad,
            "level": None if self.level is Level.UNKNOWN else self.level.value,
            "remark": self.remark,
        }


def key_figures(r: Reading, t: Thresholds) -> list[Kpi]:
    """Return all five, graded."""
    return [
        _figure(
            "mean_latency_s",
            "mean latency",
            r.latency_s,
            t.mean_latency_s,
            "s",
            enough=r.num_latencies >= t.min_requests,
            otherwise=f"of {r.num_latencies:,.0f} requests: too few",
            remark=f"of {r.num_latencies:,.0f} requests",
        ),
        _figure(
            "requests_per_s",
            "requests a second",
            r.requests_per_s,
            t.requests_per_s,
            "/s",
            enough=r.waiting >= 1,
            otherwise="nothing waits: as many as are asked for",
            remark=f"{r.waiting:,.0f} wait",
        ),
        _figure(
            "kv_pool_use",
            "KV pool in use",
            r.pool_use,
            t.kv_pool_use,
            "%",
            remark="by running requests; what is only cached is free",
        ),
        _hit_rate(r, t),
        _figure(
            "preemptions_per_request",
            "preemptions a request",
            r.preemptions / max(1.0, r.finished) if r.preemptions or r.finished else None,
            t.preemptions_per_request,
            "",
            enough=r.preemptions >= t.min_preemptions or r.finished >= t.min_requests,
            otherwise="too few requests",
        ),
    ]


def shares(r: Reading, t: Thresholds) -> bool:
    """Whether a hit rate says something: enough was asked for, and prompts are known to share.

    Metrics know no prompts. Some hits, or a request log beside them, tell that there is something
    to find; hits near zero may as well mean that every prompt is new.
    """
    if r.attainable_rate is not None:
        return r.attainable_rate >= t.min_shared
    return r.hit_rate is not None and r.hit_rate >= t.min_shared


def _hit_rate(r: Reading, t: Thresholds) -> Kpi:
    enough = r.queried_tokens >= t.min_queried_tokens and shares(r, t)
    if r.queried_tokens < t.min_queried_tokens:
        otherwise = f"of {r.queried_tokens:,.0f} prompt tokens: too few"
    else:
        otherwise = "prompts share little, or cannot be told to: a request log can"
    value, remark = r.hit_rate, f"of {r.queried_tokens:,.0f} prompt tokens"
    if r.attainable_rate is not None:
        remark += f"; {r.attainable_rate:.0%} could be"
    figure = _figure(
        "hit_rate",
        "prefix hit rate",
        value,
        t.hit_rate,
        "%",
        enough=enough,
        otherwise=otherwise,
        remark=remark,
    )
    if enough and r.attainable_rate is not None and value is not None:
        # What prompts do not share nobody can find: the limits are shares of the attainable.
        level = t.hit_rate.level(value / r.attainable_rate)
        return Kpi(figure.name, figure.title, value, figure.limit, level, "%", remark)
    return figure


def _figure(
    name: str,
    title: str,
    value: float | None,
    limit: Limit,
    unit: str,
    *,
    enough: bool = True,
    otherwise: str = "",
    remark: str = "",
) -> Kpi:
    if value is None:
        return Kpi(name, title, None, limit, Level.UNKNOWN, unit, "not there")
    if not enough:
        return Kpi(name, title, value, limit, Level.UNKNOWN, unit, otherwise)
    return Kpi(name, title, value, limit, limit.level(value), unit, remark)
