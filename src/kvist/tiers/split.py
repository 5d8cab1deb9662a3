"""Load or recompute: where to cut what a lower tier has.

Pure arithmetic; knows no tier. A sequence lacks n blocks that lower tiers have. It computes the
first k while the others come, and both should end together::

    blocks   0 ......... k ........................ n
             | compute   | load                     |
    seconds  k · c         l(k), falling in k          → the k with the least max(k · c, l(k))

k = 0 loads everything, k = n nothing. Cake (2410.03065) computes from the front and loads from the
back until the two meet; ours fixes the cut beforehand, from measured speeds, since a block that is
under a transfer may not be written.
"""

from __future__ import annotations

from collections.abc import Sequence

COMPUTE_BIAS = 0.02
"""Share of the compute time that counts beside the end: it keeps others waiting, loads do not."""


def choose_cut(load_s: Sequence[float], compute_s: float | None) -> tuple[int, float]:
    """Return how many of n blocks to compute before the loaded ones, and the seconds it all takes.

    Parameters
    ----------
    load_s : sequence of float
        Entry k: seconds to load the blocks from k to the end; n entries.
    compute_s : float or None
        Seconds to compute one block; ``None``: unknown, then everything is loaded.
    """
    n = len(load_s)
    if n == 0 or compute_s is None:
        return 0, load_s[0] if n else 0.0
    best, best_cost = n, n * compute_s * (1 + COMPUTE_BIAS)
    for cut in range(n - 1, -1, -1):
        computing = cut * compute_s
        cost = max(computing, load_s[cut]) + COMPUTE_BIAS * computing
        if cost <= best_cost:
            best, best_cost = cut, cost
    end = max(best * compute_s, load_s[best] if best < n else 0.0)
    return best, end
