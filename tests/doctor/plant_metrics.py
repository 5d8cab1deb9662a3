"""Planted metrics: what is wrong with a server by its own numbers, and what only looks so."""
# ruff: noqa: E501  (lines of metrics are as long as they are)

from __future__ import annotations

from plant_case import Case
from plant_exporters import exact, kvist, llama_cpp, page, sglang, vllm


def cases() -> list[Case]:
    """Return the cases whose main evidence is metrics."""
    label = 'engine="0",model_name="mistral-small"'
    long_answers = [*exact("vllm:request_max_num_generation_tokens", label, 1180, 200)]
    sick = vllm(
        model="qwen3-14b", running=37, waiting=52, usage=0.9981, preempted=9, e2e=22.4, queue=13.0
    )
    fits = {"num_gpu_blocks": 40211}
    return [
        Case(
            "vllm-pool-full",
            "pool-exhausted",
            "long documents, everyone waits for blocks",
            page(
                vllm(
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
            page(
                vllm(
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
            page(vllm(queries=0, hits=0, config={"enable_prefix_caching": "False"})),
        ),
        Case(
            "vllm-small-batch",
            "queue-without-pressure",
            "--max-num-seqs 8 left over from a test",
            page(vllm(running=8, waiting=97, usage=0.061, e2e=18.2, queue=16.9)),
        ),
        Case(
            "vllm-two-models-one-full",
            "pool-exhausted",
            "one exporter page for two models; the second is full",
            page(vllm(), sick),
        ),
        Case(
            "vllm-fp8-no-scales",
            "kv-quantization-risk",
            "fp8 cache, the checkpoint has no scales",
            page(vllm(config={"cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": "[]"})),
        ),
        Case(
            "vllm-turboquant",
            "kv-quantization-risk",
            "3-bit keys and values to save memory",
            page(vllm(config={"cache_dtype": "turboquant_3bit_nc"})),
        ),
        Case(
            "vllm-slow-but-not-memory",
            "latency-high",
            "long answers on a slow card; the cache is fine",
            page(vllm(running=9, usage=0.22, e2e=14.2, output=610, itl=0.023)),
        ),
        Case(
            "vllm-length-at-the-end-of-context",
            "answers-cut",
            "prompts of 3900 in a context of 4096",
            page(
                vllm(
                    model="mistral-small",
                    stop=211,
                    length=1180,
                    prompt=3890,
                    exact=("prompt",),
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
            page(
                vllm(
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
            page(sglang(58, 121, 0.99, 0.44)),
        ),
        Case(
            "llama-cpp-four-slots",
            "queue-without-pressure",
            "-np 4 with a context of 128k: slots run out, not memory",
            {"metrics.prom": llama_cpp(4, 14, 0.118)},
        ),
        Case(
            "kvist-reserved",
            "reservation-waste",
            "max_tokens is reserved at admission, answers are short",
            page(kvist((310, 90, 3696), (59136, 9310), (4120, 12), running=31, usage=0.902)),
        ),
        Case(
            "kvist-full",
            "pool-exhausted",
            "a burst of 900-token prompts",
            page(
                kvist(
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
            page(
                kvist(
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
            page(
                kvist(
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
            page(vllm(running=200, usage=0.961, e2e=1.8)),
        ),
        Case(
            "healthy-few-preemptions",
            None,
            "3 preemptions in 50000 requests",
            page(
                vllm(
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
            page(vllm(queries=9_120_331, hits=27_136, usage=0.38)),
        ),
        Case(
            "healthy-capped-by-max-tokens",
            None,
            "nine of ten end by length since clients ask for 128 tokens",
            page(
                vllm(
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
            page(vllm(running=0, usage=0.0, queries=0, hits=0, stop=0, length=0)),
        ),
        Case(
            "healthy-one-waits",
            None,
            "a snapshot in the moment of an arrival",
            page(vllm(running=22, waiting=1, usage=0.57)),
        ),
        Case(
            "healthy-int8-per-token",
            None,
            "8-bit integers with a scale for each token and head",
            page(vllm(config={"cache_dtype": "int8_per_token_head"})),
        ),
        Case(
            "healthy-sglang-busy",
            None,
            "93 % of the pool in use, queue empty",
            page(sglang(63, 0, 0.93, 0.71)),
        ),
        Case(
            "healthy-kvist-turnover",
            None,
            "evicts all day and still finds 70 %",
            page(
                kvist(
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
