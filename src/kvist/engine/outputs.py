"""What a request gives back. Names and shape are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was.

    Attributes
    ----------
    logprob : float
    rank : int
        1 for the most likely.
    decoded_token : str
        Its text by itself; a token that is part of a character has none that can be printed.
    """

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Of one position, by token id: the one that stands there first, then the most likely."""


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
    stop_reason : int, str or None
        The token id or the string that stopped it.
    cumulative_logprob : float or None
        Sum over the tokens, where log probabilities were computed.
    logprobs : list of Logprobs, or None
        One a token, where they were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None


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
    exact : bool
        False where K and V were read that a lossy codec brought back.
    error : str or None
        Why, when a finish reason is ``"error"``.
    prompt_logprobs : list of Logprobs or None, or None
        One a prompt token, ``None`` for the first, where they were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    exact: bool = True
