"""The doctor over the corpus: a planted cause is the first finding, the healthy have none.

What a case looks like is said in the README beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist.cli import app
from kvist.lab.doctor.finding import SYMPTOMS

CASES = sorted(path.parent for path in Path(__file__).parent.glob("cases/*/expected.json"))


def expectation(case: Path) -> dict:
    return json.loads((case / "expected.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planted_cause_is_the_first_finding(case):
    wanted = expectation(case)
    files = sorted(str(file) for file in case.iterdir() if file.name != "expected.json")
    shown = CliRunner().invoke(app, ["doctor", "--json", *wanted.get("options", ()), *files])
    found = [finding["symptom"] for finding in json.loads(shown.stdout)["findings"]]
    if wanted["first"] is None:
        assert found == []
        assert shown.exit_code == 0
    else:
        assert found[:1] == [wanted["first"]]
        assert shown.exit_code == 1


def test_the_corpus_is_wide_enough():
    expected = [expectation(case) for case in CASES]
    planted = {wanted["first"] for wanted in expected} - {None}
    assert planted <= set(SYMPTOMS)
    captured = [w for w in expected if w["source"].startswith("captured")]
    assert len([w for w in captured if w["first"]]) >= 5
    for engine in ("kvist", "vllm", "llama"):
        assert any(engine in w["source"] for w in captured), engine
    assert sum(w["first"] is None for w in expected) >= 6
    # Who writes a rule writes cases that it finds: half are by somebody who had not read them.
    assert 2 * sum(w["source"].startswith("planted") for w in expected) >= len(expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_private_is_in_a_case(case):
    for file in case.iterdir():
        text = file.read_text()
        assert "# HELP" not in text
        assert "/root" not in text
        assert "127.0.0.1" not in text
