"""The bill against the process it is about: in a process of its own, before and after load.

Guards against a row that is forgotten, or counted twice, and against a bill that cannot be wrong:
what the rows do not explain is a row too, and must be small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvist.engine.bill import MemoryUse

SCRIPT = """
import json, sys
from kvist.config import EngineConfig
from kvist.engine.assemble import open_engine
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest

config = EngineConfig(
    model=sys.argv[1], dtype="float32", kv_cache_memory_bytes=64 << 20, max_num_seqs=8,
    max_num_batched_tokens=256,
)
opened = open_engine(config)
looks = [opened.memory()]
for n in range(24):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = tuple((n + 7 * i) % 200 for i in range(180))
    opened.engine.add_request(
        EngineRequest(request_id=str(n), prompt_token_ids=prompt, params=params)
    )
while opened.engine.has_work:
    opened.engine.step()
looks.append(opened.memory())
for use in looks:
    print(json.dumps({
        "rows": use.rows(), "total": use.total_bytes, "workspace": use.workspace_bytes,
        "unaccounted": use.unaccounted_bytes, "kv": use.kv_resident_bytes,
        "kernels": use.kernels_bytes, "kernels_reserved": use.kernels_reserved_bytes,
    }))
"""


def use_of(**changes: int) -> MemoryUse:
    plain = {
        "weights_bytes": 100,
        "workspace_bytes": 40,
        "process_bytes": 200,
        "kv_reserved_bytes": 1000,
        "kv_resident_bytes": 50,
        "tiers_bytes": 5,
        "total_bytes": 370,
    }
    return MemoryUse(**{**plain, **changes})


@pytest.mark.parametrize("total", [300, 355, 370, 395, 500])
def test_the_resident_rows_add_up_to_what_the_process_holds(total: int):
    use = use_of(total_bytes=total)
    assert sum(resident for _, _, resident in use.rows()) == total


@pytest.mark.parametrize(
    ("total", "workspace", "unaccounted"), [(370, 15, 0), (500, 40, 105), (300, 0, -55)]
)
def test_the_workspace_never_explains_more_than_it_is(total: int, workspace: int, unaccounted: int):
    use = use_of(total_bytes=total)
    assert (use.workspace_resident_bytes, use.unaccounted_bytes) == (workspace, unaccounted)


def test_what_kernels_keep_is_taken_out_of_the_workspace():
    use = use_of(total_bytes=500, kernels_bytes=25, kernels_reserved_bytes=30)
    rows = {item: (reserved, resident) for item, reserved, resident in use.rows()}
    assert rows["workspace"] == (10, 10)
    assert rows["kernels"] == (30, 25)
    assert sum(resident for _, resident in rows.values()) == 500


def test_the_bill_fits_the_process_before_and_after_load(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from kvist.kernels.cpu import obstacle
    from kvist.testing.models import tiny_model

    folder = tiny_model("llama", tmp_path / "llama")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    before, after = map(json.loads, run.stdout.splitlines())
    for use in (before, after):
        assert sum(resident for _, _, resident in use["rows"]) == use["total"]
        assert abs(use["unaccounted"]) <= 0.05 * use["total"] + (150 << 20)
    assert after["kv"] > before["kv"]
    if obstacle(torch.device("cpu")) is None:
        # The largest step came before both, so nothing grows after it.
        assert after["kernels"] == before["kernels"] == before["kernels_reserved"] > 0
