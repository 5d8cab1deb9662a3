"""The tiers' numbers as Prometheus reads them, and as JSON.

Owns names, labels and texts; the numbers are `kvist.engine.tier_counts`'s. Labels are the names of
tiers, which the operator chose, and words from fixed lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvist.engine.tier_counts import TierNumbers

_GAUGES: tuple[tuple[str, str, Callable[[TierNumbers], float]], ...] = (
    (
        "tier_capacity_bytes",
        "What it may take; 0: not ours to say.",
        lambda t: t.capacity_bytes,
    ),
    ("tier_used_bytes", "What it takes, index and journals included.", lambda t: t.used_bytes),
    ("tier_blocks", "Blocks in it.", lambda t: t.num_blocks),
    ("tier_jobs", "Loads and stores under way.", lambda t: t.num_jobs),
    (
        "tier_suspended",
        "1 while it is left alone.",
        lambda t: t.is_suspended,
    ),
    ("tier_load_bytes_per_second", "What loads are expected to run at.", lambda t: t.bytes_per_s),
    ("tier_load_latency_seconds", "What a load is expected to cost beside.", lambda t: t.latency_s),
)
_COUNTERS: tuple[tuple[str, str, Callable[[TierNumbers], float]], ...] = (
    ("tier_hits", "Blocks that were asked for and are there.", lambda t: t.hits),
    ("tier_loaded_blocks", "Blocks read into the device.", lambda t: t.loaded_blocks),
    ("tier_load_bytes", "Stored bytes of those.", lambda t: t.load_bytes),
    ("tier_load_seconds", "Seconds that reading took, of all threads.", lambda t: t.load_seconds),
    ("tier_stored_blocks", "Blocks that came to be findable in it.", lambda t: t.stored_blocks),
    ("tier_store_bytes", "Stored bytes of those.", lambda t: t.store_bytes),
    ("tier_store_seconds", "Seconds that writing took, of all threads.", lambda t: t.store_seconds),
    ("tier_suspensions", "Times it was left alone for a while.", lambda t: t.suspensions),
)
_BY: tuple[tuple[str, str, str, Callable[[TierNumbers], Mapping[str, int]]], ...] = (
    ("tier_misses", "Blocks that were asked for and cannot be had.", "reason", lambda t: t.misses),
    ("tier_failed_loads", "Blocks that did not come: misses.", "outcome", lambda t: t.failed_loads),
    ("tier_failed_stores", "Blocks not kept.", "outcome", lambda t: t.failed_stores),
)


def tier_families(tiers: Sequence[TierNumbers], model_name: str) -> Iterator[Metric]:
    """Yield every family, empty without tiers."""
    labels = ["model_name", "tier"]
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"kvist:{name}", text, labels=labels)
        for tier in tiers:
            gauge.add_metric([model_name, tier.name], float(value(tier)))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"kvist:{name}", text, labels=labels)
        for tier in tiers:
            counter.add_metric([model_name, tier.name], float(value(tier)))
        yield counter
    for name, text, label, values in _BY:
        family = CounterMetricFamily(f"kvist:{name}", text, labels=[*labels, label])
        for tier in tiers:
            for key, amount in values(tier).items():
                family.add_metric([model_name, tier.name, key], amount)
        yield family


def cached_by_source(counters: Mapping[str, int]) -> dict[str, int]:
    """Return prompt tokens that were not computed, by where they came from."""
    below = {medium: counters.get(f"cached_{medium}", 0) for medium in ("host", "disk", "remote")}
    return {"device": counters["prompt_cached"] - sum(below.values()), **below}


def describe_tier(tier: TierNumbers) -> dict[str, Any]:
    """Return one tier for programs."""
    return {
        "name": tier.name,
        "medium": tier.medium,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "blocks": tier.num_blocks,
        "bytes_by_tenant": dict(tier.by_tenant),
        "jobs": tier.num_jobs,
        "suspended": tier.is_suspended,
        "load_bytes_per_s": round(tier.bytes_per_s),
        "load_latency_s": round(tier.latency_s, 6),
        "hits": tier.hits,
        "misses": dict(tier.misses),
        "loads": {
            "blocks": tier.loaded_blocks,
            "bytes": tier.load_bytes,
            "seconds": round(tier.load_seconds, 6),
            "failed": dict(tier.failed_loads),
        },
        "stores": {
            "blocks": tier.stored_blocks,
            "bytes": tier.store_bytes,
            "seconds": round(tier.store_seconds, 6),
            "failed": dict(tier.failed_stores),
        },
        "suspensions": tier.suspensions,
    }
