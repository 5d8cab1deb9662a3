"""`kvist serve` as a process, and OpenAI's own client in front of it.

First with a real (tiny, random) model; what ends a server is tried with a null engine behind it,
which starts sooner and takes as long for an answer as is wanted.

Guards: the parts fit each other; a shutdown cuts answers off or leaves processes behind; a server
without an engine looks healthy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
psutil = pytest.importorskip("psutil")

# Minutes only where several do this at once on a machine of two cores.
pytestmark = pytest.mark.timeout(900)

PROMPT = [{"role": "user", "content": "What is a cache, and what is it good for?"}]


@pytest.fixture(scope="module")
def server(serving, tiny):
    flags = ("--api-key", "sesame", "--kv-cache-memory-bytes", "8MiB")
    with serving(tiny, *flags) as running:
        yield running.ready()


def chat(client, **options):
    return client.chat.completions.create(
        model="tiny", messages=PROMPT, **{"temperature": 0, "max_tokens": 12, **options}
    )


def test_streamed_and_whole_answers_are_the_same_and_the_second_is_cached(server):
    client = server.client("sesame")
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == streamed
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens > 0
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 32
    # All full blocks of the prompt.
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == (whole.usage.prompt_tokens - 1) // 16 * 16


def test_the_answer_is_that_of_the_library(server, tiny):
    from kvist import LLM, SamplingParams

    llm = LLM(str(tiny), kv_cache_memory_bytes="8MiB")
    (there,) = llm.chat(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    here = chat(server.client("sesame"))
    assert here.choices[0].message.content == there.outputs[0].text
    assert here.usage.prompt_tokens == len(there.prompt_token_ids)


def test_openais_client_raises_its_own_errors(server):
    client = server.client("sesame")
    with pytest.raises(openai.BadRequestError, match="is not served"):
        chat(client, extra_body={"use_beam_search": True})
    with pytest.raises(openai.BadRequestError, match="max_model_len=4096"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 5000}]
        )
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="huge", messages=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        chat(server.client("wrong"))
    assert [entry.id for entry in client.models.list()] == ["tiny"]


def test_start_up_prints_the_bill_and_a_line_to_try(server):
    assert "KV pool" in server.output
    assert "blocks of 16" in server.output
    line = next(line for line in server.output.splitlines() if line.startswith("  curl "))
    line = line.replace("curl ", "curl -s ", 1).replace('{"model"', '{"max_tokens": 4, "model"')
    done = subprocess.run(
        ["bash", "-c", line],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "KVIST_API_KEY": "sesame", "no_proxy": "*"},
    )
    assert '"object":"chat.completion"' in done.stdout, done.stderr


def test_the_server_itself_holds_no_torch(server):
    def libraries(process):
        return Path(f"/proc/{process.pid}/maps").read_text()

    assert "libtorch" in libraries(server.worker()), "this would show it"
    assert "libtorch" not in libraries(server.process)


def test_a_port_in_use_is_said_before_anything_is_loaded(server, serving):
    port = server.url.rpartition(":")[2]
    # A model that is not there: were it looked for first, the error would be another.
    with serving("./no-such-model", "--port", port) as second:
        code, output = second.finish()
    assert code == 2
    assert f"--port={port}" in output
    assert "Traceback" not in output


def test_a_start_that_fails_says_why_and_leaves_nothing(serving, tiny):
    with serving(tiny, null=True, NULL_OPEN="config") as server:
        code, output = server.finish()
    assert code == 2
    assert "ConfigError: --block-size=7 is not served; use 16" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("to", ["server", "both"])
def test_sigterm_finishes_open_answers_and_takes_no_more(serving, tiny, to):
    # Both: what systemd does to all processes of a service.
    with serving(tiny, null=True, NULL_STEP_S="0.002") as server:
        client = server.ready().client()
        worker = server.worker()
        stream = chat(client, stream=True, max_tokens=1000)
        chunks = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        if to == "both":
            worker.send_signal(signal.SIGTERM)
        while "shutting down" not in server.output:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refusal:
            chat(client, max_tokens=1)
        chunks += stream
        code, output = server.finish()
    assert refusal.value.status_code == 503
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (code, "Traceback" in output) == (0, False), output
    assert not worker.is_running()


def test_a_start_that_is_called_off_leaves_nothing(serving, tiny):
    with serving(tiny, null=True, NULL_OPEN="hang") as server:
        while not psutil.Process(server.process.pid).children():
            time.sleep(0.01)
        worker = server.worker()
        server.process.send_signal(signal.SIGTERM)
        code, output = server.finish()
    assert (code, output) == (0, "")
    assert not worker.is_running()


def test_a_second_signal_ends_all_at_once(serving, tiny):
    with serving(tiny, null=True, NULL_STEP_S="0.002") as server:
        stream = chat(server.ready().client(), stream=True, max_tokens=30_000)
        next(stream)
        worker = server.worker()
        server.process.send_signal(signal.SIGINT)
        while "shutting down" not in server.output:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        code, output = server.finish()
    assert (code, "Traceback" in output) == (128 + signal.SIGINT, False), output
    assert not worker.is_running()


def test_a_hung_engine_holds_up_neither_who_asks_nor_the_end(serving, tiny):
    with serving(tiny, "--engine-timeout", "5", null=True, NULL_STEP_S="0.002") as server:
        client = server.ready().client()
        worker = server.worker()
        stream = chat(client, stream=True, max_tokens=30_000)
        next(stream)
        worker.suspend()
        with pytest.raises(openai.APIError, match="ended no step for"):
            list(stream)
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "engine_stalled"
        assert httpx.get(f"{server.url}/v1/kv/stats").status_code == 503
        with pytest.raises(openai.InternalServerError, match="ended no step for"):
            chat(client)
        server.process.send_signal(signal.SIGTERM)
        while "shutting down" not in server.output:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        code, output = server.finish()
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in output, output
    assert "CancelledError" not in output, output
    assert not worker.is_running()


def test_a_second_signal_leaves_no_trace_of_those_who_still_wait(serving, tiny):
    with serving(tiny, null=True, NULL_STEP_S="0.002") as server:
        server.ready()
        worker = server.worker()
        worker.suspend()
        with ThreadPoolExecutor(3) as pool:

            def ask(path, **options):
                with pytest.raises(httpx.HTTPError):
                    httpx.get(f"{server.url}{path}", timeout=120, **options).raise_for_status()

            waiting = [pool.submit(ask, path) for path in ("/v1/kv/stats", "/metrics")]
            time.sleep(0.5)
            for _ in range(2):
                server.process.send_signal(signal.SIGTERM)
                while "shutting down" not in server.output:
                    time.sleep(0.01)
            code, output = server.finish()
            for asked in waiting:
                asked.result()
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in output, output
    assert "CancelledError" not in output, output


def test_without_its_engine_the_server_says_so_until_it_is_stopped(serving, tiny):
    with serving(tiny, null=True, NULL_STEP_S="0.002") as server:
        client = server.ready().client()
        assert httpx.get(f"{server.url}/health").status_code == 200
        stream = chat(client, stream=True, max_tokens=30_000)
        next(stream)
        server.worker().kill()
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        assert httpx.get(f"{server.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="SIGKILL"):
            chat(client)
        server.process.send_signal(signal.SIGTERM)
        code, output = server.finish()
    assert (code, "Traceback" in output) == (1, False), output
    assert "EngineDeadError" in output
