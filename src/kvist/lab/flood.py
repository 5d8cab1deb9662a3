"""A flood of one-off prompts beside hot prefixes: how much reuse it washes away.

Hot requests share a few prefixes (system prompts, documents), popular as 1 / rank, each with a tail
of its own. One-off prompts share nothing. Counted are the hits of the hot requests alone, from when
the flood begins, against the same requests without a flood.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvist.lab.replay import Chain, replay
from kvist.policies.registry import make_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodWorkload:
    """Sizes, in blocks and requests.

    Attributes
    ----------
    num_prefixes, prefix_blocks : int
        The hot set is their product.
    tail_blocks : int
        Of each hot request, its own.
    num_hot_requests : int
    calm : float
        Share of the hot requests that come before the flood begins.
    one_off_blocks, one_offs_per_hot : int
        Length of a one-off prompt; how many come between two hot requests.
    capacity : int
    """

    num_prefixes: int = 16
    prefix_blocks: int = 16
    tail_blocks: int = 4
    num_hot_requests: int = 600
    calm: float = 0.25
    one_off_blocks: int = 32
    one_offs_per_hot: int = 4
    capacity: int = 1_024
    seed: int = 0

    def requests(self, *, flood: bool) -> Iterator[tuple[Chain, bool]]:
        """Yield chains and whether each is hot; the hot ones are the same either way."""
        draw = random.Random(self.seed)
        ranks = range(self.num_prefixes)
        popularity = [1 / (rank + 1) for rank in ranks]
        fresh = count(self.num_prefixes * self.prefix_blocks)
        for index in range(self.num_hot_requests):
            (rank,) = draw.choices(ranks, popularity)
            first = rank * self.prefix_blocks
            prefix = range(first, first + self.prefix_blocks)
            yield [*prefix, *(next(fresh) for _ in range(self.tail_blocks))], True
            if index >= self.first_flooded:
                for _ in range(self.one_offs_per_hot if flood else 0):
                    yield [next(fresh) for _ in range(self.one_off_blocks)], False

    @property
    def first_flooded(self) -> int:
        """Number of the first hot request that is counted."""
        return int(self.calm * self.num_hot_requests)


@dataclass(frozen=True, slots=True)
class FloodResult:
    """Hit blocks of the hot requests, without and with the flood."""

    calm_hits: int
    flooded_hits: int

    @property
    def lost(self) -> float:
        """Share of the hits that the flood took."""
        return 1 - self.flooded_hits / self.calm_hits if self.calm_hits else 0.0


def measure_flood(
    policy: str, workload: FloodWorkload | None = None, *, protected_share: float = 0.0
) -> FloodResult:
    """Replay hot requests without and with one-off prompts between them."""
    workload = workload or FloodWorkload()
    hits = []
    for flood in (False, True):
        requests = list(workload.requests(flood=flood))
        order = make_policy(policy, workload.capacity, protected_share)
        result = replay([chain for chain, _ in requests], order, workload.capacity)
        hot = [hit for hit, (_, hot) in zip(result.hits, requests, strict=True) if hot]
        hits.append(sum(hot[workload.first_flooded :]))
    return FloodResult(*hits)
