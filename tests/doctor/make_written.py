"""Writes the cases that nobody captured: by hand, in the wording of each engine, labelled so.

    python tests/doctor/make_written.py

Kept beside what it writes, so that a case can be changed where it is understood.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

CASES = Path(__file__).with_name("cases")
SOURCE = "written by hand in the engine's wording"

OLLAMA_CONFIG = (
    'time=T level=INFO source=routes.go:1158 msg="server config" env="map['
    'OLLAMA_CONTEXT_LENGTH:4096 OLLAMA_KV_CACHE_TYPE:{kv} OLLAMA_NUM_PARALLEL:1]"'
)
OLLAMA_START = (
    OLLAMA_CONFIG,
    'time=T level=INFO source=server.go:1289 msg="llama runner started in 2.10 seconds"',
)
SGLANG_ARGS = (
    "[T] server_args=ServerArgs(model_path='m', context_length=32768, disable_radix_cache={off},"
    " kv_cache_dtype='auto')"
)
SGLANG_START = (
    SGLANG_ARGS,
    "[T] KV Cache is allocated. #tokens: 120000, K size: 6.41 GB, V size: 6.41 GB",
    "[T] The server is fired up and ready to roll!",
)


def case(name: str, first: str | None, file: str, text: str, **more: object) -> None:
    folder = CASES / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    expected = {"first": first, "source": SOURCE, **more}
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


def log(name: str, first: str | None, *lines: str, **more: object) -> None:
    case(name, first, "server.log", "\n".join(lines) + "\n", **more)


def sglang(running: int, tokens: int, use: float, speed: float, queue: int) -> str:
    return (
        f"[T] Decode batch. #running-req: {running}, #token: {tokens}, token usage: {use:.2f},"
        f" cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: {queue}"
    )


def ollama_cases() -> None:
    start = [line.format(kv="") for line in OLLAMA_START]
    cut = (
        'time=T level=WARN source=runner.go:153 msg="truncating input prompt" limit=4096'
        " prompt={} keep=5 new=4096"
    )
    log("ollama-default-context", "context-truncated", *start, cut.format(9211), cut.format(7100))
    log(
        "ollama-history",
        "context-truncated",
        *start,
        'time=T level=DEBUG source=prompt.go:66 msg="truncating input messages which exceed context'
        ' length" truncated=3',
    )
    log(
        "ollama-four-bits",
        "kv-quantization-risk",
        *(line.format(kv="q4_0") for line in OLLAMA_START),
    )
    log(
        "ollama-memory",
        "oom-at-start",
        start[0],
        'time=T level=WARN source=server.go:168 msg="model request too large for system"'
        ' error="model requires more system memory (15.9 GiB) than is available (7.4 GiB)"',
    )
    log("ollama-healthy", None, *start, '[GIN] T | 200 | 1.2s | HOST | POST "/api/chat"')


def sglang_cases() -> None:
    start = [line.format(off="False") for line in SGLANG_START]
    quiet = [sglang(20, 40_000, 0.33, 900 + n, 0) for n in range(8)]
    log("sglang-healthy", None, *start, *quiet)
    log(
        "sglang-no-radix",
        "prefix-caching-off",
        *(line.format(off="True") for line in SGLANG_START),
        *quiet,
    )
    log(
        "sglang-retract",
        "preemption-storm",
        *start,
        *[
            f"[T] KV cache pool is full. Retract requests. #retracted_reqs: {n}, #new_token_ratio:"
            f" 0.{n} -> 0.9"
            for n in range(1, 6)
        ],
    )
    full = [sglang(60, 118_000, 0.98, 1500, 40 + n) for n in range(8)]
    log("sglang-full", "pool-exhausted", *start, *full)
    slower = [sglang(1, 1_000 * n, 0.01 * n, 1e3 / (10 + 1.5 * n), 0) for n in range(1, 20)]
    log("sglang-long-contexts", "decode-slows-with-context", *start, *slower)
    log(
        "sglang-fp8",
        "kv-quantization-risk",
        "[T] Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of"
        " 1.0. This may lead to less accurate results!",
        *start,
    )
    log(
        "sglang-static-memory",
        "oom-at-start",
        "[T] server_args=ServerArgs(model_path='m', mem_fraction_static=0.5)",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    )
    log(
        "sglang-first-request",
        "oom-at-first-request",
        *start,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.10 GiB. GPU 0 has a total"
        " capacity of 79.15 GiB of which 1.20 GiB is free.",
    )
    metrics = "\n".join(
        (
            'sglang:num_running_reqs{model_name="m"} 48',
            'sglang:num_queue_reqs{model_name="m"} 31',
            'sglang:token_usage{model_name="m"} 0.97',
            'sglang:cache_hit_rate{model_name="m"} 0.8',
            'sglang:prompt_tokens_total{model_name="m"} 500000',
            'sglang:num_requests_total{model_name="m"} 900',
            "",
        )
    )
    case("sglang-full-metrics", "pool-exhausted", "metrics.txt", metrics)
    healthy = metrics.replace(" 31", " 0").replace("0.97", "0.5")
    case("sglang-healthy-metrics", None, "metrics.txt", healthy)


def requests(name: str, first: str | None, bodies: list[object], **more: object) -> None:
    text = "".join(json.dumps(body) + "\n" for body in bodies)
    case(name, first, "requests.jsonl", text, **more)


RULES = " ".join(f"Rule {n}: answer number {n} with care and cite the source." for n in range(40))


def chat(system: str, user: str, **more: object) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, **more}


def text(rng: random.Random, count: int) -> str:
    return " ".join(f"w{rng.randrange(10**6)}" for _ in range(count))


def request_cases() -> None:
    rng = random.Random(7)
    bot = "You are a helpful bot."
    requests(
        "requests-timestamp",
        "prefix-differs-early",
        [chat(f"{bot} Time: 12:{i:02d}:07. {RULES}", text(rng, 20)) for i in range(50)],
    )
    requests(
        "requests-session-id",
        "prefix-differs-early",
        [
            {"custom_id": str(i), "body": chat(f"Session {rng.getrandbits(64):x}. {RULES}", "hi")}
            for i in range(40)
        ],
    )
    requests(
        "requests-documents-first",
        "prefix-differs-early",
        [{"prompt": f"Context: {text(rng, 150)} {RULES} {text(rng, 10)}"} for _ in range(30)],
    )
    requests(
        "requests-salt-each",
        "salt-or-hash-differs",
        [chat(f"{bot} {RULES}", text(rng, 9), cache_salt=f"u{i}") for i in range(40)],
    )
    requests(
        "requests-strangers",
        "prompts-share-nothing",
        [chat(text(rng, 40), text(rng, 40)) for _ in range(30)],
    )
    requests(
        "requests-short-prefix",
        "block-larger-than-prefix",
        [chat(f"{bot} {text(rng, 1)}", text(rng, 60)) for _ in range(30)],
    )
    documents = [f"{bot} {text(rng, 200)}" for _ in range(12)]
    in_turn = [{"prompt": f"{documents[i % 12]} {text(rng, 8)}"} for i in range(60)]
    requests(
        "requests-pool-too-small", "cache-too-small", in_turn, options=["--pool-tokens", "1500"]
    )
    requests("requests-pool-enough", None, in_turn, options=["--pool-tokens", "8000"])
    flooded = []
    for i in range(30):
        flooded += [{"prompt": f"{documents[i % 2]} {text(rng, 8)}"}]
        flooded += [{"prompt": text(rng, 200)} for _ in range(4)]
    requests(
        "requests-flood",
        "hot-prefixes-evicted",
        flooded,
        options=["--pool-tokens", "1500"],
    )
    requests("requests-healthy", None, [chat(f"{bot} {RULES}", text(rng, 20)) for _ in range(40)])
    slow = [
        {
            "body": {"prompt": f"{bot} {RULES} {text(rng, 5)}"},
            "usage": {
                "prompt_tokens": 500 * n,
                "completion_tokens": 100,
                "prompt_tokens_details": {"cached_tokens": 450 * n},
            },
            "duration_s": 0.6 + 0.12 * n,
        }
        for n in range(1, 16)
    ]
    requests("requests-long-contexts", "decode-slows-with-context", slow)
    requests(
        "requests-length",
        "max-model-len-too-long",
        [chat(f"{bot} {RULES}", text(rng, 20)) for _ in range(40)],
        options=["--max-model-len", "131072"],
    )


def vllm_cases() -> None:
    start = "INFO T [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'"
    ready = "INFO:     Application startup complete."

    def stats(running: int, waiting: int, use: float, hits: float, more: str = "") -> str:
        return (
            "INFO T [loggers.py:336] Engine 000: Avg prompt throughput: 812.0 tokens/s, Avg"
            f" generation throughput: 240.1 tokens/s, Running: {running} reqs, Waiting:"
            f" {waiting} reqs{more}, GPU KV cache usage: {use:.1f}%, Prefix cache hit rate:"
            f" {hits:.1f}%"
        )

    log("vllm-log-healthy", None, start, ready, *[stats(6, 0, 41.0, 80.0)] * 9)
    log("vllm-log-full", "pool-exhausted", start, ready, *[stats(9, 30, 98.7, 80.0)] * 9)
    log("vllm-log-seats", "queue-without-pressure", start, ready, *[stats(8, 30, 21.0, 80.0)] * 9)
    log("vllm-log-hits", "hit-rate-low", start, ready, *[stats(8, 0, 21.0, 22.0)] * 9)
    log(
        "vllm-first-request",
        "oom-at-first-request",
        start,
        ready,
        "ERROR T [core.py:900] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
        " 2.00 GiB",
    )
    log(
        "vllm-busy-device",
        "oom-at-start",
        start,
        "ValueError: Free memory on device cuda:0 (11.20/79.10 GiB) on startup is less than desired"
        " GPU memory utilization (0.9, 71.19 GiB).",
    )


if __name__ == "__main__":
    ollama_cases()
    sglang_cases()
    request_cases()
    vllm_cases()
