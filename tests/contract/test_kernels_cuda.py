"""The kernels that serve on a GPU pass the same contract there.

Guards: an operation that waits for, or only exists on, a CPU.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvist.kernels import dispatch
from kvist.testing.kernels import KernelContract

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu


class TestTorchOnCuda(KernelContract):
    device = torch.device("cuda")
    bitwise = False

    def select(self, case):
        return dispatch.select(self.device, case.dtype, case.layout, case.num_query_heads, "torch")
