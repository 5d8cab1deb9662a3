"""What Prometheus and people read: names, numbers, and what scraping costs.

The numbers themselves are held against the truth in `tests/unit/test_telemetry.py`; here: that they
arrive under the right names, that many scrapes are one question, and that no client makes a label.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

for needed in ("fastapi", "msgspec", "zmq", "httpx", "prometheus_client"):
    pytest.importorskip(needed)

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families as parse

from kvist.engine.messages import Stats
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import EngineDeadError, OverloadedError
from kvist.server import metrics as module
from kvist.server.metrics import LiveStats, add_metric_routes

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def app_of(client):
    app = FastAPI()
    add_metric_routes(app, client, "tiny")

    async def get(path, **headers):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvist") as http:
            return await http.get(path, headers=headers)

    return get


def samples(text):
    return {
        (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "model_name")): s.value
        for family in parse(text)
        for s in family.samples
    }


def request(name, length=20, **options):
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    options = {"prompt_token_ids": tuple(range(1, length + 1)), "params": params, **options}
    return EngineRequest(request_id=name, **options)


async def finish(stream):
    with stream:
        return [update async for update in stream]


async def after_a_script(client):
    """Two equal prompts of 40, one after the other, and one that has no time."""
    for name in ("a", "b"):
        await finish(client.submit(request(name, 40)))
    return await finish(client.submit(request("c", 8, timeout_s=1e-9)))


def test_metrics_are_the_numbers_of_a_script(null_client):
    async def main():
        async with null_client() as client:
            last = await after_a_script(client)
            get = app_of(client)
            return last, await get("/metrics"), await get("/v1/kv/stats")

    last, answer, stats = asyncio.run(main())
    assert last[-1].finish_reason == "abort"
    assert last[-1].error.startswith("deadline")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    expected = {
        ("kvist:prefix_cache_queries_total",): 80,
        ("kvist:prefix_cache_hits_total",): 32,
        ("kvist:prompt_tokens_total",): 80,
        ("kvist:prompt_tokens_cached_total",): 32,
        ("kvist:prompt_tokens_by_source_total", ("source", "computed")): 48,
        ("kvist:prompt_tokens_by_source_total", ("source", "cached")): 32,
        ("kvist:prompt_tokens_by_source_total", ("source", "recomputed")): 0,
        ("kvist:generation_tokens_total",): 10,
        ("kvist:request_success_total", ("finished_reason", "length")): 2,
        ("kvist:request_success_total", ("finished_reason", "abort")): 1,
        # There before anything of their kind happened.
        ("kvist:request_success_total", ("finished_reason", "error")): 0,
        ("kvist:admission_rejections_total", ("reason", "deadline")): 0,
        ("kvist:admission_rejections_total", ("reason", "open_reqs")): 0,
        ("kvist:request_deadlines_exceeded_total",): 1,
        ("kvist:num_requests_running",): 0,
        ("kvist:num_requests_loading",): 0,
        ("kvist:num_requests_waiting",): 0,
        ("kvist:kv_cache_usage_perc",): 0,
        ("kvist:kv_blocks", ("state", "cached")): 2,
        ("kvist:kv_blocks", ("state", "used")): 0,
        ("kvist:time_to_first_token_seconds_count",): 2,
        ("kvist:inter_token_latency_seconds_count",): 8,
        ("kvist:e2e_request_latency_seconds_count",): 2,
        ("kvist:iteration_tokens_total_count",): 10,
        ("kvist:iteration_tokens_total_bucket", ("le", "8.0")): 9,
        ("kvist:iteration_tokens_total_bucket", ("le", "+Inf")): 10,
        ("kvist:memory_bytes", ("item", "kv_pool")): 50,
        ("kvist:memory_reserved_bytes", ("item", "kv_pool")): 500,
    }
    assert {key: found[key] for key in expected} == expected
    told = stats.json()
    assert told["prefix_cache"] == {"queried_tokens": 80, "hit_tokens": 32, "hit_rate": 0.4}
    assert told["tokens"] == {"computed": 48, "cached": 32, "recomputed": 0, "generated": 10}
    assert told["pool"]["cached_blocks"] == 2
    assert told["finished"] == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert told["deadlines_exceeded"] == 1
    assert told["memory"]["items"]["weights"] == {"reserved_bytes": 1000, "resident_bytes": 1000}


def test_every_metric_stands_in_the_docs_and_the_reverse(null_client):
    async def main():
        async with null_client() as client:
            get = app_of(client)
            # What Prometheus itself sends.
            return await get("/metrics", Accept="application/openmetrics-text;version=1.0.0,*/*")

    answer = asyncio.run(main())
    families = list(parse(answer.text))
    assert all(family.documentation for family in families)
    # Whether the suffix belongs to a family's name, parsers do not agree.
    shown = {family.name.removesuffix("_total") for family in families}
    documented = re.findall(r"^\| `(kvist:\w+)[`{]", DOCS.read_text(), re.MULTILINE)
    assert sorted(name.removesuffix("_total") for name in documented) == sorted(shown)


def test_the_engines_reasons_are_the_only_labels_besides_the_models_name(null_client):
    """A client that calls itself and its salt what it likes adds no time series."""

    async def main():
        async with null_client() as client:
            get = app_of(client)
            before = await get("/metrics")
            for n in range(5):
                await finish(client.submit(request(f"evil {n}", salt=f"salt{n}")))
            await asyncio.sleep(module.FRESH_S)
            return samples(before.text), samples((await get("/metrics")).text)

    before, after = asyncio.run(main())
    assert after[("kvist:generation_tokens_total",)] == 25
    assert after.keys() == before.keys()


# --------------------------------------------------------------------------------- live, not busy


class Source:
    """Answers when it is let."""

    def __init__(self, stats):
        self.asked = 0
        self.turned_away = {}
        self.open = asyncio.Event()
        self.open.set()
        self.error = None
        self._stats = stats

    async def stats(self):
        self.asked += 1
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return self._stats


def test_many_scrapes_are_one_question():
    async def main():
        source = Source(SimpleNamespace())
        live = LiveStats(source)
        await asyncio.gather(*(live.get() for _ in range(50)))
        await live.get()
        return source.asked

    assert asyncio.run(main()) == 1


def test_while_a_step_is_long_the_last_answer_serves(monkeypatch):
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)

    async def main():
        source = Source(SimpleNamespace())
        live = LiveStats(source)
        first, _ = await live.get()
        source.open.clear()
        again, age_s = await live.get()
        await live.get()
        assert again is first
        assert age_s > 0
        assert source.asked == 2, "it is being asked already"
        source.open.set()
        await live.get()

    asyncio.run(main())


def test_a_dead_engine_is_an_error_for_everyone_who_asks():
    async def main():
        source = Source(SimpleNamespace())
        source.error = EngineDeadError("gone")
        live = LiveStats(source)
        found = await asyncio.gather(*(live.get() for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in found] == [EngineDeadError] * 3

    asyncio.run(main())


def test_stats_survive_the_wire(null_client):
    async def main():
        async with null_client() as client:
            await after_a_script(client)
            return await client.stats()

    stats = asyncio.run(main())
    assert isinstance(stats, Stats)
    assert stats.counts.finished == {"length": 2, "abort": 1}
    assert sum(stats.counts.histograms["request_prompt_tokens"].counts) == 2


# ---------------------------------------------------------------------------------------- overload


def test_a_full_queue_is_503_with_retry_after(wire):
    client = wire.ScriptedClient(OverloadedError("7 requests wait", 33))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer, _ = wire.talk(client, body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "33"
    error = wire.error_of(answer)
    assert error["code"] == "overloaded"
    assert error["message"] == "7 requests wait; ask again later"


def test_a_timeout_reaches_the_engine_and_a_wrong_one_is_named(wire):
    client = wire.ScriptedClient(wire.news("x", "stop"))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer, _ = wire.talk(client, {**body, "timeout": 2.5})
    assert answer.status_code == 200
    assert client.requests[0].timeout_s == 2.5
    answer, _ = wire.talk(client, {**body, "timeout": -1})
    assert answer.status_code == 400
    assert wire.error_of(answer)["param"] == "timeout"


def test_a_deadline_in_the_middle_is_504_and_says_so(wire):
    from kvist.engine.step import Update

    late = Update("", (), "abort", error="deadline: 2 s are over", is_last=True, fault="deadline")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer, _ = wire.talk(wire.ScriptedClient(wire.news("x"), late), body)
    assert answer.status_code == 504
    assert "deadline: 2 s are over" in wire.error_of(answer)["message"]


def test_the_engines_process_turns_away_what_the_queue_has_no_place_for(null_client, monkeypatch):
    monkeypatch.setenv("NULL_STEP_S", "0.02")
    monkeypatch.setenv("NULL_QUEUE", "3")

    async def main():
        async with null_client() as client:
            streams = [client.submit(request(str(n), n + 3)) for n in range(80)]
            found = await asyncio.gather(*map(finish, streams), return_exceptions=True)
            return found, await client.stats()

    found, stats = asyncio.run(main())
    refused = [error for error in found if isinstance(error, OverloadedError)]
    served = [updates for updates in found if isinstance(updates, list)]
    assert len(refused) + len(served) == 80
    assert refused
    assert all(1 <= error.retry_after_s <= 120 for error in refused)
    assert all(updates[-1].finish_reason == "length" for updates in served)
    assert stats.counts.rejected == {"queued_reqs": len(refused)}


# ---------------------------------------------------------------------------------- all of it


@pytest.mark.timeout(900)
def test_a_served_model_shows_its_bill_and_its_numbers(serving, tiny):
    import psutil

    with serving(tiny, "--preset", "latency", "--kv-cache-memory-bytes", "64MiB") as server:
        server.ready()
        assert "--preset latency: --max-num-seqs=16" in server.output
        answer = server.client().completions.create(model="tiny", prompt="a b c", max_tokens=4)
        url = server.url
        found = samples(httpx.get(f"{url}/metrics").text)
        told = httpx.get(f"{url}/v1/kv/stats").json()
        engine, own = (
            psutil.Process(pid).memory_info().rss
            for pid in (server.worker().pid, server.process.pid)
        )
    assert found[("kvist:generation_tokens_total",)] == answer.usage.completion_tokens
    assert found[("kvist:prompt_tokens_total",)] == answer.usage.prompt_tokens
    assert told["config"]["block_size"] == "16"
    items = {item: use["resident_bytes"] for item, use in told["memory"]["items"].items()}
    assert found[("kvist:memory_bytes", ("item", "weights"))] == items["weights"] > 0
    explained = sum(items.values()) - items["unaccounted"] + told["memory"]["server_bytes"]
    assert abs(explained - (engine + own)) <= 0.05 * (engine + own) + (150 << 20)
