"""Tiers seen from outside: what they hold, how they are filled, and a server that is killed.

Guards: that what one server computed another finds, after SIGKILL, and says so.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

for needed in ("torch", "fastapi", "httpx", "xxhash"):
    pytest.importorskip(needed)

import httpx

PROMPT = [(i * 7) % 250 for i in range(330)]
HIT = 320
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "1MiB")


def complete(url, **options):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tier_of(url):
    (tier,) = httpx.get(f"{url}/v1/kv/tiers").json()["tiers"]
    return tier


def comes_to(wanted, look, timeout_s=20):
    until = time.monotonic() + timeout_s
    while (seen := look()) != wanted and time.monotonic() < until:
        time.sleep(0.05)
    assert seen == wanted


def kill(server):
    worker = server.worker()
    for pid in (worker.pid, server.process.pid):
        os.kill(pid, signal.SIGKILL)
    worker.wait(30)


def test_what_was_served_once_survives_sigkill(serving, tiny, tmp_path):
    disk = ("--tier", f"disk:32MiB:{tmp_path}/kv", "--event-log", f"{tmp_path}/log")
    with serving(tiny, *FLAGS, *disk) as server:
        server.ready()
        text, cached = complete(server.url)
        assert cached == 0
        # Of the answer too, but for its last token.
        comes_to((len(PROMPT) + 8 - 1) // 16, lambda: tier_of(server.url)["blocks"])
        kill(server)
    with serving(tiny, *FLAGS, *disk) as server:
        server.ready()
        assert "tier disk" in server.output
        assert complete(server.url) == (text, HIT)
        tier = tier_of(server.url)
        assert tier["loads"]["blocks"] == tier["hits"] == HIT // 16
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'cached_by_source_total{model_name="tiny",source="disk"} 320' in metrics
        assert 'kvist:tier_loaded_blocks_total{model_name="tiny",tier="disk"} 20' in metrics
        # A salt is a tenant: nothing of another's is there.
        assert complete(server.url, cache_salt="mine") == (text, 0)
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert {"BlocksDemoted", "BlocksPromoted", "PrefixLoaded", "RequestFinished"} <= set(events)


def test_a_prefetch_is_there_before_it_is_asked_for(serving, tiny, tmp_path):
    from typer.testing import CliRunner

    from kvist.cli import app

    with serving(tiny, *FLAGS, "--tier", "host:8MiB", "--api-key", "secret") as server:
        server.ready()
        headers = {"Authorization": "Bearer secret"}

        def ask(path, body):
            return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)

        answer = ask("/v1/kv/prefetch", {"prompt": PROMPT}).json()
        assert answer == {"prompt_tokens": 330, "cached_tokens": 0, "computed_tokens": 330}
        usage = ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == HIT
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        assert ask("/v1/kv/prefetch", chat).json()["computed_tokens"] > 0
        for wrong in ({}, {"prompt": "x", **chat}, {"prompt": []}):
            assert ask("/v1/kv/prefetch", wrong).status_code == 400
        assert httpx.get(f"{server.url}/v1/kv/tiers").status_code == 401

        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": PROMPT, "cache_salt": "mine"}))
        command = ["warm", str(file), "--url", server.url, "--api-key", "secret", "--json"]
        result = CliRunner().invoke(app, command)
        assert json.loads(result.stdout)["prompt_tokens"] == 330, result.output
        usage = ask(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "mine"}
        ).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == HIT
