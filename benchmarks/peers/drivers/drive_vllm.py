"""vLLM on a CPU: the engine below its `LLM` class, stepped so that every token has its time."""

from __future__ import annotations

import time
from typing import Any

from driver_protocol import Facts, Generated, serve


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._llm = LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            kv_cache_memory_bytes=options["kv_bytes"],
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._kv_bytes = options["kv_bytes"]
        self._count = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        engine = self._llm.llm_engine
        params = self._params(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=self._delta
        )
        rows: dict[str, int] = {}
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        cached = 0
        start_s = time.perf_counter()
        for row, prompt in enumerate(prompts):
            self._count += 1
            name = str(self._count)
            rows[name] = row
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                now_s = time.perf_counter() - start_s
                row = rows[output.request_id]
                new = list(output.outputs[0].token_ids)
                if not ids[row]:
                    cached += output.num_cached_tokens or 0
                ids[row] += new
                times[row] += [now_s] * len(new)
        return Generated(times, ids, cached)

    def facts(self) -> Facts:
        config = self._llm.llm_engine.vllm_config
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        scheduler = config.scheduler_config
        return Facts(
            {
                "weights": "bf16",
                "KV": str(config.cache_config.cache_dtype),
                "block_size": size,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_num_seqs": scheduler.max_num_seqs,
            },
            self._kv_bytes / (blocks * size) if blocks else None,
        )


def _open(options: dict[str, Any]) -> dict[str, Any]:
    engine = _Engine(options)
    return {"generate": engine.generate, "facts": engine.facts}


if __name__ == "__main__":
    serve(_open)
