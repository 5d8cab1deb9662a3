"""What servers export: vLLM, SGLang, llama.cpp and kvist, with what else is on such a page."""

# ruff: noqa: E501  (lines of metrics and events are as long as they are)

from __future__ import annotations

from typing import Any

from plant_case import histogram, labelled, process_lines

_SECONDS = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0]
_FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0]
_TOKENS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0]


def vllm(prefix: str = "vllm", model: str = "llama-3.1-8b-instruct", **facts: Any) -> str:
    """Return one model's lines as vLLM (or kvist) exports them; `facts` over a healthy server."""
    f: dict[str, Any] = {
        "running": 14, "waiting": 0, "usage": 0.41, "queries": 4_210_881, "hits": 2_301_120,
        "preempted": 0, "stop": 2711, "length": 184, "e2e": 1.31, "prompt": 1454, "output": 92,
        "ttft": 0.11, "itl": 0.014, "queue": 0.002, "config": {}, "extra": [], "exact": (),
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
        if key in f["exact"]:
            lines += exact(f"{prefix}:{name}", labels, finished, f[key])
            continue
        count = finished * f["output"] if key == "itl" else finished
        lines += histogram(f"{prefix}:{name}", labels, f[key], count, edges)
    return "\n".join([*lines, *f["extra"]]) + "\n"


def exact(name: str, labels: str, count: int, value: int) -> list[str]:
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


def page(*parts: str) -> dict[str, str]:
    """Return the files of a case: one page of metrics."""
    return {"metrics.txt": "\n".join(process_lines()) + "\n" + "".join(parts)}


def sglang(running: int, queued: int, usage: float, hit: float, retracted: int = 0) -> str:
    """Return the lines of SGLang."""
    labels = 'engine_type="unified",model_name="qwen2.5-32b-instruct",pp_rank="0",tp_rank="0"'
    lines = [
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


def llama_cpp(processing: int, deferred: int, usage: float) -> str:
    """Return the lines of llama.cpp with ``--metrics``."""
    return (
        "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 913204\n"
        "llamacpp:prompt_seconds_total 411.204\nllamacpp:tokens_predicted_total 118321\n"
        "llamacpp:tokens_predicted_seconds_total 3511.81\nllamacpp:n_decode_total 61220\n"
        "llamacpp:n_busy_slots_per_decode 3.71\nllamacpp:prompt_tokens_seconds 2220.8\n"
        f"llamacpp:predicted_tokens_seconds 33.69\nllamacpp:kv_cache_usage_ratio {usage}\n"
        f"llamacpp:kv_cache_tokens {int(usage * 131072)}\n"
        f"llamacpp:requests_processing {processing}\nllamacpp:requests_deferred {deferred}\n"
    )


def kvist(
    blocks: tuple[int, int, int], slots: tuple[int, int], moved: tuple[int, int], **facts: Any
) -> str:
    """Return the lines of kvist."""
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
    return vllm("kvist", "smollm2-135m-instruct", extra=extra, config=config, **facts)
