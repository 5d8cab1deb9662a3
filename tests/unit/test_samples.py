"""Several continuations of one prompt: computed once, told apart, ended together.

The null runner says the same for every continuation, so each must say what the plain model says.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from kvist.cache import KVCacheManager
from kvist.config import SchedulerConfig
from kvist.engine.engine import Engine
from kvist.engine.null_runner import NullRunner, null_generate
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import Update
from kvist.errors import RequestError
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.policies.registry import make_policy
from kvist.testing.disturbed import DisturbedRunner, RigConfig

VOCAB = 61


class Samples:
    """An engine without a model, and what each continuation said."""

    def __init__(self, **sizes: Any) -> None:
        defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 60, "max_num_seqs": 8}
        config = RigConfig(**{**defaults, "max_num_batched_tokens": 32, **sizes})
        events = EventLog()
        self.cache = KVCacheManager(
            config.num_blocks,
            config.block_size,
            make_policy("lru", config.num_blocks),
            events,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
            self.cache,
            events,
            RootKey(bytes(32)),
        )
        inner = NullRunner(config.num_blocks, config.block_size, VOCAB, verify=True)
        self.runner = DisturbedRunner(inner, config)
        self.engine = Engine(scheduler, self.runner, events)
        self.outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], str] = {}
        self.last: list[str] = []

    def add(self, prompt: tuple[int, ...], n: int, max_tokens: int = 6, name: str = "r") -> None:
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0)
        self.engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)
        )

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            assert update.request_id not in self.last, f"news after the last: {update}"
            key = (update.request_id, update.index)
            self.outputs[key] += update.token_ids
            if update.finish_reason is not None:
                assert key not in self.ends
                self.ends[key] = update.finish_reason
            if update.is_last:
                self.last.append(update.request_id)

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.scheduler.check()

    def drain(self) -> None:
        for _ in range(1_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.cache.num_used_blocks == 0


def prompt(length: int) -> tuple[int, ...]:
    return tuple((3 * i * i + i) % VOCAB for i in range(length))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 29, 45])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_prompt_is_computed_once(length: int, n: int):
    """Whatever the place of its last token in a block, and in how many chunks it is read."""
    samples = Samples()
    samples.add(prompt(length), n)
    samples.drain()
    truth = null_generate(prompt(length), 6, VOCAB)
    assert dict(samples.outputs) == {("r", i): truth for i in range(n)}
    assert set(samples.ends.values()) == {"length"}
    assert samples.last == ["r"]
    # The last prompt token again for each of the others, then five of the six tokens.
    assert samples.runner.num_computed_tokens == length + (n - 1) + 5 * n
    # Each of the others needs a block of its own to write that token into; the first stays in its.
    assert samples.runner.counts["copies"] == (0 if length % 4 == 1 else n - 1)


def test_one_token_each_ends_the_first_before_the_others():
    samples = Samples()
    samples.add(prompt(9), 4, max_tokens=1)
    samples.drain()
    assert samples.ends == {("r", i): "length" for i in range(4)}
    assert samples.last == ["r"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"num_blocks": 15},
        {"num_blocks": 17, "max_num_batched_tokens": 8},
        {"num_blocks": 15, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_what_does_not_fit_side_by_side_runs_in_turn(sizes):
    samples = Samples(**sizes)
    samples.add(prompt(21), 6, max_tokens=20)
    samples.add(prompt(17), 2, max_tokens=9, name="s")
    samples.drain()
    truth = null_generate(prompt(21), 20, VOCAB)
    assert all(samples.outputs["r", i] == truth for i in range(6))
    assert sorted(samples.last) == ["r", "s"]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_ends_all_of_them(steps: int):
    samples = Samples(max_num_seqs=3)
    samples.add(prompt(40), 5, max_tokens=15)
    for _ in range(steps):
        samples.step()
    update = samples.engine.abort_request("r")
    assert update is not None
    assert update.is_last
    assert not samples.engine.has_work
    assert samples.cache.num_used_blocks == 0
    samples.engine.scheduler.check()


def test_an_abort_while_the_model_runs_ends_with_that_step():
    samples = Samples(max_num_seqs=3)
    samples.add(prompt(6), 5, max_tokens=15)
    samples.step()
    samples.step()
    samples.runner.in_flight.append(lambda: samples.engine.abort_request("r"))
    samples.step()
    assert samples.last == ["r"]
    assert not samples.engine.has_work
    assert samples.cache.num_used_blocks == 0


def test_one_continuation_can_be_ended_alone():
    samples = Samples()
    samples.add(prompt(6), 3, max_tokens=9)
    samples.step()
    samples.step()
    update = samples.engine.abort_request("r", 1)
    assert update is not None
    assert (update.index, update.finish_reason, update.is_last) == (1, "abort", False)
    samples.take([update])
    samples.drain()
    assert samples.ends == {("r", 0): "length", ("r", 1): "abort", ("r", 2): "length"}
    assert samples.last == ["r"]


@pytest.mark.parametrize("guilty", ["r", "r#2"])
def test_a_fault_of_one_ends_the_request_and_nobody_else(guilty: str):
    samples = Samples()
    samples.add(prompt(6), 4, max_tokens=9)
    samples.add(prompt(11), 1, max_tokens=9, name="s")
    samples.step()
    samples.runner.not_finite.add(guilty)
    samples.drain()
    assert "error" in samples.ends.values()
    assert sorted(samples.last) == ["r", "s"]
    assert samples.outputs["s", 0] == null_generate(prompt(11), 9, VOCAB)


def test_a_step_that_raises_ends_only_the_request_that_makes_it_raise():
    samples = Samples()
    samples.add(prompt(6), 4, max_tokens=9)
    samples.add(prompt(11), 2, max_tokens=9, name="s")
    samples.step()
    samples.runner.poison.add("r#1")
    samples.drain()
    assert sorted(samples.last) == ["r", "s"]
    assert samples.ends["r", 1] == "error"
    assert all(samples.outputs["s", i] == null_generate(prompt(11), 9, VOCAB) for i in range(2))


def test_ids_of_continuations_are_in_use():
    samples = Samples()
    samples.add(prompt(6), 1, name="r#1")
    with pytest.raises(RequestError, match="in use"):
        samples.add(prompt(6), 2, name="r")
    samples.add(prompt(6), 3, name="s")
    for name in ("s", "s#1"):
        with pytest.raises(RequestError, match="in use"):
            samples.add(prompt(6), 1, name=name)
    samples.drain()
    assert sorted(samples.last) == ["r#1", "s"]
