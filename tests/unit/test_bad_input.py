"""Whatever the lab is given that is none: one clear line, exit code 2, never a traceback."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvist.cli import app

FILES = {
    "empty": b"",
    "blank": b"\n  \n",
    "foreign": b"dear diary\ntoday nothing happened\n",
    # A trace of which nothing but the beginning of a line was written.
    "half.jsonl": b'{"timestamp": 2, "input_le',
    "other.json": b'{"schema": "someone.else.v7"}',
    "binary": bytes(range(256)) * 8,
}
TAKE_FILES = {
    "doctor": ["doctor"],
    "doctor prompts": ["doctor", "prompts"],
    "simulate": ["simulate"],
    "bench policies": ["bench", "policies"],
    "report": ["report", "--out", "page.html", "--bench"],
    "plan": ["plan"],
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)


def refused(*arguments: str) -> str:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 2, (arguments, shown.output, shown.exception)
    (line,) = [line for line in shown.stderr.splitlines() if line.strip()]
    assert line.startswith("kvist:")
    return line


@pytest.mark.parametrize("command", TAKE_FILES)
@pytest.mark.parametrize("file", [*FILES, "missing", "."])
def test_files_that_are_none(command, file):
    if command == "doctor prompts" and file in ("foreign", "half.jsonl", "other.json"):
        pytest.skip("any text may be a template")
    refused(*TAKE_FILES[command], file)


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor", "http://127.0.0.1:9"),
        ("doctor", "http://127.0.0.1:9", "--interval", "-1"),
        ("doctor", "foreign", "--thresholds", "missing.toml"),
        ("doctor", "foreign", "--thresholds", "foreign"),
        ("doctor", "foreign", "--limit", "nonsense"),
        ("doctor",),
        ("bench", "serve", "http://127.0.0.1:9"),
        ("plan", "no-such-model"),
        ("plan",),
        ("plan", "llama-3.1-8b", "--memory", "0"),
        ("plan", "llama-3.1-8b", "--memory", "lots"),
        ("plan", "llama-3.1-8b", "--memory=-5GiB"),
        ("plan", "llama-3.1-8b", "--context", "0"),
        ("plan", "llama-3.1-8b", "--utilization", "7"),
        ("plan", "llama-3.1-8b", "--gpus", "0"),
        ("plan", "llama-3.1-8b", "--kv-cache-dtype", "int3"),
        ("plan", "llama-3.1-8b", "--tier", "nvme:slow"),
        ("plan", "llama-3.1-8b", "--html", "no/such/folder.html"),
        ("report", "--out", "page.html"),
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense(arguments):
    refused(*arguments)


@pytest.mark.parametrize("bench", ["cache", "ladder", "paging", "prefix", "tiers"])
def test_a_benchmark_of_a_model_that_nobody_knows(bench):
    pytest.importorskip("torch")
    assert "no-such-model" in refused("bench", bench, "--model", "no-such-model")


def test_an_explanation_of_a_model_that_nobody_knows():
    pytest.importorskip("torch")
    refused("explain", "text", "--model", "no-such-model")
