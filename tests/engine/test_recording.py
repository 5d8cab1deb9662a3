"""A recording of the real engine replays hit for hit: text side, stops and close included.

Guards what the unit tests with the null runner cannot see: that ``record`` reaches the scheduler of
an `LLM`, that aborts by stop strings stand in it, and that closing it writes everything.
"""

from __future__ import annotations

import random

import pytest

from kvist.events import RequestFinished, RequestPreempted
from kvist.lab.simulate.locked import replay_locked
from kvist.lab.simulate.recording import read_recording

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_llm_that_records_can_be_replayed_without_it(tmp_path, tiny_folder):
    from kvist import LLM, SamplingParams

    path = tmp_path / "run.jsonl"
    hits, preempted = {}, []

    def hear(event):
        if isinstance(event, RequestFinished):
            hits[event.request_id] = event.num_cached_tokens
        elif isinstance(event, RequestPreempted):
            preempted.append(event.request_id)

    draw = random.Random(0)
    head = "You are a helpful assistant that answers in few words. "
    # 24 blocks: of eight chats some have to give their blocks up.
    with LLM(
        str(tiny_folder("llama")),
        record=str(path),
        max_model_len=256,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=24 * 16 * 256,
    ) as llm:
        assert llm.pool.num_blocks == 24
        llm.engine.events.subscribe(hear)
        letters = tuple(llm.tokenizer.encode("abcdefgh"))
        histories = [head] * 8
        for _turn in range(3):
            histories = [h + "".join(draw.choices("abcdef ", k=12)) for h in histories]
            params = [
                SamplingParams(
                    max_tokens=draw.choice((3, 9)),
                    temperature=draw.choice((0.0, 1.0)),
                    n=draw.choice((1, 1, 2)),
                    stop=draw.choice(([], ["e"])),
                    allowed_token_ids=letters,
                )
                for _ in histories
            ]
            for index, output in enumerate(llm.generate(histories, params, use_tqdm=False)):
                histories[index] += output.outputs[0].text

    recording = read_recording(path)
    found = replay_locked(recording)

    assert found.hit_tokens == hits
    assert sum(hits.values()) > 0
    assert found.num_different == 0
    assert found.num_preemptions == len(preempted)
    assert {"abort", "length"} <= {end.why for end in recording.ends.values()}
    assert all(row.seconds > 0 for row in recording.steps.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "documents", "burst"])
def test_workloads_of_a_real_model_replay_hit_for_hit(tmp_path, smollm2_folder, name):
    from benchmarks.simulate_fidelity import record

    path = tmp_path / "run.jsonl"
    measured = record(str(smollm2_folder), name, path)
    recording = read_recording(path)
    found = replay_locked(recording)
    assert found.hit_tokens == measured.hits
    assert found.num_different == 0
    assert name == "burst" or sum(measured.hits.values()) > 0
