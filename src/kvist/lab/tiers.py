"""`kvist bench tiers`: load, recompute or both, under a disk as slow as it is told to be.

A prompt is stored once in a tier behind a throttled line. For each speed of the line its time to
the first token is measured when everything is loaded, when everything is computed, and when the
engine decides. The engine knows the speed from the loads before, as it would in service.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.config import EngineConfig
from kvist.engine.assemble import OpenEngine, open_engine
from kvist.engine.loads import PrefixLoads
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.sizes import format_size
from kvist.testing.memory_tier import MemoryTier
from kvist.testing.throttled_tier import ThrottledTier

MB = 1_000_000
POLICIES = ("always", "never", "auto")
RATES_MB_S = (10, 20, 35, 60, 100, 200)
_LEARNING = 4
"""Loads before the measurement, of different lengths: latency and rate are told apart by them."""


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

    def __init__(self, model: str, workload: TiersWorkload) -> None:
        self.workload = workload
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

    def run(self, progress: Callable[[float], None] = lambda share: None) -> list[dict[str, Any]]:
        """Measure every speed; return a row for each."""
        work = self.workload
        self._loads.tiers.load_policy = "never"
        for _ in range(2):  # the second one without what happens only once
            self._ttft_s(self._prompt)
        self._loads.tiers.drain(60)
        rows = []
        for number, rate in enumerate(work.rates_mb_s):
            self._line.bytes_per_s, self._line.latency_s = rate * MB, work.latency_s
            self._learn()
            rows.append(self._row(rate))
            progress((number + 1) / len(work.rates_mb_s))
        return rows

    def close(self) -> None:
        """Let go of the engine."""
        self.opened.close()

    def _learn(self) -> None:
        self._loads.tiers.load_policy = "always"
        for share in range(1, _LEARNING + 1):
            self._ttft_s(self._prompt[: len(self._prompt) * share // _LEARNING])

    def _row(self, rate: float) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        loaded = []
        for _ in range(self.workload.repeats):
            for policy in POLICIES:
                self._loads.tiers.load_policy = policy
                seconds[policy].append(self._ttft_s(self._prompt))
                if policy == "auto":
                    loaded.append(self._cached)
        middle = {policy: statistics.median(values) for policy, values in seconds.items()}
        best = min(middle["always"], middle["never"])
        return {
            "rate_mb_s": rate,
            "load_s": round(middle["always"], 4),
            "recompute_s": round(middle["never"], 4),
            "decided_s": round(middle["auto"], 4),
            "decided_to_better_extreme": round(middle["auto"] / best, 3),
            "loaded_tokens": int(statistics.median(loaded)),
            "prompt_tokens": self.workload.num_tokens,
        }

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


def describe(bench: TierBench) -> str:
    """Say what the table is about, in a line."""
    nbytes = bench.opened.bill.kv_token_bytes * bench.workload.num_tokens
    return f"{bench.workload.num_tokens} tokens, {format_size(nbytes)} of KV"
