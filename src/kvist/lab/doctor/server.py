"""Symptoms in the metrics of a running server.

Owns thresholds and rules over one look at ``/metrics``: counters since the server started, gauges
of the moment. Knows no HTTP.

A pool that is 100 % used is exhausted, never "fragmented": paged memory has no holes. And a GPU
that is full says nothing, since servers take their memory when they start; only the share of the
pool that requests use counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvist.lab.doctor.exposition import Exposition
from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From where on a number is a symptom: (warning, critical) where there are two.

    `hit_rate` counts only where prompts share, which metrics alone cannot tell; so it is looked at
    from `min_queried_tokens` on.
    """

    latency_s: tuple[float, float] = (2.0, 5.0)
    pool_use: float = 0.9
    hit_rate: float = 0.5
    preemptions_per_request: float = 0.1
    answers_cut: float = 0.5
    max_model_len_over_need: float = 4.0
    min_requests: int = 20
    min_queried_tokens: int = 20_000


DEFAULT_THRESHOLDS = Thresholds()

_FLAGS = {
    "kvist": {
        "memory": "--kv-cache-memory-bytes",
        "seqs": "--max-num-seqs",
        "length": "--max-model-len",
        "prefix": "--enable-prefix-caching",
    },
    "vllm": {
        "memory": "--gpu-memory-utilization or --kv-cache-memory-bytes",
        "seqs": "--max-num-seqs",
        "length": "--max-model-len",
        "prefix": "--enable-prefix-caching",
    },
    "llama.cpp": {
        "memory": "-c (the context is shared by all slots)",
        "seqs": "-np",
        "length": "-c",
        "prefix": "--cache-prompt",
    },
    "sglang": {
        "memory": "--mem-fraction-static",
        "seqs": "--max-running-requests",
        "length": "--context-length",
        "prefix": "radix cache (leave out --disable-radix-cache)",
    },
}


def examine_server(
    metrics: Exposition, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> list[Finding]:
    """Return what is wrong, by expected gain; empty for a healthy server."""
    flags = _FLAGS.get(metrics.engine, _FLAGS["vllm"])
    rules = (_pool, _preemptions, _prefix, _length, _answers, _latency)
    return by_gain(found for rule in rules for found in rule(metrics, thresholds, flags))


def _finding(name: str, evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(SYMPTOMS[name], evidence, cause, remedy)


def _pool(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    use = m.total(
        "kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio", "token_usage"
    )
    waiting = m.total("num_requests_waiting", "requests_deferred", "num_queue_reqs") or 0
    running = m.total("num_requests_running", "requests_processing", "num_running_reqs") or 0
    by_reason = m.by_label("num_requests_waiting_by_reason", "reason")
    if by_reason:
        waiting = by_reason.get("capacity", 0.0)
    if use is None or waiting < 1:
        return
    if use >= t.pool_use:
        yield _finding(
            "pool-exhausted",
            f"{use:.0%} of the KV pool is in use, {running:.0f} requests run and {waiting:.0f} wait"
            " for room",
            "the contexts of running requests fill the pool, so compute idles below full batches",
            f"more KV memory ({flags['memory']}), a quantized KV cache, or a shorter"
            f" {flags['length']}; if latency matters more than throughput, fewer at a time"
            f" ({flags['seqs']})",
        )
    elif use < 0.5 and waiting >= max(4.0, running / 4):
        yield _finding(
            "queue-without-pressure",
            f"{waiting:.0f} requests wait while {use:.0%} of the KV pool is in use and"
            f" {running:.0f} run",
            "the number of sequences at a time is the limit, not memory",
            f"raise {flags['seqs']}",
        )


def _preemptions(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    preemptions = m.total("num_preemptions_total", "num_preemptions") or 0
    finished = m.total("request_success_total") or 0
    if finished < t.min_requests or preemptions < t.preemptions_per_request * finished:
        return
    sources = m.by_label("prompt_tokens_by_source_total", "source")
    again = sources.get("recomputed", 0.0)
    extra = f"; {again:,.0f} tokens were computed again" if again else ""
    yield _finding(
        "preemption-storm",
        f"{preemptions:,.0f} preemptions for {finished:,.0f} finished requests{extra}",
        "more sequences are let in than the pool can hold to their end",
        f"more KV memory ({flags['memory']}) or fewer at a time ({flags['seqs']})",
    )


def _prefix(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    config = m.info("cache_config_info")
    switched = config.get("enable_prefix_caching", config.get("prefix_caching", "")).lower()
    if switched == "false":
        yield _finding(
            "prefix-caching-off",
            "the server says enable_prefix_caching=False",
            "it was switched off, or the engine switched it off for this model",
            f"{flags['prefix']}",
        )
        return
    queried = m.total("prefix_cache_queries_total", "gpu_prefix_cache_queries_total") or 0
    hits = m.total("prefix_cache_hits_total", "gpu_prefix_cache_hits_total") or 0
    if queried < t.min_queried_tokens:
        return
    rate = hits / queried
    evicted = m.total("kv_blocks_evicted_total") or 0
    stored = m.total("kv_blocks_stored_total") or 0
    if rate < t.hit_rate and stored and evicted > 0.5 * stored:
        yield _finding(
            "cache-too-small",
            f"{rate:.0%} of {queried:,.0f} prompt tokens were hits; {evicted:,.0f} of"
            f" {stored:,.0f} blocks were evicted",
            "prefixes leave before they come again",
            f"more KV memory ({flags['memory']}) or a lower tier (--tier host:4GiB)",
        )
    elif rate < t.hit_rate and hits:
        yield _finding(
            "hit-rate-low",
            f"{rate:.1%} of {queried:,.0f} prompt tokens came from the prefix cache",
            "prompts share little, or differ before they share; metrics cannot tell which",
            "give the doctor a request log (JSONL): it finds where prompts differ",
        )


def _length(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    config = m.info("cache_config_info")
    slots = m.by_label("kv_slots", "state")
    allocated, filled = slots.get("allocated", 0.0), slots.get("filled", 0.0)
    if allocated > 10_000 and filled < 0.5 * allocated:
        yield _finding(
            "reservation-waste",
            f"{filled:,.0f} of {allocated:,.0f} allocated slots hold a token",
            "room is reserved for the longest answer there could be",
            "allocate by block (--kv-allocation paged)",
        )
    try:
        most = float(config.get("max_model_len", ""))
    except ValueError:
        return
    prompt = m.quantile("request_prompt_tokens", 0.99)
    answer = m.quantile("request_generation_tokens", 0.99)
    count = m.total("request_prompt_tokens_count") or 0
    if prompt is None or answer is None or count < t.min_requests:
        return
    need = prompt + answer
    if most > t.max_model_len_over_need * need:
        yield _finding(
            "max-model-len-too-long",
            f"99 % of {count:,.0f} requests need at most {need:,.0f} tokens, the context length is"
            f" {most:,.0f}",
            "the model's own maximum was taken over",
            f"{flags['length']} {int(need * 1.2):d} to {int(need * 1.5):d}",
        )


def _answers(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    reasons = m.by_label("request_success_total", "finished_reason")
    total = sum(reasons.values())
    cut = reasons.get("length", 0.0)
    if total >= t.min_requests and cut > t.answers_cut * total:
        yield _finding(
            "answers-cut",
            f"{cut:,.0f} of {total:,.0f} answers ended by their length",
            "max_tokens of the requests, or what the context leaves",
            f"raise max_tokens, or {flags['length']}",
        )


def _latency(m: Exposition, t: Thresholds, flags: dict[str, str]) -> Iterator[Finding]:
    mean = m.mean("e2e_request_latency_seconds")
    count = m.total("e2e_request_latency_seconds_count") or 0
    if mean is None or count < t.min_requests or mean < t.latency_s[0]:
        return
    grade = "critical" if mean >= t.latency_s[1] else "warning"
    queue = m.mean("request_queue_time_seconds") or 0.0
    prefill = m.mean("request_prefill_time_seconds") or 0.0
    decode = m.mean("request_decode_time_seconds") or 0.0
    parts = {"waiting": queue, "reading the prompt": prefill, "writing the answer": decode}
    where = max(parts, key=lambda name: parts[name])
    advice = {
        "waiting": f"more room or more at a time ({flags['memory']}, {flags['seqs']})",
        "reading the prompt": "reuse prefixes: see the hit rate, and kvist doctor on a request log",
        "writing the answer": "shorter answers, smaller batches, or quantized weights and KV",
    }
    yield _finding(
        "latency-high",
        f"{mean:.1f} s a request on average ({grade}): {queue:.1f} s waiting, {prefill:.1f} s"
        f" reading, {decode:.1f} s writing",
        f"most of it is {where}",
        advice[where],
    )
