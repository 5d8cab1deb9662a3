"""What a request gives back. Names and shape are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes
    ----------
    index : int
    text : str
    token_ids : list of int
        Including the stop token, if one was generated.
    finish_reason : str or None
        ``"stop"``, ``"length"``, ``"abort"``, ``"error"``; ``None`` while it goes on.
    stop_reason : int or None
        The token id that stopped it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its continuations.

    Attributes
    ----------
    prompt : str or None
        The text, where the prompt was given as text.
    prompt_token_ids : list of int
    outputs : list of CompletionOutput
    finished : bool
    num_cached_tokens : int
        Prompt tokens whose K and V came from the cache.
    error : str or None
        Why, when a finish reason is ``"error"``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
