"""The shape that an output must have: from the many words for it to one grammar.

Owns OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_…``, and the shape of
a tool call that must come. What a grammar does is `kvist.engine.grammar`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvist.engine.grammar import GrammarSpec
from kvist.errors import RequestError
from kvist.server.chat_schema import ChatCompletionRequest, NamedChoice, Tool
from kvist.server.fields import CommonFields, check_tree

_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar")


def asked_shape(body: CommonFields) -> GrammarSpec | None:
    """Return the grammar that a body asks for, by whatever name; ``None`` for any text.

    Raises
    ------
    RequestError
        If it asks twice, or for something that is no shape. Whether a schema can be followed,
        `kvist.engine.grammar.check_grammar` says.
    """
    found: dict[str, GrammarSpec] = {}
    if (shape := _response_format(body.response_format)) is not None:
        found["response_format"] = shape
    structured = {k: v for k, v in (body.structured_outputs or {}).items() if v is not None}
    for name, value in structured.items():
        if name not in _STRUCTURED:
            raise RequestError(
                f"structured_outputs.{name} is not served; there are {', '.join(_STRUCTURED)}",
                "structured_outputs",
            )
        if value is not False or name != "json_object":
            found[f"structured_outputs.{name}"] = _spec(name, value, "structured_outputs")
    for name in ("json", "regex", "choice", "grammar"):
        param = f"guided_{name}"
        if (value := getattr(body, param)) is not None:
            found[param] = _spec(name, value, param)
    if len(found) > 1:
        raise RequestError(
            f"{' and '.join(found)} both say what the output must look like; send one of them",
            next(iter(found)),
        )
    return next(iter(found.values()), None)


def forced_call(body: ChatCompletionRequest) -> GrammarSpec | None:
    """Return the grammar of the call that ``tool_choice`` demands; ``None`` if it demands none.

    ::

        required    [{"name": "one of them", "parameters": {...}}, ...]
        a name      {...}, its parameters alone
    """
    match body.tool_choice:
        case "required":
            schema = _schema_of_calls(body.tools, several=body.parallel_tool_calls)
        case NamedChoice(function=wanted):
            (tool,) = (t for t in body.tools if t.function.name == wanted.name)
            schema = tool.function.parameters or {"type": "object"}
        case _:
            return None
    return GrammarSpec("json_schema", json.dumps(schema), "tools")


def _response_format(asked: dict[str, Any] | None) -> GrammarSpec | None:
    match asked:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return GrammarSpec("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return GrammarSpec("json_schema", json.dumps(schema))
        case {"type": "json_schema"}:
            raise RequestError(
                "response_format.json_schema.schema is missing; it is a JSON schema",
                "response_format",
            )
        case {"type": kind}:
            raise RequestError(
                f"response_format.type={kind!r} is not served; there are text, json_object and"
                " json_schema",
                "response_format",
            )
    raise RequestError("response_format.type is missing", "response_format")


def _spec(name: str, value: object, param: str) -> GrammarSpec:
    match name, value:
        case "json_object", True:
            return GrammarSpec("json_object", param=param)
        case "json", dict() | bool():
            return GrammarSpec("json_schema", json.dumps(value), param)
        case "json", str():
            return GrammarSpec("json_schema", json.dumps(_parsed(value, param)), param)
        case "choice", list():
            return GrammarSpec("choice", json.dumps(value), param)
        case (("regex" | "grammar"), str()):
            return GrammarSpec(name, value, param)
    raise RequestError(f"{param}: a {type(value).__name__} is no {name}", param)


def _parsed(text: str, param: str) -> object:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON schema: {error}", param) from None
    check_tree(schema, param)
    return schema


def _schema_of_calls(tools: Sequence[Tool], *, several: bool) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        # References in a schema start at its root, and the root is now ours.
        for key in ("$defs", "definitions"):
            shared.setdefault(key, {}).update(parameters.pop(key, None) or {})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not several:
        schema["maxItems"] = 1
    return {**schema, **{key: value for key, value in shared.items() if value}}
