"""``--profile-steps`` records as many steps as were asked for, once, and says where.

Guards: a trace that is never written because the engine goes idle or a step fails, and a profiler
that stays on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.engine.llm import LLM
from kvist.testing.parity import greedy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_first_steps_are_in_a_file_that_the_log_names(
    tiny_folder, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tiny_folder("llama")
    llm = LLM(str(folder), max_model_len=64, kv_cache_memory_bytes="4MiB", profile_steps=3)

    def generate(num_tokens):
        (output,) = llm.generate([[1, 2, 3]], greedy(num_tokens), use_tqdm=False)
        return output.outputs[0].token_ids

    with caplog.at_level(logging.INFO, logger="kvist"):
        first = generate(2)
        assert not list(tmp_path.glob("*.json"))
        generate(4)
    (path,) = tmp_path.glob("kvist-steps-*.json")
    assert str(path) in caplog.text
    events = json.loads(Path(path).read_text())["traceEvents"]
    names = [e["name"] for e in events if str(e.get("name", "")).startswith("step of ")]
    assert set(names) == {"step of 1 tokens, 1 sequences", "step of 3 tokens, 1 sequences"}
    # Not recorded any more, and the same as before.
    assert generate(2) == first
    assert len(list(tmp_path.glob("*.json"))) == 1
