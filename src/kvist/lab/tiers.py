"""`kvist bench tiers`: load, recompute or both, under a disk as slow as it is told to be.

A prompt is stored once in a tier behind a throttled line. For each speed of the line its time to
the first token is measured when everything is loaded, when everything is computed, and when the
engine decides. The engine knows the speed from the loads before, as it would in service.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvist.config import EngineConfig
from kvist.engine.assemble import OpenEngine, open_engine
from kvist.engine.loads import PrefixLoads
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.lab.bench.result import Chart, Column, Samples, Table, Tell, quotient
from kvist.sizes import format_size
from kvist.testing.memory_tier import MemoryTier
from kvist.testing.throttled_tier import ThrottledTier

MB = 1_000_000
POLICIES = ("always", "never", "auto")
RATES_MB_S = (10, 20, 35, 60, 100, 200)
_LEARNING = 4
"""Loads before the measurement, of different lengths: latency and rate are told apart by them."""


_COLUMNS = (
    Column("rate_mb_s", "disk, MB/s", 0),
    Column("load_s", "all loaded, ms", 0, 1e3),
    Column("recompute_s", "all computed, ms", 0, 1e3),
    Column("decided_s", "as decided, ms", 0, 1e3),
    Column("decided_to_better_extreme", "to the better of both, ×", 2),
    Column("loaded_tokens", "tokens loaded", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersWorkload:
    """What is measured.

    Attributes
    ----------
    num_tokens : int
        Of the prompt.
    rates_mb_s : sequence of float
    latency_s : float
        Of every job on the line.
    repeats : int
        Of each measurement; the median counts.
    """

    num_tokens: int = 1536
    rates_mb_s: Sequence[float] = RATES_MB_S
    latency_s: float = 0.002
    repeats: int = 3


class _DiskLike(MemoryTier):
    """Bytes in memory that count as a disk's."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, "throttled")
        self.medium = "disk"


class TierBench:
    """One engine and one throttled tier.

    Parameters
    ----------
    model : str
    workload : TiersWorkload
    """

    name = "tiers"
    question = "Is what a slow tier holds loaded or computed, and how good is the choice?"

    def __init__(self, model: str, workload: TiersWorkload) -> None:
        self._work = workload
        self._samples = Samples()
        self._line = ThrottledTier(_DiskLike(1 << 40), 1e12)
        config = EngineConfig.resolve(
            {"model": model, "max_model_len": workload.num_tokens + 64, "max_num_seqs": 4}
        )
        self.opened: OpenEngine = open_engine(config, [self._line])
        loads = self.opened.engine.scheduler.loads
        assert loads is not None
        self._loads: PrefixLoads = loads
        rng = random.Random(0)
        vocab = self.opened.runner.vocab_size
        self._prompt = tuple(rng.randrange(vocab) for _ in range(workload.num_tokens))
        self._count = 0

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        return {"model": self.opened.bill.model, **asdict(self._work)}

    def measure(self, tell: Tell) -> None:
        """See `Bench`: every speed in turn."""
        work = self._work
        self._loads.tiers.load_policy = "never"
        for _ in range(2):  # the second one without what happens only once
            self._ttft_s(self._prompt)
        self._loads.tiers.drain(60)
        for number, rate in enumerate(work.rates_mb_s):
            self._line.bytes_per_s, self._line.latency_s = rate * MB, work.latency_s
            self._learn()
            tell(number / len(work.rates_mb_s), f"{rate:g} MB/s")
            self._measure_rate(rate)

    def tables(self) -> tuple[Table, ...]:
        """See `Bench`."""
        nbytes = self.opened.bill.kv_token_bytes * self._work.num_tokens
        title = f"{self._work.num_tokens} tokens, {format_size(nbytes)} of KV"
        rows = self._samples.rows("rate_mb_s")
        for row in rows:
            load, compute, decided = (
                self._samples.median(float(str(row["rate_mb_s"])), column)
                for column in ("load_s", "recompute_s", "decided_s")
            )
            if load is not None and compute is not None:
                row["decided_to_better_extreme"] = quotient(decided, min(load, compute))
        chart = Chart(
            "First token by the speed of the disk",
            "rate_mb_s",
            ("load_s", "recompute_s", "decided_s"),
            "ms",
            log=True,
        )
        return (Table("rates", title, _COLUMNS, rows, (chart,)),)

    def facts(self) -> tuple[str, ...]:
        """See `Bench`."""
        worst = max(
            (float(str(row["decided_to_better_extreme"])) for row in self.tables()[0].rows
             if row.get("decided_to_better_extreme") is not None),
            default=None,
        )  # fmt: skip
        if worst is None:
            return ()
        return (f"At worst the decision takes {worst:.2f} × what the better extreme takes.",)

    def close(self) -> None:
        """Let go of the engine."""
        self.opened.close()

    def _learn(self) -> None:
        self._loads.tiers.load_policy = "always"
        for share in range(1, _LEARNING + 1):
            self._ttft_s(self._prompt[: len(self._prompt) * share // _LEARNING])

    def _measure_rate(self, rate: float) -> None:
        columns = {"always": "load_s", "never": "recompute_s", "auto": "decided_s"}
        for _ in range(self._work.repeats):
            for policy in POLICIES:
                self._loads.tiers.load_policy = policy
                self._samples.note(rate, columns[policy], self._ttft_s(self._prompt))
                if policy == "auto":
                    self._samples.note(rate, "loaded_tokens", self._cached)

    def _ttft_s(self, prompt: tuple[int, ...]) -> float:
        engine = self.opened.engine
        engine.scheduler.cache.reset_prefix_cache()
        self._count += 1
        request = EngineRequest(
            request_id=str(self._count),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=1, temperature=0.0),
        )
        start = time.perf_counter()
        engine.add_request(request)
        end = start
        while engine.has_work:
            for update in engine.step():
                end = time.perf_counter()
                self._cached = update.num_cached_tokens
        return end - start

    _cached = 0
