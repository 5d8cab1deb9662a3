"""Past the page cache where that can be, and through it where not: the bytes are the same."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvist.tiers.disk.direct import PAGE_BYTES, DirectWrites
from kvist.tiers.disk.files import Files


class Calls(Files):
    """Notes through which opening it writes."""

    def __init__(self, *, can: bool = True, refuses: int = 0) -> None:
        self.can, self.refuses = can, refuses
        self.direct: int | None = None
        self.num_direct = 0

    def open_direct(self, fd):
        # An ordinary opening: what the file system of the tests can does not matter then.
        self.direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR) if self.can else None
        return self.direct

    def write(self, fd, buffers, offset):
        if fd == self.direct:
            self.num_direct += 1
            if self.refuses:
                raise OSError(self.refuses, os.strerror(self.refuses))
        super().write(fd, buffers, offset)


@pytest.fixture
def fd(tmp_path: Path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def pages(count: int, fill: bytes = b"k") -> memoryview:
    memory = mmap.mmap(-1, count * PAGE_BYTES)
    memory[:] = fill * len(memory)
    return memoryview(memory)


def test_whole_pages_go_past_the_cache(fd):
    files = Calls()
    writes = DirectWrites(files, fd)
    assert writes.write([pages(2, b"a"), pages(1, b"b")], PAGE_BYTES)
    assert files.num_direct == 1
    assert os.pread(fd, 4 * PAGE_BYTES, PAGE_BYTES) == b"a" * 2 * PAGE_BYTES + b"b" * PAGE_BYTES
    writes.close()


def test_what_is_no_whole_page_does_not_and_the_next_may(fd):
    files = Calls()
    writes = DirectWrites(files, fd)
    assert not writes.write([pages(1), memoryview(b"x" * 100)], 0)
    assert writes.write([pages(1)], 0)
    writes.close()


@pytest.mark.parametrize("files", [Calls(can=False), Calls(refuses=22)], ids=["open", "write"])
def test_where_it_cannot_be_that_is_found_out_once(fd, files):
    writes = DirectWrites(files, fd)
    assert [writes.write([pages(1)], 0) for _ in range(3)] == [False] * 3
    assert files.num_direct <= 1
    writes.close()


def test_a_device_that_fails_is_not_asked_another_way(fd):
    """What the other opening would take may never reach the device."""
    writes = DirectWrites(Calls(refuses=5), fd)
    with pytest.raises(OSError, match="Input/output"):
        writes.write([pages(1)], 0)
    writes.close()


def test_the_operating_system_takes_them_where_it_can(fd, tmp_path):
    """Whether it can or not, what is read through the cache is what was written."""
    os.pwrite(fd, b"old" * PAGE_BYTES, 0)
    assert os.pread(fd, 3, 0) == b"old"
    files = Files()
    writes = DirectWrites(files, fd)
    if not writes.write([pages(2)], 0):
        files.write(fd, [pages(2)], 0)
    assert os.pread(fd, 2 * PAGE_BYTES, 0) == bytes(pages(2))
    writes.close()
