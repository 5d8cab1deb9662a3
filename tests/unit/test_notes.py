"""Presets and what is said of them: a default that gives way, and never silently."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.config import PRESETS, EngineConfig
from kvist.engine.notes import preset_remarks, utilization_remark
from kvist.errors import ConfigError


def resolve(environ: dict[str, str] | None = None, **options: Any) -> EngineConfig:
    return EngineConfig.resolve(options, environ=environ or {})


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_sets_batch_and_chunk_and_says_so(preset: str):
    config = resolve(preset=preset)
    plain = EngineConfig()
    assert config.max_num_seqs == PRESETS[preset]["max_num_seqs"] != plain.max_num_seqs
    assert config.max_num_batched_tokens != plain.max_num_batched_tokens
    said = preset_remarks(config)
    assert said == (
        f"--preset {preset}: --max-num-seqs={config.max_num_seqs}",
        f"--preset {preset}: --max-num-batched-tokens={config.max_num_batched_tokens}",
    )


def test_what_was_asked_for_wins_wherever_it_was_said(tmp_path: Any):
    file = tmp_path / "kvist.toml"
    file.write_text("max-num-batched-tokens = 300")
    config = EngineConfig.resolve(
        {"preset": "latency"}, config_file=file, environ={"KVIST_MAX_NUM_SEQS": "5"}
    )
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (5, 300)
    assert preset_remarks(config) == (
        "--preset latency: --max-num-seqs=5, as asked for, not 16",
        "--preset latency: --max-num-batched-tokens=300, as asked for, not 512",
    )


def test_a_preset_may_come_from_the_environment_too():
    assert resolve({"KVIST_PRESET": "throughput"}).max_num_seqs == 256


def test_without_a_preset_nothing_is_said():
    assert preset_remarks(resolve()) == ()


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="--preset='fast' must be latency or throughput"):
        resolve(preset="fast")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", -3),
        ("request_timeout", 0.0),
    ],
)
def test_bounds_that_bound_nothing_are_refused(name: str, value: float):
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("utilization", [0.85, 0.9, 0.92])
def test_a_usual_utilization_needs_no_words(utilization: float):
    assert utilization_remark(utilization) is None


@pytest.mark.parametrize(
    ("utilization", "why"), [(0.5, "50% of the GPU unused"), (0.97, "out of memory")]
)
def test_an_unusual_utilization_is_explained(utilization: float, why: str):
    remark = utilization_remark(utilization)
    assert remark is not None
    assert why in remark
    assert f"--gpu-memory-utilization={utilization:g}" in remark
    assert "0.85–0.92" in remark
