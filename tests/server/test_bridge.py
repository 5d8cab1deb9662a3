"""The bridge and the engine's process, without a model: what is promised to who waits.

Guards: tokens lost or swapped between requests, blocks that stay held after an abort, a reader
or a parent that is gone and an engine that goes on for nobody, errors that lose their words.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import msgspec
import zmq

from kvist.config import EngineConfig
from kvist.engine import messages
from kvist.engine.messages import Add, AskStats, Codec, Launch, Ready, Stats, Updates
from kvist.engine.null_runner import null_generate
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    EngineStalledError,
    RequestError,
)
from kvist.server import bridge
from kvist.server.bridge import EngineClient
from kvist.server.sockets import SocketFolder
from kvist.server.stream import RequestStream

HERE = Path(__file__).parent
NULL_WORKER = (sys.executable, str(HERE / "null_worker.py"))
VOCAB_SIZE, POISON, MAX_MODEL_LEN = 1000, 666, 32_768
FOREVER = 30_000


def request(name, prompt, max_tokens):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens),
    )


async def collect(stream):
    with stream:
        updates = [update async for update in stream]
    return [token for update in updates for token in update.token_ids], updates[-1]


async def is_idle(client):
    stats = await client.stats()
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_requests_side_by_side_get_their_own_tokens(null_client):
    prompts = [[i, 2 * i + 1, 7] * (i + 1) for i in range(20)]

    async def main():
        async with null_client() as client:
            streams = [client.submit(request(f"r{i}", p, 30)) for i, p in enumerate(prompts)]
            return await asyncio.gather(*map(collect, streams))

    for prompt, (tokens, last) in zip(prompts, asyncio.run(main()), strict=True):
        assert tokens == null_generate(prompt, 30, VOCAB_SIZE)
        assert last.finish_reason == "length"


def test_the_second_of_two_equal_prompts_is_told_what_was_cached(null_client):
    async def main():
        async with null_client() as client:
            prompt = list(range(100))
            await collect(client.submit(request("a", prompt, 2)))
            return await collect(client.submit(request("b", prompt, 2)))

    _, last = asyncio.run(main())
    assert last.num_cached_tokens == 96


def test_who_does_not_read_finds_all_tokens_in_one_update(null_client, comes_true):
    async def main():
        async with null_client() as client:
            stream = client.submit(request("a", [1, 2, 3], 500))

            async def is_over():
                return stream.is_over

            await comes_true(is_over)
            return [update async for update in stream]

    (update,) = asyncio.run(main())
    assert list(update.token_ids) == null_generate([1, 2, 3], 500, VOCAB_SIZE)
    assert update.finish_reason == "length"


def test_leaving_a_stream_frees_its_blocks(null_client, comes_true):
    async def main():
        async with null_client() as client:
            with client.submit(request("a", range(200), FOREVER)) as stream:
                await anext(stream)
                assert (await client.stats()).num_used_blocks > 0
            await comes_true(lambda: is_idle(client))

    asyncio.run(main())


def test_an_aborted_stream_ends_at_once_for_who_waits_on_it():
    aborted = []

    async def main():
        stream = RequestStream("a", lambda *what: aborted.append(what))
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.abort()
        stream.abort()
        return await waiting

    assert asyncio.run(main()).finish_reason == "abort"
    assert aborted == [("a", None)]


def test_a_refused_request_says_why_and_others_go_on(null_client):
    async def main():
        async with null_client() as client:
            good = client.submit(request("good", [1], 20))
            bad = client.submit(request("bad", [VOCAB_SIZE], 20))
            with pytest.raises(RequestError, match=r"token id 1000 is outside .* of 1000") as info:
                await collect(bad)
            return info.value.param, await collect(good)

    param, (tokens, _) = asyncio.run(main())
    assert param == "prompt"
    assert tokens == null_generate([1], 20, VOCAB_SIZE)


def test_a_prompt_too_long_is_refused_on_this_side(null_client):
    async def main():
        async with null_client() as client:
            with pytest.raises(RequestError, match=f"{MAX_MODEL_LEN} tokens"):
                client.submit(request("a", [1] * MAX_MODEL_LEN, 1))
            assert await is_idle(client)
            assert await client.drain(10) == 0, "a refused request is not open"

    asyncio.run(main())


def test_a_request_that_breaks_its_step_fails_alone(null_client):
    async def main():
        async with null_client() as client:
            good = client.submit(request("good", [1], 20))
            bad = client.submit(request("bad", [1, POISON], 20))
            return await asyncio.gather(collect(good), collect(bad))

    (tokens, _), (_, last) = asyncio.run(main())
    assert last.finish_reason == "error"
    assert "poison" in last.error
    assert tokens == null_generate([1], 20, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("config", ConfigError, "--block-size=7 is not served; use 16"),
        ("capacity", CapacityError, "it needs 9 GiB, there are 3"),
        ("bug", EngineDeadError, "ZeroDivisionError: oops"),
        ("exit", EngineDeadError, "exit code 3"),
    ],
)
def test_a_failed_start_is_told_in_its_own_words(monkeypatch, failure, kind, words):
    monkeypatch.setenv("NULL_OPEN", failure)

    async def main():
        client = EngineClient(EngineConfig(), NULL_WORKER)
        try:
            await client.start()
            with pytest.raises(kind, match=words):
                await client.wait_ready()
        finally:
            await client.stop()
        assert words in client.death

    asyncio.run(main())


def test_an_engine_that_is_still_loading_can_be_stopped(monkeypatch):
    monkeypatch.setenv("NULL_OPEN", "hang")

    async def main():
        client = EngineClient(EngineConfig(), NULL_WORKER)
        await client.start()
        await client.stop()
        return client._process.returncode, client._folder.path.exists()

    assert asyncio.run(main()) == (-signal.SIGKILL, False)


def test_a_killed_engine_fails_who_waits_and_who_comes(null_client):
    async def main():
        async with null_client() as client:
            stream = client.submit(request("a", [1], FOREVER))
            await anext(stream)
            client._process.kill()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(stream)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                client.submit(request("b", [1], 1))
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.stats()
            assert "SIGKILL" in client.death

    asyncio.run(main())


def test_an_engine_that_hangs_is_said_to_and_heard_again_when_it_wakes(null_client, comes_true):
    async def main():
        async with null_client(engine_timeout_s=2.0) as client:
            stream = client.submit(request("a", [1], FOREVER))
            await anext(stream)
            client._process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineStalledError, match=r"no step for \d+ s.*--engine-timeout=2"):
                await collect(stream)
            assert client.stalled is not None
            with pytest.raises(EngineStalledError):
                client.submit(request("b", [1], 1))
            with pytest.raises(EngineStalledError):
                await client.stats()
            client._process.send_signal(signal.SIGCONT)

            async def is_heard():
                return client.stalled is None

            await comes_true(is_heard)
            # Nobody waits for the first any more.
            await comes_true(lambda: is_idle(client))
            return await collect(client.submit(request("c", [1], 5)))

    tokens, _ = asyncio.run(main())
    assert tokens == null_generate([1], 5, VOCAB_SIZE)


def test_a_machine_that_slept_makes_no_engine_hang(null_client):
    """Server and engine stopped together: the time in between is nobody's silence."""

    async def main():
        async with null_client(engine_timeout_s=2.0) as client:
            stream = client.submit(request("a", [1], 200))
            await anext(stream)
            client._process.send_signal(signal.SIGSTOP)
            time.sleep(4.0)
            client._process.send_signal(signal.SIGCONT)
            for _ in range(10):
                await asyncio.sleep(0.05)
                assert client.stalled is None
            return await collect(stream)

    tokens, _ = asyncio.run(main())
    assert tokens == null_generate([1], 200, VOCAB_SIZE)[1:]


def test_a_question_that_the_engine_does_not_answer_is_not_waited_for(null_client, monkeypatch):
    monkeypatch.setattr(bridge, "STATS_S", 0.2)

    async def main():
        async with null_client() as client:
            client._process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineStalledError, match=r"not answered for 0\.2 s"):
                await client.stats()
            client._process.send_signal(signal.SIGCONT)
            assert client.stalled is None, "that may have been a long step"

    asyncio.run(main())


def test_an_idle_engine_is_heard_too(null_client):
    async def main():
        async with null_client(engine_timeout_s=2.0) as client:
            for _ in range(25):
                await asyncio.sleep(0.1)
                assert client.stalled is None

    asyncio.run(main())


def test_drain_waits_for_open_requests_and_takes_no_more(null_client):
    async def main():
        async with null_client() as client:
            assert client.refusal is None
            open_one = asyncio.create_task(collect(client.submit(request("a", [1], 2000))))
            assert await client.drain(60) == 0
            assert "shutting down" in client.refusal
            return await open_one

    tokens, last = asyncio.run(main())
    assert len(tokens) == 2000
    assert last.finish_reason == "length"


def test_drain_aborts_what_outlasts_the_grace(null_client):
    async def main():
        async with null_client() as client:
            open_one = asyncio.create_task(collect(client.submit(request("a", [1], FOREVER))))
            await asyncio.sleep(0)
            assert await client.drain(0) == 1
            return await open_one

    _, last = asyncio.run(main())
    assert last.finish_reason == "abort"


def test_a_stopped_engine_exits_cleanly_and_leaves_no_files(null_client):
    async def main():
        async with null_client() as client:
            folder = client._folder.path
            assert folder.stat().st_mode & 0o077 == 0, "only this user may connect"
            client.submit(request("a", [1], FOREVER))
        return client._process.returncode, folder.exists()

    assert asyncio.run(main()) == (0, False)


def test_sigterm_lets_the_engine_finish_what_it_has(null_client, comes_true):
    async def main():
        async with null_client() as client:
            stream = client.submit(request("a", [1], 2000))
            await anext(stream)
            client._process.send_signal(signal.SIGTERM)
            client._process.send_signal(signal.SIGINT)
            tokens, last = await collect(stream)

            async def is_dead():
                return client.death is not None

            await comes_true(is_dead)
            return len(tokens), last.finish_reason, await client._process.wait()

    num_tokens, reason, code = asyncio.run(main())
    assert (num_tokens, reason, code) == (1999, "length", 0)


def test_the_engine_dies_with_its_parent():
    parent = f"""
        import asyncio, os, signal
        from kvist.config import EngineConfig
        from kvist.server.bridge import EngineClient

        async def main():
            client = EngineClient(EngineConfig(), {NULL_WORKER!r})
            await client.start()
            await client.wait_ready()
            print(client._folder.path, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    # The engine inherits stdout, and so the pipe ends, and with it `run`, when both are gone.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(parent)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    left, lives = Path(done.stdout.strip()), SocketFolder()
    assert not left.exists(), "the next server to start clears up"
    SocketFolder().remove()
    assert lives.path.exists(), "its server is still there"
    lives.remove()


def test_an_engine_that_nobody_reads_rests_and_loses_nothing(tmp_path):
    psutil = pytest.importorskip("psutil")
    num_tokens, codec = 12_000, Codec()
    with zmq.Context() as context, context.socket(zmq.PUSH) as commands:
        news = context.socket(zmq.PULL)
        news.set_hwm(1)
        endpoints = {}
        for name, socket in (("commands", commands), ("news", news)):
            endpoints[name] = f"ipc://{tmp_path}/{name}"
            socket.bind(endpoints[name])
        launch = Launch(
            protocol=messages.PROTOCOL, config=EngineConfig(), parent_pid=os.getpid(), **endpoints
        )
        process = subprocess.Popen(NULL_WORKER, stdin=subprocess.PIPE)
        process.stdin.write(msgspec.json.encode(launch))
        process.stdin.close()
        heard = [codec.decode_news(news.recv())]
        commands.send(codec.encode(Add(request("a", [1], num_tokens))))
        watched, busy_s = psutil.Process(process.pid), -1.0
        while (now_s := watched.cpu_times().user) != busy_s:
            busy_s = now_s
            # Longer than a tick of that clock: an engine at work shows in it.
            time.sleep(0.3)
        # Asked when it has come to rest: the answer is the next it says.
        commands.send(codec.encode(AskStats()))
        while not (isinstance(heard[-1], Updates) and heard[-1].updates[-1].finish_reason):
            heard.append(codec.decode_news(news.recv()))
        news.close()
        process.terminate()
        process.wait()
    tokens = [t for m in heard if isinstance(m, Updates) for u in m.updates for t in u.token_ids]
    assert isinstance(heard[0], Ready)
    assert tokens == null_generate([1], num_tokens, VOCAB_SIZE)
    assert any(isinstance(m, Stats) for m in heard), "it had finished before anyone read"
