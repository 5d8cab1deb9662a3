"""Requests to be replayed, whatever file they come from.

Owns the one form of a workload, and how the blocks of a trace become blocks of another size. Knows
no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvist.errors import ConfigError
from kvist.lab.simulate.script import Numbers


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request.

    Attributes
    ----------
    arrival_s : float
        Since the start of the workload.
    num_prompt, num_output : int
        Tokens. An output of 0 was aborted before it said anything, after `abort_s`.
    blocks : tuple of int
        Numbers of the full blocks of its prompt, and of its output as far as they are known.
    max_tokens : int
        That it asked for; at least `num_output`.
    abort_s : float or None
        When it was aborted, if it was before its first token.
    """

    request_id: str
    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    abort_s: float | None = None


@dataclass(slots=True)
class Workload:
    """Requests, by arrival.

    Attributes
    ----------
    kind : str
        Of the file.
    block_size : int
        Tokens of a numbered block.
    shares : bool
        Whether it says which blocks are equal: where not, hits mean nothing.
    notes : list of str
        What a reader must know.
    """

    kind: str
    block_size: int
    requests: list[SimRequest]
    numbers: Numbers
    shares: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(request.num_prompt for request in self.requests)

    def chains(self) -> list[tuple[int, ...]]:
        """Return the full blocks of every prompt, for replays of a policy by itself."""
        size = self.block_size
        return [request.blocks[: request.num_prompt // size] for request in self.requests]


def choose_block_size(wanted: int | None, trace_block: int) -> int:
    """Return the block size to simulate with: as wanted, if the trace can be cut so.

    Raises
    ------
    ConfigError
        If the trace's blocks are no multiple of it.
    """
    size = wanted if wanted is not None else trace_block
    if trace_block % size:
        raise ConfigError(
            f"--block-size={size}: this trace knows which blocks of {trace_block} tokens are equal,"
            f" so it can be cut into {trace_block} or a divisor of it"
        )
    return size


def cut_blocks(
    ids: Iterable[object], num_prompt: int, trace_block: int, size: int, numbers: Numbers
) -> tuple[int, ...]:
    """Return the numbers of the full blocks of `size` in a prompt made of trace blocks.

    An id stands for one block with everything before it, so that its n-th part is known by both.
    """
    full = num_prompt // size
    if size == trace_block:
        return tuple(numbers.of(ids))[:full]
    parts = trace_block // size
    return tuple(numbers.of((one, part) for one in ids for part in range(parts)))[:full]


def by_arrival(requests: Sequence[SimRequest]) -> list[SimRequest]:
    """Sort by arrival; the order of the file decides among equals."""
    return sorted(requests, key=lambda request: request.arrival_s)
