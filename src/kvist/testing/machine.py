"""A state machine that does to an engine whatever clients and failing steps may do to it.

Subclass `EngineMachine` to fix a configuration, and let pytest collect its ``TestCase``. Owns the
choice of what happens next; what must hold is in `kvist.testing.rig`. Needs hypothesis; no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvist.config import KVAllocation
from kvist.policies.registry import POLICIES
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig

VOCAB = 61

# Prompts that share prefixes: the same few texts, cut anywhere, some with a tail of their own.
_BASES = tuple(tuple((7 * i * base + i + base) % VOCAB for i in range(32)) for base in range(3))


@st.composite
def rig_configs(draw: st.DrawFn, *, tiers: bool = False) -> RigConfig:
    """Small rigs: pools that hold one or a few sequences of `max_model_len`."""
    block_size = draw(st.sampled_from((1, 2, 4, 4)))
    max_model_len = draw(st.integers(12, 40))
    enough = -(-max_model_len // block_size)
    max_num_seqs = draw(st.integers(1, 5))
    return RigConfig(
        num_blocks=enough + draw(st.integers(0, 2 * enough)),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from((0, 1, 3, 6, 17, 40))),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
        kv_allocation=draw(
            st.sampled_from((KVAllocation.PAGED, KVAllocation.PAGED, *KVAllocation))
        ),
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
        eviction_policy=draw(st.sampled_from(sorted(POLICIES))),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1, 0.3))),
        max_num_queued_reqs=draw(st.sampled_from((None, None, None, 1, 3))),
        max_num_queued_tokens=draw(st.sampled_from((None, None, None, 20, 60))),
        vocab_size=VOCAB,
        **(draw(tiers_below()) if tiers else {}),
    )


@st.composite
def tiers_below(draw: st.DrawFn) -> dict[str, Any]:
    """Draw tiers: small ones, whose loads fail, are late, damaged and cancelled, or all is well."""
    return {
        "num_tiers": draw(st.sampled_from((1, 1, 2))),
        "tier_blocks": draw(st.sampled_from((3, 20, 200, 200))),
        "tier_write_policy": draw(st.sampled_from(("through", "through", "hits:2", "evict"))),
        "tier_load_policy": draw(st.sampled_from(("auto", "always", "always"))),
        "staging_blocks": draw(st.sampled_from((1, 4, 32))),
        "in_place": draw(st.booleans()),
        "fault_rate": draw(st.sampled_from((0.0, 0.0, 0.05, 0.3))),
        "max_delay_polls": draw(st.sampled_from((0, 1, 4, 12))),
        # Loads of a few blocks take about 1e-4 s: that is where a split pays.
        "compute_s": draw(st.sampled_from((None, 1e-6, 3e-5, 1e-4))),
        "seed": draw(st.integers(0, 1000)),
    }


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Prompts around the borders of blocks, many with a common prefix, some identical."""
    base = draw(st.sampled_from(_BASES))
    cut = draw(st.one_of(st.sampled_from((4, 8, 9, 12, 16, 24)), st.integers(1, 32)))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    return (*base[:cut], *tail)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, fork, fail and go, in any order; `EngineRig` knows what must come of it."""

    rig: EngineRig

    @initialize(config=rig_configs())
    def build(self, config: RigConfig) -> None:
        """Choose the sizes."""
        self.rig = EngineRig(config)

    def _pick(self, n: int) -> str:
        active = self.rig.active
        return active[n % len(active)]

    def _has_active(self) -> bool:
        return bool(self.rig.active)

    def _has_room(self) -> bool:
        return len(self.rig.active) < 12

    @precondition(_has_room)
    @rule(
        prompt=prompts(),
        max_tokens=st.one_of(st.integers(1, 12), st.none()),
        priority=st.integers(0, 2),
        salt=st.sampled_from(("", "", "", "other")),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        times=st.sampled_from((1, 1, 1, 2, 3)),
        timeout_s=st.sampled_from((None, None, None, 1.0, 5.0, 25.0)),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int | None,
        priority: int,
        salt: str,
        stop: list[int],
        times: int,
        timeout_s: float | None,
    ) -> None:
        """Requests arrive, sometimes several with the same prompt."""
        prompt = prompt[: self.rig.config.max_model_len - 1]
        for _ in range(times):
            self.rig.add(
                prompt,
                max_tokens,
                priority=priority,
                salt=salt,
                stop_token_ids=tuple(stop),
                timeout_s=timeout_s,
            )

    @precondition(_has_active)
    @rule(n=st.sampled_from((1, 1, 1, 2, 5)))
    def step(self, n: int) -> None:
        """Time passes."""
        for _ in range(n):
            self.rig.step()

    @precondition(lambda self: self._has_active() and self._has_room())
    @rule(n=st.integers(0, 11))
    def fork(self, n: int) -> None:
        """A request is continued twice, wherever it stands."""
        self.rig.fork(self._pick(n))

    @precondition(_has_active)
    @rule(n=st.integers(0, 11))
    def abort(self, n: int) -> None:
        """A client goes away between steps."""
        self.rig.abort(self._pick(n))
        self.rig.check()

    @precondition(_has_active)
    @rule(n=st.integers(0, 11), step_fails=st.booleans())
    def abort_in_flight(self, n: int, step_fails: bool) -> None:
        """A client goes away while the model runs, sometimes in a step that then fails."""
        self.rig.abort_in_flight(lambda: self._pick(n))
        self.rig.runner.raise_next = int(step_fails)
        self.rig.step()

    @precondition(_has_active)
    @rule(before=st.booleans(), steps=st.integers(1, 3))
    def step_raises(self, before: bool, steps: int) -> None:
        """The device hiccups; nobody is to blame."""
        self.rig.runner.raise_before = before
        self.rig.runner.raise_next = steps
        for _ in range(steps):
            self.rig.step()

    @precondition(_has_active)
    @rule(n=st.integers(0, 11), before=st.booleans())
    def poison(self, n: int, before: bool) -> None:
        """From now on every step with this request raises."""
        self.rig.runner.raise_before = before
        self.rig.runner.poison.add(self._pick(n))

    @precondition(_has_active)
    @rule(n=st.integers(0, 11))
    def not_finite(self, n: int) -> None:
        """From now on the model has nothing to say to this request."""
        self.rig.runner.not_finite.add(self._pick(n))

    @precondition(_has_active)
    @rule()
    def roll_back(self) -> None:
        """A plan is made and taken back."""
        self.rig.schedule_and_roll_back()

    @rule()
    def reset_prefix_cache(self) -> None:
        """Somebody empties the cache."""
        self.rig.reset_prefix_cache()

    @rule()
    def tend(self) -> None:
        """Time passes, and the engine has nothing to compute."""
        self.rig.now_s += 0.25
        self.rig.engine.tend()
        self.rig.check()

    def teardown(self) -> None:
        """Everything ends, and nothing is left in use."""
        if hasattr(self, "rig"):
            self.rig.drain()


class TieredMachine(EngineMachine):
    """The same over tiers that do whatever tiers may do."""

    @initialize(config=rig_configs(tiers=True))
    def build(self, config: RigConfig) -> None:
        """Choose the sizes."""
        # Who reserves the maximum has no room for loads: it is the baseline of paging.
        self.rig = EngineRig(replace(config, kv_allocation=KVAllocation.PAGED))
