"""``--record``: what an engine was given is enough to run its books again, hit for hit.

Guards: a decision that depends on something the recording lacks (an abort between two steps, a
preemption, a priority, another continuation, a failed step), text or hits in a recording, a disk
that fills, a crash in the middle of a line.
"""

from __future__ import annotations

import json
import random

import pytest

from kvist.build import open_cache
from kvist.config import CacheConfig, EngineConfig, KVAllocation, SchedulerConfig
from kvist.engine.books import open_recorder
from kvist.engine.engine import Engine
from kvist.engine.null_runner import NullRunner
from kvist.engine.recording import SCHEMA, Recorder
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.errors import ConfigError
from kvist.events import EventLog, RequestFinished, RequestPreempted
from kvist.keys import RootKey
from kvist.lab.simulate.locked import replay_locked
from kvist.lab.simulate.recording import read_recording

FACTS = {
    "model": "null",
    "kv_format": "null",
    "block_bytes": 64,
    "num_blocks": 48,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "scheduling_policy": "fcfs",
    "kv_allocation": "paged",
    "watermark": 0.05,
    "eviction_policy": "lfu-da",
    "protected_share": 0.0,
    "enable_prefix_caching": True,
    "tiers": [],
    "tier_write_policy": "through",
    "tier_load_policy": "auto",
}


class Run:
    """An engine over the null runner, recorded, and what really came of its requests."""

    def __init__(self, path, max_bytes=1 << 30, **facts):
        self.facts = {**FACTS, **facts}
        f = self.facts
        self.recorder = Recorder(path, f, max_bytes)
        self.events = EventLog()
        self.events.subscribe(self.hear)
        self.hits, self.preemptions = {}, 0
        cache = open_cache(
            CacheConfig(
                num_blocks=f["num_blocks"],
                block_size=f["block_size"],
                eviction_policy=f["eviction_policy"],
                protected_share=f["protected_share"],
                enable_prefix_caching=f["enable_prefix_caching"],
            ),
            self.events,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=f["max_model_len"],
                max_num_seqs=f["max_num_seqs"],
                max_num_batched_tokens=f["max_num_batched_tokens"],
                scheduling_policy=f["scheduling_policy"],
                kv_allocation=KVAllocation(f["kv_allocation"]),
                watermark=f["watermark"],
            ),
            cache,
            self.events,
            RootKey(bytes(32)),
            recorder=self.recorder,
        )
        self.runner = NullRunner(f["num_blocks"], f["block_size"], 50)
        self.engine = Engine(scheduler, self, self.events)
        self.vocab_size = 50
        self.raise_for = None

    def run(self, plan):
        if self.raise_for in {item.request_id for item in plan.scheduled}:
            raise RuntimeError("as asked")
        return self.runner.run(plan)

    def hear(self, event):
        if isinstance(event, RequestFinished):
            self.hits[event.request_id] = event.num_cached_tokens
        self.preemptions += isinstance(event, RequestPreempted)

    def add(self, request_id, prompt, max_tokens, **options):
        names = ("priority", "salt")
        fields = {name: options.pop(name) for name in names if name in options}
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)
        self.engine.add_request(
            EngineRequest(
                request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **fields
            )
        )

    def finish(self):
        while self.engine.has_work:
            self.engine.step()
        self.recorder.close()


def conversations(run, seed, num_chats=12, turns=4):
    """Chats over two system prompts, with aborts, stops, several samples and idle moments."""
    draw = random.Random(seed)
    heads = [[draw.randrange(50) for _ in range(13)] for _ in range(2)]
    waiting = []
    for chat in range(num_chats):
        history = list(draw.choice(heads))
        for turn in range(turns):
            history = history + [draw.randrange(50) for _ in range(draw.randrange(1, 9))]
            waiting.append((f"{chat}-{turn}", list(history)))
            history = history + [draw.randrange(50) for _ in range(draw.randrange(1, 6))]
    draw.shuffle(waiting)
    while waiting or run.engine.has_work:
        if waiting and (draw.random() < 0.5 or not run.engine.has_work):
            request_id, prompt = waiting.pop()
            options = {}
            if draw.random() < 0.3:
                options["stop_token_ids"] = tuple(draw.sample(range(50), 8))
            if draw.random() < 0.2:
                options.update(n=3, seed=1)
            if draw.random() < 0.1:
                options["prompt_logprobs"] = 2
            options["priority"] = draw.randrange(3)
            run.add(request_id, prompt, draw.choice((1, 5, 30, None)), **options)
        if run.hits and draw.random() < 0.1:
            live = [view.request_id for view in run.engine.scheduler.views()]
            if live:
                owner, _, index = draw.choice(live).partition("#")
                run.engine.abort_request(owner, int(index) if index else None)
        for _ in range(draw.randrange(4)):
            run.engine.step()
    run.finish()


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"num_blocks": 26, "eviction_policy": "lru"},
        {"eviction_policy": "arc", "protected_share": 0.25, "scheduling_policy": "priority"},
        {"eviction_policy": "s3-fifo", "max_num_batched_tokens": 7, "watermark": 0.0},
        {"enable_prefix_caching": False},
        {"kv_allocation": "reserve"},
    ],
    ids=["default", "small", "priority", "chunks", "no cache", "reserve"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_recorded_run_is_replayed_hit_for_hit(tmp_path, seed, facts):
    path = tmp_path / "run.jsonl"
    run = Run(path, **facts)
    conversations(run, seed)

    found = replay_locked(read_recording(path))

    assert found.hit_tokens == run.hits
    assert found.num_different == 0
    assert found.num_preemptions == run.preemptions
    assert found.is_complete
    if run.facts["enable_prefix_caching"]:
        assert sum(run.hits.values()) > 0
    if run.facts["num_blocks"] == 26:
        assert run.preemptions, "the small pool is there to preempt"


def test_a_step_that_failed_is_taken_back_in_the_replay_too(tmp_path):
    path = tmp_path / "run.jsonl"
    run = Run(path)
    for index in range(5):
        run.add(f"r{index}", [*range(20), index], 12)
    run.engine.step()
    run.raise_for = "r3"
    run.finish()
    assert len(run.hits) == 5

    recording = read_recording(path)
    found = replay_locked(recording)

    assert recording.rollbacks
    assert recording.only
    assert found.hit_tokens == run.hits
    assert found.num_different == 0


def test_a_fork_shares_in_the_replay_what_it_shared(tmp_path):
    path = tmp_path / "run.jsonl"
    run = Run(path)
    run.add("a", range(10), 20)
    for _ in range(5):
        run.engine.step()
    run.engine.fork("a", "b")
    run.finish()
    run2 = replay_locked(read_recording(path))
    assert run2.hit_tokens == run.hits
    assert run2.num_different == 0


def test_a_recording_tells_no_text_no_ids_no_hits_and_no_names_of_blocks(tmp_path):
    lines = []
    for name in ("first", "second"):
        path = tmp_path / name
        run = Run(path)
        run.add("a", range(20), 6)
        run.add("b", range(20), 6)
        run.finish()
        assert path.stat().st_mode & 0o777 == 0o600
        lines.append([json.loads(line) for line in path.read_text().splitlines()])
    assert lines[0][0] == {"k": "header", "schema": SCHEMA, **FACTS}
    assert {frozenset(line) for line in lines[0] if line["k"] != "header"} == {
        frozenset(("k", "step", "id", "t", "prompt", "max_tokens", "keys")),
        frozenset(("k", "step", "id", "why", "out", "keys")),
        frozenset(("k", "first", "rows")),
    }
    first, second = ([x["keys"] for x in each if x["k"] == "add"] for each in lines)
    assert first[0] == first[1], "the same blocks in one recording"
    assert not set(first[0]) & set(second[0]), "and nobody can tell across two"


def test_a_recording_that_ends_in_the_middle_of_a_line_is_read_up_to_there(tmp_path):
    path = tmp_path / "run.jsonl"
    run = Run(path)
    conversations(run, 1)
    data = path.read_bytes()
    # In a line, wherever lines end: how long they are depends on how long steps took.
    path.write_bytes(data[: data.index(b"\n", 2 * len(data) // 3) + 5])

    recording = read_recording(path)
    found = replay_locked(recording)

    assert recording.was_cut
    known = {name: hit for name, hit in run.hits.items() if name in recording.ends}
    assert known
    assert {name: found.hit_tokens.get(name) for name in known} == known


def test_a_full_recording_can_be_replayed_as_far_as_it_goes(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    run = Run(path, max_bytes=20_000)
    for index in range(400):
        run.add(f"{index}", [*range(15), index % 50], 3)
        while run.engine.has_work:
            run.engine.step()
    run.finish()
    assert path.stat().st_size <= 20_000
    assert "no more is written" in caplog.text
    found = replay_locked(read_recording(path))
    assert len(found.hit_tokens) > 20
    assert found.hit_tokens.items() <= run.hits.items()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no recording of schema"),
        ("{}\n", "no recording of schema"),
        ("garbage", "no recording of schema"),
        ('{"k":"header","schema":"kvist.recording.v9"}\n', "kvist.recording.v9"),
        ("{header}\n{oops\n{}\n", "line 2: no JSON"),
        ('{header}\n{"k":"add"}\n', "line 2: not of a recording"),
        ('{header}\n{"k":"dance"}\n', "no kind 'dance'"),
        ("{header}\n[1]\n", "line 2: not an object"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "file"
    header = json.dumps({"k": "header", "schema": SCHEMA, **FACTS})
    path.write_text(text.replace("{header}", header))
    with pytest.raises(ConfigError, match=message):
        read_recording(path)


def test_a_header_that_lacks_something_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text(json.dumps({"k": "header", "schema": SCHEMA}) + "\n")
    with pytest.raises(ConfigError, match="header"):
        replay_locked(read_recording(path))


def test_the_header_names_no_path_and_no_address(tmp_path):
    path = tmp_path / "run.jsonl"
    tiers = ("host:1MiB", f"disk:2MiB:{tmp_path}/secret", "redis://:password@host:1/0")
    config = EngineConfig(record=str(path), tiers=tiers)
    recorder = open_recorder(config, 8, 64, ("m", "fp32"), 64)
    recorder.close()
    text = path.read_text()
    assert "secret" not in text
    assert "password" not in text
    assert json.loads(text)["tiers"] == ["host:1048576", "disk:2097152", "redis:0"]


def test_nothing_is_recorded_unless_asked():
    assert open_recorder(EngineConfig(), 8, 64, ("m", "fp32"), 64) is None
