"""What this process holds, as the kernel counts it. Knows nothing of what is in it. No torch."""

from __future__ import annotations

import resource
from pathlib import Path

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
