"""Does a token take longer, the longer its context is? A line through points.

Owns the fit and when it says something. Knows nothing of where the points come from.

Decoding reads the K and V of everything before the token, once a token: where memory bandwidth is
the limit, time a token is a constant (weights) plus a slope (KV) times the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from kvist.lab.doctor.finding import SYMPTOMS, Finding

_MIN_POINTS = 6
_MIN_SPREAD = 2.0
"""The longest contexts must be so many times the shortest."""

_MIN_RATIO = 1.5
"""A token at the longest contexts must take so many times one at the shortest."""

_MIN_CORRELATION = 0.7


def examine_decode(points: Sequence[tuple[float, float]]) -> list[Finding]:
    """Return the finding, if there is one.

    Parameters
    ----------
    points : sequence of (float, float)
        Tokens of context, and milliseconds a token.
    """
    points = sorted((c, ms) for c, ms in points if c > 0 and ms > 0)
    if len(points) < _MIN_POINTS:
        return []
    third = max(1, len(points) // 3)
    short, long = points[:third], points[-third:]
    contexts = median(c for c, _ in short), median(c for c, _ in long)
    times = median(ms for _, ms in short), median(ms for _, ms in long)
    if contexts[1] < _MIN_SPREAD * contexts[0] or times[1] < _MIN_RATIO * times[0]:
        return []
    if _correlation(points) < _MIN_CORRELATION:
        return []
    each = (times[1] - times[0]) / (contexts[1] - contexts[0])
    return [
        Finding(
            SYMPTOMS["decode-slows-with-context"],
            f"a token takes {times[0]:.3g} ms at {contexts[0]:,.0f} tokens of context and"
            f" {times[1]:.3g} ms at {contexts[1]:,.0f}: {1e3 * each:.2g} ms more for each 1,000"
            f" tokens ({len(points)} points)",
            "each new token reads K and V of all before it: memory bandwidth is the limit",
            "shorter contexts, a quantized KV cache (half the bytes, nearly half the slope), or a"
            " model with fewer KV heads or windows; kvist plan says the bound of each",
        )
    ]


def _correlation(points: Sequence[tuple[float, float]]) -> float:
    xs, ys = [c for c, _ in points], [ms for _, ms in points]
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
    spread = math.fsum((x - mean_x) ** 2 for x in xs) * math.fsum((y - mean_y) ** 2 for y in ys)
    return covariance / math.sqrt(spread) if spread > 0 else 0.0
