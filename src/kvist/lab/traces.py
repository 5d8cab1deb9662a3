"""Traces of real requests: when, how long, and which blocks they share. No text, no tensors.

Owns the reading of published files. A block is an id that stands for 512 tokens *with everything
before them*, so an id always has the same predecessor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes
    ----------
    arrival_s : float
        Since the start of the trace.
    input_tokens, output_tokens : int
    blocks : tuple of int
        Ids of the blocks of its prompt, in order; the last one may be partial.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Read a trace as published with Mooncake (FAST'25): a JSON object a line.

    Raises
    ------
    ConfigError
        If it cannot be read, or a line is something else. Says which, and what was expected.
    """
    requests = list(_read(path))
    if not requests:
        raise ConfigError(f"trace {path} holds no request")
    return requests


def _read(path: Path) -> Iterator[TraceRequest]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path} is no text") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            yield TraceRequest(
                arrival_s=fields["timestamp"] / 1000,
                input_tokens=int(fields["input_length"]),
                output_tokens=int(fields["output_length"]),
                blocks=tuple(int(block) for block in fields["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a request of a Mooncake trace ({error!r}); expected an"
                " object with timestamp (ms), input_length, output_length and hash_ids"
            ) from error


def distinct_blocks(requests: Sequence[TraceRequest]) -> int:
    """How many blocks a cache that forgets nothing would hold in the end."""
    return len({block for request in requests for block in request.blocks})
