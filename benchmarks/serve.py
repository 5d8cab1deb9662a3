"""Streams through the server against `LLM.generate`, and what a refused giant does to them.

The same prompts, greedy, the same number of tokens: once by `LLM.generate` in this process, once as
server-sent events from `kvist serve`, in turn, several rounds. The client is a raw socket loop; its
CPU time is measured and taken off the server's wall time as if it had had a core of its own. In
every second server round a 100 KB prompt, too long for the model, arrives in the middle: the
longest silence of any stream around it is reported beside the longest without it.

    python benchmarks/serve.py --json
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from kvist import LLM, SamplingParams
from kvist.lab.report import environment

PROMPT_WORDS = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    command = [sys.executable, "-c", "from kvist.cli import app; app()", "serve", args.model]
    server = subprocess.Popen(
        [*command, "--port", str(args.port), "--kv-cache-memory-bytes", "2GiB"],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(args.port)
        result = measure(args)
    finally:
        server.terminate()
        server.wait()
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
    else:
        for name, value in result.items():
            print(f"{name:<34} {value}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(args.model, kv_cache_memory_bytes="2GiB")
    draw = random.Random(0)
    words = [
        "river",
        "stone",
        "letter",
        "garden",
        "winter",
        "engine",
        "silver",
        "window",
        "harbour",
        "lantern",
    ]

    def texts() -> list[str]:
        return [" ".join(draw.choices(words, k=PROMPT_WORDS)) for _ in range(args.streams)]

    def offline(**sampling: Any) -> float:
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, **sampling)
        chats = [[{"role": "user", "content": text}] for text in texts()]
        start = time.perf_counter()
        llm.chat(chats, params, use_tqdm=False)
        return args.streams * args.tokens / (time.perf_counter() - start)

    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    offline(temperature=0)
    for _ in range(args.rounds):
        note("generate_tokens_per_s", offline(temperature=0))
        note("sampled_tokens_per_s", offline(temperature=0.8, top_k=50, top_p=0.9, seed=1))
        for giant in (False, True):
            tokens, wall_s, cpu_s, gap_s = stream(args, texts(), giant=giant)
            kind = "_with_giant" if giant else ""
            note(f"stream_tokens_per_s{kind}", tokens / wall_s)
            note(f"stream_tokens_per_s_less_client{kind}", tokens / (wall_s - cpu_s))
            note(f"client_cpu_s{kind}", cpu_s)
            note(f"longest_gap_s{kind}", gap_s)
    result = {name: round(statistics.median(values), 3) for name, values in rows.items()}
    pairs = zip(rows["stream_tokens_per_s_less_client"], rows["generate_tokens_per_s"], strict=True)
    result["stream_over_generate"] = round(statistics.median(a / b for a, b in pairs), 3)
    pairs = zip(rows["generate_tokens_per_s"], rows["sampled_tokens_per_s"], strict=True)
    result["sampled_cost"] = round(statistics.median(a / b for a, b in pairs) - 1, 3)
    return result


def stream(
    args: argparse.Namespace, texts: list[str], *, giant: bool
) -> tuple[int, float, float, float]:
    """Run all streams; return tokens, wall seconds, client CPU seconds, longest gap in seconds."""
    selector = selectors.DefaultSelector()
    start, cpu = time.perf_counter(), time.thread_time()
    for text in texts:
        body = json.dumps(
            {
                "model": args.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": args.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        connection = socket.create_connection(("127.0.0.1", args.port))
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    trouble = threading.Thread(target=send_giant, args=(args.port, args.model))
    last = dict.fromkeys(range(len(texts)), 0.0)
    names = {key.fd: index for index, key in enumerate(selector.get_map().values())}
    gap_s = 0.0
    buffers: list[bytearray] = []
    while selector.get_map():
        for key, _ in selector.select():
            now = time.perf_counter()
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                buffers.append(key.data)
                continue
            key.data.extend(data)
            name = names[key.fd]
            if last[name]:
                gap_s = max(gap_s, now - last[name])
            last[name] = now
            if giant and trouble.ident is None and all(last.values()):
                trouble.start()
    wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
    if giant:
        trouble.join()
    tokens = sum(usage(buffer) for buffer in buffers)
    assert tokens == args.tokens * len(texts), f"{tokens} tokens came"
    return tokens, wall_s, cpu_s, gap_s


def usage(buffer: bytearray) -> int:
    """Read the number of tokens from the usage chunk of a stream."""
    at = buffer.rindex(b'"completion_tokens":')
    return int(buffer[at + 20 : at + 30].split(b",")[0].split(b"}")[0])


def send_giant(port: int, model: str) -> None:
    """Send 100 KB of prompt and see it refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"model": model, "messages": [{"role": "user", "content": "stone river " * 8_500}]}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 400, response.read()
    response.read()


def wait_for(port: int) -> None:
    """Wait until the server answers."""
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
