"""Planted metrics: vLLM, SGLang, llama.cpp and kvist, with what else an exporter says."""

# ruff: noqa: E501  (lines of metrics and events are as long as they are)

from __future__ import annotations

from typing import Any

from plant_case import Case, histogram, labelled, process_lines

_SECONDS = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0]
_FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0]
_TOKENS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0]


def _vllm(prefix: str = "vllm", model: str = "llama-3.1-8b-instruct", **facts: Any) -> str:
    """Return one model's lines as vLLM (or kvist) exports them; `facts` over a healthy server."""
    f: dict[str, Any] = {
        "running": 14, "waiting": 0, "usage": 0.41, "queries": 4_210_881, "hits": 2_301_120,
        "preempted": 0, "stop": 2711, "length": 184, "e2e": 1.31, "prompt": 1454, "output": 92,
        "ttft": 0.11, "itl": 0.014, "queue": 0.002, "config": {}, "extra": [],
    } | facts  # fmt: skip
    labels = f'engine="0",model_name="{model}"' if prefix == "vllm" else f'model_name="{model}"'
    config = {
        "block_size": 16, "cache_dtype": "auto", "calculate_kv_scales": "False",
        "cpu_kvcache_space_bytes": "None", "enable_prefix_caching": "True", "engine": 0,
        "gpu_memory_utilization": 0.92, "is_attention_free": "False", "num_cpu_blocks": "None",
        "num_gpu_blocks": 27431, "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256", "sliding_window": "None", "swap_space": 4.0,
    } | f["config"]  # fmt: skip
    finished = f["stop"] + f["length"]
    lines = [
        f"# HELP {prefix}:num_requests_running Number of requests in model execution batches.",
        f"# TYPE {prefix}:num_requests_running gauge",
        f"{prefix}:num_requests_running{{{labels}}} {float(f['running'])}",
        f"# TYPE {prefix}:num_requests_waiting gauge",
        f"{prefix}:num_requests_waiting{{{labels}}} {float(f['waiting'])}",
        f"# TYPE {prefix}:kv_cache_usage_perc gauge",
        f"{prefix}:kv_cache_usage_perc{{{labels}}} {f['usage']}",
        f"# TYPE {prefix}:prefix_cache_queries_total counter",
        f"{prefix}:prefix_cache_queries_total{{{labels}}} {float(f['queries'])}",
        f"{prefix}:prefix_cache_queries_created{{{labels}}} 1.7637122121e+09",
        f"{prefix}:prefix_cache_hits_total{{{labels}}} {float(f['hits'])}",
        f"{prefix}:num_preemptions_total{{{labels}}} {float(f['preempted'])}",
        f"{prefix}:prompt_tokens_total{{{labels}}} {float(finished * f['prompt'])}",
        f"{prefix}:generation_tokens_total{{{labels}}} {float(finished * f['output'])}",
        *(
            f'{prefix}:request_success_total{{{labels},finished_reason="{reason}"}} {count}.0'
            for reason, count in (
                ("stop", f["stop"]), ("length", f["length"]), ("abort", 3), ("error", 0)
            )
        ),
        f"# TYPE {prefix}:cache_config_info gauge",
        f"{prefix}:cache_config_info{{{labelled(config)}}} 1.0",
    ]  # fmt: skip
    for name, key, edges in (
        ("e2e_request_latency_seconds", "e2e", _SECONDS),
        ("request_queue_time_seconds", "queue", _SECONDS),
        ("time_to_first_token_seconds", "ttft", _FIRST),
        ("inter_token_latency_seconds", "itl", _FIRST),
        ("request_prompt_tokens", "prompt", _TOKENS),
        ("request_generation_tokens", "output", _TOKENS),
    ):
        count = finished * f["output"] if key == "itl" else finished
        lines += histogram(f"{prefix}:{name}", labels, f[key], count, edges)
    return "\n".join([*lines, *f["extra"]]) + "\n"


def _exact(name: str, labels: str, count: int, value: int) -> list[str]:
    """Return a histogram all of whose values lie at one place."""
    lines = [
        f'{name}_bucket{{{labels},le="{edge}"}} {float(count if edge >= value else 0)}'
        for edge in _TOKENS
    ]
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {float(count)}')
    return [
        *lines,
        f"{name}_count{{{labels}}} {count}.0",
        f"{name}_sum{{{labels}}} {count * value}.0",
    ]


def _page(*parts: str) -> dict[str, str]:
    return {"metrics.txt": "\n".join(process_lines()) + "\n" + "".join(parts)}


def _sglang(running: int, queued: int, usage: float, hit: float, retracted: int = 0) -> str:
    labels = 'engine_type="unified",model_name="qwen2.5-32b-instruct",pp_rank="0",tp_rank="0"'
    lines = [
        "# HELP sglang:num_running_reqs The number of running requests.",
        "# TYPE sglang:num_running_reqs gauge",
        f"sglang:num_running_reqs{{{labels}}} {float(running)}",
        f"sglang:num_used_tokens{{{labels}}} {float(int(181203 * usage))}",
        f"sglang:max_total_num_tokens{{{labels}}} 181203.0",
        f"sglang:token_usage{{{labels}}} {usage}",
        f"sglang:gen_throughput{{{labels}}} 1811.42",
        f"sglang:num_queue_reqs{{{labels}}} {float(queued)}",
        f"sglang:num_retracted_reqs{{{labels}}} {float(retracted)}",
        f"sglang:cache_hit_rate{{{labels}}} {hit}",
        f"sglang:prompt_tokens_total{{{labels}}} 5.128331e+06",
        f"sglang:generation_tokens_total{{{labels}}} 811204.0",
        f"sglang:num_requests_total{{{labels}}} 6120.0",
    ]
    lines += histogram("sglang:e2e_request_latency_seconds", labels, 1.4, 6120, _SECONDS)
    lines += histogram("sglang:time_to_first_token_seconds", labels, 0.2, 6120, _FIRST)
    return "\n".join(lines) + "\n"


def _llama_cpp(processing: int, deferred: int, usage: float) -> str:
    return (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.\n"
        "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 913204\n"
        "llamacpp:prompt_seconds_total 411.204\nllamacpp:tokens_predicted_total 118321\n"
        "llamacpp:tokens_predicted_seconds_total 3511.81\nllamacpp:n_decode_total 61220\n"
        "llamacpp:n_busy_slots_per_decode 3.71\nllamacpp:prompt_tokens_seconds 2220.8\n"
        f"llamacpp:predicted_tokens_seconds 33.69\nllamacpp:kv_cache_usage_ratio {usage}\n"
        f"llamacpp:kv_cache_tokens {int(usage * 131072)}\n"
        f"llamacpp:requests_processing {processing}\nllamacpp:requests_deferred {deferred}\n"
    )


def _kvist(
    blocks: tuple[int, int, int], slots: tuple[int, int], moved: tuple[int, int], **facts: Any
) -> str:
    label = 'model_name="smollm2-135m-instruct"'
    extra = [
        *(
            f'kvist:kv_blocks{{{label},state="{state}"}} {n}'
            for state, n in zip(("free", "cached", "used"), blocks, strict=True)
        ),
        f'kvist:kv_slots{{{label},state="allocated"}} {slots[0]}',
        f'kvist:kv_slots{{{label},state="filled"}} {slots[1]}',
        f"kvist:kv_blocks_stored_total{{{label}}} {moved[0]}",
        f"kvist:kv_blocks_evicted_total{{{label}}} {moved[1]}",
        f'kvist:num_requests_waiting_by_reason{{{label},reason="capacity"}} {facts.get("waiting", 0)}',
        f'kvist:num_requests_waiting_by_reason{{{label},reason="prefix"}} 0',
        f"kvist:num_queued_tokens{{{label}}} {facts.get('waiting', 0) * 900}",
        f"kvist:engine_steps_total{{{label}}} 182331",
        f"kvist:stats_age_seconds{{{label}}} 0.2",
    ]
    config = {"num_gpu_blocks": 4096, "gpu_memory_utilization": "None"}
    return _vllm("kvist", "smollm2-135m-instruct", extra=extra, config=config, **facts)


def cases() -> list[Case]:
    """Return the cases whose main evidence is metrics."""
    label = 'engine="0",model_name="mistral-small"'
    long_answers = [*_exact("vllm:request_max_num_generation_tokens", label, 1180, 200)]
    sick = _vllm(
        model="qwen3-14b", running=37, waiting=52, usage=0.9981, preempted=9, e2e=22.4, queue=13.0
    )
    fits = {"num_gpu_blocks": 40211}
    return [
        Case(
            "vllm-pool-full",
            "pool-exhausted",
            "long documents, everyone waits for blocks",
            _page(
                _vllm(
                    running=41,
                    waiting=63,
                    usage=0.9987,
                    preempted=11,
                    e2e=31.0,
                    queue=19.2,
                    prompt=6120,
                    extra=[
                        'vllm:num_requests_waiting_by_reason{engine="0",model_name="llama-3.1-8b-instruct",reason="capacity"} 63.0',
                        'vllm:num_requests_waiting_by_reason{engine="0",model_name="llama-3.1-8b-instruct",reason="deferred"} 0.0',
                    ],
                )
            ),
        ),
        Case(
            "vllm-thrash",
            "preemption-storm",
            "five requests of 100k tokens fight for the pool",
            _page(
                _vllm(
                    running=4,
                    waiting=3,
                    usage=0.973,
                    preempted=2130,
                    stop=1140,
                    length=64,
                    e2e=66.0,
                    queue=7.0,
                    itl=0.4,
                    prompt=9800,
                )
            ),
        ),
        Case(
            "vllm-prefix-off",
            "prefix-caching-off",
            "an old launch script has --no-enable-prefix-caching",
            _page(_vllm(queries=0, hits=0, config={"enable_prefix_caching": "False"})),
        ),
        Case(
            "vllm-small-batch",
            "queue-without-pressure",
            "--max-num-seqs 8 left over from a test",
            _page(_vllm(running=8, waiting=97, usage=0.061, e2e=18.2, queue=16.9)),
        ),
        Case(
            "vllm-two-models-one-full",
            "pool-exhausted",
            "one exporter page for two models; the second is full",
            _page(_vllm(), sick),
        ),
        Case(
            "vllm-fp8-no-scales",
            "kv-quantization-risk",
            "fp8 cache, the checkpoint has no scales",
            _page(_vllm(config={"cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": "[]"})),
        ),
        Case(
            "vllm-turboquant",
            "kv-quantization-risk",
            "3-bit keys and values to save memory",
            _page(_vllm(config={"cache_dtype": "turboquant_3bit_nc"})),
        ),
        Case(
            "vllm-slow-but-not-memory",
            "latency-high",
            "long answers on a slow card; the cache is fine",
            _page(_vllm(running=9, usage=0.22, e2e=14.2, output=610, itl=0.023)),
        ),
        Case(
            "vllm-length-at-the-end-of-context",
            "answers-cut",
            "prompts of 3900 in a context of 4096",
            _page(
                _vllm(
                    model="mistral-small",
                    stop=211,
                    length=1180,
                    prompt=3890,
                    output=196,
                    config=fits,
                    extra=long_answers,
                )
            ),
            ("--max-model-len", "4096"),
        ),
        Case(
            "vllm-128k-for-chat",
            "max-model-len-too-long",
            "131072 served by default; chats of 600 tokens; one request of it fits",
            _page(
                _vllm(
                    running=3,
                    usage=0.03,
                    prompt=420,
                    output=110,
                    config={
                        "num_gpu_blocks": 8733,
                        "kv_cache_size_tokens": 139728,
                        "kv_cache_max_concurrency": "1.07",
                    },
                )
            ),
            ("--max-model-len", "131072"),
        ),
        Case(
            "sglang-full",
            "pool-exhausted",
            "queue behind a full token pool",
            _page(_sglang(58, 121, 0.99, 0.44)),
        ),
        Case(
            "llama-cpp-four-slots",
            "queue-without-pressure",
            "-np 4 with a context of 128k: slots run out, not memory",
            {"metrics.prom": _llama_cpp(4, 14, 0.118)},
        ),
        Case(
            "kvist-reserved",
            "reservation-waste",
            "max_tokens is reserved at admission, answers are short",
            _page(_kvist((310, 90, 3696), (59136, 9310), (4120, 12), running=31, usage=0.902)),
        ),
        Case(
            "kvist-full",
            "pool-exhausted",
            "a burst of 900-token prompts",
            _page(
                _kvist(
                    (2, 0, 4094),
                    (65504, 64811),
                    (81220, 13011),
                    running=71,
                    waiting=44,
                    usage=0.9995,
                    preempted=4,
                    e2e=9.1,
                    queue=5.5,
                )
            ),
        ),
        Case(
            "kvist-slow",
            "latency-high",
            "two cores, 400-token answers; nothing waits",
            _page(
                _kvist(
                    (3000, 700, 396),
                    (6336, 6104),
                    (41220, 0),
                    running=3,
                    usage=0.097,
                    e2e=7.9,
                    output=401,
                    itl=0.019,
                )
            ),
        ),
        Case(
            "kvist-thrash",
            "preemption-storm",
            "watermark 0 and long answers: sequences throw each other out",
            _page(
                _kvist(
                    (1, 3, 4092),
                    (65472, 64220),
                    (90120, 61000),
                    running=33,
                    waiting=2,
                    usage=0.991,
                    preempted=3301,
                    stop=1410,
                    length=202,
                    e2e=44.0,
                    queue=1.9,
                )
            ),
        ),
        Case(
            "healthy-batch-job",
            None,
            "an offline job fills the pool to 96 % on purpose: nobody waits, nothing is lost",
            _page(_vllm(running=200, usage=0.961, e2e=1.8)),
        ),
        Case(
            "healthy-few-preemptions",
            None,
            "3 preemptions in 50000 requests",
            _page(
                _vllm(
                    stop=49211,
                    length=1201,
                    preempted=3,
                    usage=0.83,
                    queries=73_000_000,
                    hits=51_020_112,
                )
            ),
        ),
        Case(
            "healthy-unique-traffic",
            None,
            "metrics alone: 0.3 % hits, and nothing says that prompts share",
            _page(_vllm(queries=9_120_331, hits=27_136, usage=0.38)),
        ),
        Case(
            "healthy-capped-by-max-tokens",
            None,
            "nine of ten end by length since clients ask for 128 tokens",
            _page(
                _vllm(
                    model="mistral-small",
                    stop=300,
                    length=2700,
                    prompt=310,
                    output=128,
                    config=fits,
                )
            ),
            ("--max-model-len", "8192"),
        ),
        Case(
            "healthy-fresh-server",
            None,
            "just started: all zero",
            _page(_vllm(running=0, usage=0.0, queries=0, hits=0, stop=0, length=0)),
        ),
        Case(
            "healthy-one-waits",
            None,
            "a snapshot in the moment of an arrival",
            _page(_vllm(running=22, waiting=1, usage=0.57)),
        ),
        Case(
            "healthy-int8-per-token",
            None,
            "8-bit integers with a scale for each token and head",
            _page(_vllm(config={"cache_dtype": "int8_per_token_head"})),
        ),
        Case(
            "healthy-sglang-busy",
            None,
            "93 % of the pool in use, queue empty",
            _page(_sglang(63, 0, 0.93, 0.71)),
        ),
        Case(
            "healthy-kvist-turnover",
            None,
            "evicts all day and still finds 70 %",
            _page(
                _kvist(
                    (12, 3391, 693),
                    (11088, 10731),
                    (901221, 897330),
                    running=9,
                    usage=0.169,
                    queries=5_000_000,
                    hits=3_511_020,
                )
            ),
        ),
    ]
