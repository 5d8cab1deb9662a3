"""Readers that are slow, rude or gone, over real sockets, by the hundred.

Guards: a request whose reader is gone keeps its blocks, its task or its socket; a reader who is
slow makes the server hold more than its answer, or holds up the others.

The engine is a null one, in a process of its own; the HTTP server is uvicorn, in this one, so that
its tasks and sockets can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
import struct
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
uvicorn = pytest.importorskip("uvicorn")

from kvist.config import EngineConfig
from kvist.server.app import create_app
from kvist.server.bridge import EngineClient

NULL_WORKER = Path(__file__).parents[1] / "server" / "null_worker.py"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCAB_SIZE = 1000
POISON = 666  # the null worker's: not what is tried here
LINGER_ZERO = struct.pack("ii", 1, 0)
"""For SO_LINGER: close by reset, not by an orderly end."""


class NumberTokenizer:
    """A prompt of numbers is its ids; every id is one letter of text."""

    eos_token_ids = ()
    bos_token_id = None
    vocab_size = VOCAB_SIZE
    chat_template = None

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def encode_chat(self, messages, **options):
        return self.encode(messages[0]["content"])

    def decode(self, token_ids, skip_special_tokens=True):
        return "x" * len(token_ids)

    def stream(self, skip_special_tokens=True):
        return self

    def push(self, token_id):
        return chr(ord("a") + token_id % 26)

    def flush(self):
        return ""


@contextlib.asynccontextmanager
async def served():
    """Start engine and server; yield the port and the engine's client."""
    command = (sys.executable, str(NULL_WORKER))
    client = EngineClient(EngineConfig(model="null"), command)
    try:
        await client.start()
        await client.wait_ready()
        app = create_app(
            client,
            NumberTokenizer(),
            served_model_name="null",
            model_root="null",
            max_model_len=32_768,
            defaults={},
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=5)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1], client
        finally:
            server.should_exit = True
            await serving
    finally:
        await client.stop()


async def connect(port, *, receive_bytes=None):
    end = socket.socket()
    end.setblocking(False)
    if receive_bytes is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=end, limit=receive_bytes or 1 << 16)


def spell(path, body):
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: kvist\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def hang_up(writer, rng):
    """Go: in order, or by a reset."""
    if rng.random() < 0.5:
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_ZERO)
        writer.transport.abort()
    else:
        writer.close()


def make_body(rng, number):
    prompt = " ".join(str(rng.randrange(POISON)) for _ in range(rng.randrange(1, 100)))
    body = {"max_tokens": rng.randrange(1, 200), "stream": rng.random() < 0.8}
    body["n"] = rng.choice([1, 1, 1, 2, 5])
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("abcdefgh") + rng.choice("abcdefgh")]
    if rng.random() < 0.5:
        return CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}
    prompts = [prompt, f"{number} 7", "1 2 3"][: rng.choice([1, 1, 3])]
    return COMPLETIONS, {**body, "prompt": prompts}


async def one(port, rng, number, ends):
    """Ask for something and behave somehow; note how it ended."""
    path, body = make_body(rng, number)
    sent = spell(path, body)
    manner = rng.choice(["whole", "slow", "leaves", "leaves", "speechless", "mumbles"])
    reader, writer = await connect(port, receive_bytes=4096 if manner == "slow" else None)
    try:
        if manner == "mumbles":
            # The body never comes to its end.
            writer.write(sent[: rng.randrange(1, len(sent))])
            await writer.drain()
            await asyncio.sleep(rng.random() * 0.02)
            hang_up(writer, rng)
        elif manner == "speechless":
            writer.write(sent)
            await writer.drain()
            hang_up(writer, rng)
        elif manner == "leaves":
            writer.write(sent)
            await reader.read(rng.randrange(1, 3000))
            hang_up(writer, rng)
        else:
            writer.write(sent)
            answer = bytearray()
            while piece := await reader.read(500 if manner == "slow" else 1 << 20):
                answer += piece
                if manner == "slow" and rng.random() < 0.2:
                    await asyncio.sleep(0.01)
            assert answer.startswith(b"HTTP/1.1 200"), bytes(answer[:500])
            if body["stream"]:
                assert b"data: [DONE]" in answer[-100:], bytes(answer[-300:])
        ends[manner] = ends.get(manner, 0) + 1
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def num_descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


async def settles(condition, timeout_s=30):
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_readers_of_all_kinds_nothing_is_left(monkeypatch, seed):
    monkeypatch.setenv("NULL_STEP_S", "0.0005")
    rng = random.Random(seed)
    ends: dict[str, int] = {}

    async def main():
        async with served() as (port, client):
            # One of each first: what is made once and kept is there from then on.
            await asyncio.gather(*(one(port, rng, n, {}) for n in range(20)))
            await settles(lambda: is_idle(client))
            await asyncio.sleep(0.1)
            tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()
            for _ in range(4):
                await asyncio.gather(*(one(port, rng, n, ends) for n in range(40)))
            await settles(lambda: is_idle(client))

            async def is_clean():
                return len(asyncio.all_tasks()) <= tasks and num_descriptors() <= descriptors

            await settles(is_clean)
            assert await client.drain(5) == 0, "no request is open"

    asyncio.run(main())
    assert set(ends) == {"whole", "slow", "leaves", "speechless", "mumbles"}
    assert sum(ends.values()) == 160


async def is_idle(client):
    stats = await client.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_who_does_not_read_holds_up_nobody_and_gets_it_all_in_fewer_pieces():
    num_tokens = 30_000

    async def main():
        async with served() as (port, client):
            lazy, writer = await connect(port, receive_bytes=4096)
            body = {"prompt": "1 2 3", "max_tokens": num_tokens, "stream": True}
            writer.write(spell(COMPLETIONS, body))
            await lazy.readuntil(b"data: ")
            # Others are answered meanwhile, and the engine comes to its end.
            for _ in range(3):
                reader, other = await connect(port)
                other.write(spell(COMPLETIONS, {"prompt": "4 5", "max_tokens": 5}))
                assert b'"finish_reason":"length"' in await reader.read()
                other.close()
            await settles(lambda: is_idle(client), 120)
            answer = await lazy.read()
            writer.close()
            return answer

    answer = asyncio.run(main())
    lines = [line for line in answer.split(b"\n") if line.lstrip().startswith((b"data: {", b"{"))]
    events = [json.loads(line.strip().removeprefix(b"data: ")) for line in lines]
    assert sum(len(event["choices"][0]["text"]) for event in events) == num_tokens
    assert len(events) < num_tokens
