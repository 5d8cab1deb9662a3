"""Planted logs of vLLM: what it prints when memory hurts, among what else it prints."""
# ruff: noqa: E501  (log lines are as long as they are)

from __future__ import annotations

from plant_case import Case

_BANNER = """\
INFO 11-21 09:11:02 [__init__.py:216] Automatically detected platform cuda.
(APIServer pid=2699) INFO 11-21 09:11:09 [api_server.py:1839] vLLM API server version 0.32.0
(APIServer pid=2699) INFO 11-21 09:11:09 [utils.py:233] non-default args: {{'model': 'some/model', 'max_model_len': {length}}}
(APIServer pid=2699) INFO 11-21 09:11:15 [model.py:547] Resolved architecture: LlamaForCausalLM
(APIServer pid=2699) INFO 11-21 09:11:15 [model.py:1510] Using max model len {length}
(APIServer pid=2699) INFO 11-21 09:11:15 [scheduler.py:205] Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:21 [core.py:77] Initializing a V1 LLM engine (v0.32.0) with config: model='some/model', dtype=torch.bfloat16, max_seq_len={length}, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, seed=0, enable_prefix_caching={caching}, chunked_prefill_enabled=True
(EngineCore_DP0 pid=2731) WARNING 11-21 09:11:22 [interface.py:381] Using 'pin_memory=False' as WSL is detected. This may slow down the performance.
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:25 [gpu_model_runner.py:2602] Starting to load model some/model...
Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:03<00:00,  1.21it/s]
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:31 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 5.22 seconds
"""
_READY = """\
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:44 [gpu_worker.py:298] Available KV cache memory: 17.12 GiB
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:44 [kv_cache_utils.py:1087] GPU KV cache size: 140,240 tokens
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:44 [kv_cache_utils.py:1091] Maximum concurrency for {length:,} tokens per request: {times:.2f}x
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|##########| 67/67 [00:04<00:00, 15.11it/s]
(EngineCore_DP0 pid=2731) INFO 11-21 09:11:51 [gpu_model_runner.py:3480] Graph capturing finished in 6 secs, took 0.61 GiB
(APIServer pid=2699) INFO 11-21 09:11:53 [launcher.py:44] Route: /metrics, Methods: GET
(APIServer pid=2699) INFO:     Started server process [2699]
(APIServer pid=2699) INFO:     Application startup complete.
"""


def _banner(length: int = 32768, caching: bool = True) -> str:
    return _BANNER.format(length=length, caching=caching)


def _start(length: int = 32768, caching: bool = True) -> str:
    return _banner(length, caching) + _READY.format(length=length, times=140240 / length)


def _stats(
    minute: int,
    second: int,
    running: int,
    waiting: int,
    usage: float,
    hits: float,
    preempted: int = 0,
) -> str:
    thrown = f"Preemptions: {preempted}, " if preempted else ""
    return (
        f"(APIServer pid=2699) INFO 11-21 09:{minute:02d}:{second:02d} [loggers.py:127] Engine 000: Avg prompt throughput:"
        f" {811.4 + second:.1f} tokens/s, Avg generation throughput: {644.1 - second:.1f} tokens/s, Running: {running} reqs,"
        f" Waiting: {waiting} reqs, {thrown}GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: {hits:.1f}%\n"
        '(APIServer pid=2699) INFO:     client:48210 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    )


def _vllm_full() -> str:
    text = _start() + "".join(
        _stats(14, s, 31 + s % 3, 12 + s, 99.1 + s / 100, 41.0) for s in range(2, 60, 10)
    )
    return (
        text
        + "(APIServer pid=2699) INFO 11-21 09:15:02 [loggers.py:127] Engine 000: Avg prompt thr"
    )


def _vllm_calm() -> str:
    text = _start() + "".join(
        _stats(20 + m, s, (7 * m + s) % 19, 0, (11.3 * m + s) % 57, 61.2)
        for m in range(4)
        for s in (2, 32)
    )
    text += "".join(_stats(31, s, 0, 0, 0.0, 61.2) for s in (2, 12))
    return text + (
        "(APIServer pid=2699) WARNING 11-21 09:32:11 [serving_chat.py:981] The client closed the connection; request chatcmpl-9f2c aborted\n"
        "(APIServer pid=2699) INFO 11-21 09:32:12 [logger.py:39] Received request chatcmpl-11aa: prompt: 'why does my job die with out of memory?', params: SamplingParams(n=1, temperature=0.7, max_tokens=400)\n"
        "(APIServer pid=2699) INFO 11-21 09:33:00 [loggers.py:127] Engine 000: Avg prompt throughput: 20.1 tok"
    )


CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 23.64 GiB of which 310.44 MiB is free. Including non-PyTorch memory, this process has 23.32 GiB memory in use."


def _vllm_load_oom() -> str:
    who = "(EngineCore_DP0 pid=2731) ERROR 11-21 09:11:29 [core.py:708] "
    lines = _banner().splitlines()[:-2]
    lines += [
        who + "EngineCore failed to start.",
        who + "Traceback (most recent call last):",
        who + '  File "vllm/v1/engine/core.py", line 699, in run_engine_core',
        who + "    engine_core = EngineCoreProc(*args, **kwargs)",
        who + CUDA_OOM.format(size="224.00 MiB"),
        "(APIServer pid=2699) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    return "\n".join(lines) + "\n"


def _vllm_no_blocks(message: str, length: int = 32768) -> str:
    who = "(EngineCore_DP0 pid=2731) ERROR 11-21 09:11:45 [core.py:708] "
    return (
        _banner(length)
        + "(EngineCore_DP0 pid=2731) INFO 11-21 09:11:44 [gpu_worker.py:298] Available KV cache memory: 3.10 GiB\n"
        + f'{who}EngineCore failed to start.\n{who}Traceback (most recent call last):\n{who}  File "vllm/v1/core/kv_cache_utils.py", line 1031, in check_enough\n'
        + f"{who}ValueError: {message}\n"
    )


def _vllm_first_request_oom() -> str:
    who = "(EngineCore_DP0 pid=2731) ERROR 11-21 09:13:20 [core.py:710] "
    return (
        _start()
        + "(APIServer pid=2699) INFO 11-21 09:13:19 [logger.py:39] Received request chatcmpl-7b01: params: SamplingParams(n=1, max_tokens=1024, prompt_logprobs=1)\n"
        + f"{who}EngineCore encountered a fatal error.\n{who}Traceback (most recent call last):\n{who}    logits = logits.to(torch.float32)\n{who}{CUDA_OOM.format(size='9.82 GiB')}\n"
        + '(APIServer pid=2699) INFO:     client:51822 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
    )


def _vllm_too_long() -> str:
    refusals = "".join(
        f"(APIServer pid=2699) ERROR 11-21 09:1{4 + i % 5}:0{i} [serving_chat.py:257] ValueError: This model's maximum context length is 8192 tokens. However, you requested {9000 + 311 * i} tokens ({8000 + 311 * i} in the messages, 1000 in the completion). Please reduce the length of the messages or completion.\n"
        '(APIServer pid=2699) INFO:     client:48810 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request\n'
        for i in range(7)
    )
    return (
        _start(8192) + _stats(13, 2, 4, 0, 12.0, 33.0) + refusals + _stats(19, 42, 3, 0, 9.0, 33.0)
    )


def _vllm_recompute() -> str:
    """The words of an older version."""
    return _start() + "".join(
        f"WARNING 11-21 09:{20 + i // 12:02d}:{5 * i % 60:02d} scheduler.py:1754] Sequence group {i} is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption={50 * i + 1}\n"
        f"INFO 11-21 09:{20 + i // 12:02d}:{(5 * i + 2) % 60:02d} metrics.py:455] Avg prompt throughput: 402.1 tokens/s, Avg generation throughput: 98.3 tokens/s, Running: 22 reqs, Swapped: 0 reqs, Pending: 1 reqs, GPU KV cache usage: 98.9%, CPU KV cache usage: 0.0%.\n"
        for i in range(24)
    )


def _vllm_in_a_pod() -> str:
    """A log as a container runtime keeps it; two engines, the second is full."""
    text = _start() + "".join(
        _stats(14, s, 12, 0, 33.0, 58.0)
        + _stats(14, s, 30, 25 + s, 99.6, 58.0).replace("Engine 000", "Engine 001")
        for s in range(2, 60, 10)
    )
    return "".join(
        f"2026-11-21T09:14:0{i % 10}.{i:09d}Z stdout F {line}\n"
        for i, line in enumerate(text.splitlines())
    )


def _vllm_two_engines_calm() -> str:
    return _start() + "".join(
        _stats(14, s, 12, 0, 63.0, 58.0)
        + _stats(14, s, 0, 0, 0.0, 0.0).replace("Engine 000", "Engine 001")
        for s in range(2, 60, 10)
    )


def cases() -> list[Case]:
    """Return the cases whose only evidence is a log."""
    no_blocks = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
    too_long = "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (3.10 GiB). Based on the available memory, the estimated maximum model length is 25392. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    return [
        Case(
            "log-vllm-full",
            "pool-exhausted",
            "a day's log in which the queue grows behind a full pool; last line cut",
            {"server.log": _vllm_full()},
        ),
        Case(
            "log-vllm-load-oom",
            "oom-at-start",
            "weights do not fit",
            {"server.log": _vllm_load_oom()},
        ),
        Case(
            "log-vllm-no-blocks",
            "oom-at-start",
            "weights fit, nothing is left for the cache",
            {"server.log": _vllm_no_blocks(no_blocks)},
        ),
        Case(
            "log-vllm-context-does-not-fit",
            "oom-at-start",
            "one request of the model's length does not fit",
            {"vllm.log": _vllm_no_blocks(too_long, 131072)},
        ),
        Case(
            "log-vllm-first-request-oom",
            "oom-at-first-request",
            "prompt_logprobs needs workspace that nobody left",
            {"vllm.log": _vllm_first_request_oom()},
        ),
        Case(
            "log-vllm-too-long",
            "context-too-short",
            "an agent grows past 8192 and gets 400",
            {"vllm.log": _vllm_too_long()},
        ),
        Case(
            "log-vllm-prefix-off",
            "prefix-caching-off",
            "only the configuration line says so",
            {
                "vllm.log": _start(caching=False)
                + _stats(20, 2, 9, 0, 31.0, 0.0)
                + _stats(20, 12, 8, 0, 29.0, 0.0)
            },
        ),
        Case(
            "log-vllm-queue",
            "queue-without-pressure",
            "8 run, 60 wait, the pool is at 5 %",
            {
                "vllm.log": _start()
                + "".join(_stats(20, s, 8, 57 + s, 5.1, 55.0) for s in range(1, 60, 10))
            },
        ),
        Case(
            "log-vllm-recompute",
            "preemption-storm",
            "50 preemptions every 5 seconds, in the words of an older version",
            {"vllm.log": _vllm_recompute()},
        ),
        Case(
            "log-pod-second-engine-full",
            "pool-exhausted",
            "two engines behind one log with a container's prefix; the second is full",
            {"pod.log": _vllm_in_a_pod()},
        ),
        Case(
            "healthy-log-idle-engine",
            None,
            "two engines, the second gets nothing: usage 0, hits 0",
            {"vllm.log": _vllm_two_engines_calm()},
        ),
        Case(
            "healthy-log-vllm",
            None,
            "idle phases with usage 0, a client that left, and 'out of memory' in somebody's question",
            {"vllm.log": _vllm_calm()},
        ),
    ]
