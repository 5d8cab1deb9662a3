"""``--profile-steps``: what the first steps spend their time on, as a Chrome trace.

Owns the profiler around a runner and the file it writes. Between two forward passes lies what the
control plane does, as a gap. Threads: the one that runs the model.
"""

from __future__ import annotations

import logging
import os
import tempfile

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kvist.engine.runner import ModelRunner
from kvist.engine.step import StepPlan, StepResult

logger = logging.getLogger(__name__)


class ProfiledRunner:
    """A runner that records its first steps, and then only passes plans on.

    Parameters
    ----------
    inner : ModelRunner
    num_steps : int
        How many steps to record; the first also pays for what is made once.

    Notes
    -----
    A recorded step takes longer: about a microsecond for each operation of torch. The trace opens
    in ``chrome://tracing`` and in Perfetto; the log names the file.
    """

    def __init__(self, inner: ModelRunner, num_steps: int) -> None:
        self.vocab_size = inner.vocab_size
        self._inner = inner
        self._left = num_steps
        self._profile: profile | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan; see `ModelRunner.run`."""
        if self._left <= 0:
            return self._inner.run(plan)
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        name = f"step of {plan.num_tokens} tokens, {len(plan.scheduled)} sequences"
        try:
            with record_function(name):
                return self._inner.run(plan)
        finally:
            self._left -= 1
            if self._left == 0:
                self._write(self._profile)

    def _write(self, recorded: profile) -> None:
        recorded.stop()
        handle, path = tempfile.mkstemp(prefix="kvist-steps-", suffix=".json")
        os.close(handle)
        recorded.export_chrome_trace(path)
        self._profile = None
        logger.info("--profile-steps: trace written to %s", path)
