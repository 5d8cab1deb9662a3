"""The numbers are the truth: counters against a ledger of every token, times against a script.

Guards against a hit that is counted twice (or although its step was taken back), a preempted
request whose own blocks pass for reuse, and records that stay of requests that ended.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepPlan, StepResult, Update
from kvist.engine.telemetry import HistogramCounts, Telemetry
from kvist.events import EventLog, RequestPreempted, StepDone, StepFailed
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig


def rig_of(**sizes: Any) -> EngineRig:
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 100}
    defaults |= {"max_num_seqs": 8, "max_num_batched_tokens": 32}
    return EngineRig(RigConfig(**{**defaults, **sizes}))


class Ledger:
    """Every token of every committed plan: who had its K and V before, and from where."""

    def __init__(self, rig: EngineRig) -> None:
        self.counts: Counter[str] = Counter()
        self._rig = rig
        self._had: dict[str, set[int]] = {}
        self._commit = rig.scheduler.commit
        rig.scheduler.commit = self._record  # type: ignore[method-assign]

    def _record(self, plan: StepPlan, result: StepResult) -> list[Update]:
        aborted = {
            name for name, seq in self._rig.scheduler._sequences.items() if seq.abort_requested
        }
        for item in plan.scheduled:
            story = self._rig.stories[item.request_id]
            num_prompt = len(story.prompt)
            had = self._had.setdefault(item.request_id, set())
            for position in range(item.position):
                if position not in had:
                    had.add(position)
                    self.counts["cached"] += position < num_prompt
            if item.request_id in aborted or item.request_id in result.failed:
                continue
            for position in range(item.position, item.position + len(item.token_ids)):
                if position in had:
                    self.counts["recomputed"] += 1
                else:
                    self.counts["computed"] += position < num_prompt
                had.add(position)
            self.counts["generated"] += item.sample is not None
        return self._commit(plan, result)


def disturbed(seed: int, **sizes: Any) -> tuple[EngineRig, Ledger]:
    """Shared prefixes, preemption, aborts, failing steps and plans taken back."""
    rng = random.Random(seed)
    rig = rig_of(num_blocks=16, max_model_len=50, max_num_batched_tokens=12, **sizes)
    ledger = Ledger(rig)
    bases = [tuple(rng.randrange(61) for _ in range(30)) for _ in range(2)]
    for _ in range(600):
        if len(rig.active) < 6 and rng.random() < 0.4:
            base = rng.choice(bases)[: rng.randint(3, 30)]
            rig.add((*base, rng.randrange(61)), rng.choice((1, 5, 15)))
        if rig.active and rng.random() < 0.05:
            rig.abort(rng.choice(rig.active))
        if rng.random() < 0.05:
            rig.schedule_and_roll_back()
        if rng.random() < 0.05:
            rig.runner.raise_next = 1
        if rig.active and rng.random() < 0.01:
            rig.runner.not_finite.add(rng.choice(rig.active))
        rig.step()
    rig.drain()
    return rig, ledger


@pytest.mark.parametrize("seed", range(4))
def test_counters_equal_a_ledger_of_every_token(seed: int):
    rig, ledger = disturbed(seed)
    assert rig.events.counts[RequestPreempted] > 5
    assert rig.events.counts[StepFailed] > 5
    assert rig.counts["rollbacks"] > 5
    truth = ledger.counts
    counters = rig.telemetry.counts().counters
    found = {
        "cached": counters["prompt_cached"],
        "computed": counters["prompt_computed"],
        "recomputed": counters["recomputed"],
        "generated": counters["generated"],
    }
    assert found == dict(truth)
    assert min(found.values()) > 0
    assert counters["preemptions"] == rig.events.counts[RequestPreempted]
    assert counters["failed_steps"] == rig.events.counts[StepFailed]
    assert rig.telemetry.counts().finished == {
        reason: rig.counts[f"finish: {reason}"]
        for reason in ("length", "abort", "error")
        if rig.counts[f"finish: {reason}"]
    }


def test_without_the_cache_nothing_is_looked_up():
    rig, ledger = disturbed(0, enable_prefix_caching=False)
    counters = rig.telemetry.counts().counters
    assert counters["prefix_queries"] == counters["prefix_hits"] == counters["prompt_cached"] == 0
    assert counters["recomputed"] == ledger.counts["recomputed"] > 0


def test_a_hit_is_counted_once_in_tokens_of_the_first_admission():
    rig = rig_of()
    rig.add(tuple(range(30)), 2)
    rig.drain()
    rig.add(tuple(range(30)), 2)
    rig.schedule_and_roll_back()
    rig.schedule_and_roll_back()
    assert rig.telemetry.counts().counters["prefix_hits"] == 0
    rig.drain()
    counters = rig.telemetry.counts().counters
    assert (counters["prefix_queries"], counters["prefix_hits"]) == (60, 28)
    assert (counters["prompt_computed"], counters["prompt_cached"]) == (30 + 2, 28)
    assert counters["recomputed"] == 0


def test_the_blocks_of_a_preempted_request_are_no_hits():
    rig = rig_of(num_blocks=10, max_model_len=40)
    rig.add(tuple(range(15)), 20)
    rig.add(tuple(range(20, 35)), 20)
    rig.drain()
    assert rig.counts["hits after preemption"] > 0
    counters = rig.telemetry.counts().counters
    assert counters["prefix_hits"] == counters["prompt_cached"] == 0
    assert counters["prefix_queries"] == counters["prompt_computed"] == 30
    assert counters["generated"] == 40


def test_who_wants_logits_of_the_prompt_does_not_ask_the_cache():
    rig = rig_of()
    rig.add(tuple(range(30)), 2)
    rig.drain()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    rig.engine.add_request(
        EngineRequest(request_id="x", prompt_token_ids=tuple(range(30)), params=params)
    )
    while rig.engine.has_work:
        rig.engine.step()
    assert rig.telemetry.counts().counters["prefix_queries"] == 30


def test_continuations_of_one_prompt_are_no_hits_of_each_other():
    rig = rig_of()
    params = SamplingParams(max_tokens=4, temperature=0.0, n=3)
    rig.engine.add_request(
        EngineRequest(request_id="x", prompt_token_ids=tuple(range(30)), params=params)
    )
    while rig.engine.has_work:
        rig.engine.step()
    counts = rig.telemetry.counts()
    assert counts.counters["prefix_hits"] == 0
    assert counts.counters["prompt_computed"] == 30
    assert counts.counters["recomputed"] == 2, "the last prompt token, once for each of the others"
    assert counts.counters["generated"] == 12
    assert counts.finished == {"length": 3}


# ------------------------------------------------------------------------------------------- times


def observed(histogram: HistogramCounts) -> tuple[int, float]:
    return sum(histogram.counts), pytest.approx(histogram.total)


def test_times_are_those_of_the_script():
    """One at a time; a step takes a second, and what it brings is seen at its end."""
    rig = rig_of(max_num_seqs=1)
    rig.now_s = 100.0
    for arrived_s in (98.0, 99.5):
        params = SamplingParams(max_tokens=3, temperature=0.0)
        rig.engine.add_request(
            EngineRequest(
                request_id=str(arrived_s),
                prompt_token_ids=(1, 2, 3),
                params=params,
                arrived_s=arrived_s,
            )
        )
    while rig.engine.has_work:
        rig.engine.step()
        rig.now_s += 1.0
    histograms = rig.telemetry.counts().histograms
    # Tokens at 100, 101, 102 and at 103, 104, 105.
    assert observed(histograms["time_to_first_token_seconds"]) == (2, 2.0 + 3.5)
    assert observed(histograms["request_queue_time_seconds"]) == (2, 2.0 + 3.5)
    assert observed(histograms["request_prefill_time_seconds"]) == (2, 0.0)
    assert observed(histograms["inter_token_latency_seconds"]) == (4, 4.0)
    assert observed(histograms["request_decode_time_seconds"]) == (2, 4.0)
    assert observed(histograms["request_inference_time_seconds"]) == (2, 4.0)
    assert observed(histograms["request_time_per_output_token_seconds"]) == (2, 2.0)
    assert observed(histograms["e2e_request_latency_seconds"]) == (2, 4.0 + 5.5)
    assert observed(histograms["request_prompt_tokens"]) == (2, 6)
    assert observed(histograms["request_generation_tokens"]) == (2, 6)
    assert observed(histograms["iteration_tokens_total"]) == (6, 2 * (3 + 1 + 1))


def test_a_gap_lasts_while_a_sequence_has_no_blocks():
    rig = rig_of(num_blocks=10, max_model_len=40, enable_prefix_caching=False)
    rig.add(tuple(range(15)), 20)
    rig.add(tuple(range(20, 35)), 20)
    last: dict[str, float] = {}
    gaps: list[float] = []
    while rig.engine.has_work:
        for update in rig.engine.step():
            if update.request_id in last:
                gaps.append(rig.now_s - last[update.request_id])
            last[update.request_id] = rig.now_s
        rig.now_s += 1.0
    assert max(gaps) > 1.0, "somebody was preempted"
    histogram = rig.telemetry.counts().histograms["inter_token_latency_seconds"]
    assert observed(histogram) == (len(gaps), sum(gaps))


def test_bounds_are_inclusive_and_beyond_them_nothing_is_lost():
    events = EventLog()
    telemetry = Telemetry(events, max_model_len=100)
    for num_tokens in (1, 8, 9, 20_000):
        events.emit(StepDone(num_tokens, 1, 0))
    histogram = telemetry.counts().histograms["iteration_tokens_total"]
    assert histogram.bounds[:3] == (1.0, 8.0, 16.0)
    assert histogram.counts[:3] == (1, 1, 1)
    assert histogram.counts[-1] == 1
    assert telemetry.counts().histograms["request_prompt_tokens"].bounds == (
        *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
    )


# ----------------------------------------------------------------------------------------- bounded


def test_nothing_is_kept_of_sequences_that_ended():
    rig, _ = disturbed(1)
    assert not rig.telemetry._lives
    assert not rig.telemetry._ended
    assert len(rig.telemetry._sampled) <= rig.config.max_num_seqs


def test_what_the_log_forgets_is_counted():
    events = EventLog(capacity=4)
    telemetry = Telemetry(events, max_model_len=100)
    for _ in range(10):
        events.emit(StepDone(1, 1, 0))
    counters = telemetry.counts().counters
    assert (counters["steps"], counters["dropped_events"]) == (10, 6)


def test_reasons_are_words_of_ours():
    rig, _ = disturbed(2, max_num_queued_reqs=2)
    counts = rig.telemetry.counts()
    assert set(counts.finished) <= {"stop", "length", "abort", "error"}
    assert set(counts.rejected) == {"queued_reqs"}
    assert counts.rejected["queued_reqs"] == rig.counts["rejected: queued_reqs"]
