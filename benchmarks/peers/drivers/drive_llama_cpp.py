"""llama.cpp through the C interface of llama-cpp-python, batched as its server does it.

Prompts of all streams fill batches of `n_batch` tokens; then every stream decodes a token a batch.
A sequence's context stays where it is, so the next prompt computes only what it does not share.
"""

from __future__ import annotations

import time
from typing import Any

import llama_cpp as llama
import numpy as np
from driver_protocol import Facts, Generated, serve

_KV_TYPES = {"f16": 1, "q8_0": 8}
"""Numbers of ggml's types."""
_FLASH_ATTENTION_ON = 1
_N_BATCH = 2048
_STREAM_STEP = 256
"""llama.cpp pads contexts to a multiple of this."""


class _Context:
    """A context of its own for each number of streams: llama.cpp divides it among them."""

    def __init__(self, model: Any, options: dict[str, Any], streams: int, length: int) -> None:
        params = llama.llama_context_default_params()
        params.n_seq_max = streams
        params.n_ctx = streams * (-(-length // _STREAM_STEP) * _STREAM_STEP)
        params.n_batch = _N_BATCH
        params.n_threads = params.n_threads_batch = options["threads"]
        params.type_k = params.type_v = _KV_TYPES[options["kv"]]
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.kv_unified = False
        params.no_perf = True
        self.handle = llama.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError(f"no context of {params.n_ctx} tokens for {streams} streams")
        self.streams, self.length = streams, length
        self.memory = llama.llama_get_memory(self.handle)
        self.batch = llama.llama_batch_init(_N_BATCH, 0, 1)
        self.held: list[list[int]] = [[] for _ in range(streams)]

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, stream, wants logits) entries, `_N_BATCH` at most."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, (token, position, stream, wanted) in enumerate(tokens):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = stream
            batch.logits[row] = wanted
        if code := llama.llama_decode(self.handle, batch):
            raise RuntimeError(f"llama_decode gave {code} for {len(tokens)} tokens")

    def forget_beyond(self, stream: int, kept: int) -> None:
        llama.llama_memory_seq_rm(self.memory, stream, kept, -1)
        del self.held[stream][kept:]

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.handle)


class _Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        # With its AMX buffers this build crashes while it reads a prompt.
        params.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(options["gguf"].encode(), params)
        if not self._model:
            raise RuntimeError(f"cannot load {options['gguf']}")
        vocab = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocab)
        self._options = options
        self._context: _Context | None = None
        self._kv_token_bytes: float | None = None

    def generate(self, prompts: list[list[int]], tokens: int) -> Generated:
        context = self._context_for(len(prompts), max(map(len, prompts)) + tokens)
        times: list[list[float]] = [[] for _ in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        cached = 0
        start_s = time.perf_counter()
        waiting: list[tuple[int, int, int, bool]] = []
        for stream, prompt in enumerate(prompts):
            kept = _shared(context.held[stream], prompt[:-1])
            context.forget_beyond(stream, kept)
            context.held[stream] = list(prompt)
            cached += kept
            last = len(prompt) - 1
            waiting += [(prompt[at], at, stream, at == last) for at in range(kept, len(prompt))]
        while waiting:
            now, waiting = waiting[:_N_BATCH], waiting[_N_BATCH:]
            self._step(context, now, start_s, times, ids)
        while (made := len(ids[0])) < tokens:
            entries = [
                (ids[stream][-1], len(prompt) + made - 1, stream, True)
                for stream, prompt in enumerate(prompts)
            ]
            for token, _, stream, _ in entries:
                context.held[stream].append(token)
            self._step(context, entries, start_s, times, ids)
        # A saved state is K and V, and a few bytes a token that say whose they are.
        held = sum(map(len, context.held))
        self._kv_token_bytes = llama.llama_state_get_size(context.handle) / held
        return Generated(times, ids, cached)

    def _step(
        self,
        context: _Context,
        entries: list[tuple[int, int, int, bool]],
        start_s: float,
        times: list[list[float]],
        ids: list[list[int]],
    ) -> None:
        context.decode(entries)
        for row, (_, _, stream, wanted) in enumerate(entries):
            if wanted:
                logits = llama.llama_get_logits_ith(context.handle, row)
                array = np.ctypeslib.as_array(logits, shape=(self._vocab_size,))
                ids[stream].append(int(array.argmax()))
        now_s = time.perf_counter() - start_s
        for _, _, stream, wanted in entries:
            if wanted:
                times[stream].append(now_s)

    def _context_for(self, streams: int, length: int) -> _Context:
        length = self._options["max_model_len"] if streams == 1 else length
        held = self._context
        if held is None or held.streams != streams or held.length < length:
            if held is not None:
                held.close()
            self._context = _Context(self._model, self._options, streams, length)
        assert self._context is not None
        return self._context

    def facts(self) -> Facts:
        return Facts(
            {
                "weights": "Q4_1 of the GGUF file",
                "KV": self._options["kv"],
                "flash attention": "on",
                "use_extra_bufts": False,
                "n_batch": _N_BATCH,
                "threads": self._options["threads"],
                "features": llama.llama_print_system_info().decode().strip(),
            },
            self._kv_token_bytes,
        )


def _shared(held: list[int], prompt: list[int]) -> int:
    """How many tokens the two have in common from the beginning."""
    count = 0
    for ours, theirs in zip(held, prompt, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _open(options: dict[str, Any]) -> dict[str, Any]:
    engine = _Engine(options)
    return {"generate": engine.generate, "facts": engine.facts}


if __name__ == "__main__":
    serve(_open)
