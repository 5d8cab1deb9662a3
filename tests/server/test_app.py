"""The HTTP face over an engine that is a script: what clients see, byte by byte.

Guards: clients written for OpenAI's API meet another shape; an option is dropped in silence; an
error gets the wrong status or loses its words; a client that left keeps its request running.
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
httpx = pytest.importorskip("httpx")

from kvist.engine.step import Update
from kvist.errors import EngineDeadError, RequestError
from kvist.server.app import create_app

MODEL, EOS = "tiny", 0
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


# ---------------------------------------------------------------------- answers


def test_an_answer_has_openais_shape(wire):
    answer, _ = wire.talk(
        wire.ScriptedClient(wire.news("Hel"), wire.news("lo"), wire.news("!", "length")), HELLO
    )
    got = answer.json()
    assert answer.status_code == 200
    assert got.pop("id").startswith("chatcmpl-")
    assert isinstance(got.pop("created"), int)
    assert got == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "finish_reason": "length",
                "logprobs": None,
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_the_token_that_stops_is_counted_and_not_said(wire):
    client = wire.ScriptedClient(wire.news("Hi"), Update("", (EOS,), "stop", EOS, is_last=True))
    got = wire.talk(client, HELLO)[0].json()
    assert got["choices"][0]["message"]["content"] == "Hi"
    assert got["choices"][0]["finish_reason"] == "stop"
    assert got["usage"]["completion_tokens"] == 3


def test_a_stream_is_role_texts_finish_done(wire):
    client = wire.ScriptedClient(wire.news("He"), wire.news("l"), wire.news("", "length"))
    answer, _ = wire.talk(client, {**HELLO, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = wire.events_of(answer)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
        {"content": "l"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


def test_a_stream_says_nothing_while_a_letter_is_half(wire):
    client = wire.ScriptedClient(wire.news("\x01"), wire.news("é"), wire.news("", "length"))
    events = wire.events_of(wire.talk(client, {**HELLO, "stream": True})[0])
    texts = [e["choices"][0]["delta"].get("content") for e in events]
    assert texts == ["", "é", None]


def test_usage_comes_in_an_event_of_its_own_where_it_is_asked_for(wire):
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = wire.events_of(
        wire.talk(wire.ScriptedClient(wire.news("ab", "length")), body)[0]
    )
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 2
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_models_has_the_length_as_in_vllm(wire):
    answer, _ = wire.talk(wire.ScriptedClient(), None, "/v1/models")
    (model,) = answer.json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 64)


# ---------------------------------------------------------------------- what is asked for


def test_options_reach_the_engine_and_the_rest_is_the_models_default(wire):
    client = wire.ScriptedClient(wire.news("a", "length"))
    body = {
        **HELLO,
        "model": MODEL,
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": -2,
        "cache_salt": "mine",
        "user": "somebody",
        "n": 1,
        "stop": None,
        "tools": [],
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "never_heard_of": 1,
    }
    answer, _ = wire.talk(client, body, defaults={"temperature": 0.1, "top_k": 20})
    assert answer.status_code == 200, answer.text
    (request,) = client.requests
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.5, 20, 1.0)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (3, (9,), True)
    assert (request.priority, request.salt) == (-2, "mine")
    assert request.prompt_token_ids == (ord("h"), ord("i"))
    assert request.eos_token_ids == (EOS,)


def test_without_a_limit_an_answer_may_fill_the_context(wire):
    client = wire.ScriptedClient(wire.news("a", "length"))
    wire.talk(client, HELLO)
    assert client.requests[0].params.max_tokens is None


def test_text_parts_become_one_text(wire):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts, "name": "Ada"}]}
    _, tokenizer = wire.talk(
        wire.ScriptedClient(wire.news("a", "length")),
        {**body, "chat_template_kwargs": {"think": False}},
    )
    (chat,) = tokenizer.chats
    assert chat.messages == [{"role": "user", "content": "a\nb", "name": "Ada"}]
    assert chat.variables == {"think": False}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("audio", {"voice": "alloy"}),
        ("chat_template", "{{ messages }}"),
        ("functions", [{"name": "f"}]),
        ("length_penalty", 1.5),
        ("logits_processors", ["x"]),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("use_beam_search", True),
        ("web_search_options", {}),
    ],
)
def test_an_option_that_would_change_the_answer_is_refused_by_name(wire, param, value):
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, {**HELLO, param: value})
    assert answer.status_code == 400
    assert wire.error_of(answer)["param"] == param
    assert wire.error_of(answer)["type"] == "invalid_request_error"
    assert "is not served" in wire.error_of(answer)["message"]
    assert client.requests == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "required"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "no text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "part 0 is of type 'image_url'; only text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "required",
        ),
        ({**HELLO, "temperature": -1}, "temperature", "at least 0"),
        ({**HELLO, "temperature": "warm"}, "temperature", "number"),
        ({**HELLO, "top_p": 0}, "top_p", "above 0"),
        ({**HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({**HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({**HELLO, "seed": 2**63}, "seed", "less than"),
        ({**HELLO, "max_tokens": 2**63}, "max_tokens", "less than"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        ({**HELLO, "cache_salt": "\udfff"}, "cache_salt", "surrogate"),
        ({"messages": []}, "messages", "at least one"),
        ({**HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ],
)
def test_a_wrong_field_is_named(wire, body, param, words):
    answer, _ = wire.talk(wire.ScriptedClient(wire.news("a", "length")), body)
    assert answer.status_code == 400, answer.text
    assert wire.error_of(answer)["param"] == param
    assert words in wire.error_of(answer)["message"]


def test_a_body_that_is_no_json_is_400(wire):
    headers = {"Content-Type": "application/json"}
    answer, _ = wire.talk(wire.ScriptedClient(), None, content=b'{"messages": ', headers=headers)
    assert answer.status_code == 400
    assert "not JSON" in wire.error_of(answer)["message"]


def test_a_body_sent_as_a_form_is_told_the_header(wire):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer, _ = wire.talk(wire.ScriptedClient(), None, content=b'{"messages": []}', headers=headers)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in wire.error_of(answer)["message"]


def test_another_model_is_404(wire):
    answer, _ = wire.talk(wire.ScriptedClient(), {**HELLO, "model": "gpt-5"})
    assert answer.status_code == 404
    assert wire.error_of(answer)["code"] == "model_not_found"
    assert "'gpt-5'" in wire.error_of(answer)["message"]
    assert f"'{MODEL}'" in wire.error_of(answer)["message"]


def test_another_route_and_another_method_have_the_same_shape(wire):
    assert wire.error_of(wire.talk(wire.ScriptedClient(), {}, "/v1/nothing")[0])[
        "message"
    ].startswith("POST /v1")
    answer, _ = wire.talk(wire.ScriptedClient(), None)
    assert answer.status_code == 405
    assert wire.error_of(answer)["message"].startswith("GET /v1/chat/completions")


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("item", "status", "param", "code"),
    [
        (RequestError("the prompt has 99 tokens", "prompt"), 400, "messages", None),
        (EngineDeadError("it was ended by SIGKILL"), 503, None, "engine_dead"),
        (Update("", (), "error", error="not finite", is_last=True), 500, None, None),
        (Update("", (), "abort", is_last=True), 503, None, "aborted"),
        (
            Update("", (), "abort", error="2 s are over", is_last=True, fault="deadline"),
            504,
            None,
            "deadline_exceeded",
        ),
    ],
)
def test_what_fails_before_the_first_token_has_a_status(wire, item, status, param, code, stream):
    answer, _ = wire.talk(wire.ScriptedClient(item), {**HELLO, "stream": stream})
    assert answer.status_code == status
    error = wire.error_of(answer)
    assert (error["param"], error["code"]) == (param, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert answer.headers.get("x-should-retry") == ("false" if status == 504 else None)


@pytest.mark.parametrize(
    "item", [EngineDeadError("it died"), Update("", (), "error", error="it died", is_last=True)]
)
def test_a_stream_that_breaks_ends_with_the_error(wire, item):
    events = wire.events_of(
        wire.talk(wire.ScriptedClient(wire.news("a"), item), {**HELLO, "stream": True})[0]
    )
    assert [event["choices"][0]["delta"].get("content") for event in events[:-1]] == ["", "a"]
    assert "it died" in events[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", "a"])
def test_a_grammar_that_proves_too_large_is_the_requests_fault(wire, stream, before):
    first = [wire.news(before)] if before else []
    end = Update("", (), "error", error="guided_regex: too large", is_last=True, fault="request")
    body = {**HELLO, "guided_regex": "a+", "stream": stream}
    answer, _ = wire.talk(wire.ScriptedClient(*first, end), body)
    if stream and before:
        error = wire.events_of(answer)[-1]["error"]
    else:
        assert answer.status_code == 400
        error = wire.error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert error["message"] == "guided_regex: too large"


def test_a_deadline_in_the_middle_of_a_stream_is_said_in_it(wire):
    end = Update("", (), "abort", error="2 s are over", is_last=True, fault="deadline")
    answer, _ = wire.talk(wire.ScriptedClient(wire.news("a"), end), {**HELLO, "stream": True})
    error = wire.events_of(answer)[-1]["error"]
    assert error["code"] == "deadline_exceeded"
    assert "2 s are over" in error["message"]


def test_an_answer_that_breaks_is_an_error_not_half_an_answer(wire):
    answer, _ = wire.talk(wire.ScriptedClient(wire.news("a"), EngineDeadError("it died")), HELLO)
    assert answer.status_code == 503
    assert wire.error_of(answer)["message"] == "it died"


def test_a_dead_engine_shows_in_health_and_in_requests(wire):
    client = wire.ScriptedClient(wire.news("a", "length"))
    assert wire.talk(client, None, "/health")[0].status_code == 200
    client.death = "it was ended by SIGKILL"
    for body, path in ((None, "/health"), (HELLO, "/v1/chat/completions")):
        answer, _ = wire.talk(client, body, path)
        assert answer.status_code == 503
        assert wire.error_of(answer)["message"] == "it was ended by SIGKILL"
    assert client.requests == []


def test_a_server_that_drains_sends_clients_away(wire):
    client = wire.ScriptedClient(wire.news("a", "length"))
    client.refusal = "the server is shutting down"
    answer, _ = wire.talk(client, HELLO)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert client.requests == []
    assert client.turned_away == {"open_reqs": 1}


def test_a_bug_is_500_and_tells_nothing(wire):
    class Broken(wire.ScriptedClient):
        def submit(self, request):
            raise ZeroDivisionError("secret")

    answer, _ = wire.talk(Broken(), HELLO)
    assert answer.status_code == 500
    assert "secret" not in wire.error_of(answer)["message"]


@pytest.mark.parametrize("given", [None, "Bearer wrong", "sesame", "bearer ünïcode"])
def test_without_the_key_there_is_only_health(wire, given):
    client = wire.ScriptedClient(wire.news("a", "length"))
    headers = {} if given is None else {"Authorization": given.encode()}
    for body, path in ((HELLO, "/v1/chat/completions"), (None, "/v1/models")):
        answer, _ = wire.talk(client, body, path, headers=headers, config={"api_key": "sesame"})
        assert answer.status_code == 401
        assert wire.error_of(answer)["code"] == "invalid_api_key"
    assert (
        wire.talk(client, None, "/health", headers=headers, config={"api_key": "sesame"})[
            0
        ].status_code
        == 200
    )
    assert client.requests == []


def test_with_the_key_all_is_open(wire):
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(
        client, HELLO, headers={"Authorization": "Bearer sesame"}, config={"api_key": "sesame"}
    )
    assert answer.status_code == 200


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_client_that_leaves_aborts_its_request(wire, stream, is_begun):
    client = wire.ScriptedClient(*([wire.news("a")] if is_begun else []), None)
    app = create_app(
        client,
        wire.LetterTokenizer(),
        served_model_name=MODEL,
        model_root="root",
        max_model_len=64,
        defaults={},
    )
    body = json.dumps({**HELLO, "stream": stream}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def main():
        left = asyncio.Event()
        first = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if b"content" in message.get("body", b""):
                first.set()

        running = asyncio.create_task(app(scope, receive, send))
        while not client.requests:
            await asyncio.sleep(0)
        if stream and is_begun:
            await first.wait()
        assert client.aborted == []
        left.set()
        await asyncio.wait_for(running, 30)

    asyncio.run(main())
    assert client.aborted == [(client.requests[0].request_id, None)]
