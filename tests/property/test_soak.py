"""The disturbances of the state machine, at random but seeded, so that events can be counted.

Guards what a machine cannot promise: that its examples ever got to a preemption, a copy on write, a
follower, an abort in each state. A count of zero here means the property tests prove nothing there.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvist.config import KVAllocation
from kvist.events import BlockEvicted, BlocksShared, RequestPreempted, StepFailed
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import EngineRig

VOCAB = 61


def disturb(rig: EngineRig, rng: random.Random, rounds: int) -> Counter[str]:
    bases = [tuple(rng.randrange(VOCAB) for _ in range(36)) for _ in range(3)]
    limit = rig.config.max_model_len - 1

    def add() -> None:
        cut = rng.choice((4, 8, 12, 16, 24, rng.randint(1, 36)))
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 5))))
        prompt = (*rng.choice(bases)[:cut], *tail)[:limit]
        stop = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 2))))
        for _ in range(rng.choice((1, 1, 3))):
            rig.add(
                prompt,
                rng.choice((1, 4, 9, 15, None)),
                priority=rng.randrange(3),
                salt=rng.choice(("", "", "", "other")),
                stop_token_ids=stop,
                timeout_s=rng.choice((None, None, None, None, 6.0, 30.0)),
            )

    def any_in_some_state() -> str:
        # Most wait, few run and hardly any follow: so that each state has its share.
        groups: dict[str, list[str]] = {}
        for request_id in rig.active:
            groups.setdefault(rig.state(request_id), []).append(request_id)
        state = "following" if "following" in groups else rng.choice(sorted(groups))
        return rng.choice(groups[state])

    for _ in range(rounds):
        dice = rng.random()
        if len(rig.active) < 3:
            add()
        elif dice < 0.20:
            if len(rig.active) < 9:
                add()
        elif dice < 0.25:
            if len(rig.active) < 9:
                rig.fork(any_in_some_state())
        elif dice < 0.29:
            rig.abort(any_in_some_state())
        elif dice < 0.33:
            rig.abort_in_flight(any_in_some_state)
        elif dice < 0.36:
            rig.runner.raise_before = rng.random() < 0.5
            rig.runner.raise_next = 1
        elif dice < 0.37:
            rig.runner.poison.add(any_in_some_state())
        elif dice < 0.38:
            rig.runner.not_finite.add(any_in_some_state())
        elif dice < 0.41:
            rig.schedule_and_roll_back()
        elif dice < 0.42:
            rig.reset_prefix_cache()
        if rig.active:
            rig.step()
    rig.drain()
    events = rig.events.counts
    return Counter(
        {
            **rig.counts,
            **rig.runner.counts,
            "preemptions": events[RequestPreempted],
            "evictions": events[BlockEvicted] - rig.counts["blocks reset"],
            "shared": events[BlocksShared],
            "failed steps": events[StepFailed],
        }
    )


ALWAYS = [
    "steps",
    "chunks",
    "forks",
    "copies",
    "rollbacks",
    "failed steps",
    "finish: length",
    "finish: stop",
    "finish: abort",
    "finish: error",
    "abort: waiting",
    "abort: prefill",
    "abort: decode",
    "abort: decode, forked",
    "abort in flight: prefill",
    "abort in flight: decode",
    "abort in flight: decode, forked",
    "preemptions",
    "deadlines",
    "hopeless",
    "most passes",
]
CACHING = ["shared", "hits", "hits after preemption", "evictions", "blocks reset", "follows"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_paged(policy: str, caching: bool):
    rig = EngineRig(RigConfig(scheduling_policy=policy, enable_prefix_caching=caching))
    counts = disturb(rig, random.Random(3), rounds=2_000)
    events = [*ALWAYS, "abort: waiting, preempted"]
    for event in events + (CACHING + ["abort in flight: following"] if caching else []):
        assert counts[event] > 0, f"never happened: {event}; {counts}"
    if not caching:
        assert counts["shared"] == counts["hits"] == counts["evictions"] == 0


def test_reserve():
    config = RigConfig(num_blocks=32, kv_allocation=KVAllocation.RESERVE)
    counts = disturb(EngineRig(config), random.Random(3), rounds=2_000)
    for event in ALWAYS + CACHING:
        assert counts[event] > 0, f"never happened: {event}; {counts}"


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", range(40))
def test_paged_with_other_sizes(seed: int):
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 8)
    block_size = rng.choice((1, 2, 3, 4, 8))
    enough = -(-40 // block_size)
    rig = EngineRig(
        RigConfig(
            num_blocks=enough + rng.randrange(2 * enough),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randrange(30),
            scheduling_policy=rng.choice(("fcfs", "priority")),
            kv_allocation=rng.choice(list(KVAllocation)),
        )
    )
    assert disturb(rig, rng, rounds=3_000)["finish: length"] > 0
