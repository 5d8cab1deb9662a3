"""Threads of a tier: urgent first, every job told once, nothing lost on close."""

from __future__ import annotations

import threading

import pytest

from kvist.keys import BlockKey
from kvist.tiers.base import LoadJob, Outcome, StoreJob
from kvist.tiers.jobs import QUEUE_FULL, JobThreads, Report

KEYS = (BlockKey(b"a" * 32), BlockKey(b"b" * 32))


def load(job_id, deadline_s=None):
    return LoadJob(job_id, b"", KEYS, range(1), (memoryview(b""),) * 2, deadline_s)


def store(job_id):
    return StoreJob(job_id, b"", KEYS, (memoryview(b""),) * 2, ())


def done(ticket):
    report = Report()
    for _ in range(ticket.num_keys):
        report.add(Outcome.DONE, stored_bytes=10)
    return report


class Gate:
    """Work that waits until it is let go, and notes who was worked on."""

    def __init__(self):
        self.open, self.began, self.order = threading.Event(), threading.Event(), []

    def __call__(self, ticket):
        self.order.append(ticket.job_id)
        self.began.set()
        self.open.wait(10)
        report = Report()
        for _ in range(ticket.num_keys):
            report.add(ticket.verdict() or Outcome.DONE)
        return report


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def threads(gate):
    threads = JobThreads("test", 1, max_queued_jobs=3)
    yield threads
    gate.open.set()
    threads.close()


def test_a_job_is_told_once_with_its_sums(threads):
    threads.submit(load(7), done)
    assert threads.drain(10)
    (ended,) = threads.poll()
    assert (ended.job_id, ended.outcomes, ended.stored_bytes) == (7, (Outcome.DONE,) * 2, 20)
    assert threads.poll() == []
    assert threads.num_unfinished == 0


def test_loads_overtake_stores_that_wait(threads, gate):
    threads.submit(store(1), gate)
    gate.began.wait(10)
    threads.submit(store(2), gate)
    threads.submit(load(3), gate)
    gate.open.set()
    assert threads.drain(10)
    assert gate.order == [1, 3, 2]


def test_what_finds_the_queue_full_is_answered_at_once(threads, gate):
    threads.submit(store(0), gate)
    gate.began.wait(10)
    for job_id in range(1, 5):
        threads.submit(store(job_id), gate)
        threads.submit(load(10 + job_id), gate)
    answers = {ended.job_id: ended for ended in threads.poll()}
    assert {job_id: (e.outcomes[0], e.reason) for job_id, e in answers.items()} == {
        4: (Outcome.REFUSED, QUEUE_FULL),
        14: (Outcome.FAILED, QUEUE_FULL),
    }


def test_a_cancelled_job_still_ends_and_only_then(threads, gate):
    threads.submit(load(1), gate)
    gate.began.wait(10)
    threads.submit(load(2), gate)
    threads.cancel(1)
    threads.cancel(2)
    threads.cancel(99)
    assert threads.poll() == [], "its buffers are still in use"
    gate.open.set()
    assert threads.drain(10)
    assert [ended.outcomes for ended in threads.poll()] == [(Outcome.CANCELLED,) * 2] * 2
    assert gate.order == [1], "the second one need not begin"


def test_a_job_that_begins_too_late_is_late(gate):
    now = [0.0]
    threads = JobThreads("test", 1, clock=lambda: now[0])
    threads.submit(load(1), gate)
    gate.began.wait(10)
    threads.submit(load(2, deadline_s=5.0), done)
    threads.submit(load(3, deadline_s=7.0), done)
    now[0] = 6.0
    gate.open.set()
    assert threads.drain(10)
    assert [ended.outcomes[0] for ended in threads.poll()] == ["done", "late", "done"]
    threads.close()


def test_an_error_in_the_work_is_an_outcome(threads):
    def broken(ticket):
        raise OSError("the disk fell out")

    threads.submit(load(1), broken)
    threads.submit(load(2), done)
    assert threads.drain(10)
    first, second = threads.poll()
    assert first.outcomes == (Outcome.FAILED,) * 2
    assert first.reason == "OSError: the disk fell out"
    assert second.outcomes[0] is Outcome.DONE, "the thread lives on"


def test_draining_gives_up_when_told(threads, gate):
    threads.submit(load(1), gate)
    assert not threads.drain(0.01)


def test_the_waker_is_called_for_every_end(threads, gate):
    woken = threading.Event()
    threads.set_waker(woken.set)
    threads.submit(load(1), done)
    assert woken.wait(10)


def test_closing_ends_every_job_and_thread(gate):
    threads = JobThreads("closing", 2)
    for job_id in range(6):
        threads.submit(store(job_id), gate)
    gate.began.wait(10)
    gate.open.set()
    threads.close()
    threads.submit(store(6), done)
    assert sorted(ended.job_id for ended in threads.poll()) == list(range(7))
    assert not [t for t in threading.enumerate() if t.name.startswith("kvist-closing")]
    threads.close()
