"""`kvist plan`: published sizes exactly, what fits by hand, splits over GPUs, clear refusals.

Guards against the planner and the engine counting differently, and against the sizing mistakes
that people make: query heads for KV heads, GB for GiB, latents divided over GPUs.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.errors import ConfigError, ModelError
from kvist.formats.registry import FORMATS, planned_format, resolve_format
from kvist.lab.advice import advise
from kvist.lab.known_models import KNOWN_MODELS, find_known
from kvist.lab.models import find_model
from kvist.lab.plan import Demand, TierSpeed, make_plan
from kvist.spec import KVSpec

KIB, GIB = 1024, 1024**3
CONTEXT = 131_072


def plan(name: str, context: int, **options):
    return make_plan(find_model(name), Demand(context=context, **options))


@pytest.mark.parametrize(
    ("name", "context", "concurrency", "dtype", "kv_bytes"),
    [
        ("llama-2-7b", 4096, 16, "fp16", 32 * GIB),
        ("llama-3.1-8b", CONTEXT, 1, "auto", 16 * GIB),
        ("llama-3.1-8b", CONTEXT, 1, "fp8", 8 * GIB),
        ("llama-3.1-8b", 32_768, 32, "auto", 128 * GIB),
        ("llama-3.1-70b", CONTEXT, 1, "auto", 40 * GIB),
        ("llama-3.1-70b", 1_048_576, 1, "auto", 320 * GIB),
        ("deepseek-v3", CONTEXT, 1, "auto", 70_272 * CONTEXT),
        ("smollm2-135m", 8192, 1, "auto", 23_040 * 8192),
    ],
)
def test_sizes_are_the_published_ones(name, context, concurrency, dtype, kv_bytes):
    found = plan(name, context, concurrency=concurrency, kv_cache_dtype=dtype)
    assert found.kv_bytes == kv_bytes
    assert found.to_dict()["kv_bytes"] == kv_bytes


def test_bytes_a_token_in_every_format():
    by_name = {
        name: plan("llama-3.1-8b", 4096, kv_cache_dtype=name).kv_bytes_per_token
        for name in ("bf16", "fp8", "int8", "k8v4", "int4")
    }
    vectors = 32 * 8  # layers and KV heads, each with one K and one V of 128
    assert by_name == {
        "bf16": vectors * 512,
        "fp8": vectors * 256,
        "int8": vectors * 2 * (128 + 2),
        "k8v4": vectors * ((128 + 2) + (64 + 2 * 4)),
        "int4": vectors * 2 * (64 + 4 * 4),
    }


def test_a_70b_with_a_full_context_does_not_fit_two_80_gb_cards():
    found = plan("llama-3.1-70b", CONTEXT, memory_bytes=80 * GIB, num_gpus=2)
    assert found.fits is False
    assert found.max_concurrency == 0
    assert 0 < found.max_context < CONTEXT
    four = plan("llama-3.1-70b", CONTEXT, memory_bytes=80 * GIB, num_gpus=4)
    assert four.fits is True
    assert "--tensor-parallel-size 4" in " ".join(a.text for a in advise(found))


def test_gemma_3_at_128k_is_far_below_full_attention():
    spec = find_model("gemma-3-27b").spec
    everything = spec.token_bytes() * CONTEXT
    assert plan("gemma-3-27b", CONTEXT).kv_bytes < 0.17 * everything


def test_what_fits_is_what_the_budget_leaves():
    memory = 24 * GIB
    found = plan("llama-3.1-8b", 8192, concurrency=4, memory_bytes=memory)
    room = int(memory * 0.9) - found.model.weights_bytes - found.workspace_bytes
    assert found.max_concurrency == room // (128 * KIB * 8192)
    longest = found.max_context
    assert 4 * 128 * KIB * longest <= room < 4 * 128 * KIB * (longest + 16)


def test_kv_heads_divide_over_gpus_and_latents_do_not():
    for num_gpus, share in ((2, 2), (8, 8), (16, 8)):  # 8 KV heads: none is cut in two
        one = plan("llama-3.1-8b", 4096)
        split = plan("llama-3.1-8b", 4096, num_gpus=num_gpus)
        assert split.kv_bytes_per_gpu * share == one.kv_bytes_per_gpu
        assert split.replicated is (num_gpus > 8)
    whole = plan("deepseek-v3", 4096)
    split = plan("deepseek-v3", 4096, num_gpus=8)
    assert split.kv_bytes_per_gpu == whole.kv_bytes_per_gpu
    assert split.replicated


def test_loading_wins_where_the_tier_is_faster_than_prefill():
    tiers = (TierSpeed("fast", 2 * 131_072 * 1000.0), TierSpeed("slow", 0.5 * 131_072 * 1000.0))
    found = plan("llama-3.1-8b", 4096, prefill_tokens_per_s=1000.0, tiers=tiers)
    assert [(tier.name, load) for tier, _, load in found.break_even] == [
        ("fast", True),
        ("slow", False),
    ]


def test_the_bandwidth_bound_reads_weights_once_and_every_context():
    found = plan("llama-3.1-8b", 4096, concurrency=8, bandwidth_bytes_per_s=1e12)
    read = found.model.weights_bytes + 8 * 4096 * 128 * KIB
    assert found.decode_tokens_per_s == pytest.approx(8 * 1e12 / read)
    sparse = plan("mixtral-8x7b", 4096)
    assert sparse.model.active_bytes < sparse.model.weights_bytes / 3


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_every_known_model_has_a_plan(name):
    found = plan(name, 2048)
    assert found.kv_bytes_per_token > 0
    assert found.to_dict()["max_concurrency"] is None
    assert find_known(f"{name}-Instruct") is KNOWN_MODELS[name]


def test_a_folder_counts_its_own_weights(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "intermediate_size": 256,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    estimated = find_model(str(tmp_path))
    count = 2 * 128 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256)
    assert estimated.weights_bytes == 2 * count
    (tmp_path / "model.safetensors").write_bytes(bytes(12_345))
    assert find_model(str(tmp_path)).weights_bytes == 12_345 // 2 * 2
    assert find_model(str(tmp_path), parameters=1e6).weights_bytes == 2_000_000
    assert find_model(str(tmp_path), "int8", 1e6).weights_bytes == 1_000_000


def test_planned_formats_do_not_run():
    for name in ("fp8", "int8", "k8v4", "int4", "fp8_e4m3"):
        with pytest.raises(ConfigError, match="cannot run"):
            resolve_format(name, "bfloat16")
        assert planned_format(name, "bfloat16").name not in FORMATS
    with pytest.raises(ConfigError, match="int3"):
        planned_format("int3", "bfloat16")


@pytest.mark.parametrize(
    "options",
    [
        {"context": 0},
        {"concurrency": -1},
        {"num_gpus": 0},
        {"block_size": 0},
        {"utilization": 1.5},
        {"memory_bytes": 0},
        {"bandwidth_bytes_per_s": 0.0},
        {"prefill_tokens_per_s": -1.0},
    ],
)
def test_demands_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        Demand(**{"context": 4096, **options})


def test_a_misspelled_model_is_answered_with_what_is_near():
    with pytest.raises(ModelError, match=r"llama-3\.1-8b"):
        find_model("lama-3.1-8b")


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_says_fine_found_or_misused_by_its_exit_code():
    assert run("llama-3.1-8b", "--context", "4096", "--memory", "80GiB").exit_code == 0
    assert run("llama-3.1-70b", "--memory", "80GiB", "--gpus", "2").exit_code == 1
    for arguments in (
        [],
        ["no-such-model"],
        ["llama-3.1-8b", "--memory", "much"],
        ["llama-3.1-8b", "--kv-cache-dtype", "int3"],
        ["llama-3.1-8b", "--weights-dtype", "int3"],
        ["llama-3.1-8b", "--parameters", "many"],
        ["llama-3.1-8b", "--tier", "nvme"],
        ["llama-3.1-8b", "--concurrency", "0"],
    ):
        assert run(*arguments).exit_code == 2, arguments


def test_json_is_of_the_named_schema_for_one_model_and_for_several():
    one = json.loads(run("llama-3.1-8b", "--context", "131072", "--json").stdout)
    assert one["schema"] == "kvist.plan.v1"
    assert one["kv_bytes"] == 16 * GIB
    several = json.loads(run("llama-3.1-8b", "qwen3-8b", "--context", "4096", "--json").stdout)
    assert [each["model"] for each in several["plans"]] == ["llama-3.1-8b", "qwen3-8b"]


def test_the_screen_answers_how_big_what_fits_and_what_helps():
    shown = run("llama-2-7b", "--concurrency", "16", "--memory", "24GiB").stdout
    for text in ("32 GiB", "NOT fit", "quantize", "fewer KV heads", "fp8"):
        assert text in shown, text


def test_a_known_model_is_found_as_a_spec_too():
    assert KVSpec.from_config(KNOWN_MODELS["phi-4"].config).token_bytes() == 40 * 10 * 2 * 128 * 2
