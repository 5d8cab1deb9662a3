"""The bodies that hold plain prompts: ``POST /v1/completions``, ``/tokenize``, ``/detokenize``.

Owns their names and types. A prompt is text or token ids, alone or in a list.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from kvist.errors import RequestError
from kvist.server.chat_schema import ChatFields, Message
from kvist.server.fields import Body, CommonFields, Int64

MAX_PROMPTS = 256
"""Of one request: each is a request to the engine."""

_LARGEST = 2**63

Prompt = str | tuple[int, ...]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _as_prompts(value: object) -> list[Prompt]:
    """Tell the four forms of OpenAI's prompt from each other."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("a prompt is a text, a list of token ids, or a list of either")
    if value and all(map(_is_id, value)):
        return [tuple(value)]
    if not value:
        raise ValueError("the prompt is empty: there is nothing to continue")
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and all(map(_is_id, item)):
            prompts.append(tuple(item))
        else:
            raise ValueError(f"prompt {index} is neither a text nor a list of token ids")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts are more than {MAX_PROMPTS}; send several bodies")
    return prompts


Prompts = Annotated[
    list[Prompt],
    PlainValidator(
        _as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class CompletionRequest(CommonFields):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Int64 | None = 16
    best_of: Int64 | None = None
    echo: bool = False
    logprobs: Int64 | None = None
    # vLLM's
    add_special_tokens: bool = True

    @property
    def wants_no_token(self) -> bool:
        """Whether only the prompt is to be looked at: ``echo`` and no token more."""
        return self.echo and self.max_tokens == 0

    def _own(self) -> dict[str, Any]:
        if self.best_of is not None and self.stream and self.best_of > (self.n or 1):
            raise RequestError(
                f"best_of={self.best_of} above n={self.n or 1} cannot be streamed: which"
                " continuations are the best shows at their end",
                "best_of",
            )
        own: dict[str, Any] = {"best_of": self.best_of, "logprobs": self.logprobs}
        if self.wants_no_token:
            own["max_tokens"] = 1
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            own["prompt_logprobs"] = self.logprobs
        return own


class TokenizeRequest(ChatFields):
    """Body of ``POST /tokenize``: a text, or a conversation."""

    prompt: str | None = None
    messages: list[Message] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("send prompt or messages, one of them")
        return self


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    tokens: list[Int64]
