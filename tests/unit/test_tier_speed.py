"""Load or recompute: what speeds are learned from, and where a run is cut."""

from __future__ import annotations

import random

import pytest

from kvist.tiers.speed import LoadSpeed, PrefillSpeed
from kvist.tiers.split import choose_cut

MB = 1_000_000


def device(nbytes: int, latency_s: float, rate: float) -> float:
    return latency_s + nbytes / rate


@pytest.mark.parametrize("rate", [10 * MB, 200 * MB, 4000 * MB])
@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_latency_and_rate_are_told_apart(rate: float, latency_s: float):
    speed, rng = LoadSpeed(1e-3, 500 * MB), random.Random(1)
    for _ in range(60):
        nbytes = rng.randint(1, 200) * MB
        speed.observe(nbytes, device(nbytes, latency_s, rate))
    for nbytes in (MB, 50 * MB, 200 * MB):
        expected = device(nbytes, latency_s, rate)
        assert speed.seconds(nbytes) == pytest.approx(expected, rel=0.05, abs=2e-3)


def test_a_few_loads_are_enough_to_leave_a_wrong_belief():
    speed = LoadSpeed(1e-3, 500 * MB)
    for _ in range(4):
        speed.observe(20 * MB, 2.0)
    assert speed.seconds(20 * MB) == pytest.approx(2.0, rel=0.35)


def test_it_follows_a_device_that_becomes_slow():
    speed, rng = LoadSpeed(1e-3, 500 * MB), random.Random(2)
    for rate in (1000 * MB, 20 * MB):
        for _ in range(40):
            nbytes = rng.randint(5, 100) * MB
            speed.observe(nbytes, nbytes / rate)
        assert speed.seconds(50 * MB) == pytest.approx(50 * MB / rate, rel=0.2)


def test_nothing_is_learned_from_nothing():
    speed = LoadSpeed(1e-3, 500 * MB)
    before = speed.seconds(MB)
    speed.observe(0, 1.0)
    speed.observe(MB, 0.0)
    assert speed.seconds(MB) == before


def test_prefill_is_learned_from_steps_that_read_prompts():
    speed = PrefillSpeed()
    assert speed.tokens_per_s is None
    speed.observe(1, 1.0)
    assert speed.tokens_per_s is None
    for _ in range(20):
        speed.observe(2048, 4.0)
    assert speed.tokens_per_s == pytest.approx(512)


def linear(n: int, latency_s: float, block_s: float) -> list[float]:
    return [latency_s + (n - k) * block_s for k in range(n)]


def test_a_fast_tier_loads_everything_and_a_hopeless_one_nothing():
    assert choose_cut(linear(100, 1e-3, 1e-4), 0.04)[0] == 0
    assert choose_cut(linear(100, 100.0, 1.0), 0.04)[0] == 100
    assert choose_cut([], 0.04)[0] == 0


def test_without_a_measurement_everything_is_loaded():
    assert choose_cut(linear(10, 5.0, 5.0), None) == (0, 55.0)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_a_split_takes_no_longer_than_the_better_extreme(ratio: float):
    n, compute_s = 200, 0.01
    load_s = linear(n, 0.05, ratio * compute_s)
    cut, end_s = choose_cut(load_s, compute_s)
    assert end_s <= min(load_s[0], n * compute_s)
    # Both ends together: as fast as the two speeds added, but for a block and the latency.
    together = n / (1 / compute_s + 1 / (ratio * compute_s))
    if cut:
        assert end_s == pytest.approx(together, rel=0.1, abs=0.1)
    assert cut < n
    assert (cut > 0) is (ratio > 0.1)


def test_the_cut_is_the_best_one_there_is():
    rng = random.Random(3)
    for _ in range(200):
        n = rng.randint(1, 30)
        compute_s = rng.uniform(0.001, 0.1)
        load_s = linear(n, rng.uniform(0, 0.5), rng.uniform(0.0005, 0.2))
        _, end_s = choose_cut(load_s, compute_s)
        best = min(max(k * compute_s, load_s[k] if k < n else 0.0) for k in range(n + 1))
        assert best <= end_s <= best / 0.9 * 1.03 + 1e-9


def test_a_small_gain_is_not_worth_a_split():
    assert choose_cut(linear(100, 0.0, 0.001), 0.02)[0] == 0
    assert choose_cut(linear(100, 0.0, 0.02), 0.001)[0] == 100


def test_what_a_step_costs_beside_makes_small_heads_dear():
    load_s = linear(32, 0.0, 0.01)
    assert choose_cut(load_s, 0.02)[0] > 0
    assert choose_cut(load_s, 0.02, step_s=0.3)[0] == 0


def test_a_step_and_its_tokens_are_told_apart():
    speed, rng = PrefillSpeed(), random.Random(4)
    for _ in range(60):
        tokens = rng.randint(32, 2048)
        speed.observe(tokens, 0.05 + tokens / 400)
    assert speed.tokens_per_s == pytest.approx(400, rel=0.05)
    assert speed.step_s == pytest.approx(0.05, abs=0.05)
