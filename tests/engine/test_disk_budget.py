"""What a disk tier takes on the device, by `du`, while everything happens at once.

A real engine serves prompts without reuse over a store that is always full; another process stores,
evicts, deletes and reads in the same directory; a third runs `--gc`, `--backup`, `--verify` and
`--restore`; afterwards `--repair`. A thread sums up blocks on the device all the while. Guards: a
log that grows while others read; an index that grows with every eviction; files left behind; a
bill that says other than `du`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from typer.testing import CliRunner

from kvist.cli import app
from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.tiers.disk.index import INDEX_NAME

BUDGET = 12 << 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

# Both run until their input ends; each line they print is something done.
WRITER = """
import random, sys, threading
from pathlib import Path
from kvist.testing.tier_driver import TierDriver, chain, space
from kvist.tiers.disk.tier import DiskTier

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
tier = DiskTier(Path(sys.argv[1]), int(sys.argv[2]))
label = space("other")
driver = TierDriver(tier, label)
rng = random.Random(1)
while not ended.is_set():
    keys = chain(rng.randrange(40), rng.randrange(1, 12))
    driver.store(label, keys)
    driver.load(label, keys)
    tier.touch(label.digest, keys)
    if rng.random() < 0.3:
        tier.delete(label.digest, keys)
    print("round", flush=True)
tier.check()
tier.close()
"""

KEEPER = """
import sys, threading, time
from pathlib import Path
from kvist.tiers.disk import archive, care
from kvist.tiers.disk.opening import open_store

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
directory, copy = Path(sys.argv[1]), Path(sys.argv[2])
while not ended.is_set():
    store = open_store(directory, None).store
    archive.backup(store, copy)
    care.verify(store)
    care.collect(store, directory, 3600.0, time.time())
    archive.restore(store, copy)
    store.close()
    print("round", flush=True)
"""


class Du:
    """Sums up what lies in a directory, again and again, from a thread of its own."""

    def __init__(self, directory):
        self._directory = directory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples = 0
        self.most = 0
        self.most_log = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._ended.wait(0.003):
            if self._directory.exists():
                self.samples += 1
                self.most = max(self.most, du(self._directory))
                with suppress(FileNotFoundError):
                    log = (self._directory / (INDEX_NAME + "-wal")).stat().st_blocks * 512
                    self.most_log = max(self.most_log, log)


def du(directory):
    total = directory.stat().st_blocks * 512
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


class Other:
    """One of the scripts above in a process of its own, ended with the block that it is used in."""

    def __init__(self, script, *args):
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.rounds = 0
        self._thread = threading.Thread(target=self._count)

    def _count(self):
        for _ in self._process.stdout:
            self.rounds += 1

    @property
    def is_running(self):
        return self._process.poll() is None

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._process.stdin.close()
        code = self._process.wait()
        self._thread.join()
        self._process.stdout.close()
        assert code == 0


def test_all_at_once_stays_within_the_budget(tiny_folder, tmp_path, one_thread):
    directory = tmp_path / "kv"
    rng = random.Random(3)
    with (
        Du(directory) as seen,
        LLM(
            str(tiny_folder("llama")),
            dtype="float32",
            max_model_len=512,
            kv_cache_memory_bytes="1MiB",
            tiers=[f"disk:{BUDGET}:{directory}"],
        ) as llm,
    ):
        with (
            Other(WRITER, directory, BUDGET) as writer,
            Other(KEEPER, directory, tmp_path / "copy") as keeper,
        ):
            others = (writer, keeper)
            # Not so many seconds: a busy machine does less in them.
            while min(other.rounds for other in others) < 8 or seen.samples < 1_000:
                prompts = [[rng.randrange(250) for _ in range(400)] for _ in range(4)]
                llm.generate(prompts, PARAMS, use_tqdm=False)
                (state,) = llm.engine.scheduler.loads.tiers.states()
                assert state.usage.used_bytes <= state.usage.capacity_bytes == BUDGET
                assert all(other.is_running for other in others)
        # What the others stored is on this one's bill too.
        assert llm.engine.scheduler.loads.tiers.drain(10)
        tier = llm.engine.scheduler.loads.tiers._links[0].tier
        assert tier.drain(10)
        ((name, on_the_bill, _),) = llm.bill.tiers
        assert (name, on_the_bill) == ("disk", BUDGET)
        free = tier._store.books.arena.num_free * (32 << 10)
        rest = du(directory) - tier.usage().used_bytes - free
        # The directory itself, and what the file system notes of where the slab lies.
        assert 0 <= rest <= 64 << 10
        tier.check()
    with Du(directory) as afterwards:
        for option in ("--repair", "--gc", "--verify"):
            done = CliRunner().invoke(app, ["inspect", str(directory), option])
            assert done.exit_code == 0, done.output
    print([other.rounds for other in others], seen.samples, seen.most, seen.most_log)
    assert seen.most_log > 0
    assert 0 < seen.most <= BUDGET
    assert 0 < afterwards.most <= BUDGET
