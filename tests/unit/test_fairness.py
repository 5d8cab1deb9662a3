"""Who may pass whom, who is left alone, and what is kept free.

Guards against the two ends of an unfair queue: a big request that small ones overtake for ever, and
small ones that stand behind a big one in front of a half empty pool.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvist.engine.admission import MAX_LOOKS, MAX_PASSES
from kvist.events import RequestPreempted, RequestScheduled
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig


def rig_of(**sizes: Any) -> EngineRig:
    defaults = {"num_blocks": 20, "block_size": 4, "max_model_len": 60}
    defaults |= {"max_num_seqs": 16, "max_num_batched_tokens": 128}
    return EngineRig(RigConfig(**{**defaults, "enable_prefix_caching": False, **sizes}))


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % 61 for i in range(length))


def order_of_starts(rig: EngineRig) -> list[str]:
    return [e.request_id for e in rig.events.recent() if isinstance(e, RequestScheduled)]


def passes(rig: EngineRig, request_id: str) -> int:
    view = rig.scheduler.view(request_id)
    assert view is not None
    return view.passes


def with_a_big_one_waiting(**sizes: Any) -> EngineRig:
    """r0 holds 10 of 20 blocks for long; r1 needs 13 and waits."""
    rig = rig_of(**sizes)
    rig.add(prompt(39), 20)
    rig.step()
    rig.add(prompt(50, 3), 2)
    rig.step()
    assert rig.state("r1") == "waiting"
    return rig


def test_small_ones_pass_a_big_one_that_finds_no_room():
    rig = with_a_big_one_waiting()
    rig.add(prompt(3, 5), 1)
    rig.step()
    assert rig.stories["r2"].finish_reason == "length"
    assert passes(rig, "r1") == 1


def test_a_big_one_is_passed_eight_times_and_then_everyone_waits_for_it():
    rig = with_a_big_one_waiting()
    while passes(rig, "r1") < MAX_PASSES:
        rig.add(prompt(3, 5), 1)
        rig.step()
    late = rig.add(prompt(3, 5), 1)
    for _ in range(5):
        rig.step()
        assert late in rig.active
    rig.drain()
    starts = order_of_starts(rig)
    assert starts.index("r1") == 1 + MAX_PASSES
    assert starts[-1] == late


def test_many_small_ones_in_one_step_are_counted_one_by_one():
    rig = with_a_big_one_waiting(num_blocks=23)
    for _ in range(MAX_PASSES + 3):
        rig.add(prompt(1, 5), 1)
    rig.step()
    assert passes(rig, "r1") == MAX_PASSES
    assert rig.scheduler.num_waiting == 1 + 3


def test_a_big_one_starts_in_a_flood_that_never_ends():
    rig = rig_of(max_num_seqs=8)
    for n in range(4):
        rig.add(prompt(9, n), 4 + 3 * n)
    rig.step()
    big = rig.add(prompt(58, 7), 2)
    assert big is not None
    for n in range(400):
        if rig.stories[big].finish_reason is not None:
            break
        while len(rig.active) < 12:
            rig.add(prompt(5, n), 4)
        rig.step()
    assert rig.stories[big].finish_reason == "length"
    starts = order_of_starts(rig)
    later = [r for r in starts[: starts.index(big)] if int(r[1:]) > int(big[1:])]
    assert 0 < len(later) <= MAX_PASSES
    rig.drain()


def test_a_pass_that_is_rolled_back_never_happened():
    rig = with_a_big_one_waiting()
    rig.add(prompt(3, 5), 1)
    plan = rig.scheduler.schedule()
    assert passes(rig, "r1") == 1
    rig.scheduler.rollback(plan)
    assert passes(rig, "r1") == 0
    for _ in range(3 * MAX_PASSES):
        rig.schedule_and_roll_back()
    rig.step()
    assert passes(rig, "r1") == 1


def test_the_preempted_is_not_passed():
    rig = rig_of(num_blocks=10, max_model_len=40)
    rig.add(prompt(15, 1), None)
    rig.add(prompt(15, 2), None)
    rig.step_until(lambda: rig.events.counts[RequestPreempted])
    rig.add(prompt(1, 4), 1)
    rig.step()
    assert rig.scheduler.num_waiting == 2
    assert passes(rig, "r1") == 0
    rig.drain()


def test_a_step_looks_at_few_that_find_no_room():
    """However long the queue of big ones is: a step must not match them all against the cache."""
    rig = with_a_big_one_waiting()
    for n in range(MAX_LOOKS):
        rig.add(prompt(50, n), 2)
    small = rig.add(prompt(1), 1)
    rig.step()
    assert small in rig.active
    rig.drain()


# --------------------------------------------------------------------------------------- preemption


def test_who_said_nothing_since_it_was_preempted_is_left_alone():
    # r1 is preempted, comes back, and reads its prompt again while r0 grows into its blocks.
    rig = rig_of(num_blocks=16, max_model_len=64, max_num_batched_tokens=3, max_num_seqs=3)
    rig.add(prompt(20, 1), None)
    rig.add(prompt(20, 2), None)
    rig.drain()  # the rig asserts that nobody is preempted twice without a token in between
    assert rig.events.counts[RequestPreempted] > 0
    assert rig.counts["finish: length"] == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_owes_a_token_is_spared_until_it_said_one_whatever_the_ranks(policy: str):
    rig = rig_of(scheduling_policy=policy)
    for priority, first in enumerate((1, 2, 3)):
        rig.add(prompt(9, first), 9, priority=priority)
    rig.step()
    running = rig.scheduler._running
    last = list(running)[-1]
    assert running.victim() is last
    last.output_at_preemption = last.num_output_tokens
    assert running.victim().request_id == "r1"
    last.append(5)
    assert running.victim() is last


# ---------------------------------------------------------------------------------------- watermark


@pytest.mark.parametrize(("watermark", "running"), [(0.0, 2), (0.2, 1)])
def test_the_watermark_stays_free_beside_others(watermark: float, running: int):
    # Two of 8 blocks with room to grow are 18 of 20; a fifth of 20 must stay free.
    rig = rig_of(watermark=watermark)
    rig.add(prompt(31, 1), 3)
    rig.add(prompt(31, 2), 3)
    rig.step()
    assert rig.scheduler.num_running == running
    rig.drain()


def test_the_watermark_keeps_nobody_out_of_an_empty_pool():
    rig = rig_of(watermark=0.9, num_blocks=15)
    rig.add(prompt(59), None)
    rig.drain()
    assert rig.counts["finish: length"] == 1


def preemptions(watermark: float) -> int:
    rng = random.Random(1)
    rig = rig_of(watermark=watermark, num_blocks=200, max_num_seqs=32, max_model_len=256)
    for n in range(80):
        half = rng.randint(8, 120)
        rig.add(prompt(half, n), half)
    rig.drain()
    return rig.events.counts[RequestPreempted]


def test_a_watermark_saves_preemptions():
    assert preemptions(0.05) < 0.7 * preemptions(0.0)
