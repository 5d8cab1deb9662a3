"""Load or recompute: where to cut what a lower tier has.

Pure arithmetic; knows no tier. A sequence lacks n blocks that lower tiers have. It computes the
first k while the others come, and both should end together::

    blocks   0 ......... k ........................ n
             | compute   | load                     |
    seconds  f + k · c     l(k), falling in k          → the k with the least max(f + k · c, l(k))

k = 0 loads everything and computes nothing, k = n the reverse. Speeds are estimates, so a split has
to promise more than `LEAST_GAIN` over the better of the two. Cake (2410.03065) computes from the
front and loads from the back until the two meet; ours fixes the cut beforehand, from measured
speeds, since a block that is under a transfer may not be written.
"""

from __future__ import annotations

from collections.abc import Sequence

COMPUTE_BIAS = 0.02
"""Share of the compute time that counts beside the end: it keeps others waiting, loads do not."""

LEAST_GAIN = 0.1
"""Share of the better extreme's seconds that a split must save."""


def choose_cut(
    load_s: Sequence[float], compute_s: float | None, step_s: float = 0.0
) -> tuple[int, float]:
    """Return how many of n blocks to compute before the loaded ones, and the seconds it all takes.

    Parameters
    ----------
    load_s : sequence of float
        Entry k: seconds to load the blocks from k to the end; n entries.
    compute_s : float or None
        Seconds to compute one block; ``None``: unknown, then everything is loaded.
    step_s : float
        Seconds that computing takes beside, however few blocks.
    """
    n = len(load_s)
    if n == 0 or compute_s is None:
        return 0, load_s[0] if n else 0.0
    everything = step_s + n * compute_s
    best, end_s = (n, everything) if everything < load_s[0] else (0, load_s[0])
    best_cost = end_s * (1 - LEAST_GAIN)
    for cut in range(1, n):
        computing = step_s + cut * compute_s
        cost = max(computing, load_s[cut]) + COMPUTE_BIAS * computing
        if cost < best_cost:
            best, best_cost, end_s = cut, cost, max(computing, load_s[cut])
    return best, end_s
