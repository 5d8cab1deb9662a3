"""`kvist bench policies` as one of the benchmarks: traces in turn, then everything together.

How a trace is replayed, and what the bound is, stands in `kvist.lab.policies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell
from kvist.lab.policies import (
    PROTECTED_SHARE,
    PolicyScore,
    compare_policies,
    flood_losses,
    summarize,
)
from kvist.lab.replay import Chain

_SUMMARY = (
    Column("policy", "policy"),
    Column("mean_vs_lru", "hits over LRU's, mean", 3),
    Column("worst_vs_lru", "worst", 3),
    Column("lost", "lost in a flood, %", 1, 100),
    Column("lost_protected", f"with {PROTECTED_SHARE:.0%} protected, %", 1, 100),
)


class PoliciesBench:
    """Eviction policies on traces of real requests.

    Parameters
    ----------
    traces : mapping of name to block chains
    policies : sequence of str
    """

    name = "policies"
    question = "Which eviction policy keeps what is wanted again?"

    def __init__(self, traces: Mapping[str, Sequence[Chain]], policies: Sequence[str]) -> None:
        self._traces = traces
        self._policies = policies
        self._scores: list[PolicyScore] = []
        self._losses: dict[str, tuple[float, float]] = {}

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        requests = {name: len(chains) for name, chains in self._traces.items()}
        return {"requests": requests, "policies": list(self._policies)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        for number, (name, chains) in enumerate(self._traces.items()):

            def told(share: float, number: int = number, name: str = name) -> None:
                tell((number + share) / len(self._traces), name)

            self._scores += compare_policies({name: chains}, self._policies, progress=told)
        tell(1.0, "a flood of one-off prompts")
        self._losses = flood_losses(self._policies)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        tables = [self._of_trace(name) for name in dict.fromkeys(s.trace for s in self._scores)]
        return (*tables, self._summary())

    def _of_trace(self, trace: str) -> Table:
        samples, columns = Samples(), [Column("policy", "policy")]
        for score in self._scores:
            if score.trace != trace:
                continue
            size = f"hits_{score.share:.0%}".rstrip("%")
            if all(column.name != size for column in columns):
                title = f"{score.share:.0%}: {score.capacity:,} blocks, hits %"
                columns += [Column(size, title, 2, 100), Column(f"{size}_vs_lru", "over LRU", 3)]
            samples.put(score.policy, size, score.hit_ratio)
            samples.put(score.policy, f"{size}_vs_lru", score.vs_lru)
        sizes = tuple(column.name for column in columns[1::2])
        chart = Chart(trace, "policy", sizes, "% of blocks found", bars=True)
        title = f"{trace}: blocks found, by size of the cache"
        return Table(trace, title, tuple(columns), samples.rows("policy"), (chart,))

    def _summary(self) -> Table:
        samples = Samples()
        for summary in summarize(self._scores):
            samples.put(summary.policy, "mean_vs_lru", summary.mean_vs_lru)
            samples.put(summary.policy, "worst_vs_lru", summary.worst_vs_lru)
            lost, protected = self._losses.get(summary.policy, (None, None))
            samples.put(summary.policy, "lost", lost)
            samples.put(summary.policy, "lost_protected", protected)
        chart = Chart("Hits over LRU's", "policy", ("mean_vs_lru", "worst_vs_lru"), "×", bars=True)
        rows = samples.rows("policy")
        return Table("summary", "over all traces and sizes", _SUMMARY, rows, (chart,))

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        unsafe = [s.policy for s in summarize(self._scores) if not s.is_safe]
        found = ["Cache sizes are shares of a trace's distinct blocks. No model, no bytes."]
        if unsafe:
            found.append(f"Somewhere clearly below LRU: {', '.join(unsafe)}.")
        return tuple(found)
