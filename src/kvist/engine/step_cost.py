"""How long a step takes, by what is in it: learned from the steps that were made.

Owns three numbers and how they follow the machine. Knows no requests and no clock. No torch.
"""

from __future__ import annotations

_ENOUGH = 4
"""After fewer steps than this nothing is known."""
_RATE = 0.1
"""By so much of its error the newest step corrects."""


class StepCost:
    """A step costs so much, each sequence that decodes in it so much, each token it reads so much.

    Notes
    -----
    Normalised least mean squares, each number in the measure of what is usual: a step moves them
    along its own mix only, as far as explains it. So what is said of steps like those of late is
    right soon, and what was learned of others is kept, where a regression that forgets would lose
    it. O(1).
    """

    __slots__ = ("_base_s", "_decode_s", "_decoding_sq", "_num_steps", "_read_s", "_reading_sq")

    def __init__(self) -> None:
        self._base_s = self._decode_s = self._read_s = 0.0
        # Mean squares of what steps held.
        self._decoding_sq = self._reading_sq = 1.0
        self._num_steps = 0

    def observe(self, num_decoding: float, num_reading: float, took_s: float) -> None:
        """Learn from a step that decoded for so many sequences and read so many prompt tokens."""
        self._num_steps += 1
        rate = max(_RATE, 1 / self._num_steps)
        self._decoding_sq = _toward(self._decoding_sq, num_decoding**2, rate)
        self._reading_sq = _toward(self._reading_sq, num_reading**2, rate)
        decoding, reading = num_decoding / self._decoding_sq, num_reading / self._reading_sq
        error_s = took_s - self._cost_s(num_decoding, num_reading)
        gain = rate * error_s / (1 + num_decoding * decoding + num_reading * reading)
        self._base_s = max(0.0, self._base_s + gain)
        self._decode_s = max(0.0, self._decode_s + gain * decoding)
        self._read_s = max(0.0, self._read_s + gain * reading)

    def step_s(self, num_decoding: float, num_reading: float) -> float | None:
        """Return seconds that such a step takes; ``None``: unknown."""
        return self._cost_s(num_decoding, num_reading) if self._num_steps >= _ENOUGH else None

    def read_s(self, num_tokens: float) -> float:
        """Return seconds by which reading so many prompt tokens lengthens steps."""
        return self._read_s * num_tokens

    def _cost_s(self, num_decoding: float, num_reading: float) -> float:
        return self._base_s + self._decode_s * num_decoding + self._read_s * num_reading


def _toward(mean: float, value: float, rate: float) -> float:
    """Move a running mean; never below 1, which is the least that counts."""
    return max(1.0, mean + rate * (value - mean))
