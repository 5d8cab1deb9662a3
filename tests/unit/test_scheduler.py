"""Who runs, with how many tokens, over which blocks; and what is true after it.

`kvist.testing.machine` tries everything in every order; here stands what one decision promises.
Tokens are counted, not seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvist.config import KVAllocation
from kvist.engine.step import StepPlan, StepResult
from kvist.errors import CapacityError, IntegrityError, RequestError
from kvist.events import RequestPreempted, RequestScheduled
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig


def rig_of(**sizes: Any) -> EngineRig:
    defaults = {"num_blocks": 64, "block_size": 4, "max_model_len": 100}
    defaults |= {"max_num_seqs": 8, "max_num_batched_tokens": 32}
    return EngineRig(RigConfig(**{**defaults, **sizes}))


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % 61 for i in range(length))


def runs(plan: StepPlan | None) -> list[tuple[str, int]]:
    assert plan is not None
    return [(item.request_id, len(item.token_ids)) for item in plan.scheduled]


# ------------------------------------------------------------------------------------- the budget


def test_decodes_come_first_then_prompts_under_way_then_new_ones():
    rig = rig_of(max_num_batched_tokens=10)
    rig.add(prompt(3, 1), 9)
    rig.step()
    rig.add(prompt(14, 2), 9)
    rig.step()
    assert runs(rig.runner.last_plan) == [("r0", 1), ("r1", 9)]
    rig.add(prompt(20, 3), 9)
    rig.step()
    assert runs(rig.runner.last_plan) == [("r0", 1), ("r1", 5), ("r2", 4)]
    rig.drain()


@pytest.mark.parametrize("budget", [1, 3, 5, 7, 13, 31])
def test_a_long_prompt_is_read_in_chunks_of_the_budget(budget: int):
    rig = rig_of(max_num_seqs=1, max_num_batched_tokens=budget)
    rig.add(prompt(50), 3)
    rig.drain()  # the rig compares the tokens, and every plan with the budget
    assert rig.runner.counts["chunks"] == -(-50 // budget) - 1
    assert rig.runner.num_computed_tokens == 50 + 2


def test_only_the_end_of_the_known_tokens_is_sampled():
    rig = rig_of(max_num_batched_tokens=8)
    rig.add(prompt(12), 3)
    rig.step()
    assert rig.runner.last_plan is not None
    assert rig.runner.last_plan.scheduled[0].sample is None
    rig.step()
    sample = rig.runner.last_plan.scheduled[0].sample
    assert sample is not None
    assert sample.position == 12
    rig.drain()


def test_no_more_than_max_num_seqs_run():
    rig = rig_of(max_num_seqs=2)
    for first in range(4):
        rig.add(prompt(3, first), 4)
    rig.step()
    assert runs(rig.runner.last_plan) == [("r0", 3), ("r1", 3)]
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 2)
    rig.drain()


# ---------------------------------------------------------------------------------- shared prefix


def test_the_same_prompt_arriving_together_is_computed_once():
    rig = rig_of(max_num_batched_tokens=64)
    for _ in range(4):
        rig.add(prompt(42), 1)
    rig.drain()
    # The others compute the last two tokens, which fill no block.
    assert rig.runner.num_computed_tokens == 42 + 3 * 2
    assert rig.counts["follows"] == 3


def test_a_prompt_of_whole_blocks_computes_its_last_block_again():
    rig = rig_of(max_num_batched_tokens=64)
    for _ in range(2):
        rig.add(prompt(40), 1)
    rig.drain()
    assert rig.runner.num_computed_tokens == 40 + 4


@pytest.mark.parametrize("suffix", [1, 7, 33])
@pytest.mark.parametrize("shared", [2_000, 2_001, 2_015])
def test_a_second_request_with_the_same_long_prefix_computes_a_block_and_its_suffix(
    shared: int, suffix: int
):
    rig = rig_of(
        num_blocks=300,
        block_size=16,
        max_model_len=2_200,
        max_num_batched_tokens=512,
        vocab_size=251,
    )
    common = tuple(i % 250 for i in range(shared))
    rig.add((*common, *range(suffix)), 1)
    rig.drain()
    before = rig.runner.num_computed_tokens
    rig.add((*common, *range(100, 100 + suffix)), 1)
    rig.drain()
    assert suffix <= rig.runner.num_computed_tokens - before <= 16 + suffix
    assert rig.stories["r1"].finish_reason == "length"


def test_different_salts_never_share():
    rig = rig_of()
    for salt in ("a", "b"):
        rig.add(prompt(30), 1, salt=salt)
    rig.drain()
    assert rig.runner.num_computed_tokens == 60
    assert rig.counts["hits"] == rig.counts["follows"] == 0


def test_turned_off_nothing_is_shared():
    rig = rig_of(enable_prefix_caching=False)
    for _ in range(2):
        rig.add(prompt(30), 1)
    rig.drain()
    assert rig.runner.num_computed_tokens == 60


def test_cached_tokens_are_told_with_the_first_news():
    rig = rig_of()
    rig.add(prompt(30), 1)
    rig.drain()
    rig.add(prompt(30), 2)
    updates = rig.engine.step() + rig.engine.step()
    assert [update.num_cached_tokens for update in updates] == [28, 28]
    assert updates[-1].finish_reason == "length"


# ------------------------------------------------------------------------------------ who follows


def with_a_follower(**sizes: Any) -> tuple[EngineRig, StepPlan]:
    """r0 reads a prompt in this plan, r1 with the same one follows it; the plan is in flight."""
    rig = rig_of(max_num_batched_tokens=64, **sizes)
    rig.add(prompt(42), 5)
    rig.add(prompt(42), 5)
    plan = rig.scheduler.schedule()
    assert runs(plan) == [("r0", 42)]
    assert rig.state("r1") == "following"
    return rig, plan


def test_a_follower_is_woken_when_its_leader_commits():
    rig, plan = with_a_follower()
    rig.scheduler.commit(plan, rig.runner.run(plan))
    assert rig.state("r1") == "waiting"
    assert runs(rig.scheduler.schedule()) == [("r0", 1), ("r1", 2)]


def test_a_follower_is_woken_when_its_leader_is_aborted():
    rig, plan = with_a_follower()
    assert rig.scheduler.abort("r0") is None
    (update,) = rig.scheduler.commit(plan, rig.runner.run(plan))
    assert (update.request_id, update.finish_reason) == ("r0", "abort")
    assert rig.state("r1") == "waiting"
    assert runs(rig.scheduler.schedule()) == [("r1", 42)]


def test_a_follower_is_woken_when_its_leader_fails():
    rig, plan = with_a_follower()
    (update,) = rig.scheduler.commit(plan, StepResult({}, {"r0": "not finite"}))
    assert (update.finish_reason, update.error) == ("error", "not finite")
    assert rig.state("r1") == "waiting"


def test_a_follower_is_woken_when_the_step_is_rolled_back():
    rig, plan = with_a_follower()
    rig.scheduler.rollback(plan)
    assert rig.state("r0") == rig.state("r1") == "waiting"


def test_a_follower_is_woken_when_its_leader_is_preempted():
    # r0 decodes and grows; r1 reads a long prompt, two tokens a step, until both fill the pool.
    rig = rig_of(num_blocks=12, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=3)
    rig.add(prompt(7, 5), None)
    rig.step_until(lambda: rig.stories["r0"].outputs)
    rig.add(prompt(33), 2)
    rig.step()
    rig.add(prompt(33), 2)
    rig.scheduler.rollback(rig.scheduler.schedule(only={"r2"}))
    for _ in range(30):
        if rig.stories["r1"].preempted:
            break
        assert rig.state("r2") == "following"
        rig.step()
    assert rig.state("r1") == "waiting, preempted"
    assert rig.state("r2") == "waiting"
    rig.drain()


def test_a_follower_may_be_aborted():
    rig, plan = with_a_follower()
    update = rig.scheduler.abort("r1")
    assert update is not None
    assert update.finish_reason == "abort"
    rig.scheduler.commit(plan, rig.runner.run(plan))
    rig.scheduler.check()
    assert "r1" not in rig.scheduler


# -------------------------------------------------------------------------- order, room, preemption


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "012"), ("priority", "120")])
def test_order_of_admission(policy: str, order: str):
    rig = rig_of(scheduling_policy=policy, max_num_seqs=1)
    for first, priority in enumerate((5, 0, 1)):
        rig.add(prompt(3, first), 2, priority=priority)
    rig.drain()
    scheduled = [e.request_id for e in rig.events.recent() if isinstance(e, RequestScheduled)]
    assert scheduled == [f"r{n}" for n in order]


def two_that_outgrow_the_pool(policy: str = "fcfs") -> EngineRig:
    rig = rig_of(
        num_blocks=10, max_model_len=40, scheduling_policy=policy, enable_prefix_caching=False
    )
    rig.add(prompt(15, 1), None, priority=1)
    rig.add(prompt(15, 2), None, priority=0)
    return rig


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "r1"), ("priority", "r0")])
def test_who_should_run_last_gives_its_blocks_up(policy: str, victim: str):
    rig = two_that_outgrow_the_pool(policy)
    rig.step_until(lambda: rig.events.counts[RequestPreempted])
    assert rig.stories[victim].preempted
    assert rig.runner.last_plan is not None
    assert rig.runner.last_plan.preempted == (victim,)
    rig.drain()


def test_the_preempted_keeps_its_place_before_those_that_came_later():
    rig = two_that_outgrow_the_pool()
    rig.step_until(lambda: rig.stories["r1"].preempted)
    rig.add(prompt(2, 4), 2)
    rig.drain()
    scheduled = [e.request_id for e in rig.events.recent() if isinstance(e, RequestScheduled)]
    assert scheduled[-2:] == ["r1", "r2"]


def test_the_preempted_finds_its_own_blocks_again():
    rig = rig_of(num_blocks=10, max_model_len=40)
    rig.add(prompt(15, 1), 20)
    rig.add(prompt(15, 2), 20)
    rig.drain()
    assert rig.events.counts[RequestPreempted] > 0
    assert rig.counts["hits after preemption"] > 0
    resumed = [e for e in rig.events.recent() if isinstance(e, RequestScheduled) and e.resumed]
    assert all(e.num_cached_tokens for e in resumed)


def test_admission_looks_ahead_so_that_there_is_no_storm():
    # Each needs 5 blocks for its prompt and 9 in the end; 4 fit to the end, 8 at their start.
    rig = rig_of(num_blocks=40, max_model_len=40, max_num_seqs=32, max_num_batched_tokens=64)
    for first in range(32):
        rig.add(prompt(20, first + 1), 16)
    rig.drain()
    assert rig.events.counts[RequestPreempted] <= 32
    computed = rig.runner.num_computed_tokens
    assert computed <= 1.5 * 32 * (20 + 15)


def test_nobody_comes_in_only_to_be_pushed_out_by_the_next_block_of_another():
    # Both prompts fill the pool to the last slot; the first one grows in the next step.
    rig = rig_of(num_blocks=8, max_model_len=32)
    rig.add(prompt(16, 1), 8)
    rig.add(prompt(16, 2), 8)
    rig.step()
    assert rig.scheduler.num_running == 1
    rig.drain()
    assert rig.events.counts[RequestPreempted] == 0


def test_reserve_takes_room_for_the_maximum_and_never_preempts():
    sizes = {"num_blocks": 50, "max_model_len": 40, "enable_prefix_caching": False}
    peak = {}
    for mode in (KVAllocation.PAGED, KVAllocation.RESERVE):
        rig = rig_of(kv_allocation=mode, **sizes)
        for first in range(8):
            rig.add(prompt(3, first), 4)
        rig.step()
        peak[mode] = rig.scheduler.num_running
        if mode is KVAllocation.RESERVE:
            assert rig.cache.num_used_blocks == 50
        rig.drain()
        assert rig.events.counts[RequestPreempted] == 0
    assert peak == {KVAllocation.PAGED: 8, KVAllocation.RESERVE: 5}


def test_a_pool_for_less_than_one_request_is_refused_with_numbers():
    with pytest.raises(CapacityError, match=r"max_model_len=33 needs 9 blocks.*has 8.*to 32"):
        rig_of(num_blocks=8, max_model_len=33)
    with pytest.raises(CapacityError, match=r"has 0 .*raise --kv-cache-memory-bytes$"):
        rig_of(num_blocks=0, max_model_len=33)


def test_one_request_may_fill_the_whole_pool():
    rig = rig_of(num_blocks=8, max_model_len=32)
    rig.add(prompt(5), None)
    rig.add(prompt(5, 3), None)
    rig.drain()
    assert rig.counts["finish: length"] == 2


# ------------------------------------------------------------------------------ rollback and misuse


def test_rollback_restores_the_books():
    rig = rig_of(num_blocks=24, max_model_len=40, max_num_batched_tokens=20)
    rig.add(prompt(11, 1), 9)
    rig.step()
    child = rig.fork("r0")
    rig.add(prompt(30, 2), 9)
    rig.step()
    rig.add(prompt(11, 1), 9)
    while rig.active:
        rig.schedule_and_roll_back()  # compares the books before and after
        rig.step()
    assert rig.counts["rollbacks"] >= 9
    assert rig.runner.counts["copies"] > 0
    rig.drain()
    assert rig.stories[child].finish_reason == "length"


def test_a_plan_is_recorded_once_and_before_the_next():
    rig = rig_of()
    rig.add(prompt(5), 5)
    plan = rig.scheduler.schedule()
    with pytest.raises(IntegrityError, match="step 1 is not recorded yet"):
        rig.scheduler.schedule()
    with pytest.raises(IntegrityError, match="in flight"):
        rig.scheduler.fork("r0", "new")
    rig.scheduler.commit(plan, rig.runner.run(plan))
    with pytest.raises(IntegrityError, match="step 1 is not the plan in flight"):
        rig.scheduler.commit(plan, StepResult({"r0": 1}))
    with pytest.raises(IntegrityError, match="step 1 is not the plan in flight"):
        rig.scheduler.rollback(plan)


def test_a_result_without_a_token_is_refused_before_anything_is_recorded():
    rig = rig_of()
    rig.add(prompt(5), 5)
    rig.add(prompt(5, 3), 5)
    plan = rig.scheduler.schedule()
    result = rig.runner.run(plan)
    with pytest.raises(IntegrityError, match="step 1 brought no token for 'r1'"):
        rig.scheduler.commit(plan, StepResult({"r0": result.tokens["r0"]}))
    rig.scheduler.rollback(plan)
    rig.drain()


def test_blocks_of_an_aborted_request_stay_until_its_plan_is_recorded():
    rig = rig_of()
    rig.add(prompt(9), 5)
    plan = rig.scheduler.schedule()
    assert rig.scheduler.abort("r0") is None
    assert rig.cache.num_used_blocks == 3
    (update,) = rig.scheduler.commit(plan, rig.runner.run(plan))
    assert (update.finish_reason, update.token_ids) == ("abort", ())
    assert rig.cache.num_used_blocks == 0


def test_aborted_in_a_step_that_is_rolled_back():
    rig = rig_of()
    rig.add(prompt(9), 5)
    plan = rig.scheduler.schedule()
    rig.scheduler.abort("r0")
    (update,) = rig.scheduler.rollback(plan)
    assert update.finish_reason == "abort"
    assert not rig.scheduler.has_work
    rig.scheduler.check()


def test_rows_that_are_not_finite_fail_alone():
    rig = rig_of()
    for first in range(3):
        rig.add(prompt(5, first), 5)
    rig.runner.not_finite.add("r1")
    rig.drain()
    assert {r: s.finish_reason for r, s in rig.stories.items()} == {
        "r0": "length",
        "r1": "error",
        "r2": "length",
    }


def test_what_nobody_asked_for_cannot_be_aborted_or_forked():
    rig = rig_of()
    assert rig.scheduler.abort("nobody") is None
    with pytest.raises(RequestError, match="no unfinished request 'nobody'"):
        rig.scheduler.fork("nobody", "child")
    rig.add(prompt(5), 5)
    rig.add(prompt(6), 5)
    with pytest.raises(RequestError, match="'r1' is in use"):
        rig.scheduler.fork("r0", "r1")


# --------------------------------------------------------------------------------------------- fork


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_fork_says_what_its_parent_says(steps: int):
    rig = rig_of(max_num_batched_tokens=8)
    rig.add(prompt(13), 9)
    for _ in range(steps):
        rig.step()
    rig.fork("r0")
    rig.drain()
    assert rig.stories["r0"].outputs == rig.stories["r1"].outputs


def test_a_fork_of_a_decoding_request_computes_nothing_twice():
    rig = rig_of(max_num_batched_tokens=32)
    rig.add(prompt(13), 9)
    rig.step()
    before = rig.runner.num_computed_tokens
    rig.fork("r0")
    rig.drain()
    assert rig.runner.num_computed_tokens - before == 2 * 8
    assert rig.runner.counts["copies"] == 1, "one of them stayed in the half filled block"


def test_a_fork_beyond_max_num_seqs_waits():
    rig = rig_of(max_num_seqs=1)
    rig.add(prompt(13), 9)
    rig.step()
    rig.fork("r0")
    assert rig.state("r1") == "waiting"
    rig.drain()


def test_a_step_that_cannot_be_planned_leaves_the_books_as_they_were(monkeypatch):
    rig = rig_of(num_blocks=24, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=16)
    rig.add(prompt(9), 8)
    rig.step()
    rig.add(prompt(7, 5), 8)
    before = rig.scheduler.cache.stats()

    def broken(*_: object) -> None:
        raise ValueError("cannot be planned")

    with monkeypatch.context() as patched:
        patched.setattr("kvist.engine.scheduler.plan_step", broken)
        with pytest.raises(ValueError, match="cannot be planned"):
            rig.scheduler.schedule()
    assert rig.scheduler.cache.stats() == before
    rig.scheduler.check()
    rig.drain()


# ------------------------------------------------------------------------------- without a KV cache


@pytest.mark.parametrize("budget", [100, 7])
def test_without_a_cache_every_token_computes_its_whole_context_again(budget: int):
    # In one piece, or in chunks that keep K and V until the token is there.
    rig = rig_of(
        kv_allocation=KVAllocation.NONE,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_num_batched_tokens=budget,
    )
    rig.add(prompt(20), 4)
    rig.drain()  # the rig compares the tokens with those of a plain loop
    assert rig.runner.num_computed_tokens == 20 + 21 + 22 + 23
