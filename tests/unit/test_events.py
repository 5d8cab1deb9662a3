"""Events are told to everyone at once, counted for ever, and remembered for a while."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from kvist.events import BlocksShared, Event, EventLog, RequestAdded, StepDone


def test_the_log_is_bounded_and_says_what_it_dropped():
    log = EventLog(capacity=3)
    for n in range(5):
        log.emit(StepDone(n, 1, 0))
    assert [event.num_tokens for event in log.recent()] == [2, 3, 4]
    assert log.num_dropped == 2


def test_counts_outlive_the_memory():
    log = EventLog(capacity=1)
    for n in range(4):
        log.emit(StepDone(n, 1, 0))
    log.emit(RequestAdded("a", 3))
    assert log.counts == {StepDone: 4, RequestAdded: 1}
    assert log.counts[BlocksShared] == 0


def test_every_listener_hears_every_event_from_its_subscription_on_in_order():
    log = EventLog(capacity=1)
    early: list[Event] = []
    late: list[Event] = []
    log.subscribe(early.append)
    log.emit(RequestAdded("a", 1))
    log.subscribe(late.append)
    log.emit(RequestAdded("b", 1))
    assert [event.request_id for event in early] == ["a", "b"]
    assert [event.request_id for event in late] == ["b"]


def test_a_look_at_the_log_is_a_copy():
    log = EventLog()
    log.emit(RequestAdded("a", 1))
    before = log.recent()
    log.emit(RequestAdded("b", 1))
    assert len(before) == 1


def test_events_are_frozen():
    event = RequestAdded("a", 1)
    with pytest.raises(FrozenInstanceError):
        event.request_id = "b"  # type: ignore[misc]
