"""Real connections over a real socket, and clients that hang up in the middle.

Guards: a request whose client is gone keeps its blocks and its place in the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from kvist.server.app import create_app


class NumberTokenizer:
    """A prompt of numbers is its ids; every id is one letter of text."""

    eos_token_ids = ()
    bos_token_id = None
    chat_template = None

    def encode_chat(self, messages, **options):
        return [int(word) for word in messages[0]["content"].split()]

    def stream(self, skip_special_tokens=True):
        return self

    def push(self, token_id):
        return "x"

    def flush(self):
        return ""


@contextlib.asynccontextmanager
async def http_in_front_of(client):
    app = create_app(
        client,
        NumberTokenizer(),
        served_model_name="null",
        model_root="null",
        max_model_len=32_768,
        defaults={},
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield http
    server.should_exit = True
    await serving


def ask(prompt, max_tokens, stream):
    content = " ".join(map(str, prompt))
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "stream": stream,
    }


async def is_idle(client):
    stats = await client.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_blocks(null_client, comes_true, monkeypatch, stream):
    monkeypatch.setenv("NULL_STEP_S", "0.002")

    async def main():
        async with null_client() as client, http_in_front_of(client) as http:

            async def hold():
                body = ask(range(100), 30_000, stream)
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass

            holding = asyncio.create_task(hold())

            async def is_running():
                return (await client.stats()).num_used_blocks > 0

            await comes_true(is_running)
            holding.cancel()
            await comes_true(lambda: is_idle(client))

    asyncio.run(main())


def test_after_many_that_hang_up_at_random_nothing_is_held(null_client, comes_true, monkeypatch):
    monkeypatch.setenv("NULL_STEP_S", "0.001")
    rng = random.Random(0)
    finished = []

    async def main():
        async with null_client() as client, http_in_front_of(client) as http:

            async def one(number):
                prompt = [*range(rng.randrange(64)), number]
                body = ask(prompt, rng.randrange(1, 60), number % 3 != 0)
                patience = rng.choice([0, 1, 5, 10_000])
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_lines():
                        patience -= 1
                        if patience < 0:
                            return
                finished.append(number)

            for _ in range(4):
                await asyncio.gather(*map(one, range(30)))
            await comes_true(lambda: is_idle(client))
            assert await client.drain(30) == 0

    asyncio.run(main())
    assert 0 < len(finished) < 120, "both kinds happened"
