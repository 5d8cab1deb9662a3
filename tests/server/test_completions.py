"""Completions over a scripted engine: prompts of every form, echo, log probabilities, the best of.

Guards: continuations of several prompts are mixed up; a stream says something else than the whole;
what is echoed is not the prompt.
"""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from kvist.engine.sequence import TokenLogprobs

PATH = "/v1/completions"


def logprobs(text, value=-1.0):
    return tuple(TokenLogprobs(ord(c), value, 1, ((ord(c), value), (122, -2.0))) for c in text)


def complete(wire, body, *news):
    client = wire.ScriptedClient(*news)
    answer, _ = wire.talk(client, body, PATH)
    assert answer.status_code == 200, answer.text
    return answer.json(), client


def both(wire, body, *news):
    """Ask twice, whole and streamed; the answers are the same. Return the whole and the engine."""
    got, client = complete(wire, body, *news)
    streamed, _ = wire.talk(wire.ScriptedClient(*news), {**body, "stream": True}, PATH)
    found = {}
    for event in wire.events_of(streamed):
        assert event["object"] == got["object"] == "text_completion"
        for choice in event["choices"]:
            there = found.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": []})
            there["text"] += choice["text"]
            there["tokens"] += (choice["logprobs"] or {}).get("tokens", [])
            there["offsets"] += (choice["logprobs"] or {}).get("text_offset", [])
            there["finish_reason"] = choice["finish_reason"]
    for choice in got["choices"]:
        assert found.pop(choice["index"]) == {
            "text": choice["text"],
            "tokens": (choice["logprobs"] or {}).get("tokens", []),
            "offsets": (choice["logprobs"] or {}).get("text_offset", []),
            "finish_reason": choice["finish_reason"],
        }
    assert found == {}
    return got, client


def test_a_completion_has_openais_shape(wire):
    got, client = complete(wire, {"prompt": "Hi"}, wire.news(" the"), wire.news("re", "length"))
    assert got.pop("id").startswith("cmpl-")
    assert isinstance(got.pop("created"), int)
    assert got == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": " there",
                "logprobs": None,
                "finish_reason": "length",
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
    assert client.requests[0].params.max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97, 98], [99]], [(97, 98), (99,)]),
    ],
)
def test_all_forms_of_a_prompt(wire, prompt, ids):
    got, client = both(wire, {"prompt": prompt, "n": 1}, wire.news("x", "length"))
    assert [request.prompt_token_ids for request in client.requests] == ids
    assert [choice["index"] for choice in got["choices"]] == list(range(len(ids)))
    assert len({request.request_id for request in client.requests}) == len(ids)
    assert got["usage"]["completion_tokens"] == len(ids)


def test_choices_are_numbered_through_prompts_and_continuations(wire):
    news = wire.news("a", "length", is_last=False), wire.news("b", "stop", index=1)
    got, _ = both(wire, {"prompt": ["p", "q"], "n": 2}, *news)
    assert [(c["index"], c["text"]) for c in got["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "a"),
        (3, "b"),
    ]


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
def test_echo_puts_the_prompt_and_its_log_probabilities_before(wire, prompt):
    body = {"prompt": prompt, "echo": True, "logprobs": 2}
    news = (
        wire.news("y", logprobs=logprobs("y"), prompt_logprobs=logprobs("i", -3.0)),
        wire.news("o", "length", logprobs=logprobs("o")),
    )
    got, client = both(wire, body, *news)
    (choice,) = got["choices"]
    assert choice["text"] == "Hiyo"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "token_logprobs": [None, -3.0, -1.0, -1.0],
        "tokens": ["H", "i", "y", "o"],
        "top_logprobs": [
            None,
            {"i": -3.0, "z": -2.0},
            {"y": -1.0, "z": -2.0},
            {"o": -1.0, "z": -2.0},
        ],
    }
    assert client.requests[0].params.prompt_logprobs == 2


def test_echo_without_a_token_more_scores_the_prompt(wire):
    body = {"prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 0}
    news = wire.news("y", "length", logprobs=logprobs("y"), prompt_logprobs=logprobs("i"))
    got, client = both(wire, body, news)
    assert got["choices"][0]["text"] == "Hi"
    assert got["choices"][0]["logprobs"]["tokens"] == ["H", "i"]
    assert got["usage"]["completion_tokens"] == 0
    assert client.requests[0].params.max_tokens == 1


def test_the_best_of_several_are_returned(wire):
    news = (
        wire.news("a", "length", is_last=False, logprobs=logprobs("a", -3.0)),
        wire.news("b", "length", index=1, logprobs=logprobs("b", -1.0)),
    )
    got, client = complete(wire, {"prompt": "p", "best_of": 2}, *news)
    assert [(c["index"], c["text"]) for c in got["choices"]] == [(0, "b")]
    assert client.requests[0].params.best_of == 2
    assert got["choices"][0]["logprobs"] is None, "they were for ranking"


def test_prompt_log_probabilities_as_in_vllm(wire):
    news = wire.news("y", "length", prompt_logprobs=logprobs("i", -3.0))
    got, _ = both(wire, {"prompt": "Hi", "prompt_logprobs": 1}, news)
    none, second = got["choices"][0]["prompt_logprobs"]
    assert none is None
    assert second["105"] == {"logprob": -3.0, "rank": 1, "decoded_token": "i"}


def test_a_prompt_may_be_cut_to_its_end(wire):
    for most, ids in ((2, (100, 101)), (-1, (97, 98, 99, 100, 101))):
        body = {"prompt": "abcde", "truncate_prompt_tokens": most}
        _, client = complete(wire, body, wire.news("x", "length"))
        assert client.requests[0].prompt_token_ids == ids


def test_one_prompt_that_is_refused_takes_none_of_the_others_with_it(wire):
    client = wire.ScriptedClient(None)
    answer, _ = wire.talk(client, {"prompt": ["fine", ""]}, PATH)
    assert answer.status_code == 400
    assert wire.error_of(answer)["param"] == "prompt"
    assert [name for name, _ in client.aborted] == [client.requests[0].request_id]


def test_an_error_of_one_prompt_ends_all(wire):
    from kvist.errors import EngineDeadError

    client = wire.ScriptedClient(EngineDeadError("it died"))
    answer, _ = wire.talk(client, {"prompt": ["a", "b", "c"]}, PATH)
    assert answer.status_code == 503
    assert wire.error_of(answer)["message"] == "it died"


# ---------------------------------------------------------------------- the tokenizer's routes


def test_tokenize_has_vllms_shape(wire):
    body = {"prompt": "ab", "return_token_strs": True}
    answer, _ = wire.talk(wire.ScriptedClient(), body, "/tokenize")
    assert answer.json() == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [97, 98],
        "token_strs": ["a", "b"],
    }
    body = {"messages": [{"role": "user", "content": "hej"}], "add_generation_prompt": False}
    answer, tokenizer = wire.talk(wire.ScriptedClient(), body, "/tokenize")
    assert answer.json()["tokens"] == [104, 101, 106]
    assert not tokenizer.chats[0].opens_turn


def test_detokenize_is_the_way_back(wire):
    answer, _ = wire.talk(wire.ScriptedClient(), {"tokens": [97, 98]}, "/detokenize")
    assert answer.json() == {"prompt": "ab"}
    for wrong in (-1, 1000):
        answer, _ = wire.talk(wire.ScriptedClient(), {"tokens": [1, wrong]}, "/detokenize")
        assert answer.status_code == 400
        assert wire.error_of(answer)["param"] == "tokens"
        assert str(wrong) in wire.error_of(answer)["message"]
