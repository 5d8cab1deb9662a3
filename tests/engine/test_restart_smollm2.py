"""A restart with the default model: a long prompt is found again by a process that never saw it.

The times are the benchmark's business; here are the tokens, and where they come from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOKENS = 7500


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_killed_after_one_answer_the_next_process_finds_the_prompt(smollm2_folder, codec):
    command = [sys.executable, "benchmarks/restart_warm.py", "--json"]
    command += ["--model", str(smollm2_folder), "--tokens", str(TOKENS), "--codec", codec]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told)
    assert told["dtype"] == "float32"
    assert told["tokens_equal"]
    assert told["cached_tokens"] >= TOKENS - 16
