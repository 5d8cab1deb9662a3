"""Windows, caps on scores and sinks: greedy output equals transformers, token by token, in fp32.

Guards against an option that is lost between the model's code and the kernel, on the way through
modules or through fused layers, and against one that the kernel never gets to see because something
slower ran in its place. That the reference itself is right, the kernels' contract shows.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.kernels import cpu, reference
from kvist.testing.models import BEYOND_PLAIN, WINDOW, tiny_model
from kvist.testing.parity import GreedyReference, WatchedEngine

pytestmark = pytest.mark.usefixtures("one_thread")

NO_CPP = cpu.obstacle(torch.device("cpu"))
needs_cpp = pytest.mark.skipif(NO_CPP is not None, reason=str(NO_CPP))
CPP = pytest.param("cpp", marks=needs_cpp)
FUSED = {"mistral", "phi3", "qwen2", "qwen3", "smollm3"}
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 70, 150)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Return a function from family to a folder with a tiny model that asks for more."""
    root = tmp_path_factory.mktemp("beyond")
    made = {}

    def folder(family):
        if family not in made:
            made[family] = tiny_model(family, root / family, **BEYOND_PLAIN[family])
        return made[family]

    return folder


def tokens(rng, length):
    return [rng.randrange(256) for _ in range(length)]


def check(watched, oracle, rng):
    """Ragged prompts side by side, in chunks, then the same prefixes again with other ends."""
    prompts = [tokens(rng, n) for n in LENGTHS]
    assert watched.generate(prompts, 20) == [oracle.generate(p, 20) for p in prompts]
    again = [p + tokens(rng, 5) for p in prompts]
    assert watched.generate(again, 12) == [oracle.generate(p, 12) for p in again]
    assert watched.counts["hits"] > 2 * WINDOW
    assert watched.counts["chunks"] > 10
    assert watched.counts["mixed steps"] > 5


def watched_engine(folder, **options):
    sizes = {"num_blocks": 80, "max_model_len": 200, "max_num_seqs": 8, "block_size": 16}
    return WatchedEngine(folder, **{**sizes, "max_num_batched_tokens": 29, **options})


@needs_cpp
@pytest.mark.parametrize("family", BEYOND_PLAIN)
def test_in_cpp_and_nowhere_else(folder_of, family, rng, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("attention was computed by the reference")

    monkeypatch.setattr(reference, "attend", never)
    watched = watched_engine(folder_of(family))
    notes = "\n".join(watched.llm.bill.notes)
    assert ("2 of 2 layers fused" in notes) == (family in FUSED)
    assert f"a window of {WINDOW} tokens in" in notes
    assert "computed by cpp" in notes
    check(watched, GreedyReference(folder_of(family)), rng)


@pytest.mark.parametrize(
    ("family", "kernels", "words"),
    [
        ("gemma2", "reference", "computed by reference"),
        ("gemma2", "torch", "computed by torch, but prompts by reference, slowly"),
        ("gpt_oss", "torch", "computed by torch, but prompts by reference, slowly"),
        ("mistral", "torch", "computed by torch"),
        ("gemma3_text", "sdpa", "computed by reference, slowly, since sdpa knows none of it"),
    ],
)
def test_in_other_kernels(folder_of, family, kernels, words, rng):
    watched = watched_engine(folder_of(family), kernels=kernels)
    assert any(note.endswith(words) for note in watched.llm.bill.notes)
    check(watched, GreedyReference(folder_of(family)), rng)


@needs_cpp
@pytest.mark.parametrize(("family", "block_size"), [("mistral", 16), ("gemma2", 32)])
def test_with_preemptions(folder_of, family, block_size, rng):
    watched = watched_engine(
        folder_of(family), num_blocks=160 // block_size, max_model_len=96, block_size=block_size
    )
    oracle = GreedyReference(folder_of(family))
    prompts = [tokens(rng, n) for n in (14, 30, 45, 9, 33)]
    assert watched.generate(prompts, 45) == [oracle.generate(p, 45) for p in prompts]
    assert watched.counts["preemptions"] > 0


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}),
        ("gemma2", {"attn_logit_softcapping": None}),
    ],
)
def test_what_is_asked_for_changes_the_text(folder_of, tmp_path, family, plain, rng):
    """Else the tests above could not tell whether it was lost."""
    options = {**BEYOND_PLAIN[family], **plain}
    without = GreedyReference(tiny_model(family, tmp_path / "plain", **options))
    oracle = GreedyReference(folder_of(family))
    prompts = [tokens(rng, n) for n in LENGTHS[-3:]]
    assert all(without.generate(p, 12) != oracle.generate(p, 12) for p in prompts)


def test_sinks_change_the_text(folder_of, rng):
    folder = folder_of("gpt_oss")
    without = GreedyReference(folder)
    for layer in without.model.model.layers:
        layer.self_attn.sinks.data.fill_(-30.0)
    oracle = GreedyReference(folder)
    prompts = [tokens(rng, n) for n in LENGTHS[-3:]]
    assert all(without.generate(p, 12) != oracle.generate(p, 12) for p in prompts)


def test_a_window_that_cuts_nothing_is_no_window(folder_of, rng):
    watched = watched_engine(folder_of("mistral"), max_model_len=WINDOW)
    assert not any("attention:" in note for note in watched.llm.bill.notes)
    prompts = [tokens(rng, n) for n in (1, 9, WINDOW - 6)]
    oracle = GreedyReference(folder_of("mistral"))
    assert watched.generate(prompts, 6) == [oracle.generate(p, 6) for p in prompts]


@needs_cpp
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_batch_invariant(folder_of, family):
    """The last tokens of a long text are the same alone and among others, in bf16."""
    rng = random.Random(5)
    prompts = [tokens(rng, n) for n in LENGTHS]
    watched = watched_engine(folder_of(family), dtype="bfloat16", batch_invariant=True)
    together = watched.generate(prompts, 12)
    alone = watched_engine(
        folder_of(family),
        dtype="bfloat16",
        batch_invariant=True,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    assert [alone.generate([p], 12)[0] for p in prompts] == together
