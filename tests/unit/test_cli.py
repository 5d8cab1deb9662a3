"""What a person at a terminal reads and types."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvist import cli
from kvist.flags import ENGINE_HELP, SERVER_HELP


def test_help_says_every_name_in_full_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(cli.app, ["serve", "--help"], terminal_width=80).output
    assert "…" not in re.sub(r"cuda:1 …", "", shown)
    for name in (*ENGINE_HELP, *SERVER_HELP):
        if name != "tiers":  # several of these are given as --tier
            assert "--" + name.replace("_", "-") in shown.split(), name


def test_a_slip_in_a_chat_is_no_turn_of_it(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(
        cli, "_open", lambda model, args: SimpleNamespace(bill=SimpleNamespace(model="m"))
    )
    monkeypatch.setattr(cli, "_sampling", lambda llm, **given: None)
    # A turn would need the model's tokenizer, which is not there.
    found = CliRunner().invoke(cli.app, ["chat"], input="/claer\n/quit\n")
    assert found.exit_code == 0, found.output
    assert "/claer is no command; there are /clear, /bill, /quit" in found.output
