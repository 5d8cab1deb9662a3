"""What cannot be served is refused at start-up, with the numbers and what to do."""

from __future__ import annotations

import json
import re
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist import LLM
from kvist.config import EngineConfig
from kvist.engine import assemble
from kvist.errors import ConfigError, KvistError, ModelError, RequestError
from kvist.sizes import parse_size
from kvist.spec import BlockLayout, KVSpec
from kvist.testing.parity import WatchedEngine, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # slots, K and V, layers, KV heads, head dim, fp32


@pytest.fixture
def folder(tiny_folder):
    return tiny_folder("llama")


def open_llm(folder, **options) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", **options})


def test_a_context_that_the_pool_can_never_hold(folder):
    """1,024 tokens need 64 blocks of 16, the pool has 10: the message says both, and what to do."""
    assert KVSpec.from_path(folder).token_bytes(4) * 16 == BLOCK_BYTES
    with pytest.raises(ConfigError) as caught:
        open_llm(folder, max_model_len=1_024, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    message = str(caught.value)
    assert "max_model_len=1024 needs 64 blocks" in message
    assert "the pool has 10" in message
    assert "block_size=16" in message
    raised = re.search(r"raise --kv-cache-memory-bytes to (\d+KiB) or", message)
    lowered = re.search(r"--max-model-len to (\d+)", message)
    # What the message says to do, works, and nothing less does.
    open_llm(folder, max_model_len=1_024, kv_cache_memory_bytes=raised[1])
    with pytest.raises(ConfigError):
        open_llm(folder, max_model_len=1_024, kv_cache_memory_bytes=parse_size(raised[1]) - 1)
    ok = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 5}
    open_llm(folder, max_model_len=int(lowered[1]), **ok)
    with pytest.raises(ConfigError):
        open_llm(folder, max_model_len=int(lowered[1]) + 1, **ok)


@pytest.mark.parametrize(
    ("free", "says", "not_said"),
    [
        (300 << 20, "raise --kv-cache-memory-bytes to 257MiB$", "--max-model-len to"),
        # To raise it to more than there is would only be refused in its turn.
        (200 << 20, "free memory there, or choose a smaller model", "raise --kv-cache"),
    ],
)
def test_a_pool_without_a_single_block_is_not_to_be_lowered_to(monkeypatch, free, says, not_said):
    layout = BlockLayout(
        num_layers=1, num_kv_heads=1, key_dim=8192, value_dim=8192, block_size=16, itemsize=4
    )
    monkeypatch.setattr(assemble, "available_bytes", lambda device: free)
    with pytest.raises(ConfigError, match=says) as caught:
        assemble._num_blocks(
            EngineConfig(model="none", kv_cache_memory_bytes=100_000),
            layout,
            4_097,  # 257 blocks of 1 MiB
            torch.device("cpu"),
            0,
        )
    assert not_said not in str(caught.value)


def test_a_pool_that_just_holds_the_longest_request_serves_it(folder):
    watched = WatchedEngine(folder, num_blocks=4, max_model_len=64)
    (tokens,) = watched.generate([list(range(40))], 24)
    assert len(tokens) == 24
    assert watched.counts["preemptions"] == 0


def test_a_request_longer_than_the_context_is_refused_alone(folder):
    llm = open_llm(folder, max_model_len=64, kv_cache_memory_bytes=4 * BLOCK_BYTES)
    with pytest.raises(RequestError, match=r"the prompt has 64 tokens.*at most 63"):
        llm.generate([[1] * 3, [1] * 64], greedy(4), use_tqdm=False)
    assert not llm.engine.has_work
    (output,) = llm.generate([[1] * 63], greedy(4), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 5_000}, ["--max-model-len=5000", "4096 positions", "4096 or less"]),
        ({"max_model_len": 1}, ["--max-model-len=1", "at least 2"]),
        ({"kv_cache_memory_bytes": "900TiB"}, ["--kv-cache-memory-bytes", "900 TiB", "lower it"]),
        ({"kv_cache_memory_bytes": "many"}, ["'many' is not a size"]),
        ({"kv_cache_memory_bytes": 0}, ["--kv-cache-memory-bytes=0", "above 0"]),
        ({"kv_cache_dtype": "float16"}, ["--kv-cache-dtype=float16", "float32", "auto"]),
        ({"kv_cache_dtype": "int3"}, ["int3", "auto"]),
        ({"dtype": "float31"}, ["float31", "bfloat16"]),
        ({"device": "tpu"}, ["--device='tpu'", "cpu or cuda"]),
        ({"device": "meta"}, ["--device=meta", "cpu and cuda"]),
        ({"kernels": "cuda"}, ["--kernels='cuda'", "reference"]),
        ({"weights": "int2"}, ["--weights='int2'", "int8 or int4"]),
        ({"scheduling_policy": "fair"}, ["--scheduling-policy='fair'", "fcfs or priority"]),
        ({"kv_allocation": "lazy"}, ["'lazy'", "paged or reserve"]),
        ({"eviction_policy": "random"}, ["random", "lru"]),
        ({"block_size": 0}, ["--block-size=0", "from 1 to 256"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs=0"]),
        ({"max_num_batched_tokens": 8}, ["--max-num-batched-tokens=8", "max_num_seqs=64"]),
        ({"gpu_memory_utilization": 1.5}, ["--gpu-memory-utilization=1.5", "at most 1"]),
        ({"tensor_parallel": 2}, ["tensor_parallel", "block_size"]),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_used(folder, options, words):
    with pytest.raises(ConfigError) as caught:
        open_llm(folder, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(folder):
    with pytest.raises(ConfigError, match="sees no GPU here; use cpu"):
        open_llm(folder, device="cuda")


def altered(folder, tmp_path, **fields):
    copy = tmp_path / "altered"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config.update(fields)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_chunks_are_refused(tiny_folder, tmp_path):
    chunks = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 64}
    copy = altered(tiny_folder("mistral"), tmp_path, **chunks)
    with pytest.raises(ModelError, match=r"chunks of 64 tokens.*--max-model-len 64"):
        open_llm(copy, max_model_len=65)


def test_weights_that_do_not_fill_the_model(folder, tmp_path):
    copy = altered(folder, tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"no weights for \d+ parameters"):
        open_llm(copy)


def test_no_such_model():
    with pytest.raises(KvistError):
        LLM("no-such-model-anywhere")


def test_the_default_pool_is_bounded_by_what_can_be_used(folder):
    """A tiny model: max_num_seqs x max_model_len is far less than half of the memory."""
    llm = open_llm(folder, max_model_len=100, max_num_seqs=3, max_num_batched_tokens=64)
    assert llm.bill.num_blocks == 3 * 7
    assert llm.bill.max_concurrency == 3.0
    assert llm.pool.num_blocks == llm.engine.scheduler.cache.stats().num_blocks == 21


def test_context_length_comes_from_the_model(folder):
    assert open_llm(folder, kv_cache_memory_bytes="64MiB").max_model_len == 4_096


def test_what_changes_the_bytes_changes_the_root(tiny_folder, tmp_path):
    """Each engine sees the same prompt; their first blocks must bear different keys."""

    def first_key(folder, **options):
        llm = open_llm(folder, max_model_len=64, **options)
        seen = []
        llm.engine.events.subscribe(seen.append)
        llm.generate([list(range(40))], greedy(1), use_tqdm=False)
        return next(e.key for e in seen if type(e).__name__ == "BlockStored")

    base = tiny_folder("llama")
    keys = [
        first_key(base),
        first_key(base, dtype="bfloat16"),
        first_key(base, block_size=32),
        first_key(altered(base, tmp_path, rope_theta=5.0, rope_parameters=None)),
        first_key(tiny_folder("qwen2")),
    ]
    assert len(set(keys)) == len(keys)
    assert first_key(base, max_num_seqs=7, max_num_batched_tokens=11, kernels="torch") == keys[0]
