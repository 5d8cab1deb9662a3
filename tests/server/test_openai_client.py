"""OpenAI's own client in front of a real engine with a tiny random model.

Guards: what the client's types, helpers and streams expect, and the parts together: forks, log
probabilities, stop strings and grammars from HTTP down to the sampler and back.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

PROMPT = [{"role": "user", "content": "What is a cache, and what is it good for?"}]
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{{ eos_token }}{% endif %}
{%- for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


class Verdict(pydantic.BaseModel):
    """What the parse helper makes a schema of."""

    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def client(serving, tiny, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--kv-cache-memory-bytes", "8MiB")
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(tiny, *flags, *more) as server:
        yield server.ready().client()


def chat(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=PROMPT, **{"temperature": 0, "max_tokens": 24, **options}
    )


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_several_answers_draw_differently_and_the_same_again_by_seed(client):
    def ask():
        found = chat(client, n=3, temperature=1, seed=7)
        return [choice.message.content for choice in found.choices]

    answers = ask()
    assert len(set(answers)) == 3
    assert ask() == answers
    chunks = list(chat(client, n=3, temperature=1, seed=7, stream=True))
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == answers


def test_a_stop_string_across_tokens(client):
    whole = chat(client, logprobs=True).choices[0]
    tokens = [entry.token for entry in whole.logprobs.content]
    stop = "".join(tokens[5:8])
    end = whole.message.content.index(stop)
    stopped = chat(client, stop=[stop])
    assert stopped.choices[0].message.content == whole.message.content[:end]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == stop
    assert text_of(chat(client, stop=[stop], stream=True)) == whole.message.content[:end]


def test_log_probabilities_are_of_the_tokens(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=3, max_tokens=6).choices
    content = choice.logprobs.content
    assert len(content) == 6
    for entry in content:
        top = entry.top_logprobs
        assert len(top) == 3
        assert [t.logprob for t in top] == sorted((t.logprob for t in top), reverse=True)
        # Greedy: the first of them was chosen.
        assert (entry.bytes, entry.logprob) == (top[0].bytes, top[0].logprob)
        assert entry.logprob <= 0
    assert bytes(b for e in content for b in e.bytes).decode(errors="replace") == (
        choice.message.content
    )


def test_a_bias_makes_a_token_certain(client):
    (choice,) = chat(client, logit_bias={"65": 100}, max_tokens=4).choices
    assert len(set(choice.message.content)) == 1


def test_the_parse_helper_gets_what_its_schema_says(client):
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=PROMPT,
        response_format=Verdict,
        temperature=1,
        seed=1,
        max_tokens=400,
    )
    assert parsed.choices[0].message.parsed.answer in ("yes", "no")


def test_a_named_tool_and_a_required_one(client):
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in (named, "required"):
        options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
        options["parallel_tool_calls"] = False  # a random model may never stop calling
        answer = chat(client, **options).choices[0]
        (call,) = answer.message.tool_calls[:1]
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")
        with client.chat.completions.stream(
            model="tiny", messages=PROMPT, temperature=0, **options
        ) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls[0].function.arguments == call.function.arguments
        assert final.tool_calls[0].id


def test_a_tool_is_told_to_the_model_and_its_text_is_no_call(client):
    with_tool = chat(client, tools=[TOOL])
    assert with_tool.usage.prompt_tokens > chat(client).usage.prompt_tokens + 100
    assert with_tool.choices[0].message.tool_calls is None


def test_choices_are_held_to(client):
    found = chat(client, extra_body={"structured_outputs": {"choice": ["red", "green"]}})
    assert found.choices[0].message.content in ("red", "green")


def test_completions_of_all_kinds(client):
    def complete(prompt, **options):
        return client.completions.create(
            model="tiny", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **options}
        )

    both = complete(["A cache", "A block"])
    assert [c.index for c in both.choices] == [0, 1]
    assert complete("A block").choices[0].text == both.choices[1].text
    streamed = complete(["A cache", "A block"], stream=True)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in both.choices]
    best = complete("A cache", best_of=3, temperature=1, seed=3)
    assert len(best.choices) == 1


def test_an_echo_scores_its_prompt_whether_or_not_it_is_cached(client):
    def score():
        found = client.completions.create(
            model="tiny", prompt="A cache is a store. " * 8, echo=True, logprobs=0, max_tokens=1
        )
        return found.choices[0].logprobs

    first, second = score(), score()
    assert first.token_logprobs[0] is None
    assert len(first.tokens) == 8 * 20 + 1
    assert first.token_logprobs[1:-1] == second.token_logprobs[1:-1]


def test_tokens_there_and_back(client):
    import httpx

    base = str(client.base_url).removesuffix("/v1/")
    tokens = httpx.post(f"{base}/tokenize", json={"prompt": "Åsa"}).json()
    assert tokens["count"] == len("Åsa".encode())
    there = httpx.post(f"{base}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert there == {"prompt": "Åsa"}
    assert httpx.get(f"{base}/version").json()["version"]
    assert httpx.get(f"{base}/ping").status_code == 200


def test_refusals_leave_the_others_alone(client):
    stream = chat(client, stream=True, max_tokens=200)
    chunks = [next(stream)]
    for wrong in (
        {"extra_body": {"allowed_token_ids": [99_999]}},
        {"logit_bias": {"99999": 1}},
        {"temperature": -1},
        {"n": 64, "max_tokens": 4000},
        {"stop": ["x"] * 17},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
    ):
        with pytest.raises(openai.BadRequestError) as info:
            chat(client, **wrong)
        assert info.value.param
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model="tiny", prompt=[99_999])
    with pytest.raises(openai.BadRequestError, match="embeddings need"):
        client.embeddings.create(model="tiny", input="a")
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_asynchronous_client(client):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=client.base_url, api_key="none", max_retries=0
        ) as there:
            whole, stream = await asyncio.gather(
                chat(there, max_tokens=12), chat(there, max_tokens=12, stream=True)
            )
            return whole.choices[0].message.content, text_of([chunk async for chunk in stream])

    whole, streamed = asyncio.run(main())
    assert whole == streamed
