"""The planner's bytes are those that the engine takes, for every model that the tests build.

`kvist plan` computes from ``config.json`` alone, the engine allocates from a layout of its own: two
ways to one number. Guarded against: a family whose shape one of them reads differently.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvist.engine.llm import LLM
from kvist.lab.models import find_model
from kvist.lab.plan import Demand, make_plan
from kvist.testing.models import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, BLOCK = 128, 16


def allocated(folder, dtype: str, **options) -> LLM:
    return LLM(str(folder), dtype=dtype, max_model_len=CONTEXT, block_size=BLOCK, **options)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_planned_bytes_are_allocated_bytes(family, tiny_folder):
    folder = tiny_folder(family)
    for dtype, spelled in (("float32", "fp32"), ("bfloat16", "bf16")):
        model = find_model(str(folder))
        demand = Demand(context=CONTEXT, concurrency=3, kv_cache_dtype=spelled, block_size=BLOCK)
        plan = make_plan(model, demand)
        # What three whole sequences are planned to take is what three of them are given.
        with allocated(folder, dtype, kv_cache_memory_bytes=plan.kv_bytes) as llm:
            assert llm.bill.kv_token_bytes == plan.kv_bytes_per_token
            assert llm.pool.tensor.nbytes == plan.kv_bytes
            assert llm.pool.num_blocks == 3 * CONTEXT // BLOCK
            assert llm.bill.kv_pool_bytes == plan.kv_bytes


def test_planned_weights_are_those_that_are_loaded(tiny_folder):
    folder = tiny_folder("llama")
    planned = find_model(str(folder)).weights_bytes
    with allocated(folder, "float32", kv_cache_memory_bytes=1 << 20) as llm:
        # What the engine packs and pads for its kernels comes on top.
        assert planned <= llm.bill.weights_bytes <= 1.02 * planned
