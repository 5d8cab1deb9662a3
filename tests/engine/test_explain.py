"""What `kvist explain` says is what the engine did: counted tokens, blocks, addresses, sources."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from kvist.cli import app
from kvist.engine.llm import LLM
from kvist.lab.explain import explain
from kvist.spec import KVSpec

TEXT = "a b c d e f g h i j k l m n o p q r s t u v w x y z and then all of it once more"


@pytest.fixture(scope="module")
def found(tiny_folder, one_thread):
    folder = tiny_folder("llama")
    spec = KVSpec.from_config(json.loads((folder / "config.json").read_text()))
    options = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "max_model_len": 256}
    with LLM(str(folder), tiers=("host:16MiB",), **options) as llm:
        yield explain(llm, spec, TEXT, 5), llm


def test_the_first_time_everything_is_computed_once_and_the_last_token_never(found):
    explanation, _ = found
    cold = explanation.passes[0]
    *others, last = cold.tokens
    assert {token.source for token in others} == {"computed"}
    assert (last.source, last.block, last.asked) == ("never", None, 0)
    prompt = [token for token in others if token.role == "prompt"]
    assert {token.step for token in prompt} == {1}
    # Each generated token goes through the model in the step after the one that sampled it.
    assert [t.step for t in others if t.role == "generated"] == [2, 3, 4, 5]
    assert cold.num_steps == 5
    assert [token.asked for token in others] == list(range(1, len(others) + 1))
    assert cold.num_without_cache == sum(len(prompt) + n for n in range(5))


def test_again_the_full_blocks_come_from_the_device_and_after_a_restart_from_the_tier(found):
    explanation, llm = found
    size = explanation.block_size
    cold, *later = explanation.passes
    num_prompt = sum(token.role == "prompt" for token in cold.tokens)
    full = (num_prompt - 1) // size * size
    assert full > 0
    assert [done.name for done in later] == ["again", "restart"]
    for done, source in zip(later, ("device", "host"), strict=True):
        assert {token.source for token in done.tokens[:full]} == {source}
        assert {token.source for token in done.tokens[full:-1]} == {"computed"}
        # The same text has the same addresses, wherever it lies.
        assert [t.key for t in done.tokens[:full]] == [t.key for t in cold.tokens[:full]]
        assert all(token.key for token in done.tokens[:full])
        assert [t.token_id for t in done.tokens] == [t.token_id for t in cold.tokens]
    assert later[0].num_reused == full
    assert explanation.kv_bytes_per_token == llm.bill.kv_token_bytes


def test_the_command_prints_its_schema_and_refuses_an_empty_text(found, tiny_folder):
    _ = found
    model = str(tiny_folder("llama"))
    shown = CliRunner().invoke(app, ["explain", TEXT, "--model", model, "--json"])
    assert shown.exit_code == 0, shown.output
    body = json.loads(shown.stdout)
    assert body["schema"] == "kvist.explain.v1"
    assert [done["name"] for done in body["passes"]] == ["cold", "again"]
    people = CliRunner().invoke(app, ["explain", TEXT, "--model", model])
    assert "reused, device" in people.stdout
    assert "Q is not kept" in people.stdout
    for wrong in (
        ["explain", ""],
        ["explain", "x", "--model", "no-such-model-anywhere"],
        ["explain", "x", "--model", model, "--tier", "nonsense"],
    ):
        assert CliRunner().invoke(app, wrong).exit_code == 2
