"""Files of traces -> a workload: which kind a file is, and how each kind is read.

Owns the forms of published traces. An id of Mooncake's or of a Claude Code session stands for a
block with everything before it; one of RAGPulse's for a piece of content, so that here the prefixes
are put together from the pieces. Azure's files have lengths alone.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from kvist.errors import ConfigError
from kvist.lab.simulate.recording import Recording, is_recording, read_recording
from kvist.lab.simulate.script import Numbers
from kvist.lab.simulate.workload import (
    SimRequest,
    Workload,
    by_arrival,
    choose_block_size,
    cut_blocks,
)
from kvist.lab.traces import MOONCAKE_BLOCK_TOKENS

DEFAULT_BLOCK_SIZE = 16
SESSION_GAP_S = 60.0
"""Between the starts of two sessions of a folder: their files know no common clock."""

_RAG_ORDER = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_RAG_LENGTHS = ("sys_prompt", "passages", "history", "user_input", "web_search")
_KINDS = (
    "a recording (--record), Mooncake JSONL, Azure CSV, RAGPulse JSONL, a Claude Code session or a"
    " folder of them"
)


def read_workload(path: Path, block_size: int | None = None) -> tuple[Workload, Recording | None]:
    """Read a trace or a recording, of whatever kind.

    Parameters
    ----------
    block_size : int, optional
        Tokens a block; by itself the trace's own.

    Returns
    -------
    Workload
    Recording or None
        The whole of it, if it is one.

    Raises
    ------
    ConfigError
        If it cannot be read, is empty, or is nothing of the kind; says which line.
    """
    recording = None
    if path.is_dir():
        workload = _sessions(sorted(path.glob("*.json")), block_size)
    else:
        text = _text(path)
        head = text.lstrip()[:65_536]
        first = head.partition("\n")[0]
        if not head:
            raise ConfigError(f"{path} is empty; a trace is {_KINDS}")
        if is_recording(first):
            recording = read_recording(path)
            workload = from_recording(recording, block_size)
        elif first.upper().startswith("TIMESTAMP,"):
            workload = _azure(path, text, block_size)
        elif '"requests"' in head and '"block_size"' in head:
            workload = _sessions([path], block_size)
        else:
            workload = _json_lines(path, text, block_size)
    if not workload.requests:
        raise ConfigError(f"{path} has no requests; a trace is {_KINDS}")
    workload.requests = by_arrival(workload.requests)
    return workload, recording


def from_recording(recording: Recording, block_size: int | None) -> Workload:
    """Return the requests of a recording, each as long as it became."""
    recorded: int = recording.header["block_size"]
    if block_size not in (None, recorded):
        raise ConfigError(f"--block-size={block_size}: the recording was made with {recorded}")
    aborts = {op.request_id: op.at_s for op in recording.operations if op.kind == "abort"}
    requests = []
    for given in recording.given.values():
        names = [given.request_id]
        names += [f"{given.request_id}#{index}" for index in range(1, given.num_samples)]
        for name in names:
            end = recording.ends.get(name)
            if end is None:
                continue
            most = given.max_tokens
            longest: int = recording.header["max_model_len"] - given.num_prompt
            requests.append(
                SimRequest(
                    name,
                    given.arrival_s,
                    given.num_prompt,
                    end.num_output,
                    (*given.blocks, *end.blocks),
                    longest if most is None else min(most, longest),
                    given.priority,
                    None if end.num_output else aborts.get(given.request_id, given.arrival_s),
                )
            )
    workload = Workload("recording", recorded, requests, recording.numbers)
    if recording.was_cut:
        workload.notes.append("the last line is half written and was left out")
    unfinished = len(recording.given) - len({r.request_id.partition("#")[0] for r in requests})
    if unfinished:
        workload.notes.append(f"{unfinished} requests had not ended and were left out")
    return workload


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text; a trace is {_KINDS}") from error


def _azure(path: Path, text: str, block_size: int | None) -> Workload:
    workload = Workload("azure", block_size or DEFAULT_BLOCK_SIZE, [], Numbers(), shares=False)
    workload.notes.append("this trace has lengths alone: nothing is shared, hits mean nothing")
    start: datetime | None = None
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if number == 1 or not row:
            continue
        try:
            # Seven digits behind the point are one more than Python takes.
            when = datetime.fromisoformat(row[0][:26])
            prompt, output = int(row[1]), int(row[2])
        except (ValueError, IndexError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected TIMESTAMP,ContextTokens,GeneratedTokens: {error}"
            ) from error
        start = start or when
        full = prompt // workload.block_size
        blocks = tuple(workload.numbers.new() for _ in range(full))
        _add(workload, (when - start).total_seconds(), prompt, output, blocks)
    return workload


def _json_lines(path: Path, text: str, block_size: int | None) -> Workload:
    """Read Mooncake or RAGPulse; the first line says which."""
    workload: Workload | None = None
    rag: _Pieces | None = None
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields: dict[str, Any] = json.loads(line)
            ids = fields["hash_ids"]
            prompt, output = int(fields["input_length"]), int(fields["output_length"])
            if workload is None:
                if isinstance(ids, dict):
                    rag = _Pieces(path.parent)
                    size = block_size or DEFAULT_BLOCK_SIZE
                    workload = Workload("ragpulse", size, [], Numbers())
                else:
                    size = choose_block_size(block_size, MOONCAKE_BLOCK_TOKENS)
                    workload = Workload("mooncake", size, [], Numbers())
            if rag is not None:
                pieces = [piece for name in _RAG_ORDER for piece in ids[name]]
                prompt, blocks = rag.cut(pieces, workload.block_size, workload.numbers)
                at_s = float(fields["timestamp"])
            else:
                blocks = cut_blocks(
                    ids, prompt, MOONCAKE_BLOCK_TOKENS, workload.block_size, workload.numbers
                )
                at_s = float(fields["timestamp"]) / 1000
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and workload is not None:
                workload.notes.append("the last line is half written and was left out")
                break
            raise ConfigError(
                f"{path}, line {number}: no request of a trace ({error!r}); one is {_KINDS}"
            ) from error
        _add(workload, at_s, prompt, output, blocks)
    return workload or Workload("none", DEFAULT_BLOCK_SIZE, [], Numbers())


class _Pieces:
    """RAGPulse's pieces of content, and the prefixes that they make."""

    def __init__(self, folder: Path) -> None:
        self._lengths: dict[int, int] = {}
        for name in _RAG_LENGTHS:
            found = sorted(folder.glob(f"[0-9]_{name}.jsonl"))
            if not found:
                raise ConfigError(
                    f"{folder}: a RAGPulse trace needs the lengths of its pieces beside it, and"
                    f" there is no N_{name}.jsonl"
                )
            for line in _text(found[0]).splitlines():
                if line.strip():
                    fields = json.loads(line)
                    length = fields.pop("token_length")
                    self._lengths[next(iter(fields.values()))] = length

    def cut(self, pieces: list[int], size: int, numbers: Numbers) -> tuple[int, tuple[int, ...]]:
        """Return how long a prompt of pieces is, and the numbers of its full blocks.

        A block is known by all pieces up to its end, and how far into the last one that is.
        """
        names: list[object] = []
        before, end = (0, 0), 0
        for piece in pieces:
            start, end = end, end + self._lengths[piece]
            first = (start // size + 1) * size
            names += [(before, piece, at - start) for at in range(first, end + 1, size)]
            # One number for all pieces so far, instead of an ever longer tuple.
            before = (numbers.of([("prefix", before, piece)])[0], 0)
        return end, tuple(numbers.of(names))


def _sessions(paths: list[Path], block_size: int | None) -> Workload:
    workload: Workload | None = None
    for index, path in enumerate(paths):
        try:
            session = json.loads(_text(path))
            trace_block = int(session["block_size"])
            if workload is None:
                size = choose_block_size(block_size, trace_block)
                workload = Workload("claude-code", size, [], Numbers())
            for at_s, fields in _calls(session["requests"], 0.0):
                # Ids are of this file alone, and models share no memory.
                ids = [(index, fields["model"], one) for one in fields["hash_ids"]]
                prompt = int(fields["in"])
                blocks = cut_blocks(ids, prompt, trace_block, workload.block_size, workload.numbers)
                full = prompt // workload.block_size
                prompt = prompt if len(blocks) == full else len(blocks) * workload.block_size
                _add(workload, index * SESSION_GAP_S + at_s, prompt, int(fields["out"]), blocks)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: no Claude Code session: {error!r}") from error
    if workload is None:
        raise ConfigError(f"a folder without sessions (*.json); a trace is {_KINDS}")
    if len(paths) > 1:
        workload.notes.append(
            f"sessions know no common clock: each begins {SESSION_GAP_S:g} s after the one before"
        )
    return workload


def _calls(requests: list[Any], start_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the calls of a session with their times, those of its sub-agents too."""
    for fields in requests:
        at_s = start_s + float(fields["t"])
        if "requests" in fields:
            yield from _calls(fields["requests"], at_s)
        else:
            yield at_s, fields


def _add(
    workload: Workload, at_s: float, prompt: int, output: int, blocks: tuple[int, ...]
) -> None:
    if prompt < 1:
        return
    name = str(len(workload.requests))
    # Every answer has a token at least: that is what a first token is.
    most = max(1, output)
    workload.requests.append(SimRequest(name, at_s, prompt, most, blocks, most))
