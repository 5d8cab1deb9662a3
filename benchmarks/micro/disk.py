"""The disk tier against a plain file with the same bytes, on the same device, in the same run.

Reads with a cold page cache on both sides (`fdatasync`, then `posix_fadvise(DONTNEED)`), writes up
to `fdatasync`, and what a lookup of 500 blocks costs. Tier and plain file take turns, so that a
busy device slows both alike; medians are reported.

    python benchmarks/micro/disk.py --dir DIR [--json] [--mib 512] [--rounds 5] [--codec raw]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from hashlib import blake2b
from pathlib import Path
from threading import Event
from time import perf_counter

from kvist.codecs.registry import make_codec
from kvist.keys import BlockKey
from kvist.tiers.base import BlockMeta, LoadJob, Namespace, Outcome, StoreJob
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.tier import DiskTier

# SmolLM2-135M: 16 tokens, 30 layers, K and V, 3 heads, 64 wide, 16 bit; four ranges of layers.
SEGMENT_BYTES = (92_160,) * 4
CHUNK_BYTES = 1 << 20


def key_of(index: int) -> BlockKey:
    return BlockKey(blake2b(index.to_bytes(8, "little"), digest_size=32).digest())


def forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def write_plain(path: Path, data: memoryview) -> float:
    path.unlink(missing_ok=True)
    start = perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for offset in range(0, len(data), CHUNK_BYTES):
        os.pwrite(fd, data[offset : offset + CHUNK_BYTES], offset)
    os.fdatasync(fd)
    taken = perf_counter() - start
    os.close(fd)
    return taken


def read_plain(path: Path, out: memoryview) -> float:
    forget_pages(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    start = perf_counter()
    for offset in range(0, len(out), CHUNK_BYTES):
        os.preadv(fd, [out[offset : offset + CHUNK_BYTES]], offset)
    taken = perf_counter() - start
    os.close(fd)
    return taken


def wait(tier: DiskTier, ended: Event) -> tuple[Outcome, ...]:
    if not ended.wait(600.0):
        raise SystemExit("no answer from the tier in 600 s")
    ended.clear()
    return tier.poll()[0].outcomes


def measure(directory: Path, mib: int, rounds: int, codec: str, threads: int) -> dict[str, object]:
    space = Namespace(bytes(32), "benchmark", "bf16", "", SEGMENT_BYTES)
    size = space.block_bytes
    count = (mib << 20) // size
    data = memoryview(bytearray(os.urandom(size * count)))
    out = memoryview(bytearray(size * count))
    keys = [key_of(index) for index in range(count)]
    views = tuple(data[i * size : (i + 1) * size] for i in range(count))
    outs = tuple(out[i * size : (i + 1) * size] for i in range(count))
    parents = [b"", *keys]
    metas = tuple(BlockMeta(parents[i], i) for i in range(count))
    plain = directory / "plain"
    times: dict[str, list[float]] = {
        name: [] for name in ("write", "plain_write", "read", "plain_read", "lookup_500")
    }
    for turn in range(rounds):
        store = directory / f"store-{turn}"
        tier = DiskTier(store, (mib << 20) * 5 // 4, codec=make_codec(codec), threads=threads)
        tier.open_namespace(space)
        ended = Event()
        tier.set_waker(ended.set)
        times["plain_write"].append(write_plain(plain, data))
        start = perf_counter()
        tier.submit_store(StoreJob(1, space.digest, tuple(keys), views, metas))
        stored = wait(tier, ended)
        assert tier.drain(600.0)
        times["write"].append(perf_counter() - start)
        assert set(stored) == {Outcome.DONE}, stored
        for _ in range(2):
            forget_pages(store / SLAB_NAME)
            out[:] = bytes(len(out))
            start = perf_counter()
            tier.submit_load(LoadJob(2, space.digest, tuple(keys), range(4), outs))
            loaded = wait(tier, ended)
            times["read"].append(perf_counter() - start)
            assert set(loaded) == {Outcome.DONE}, loaded
            assert out == data
            times["plain_read"].append(read_plain(plain, out))
        wanted = keys[:500]
        for _ in range(20):
            start = perf_counter()
            tier.lookup(space.digest, wanted)
            times["lookup_500"].append((perf_counter() - start) * 500 / len(wanted))
        tier.close()
        shutil.rmtree(store)
    plain.unlink()
    median = {name: statistics.median(taken) for name, taken in times.items()}
    speed = {
        name: size * count / median[name] / 1e6
        for name in ("write", "plain_write", "read", "plain_read")
    }
    return {
        "mib": mib,
        "codec": codec,
        "threads": threads,
        "mb_per_s": {name: round(value) for name, value in speed.items()},
        "read_share": round(speed["read"] / speed["plain_read"], 3),
        "write_share": round(speed["write"] / speed["plain_write"], 3),
        "lookup_500_ms": round(median["lookup_500"] * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="on the device to be measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--threads", type=int, default=3)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    found = measure(args.dir, args.mib, args.rounds, args.codec, args.threads)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
