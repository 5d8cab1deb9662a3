"""`kvist bench paging` as one of the benchmarks: modes in turn, books first, then a real model.

What the modes are, and what they mean, stands in `kvist.lab.paging`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvist.lab.bench.host import Host
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell, quotient
from kvist.lab.paging import MODES, PagingResult, PagingWorkload, compare, run_mode

_COLUMNS = (
    Column("mode", "mode"),
    Column("utilization", "slots filled, %", 1, 100),
    Column("concurrency", "side by side", 1),
    Column("preemptions", "preemptions", 0),
    Column("tokens_per_s", "tokens/s", 1),
)


class PagingBench:
    """Paged blocks against reserving the maximum.

    Parameters
    ----------
    host : Host or None
        Its pool is that of the workload. ``None``: books only.
    work : PagingWorkload
    seconds : float
        Steady window of each mode, for tokens/s.
    """

    name = "paging"
    question = "What does paged allocation buy over reserving the maximum?"

    def __init__(self, host: Host | None, work: PagingWorkload, seconds: float) -> None:
        self._host = host
        self._work = work
        self._seconds = seconds
        self._samples = Samples()
        self._exact: dict[str, PagingResult] = {}
        self._measured: dict[str, PagingResult] = {}

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        model = self._host.model if self._host is not None else "none"
        return {"model": model, "seconds": self._seconds, **asdict(self._work)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`."""
        runners = [None] if self._host is None else [None, self._host.runner]
        total = len(runners) * len(MODES)
        for place, runner in enumerate(runners):
            for number, mode in enumerate(MODES):
                done = place * len(MODES) + number

                def told(share: float, done: int = done, mode: str = mode) -> None:
                    tell((done + min(1.0, share)) / total, mode)

                if runner is not None:
                    measured = run_mode(
                        mode, self._work, runner, seconds=self._seconds, progress=told
                    )
                    self._measured[mode] = measured
                    self._samples.put(mode, "tokens_per_s", measured.tokens_per_s)
                    continue
                exact = run_mode(mode, self._work, progress=told)
                self._exact[mode] = exact
                self._samples.put(mode, "utilization", exact.utilization)
                self._samples.put(mode, "concurrency", exact.concurrency)
                self._samples.put(mode, "preemptions", exact.preemptions)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        work = self._work
        title = (
            f"{work.num_requests} requests of {work.shortest}–{work.longest} tokens, a pool of"
            f" {work.slots:,}"
        )
        charts = [
            Chart("Slots filled", "mode", ("utilization",), "%", bars=True),
            Chart("Side by side", "mode", ("concurrency",), "sequences", bars=True),
        ]
        if self._host is not None:
            charts.append(Chart("Speed", "mode", ("tokens_per_s",), "tokens/s", bars=True))
        rows = self._samples.rows("mode")
        return (Table("modes", title, _COLUMNS, rows, tuple(charts)),)

    def summary(self) -> Mapping[str, Any]:
        """Return each mode, and ``ratio``: paged over reserve. See `Summarized`."""
        if len(self._exact) < len(MODES):
            return {}
        return compare(self._exact, self._measured if len(self._measured) == len(MODES) else None)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        rows = {row["mode"]: row for row in self._samples.rows("mode")}
        if "paged" not in rows:
            return ()
        parts = []
        for column, what in (
            ("utilization", "slots filled"),
            ("concurrency", "side by side"),
            ("tokens_per_s", "tokens/s"),
        ):
            paged, reserve = (rows[mode].get(column) for mode in ("paged", "reserve"))
            if isinstance(paged, float) and isinstance(reserve, float):
                parts.append(f"{quotient(paged, reserve):.1f} × {what}")
        return (f"Paged over reserve: {', '.join(parts)}.",)
