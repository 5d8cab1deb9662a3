"""A dead server costs once; when to look again; who may not make that longer."""

from __future__ import annotations

import pytest

from kvist.tiers.breaker import CircuitBreaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(clock, least_wait_s=1.0, longest_wait_s=5.0)


def test_it_is_closed_until_something_fails(breaker):
    assert not breaker.is_open
    assert breaker.probe_s is None
    assert not breaker.probe_is_due()
    assert breaker.reason == ""


def test_one_failure_opens_it_and_a_probe_is_due_after_a_while(breaker, clock):
    breaker.fail("refused")
    assert breaker.is_open
    assert breaker.reason == "refused"
    assert not breaker.probe_is_due()
    clock.now += 0.999
    assert not breaker.probe_is_due()
    clock.now += 0.001
    assert breaker.probe_is_due()
    assert breaker.is_open, "only an answer closes it, not time"


def test_every_failed_probe_doubles_the_wait_up_to_a_limit(breaker, clock):
    waits = []
    breaker.fail("refused")
    for _ in range(5):
        waits.append(breaker.probe_s - clock.now)
        clock.now = breaker.probe_s
        breaker.fail("refused")
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_those_who_were_under_way_do_not_make_the_wait_longer(breaker, clock):
    """Ten requests that hit the same dead server are one failure."""
    breaker.fail("timeout")
    for _ in range(10):
        clock.now += 0.01
        breaker.fail("timeout of another")
    assert breaker.probe_s == 101.0
    assert breaker.num_failures == 11


def test_an_answered_probe_closes_it_and_forgets_the_past(breaker, clock):
    for _ in range(3):
        breaker.fail("refused")
        clock.now = breaker.probe_s
    breaker.succeed()
    assert not breaker.is_open
    assert breaker.reason == ""
    breaker.fail("refused again")
    assert breaker.probe_s == clock.now + 1.0
