"""What stands behind the server in its tests: a scripted engine, a null one, a whole process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

NULL_WORKER = (sys.executable, str(Path(__file__).with_name("null_worker.py")))

REAL = (sys.executable, "-c", "from kvist.cli import app; app()")
NULL = (sys.executable, str(Path(__file__).with_name("null_serve.py")))

MODEL, EOS, BOS = "tiny", 0, 2


@pytest.fixture
def null_client():
    """Return a context manager: an `EngineClient` in front of a null engine, started and ready."""
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    from kvist.config import EngineConfig
    from kvist.server.bridge import EngineClient

    @asynccontextmanager
    async def opened(**options):
        client = EngineClient(EngineConfig(model="null"), NULL_WORKER, **options)
        try:
            await client.start()
            await client.wait_ready()
            yield client
        finally:
            await client.stop()

    return opened


@pytest.fixture
def comes_true():
    """Return a function that waits until a condition (a coroutine function) holds."""

    async def wait(condition, timeout_s=30):
        async with asyncio.timeout(timeout_s):
            while not await condition():
                await asyncio.sleep(0.01)

    return wait


class LetterTokenizer:
    """One token a letter, its code point; `EOS` ends a text, `1` is half of the letter after it."""

    eos_token_ids = (EOS,)
    bos_token_id = BOS
    vocab_size = 1000
    chat_template = "{{ tools }}<tool_call>"

    def __init__(self):
        self.chats = []

    def encode_chat(self, messages, tools, add_generation_prompt, chat_template, template_kwargs):
        from kvist.errors import RequestError

        if not messages:
            raise RequestError("a chat needs at least one message", "messages")
        self.chats.append(
            SimpleNamespace(
                messages=list(messages),
                tools=tools,
                opens_turn=add_generation_prompt,
                template=chat_template,
                variables=dict(template_kwargs),
            )
        )
        return [ord(letter) for message in messages for letter in message["content"]]

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id):
        return chr(token_id).encode()

    def stream(self, skip_special_tokens=True):
        return self

    def push(self, token_id):
        return "" if token_id == 1 else chr(token_id)

    def flush(self):
        return ""


class ScriptedClient:
    """Answers every request with the same news. `None` among them: nothing more, ever."""

    def __init__(self, *news):
        self.news = news
        self.death = None
        self.refusal = None
        self.stalled = None
        self.turned_away = Counter()
        self.requests = []
        self.aborted = []

    def turn_away(self, reason):
        self.turned_away[reason] += 1

    def submit(self, request):
        from kvist.server.stream import RequestStream

        request.check(64)
        self.requests.append(request)
        stream = RequestStream(
            request.request_id, lambda name, index: self.aborted.append((name, index))
        )
        asyncio.get_running_loop().create_task(self._play(stream))
        return stream

    async def _play(self, stream):
        for item in self.news:
            if item is None:
                return
            if isinstance(item, Exception):
                stream.fail(item)
            else:
                stream.push(item)
            # So that each is read by itself.
            for _ in range(10):
                await asyncio.sleep(0)


def news(text, finish_reason=None, **others):
    """New tokens of an answer; an end is the last news, unless `is_last` says no."""
    from kvist.engine.step import Update

    others = {"num_cached_tokens": 1, "is_last": finish_reason is not None, **others}
    return Update("", tuple(map(ord, text)), finish_reason, **others)


def talk(client, body, path="/v1/chat/completions", *, headers=None, content=None, **options):
    """Send one request; return the answer and the tokenizer. Without a body and content: GET."""
    import httpx

    from kvist.config import ServerConfig
    from kvist.server.app import create_app

    tokenizer = LetterTokenizer()
    for name in ("chat_template",):
        if name in options:
            setattr(tokenizer, name, options.pop(name))
    options = {"served_model_name": MODEL, "defaults": {}, **options}
    config = ServerConfig(**options.pop("config", {}))
    app = create_app(
        client, tokenizer, model_root="root", max_model_len=64, config=config, **options
    )

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvist") as http:
            if body is None and content is None:
                return await http.get(path, headers=headers)
            sent = json.dumps(body) if content is None else content
            given = {"Content-Type": "application/json", **(headers or {})}
            return await http.post(path, content=sent, headers=given)

    return asyncio.run(main()), tokenizer


def error_of(answer):
    """Return the error; it has OpenAI's shape."""
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(answer):
    """Return the events of a stream that ended as it should."""
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
def wire():
    """Return what it takes to talk to the HTTP face over a scripted engine."""
    for name in ("fastapi", "msgspec", "zmq", "httpx"):
        pytest.importorskip(name)
    return SimpleNamespace(
        LetterTokenizer=LetterTokenizer,
        ScriptedClient=ScriptedClient,
        news=news,
        talk=talk,
        error_of=error_of,
        events_of=events_of,
    )


class Server:
    """A `kvist serve` and what it printed."""

    def __init__(self, command, model, *flags, **environ):
        self.process = subprocess.Popen(
            [*command, "serve", str(model), "--served-model-name", "tiny", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # One thread: on tensors this small more only wait for each other.
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", **environ},
        )
        self.output = ""
        self.url = None
        self._clients = []
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._printed:
                self.output += line
                self._printed.notify_all()

    def ready(self, timeout_s=300):
        with self._printed:
            self._printed.wait_for(
                # The last line it prints; the address is on the one before.
                lambda: "\n  curl " in self.output or self.process.poll() is not None,
                timeout_s,
            )
        found = re.search(r"on (http://\S+); try", self.output)
        assert found, self.output
        self.url = found[1]
        return self

    def finish(self, timeout_s=120):
        """Wait for the end; return exit code and all output."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        self.process.stdout.close()
        for client in self._clients:
            client.close()
        return code, self.output

    def worker(self):
        import psutil

        (child,) = psutil.Process(self.process.pid).children()
        return child

    def client(self, api_key="none"):
        import openai

        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120
        )
        self._clients.append(client)
        return client


@pytest.fixture(scope="session")
def serving():
    """Return a context manager: `kvist serve` with a model, and a null engine if that is asked."""
    for name in ("torch", "fastapi", "httpx", "openai", "psutil"):
        pytest.importorskip(name)

    @contextlib.contextmanager
    def started(model, *flags, null=False, **environ):
        server = Server(NULL if null else REAL, model, "--port", "0", *flags, **environ)
        try:
            yield server
        finally:
            server.process.terminate()
            server.finish()

    return started


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a tiny random model."""
    pytest.importorskip("torch")
    from kvist.testing.models import tiny_model

    return tiny_model("llama", tmp_path_factory.mktemp("served") / "llama")
