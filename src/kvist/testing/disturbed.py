"""A runner that fails on demand, and looks at every plan before it runs.

Owns what can go wrong while a step runs, and what every plan must be like. Knows no requests beyond
their ids. No torch. Threads: one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvist.config import KVAllocation
from kvist.engine.null_runner import NullRunner
from kvist.engine.step import StepPlan, StepResult


class StepError(RuntimeError):
    """What a disturbed runner raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RigConfig:
    """Sizes of a rig. Small ones make preemption and eviction common.

    REQUIRES ``num_blocks * block_size >= max_model_len`` and
    ``max_num_batched_tokens >= max_num_seqs``, as `kvist.build` sees to.

    Below the device are `num_tiers` tiers of `tier_blocks` blocks; everything that a tier can do
    wrong it does at `fault_rate`, and the ends of its jobs are told up to `max_delay_polls` late.
    `compute_s` is what the tiers are told that a block costs to compute.
    """

    num_blocks: int = 14
    block_size: int = 4
    max_model_len: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 10
    scheduling_policy: str = "fcfs"
    kv_allocation: KVAllocation = KVAllocation.PAGED
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    vocab_size: int = 61
    num_tiers: int = 0
    tier_blocks: int = 20
    tier_write_policy: str = "through"
    tier_load_policy: str = "auto"
    staging_blocks: int = 4
    in_place: bool = True
    fault_rate: float = 0.0
    max_delay_polls: int = 0
    compute_s: float | None = None
    seed: int = 0


class DisturbedRunner:
    """The null runner, made to fail on demand, and a witness of every plan.

    Attributes
    ----------
    poison : set of request id
        A step with one of them raises.
    not_finite : set of request id
        Their rows come back as failed.
    raise_next : int
        So many steps raise, whoever is in them.
    raise_before : bool
        Raise before anything is written, rather than after all of it was.
    in_flight : list of callables
        Called once, between schedule and commit.
    convicted : set of request id
        Were alone in a step that raised: these may end with an error, and only these.
    """

    def __init__(self, inner: NullRunner, config: RigConfig) -> None:
        self.vocab_size = inner.vocab_size
        self.poison: set[str] = set()
        self.not_finite: set[str] = set()
        self.raise_next = 0
        self.raise_before = False
        self.in_flight: list[Callable[[], None]] = []
        self.convicted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.last_plan: StepPlan | None = None
        self._inner = inner
        self._config = config

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return self._inner.num_computed_tokens

    def run(self, plan: StepPlan) -> StepResult:
        """Look at the plan, let the world interfere, compute, and fail if that was asked for."""
        self._inspect(plan)
        self.last_plan = plan
        self.counts["steps"] += 1
        self.counts["copies"] += len(plan.copies)
        self.counts["chunks"] += sum(s.sample is None for s in plan.scheduled)
        callbacks, self.in_flight = self.in_flight, []
        for callback in callbacks:
            callback()
        request_ids = [item.request_id for item in plan.scheduled]
        fails = self.raise_next > 0 or any(r in self.poison for r in request_ids)
        self.raise_next = max(0, self.raise_next - 1)
        if fails and len(request_ids) == 1:
            self.convicted.add(request_ids[0])
        if fails and self.raise_before:
            raise StepError(f"before {request_ids}")
        result = self._inner.run(plan)
        if fails:
            raise StepError(f"after {request_ids}")
        failed = {r: "not finite" for r in request_ids if r in self.not_finite}
        tokens = {r: t for r, t in result.tokens.items() if r not in failed}
        return StepResult(tokens, failed, prompt_logprobs=result.prompt_logprobs)

    def _inspect(self, plan: StepPlan) -> None:
        config = self._config
        lengths = [len(item.token_ids) for item in plan.scheduled]
        assert plan.num_tokens == sum(lengths) <= config.max_num_batched_tokens
        assert 0 < len(lengths) <= config.max_num_seqs
        assert all(lengths), "a run without tokens"
        assert [n > 1 for n in lengths] == sorted(n > 1 for n in lengths), "decode comes first"
        request_ids = {item.request_id for item in plan.scheduled}
        assert len(request_ids) == len(lengths)
        assert not request_ids & set(plan.preempted), "preempted and scheduled"
        assert len(set(plan.fresh)) == len(plan.fresh), "one block handed out twice"
        assert {c.target for c in plan.copies} <= set(plan.fresh)
        writers: dict[int, str] = {}
        for item in plan.scheduled:
            end = item.position + len(item.token_ids)
            first, last = item.position // config.block_size, (end - 1) // config.block_size
            assert len(item.block_ids) == last + 1, "the snapshot does not fit the run"
            for block_id in item.block_ids[first : last + 1]:
                other = writers.setdefault(block_id, item.request_id)
                assert other == item.request_id, f"both write block {block_id}"
