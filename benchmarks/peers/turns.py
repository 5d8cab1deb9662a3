"""One engine's turn: start it, measure, end it. What fails leaves its reason.

Owns the order within a turn and the time limits. Knows no engine by name.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.child import CallError, Driver, DriverError
from benchmarks.peers.measures import (
    Engine,
    Lengths,
    Measure,
    Read,
    first_tokens,
    measures,
    own_measures,
    warm_up,
)
from benchmarks.peers.results import Record

_START_LIMIT_S = 400.0
_PROBE_TOKENS = 16
_CHEAP_S = 6.0
"""What takes less is taken twice in a turn: a second sample for less than a second start."""
_START_GUESS_S = 40.0
"""Of an engine that was only started with code to compile so far."""


@dataclass(frozen=True)
class Launch:
    """How a driver is run.

    Attributes
    ----------
    command : sequence of str
    environ : dict of str to str
    options : dict
        It is opened with them.
    log : Path
    keeps_prefixes, is_ours : bool
    is_cold : bool
        Whether this start has code to compile that later ones find.
    """

    command: Sequence[str]
    environ: dict[str, str]
    options: dict[str, Any]
    log: Path
    keeps_prefixes: bool
    is_ours: bool
    is_cold: bool


@dataclass(frozen=True)
class Turn:
    """What is to be done in a turn.

    Attributes
    ----------
    lengths : Lengths
    seed : str
        Of the prompts: the same for every engine, another in every turn.
    left_out : collection of str
        Measures that were too slow or failed before, or that nobody asked for.
    say : callable
        Told what was found.
    limit_s : float
        For one answer of an engine.
    read : callable
        Measures how fast memory is read; see `measures.Read`.
    """

    lengths: Lengths
    seed: str
    left_out: Collection[str]
    say: Callable[[str], None]
    limit_s: float
    read: Read

    def draw(self, name: str) -> random.Random:
        """Return the source of prompts of one measure, whichever others were left out."""
        return random.Random(f"{self.seed} {name}")


def take_turn(launch: Launch, record: Record, turn: Turn) -> None:
    """Run a driver once through its measures; note numbers and reasons in `record`."""
    with Driver(launch.command, launch.environ, launch.log) as driver:
        engine = Engine(
            lambda name, **arguments: driver.call(name, turn.limit_s, **arguments),
            launch.keeps_prefixes,
        )
        try:
            driver.call("open", _START_LIMIT_S, **launch.options)
            first_tokens(engine, 1)
            start_s = time.perf_counter() - driver.started_s
            turn.say(f"first token after {start_s:.1f} s")
            record.first_tokens = first_tokens(engine, _PROBE_TOKENS)
            warm_up(engine, turn.lengths, turn.draw("warm-up"))
        except (CallError, DriverError, ValueError) as error:
            record.reasons["start"] = str(error)
            turn.say(f"does not start: {error}")
            return
        record.add({"start_cold_s" if launch.is_cold else "start_s": start_s})
        took_s = time.perf_counter() - driver.started_s
        record.cost_s["start"] = _START_GUESS_S if launch.is_cold else took_s
        try:
            _take_all(measures(turn.lengths), engine, record, turn)
            facts = engine.call("facts")
            record.settings, record.kv_token_bytes = facts["settings"], facts["kv_token_bytes"]
            memory = driver.memory()
            record.add({f"memory_{kind}": float(value) for kind, value in memory.items()})
            if launch.is_ours:
                _take_all(own_measures(turn.read), engine, record, turn)
        except (CallError, DriverError) as error:
            turn.say(f"ends its turn here: {error}")


def _take_all(
    named: Iterator[tuple[str, Measure]], engine: Engine, record: Record, turn: Turn
) -> None:
    """Take measures in order; raises `DriverError` when there is nobody left to ask."""
    for name, measure in named:
        if name in turn.left_out:
            continue
        record.taken[name] = record.taken.get(name, 0) + 1
        try:
            for again in range(2):
                begun_s = time.perf_counter()
                found = measure(engine, turn.lengths, turn.draw(f"{name} {again}"))
                took_s = time.perf_counter() - begun_s
                record.add(found)
                record.cost_s[name] = took_s * (1 + again)
                turn.say(f"{name}: {', '.join(f'{k} {v:,.4g}' for k, v in found.items())}")
                if took_s > _CHEAP_S:
                    break
        except (CallError, DriverError, ValueError, ZeroDivisionError) as error:
            record.reasons[name] = str(error)
            turn.say(f"{name}: {error}")
            if isinstance(error, DriverError):
                raise
