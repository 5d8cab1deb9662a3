"""Planted logs of SGLang, llama.cpp and Ollama."""
# ruff: noqa: E501  (log lines are as long as they are)

from __future__ import annotations

from plant_case import Case
from plant_logs import CUDA_OOM

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
main: server is listening on port 8080 - starting the main loop
srv  update_slots: all slots are idle
"""


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
        + CUDA_OOM.format(size="2.00 GiB")
        + "\n[2026-11-21 10:02:10] Received sigquit from a child process. It usually means the child failed.\n"
    )


def _sglang_too_long() -> str:
    return (
        _sglang()
        + "".join(
            f"[2026-11-21 10:0{3 + i}:11] ERROR: Input validation failed: The input ({70123 + 512 * i} tokens) is longer than the model's context length (65536 tokens).\n"
            f'[2026-11-21 10:0{3 + i}:11] INFO:     client:40010 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request\n'
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
        "srv  log_server_r: request: POST /v1/chat/completions client 200\n"
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
            "srv  log_server_r: request: POST /v1/chat/completions client 400\n"
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
        text += f'[GIN] 2026/11/21 - 09:1{i}:41 | 200 |  {1 + i / 10:.3f}s |       client | POST     "/api/chat"\n'
    return text


def cases() -> list[Case]:
    """Return the cases whose only evidence is a log."""
    return [
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
            "healthy-log-llama-cpp",
            None,
            "a context of 32k where the model has 40k, truncated = 0",
            {"llama.log": _llama_healthy()},
        ),
        Case("healthy-log-ollama", None, "short prompts, nothing cut", {"ollama.log": _ollama(0)}),
    ]
