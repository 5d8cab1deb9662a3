"""Symptoms in what a running server says of itself.

Owns the rules over one `Reading`. Knows no metric names, no HTTP and no thresholds of its own.

A pool that is 100 % used is exhausted, never "fragmented": paged memory has no holes. And a GPU
that is full says nothing, since servers take their memory when they start; only the share of the
pool that requests use counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.kpis import key_figures, shares
from kvist.lab.doctor.reading import Reading
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Level, Thresholds

_FOUR_BITS = re.compile(r"int4|[qk]4|q5|iq4|fp4|e2m1|4bit|2bit|turboquant", re.IGNORECASE)
_EIGHT_BITS = re.compile(r"fp8|float8|e4m3|e5m2", re.IGNORECASE)
_ROOMY = 8
_SOME_HITS = 0.01
"""Below it prompts are all new as far as metrics can tell, and evictions are as they must be."""


class Flags(NamedTuple):
    """What an engine calls the screws."""

    memory: str
    seqs: str
    length: str
    prefix: str
    quantize: str
    tier: str


_VLLM = Flags(
    memory="--gpu-memory-utilization or --kv-cache-memory-bytes",
    seqs="--max-num-seqs",
    length="--max-model-len",
    prefix="--enable-prefix-caching",
    quantize="--kv-cache-dtype fp8",
    tier="--kv-offloading-size",
)
_FLAGS = {
    "kvist": Flags(
        memory="--kv-cache-memory-bytes",
        seqs="--max-num-seqs",
        length="--max-model-len",
        prefix="--enable-prefix-caching",
        quantize="",  # until the engine runs what the planner counts
        tier="--tier host:4GiB",
    ),
    "vllm": _VLLM,
    "llama.cpp": Flags(
        memory="-c (the context is shared by all slots)",
        seqs="-np",
        length="-c",
        prefix="--cache-prompt",
        quantize="-ctk q8_0 -ctv q8_0",
        tier="--cache-ram",
    ),
    "sglang": Flags(
        memory="--mem-fraction-static",
        seqs="--max-running-requests",
        length="--context-length",
        prefix="the radix cache (leave out --disable-radix-cache)",
        quantize="--kv-cache-dtype fp8_e4m3",
        tier="--enable-hierarchical-cache",
    ),
}


def flags_of(engine: str) -> Flags:
    """Return an engine's flags; vLLM's names where the engine is unknown."""
    return _FLAGS.get(engine, _VLLM)


def examine_server(r: Reading, t: Thresholds = DEFAULT_THRESHOLDS) -> list[Finding]:
    """Return what is wrong, by expected gain; empty for a healthy server."""
    rules = (
        _preemptions,
        _pool,
        _prefix,
        _length,
        _answers,
        _latency,
        _throughput,
        _format,
        _hit_rate,  # last among its equals: it knows no cause
    )
    return by_gain(found for rule in rules for found in rule(r, t, flags_of(r.engine)))


def is_roomy(pool_tokens: float | None, max_model_len: float) -> bool:
    """Whether a pool holds so many of the longest requests that their length costs nothing."""
    return pool_tokens is not None and pool_tokens >= _ROOMY * max_model_len


def _finding(name: str, evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(SYMPTOMS[name], evidence, cause, remedy)


def _graded(name: str, r: Reading, t: Thresholds) -> str:
    """Return the level of a key figure if it is a symptom, else an empty text."""
    level = next(figure.level for figure in key_figures(r, t) if figure.name == name)
    return level.value if level in (Level.WARNING, Level.BAD) else ""


def _pool(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    if r.waiting < 1:
        return
    level = _graded("kv_pool_use", r, t)
    if r.pool_use is not None and level:
        quantized = f", a quantized KV cache ({flags.quantize})" * bool(flags.quantize)
        steps = f"; a step has {r.step_tokens:,.0f} tokens on average" if r.step_tokens else ""
        yield _finding(
            "pool-exhausted",
            f"{r.pool_use:.0%} of the KV pool is in use ({level}), {r.running:.0f} requests run and"
            f" {r.waiting:.0f} wait for room{steps}",
            "the contexts of running requests fill the pool, so compute idles below full batches."
            " Blocks leave no holes: the pool is used up, not fragmented",
            f"more KV memory ({flags.memory}){quantized}, or a shorter {flags.length}; if latency"
            f" matters more than throughput, fewer at a time ({flags.seqs})",
        )
        return
    if r.pool_use is None and (r.evicted_blocks or r.preemptions):
        return  # there may be no room: something had to go
    if (r.pool_use is None or r.pool_use < 0.5) and r.waiting >= max(4.0, r.running / 4):
        pool = "" if r.pool_use is None else f" while {r.pool_use:.0%} of the KV pool is in use"
        yield _finding(
            "queue-without-pressure",
            f"{r.waiting:.0f} requests wait{pool} and {r.running:.0f} run",
            "the number of sequences at a time is the limit, not memory",
            f"raise {flags.seqs}",
        )


def _preemptions(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    if r.preemptions < t.min_preemptions or not (level := _graded("preemptions_per_request", r, t)):
        return
    requests = f" for {r.finished:,.0f} finished requests" * bool(r.finished)
    again = f"; {r.recomputed_tokens:,.0f} tokens were computed again" * bool(r.recomputed_tokens)
    yield _finding(
        "preemption-storm",
        f"{r.preemptions:,.0f} preemptions{requests} ({level}){again}",
        "more sequences are let in than the pool can hold to their end",
        f"more KV memory ({flags.memory}) or fewer at a time ({flags.seqs})",
    )


def _prefix(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    if r.is_caching is False:
        yield _finding(
            "prefix-caching-off",
            "the server says enable_prefix_caching=False",
            "it was switched off, or the engine switched it off for this model",
            f"{flags.prefix}",
        )
        return
    if r.hit_rate is None or r.queried_tokens < t.min_queried_tokens:
        return
    # Without a request log nobody knows what there is to find: less than half of it is a symptom,
    # a little less than most of it is how prompts are.
    poor = t.hit_rate.level(r.hit_rate) is Level.BAD
    share = f"{r.hit_rate:.0%} of {r.queried_tokens:,.0f} prompt tokens were hits"
    gap, idle = r.reuse_gap_s, r.idle_before_evict_s
    if poor and gap is not None and idle is not None and idle < 2 * gap:
        yield _finding(
            "hot-prefixes-evicted",
            f"{share}; blocks come again after {gap:,.0f} s on average, and are evicted after lying"
            f" unused for {idle:,.0f} s",
            "what is used once pushes out what is used again and again",
            f"a lower tier ({flags.tier}), or more KV memory ({flags.memory}); in kvist"
            " --protected-share 0.25",
        )
    elif poor and r.hit_rate >= _SOME_HITS and r.evicted_blocks > 0.5 * r.stored_blocks > 0:
        tier = "" if r.tiers else f" or a lower tier ({flags.tier})"
        yield _finding(
            "cache-too-small",
            f"{share}; {r.evicted_blocks:,.0f} of {r.stored_blocks:,.0f} blocks were evicted",
            "prefixes leave before they come again; or prompts share no more than that",
            f"more KV memory ({flags.memory}){tier}; with a request log (JSONL) beside it the"
            " doctor says which, and how much",
        )


def _hit_rate(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    """Few hits, by metrics alone, where nothing else explains them."""
    if r.is_caching is False or r.attainable_rate is not None or not shares(r, t):
        return
    if r.hit_rate is not None and _graded("hit_rate", r, t) == Level.BAD:
        yield _finding(
            "hit-rate-low",
            f"{r.hit_rate:.1%} of {r.queried_tokens:,.0f} prompt tokens came from the prefix cache",
            "prompts share little, or differ before they share; metrics cannot tell which",
            "give the doctor a request log (JSONL) too: it finds where prompts differ",
        )


def _length(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    if r.allocated_slots > 1_000 and r.filled_slots < 0.5 * r.allocated_slots:
        yield _finding(
            "reservation-waste",
            f"{r.filled_slots:,.0f} of {r.allocated_slots:,.0f} allocated slots hold a token",
            "room is reserved for the longest answer there could be",
            "allocate by block (--kv-allocation paged)",
        )
    most, need = r.max_model_len, r.need_tokens
    if most is None or need is None or r.num_sized < t.min_requests:
        return
    if most > t.max_model_len_over_need * need and not is_roomy(r.pool_tokens, most):
        yield _finding(
            "max-model-len-too-long",
            f"99 % of {r.num_sized:,.0f} requests need at most {need:,.0f} tokens, the context"
            f" length is {most:,.0f}",
            "the model's own maximum was taken over",
            f"{flags.length} {int(need * 1.2):d} to {int(need * 1.5):d}",
        )


def _answers(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    most, need = r.max_model_len, r.need_tokens
    if r.ended < t.min_requests or r.cut <= t.answers_cut * r.ended or most is None:
        return
    # Many clients want short answers; it is the context that must not be what cuts them.
    # `need` is the upper bound of a bucket, which is up to 2.5 times too much: no nearer than that.
    if need is not None and need >= most:
        yield _finding(
            "answers-cut",
            f"{r.cut:,.0f} of {r.ended:,.0f} answers ended by their length, and requests reach the"
            f" end of the context, {most:,.0f} tokens",
            "what the prompt leaves of the context is too little for the answer",
            f"a longer {flags.length}, or shorter prompts",
        )


def _latency(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    level = _graded("mean_latency_s", r, t)
    if not level or r.latency_s is None:
        return
    parts = {
        "waiting": r.queue_s or 0.0,
        "reading the prompt": r.prefill_s or 0.0,
        "writing the answer": r.decode_s or 0.0,
    }
    where = max(parts, key=lambda name: parts[name])
    if not any(parts.values()):
        where = ""
    advice = {
        "waiting": f"more room or more at a time ({flags.memory}, {flags.seqs})",
        "reading the prompt": "reuse prefixes: see the hit rate, and kvist doctor on a request log",
        "writing the answer": "shorter answers, smaller batches, or quantized weights and KV",
        "": "the parts of it are not there; see the other findings",
    }
    told = ", ".join(f"{seconds:.1f} s {name}" for name, seconds in parts.items() if seconds)
    yield _finding(
        "latency-high",
        f"{r.latency_s:.1f} s a request on average ({level})" + (f": {told}" if told else ""),
        f"most of it is {where}" if where else "unknown",
        advice[where],
    )


def _throughput(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    if level := _graded("requests_per_s", r, t):
        yield _finding(
            "throughput-low",
            f"{r.requests_per_s:.1f} requests a second ({level}) while {r.waiting:.0f} wait",
            "memory or the number of sequences at a time, if another finding says so; else compute",
            f"see the other findings; else quantized weights, shorter prompts and answers, reuse of"
            f" prefixes ({flags.prefix}), or another machine",
        )


def _format(r: Reading, t: Thresholds, flags: Flags) -> Iterator[Finding]:
    four = _FOUR_BITS.search(r.cache_dtype)
    if not four and not _EIGHT_BITS.search(r.cache_dtype):
        return
    bits = "4 bits or less" if four else "8 bits of floating point, whose scales it does not tell"
    yield _finding(
        "kv-quantization-risk",
        f"the KV cache is stored as {r.cache_dtype}: {bits}",
        "long contexts, tool calls and small models suffer first",
        "calibrated scales, or 8 bits with a scale a token; measure quality on your own task, and"
        " leave this out with --ignore kv-quantization-risk",
    )
