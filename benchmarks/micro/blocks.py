"""Block operations a second of the books: allocate, match, seal, release.

Sequences of 32 full blocks come, are looked up, take room, fill it and go, over a pool that is
full, so that every new block evicts one. A quarter of the sequences is found. One block allocated,
matched, sealed or released is one operation; the bar is 200,000 a second, of CPU time: the books
are one thread, and whoever else is on the machine is none of theirs.

    python benchmarks/micro/blocks.py --json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from kvist.build import open_cache
from kvist.config import CacheConfig
from kvist.keys import BlockKey, HashChain, RootKey
from kvist.lab.report import environment

BLOCKS = 32
SIZE = 16
BAR = 200_000


class KnownChain(HashChain):
    """A chain whose keys are there: hashing is `keys`'s cost, not the books'."""

    def __init__(self, number: int) -> None:
        super().__init__(RootKey(bytes(32)), BlockKey(bytes(32)), SIZE)
        self._keys = [BlockKey((number * BLOCKS + i).to_bytes(32, "big")) for i in range(BLOCKS)]

    def extend(self, token_ids: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="lfu-da")
    parser.add_argument("--sequences", type=int, default=1000, help="a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=8192, help="of the pool")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    cache = open_cache(
        CacheConfig(num_blocks=args.blocks, block_size=SIZE, eviction_policy=args.policy)
    )
    tokens = list(range(BLOCKS * SIZE + 1))
    rates = []
    number = 0
    # The first round fills the pool and is not counted.
    for repeat in range(args.repeats + 1):
        chains = []
        for index in range(args.sequences):
            number += index % 4 != 3
            chains.append(KnownChain(number))
        done = 0
        start_s = time.process_time()
        for chain in chains:
            match = cache.match(chain.keys, len(tokens))
            table = cache.open_table()
            allocation = cache.allocate(table, len(tokens), match)
            assert allocation is not None
            sealed = cache.commit(table, len(tokens), tokens, chain) - len(match.block_ids)
            held = len(table.ids)
            cache.release(table)
            done += len(match.block_ids) + len(allocation.fresh) + sealed + held
        if not repeat:
            # As the engine's process does it once it stands.
            gc.freeze()
        else:
            rates.append(done / (time.process_time() - start_s))
    cache.check()
    result = {
        "policy": args.policy,
        "operations_per_s": round(statistics.median(rates)),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
        "bar": BAR,
    }
    if args.json:
        print(json.dumps({**result, "environment": environment()}))
    else:
        print(
            f"{args.policy}: {result['operations_per_s']:,} block operations a second"
            f" ({result['lowest']:,} to {result['highest']:,}; bar {BAR:,})"
        )


if __name__ == "__main__":
    main()
