"""How much memory there is, and how much a piece of work needed.

Owns the reading of CUDA counters and of peaks (`kvist.process` reads the rest of /proc). Knows
nothing of models or blocks.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

from kvist.process import available_memory_bytes, resident_bytes


def available_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on `device`.

    On a CPU the smaller of what the kernel calls available and what the cgroup leaves.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()


class PeakMeter:
    """Context manager: how far memory rose above where it stood, at most.

    Attributes
    ----------
    peak_bytes : int
        Set on leaving.

    Notes
    -----
    On a CPU the kernel's high-water mark is reset first; where it cannot be, the mark since the
    start of the process serves, which can only be larger. What the allocator keeps of memory that
    was freed is given back before (with glibc): work that finds room there would seem to need none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        _give_back_freed()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = resident_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _high_water_bytes()
        self.peak_bytes = max(0, peak - self._before)


def _give_back_freed() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
