"""What the doctor says: a finding, and the table of all that it knows.

Owns the words. Every finding belongs to one `Symptom` of the table, so that `kvist doctor --list`
and the findings cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

SCHEMA = "kvist.doctor.v1"


@dataclass(frozen=True, slots=True)
class Symptom:
    """One row of the table.

    Attributes
    ----------
    name : str
        Stable, for programs.
    title, check, remedy : str
        For people; `remedy` in general, a finding names the flag of its engine.
    gain : int
        How much is usually won, 1 to 5. Findings are ordered by it.
    """

    name: str
    title: str
    check: str
    remedy: str
    gain: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A symptom that was seen.

    Attributes
    ----------
    symptom : Symptom
    evidence : str
        With the numbers.
    cause, remedy : str
        Likely; the remedy names exact flags where the engine is known.
    """

    symptom: Symptom
    evidence: str
    cause: str
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "symptom": self.symptom.name,
            "title": self.symptom.title,
            "evidence": self.evidence,
            "cause": self.cause,
            "remedy": self.remedy,
            "gain": self.symptom.gain,
        }


def by_gain(findings: Iterable[Finding]) -> list[Finding]:
    """Order findings by what curing them usually brings; one a symptom."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.symptom.name, finding)
    return sorted(first.values(), key=lambda f: -f.symptom.gain)


_TABLE = (
    Symptom(
        "oom-at-start",
        "the engine dies of memory while it starts",
        "out-of-memory or 'no available memory for the cache' in the log",
        "shorter --max-model-len, smaller batch, quantized weights or KV, more GPUs",
        5,
    ),
    Symptom(
        "oom-at-first-request",
        "it loads, and dies at the first requests",
        "out-of-memory after the server said that it is ready",
        "leave workspace: lower the share of memory that the engine may take",
        5,
    ),
    Symptom(
        "context-truncated",
        "prompts are cut or rolled over without an error",
        "truncation or context shift in the log; context far below the model's",
        "raise the context length of the server, or shorten prompts on purpose",
        5,
    ),
    Symptom(
        "context-too-short",
        "requests are refused because they do not fit the context",
        "refusals in the log, with both numbers",
        "a context length of the longest request × 1.2, or shorter prompts",
        4,
    ),
    Symptom(
        "prefix-differs-early",
        "prompts share almost everything, and differ near the start",
        "first differing token of neighbouring prompts, and how often it comes",
        "move what changes (date, id, name) behind what does not",
        5,
    ),
    Symptom(
        "prefix-caching-off",
        "the prefix cache is switched off",
        "configuration in metrics or log",
        "switch it on: it costs next to nothing",
        4,
    ),
    Symptom(
        "pool-exhausted",
        "the KV pool is full and requests wait",
        "pool use at its limit while requests wait for room",
        "more KV memory, quantized KV, shorter --max-model-len, or fewer at a time",
        4,
    ),
    Symptom(
        "preemption-storm",
        "sequences are thrown out and computed again",
        "preemptions for each finished request; recomputed tokens",
        "more KV memory or fewer sequences at a time",
        4,
    ),
    Symptom(
        "cache-too-small",
        "prefixes are evicted before they come again",
        "evictions beside a low hit rate with prompts that share",
        "more KV memory or a lower tier",
        4,
    ),
    Symptom(
        "hot-prefixes-evicted",
        "prefixes that come again and again are evicted by what comes once",
        "blocks evicted and stored again; time to the next use against time to eviction",
        "an eviction policy that sees how often, a protected share, a lower tier",
        4,
    ),
    Symptom(
        "salt-or-hash-differs",
        "prompts share, and the server does not find it",
        "salts, adapters and models of requests; hit rate against what a request log shares",
        "one salt for all who may share; one model name; requests of a prefix to one replica",
        4,
    ),
    Symptom(
        "reservation-waste",
        "room is kept for tokens that never come",
        "allocated against filled slots; context length against lengths seen",
        "--max-model-len of the longest request seen × 1.2–1.5; paged allocation",
        3,
    ),
    Symptom(
        "max-model-len-too-long",
        "the context length is far above need",
        "99th percentile of prompt and answer against the context length, unless 8 of it fit",
        "--max-model-len of that percentile × 1.2–1.5",
        3,
    ),
    Symptom(
        "queue-without-pressure",
        "requests wait although the pool has room",
        "waiting requests at low pool use",
        "let more run at a time (--max-num-seqs)",
        3,
    ),
    Symptom(
        "hit-rate-low",
        "few prompt tokens come from the cache",
        "hits against queried tokens; only where prompts share",
        "look at a request log with kvist doctor: do prompts share, and where do they differ",
        3,
    ),
    Symptom(
        "block-larger-than-prefix",
        "what prompts share is shorter than one block",
        "lengths of shared prefixes against the block size",
        "a smaller --block-size, or a longer common beginning",
        3,
    ),
    Symptom(
        "kv-quantization-risk",
        "the KV cache is quantized in a way that may cost quality",
        "the format of the KV cache: 4 bits, or 8-bit floating point without scales",
        "calibrated scales, or int8 a token; measure quality on your own task",
        3,
    ),
    Symptom(
        "decode-slows-with-context",
        "each token takes longer, the longer the context is",
        "time a token of short against long contexts",
        "decode is bound by memory bandwidth: quantized KV, shorter contexts, fewer KV heads",
        3,
    ),
    Symptom(
        "answers-cut",
        "answers are cut by the end of the context",
        "finish reasons, where requests are as long as the context",
        "a longer context, or shorter prompts",
        2,
    ),
    Symptom(
        "latency-high",
        "requests take long",
        "mean end-to-end latency against 2 s (warning) and 5 s (bad)",
        "see the other findings; else shorter answers or more compute",
        2,
    ),
    Symptom(
        "throughput-low",
        "few requests a second while others wait",
        "finished requests a second against 100 (warning) and 50 (bad), only where some wait",
        "what keeps them waiting: see the other findings; else compute",
        2,
    ),
    Symptom(
        "prompts-share-nothing",
        "prompts have no common beginning",
        "lengths of shared prefixes in a request log",
        "nothing to cache: switching the prefix cache on or off makes no difference",
        1,
    ),
)

SYMPTOMS: Mapping[str, Symptom] = MappingProxyType({s.name: s for s in _TABLE})
"""All that the doctor knows, by name."""
