"""Kvist itself, through `kvist.LLM`, with the clock beside its engine's steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from driver_protocol import Facts, Generated, serve

from kvist import LLM, SamplingParams
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.dispatch import StepAttention


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._llm = LLM(
            options["model"],
            max_model_len=options["max_model_len"],
            kv_cache_memory_bytes=options["kv_bytes"],
            **options["arguments"],
        )
        self._arguments = options["arguments"]
        self._step = self._llm.engine.step

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        """`LLM.generate`, text and all; the clock stands around the step inside it."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        times: dict[str, list[float]] = {}
        start_s = time.perf_counter()

        def step() -> Any:
            updates = self._step()
            now_s = time.perf_counter() - start_s
            for update in updates:
                times.setdefault(update.request_id, []).extend([now_s] * len(update.token_ids))
            return updates

        self._llm.engine.step = step  # type: ignore[method-assign]
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        finally:
            self._llm.engine.step = self._step  # type: ignore[method-assign]
        return Generated(
            [times[output.request_id] for output in outputs],
            [list(output.outputs[0].token_ids) for output in outputs],
            sum(output.num_cached_tokens for output in outputs),
        )

    def outside_model(self, prompts: list[list[int]], tokens: int) -> float:
        """Share of the decoding steps' time that is not in the model's forward pass.

        Scheduler, cache, building of batches, sampling, text; not the Python inside the model.
        """
        spent: list[float] = []
        runner = self._llm.runner
        # Whatever is fused below it, every step's pass through the layers is this one call.
        forward = runner._forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start_s)

        runner._forward = timed  # type: ignore[method-assign]
        try:
            made = self.generate(prompts, tokens)
        finally:
            runner._forward = forward  # type: ignore[method-assign]
        # The last of the first tokens ends the prefill.
        first = max(times[0] for times in made.times)
        ends = sorted({at for times in made.times for at in times})
        steps = [at for at in ends if at > first]
        inside_s = sum(spent[-len(steps) :])
        return 1 - inside_s / (steps[-1] - first)

    def attention(self, batch: int, context: int, seconds: float) -> list[float]:
        """Bytes of K and V a second that decoding attention reads, of each pass over all layers.

        Each pass reads other blocks while there are any, so that no cache holds them. What the
        pool held is lost.
        """
        runner, pool = self._llm.runner, self._llm.pool.tensor
        layout, kernels = runner.layout, runner.kernels
        heads = runner.model.config.num_attention_heads
        blocks = -(-context // layout.block_size)
        sets = pool.shape[0] // (batch * blocks)
        if not sets:
            raise ValueError(f"{batch} x {blocks} blocks, the pool has {pool.shape[0]}")
        pool[:] = torch.randn(layout.block_elements, dtype=pool.dtype)
        order = torch.randperm(pool.shape[0])[: sets * batch * blocks].view(sets, batch, blocks)
        lengths = [1] * batch, [context] * batch
        size, scale = layout.block_size, layout.key_dim**-0.5
        query, out = torch.randn(2, batch, heads, layout.key_dim, dtype=pool.dtype)
        shape = (batch, layout.num_kv_heads, layout.key_dim)
        key, value = torch.randn(2, *shape, dtype=pool.dtype)
        passes: list[Callable[[int], Any]] = []
        for tables in order:
            step = AttentionBatch.build(*lengths, tables.tolist(), size)
            if kernels.prepare is None:

                def attend(layer: int, step: AttentionBatch = step) -> None:
                    kernels.attention(query, pool, layout, layer, step, scale)

            else:
                # As a step of the engine does: K and V of the new tokens are written, too.
                slots = tables[:, -1].long() * size + (context - 1) % size
                prepared = kernels.prepare(query, key, value, slots, pool, layout, step, out)

                def attend(layer: int, prepared: StepAttention = prepared) -> None:
                    prepared.attend(layer, scale, 0, 0.0, None)

            passes.append(attend)
        token_bytes = layout.num_kv_heads * (layout.key_dim + layout.value_dim) * layout.itemsize
        read_bytes = batch * context * token_bytes * layout.num_layers
        rates: list[float] = []
        end_s = time.perf_counter() + seconds
        while not rates or time.perf_counter() < end_s:
            attend = passes[len(rates) % sets]
            start_s = time.perf_counter()
            for layer in range(layout.num_layers):
                attend(layer)
            rates.append(read_bytes / (time.perf_counter() - start_s))
        return rates

    def facts(self) -> Facts:
        bill = self._llm.bill
        return Facts(
            {
                "weights": self._arguments.get("weights", bill.dtype),
                "KV": bill.kv_format,
                "block_size": bill.block_size,
                "kernels": {operation: backend for operation, backend, _ in bill.kernels},
                **self._arguments,
            },
            float(bill.kv_token_bytes),
        )


def _open(options: dict[str, Any]) -> dict[str, Any]:
    engine = _Engine(options)
    return {
        "generate": engine.generate,
        "facts": engine.facts,
        "attention": engine.attention,
        "outside_model": engine.outside_model,
    }


if __name__ == "__main__":
    serve(_open)
