"""What more room would bring, and another order of eviction: replays of a policy by itself.

Owns the sizes that are tried. The rules are those of `kvist.lab.replay`; no scheduler, no time, so
that a point of the curve costs seconds. Hits are counted in full blocks of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.lab.replay import Chain, farthest_next_use, replay
from kvist.policies.registry import POLICIES, make_policy

SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Sizes of the curve, in pools."""

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A pool of another size.

    Attributes
    ----------
    hit_rate : float
        Hit over requested blocks.
    gain_per_gib : float or None
        What each GiB more brought since the point before, in shares of the requested blocks.
    """

    num_blocks: int
    pool_bytes: int
    hit_rate: float
    gain_per_gib: float | None


@dataclass(frozen=True, slots=True)
class PolicyPoint:
    """An order of eviction at the pool's own size."""

    policy: str
    hit_rate: float


def miss_ratio_curve(
    chains: Sequence[Chain],
    policy: str,
    num_blocks: int,
    block_bytes: int,
    protected_share: float = 0.0,
    progress: Callable[[float], None] = lambda done: None,
) -> list[CurvePoint]:
    """Replay at every size of `SCALES`, up to that at which everything stays.

    After Ctrl-C the points found so far are returned.
    """
    distinct = len({block for chain in chains for block in chain})
    sizes = [max(1, round(scale * num_blocks)) for scale in SCALES]
    # Beyond what there is, more room is more of nothing.
    sizes = sorted({min(size, distinct) for size in sizes if distinct})
    points: list[CurvePoint] = []
    try:
        for index, size in enumerate(sizes):
            found = replay(chains, make_policy(policy, size, protected_share), size).hit_ratio
            gain = None
            if points:
                more_gib = (size - points[-1].num_blocks) * block_bytes / (1 << 30)
                gain = (found - points[-1].hit_rate) / more_gib
            points.append(CurvePoint(size, size * block_bytes, found, gain))
            progress((index + 1) / len(sizes))
    except KeyboardInterrupt:
        pass
    return points


def compare_policies(
    chains: Sequence[Chain],
    names: Sequence[str],
    num_blocks: int,
    progress: Callable[[float], None] = lambda done: None,
) -> list[PolicyPoint]:
    """Replay under several policies, and under one that knows the future, at one size.

    Raises
    ------
    ConfigError
        For an unknown name. ``all`` is every one there is.
    """
    wanted = list(
        dict.fromkeys(n for name in names for n in (POLICIES if name == "all" else (name,)))
    )
    policies = [(name, make_policy(name, num_blocks)) for name in wanted]
    points: list[PolicyPoint] = []
    try:
        for name, policy in policies:
            points.append(PolicyPoint(name, replay(chains, policy, num_blocks).hit_ratio))
            progress(len(points) / (len(policies) + 1))
        points.append(PolicyPoint(BELADY, farthest_next_use(chains, num_blocks).hit_ratio))
    except KeyboardInterrupt:
        pass
    return points
