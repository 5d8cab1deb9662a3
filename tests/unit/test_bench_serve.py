"""`kvist bench serve` against a scripted server: what it counts, and what it makes of trouble."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.lab.bench.load import Words, from_trace
from kvist.lab.traces import TraceRequest

WORD_TOKENS, TEMPLATE_TOKENS, SHARED_TOKENS = 3, 10, 60


class Scripted:
    """Answers like a server: a word is 3 tokens, each text token an event, 60 tokens cached.

    `trouble` says of the n-th request to chat (from 1) what goes wrong: ``refuse``, ``cut``.
    """

    def __init__(self, trouble: Callable[[int], str | None] = lambda n: None) -> None:
        self.trouble = trouble
        self.bodies: list[dict] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            self._send(writer, 200, json.dumps({"data": [{"id": "m"}]}))
        else:
            assert head.startswith("POST /v1/chat/completions ")
            self.bodies.append(json.loads(body))
            await self._answer(writer, self.bodies[-1], self.trouble(len(self.bodies)))
        await writer.drain()
        writer.close()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    async def _answer(self, writer: asyncio.StreamWriter, body: dict, trouble: str | None) -> None:
        if trouble == "refuse":
            self._send(writer, 503, json.dumps({"error": {"message": "busy"}}))
            return
        tokens = body["max_tokens"]
        prompt = TEMPLATE_TOKENS + WORD_TOKENS * len(body["messages"][0]["content"].split())
        # Longer prompts take longer: the probes look for that.
        await asyncio.sleep(prompt * 2e-5)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": SHARED_TOKENS},
        }
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": "a"}}]}] * tokens
        events += [{"choices": [], "usage": usage}]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        if trouble == "cut":
            lines = lines[:3]
        text = "".join(lines).encode()
        # Chunks do not end where events do.
        for start in range(0, len(text), 50):
            part = text[start : start + 50]
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        if trouble != "cut":
            writer.write(b"0\r\n\r\n")


@contextmanager
def serving(server: Scripted) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()

    def work() -> None:
        asyncio.set_event_loop(loop)
        opened = loop.run_until_complete(asyncio.start_server(server.handle, sock=listener))
        started.set()
        loop.run_forever()
        opened.close()
        loop.run_until_complete(opened.wait_closed())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def bench(url: str, *args: str) -> dict:
    load = ("--rate", "40", "--seconds", "1", "--max-tokens", "5", "--prompt-tokens", "300")
    found = CliRunner().invoke(app, ["bench", "serve", url, *load, *args, "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_counts_what_came_and_what_was_cached():
    with serving(server := Scripted()) as url:
        found = bench(url, "--shared-tokens", "60", "--prefixes", "1")
    (row,) = found["tables"]["load"]["rows"]
    loads = [body for body in server.bodies if body["max_tokens"] == 5]
    assert row["finished"] == len(loads) > 10
    assert row["failed"] == 0
    assert row["good_share"] == 1
    assert row["ttft_p50_s"] <= row["ttft_p95_s"]
    words = [body["messages"][0]["content"].split() for body in loads]
    # 3 tokens a word was learned from the probes, so 300 tokens are 100 words, 20 of them shared.
    assert {len(text) for text in words} == {100}
    assert len({tuple(text[:20]) for text in words}) == 1
    assert len({tuple(text[20:]) for text in words}) == len(words)
    assert row["cached_share"] == pytest.approx(SHARED_TOKENS / (TEMPLATE_TOKENS + 300))
    assert row["saved_s"] > 0


def test_failures_are_counted_by_their_reason_and_are_not_good():
    def trouble(n: int) -> str | None:
        # The first seven are probes.
        return None if n <= 7 else {0: "refuse", 1: "cut"}.get(n % 4)

    with serving(Scripted(trouble)) as url:
        found = bench(url)
    (row,) = found["tables"]["load"]["rows"]
    assert row["failed"] > 0
    assert row["good_share"] == row["finished"] / (row["finished"] + row["failed"])
    facts = " ".join(found["facts"])
    assert "status 503: busy" in facts
    assert "× the stream broke off" in facts


def test_a_trace_keeps_its_sharing_and_its_times():
    requests = [
        TraceRequest(10.0, 1024, 64, (1, 2)),
        TraceRequest(12.0, 1200, 640, (1, 2, 3)),
        TraceRequest(13.0, 512, 64, (4,)),
    ]
    first, second = from_trace(Words(2.0, 0), requests, count=2, speed=4, shrink=16)
    assert (first.due_s, second.due_s) == (0.0, 0.5)
    assert (first.max_tokens, second.max_tokens) == (4, 40)
    # 1,024 tokens, 16 times shorter, of 2 a word.
    assert len(first.text.split()) == 32
    assert second.text.startswith(first.text + " ")


def test_nobody_there_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = CliRunner().invoke(app, ["bench", "serve", f"http://127.0.0.1:{port}"])
    assert found.exit_code == 2
    assert len(found.stderr.strip().splitlines()) == 1
    assert "cannot reach" in found.stderr


@pytest.mark.parametrize(
    "args", [["nonsense"], ["http://127.0.0.1:1", "--rate", "0"], ["http://x", "--trace", "gone"]]
)
def test_misuse_is_one_line(args: list[str]):
    found = CliRunner().invoke(app, ["bench", "serve", *args])
    assert found.exit_code == 2
    assert len(found.stderr.strip().splitlines()) == 1
