"""Planted logs: what engines print when memory hurts, among what else they print."""
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
_SGLANG = """\
[2026-11-21 10:01:22] server_args=ServerArgs(model_path='some/model', tokenizer_mode='auto', context_length={context}, mem_fraction_static=0.88, max_running_requests=None, schedule_policy='fcfs', chunked_prefill_size=8192, disable_radix_cache={off}, attention_backend='fa3', kv_cache_dtype='auto')
[2026-11-21 10:01:31 TP0] Init torch distributed begin.
[2026-11-21 10:01:44 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem=63.12 GB, mem usage=15.2 GB.
[2026-11-21 10:01:45 TP0] KV Cache is allocated. #tokens: 181203, K size: 26.1 GB, V size: 26.1 GB
[2026-11-21 10:01:46 TP0] max_total_num_tokens=181203, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len={context}
[2026-11-21 10:01:52] INFO:     Application startup complete.
[2026-11-21 10:01:54] The server is fired up and ready to roll!
"""
_LLAMA = """\
build: 7101 (a1b2c3d4) with gcc 13.3.0 for x86_64-linux-gnu
system info: n_threads = 8, n_threads_batch = 8, total_threads = 16
main: loading model
llama_model_loader: - kv  17:                qwen3.context_length u32              = 40960
llama_context: n_seq_max     = 1
llama_context: n_ctx         = {ctx}
llama_context: n_ctx_seq     = {ctx}
llama_context: n_batch       = 2048
llama_kv_cache:      CUDA0 KV buffer size =   576.00 MiB
srv          init: initializing slots, n_slots = 1
main: model loaded
main: server is listening on http://127.0.0.1:8080 - starting the main loop
srv  update_slots: all slots are idle
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
        '(APIServer pid=2699) INFO:     127.0.0.1:48210 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
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


_CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 23.64 GiB of which 310.44 MiB is free. Including non-PyTorch memory, this process has 23.32 GiB memory in use."


def _vllm_load_oom() -> str:
    who = "(EngineCore_DP0 pid=2731) ERROR 11-21 09:11:29 [core.py:708] "
    lines = _banner().splitlines()[:-2]
    lines += [
        who + "EngineCore failed to start.",
        who + "Traceback (most recent call last):",
        who + '  File "vllm/v1/engine/core.py", line 699, in run_engine_core',
        who + "    engine_core = EngineCoreProc(*args, **kwargs)",
        who + _CUDA_OOM.format(size="224.00 MiB"),
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
        + f"{who}EngineCore encountered a fatal error.\n{who}Traceback (most recent call last):\n{who}    logits = logits.to(torch.float32)\n{who}{_CUDA_OOM.format(size='9.82 GiB')}\n"
        + '(APIServer pid=2699) INFO:     127.0.0.1:51822 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
    )


def _vllm_too_long() -> str:
    refusals = "".join(
        f"(APIServer pid=2699) ERROR 11-21 09:1{4 + i % 5}:0{i} [serving_chat.py:257] ValueError: This model's maximum context length is 8192 tokens. However, you requested {9000 + 311 * i} tokens ({8000 + 311 * i} in the messages, 1000 in the completion). Please reduce the length of the messages or completion.\n"
        '(APIServer pid=2699) INFO:     127.0.0.1:48810 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request\n'
        for i in range(7)
    )
    return (
        _start(8192) + _stats(13, 2, 4, 0, 12.0, 33.0) + refusals + _stats(19, 42, 3, 0, 9.0, 33.0)
    )


def _sglang(context: int = 65536, off: bool = False) -> str:
    return _SGLANG.format(context=context, off=off)


def _sglang_batches(usage: float, queued: int, cached: int) -> str:
    return "".join(
        f"[2026-11-21 10:04:{s:02d} TP0] Prefill batch. #new-seq: 3, #new-token: 4{s:02d}1, #cached-token: {cached}, token usage: {usage:.2f}, #running-req: {40 + s % 4}, #queue-req: {queued}, \n"
        f"[2026-11-21 10:04:{s:02d} TP0] Decode batch. #running-req: {43 + s % 4}, #token: {int(181203 * usage)}, token usage: {usage:.2f}, cuda graph: True, gen throughput (token/s): 1{s:02d}2.11, #queue-req: {queued}, \n"
        for s in range(10, 50, 7)
    )


def _sglang_retracts() -> str:
    storm = "".join(
        f"[2026-11-21 10:05:{s:02d} TP0] KV cache pool is full. Retract requests. #retracted_reqs: {2 + s % 3}, #new_tokens_gained: 4{s}9, #new_token_ratio: 0.{60 + s % 30} -> 0.99\n"
        + _sglang_batches(0.99, 2, 0).splitlines(keepends=True)[1]
        for s in range(10, 58, 2)
    )
    return _sglang() + _sglang_batches(0.97, 1, 0) + storm


def _sglang_first_oom() -> str:
    return (
        _sglang()
        + "[2026-11-21 10:02:09 TP0] Prefill batch. #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0, \n"
        + "[2026-11-21 10:02:10 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        + '  File "sglang/srt/managers/scheduler.py", line 2711, in run_scheduler_process\n    scheduler.event_loop_overlap()\n'
        + _CUDA_OOM.format(size="2.00 GiB")
        + "\n[2026-11-21 10:02:10] Received sigquit from a child process. It usually means the child failed.\n"
    )


def _sglang_too_long() -> str:
    return (
        _sglang()
        + "".join(
            f"[2026-11-21 10:0{3 + i}:11] ERROR: Input validation failed: The input ({70123 + 512 * i} tokens) is longer than the model's context length (65536 tokens).\n"
            f'[2026-11-21 10:0{3 + i}:11] INFO:     127.0.0.1:40010 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request\n'
            for i in range(4)
        )
        + _sglang_batches(0.31, 0, 2048)
    )


def _slot(task: int, prompt: int, rate: float, truncated: int = 0, extra: str = "") -> str:
    return (
        f"slot launch_slot_: id  0 | task {task} | processing task\n"
        f"slot update_slots: id  0 | task {task} | new prompt, n_ctx_slot = 40960, n_keep = 0, task.n_tokens = {prompt}\n"
        f"slot update_slots: id  0 | task {task} | prompt done, n_tokens = {prompt}, batch.n_tokens = {min(prompt, 512)}\n{extra}"
        f"slot print_timing: id  0 | task {task} | \n"
        f"prompt eval time = {prompt * 0.4:10.2f} ms / {prompt:5d} tokens (    0.40 ms per token,  2500.00 tokens per second)\n"
        f"       eval time = {rate * 200:10.2f} ms /   200 tokens ({rate:8.2f} ms per token, {1000 / rate:8.2f} tokens per second)\n"
        f"      total time = {rate * 200 + prompt * 0.4:10.2f} ms / {prompt + 200:5d} tokens\n"
        f"slot      release: id  0 | task {task} | stop processing: n_tokens = {prompt + 199}, truncated = {truncated}\n"
        "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200\n"
    )


def _llama_shift() -> str:
    return _LLAMA.format(ctx=4096) + "".join(
        _slot(
            40 * i,
            3800 + i,
            14.0,
            1,
            f"slot update_slots: id  0 | task {40 * i} | slot context shift, n_keep = 1, n_left = 4094, n_discard = 2047\n",
        )
        for i in range(1, 6)
    ).replace("n_ctx_slot = 40960", "n_ctx_slot = 4096")


def _llama_refuses() -> str:
    text = _LLAMA.format(ctx=8192)
    for i in range(4):
        need = 9120 + 777 * i
        text += (
            f"slot update_slots: id  0 | task {30 * i} | new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = {need}\n"
            f"srv    send_error: task id = {30 * i}, error: request ({need} tokens) exceeds the available context size (8192 tokens), try increasing it\n"
            f"slot      release: id  0 | task {30 * i} | stop processing: n_tokens = 0, truncated = 0\n"
            "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 400\n"
        )
    return text


def _llama_slows() -> str:
    lengths = [300, 450, 9000, 520, 12000, 700, 16000, 410, 20000, 880, 24000, 600]
    return _LLAMA.format(ctx=40960) + "".join(
        _slot(10 * i, n, 11.0 + n / 450) for i, n in enumerate(lengths)
    )


def _llama_healthy() -> str:
    lengths = [300, 450, 900, 520, 1200, 700, 600, 410]
    note = "llama_context: n_ctx_seq (32768) < n_ctx_train (40960) -- the full capacity of the model will not be utilized\n"
    return (
        _LLAMA.format(ctx=32768)
        + note
        + "".join(_slot(10 * i, n, 5.0) for i, n in enumerate(lengths)).replace(
            "40960, n_keep", "32768, n_keep"
        )
    )


def _llama_load_oom() -> str:
    return (
        "".join(_LLAMA.splitlines(keepends=True)[:4])
        + "load_tensors: offloading 48 repeating layers to GPU\nload_tensors:        CUDA0 model buffer size = 17821.44 MiB\n"
        + "llama_context: n_ctx         = 131072\n"
        + "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 24576.00 MiB on device 0: cudaMalloc failed: out of memory\n"
        + "alloc_tensor_range: failed to allocate CUDA0 buffer of size 25769803776\n"
        + "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n"
        + "common_init_from_params: failed to create context with model 'model.gguf'\nsrv    load_model: failed to load model, 'model.gguf'\n"
        + "srv    operator(): operator(): cleaning up before exit...\nmain: exiting due to model loading error\n"
    )


def _ollama(cuts: int) -> str:
    text = 'time=2026-11-21T09:10:58.004Z level=INFO source=routes.go:1331 msg="server config" env="map[OLLAMA_CONTEXT_LENGTH:4096 OLLAMA_FLASH_ATTENTION:false OLLAMA_KV_CACHE_TYPE: OLLAMA_MAX_QUEUE:512 OLLAMA_NUM_PARALLEL:1]"\n'
    text += 'time=2026-11-21T09:11:02.512Z level=INFO source=server.go:630 msg="llama runner started in 3.12 seconds"\n'
    for i in range(8):
        if i < cuts:
            text += f'time=2026-11-21T09:1{i}:33.122Z level=WARN source=runner.go:131 msg="truncating input prompt" limit=4096 prompt={9213 + i} keep=4 new=4096\n'
        text += f'[GIN] 2026/11/21 - 09:1{i}:41 | 200 |  {1 + i / 10:.3f}s |       127.0.0.1 | POST     "/api/chat"\n'
    return text


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
            "log-sglang-radix-off",
            "prefix-caching-off",
            "disable_radix_cache=True from a benchmark script",
            {"sglang.log": _sglang(off=True) + _sglang_batches(0.40, 0, 0)},
        ),
        Case(
            "log-sglang-retracts",
            "preemption-storm",
            "requests are retracted every two seconds",
            {"sglang.log": _sglang_retracts()},
        ),
        Case(
            "log-sglang-full",
            "pool-exhausted",
            "130 wait behind a full pool",
            {"sglang.log": _sglang() + _sglang_batches(0.99, 130, 2048)},
        ),
        Case(
            "log-sglang-first-request-oom",
            "oom-at-first-request",
            "the first long prefill dies",
            {"sglang.log": _sglang_first_oom()},
        ),
        Case(
            "log-sglang-too-long",
            "context-too-short",
            "inputs of 70k in 64k",
            {"sglang.log": _sglang_too_long()},
        ),
        Case(
            "log-llama-cpp-shift",
            "context-truncated",
            "--context-shift with 4096: conversations lose their middle",
            {"llama.log": _llama_shift()},
        ),
        Case(
            "log-llama-cpp-refuses",
            "context-too-short",
            "prompts of 9k to a slot of 8k",
            {"llama.log": _llama_refuses()},
        ),
        Case(
            "log-llama-cpp-load-oom",
            "oom-at-start",
            "-c 0 takes the context of the model",
            {"llama.log": _llama_load_oom()},
        ),
        Case(
            "log-llama-cpp-slows",
            "decode-slows-with-context",
            "11 ms a token at 300 tokens, 64 ms at 24000",
            {"llama.log": _llama_slows()},
        ),
        Case(
            "log-ollama-truncates",
            "context-truncated",
            "4096 by default, prompts of 9213, HTTP 200",
            {"ollama.log": _ollama(6)},
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
        Case(
            "healthy-log-llama-cpp",
            None,
            "a context of 32k where the model has 40k, truncated = 0",
            {"llama.log": _llama_healthy()},
        ),
        Case("healthy-log-ollama", None, "short prompts, nothing cut", {"ollama.log": _ollama(0)}),
    ]
