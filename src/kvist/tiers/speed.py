"""How fast things have been lately: loads of a tier, and the model's prefill.

Owns two estimates and nothing that acts on them. Threads: one.
"""

from __future__ import annotations

_DECAY = 0.9
"""What an observation weighs when the next one has come."""

_PRIOR_WEIGHT = 1.0


class LoadSpeed:
    """Seconds that a load takes, as ``latency + bytes / rate``, from what loads took.

    Parameters
    ----------
    latency_s, bytes_per_s : float
        What is believed before anything was seen; it weighs as much as one observation.

    Notes
    -----
    Least squares with weights that decay: both numbers follow the device, and a few large loads do
    not hide what a small one costs. Loads of one size say nothing of latency; then what was
    believed of it stays and the rate follows.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s = latency_s
        self._s_per_byte = 1.0 / bytes_per_s
        # Sums of weight, bytes, seconds, bytes², bytes · seconds.
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._seen = False

    @property
    def latency_s(self) -> float:
        """Seconds that a load of nothing would take."""
        return self._latency_s

    @property
    def bytes_per_s(self) -> float:
        """Stored bytes a second, beyond the latency."""
        return 1.0 / self._s_per_byte

    def seconds(self, nbytes: float) -> float:
        """How long a load of `nbytes` stored bytes should take."""
        return self._latency_s + nbytes * self._s_per_byte

    def observe(self, nbytes: int, seconds: float) -> None:
        """Take note of a load. One of nothing, or in no time, is none."""
        if nbytes <= 0 or seconds <= 0:
            return
        if not self._seen:
            # The belief, as if a load of this size had confirmed it.
            self._seen = True
            self._add(nbytes, self.seconds(nbytes), _PRIOR_WEIGHT)
        for name in ("_w", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _DECAY)
        self._add(nbytes, seconds, 1.0)
        mean_x, mean_y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - mean_x * mean_x
        if spread > (0.1 * mean_x) ** 2:
            slope = (self._xy / self._w - mean_x * mean_y) / spread
            if 0 < slope * mean_x <= mean_y:
                self._s_per_byte, self._latency_s = slope, mean_y - slope * mean_x
                return
        # All of a size, or too noisy to tell the two apart.
        self._latency_s = min(self._latency_s, 0.5 * mean_y)
        self._s_per_byte = (mean_y - self._latency_s) / mean_x

    def _add(self, x: float, y: float, weight: float) -> None:
        self._w += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y


class PrefillSpeed:
    """Seconds that a step takes to read prompts: a part that every step has, and one a token.

    The first is a pass over the weights, and makes small chunks dear.

    Parameters
    ----------
    least_tokens : int
        Steps of fewer tokens say little of prefill and are not counted.
    """

    def __init__(self, least_tokens: int = 32) -> None:
        self._least_tokens = least_tokens
        self._speed: LoadSpeed | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second beyond `step_s`; ``None`` before the first step that counts."""
        return None if self._speed is None else self._speed.bytes_per_s

    @property
    def step_s(self) -> float:
        """Seconds that a step takes however few tokens it reads; 0 while unknown."""
        return 0.0 if self._speed is None else self._speed.latency_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step."""
        if num_tokens < self._least_tokens or seconds <= 0:
            return
        if self._speed is None:
            self._speed = LoadSpeed(0.0, num_tokens / seconds)
        self._speed.observe(num_tokens, seconds)
