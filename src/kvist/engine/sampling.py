"""What a request asks of sampling. Numbers only; the arithmetic is in `engine.sampler`."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Names and defaults are vLLM's.

    Parameters
    ----------
    max_tokens : int or None
        Tokens to generate at most; ``None`` for as many as the context window leaves.
    temperature : float
        0 chooses the most likely token (the lowest id among equals).
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all.
    top_p : float
        Keep the smallest set of tokens whose probability reaches p, after top-k.
    seed : int or None
        The draw for a position depends on (seed, position) alone. ``None``: the engine picks one.
    stop_token_ids : tuple of int
        Stop after one of these, in addition to the model's end-of-sequence ids.
    ignore_eos : bool
        Go on after an end-of-sequence id. `stop_token_ids` still stop.

    Raises
    ------
    RequestError
        Naming the parameter, its value and the allowed range.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def refuse(param: str, allowed: str) -> RequestError:
            return RequestError(f"{param} must be {allowed}, not {getattr(self, param)!r}", param)

        if self.max_tokens is not None and self.max_tokens < 1:
            raise refuse("max_tokens", "at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise refuse("temperature", "a finite number of at least 0")
        if self.top_k < -1:
            raise refuse("top_k", "at least 1, or 0 or -1 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise refuse("top_p", "above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < 1e-5 or self.top_k == 1
