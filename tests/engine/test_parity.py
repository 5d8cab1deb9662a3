"""Greedy output equals transformers, token by token, in fp32.

Guards against everything between a request and its text that could change it: slots, tables,
positions, ropes, prefix hits, chunks, copies, preemptions, kernels. Each test demands that what it
is about did happen. The books are checked after every step, and fresh blocks hold NaN.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvist.kernels import cpu
from kvist.testing.models import FAMILIES
from kvist.testing.parity import GreedyReference, WatchedEngine, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = [
    pytest.param(
        "cpp",
        marks=pytest.mark.skipif(
            cpu.obstacle(torch.device("cpu")) is not None, reason="no C++ kernels here"
        ),
    ),
    "torch",
    "reference",
]
RAGGED = (1, 2, 15, 16, 17, 33, 64, 70)
LENGTHS = (12, 9, 1, 12, 20, 7, 16, 5)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def reference(tiny_folder, family, one_thread):
    return GreedyReference(tiny_folder(family))


@pytest.fixture(scope="module")
def roomy(tiny_folder, family, one_thread):
    """An engine in which nobody has to wait."""
    return WatchedEngine(tiny_folder(family), num_blocks=128, max_model_len=256)


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def ragged(rng: random.Random) -> list[list[int]]:
    return [tokens(rng, n) for n in RAGGED]


def expected(reference: GreedyReference, prompts, lengths) -> list[list[int]]:
    return [reference.generate(p, n) for p, n in zip(prompts, lengths, strict=True)]


def check_added(watched: WatchedEngine, reference: GreedyReference) -> None:
    """Every request given to `add` ended for its length with the reference's tokens."""
    assert set(watched.ends.values()) == {"length"}
    for request_id, output in watched.outputs.items():
        assert output == reference.generate(watched.prompts[request_id], len(output)), request_id


def test_the_reference_is_not_trivial(reference, rng):
    """A model that repeats one token would hide any error."""
    for _ in range(2):
        assert len(set(reference.generate(tokens(rng, 20), 20))) >= 5


def test_alone(roomy, reference, rng):
    for prompt, length in zip(ragged(rng), LENGTHS, strict=True):
        assert roomy.generate([prompt], length) == [reference.generate(prompt, length)]
    assert roomy.num_used_blocks == 0


def test_in_a_mixed_batch(roomy, reference, rng):
    prompts = ragged(rng)
    roomy.counts.clear()
    assert roomy.generate(prompts, LENGTHS) == expected(reference, prompts, LENGTHS)
    assert roomy.counts["steps"] == max(LENGTHS)


def test_with_prefix_hits(roomy, reference, rng):
    stem = tokens(rng, 50)
    prompts = [stem + tokens(rng, n) for n in (3, 20)] + [stem[:48], stem[:33]]
    first, *others = prompts
    assert roomy.generate([first], 8) == [reference.generate(first, 8)]
    params = [greedy(8)] * 3
    outputs = roomy.llm.generate(others, params, use_tqdm=False)
    # At least one token of a prompt is always computed: 48 cached ones give 32.
    assert [output.num_cached_tokens for output in outputs] == [48, 32, 32]
    for prompt, output in zip(others, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.generate(prompt, 8)
    # What was generated is found too.
    again = first + reference.generate(first, 8)
    (output,) = roomy.llm.generate([again + tokens(rng, 8)], params[0], use_tqdm=False)
    assert output.num_cached_tokens == len(again) // 16 * 16 > 48 - 1


def test_with_forks(roomy, reference, rng):
    """Forks in the middle of a block: both go on, and whoever writes first copies."""
    roomy.counts.clear()
    parent = roomy.add(tokens(rng, 21), 20)
    for _ in range(5):
        roomy.step()
    child = roomy.fork(parent)
    roomy.step()
    grandchild = roomy.fork(child)
    roomy.drain()
    check_added(roomy, reference)
    assert [len(roomy.outputs[r]) for r in (parent, child, grandchild)] == [20, 20, 20]
    assert roomy.counts["copies"] >= 2


@pytest.mark.parametrize(("budget", "block_size"), [(7, 16), (13, 8)])
def test_in_chunks_of_odd_sizes(tiny_folder, family, reference, rng, budget, block_size):
    watched = WatchedEngine(
        tiny_folder(family),
        num_blocks=128,
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        block_size=block_size,
    )
    prompts = ragged(rng)
    assert watched.generate(prompts, LENGTHS) == expected(reference, prompts, LENGTHS)
    assert watched.counts["chunks"] > 10
    assert watched.counts["mixed steps"] > 5


def test_with_preemptions(tiny_folder, family, reference, rng):
    watched = WatchedEngine(
        tiny_folder(family), num_blocks=12, max_model_len=80, max_num_seqs=4, block_size=8
    )
    prompts = [tokens(rng, n) for n in (14, 15, 22, 9, 30)]
    lengths = (40, 40, 30, 40, 20)
    assert watched.generate(prompts, lengths) == expected(reference, prompts, lengths)
    assert watched.counts["preemptions"] > 0


def test_with_room_reserved(tiny_folder, family, reference, rng):
    watched = WatchedEngine(
        tiny_folder(family), num_blocks=18, max_model_len=96, kv_allocation="reserve"
    )
    prompts = ragged(rng)
    assert watched.generate(prompts, LENGTHS) == expected(reference, prompts, LENGTHS)
    # 6 blocks each: three at a time, so they did not all run in as many steps as the longest has.
    assert watched.counts["steps"] > max(LENGTHS)
    assert watched.counts["preemptions"] == 0


def test_without_prefix_caching(tiny_folder, family, reference, rng):
    watched = WatchedEngine(
        tiny_folder(family),
        num_blocks=16,
        max_model_len=128,
        block_size=8,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )
    prompts = [tokens(rng, 30)] * 2 + [tokens(rng, 20), tokens(rng, 40)]
    lengths = (25, 25, 25, 20)
    assert watched.generate(prompts, lengths) == expected(reference, prompts, lengths)
    assert watched.generate(prompts, lengths) == expected(reference, prompts, lengths)
    assert watched.counts["hits"] == watched.counts["hits after preemption"] == 0
    assert watched.counts["preemptions"] > 0


def everything(watched: WatchedEngine, rng: random.Random, num_requests: int) -> None:
    """Requests arrive at random, share prefixes, are forked; the pool is too small for them."""
    stems = [tokens(rng, n) for n in (24, 40)]
    left = num_requests
    while left or watched.engine.has_work:
        if left and rng.random() < 0.4:
            left -= 1
            stem = rng.choice([*stems, [], []])
            prompt = stem + tokens(rng, rng.randint(1, 12))
            watched.add(prompt, rng.randint(8, 40))
        running = [r for r, out in watched.outputs.items() if out and r not in watched.ends]
        if running and watched.counts["forks"] < num_requests // 3 and rng.random() < 0.15:
            watched.fork(rng.choice(running))
        watched.step()
    watched.drain()


def test_everything_at_once(tiny_folder, family, reference):
    watched = WatchedEngine(
        tiny_folder(family),
        num_blocks=12,
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        block_size=8,
    )
    everything(watched, random.Random(0), 20)
    check_added(watched, reference)
    for event in ("chunks", "copies", "preemptions", "hits", "forks", "mixed steps"):
        assert watched.counts[event] > 0, (event, watched.counts)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox"])
def test_with_each_kernel_and_block_size(tiny_folder, kind, kernels, block_size):
    watched = WatchedEngine(
        tiny_folder(kind),
        num_blocks=160 // block_size,
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        block_size=block_size,
        kernels=kernels,
    )
    assert {name for _, name, _ in watched.llm.bill.kernels} == {kernels}
    everything(watched, random.Random(0), 10)
    check_added(watched, GreedyReference(tiny_folder(kind)))
    assert watched.counts["chunks"] > 0
    assert watched.counts["copies"] > 0
