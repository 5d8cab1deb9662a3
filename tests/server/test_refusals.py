"""Requests that cannot be served as asked: each gets its status, its words and the field's name.

Guards: nonsense crashes the server, is served as something else, or is answered with a 5xx; a body
is read without end.
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from kvist.errors import RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def refused(wire, body, path, status=400, *, content=None, **options):
    """Send it; it is refused without the engine hearing of it. Return the error."""
    client = wire.ScriptedClient(wire.news("a", "length"))
    answer, _ = wire.talk(client, body, path, content=content, **options)
    assert answer.status_code == status, answer.text
    assert client.requests == []
    return wire.error_of(answer)


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "maybe"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 2**63}, "priority"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_value_out_of_range_is_named(wire, path, others, param):
    body = {**HELLO, **others} if path == CHAT else {"prompt": "hi", **others}
    error = refused(wire, body, path)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 64}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", **HELLO}, None),
        ("/tokenize", {"messages": []}, None),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
def test_what_one_route_cannot_serve(wire, path, body, param):
    assert refused(wire, body, path)["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_out_of_range_are_the_engines_to_refuse_and_get_the_fields_name(wire, path):
    error = RequestError("prompt: token id 99999 is outside the vocabulary of 1000", "prompt")
    body = HELLO if path == CHAT else {"prompt": [99_999]}
    answer, _ = wire.talk(wire.ScriptedClient(error), body, path)
    assert answer.status_code == 400
    assert wire.error_of(answer)["param"] == ("messages" if path == CHAT else "prompt")
    assert "outside the vocabulary" in wire.error_of(answer)["message"]


def test_continuations_that_could_never_lie_in_the_pool_together(wire):
    body = {"prompt": "abcd", "n": 4, "max_tokens": 30}
    error = refused(wire, body, COMPLETIONS, num_pool_tokens=100)
    assert error["param"] == "n"
    assert "need 124 slots of KV, the pool has 100" in error["message"]
    ends = [wire.news("a", "length", index=i, is_last=i == 3) for i in range(4)]
    # It just fits; and without a limit, they take turns.
    for path, others, pool in ((COMPLETIONS, body, 124), (CHAT, {**HELLO, "n": 4}, 100)):
        answer, _ = wire.talk(wire.ScriptedClient(*ends), others, path, num_pool_tokens=pool)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"prompt": ',
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"messages": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"a": ' * 100_000,
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "messages": [' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"]}",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    ],
)
def test_a_body_that_is_nonsense_is_400(wire, path, content):
    refused(wire, None, path, content=content)


def test_nesting_is_refused_by_name_and_depth(wire):
    deep = json.loads("[" * 80 + "]" * 80)
    error = refused(wire, {**HELLO, "chat_template_kwargs": {"x": deep}}, CHAT)
    assert error["param"] == "chat_template_kwargs"
    assert "deeper than 64 levels" in error["message"]


def test_half_a_letter_is_found_wherever_it_is(wire):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"\ud800": 1}}}]
    assert refused(wire, {**HELLO, "tools": tools}, CHAT)["param"].startswith("tools[0].function")
    assert refused(wire, {**HELLO, "stop": ["a", "\ud800"]}, CHAT)["param"] == "stop[1]"


def test_another_model_is_404_on_every_route(wire):
    bodies = {
        CHAT: HELLO,
        COMPLETIONS: {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        error = refused(wire, {**body, "model": "gpt-5"}, path, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert refused(wire, None, "/v1/models/a/b", 404)["code"] == "model_not_found"
    assert wire.talk(wire.ScriptedClient(), None, "/v1/models/tiny")[0].json()["id"] == "tiny"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses", "/v1/audio/speech", "/v1/images/generations"]
)
def test_routes_of_others_are_refused_with_the_reason(wire, path):
    error = refused(wire, {"input": "a", "model": "tiny"}, path)
    assert (error["code"], path in error["message"]) == ("not_served", True)


# ---------------------------------------------------------------------- sizes


def test_a_body_that_is_too_large_is_413_by_its_header_and_by_its_bytes(wire):
    body = json.dumps({"prompt": "x" * 3000}).encode()
    options = {"config": {"max_body_bytes": 2048}}
    error = refused(wire, None, COMPLETIONS, 413, content=body, **options)
    assert error["code"] == "body_too_large"
    assert "takes 2048" in error["message"]

    async def chunks():
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    refused(wire, None, COMPLETIONS, 413, content=chunks(), **options)
    small = {"prompt": "x", "max_tokens": 1}
    answer, _ = wire.talk(wire.ScriptedClient(wire.news("a", "length")), small, COMPLETIONS)
    assert answer.status_code == 200


def test_bodies_held_at_a_time_are_bounded_and_let_go():
    from kvist.server.middleware import BODIES_AT_ONCE, BodyLimit

    leave = asyncio.Event()
    statuses = []

    async def app(scope, receive, send):
        assert len((await receive())["body"]) == 1000
        await leave.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate = BodyLimit(app, 1000)

    async def one():
        sent = [{"type": "http.request", "body": b"x" * 1000, "more_body": False}]

        async def receive():
            return sent.pop()

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await gate({"type": "http", "headers": [], "path": "/"}, receive, send)

    async def main():
        held = [asyncio.create_task(one()) for _ in range(BODIES_AT_ONCE)]
        await asyncio.sleep(0)
        await one()
        assert statuses == [503]
        leave.set()
        await asyncio.gather(*held)
        await one()
        assert statuses == [503] + [200] * (BODIES_AT_ONCE + 1)

    asyncio.run(main())


def test_prompts_that_wait_to_be_tokenized_are_bounded():
    import threading

    from kvist.server.api_errors import ApiError
    from kvist.server.text import TextThread

    async def main():
        thread, go = TextThread(most=2), threading.Event()
        working = [asyncio.create_task(thread.run(go.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as info:
            await thread.run(lambda: None)
        assert info.value.status == 503
        go.set()
        await asyncio.gather(*working)
        assert await thread.run(lambda: 7) == 7

    asyncio.run(main())


def test_the_tokenizers_routes_need_the_key_too(wire):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        error = refused(wire, body, path, 401, config={"api_key": "sesame"})
        assert error["code"] == "invalid_api_key"
