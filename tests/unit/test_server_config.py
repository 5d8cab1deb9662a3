"""The server's options: ranges, the file shared with the engine's, and a flag for each.

Guards: an option without a flag; a TOML file with options of both kinds is refused by one of them;
an environment that somebody else writes breaks the start.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvist.config import EngineConfig, ServerConfig
from kvist.errors import ConfigError

pytest.importorskip("typer")

from kvist.flags import ENGINE_HELP, SERVER_HELP

NO_FLAG = {"model", "served_model_name", "poison_fresh_blocks"}
"""The commands have the first two of their own; the last is for tests."""


def test_every_option_has_a_flag():
    assert set(SERVER_HELP) == {field.name for field in fields(ServerConfig)}
    assert set(ENGINE_HELP) == {field.name for field in fields(EngineConfig)} - NO_FLAG


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("context_overflow", "shrug", "error, truncate or drop-oldest-turns"),
        ("tool_call_parser", "guess", "hermes, llama3_json or mistral"),
        ("port", 70_000, "65535"),
        ("max_body_bytes", "10", "at least 1KiB"),
        ("max_body_bytes", "many", "is not a size"),
        ("shutdown_timeout", -1, "at least 0"),
        ("api_key", "", "not empty"),
    ],
)
def test_a_value_that_cannot_be_is_named(option: str, value: object, words: str):
    with pytest.raises(ConfigError, match=words) as info:
        ServerConfig.resolve({option: value}, environ={})
    assert option.replace("_", "-") in str(info.value).replace("_", "-")


def test_one_file_holds_the_options_of_both(tmp_path: Path):
    path = tmp_path / "kvist.toml"
    path.write_text('block-size = 32\ncontext-overflow = "truncate"\nmax-body-bytes = "1MiB"\n')
    engine = EngineConfig.resolve({}, config_file=path, environ={})
    server = ServerConfig.resolve({}, config_file=path, environ={})
    assert engine.block_size == 32
    assert (server.context_overflow, server.max_body_bytes) == ("truncate", 1 << 20)
    path.write_text("no-such-option = 1\n")
    for config in (EngineConfig, ServerConfig):
        with pytest.raises(ConfigError, match="no_such_option"):
            config.resolve({}, config_file=path, environ={})


def test_the_key_may_come_from_the_environment_the_port_may_not():
    environ = {"KVIST_API_KEY": "sesame", "KVIST_PORT": "tcp://10.0.0.1:8000"}
    server = ServerConfig.resolve({}, environ=environ)
    assert (server.api_key, server.port) == ("sesame", 8000)


def test_a_chat_template_that_is_not_there_is_named(tmp_path: Path):
    config = ServerConfig(chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template=.*none\.jinja: No such file"):
        config.read_chat_template()
    (tmp_path / "none.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="name a file with a Jinja template"):
        config.read_chat_template()
