"""Symptoms in the logs of vLLM, SGLang, llama.cpp, Ollama and Kvist.

Owns one pass over the lines: which rule each meets, whether memory ran out before or after the
server was ready, and what its statistics say. What lines mean stands in `log_rules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvist.lab.doctor.finding import SYMPTOMS, Finding, by_gain
from kvist.lab.doctor.log_rules import OUT_OF_MEMORY, READY, RULES, LogRule
from kvist.lab.doctor.log_stats import LogStats
from kvist.lab.doctor.reading import Reading
from kvist.lab.doctor.server import examine_server
from kvist.lab.doctor.slope import examine_decode
from kvist.lab.doctor.thresholds import DEFAULT_THRESHOLDS, Thresholds


def read_log(
    lines: Iterable[str], thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> tuple[list[Finding], Reading | None, str]:
    """Return what a log tells, by expected gain; its statistics; and whose it is.

    One pass; lines are not kept. The engine is ``""`` where no line tells.
    """
    counts: Counter[LogRule] = Counter()
    first: dict[LogRule, dict[str, str]] = {}
    stats = LogStats()
    ready = False
    out_of_memory = ""
    for line in lines:
        stats.read(line)
        if OUT_OF_MEMORY.search(line):
            out_of_memory = out_of_memory or ("oom-at-first-request" if ready else "oom-at-start")
        elif READY.search(line):
            ready = True
        for rule in RULES:
            match = rule.pattern.search(line)
            if match is not None:
                counts[rule] += 1
                first.setdefault(rule, match.groupdict())
                break
    found = [_said(rule, first[rule], n) for rule, n in counts.items() if n >= rule.at_least]
    if out_of_memory:
        found.append(_memory(out_of_memory))
    reading = stats.reading()
    if reading is not None:
        found += examine_server(reading, thresholds)
    found += examine_decode(stats.points)
    return by_gain(found), reading, stats.engine


def examine_log(lines: Iterable[str]) -> list[Finding]:
    """Return what a log tells, by expected gain."""
    return read_log(lines)[0]


def _said(rule: LogRule, groups: dict[str, str], count: int) -> Finding:
    return Finding(
        SYMPTOMS[rule.symptom],
        rule.evidence.format(count=count, **groups),
        rule.cause,
        rule.remedy.format(**groups),
    )


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
