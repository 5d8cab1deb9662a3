"""The loop, and what a step that raises costs whom."""

from __future__ import annotations

import random

import pytest

from kvist.engine.null_runner import NullRunner, null_generate
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import IntegrityError, RequestError
from kvist.events import RequestFinished, StepFailed
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig


def rig_with(num_requests: int, *, max_tokens: int = 4) -> EngineRig:
    rig = EngineRig(
        RigConfig(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=40)
    )
    for n in range(num_requests):
        rig.add((n, n + 1, n + 2), max_tokens)
    return rig


@pytest.mark.parametrize("culprit", range(8))
@pytest.mark.parametrize("before", [True, False])
def test_halving_finds_the_culprit_and_only_it_fails(culprit: int, before: bool):
    rig = rig_with(8)
    rig.runner.poison.add(f"r{culprit}")
    rig.runner.raise_before = before
    rig.drain()
    reasons = [story.finish_reason for story in rig.stories.values()]
    assert reasons == ["error" if n == culprit else "length" for n in range(8)]
    # 8, 4, 2, 1: no more than log2 of the batch steps are lost.
    assert rig.events.counts[StepFailed] == 4


def test_several_culprits_all_fail_and_nobody_else():
    rig = rig_with(8)
    rig.runner.poison |= {"r1", "r2", "r7"}
    rig.drain()
    failed = {r for r, story in rig.stories.items() if story.finish_reason == "error"}
    assert failed == {"r1", "r2", "r7"}


def test_a_hiccup_costs_time_and_no_request():
    rig = rig_with(8)
    rig.step()
    rig.runner.raise_next = 1
    rig.step()
    rig.drain()
    assert rig.counts["finish: length"] == 8
    assert rig.events.counts[StepFailed] == 1


def test_a_poisoned_request_among_those_that_decode():
    rig = rig_with(4, max_tokens=12)
    rig.step()
    rig.step()
    rig.runner.poison.add("r2")
    rig.drain()
    story = rig.stories["r2"]
    assert story.finish_reason == "error"
    assert len(story.outputs) == 2, "what it had said before stands"
    assert rig.counts["finish: length"] == 3


def test_the_error_names_what_was_raised():
    rig = rig_with(1)
    rig.runner.poison.add("r0")
    (update,) = rig.engine.step()
    assert update.error == "StepError: after ['r0']"
    assert not rig.engine.has_work


def test_a_suspect_that_was_aborted_meanwhile_holds_nothing_up():
    rig = rig_with(4)
    rig.runner.raise_next = 1
    rig.step()
    for request_id in ("r0", "r1"):
        rig.abort(request_id)
    rig.drain()
    assert rig.counts["finish: length"] == 2


def test_an_interrupt_is_not_a_failed_step(monkeypatch: pytest.MonkeyPatch):
    rig = rig_with(1)

    def interrupted(plan: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()


def test_a_step_with_nothing_to_do_does_nothing():
    rig = rig_with(0)
    assert rig.engine.step() == []
    assert not rig.engine.has_work


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((1, 61), "token id 61 is outside the vocabulary of 61"),
        ((1, -1), "token id -1 "),
        ((1,) * 40, r"has 40 tokens; with max_model_len=40 .* at most 39.* by 1 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_numbers(prompt: tuple[int, ...], message: str):
    rig = rig_with(0)
    with pytest.raises(RequestError, match=message) as caught:
        rig.add(prompt, 4)
    assert caught.value.param == "prompt"
    assert not rig.engine.has_work


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    rig = rig_with(1)
    request = EngineRequest(request_id="r0", prompt_token_ids=(1, 2))
    with pytest.raises(RequestError, match="'r0' is in use"):
        rig.engine.add_request(request)
    rig.drain()
    rig.engine.add_request(request)
    assert rig.engine.has_work


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_and_end_of_text(ignore_eos: bool):
    rig = rig_with(0)
    said = null_generate((5, 6, 7), 12, 61)
    eos = said[3]
    assert eos not in said[:3]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=ignore_eos)
    rig.engine.add_request(
        EngineRequest(
            request_id="a", prompt_token_ids=(5, 6, 7), params=params, eos_token_ids=(eos,)
        )
    )
    updates = []
    while rig.engine.has_work:
        updates += rig.engine.step()
    assert [t for u in updates for t in u.token_ids] == said[: 8 if ignore_eos else 4]
    last = updates[-1]
    assert (last.finish_reason, last.stop_reason) == (
        ("length", None) if ignore_eos else ("stop", eos)
    )


def test_the_window_ends_a_request_without_max_tokens():
    rig = rig_with(0)
    rig.add((1, 2, 3), None)
    rig.drain()
    assert len(rig.stories["r0"].outputs) == 37
    (event,) = [e for e in rig.events.recent() if isinstance(e, RequestFinished)]
    assert (event.reason, event.num_prompt_tokens, event.num_output_tokens) == ("length", 3, 37)


def test_nothing_is_kept_of_requests_that_ended():
    """A server runs for months: what a request leaves behind, it leaves a million times."""
    rig = EngineRig(RigConfig(num_blocks=20))
    for n in range(60):
        rig.add((n % 3, n % 5, 7), 9)
        if n % 7 == 0:
            rig.abort(rig.active[-1])
        rig.step()
    rig.drain()
    scheduler = rig.scheduler
    waiting = scheduler._waiting
    held = (scheduler._sequences, scheduler._requests._by_owner, scheduler._running, waiting)
    assert not any(map(len, held))
    assert not waiting._parked
    assert not waiting._followers
    assert not waiting._promises
    assert not rig.cache._tables
    assert not rig.engine._suspects


# ------------------------------------------------------------------------------- the null runner


def test_the_null_runner_notices_a_wrong_table():
    """The tests above stand on this: with wrong books the null model does not stay silent."""
    rig = rig_with(2, max_tokens=20)
    for _ in range(6):
        rig.step()
    tables = [rig.scheduler._sequences[r].table for r in ("r0", "r1")]
    assert tables[0] is not None
    assert tables[1] is not None
    tables[0].ids[0] = tables[1].ids[0]
    plan = rig.scheduler.schedule()
    with pytest.raises(IntegrityError, match="r0 reads another's token at "):
        rig.runner.run(plan)


def test_the_null_runner_notices_a_block_nobody_wrote():
    rig = rig_with(1, max_tokens=20)
    for _ in range(6):
        rig.step()
    table = rig.scheduler._sequences["r0"].table
    assert table is not None
    table.ids[0] = 63 - table.ids[0]
    plan = rig.scheduler.schedule()
    with pytest.raises(IntegrityError, match="slot 0, which nobody wrote"):
        rig.runner.run(plan)


def test_virtual_time_adds_up():
    rig = rig_with(1)
    runner = NullRunner(64, 4, 61, step_seconds=lambda plan: 0.5 + plan.num_tokens)
    rig.engine.runner = runner
    rig.drain()
    assert runner.now_s == (0.5 + 3) + 3 * (0.5 + 1)


def test_every_context_gives_its_own_tokens():
    """A model that says the same whatever came before would hide every wrong table."""
    rng = random.Random(0)
    prompts = {tuple(rng.randrange(1000) for _ in range(6)) for _ in range(200)}
    said = {tuple(null_generate(prompt, 6, 1000)) for prompt in prompts}
    assert len(said) == len(prompts)
