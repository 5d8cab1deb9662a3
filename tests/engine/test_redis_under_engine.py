"""A Redis server under a real engine: whatever the server does, the output is as without it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
if not os.environ.get("KVIST_REQUIRE_REDIS"):
    pytest.importorskip("redis", reason="needs the redis extra")
    pytest.importorskip("xxhash", reason="tiers need the tiers extra")

from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.events import BlocksDemoted, BlocksPromoted
from kvist.testing.redis_server import RedisServer, need_server

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [(i * 7 + i // 13) % 250 for i in range(330)]
HIT = 320  # whole blocks that leave a token to compute


@pytest.fixture
def server(tmp_path):
    need_server()
    with RedisServer(tmp_path / "redis") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama")


def opened(folder, *tiers):
    return LLM(
        str(folder),
        tiers=tiers,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes="1MiB",
        poison_fresh_blocks=True,
        # Whether a load pays on this machine is not the question here.
        tier_load_policy="always",
    )


@pytest.fixture(scope="module")
def expected(folder, one_thread):
    with opened(folder) as llm:
        return answer(llm)[0]


def answer(llm):
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    llm.engine.scheduler.check()
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def forget(llm):
    llm.engine.scheduler.loads.tiers.drain(30)
    llm.engine.scheduler.cache.reset_prefix_cache()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_one_engine_computed_another_finds(folder, expected, server, codec):
    tier = f"{server.url},codec={codec}"
    with opened(folder, tier) as llm:
        assert answer(llm) == (expected, 0)
        forget(llm)
        assert answer(llm) == (expected, HIT)
    with opened(folder, tier) as llm:
        assert answer(llm) == (expected, HIT)


def test_a_server_that_dies_and_comes_back_empty(folder, expected, server):
    with opened(folder, server.url) as llm:
        answer(llm)
        forget(llm)
        server.kill()
        assert answer(llm) == (expected, 0)
        forget(llm)
        server.start()
        assert answer(llm)[0] == expected
        assert llm.engine.events.counts[BlocksPromoted] == 0


def test_a_server_that_hangs(folder, expected, server):
    with opened(folder, server.url) as llm:
        answer(llm)
        forget(llm)
        server.freeze()
        try:
            assert answer(llm)[0] == expected
        finally:
            server.thaw()


def test_a_server_full_of_garbage(folder, expected, server):
    """Every value is overwritten, headers and bodies alike."""
    with opened(folder, server.url) as llm:
        answer(llm)
        forget(llm)
        client = server.client()
        names = client.keys("*")
        assert names
        for number, name in enumerate(names):
            length = client.strlen(name)
            client.set(name, os.urandom(length) if number % 2 else b"\x00" * length)
        assert answer(llm)[0] == expected
        assert llm.engine.events.counts[BlocksPromoted] == 0


def test_a_server_that_is_full(folder, expected, server):
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"])
    with opened(folder, server.url) as llm:
        assert answer(llm) == (expected, 0)
        forget(llm)
        assert answer(llm)[0] == expected
        assert llm.engine.events.counts[BlocksDemoted] == 0
