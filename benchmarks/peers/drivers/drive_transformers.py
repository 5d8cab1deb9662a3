"""transformers' own `generate`: one static batch, SDPA attention, a cache in bf16."""

from __future__ import annotations

import time
from typing import Any

import torch
from driver_protocol import Facts, Generated, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class _Clock(BaseStreamer):
    """Notes when each step's tokens came; the first call hands back the prompts."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()
        self.steps: list[tuple[float, list[int]]] = []
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._saw_prompt:
            self.steps.append((time.perf_counter() - self.start_s, value.reshape(-1).tolist()))
        self._saw_prompt = True

    def end(self) -> None:
        pass


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.bfloat16
        ).eval()
        # Lengths are given, so nothing may end before.
        self._model.generation_config.eos_token_id = None
        self._kv_token_bytes: float | None = None

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            clock = _Clock()
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
                return_dict_in_generate=True,
            )
        cache = out.past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        self._kv_token_bytes = held / (len(prompts) * cache.get_seq_length())
        times = [at_s for at_s, _ in clock.steps]
        return Generated(
            [times] * len(prompts),
            [list(column) for column in zip(*(row for _, row in clock.steps), strict=True)],
            cached=0,
        )

    def facts(self) -> Facts:
        return Facts(
            {
                "attention": self._model.config._attn_implementation,
                "weights": "bf16",
                "KV": "bf16",
                "threads": torch.get_num_threads(),
            },
            self._kv_token_bytes,
        )


def _open(options: dict[str, Any]) -> dict[str, Any]:
    engine = _Engine(options)
    return {"generate": engine.generate, "facts": engine.facts}


if __name__ == "__main__":
    serve(_open)
