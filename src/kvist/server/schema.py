"""The OpenAI wire, outwards: what clients get.

Owns names, types and order of the JSON of answers. What clients send is `kvist.server.fields`'s,
`kvist.server.chat_schema`'s and `kvist.server.completion_schema`'s. Answers that are made token by
token are msgspec's, since they are encoded on the loop that all streams share.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What of the prompt was there already."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Prefetched(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/kv/prefetch``: tokens that are there now, and how they came."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token of a position, and the most likely ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of an answer to a chat."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a completion; lists of one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token was in its place of the prompt, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One a prompt token, by token id."""


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """What is called, with arguments as JSON text; in a stream, a piece of it."""

    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, omit_defaults=True):
    """One call of a tool; in a stream, what is new of it, and which one it is."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One answer. `stop_reason` is vLLM's: the token or the text that ended it."""

    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None


class Kvist(msgspec.Struct, frozen=True):
    """What is ours to say of an answer; nothing of it unless there is something to say.

    Attributes
    ----------
    dropped_turns, dropped_tokens : int
        What was left out of the prompt to make it fit: ``--context-overflow``.
    exact : bool
        False where K and V were read that a lossy codec brought back: ``allow_lossy``.
    """

    dropped_turns: int | UnsetType = UNSET
    dropped_tokens: int | UnsetType = UNSET
    exact: bool | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a chat that does not stream."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kvist: Kvist | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new in a chunk."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. `usage` is left out unless it was asked for."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kvist: Kvist | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One continuation of a prompt, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of ``POST /v1/completions``, and every event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kvist: Kvist | UnsetType = UNSET


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


class Tokens(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


class Version(BaseModel):
    """Answer of ``GET /version``."""

    version: str


class ErrorBody(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not 200, and the last event of a stream that broke."""

    error: ErrorBody
