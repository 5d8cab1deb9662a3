"""What this process holds and could still take, as the kernel counts it.

Owns the reading of /proc and cgroup files. Knows nothing of what is in the memory. No torch.
"""

from __future__ import annotations

import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1 = _CGROUP / "memory"
_ROLLUP = Path("/proc/self/smaps_rollup")
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Bytes of this process that are in memory now; its peak where the kernel does not say.

    Pages that other processes map too count in full. Microseconds.
    """
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def proportional_bytes() -> int:
    """Bytes of this process that are in memory now, a page that n processes map counting 1/n.

    So the sum over processes is what they hold together: server and engine share the libraries of
    torch, some 200 MB. `resident_bytes` where the kernel does not say. Milliseconds: the kernel
    walks the page tables.
    """
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError:
        return resident_bytes()
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return resident_bytes()


def available_memory_bytes() -> int:
    """Bytes that this process could still take.

    The smaller of what the kernel calls available and what the cgroup leaves.
    """
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
