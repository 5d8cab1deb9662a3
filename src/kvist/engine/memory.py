"""How much memory there is, and how much a piece of work needed.

Owns the reading of /proc, cgroup files and CUDA counters. Knows nothing of models or blocks.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1 = _CGROUP / "memory"


def available_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on `device`.

    On a CPU the smaller of what the kernel calls available and what the cgroup leaves.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [_meminfo("MemAvailable")]
    for limit, used, stat in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current", _CGROUP / "memory.stat"),
        (
            _CGROUP_V1 / "memory.limit_in_bytes",
            _CGROUP_V1 / "memory.usage_in_bytes",
            _CGROUP_V1 / "memory.stat",
        ),
    ):
        left = _cgroup_left(limit, used, stat)
        if left is not None:
            limits.append(left)
    return max(0, min(limits))


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _cgroup_left(limit: Path, used: Path, stat: Path) -> int | None:
    """Room under a cgroup limit. Page cache counts as used but gives way: it is added back."""
    try:
        most = limit.read_text().strip()
        if most == "max" or int(most) >= 1 << 60:
            return None
        inactive = next(
            (
                int(line.split()[1])
                for line in stat.read_text().splitlines()
                if line.split()[0] in ("inactive_file", "total_inactive_file")
            ),
            0,
        )
        return int(most) - int(used.read_text()) + inactive
    except (OSError, ValueError):
        return None


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class PeakMeter:
    """Context manager: how far memory rose above where it stood, at most.

    Attributes
    ----------
    peak_bytes : int
        Set on leaving.

    Notes
    -----
    On a CPU the kernel's high-water mark is reset first; where it cannot be, the mark since the
    start of the process serves, which can only be larger.
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


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
