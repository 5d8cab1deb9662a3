"""A disk that goes wrong under a serving engine: the output is the same, and the log says why.

`tests/faults` breaks the disk tier by itself, in more ways; here each kind of fault happens below a
real, tiny model with ``--event-log``. Guards: a fault that ends a request or changes a token; one
that nobody is told of; a tier that does not come back.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from kvist.engine import assemble
from kvist.engine.llm import LLM
from kvist.engine.sampling import SamplingParams
from kvist.engine.sequence import EngineRequest
from kvist.errors import ConfigError
from kvist.testing.disk_files import FailingFiles
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.slab import SLAB_NAME
from kvist.tiers.disk.tier import DiskTier

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BUDGET = 9 << 20
HIT = 320  # whole blocks that leave a token to compute


def prompt(seed: int = 7) -> list[int]:
    return [(i * seed + i // 13) % 250 for i in range(330)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def expected(folder, one_thread):
    """Return the answers to the prompts of seeds 7, 11 and 17 without any tier."""
    with opened(folder) as llm:
        return {seed: answer(llm, seed)[0] for seed in (7, 11, 17)}


@contextmanager
def opened(folder, tiers=(), **options):
    options = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "1MiB", **options}
    options.setdefault("tier_load_policy", "always")
    with LLM(str(folder), tiers=tiers, poison_fresh_blocks=True, **options) as llm:
        yield llm
        llm.engine.scheduler.check()


class Served:
    """An engine over one disk tier of the test's making, and what its event log says."""

    def __init__(self, llm, tier, log):
        self.llm, self.tier, self._log = llm, tier, log

    def forget(self):
        """Let the device forget all; the tier may lack what it could not keep."""
        settled = self.llm.engine.scheduler.loads.tiers.drain(2)
        self.llm.engine.scheduler.cache.reset_prefix_cache()
        return settled

    def said(self, event):
        self.llm._opened.event_file.flush()
        lines = map(json.loads, self._log.read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def reasons(self, event):
        return Counter((line["outcome"], line["reason"]) for line in self.said(event))


@pytest.fixture
def served(folder, tmp_path, monkeypatch):
    """Return a way to open an engine over a `DiskTier` with other files or clocks."""

    @contextmanager
    def serve(directory=None, log="events.jsonl", budget=BUDGET, **others):
        made = []

        def make(texts, key):
            made.append(DiskTier(directory or tmp_path / "kv", budget, **others))
            return list(made)

        monkeypatch.setattr(assemble, "open_tiers", make)
        text = f"disk:{budget}:{directory or tmp_path / 'kv'}"
        with opened(folder, (text,), event_log=str(tmp_path / log)) as llm:
            yield Served(llm, made[0], tmp_path / log)

    return serve


def answer(llm, seed=7):
    (output,) = llm.generate([prompt(seed)], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_reads_that_fail(served, expected):
    files = FailingFiles()
    with served(files=files) as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        files.fails = lambda call, count: errno.EIO if call == "read" else 0
        assert answer(one.llm) == (expected[7], 0)
        assert one.reasons("LoadFailed") == {("failed", "Input/output error"): 1}
        files.fails = lambda call, count: 0
        assert one.forget()
        assert answer(one.llm) == (expected[7], HIT)
        assert [line["sources"] for line in one.said("PrefixLoaded")] == [[["disk", HIT]]]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "lock"])
def test_writes_that_fail(served, expected, call, number):
    files = FailingFiles()
    with served(files=files) as one:
        files.fails = lambda name, count: number if name == call else 0
        for seed in (7, 11):
            assert answer(one.llm, seed) == (expected[seed], 0)
            one.forget()
        reasons = one.reasons("DemotionFailed")
        assert any(what == "failed" and errno_text(number) in why for what, why in reasons)
        assert ("refused", "device_error") in reasons
        files.fails = lambda name, count: 0
        assert stored_again(one, expected)


def errno_text(number):
    return {errno.EIO: "Input/output", errno.ENOSPC: "No space", errno.EROFS: "Read-only"}[number]


def stored_again(one, expected, seed=17):
    """Ask until the tier keeps and gives again: it is left alone for a while after a fault."""
    give_up = time.monotonic() + 30.0
    while time.monotonic() < give_up:
        tokens, cached = answer(one.llm, seed)
        assert tokens == expected[seed]
        if cached == HIT and one.said("PrefixLoaded"):
            return True
        one.forget()
        time.sleep(0.1)
    return False


def test_a_device_that_others_fill_up_and_that_is_emptied_again(served, expected, small_device):
    """The slab is reserved and the index is not: a real ENOSPC, from SQLite."""
    with served(small_device / "kv") as one:
        # A log that is empty: every write needs new room.
        assert one.tier.drain(10)
        (small_device / "hog").touch()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={small_device}/hog", "bs=4k"],
            check=False,
            capture_output=True,
        )
        for seed in (7, 11):
            assert answer(one.llm, seed)[0] == expected[seed]
            one.forget()
        assert any("full" in why for _, why in one.reasons("DemotionFailed"))
        (small_device / "hog").unlink()
        assert stored_again(one, expected)


def test_a_device_that_became_read_only(served, expected, small_device):
    """What open files of a damaged device see; and a start on one that is mounted so."""
    files = FailingFiles()
    with served(small_device / "kv", files=files) as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        frozen = ("write", "sync", "reserve")
        files.fails = lambda call, count: errno.EROFS if call in frozen else 0
        one.tier._store.ledger.index._db.execute("PRAGMA query_only = ON")
        assert answer(one.llm) == (expected[7], HIT), "what is there is read"
        assert answer(one.llm, 11) == (expected[11], 0)
        one.forget()
        assert not one.tier.drain(0.5), "nothing can be made durable"
        assert any(what == "failed" for what, _ in one.reasons("DemotionFailed"))
        assert not one.said("LoadFailed")
    subprocess.run(["mount", "-o", "remount,ro", str(small_device)], check=True)
    try:
        with pytest.raises(ConfigError, match="Read-only"), served(small_device / "kv"):
            pass
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_device)], check=True)
    with served(small_device / "kv") as one:
        assert answer(one.llm) == (expected[7], HIT)


class Held(Files):
    """Reads of the slab wait until they are let go."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()

    def read(self, fd, buffers, offset):
        self.go.wait(20)
        return super().read(fd, buffers, offset)


def test_a_device_that_stops_answering(served, expected):
    files = Held()
    with served(files=files) as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        files.go.clear()
        assert answer(one.llm) == (expected[7], 0)
        # And once it was found out, nobody waits for it again.
        one.llm.engine.scheduler.cache.reset_prefix_cache()
        assert answer(one.llm) == (expected[7], 0)
        assert [line["reason"] for line in one.said("TierSuspended")] == ["a load is overdue"]
        files.go.set()
        assert stored_again(one, expected)


def test_clocks_that_jump(served, expected, monkeypatch):
    """The wall clock at every look; the tier's own for deadlines by an hour, to and fro."""
    jumps = iter(range(10**6))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e8)
    shift = [0.0]
    with served(wall=time.time, clock=lambda: time.monotonic() + shift[0]) as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        shift[0] = -3600.0
        assert answer(one.llm) == (expected[7], HIT)
        digest = next(iter(one.tier._labels))
        entries = list(one.tier.entries(digest))
        assert len(entries) >= HIT // 16
        assert all(entry.age_s >= 0 for entry in entries)
        assert one.forget()
        shift[0] = 3600.0  # every deadline has passed
        assert answer(one.llm) == (expected[7], 0)
        assert ("late", "late") in one.reasons("LoadFailed")
        assert [line["reason"] for line in one.said("TierSuspended")] == ["a load was late"]
        shift[0] = 0.0
        assert stored_again(one, expected)


def test_damage_is_told_and_mended(served, expected, tmp_path):
    with served() as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        slab = tmp_path / "kv" / SLAB_NAME
        data = bytearray(slab.read_bytes())
        for place in range(64 << 10, len(data), 4096):
            data[place] ^= 1
        with slab.open("r+b") as file:
            file.write(data)
        assert answer(one.llm) == (expected[7], 0)
        (found,) = {what for what, _ in one.reasons("LoadFailed")}
        assert found == "damaged"
        assert stored_again(one, expected, 7)


def test_a_directory_that_is_deleted_while_serving(served, expected, tmp_path):
    """The old engine reads on, from files without a name, and says why it stores no more."""
    with served() as one:
        assert answer(one.llm) == (expected[7], 0)
        assert one.forget()
        shutil.rmtree(tmp_path / "kv")
        assert answer(one.llm) == (expected[7], HIT)
        seeds = iter(range(21, 10**6, 2))
        give_up = time.monotonic() + 20.0
        while not one.reasons("DemotionFailed")["refused", "directory_gone"]:
            assert time.monotonic() < give_up, "nobody was told"
            answer(one.llm, next(seeds))
            one.forget()
        with served(log="second.jsonl") as two:
            assert answer(two.llm) == (expected[7], 0)
            assert two.forget()
            assert answer(one.llm, 11)[0] == expected[11]
            assert answer(one.llm, 17)[0] == expected[17]
            one.forget()
            assert answer(two.llm) == (expected[7], HIT)
    with served(log="third.jsonl") as three:
        assert answer(three.llm) == (expected[7], HIT)
        assert not three.said("LoadFailed")


# ---------------------------------------------------------------------- isolation


def ask(llm, **lane):
    request = EngineRequest(request_id="r", prompt_token_ids=tuple(prompt()), params=PARAMS, **lane)
    llm.engine.add_request(request)
    cached = None
    while llm.engine.has_work:
        for update in llm.engine.step():
            cached = update.num_cached_tokens
    return cached


LANES = [
    {"adapter": ""},
    {"adapter": "lora-a"},
    {"adapter": "lora-b"},
    {"salt": "lora-a"},
    {"adapter": "lora-a", "salt": "tenant"},
]


def test_adapters_and_tenants_share_nothing_on_the_disk(served):
    """Adapters are a name in the keys so far: no weights come with it. That name must suffice."""
    with served(budget=16 << 20) as one:
        for lane in LANES:
            assert ask(one.llm, **lane) == 0, lane
            assert one.forget()
        assert not one.said("BlocksPromoted")
    with served(log="second.jsonl", budget=16 << 20) as two:
        for lane in LANES:
            assert ask(two.llm, **lane) == HIT, lane


def test_another_revision_in_the_same_folder(folder, tmp_path):
    """The same name and path, shapes and configuration; other weights since yesterday."""
    from kvist.testing.models import tiny_model

    disk = f"disk:9MiB:{tmp_path}/kv"
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    with opened(model, (disk,)) as llm:
        answer(llm)
    with opened(model, (disk,)) as llm:
        assert answer(llm)[1] == HIT
    newer = tiny_model("llama", tmp_path / "newer", seed=3)
    for file in Path(newer).glob("*.safetensors"):
        shutil.copyfile(file, model / file.name)
    with opened(newer) as llm:
        right = answer(llm)[0]
    with opened(model, (disk,)) as llm:
        assert answer(llm) == (right, 0)


@pytest.mark.parametrize("names", [("float32", "bfloat16"), ("bfloat16", "float16")])
def test_another_kv_preset(folder, tmp_path, names):
    disk = f"disk:9MiB:{tmp_path}/kv"
    for name in names:
        with opened(folder, (disk,), dtype=name, kv_cache_dtype=name) as llm:
            assert answer(llm)[1] == 0
    for name in names:
        with opened(folder, (disk,), dtype=name, kv_cache_dtype=name) as llm:
            assert answer(llm)[1] == HIT
