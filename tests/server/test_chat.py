"""Chats over a scripted engine: several answers, tools, log probabilities, stop strings, shapes.

Guards: a stream says something else than the whole answer; what belongs to one answer shows in
another; an option is spelled for the engine as something else.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from kvist.engine.grammar import GrammarSpec
from kvist.engine.sequence import TokenLogprobs
from kvist.engine.step import Update

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


def logprobs(text):
    """Each letter first with -1, then `z` with -2."""
    return tuple(TokenLogprobs(ord(c), -1.0, 1, ((ord(c), -1.0), (122, -2.0))) for c in text)


def choices_of(events):
    """Put a stream together as a client does."""
    found = {}
    for event in events:
        for choice in event["choices"]:
            got = found.setdefault(choice["index"], {"content": "", "calls": [], "logprobs": []})
            delta = choice["delta"]
            assert got.get("finish_reason") is None, "nothing comes after the end"
            got["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["index"] == len(got["calls"])
                    assert call["type"] == "function"
                    got["calls"].append([call["function"]["name"], ""])
                got["calls"][call["index"]][1] += call["function"]["arguments"]
            got["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            got["finish_reason"] = choice["finish_reason"]
    return found


def both(wire, body, *news, **options):
    """Ask twice, whole and streamed; the answers are the same. Return them, and the engine."""
    client = wire.ScriptedClient(*news)
    whole, tokenizer = wire.talk(client, body, **options)
    assert whole.status_code == 200, whole.text
    streamed, _ = wire.talk(wire.ScriptedClient(*news), {**body, "stream": True}, **options)
    found = choices_of(wire.events_of(streamed))
    choices = whole.json()["choices"]
    assert [choice["index"] for choice in choices] == sorted(found)
    for choice in choices:
        there, message = found[choice["index"]], choice["message"]
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ]
        assert (there["content"], there["calls"]) == (message["content"] or "", calls)
        assert there["finish_reason"] == choice["finish_reason"]
        assert there["logprobs"] == (choice["logprobs"] or {}).get("content", [])
    return choices, client, tokenizer


def test_several_answers_are_told_apart(wire):
    choices, client, _ = both(
        wire,
        {**HELLO, "n": 3},
        wire.news("a"),
        wire.news("xy", index=1),
        wire.news("b", "length", is_last=False),
        wire.news("7", index=2),
        wire.news("z", "stop", index=1, is_last=False),
        wire.news("8", "length", index=2),
    )
    assert [c["message"]["content"] for c in choices] == ["ab", "xyz", "78"]
    assert [c["finish_reason"] for c in choices] == ["length", "stop", "length"]
    assert client.requests[0].params.n == 3


def test_a_stop_string_ends_its_answer_alone_and_the_engine_hears_of_it(wire):
    choices, client, _ = both(
        wire,
        {**HELLO, "n": 2, "stop": "END"},
        wire.news("helloE"),
        wire.news("12", index=1),
        wire.news("NDmore"),
        wire.news("", "abort", is_last=False),
        wire.news("E", "length", index=1),
    )
    assert [c["message"]["content"] for c in choices] == ["hello", "12E"]
    assert [c["stop_reason"] for c in choices] == ["END", None]
    assert [c["finish_reason"] for c in choices] == ["stop", "length"]
    name = client.requests[0].request_id
    assert client.aborted[0] == (name, 0)


def test_an_answer_that_stopped_does_not_wait_for_the_engine(wire):
    choices, client, _ = both(wire, {**HELLO, "stop": ["!"]}, wire.news("ja!"), None)
    assert choices[0]["message"]["content"] == "ja"
    assert client.aborted[0] == (client.requests[0].request_id, 0)


def test_log_probabilities_have_openais_form(wire):
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    choices, client, _ = both(
        wire,
        body,
        wire.news("é", logprobs=logprobs("é")),
        wire.news("\x01b", "length", logprobs=logprobs("\x01b")),
    )
    first, half, _ = choices[0]["logprobs"]["content"]
    assert first == {
        "token": "é",
        "logprob": -1.0,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -1.0, "bytes": [0xC3, 0xA9]},
            {"token": "z", "logprob": -2.0, "bytes": [122]},
        ],
    }
    assert half["token"] == "\x01"
    assert client.requests[0].params.logprobs == 2


def test_usage_of_several_answers_counts_the_prompt_once(wire):
    news = wire.news("ab", "length", is_last=False), wire.news("c", "length", index=1)
    body = {**HELLO, "n": 2}
    usage = wire.talk(wire.ScriptedClient(*news), body)[0].json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**body, "stream": True, "stream_options": options}
    events = wire.events_of(wire.talk(wire.ScriptedClient(*news), body)[0])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert events[-1]["choices"] == []


def test_options_have_the_engines_names(wire):
    body = {
        **HELLO,
        "n": 2,
        "min_p": 0.1,
        "min_tokens": 2,
        "max_tokens": 9,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 5, "66": -100},
        "stop": ["a", "b"],
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "guided_regex": "a+",
        "kv_transfer_params": {"do_remote_prefill": True},
        "metadata": {"a": "b"},
        "store": True,
    }
    news = wire.news("a", "length", is_last=False), wire.news("a", "length", index=1)
    client = wire.ScriptedClient(*news)
    answer, _ = wire.talk(client, body)
    assert answer.status_code == 200, answer.text
    (request,) = client.requests
    p = request.params
    assert (p.n, p.min_p, p.min_tokens, p.max_tokens) == (2, 0.1, 2, 9)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.5, -1, 1.1)
    assert dict(p.logit_bias) == {65: 5.0, 66: -100.0}
    assert (p.stop, p.include_stop_str_in_output) == (("a", "b"), True)
    assert p.bad_words_token_ids == ((ord("n"), ord("o")), (ord(" "), ord("n"), ord("o")))[:1]
    assert (p.allowed_token_ids, p.skip_special_tokens, p.prompt_logprobs) == ((1, 2), False, 1)
    assert request.grammar == GrammarSpec("regex", "a+")


# ---------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            GrammarSpec("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
        ({"structured_outputs": {"regex": "[0-9]+"}}, GrammarSpec("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["x"]}}, GrammarSpec("choice", '["x"]')),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_all_words_for_a_shape(wire, asked, shape):
    pytest.importorskip("llguidance")
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, {**HELLO, **asked})
    assert answer.status_code == 200, answer.text
    assert client.requests[0].grammar == shape


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
    ],
)
def test_a_shape_that_is_none_is_refused(wire, asked, param):
    pytest.importorskip("llguidance")
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, {**HELLO, **asked})
    assert answer.status_code == 400, answer.text
    assert wire.error_of(answer)["param"] == param
    assert client.requests == []


# ---------------------------------------------------------------------- tools

CALLS = (
    'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Umeå"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
)


def test_calls_of_tools_are_parsed(wire):
    choices, _, tokenizer = both(
        wire, {**HELLO, "tools": TOOLS}, wire.news(CALLS[:50]), wire.news(CALLS[50:], "stop")
    )
    message = choices[0]["message"]
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Umeå"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert choices[0]["finish_reason"] == "tool_calls"
    assert [tool["function"]["name"] for tool in tokenizer.chats[0].tools] == ["weather", "time"]


def test_text_beside_tools_is_text(wire):
    choices, *_ = both(wire, {**HELLO, "tools": TOOLS}, wire.news("It is 7 < 8.", "stop"))
    assert choices[0]["message"] == {
        "role": "assistant",
        "content": "It is 7 < 8.",
        "refusal": None,
    }
    assert choices[0]["finish_reason"] == "stop"


def test_without_a_choice_calls_stay_text(wire):
    body = {**HELLO, "tools": TOOLS, "tool_choice": "none"}
    choices, *_ = both(wire, body, wire.news(CALLS, "stop"))
    assert choices[0]["message"]["content"] == CALLS


def test_a_named_tool_gets_all_of_the_output_and_its_schema_holds(wire):
    pytest.importorskip("llguidance")
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {**HELLO, "tools": TOOLS, "tool_choice": choice}
    news = wire.news('{"city": '), wire.news('"Umeå"}', "stop")
    choices, client, _ = both(wire, body, *news)
    (call,) = choices[0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Umeå"}'}
    assert choices[0]["message"]["content"] is None
    assert choices[0]["finish_reason"] == "stop"
    assert client.requests[0].grammar == GrammarSpec("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize("several", [True, False])
def test_a_required_call_holds_to_one_schema_of_all_tools(wire, several):
    pytest.importorskip("llguidance")
    body = {
        **HELLO,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": several,
    }
    output = '[{"name": "time", "parameters": {}}]'
    # Even where the template knows no tools.
    choices, client, _ = both(wire, body, wire.news(output, "stop"), chat_template="{{ messages }}")
    (call,) = choices[0]["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert choices[0]["finish_reason"] == "tool_calls"
    schema = json.loads(client.requests[0].grammar.text)
    assert schema.get("maxItems") == (None if several else 1)
    names = [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]]
    assert names == ["weather", "time"]


def test_references_in_a_required_calls_schema_still_lead_somewhere(wire):
    pytest.importorskip("llguidance")
    parameters = {
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    client = wire.ScriptedClient(wire.news("[]", "stop"))
    answer, _ = wire.talk(client, {**HELLO, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 200, answer.text
    assert json.loads(client.requests[0].grammar.text)["$defs"] == {"Place": {"type": "string"}}


def test_calls_that_were_made_reach_the_template_as_objects(wire):
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    news = wire.news("a", "length")
    _, tokenizer = wire.talk(wire.ScriptedClient(news), {"messages": messages, "tools": TOOLS})
    _, assistant, tool = tokenizer.chats[0].messages
    assert assistant["tool_calls"][0]["function"] == {"name": "time", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "noon", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("others", "param", "words"),
    [
        ({"tools": TOOLS, "chat_template": "{{ messages }}"}, "tools", "has no place"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the tools: weather, time",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ],
)
def test_tools_that_cannot_be_are_refused(wire, others, param, words):
    options = {"chat_template": others.pop("chat_template")} if "chat_template" in others else {}
    answer, _ = wire.talk(wire.ScriptedClient(), {**HELLO, **others}, **options)
    assert answer.status_code == 400, answer.text
    assert wire.error_of(answer)["param"] == param
    assert words in wire.error_of(answer)["message"]


def test_arguments_in_a_conversation_that_are_no_object_are_refused(wire):
    for arguments in ("[1]", "{", "[" * 100_000):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        answer, _ = wire.talk(wire.ScriptedClient(), {"messages": messages})
        assert answer.status_code == 400
        assert wire.error_of(answer)["param"] == "messages[0].tool_calls[0].function.arguments"


# ---------------------------------------------------------------------- templates


def test_what_the_template_is_told(wire, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{{ mine }}")
    body = {**HELLO, "continue_final_message": True, "chat_template_kwargs": {"a": 1}}
    _, tokenizer = wire.talk(
        wire.ScriptedClient(wire.news("a", "length")), body, config={"chat_template": str(path)}
    )
    (chat,) = tokenizer.chats
    assert (chat.template, chat.opens_turn) == ("{{ mine }}", False)
    assert chat.variables == {"a": 1, "continue_final_message": True}
    for wrong in ({"add_generation_prompt": True}, {"chat_template_kwargs": {"tokenize": 1}}):
        answer, _ = wire.talk(wire.ScriptedClient(), {**body, **wrong})
        assert answer.status_code == 400


def test_news_of_one_continuation_do_not_end_the_request(wire):
    client = wire.ScriptedClient(
        Update("", (65,), "length", index=1), Update("", (66,), "length", index=0, is_last=True)
    )
    answer, _ = wire.talk(client, {**HELLO, "n": 2})
    assert [c["message"]["content"] for c in answer.json()["choices"]] == ["B", "A"]
