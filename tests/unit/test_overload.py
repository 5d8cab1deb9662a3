"""Bounds of the queue, deadlines, and what is said to those who come too late.

Guards against a queue that grows without end, one that serves nobody in time, and blocks held by a
request whose time is over. Seconds are the rig's: one a step.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvist.engine.overload import Margin
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.engine.throughput import Throughput
from kvist.errors import RequestError
from kvist.events import (
    RequestAdded,
    RequestExpired,
    RequestFinished,
    RequestRejected,
    RequestScheduled,
    StepDone,
)
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig


def rig_of(**sizes: Any) -> EngineRig:
    defaults = {"num_blocks": 40, "block_size": 4, "max_model_len": 60}
    defaults |= {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    return EngineRig(RigConfig(**{**defaults, **sizes}))


def request(name: str = "x", **options: Any) -> EngineRequest:
    options = {"prompt_token_ids": (1, 2, 3), **options}
    return EngineRequest(request_id=name, **options)


# ------------------------------------------------------------------------------------------ bounds


def test_beyond_max_num_queued_reqs_a_request_is_told_to_come_back():
    rig = rig_of(max_num_queued_reqs=2)
    rig.add((1, 2), 5)
    rig.step()
    for n in range(2):
        assert rig.add((n, 3), 5)
    overload = rig.engine.offer(request())
    assert overload is not None
    assert overload.reason == "queued_reqs"
    assert "2 requests wait, and --max-num-queued-reqs=2" in overload.message
    assert overload.retry_after_s >= 1
    assert rig.events.recent()[-1] == RequestRejected("x", "queued_reqs")
    rig.drain()
    assert rig.engine.offer(request()) is None


def test_tokens_are_bounded_and_one_request_alone_always_has_a_place():
    rig = rig_of(max_num_queued_tokens=10)
    assert rig.add(tuple(range(50)), 5), "the queue was empty"
    rig.step()
    assert rig.add(tuple(range(8)), 1)
    overload = rig.engine.offer(request())
    assert overload is not None
    assert overload.reason == "queued_tokens"
    assert "with 8 tokens wait, this one has 3" in overload.message
    assert rig.add((1, 2), 1), "8 and 2 are within 10"
    rig.drain()


def test_a_request_that_can_never_run_is_told_so_although_the_queue_is_full():
    rig = rig_of(max_num_queued_reqs=1)
    for n in range(2):
        rig.add((n, 3), 5)
        rig.step()
    with pytest.raises(RequestError, match="the prompt is empty"):
        rig.engine.offer(request(prompt_token_ids=()))
    assert rig.events.counts[RequestRejected] == 0
    rig.drain()


def test_who_adds_without_asking_is_not_bounded():
    """`LLM.generate` brings its own list: that is a queue already."""
    rig = rig_of(max_num_queued_reqs=1)
    for n in range(9):
        rig.engine.add_request(request(str(n), params=SamplingParams(max_tokens=1)))
    assert rig.scheduler.num_waiting == 9


# --------------------------------------------------------------------------------------- deadlines


def test_a_running_request_ends_at_its_deadline_and_its_blocks_are_free():
    rig = rig_of()
    rig.add((1, 2, 3), None, timeout_s=4.0)
    rig.drain()  # the rig checks that it ends in time, and with the words of a deadline
    assert rig.counts["deadlines"] == 1
    assert len(rig.stories["r0"].outputs) == 4
    assert rig.events.counts[RequestExpired] == 1
    assert rig.cache.num_used_blocks == 0


def test_a_waiting_request_ends_at_its_deadline():
    rig = rig_of()
    rig.add((1, 2, 3), 20)
    rig.step()
    rig.add((3, 4), 5, timeout_s=3.0)
    rig.drain()
    assert rig.stories["r1"].finish_reason == "abort"
    assert rig.stories["r1"].outputs == []
    assert rig.stories["r0"].finish_reason == "length"


def test_the_news_say_which_deadline():
    rig = rig_of()
    rig.engine.add_request(request(timeout_s=2.5))
    rig.now_s = 3.0
    (update,) = rig.engine.step()
    assert (update.finish_reason, update.is_last) == ("abort", True)
    assert (update.error, update.fault) == ("deadline: 2.5 s are over", "deadline")
    assert not rig.engine.has_work


def test_time_counts_from_arrival_at_the_service_not_at_the_engine():
    rig = rig_of()
    rig.now_s = 10.0
    rig.engine.add_request(request(timeout_s=5.0, arrived_s=6.0))
    rig.now_s = 11.5
    (update,) = rig.engine.step()
    assert update.finish_reason == "abort"
    added = [e for e in rig.events.recent() if isinstance(e, RequestAdded)]
    assert [e.arrived_s for e in added] == [6.0]


@pytest.mark.parametrize(("asked", "expected"), [(None, 7.0), (3.0, 3.0), (30.0, 7.0)])
def test_the_engines_timeout_is_the_most_a_request_gets(asked: float | None, expected: float):
    from kvist.engine.engine import Engine

    rig = rig_of()
    engine = Engine(
        rig.scheduler, rig.runner, rig.events, request_timeout_s=7.0, clock=lambda: rig.now_s
    )
    engine.add_request(request(timeout_s=asked, params=SamplingParams(max_tokens=None)))
    rig.now_s = expected - 0.01
    (update,) = engine.step()
    assert update.finish_reason is None
    rig.now_s = expected
    (update,) = engine.step()
    assert update.finish_reason == "abort"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_that_leaves_no_time_is_refused(timeout_s: float):
    with pytest.raises(RequestError, match="timeout=") as caught:
        rig_of().engine.add_request(request(timeout_s=timeout_s))
    assert caught.value.param == "timeout"


def test_all_continuations_end_with_their_request():
    rig = rig_of(max_num_seqs=4)
    params = SamplingParams(max_tokens=None, n=3)
    rig.engine.add_request(request(params=params, timeout_s=5.0))
    for _ in range(3):
        rig.engine.step()
    assert rig.scheduler.num_running == 3
    rig.now_s = 5.0
    last = [update for update in rig.engine.step() if update.is_last]
    assert [update.finish_reason for update in last] == ["abort"]
    assert not rig.engine.has_work
    assert rig.cache.num_used_blocks == 0


def test_nothing_is_kept_of_requests_that_ended():
    rig = rig_of(max_num_seqs=3)
    for n in range(40):
        rig.add((n, 2), 3, timeout_s=1_000.0 + n)
        if n % 5 == 0:
            rig.abort(rig.active[-1])
        rig.step()
    rig.drain()
    door = rig.engine._overload
    assert (len(door._deadlines), len(door._requests), len(door._throughput._begun)) == (0, 0, 0)


# -------------------------------------------------------------------------------------------- pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_rate_is_that_of_a_queue_that_is_never_empty():
    clock = Clock()
    pace = Throughput(clock)
    for n in range(50):
        clock.now_s += 100.0
        pace(RequestScheduled(str(n), 0, 5, False, 5, 0))
        pace(StepDone(5, 1, 0))
    assert pace.leave_rate is None, "that was the rate at which they came"
    pace(StepDone(5, 1, 9))
    for n in range(50, 60):
        clock.now_s += 0.5
        pace(RequestScheduled(str(n), 0, 5, False, 5, 0))
    assert pace.leave_rate == pytest.approx(2.0)
    clock.now_s += 5.0
    assert pace.leave_rate == pytest.approx(1.0), "nobody left: it is slower by now"
    pace(StepDone(5, 1, 0))
    assert pace.leave_rate is None


def decode(pace: Throughput, clock: Clock, names: list[str], step_s: float) -> None:
    clock.now_s += step_s
    pace(StepDone(len(names), len(names), 0, sampled=tuple(names)))


def test_nothing_is_said_of_a_pace_that_nobody_saw():
    pace = Throughput(Clock())
    assert pace.run_s(10, 10, 1) is None


def test_a_run_takes_as_many_steps_as_tokens_are_asked_for():
    clock = Clock()
    pace = Throughput(clock)
    pace(RequestScheduled("a", 0, 5, False, 5, 0))
    for _ in range(500):
        decode(pace, clock, ["a"], 2.0)
    assert pace.run_s(0, 10, 1) == pytest.approx(20.0, rel=0.02)


def test_who_was_cut_off_counts_too():
    """Only one in ten ends by itself: the average of those would be a tenth of the truth."""
    clock = Clock()
    pace = Throughput(clock)
    for n in range(100):
        name = str(n)
        pace(RequestScheduled(name, 0, 5, False, 5, 0))
        for _ in range(5 if n % 10 == 0 else 50):
            decode(pace, clock, [name], 1.0)
        pace(RequestFinished(name, "stop" if n % 10 == 0 else "abort", 5, 50, 0))
    # 4,550 tokens and 10 ends.
    assert pace.num_output_tokens(10_000) == pytest.approx(455, rel=0.3)


def test_a_crowd_makes_each_step_longer_also_before_it_is_there():
    clock = Clock()
    pace = Throughput(clock)
    crowd = [str(n) for n in range(12)]
    for name in crowd:
        pace(RequestScheduled(name, 0, 5, False, 5, 0))
    for n in range(2_000):
        num = 1 + n % 8
        decode(pace, clock, crowd[:num], 0.1 + 0.05 * num)
    assert pace.run_s(0, 1, 4) == pytest.approx(0.3, rel=0.05)
    assert pace.run_s(0, 1, 12) == pytest.approx(0.7, rel=0.1)


def test_prompts_take_time_in_which_others_wait_and_cached_ones_do_not():
    def paced(num_cached: int) -> Throughput:
        clock = Clock()
        pace = Throughput(clock)
        for n in range(1_000):
            pace(RequestScheduled(str(n), num_cached, 100, False, 100, 0))
            reads = 100 - num_cached if n % 2 else 0
            clock.now_s += 1.0 + 0.01 * reads
            pace(StepDone(1 + reads, 2, 0, reads, sampled=("0",)))
        return pace

    none, most = paced(0), paced(90)
    for pace, share in ((none, 1.0), (most, 0.1)):
        longer, shorter = pace.run_s(1_000, 1, 1), pace.run_s(0, 1, 1)
        assert longer is not None
        assert shorter is not None
        assert longer - shorter == pytest.approx(10 * share, rel=0.1)


def test_the_time_in_which_nobody_runs_belongs_to_no_step():
    clock = Clock()
    pace = Throughput(clock)
    for n in range(100):
        clock.now_s += 1_000.0
        pace(RequestScheduled(str(n), 0, 5, False, 5, 0))
        for _ in range(3):
            decode(pace, clock, [str(n)], 1.0)
        pace(RequestFinished(str(n), "length", 5, 3, 0))
        decode(pace, clock, [str(n)], 1.0)
    assert pace.run_s(0, 1, 1) == pytest.approx(1.0, rel=0.01)


def busy_rig(**sizes: Any) -> EngineRig:
    """One at a time, ten steps each; eight have run, and the queue was never empty."""
    rig = rig_of(**sizes)
    for n in range(16):
        rig.add((n, 1, 2), 10)
    rig.step_until(lambda: len(rig.active) == 8)
    rig.step()
    return rig


def test_who_would_not_be_done_in_time_is_turned_away_at_once():
    rig = busy_rig()
    # Seven wait before it: 70 seconds, and 10 to run.
    overload = rig.engine.offer(request(timeout_s=40.0))
    assert overload is not None
    assert overload.reason == "deadline"
    assert 20 <= overload.retry_after_s <= 60
    assert rig.engine.offer(request("y", timeout_s=200.0)) is None
    assert rig.engine.offer(request("z")) is None


def test_the_margin_rests_where_few_are_cut_off():
    margin = Margin()
    margin.in_time()
    assert margin.value == Margin.LEAST
    for _ in range(10):
        margin.cut_off()
    risen = margin.value
    assert risen == pytest.approx(Margin.LEAST + 0.2)
    for _ in range(49):
        margin.in_time()
    margin.cut_off()
    assert margin.value == pytest.approx(risen), "one of fifty is what is aimed at"
    for _ in range(100):
        margin.cut_off()
    assert margin.value == Margin.MOST
    for _ in range(5_000):
        margin.in_time()
    assert margin.value == Margin.LEAST


def test_those_cut_off_in_the_middle_raise_the_margin_and_those_that_never_began_do_not():
    rig = rig_of()
    margin = rig.engine._overload._margin
    rig.add((1, 2), 50, timeout_s=3.5)
    rig.add((1, 2, 3), 5, timeout_s=3.5)
    rig.drain()
    assert rig.counts["deadlines"] == 2
    assert margin.value == pytest.approx(Margin.LEAST + 0.02)
    rig.add((1, 2), 2, timeout_s=30.0)
    rig.drain()
    assert Margin.LEAST < margin.value < Margin.LEAST + 0.02


def test_who_has_become_hopeless_ends_before_it_begins():
    rig = busy_rig()
    # Taken without asking, so that it is in the queue.
    rig.engine.add_request(
        request(timeout_s=15.0, params=SamplingParams(max_tokens=20, temperature=0.0))
    )
    ended = []
    while not ended:
        ended = [u for u in rig.engine.step() if u.request_id == "x"]
        rig.now_s += 1.0
    (update,) = ended
    assert update.finish_reason == "abort"
    assert update.error is not None
    assert "it was not begun" in update.error


def test_an_idle_engine_begins_whatever_comes():
    rig = busy_rig()
    rig.drain()
    assert rig.add((5, 6), 2, timeout_s=4.0), "others ran ten seconds; nobody waits"
    rig.drain()
    assert rig.stories["r16"].finish_reason == "length"


def test_retry_after_follows_the_pace():
    slow, quick = (busy_rig(max_num_queued_tokens=50) for _ in range(2))
    slow.now_s += 500.0
    long = request(prompt_token_ids=(1,) * 40)
    overloads = [rig.engine.offer(long) for rig in (slow, quick)]
    first, second = (o.retry_after_s for o in overloads if o is not None)
    assert first == 120
    assert 20 <= second <= 60


def test_under_overload_those_that_are_taken_are_done_in_time():
    """Five come for each that can be served; a plain queue would let all of them rot."""
    rig = rig_of()
    taken = 0
    for second in range(1_500):
        if second % 2 == 0:
            taken += rig.add((second % 61, 1, 2), 10, timeout_s=40.0) is not None
        rig.step()
    rig.drain()
    finished = rig.counts["finish: length"]
    assert finished >= 0.9 * 1_500 / 10
    assert rig.counts["deadlines"] <= 0.1 * finished, "cut off in the middle: wasted"
    assert taken == finished + rig.counts["deadlines"] + rig.counts["hopeless"]
