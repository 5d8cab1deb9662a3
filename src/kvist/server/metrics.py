"""The engine's numbers as Prometheus reads them, and as JSON.

Owns names, labels and texts; the numbers are the engine's (`kvist.engine.telemetry`), asked for
over the wire and kept for a moment, so that many who scrape cost the engine no more than one. Names
are vLLM's, under ``kvist:``; `docs/metrics.md` has the table. Labels are the model's name and words
from fixed lists: nothing that clients send ever becomes a label.

Threads: the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from kvist.engine.messages import Stats
from kvist.engine.telemetry import HistogramCounts
from kvist.process import proportional_bytes
from kvist.server.tier_metrics import cached_by_source, describe_tier, tier_families

FRESH_S = 0.5
"""So old may an answer be without the engine being asked again."""

PATIENCE_S = 1.0
"""That the engine gets to answer, between two steps; then the last answer serves, with its age."""

_TEXT = "text/plain; version=0.0.4; charset=utf-8"

_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of one sequence.",
    "request_time_per_output_token_seconds": "Average of that over one finished sequence.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first time a sequence runs.",
    "request_inference_time_seconds": "From then to the last token.",
    "request_prefill_time_seconds": "From then to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Prompt tokens of finished sequences.",
    "request_generation_tokens": "Generated tokens of finished sequences.",
    "iteration_tokens_total": "Tokens that went through the model in one step.",
}
_COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Tokens of those that were found."),
    "generated": ("generation_tokens", "Tokens generated."),
    "preemptions": ("num_preemptions", "Times a sequence gave its blocks up."),
    "expired": ("request_deadlines_exceeded", "Requests that ended at their deadline."),
    "steps": ("engine_steps", "Steps that were recorded."),
    "failed_steps": ("engine_steps_failed", "Steps that raised and were taken back."),
    "stored_blocks": ("kv_blocks_stored", "Blocks that became findable."),
    "evicted_blocks": ("kv_blocks_evicted", "Findable blocks that were forgotten to make room."),
    "dropped_events": ("events_dropped", "Old events that the bounded log forgot."),
}


class StatsSource(Protocol):
    """Whoever can ask the engine; `kvist.server.bridge.EngineClient` can."""

    @property
    def turned_away(self) -> Mapping[str, int]:
        """Requests that the engine never heard of, by why."""

    async def stats(self) -> Stats:
        """Ask how the engine stands."""


class LiveStats:
    """The engine's latest answer, asked for at most every `FRESH_S`.

    Parameters
    ----------
    source : StatsSource
    """

    def __init__(self, source: StatsSource) -> None:
        self._source = source
        self._asking: asyncio.Task[Stats] | None = None
        self._last: Stats | None = None
        self._answered_s = 0.0

    async def get(self) -> tuple[Stats, float]:
        """Return the stats and their age in seconds.

        Raises
        ------
        EngineDeadError
            If the engine is dead.
        """
        if self._last is None or time.monotonic() - self._answered_s > FRESH_S:
            asking = self._asking
            if asking is None:
                asking = self._asking = asyncio.create_task(self._ask())
            patience_s = PATIENCE_S if self._last is not None else None
            await asyncio.wait({asking}, timeout=patience_s)
            if asking.done():
                if self._asking is asking:
                    self._asking = None
                asking.result()
        assert self._last is not None
        return self._last, time.monotonic() - self._answered_s

    async def _ask(self) -> Stats:
        self._last = await self._source.stats()
        self._answered_s = time.monotonic()
        return self._last


class StatsCollector:
    """Stats as metric families.

    Parameters
    ----------
    stats : Stats
    age_s : float
    model_name : str
        As clients know it.
    turned_away : mapping
        Requests that the engine never heard of.
    """

    def __init__(
        self, stats: Stats, age_s: float, model_name: str, turned_away: Mapping[str, int]
    ) -> None:
        self._turned_away = turned_away
        self._stats = stats
        self._age_s = age_s
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._gauges()
        yield from self._counters()
        yield from tier_families(self._stats.tiers, self._model_name)
        for name, text in _HISTOGRAMS.items():
            yield self._histogram(name, text, self._stats.counts.histograms[name])

    def _gauges(self) -> Iterator[Metric]:
        stats, cache = self._stats, self._stats.cache
        waiting = waiting_by_reason(stats)
        gauge = self._gauge
        yield gauge("num_requests_running", "Sequences that hold blocks.", stats.num_running)
        text = "Of those that run, the ones with blocks on their way from a lower tier."
        yield gauge("num_requests_loading", text, stats.num_loading)
        total = sum(waiting.values())
        yield gauge("num_requests_waiting", "Sequences that hold none.", total)
        text = "The same by what they wait for: room, a prefix being computed, their grammar."
        yield self._by("num_requests_waiting_by_reason", text, "reason", waiting)
        yield gauge(
            "num_queued_tokens", "Known tokens of waiting sequences.", stats.num_queued_tokens
        )
        text = "Share of the pool that running sequences hold, 0 to 1."
        yield gauge("kv_cache_usage_perc", text, cache.usage)
        blocks = {
            "free": cache.num_free_blocks,
            "cached": cache.num_cached_blocks,
            "used": cache.num_used_blocks,
        }
        yield self._by("kv_blocks", "Blocks of the pool by state.", "state", blocks)
        slots = {"filled": cache.filled_slots, "allocated": cache.allocated_slots}
        yield self._by("kv_slots", "Slots of blocks in use.", "state", slots)
        rows = stats.memory.rows()
        held = {item: resident for item, _, resident in rows} | {"server": proportional_bytes()}
        yield self._by("memory_bytes", "Memory that is there now, by item.", "item", held)
        reserved = {item: nbytes for item, nbytes, _ in rows if item != "unaccounted"}
        yield self._by("memory_reserved_bytes", "Memory set aside, by item.", "item", reserved)
        info = GaugeMetricFamily(
            "kvist:cache_config_info",
            "How the cache was built, as labels.",
            labels=["model_name", *_config(stats)],
        )
        info.add_metric([self._model_name, *_config(stats).values()], 1)
        yield info
        yield gauge("stats_age_seconds", "How old these numbers are.", self._age_s)

    def _counters(self) -> Iterator[Metric]:
        counts = self._stats.counts
        counters = counts.counters
        for key, (name, text) in _COUNTERS.items():
            yield self._counter(name, text, counters[key])
        sources = tokens_by_source(self._stats)
        prompt = sources["computed"] + sources["cached"]
        yield self._counter("prompt_tokens", "Prompt tokens read, from wherever.", prompt)
        text = "Prompt tokens taken from the cache."
        yield self._counter("prompt_tokens_cached", text, sources["cached"])
        text = "Prompt tokens by where they came from; recomputed ones had been there before."
        family = CounterMetricFamily(
            "kvist:prompt_tokens_by_source", text, labels=["model_name", "source"]
        )
        for source, amount in sources.items():
            family.add_metric([self._model_name, source], amount)
        yield family
        family = CounterMetricFamily(
            "kvist:prompt_tokens_cached_by_source",
            "Prompt tokens that were not computed, by where they came from.",
            labels=["model_name", "source"],
        )
        for source, amount in cached_by_source(counters).items():
            family.add_metric([self._model_name, source], amount)
        yield family
        finished = finished_by_reason(self._stats)
        rejected = rejected_by_reason(self._stats, self._turned_away)
        for name, text, label, reasons in (
            ("request_success", "Sequences that ended.", "finished_reason", finished),
            ("admission_rejections", "Requests turned away.", "reason", rejected),
        ):
            family = CounterMetricFamily(f"kvist:{name}", text, labels=["model_name", label])
            for reason, amount in reasons.items():
                family.add_metric([self._model_name, reason], amount)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvist:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"kvist:{name}", text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvist:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, text: str, counts: HistogramCounts) -> Metric:
        family = HistogramMetricFamily(f"kvist:{name}", text, labels=["model_name"])
        seen = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*counts.bounds, float("inf")), counts.counts, strict=True):
            seen += count
            buckets.append((floatToGoString(bound), seen))  # type: ignore[no-untyped-call]
        family.add_metric([self._model_name], buckets, counts.total)
        return family


def tokens_by_source(stats: Stats) -> dict[str, int]:
    """Return tokens that the model read, or was spared, by why."""
    counters = stats.counts.counters
    return {
        "computed": counters["prompt_computed"],
        "cached": counters["prompt_cached"],
        "recomputed": counters["recomputed"],
    }


def finished_by_reason(stats: Stats) -> dict[str, int]:
    """Return sequences that ended by how; zeros too."""
    return dict.fromkeys(("stop", "length", "abort", "error"), 0) | dict(stats.counts.finished)


def rejected_by_reason(stats: Stats, turned_away: Mapping[str, int]) -> dict[str, int]:
    """Return requests that were turned away by why, by the engine or before it; zeros too."""
    reasons = ("queued_reqs", "queued_tokens", "deadline", "open_reqs", "like_refused")
    return dict.fromkeys(reasons, 0) | dict(stats.counts.rejected) | dict(turned_away)


def waiting_by_reason(stats: Stats) -> dict[str, int]:
    """Return those that wait by what they wait for."""
    return {
        "capacity": stats.num_waiting - stats.num_following,
        "prefix": stats.num_following,
        "grammar": stats.num_awaiting_grammar,
    }


def _config(stats: Stats) -> dict[str, str]:
    bill = stats.bill
    return {
        "block_size": str(bill.block_size),
        "num_blocks": str(bill.num_blocks),
        "cache_dtype": bill.kv_format,
        "kv_cache_size_tokens": str(bill.pool_tokens),
        "kv_cache_max_concurrency": f"{bill.max_concurrency:.2f}",
        "enable_prefix_caching": str(bill.prefix_caching),
        "kv_allocation": bill.kv_allocation,
        "max_model_len": str(bill.max_model_len),
    }


def describe(
    stats: Stats, age_s: float, model_name: str, turned_away: Mapping[str, int]
) -> dict[str, Any]:
    """Return the same for programs: what the cache holds, where, and whether it is reused."""
    cache, counts = stats.cache, stats.counts
    queried, hits = counts.counters["prefix_queries"], counts.counters["prefix_hits"]
    return {
        "model": model_name,
        "age_s": round(age_s, 3),
        "config": _config(stats),
        "pool": {
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "free_blocks": cache.num_free_blocks,
            "cached_blocks": cache.num_cached_blocks,
            "used_blocks": cache.num_used_blocks,
            "filled_slots": cache.filled_slots,
            "allocated_slots": cache.allocated_slots,
            "usage": cache.usage,
        },
        "queue": {
            "running": stats.num_running,
            "waiting": waiting_by_reason(stats),
            "queued_tokens": stats.num_queued_tokens,
        },
        "prefix_cache": {
            "queried_tokens": queried,
            "hit_tokens": hits,
            "hit_rate": hits / queried if queried else 0.0,
        },
        "tokens": {**tokens_by_source(stats), "generated": counts.counters["generated"]},
        "cached_tokens_by_source": cached_by_source(counts.counters),
        "tiers": [describe_tier(tier) for tier in stats.tiers],
        "blocks": {
            "stored": counts.counters["stored_blocks"],
            "evicted": counts.counters["evicted_blocks"],
        },
        "preemptions": counts.counters["preemptions"],
        "deadlines_exceeded": counts.counters["expired"],
        "finished": finished_by_reason(stats),
        "rejected": rejected_by_reason(stats, turned_away),
        "memory": {
            "items": {
                item: {"reserved_bytes": reserved, "resident_bytes": resident}
                for item, reserved, resident in stats.memory.rows()
            },
            "engine_bytes": stats.memory.total_bytes,
            "server_bytes": proportional_bytes(),
        },
        "events_dropped": counts.counters["dropped_events"],
    }


def add_metric_routes(app: FastAPI, source: StatsSource, model_name: str) -> None:
    """Add ``GET /metrics``, ``GET /v1/kv/stats`` and ``GET /v1/kv/tiers``."""
    live = LiveStats(source)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        stats, age_s = await live.get()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StatsCollector(stats, age_s, model_name, source.turned_away))
        # Whatever is accepted: in OpenMetrics the library turns the colon into an underscore.
        return Response(generate_latest(registry), headers={"Content-Type": _TEXT})

    @app.get("/v1/kv/tiers", response_model=None)
    async def kv_tiers() -> Response:
        stats, age_s = await live.get()
        body = {"age_s": round(age_s, 3), "tiers": [describe_tier(tier) for tier in stats.tiers]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    @app.get("/v1/kv/stats", response_model=None)
    async def kv_stats() -> Response:
        stats, age_s = await live.get()
        body = msgspec.json.encode(describe(stats, age_s, model_name, source.turned_away))
        return Response(body, media_type="application/json")
