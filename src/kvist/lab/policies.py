"""`kvist bench policies`: which eviction policy keeps what is wanted again, on real traces.

Every policy over every trace, at cache sizes that are a share of the trace's distinct blocks, by
the rules of `kvist.lab.replay`; beside them LRU, which all are measured against, and what a cache
that knows the future would reach. And what a flood of one-off prompts takes from hot prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from kvist.lab.flood import measure_flood
from kvist.lab.replay import Chain, ReplayResult, farthest_next_use, replay
from kvist.policies.registry import POLICIES, make_policy

SHARES = (0.01, 0.02, 0.05, 0.10)
"""Cache sizes, as shares of a trace's distinct blocks."""

BOUND = "farthest next use"
PROTECTED_SHARE = 0.25
MAX_BELOW_LRU = 0.02
"""What the default policy may lose against LRU anywhere."""


def recompute_s(depth: int) -> float:
    """What computing a block again takes, in units of the first one.

    A block costs its share of the weights' products, and attention over what stands before it. Here
    for 512-token blocks of a model of Llama-3-8B's shape: 2 × 8.0e9 operations a token, and
    4 × 32 layers × 4096 for each token of context.
    """
    return 1 + depth * 512 * (4 * 32 * 4096) / (2 * 8.0e9)


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """One policy over one trace at one size.

    Attributes
    ----------
    hit_ratio : float
        Hit over requested blocks.
    saved : float
        The same, blocks weighted by `recompute_s`.
    vs_lru : float
        Hit ratio over LRU's.
    """

    trace: str
    share: float
    capacity: int
    policy: str
    hit_ratio: float
    saved: float
    vs_lru: float


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """One policy over everything: hits over LRU's hits, on average and where it does worst."""

    policy: str
    mean_vs_lru: float
    worst_vs_lru: float

    @property
    def is_safe(self) -> bool:
        """Whether it is nowhere more than `MAX_BELOW_LRU` below LRU."""
        return self.worst_vs_lru >= 1 - MAX_BELOW_LRU


def compare_policies(
    traces: Mapping[str, Sequence[Chain]],
    policies: Sequence[str] = tuple(POLICIES),
    shares: Sequence[float] = SHARES,
    progress: Callable[[float], None] = lambda done: None,
) -> list[PolicyScore]:
    """Replay every trace under every policy at every size; LRU and the bound always too.

    Parameters
    ----------
    traces : mapping of name to block chains
    progress : callable
        Told the share of the work that is done.

    Notes
    -----
    Seconds for each of them and 100,000 requested blocks.
    """
    names = ["lru", *(name for name in policies if name != "lru"), BOUND]
    scores: list[PolicyScore] = []
    total = len(traces) * len(shares) * len(names)
    for trace, chains in traces.items():
        distinct = len({block for chain in chains for block in chain})
        for share in shares:
            capacity = max(1, round(share * distinct))
            lru = 0.0
            for name in names:
                if name == BOUND:
                    result = farthest_next_use(chains, capacity)
                else:
                    order = make_policy(name, capacity)
                    result = replay(chains, order, capacity, recompute_s=recompute_s)
                ratio = result.hit_ratio
                lru = ratio if name == "lru" else lru
                saved = _saved(chains, result)
                vs_lru = ratio / lru if lru else 1.0
                scores.append(PolicyScore(trace, share, capacity, name, ratio, saved, vs_lru))
                progress(len(scores) / total)
    return scores


def _saved(chains: Sequence[Chain], result: ReplayResult) -> float:
    longest = max(map(len, chains), default=0)
    upto = [0.0]
    for depth in range(longest):
        upto.append(upto[-1] + recompute_s(depth))
    return sum(upto[hit] for hit in result.hits) / sum(upto[len(chain)] for chain in chains)


def summarize(scores: Sequence[PolicyScore]) -> list[PolicySummary]:
    """Put each policy's results together, the best mean first; the bound is none."""
    summaries = []
    for name in dict.fromkeys(score.policy for score in scores if score.policy != BOUND):
        ratios = [score.vs_lru for score in scores if score.policy == name]
        summaries.append(PolicySummary(name, mean(ratios), min(ratios)))
    return sorted(summaries, key=lambda summary: -summary.mean_vs_lru)


def flood_losses(policies: Sequence[str] = tuple(POLICIES)) -> dict[str, tuple[float, float]]:
    """Share of the hot prefixes' hits that a flood takes: without, and with, a protected share."""
    return {
        name: (
            measure_flood(name).lost,
            measure_flood(name, protected_share=PROTECTED_SHARE).lost,
        )
        for name in policies
    }
