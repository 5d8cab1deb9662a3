"""What single lines of an engine's log mean: the table behind `kvist.lab.doctor.logs`.

Owns the wording of vLLM, SGLang, llama.cpp, Ollama and Kvist, and nothing else. Only an engine's
own words are matched, never a request's text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogRule:
    """One kind of line.

    Attributes
    ----------
    symptom : str
        Name of a `Symptom`.
    pattern : re.Pattern
    evidence, cause, remedy : str
        Templates over the pattern's named groups and ``count``.
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


READY = re.compile(
    r"application startup complete|server is listening|llama_server: listening|fired up and ready"
    r"|kvist: serving|llama runner started",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile(
    r"(?:cuda|hip|xpu) out of memory|outofmemoryerror|cudamalloc failed: out of memory"
    r"|failed to allocate .*buffer|unable to allocate .*buffer|oom-kill|killed process \d+"
    r"|can't allocate memory|cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)

_TOO_LONG_CONTEXT = "the context length is the model's own, and memory is smaller"

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
        r"model's max seq len \((?P<wanted>\d+)\),? \(?(?P<need>[\d.]+ GiB) KV cache is needed.*"
        r"available KV cache memory \((?P<there>[\d.]+ GiB)\).*model length is (?P<fits>\d+)",
        "one request may have {wanted} tokens and needs {need} of KV cache, {there} are there",
        _TOO_LONG_CONTEXT,
        "--max-model-len {fits} or less; or more KV memory (--gpu-memory-utilization,"
        " --kv-cache-memory-bytes)",
    ),
    _rule(
        "oom-at-start",
        r"KV cache is needed, which is larger than the available KV cache memory"
        r" \((?P<there>[\d.]+ GiB)\)",
        "one request of the greatest length does not fit the {there} of KV cache that are there",
        _TOO_LONG_CONTEXT,
        "a shorter --max-model-len, or more KV memory (--gpu-memory-utilization,"
        " --kv-cache-memory-bytes)",
    ),
    _rule(
        "oom-at-start",
        r"max(?:imum)? ?(?:seq|model)[ _]len(?:gth)?[ (]*\(?(?P<wanted>\d+)\)? is larger than the"
        r" maximum number of tokens that can be stored in kv cache \((?P<there>\d+)\)",
        "one request may have {wanted} tokens, the KV cache holds {there}",
        _TOO_LONG_CONTEXT,
        "--max-model-len {there} or less; or raise --gpu-memory-utilization",
    ),
    _rule(
        "oom-at-start",
        r"free memory on .*\((?P<there>[\d.]+)/(?P<all>[\d.]+) GiB\).*less than desired",
        "{there} of {all} GiB are free, the engine was told to take more",
        "another process holds memory, or an old one has not ended yet",
        "end it, or a lower --gpu-memory-utilization",
    ),
    _rule(
        "oom-at-start",
        r"not enough memory.*mem-fraction-static",
        "the server says that the static share of memory is too small",
        "weights leave no room for the KV pool",
        "raise --mem-fraction-static, or use quantized weights or --tp",
    ),
    _rule(
        "oom-at-start",
        r"model requires more system memory \((?P<need>[^)]+)\) than is available"
        r" \((?P<there>[^)]+)\)",
        "the model needs {need} of memory, {there} are there",
        "weights and the KV cache of the whole context are taken at once",
        "a smaller context (num_ctx, OLLAMA_CONTEXT_LENGTH), or a smaller quantization",
    ),
    _rule(
        "oom-at-start",
        r"--(?:kv-cache-memory-bytes|max-model-len|memory).*\bholds? (?:only )?[\d,]+ (?:tokens|"
        r"blocks)",
        "the KV memory that was asked for does not hold one request of the greatest length",
        _TOO_LONG_CONTEXT,
        "a shorter --max-model-len, or more --kv-cache-memory-bytes",
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
        r"truncating input messages|\btruncat(?:ing|ed) (?:the )?(?:input|prompt)\b(?!\s*=)",
        "{count} lines tell of prompts that were cut",
        "the context length of the server is below what requests need",
        "a longer context (num_ctx, OLLAMA_CONTEXT_LENGTH, --context-length), or shorter prompts",
    ),
    _rule(
        "context-truncated",
        r"stop processing: n_(?:tokens|past) = (?P<tokens>\d+), truncated = 1",
        "{count} answers were cut by the end of the context, one at {tokens} tokens",
        "prompt and answer are longer than the context of a slot, which is -c over -np",
        "-c of the longest prompt and answer × slots (-np)",
    ),
    _rule(
        "context-truncated",
        r"(?:applying|slot|performing) context shift|context limit hit|shifting kv cache"
        r"|context shift, n_keep",
        "the oldest tokens were dropped {count} times to go on",
        "prompt and answer are longer than the context",
        "a longer context (-c, num_ctx), or --no-context-shift to get an error instead",
    ),
    _rule(
        "context-too-short",
        r"request \((?P<asked>\d+) tokens\) exceeds the available context size \((?P<there>\d+)",
        "{count} requests were refused, one of {asked} tokens where a slot has {there}",
        "the context is shared by the slots: each has -c over -np",
        "-c of the longest prompt and answer × slots (-np)",
    ),
    _rule(
        "context-too-short",
        r"maximum context length is (?P<there>\d+) tokens.*?(?:requested|has|contains) .*?"
        r"(?P<asked>\d+)",
        "{count} requests were refused, one of {asked} tokens where {there} are allowed",
        "the context length is below what requests need",
        "a longer --max-model-len, or shorter prompts or max_tokens",
    ),
    _rule(
        "context-too-short",
        r"input \((?P<asked>\d+) tokens\) is longer than the model's context length"
        r" \((?P<there>\d+)",
        "{count} requests were refused, one of {asked} tokens where {there} are allowed",
        "the context length is below what requests need",
        "a longer --context-length, or shorter prompts",
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
        r"failed to find (?:free space in the|a memory slot for batch).*",
        "no free cell was found {count} times",
        "the context shared by all slots is used up",
        "a larger -c, or fewer slots (-np)",
    ),
    _rule(
        "max-model-len-too-long",
        r"maximum concurrency for (?P<tokens>[\d,]+) tokens per request: (?P<most>[01]\.\d+)x",
        "at full length only {most} requests of {tokens} tokens fit at a time",
        "the context length is far above what memory holds; long requests will preempt each other",
        "--max-model-len of the longest request seen × 1.2–1.5, or --kv-cache-dtype fp8",
    ),
    _rule(
        "kv-quantization-risk",
        r"fp8 data type to store kv cache.*(?:without|scaling factor)"
        r"|fp8 kv cache but no scaling factors",
        "the engine stores K and V in fp8 and says that accuracy may drop without scales",
        "the checkpoint has no scales for K and V",
        "calibrate scales, or --kv-cache-dtype auto; measure quality on your own task",
    ),
    _rule(
        "kv-quantization-risk",
        r"kv_cache.*\b[KV] \((?P<form>[qi]q?[1-5]_\w+)\)|OLLAMA_KV_CACHE_TYPE[:=](?P<form2>q4\w*)"
        r"|kv_cache_dtype[=:' ]+(?P<form3>\w*(?:int4|fp4|e5m2)\w*)",
        "K or V is stored with 5 bits or less",
        "long contexts, tool calls and small models suffer first",
        "q8_0 or fp8 with scales; measure quality on your own task",
    ),
    _rule(
        "prefix-caching-off",
        r"enable_prefix_caching['\"]?[=:' ]+false|prefix caching (?:is )?disabled"
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
