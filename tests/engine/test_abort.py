"""Requests that are given up at any point hold nothing afterwards, and disturb nobody.

The state machine over the null runner aborts in every state; here the streams and the model are
real. The books are checked after every step.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.testing.parity import GreedyReference, WatchedEngine, greedy

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(rng, length):
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def reference(tiny_folder, one_thread):
    return GreedyReference(tiny_folder("qwen2"))


@pytest.fixture
def watched(tiny_folder):
    return WatchedEngine(
        tiny_folder("qwen2"),
        num_blocks=14,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=8,
    )


def assert_idle(watched) -> None:
    assert watched.num_used_blocks == 0
    assert not watched.engine.has_work
    assert watched.scheduler.num_running == watched.scheduler.num_waiting == 0
    watched.scheduler.check()


def test_streams_closed_at_random_points(watched, reference):
    rng = random.Random(1)
    closed = Counter()
    stem = tokens(rng, 20)
    for _ in range(30):
        prompt = rng.choice([stem, []]) + tokens(rng, rng.randint(1, 30))
        wanted = rng.randrange(12)
        stream = watched.llm.stream(prompt, greedy(10))
        seen = []
        for output in stream:
            seen = list(output.outputs[0].token_ids)
            if len(seen) >= wanted:
                break
        stream.close()
        assert seen == reference.generate(prompt, 10)[: len(seen)]
        closed["early" if len(seen) < 10 else "at its end"] += 1
        assert_idle(watched)
    assert closed["early"] >= 10
    assert closed["at its end"] >= 3


def test_a_stream_closed_before_its_first_step(watched):
    stream = watched.llm.stream([1, 2, 3], greedy(5))
    stream.close()
    assert_idle(watched)


def test_several_streams_of_which_some_are_given_up(watched, reference):
    """They are pulled in turn, so closing one finds the others in the middle of their work."""
    rng = random.Random(2)
    prompts = [tokens(rng, n) for n in (5, 18, 30, 11, 22)]
    streams = [watched.llm.stream(p, greedy(12)) for p in prompts]
    last = [[] for _ in prompts]
    for _ in range(3):
        for index, stream in enumerate(streams):
            last[index] = next(stream).outputs[0].token_ids
    streams[1].close()
    streams[3].close()
    for index in (0, 2, 4):
        for output in streams[index]:
            last[index] = output.outputs[0].token_ids
        assert last[index] == reference.generate(prompts[index], 12)
    assert_idle(watched)


def state_of(watched, request_id: str) -> str:
    seq = watched.scheduler._sequences[request_id]
    if seq.num_scheduled:
        return "in flight"
    if seq.table is None:
        again = ", preempted" if seq.preemptions else ""
        return seq.status.value + again
    return "decoding" if seq.num_remaining == 1 else "prefilling"


def test_aborts_in_every_state(watched, reference):
    """Random arrivals, forks and aborts in a pool too small for them; aborts in flight too."""
    rng = random.Random(3)
    aborted = Counter()

    def disturb() -> None:
        by_state = {}
        for request_id in watched.scheduler._sequences:
            by_state.setdefault(state_of(watched, request_id), []).append(request_id)
        # Following is rare and short.
        follows = "following" in by_state
        if by_state and rng.random() < (0.6 if follows else 0.15):
            # The state first, or nearly all would be aborted while they decode.
            state = "following" if follows else rng.choice(sorted(by_state))
            aborted[state] += 1
            watched.abort(rng.choice(by_state[state]))

    inner = watched.engine.runner

    class DisturbedInFlight:
        vocab_size = inner.vocab_size

        def run(self, plan):
            disturb()
            return inner.run(plan)

    watched.engine.runner = DisturbedInFlight()
    left = 60
    while left or watched.engine.has_work:
        if left and len(watched.outputs) - len(watched.ends) < 8:
            left -= 1
            # Two at once with the same beginning: the second waits for the first.
            stem = tokens(rng, rng.choice([0, 24, 40]))
            for _ in range(2):
                watched.add(stem + tokens(rng, rng.randint(1, 12)), rng.randint(8, 40))
        watched.step()
        disturb()
        decoding = [r for r, out in watched.outputs.items() if out and r not in watched.ends]
        if decoding and watched.counts["forks"] < 30 and rng.random() < 0.1:
            watched.fork(rng.choice(decoding))
    watched.drain()
    assert_idle(watched)
    states = {"waiting", "waiting, preempted", "following", "prefilling", "decoding", "in flight"}
    assert set(aborted) >= states, aborted
    assert watched.counts["preemptions"] > 0
    assert watched.counts["copies"] > 0
    for request_id, output in watched.outputs.items():
        wanted = reference.generate(watched.prompts[request_id], max(1, len(output)))
        assert output == wanted[: len(output)], request_id
    assert set(watched.ends.values()) == {"length", "abort"}


def test_a_failing_step_takes_one_request_with_it(watched, reference, monkeypatch):
    """The model raises for one of four prompts: that one ends with the reason, the others go on."""
    rng = random.Random(4)
    prompts = [tokens(rng, n) for n in (5, 9, 4, 7)]
    poison = prompts[2][0]
    inner = watched.engine.runner

    class Raises:
        vocab_size = inner.vocab_size

        def run(self, plan):
            if any(item.position == 0 and item.token_ids[0] == poison for item in plan.scheduled):
                raise RuntimeError("the kernel said no")
            return inner.run(plan)

    assert [p[0] for p in prompts].count(poison) == 1
    monkeypatch.setattr(watched.engine, "runner", Raises())
    outputs = watched.llm.generate(prompts, greedy(8), use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error", "length"]
    assert "the kernel said no" in outputs[2].error
    for index in (0, 1, 3):
        assert outputs[index].outputs[0].token_ids == reference.generate(prompts[index], 8)
    assert watched.counts["failed steps"] > 0
    assert_idle(watched)
