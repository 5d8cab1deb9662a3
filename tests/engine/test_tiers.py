"""Tiers under a real, tiny model: the output is the same, whatever they do.

`kvist.testing.machine` tries orders of events over a null model; here the bytes are real K and V,
and go through real tiers, into another process' engine, and back.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from kvist.engine import assemble
from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.events import BlocksPromoted, LoadFailed, PrefixLoaded, TierSuspended
from kvist.testing.faulty_tier import FaultyTier, RandomFaults
from kvist.testing.throttled_tier import ThrottledTier

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [(i * 7 + i // 13) % 250 for i in range(330)]
HIT = 320  # whole blocks that leave a token to compute


@contextmanager
def opened(folder, tiers=(), **options):
    options = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "1MiB", **options}
    # Whether a load pays on this machine is not the question here.
    options.setdefault("tier_load_policy", "always")
    with LLM(str(folder), tiers=tiers, poison_fresh_blocks=True, **options) as llm:
        yield llm
        llm.engine.scheduler.check()


def answer(llm, prompt=PROMPT):
    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def forget(llm):
    """Let the device forget everything, once the tiers have it."""
    assert llm.engine.scheduler.loads.tiers.drain(30)
    llm.engine.scheduler.cache.reset_prefix_cache()


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def expected(folder, one_thread):
    with opened(folder) as llm:
        return answer(llm)[0]


@pytest.fixture
def disk(tmp_path):
    return f"disk:16MiB:{tmp_path}/kv"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kinds", [("host",), ("disk",), ("host", "disk")])
def test_what_the_device_forgot_comes_back(folder, expected, tmp_path, kinds, codec):
    texts = {"host": f"host:16MiB:{codec}", "disk": f"disk:16MiB:{tmp_path}/kv:{codec}"}
    tiers = tuple(texts[kind] for kind in kinds)
    with opened(folder, tiers) as llm:
        assert answer(llm) == (expected, 0)
        forget(llm)
        assert answer(llm) == (expected, HIT)
        assert llm.engine.events.counts[PrefixLoaded] == 1


def test_a_new_engine_finds_what_an_old_one_computed(folder, expected, disk):
    with opened(folder, (disk,)) as llm:
        answer(llm)
    with opened(folder, (disk,)) as llm:
        assert answer(llm) == (expected, HIT)


def test_blocks_of_the_disk_are_copied_into_host_memory(folder, expected, disk):
    with opened(folder, (disk,)) as llm:
        answer(llm)
    with opened(folder, ("host:16MiB", disk)) as llm:
        answer(llm)
        forget(llm)
        assert answer(llm) == (expected, HIT)
        loaded = [e for e in llm.engine.events.recent() if isinstance(e, PrefixLoaded)]
        assert [e.sources for e in loaded] == [(("disk", HIT),), (("host", HIT),)]


OTHERS = {
    "weights": {},
    "weights format": {"weights": "int8"},
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 32},
    "arithmetic": {"batch_invariant": True},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_changes_the_bytes_never_hits(folder, disk, what, tmp_path):
    from kvist.testing.models import tiny_model

    with opened(folder, (disk,)) as llm:
        answer(llm)
    other = tiny_model("llama", tmp_path / "other", seed=1) if what == "weights" else folder
    with opened(other, (disk,), **OTHERS[what]) as llm:
        assert answer(llm)[1] == 0
        assert llm.engine.events.counts[BlocksPromoted] == 0


def test_tenants_share_nothing(folder, expected, disk):
    from kvist.engine.sequence import EngineRequest

    def ask(llm, salt, name):
        llm.engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=tuple(PROMPT), params=PARAMS, salt=salt)
        )
        tokens, cached = [], 0
        while llm.engine.has_work:
            for update in llm.engine.step():
                tokens += update.token_ids
                cached = update.num_cached_tokens
        return tokens, cached

    with opened(folder, (disk,)) as llm:
        assert ask(llm, "mine", "a") == (expected, 0)
    with opened(folder, (disk,)) as llm:
        assert ask(llm, "yours", "b") == (expected, 0)
        assert ask(llm, "", "c") == (expected, 0)
        forget(llm)
        assert ask(llm, "mine", "d") == (expected, HIT)
        tenants = llm.engine.scheduler.loads.tiers.states()[0].usage.by_tenant
        assert len([t for t in tenants if t]) == 2
        assert not {"mine", "yours"} & set(tenants)


@pytest.mark.parametrize("seed", range(4))
def test_no_fault_changes_the_output(folder, tmp_path, seed, monkeypatch):
    """Prompts with common prefixes, a pool too small for them, and tiers that do all they may."""
    rng = random.Random(seed)
    bases = [[rng.randrange(250) for _ in range(200)] for _ in range(3)]
    prompts = []
    for _ in range(18):
        base = rng.choice(bases)
        prompts.append(base[: rng.choice((40, 100, 200))] + [rng.randrange(250) for _ in range(9)])
    with opened(folder, max_model_len=256, kv_cache_memory_bytes="256KiB") as llm:
        plain = [answer(llm, prompt)[0] for prompt in prompts]

    faults = RandomFaults(random.Random(seed), 0.1, 0.15, 0.1, 3)
    real = assemble.open_tiers
    wrapped = []

    def faulty(texts, key):
        wrapped.extend(FaultyTier(tier, faults) for tier in real(texts, key))
        return list(wrapped)

    monkeypatch.setattr(assemble, "open_tiers", faulty)
    tiers = ("host:1MiB", f"disk:16MiB:{tmp_path}/kv:zstd")
    with opened(
        folder,
        tiers,
        max_model_len=256,
        kv_cache_memory_bytes="256KiB",
        max_num_seqs=4,
    ) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain
        assert [answer(llm, prompt)[0] for prompt in prompts] == plain
        counts = llm.engine.events.counts
        assert sum(tier.num_faults for tier in wrapped) > 10
        assert counts[LoadFailed] > 0
        assert counts[PrefixLoaded] > 0


def test_a_tier_that_hangs_costs_its_patience_once(folder, expected, tmp_path, monkeypatch):
    """Lookups go on to say that all is there; loads never end before their deadline."""
    real = assemble.open_tiers

    def slow(texts, key):
        return [ThrottledTier(tier, 1.0, latency_s=3600) for tier in real(texts, key)]

    log = tmp_path / "events.jsonl"
    disk = f"disk:16MiB:{tmp_path}/kv"
    with opened(folder, (disk,)) as llm:
        answer(llm)
    monkeypatch.setattr(assemble, "open_tiers", slow)
    with opened(folder, (disk,), event_log=str(log)) as llm:
        assert answer(llm) == (expected, 0)
        forget(llm)
        assert answer(llm) == (expected, 0)
        assert llm.engine.events.counts[TierSuspended] == 1
    said = Counter(json.loads(line)["event"] for line in log.read_text().splitlines())
    assert said["TierSuspended"] == 1
    assert said["RequestFinished"] == 2


def test_warm_fills_a_tier_for_others(folder, expected, disk, tmp_path):
    from typer.testing import CliRunner

    from kvist.cli import app

    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}) + "\n\n" + json.dumps({"prompt": "hello"}))
    flags = ["--tier", disk, "--dtype", "float32", "--max-model-len", "512", "--json"]
    flags += ["--kv-cache-memory-bytes", "1MiB", "--model", str(folder)]
    result = CliRunner().invoke(app, ["warm", str(file), *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompts"] == 2
    with opened(folder, (disk,)) as llm:
        assert answer(llm) == (expected, HIT)
    refused = CliRunner().invoke(app, ["warm", str(file), "--model", str(folder)])
    assert refused.exit_code == 2
    assert "--tier" in refused.output
