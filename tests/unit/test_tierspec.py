"""How tiers are written, and what is said of those that are not."""

from __future__ import annotations

import pytest

from kvist.config import EngineConfig
from kvist.errors import ConfigError
from kvist.tierspec import TierSpec, parse_tier

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("host:4GiB", TierSpec(kind="host", capacity_bytes=4 * GIB)),
        ("host:512MiB:zstd:3", TierSpec(kind="host", capacity_bytes=GIB // 2, codec="zstd:3")),
        ("disk:20GiB:/data/kv", TierSpec(kind="disk", capacity_bytes=20 * GIB, path="/data/kv")),
        (
            "disk:1GiB:/a:b/c:zstd,policy=lfu-da,hits=2,name=slow",
            TierSpec(
                kind="disk",
                capacity_bytes=GIB,
                path="/a:b/c",
                codec="zstd",
                policy="lfu-da",
                min_hits=2,
                name="slow",
            ),
        ),
        (
            "host:1GiB,protect=0.25,quota=64MiB",
            TierSpec(
                kind="host",
                capacity_bytes=GIB,
                protected_share=0.25,
                tenant_quota_bytes=64 << 20,
            ),
        ),
        ("redis://h:6379/0", TierSpec(kind="redis", url="redis://h:6379/0")),
        (
            "valkeys://u:p@a:1,b:2,ttl=60,codec=zstd",
            TierSpec(kind="redis", url="rediss://u:p@a:1,b:2", ttl_s=60.0, codec="zstd"),
        ),
    ],
)
def test_what_people_write(text: str, spec: TierSpec):
    assert parse_tier(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ssd:4GiB", "no tier 'ssd'"),
        ("host", "size is missing"),
        ("host:", "size is missing"),
        ("host:many", "not a size"),
        ("host:0", "above 0"),
        ("host:4GiB:/path", "no path"),
        ("disk:4GiB", "directory is missing"),
        ("http://x", "no tier speaks 'http'"),
        ("redis://", "no tier speaks"),
        ("host:4GiB,hits=0", "not above 0"),
        ("host:4GiB,hits=two", "no number"),
        ("host:4GiB,ttl=-1", "not above 0"),
        ("host:4GiB,quota=0", "not above 0"),
        ("host:4GiB,protect=1", "from 0 to below 1"),
        ("host:4GiB,protect=half", "no number"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str):
    with pytest.raises(ConfigError, match=says):
        parse_tier(text)


def test_a_password_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        parse_tier("http://user:secret@host/0")
    assert "secret" not in str(caught.value)


def test_sources_of_tiers(tmp_path):
    file = tmp_path / "kvist.toml"
    file.write_text('tiers = ["host:1GiB", "disk:2GiB:/x"]\n')
    assert EngineConfig.resolve({}, config_file=file, environ={}).tiers[1] == "disk:2GiB:/x"
    environ = {"KVIST_TIERS": "host:3GiB disk:4GiB:/y"}
    by_environment = EngineConfig.resolve({}, config_file=file, environ=environ)
    assert by_environment.tiers == ("host:3GiB", "disk:4GiB:/y")
    flags = EngineConfig.resolve({"tiers": ["host:5GiB"]}, config_file=file, environ=environ)
    assert flags.tiers == ("host:5GiB",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tiers": ["nowhere:1GiB"]}, "no tier 'nowhere'"),
        ({"tiers": 3}, "list of texts"),
        ({"tiers": ["host:1GiB"], "enable_prefix_caching": False}, "with --tier"),
        ({"tiers": ["host:1GiB"], "kv_allocation": "reserve"}, "with --tier"),
        ({"tier_write_policy": "hits:0"}, "hits:K"),
        ({"tier_load_policy": "sometimes"}, "auto, always or never"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig.resolve(options, environ={})


def test_the_flags_are_among_the_help():
    from typer.testing import CliRunner

    from kvist.cli import app

    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert "--tier " in result.output
    assert "--tier-write-policy" in result.output


def test_the_flag_may_be_given_several_times():
    pytest.importorskip("torch")  # the command opens an engine
    from typer.testing import CliRunner

    from kvist.cli import app

    refused = CliRunner().invoke(
        app, ["generate", "x", "--tier", "host:1GiB", "--tier", "ssd:1GiB"]
    )
    assert refused.exit_code == 2
