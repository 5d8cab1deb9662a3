"""The OpenAI wire, inwards: the options that chats and completions share.

Owns their names, types and defaults, and what is refused. An option that would change the answer
and is not served is refused by name; so is nothing that clients send with its neutral value.
Fields that neither OpenAI nor vLLM knows are ignored, as in vLLM; so are ``user``, ``metadata``,
``store`` and ``kv_transfer_params``, which change no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError
from kvist.server.api_errors import ApiError

MAX_DEPTH = 64
"""Levels of a body. What reads it later (templates, schemas) recurses."""

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

NOT_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "length_penalty": (1,),
        "logits_processors": (),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_embeds": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "web_search_options": (),
    }
)
"""Options that are not served, with the values (besides null) that ask for nothing."""

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "chat_template": "start the server with --chat-template FILE",
        "functions": "send tools",
        "function_call": "send tool_choice",
        "suffix": "put it into the prompt, in the model's own form for it",
        "use_beam_search": "ask for n or best_of",
    }
)

_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def check_tree(body: object, root: str = "") -> None:
    """Refuse what is nested deeper than `MAX_DEPTH`, or holds half of a surrogate pair.

    JSON can spell both, and neither is an option of anything: templates, schemas and tokenizers
    would break over it. Not recursive. O(size), any thread.

    Raises
    ------
    ApiError
        400, naming the field.
    """
    level: list[tuple[str, object]] = [(root, body)]
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[str, object]] = []
        for place, value in level:
            match value:
                case str():
                    _check_text(value, place)
                case dict():
                    for key, inner in value.items():
                        _check_text(str(key), place)
                        if isinstance(inner, str | dict | list):
                            deeper.append((f"{place}.{key}" if place else str(key), inner))
                case list():
                    deeper += [
                        (f"{place}[{index}]", inner)
                        for index, inner in enumerate(value)
                        if isinstance(inner, str | dict | list)
                    ]
        if not deeper:
            return
        level = deeper
    param = level[0][0].partition(".")[0].partition("[")[0]
    raise ApiError(400, f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"{place}: letter {error.start} is half of a surrogate pair, no letter",
            param=place or None,
        ) from None


def _as_list(value: object) -> object:
    """A text for a list of one; the empty text for none."""
    if isinstance(value, str):
        return [value] if value else []
    return value


Texts = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class Body(BaseModel):
    """Any body of ours: unknown fields are kept for a look, null says nothing."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: object) -> object:
        check_tree(body)
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(BaseModel):
    """How a stream is sent; the second is vLLM's: usage so far in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CommonFields(Body):
    """Options of both. ``None`` takes the model's default."""

    max_tokens: Int64 | None = None
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    stop: Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int64, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Int64 | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Int64 = 0
    cache_salt: str | None = None
    # Ours: copies of K and V that a lossy codec made may be read.
    allow_lossy: bool = False
    # Ours: seconds from arrival to the last token.
    timeout: float | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event of a stream says the usage so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and options.continuous_usage_stats

    def refuse_what_is_not_served(self) -> None:
        """Raise `RequestError` for the first option that would change the answer and cannot."""
        for param, value in (self.model_extra or {}).items():
            neutral = NOT_SERVED.get(param)
            if neutral is None or value in neutral:
                continue
            hint = f" or {neutral[0]!r}" if neutral else ""
            instead = f"; {_INSTEAD[param]}" if param in _INSTEAD else ""
            raise RequestError(
                f"{param}={_short(value)} is not served, and the answer would be another"
                f" without it; leave it out, or send null{hint}{instead}",
                param,
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options need stream=true", "stream_options")
        most = self.truncate_prompt_tokens
        if most is not None and most < 1 and most != -1:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for all that fit, not {most}",
                "truncate_prompt_tokens",
            )

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return how to sample: what was asked for, else `defaults`, else vLLM's defaults.

        Raises
        ------
        RequestError
            Naming the option, its value and the allowed range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**defaults, "max_tokens": self.max_tokens, **given, **self._own()})

    def _own(self) -> dict[str, Any]:
        """Sampling options that one kind of body spells in its own way."""
        return {}


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
