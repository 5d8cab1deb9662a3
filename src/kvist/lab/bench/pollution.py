"""`kvist bench pollution`: how much reuse one-off prompts wash away, by eviction policy.

Counted in the books, without a model: exact, and the same on every machine. The workload is that of
`kvist.lab.flood`; here it runs for every policy, with and without a protected share of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell
from kvist.lab.flood import FloodWorkload, measure_flood
from kvist.lab.policies import PROTECTED_SHARE
from kvist.policies.registry import POLICIES

_COLUMNS = (
    Column("policy", "policy"),
    Column("calm_hits", "hit blocks without the flood", 0),
    Column("kept", "kept in the flood, %", 1, 100),
    Column("kept_protected", "kept with protection, %", 1, 100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollutionWorkload:
    """What is measured.

    Attributes
    ----------
    policies : tuple of str
    protected_share : float
        Of the pool, in the last column.
    flood : FloodWorkload
    """

    policies: tuple[str, ...] = tuple(POLICIES)
    protected_share: float = PROTECTED_SHARE
    flood: FloodWorkload = field(default_factory=FloodWorkload)


class PollutionBench:
    """Hot prefixes beside a flood of prompts that never come again.

    Parameters
    ----------
    work : PollutionWorkload
    """

    name = "pollution"
    question = "How many hits on hot prefixes are left when one-off prompts flood the pool?"

    def __init__(self, work: PollutionWorkload) -> None:
        self._work = work
        self._samples = Samples()

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        work = self._work
        return {"protected_share": work.protected_share, **asdict(work.flood)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        work = self._work
        for number, policy in enumerate(work.policies):
            tell(number / len(work.policies), policy)
            plain = measure_flood(policy, work.flood)
            protected = measure_flood(policy, work.flood, protected_share=work.protected_share)
            self._samples.put(policy, "calm_hits", plain.calm_hits)
            self._samples.put(policy, "kept", 1 - plain.lost)
            self._samples.put(policy, "kept_protected", 1 - protected.lost)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        flood = self._work.flood
        title = (
            f"{flood.one_offs_per_hot} one-off prompts between two hot ones, a pool of"
            f" {flood.capacity:,} blocks"
        )
        chart = Chart("Hits that are left", "policy", ("kept", "kept_protected"), "%", bars=True)
        return (Table("policies", title, _COLUMNS, self._samples.rows("policy"), (chart,)),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        hot = self._work.flood.num_prefixes * self._work.flood.prefix_blocks
        return (
            (
                f"The hot prefixes are {hot} blocks in all. Protected: --protected-share"
                f" {self._work.protected_share:g}. Counted in the books; no seconds in it."
            ),
        )
