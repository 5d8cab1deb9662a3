"""Other people's clients, unchanged: LangChain's ChatOpenAI, LlamaIndex's OpenAILike.

Guards: what these send by default, and read, without being told that the server is not OpenAI's.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

_HOW = "is not installed; pip install 'kvist[clients]'"


@pytest.fixture(scope="module")
def server(serving, tiny, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(
        "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{{ eos_token }}"
        "{% endif %}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    flags = ("--chat-template", str(template), "--kv-cache-memory-bytes", "8MiB")
    with serving(tiny, *flags) as running:
        yield running.ready()


def test_langchain_chats_streams_calls_tools_and_parses(server):
    langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai {_HOW}")
    model = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=16,
        max_retries=0,
    )
    whole = model.invoke("What is a cache?")
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"
    streamed = "".join(chunk.content for chunk in model.stream("What is a cache?"))
    assert streamed == whole.content

    schema = {
        "title": "weather",
        "description": "Ask for the weather.",
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    patient = model.model_copy(update={"max_tokens": 400})
    asked = patient.bind_tools([schema], tool_choice="weather").invoke("How warm is it?")
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]["unit"]) in (
        ("weather", "celsius"),
        ("weather", "kelvin"),
    )
    for method in ("function_calling", "json_schema"):
        found = patient.with_structured_output(schema, method=method).invoke("How warm is it?")
        assert found["unit"] in ("celsius", "kelvin")


def test_llamaindex_chats_streams_and_completes(server):
    like = pytest.importorskip(
        "llama_index.llms.openai_like", reason=f"llama-index-llms-openai-like {_HOW}"
    )
    core = pytest.importorskip("llama_index.core.llms")
    options = {
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 16,
        "max_retries": 0,
        "context_window": 4096,
    }
    talker = like.OpenAILike(is_chat_model=True, is_function_calling_model=True, **options)
    messages = [core.ChatMessage(role="user", content="What is a cache?")]
    whole = talker.chat(messages).message.content
    assert "".join(chunk.delta or "" for chunk in talker.stream_chat(messages)) == whole
    writer = like.OpenAILike(is_chat_model=False, **options)
    text = writer.complete("A cache is").text
    assert "".join(chunk.delta or "" for chunk in writer.stream_complete("A cache is")) == text
