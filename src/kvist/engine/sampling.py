"""What a request asks of sampling. Values only; the arithmetic is in `engine.sampler`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from kvist.errors import RequestError

MAX_SAMPLES = 128
"""Of one prompt, at most: OpenAI's limit."""

MAX_STOP_STRINGS = 16
_TEXTS = ("stop", "bad_words")
_INTS = ("n", "max_tokens", "min_tokens", "top_k", "best_of", "seed", "logprobs", "prompt_logprobs")
_OPTIONAL = frozenset(("max_tokens", "best_of", "seed", "logprobs", "prompt_logprobs"))
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Names and defaults are vLLM's.

    Parameters
    ----------
    n : int
        Continuations of one prompt. The prompt is computed once.
    best_of : int or None
        Make so many and return the `n` with the highest log probability a token; ``None`` for `n`.
    max_tokens : int or None
        Tokens to generate at most; ``None`` for as many as the context window leaves.
    min_tokens : int
        Tokens before anything may stop the text, `max_tokens` apart.
    temperature : float
        0 chooses the most likely token (the lowest id among equals).
    top_k : int
        Keep the k most likely tokens; 0 or -1 keeps all.
    top_p : float
        Keep the smallest set of tokens whose probability reaches p, after min-p and top-k.
    min_p : float
        Keep tokens at least so likely as this share of the most likely one's probability.
    repetition_penalty : float
        Divide the positive logits of tokens in prompt or output by it, multiply the negative ones.
    presence_penalty, frequency_penalty : float
        Taken off the logits of generated tokens, once, and as often as they were generated.
    logit_bias : mapping of token id to float, optional
        Added to logits.
    allowed_token_ids : tuple of int, optional
        Nothing else may be generated.
    bad_words : tuple of str
        May not be generated. The text side turns them into `bad_words_token_ids`.
    bad_words_token_ids : tuple of tuples of int
        Sequences of ids whose last one may not follow the others.
    seed : int or None
        The draw depends on (seed, index of the continuation, position) alone. ``None``: the engine
        picks one.
    stop : tuple of str
        Texts that end the output, searched across tokens by the text side.
    include_stop_str_in_output : bool
    stop_token_ids : tuple of int
        Stop after one of these, in addition to the model's end-of-sequence ids.
    ignore_eos : bool
        Go on after an end-of-sequence id. `stop_token_ids` still stop.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    logprobs : int or None
        Log probabilities of so many of the most likely tokens at each position, besides the chosen
        one's: of the model's own distribution, before anything above changes it.
    prompt_logprobs : int or None
        The same for the prompt. Such a request does not read the cache.

    Raises
    ------
    RequestError
        Naming the parameter, its value and the allowed range.

    Notes
    -----
    A text for `stop`, and lists for tuples, are taken too.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._settle_forms()

        def require(ok: bool, param: str, allowed: str) -> None:
            if not ok:
                value = getattr(self, param)
                raise RequestError(f"{param} must be {allowed}, not {value!r}", param)

        require(1 <= self.n <= MAX_SAMPLES, "n", f"from 1 to {MAX_SAMPLES}")
        require(
            self.best_of is None or self.n <= self.best_of <= MAX_SAMPLES,
            "best_of",
            f"from n={self.n} to {MAX_SAMPLES}",
        )
        most = self.max_tokens
        require(most is None or most >= 1, "max_tokens", "at least 1")
        require(
            self.min_tokens >= 0 and (most is None or self.min_tokens <= most),
            "min_tokens",
            "from 0 to max_tokens" if most is None else f"from 0 to max_tokens={most}",
        )
        require(0.0 <= self.temperature < math.inf, "temperature", "a finite number of at least 0")
        require(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 for all tokens")
        require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        require(0.0 <= self.min_p <= 1.0, "min_p", "from 0 to 1")
        require(
            0.0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "a finite number above 0",
        )
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "from -2 to 2")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "from -2 to 2")
        biases = (self.logit_bias or {}).values()
        require(all(-100.0 <= b <= 100.0 for b in biases), "logit_bias", "from -100 to 100 a token")
        allowed = self.allowed_token_ids
        require(allowed is None or len(allowed) > 0, "allowed_token_ids", "at least one id")
        require(all(self.bad_words), "bad_words", "texts that are not empty")
        require(
            all(self.bad_words_token_ids), "bad_words_token_ids", "sequences of at least one id"
        )
        require(
            len(self.stop) <= MAX_STOP_STRINGS and all(self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} texts that are not empty",
        )
        require(self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0")
        require(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            "at least 0",
        )

    def _settle_forms(self) -> None:
        """Take a text for a tuple of one, lists for tuples, and any library's numbers for Python's.

        What has another type would fail in the middle of a step, where others run beside it.
        """

        def settle(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.stop, str):
            settle("stop", (self.stop,))
        for name in _INTS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                settle(name, _as_int(value, name))
        for name in _FLOATS:
            settle(name, _as_float(getattr(self, name), name))
        for name in _TEXTS:
            texts = _as_tuple(getattr(self, name), name)
            if not all(isinstance(text, str) for text in texts):
                raise RequestError(f"{name} must be texts, not {texts!r}", name)
            settle(name, texts)
        settle("stop_token_ids", _as_ids(self.stop_token_ids, "stop_token_ids"))
        words = _as_tuple(self.bad_words_token_ids, "bad_words_token_ids")
        settle("bad_words_token_ids", tuple(_as_ids(w, "bad_words_token_ids") for w in words))
        if self.allowed_token_ids is not None:
            settle("allowed_token_ids", _as_ids(self.allowed_token_ids, "allowed_token_ids"))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, not {self.logit_bias!r}",
                    "logit_bias",
                )
            biases = self.logit_bias.items()
            settle(
                "logit_bias",
                {_as_int(i, "logit_bias"): _as_float(b, "logit_bias") for i, b in biases},
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def num_samples(self) -> int:
        """Continuations that are computed."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens whose log probability is reported; ranking needs the chosen one's."""
        if self.logprobs is None and self.num_samples > self.n:
            return 0
        return self.logprobs

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def token_ids(self) -> Iterable[tuple[str, int]]:
        """Yield every token id that is named, with the parameter that names it."""
        for token_id in self.logit_bias or ():
            yield "logit_bias", token_id
        for token_id in self.allowed_token_ids or ():
            yield "allowed_token_ids", token_id
        for word in self.bad_words_token_ids:
            for token_id in word:
                yield "bad_words", token_id


def _as_int(value: object, param: str) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise RequestError(f"{param} must be a whole number, not {value!r}", param)


def _as_float(value: object, param: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise RequestError(f"{param} must be a number, not {value!r}", param)


def _as_tuple(value: object, param: str) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"{param} must be a list, not {value!r}", param)
    return tuple(value)


def _as_ids(value: object, param: str) -> tuple[int, ...]:
    return tuple(_as_int(item, param) for item in _as_tuple(value, param))
