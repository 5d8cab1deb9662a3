"""What blocks cost on their way to host memory and to Redis: codecs, tiers, lookups.

Blocks of normally distributed bf16 numbers, 360 KiB each, in batches of 16 as a demotion brings
them. "step thread" is how fast a loop of pure Python still is while blocks are stored beside it,
against the same loop alone: what holds the interpreter lock shows there.

    python benchmarks/micro/tiers.py --json
    python benchmarks/micro/tiers.py --redis    # starts a redis-server on the loopback
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvist.codecs.registry import make_codec
from kvist.lab.report import environment
from kvist.policies.keeper import Keeper
from kvist.policies.registry import policy_factory
from kvist.testing.codec_contract import bf16_like
from kvist.testing.tier_driver import TierDriver, block_key, space
from kvist.tiers.base import BlockMeta, Outcome, Tier
from kvist.tiers.host import HostTier

BLOCK_BYTES = 360 << 10
SPACE = space("bench", segments=(BLOCK_BYTES // 3,) * 3)
BATCH = 16
META = [BlockMeta()] * BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="batches of 16 blocks")
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report: dict[str, object] = {"environment": environment(), "block_bytes": BLOCK_BYTES}
    report["codecs"] = {name: codec(name) for name in ("raw", "zstd")}
    for name in ("raw", "zstd"):
        keeper = lambda capacity: Keeper(capacity, policy_factory("lru"))  # noqa: E731
        host = HostTier(2 * args.rounds * BATCH * BLOCK_BYTES, keeper, codec=make_codec(name))
        report[f"host {name}"] = tier(host, args.rounds)
    if args.redis:
        for name in ("raw", "zstd"):
            with redis_tier(name) as remote:
                report[f"redis {name}"] = tier(remote, args.rounds)
    if args.json:
        print(json.dumps(report, indent=1))
        return
    for name, rows in report.items():
        if isinstance(rows, dict) and name != "environment":
            print(f"{name:12}", rows)


def codec(name: str) -> dict[str, float]:
    made = make_codec(name)
    block = memoryview(bf16_like(BLOCK_BYTES))
    data = memoryview(made.encode(block, 2))
    out = memoryview(bytearray(BLOCK_BYTES))
    encode = best(lambda: made.encode(block, 2))
    decode = best(lambda: made.decode(data, out, 2))
    return {
        "ratio": round(len(data) / BLOCK_BYTES, 3),
        "encode_mb_s": round(BLOCK_BYTES / encode / 1e6),
        "decode_mb_s": round(BLOCK_BYTES / decode / 1e6),
    }


def tier(made: Tier, rounds: int) -> dict[str, float]:
    driver = TierDriver(made, SPACE)
    batches = [
        {block_key((turn, index)): bf16_like(BLOCK_BYTES, index) for index in range(BATCH)}
        for turn in range(rounds)
    ]
    driver.hits(SPACE, list(batches[0]))  # connect, and so on
    alone = spins(lambda turn: turn == 2_000)
    stores, loads, beside = [], [], []
    for blocks in batches:
        start = time.perf_counter()
        job_id = driver.begin_store(SPACE, blocks, META)
        beside.append(spins(lambda turn: turn % 50 == 0 and ended(driver, job_id)))  # noqa: B023
        done = driver.wait(job_id)
        stores.append(time.perf_counter() - start)
        assert set(done.outcomes) == {Outcome.DONE}
    for blocks in batches:
        start = time.perf_counter()
        got = driver.load(SPACE, list(blocks))
        loads.append(time.perf_counter() - start)
        assert got == list(blocks.values())
    keys = [key for blocks in batches for key in blocks][:500]
    keys += [block_key(("absent", index)) for index in range(500 - len(keys))]
    assert made.drain(10)
    call = best(lambda: made.lookup(SPACE.digest, keys))
    fresh = [[block_key(("fresh", turn, i)) for i in range(500)] for turn in range(10)]
    answered = best(lambda: driver.hits(SPACE, fresh.pop()), times=10)
    made.close()
    nbytes = BATCH * BLOCK_BYTES
    return {
        "store_mb_s": round(nbytes / statistics.median(stores) / 1e6),
        "load_mb_s": round(nbytes / statistics.median(loads) / 1e6),
        "lookup_call_500_ms": round(call * 1e3, 2),
        "lookup_answer_500_ms": round(answered * 1e3, 2),
        "step_thread_beside_stores": round(statistics.median(beside) / alone, 3),
    }


def ended(driver: TierDriver, job_id: int) -> bool:
    driver.poll()
    return job_id in driver.ended


def spins(stop: Callable[[int], bool]) -> float:
    """Turns a second of a loop in pure Python, until `stop` of the number of turns."""
    turns = 0
    start = time.perf_counter()
    while not stop(turns):
        sum(range(200))
        turns += 1
    return turns / (time.perf_counter() - start)


def best(work: Callable[[], object], times: int = 40) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@contextmanager
def redis_tier(codec_name: str) -> Iterator[Tier]:
    from kvist.testing.redis_server import RedisServer
    from kvist.tiers.redis.tier import RedisTier

    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        yield RedisTier(server.url, codec=make_codec(codec_name), timeout_s=10.0)


if __name__ == "__main__":
    main()
