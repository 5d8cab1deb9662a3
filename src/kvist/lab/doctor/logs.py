"""Symptoms in the logs of vLLM, SGLang, llama.cpp, Ollama and Kvist.

Owns what lines mean. Each rule is one expression over one line; its named groups are the numbers of
the evidence. Only the engine's own wording is matched, never a request's text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain


@dataclass(frozen=True, slots=True)
class LogRule:
    """One kind of line.

    Attributes
    ----------
    symptom : str
        Name of a `Symptom`.
    pattern : re.Pattern
    evidence, cause, remedy : str
        `evidence` is a template over the pattern's named groups and ``count``.
    at_least : int
        Lines before it is a symptom.
    """

    symptom: str
    pattern: re.Pattern[str]
    evidence: str
    cause: str
    remedy: str
    at_least: int = 1


def _rule(
    symptom: str, pattern: str, evidence: str, cause: str, remedy: str, at_least: int = 1
) -> LogRule:
    return LogRule(symptom, re.compile(pattern, re.IGNORECASE), evidence, cause, remedy, at_least)


_READY = re.compile(
    r"application startup complete|server is listening|fired up and ready|kvist: serving|"
    r"llama runner started",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(
    r"cuda out of memory|outofmemoryerror|failed to allocate .*buffer|oom-kill|hip out of memory",
    re.IGNORECASE,
)

RULES = (
    _rule(
        "oom-at-start",
        r"no available memory for the cache blocks",
        "the engine found no memory for a single block",
        "weights and workspace take all that the engine may use",
        "raise --gpu-memory-utilization, or use quantized weights, or --tensor-parallel-size",
    ),
    _rule(
        "oom-at-start",
        r"max(?:imum)? ?(?:seq|model)[ _]len(?:gth)?[ (]*\(?(?P<wanted>\d+)\)? is larger than the"
        r" maximum number of tokens that can be stored in kv cache \((?P<there>\d+)\)",
        "one request may have {wanted} tokens, the KV cache holds {there}",
        "the context length is the model's own, and memory is smaller",
        "--max-model-len {there} or less; or raise --gpu-memory-utilization",
    ),
    _rule(
        "oom-at-start",
        r"not enough memory.*mem-fraction-static",
        "the server says that the static share of memory is too small",
        "weights leave no room for the KV pool",
        "raise --mem-fraction-static, or use quantized weights or --tp",
    ),
    _rule(
        "context-truncated",
        r"truncating input prompt.*?limit=(?P<limit>\d+).*?prompt=(?P<prompt>\d+)",
        "{count} prompts were cut, one of {prompt} tokens to {limit}",
        "the context length of the server is its default, not the model's",
        "OLLAMA_CONTEXT_LENGTH or num_ctx above the longest prompt and answer",
    ),
    _rule(
        "context-truncated",
        r"n_ctx_(?:per_)?seq \((?P<there>\d+)\) < n_ctx_train \((?P<trained>\d+)\)",
        "each sequence has {there} tokens of context, the model was trained for {trained}",
        "the context is divided by the number of slots, or left at its default",
        "-c of the longest prompt and answer × slots (-np)",
    ),
    _rule(
        "context-truncated",
        r"context shift|slot context shift|shifting kv cache",
        "the oldest tokens were dropped {count} times to go on",
        "prompt and answer are longer than the context",
        "a longer context (-c, num_ctx), or --no-context-shift to get an error instead",
    ),
    _rule(
        "preemption-storm",
        r"is preempted by|retract(?:ed)? requests|kv cache pool is full",
        "{count} lines tell of sequences that lost their blocks",
        "more sequences run than the pool can hold to their end",
        "more KV memory, or a lower --max-num-seqs (--max-running-requests)",
        at_least=3,
    ),
    _rule(
        "pool-exhausted",
        r"failed to find free space in the kv cache",
        "no free cell was found {count} times",
        "the context shared by all slots is used up",
        "a larger -c, or fewer slots (-np)",
    ),
    _rule(
        "reservation-waste",
        r"maximum concurrency for (?P<tokens>[\d,]+) tokens per request: (?P<most>[01]\.\d+)x",
        "at full length only {most} requests of {tokens} tokens fit at a time",
        "the context length is far above what memory holds; long requests will preempt each other",
        "--max-model-len of the longest request seen × 1.2–1.5, or --kv-cache-dtype fp8",
    ),
    _rule(
        "kv-quantization-risk",
        r"fp8 data type to store kv cache.*(?:without|scaling factor)",
        "the engine stores K and V in fp8 and says that accuracy may drop without scales",
        "the checkpoint has no scales for K and V",
        "calibrate scales, or --kv-cache-dtype auto; measure quality on your own task",
    ),
    _rule(
        "prefix-caching-off",
        r"enable_prefix_caching[=:' ]+false|prefix caching (?:is )?disabled"
        r"|disable_radix_cache=true",
        "the log says that prefix caching is off",
        "it was switched off, or the engine does not support it for this model",
        "--enable-prefix-caching (leave out --disable-radix-cache)",
    ),
    _rule(
        "hit-rate-low",
        r"forcing full prompt re-processing",
        "the whole prompt was read again {count} times",
        "the model keeps a window or state that cannot be rolled back to the shared prefix",
        "--swa-full, or context checkpoints, where memory allows",
        at_least=3,
    ),
)


def examine_log(lines: Iterable[str]) -> list[Finding]:
    """Return what a log tells, by expected gain. One pass; lines are not kept."""
    counts: Counter[LogRule] = Counter()
    first: dict[LogRule, dict[str, str]] = {}
    ready = False
    out_of_memory: str | None = None
    for line in lines:
        if _OUT_OF_MEMORY.search(line):
            out_of_memory = out_of_memory or ("oom-at-first-request" if ready else "oom-at-start")
        elif _READY.search(line):
            ready = True
        for rule in RULES:
            match = rule.pattern.search(line)
            if match is not None:
                counts[rule] += 1
                first.setdefault(rule, match.groupdict())
                break
    found = [
        Finding(
            SYMPTOMS[rule.symptom],
            rule.evidence.format(count=count, **first[rule]),
            rule.cause,
            rule.remedy.format(**first[rule]),
        )
        for rule, count in counts.items()
        if count >= rule.at_least
    ]
    if out_of_memory is not None:
        found.append(_memory(out_of_memory))
    return by_gain(found)


def _memory(symptom: str) -> Finding:
    if symptom == "oom-at-start":
        return Finding(
            SYMPTOMS[symptom],
            "memory ran out before the server was ready",
            "weights, workspace and KV pool together are more than the device has",
            "shorter --max-model-len, smaller --max-num-batched-tokens, quantized weights; kvist"
            " plan MODEL --memory says what fits",
        )
    return Finding(
        SYMPTOMS[symptom],
        "memory ran out after the server had said that it was ready",
        "the KV pool took what the largest step needs for its activations",
        "lower --gpu-memory-utilization by 0.05 at a time (--mem-fraction-static), or"
        " --max-num-batched-tokens",
    )
