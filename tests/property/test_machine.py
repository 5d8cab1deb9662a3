"""Whatever happens in whatever order: every request gets its tokens, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvist.testing.cache_machine import CacheMachine
from kvist.testing.loading_machine import LoadingMachine
from kvist.testing.machine import EngineMachine, TieredMachine

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def run(machine: type, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            suppress_health_check=SLOW_TO_DRAW,
        ),
    )


def test_engine():
    run(EngineMachine, max_examples=250, steps=50)


def test_engine_over_tiers():
    run(TieredMachine, max_examples=120, steps=50)


def test_cache():
    run(CacheMachine, max_examples=150, steps=50)


def test_cache_that_loads():
    run(LoadingMachine, max_examples=250, steps=50)


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("machine", [EngineMachine, TieredMachine, CacheMachine, LoadingMachine])
def test_many_more(machine: type):
    run(machine, max_examples=3_000, steps=80)
