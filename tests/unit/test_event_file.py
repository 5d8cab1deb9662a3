"""``--event-log``: a line an event, no text of users, a bounded file."""

from __future__ import annotations

import json

import pytest

from kvist.engine.event_file import EventFile
from kvist.errors import ConfigError
from kvist.events import BlockStored, LoadFailed, RequestFinished, StepDone
from kvist.keys import BlockKey

KEY = BlockKey(bytes(range(32)))


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_say_what_happened_and_not_what_was_written(tmp_path):
    path, clock = tmp_path / "log", Clock()
    log = EventFile(path, clock=clock)
    log(BlockStored(3, KEY, KEY, 0, (72, 105)))
    log.flush()
    (line,) = lines(path)
    assert line == {
        "t": 1000.0,
        "event": "BlockStored",
        "block_id": 3,
        "key": KEY.hex()[:16],
        "parent": KEY.hex()[:16],
        "depth": 0,
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_went_wrong_is_there_at_once_and_the_rest_within_a_second(tmp_path):
    path, clock = tmp_path / "log", Clock()
    log = EventFile(path, clock=clock)
    log(StepDone(1, 1, 0))
    assert lines(path) == []
    log(LoadFailed("disk", 1, "damaged", "checksum"))
    assert len(lines(path)) == 2
    log(RequestFinished("a", "stop", 1, 1, 0))
    clock.now += 0.06
    log(StepDone(1, 1, 0))
    assert len(lines(path)) == 4
    log(StepDone(1, 1, 0))
    clock.now += 1.0
    log(StepDone(1, 1, 0))
    assert len(lines(path)) == 6


def test_the_file_is_bounded(tmp_path):
    path = tmp_path / "log"
    log = EventFile(path, max_bytes=2000)
    for _ in range(100):
        log(LoadFailed("disk", 1, "damaged", "x" * 100))
    old = path.with_name("log.1")
    assert path.stat().st_size <= 2000
    assert old.stat().st_size <= 2000
    assert all(line["event"] == "LoadFailed" for line in lines(path) + lines(old))


def test_a_file_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="event-log"):
        EventFile(tmp_path / "none" / "log")
