"""The device tier: one tensor in which every block is one contiguous run of bytes.

Owns the memory that attention reads and writes, and the bytes of its blocks as transfers reach
them. Knows neither which block is in use nor by whom.

On a CPU the memory is an anonymous mapping aligned to 2 MiB and advised for huge pages, since
attention reads blocks in random order and 4 KiB pages would make it wait for the TLB. It is not
touched in advance: pages arrive when blocks are first written, so a large pool costs nothing until
it is used, and `residency` tells how much has arrived.

Threads: the tensor belongs to the step thread; `residency` may be called from any thread.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvist.errors import CapacityError
from kvist.spec import BlockLayout

HUGE_PAGE_BYTES = 2 << 20
_MAPS_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a pool is really there.

    Attributes
    ----------
    reserved_bytes : int
        Address space, or device memory, set aside.
    resident_bytes : int
        Bytes backed by memory now; equal to `reserved_bytes` on a GPU.
    huge_bytes : int or None
        Of these, bytes in huge pages; ``None`` where that cannot be told.
    """

    reserved_bytes: int
    resident_bytes: int
    huge_bytes: int | None


class DevicePool:
    """`num_blocks` blocks of one layout on one device.

    Parameters
    ----------
    layout : BlockLayout
    num_blocks : int
    dtype : torch.dtype
        Of the stored elements; its size is the layout's `itemsize`.
    device : torch.device

    Attributes
    ----------
    tensor : Tensor
        [N, block elements]; row n is block n.

    Raises
    ------
    CapacityError
        If the device does not have that much memory.
    """

    def __init__(
        self, layout: BlockLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.block_bytes
        self._mapping: mmap.mmap | None = None
        self._bytes: memoryview | None = None
        try:
            if device.type == "cpu":
                flat = self._map(self.nbytes)
            else:
                flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks ({self.nbytes} bytes) does not fit on {device}:"
                f" {error}; lower --kv-cache-memory-bytes"
            ) from error
        self.tensor = flat.view(dtype).view(num_blocks, layout.block_elements)

    def _map(self, nbytes: int) -> Tensor:
        self._mapping = mmap.mmap(
            -1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self._bytes = memoryview(self._mapping)[start : start + nbytes]
        return whole[start : start + nbytes]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.block_bytes

    @property
    def is_host(self) -> bool:
        """Whether `landing` is the block itself, and others may read it there."""
        return self._bytes is not None

    def read(self, block_id: int, out: memoryview) -> None:
        """Copy the bytes of a block into host memory. Waits for what a GPU is doing."""
        if self._bytes is not None:
            out[:] = self.landing(block_id)
        else:
            host = torch.frombuffer(out, dtype=torch.uint8)
            host.copy_(self.tensor[block_id].view(torch.uint8))

    def landing(self, block_id: int) -> memoryview:
        """Return where a transfer may write a block: itself on a CPU, else pinned memory."""
        if self._bytes is not None:
            start = block_id * self.block_bytes
            return self._bytes[start : start + self.block_bytes]
        pinned: Any = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memoryview(pinned)

    def land(self, block_id: int, landing: memoryview) -> None:
        """Bring what was written to `landing` into the block, if it is not there."""
        if self._bytes is None:
            host = torch.frombuffer(landing, dtype=torch.uint8)
            self.tensor[block_id].view(torch.uint8).copy_(host)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of a slot that nobody wrote cannot go unnoticed."""
        if block_ids:
            index = torch.tensor(list(block_ids), device=self.tensor.device)
            self.tensor.index_fill_(0, index, float("nan"))

    def residency(self) -> Residency:
        """Ask the kernel how much of the pool has arrived. Reads ``/proc``: about a millisecond."""
        if self._mapping is None:
            return Residency(self.nbytes, self.nbytes, None)
        start = self.tensor.data_ptr()
        try:
            resident, huge = _smaps(start, start + self.nbytes)
        except OSError:
            return Residency(self.nbytes, self.nbytes, None)
        return Residency(self.nbytes, min(resident, self.nbytes), min(huge, self.nbytes))


def _smaps(start: int, end: int) -> tuple[int, int]:
    """Sum resident and huge bytes of the mappings that overlap ``[start, end)``."""
    resident = huge = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        m = _MAPS_LINE.match(line)
        if m is not None:
            inside = int(m[1], 16) < end and int(m[2], 16) > start
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) * 1024
    return resident, huge
