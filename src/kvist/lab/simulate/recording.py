"""Read a recording: the header, what came in and when, how steps went.

Owns the reader of what `kvist.engine.recording` writes. A last line that was cut off, by a crash or
a full disk, is left out; anything else that is not as it should be is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.engine.recording import SCHEMA
from kvist.errors import ConfigError
from kvist.lab.simulate.script import Numbers, Script


@dataclass(frozen=True, slots=True)
class Given:
    """A request as it came in.

    Attributes
    ----------
    arrival_s : float
        Since the recording began.
    """

    request_id: str
    arrival_s: float
    num_prompt: int
    max_tokens: int | None
    num_samples: int
    priority: int
    wants_prompt_logprobs: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended.

    `blocks` are the numbers of its full blocks behind those of its prompt.
    """

    step: int
    why: str
    num_output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """Something asked of the scheduler, after `step` plans had been made.

    `kind` is ``add``, ``abort``, ``fail`` or ``fork``; `index` is of an abort, `of` of a fork.
    """

    step: int
    kind: str
    request_id: str
    at_s: float = 0.0
    index: int | None = None
    of: str = ""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What was in a step and how long it took.

    Attributes
    ----------
    decoded : int
        Sequences that computed one token.
    read : int
        Tokens of the longer runs.
    context : int
        Tokens that the former attend to, all together.
    pairs : int
        Pairs of query and key of the latter.
    seconds : float
        From the end of the step before it, or from its own beginning after a rest.
    """

    decoded: int
    read: int
    context: int
    pairs: int
    seconds: float


@dataclass(slots=True)
class Recording:
    """A recording, read.

    Attributes
    ----------
    header : mapping
    numbers : Numbers
        Of all blocks.
    given : dict of request id to Given
    operations : list of Operation
        In their order.
    ends : dict of sequence id to End
    steps : dict of step to StepRow
    only : dict of step to set of sequence id
    rollbacks : set of int
    was_cut : bool
        Whether the last line was half written.
    """

    header: Mapping[str, Any]
    numbers: Numbers = field(default_factory=Numbers)
    given: dict[str, Given] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    ends: dict[str, End] = field(default_factory=dict)
    steps: dict[int, StepRow] = field(default_factory=dict)
    only: dict[int, frozenset[str]] = field(default_factory=dict)
    rollbacks: set[int] = field(default_factory=set)
    was_cut: bool = False

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        last = self.operations[-1].step if self.operations else 0
        # Ends and operations are written at once, rows of steps a little later.
        last = max(last, *(end.step for end in self.ends.values()), 0)
        return max(last, max(self.steps, default=0))

    def script(self, sequence_id: str) -> Script:
        """Return what a sequence said."""
        given = self.given.get(sequence_id) or self.given[sequence_id.rpartition("#")[0]]
        end = self.ends.get(sequence_id)
        if end is None:
            return Script(given.num_prompt, given.blocks)
        stops = end.num_output if end.why == "stop" else None
        fails_in = end.step if end.why == "error" else None
        return Script(given.num_prompt, (*given.blocks, *end.blocks), stops, fails_in)


def is_recording(first_line: str) -> bool:
    """Whether a file that begins so is a recording, of whatever version."""
    return '"kvist.recording.' in first_line[:200]


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises
    ------
    ConfigError
        If it cannot be read, is none, is of another version, or a line in it is damaged.
    """
    lines = _lines(path)
    number, first = next(lines, (1, {}))
    if first is None or first.get("schema") != SCHEMA:
        found = None if first is None else first.get("schema")
        raise ConfigError(
            f"{path}: no recording of schema {SCHEMA} (it says {found!r}); make one with --record"
        )
    recording = Recording(first)
    for number, line in lines:
        if line is None:
            recording.was_cut = True
            break
        try:
            _take(recording, line)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not of a recording: {error!r}") from error
    return recording


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the lines with their numbers; ``None`` for a last one that is half written."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            # Without its end of line: somebody was writing it.
            if number == len(lines):
                yield number, None
                return
            raise ConfigError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}, line {number}: not an object")
        yield number, found


def _take(recording: Recording, line: Mapping[str, Any]) -> None:
    kind = line["k"]
    if kind == "steps":
        for step, row in enumerate(line["rows"], start=line["first"]):
            recording.steps[step] = StepRow(*row)
    elif kind == "end":
        blocks = tuple(recording.numbers.of(line["keys"]))
        recording.ends[line["id"]] = End(line["step"], line["why"], line["out"], blocks)
    elif kind == "only":
        recording.only[line["step"]] = frozenset(line["ids"])
    elif kind == "rollback":
        recording.rollbacks.add(line["step"])
    elif kind in ("add", "abort", "fail", "fork"):
        request_id = line["id"]
        recording.operations.append(
            Operation(
                line["step"],
                kind,
                request_id,
                line.get("t", 0.0),
                line.get("index"),
                line.get("of", ""),
            )
        )
        if kind == "add":
            recording.given[request_id] = Given(
                request_id,
                line["t"],
                line["prompt"],
                line["max_tokens"],
                line.get("n", 1),
                line.get("priority", 0),
                line.get("prompt_logprobs", False),
                tuple(recording.numbers.of(line["keys"])),
            )
        elif kind == "fork":
            recording.given[request_id] = recording.given[line["of"]]
    else:
        raise ValueError(f"there is no kind {kind!r}")
