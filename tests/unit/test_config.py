"""Options: sizes, the order of sources, and refusals that name the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvist.config import EngineConfig, KVAllocation
from kvist.errors import ConfigError
from kvist.sizes import format_size, option_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("0", 0),
        ("1048576", 1 << 20),
        ("12B", 12),
        ("8G", 8 << 30),
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("8gib", 8 << 30),
        ("512 MiB", 512 << 20),
        (" 512MiB ", 512 << 20),
        ("1.5K", 1536),
        (".5KiB", 512),
        ("2TB", 2 * 10**12),
        ("2T", 2 << 40),
        ("3MB", 3 * 10**6),
    ],
)
def test_sizes(text: str | int, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "8 GiB KV", "-1", "8PiB", "1e9", "eight"])
def test_what_is_no_size_is_refused_by_name(text: str):
    with pytest.raises(ConfigError, match=rf"^--pool='{text}'.*8GiB"):
        parse_size(text, "--pool")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (360 << 10, "360 KiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 40, "1 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (3 << 29, "1.5GiB"),
        ((3 << 30) + 1, "3.01GiB"),
        (257 << 20, "257MiB"),
        ((1 << 30) - 1, "1024MiB"),
        (1 << 40, "1TiB"),
    ],
)
def test_a_size_for_an_option_is_short_and_holds_what_was_asked_for(nbytes: int, text: str):
    assert option_size(nbytes) == text
    assert nbytes <= parse_size(text) <= nbytes * 1.01


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "kvist.toml"
        path.write_text(text)
        return path

    return write


def test_flags_win_over_environment_over_file_over_defaults(toml: Any):
    path = toml("max-num-seqs = 2\nblock_size = 8\nseed = 5\n")
    environ = {"KVIST_MAX_NUM_SEQS": "3", "KVIST_BLOCK_SIZE": "32", "OTHER": "x"}
    config = EngineConfig.resolve({"max_num_seqs": 4}, config_file=path, environ=environ)
    assert (config.max_num_seqs, config.block_size, config.seed) == (4, 32, 5)
    assert config.max_num_batched_tokens == EngineConfig().max_num_batched_tokens


def test_a_flag_that_was_not_given_hides_nothing():
    config = EngineConfig.resolve({"seed": None}, environ={"KVIST_SEED": "7"})
    assert config.seed == 7


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "4096", 4096),
        ("kv_cache_memory_bytes", "2GiB", 2 << 30),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enable_prefix_caching", "false", False),
        ("enable_prefix_caching", "On", True),
        ("kv_allocation", "reserve", KVAllocation.RESERVE),
        ("model", "some/model", "some/model"),
    ],
)
def test_text_becomes_the_type_of_the_option(name: str, text: str, value: object):
    config = EngineConfig.resolve({}, environ={"KVIST_" + name.upper(): text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_model_len", "many"),
        ("max_model_len", "1.5"),
        ("gpu_memory_utilization", "half"),
        ("enable_prefix_caching", "maybe"),
        ("kv_allocation", "swap"),
        ("kv_cache_memory_bytes", "lots"),
    ],
)
def test_text_that_is_not_of_the_type_is_refused_by_name(name: str, text: str):
    with pytest.raises(ConfigError, match=rf"^{name}='{text}'"):
        EngineConfig.resolve({}, environ={"KVIST_" + name.upper(): text})


@pytest.mark.parametrize(
    "line",
    ["max_num_seqs = [1]", "max_num_seqs = 1.9", "kv_cache_memory_bytes = 1.5", "model = {}"],
)
def test_a_file_with_a_value_of_the_wrong_kind_is_refused(toml: Any, line: str):
    with pytest.raises(ConfigError, match=f"^{line.split(maxsplit=1)[0]}="):
        EngineConfig.resolve({}, config_file=toml(line), environ={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1}, "--max-model-len=1 must be at least 2"),
        ({"max_num_seqs": 0}, "--max-num-seqs=0 "),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 63},
            "--max-num-batched-tokens=63 must be at least max_num_seqs=64",
        ),
        (
            {"max_num_seqs": 1 << 21, "max_num_batched_tokens": 1 << 21},
            "--max-num-batched-tokens=2097152 must be at most 1048576",
        ),
        ({"block_size": 0}, "--block-size=0 must be from 1 to 256"),
        ({"block_size": 257}, "--block-size=257 "),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes=0 "),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization=0.0 "),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization=1.1 "),
        ({"scheduling_policy": "sjf"}, "--scheduling-policy='sjf' must be fcfs or priority"),
        ({"kernels": "metal"}, "--kernels='metal' "),
    ],
)
def test_a_value_out_of_range_is_refused_with_flag_value_and_range(
    options: dict[str, Any], message: str
):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert str(caught.value).startswith(message)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'max_seqs'.*max_num_seqs"):
        EngineConfig.resolve({"max_seqs": 4}, environ={})


def test_a_file_that_is_missing_or_no_toml_is_refused_by_name(toml: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        EngineConfig.resolve({}, config_file=tmp_path / "absent.toml", environ={})
    with pytest.raises(ConfigError, match=r"kvist\.toml is not TOML"):
        EngineConfig.resolve({}, config_file=toml("max_num_seqs ="), environ={})
    path = tmp_path / "latin.toml"
    path.write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml is not TOML"):
        EngineConfig.resolve({}, config_file=path, environ={})
