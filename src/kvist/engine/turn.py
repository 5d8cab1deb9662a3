"""One streamed answer and its numbers: what was reused, how fast it came, what it held.

For people at a terminal. Knows `LLM`; prints nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.errors import KvistError
from kvist.sizes import format_size


class Turn:
    """One streamed answer and its numbers.

    Parameters
    ----------
    llm : LLM
    write : callable
        Given every new piece of text.

    Attributes
    ----------
    text : str
        The answer so far.
    """

    def __init__(self, llm: LLM, write: Callable[[str], None]) -> None:
        self._llm, self._write = llm, write
        self.text = ""
        self._ttft_s = self._total_s = 0.0
        self._num_prompt = self._num_cached = self._num_output = 0
        self._finish_reason: str | None = None
        self._held_bytes = 0

    def run(self, prompt: Any, params: SamplingParams) -> None:
        """Generate, writing text as it comes.

        Raises
        ------
        RequestError
            If the prompt cannot be served.
        KvistError
            If the request failed on the way.
        """
        start = time.perf_counter()
        cache = self._llm.engine.scheduler.cache
        for output in self._llm.stream(prompt, params):
            completion = output.outputs[0]
            if completion.token_ids and not self._ttft_s:
                self._ttft_s = time.perf_counter() - start
            self._write(completion.text[len(self.text) :])
            self.text = completion.text
            self._num_prompt = len(output.prompt_token_ids)
            self._num_cached = output.num_cached_tokens
            self._num_output = len(completion.token_ids)
            self._finish_reason = completion.finish_reason
            used = cache.num_used_blocks * self._llm.runner.layout.block_bytes
            self._held_bytes = max(self._held_bytes, used)
            if output.error:
                raise KvistError(f"the request failed: {output.error}")
        self._total_s = time.perf_counter() - start

    @property
    def tokens_per_s(self) -> float:
        """Decode speed, the first token left out."""
        decode_s = self._total_s - self._ttft_s
        return (self._num_output - 1) / decode_s if self._num_output > 1 and decode_s > 0 else 0.0

    def summary(self) -> str:
        """Return the numbers in one line."""
        share = self._num_cached / self._num_prompt if self._num_prompt else 0
        return (
            f"reused {self._num_cached} of {self._num_prompt} prompt tokens ({share:.0%})"
            f" · first token {self._ttft_s:.2f} s · {self.tokens_per_s:.1f} tokens/s"
            f" · KV held {format_size(self._held_bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return text and numbers for programs."""
        return {
            "text": self.text,
            "finish_reason": self._finish_reason,
            "prompt_tokens": self._num_prompt,
            "cached_tokens": self._num_cached,
            "completion_tokens": self._num_output,
            "ttft_s": round(self._ttft_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "kv_bytes_held": self._held_bytes,
        }
