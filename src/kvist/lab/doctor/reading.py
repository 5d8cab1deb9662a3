"""What a server says of itself, in one shape whichever engine it is.

Owns the names that engines give the same thing. Knows no thresholds. A field that nobody told is
``None``, or 0 where a count of nothing means the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvist.lab.doctor.exposition import Exposition


@dataclass(slots=True, kw_only=True)
class Reading:
    """One look at a server: gauges of the moment, counts since its start or over an interval.

    Attributes
    ----------
    engine : str
    running, waiting : float
        Requests; `waiting` for room where the engine tells the reason.
    pool_use : float or None
        Share of the KV pool that running requests hold, 0 to 1.
    preemptions, finished, recomputed_tokens : float
    num_shed : float
        Requests turned away.
    is_caching : bool or None
        Whether the prefix cache is on.
    queried_tokens, hit_tokens : float
    attainable_rate : float or None
        Share of prompt tokens that a cache without limits would find, from a request log.
    stored_blocks, evicted_blocks : float
    idle_before_evict_s, reuse_gap_s : float or None
        Means: how long a block lay unused before it was evicted; between two uses of one.
    allocated_slots, filled_slots : float
    max_model_len, need_tokens : float or None
        `need_tokens`: 99th percentile of prompt plus that of the answer.
    num_sized : float
        Requests behind `need_tokens`.
    cut, ended : float
        Answers that ended at their length limit, and all.
    latency_s, queue_s, prefill_s, decode_s : float or None
        Means.
    num_latencies : float
    requests_per_s : float or None
    cache_dtype : str
    block_size, pool_tokens : int or None
    step_tokens : float or None
        Mean tokens of a step.
    tiers : bool
        Whether there is one below the device.
    """

    engine: str = ""
    running: float = 0.0
    waiting: float = 0.0
    pool_use: float | None = None
    preemptions: float = 0.0
    finished: float = 0.0
    recomputed_tokens: float = 0.0
    num_shed: float = 0.0
    is_caching: bool | None = None
    queried_tokens: float = 0.0
    hit_tokens: float = 0.0
    attainable_rate: float | None = None
    stored_blocks: float = 0.0
    evicted_blocks: float = 0.0
    idle_before_evict_s: float | None = None
    reuse_gap_s: float | None = None
    allocated_slots: float = 0.0
    filled_slots: float = 0.0
    max_model_len: float | None = None
    need_tokens: float | None = None
    num_sized: float = 0.0
    cut: float = 0.0
    ended: float = 0.0
    latency_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    num_latencies: float = 0.0
    requests_per_s: float | None = None
    cache_dtype: str = ""
    block_size: int | None = None
    pool_tokens: int | None = None
    step_tokens: float | None = None
    tiers: bool = False

    @property
    def hit_rate(self) -> float | None:
        """Hits over what was looked up; ``None`` before the first lookup."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else None


def read_metrics(m: Exposition, elapsed_s: float | None = None) -> Reading:
    """Translate an engine's metrics.

    Parameters
    ----------
    m : Exposition
    elapsed_s : float, optional
        Over which its counters have counted.
    """
    config = m.info("cache_config_info")
    reasons = m.by_label("request_success_total", "finished_reason")
    ended = math.fsum(reasons.values())
    finished = ended or m.total("num_requests_total") or 0.0
    prompt = m.quantile("request_prompt_tokens", 0.99)
    answer = m.quantile("request_generation_tokens", 0.99)
    slots = m.by_label("kv_slots", "state")
    sources = m.by_label("prompt_tokens_by_source_total", "source")
    queried, hits = _hits(m)
    block_size = _whole(config.get("block_size"))
    latencies = m.total("e2e_request_latency_seconds_count") or 0.0
    return Reading(
        engine=m.engine,
        running=m.total("num_requests_running", "requests_processing", "num_running_reqs") or 0.0,
        waiting=_waiting(m),
        pool_use=m.peak(
            "kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio", "token_usage"
        ),
        preemptions=m.total("num_preemptions_total", "num_preemptions", "num_retracted_reqs_total")
        or 0.0,
        finished=finished,
        recomputed_tokens=sources.get("recomputed", 0.0),
        num_shed=m.total("admission_rejections_total") or 0.0,
        is_caching=_switch(config.get("enable_prefix_caching", config.get("prefix_caching"))),
        queried_tokens=queried,
        hit_tokens=hits,
        stored_blocks=m.total("kv_blocks_stored_total") or 0.0,
        evicted_blocks=m.total("kv_blocks_evicted_total") or 0.0,
        idle_before_evict_s=m.mean("kv_block_idle_before_evict_seconds"),
        reuse_gap_s=m.mean("kv_block_reuse_gap_seconds"),
        allocated_slots=slots.get("allocated", 0.0),
        filled_slots=slots.get("filled", 0.0),
        max_model_len=_max_model_len(m),
        need_tokens=None if prompt is None or answer is None else prompt + answer,
        num_sized=m.total("request_prompt_tokens_count") or 0.0,
        cut=reasons.get("length", 0.0),
        ended=ended,
        latency_s=m.mean("e2e_request_latency_seconds"),
        queue_s=m.mean("request_queue_time_seconds"),
        prefill_s=m.mean("request_prefill_time_seconds"),
        decode_s=m.mean("request_decode_time_seconds"),
        num_latencies=latencies,
        requests_per_s=finished / elapsed_s if elapsed_s else None,
        cache_dtype=config.get("cache_dtype", config.get("kv_cache_dtype", "")),
        block_size=block_size,
        pool_tokens=_pool_tokens(m, block_size),
        step_tokens=m.mean("iteration_tokens_total"),
        tiers=bool(m.samples.get("tier_capacity_bytes")),
    )


def _waiting(m: Exposition) -> float:
    by_reason = m.by_label("num_requests_waiting_by_reason", "reason")
    if by_reason:
        return by_reason.get("capacity", 0.0)
    return m.total("num_requests_waiting", "requests_deferred", "num_queue_reqs") or 0.0


def _hits(m: Exposition) -> tuple[float, float]:
    queried = m.total("prefix_cache_queries_total", "gpu_prefix_cache_queries_total")
    if queried is not None:
        hits = m.total("prefix_cache_hits_total", "gpu_prefix_cache_hits_total") or 0.0
        # A second level that belongs to the engine is a hit too: nobody computed those tokens.
        return queried, hits + (m.total("external_prefix_cache_hits_total") or 0.0)
    prompt = m.total("prompt_tokens_total") or 0.0
    if (cached := m.total("cached_tokens_total")) is not None:
        return prompt, cached
    if m.engine == "llama.cpp" and (cached := m.total("prompt_tokens_cached_total")) is not None:
        # It counts a prompt's tokens without those it did not have to read.
        return prompt + cached, cached
    if (rate := m.total("cache_hit_rate")) is not None:
        return prompt, rate * prompt
    return 0.0, 0.0


def _max_model_len(m: Exposition) -> float | None:
    """Context length: said outright, or what a cache's tokens over its concurrency must be."""
    config = m.info("cache_config_info")
    for name in ("max_model_len", "kv_cache_max_model_len"):
        if (length := _real(config.get(name))) is not None:
            return length
    tokens = _real(config.get("kv_cache_size_tokens"))
    most = _real(config.get("kv_cache_max_concurrency"))
    return round(tokens / most) if tokens and most else None


def _pool_tokens(m: Exposition, block_size: int | None) -> int | None:
    config = m.info("cache_config_info")
    said = _whole(config.get("kv_cache_size_tokens")) or _whole(m.total("max_total_num_tokens"))
    if said:
        return said
    blocks = _whole(config.get("num_gpu_blocks")) or _whole(config.get("num_blocks"))
    return blocks * block_size if blocks and block_size else None


def _switch(text: str | None) -> bool | None:
    return {"true": True, "false": False}.get((text or "").lower())


def _real(value: str | float | None) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _whole(value: str | float | None) -> int | None:
    number = _real(value)
    return None if number is None else int(number)
