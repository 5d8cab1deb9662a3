"""One request of a rig as the plain model sees it. A record; knows nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Story:
    """One request as the plain model sees it.

    Attributes
    ----------
    expected : list of int
        All it should ever produce, from its prompt on.
    outputs : list of int
        What it produced, what its parent had produced at the fork included.
    forked : bool
        It is a fork or was forked.
    deadline_s : float or None
        When it must be over, on the rig's clock.
    said_when_preempted : int
        Length of `outputs` when it was last preempted; -1 if it never was.
    """

    request_id: str
    prompt: tuple[int, ...]
    salt: str
    expected: list[int]
    outputs: list[int] = field(default_factory=list)
    forked: bool = False
    preempted: bool = False
    finish_reason: str | None = None
    deadline_s: float | None = None
    said_when_preempted: int = -1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt, *self.outputs)
