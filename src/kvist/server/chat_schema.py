"""The body of ``POST /v1/chat/completions``, and the conversation in it.

Owns the names and types of messages and tools, and their form for chat templates.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvist.errors import RequestError
from kvist.server.fields import Body, CommonFields, Int64, check_tree

_TEMPLATE_OWN = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    )
)
"""Arguments of the renderer, which are no variables of a template."""


def _as_text(content: object) -> object:
    """Return a message's content as the one string that chat templates read.

    Parts are joined by line ends, as in vLLM.
    """
    if content is None:
        raise ValueError("there is no text")
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind not in ("text", "refusal"):
                raise ValueError(f"part {index} is of type {kind!r}; only text is served")
            case _:
                raise ValueError(f'part {index} is not {{"type": "text", "text": "…"}}')
    return "\n".join(texts)


class CalledFunction(BaseModel):
    """A function that the assistant called, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class MessageToolCall(BaseModel):
    """A call in an assistant's turn that is over."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One turn of a conversation. Which roles there are, and in what order, the template says."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[
        str, BeforeValidator(_as_text, json_schema_input_type=str | list[dict[str, Any]])
    ]
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_text(cls, turn: object) -> object:
        if isinstance(turn, dict) and turn.get("tool_calls") and turn.get("content") is None:
            return {**turn, "content": ""}
        return turn

    def for_template(self, place: str) -> dict[str, Any]:
        """Return the turn as chat templates read it, arguments of calls as objects.

        Raises
        ------
        RequestError
            Naming the arguments that are no JSON object; `place` is the turn's name.
        """
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments,
                            f"{place}.tool_calls[{index}].function.arguments",
                        ),
                    },
                }
                for index, call in enumerate(self.tool_calls)
            ]
        return turn


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"{place} is no JSON object", place)
    check_tree(found, place)
    return found


class FunctionSpec(BaseModel):
    """A function that may be called. `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool; only functions are."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(BaseModel):
    """Its name."""

    name: str


class NamedChoice(BaseModel):
    """The one function that is to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class ChatFields(Body):
    """What is rendered by the chat template."""

    messages: list[Message]
    tools: list[Tool] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them."""
        return [m.for_template(f"messages[{i}]") for i, m in enumerate(self.messages)]

    def described_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates read them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools] or None

    def template_variables(self) -> dict[str, Any]:
        """Return what the template is told besides messages and tools.

        Raises
        ------
        RequestError
            If a variable is none, or the options contradict each other.
        """
        for name in self.chat_template_kwargs:
            if name in _TEMPLATE_OWN:
                raise RequestError(
                    f"chat_template_kwargs: {name!r} is no variable of a template",
                    "chat_template_kwargs",
                )
        if not self.continue_final_message:
            return self.chat_template_kwargs
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with the last message, add_generation_prompt begins"
                " a new one; ask for one of them",
                "continue_final_message",
            )
        return {**self.chat_template_kwargs, "continue_final_message": True}

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        return self.add_generation_prompt and not self.continue_final_message


class ChatCompletionRequest(CommonFields, ChatFields):
    """Body of ``POST /v1/chat/completions``."""

    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    def check_tools(self) -> None:
        """Raise `RequestError` unless `tools` and `tool_choice` fit each other."""
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise RequestError("tools: two of them have the same name", "tools")
        if self.tool_choice in (None, "none", "auto"):
            return
        if not names:
            raise RequestError("tool_choice needs tools to choose from", "tool_choice")
        if isinstance(self.tool_choice, NamedChoice):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise RequestError(
                    f"tool_choice: {wanted!r} is none of the tools: {', '.join(names)}",
                    "tool_choice",
                )

    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            if self.max_completion_tokens < 1:
                raise RequestError(
                    f"max_completion_tokens must be at least 1, not {self.max_completion_tokens}",
                    "max_completion_tokens",
                )
            own["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs need logprobs=true", "top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(
                f"top_logprobs must be at least 0, not {self.top_logprobs}", "top_logprobs"
            )
        if self.logprobs:
            own["logprobs"] = self.top_logprobs or 0
        return own
