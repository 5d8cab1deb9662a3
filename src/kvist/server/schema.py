"""The OpenAI wire: what clients send and get, and what of it is not served yet.

Owns names, types and defaults of the JSON. An option that would change the answer and is not
served is refused by name; so is nothing that clients send with its neutral value. Fields that
neither OpenAI nor vLLM knows are ignored, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kvist.engine.sampling import SamplingParams
from kvist.errors import RequestError


def _as_utf8(text: str) -> str:
    """Refuse what JSON can spell and no text is: one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"letter {error.start} is half of a surrogate pair, no letter") from None
    return text


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, AfterValidator(_as_utf8)]

NOT_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": (),
        "audio": (),
        "best_of": (1,),
        "bad_words": ([],),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "logits_processors": (),
        "logit_bias": ({},),
        "logprobs": (False,),
        "min_p": (0,),
        "min_tokens": (0,),
        "modalities": (["text"],),
        "n": (1,),
        "prediction": (),
        "presence_penalty": (0,),
        "prompt_logprobs": (),
        "repetition_penalty": (1,),
        "response_format": ({"type": "text"},),
        "skip_special_tokens": (True,),
        "stop": ([], ""),
        "structured_outputs": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "web_search_options": (),
    }
)
"""Options that are not served yet, with the values (besides null) that ask for nothing."""


def _as_text(content: object) -> object:
    """Return a message's content as the one string that chat templates read.

    Parts are joined by line ends, as in vLLM.
    """
    if content is None:
        raise ValueError("there is no text; tool calls are not served yet")
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind != "text":
                raise ValueError(f"part {index} is of type {kind!r}; only text is served")
            case _:
                raise ValueError(f'part {index} is not {{"type": "text", "text": "…"}}')
    return "\n".join(texts)


class Message(BaseModel):
    """One turn of a conversation. Which roles there are, and in what order, the template says."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Annotated[Text, BeforeValidator(_as_text)]
    name: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the turn as chat templates read it."""
        turn = {"role": self.role, "content": self.content}
        return turn if self.name is None else {**turn, "name": self.name}


class StreamOptions(BaseModel):
    """How a stream is sent."""

    include_usage: bool = False


class ChatCompletionRequest(BaseModel):
    """Body of ``POST /v1/chat/completions``. Options that are ``None`` take the model's default."""

    model_config = ConfigDict(extra="allow")

    messages: list[Message]
    model: Text | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: Int64 | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool = False
    priority: Int64 = 0
    cache_salt: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_what_is_not_served(self) -> None:
        """Raise `RequestError` for the first option that would change the answer and cannot."""
        for param, value in (self.model_extra or {}).items():
            neutral = NOT_SERVED.get(param)
            if neutral is None or value is None or value in neutral:
                continue
            hint = f" or {neutral[0]!r}" if neutral else ""
            raise RequestError(
                f"{param}={_short(value)} is not served yet, and the answer would be another"
                f" without it; leave it out, or send null{hint}",
                param,
            )
        for index, message in enumerate(self.messages):
            if message.model_extra and message.model_extra.get("tool_calls"):
                param = f"messages[{index}].tool_calls"
                raise RequestError(f"{param}: tools are not served yet; send text only", param)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options need stream=true", "stream_options")

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return how to sample: what was asked for, else `defaults`, else OpenAI's defaults.

        Raises
        ------
        RequestError
            Naming the option, its value and the allowed range.
        """
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        most, param = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            most, param = self.max_completion_tokens, "max_completion_tokens"
        try:
            return SamplingParams(
                **{**defaults, **given},
                max_tokens=most,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
            )
        except RequestError as error:
            if error.param == "max_tokens" and param != "max_tokens":
                raise RequestError(str(error).replace("max_tokens", param, 1), param) from None
            raise


class PromptTokensDetails(BaseModel):
    """What of the prompt was there already."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(BaseModel):
    """The assistant's turn."""

    role: str
    content: str


class Choice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: None
    stop_reason: int | None


class ChatCompletion(BaseModel):
    """Answer to a request that does not stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Delta(BaseModel):
    """What is new in a chunk. Fields that are not set are left out."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: None


class ChatCompletionChunk(BaseModel):
    """One event of a stream. `usage` is left out unless it was asked for."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelEntry(BaseModel):
    """A model, as ``GET /v1/models`` lists it; `max_model_len` as in vLLM."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvist"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Answer of ``GET /v1/models``."""

    object: str = "list"
    data: list[ModelEntry]


class ErrorBody(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not 200, and the last event of a stream that broke."""

    error: ErrorBody


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
