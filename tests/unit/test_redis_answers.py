"""What is known of a block for a moment, and which of two answers is the newer one."""

from __future__ import annotations

import pytest

pytest.importorskip("xxhash", reason="tiers need the tiers extra")

from kvist.tiers.base import Lookup, LookupStatus
from kvist.tiers.redis.answers import Answers, ShortMemory

HIT = Lookup(LookupStatus.HIT, 10)
MISS = Lookup(LookupStatus.MISS, reason="absent")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def answers(clock):
    return Answers(clock)


def test_values_are_kept_for_a_while_and_the_latest_only(clock):
    memory = ShortMemory(limit=2, keep_s=5.0, clock=clock)
    for name in (b"a", b"b", b"a", b"c"):
        memory.put(name, name)
    assert [memory.get(name) for name in (b"a", b"b", b"c")] == [b"a", None, b"c"]
    clock.now = 5.0
    assert memory.get(b"a") is None
    assert memory.forget(b"a") == b"a", "too old to be used, not to be remembered"
    assert memory.forget(b"a") is None


def test_a_hit_is_remembered_longer_than_a_miss(answers, clock):
    for name, answer in ((b"h", HIT), (b"m", MISS)):
        answers.ask(name)
        answers.heard(name, answer)
    clock.now = 2.0
    assert (answers.get(b"h"), answers.get(b"m")) == (HIT, None)


def test_an_answer_that_came_in_between_is_not_asked_for_again(answers):
    assert answers.ask(b"x") is None
    answers.heard(b"x", HIT)
    assert answers.ask(b"x") == HIT
    assert answers.wanted() == []


def test_what_nobody_asked_for_is_not_heard(answers):
    answers.heard(b"x", HIT)
    assert answers.get(b"x") is None


def test_a_miss_that_was_on_its_way_does_not_hide_what_was_stored_since(answers):
    answers.ask(b"x")
    answers.stored(b"x", HIT)
    answers.heard(b"x", MISS)
    assert answers.get(b"x") == HIT


def test_a_hit_that_was_on_its_way_does_not_bring_back_what_was_deleted_since(answers):
    answers.ask(b"x")
    assert not answers.deleted(b"x", MISS)
    answers.heard(b"x", HIT)
    assert answers.get(b"x") == MISS


def test_what_was_stored_and_deleted_at_the_same_time_is_asked_for(answers, clock):
    """Which of the two came first at the server, only the server knows."""
    answers.deleted(b"x", MISS)
    answers.stored(b"x", HIT)
    assert answers.get(b"x") is None
    clock.now = 10.0
    answers.stored(b"x", HIT)
    assert answers.get(b"x") == HIT


def test_deleting_tells_what_was_a_hit_and_only_once(answers):
    answers.stored(b"x", HIT)
    assert answers.deleted(b"x", MISS)
    assert not answers.deleted(b"x", MISS)


def test_a_load_that_did_not_find_it_ends_a_hit(answers):
    answers.stored(b"x", HIT)
    answers.gone(b"x")
    assert answers.get(b"x") is None
