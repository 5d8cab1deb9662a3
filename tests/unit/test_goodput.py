"""Far more is asked than can be done: how many are done within their deadline, in virtual time.

Guards against promises that the engine does not keep: requests that are taken and cut off at their
deadline have cost as much as those that finish, and under overload there is nothing else left. The
steps take what a cost model says, so the numbers are the same on every machine.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from kvist.build import open_cache
from kvist.config import CacheConfig, SchedulerConfig
from kvist.engine.engine import Engine
from kvist.engine.null_runner import NullRunner
from kvist.engine.sampling import SamplingParams
from kvist.engine.scheduler import Scheduler
from kvist.engine.sequence import EngineRequest
from kvist.engine.step import StepPlan, Update
from kvist.events import EventLog
from kvist.keys import RootFields, root_key

BAR = 0.9
"""Of the best of all factors."""
FACTORS = (0.8, 1.5, 5.0)
BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048

ROOT = root_key(
    RootFields(
        weights_digest=b"null",
        compute_dtype="none",
        formats=("null",),
        rope="",
        windows="",
        block_size=BLOCK_SIZE,
        packing_id="null",
        layers="0-0",
        heads="0-0",
    )
)


@dataclass(frozen=True)
class Load:
    """What a step costs, and what is asked.

    `step_s`, `decode_s`, `read_s`: of a step, of each sequence that decodes in it, of each token
    that it reads. `ends`: so many of a thousand tokens end an answer.
    """

    step_s: float
    decode_s: float
    read_s: float
    num_seqs: int = 16
    num_blocks: int = 2000
    prompt: tuple[int, int] = (40, 60)
    tokens: tuple[int, int] = (16, 32)
    ends: int = 0
    deadline_s: float = 10.0
    seconds: float = 80.0


LOADS = {
    # A full batch is done in half of the deadline: what is left for the queue is the question.
    "roomy": Load(0.02, 0.01, 0.001),
    # A full batch takes as long as the deadline: whoever waits, or guesses short, is late.
    "tight": Load(0.1, 0.018, 0.001),
    # A full batch takes twice the deadline: it must not become full.
    "too wide": Load(0.1, 0.05, 0.001, num_seqs=32),
    # Reading prompts is most of the work, and delays those that decode.
    "long prompts": Load(0.05, 0.004, 0.001, prompt=(300, 900), tokens=(8, 24), seconds=120.0),
    # Nobody knows how long an answer gets.
    "open end": Load(0.02, 0.008, 0.001, tokens=(400, 400), ends=25, deadline_s=15.0, seconds=80.0),
    # The pool is full before the places are taken.
    "small pool": Load(0.02, 0.01, 0.001, num_blocks=40, prompt=(40, 120), tokens=(16, 100)),
}


class Door:
    """An engine in virtual time and the requests that come to it."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.rng = random.Random(seed)
        events = EventLog()
        cache = open_cache(CacheConfig(num_blocks=load.num_blocks, block_size=BLOCK_SIZE), events)
        config = SchedulerConfig(
            max_model_len=min(MAX_MODEL_LEN, load.num_blocks * BLOCK_SIZE),
            max_num_seqs=load.num_seqs,
        )
        self.runner = NullRunner(load.num_blocks, BLOCK_SIZE, step_seconds=self.cost_s)
        self.engine = Engine(
            Scheduler(config, cache, events, ROOT),
            self.runner,
            events,
            clock=lambda: self.runner.now_s,
        )

    def cost_s(self, plan: StepPlan) -> float:
        decoding = sum(len(item.token_ids) == 1 for item in plan.scheduled)
        reading = plan.num_tokens - decoding
        load = self.load
        return load.step_s + load.decode_s * decoding + load.read_s * reading

    def request(self, name: str, timeout_s: float | None, arrived_s: float) -> EngineRequest:
        length = self.rng.randint(*self.load.prompt)
        return EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(self.rng.choices(range(1000), k=length)),
            params=SamplingParams(max_tokens=self.rng.randint(*self.load.tokens)),
            eos_token_ids=tuple(range(self.load.ends)),
            timeout_s=timeout_s,
            arrived_s=arrived_s,
        )


def capacity(load: Load) -> float:
    """Requests a second by clients that ask again as soon as they are answered."""
    door, done = Door(load, 1), 0
    for n in range(load.num_seqs):
        door.engine.add_request(door.request(f"c{n}", None, 0.0))
    while door.runner.now_s < load.seconds:
        for update in door.engine.step():
            if update.is_last:
                done += 1
                name = f"again {done}"
                door.engine.add_request(door.request(name, None, door.runner.now_s))
    return done / door.runner.now_s


def open_loop(load: Load, rate: float) -> tuple[float, Counter[str]]:
    """Return goodput a second, and how all ended, of requests that come at random times."""
    door, ends, good = Door(load, 2), Counter[str](), 0
    arrivals: list[float] = []
    while not arrivals or arrivals[-1] < load.seconds + load.deadline_s:
        arrivals.append((arrivals[-1] if arrivals else 0.0) + door.rng.expovariate(rate))
    runner, engine, came = door.runner, door.engine, 0

    def end(update: Update) -> bool:
        if update.finish_reason not in ("stop", "length"):
            hopeless = update.error is not None and "not begun" in update.error
            ends["hopeless" if hopeless else "cut off"] += 1
            return False
        ends["finished"] += 1
        took_s = runner.now_s - arrivals[int(update.request_id)]
        counts = load.deadline_s <= runner.now_s <= load.deadline_s + load.seconds
        return counts and took_s <= load.deadline_s

    while came < len(arrivals) or engine.has_work:
        if not engine.has_work:
            runner.now_s = max(runner.now_s, arrivals[came])
        while came < len(arrivals) and arrivals[came] <= runner.now_s:
            asked = door.request(str(came), load.deadline_s, arrivals[came])
            ends["refused"] += engine.offer(asked) is not None
            came += 1
        good += sum(end(update) for update in engine.step() if update.is_last)
    return good / load.seconds, ends


@pytest.mark.parametrize("name", LOADS)
def test_at_five_times_the_capacity_as_much_is_done_in_time_as_at_best(name: str):
    load = LOADS[name]
    most = capacity(load)
    runs = {factor: open_loop(load, factor * most) for factor in FACTORS}
    best = max(goodput for goodput, _ in runs.values())
    goodput, ends = runs[FACTORS[-1]]
    assert goodput >= BAR * best, runs
    # Of answers without a known end nobody can say which get long.
    wasted = 0.5 if load.ends else 0.15
    assert ends["cut off"] <= wasted * ends["finished"], runs
    below = runs[FACTORS[0]][1]
    assert below["refused"] <= 0.2 * below.total(), runs
