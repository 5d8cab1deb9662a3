"""OpenVINO GenAI: its continuous batching pipeline, straight from the GGUF file."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from driver_protocol import Facts, Generated, serve


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        # Prefixes are kept as in its own LLMPipeline. In a trial this size was faster than that
        # one's whole prompts, and than the scheduler's default of 256.
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = max(1, options["kv_bytes"] >> 30)
        self._properties = {"INFERENCE_NUM_THREADS": options["threads"], **options["properties"]}
        self._scheduler = scheduler
        self._pipe = genai.ContinuousBatchingPipeline(
            options["gguf"], scheduler, "CPU", self._properties
        )
        self._count = 0
        self._longest = 0
        self._kv_token_bytes: float | None = None

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        config = genai.GenerationConfig(
            max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        start_s = time.perf_counter()
        handles = []
        for prompt in prompts:
            tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipe.add_request(self._count, tensor, config))
            self._count += 1
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            now_s = time.perf_counter() - start_s
            is_read = bool(ids[0])
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        ids[row] += output.generated_ids
                        times[row] += [now_s] * len(output.generated_ids)
            if len(prompts) == 1 and ids[0] and not is_read:
                self._note_memory(len(prompts[0]))
        return Generated(times, ids)

    def _note_memory(self, tokens: int) -> None:
        """Its pool counts in blocks, so the longest prompt says best what a token takes."""
        if tokens > self._longest:
            metrics = self._pipe.get_metrics()
            used_bytes = metrics.cache_usage / 100 * metrics.kv_cache_size_in_bytes
            self._longest, self._kv_token_bytes = tokens, used_bytes / tokens

    def facts(self) -> Facts:
        return Facts(
            {
                "weights": "Q4_1 of the GGUF file",
                "KV": self._properties.get("KV_CACHE_PRECISION", "its default, u8"),
                "max_num_batched_tokens": self._scheduler.max_num_batched_tokens,
                **self._properties,
            },
            self._kv_token_bytes,
        )


def _open(options: dict[str, Any]) -> dict[str, Any]:
    engine = _Engine(options)
    return {"generate": engine.generate, "facts": engine.facts}


if __name__ == "__main__":
    serve(_open)
