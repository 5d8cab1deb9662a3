"""The engine's process with a null runner instead of a model: the same loop, nothing to load.

`NULL_STEP_S`: how long a step takes. `NULL_QUEUE`: how many may wait. `NULL_OPEN`: what goes wrong
while it opens. A prompt that ends with `POISON` makes every step it is in raise.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from kvist.build import open_cache
from kvist.config import CacheConfig, EngineConfig, SchedulerConfig
from kvist.engine.bill import MemoryUse, StartupBill
from kvist.engine.engine import Engine
from kvist.engine.null_runner import NullRunner
from kvist.engine.scheduler import Scheduler
from kvist.engine.step import StepPlan, StepResult
from kvist.engine.worker import run
from kvist.errors import CapacityError, ConfigError
from kvist.events import EventLog
from kvist.keys import RootFields, root_key

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, POISON = 2048, 16, 32_768, 1000, 666

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


class SlowRunner(NullRunner):
    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(float(os.environ.get("NULL_STEP_S", "0")))
        if any(s.position == 0 and s.token_ids[-1] == POISON for s in plan.scheduled):
            raise RuntimeError("poison")
        return super().run(plan)


@dataclass
class Opened:
    engine: Engine
    max_model_len: int
    bill: StartupBill

    def close(self, timeout_s: float) -> None:
        pass

    def memory(self) -> MemoryUse:
        return MemoryUse(
            weights_bytes=1000,
            workspace_bytes=100,
            process_bytes=10,
            kv_reserved_bytes=500,
            kv_resident_bytes=50,
            tiers_bytes=0,
            total_bytes=1100,
        )


def open_null(config: EngineConfig) -> Opened:
    match os.environ.get("NULL_OPEN"):
        case "config":
            raise ConfigError("--block-size=7 is not served; use 16")
        case "capacity":
            raise CapacityError("it needs 9 GiB, there are 3")
        case "bug":
            raise ZeroDivisionError("oops")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(600)
    events = EventLog()
    cache = open_cache(CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), events)
    queue = os.environ.get("NULL_QUEUE")
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_queued_reqs=int(queue) if queue else None
        ),
        cache,
        events,
        ROOT,
    )
    runner = SlowRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    bill = StartupBill(
        model=config.model,
        origin="nowhere",
        device="cpu",
        dtype="none",
        kv_format="null",
        process_bytes=0,
        weights_bytes=0,
        workspace_bytes=0,
        kv_pool_bytes=0,
        left_bytes=0,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        kv_token_bytes=0,
        max_model_len=MAX_MODEL_LEN,
        kv_allocation="paged",
        prefix_caching=True,
        kernels=(),
    )
    return Opened(Engine(scheduler, runner, events), MAX_MODEL_LEN, bill)


if __name__ == "__main__":
    sys.exit(run(open_null))
